"""`lyceum ops`: long-running operations of any server, and following one with a progress bar.

An operation outlives its server: while a watched one restarts, the watch waits for it and goes on.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lyceum_cli.connection import Target, complete_service, connect
from lyceum_cli.output import CliError, Json, emit, note, printable, stderr, table

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from lyceum_cli.reflection import Server

OPERATIONS = "google.longrunning.Operations"
WATCH = "lyceum.operations.v1.OperationsService/WatchOperation"
RESTART_SECONDS = 60.0
_POLL_SECONDS = 0.5

app = typer.Typer(no_args_is_help=True, help="List, watch, cancel and delete long-running operations.")

Name = Annotated[str, typer.Argument(help="operations/ID, or the ID alone.")]
Service = Annotated[
    str | None,
    typer.Option(
        "--service",
        "-s",
        help="Service to ask. Default: every one that answers.",
        autocompletion=complete_service,
        show_default=False,
    ),
]


@app.command("list")
def list_operations(
    service: Service = None,
    target: Target = None,
    filter_text: Annotated[str, typer.Option("--filter", help="Such as done = false, in AIP-160 form.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most operations to show.")] = 50,
    as_json: Json = False,
) -> None:
    """List operations."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for server in _servers(service, target):
        # Servers that share a database list one another's operations.
        own = f'service = "{server.name}"' if server.name else ""
        for operation in _pages(server, " AND ".join(term for term in (own, filter_text) if term), limit):
            found.setdefault(operation["name"], (server.name or server.target, operation))
    shown = list(found.values())[:limit]
    if as_json:
        emit({"operations": [operation for _, operation in shown]})
        return
    table(("operation", "service", "state", "stage", "progress"), [_row(name, operation) for name, operation in shown])
    if not shown:
        note("no operations")


@app.command()
def get(name: Name, service: Service = None, target: Target = None, as_json: Json = False) -> None:
    """Print an operation."""
    with _located(name, service, target) as (server, operation):
        emit(server.to_json(operation), pretty=not as_json)


@app.command()
def watch(name: Name, service: Service = None, target: Target = None, as_json: Json = False) -> None:
    """Print each change of an operation as one JSON line until it is done."""
    with _located(name, service, target) as (server, operation):
        state = operation
        for state in states(server, operation):
            emit(server.to_json(state))
        result_of(server, state)


@app.command()
def wait(
    name: Name,
    service: Service = None,
    target: Target = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            metavar="SECONDS",
            help="Give up after this time; the operation goes on.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Follow an operation to its end and print its response."""
    with _located(name, service, target) as (server, operation):
        emit(follow(server, operation, quiet=as_json, timeout=timeout), pretty=not as_json)


@app.command()
def cancel(name: Name, service: Service = None, target: Target = None, as_json: Json = False) -> None:
    """Ask an operation to stop; its work so far is dropped."""
    with _located(name, service, target) as (server, operation):
        server.ask(f"{OPERATIONS}/CancelOperation", {"name": _name(operation)})
        _done(as_json, name=_name(operation), text=f"cancelling {_name(operation)}")


@app.command()
def delete(name: Name, service: Service = None, target: Target = None, as_json: Json = False) -> None:
    """Forget a finished operation and its result."""
    with _located(name, service, target) as (server, operation):
        server.ask(f"{OPERATIONS}/DeleteOperation", {"name": _name(operation)})
        _done(as_json, name=_name(operation), text=f"deleted {_name(operation)}")


def follow(server: "Server", operation: "Message", *, quiet: bool, timeout: float | None = None) -> Any:
    """Waits for an operation, with a progress bar on standard error unless `quiet`, and returns its response as JSON.

    Raises:
        CallFailed: the operation failed or was cancelled.
    """
    state = operation
    try:
        with _progress(quiet) as show:
            for state in states(server, operation, timeout=timeout):
                show(server.to_json(state))
    except KeyboardInterrupt:
        note(f"{_name(operation)} goes on; `lyceum ops wait {_name(operation)} {server.options_here}` follows it again")
        raise
    return result_of(server, state)


def states(server: "Server", operation: "Message", *, timeout: float | None = None) -> Iterator["Message"]:
    """The operation, then each change of it as the server reports it; the last one is done.

    Raises:
        CliError: not done after `timeout` seconds, or the server stayed away.
    """
    from google.rpc import code_pb2

    from lyceum_cli.failure import CallFailed

    yield operation
    state: Any = operation
    end = None if timeout is None else time.monotonic() + timeout
    away_since: float | None = None
    while not state.done:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            _not_done(operation, timeout)
        try:
            for state in _reported(server, operation, left):
                away_since = None
                yield state
        except CallFailed as failure:
            if failure.status.code == code_pb2.DEADLINE_EXCEEDED and end is not None:
                _not_done(operation, timeout)
            if failure.status.code != code_pb2.UNAVAILABLE:
                raise
            if away_since is None:
                away_since = time.monotonic()
                note(f"{server.target} is away; waiting for it")
            if time.monotonic() - away_since > RESTART_SECONDS:
                raise
            time.sleep(_POLL_SECONDS)


def _not_done(operation: "Message", timeout: float | None) -> NoReturn:
    raise CliError(f"{_name(operation)} is not done after {timeout:g} s", "it goes on; wait again or cancel it")


def _reported(server: "Server", operation: "Message", timeout: float | None) -> Iterator[Any]:
    """One round of states: a watch where the server has it, else one poll."""
    watching = server.method(WATCH)
    if watching is None:
        time.sleep(_POLL_SECONDS)
        yield server.ask(f"{OPERATIONS}/GetOperation", {"name": _name(operation)})
        return
    request = server.request(watching, {"name": _name(operation)})
    for response in server.call(watching, iter([request]), timeout=timeout):
        yield response.operation  # type: ignore[attr-defined]


def result_of(server: "Server", state: Any) -> Any:
    """The response of a finished operation as JSON.

    Raises:
        CallFailed: it has an error instead.
    """
    from google.rpc import status_pb2

    from lyceum_cli.failure import CallFailed

    if state.HasField("error"):
        raise CallFailed(status_pb2.Status.FromString(state.error.SerializeToString()))
    response = server.unpack(state.response)
    return server.to_json(state.response if response is None else response)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that shows an operation's state: a bar on a terminal, else a line for each new stage."""
    if quiet:
        yield lambda operation: None
        return
    if not stderr().is_terminal:
        yield _stage_lines()
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}", style="cyan", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[metrics]}", style="dim", markup=False),
    )
    with progress.Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("queued", total=None, metrics="")

        def show(operation: dict[str, Any]) -> None:
            stage, completed, total, metrics = _progress_of(operation)
            bar.update(task, description=stage or "queued", completed=completed, total=total or None, metrics=metrics)

        yield show


