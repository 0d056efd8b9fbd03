"""Log lines and what they carry."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lyceum_runtime import telemetry
from lyceum_runtime.logs import setup_logging
from lyceum_runtime.settings import Settings


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    root.handlers.clear()
    telemetry.setup(Settings(state_dir=tmp_path), "apex")
    yield
    telemetry.shutdown()
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_json_line_carries_trace_span_and_service(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(Settings(log_level="INFO"))
    with telemetry.span("work"):
        logging.getLogger("lyceum_runtime.x").warning("half of %d\nlines", 7)
        _, trace_id, span_id, _ = telemetry.carrier()["traceparent"].split("-")
    line = capsys.readouterr().err
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "WARNING",
        "logger": "lyceum_runtime.x",
        "message": "half of 7\nlines",
        "service": "apex",
        "trace_id": trace_id,
        "span_id": span_id,
    }
    assert line.count("\n") == 1


def test_terminal_gets_a_short_line_with_the_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    setup_logging(Settings(log_level="INFO"))
    with telemetry.span("work"):
        logging.getLogger("x").info("started")
        trace_id = telemetry.carrier()["traceparent"].split("-")[1]
    assert capsys.readouterr().err[8:] == f" INFO    x: started  [trace {trace_id[:8]}]\n"


def test_libraries_are_quiet_and_levels_hold(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("dbos").addHandler(logging.StreamHandler())
    setup_logging(Settings(log_level="WARNING"))
    logging.getLogger("dbos").info("started")
    logging.getLogger("x").info("started")
    assert capsys.readouterr().err == ""
    logging.getLogger("dbos").error("broken")
    assert json.loads(capsys.readouterr().err)["message"] == "broken"
