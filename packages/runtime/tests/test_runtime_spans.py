"""The local trace store: many writers, prefixes, bounds."""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from lyceum_runtime.span_exporter import SQLiteSpanExporter
from lyceum_runtime.spans import SCHEMA, SpanStore, sweep

WRITER = """
import sys
from pathlib import Path
from lyceum_runtime import telemetry
telemetry.setup_process(Path(sys.argv[1]), sys.argv[2])
with telemetry.attached({"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}):
    for index in range(500):
        with telemetry.span(f"span {index}"):
            pass
        if index % 50 == 0:
            telemetry.flush()
telemetry.shutdown()
"""


def write(path: Path, rows: Sequence[tuple[str, str, str | None, int]]) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.executescript(SCHEMA)
    with connection:
        connection.executemany(
            "INSERT INTO spans VALUES (?, ?, ?, 'name', 'service', ?, ?, 'OK', '{}', '[]')",
            [(trace, span, parent, start, start + 1) for trace, span, parent, start in rows],
        )
    return connection


def test_four_processes_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), f"w{index}"]) for index in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    spans = SpanStore(tmp_path / "spans.db").trace("aaaa")
    assert len(spans) == 4 * 500
    for index in range(4):
        assert {span.name for span in spans if span.service == f"w{index}"} == {
            f"span {number}" for number in range(500)
        }


def test_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "spans.db")
    assert store.recent() == store.trace("a") == store.missing_parents("a") == []
    assert list(tmp_path.iterdir()) == []


def test_trace_is_found_by_a_unique_beginning_of_its_id(tmp_path: Path) -> None:
    write(tmp_path / "spans.db", [("ab01", "1", None, 1), ("ab02", "2", None, 2)])
    store = SpanStore(tmp_path / "spans.db")
    assert [span.span_id for span in store.trace("AB02")] == ["2"]
    assert store.trace("ac") == []
    with pytest.raises(ValueError, match="more than one trace begins with 'ab'"):
        store.trace("ab")


def test_recent_gives_roots_newest_first_and_the_first_span_where_the_root_is_elsewhere(tmp_path: Path) -> None:
    rows = [("a", "child", "root", 1), ("a", "root", None, 2), ("b", "late", "x", 9), ("b", "early", "x", 8)]
    write(tmp_path / "spans.db", [("c", "old", None, 0), *rows])
    store = SpanStore(tmp_path / "spans.db")
    assert [span.span_id for span in store.recent()] == ["early", "root", "old"]
    assert [span.span_id for span in store.recent(1)] == ["early"]


def test_missing_parents_are_named(tmp_path: Path) -> None:
    write(tmp_path / "spans.db", [("a", "root", None, 1), ("a", "child", "root", 2), ("a", "orphan", "gone", 3)])
    assert [span.span_id for span in SpanStore(tmp_path / "spans.db").missing_parents("a")] == ["orphan"]


def test_sweep_deletes_old_traces_whole(tmp_path: Path) -> None:
    now = time.time_ns()
    day = int(86400e9)
    rows = [("old", "1", None, now - 3 * day), ("both", "2", None, now - 3 * day), ("both", "3", "2", now)]
    connection = write(tmp_path / "spans.db", rows)
    sweep(connection, max_bytes=2**30, max_days=1)
    store = SpanStore(tmp_path / "spans.db")
    assert store.trace("old") == []
    assert len(store.trace("both")) == 2


@pytest.mark.parametrize("traces", [1000, 1])  # many small ones; one that fills the file alone
def test_sweep_bounds_the_file_and_keeps_the_newest(tmp_path: Path, traces: int) -> None:
    now = time.time_ns()
    rows = [(f"{index * traces // 20000:032x}", f"{index:016x}", None, now + index) for index in range(20000)]
    connection = write(tmp_path / "spans.db", rows)
    before = (tmp_path / "spans.db").stat().st_size
    sweep(connection, max_bytes=before // 2, max_days=1)
    assert (tmp_path / "spans.db").stat().st_size <= before // 2
    (count,) = connection.execute("SELECT count(*) FROM spans").fetchone()
    assert 20000 * 0.3 < count < 20000 * 0.5  # three quarters of half
    assert connection.execute("SELECT max(start_ns) FROM spans").fetchone() == (now + 19999,)


def test_exporter_sweeps_by_itself(tmp_path: Path) -> None:
    write(tmp_path / "spans.db", [("old", "1", None, 1)])
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SQLiteSpanExporter(tmp_path / "spans.db", max_days=1)))
    provider.get_tracer("test").start_span("new").end()
    provider.shutdown()
    assert [span.name for span in SpanStore(tmp_path / "spans.db").recent()] == ["new"]


def test_locked_store_loses_the_batch_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lyceum_runtime.span_exporter.BUSY_SECONDS", 0.05)
    connection = write(tmp_path / "spans.db", [])
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SQLiteSpanExporter(tmp_path / "spans.db")))
    tracer = provider.get_tracer("test")
    connection.execute("BEGIN EXCLUSIVE")
    tracer.start_span("lost").end()
    connection.rollback()
    tracer.start_span("kept").end()
    provider.shutdown()
    assert [span.name for span in SpanStore(tmp_path / "spans.db").recent()] == ["kept"]


def test_store_is_read_without_loading_the_telemetry_sdk() -> None:
    code = "import sys, lyceum_runtime.spans; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
