"""A trace store in one SQLite file, for machines without a collector.

Every process of this user writes its ended spans to the same file (write-ahead log, so that readers and writers do not
wait for each other); :class:`SpanStore` reads them. The file is bounded: the oldest traces go once it is larger than
`MAX_BYTES` or they are older than `MAX_DAYS`.
"""

import json
import sqlite3
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MAX_BYTES = 128 * 2**20
MAX_DAYS = 14.0
BUSY_SECONDS = 2.0
"""How long one process waits for another's write. Writers wait on their export thread, never in a call."""

# Appending rows in the order in which spans end costs a fifth of keeping them sorted by their random ids.
SCHEMA = """
CREATE TABLE IF NOT EXISTS spans (
    trace_id TEXT NOT NULL, span_id TEXT NOT NULL, parent_id TEXT, name TEXT NOT NULL, service TEXT NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, status TEXT NOT NULL,
    attributes TEXT NOT NULL, events TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS spans_by_trace ON spans (trace_id);
"""


@dataclass(frozen=True)
class Span:
    """One ended span. Times are nanoseconds since 1970, `status` is "OK", "ERROR" or "UNSET"."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    status: str
    attributes: Mapping[str, object]


_COLUMNS = tuple(field.name for field in fields(Span))


class SpanStore:
    """Reads the store at `path`; one that does not exist yet is empty."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def trace(self, trace_id: str) -> list[Span]:
        """All spans of one trace in the order they began, none if it is unknown. The beginning of the id is enough.

        Raises:
            ValueError: several traces begin like that.
        """
        prefix = trace_id.lower()
        query = "SELECT DISTINCT trace_id FROM spans WHERE trace_id >= ? AND trace_id < ? LIMIT 2"
        rows = list(self._rows(query, prefix, prefix + "g"))  # ids are hexadecimal
        if len(rows) > 1:
            raise ValueError(f"more than one trace begins with {trace_id!r}; give more of its id")
        return self._spans("WHERE trace_id = ? ORDER BY start_ns, end_ns DESC", rows[0][0]) if rows else []

    def recent(self, limit: int = 20) -> list[Span]:
        """One span of each of the last `limit` traces, newest first: its root, or without one its first span."""
        latest: dict[str, None] = {}
        with closing(self._rows("SELECT trace_id FROM spans ORDER BY rowid DESC")) as rows:
            for (trace_id,) in rows:
                latest[trace_id] = None
                if len(latest) == limit:
                    break
        where = "WHERE trace_id = ? ORDER BY parent_id IS NOT NULL, start_ns LIMIT 1"
        return [span for trace_id in latest for span in self._spans(where, trace_id)]

    def missing_parents(self, trace_id: str) -> list[Span]:
        """The spans of a trace whose parent is not in the store: not ended yet, kept elsewhere, or lost."""
        spans = self.trace(trace_id)
        known = {span.span_id for span in spans}
        return [span for span in spans if span.parent_id is not None and span.parent_id not in known]

    def _spans(self, where: str, *arguments: object) -> list[Span]:
        rows = self._rows(f"SELECT {', '.join(_COLUMNS)} FROM spans {where}", *arguments)
        return [Span(**dict(zip(_COLUMNS, row)) | {"attributes": json.loads(row[-1])}) for row in rows]

    def _rows(self, query: str, *arguments: object) -> Generator[tuple[Any, ...], None, None]:
        if not self.path.exists():
            return
        with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as connection:
            try:
                yield from connection.execute(query, arguments)
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):  # that one a writer is just creating
                    raise


def sweep(connection: sqlite3.Connection, max_bytes: int, max_days: float) -> None:
    """Delete the traces older than `max_days`, and the oldest ones while more than `max_bytes` are in use."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        too_old = time.time_ns() - int(max_days * 86400e9)
        query = "SELECT ifnull(min(rowid), 0) FROM (SELECT rowid FROM spans WHERE end_ns >= ? ORDER BY rowid LIMIT 1)"
        _delete_traces(connection, connection.execute(query, (too_old,)).fetchone()[0])
        pages, free, page_bytes = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        used = (pages - free) * page_bytes
        if used > max_bytes:
            total = connection.execute("SELECT count(*) FROM spans").fetchone()[0]
            surplus = total - int(total * 0.75 * max_bytes / used)  # room for a while
            query = "SELECT rowid FROM spans ORDER BY rowid LIMIT 1 OFFSET ?"
            (first_kept,) = connection.execute(query, (surplus,)).fetchone()
            if _delete_traces(connection, first_kept) < surplus // 2:  # one trace fills the file: its beginning goes
                connection.execute("DELETE FROM spans WHERE rowid < ?", (first_kept,))
    connection.executescript("PRAGMA incremental_vacuum")  # by execute() it frees a single page


def _delete_traces(connection: sqlite3.Connection, first_kept: int) -> int:
    """Delete the traces of which every row is before `first_kept`; the number of rows deleted."""
    query = """DELETE FROM spans WHERE trace_id IN (
        SELECT trace_id FROM spans old WHERE rowid < :first AND NOT EXISTS (
            SELECT 1 FROM spans new WHERE new.trace_id = old.trace_id AND new.rowid >= :first
        )
    )"""
    return connection.execute(query, {"first": first_kept}).rowcount
