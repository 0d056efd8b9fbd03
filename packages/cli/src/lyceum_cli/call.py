"""`lyceum call`: any RPC of any server, known by reflection alone."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyceum_cli.connection import Target, complete_service, connect
from lyceum_cli.output import Json, emit, note, table

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from lyceum_cli.reflection import Rpc, Server

UNARY_SECONDS = 60.0
MAX_SECONDS = 366 * 24 * 3600.0
"""gRPC takes an endless deadline for one that has passed."""
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.001,
        max=MAX_SECONDS,
        metavar="SECONDS",
        show_default=False,
        help=f"Deadline. Default: {UNARY_SECONDS:g} for one answer, none for a stream.",
    ),
]


def call(
    ctx: typer.Context,
    service: Annotated[
        str,
        typer.Argument(
            help="Name in the table of services, or with --target any of a service's names.",
            autocompletion=complete_service,
        ),
    ],
    rpc: Annotated[
        str | None,
        typer.Argument(help="RPC, or package.Service/RPC. Without it, the RPCs are listed.", show_default=False),
    ] = None,
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON",
            help="The request; - reads standard input. A stream takes JSON Lines or an array.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the request from a file.", show_default=False)
    ] = None,
    target: Target = None,
    timeout: Timeout = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Follow the operation that the RPC returns and print its response.")
    ] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print the fields of the request with their types and rules.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Call an RPC with a JSON request and print the response, one JSON line for each message of a stream.

    [dim]lyceum call apex                                lists the RPCs
    lyceum call apex GetLibrary --describe          shows the request's fields
    lyceum call apex GetLibrary '{"name": "libraries/thrombin"}'[/dim]
    """
    from lyceum_runtime import telemetry
    from lyceum_runtime.settings import load_settings

    with connect(service, target) as server:
        if rpc is None:
            _list_rpcs(server, server.service(_full_name(service, target)), as_json)
            return
        if "/" in rpc:
            owner, _, method = rpc.partition("/")
        else:
            owner, method = _full_name(service, target), rpc
        known = server.rpc(server.service(owner), method)
        if describe:
            _describe(server, known, as_json)
            return
        telemetry.setup(load_settings(), "cli")
        with telemetry.span("lyceum call", rpc=known.path):
            trace_id = telemetry.carrier().get("traceparent", "--").split("-")[1]
            if not as_json:
                # After the result, and after the error that the group of commands prints.
                ctx.find_root().call_on_close(lambda: note(f"trace {trace_id}"))
            _call(server, known, request, file, timeout, wait, as_json)


def _full_name(service: str, target: str | None) -> str:
    """The gRPC name of a service of the table; with a target, whatever the user calls it."""
    from lyceum_runtime.services import load_services

    entry = load_services().get(service)
    return service if entry is None else entry.service


def _call(
    server: "Server",
    rpc: "Rpc",
    request: str | None,
    file: Path | None,
    timeout: float | None,
    wait: bool,
    as_json: bool,
) -> None:
    from lyceum_cli.operations import follow
    from lyceum_cli.requests import read_requests

    values = read_requests(request, file, stream=rpc.takes_stream)
    requests: Iterator[Message] = (server.request(rpc, value) for value in values)
    if not rpc.takes_stream:
        requests = iter([next(requests)])
    deadline = timeout if timeout is not None or rpc.takes_stream or rpc.gives_stream else UNARY_SECONDS
    for response in server.call(rpc, requests, timeout=deadline):
        if wait and rpc.is_long:
            emit(follow(server, response, quiet=as_json), pretty=not as_json)
            continue
        emit(server.to_json(response), pretty=not as_json and not rpc.gives_stream)
        if rpc.is_long and not as_json:
            name = server.to_json(response)["name"]
            note(f"long work; `lyceum ops wait {name} {server.options_here}` follows it, or call with --wait")


def _list_rpcs(server: "Server", service: "ServiceDescriptor", as_json: bool) -> None:
    from lyceum_cli.reflection import Rpc

    rows = []
    for method in service.methods:
        rpc = Rpc(method)
        options = server.options(method.GetOptions())
        info = options.get("[google.longrunning.operation_info]", {})
        answer = method.output_type.name + (f" -> {info['response_type']}" if info.get("response_type") else "")
        rows.append(
            {
                "rpc": rpc.name,
                "kind": "operation" if rpc.is_long else rpc.kind,
                "request": method.input_type.name,
                "response": answer,
            }
        )
    if as_json:
        emit({"service": service.full_name, "target": server.target, "rpcs": rows})
        return
    table(("RPC", "kind", "request", "response"), [tuple(row.values()) for row in rows])
    note(f"{service.full_name} at {server.target}; `lyceum call {server.name} RPC --describe` shows a request's fields")


def _describe(server: "Server", rpc: "Rpc", as_json: bool) -> None:
    from lyceum_cli.schema import fields_of

    fields = fields_of(server, rpc.descriptor.input_type)
    if as_json:
        emit({"rpc": rpc.path, "kind": rpc.kind, "request": rpc.descriptor.input_type.full_name, "fields": fields})
        return
    rows = [(field["path"], field["type"], _rules_text(field)) for field in fields]
    table(("field", "type", "rules"), rows, title=f"{rpc.name}: {rpc.descriptor.input_type.full_name}")


def _rules_text(field: dict[str, Any]) -> str:
    parts = [f"{name} {_rule_value(value)}" for name, value in field["rules"].items()]
    if field.get("oneof"):
        parts.append(f"one of {field['oneof']}")
    if field.get("values"):
        parts.append(
            "values "
            + ", ".join(itertools.islice(field["values"], 12))
            + (", ..." if len(field["values"]) > 12 else "")
        )
    return "; ".join(parts)


def _rule_value(value: Any) -> str:
    """A rule's value; 64-bit limits, which are strings in JSON, and whole floats read as plain integers."""
    if isinstance(value, str) and value.lstrip("-").isdigit():
        return value
    if isinstance(value, float):
        return f"{value:.15g}"
    return json.dumps(value, ensure_ascii=False)
