"""Which server a command talks to: `--target`, the variable `LYCEUM_<SERVICE>_TARGET`, or the table of services."""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from lyceum_cli.output import UsageError

if TYPE_CHECKING:
    import grpc

    from lyceum_cli.reflection import Server
    from lyceum_runtime.services import ServiceEntry

MAX_MESSAGE_BYTES = 128 * 2**20  # servers stop at 64 MiB, with a clearer error than the channel's
MAX_METADATA_BYTES = 64 * 2**10

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="HOST:PORT",
        help="Server to talk to instead of the one in the table of services.",
        show_default=False,
    ),
]


def complete_service(incomplete: str) -> list[str]:
    """Shell completion of a service's name."""
    from lyceum_runtime.services import load_services

    return [name for name in load_services() if name.startswith(incomplete)]


def entry_of(name: str) -> "ServiceEntry":
    """A service of the table.

    Raises:
        UsageError: no such service.
    """
    from lyceum_runtime.services import load_services

    services = load_services()
    if name not in services:
        close = difflib.get_close_matches(name, services, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(services)}"
        raise UsageError(f"there is no service {name}", hint)
    return services[name]


def address_of(entry: "ServiceEntry") -> str:
    """host:port of a service."""
    return os.environ.get(f"LYCEUM_{entry.name.upper()}_TARGET") or f"127.0.0.1:{entry.port}"


def open_channel(target: str) -> "grpc.Channel":
    """A plaintext channel with Lyceum's message limit."""
    import grpc

    limits = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
    return grpc.insecure_channel(target, options=[*limits, ("grpc.max_metadata_size", MAX_METADATA_BYTES)])


@contextmanager
def connect(name: str, target: str | None) -> Iterator["Server"]:
    """The server of the service `name`; with a `target`, `name` need not be in the table."""
    from lyceum_cli.reflection import Server

    address = target or address_of(entry_of(name))
    channel = open_channel(address)
    try:
        yield Server(channel, address, name, f"--target {target}" if target else f"--service {name}")
    finally:
        channel.close()
