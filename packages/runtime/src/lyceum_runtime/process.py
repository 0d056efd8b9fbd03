"""One call in a process of its own, which can be killed: for a solver that does not stop, or a parser of files not to
be trusted.

The child is a fresh interpreter (never a fork), leads its own process group, ends with this process, and belongs to the
caller's trace. Its argument and result are JSON.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lyceum_runtime import telemetry
from lyceum_runtime.errors import Cancelled, DeadlineExceeded
from lyceum_runtime.parent import end_with_parent, named_parent

if TYPE_CHECKING:
    from lyceum_runtime.settings import Settings

_POLL_SECONDS = 0.02


class ChildFailed(Exception):
    """The child raised or died; the message says how, and what it wrote is in the parent's log."""


def call_in_process(
    target: str,
    argument: Any,
    *,
    settings: "Settings",
    timeout_seconds: float,
    memory_bytes: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Any:
    """The result of the function `target` ("package.module:function") for `argument`, computed in a process of its own.

    The child and all its children are killed when this returns or raises, whatever they do. `memory_bytes` bounds its
    address space.

    Raises:
        DeadlineExceeded: it took longer than `timeout_seconds`.
        Cancelled: `should_stop` became true.
        ChildFailed: the function raised, or the process died.
    """
    deadline = time.monotonic() + timeout_seconds
    with telemetry.span("child process"), tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        task = {
            "target": target,
            "argument": argument,
            "state_dir": str(settings.state_dir),
            "service": telemetry.service_name(),
            "carrier": telemetry.carrier(),
            "memory_bytes": memory_bytes,
        }
        stdin.write(json.dumps(task).encode())
        stdin.seek(0)
        environment = {**os.environ, **named_parent(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        child = subprocess.Popen(
            [sys.executable, "-m", "lyceum_runtime.process"],
            stdin=stdin,
            stdout=stdout,
            env=environment,
            start_new_session=True,
        )
        try:
            while (code := child.poll()) is None:
                if should_stop():
                    raise Cancelled(f"{target} was cancelled")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{target} took longer than {timeout_seconds:g} s and was killed")
                time.sleep(_POLL_SECONDS)
        finally:
            _kill_group(child)
        if code != 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            raise ChildFailed(f"{target} {how}")
        stdout.seek(0)
        return json.loads(stdout.read())


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the group outlives its leader while any of its children does
    child.wait()


def main() -> None:
    """The child: a task on standard input, the result on standard output."""
    end_with_parent(signal.SIGKILL)
    task = json.load(sys.stdin)
    result_file, sys.stdout = sys.stdout, sys.stderr  # a stray print must not end up in the result
    if task["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (task["memory_bytes"], task["memory_bytes"]))
    telemetry.setup_process(Path(task["state_dir"]), task["service"])
    module, _, function = task["target"].partition(":")
    try:
        with telemetry.attached(task["carrier"]), telemetry.span(function):
            result = getattr(importlib.import_module(module), function)(task["argument"])
    finally:
        telemetry.shutdown()
    json.dump(result, result_file)


if __name__ == "__main__":
    main()
