"""Logs on standard error: one JSON object a line for machines, one short line for a person at a terminal.

Each record carries the trace and span during which it was written, so that a log line leads to its trace and back.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import format_span_id, format_trace_id

from lyceum_runtime import telemetry

if TYPE_CHECKING:
    from lyceum_runtime.settings import Settings

_QUIET = {
    "dbos": logging.WARNING,  # says each workflow's start and end, with tracebacks for a mere cancel
    "grpc": logging.WARNING,
    "httpx": logging.WARNING,  # logs whole URLs
    "opentelemetry": logging.WARNING,
    "sqlalchemy": logging.WARNING,
    "uvicorn.access": logging.WARNING,
    "fsspec": logging.WARNING,
    "matplotlib": logging.WARNING,
    "numba": logging.WARNING,
}


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, `service`, and within a span `trace_id` and `span_id`; `error` has a
    traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "service": telemetry.service_name(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            entry |= {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TerminalFormatter(logging.Formatter):
    """`12:30:01 WARNING lyceum_runtime.server: text  [trace 1f3c9a2b]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the beginning of the trace's id, which is all that `lyceum trace show` needs."""
        context = trace.get_current_span().get_span_context()
        suffix = f"  [trace {format_trace_id(context.trace_id)[:8]}]" if context.is_valid else ""
        return super().formatMessage(record) + suffix


def setup_logging(settings: "Settings") -> None:
    """Send all logs of the process to standard error at `settings.log_level`, JSON unless a person is watching."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    for name, level in _QUIET.items():
        noisy = logging.getLogger(name)
        noisy.setLevel(level)
        noisy.handlers.clear()  # DBOS and uvicorn bring their own, which would print everything twice
        noisy.propagate = True
