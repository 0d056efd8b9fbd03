"""One process that serves one or more services: start, health, drain.

All hosted services are served on each one's own loopback port, with health, reflection, channelz, operations and
artifacts beside them. A method's package is imported by its first request, not at the start, so a server is healthy in
a moment and small while idle.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.longrunning import operations_pb2
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from lyceum_runtime import logs, telemetry, validation
from lyceum_runtime.compute import Lane, Stop
from lyceum_runtime.definition import Call, ServiceDefinition
from lyceum_runtime.errors import ConfigurationError
from lyceum_runtime.handlers import Host, generic_handler
from lyceum_runtime.parallel import end_workers
from lyceum_runtime.parent import end_with_parent
from lyceum_runtime.services import ServiceEntry, find_entry, load_definition, require_installed
from lyceum_runtime.settings import Settings, load_settings, require_writable

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""Python's thread switch interval. At its default of 5 ms, two busy Python threads delay a health answer by 100-200 ms;
so by 17.
"""

YOUNG_OBJECTS = 20_000
"""New objects between two garbage collections. A request makes hundreds that end with it, and at Python's default of
700 the collector takes a twentieth of a busy server's time.
"""

STOP_SECONDS = 2.0
"""How long work that was asked to stop may take before it is left behind."""

_launching = threading.Lock()  # held while a server's operations run; DBOS is one a process

_TRANSFERS = 128  # requests that only wait for storage or for other work; each has a thread while it is open
_DECODED = 2  # gRPC's own limit is this many times ours, so that a request somewhat too large gets a status that helps


