"""DBOS 3.4.0 as the runner of operations: everything that knows DBOS is in this file.

DBOS keeps a queue for each service and one generic workflow, whose input is a JSON object and whose steps are the
operation's checkpoints. What Lyceum needs beyond DBOS's public interface, and pins by its version and by tests:

* `DBOS._recover_pending_workflows([executor])` puts a dead process's running workflows back into their queues;
* `_get_dbos_instance().background_thread_stop_events` stops the dequeuing without stopping what runs;
* a `BaseException` other than DBOS's own leaves a workflow as it is (PENDING, or CANCELLED) and only ends its thread:
:class:`Parked`.
"""

import base64
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import sqlalchemy as sa
from google.rpc import code_pb2, status_pb2
from sqlalchemy.exc import SQLAlchemyError

from lyceum_runtime.database import Database, StateError
from lyceum_runtime.errors import ServiceError, from_status

if TYPE_CHECKING:
    from dbos import DBOSClient

T = TypeVar("T")

APPLICATION = "lyceum"
APPLICATION_VERSION = "1"
"""Raised only with a migration of pending operations. DBOS runs no workflow of another version, so that its default, a
hash of the source, would strand operations whenever the source is edited."""
WORKFLOW = "operation"
POLL_SECONDS = 0.2
"""How often a queue is looked at, if the process has one; with more queues each of them less often, to a second."""

Task = dict[str, Any]
"""The input of the generic workflow."""


class Parked(BaseException):
    """Ends a workflow's thread and leaves the workflow as it is, for another process or, if it was cancelled, for good.

    Not an Exception, because DBOS records every Exception as the workflow's failure.
    """


class DbosRunner:
    """One process's DBOS. `run(task)` is called on a thread of DBOS for each operation whose turn it is.

    Of each service, `running_at_once` operations run at the same time; the others wait in its queue.
    """

    def __init__(
        self, database: Database, executor_id: str, run: Callable[[Task], None], *, running_at_once: int
    ) -> None:
        self._database = database
        self._executor_id = executor_id
        self._run = run
        self._running_at_once = running_at_once
        self._client: DBOSClient | None = None
        self._launched = False
        self._lock = threading.Lock()

    def launch(self, services: Sequence[str]) -> None:
        """Starts DBOS, listening to the queues of `services` and no others.

        Raises:
            StateError: DBOS cannot use its tables.
        """
        from dbos import DBOS, error
        from dbos import _dbos as module

        if module._dbos_global_instance is not None:
            # DBOS(config) would return that one, with its own database and serializer, and say nothing.
            raise StateError("this process runs DBOS for something else; serve from a process of its own")
        _quieten()
        global _run_task
        _run_task = self._run
        DBOS(
            config={
                "name": APPLICATION,
                "system_database_url": self._database.url.render_as_string(hide_password=False),
                "system_database_engine": self._database.engine,
                "application_version": APPLICATION_VERSION,
                "executor_id": self._executor_id,
                "serializer": _json_serializer(),
                "use_listen_notify": False,  # nothing here uses notifications; it would hold a connection and a thread
                "log_level": "WARNING",
            }
        )
        try:
            _register_workflow()
            DBOS.listen_queues(list(services))
            DBOS.launch()
            poll = min(1.0, POLL_SECONDS * len(services))
            for service in services:
                DBOS.register_queue(
                    service,
                    worker_concurrency=self._running_at_once,
                    polling_interval_sec=poll,
                    on_conflict="always_update",
                )
        except BaseException as failure:
            DBOS.destroy()  # the next server of this process would otherwise get this one
            if not isinstance(failure, SQLAlchemyError | error.DBOSException):
                raise
            reason = " ".join(str(getattr(failure, "orig", failure)).split())
            raise StateError(f"the queues of operations cannot be used: {reason}") from None
        self._launched = True

    def enqueue(self, connection: sa.Connection, operation_id: str, service: str, task: Task) -> None:
        """Puts an operation into its service's queue as a part of the caller's transaction."""
        self._dbos_client().enqueue_in_transaction(
            connection,
            {
                "workflow_name": WORKFLOW,
                "queue_name": service,
                "workflow_id": operation_id,
                "app_version": APPLICATION_VERSION,
            },
            task,
        )

    def cancel(self, operation_id: str) -> None:
        """Takes an operation out of its queue for good. One that runs goes on until its next step."""
        self._dbos_client().cancel_workflow(operation_id)

    def delete(self, operation_id: str) -> None:
        """Forgets an operation with its steps."""
        self._dbos_client().delete_workflow(operation_id)

    def recover(self, executor_id: str) -> bool:
        """Puts what the process `executor_id` was running back into the queues; whether there was anything. Safe to
        repeat, and for several at once.
        """
        from dbos import DBOS

        return bool(DBOS._recover_pending_workflows([executor_id]))

    def step(self, name: str, function: Callable[[], T]) -> T:
        """Runs one step of the present workflow, or returns what it returned before the process died.

        Raises:
            Parked: the operation was taken over by another process, or cancelled.
        """
        from dbos import DBOS, error

        try:
            result: T = DBOS.run_step({"name": name}, function)
        except (error.DBOSWorkflowConflictIDError, error.DBOSWorkflowCancelledError):
            # DBOS would keep the thread until the other process has finished.
            raise Parked from None
        return result

    def stop_dequeuing(self) -> None:
        """Starts no further operation; what runs is not touched."""
        from dbos._dbos import _get_dbos_instance

        if self._launched:
            for event in _get_dbos_instance().background_thread_stop_events:
                event.set()

    def close(self) -> None:
        """Stops DBOS's threads. Its workflows must have ended or parked; those that have not are left behind."""
        from dbos import DBOS
        from dbos._dbos import _get_dbos_instance

        if self._client is not None:
            self._client.destroy()
        if self._launched:
            self._launched = False
            # A thread that polls for the result of another process's run would do so for ever, and keep this process.
            vars(_get_dbos_instance()._sys_db)["check_workflow_result"] = _leave
            DBOS.destroy()

    def _dbos_client(self) -> "DBOSClient":
        """DBOS's own client, which enqueues, cancels and deletes, also before the launch."""
        from dbos import DBOSClient

        with self._lock:
            if self._client is None:
                self._client = DBOSClient(
                    system_database_engine=self._database.engine,
                    serializer=_json_serializer(),
                    application_name=APPLICATION,
                    lazy=True,
                )
            return self._client


