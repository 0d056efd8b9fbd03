"""Traces and metrics, set up once in each process, and the context that ties a trace together.

A span is a named stretch of time with a parent; a trace is the tree of all spans that one request caused. The parent
travels as a *carrier*, the W3C `traceparent` header in a dict: over gRPC in the metadata
(:mod:`lyceum_runtime.interceptors`), with a stored operation, into a child process or a loky worker. Spans go to the
collector at `OTEL_EXPORTER_OTLP_ENDPOINT`, or else to a local SQLite file that `lyceum trace` reads
(:mod:`lyceum_runtime.spans`). Export runs on its own thread behind a bounded queue: a dead collector or a full disk
loses spans and never slows or fails a call.

Spans carry numbers and names, never text from a request: see :func:`span`.
"""

import atexit
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    import grpc
    import grpc.aio
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from lyceum_runtime.settings import Settings

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 2.0
"""The longest that a process waits at its end for spans still to be sent."""

NAME_ATTRIBUTES = frozenset(
    {"artifact", "dataset", "error.type", "kind", "method", "model", "operation", "rpc", "service", "stage", "status"}
)
"""The only attributes whose value may be a string."""

_BUCKET_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]  # of the conventions
_NAME = re.compile(r"[\w.:/@+-]{1,128}")  # a name has no blanks, so no sentence of a prompt passes
_PROPAGATOR = TraceContextTextMapPropagator()  # the trace only: baggage could carry anything


class _State:
    """What :func:`setup` made in this process."""

    key: tuple[str, str | None, Path] | None = None
    service = "lyceum"
    tracer: trace.Tracer = trace.get_tracer("lyceum_runtime")  # the application's own provider, if a client has one
    meter: metrics.Meter = metrics.get_meter("lyceum_runtime")
    tracers: "TracerProvider | None" = None
    exporter: "SpanExporter | None" = None
    start_request: "Callable[..., trace.Span] | None" = None
    meters: "MeterProvider | None" = None


_state = _State()
_lock = threading.Lock()
_instruments: dict[str, Any] = {}
_gauges: dict[str, Callable[[], float]] = {}


def setup(settings: "Settings", service_name: str) -> None:
    """Start exporting this process's spans and metrics under `service_name`. Setting up the same thing again does
    nothing.

    Raises:
        ValueError: OTEL_EXPORTER_OTLP_PROTOCOL asks for something other than grpc.
    """
    setup_process(settings.state_dir, service_name)


def setup_process(state_dir: Path, service_name: str) -> None:
    """:func:`setup` for a child process, which has the state directory but need not load the settings."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    if endpoint and protocol != "grpc":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; only 'grpc' is supported (usually port 4317)")
    key = (service_name, endpoint, state_dir)
    with _lock:
        if _state.key == key:
            return
    shutdown()

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from lyceum_runtime.request_span import RequestSpan, records_all

    resource = Resource.create({"service.name": service_name})
    exporter: SpanExporter
    processor: SpanProcessor
    if endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = OTLPSpanExporter()
        processor = BatchSpanProcessor(exporter)
    else:
        from lyceum_runtime.span_exporter import SpanBuffer, SQLiteSpanExporter

        exporter = SQLiteSpanExporter(state_dir / "spans.db")
        processor = SpanBuffer(exporter)
    # Not the global provider: another library's instrumentation must not write request text into our spans.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    with _lock:
        _state.start_request = partial(RequestSpan, provider, processor) if records_all(provider) else None
        _state.key, _state.service, _state.exporter = key, service_name, exporter
        _state.tracers, _state.tracer = provider, provider.get_tracer("lyceum_runtime")
        if endpoint:
            _state.meters = _meter_provider(resource)
            _state.meter = _state.meters.get_meter("lyceum_runtime")
            _instruments.clear()
            for name, callback in _gauges.items():
                _create_gauge(name, callback)
    atexit.register(shutdown)


def _meter_provider(resource: Any) -> "MeterProvider":
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)


def flush(timeout_seconds: float = SHUTDOWN_SECONDS) -> None:
    """Hand over every ended span, waiting at most `timeout_seconds`."""
    provider = _state.tracers
    if provider is not None:
        _bounded(provider.force_flush, timeout_seconds)


def shutdown(timeout_seconds: float = SHUTDOWN_SECONDS) -> None:
    """Flush and stop. Returns after `timeout_seconds` at the latest; what was not sent by then is lost."""
    with _lock:
        tracers, exporter, meters = _state.tracers, _state.exporter, _state.meters
        _state.key = _state.tracers = _state.exporter = _state.meters = _state.start_request = None
        _state.tracer, _state.meter = trace.get_tracer("lyceum_runtime"), metrics.get_meter("lyceum_runtime")
        _instruments.clear()
    if tracers is None:
        return
    atexit.unregister(shutdown)

    def stop() -> None:
        tracers.shutdown()
        if meters is not None:
            meters.shutdown(timeout_millis=1000 * timeout_seconds)

    if not _bounded(stop, timeout_seconds) and exporter is not None:
        _bounded(exporter.shutdown, 0.1)  # ends an export that waits for a silent collector


def _bounded(action: Callable[[], object], timeout_seconds: float) -> bool:
    """Run `action` on a daemon thread; whether it ended in time. The SDK's own timeouts do not cover a hanging
    export.
    """

    def run() -> None:
        try:
            action()
        except Exception as error:
            logger.warning("telemetry: %s while flushing", type(error).__name__)

    thread = threading.Thread(target=run, name="telemetry-flush", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return not thread.is_alive()


def service_name() -> str:
    """The name under which this process reports."""
    return _state.service


def tracer() -> trace.Tracer:
    """This process's tracer: the one of :func:`setup`, else the application's global one."""
    return _state.tracer


def start_request(
    name: str, context: otel_context.Context | None, kind: SpanKind, attributes: dict[str, str]
) -> trace.Span:
    """A new span for an RPC, child of the one in `context`, by default the current one."""
    parent = trace.get_current_span(context).get_span_context()
    if _state.start_request is None or (parent.is_valid and not parent.trace_flags.sampled):
        return _state.tracer.start_span(name, context, kind, attributes)
    return _state.start_request(name, parent if parent.is_valid else None, kind, attributes)


def carrier() -> dict[str, str]:
    """The current trace context in a form that can be stored or sent; empty outside any span."""
    carried: dict[str, str] = {}
    inject(carried)
    return carried


def inject(carried: dict[str, str], context: otel_context.Context | None = None) -> None:
    """Write `context`, by default the current one, into `carried`."""
    _PROPAGATOR.inject(carried, context)


def remote_context(carried: Mapping[str, str]) -> otel_context.Context:
    """The context that `carried` names, without what the current thread has."""
    return _PROPAGATOR.extract(carried, context=otel_context.Context())


@contextmanager
def attached(carried: Mapping[str, str]) -> Iterator[None]:
    """Make the context in `carried` the current one, so that spans made inside belong to that trace."""
    token = otel_context.attach(remote_context(carried))
    try:
        yield
    finally:
        otel_context.detach(token)


@contextmanager
def span(name: str, **attributes: object) -> Iterator[None]:
    """A span around the block, child of the current one.

    Attributes are numbers, or names under a key of :data:`NAME_ATTRIBUTES`; everything else is dropped, so that no
    prompt, path or secret can reach a collector. A failed block marks the span with the error's type, not its text.
    """
    current = _state.tracer.start_span(name[:128], kind=SpanKind.INTERNAL, attributes=allowed(attributes))
    token = otel_context.attach(trace.set_span_in_context(current))
    try:
        yield
    except BaseException as error:
        if not isinstance(error, GeneratorExit):  # a generator that its reader closed has not failed
            current.set_attribute("error.type", type(error).__name__)
            current.set_status(StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        otel_context.detach(token)
        current.end()


def stage(name: str, **attributes: object) -> Any:
    """A span for one stage of a method's work, such as "encode" or "search"; no finer than that."""
    return span(name, stage=name, **attributes)


