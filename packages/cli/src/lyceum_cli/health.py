"""`lyceum ls` and `lyceum health`: which services there are, where, and whether they serve."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from lyceum_cli.connection import Target, address_of, complete_service, entry_of, open_channel
from lyceum_cli.output import FAILED, CliError, Json, emit, note, table

if TYPE_CHECKING:
    from rich.text import Text

    from lyceum_runtime.services import ServiceEntry

CHECK_SECONDS = 2.0
SERVING = "serving"
DOWN = "down"


@dataclass(frozen=True)
class Row:
    """One service; `health` is serving, not serving, unknown (its server lacks it) or down (no server answers)."""

    service: str
    address: str
    health: str
    version: str | None
    """The installed package's; None where it runs from its source."""


def ls(as_json: Json = False) -> None:
    """List the services with their addresses, health and installed versions."""
    from lyceum_runtime.services import load_services

    rows = check([(entry, address_of(entry)) for entry in load_services().values()])
    _print(rows, as_json)
    if not as_json and all(row.health == DOWN for row in rows):
        note("nothing is running; `lyceum up` starts the services")


def health(
    service: Annotated[
        str | None,
        typer.Argument(help="Service to check. Default: all.", autocompletion=complete_service, show_default=False),
    ] = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Check health; the exit status is 1 if something is not serving."""
    from lyceum_runtime.services import load_services

    if target is not None and service is None:
        raise CliError("--target needs the service to ask for", "name one of `lyceum ls`")
    entries = list(load_services().values()) if service is None else [entry_of(service)]
    rows = check([(entry, target or address_of(entry)) for entry in entries])
    _print(rows, as_json)
    missing = [row.service for row in rows if row.health != SERVING]
    if missing:
        if not as_json:
            note(f"not serving: {', '.join(missing)}; start with `lyceum up {' '.join(missing)}`", style="red")
        raise typer.Exit(FAILED)


def check(places: "Iterable[tuple[ServiceEntry, str]]", *, timeout: float = CHECK_SECONDS) -> list[Row]:
    """The health of each service at its address, all asked at once."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    asked = []
    for entry, address in places:
        channel = open_channel(address)
        request = health_pb2.HealthCheckRequest(service=entry.service)
        asked.append(
            (entry, address, channel, health_pb2_grpc.HealthStub(channel).Check.future(request, timeout=timeout))
        )
    rows = []
    for entry, address, channel, answer in asked:
        try:
            state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.result().status).lower().replace("_", " ")
        except grpc.RpcError as error:
            state = "unknown" if error.code() == grpc.StatusCode.NOT_FOUND else DOWN
        channel.close()
        rows.append(Row(entry.name, address, state, _version(entry)))
    return rows


def _version(entry: "ServiceEntry") -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(entry.package.replace("_", "-"))
    except PackageNotFoundError:
        return None


def _print(rows: list[Row], as_json: bool) -> None:
    if as_json:
        emit({"services": [asdict(row) for row in rows]})
        return
    columns = ["service", "address", "health"]
    cells: list[list[str | Text]] = [[row.service, row.address, _coloured(row.health)] for row in rows]
    if any(row.version for row in rows):
        columns.append("version")
        for line, row in zip(cells, rows):
            line.append(row.version or "-")
    table(columns, cells)


def _coloured(state: str) -> "Text":
    from rich.text import Text

    return Text(state, style={SERVING: "green", DOWN: "red"}.get(state, "yellow"))
