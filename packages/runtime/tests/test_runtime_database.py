"""The database: what it refuses, its transactions and its migrations."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from lyceum_runtime.database import Database, StateError
from lyceum_runtime.errors import ResourceExhausted


def url(path: Path) -> str:
    return f"sqlite:///{path}"


def test_a_file_that_is_no_database_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lyceum.db"
    path.write_bytes(b"a text that somebody wants to keep" * 100)
    before = path.read_bytes()
    with pytest.raises(StateError, match=r"lyceum\.db.*left as it is") as error:
        Database(url(path))
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before


def test_a_damaged_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lyceum.db"
    Database(url(path)).close()
    data = bytearray(path.read_bytes())
    data[100:] = b"\xff" * (len(data) - 100)
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"lyceum\.db"):
        Database(url(path))
    assert path.read_bytes() == data


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="LYCEUM_DATABASE_URL") as error:
        Database(url(tmp_path / "file" / "lyceum.db"))
    assert "\n" not in str(error.value)
    (tmp_path / "directory.db").mkdir()
    with pytest.raises(StateError, match="LYCEUM_DATABASE_URL"):
        Database(url(tmp_path / "directory.db"))


@pytest.mark.parametrize("bad", ["", "nonsense", "mysql://host/x", "sqlite://"])
def test_a_url_that_cannot_be_used_is_refused(bad: str) -> None:
    with pytest.raises(StateError):
        Database(bad)


@pytest.mark.parametrize("option", ["mode=ro", "mode=ro&uri=true", "timeout=5", "nonsense=1"])
def test_an_sqlite_url_with_options_is_refused_rather_than_opened_without_them(tmp_path: Path, option: str) -> None:
    with pytest.raises(StateError, match=f"takes no options .*{option.partition('=')[0]}") as error:
        Database(f"{url(tmp_path / 'x.db')}?{option}")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_database_that_may_only_be_read_is_refused_in_one_line_that_names_it(tmp_path: Path, journal: str) -> None:
    path = tmp_path / "x.db"
    Database(url(path)).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={journal}")
    before = path.read_bytes()

    def read_only(*_: object) -> sqlite3.Connection:  # what a file without write permission is to all but root
        return sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)

    event.listen(sa.Engine, "do_connect", read_only)
    try:
        with pytest.raises(StateError, match=r"x\.db: .*readonly.*LYCEUM_DATABASE_URL") as error:
            Database(url(path))
    finally:
        event.remove(sa.Engine, "do_connect", read_only)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before


def test_a_full_disk_is_a_status_while_it_runs_and_one_line_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "lyceum.db"
    database = Database(url(path))
    with database.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

    @event.listens_for(database.engine, "connect")
    def no_room(connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}")

    database.engine.dispose()
    with pytest.raises(ResourceExhausted, match="full"), database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE t AS SELECT randomblob(100000)")
    with (
        pytest.raises(StateError, match=r"lyceum\.db: the database is full"),
        database.explained(),
        database.write() as connection,
    ):
        connection.exec_driver_sql("CREATE TABLE t AS SELECT randomblob(100000)")
    database.close()


@pytest.mark.parametrize("driver", ["sqlite+aiosqlite", "sqlite+pysqlcipher"])
def test_an_sqlite_url_with_another_driver_opens_the_same_file(tmp_path: Path, driver: str) -> None:
    Database(f"{driver}:///{tmp_path / 'x.db'}").close()
    assert (tmp_path / "x.db").is_file()


def test_migrations_run_once_each_and_in_order(tmp_path: Path) -> None:
    database = Database(url(tmp_path / "x.db"))
    ran: list[int] = []

    def migration(number: int) -> None:
        def migrate(connection: sa.Connection) -> None:
            ran.append(number)
            connection.execute(sa.text(f"CREATE TABLE t{number} (x INTEGER)"))

        migrations.append(migrate)

    migrations: list = []  # type: ignore[type-arg]
    migration(1)
    migration(2)
    database.migrate("toy", migrations)
    migration(3)
    database.migrate("toy", migrations)
    database.migrate("toy", migrations)
    assert ran == [1, 2, 3]
    with pytest.raises(StateError, match="upgrade Lyceum"):
        database.migrate("toy", migrations[:2])
    database.close()


def test_a_failed_migration_leaves_nothing(tmp_path: Path) -> None:
    database = Database(url(tmp_path / "x.db"))

    def half(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE half (x INTEGER)"))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        database.migrate("toy", [half])
    assert not sa.inspect(database.engine).has_table("half")
    database.migrate("toy", [lambda connection: None])
    database.close()


def test_a_write_keeps_what_it_read_until_it_commits(tmp_path: Path) -> None:
    database = Database(url(tmp_path / "x.db"))
    with database.write() as connection:
        connection.execute(sa.text("CREATE TABLE n (x INTEGER)"))
        connection.execute(sa.text("INSERT INTO n VALUES (0)"))

    def add() -> None:
        for _ in range(25):
            with database.write() as connection:
                value: int = connection.execute(sa.text("SELECT x FROM n")).scalar_one()
                connection.execute(sa.text("UPDATE n SET x = :x"), {"x": value + 1})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT x FROM n")).scalar() == 100
    database.close()


def test_processes_that_start_at_once_share_a_new_database(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:] = sys.argv[2].split(':'); "
        "from lyceum_runtime.database import Database; import sqlalchemy as sa\n"
        "d = Database(sys.argv[1]); d.migrate('t', [lambda c: c.execute(sa.text('CREATE TABLE t (x INTEGER)'))])"
    )
    path = ":".join(entry for entry in sys.path if entry)
    arguments = [sys.executable, "-c", code, url(tmp_path / "new.db"), path]
    children = [subprocess.Popen(arguments) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
