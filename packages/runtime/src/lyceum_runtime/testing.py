"""Services inside this process, for tests and notebooks: a real server on a free port, with its own state.

    from lyceum_runtime import testing

    with testing.serve("apex") as served:
        served.client.stub.GetLibrary(...)

All servers of a process share one event loop on a thread of its own, so `serve` works beside a notebook's loop and in
plain code.
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from lyceum_runtime.client import Client
from lyceum_runtime.definition import ServiceDefinition
from lyceum_runtime.server import Server, new_event_loop
from lyceum_runtime.services import ServiceEntry, find_entry
from lyceum_runtime.settings import Settings, load_settings

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """A running server and the way to it."""

    server: Server
    client: Client
    """Client of the first service; its channel reaches all."""

    @property
    def settings(self) -> Settings:
        """The server's settings, its temporary state directory among them."""
        return self.server.settings

    @property
    def target(self) -> str:
        """Address, host:port."""
        return self.client.target

    def connect(self, name: str, *, timeout: float | None = None) -> Client:
        """A client of the hosted service `name`; close it after use."""
        return Client(self.server.entries[name], target=self.target, timeout=timeout)

    def stop(self, drain_seconds: float | None = None) -> None:
        """Drains as SIGTERM does; `serve` does it at its end if it was not done."""
        on_loop(self.server.stop(drain_seconds))


@contextlib.contextmanager
def serve(*services: str | ServiceEntry | ServiceDefinition, **settings: Any) -> Iterator[Served]:
    """Serves `services`: short names, entries, or definitions of toy services whose stubs are imported.

    `settings` are fields of :class:`~lyceum_runtime.settings.Settings`; unless given, the port is free, the state
    directory temporary, and the drain 2 s. Where a name occurs twice, the last one counts.

    Raises:
        ConfigurationError: as a server's start does.
    """
    with contextlib.ExitStack() as stack:
        if "state_dir" not in settings:
            folder = tempfile.TemporaryDirectory(prefix="lyceum-", ignore_cleanup_errors=True)
            settings["state_dir"] = stack.enter_context(folder)
        chosen = load_settings(**{"port": 0, "drain_seconds": 2.0, **settings})
        entries, definitions = [], {}
        for service in services:
            if isinstance(service, ServiceDefinition):
                definitions[service.name] = service
                service = ServiceEntry(service.name, "", service.service, port=0, cpus=1, memory_gib=1)
            entries.append(find_entry(service) if isinstance(service, str) else service)
        server = Server(chosen, entries, definitions=definitions)
        on_loop(server.start())
        stack.callback(lambda: on_loop(server.stop()))
        entry = next(iter(server.entries.values()))
        client = Client(entry, target=server.address(entry.name))
        stack.callback(client.close)
        yield Served(server, client)


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on the servers' event loop and returns what it returns."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    # One for all servers: grpc.aio does not bear event loops on several threads well.
    loop = new_event_loop()
    threading.Thread(target=loop.run_forever, name="lyceum-servers", daemon=True).start()
    return loop
