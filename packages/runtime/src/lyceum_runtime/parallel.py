"""Many processes for a core that uses plain `joblib.Parallel`, in the caller's trace.

A core writes `Parallel(n_jobs=...)(delayed(f)(x) for x in xs)` and knows nothing of services. Inside
:func:`parallel_backend` its tasks run in loky's worker processes (spawned, never forked, and kept for the next call);
each batch of tasks that joblib sends to a worker is one span there, and spans that the tasks open are its children.
They are written before the batch's result is returned, since a worker may be reaped at any time after.

Workers end with this process, whatever ends it. Ctrl-C, which reaches every process of a terminal, does not end them
while this process still lets its requests finish.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lyceum_runtime import telemetry
from lyceum_runtime.settings import available_cpus

if TYPE_CHECKING:
    from lyceum_runtime.settings import Settings


_WATCH_SECONDS = 1.0


@contextmanager
def parallel_backend(settings: "Settings") -> Iterator[None]:
    """Let `joblib.Parallel` in this thread use worker processes that report into the current trace.

    Each worker computes with `settings.torch_threads` threads.
    """
    import joblib

    backend = _traced_loky_backend(settings.state_dir)
    with joblib.parallel_config(backend=backend, n_jobs=available_cpus(), inner_max_num_threads=settings.torch_threads):
        yield


def end_workers() -> None:
    """Ends loky's worker processes of this process, if it has any. Left alone they would outlive it by minutes."""
    loky = sys.modules.get("joblib.externals.loky.reusable_executor")
    executor: Any = getattr(loky, "_executor", None)
    if executor is not None:
        with contextlib.suppress(Exception):  # they may have died already
            executor.terminate(kill_workers=True)


@dataclass(frozen=True)
class _Batch:
    """One batch of joblib's tasks with what the worker needs to report on it."""

    run: Callable[[], Any]
    parent: int
    state_dir: Path
    service: str
    carrier: Mapping[str, str]
    tasks: int

    def __call__(self) -> Any:
        _belong_to(self.parent)
        telemetry.setup_process(self.state_dir, self.service)  # after a worker's first batch this returns at once
        try:
            with telemetry.attached(self.carrier), telemetry.span("parallel batch", tasks=self.tasks):
                return self.run()
        finally:
            telemetry.flush()


@cache
def _belong_to(parent: int) -> None:
    """Makes this worker end with its parent. The kernel's signal for it (:mod:`lyceum_runtime.parent`) does not fit: it
    comes when the thread ends that started the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), name="lyceum-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _traced_loky_backend(state_dir: Path) -> Any:
    from joblib._parallel_backends import LokyBackend  # joblib exports the class under no public name

    class TracedLokyBackend(LokyBackend):
        carrier: Mapping[str, str]

        def start_call(self) -> None:
            # In the thread that calls Parallel; later batches are submitted from joblib's own threads.
            self.carrier = telemetry.carrier()

        def submit(self, func: Any, callback: Any = None) -> Any:
            batch = _Batch(func, os.getpid(), state_dir, telemetry.service_name(), self.carrier, len(func))
            return super().submit(batch, callback)

    return TracedLokyBackend()
