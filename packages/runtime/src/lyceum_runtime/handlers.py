"""From a service's plain functions to gRPC handlers.

Every request takes the same way: admission, tenant, parsing and validation, the function, the response's size.
Everything but the admission happens on a thread, so a large message or a slow method never holds up the event loop;
only an `async def` with a small request is served on the loop altogether. The kinds (unary or stream, each way) come
from the proto's descriptor.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.longrunning import operations_pb2
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from lyceum_runtime import errors, validation
from lyceum_runtime.compute import Inbox, Lane, Outbox, Stop, stopped
from lyceum_runtime.definition import Call, ServiceDefinition

T = TypeVar("T")

logger = logging.getLogger(__name__)

STATUS_KEY = "grpc-status-details-bin"
"""Metadata key under which gRPC carries a `google.rpc.Status`."""

WAITERS = {"google.longrunning.Operations", "lyceum.operations.v1.OperationsService"}
"""Services whose requests wait for operations: a drain ends them first."""

SHORT_SECONDS = 2.0
"""An operation that ends within this is returned done by the RPC that started it."""

_LOOP_BYTES = 16 * 1024
"""A request of at most this size may be parsed and checked on the event loop: 0.3 ms if each of 2,000 numbers has a
rule.
"""

_BREAK_SECONDS = 0.02

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
# Clients accept 8 KiB of headers, and there the text takes up to three times its bytes and the status 4/3 of its own.
_MAX_TEXT_BYTES = 1024
_MAX_STATUS_BYTES = 3 * 1024


def tenant_of(context: Any) -> str:
    """The tenant that the request of a gRPC context acts for. There is one as long as no caller is authenticated: a
    name in its metadata proves nothing.
    """
    return "default"


@dataclass(frozen=True)
class Host:
    """What the handlers of one service need of their server."""

    name: str
    lane: Lane
    load: Callable[[], ServiceDefinition]
    """The service's functions; imports the method, so it may take seconds the first time."""
    call: Callable[[str, Callable[[], bool]], Call]
    """(tenant, should_stop) -> what the functions may use."""
    start_operation: Callable[[str, Any, str], operations_pb2.Operation]
    """(rpc, checked request, tenant) -> the stored operation."""
    wait_operation: Callable[[str, str, float, Callable[[], bool]], operations_pb2.Operation]
    """(name, tenant, seconds, should_stop) -> the operation, after that time at the latest."""
    max_message_bytes: int
    running: set[Stop]
    """The requests inside, for the server's drain."""
    draining: Callable[[], bool]