def annotate(**attributes: object) -> None:
    """Add numbers or names to the current span (see :func:`span` for what is kept)."""
    trace.get_current_span().set_attributes(allowed(attributes))


def allowed(attributes: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """The attributes that may leave the process: numbers, and names under a known key."""
    return {
        key: value
        for key, value in attributes.items()
        if isinstance(value, bool | int | float)
        or (isinstance(value, str) and key in NAME_ATTRIBUTES and _NAME.fullmatch(value))
    }


def count(name: str, amount: int = 1, **attributes: object) -> None:
    """Add to the counter `name`, such as "lyceum.operations" with status="succeeded"."""
    if _state.meters is not None:
        counter = _instruments.get(name) or _instruments.setdefault(name, _state.meter.create_counter(name))
        counter.add(amount, allowed(attributes))


def observe(name: str, callback: Callable[[], float]) -> None:
    """Report `callback()` as the gauge `name` (a queue's depth, say) at each metric export, instead of an earlier
    one.
    """
    with _lock:
        known = name in _gauges
        _gauges[name] = callback
        if _state.meters is not None and not known:
            _create_gauge(name, callback)


def _create_gauge(name: str, callback: Callable[[], float]) -> None:
    _state.meter.create_observable_gauge(name, [lambda options: [metrics.Observation(_gauges[name]())]])


def record_rpc(side: str, method: str, code: str, seconds: float) -> None:
    """One ended RPC into the histogram `rpc.<side>.call.duration`; its count by status code is the error counter."""
    if _state.meters is None:
        return
    name = f"rpc.{side}.call.duration"
    histogram = _instruments.get(name) or _instruments.setdefault(
        name,
        _state.meter.create_histogram(
            name,
            unit="s",
            description=f"Duration of gRPC calls, {side} side",
            explicit_bucket_boundaries_advisory=_BUCKET_SECONDS,
        ),
    )
    histogram.record(seconds, {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": code})


def traced(handlers: "grpc.GenericRpcHandler") -> "grpc.GenericRpcHandler":
    """`handlers` for a `grpc.aio` server, with a span for each RPC."""
    from lyceum_runtime.interceptors import TracedHandlers

    return TracedHandlers(handlers)


def client_interceptors() -> "list[Any]":
    """For `grpc.intercept_channel(channel, *client_interceptors())`."""
    from lyceum_runtime.interceptors import ClientInterceptor

    return [ClientInterceptor()]


def aio_client_interceptors() -> "list[grpc.aio.ClientInterceptor]":
    """For `grpc.aio.insecure_channel(target, interceptors=aio_client_interceptors())`."""
    from lyceum_runtime import interceptors

    return [
        interceptors.AioUnaryUnaryInterceptor(),
        interceptors.AioUnaryStreamInterceptor(),
        interceptors.AioStreamUnaryInterceptor(),
        interceptors.AioStreamStreamInterceptor(),
    ]
