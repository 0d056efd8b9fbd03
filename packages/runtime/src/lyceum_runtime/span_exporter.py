"""The writing end of the local trace store (:mod:`lyceum_runtime.spans`), as OpenTelemetry's processor and exporter."""

import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lyceum_runtime.spans import BUSY_SECONDS, MAX_BYTES, MAX_DAYS, SCHEMA, sweep

logger = logging.getLogger(__name__)

_FIELDS = 10
_TOGETHER = 64
"""Rows of one statement. SQLite lets go of the interpreter for each, and a server's loop has to fight for it again."""

_EXPORT_SECONDS = 0.5  # `lyceum trace` should see a call soon after it ended
_BATCH = 512
_SWEEP_SECONDS = 60.0
_COMPLAIN_SECONDS = 60.0


class SpanBuffer(SpanProcessor):
    """Hands ended spans to `exporter` twice a second, on a thread of its own.

    `BatchSpanProcessor` asks the kernel for the process id and takes several calls for every span, which a small
    request notices. The oldest spans are lost if more than `WAITING` come together.
    """

    WAITING = 32768

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended: deque[ReadableSpan] = deque(maxlen=self.WAITING)
        self._exporting = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lyceum-spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Keeps a recorded span for the next export."""
        if span.context.trace_flags.sampled:
            self._ended.append(span)

    def _run(self) -> None:
        while not self._over.wait(_EXPORT_SECONDS):
            self._export()

    def _export(self) -> None:
        with self._exporting:
            for _ in range(-(-len(self._ended) // _BATCH)):
                batch = [self._ended.popleft() for _ in range(min(_BATCH, len(self._ended)))]
                try:
                    self._exporter.export(batch)
                except Exception:
                    logger.exception("%d spans are lost", len(batch))

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Exports what has ended."""
        self._export()
        return True

    def shutdown(self) -> None:
        """Exports what has ended, and nothing more."""
        self._over.set()
        self._export()
        self._exporter.shutdown()


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
                for first in range(0, len(spans), _TOGETHER):
                    values = [value for span in spans[first : first + _TOGETHER] for value in _row(span)]
                    connection.execute(_insert(len(values) // _FIELDS), values)
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


def _insert(rows: int) -> str:
    row = f"({','.join('?' * _FIELDS)})"
    return f"INSERT INTO spans VALUES {','.join([row] * rows)}"


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _row(span: ReadableSpan) -> tuple[object, ...]:
    context, parent = span.context, span.parent
    return (
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        f"{parent.span_id:016x}" if parent else None,
        span.name,
        span.resource.attributes.get("service.name", ""),
        span.start_time,
        span.end_time,
        span.status.status_code.name,
        _encode(dict(span.attributes or {})),
        _encode([{"name": event.name, "time_ns": event.timestamp} for event in span.events]) if span.events else "[]",
    )
