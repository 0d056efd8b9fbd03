"""Spans over real gRPC, their export, and what must not happen when the collector is dead."""

import asyncio
import logging
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from lyceum_runtime import telemetry
from lyceum_runtime.settings import Settings
from lyceum_runtime.spans import Span, SpanStore

METHOD = "test.Kinds"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(variable, raising=False)
    yield Settings(state_dir=tmp_path)
    telemetry.shutdown()


@pytest.fixture
def store(settings: Settings) -> SpanStore:
    telemetry.setup(settings, "test")
    return SpanStore(settings.state_dir / "spans.db")


class Kinds:
    """One RPC of each kind on bytes; the request says what to do."""

    async def unary(self, request: bytes, context: Any) -> bytes:
        if request == b"sleep":
            await asyncio.sleep(5)
        if request == b"abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "secret text")
        if request == b"raise":
            raise RuntimeError("secret text")
        with telemetry.span("work"):
            return telemetry.carrier()["traceparent"].encode()

    async def server_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000
            if request == b"sleep":
                await asyncio.sleep(0.01)

    async def client_stream(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    def handler(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "ServerStream": grpc.unary_stream_rpc_method_handler(self.server_stream),
            "ClientStream": grpc.stream_unary_rpc_method_handler(self.client_stream),
            "Both": grpc.stream_stream_rpc_method_handler(self.both),
        }
        return grpc.method_handlers_generic_handler(METHOD, handlers)


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([telemetry.traced(Kinds().handler())])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def channel(target: str) -> Any:
    return grpc.aio.insecure_channel(target, interceptors=telemetry.aio_client_interceptors())


async def ended(store: SpanStore, count: int) -> list[Span]:
    """The spans of the one trace in the store, once there are `count`."""
    for _ in range(60):
        await asyncio.sleep(0.05)
        telemetry.flush()
        roots = store.recent(10)
        spans = store.trace(roots[0].trace_id) if roots else []
        if len(spans) >= count:
            assert len(roots) == 1
            assert store.missing_parents(spans[0].trace_id) == []
            return spans
    raise AssertionError(f"{len(spans)} of {count} spans after 3 s: {spans}")


def named(spans: list[Span], name: str) -> Span:
    (span,) = [span for span in spans if span.name == name]
    return span


def sides(spans: list[Span]) -> tuple[Span, Span]:
    """The client's and the server's span of the trace's only RPC."""
    client, server = [span for span in spans if span.name.startswith(METHOD)]
    assert server.parent_id == client.span_id
    return client, server


def code(span: Span) -> object:
    return span.attributes["rpc.response.status_code"]


async def test_unary_call_is_client_span_server_span_and_its_work(store: SpanStore) -> None:
    async with serving() as target, channel(target) as ch:
        traceparent = await ch.unary_unary(f"/{METHOD}/Unary")(b"")
    spans = await ended(store, 3)
    client, server = sides(spans)
    work = named(spans, "work")
    assert client.parent_id is None
    assert work.parent_id == server.span_id
    assert traceparent.decode().split("-")[1:3] == [work.trace_id, work.span_id]
    for span in (client, server):
        assert span.attributes == {
            "rpc.system.name": "grpc",
            "rpc.method": f"{METHOD}/Unary",
            "rpc.response.status_code": "OK",
        }
        assert span.status == "UNSET"
        assert span.service == "test"


@pytest.mark.parametrize(
    ("request_", "expected", "server_status"), [(b"abort", "NOT_FOUND", "UNSET"), (b"raise", "UNKNOWN", "ERROR")]
)
async def test_failed_call_has_its_code_and_none_of_its_text(
    store: SpanStore, request_: bytes, expected: str, server_status: str
) -> None:
    async with serving() as target, channel(target) as ch:
        with pytest.raises(grpc.aio.AioRpcError):
            await ch.unary_unary(f"/{METHOD}/Unary")(request_)
    client, server = sides(await ended(store, 2))
    assert (code(client), code(server)) == (expected, expected)
    assert (client.status, server.status) == ("ERROR", server_status)
    assert b"secret" not in b"".join(path.read_bytes() for path in store.path.parent.glob("spans.db*"))


async def test_cancelled_unary_call_ends_both_spans_as_cancelled(store: SpanStore) -> None:
    async with serving() as target, channel(target) as ch:
        call = ch.unary_unary(f"/{METHOD}/Unary")(b"sleep")
        await asyncio.sleep(0.1)
        call.cancel()
        spans = await ended(store, 2)
    assert [(code(span), span.status) for span in sides(spans)] == [("CANCELLED", "ERROR")] * 2


async def test_late_unary_call_ends_both_spans_as_deadline_exceeded(store: SpanStore) -> None:
    async with serving() as target, channel(target) as ch:
        with pytest.raises(grpc.aio.AioRpcError):
            await ch.unary_unary(f"/{METHOD}/Unary")(b"sleep", timeout=0.1)
        spans = await ended(store, 2)
    assert [(code(span), span.status) for span in sides(spans)] == [("DEADLINE_EXCEEDED", "ERROR")] * 2


@pytest.mark.parametrize("request_", [b"sleep", b"flood"])  # left while the server computes, and while it waits to send
async def test_cancelled_stream_ends_both_spans_as_cancelled(store: SpanStore, request_: bytes) -> None:
    async with serving() as target, channel(target) as ch:
        call = ch.unary_stream(f"/{METHOD}/ServerStream")(request_)
        async for _ in call:
            break
        await asyncio.sleep(0.1)
        call.cancel()
        spans = await ended(store, 2)
    assert [(code(span), span.status) for span in sides(spans)] == [("CANCELLED", "ERROR")] * 2


async def test_late_stream_ends_both_spans_as_deadline_exceeded(store: SpanStore) -> None:
    async with serving() as target, channel(target) as ch:
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in ch.unary_stream(f"/{METHOD}/ServerStream")(b"sleep", timeout=0.2):
                pass
        spans = await ended(store, 2)
    assert [(code(span), span.status) for span in sides(spans)] == [("DEADLINE_EXCEEDED", "ERROR")] * 2


async def test_streams_of_requests_are_traced(store: SpanStore) -> None:
    async def requests() -> AsyncIterator[bytes]:
        for part in (b"a", b"b"):
            yield part

    async with serving() as target, channel(target) as ch:
        with telemetry.span("caller"):
            assert await ch.stream_unary(f"/{METHOD}/ClientStream")(requests()) == b"ab"
            assert [part async for part in ch.stream_stream(f"/{METHOD}/Both")(requests())] == [b"a", b"b"]
    spans = await ended(store, 5)
    caller = named(spans, "caller")
    assert [span.name for span in spans if span.parent_id == caller.span_id] == [
        f"{METHOD}/ClientStream",
        f"{METHOD}/Both",
    ]
    assert {code(span) for span in spans if span is not caller} == {"OK"}


async def test_blocking_client_ends_its_spans(store: SpanStore) -> None:
    def call(target: str) -> None:
        with (
            grpc.insecure_channel(target) as plain,
            telemetry.span("caller"),
        ):
            ch: Any = grpc.intercept_channel(plain, *telemetry.client_interceptors())
            ch.unary_unary(f"/{METHOD}/Unary")(b"", timeout=5)
            with pytest.raises(grpc.RpcError):
                ch.unary_unary(f"/{METHOD}/Unary")(b"sleep", timeout=0.1)
            stream = ch.unary_stream(f"/{METHOD}/ServerStream")(b"sleep")
            next(stream)
            stream.cancel()

    async with serving() as target:
        await asyncio.to_thread(call, target)
        spans = await ended(store, 8)
    children = [span for span in spans if span.parent_id == named(spans, "caller").span_id]
    assert [code(span) for span in children] == ["OK", "DEADLINE_EXCEEDED", "CANCELLED"]
    servers = [span for child in children for span in spans if span.parent_id == child.span_id]
    assert [code(span) for span in servers] == ["OK", "DEADLINE_EXCEEDED", "CANCELLED"]


async def test_health_and_reflection_are_not_traced(store: SpanStore) -> None:
    async with serving() as target, channel(target) as ch:
        with pytest.raises(grpc.aio.AioRpcError):
            await ch.unary_unary("/grpc.health.v1.Health/Check")(b"")
        await ch.unary_unary(f"/{METHOD}/Unary")(b"")
    assert not [span for span in await ended(store, 3) if "health" in span.name]


def test_attributes_are_numbers_or_names_and_errors_have_no_text(store: SpanStore) -> None:
    def work() -> None:
        with telemetry.span("outer", n=3, ratio=0.5, service="apex", prompt="tell", model="two words"):
            telemetry.annotate(hits=7, path="/home/me")
            with telemetry.stage("encode"):
                raise ValueError("secret text")

    with pytest.raises(ValueError):
        work()
    telemetry.flush()
    (root,) = store.recent()
    outer, encode = store.trace(root.trace_id)
    assert outer.attributes == {"n": 3, "ratio": 0.5, "service": "apex", "hits": 7, "error.type": "ValueError"}
    assert encode.attributes == {"stage": "encode", "error.type": "ValueError"}
    assert outer.status == encode.status == "ERROR"
    assert b"secret" not in b"".join(path.read_bytes() for path in store.path.parent.glob("spans.db*"))


def test_carrier_continues_the_trace_in_another_thread(store: SpanStore) -> None:
    def work(carried: dict[str, str]) -> None:
        with telemetry.attached(carried), telemetry.span("elsewhere"):
            pass

    with telemetry.span("here"):
        thread = threading.Thread(target=work, args=[telemetry.carrier()])
        thread.start()
        thread.join()
    telemetry.flush()
    here, elsewhere = store.trace(store.recent()[0].trace_id)
    assert elsewhere.parent_id == here.span_id
    assert telemetry.carrier() == {}


def test_protocol_other_than_grpc_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ValueError, match="only 'grpc'"):
        telemetry.setup(settings, "test")


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """A real OTLP receiver."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.metrics: dict[str, Any] = {}

    def Export(self, request: Any, context: Any) -> Any:
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for group in request.resource_spans:
                self.services |= {a.value.string_value for a in group.resource.attributes if a.key == "service.name"}
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
            return trace_service_pb2.ExportTraceServiceResponse()
        for group in request.resource_metrics:
            self.metrics |= {metric.name: metric for scope in group.scope_metrics for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def collector(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    receiver = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    telemetry.setup(settings, "test")
    yield receiver
    telemetry.shutdown()
    server.stop(None)


async def test_collector_receives_spans_and_metrics_and_no_file_is_written(
    collector: Collector, settings: Settings
) -> None:
    telemetry.observe("lyceum.compute.pending", lambda: 5)
    telemetry.count("lyceum.operations", 2, status="succeeded", prompt="dropped")
    async with serving() as target, channel(target) as ch:
        await ch.unary_unary(f"/{METHOD}/Unary")(b"")
        await asyncio.sleep(0.1)
    await asyncio.to_thread(telemetry.shutdown)
    assert collector.services == {"test"}
    assert [span.name for span in sorted(collector.spans, key=lambda span: span.start_time_unix_nano)] == [
        f"{METHOD}/Unary",
        f"{METHOD}/Unary",
        "work",
    ]
    known = {span.span_id for span in collector.spans}
    assert [span for span in collector.spans if span.parent_span_id and span.parent_span_id not in known] == []
    for side in ("server", "client"):
        (point,) = collector.metrics[f"rpc.{side}.call.duration"].histogram.data_points
        assert point.count == 1
        assert {a.key: a.value.string_value for a in point.attributes} == {
            "rpc.system.name": "grpc",
            "rpc.method": f"{METHOD}/Unary",
            "rpc.response.status_code": "OK",
        }
    (point,) = collector.metrics["lyceum.operations"].sum.data_points
    assert point.as_int == 2
    assert [a.key for a in point.attributes] == ["status"]
    (point,) = collector.metrics["lyceum.compute.pending"].gauge.data_points
    assert point.as_int == 5
    assert not (settings.state_dir / "spans.db").exists()


def _nobody_listens() -> tuple[int, Callable[[], None]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1], lambda: None


def _accepts_and_never_answers() -> tuple[int, Callable[[], None]]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener.getsockname()[1], listener.close


def _broken_store(kind: str, state_dir: Path) -> None:
    path = state_dir / "spans.db"
    if kind == "corrupt":
        path.write_bytes(b"no database" * 1000)
    else:
        path.mkdir()


async def _latency(calls: int = 100, rounds: int = 5) -> float:
    """The smallest of a few medians, seconds: other programs on the machine only ever add to one."""
    medians = []
    async with serving() as target, channel(target) as ch:
        method = ch.unary_unary(f"/{METHOD}/Unary")
        for _ in range(rounds):
            latencies = []
            for _ in range(calls):
                started = time.perf_counter()
                await method(b"")
                latencies.append(time.perf_counter() - started)
            medians.append(statistics.median(latencies))
    return min(medians)


@pytest.mark.parametrize("dead", [_nobody_listens, _accepts_and_never_answers])
async def test_dead_collector_neither_slows_calls_nor_holds_the_end(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, dead: Callable[[], tuple[int, Callable[[], None]]]
) -> None:
    telemetry.setup(settings, "test")
    healthy = await _latency()
    telemetry.shutdown()
    port, close = dead()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    telemetry.setup(settings, "test")
    for _ in range(3000):  # more than the queue holds
        with telemetry.span("filler"):
            pass
    assert await _latency() < 1.5 * healthy + 0.0005
    started = time.monotonic()
    await asyncio.to_thread(telemetry.shutdown)
    assert time.monotonic() - started < 2.5
    close()


@pytest.mark.parametrize("kind", ["corrupt", "directory"])
async def test_broken_store_fails_no_call_and_is_reported_once(
    settings: Settings, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    _broken_store(kind, settings.state_dir)
    telemetry.setup(settings, "test")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await _latency(5, 1)
            telemetry.flush()
    assert [record.message for record in caplog.records if "spans are being lost" in record.message][1:] == []
    assert "spans are being lost" in caplog.text