_run_task: Callable[[Task], None]
_registered = False


def _register_workflow() -> None:
    """Registers the one generic workflow; DBOS's registry outlives its instances."""
    from dbos import DBOS

    global _registered
    if not _registered:
        # Attempts are counted by the engine, which knows whether an attempt came further than the one before.
        DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)(_workflow)
        _registered = True


def _workflow(task: Task) -> None:
    _run_task(task)


def _leave(workflow_id: str, **options: Any) -> NoReturn:
    raise Parked


def to_json(value: Any) -> str:
    """JSON with bytes as base64 and an exception as its `google.rpc.Status`; an unexpected one without its text."""
    return json.dumps(value, default=_encoded, separators=(",", ":"), allow_nan=True)


def from_json(text: str) -> Any:
    """What `to_json` wrote, with tuples as lists."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, BaseException):
        unexpected = status_pb2.Status(code=code_pb2.INTERNAL, message=f"unexpected {type(value).__name__}")
        status = value.status() if isinstance(value, ServiceError) else unexpected
        return {"$status": base64.b64encode(status.SerializeToString()).decode()}
    raise TypeError(f"{type(value).__name__} cannot be stored with an operation")


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() == {"$bytes"}:
        return base64.b64decode(value["$bytes"])
    if value.keys() == {"$status"}:
        return from_status(status_pb2.Status.FromString(base64.b64decode(value["$status"])))
    return value


def _json_serializer() -> Any:
    """The above as DBOS's serializer, whose default is pickle."""
    from dbos import Serializer

    class JsonSerializer(Serializer):
        def name(self) -> str:
            return "lyceum_json"

        def serialize(self, data: Any) -> str:
            return to_json(data)

        def deserialize(self, serialized_data: str) -> Any:
            return from_json(serialized_data)

    return JsonSerializer()


class _Quiet(logging.Filter):
    """Keeps DBOS's log short. A workflow's own end (failed, cancelled, taken over) is no error of the program, and no
    traceback is written, because an exception's text may hold a user's data."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None:
            record.msg, record.args = f"{record.getMessage()} {type(error).__name__}", ()
            record.exc_info = record.exc_text = None
        text = record.getMessage()
        if isinstance(error, ServiceError) or "cancelled" in text or "no longer owned" in text:
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def _quieten() -> None:
    """Sends DBOS's log through the process's own; DBOS adds its console handler only to a logger that has none."""
    logger = logging.getLogger("dbos")
    if not any(isinstance(filter, _Quiet) for filter in logger.filters):
        logger.addHandler(logging.NullHandler())
        logger.addFilter(_Quiet())
        logger.propagate = True
