"""The writing end of the local trace store (:mod:`lyceum_runtime.spans`), as an OpenTelemetry exporter."""

import json
import logging
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id

from lyceum_runtime.spans import BUSY_SECONDS, MAX_BYTES, MAX_DAYS, SCHEMA, sweep

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 60.0
_COMPLAIN_SECONDS = 60.0


class SQLiteSpanExporter(SpanExporter):
    """Writes ended spans to the store. A locked, corrupt or full one loses them, with one warning a minute at most."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, max_days: float = MAX_DAYS) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_days = max_days
        self._connection: sqlite3.Connection | None = None
        self._next_sweep = 0.0
        self._next_complaint = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Store one batch in one transaction."""
        try:
            connection = self._connection or self._open()
            with connection:
                connection.executemany("INSERT INTO spans VALUES (?,?,?,?,?,?,?,?,?,?)", map(_row, spans))
            if time.monotonic() >= self._next_sweep:
                self._next_sweep = time.monotonic() + _SWEEP_SECONDS
                sweep(connection, self._max_bytes, self._max_days)
            return SpanExportResult.SUCCESS
        except (sqlite3.Error, OSError) as error:
            self.shutdown()  # the next batch opens it anew: it may have been deleted or repaired
            if time.monotonic() >= self._next_complaint:
                self._next_complaint = time.monotonic() + _COMPLAIN_SECONDS
                logger.warning("spans are being lost: cannot write %s: %s", self._path, error)
            return SpanExportResult.FAILURE

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The SDK calls export under its own lock, but from the thread that flushes as well as from its own.
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, check_same_thread=False)
        self._connection = connection
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect only before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")  # a power cut may cost the last spans; a process crash does not
        connection.executescript(SCHEMA)
        return connection

    def shutdown(self) -> None:
        """Close the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _row(span: ReadableSpan) -> tuple[object, ...]:
    context = span.context
    return (
        format_trace_id(context.trace_id),
        format_span_id(context.span_id),
        format_span_id(span.parent.span_id) if span.parent else None,
        span.name,
        span.resource.attributes.get("service.name", ""),
        span.start_time,
        span.end_time,
        span.status.status_code.name,
        _encode(dict(span.attributes or {})),
        _encode([{"name": event.name, "time_ns": event.timestamp} for event in span.events]) if span.events else "[]",
    )
