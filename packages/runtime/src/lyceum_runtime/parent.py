"""Child processes that end with their parent, also when it is killed and can end nobody.

The parent hands its process id to the child in the environment, and the child asks the kernel for a signal at the
parent's death (`prctl(2)`, PR_SET_PDEATHSIG; on Linux only). The kernel takes the death of the thread that started the
child for the parent's, so that thread must stay, as a process's main thread does.
"""

import os
import signal
import sys
from collections.abc import Mapping

_VARIABLE = "LYCEUM_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def named_parent() -> Mapping[str, str]:
    """What the environment of a child must hold so that its `end_with_parent` finds this process."""
    return {_VARIABLE: str(os.getpid())}


def end_with_parent(number: signal.Signals) -> None:
    """Sends this process `number` when the parent dies that started it with `named_parent`; without one does nothing.

    The name is taken out of the environment: a grandchild has another parent.
    """
    parent = os.environ.pop(_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if str(os.getppid()) != parent:  # it was faster
        os.kill(os.getpid(), number)
