"""`lyceum bench runtime`: what the chassis costs beside a bare grpc.aio server, and whether it stays small and quick.

Both servers run the same function behind the same RPC, `lyceum.testing.v1.EchoService/Echo`, and take turns within each
round, so that other work on the machine falls on both. Each server has a process of its own, and the clients too. The
bare server is what `asyncio.run` and `grpc.aio.server` give; a second one has the chassis's event loop, to show what of
the difference that loop makes. What the chassis adds is admission, tracing, validation, and for a synchronous function
a worker thread. 1,000 numbers travel each way: as a Tensor, which is how methods carry them and whose bytes are not
looked at, and as a repeated field with a rule for each number, the most that validation can cost.
"""

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lyceum.common.v1 import common_pb2
from lyceum.testing.v1 import testing_pb2, testing_pb2_grpc
from lyceum_runtime.bench_report import Row, report, save, show
from lyceum_runtime.server import Server, new_event_loop
from lyceum_runtime.services import load_services
from lyceum_runtime.settings import load_settings
from lyceum_runtime.testing_service import ENTRY, service

SEED = 0
NUMBERS = 1000
CLIENTS = 64
PACKAGES = ("grpcio", "protobuf", "protovalidate", "opentelemetry-sdk", "dbos")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int = 7
    latency_calls: int = 300
    throughput_seconds: float = 1.5
    starts: int = 5
    health_checks: int = 500


QUICK = Sizes(rounds=2, latency_calls=30, throughput_seconds=0.3, starts=1, health_checks=50)


def run(case: str | None, quick: bool, out_dir: Path) -> dict[str, Any]:
    """Measure `case` (None: all of :data:`CASES`), print the table, write `out_dir`/results.json and return its
    content.

    Raises:
        ValueError: no such case.
    """
    if case is not None and case not in CASES:
        raise ValueError(f"no case {case!r}; there are {', '.join(CASES)}")
    sizes = QUICK if quick else Sizes()
    rows = [row for name, measure in CASES.items() if case in (None, name) for row in measure(sizes)]
    amounts = {"numbers": NUMBERS, "clients": CLIENTS, **vars(sizes)}
    results = report("runtime", rows, seed=SEED, quick=quick, sizes=amounts, packages=PACKAGES)
    show(results)
    save(results, out_dir)
    return results


def echo(sizes: Sizes) -> list[Row]:
    """Latency and throughput of the chassis over a bare server's, for a synchronous and an asynchronous function."""
    with contextlib.ExitStack() as stack:
        targets = {kind: stack.enter_context(_echo_server(kind)) for kind in (*_BARE, "sync", "async")}
        rounds = {name: asyncio.run(_rounds(targets, data, sizes)) for name, data in _requests().items()}
    return [
        row
        for name in rounds
        for kind in ("sync", "async")
        for row in _ratios(f"echo {name}, {kind}", kind, rounds[name])
    ]


_BARE: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "bare": asyncio.new_event_loop,
    "bare uvloop": new_event_loop,
}


def _requests() -> dict[str, bytes]:
    numbers = [Random(SEED).random() for _ in range(NUMBERS)]
    tensor = common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT64, shape=[NUMBERS], data=array("d", numbers).tobytes())
    requests = {"tensor": testing_pb2.EchoRequest(tensor=tensor), "checked": testing_pb2.EchoRequest(values=numbers)}
    return {name: request.SerializeToString() for name, request in requests.items()}


def _ratios(case: str, kind: str, rounds: "list[Measured]") -> list[Row]:
    def row(clients: int, index: int, measured: str, target: str, show: Callable[[float], str]) -> Row:
        def median(of: str) -> float:
            return statistics.median(r[of, clients][index] for r in rounds)

        def ratio(of: str) -> float:
            return statistics.median(r[kind, clients][index] / r[of, clients][index] for r in rounds)

        context = f"{show(median(kind))}, bare {show(median('bare'))}; {ratio('bare uvloop'):.2f}x of bare with uvloop"
        return Row(case, measured, ratio("bare"), target=target, context=context)

    def milliseconds(seconds: float) -> str:
        return f"{1000 * seconds:.2f} ms"

    return [
        row(1, 0, "median latency, 1 client", "<= 1.6", milliseconds),
        row(CLIENTS, 0, f"median latency, {CLIENTS} clients", "<= 1.6", milliseconds),
        row(CLIENTS, 1, f"throughput, {CLIENTS} clients", ">= 0.6", lambda rate: f"{rate:.0f}/s"),
    ]


Measured = Mapping[tuple[str, int], tuple[float, float]]
"""(server, clients) -> (median latency in seconds, calls per second)."""


async def _rounds(targets: Mapping[str, str], request: bytes, sizes: Sizes) -> list[Measured]:
    async with contextlib.AsyncExitStack() as stack:
        calls: dict[str, Callable[[bytes], Any]] = {}
        for kind, target in targets.items():
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
            call: Any = channel.unary_unary(f"/{ENTRY.service}/Echo")  # on bytes: the client's own cost stays out
            calls[kind] = call
        for call in calls.values():  # connections, lazy imports, compiled rules
            await asyncio.gather(*(call(request) for _ in range(CLIENTS)))
            for _ in range(20):
                await call(request)
        rounds: list[Measured] = []
        for _ in range(sizes.rounds):
            measured: dict[tuple[str, int], tuple[float, float]] = {}
            for clients in (1, CLIENTS):
                for kind, call in calls.items():
                    measured[kind, clients] = await _load(call, request, clients, sizes)
            rounds.append(measured)
        return rounds


