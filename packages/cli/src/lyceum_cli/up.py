"""`lyceum up`: the services of this machine, in one process or in a process each.

In one process (the default) a method's package is imported by its first request, so all services together start in a
moment. With `--isolated` each service is a child process that is started again when it dies, later after each death,
until it has died `MAX_QUICK_DEATHS` times soon after its start.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from lyceum_cli.connection import complete_service, entry_of
from lyceum_cli.output import FAILED, Json, UsageError, emit, note, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lyceum_runtime.services import ServiceEntry

MAX_QUICK_DEATHS = 5
QUICK_SECONDS = 10.0
FIRST_DELAY_SECONDS = 0.5
LAST_DELAY_SECONDS = 30.0
KILL_SECONDS = 10.0
"""How long after its drain time a child may still take before it is killed."""
_POLL_SECONDS = 0.2


def up(
    services: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SERVICE]...", help="Services to start. Default: all.", autocompletion=complete_service
        ),
    ] = None,
    isolated: Annotated[bool, typer.Option("--isolated", help="A process each, started again when it dies.")] = False,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="Port instead of the table's; 0 takes a free one. With --isolated, the first of consecutive ports.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start services and print where they are; Ctrl-C or SIGTERM lets running requests finish and stops them."""
    from lyceum_runtime.parent import end_with_parent
    from lyceum_runtime.services import load_services, require_installed
    from lyceum_runtime.settings import load_settings

    end_with_parent(signal.SIGTERM)
    entries = [entry_of(name) for name in dict.fromkeys(services)] if services else list(load_services().values())
    for entry in entries:
        require_installed(entry)
    if isolated:
        first = load_settings().port if port is None else port
        code = asyncio.run(_Supervisor(_ports(entries, first), as_json).run())
        if code:
            raise typer.Exit(code)
    else:
        _serve(entries, port, as_json)


def _serve(entries: "list[ServiceEntry]", port: int | None, as_json: bool) -> NoReturn:
    """All services in this process, which then ends."""
    from lyceum_runtime import logs
    from lyceum_runtime.server import Server, end_process, new_event_loop
    from lyceum_runtime.settings import load_settings

    settings = load_settings() if port is None else load_settings(port=port)
    logs.setup_logging(settings)
    # Read when torch or a BLAS is first imported, which is later.
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.torch_threads))
    server = Server(settings, entries)

    async def run() -> None:
        stopping = _stop_signal()
        await server.start()
        _announce({entry.name: server.address(entry.name) for entry in entries}, as_json)
        await stopping.wait()
        note("stopping; running requests may finish")
        await server.stop()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())
    sys.stderr.flush()
    end_process(0)


def _announce(places: "Mapping[str, str]", as_json: bool) -> None:
    if as_json:
        emit({"services": [{"service": name, "address": address} for name, address in places.items()]})
        return
    table(("service", "address"), list(places.items()))
    note(f"ready; try `lyceum call {next(iter(places))}`, stop with Ctrl-C")


def _stop_signal() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def _ports(entries: "list[ServiceEntry]", first: int | None) -> "list[tuple[ServiceEntry, int]]":
    """The port of each child."""
    if first is None:
        return [(entry, entry.port) for entry in entries]
    if first == 0:
        return [(entry, free_port()) for entry in entries]
    if first + len(entries) - 1 > 65535:
        raise UsageError(f"--port {first} leaves no room for {len(entries)} services", "give a lower one")
    return [(entry, first + index) for index, entry in enumerate(entries)]


def free_port() -> int:
    """A port of loopback that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Supervisor:
    """A child process for each service."""

    def __init__(self, children: "list[tuple[ServiceEntry, int]]", as_json: bool) -> None:
        self._children = children
        self._as_json = as_json

    async def run(self) -> int:
        """Runs until a signal, or until every service has been given up; 1 if one was."""
        from lyceum_runtime.settings import load_settings

        settings = load_settings()
        self._drain_seconds = settings.drain_seconds
        stopping = _stop_signal()
        tasks = [asyncio.create_task(self._keep(entry, port, stopping)) for entry, port in self._children]
        ready = asyncio.create_task(self._announce_when_ready(settings.host))
        results = await asyncio.gather(*tasks)
        ready.cancel()
        return 0 if all(results) else FAILED

    async def _announce_when_ready(self, host: str) -> None:
        from lyceum_cli.health import SERVING, check

        places = {entry.name: f"{host}:{port}" for entry, port in self._children}
        waiting = [(entry, places[entry.name]) for entry, _ in self._children]
        while waiting:
            rows = await asyncio.to_thread(check, waiting, timeout=1.0)
            waiting = [place for place, row in zip(waiting, rows) if row.health != SERVING]
            await asyncio.sleep(_POLL_SECONDS)
        _announce(places, self._as_json)

    async def _keep(self, entry: "ServiceEntry", port: int, stopping: asyncio.Event) -> bool:
        """Keeps one child running; False if it was given up."""
        from lyceum_runtime.parent import named_parent

        environment = {**os.environ, **named_parent(), "LYCEUM_PORT": str(port)}
        quick_deaths = 0
        while not stopping.is_set():
            began = time.monotonic()
            # A session of its own: Ctrl-C reaches this process only, which then drains the children in order.
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                entry.package,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                await _first(asyncio.create_task(child.wait()), asyncio.create_task(stopping.wait()))
            except asyncio.CancelledError:
                child.terminate()  # this process ends of itself, as when its output is closed
                raise
            if stopping.is_set():
                await self._end(child)
                return True
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < QUICK_SECONDS else 1
            if quick_deaths >= MAX_QUICK_DEATHS:
                problem = (
                    f"{entry.name} died {quick_deaths} times soon after its start ({_ending(child)}) and is given up"
                )
                note(f"error: {problem}; its last lines above say why, or run `python -m {entry.package}`", style="red")
                return False
            delay = min(FIRST_DELAY_SECONDS * 2 ** (quick_deaths - 1), LAST_DELAY_SECONDS)
            note(f"{entry.name} died ({_ending(child)}); starting it again in {delay:g} s", style="yellow")
            await _first(asyncio.create_task(asyncio.sleep(delay)), asyncio.create_task(stopping.wait()))
        return True

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        if child.returncode is None:
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), self._drain_seconds + KILL_SECONDS)
        except TimeoutError:
            child.kill()
            await child.wait()


async def _first(*tasks: "asyncio.Task[object]") -> None:
    """Waits for the first of the tasks and cancels the others."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _ending(child: asyncio.subprocess.Process) -> str:
    code = child.returncode or 0
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