class Server:
    """Serves `entries` as `settings` say.

    `definitions` gives the functions of services that no package has: toy services in tests.

    Raises:
        ConfigurationError: a package is missing, or the state directory cannot be written.
    """

    def __init__(
        self,
        settings: Settings,
        entries: Sequence[ServiceEntry],
        *,
        definitions: Mapping[str, ServiceDefinition] | None = None,
    ) -> None:
        self.settings = settings
        self.entries = {entry.name: entry for entry in entries}
        self.ports: dict[str, int] = {}
        """Port of each service by short name, once started."""
        self._definitions = dict(definitions or {})
        for name, definition in self._definitions.items():
            _check_definition(definition, self.entries[name].descriptor())
        self._loading = threading.Lock()
        self._running: set[Stop] = set()
        self._draining = False
        self._closing = contextlib.ExitStack()
        for entry in entries:
            if entry.name not in self._definitions:
                require_installed(entry)
        require_writable(settings)

    def definition(self, name: str) -> ServiceDefinition:
        """The functions of the service `name`; imports its package the first time."""
        if name not in self._definitions:
            with self._loading:
                if name not in self._definitions:
                    entry = self.entries[name]
                    definition = load_definition(entry)
                    _check_definition(definition, entry.descriptor())
                    self._definitions[name] = definition
        return self._definitions[name]

    async def start(self) -> None:
        """Binds the ports and opens the store; returns when requests are accepted and health says SERVING.

        Raises:
            ConfigurationError: a port is taken, stored state cannot be used, or an OTEL_ variable is wrong. Nothing is
                left running.
        """
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        try:
            telemetry.setup(self.settings, next(iter(self.entries)) if len(self.entries) == 1 else "lyceum")
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        self._closing.callback(telemetry.shutdown)
        self._work = Lane("work", workers=self.settings.max_workers, limit=self.settings.max_pending)
        self._closing.callback(self._work.close)
        self._transfers = Lane("transfer", workers=None, limit=_TRANSFERS)
        self._closing.callback(self._transfers.close)
        self._grpc = self._new_grpc_server()
        try:
            self._bind()
            await asyncio.to_thread(self._open_storage)
            names = self._add_handlers()
            self._health = health.aio.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME, health.SERVICE_NAME), self._grpc)
            channelz.add_channelz_servicer(self._grpc)
            for name in ("", *names):
                await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
            await self._grpc.start()
            # Health answers meanwhile; a request that starts an operation waits for it.
            await asyncio.to_thread(self._launch)
        except BaseException:
            await self._grpc.stop(None)
            await asyncio.to_thread(self._closing.close)
            raise
        logger.info("serving %s", ", ".join(f"{name} at {self.address(name)}" for name in self.entries))

    def address(self, name: str) -> str:
        """host:port of the service `name`, once started."""
        return f"{_bracketed(self.settings.host)}:{self.ports[name]}"

    def _new_grpc_server(self) -> grpc.aio.Server:
        hard_limit = _DECODED * self.settings.max_message_bytes
        return grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a share of its requests
                ("grpc.max_receive_message_length", hard_limit),
                ("grpc.max_send_message_length", hard_limit),
                ("grpc.enable_channelz", 1),
            ],
        )

    def _bind(self) -> None:
        """All services answer on every port. LYCEUM_PORT replaces the services' own ports by one."""
        host = _bracketed(self.settings.host)
        bound: dict[int, int] = {}
        for name, entry in self.entries.items():
            asked = entry.port if self.settings.port is None else self.settings.port
            if asked not in bound:
                try:
                    _probe(self.settings.host, asked)
                    bound[asked] = self._grpc.add_insecure_port(f"{host}:{asked}")
                except (OSError, RuntimeError):
                    raise ConfigurationError(
                        f"port {asked} of service {name!r} on {self.settings.host} is taken; "
                        "stop the process that has it or set LYCEUM_PORT to another (0 takes a free one)"
                    ) from None
            self.ports[name] = bound[asked]

    def _open_storage(self) -> None:
        # SQLAlchemy and DBOS take a good part of the start; a client of this module does not need them.
        from lyceum_runtime.artifacts import ArtifactStore
        from lyceum_runtime.database import Database
        from lyceum_runtime.operations import OperationsEngine
        from lyceum_runtime.resources import ResourceStore

        database = Database(self.settings.database_url)
        self._closing.callback(database.close)
        self._artifacts = ArtifactStore(self.settings, database)
        self._resources = ResourceStore(database)
        self._engine = OperationsEngine(self.settings, database, self._artifacts, self.definition)

    def _launch(self) -> None:
        names = [name for name in self.entries if self._has_operations(name)]
        if not names:
            return
        if not _launching.acquire(blocking=False):
            raise ConfigurationError("a process runs operations for one server; serve all its services together")
        self._closing.callback(_launching.release)
        self._closing.callback(self._engine.close)
        self._engine.launch(names)

    def _has_operations(self, name: str) -> bool:
        if name in self._definitions:
            return bool(self._definitions[name].long_methods)
        methods = self.entries[name].descriptor().methods
        return any(method.output_type.full_name == "google.longrunning.Operation" for method in methods)

    def _add_handlers(self) -> list[str]:
        """Adds every service's handlers; returns their full names."""
        from lyceum_runtime.artifacts import artifacts_definition
        from lyceum_runtime.operations import operations_definitions

        own = [artifacts_definition(), *operations_definitions(self._engine)]
        hosts = [self._host(name, self._work) for name in self.entries]
        services = [entry.descriptor() for entry in self.entries.values()]
        for definition in own:
            self._definitions[definition.name] = definition
            hosts.append(self._host(definition.name, self._transfers))
            services.append(descriptor_pool.Default().FindServiceByName(definition.service))
        self._grpc.add_generic_rpc_handlers([telemetry.traced(generic_handler(*pair)) for pair in zip(services, hosts)])
        requests = [method.input_type for service in services for method in service.methods]
        threading.Thread(target=validation.compile_rules, args=(requests,), name="lyceum-rules", daemon=True).start()
        return [service.full_name for service in services]

    def _host(self, name: str, lane: Lane) -> Host:
        resources = functools.cache(functools.partial(self._resources.of, name))
        artifacts = functools.cache(self._artifacts.of)

        def call(tenant: str, should_stop: Callable[[], bool]) -> Call:
            return Call(
                service=name,
                tenant=tenant,
                resources=resources(tenant),
                artifacts=artifacts(tenant),
                should_stop=should_stop,
                on_progress=_annotate,
            )

        def start_operation(rpc: str, request: Any, tenant: str) -> operations_pb2.Operation:
            request_id = getattr(request, "request_id", "")
            return self._engine.start(name, rpc, request, tenant, request_id, telemetry.carrier())

        return Host(
            name=name,
            lane=lane,
            load=lambda: self.definition(name),
            call=call,
            start_operation=start_operation,
            wait_operation=self._engine.wait,
            max_message_bytes=self.settings.max_message_bytes,
            running=self._running,
            draining=lambda: self._draining,
        )

    async def serve_forever(self) -> None:
        """Starts, serves until SIGTERM or SIGINT, and drains."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        await self.start()
        await stopping.wait()
        await self.stop()

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drains and ends: new requests get UNAVAILABLE, running ones `drain_seconds` (default: the setting),
        operations are parked.
        """
        if self._draining:
            return
        seconds = self.settings.drain_seconds if drain_seconds is None else drain_seconds
        logger.info("stopping: %d requests have up to %g s", len(self._running), seconds)
        self._draining = True
        await self._health.enter_graceful_shutdown()
        for stop in [stop for stop in self._running if stop.waiter]:
            stop.set()  # who only waits for an operation can wait again elsewhere
        parked = asyncio.ensure_future(asyncio.to_thread(self._engine.drain, seconds))
        await self._quiet(seconds)
        for stop in list(self._running):
            stop.set()
        await self._quiet(STOP_SECONDS)
        await parked
        await self._grpc.stop(0.25)
        await asyncio.to_thread(self._closing.close)

    async def _quiet(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            await asyncio.sleep(0.01)

    @property
    def abandoned(self) -> int:
        """Requests whose thread still computes although it was asked to stop."""
        return self._work.pending + self._transfers.pending


def _probe(host: str, port: int) -> None:
    """Raises OSError if the port is taken. gRPC finds that too, but prints lines of its own about it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that a stopped server just left is free
        probe.bind((host, port))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _annotate(stage: str, completed: int, total: int, metrics: Mapping[str, float]) -> None:
    telemetry.annotate(stage=stage, completed=completed, total=total)


def _check_definition(definition: ServiceDefinition, service: ServiceDescriptor) -> None:
    """A definition that names an RPC that its proto lacks, or another service, is a mistake in the method's package."""
    if definition.service != service.full_name:
        raise ValueError(f"the definition of {service.full_name} is for {definition.service}")
    unknown = {*definition.methods, *definition.long_methods} - {method.name for method in service.methods}
    if unknown:
        raise ValueError(f"{service.full_name} has no RPC {', '.join(sorted(unknown))}")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a server: libuv's, on which a busy server answers a quarter more requests than on asyncio's."""
    import uvloop

    return uvloop.new_event_loop()


def main(services: Iterable[str | ServiceEntry]) -> NoReturn:
    """Serves `services` until SIGTERM: what a method's `__main__.py` calls. Exits 0 after a drain, 2 with one line if
    it cannot start.
    """
    end_with_parent(signal.SIGTERM)
    try:
        settings = load_settings()
        logs.setup_logging(settings)
        # Read when torch or a BLAS is first imported, which is later.
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.torch_threads))
        entries = [find_entry(service) if isinstance(service, str) else service for service in services]
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(Server(settings, entries).serve_forever())
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    end_process(0)


def end_process(code: int) -> NoReturn:
    """Exits with `code` and ends worker processes, also if a request or an operation left a thread behind that computes
    without polling.

    The interpreter would wait for such a thread.
    """
    end_workers()
    end = time.monotonic() + 0.5
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in others:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
