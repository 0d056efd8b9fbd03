"""One run of an operation: drives the method's generator of checkpoints, each checkpoint one step of the DBOS workflow.

A step asks the generator for its next state, stores it as a blob, and returns the blob's checksum, which DBOS records.
After a crash DBOS replays the recorded steps without calling them; the first step that is not replayed creates the
generator, with `resume` = the state of the last recorded step. The last step turns the last state, read back from its
blob in every case, into the response.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from google.longrunning import operations_pb2

from lyceum.common.v1 import common_pb2
from lyceum_runtime import telemetry
from lyceum_runtime.blobs import Blobs, DamagedBlob
from lyceum_runtime.dbos_runner import DbosRunner, Parked, Task
from lyceum_runtime.definition import Call, LongMethod
from lyceum_runtime.errors import Internal, ServiceError
from lyceum_runtime.operation_store import OperationStore
from lyceum_runtime.parallel import parallel_backend
from lyceum_runtime.settings import Settings

if TYPE_CHECKING:
    from lyceum_base.checkpoint import Checkpoint

# lyceum_base is imported where it is used: an idle process does without NumPy.

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 0.5
"""Progress between checkpoints is written at most this often."""
_KEPT_CHECKPOINTS = 2


class OperationRun:
    """One run, on one thread; `request_stop`, `draining` and `progress` may be used from others."""

    def __init__(
        self,
        task: Task,
        number: int,
        *,
        settings: Settings,
        store: OperationStore,
        blobs: Blobs,
        runner: DbosRunner,
        load: Callable[[], LongMethod],
        make_call: Callable[["OperationRun"], Call],
        draining: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self.id: str = task["id"]
        self.name = f"operations/{self.id}"
        self.progress = common_pb2.Progress()
        self._task = task
        self._number = number
        self._settings = settings
        self._store = store
        self._blobs = blobs
        self._runner = runner
        self._load = load
        self._make_call = make_call
        self._draining = draining
        self._on_change = on_change
        self._cancelled = threading.Event()
        self._stopping = threading.Event()
        self._recorded: list[str] = []
        self._checkpoints: Iterator[Checkpoint] | None = None
        self._stages = contextlib.ExitStack()
        self._stage_start = ("", 0.0, 0)
        self._written = 0.0

    def drive(self) -> None:
        """Runs or resumes the operation to its end.

        Raises:
            Parked: it stopped on the way: cancelled, drained, or taken over by another process.
            ServiceError: it failed; this is recorded already.
        """
        with (
            telemetry.attached(self._task["carrier"]),
            telemetry.span(f"operation {self._task['rpc']}", service=self._task["service"], rpc=self._task["rpc"]),
            parallel_backend(self._settings),
            self._stages,
        ):
            while (checkpoint := self._runner.step("checkpoint", self._next_checkpoint)) is not None:
                self._recorded.append(checkpoint)
            self._runner.step("finish", self._finish)

    def fail_unexpectedly(self, error: Exception) -> None:
        """Ends the operation for a reason that lies in none of its steps, such as a library that cannot be imported."""
        self._fail(self._unexpected(error))

    def request_stop(self, *, cancel: bool) -> None:
        """Asks the computation to stop: for good, or to be resumed elsewhere."""
        if cancel:
            self._cancelled.set()
        self._stopping.set()

    def should_stop(self) -> bool:
        """What the method polls."""
        return self._stopping.is_set()

    def report(self, stage: str, completed: int, total: int, metrics: Mapping[str, float]) -> None:
        """Publishes progress between checkpoints."""
        self._publish(stage, completed, total, metrics, checkpoint=False)

    def _next_checkpoint(self) -> str | None:
        """The checksum of the next state's blob; None when the generator has ended."""
        from lyceum_base.checkpoint import Stopped

        if self._draining() and not self._cancelled.is_set():
            raise Parked  # the state before this one is recorded: a good place to leave off
        with self._outcome():
            if self._checkpoints is None:
                self._checkpoints = self._begin()
            for checkpoint in self._checkpoints:
                is_state = checkpoint.state is not None
                stored = self._store_state(checkpoint.state) if checkpoint.state is not None else None
                self._publish(
                    checkpoint.stage, checkpoint.completed, checkpoint.total, checkpoint.metrics, checkpoint=is_state
                )
                if stored is not None:
                    return stored
                if self.should_stop():
                    raise Stopped
            if self.should_stop():
                raise Stopped  # it may have ended for that reason, before its last state
            if not self._recorded:
                raise RuntimeError("the method ended without a state")
            return None

    def _begin(self) -> "Iterator[Checkpoint]":
        """The generator, from the last recorded state that can be read, or from the start."""
        resume = None
        for sha256 in reversed(self._recorded[-_KEPT_CHECKPOINTS:]):
            try:
                resume = self._load_state(sha256)
                break
            except (DamagedBlob, ValueError):
                logger.warning("%s: checkpoint %s is damaged, resuming from an earlier one", self.name, sha256[:12])
        return iter(self._load().run(self._request(), self._make_call(self), resume))

    def _finish(self) -> None:
        with self._outcome():
            method = self._load()
            state = self._load_state(self._recorded[-1])
            response = method.finish(self._request(), state, self._make_call(self))
            if not isinstance(response, method.response):
                raise TypeError(f"finish returned {type(response).__name__}, not {method.response.__name__}")
            operation = operations_pb2.Operation()
            operation.response.Pack(response)
            if not self._store.succeed(self.id, self._number, operation):
                raise Parked
        self._ended("succeeded")

    @contextlib.contextmanager
    def _outcome(self) -> Iterator[None]:
        """Turns what the method raised into the operation's end, or into Parked."""
        from lyceum_base.checkpoint import Stopped

        try:
            yield
        except Stopped as error:
            if not self._stopping.is_set():
                self._fail(self._unexpected(error))
            self._leave()
        except ServiceError as error:
            if self._stopping.is_set():  # it may well be the stop's consequence; a resumed run will tell
                self._leave()
            self._fail(error)
        except Exception as error:
            if self._stopping.is_set() or self._draining():  # such as a worker process that ended before this one
                self._leave()
            self._fail(self._unexpected(error))

    def _leave(self) -> None:
        if self._cancelled.is_set() and self._store.end_cancelled(self.id, self._number):
            self._runner.cancel(self.id)
            self._ended("cancelled")
        raise Parked

    def _fail(self, error: ServiceError) -> None:
        if not self._store.fail(self.id, self._number, error):
            raise Parked
        self._ended("failed")
        raise error

    def _ended(self, how: str) -> None:
        logger.info("%s %s", self.name, how)
        telemetry.count("lyceum.operations", service=self._task["service"], rpc=self._task["rpc"], status=how)
        self._blobs.delete_folder(self.name)
        self._on_change()

    def _unexpected(self, error: Exception) -> ServiceError:
        reference = secrets.token_hex(8)
        logger.error("%s failed unexpectedly, reference %s", self.name, reference, exc_info=error)
        return Internal(f"the server failed; its log has the reference {reference}")

    def _request(self) -> Any:
        data = self._task["request"]
        if isinstance(data, str):  # too large for the queue's row: the checksum of its blob
            data = self._read(data)
        return self._load().request.FromString(data)

    def _store_state(self, state: Mapping[str, Any]) -> str:
        from lyceum_base.checkpoint import encode_state

        with self._blobs.stage([encode_state(state)]) as staged:
            self._blobs.commit(staged, f"{self.name}/{staged.sha256}")
        kept = {staged.sha256, *self._recorded[-(_KEPT_CHECKPOINTS - 1) :]}
        for old in self._recorded[-_KEPT_CHECKPOINTS : -(_KEPT_CHECKPOINTS - 1)]:
            if old not in kept:
                self._blobs.delete(f"{self.name}/{old}")
        return staged.sha256

    def _load_state(self, sha256: str) -> dict[str, Any]:
        from lyceum_base.checkpoint import decode_state

        return decode_state(self._read(sha256))

    def _read(self, sha256: str) -> bytes:
        return b"".join(self._blobs.chunks(f"{self.name}/{sha256}", sha256))

    def _publish(
        self, stage: str, completed: int, total: int, metrics: Mapping[str, float], *, checkpoint: bool
    ) -> None:
        now = time.monotonic()
        if stage != self._stage_start[0]:
            self._stages.close()
            self._stages.enter_context(telemetry.stage(stage))
            self._stage_start = (stage, now, completed)
        progress = common_pb2.Progress(stage=stage, completed=completed, total=total, metrics=metrics)
        progress.update_time.GetCurrentTime()
        _, start, before = self._stage_start
        if total > completed > before:
            progress.eta_seconds = (now - start) / (completed - before) * (total - completed)
        self.progress = progress
        if checkpoint or now - self._written >= _REPORT_SECONDS:
            self._written = now
            if not self._store.report(self.id, self._number, progress, checkpoint=checkpoint):
                raise Parked  # another run has the operation
        self._on_change()
