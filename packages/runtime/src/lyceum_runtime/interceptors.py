"""A span for every RPC, on both ends of the wire, that always ends and always has the RPC's real status.

The names follow OpenTelemetry's semantic conventions for RPC (`rpc.system.name`, `rpc.method`,
`rpc.response.status_code`, `error.type`, metrics `rpc.server.call.duration` and `rpc.client.call.duration`). These
interceptors stand in for `opentelemetry-instrumentation-grpc`, whose asyncio half leaves a cancelled client span open
for ever, gives a server span of a cancelled or late call the status OK, and copies the text of errors into spans.
Health checks, reflection and channelz are not traced.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from lyceum_runtime import telemetry

_SERVER_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
"""Codes that make a server's span an error by the semantic conventions; the others are the caller's mistakes."""

_CLOCK_SECONDS = 0.1
"""A caller's deadline passes a little before the server's own copy of it, which is rounded up and began on arrival."""

_HANDLERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _untraced(method: str) -> bool:
    return method.startswith("/grpc.")


def _start(method: str, kind: SpanKind, parent: otel_context.Context | None = None) -> trace.Span:
    name = method.lstrip("/")
    attributes = {"rpc.system.name": "grpc", "rpc.method": name}
    return telemetry.start_request(name, parent, kind, attributes)


def _end(span: trace.Span, side: str, method: str, code: grpc.StatusCode, started: float, *, error: bool) -> None:
    span.set_attribute("rpc.response.status_code", code.name)
    if error:
        span.set_attribute("error.type", code.name)
        span.set_status(StatusCode.ERROR, code.name)
    span.end()
    telemetry.record_rpc(side, method.lstrip("/"), code.name, time.perf_counter() - started)


class TracedHandlers(grpc.GenericRpcHandler):
    """Gives each RPC of `handlers` on a `grpc.aio` server a span, child of its caller's.

    A handler and no server interceptor: grpc.aio goes through those with a chain of coroutines for each RPC.
    """

    def __init__(self, handlers: grpc.GenericRpcHandler) -> None:
        self._handlers = handlers
        self._traced: dict[str, Any] = {}

    def service(self, handler_call_details: Any) -> Any:
        """The RPC's handler inside its span; None for a method that `handlers` does not have."""
        method: str = handler_call_details.method
        traced = self._traced.get(method)
        if traced is None:
            handler = self._handlers.service(handler_call_details)
            if handler is not None:
                traced = self._traced[method] = _traced(method, handler)
        return traced


def _traced(method: str, handler: Any) -> Any:
    if handler.response_streaming:
        behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
    else:
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def single(request: Any, context: Any) -> Any:
        _begin(method, context)
        try:
            return await behaviour(request, context)
        except Exception:
            _mark_unknown(context)
            raise

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        _begin(method, context)
        try:
            async for response in behaviour(request, context):
                yield response
        except Exception:
            _mark_unknown(context)
            raise

    make = _HANDLERS[handler.request_streaming, handler.response_streaming]
    behave = stream if inspect.isasyncgenfunction(behaviour) else single
    return make(behave, handler.request_deserializer, handler.response_serializer)


def _begin(method: str, context: Any) -> None:
    started = time.perf_counter()
    metadata = {key: value for key, value in context.invocation_metadata() if key.startswith("trace")}
    parent = telemetry.remote_context(metadata) if metadata else otel_context.Context()
    span = _start(method, SpanKind.SERVER, parent)
    # Never detached: the task's context ends with the task, and a stream's generator may be closed in another one.
    otel_context.attach(trace.set_span_in_context(span))

    def over(context: Any) -> None:
        # Runs when the RPC is over in every case: also when the client has left between two messages of a stream.
        if context.done():  # a status was sent
            code = context.code() or grpc.StatusCode.OK
        else:
            remaining = context.time_remaining()
            late = remaining is not None and remaining < _CLOCK_SECONDS
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        # By the conventions a cancelled call is no server error; here it is marked, since its work was not done.
        failed = code.name in _SERVER_FAULTS or code is grpc.StatusCode.CANCELLED
        _end(span, "server", method, code, started, error=failed)

    context.add_done_callback(over)


def _mark_unknown(context: Any) -> None:
    """grpc sends UNKNOWN for an exception that is no abort, but its context does not say so."""
    if context.code() is None:
        context.set_code(grpc.StatusCode.UNKNOWN)


def _with_trace(metadata: Any, span: trace.Span) -> tuple[tuple[str, str | bytes], ...]:
    carried: dict[str, str] = {}
    telemetry.inject(carried, trace.set_span_in_context(span))
    return (*(metadata or ()), *carried.items())


class _ClientDetails(grpc.ClientCallDetails):
    """The call's details with the trace added."""

    def __init__(self, details: Any, span: trace.Span) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = _with_trace(details.metadata, span)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class ClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Gives each RPC of a blocking channel its span. The call is handed on as it is, so `cancel()` and `future()`
    work.
    """

    def _intercept(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        method: str = details.method
        if _untraced(method):
            return continuation(details, request)
        started = time.perf_counter()
        span = _start(method, SpanKind.CLIENT)
        try:
            call = continuation(_ClientDetails(details, span), request)
        except BaseException:
            _end(span, "client", method, grpc.StatusCode.UNKNOWN, started, error=True)
            raise

        def done(ended: Any) -> None:
            code = ended.code() or grpc.StatusCode.OK
            _end(span, "client", method, code, started, error=code is not grpc.StatusCode.OK)

        call.add_done_callback(done)
        return call

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept


_ending: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly


class _AioClientInterceptor:
    """Gives each RPC of a `grpc.aio` channel its span; one class below for each kind, since grpc sorts them by
    class.
    """

    async def _intercept(self, continuation: Callable[[Any, Any], Awaitable[Any]], details: Any, request: Any) -> Any:
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        if _untraced(method):
            return await continuation(details, request)
        started = time.perf_counter()
        span = _start(method, SpanKind.CLIENT)
        metadata = grpc.aio.Metadata(*_with_trace(details.metadata, span))
        try:
            call = await continuation(details._replace(metadata=metadata), request)
        except BaseException:
            _end(span, "client", method, grpc.StatusCode.CANCELLED, started, error=True)
            raise

        async def end() -> None:
            code = grpc.StatusCode.CANCELLED  # what it is if the loop stops before the call has ended
            try:
                code = await call.code()  # known however the call ends, cancelled here included
            finally:
                _end(span, "client", method, code, started, error=code is not grpc.StatusCode.OK)

        task = asyncio.get_running_loop().create_task(end())
        _ending.add(task)
        task.add_done_callback(_ending.discard)
        return call


class AioUnaryUnaryInterceptor(_AioClientInterceptor, grpc.aio.UnaryUnaryClientInterceptor):
    """One request, one response."""

    intercept_unary_unary: Any = _AioClientInterceptor._intercept


class AioUnaryStreamInterceptor(_AioClientInterceptor, grpc.aio.UnaryStreamClientInterceptor):
    """One request, a stream of responses."""

    intercept_unary_stream: Any = _AioClientInterceptor._intercept


class AioStreamUnaryInterceptor(_AioClientInterceptor, grpc.aio.StreamUnaryClientInterceptor):
    """A stream of requests, one response."""

    intercept_stream_unary: Any = _AioClientInterceptor._intercept


class AioStreamStreamInterceptor(_AioClientInterceptor, grpc.aio.StreamStreamClientInterceptor):
    """A stream of requests and of responses."""

    intercept_stream_stream: Any = _AioClientInterceptor._intercept