def generic_handler(service: ServiceDescriptor, host: Host) -> grpc.GenericRpcHandler:
    """The gRPC handler of all methods of `service`."""
    handlers = {method.name: _Rpc(method, host).handler() for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


class _Rpc:
    """One RPC of one service."""

    def __init__(self, method: MethodDescriptor, host: Host) -> None:
        self.name = method.name
        self.full_name = method.full_name
        self.host = host
        self.request_class: type[Message] = GetMessageClass(method.input_type)
        self.client_streaming: bool = method.client_streaming
        self.server_streaming: bool = method.server_streaming
        self.waiter = self.full_name.rpartition(".")[0] in WAITERS
        self.function: Callable[..., Any] | None = None
        """The plain function, once a first request has imported it; None for a long method."""
        self.on_loop = False

    def learn(self, definition: ServiceDefinition) -> None:
        """Takes the function from the imported package."""
        if self.function is None and self.name not in definition.long_methods:
            function = definition.methods.get(self.name)
            self.on_loop = inspect.iscoroutinefunction(function)
            self.function = function

    def handler(self) -> Any:
        """Both ends carry bytes: gRPC would answer an unparsable request with INTERNAL."""
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[self.client_streaming, self.server_streaming]
        return make(self._stream if self.server_streaming else self._single)

    async def _single(self, incoming: Any, context: Any) -> bytes:
        request = self._begin(context)
        try:
            return await request.single(incoming)
        except Exception as error:
            await self._abort(error, request.stop, context)

    async def _stream(self, incoming: Any, context: Any) -> AsyncIterator[bytes]:
        request = self._begin(context)
        try:
            async for message in request.stream(incoming):
                yield message
        except Exception as error:
            await self._abort(error, request.stop, context)

    def _begin(self, context: Any) -> "_Request":
        stop = Stop(context.time_remaining(), waiter=self.waiter)
        self.host.running.add(stop)

        def end(_: Any) -> None:
            self.host.running.discard(stop)
            stop.set()

        # Runs when the RPC is over in every case, also when the client leaves between two messages of a stream.
        context.add_done_callback(end)
        return _Request(self, stop, context)

    async def _abort(self, error: Exception, stop: Stop, context: Any) -> NoReturn:
        """Ends the RPC with the status of `error`."""
        status = self._status(error, stop)
        stop.set()
        await context.abort(_STATUS_CODES[status.code], status.message, ((STATUS_KEY, status.SerializeToString()),))
        raise AssertionError  # abort has raised

    def _status(self, error: Exception, stop: Stop) -> Any:
        if not isinstance(error, errors.ServiceError) and isinstance(error, type(stopped())):
            if stop.expired():
                error = errors.DeadlineExceeded("the deadline passed before the work was done")
            elif self.host.draining():
                error = errors.Unavailable("the server stopped before the work was done; try again")
            else:
                error = errors.Cancelled("the caller cancelled the work")
        if not isinstance(error, errors.ServiceError):
            reference = secrets.token_hex(8)
            logger.error("%s failed unexpectedly, reference %s", self.full_name, reference, exc_info=error)
            error = errors.Internal(f"the server failed; its log has the reference {reference}")
        return errors.fitted(error.status(), text_bytes=_MAX_TEXT_BYTES, status_bytes=_MAX_STATUS_BYTES)


class _Request:
    """One admitted request on its way through its thread."""

    def __init__(self, rpc: _Rpc, stop: Stop, context: Any) -> None:
        self.rpc = rpc
        self.stop = stop
        self.context = context
        self.tenant = tenant_of(context)
        self.slot = rpc.host.lane.slot(stop)
        self.loop = asyncio.get_running_loop()
        self.awaited: concurrent.futures.Future[Any] | asyncio.Task[Any] | None = None
        """What the request waits for on the event loop, if its function runs there."""
        self.sending: asyncio.Future[None] | None = None
        """The initial metadata of an answer to a stream, once they are under way."""
        stop.on_set(self._cancel_awaited)

    async def single(self, incoming: Any) -> bytes:
        """The answer of an RPC that has one."""
        if self.rpc.client_streaming:
            inbox: Inbox[bytes] = Inbox(self.slot, self.stop)
            work = self._submit(lambda: self._run(iter(inbox), None))
            try:
                async with _filling(inbox, incoming, self._complete):
                    return await work
            finally:
                if self.sending is not None:
                    await asyncio.wait((self.sending,))
            raise AssertionError  # the block has returned or raised
        if self.rpc.on_loop and len(incoming) <= _LOOP_BYTES:
            return await self._run_on_loop(incoming)
        shared = self.rpc.function is not None and not self.rpc.on_loop
        return await self._submit(lambda: self._run(iter((incoming,)), None), shared=shared)

    async def stream(self, incoming: Any) -> AsyncIterator[bytes]:
        """The answers of an RPC that has many."""
        outbox: Outbox[bytes] = Outbox(self.slot, self.stop)
        if not self.rpc.client_streaming:
            work = self._submit(lambda: self._run(iter((incoming,)), outbox))
            async for message in outbox.drain(work):
                yield message
            return
        inbox: Inbox[bytes] = Inbox(self.slot, self.stop)
        work = self._submit(lambda: self._run(iter(inbox), outbox))
        async with _filling(inbox, incoming, self._complete):
            async for message in outbox.drain(work):
                yield message

    async def _complete(self) -> None:
        """Returns once it is sure that a client's stream, which has ended, did not break off.

        grpc.aio ends both alike and says up to some 10 ms later that a call was cancelled; but what is sent on a
        cancelled call fails. When answers are under way that cannot be tried, and the time has to do.
        """
        if self.rpc.server_streaming:
            await asyncio.sleep(_BREAK_SECONDS)
        else:
            # Not cancelled half-way: gRPC would not know that they are sent, and the status could not follow.
            self.sending = asyncio.ensure_future(self.context.send_initial_metadata(()))
            self.sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())  # else it is logged
            await asyncio.shield(self.sending)

    def _submit(self, work: Callable[[], bytes], *, shared: bool = False) -> "asyncio.Future[bytes]":
        self._refuse_if_draining()
        return self.rpc.host.lane.submit(work, self.stop, shared=shared)

    def _refuse_if_draining(self) -> None:
        if self.rpc.host.draining():
            raise errors.Unavailable("the server is stopping; try again")

    async def _run_on_loop(self, data: bytes) -> bytes:
        """The whole work of a function on the event loop with a small request."""
        self._refuse_if_draining()
        function: Any = self.rpc.function
        self.rpc.host.lane.enter()
        task = self.awaited = asyncio.current_task()
        try:
            request = self._parse(data)
            return self._serialize(await function(request, self.rpc.host.call(self.tenant, self.stop)))
        except asyncio.CancelledError:
            if self.rpc.host.draining() and task is not None and not task.uncancel():
                raise stopped() from None  # not gRPC but the drain has cancelled it, and the caller still waits
            raise
        finally:
            self.awaited = None
            self.rpc.host.lane.leave()

    def _run(self, incoming: Iterator[bytes], outbox: Outbox[bytes] | None) -> bytes:
        """The thread's whole work."""
        try:
            request: Any
            if self.rpc.client_streaming:
                request = self._messages(incoming)
            else:
                request = self._parse(next(incoming))
            definition = self.rpc.host.load()
            self.rpc.learn(definition)
            self.slot.take()
            if self.rpc.name in definition.long_methods:
                return self._serialize(self._start(request))
            function = definition.methods.get(self.rpc.name)
            if function is None:
                raise errors.Unimplemented(f"{self.rpc.full_name} is not served yet")
            result = function(request, self.rpc.host.call(self.tenant, self.stop))
            if outbox is None:
                return self._serialize(self._awaited(result) if inspect.iscoroutine(result) else result)
            messages: Generator[Message, None, None] = self._iterated(result) if inspect.isasyncgen(result) else result
            with contextlib.closing(messages):
                for message in messages:
                    outbox.put(self._serialize(message))
            return b""
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # The first kind would end the event loop, the second is not accepted by its futures.
            raise RuntimeError(f"the function raised {type(error).__name__}") from error
        finally:
            self.slot.give()

    def _start(self, request: Any) -> operations_pb2.Operation:
        """The started operation; done already if it was short. The caller's leaving does not stop it."""
        operation = self.rpc.host.start_operation(self.rpc.name, request, self.tenant)
        self.slot.give()
        return self.rpc.host.wait_operation(operation.name, self.tenant, SHORT_SECONDS, self.stop)

    def _awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """What a function on the event loop returns; it holds no slot and is cancelled when the request ends."""
        self.slot.give()
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self.awaited = future
        if self.stop():
            future.cancel()
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise stopped() from None

    def _cancel_awaited(self) -> None:
        if self.awaited is not None:
            self.awaited.cancel()

    def _iterated(self, messages: AsyncGenerator[Message, None]) -> Generator[Message, None, None]:
        async def following() -> Message | None:
            return await anext(messages, None)

        try:
            while (message := self._awaited(following())) is not None:
                yield message
        finally:
            asyncio.run_coroutine_threadsafe(messages.aclose(), self.loop)

    def _messages(self, incoming: Iterator[bytes]) -> Iterator[Any]:
        for index, data in enumerate(incoming):
            yield self._parse(data, index)

    def _parse(self, data: bytes, index: int | None = None) -> Any:
        limit = self.rpc.host.max_message_bytes
        if len(data) > limit:
            raise errors.ResourceExhausted(
                f"the request has {len(data)} bytes, more than the {limit} that are accepted; "
                "upload large data with lyceum.artifacts.v1.ArtifactService and pass the reference"
            )
        return validation.parse(self.rpc.request_class, data, index=index)

    def _serialize(self, message: Message) -> bytes:
        data = message.SerializeToString()
        limit = self.rpc.host.max_message_bytes
        if len(data) > limit:
            raise errors.ResourceExhausted(
                f"the answer has {len(data)} bytes, more than the {limit} that are sent; "
                "ask for less at once, or use the service's operation or stream that returns an artifact"
            )
        return data


@contextlib.asynccontextmanager
async def _filling(
    inbox: Inbox[bytes], incoming: AsyncIterator[bytes], complete: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Passes a client's stream on while the block runs; what the function did not read is dropped."""
    filling = asyncio.ensure_future(inbox.fill(incoming, complete))
    try:
        yield
    finally:
        filling.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await filling
