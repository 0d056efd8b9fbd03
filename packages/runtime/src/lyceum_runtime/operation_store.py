"""The table of operations: what Get, List and Watch read, and what decides who runs, ends or cancels an operation.

DBOS knows the steps of an operation, this table its face: request id, progress, result. A run *claims* an operation and
gets a number; every later write of that run names its number and does nothing once another run has claimed the
operation, so that a process which slept through its lease cannot disturb its successor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa
from google.longrunning import operations_pb2

from lyceum.common.v1 import common_pb2
from lyceum_runtime.artifacts import release_uses
from lyceum_runtime.database import Database, metadata, name_type
from lyceum_runtime.errors import Cancelled, ResourceExhausted, ServiceError
from lyceum_runtime.filters import Cursor, Kind, page_size, parse_filter
from lyceum_runtime.resources import release

_REQUEST_ID_MILLISECONDS = 24 * 3600 * 1000
_SWEEP_BATCH = 500

operations = sa.Table(
    "operations",
    metadata,
    sa.Column("id", name_type(64), primary_key=True),
    sa.Column("tenant", sa.String(128), nullable=False),
    sa.Column("service", sa.String(64), nullable=False),
    sa.Column("rpc", sa.String(128), nullable=False),
    sa.Column("request_id", sa.String(64)),
    sa.Column("fingerprint", sa.String(64), nullable=False, doc="SHA-256 of RPC and request"),
    sa.Column("create_ms", sa.BigInteger, nullable=False),
    sa.Column("done", sa.Boolean, nullable=False),
    sa.Column("done_ms", sa.BigInteger),
    sa.Column("cancel", sa.Boolean, nullable=False, doc="cancellation was asked for"),
    sa.Column("executor_id", sa.String(64), doc="the process that runs it, if any"),
    sa.Column("run", sa.Integer, nullable=False, doc="number of the last run"),
    sa.Column("attempts", sa.Integer, nullable=False, doc="runs since the last checkpoint"),
    sa.Column("progress", sa.LargeBinary, nullable=False),
    sa.Column("result", sa.LargeBinary, doc="the finished google.longrunning.Operation"),
    sa.Index("operations_by_tenant", "tenant", "id"),
    sa.Index("operations_by_request_id", "tenant", "service", "request_id", unique=True),
    sa.Index("operations_by_done", "done", "done_ms"),
)


def create_tables(connection: sa.Connection) -> None:
    """The first migration of operations; the table of leases belongs to it."""
    metadata.create_all(connection, tables=[operations, metadata.tables["executors"]])


@dataclass(frozen=True)
class NewOperation:
    """What is known of an operation when it starts."""

    id: str
    tenant: str
    service: str
    rpc: str
    request_id: str
    fingerprint: str

    @property
    def name(self) -> str:
        """The resource name."""
        return f"operations/{self.id}"


class OperationStore:
    """Reads and writes of the table, each one short transaction. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def get(self, operation_id: str, tenant: str) -> operations_pb2.Operation | None:
        """The tenant's operation as its clients see it, or None."""
        query = sa.select(operations).where(operations.c.id == operation_id, operations.c.tenant == tenant)
        with self.database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _message(row)

    def list(self, tenant: str, size: int, token: str, filter: str) -> tuple[Sequence[operations_pb2.Operation], str]:
        """A page of the tenant's operations by name, which is by time; and the next page's token."""
        size = page_size(size)
        cursor = Cursor(("operations", tenant, filter))
        fields = {"done": Kind.BOOL, "service": Kind.STRING, "rpc": Kind.STRING}
        where = [operations.c.tenant == tenant]
        where += parse_filter(filter, fields).clauses({name: operations.c[name] for name in fields})
        key = cursor.key(token, (str,))
        if key is not None:
            where.append(operations.c.id > key[0])
        query = sa.select(operations).where(*where).order_by(operations.c.id).limit(size + 1)
        with self.database.read() as connection:
            rows = connection.execute(query).mappings().all()
        more = cursor.token([rows[size - 1]["id"]]) if len(rows) > size else ""
        return [_message(row) for row in rows[:size]], more

    def first_of_request_id(self, connection: sa.Connection, new: NewOperation) -> tuple[str, str] | None:
        """(id, fingerprint) of the operation that this request id started within 24 h; an older use is forgotten."""
        where = (
            operations.c.tenant == new.tenant,
            operations.c.service == new.service,
            operations.c.request_id == new.request_id,
        )
        age = (self.database.now - operations.c.create_ms).label("age")
        row = connection.execute(sa.select(operations.c.id, operations.c.fingerprint, age).where(*where)).first()
        if row is None:
            return None
        if row.age > _REQUEST_ID_MILLISECONDS:
            connection.execute(sa.update(operations).where(*where).values(request_id=None))
            return None
        return row.id, row.fingerprint

    def insert(self, connection: sa.Connection, new: NewOperation) -> None:
        """Adds an operation that waits in its queue."""
        connection.execute(
            sa.insert(operations).values(
                id=new.id,
                tenant=new.tenant,
                service=new.service,
                rpc=new.rpc,
                request_id=new.request_id or None,
                fingerprint=new.fingerprint,
                create_ms=self.database.now,
                done=False,
                cancel=False,
                run=0,
                attempts=0,
                progress=b"",
            )
        )

    def claim(self, operation_id: str, executor_id: str, max_attempts: int) -> int | None:
        """Begins a run: its number, or None if there is nothing to run any more.

        An operation whose cancellation came meanwhile ends here, and so does one whose last `max_attempts` runs all
        ended with the death of their process before they reached another checkpoint.
        """
        with self.database.write() as connection:
            self.database.exclusive(connection, f"operations/{operation_id}")
            row = connection.execute(sa.select(operations).where(operations.c.id == operation_id)).mappings().first()
            if row is None or row["done"]:
                return None
            if row["cancel"]:
                self._end(connection, row, error=_cancelled())
                return None
            if row["attempts"] >= max_attempts:
                self._end(connection, row, error=_poison(row["attempts"]))
                return None
            run: int = row["run"] + 1
            values = {"executor_id": executor_id, "run": run, "attempts": row["attempts"] + 1}
            connection.execute(sa.update(operations).where(operations.c.id == operation_id).values(**values))
            return run

    def report(self, operation_id: str, run: int, progress: common_pb2.Progress, *, checkpoint: bool) -> bool:
        """Stores a run's progress; False if the operation is no longer this run's."""
        values: dict[str, object] = {"progress": progress.SerializeToString()}
        if checkpoint:
            values["attempts"] = 0  # it came further
        return self._update(operation_id, run, values)

    def park(self, operation_id: str, run: int) -> None:
        """Ends a run whose process stops in good order: it is no failed attempt."""
        attempts = operations.c.attempts
        self._update(
            operation_id, run, {"executor_id": None, "attempts": sa.case((attempts > 0, attempts - 1), else_=0)}
        )

    def succeed(self, operation_id: str, run: int, response: "operations_pb2.Operation") -> bool:
        """Ends an operation with a response; `response` is an Operation with nothing else set."""
        return self._finish(operation_id, run, response)

    def fail(self, operation_id: str, run: int, error: ServiceError) -> bool:
        """Ends an operation with an error."""
        return self._finish(operation_id, run, operations_pb2.Operation(error=error.status()))

    def cancel(self, operation_id: str, tenant: str) -> bool | None:
        """Asks for cancellation. True if that ended the operation, as nobody runs it; None if there is none."""
        with self.database.write() as connection:
            self.database.exclusive(connection, f"operations/{operation_id}")
            where = (operations.c.id == operation_id, operations.c.tenant == tenant)
            row = connection.execute(sa.select(operations).where(*where)).mappings().first()
            if row is None:
                return None
            if row["done"]:
                return False
            connection.execute(sa.update(operations).where(*where).values(cancel=True))
            if row["executor_id"] is None:
                self._end(connection, row, error=_cancelled())
                return True
            return False

    def end_cancelled(self, operation_id: str, run: int) -> bool:
        """Ends a run that has stopped because its operation was cancelled."""
        return self.fail(operation_id, run, _cancelled())

    def cancels(self, executor_id: str) -> Sequence[str]:
        """The operations that this process runs and that shall stop."""
        query = sa.select(operations.c.id).where(
            operations.c.executor_id == executor_id, operations.c.cancel, sa.not_(operations.c.done)
        )
        with self.database.read() as connection:
            return connection.execute(query).scalars().all()

    def abandon(self, executor_ids: Sequence[str]) -> None:
        """Notes that these processes run nothing any more."""
        gone = operations.c.executor_id.in_(executor_ids)
        with self.database.write() as connection:
            connection.execute(sa.update(operations).where(gone, sa.not_(operations.c.done)).values(executor_id=None))

    def delete(self, operation_id: str, tenant: str) -> bool | None:
        """Deletes a finished operation. False if it is not finished, None if there is none of this name."""
        with self.database.write() as connection:
            where = (operations.c.id == operation_id, operations.c.tenant == tenant)
            done: bool | None = connection.execute(sa.select(operations.c.done).where(*where)).scalar()
            if done:
                connection.execute(sa.delete(operations).where(*where))
                release_uses(connection, tenant, f"operations/{operation_id}")
            return done

    def finished_before(self, age: timedelta) -> Sequence[tuple[str, str]]:
        """(id, tenant) of some operations that have been done for longer than `age`."""
        limit = self.database.now - int(age.total_seconds() * 1000)
        query = sa.select(operations.c.id, operations.c.tenant).where(operations.c.done, operations.c.done_ms < limit)
        with self.database.read() as connection:
            return [(row.id, row.tenant) for row in connection.execute(query.limit(_SWEEP_BATCH))]

    def waiting(self, services: Sequence[str]) -> int:
        """How many operations of these services wait for their turn."""
        query = sa.select(sa.func.count()).where(
            operations.c.service.in_(services), sa.not_(operations.c.done), operations.c.executor_id.is_(None)
        )
        with self.database.read() as connection:
            return connection.execute(query).scalar_one()

    def unfinished(self, operation_id: str) -> bool:
        """Whether there is such an operation and it is not done."""
        query = sa.select(operations.c.id).where(operations.c.id == operation_id, sa.not_(operations.c.done))
        with self.database.read() as connection:
            return connection.execute(query).first() is not None

    def _finish(self, operation_id: str, run: int, operation: operations_pb2.Operation) -> bool:
        with self.database.write() as connection:
            self.database.exclusive(connection, f"operations/{operation_id}")
            row = connection.execute(sa.select(operations).where(operations.c.id == operation_id)).mappings().first()
            if row is None or row["done"] or row["run"] != run:
                return False
            self._store_result(connection, row, operation)
            return True

    def _end(self, connection: sa.Connection, row: sa.RowMapping, *, error: ServiceError) -> None:
        self._store_result(connection, row, operations_pb2.Operation(error=error.status()))

    def _store_result(self, connection: sa.Connection, row: sa.RowMapping, operation: operations_pb2.Operation) -> None:
        release(connection, row["service"], row["tenant"], f"operations/{row['id']}")
        finished = _message(row)
        finished.MergeFrom(operation)
        finished.done = True
        connection.execute(
            sa.update(operations)
            .where(operations.c.id == row["id"])
            .values(done=True, done_ms=self.database.now, executor_id=None, result=finished.SerializeToString())
        )

    def _update(self, operation_id: str, run: int, values: dict[str, object]) -> bool:
        mine = (operations.c.id == operation_id, operations.c.run == run, sa.not_(operations.c.done))
        with self.database.write() as connection:
            return bool(connection.execute(sa.update(operations).where(*mine).values(**values)).rowcount)


def _message(row: sa.RowMapping) -> operations_pb2.Operation:
    if row["result"] is not None:
        return operations_pb2.Operation.FromString(row["result"])
    operation = operations_pb2.Operation(name=f"operations/{row['id']}")
    progress = common_pb2.Progress.FromString(row["progress"])
    if not progress.HasField("update_time"):
        progress.update_time.FromMilliseconds(row["create_ms"])
    operation.metadata.Pack(progress)
    return operation


def _cancelled() -> ServiceError:
    return Cancelled("the operation was cancelled")


def _poison(attempts: int) -> ServiceError:
    return ResourceExhausted(
        f"the process died {attempts} times while it ran this operation, most likely for lack of memory; "
        "try a smaller request",
        reason="PROCESS_DIED",
    )
