"""Durable long work: starts, runs, resumes, cancels and lists operations.

An operation is a row (:mod:`lyceum_runtime.operation_store`) and a DBOS workflow in its service's queue
(:mod:`lyceum_runtime.dbos_runner`), written in one transaction. Any process that serves the service may run it
(:mod:`lyceum_runtime.operation_run`); one that dies loses its lease (:mod:`lyceum_runtime.leases`), and another, or
itself after its restart, goes on from the last checkpoint.
"""

import hashlib
import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from google.protobuf.message import Message

from lyceum.operations.v1 import operations_pb2 as lyceum_operations_pb2
from lyceum_runtime import telemetry
from lyceum_runtime.artifacts import ArtifactStore, record_uses, referenced
from lyceum_runtime.database import Database
from lyceum_runtime.dbos_runner import DbosRunner, Parked, Task
from lyceum_runtime.definition import Call, LongMethod, ServiceDefinition
from lyceum_runtime.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError, Unavailable
from lyceum_runtime.identifiers import new_id
from lyceum_runtime.leases import Lease
from lyceum_runtime.operation_run import OperationRun
from lyceum_runtime.operation_store import NewOperation, OperationStore, create_tables
from lyceum_runtime.resources import ResourceStore, request_id_reused
from lyceum_runtime.settings import Settings

logger = logging.getLogger(__name__)

INLINE_BYTES = 64 * 1024
"""A larger request is stored as a blob, and the queue carries its checksum."""
KEPT_AFTER_DONE = timedelta(days=30)
_LAUNCH_SECONDS = 10.0
_TICK_SECONDS = 0.2
_STOP_SECONDS = 2.0
_SWEEP_SECONDS = 3600.0
_ORPHAN_SECONDS = 3600.0

_MIGRATIONS = [create_tables]


@dataclass(frozen=True)
class Durability:
    """How fast a dead process is noticed, and how often an operation may take its process down."""

    lease_seconds: float = 20.0
    renew_seconds: float = 5.0
    max_attempts: int = 10
    """Runs in a row that die before they reach another checkpoint; then the operation fails."""