def _stage_lines() -> Callable[[dict[str, Any]], None]:
    seen: list[str] = []

    def show(operation: dict[str, Any]) -> None:
        stage, completed, total, metrics = _progress_of(operation)
        if stage and stage not in seen:
            seen.append(stage)
            note(f"{stage} {completed}/{total or '?'} {metrics}".rstrip())

    return show


def _progress_of(operation: dict[str, Any]) -> tuple[str, int, int, str]:
    metadata = operation.get("metadata", {})
    metrics = metadata.get("metrics", {})
    text = " ".join(
        f"{name}={value:.4g}" for name, value in list(metrics.items())[:3] if isinstance(value, int | float)
    )
    stage = printable(metadata.get("stage", ""))
    return stage, int(metadata.get("completed", 0)), int(metadata.get("total", 0)), printable(text)


def _row(service: str, operation: dict[str, Any]) -> tuple[str, ...]:
    stage, completed, total, _ = _progress_of(operation)
    if not operation.get("done"):
        state = "running"
    elif "error" in operation:
        from lyceum_cli.failure import code_name

        state = code_name(operation["error"].get("code", 0)).lower()
    else:
        state = "done"
    return operation["name"], service, state, stage, f"{completed}/{total}" if total else ""


def _pages(server: "Server", filter_text: str, limit: int) -> Iterator[dict[str, Any]]:
    token = ""
    while limit > 0:
        request = {"name": "operations", "filter": filter_text, "page_size": min(limit, 1000), "page_token": token}
        page: Any = server.ask(f"{OPERATIONS}/ListOperations", request)
        yield from (server.to_json(operation) for operation in page.operations)
        limit -= len(page.operations)
        token = page.next_page_token
        if not token:
            return


def _servers(service: str | None, target: str | None) -> Iterator["Server"]:
    """The server asked for, or every one of the table that answers."""
    from lyceum_runtime.services import load_services

    if service is not None or target is not None:
        with connect(service or "", target) as server:
            yield server
        return
    answered = False
    for name in load_services():
        with connect(name, None) as server:
            try:
                server.services()
            except CliError:
                continue
            answered = True
            yield server
    if not answered:
        raise CliError("no service answers", "start them with `lyceum up`, or give --target HOST:PORT")


@contextmanager
def _located(name: str, service: str | None, target: str | None) -> Iterator[tuple["Server", "Message"]]:
    """The first server that knows the operation, and the operation."""
    from google.rpc import code_pb2

    from lyceum_cli.failure import CallFailed

    full = name if name.startswith("operations/") else f"operations/{name}"
    for server in _servers(service, target):
        try:
            operation = server.ask(f"{OPERATIONS}/GetOperation", {"name": full})
        except CallFailed as failure:
            if failure.status.code != code_pb2.NOT_FOUND:
                raise
            continue
        yield server, operation
        return
    raise CliError(f"there is no operation {full}", "`lyceum ops list` shows them")


def _name(operation: Any) -> str:
    return str(operation.name)


def _done(as_json: bool, *, name: str, text: str) -> None:
    if as_json:
        emit({"name": name})
    else:
        note(text, style="none")
