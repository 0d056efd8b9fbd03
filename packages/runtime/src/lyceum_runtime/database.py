"""The one database of a process: SQLAlchemy engine, transactions and migrations.

Operations, resources and artifact ownership lie in tables of the database that `Settings.database_url` names: an SQLite
file by default, PostgreSQL by URL. DBOS keeps its own tables in the same database (in PostgreSQL in the schema `dbos`)
and through the same engine, so there is one file to back up and one writer's lock. SQLite runs in WAL mode: readers
never wait for the writer, and a writer waits its turn for up to 30 s.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError

from lyceum_runtime.errors import ConfigurationError, ResourceExhausted

_BUSY_MILLISECONDS = 30_000

Migration = Callable[[sa.Connection], None]


class StateError(ConfigurationError):
    """The stored state cannot be used: damaged file, unwritable directory, newer format. One line; nothing was
    overwritten.
    """


metadata = sa.MetaData()

_migrations = sa.Table(
    "lyceum_migrations",
    metadata,
    sa.Column("component", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)


def name_type(length: int) -> sa.String:
    """The column type of names: compared byte by byte in every database, so that pages have one order and a prefix is a
    range.
    """
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


class Database:
    """An engine with short transactions. Thread-safe; one a process.

    Raises:
        StateError: the database cannot be opened, is damaged, or was written by a newer Lyceum.
    """

    def __init__(self, url: str) -> None:
        try:
            self.url = sa.make_url(url)
        except SQLAlchemyError:
            raise StateError(
                "the database URL cannot be read; an example is sqlite:////var/lib/lyceum/lyceum.db"
            ) from None
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self.engine = _sqlite_engine(self.url)
        elif self.url.get_backend_name() == "postgresql":
            self.engine = sa.create_engine(
                self.url.set(drivername="postgresql+psycopg"), pool_pre_ping=True, pool_size=10
            )
        else:
            raise StateError(
                f"database {self.url.get_backend_name()} is not supported; use sqlite:/// or postgresql://"
            )
        with self.explained(), self.write() as connection:
            self.exclusive(connection, "migrations")
            _migrations.create(connection, checkfirst=True)
            # SQLite opens a file that it may not write, and says so at the first write only.
            connection.execute(sa.delete(_migrations).where(_migrations.c.component == ""))

    def close(self) -> None:
        """Closes the pool's connections."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection for reading: its statements see each other's committed past, and it never waits for a writer."""
        with self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction, committed at the end of the block and rolled back by an exception.

        On SQLite it holds the write lock from its first line, so that what it reads stays true until it commits.

        Raises:
            ResourceExhausted: the disk is full.
        """
        try:
            with self.engine.begin() as connection:
                if self.is_sqlite:
                    # pysqlite would begin only at the first INSERT, after the reads on which that INSERT depends.
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                yield connection
        except OperationalError as error:
            if "disk is full" not in str(error.orig):
                raise
            raise ResourceExhausted("the database is full", reason="DISK_FULL") from error

    def exclusive(self, connection: sa.Connection, key: str) -> None:
        """Until `connection`'s transaction ends, no other transaction passes this line with the same `key`."""
        if not self.is_sqlite:  # there, write() is exclusive already
            connection.execute(
                sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": f"lyceum/{key}"}
            )

    @property
    def now(self) -> sa.ColumnElement[int]:
        """The database's clock, the one that all replicas share: milliseconds since 1970 as an SQL expression."""
        if self.is_sqlite:
            return sa.literal_column("CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)", sa.BigInteger)
        return sa.literal_column("CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)", sa.BigInteger)

    def migrate(self, component: str, migrations: Sequence[Migration]) -> None:
        """Brings a component's tables up to date: migration i (from 1) runs once per database, in a transaction.

        A service with tables of its own calls this with its short name. Migrations are only ever appended.

        Raises:
            StateError: the database holds a newer version than this program knows.
        """
        with self.explained():
            for number in range(self._version(component) + 1, len(migrations) + 1):
                self._apply(component, number, migrations[number - 1])
            found = self._version(component)
        if found > len(migrations):
            raise StateError(
                f"{self._shown()} holds version {found} of the {component} tables, "
                f"this program knows {len(migrations)}; upgrade Lyceum"
            )

    def _apply(self, component: str, number: int, migration: Migration) -> None:
        with self.write() as connection:
            self.exclusive(connection, "migrations")
            if self._version(component, connection) >= number:
                return  # another process was faster
            migration(connection)
            connection.execute(sa.delete(_migrations).where(_migrations.c.component == component))
            connection.execute(sa.insert(_migrations).values(component=component, version=number))

    def _version(self, component: str, connection: sa.Connection | None = None) -> int:
        query = sa.select(_migrations.c.version).where(_migrations.c.component == component)
        if connection is not None:
            return connection.execute(query).scalar() or 0
        with self.read() as own:
            return own.execute(query).scalar() or 0

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the driver's error at start into one line that says which file or server, and what to do."""
        try:
            yield
        except ResourceExhausted as error:
            raise StateError(f"database {self._shown()}: {error.message}; make room on its disk") from None
        except DatabaseError as error:
            reason = re.sub(r"\s+", " ", str(error.orig)).strip()
            if not self.is_sqlite:
                raise StateError(f"database {self._shown()}: {reason}") from None
            if re.search("not a database|malformed|disk image", reason):
                advice = "the file is damaged or not SQLite; it was left as it is: move it away or restore a copy"
            else:
                advice = "check that the file and its directory can be written, or set LYCEUM_DATABASE_URL"
            raise StateError(f"database {self._shown()}: {reason}; {advice}") from None

    def _shown(self) -> str:
        return (self.url.database or ":memory:") if self.is_sqlite else self.url.render_as_string(hide_password=True)


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        raise StateError("an SQLite database must be a file, because several threads and processes share it")
    if url.query:
        raise StateError(
            f"an SQLite URL takes no options ({', '.join(url.query)}); set LYCEUM_DATABASE_URL to sqlite:///<path>"
        )
    path = Path(url.database)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(
            f"database {path}: {error.strerror}; set LYCEUM_DATABASE_URL to a path that can be written"
        ) from None
    engine = sa.create_engine(url.set(drivername="sqlite"), pool_size=10, max_overflow=20, pool_timeout=30)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # DBOS relies on IMMEDIATE transactions and foreign keys when it is given an engine.
        connection.isolation_level = "IMMEDIATE"
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA journal_mode=WAL")
        # In WAL mode NORMAL survives the process's death; only a power cut may lose the last commits, never the file.
        connection.execute("PRAGMA synchronous=NORMAL")

    return engine