class OperationsEngine:
    """All operations of this process's services. Thread-safe; one a process, because DBOS is.

    Raises:
        StateError: the tables cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        artifact_store: ArtifactStore,
        load_definition: Callable[[str], ServiceDefinition],
        *,
        durability: Durability | None = None,
    ) -> None:
        self._settings = settings
        self._artifacts = artifact_store
        self._resources = ResourceStore(database)
        self._load_definition = load_definition
        self._durability = durability or Durability()
        database.migrate("operations", _MIGRATIONS)
        self._database = database
        self._store = OperationStore(database)
        # A new one at each start: two processes of one id would run the same operation.
        self._executor_id = uuid.uuid4().hex
        self._lease = Lease(
            database, settings.state_dir / "executors", self._executor_id, self._durability.lease_seconds
        )
        self._runner = DbosRunner(database, self._executor_id, self._run, running_at_once=settings.max_workers)
        self._runs: dict[str, OperationRun] = {}
        self._changed = threading.Condition()
        self._launched = threading.Event()
        self._draining = threading.Event()
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None

    def launch(self, names: Sequence[str]) -> None:
        """Begins to run operations of the services `names`, first of all those that a dead process left.

        `start` waits for this; everything else works before.

        Raises:
            StateError: DBOS cannot use its tables.
        """
        with self._database.explained():
            self._lease.acquire()
            try:
                self._runner.launch(names)
                self._adopt()
            except BaseException:
                self._lease.drop()
                raise
        self._keeper = threading.Thread(target=self._keep, name="lyceum-operations", daemon=True)
        self._keeper.start()
        telemetry.observe("lyceum.operations.waiting", lambda: self._store.waiting(names))
        self._launched.set()

    def start(
        self,
        service: str,
        rpc: str,
        request: Any,
        tenant: str,
        request_id: str = "",
        carrier: Mapping[str, str] | None = None,
    ) -> operations_pb2.Operation:
        """Starts an operation and returns it as it is now. A repeat with the same request id returns the first one.

        Raises:
            ServiceError: the method's `check` refuses the request.
            FailedPrecondition: the request id came with another request within 24 h.
            NotFound: the request names an artifact that the tenant does not have.
            Unavailable: the process is stopping.
        """
        if self._draining.is_set() or not self._launched.wait(_LAUNCH_SECONDS):
            raise Unavailable("the server cannot take new operations now; try again")
        fingerprint = hashlib.sha256(f"{rpc}\n".encode() + request.SerializeToString(deterministic=True)).hexdigest()
        new = NewOperation(new_id(), tenant, service, rpc, request_id, fingerprint)
        # Before the check, which may refuse what the first request has created.
        if request_id and (first := self._first(new)) is not None:
            return first
        method = self._method(service, rpc)
        method.check(request, self._call(service, tenant))
        if method.seeded and not request.HasField("seed"):
            seeded = type(request)()
            seeded.CopyFrom(request)
            seeded.seed.value = secrets.randbits(64)
            request = seeded
        return self._enqueue(new, request, dict(carrier or {}))

    def get(self, name: str, tenant: str) -> operations_pb2.Operation:
        """The operation as it is now.

        Raises:
            NotFound: the tenant has none of this name; so do the functions below.
        """
        operation = self._store.get(_id(name), tenant)
        if operation is None:
            raise NotFound(name)
        run = self._runs.get(_id(name))
        if run is not None and not operation.done and run.progress.stage:
            operation.metadata.Pack(run.progress)  # fresher than the table
        return operation

    def list(
        self, tenant: str, *, page_size: int = 0, page_token: str = "", filter: str = ""
    ) -> operations_pb2.ListOperationsResponse:
        """A page of operations by name, which is by time. Filter fields: done, service, rpc."""
        found, more = self._store.list(tenant, page_size, page_token, filter)
        return operations_pb2.ListOperationsResponse(operations=found, next_page_token=more)

    def cancel(self, name: str, tenant: str) -> None:
        """Asks for cancellation: the operation is done once its computation has stopped. A finished one stays."""
        operation_id = _id(name)
        ended = self._store.cancel(operation_id, tenant)
        if ended is None:
            raise NotFound(name)
        if ended:
            self._runner.cancel(operation_id)
            logger.info("%s cancelled", name)
        run = self._runs.get(operation_id)
        if run is not None:
            run.request_stop(cancel=True)
        self._notify()

    def delete(self, name: str, tenant: str) -> None:
        """Forgets a finished operation; what it created stays.

        Raises:
            FailedPrecondition: it is not done.
        """
        done = self._store.delete(_id(name), tenant)
        if done is None:
            raise NotFound(name)
        if not done:
            raise FailedPrecondition(f"{name} is not done; cancel it first", reason="NOT_DONE", subject=name)
        self._runner.delete(_id(name))
        self._artifacts.blobs.delete_folder(name)

    def wait(
        self, name: str, tenant: str, timeout: float, should_stop: Callable[[], bool] = lambda: False
    ) -> operations_pb2.Operation:
        """The operation once it is done, or as it is after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            operation = self.get(name, tenant)
            left = deadline - time.monotonic()
            if operation.done or left <= 0 or should_stop():
                return operation
            self._await_change(min(left, _TICK_SECONDS))

    def watch(
        self, name: str, tenant: str, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[operations_pb2.Operation]:
        """The operation's present state, each change that is seen, and the finished operation last."""
        before = None
        while True:
            operation = self.get(name, tenant)
            if operation != before:
                yield operation
                before = operation
            if operation.done or should_stop():
                return
            self._await_change(_TICK_SECONDS)

    def drain(self, seconds: float) -> None:
        """Stops in good order: runs reach their next checkpoint within `seconds` or are stopped, for others to take."""
        if self._draining.is_set():
            return
        self._draining.set()
        self._runner.stop_dequeuing()
        self._await_runs(seconds)
        for run in list(self._runs.values()):
            run.request_stop(cancel=False)
        self._await_runs(_STOP_SECONDS)
        self._closed.set()
        if self._keeper is not None:
            self._keeper.join()
            try:
                self._runner.recover(self._executor_id)
                self._store.abandon([self._executor_id])
                self._lease.drop()
            except Exception as error:  # the database is away or full: the lease runs out, as after a crash
                logger.error("operations: %s; they are not handed over but found later", type(error).__name__)
        self._runner.close()

    def close(self) -> None:
        """Stops at once; what runs is resumed from its last checkpoint later."""
        self.drain(0)

    def sweep(self) -> None:
        """Deletes operations that were done 30 days ago, expired resources, and blobs that killed runs left."""
        for operation_id, tenant in self._store.finished_before(KEPT_AFTER_DONE):
            self.delete(f"operations/{operation_id}", tenant)
        self._resources.sweep_expired()
        for stored in self._artifacts.blobs.list("operations"):
            folder = stored.key.rpartition("/")[0]
            if stored.age_seconds > _ORPHAN_SECONDS and not self._store.unfinished(_id(folder)):
                self._artifacts.blobs.delete(stored.key)

    def _first(self, new: NewOperation) -> operations_pb2.Operation | None:
        """What this request id has started, if it has."""
        with self._database.write() as connection:
            first = self._store.first_of_request_id(connection, new)
        if first is None:
            return None
        return self._repeated(new, *first)

    def _repeated(self, new: NewOperation, first_id: str, fingerprint: str) -> operations_pb2.Operation:
        if fingerprint != new.fingerprint:
            raise request_id_reused(new.request_id)
        return self.get(f"operations/{first_id}", new.tenant)

    def _enqueue(self, new: NewOperation, request: Message, carrier: dict[str, str]) -> operations_pb2.Operation:
        data: bytes = request.SerializeToString(deterministic=True)
        large = len(data) > INLINE_BYTES
        if large:
            with self._artifacts.blobs.stage([data]) as staged:
                self._artifacts.blobs.commit(staged, f"{new.name}/{staged.sha256}")
        task: Task = {
            "id": new.id,
            "tenant": new.tenant,
            "service": new.service,
            "rpc": new.rpc,
            "request": staged.sha256 if large else data,
            "carrier": carrier,
        }
        with self._database.write() as connection:
            if new.request_id:
                self._database.exclusive(connection, f"request/{new.tenant}/{new.service}/{new.request_id}")
                first = self._store.first_of_request_id(connection, new)
                if first is not None:
                    return self._repeated(new, *first)
            self._store.insert(connection, new)
            record_uses(connection, new.tenant, new.name, referenced(request))
            self._resources.of(new.service, new.tenant).hold(connection, new.name, request)
            self._runner.enqueue(connection, new.id, new.service, task)
        return self.get(new.name, new.tenant)

    def _run(self, task: Task) -> None:
        """Runs an operation, on a thread of DBOS."""
        operation_id: str = task["id"]
        if self._draining.is_set():
            raise Parked
        number = self._store.claim(operation_id, self._executor_id, self._durability.max_attempts)
        if number is None:
            self._notify()
            return
        run = OperationRun(
            task,
            number,
            settings=self._settings,
            store=self._store,
            blobs=self._artifacts.blobs,
            runner=self._runner,
            load=lambda: self._method(task["service"], task["rpc"]),
            make_call=lambda run: self._call(task["service"], task["tenant"], run),
            draining=self._draining.is_set,
            on_change=self._notify,
        )
        self._runs[operation_id] = run
        try:
            run.drive()
        except Parked:
            self._store.park(operation_id, number)
            raise
        except ServiceError:
            raise  # the run has recorded it
        except Exception as error:
            run.fail_unexpectedly(error)
        finally:
            if self._runs.get(operation_id) is run:
                del self._runs[operation_id]
            self._notify()

    def _call(self, service: str, tenant: str, run: OperationRun | None = None) -> Call:
        """What a method may use; with a run, bound to its operation."""
        operation = None if run is None else run.name
        return Call(
            service=service,
            tenant=tenant,
            resources=self._resources.of(service, tenant, operation=operation),
            artifacts=self._artifacts.of(tenant, owner=operation),
            should_stop=self._draining.is_set if run is None else run.should_stop,
            on_progress=_ignore if run is None else run.report,
        )

    def _method(self, service: str, rpc: str) -> LongMethod:
        return self._load_definition(service).long_methods[rpc]

    def _keep(self) -> None:
        """Until the end: passes cancellations on to runs, renews the lease, adopts, sweeps."""
        renewed = time.monotonic()
        swept = -_SWEEP_SECONDS
        while not self._closed.wait(_TICK_SECONDS):
            try:
                if self._runs:
                    for operation_id in self._store.cancels(self._executor_id):
                        if operation_id in self._runs:
                            self._runs[operation_id].request_stop(cancel=True)
                if time.monotonic() - renewed >= self._durability.renew_seconds:
                    renewed = time.monotonic()
                    self._renew()
                    self._adopt()
                if time.monotonic() - swept >= _SWEEP_SECONDS:
                    swept = time.monotonic()
                    self.sweep()
            except Exception as error:  # the database may be away for a while; the lease then runs out, as it should
                logger.error("operations: %s; trying again", type(error).__name__)

    def _renew(self) -> None:
        if self._lease.renew():
            return
        logger.warning("this process's lease ran out; its operations are put back into their queues")
        for run in list(self._runs.values()):
            run.request_stop(cancel=False)
        self._store.abandon([self._executor_id])
        self._runner.recover(self._executor_id)

    def _adopt(self) -> None:
        with self._lease.dead() as dead:
            for executor_id in dead:
                logger.debug("process %s is gone", executor_id)
                if self._runner.recover(executor_id):
                    logger.info("operations of process %s, which is gone, are put back into their queues", executor_id)
            if dead:
                self._store.abandon(dead)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _await_change(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def _await_runs(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._runs and time.monotonic() < deadline:
            self._await_change(0.05)


def operations_definitions(engine: OperationsEngine) -> "list[ServiceDefinition]":
    """google.longrunning.Operations and lyceum.operations.v1.OperationsService, which every server has."""

    def page(request: operations_pb2.ListOperationsRequest, call: Call) -> operations_pb2.ListOperationsResponse:
        if request.name not in ("", "operations"):
            raise InvalidArgument(("name", f"{request.name!r} is not accepted; leave it empty or give 'operations'"))
        return engine.list(
            call.tenant, page_size=request.page_size, page_token=request.page_token, filter=request.filter
        )

    def cancel(request: operations_pb2.CancelOperationRequest, call: Call) -> empty_pb2.Empty:
        engine.cancel(request.name, call.tenant)
        return empty_pb2.Empty()

    def delete(request: operations_pb2.DeleteOperationRequest, call: Call) -> empty_pb2.Empty:
        engine.delete(request.name, call.tenant)
        return empty_pb2.Empty()

    def wait(request: operations_pb2.WaitOperationRequest, call: Call) -> operations_pb2.Operation:
        timeout = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else float("inf")
        return engine.wait(request.name, call.tenant, timeout, call.should_stop)

    def watch(
        request: lyceum_operations_pb2.WatchOperationRequest, call: Call
    ) -> Iterator[lyceum_operations_pb2.WatchOperationResponse]:
        for operation in engine.watch(request.name, call.tenant, call.should_stop):
            yield lyceum_operations_pb2.WatchOperationResponse(operation=operation)

    return [
        ServiceDefinition(
            name="longrunning",
            service="google.longrunning.Operations",
            methods={
                "ListOperations": page,
                "GetOperation": lambda request, call: engine.get(request.name, call.tenant),
                "DeleteOperation": delete,
                "CancelOperation": cancel,
                "WaitOperation": wait,
            },
            long_methods={},
        ),
        ServiceDefinition(
            name="operations",
            service="lyceum.operations.v1.OperationsService",
            methods={"WatchOperation": watch},
            long_methods={},
        ),
    ]


def _id(name: str) -> str:
    return name.removeprefix("operations/")


def _ignore(stage: str, completed: int, total: int, metrics: Mapping[str, float]) -> None:
    """Progress of a check, which nobody watches."""