async def _load(call: Callable[[bytes], Any], request: bytes, clients: int, sizes: Sizes) -> tuple[float, float]:
    """(median latency, calls per second) of `clients` callers who each send the next request after their answer."""
    latencies: list[float] = []
    started = time.perf_counter()

    def over() -> bool:
        if clients == 1:
            return len(latencies) >= sizes.latency_calls
        return time.perf_counter() - started >= sizes.throughput_seconds

    async def caller() -> None:
        while not over():
            sent = time.perf_counter()
            await call(request)
            latencies.append(time.perf_counter() - sent)

    await asyncio.gather(*(caller() for _ in range(clients)))
    return statistics.median(latencies), len(latencies) / (time.perf_counter() - started)


def start(sizes: Sizes) -> list[Row]:
    """Time from starting a service's process to its first healthy answer, and the memory it has while idle."""
    installed = [entry for entry in load_services().values() if find_spec(entry.package)]
    rows = []
    for entry in (ENTRY, *installed):
        seconds, mebibytes = [], []
        for _ in range(sizes.starts):
            started = time.perf_counter()
            with _process("-m", entry.package) as (process, target), grpc.insecure_channel(target) as channel:
                while not _healthy(channel, entry.service):
                    if process.poll() is not None:
                        raise RuntimeError(f"{entry.name} ended with exit code {process.returncode} at its start")
                    time.sleep(0.01)
                seconds.append(time.perf_counter() - started)
                time.sleep(1.0)  # background work of the start is over
                mebibytes.append(_resident_mebibytes(process.pid))
        context = f"{sizes.starts} starts, worst {max(seconds):.2f} s"
        rows += [
            Row(f"start {entry.name}", "process start to healthy", statistics.median(seconds), "s", "<= 3", context),
            Row(f"start {entry.name}", "resident memory, idle", max(mebibytes), "MiB", "<= 120"),
        ]
    return rows


def health(sizes: Sizes) -> list[Row]:
    """How soon health answers while two methods compute in pure Python on the server's threads."""
    with _echo_server("sync") as target, grpc.insecure_channel(target) as channel:
        stub: Any = testing_pb2_grpc.EchoServiceStub(channel)
        busy = [stub.Spin(testing_pb2.SpinRequest(count=10**6, period_seconds=0.5)) for _ in range(2)]
        for stream in busy:
            next(stream)
        latencies = []
        for _ in range(sizes.health_checks):
            sent = time.perf_counter()
            if not _healthy(channel, ENTRY.service):
                raise RuntimeError("the server was not healthy under load")
            latencies.append(1000 * (time.perf_counter() - sent))
            time.sleep(0.005)
        for stream in busy:
            stream.cancel()
    p99 = statistics.quantiles(latencies, n=100, method="inclusive")[98]
    context = f"median {statistics.median(latencies):.1f} ms, worst {max(latencies):.1f} ms"
    return [Row("health", "p99 beside 2 Python-bound threads", p99, "ms", "<= 100", context)]


CASES: Mapping[str, Callable[[Sizes], list[Row]]] = {"echo": echo, "start": start, "health": health}


def _healthy(channel: grpc.Channel, name: str) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        response = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _resident_mebibytes(pid: int) -> float:
    kibibytes = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True, text=True).stdout
    return int(kibibytes) / 1024


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A Python process that will serve on the given free port, with state of its own, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="lyceum-bench-", ignore_cleanup_errors=True) as state_dir:
        environment = os.environ | {
            "LYCEUM_STATE_DIR": state_dir,
            "LYCEUM_PORT": str(port),
            "LYCEUM_MAX_PENDING": str(2 * CLIENTS),
            "LYCEUM_LOG_LEVEL": "WARNING",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        process = subprocess.Popen([sys.executable, *arguments], env=environment)
        try:
            yield process, f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _echo_server(kind: str) -> Iterator[str]:
    with _process("-m", "lyceum_runtime.bench", kind) as (_, target), grpc.insecure_channel(target) as channel:
        grpc.channel_ready_future(channel).result(60)
        yield target


def _echo(request: testing_pb2.EchoRequest) -> testing_pb2.EchoResponse:
    tensor = request.tensor if request.HasField("tensor") else None
    return testing_pb2.EchoResponse(values=request.values, tensor=tensor)


async def _echo_on_loop(request: testing_pb2.EchoRequest, _: Any) -> testing_pb2.EchoResponse:
    return _echo(request)


async def _serve(kind: str) -> None:
    settings = load_settings()
    if kind in _BARE:
        behaviour: Any = _echo_on_loop
        handler = grpc.unary_unary_rpc_method_handler(
            behaviour, testing_pb2.EchoRequest.FromString, testing_pb2.EchoResponse.SerializeToString
        )
        bare = grpc.aio.server()
        bare.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(ENTRY.service, {"Echo": handler})])
        bare.add_insecure_port(f"127.0.0.1:{settings.port}")
        await bare.start()
        await bare.wait_for_termination()
    definition = service.definition()
    functions: dict[str, Callable[..., Any]] = {"sync": lambda request, call: _echo(request), "async": _echo_on_loop}
    definition = replace(definition, methods={**definition.methods, "Echo": functions[kind]})
    await Server(settings, [ENTRY], definitions={ENTRY.name: definition}).serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_BARE.get(sys.argv[1], new_event_loop)) as runner:
        runner.run(_serve(sys.argv[1]))
