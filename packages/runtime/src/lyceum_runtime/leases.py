"""Which processes are alive: each holds a lease in the database and a lock on a file.

A process renews its lease every few seconds; a lease that ran out on the database's clock tells the other processes
that its owner is dead, or cut off. On the same machine a dead process is noticed at once: the kernel gives its file
lock free, so that a restart after `kill -9` does not wait for the lease. A process that was merely asleep keeps its
lock, and finds its lease expired when it wakes.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from lyceum_runtime.database import Database, metadata

_KEPT_MILLISECONDS = 24 * 3600 * 1000

executors = sa.Table(
    "executors",
    metadata,
    sa.Column("executor_id", sa.String(64), primary_key=True),
    sa.Column("expire_ms", sa.BigInteger, nullable=False, doc="on the database's clock"),
    sa.Column("adopted", sa.Boolean, nullable=False, doc="its operations were put back into the queues"),
)


class Lease:
    """This process's lease, and the view of the others'."""

    def __init__(self, database: Database, folder: Path, executor_id: str, seconds: float) -> None:
        self._database = database
        self._folder = folder
        self._executor_id = executor_id
        self._milliseconds = int(seconds * 1000)
        self._lock: int | None = None

    def acquire(self) -> None:
        """Takes the file lock and the first lease."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder / self._executor_id, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.renew()

    def renew(self) -> bool:
        """Extends the lease. False if it had run out: the others may have adopted what this process was running."""
        database = self._database
        mine = executors.c.executor_id == self._executor_id
        with database.write() as connection:
            held = connection.execute(sa.select(executors.c.expire_ms > database.now).where(mine)).scalar()
            values = {"expire_ms": database.now + self._milliseconds, "adopted": False}
            if not connection.execute(sa.update(executors).where(mine).values(**values)).rowcount:
                connection.execute(sa.insert(executors).values(executor_id=self._executor_id, **values))
            return bool(held)

    @contextlib.contextmanager
    def dead(self) -> Iterator[list[str]]:
        """The dead processes whose operations nobody has adopted. After the block they count as adopted; if it raises,
        they do not.
        """
        database = self._database
        with database.read() as connection:
            others = sa.select(executors.c.executor_id, (executors.c.expire_ms <= database.now).label("expired")).where(
                executors.c.executor_id != self._executor_id, sa.not_(executors.c.adopted)
            )
            found = [
                row.executor_id for row in connection.execute(others) if row.expired or self._unlocked(row.executor_id)
            ]
        yield found
        if found:
            with database.write() as connection:
                forgotten = executors.c.adopted & (executors.c.expire_ms < database.now - _KEPT_MILLISECONDS)
                connection.execute(sa.delete(executors).where(forgotten))
                gone = executors.c.executor_id.in_(found)
                # Expired as well: should one of them be alive after all, it learns it at its next renewal.
                connection.execute(sa.update(executors).where(gone).values(adopted=True, expire_ms=database.now - 1))
            for executor_id in found:
                (self._folder / executor_id).unlink(missing_ok=True)

    def drop(self) -> None:
        """Gives lease and lock up, so that the others adopt at once."""
        with self._database.write() as connection:
            mine = executors.c.executor_id == self._executor_id
            connection.execute(sa.update(executors).where(mine).values(expire_ms=self._database.now - 1))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            (self._folder / self._executor_id).unlink(missing_ok=True)

    def _unlocked(self, executor_id: str) -> bool:
        """Whether that process ran on this machine and has died. False if it is alive, or runs elsewhere."""
        try:
            handle = os.open(self._folder / executor_id, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return True
