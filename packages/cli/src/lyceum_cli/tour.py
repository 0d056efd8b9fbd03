"""`lyceum tour`: each method at work on real data, over gRPC, in one trace.

The services run in a child process on a free port, with a database and an artifact store that are thrown away
afterwards; their traces go to the user's own store, where `lyceum trace show` finds them. A method's tour is `run` in
the module `tour` of its package (`lyceum_runtime.tour`).
"""

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyceum_cli.connection import address_of, complete_service, entry_of
from lyceum_cli.output import FAILED, CliError, Json, emit, note, one_line, table, tick

if TYPE_CHECKING:
    from lyceum_runtime.services import ServiceEntry

START_SECONDS = 60.0
STOP_SECONDS = 30.0
SPANS_SECONDS = 5.0
"""How long the last spans of a trace may take to reach the store."""


@dataclass
class Visit:
    """What one method's tour gave."""

    method: str
    headline: str = ""
    passed: bool = False
    rows: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    trace_id: str = ""
    spans: int = 0
    missing_parents: int = 0


def tour(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Methods to visit. Default: all.", autocompletion=complete_service),
    ] = None,
    running: Annotated[bool, typer.Option("--running", help="Use the services that run already.")] = False,
    as_json: Json = False,
) -> None:
    """Show every method at work on real data and check its main effect; the exit status is 1 if one fails."""
    from lyceum_runtime import telemetry
    from lyceum_runtime.services import load_services
    from lyceum_runtime.settings import load_settings

    entries = [entry_of(name) for name in dict.fromkeys(methods)] if methods else list(load_services().values())
    telemetry.setup(load_settings(), "tour")
    places = {entry.name: address_of(entry) for entry in entries}
    with _started(entries) if not running else _as_they_are(places) as addresses:
        visits = [_visit(entry, addresses[entry.name], quiet=as_json) for entry in entries]
    telemetry.shutdown()
    for visit in visits:
        _check_trace(visit)
    _report(visits, as_json)
    if not all(visit.passed for visit in visits):
        raise typer.Exit(FAILED)


def _visit(entry: "ServiceEntry", address: str, *, quiet: bool) -> Visit:
    from lyceum_runtime import telemetry
    from lyceum_runtime.client import Client
    from lyceum_runtime.tour import TourResult

    visit = Visit(entry.name)
    began = time.monotonic()

    def report(what: str, value: str) -> None:
        if not quiet:
            note(f"{entry.name}  {what}: {value}")

    try:
        module = importlib.import_module(f"{entry.package}.tour")
        with telemetry.span(f"tour {entry.name}"), Client(entry, target=address) as client:
            visit.trace_id = telemetry.carrier().get("traceparent", "--").split("-")[1]
            result: TourResult = module.run(client.ready(), report)
        visit.headline, visit.rows, visit.passed = result.headline, result.rows, result.passed
    except ModuleNotFoundError as error:
        if error.name == f"{entry.package}.tour":
            visit.headline = "it has no tour"
        else:
            visit.headline = f"it needs the package {error.name}, which is not installed"
    except Exception as error:  # one method's failure must not hide the others
        if os.environ.get("LYCEUM_DEBUG"):
            raise
        visit.headline = one_line(f"{type(error).__name__}: {error}")
    visit.seconds = time.monotonic() - began
    return visit


def _check_trace(visit: Visit) -> None:
    """Looks the trace up in the store: it must be whole. Where spans go to a collector, it cannot be looked up."""
    from lyceum_cli.trace import missing_parents, read, span_store

    if not visit.trace_id or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return
    store = span_store()
    end = time.monotonic() + SPANS_SECONDS
    while True:
        spans = read(store, lambda: store.trace(visit.trace_id))
        visit.spans, visit.missing_parents = len(spans), len(missing_parents(spans))
        if (spans and not visit.missing_parents) or time.monotonic() > end:
            break
        time.sleep(0.2)
    if visit.passed and (not spans or visit.missing_parents):
        visit.passed = False
        visit.headline += f" (but its trace is broken: {visit.missing_parents} of {visit.spans} spans have no parent)"


def _report(visits: list[Visit], as_json: bool) -> None:
    if as_json:
        emit({"passed": all(visit.passed for visit in visits), "methods": [asdict(visit) for visit in visits]})
        return
    for visit in visits:
        if visit.rows:
            table((visit.method, ""), visit.rows)
            sys.stdout.write("\n")
    table(
        ("method", "passed", "took", "result", "trace"),
        [
            (visit.method, tick(visit.passed), f"{visit.seconds:.1f} s", visit.headline, visit.trace_id)
            for visit in visits
        ],
    )
    seen = [visit.trace_id for visit in visits if visit.spans]
    if seen:
        note(f"`lyceum trace show {seen[0]}` draws what happened")


@contextmanager
def _as_they_are(places: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    yield places


@contextmanager
def _started(entries: "list[ServiceEntry]") -> Iterator[Mapping[str, str]]:
    """Runs `lyceum up` for the services on a free port and gives their addresses; stops it at the end.

    Raises:
        CliError: they did not start.
    """
    from lyceum_runtime.parent import named_parent

    with tempfile.TemporaryDirectory(prefix="lyceum-tour-", ignore_cleanup_errors=True) as folder:
        environment = {
            **os.environ,
            **named_parent(),
            "LYCEUM_DATABASE_URL": f"sqlite:///{folder}/lyceum.db",
            "LYCEUM_ARTIFACTS_URL": f"{folder}/artifacts",
            "LYCEUM_LOG_LEVEL": os.environ.get("LYCEUM_LOG_LEVEL", "WARNING"),
        }
        log = Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "lyceum_cli",
            "up",
            *(entry.name for entry in entries),
            "--port",
            "0",
            "--json",
        ]
        with log.open("wb") as errors:
            # A session of its own: Ctrl-C must not stop the services before the tour has ended its calls.
            child = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield _addresses(child, log)
        finally:
            child.terminate()
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _addresses(child: "subprocess.Popen[bytes]", log: Path) -> Mapping[str, str]:
    """What the child says when it is ready."""
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], START_SECONDS)
    line = child.stdout.readline() if readable else b""
    if not line:
        said = log.read_text("utf-8", "replace").strip().splitlines()
        reason = _reason(said[-1]) if said else f"nothing was heard of them for {START_SECONDS:g} s"
        raise CliError(f"the services did not start: {reason}", "`lyceum up` shows more")
    started: dict[str, Any] = json.loads(line)
    return {service["service"]: service["address"] for service in started["services"]}


def _reason(line: str) -> str:
    """The message of an error that `--json` reported."""
    try:
        return str(json.loads(line)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return line
