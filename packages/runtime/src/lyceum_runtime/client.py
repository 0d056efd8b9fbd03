"""The client's side: one call to reach a service, and what every caller would otherwise write again.

    with connect("apex") as apex:
        operation = apex.stub.SearchLibrary(request)
        response = apex.wait(operation, SearchLibraryResponse)

A call without a timeout gets one; a request that has a `request_id` gets a fresh one if it is unset, so it can be sent
again; calls that are safe to repeat are repeated while the server is UNAVAILABLE; the caller's trace goes along; and an
error is raised as the :class:`~lyceum_runtime.errors.ServiceError` that the server raised, with its details.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, status_pb2

from lyceum.artifacts.v1 import artifacts_pb2, artifacts_pb2_grpc
from lyceum.common.v1 import common_pb2
from lyceum.operations.v1 import operations_pb2 as watching_pb2
from lyceum.operations.v1 import operations_pb2_grpc as watching_pb2_grpc
from lyceum_runtime import telemetry
from lyceum_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    from_code,
    from_status,
)
from lyceum_runtime.services import ServiceEntry, find_entry

M = TypeVar("M", bound=Message)

UNARY_SECONDS = 60.0
STREAM_SECONDS = 3600.0
"""Deadlines of calls that name none: with one answer, and with streams."""

CHUNK_BYTES = 1 << 20
_RECONNECT_SECONDS = 60.0
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.2, 2.0  # before a lost connection is tried again
_MESSAGE_BYTES = 128 * 1024 * 1024 + 128 * 1024  # the server's own limit is lower and its error clearer
_METADATA_BYTES = 64 * 1024
_STATUS_KEY = "grpc-status-details-bin"
_PASSING = (Cancelled, DeadlineExceeded, ResourceExhausted, Unavailable)  # a download goes on after these


def connect(name: str, *, target: str | None = None, timeout: float | None = None) -> "Client":
    """A client of the service `name`, as in the table of services.

    Args:
        name: short name, such as "apex".
        target: host:port; else LYCEUM_<NAME>_TARGET, else the service's port on loopback.
        timeout: deadline in seconds of calls that name none; else 60 s, and an hour for streams.

    Raises:
        ConfigurationError: no such service.
    """
    return Client(find_entry(name), target=target, timeout=timeout)


class Client:
    """A channel to one server, and the stubs on it. Thread-safe; close it, or use it in a `with` statement."""

    def __init__(self, entry: ServiceEntry, *, target: str | None = None, timeout: float | None = None) -> None:
        self.entry = entry
        self.target = target or os.environ.get(f"LYCEUM_{entry.name.upper()}_TARGET") or f"127.0.0.1:{entry.port}"
        shared = (operations_pb2, watching_pb2, artifacts_pb2)
        services = [entry.descriptor(), *(_descriptor(module) for module in shared)]
        self._plain = grpc.insecure_channel(
            self.target,
            options=[
                ("grpc.max_send_message_length", _MESSAGE_BYTES),
                ("grpc.max_receive_message_length", _MESSAGE_BYTES),
                ("grpc.max_metadata_size", _METADATA_BYTES),
                ("grpc.service_config", json.dumps(service_config(*services))),
            ],
        )
        self.channel = grpc.intercept_channel(self._plain, _Calls(timeout), *telemetry.client_interceptors())
        """The channel, for stubs of other services on the same server."""
        name = entry.service.rpartition(".")[2]
        self.stub: Any = getattr(entry.stubs("_pb2_grpc"), f"{name}Stub")(self.channel)
        """The service's generated stub."""
        self.operations = operations_pb2_grpc.OperationsStub(self.channel)
        """google.longrunning.Operations: get, list, cancel, delete, wait."""
        self.artifacts = artifacts_pb2_grpc.ArtifactServiceStub(self.channel)
        """The artifacts on this server; `upload` and `download` are simpler."""
        self._watching = watching_pb2_grpc.OperationsServiceStub(self.channel)

    def close(self) -> None:
        """Ends the channel and the calls on it."""
        self._plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ready(self, timeout: float = 10.0) -> Self:
        """Waits until the server can be reached.

        Raises:
            Unavailable: it cannot within `timeout` seconds.
        """
        try:
            grpc.channel_ready_future(self._plain).result(timeout)
        except grpc.FutureTimeoutError:
            raise Unavailable(f"no server at {self.target}; start it with: lyceum up {self.entry.name}") from None
        return self

    def wait(
        self,
        operation: operations_pb2.Operation | str,
        response: type[M],
        *,
        timeout: float | None = None,
        progress: bool | Callable[[common_pb2.Progress], None] | None = None,
    ) -> M:
        """The response of a long-running operation, once it is done.

        The operation goes on whatever happens here; a server that restarts meanwhile is waited for.

        Args:
            operation: it, or its name.
            response: message type of the response.
            timeout: seconds to wait; None waits for as long as it takes.
            progress: True shows a bar on standard error, a function is called with each state, None shows the bar at a
            terminal.

        Raises:
            ServiceError: the error that the operation ended with.
            DeadlineExceeded: it is not done within `timeout`.
        """
        last = operations_pb2.Operation(name=operation) if isinstance(operation, str) else operation
        if not last.done:
            with _shown(progress, last.name) as show:
                for state in self.watch(last.name, timeout=timeout):
                    if show is not None:
                        show(unpack(state.metadata, common_pb2.Progress))
                    last = state
        if last.HasField("error"):
            raise from_status(last.error)
        return unpack(last.response, response)

    def watch(self, name: str, *, timeout: float | None = None) -> Iterator[operations_pb2.Operation]:
        """Each state of an operation as it comes; the finished one last. Goes on after a lost connection.

        Raises:
            DeadlineExceeded: it is not done within `timeout` seconds.
            Unavailable: no server for a minute.
        """
        end = None if timeout is None else time.monotonic() + timeout
        lost_since: float | None = None
        pause = _PAUSE_SECONDS
        while True:
            left = STREAM_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{name} is not done after {timeout:g} s; it goes on, wait for it again")
            try:
                for state in self._watching.WatchOperation(watching_pb2.WatchOperationRequest(name=name), timeout=left):
                    lost_since, pause = None, _PAUSE_SECONDS
                    yield state.operation
                    if state.operation.done:
                        return
            except DeadlineExceeded:
                continue
            except Unavailable:
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since > _RECONNECT_SECONDS:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def upload(
        self, source: Path | str | bytes, *, media_type: str = "application/octet-stream"
    ) -> common_pb2.ArtifactRef:
        """Stores a file's bytes, or these bytes, and returns the reference to use in requests.

        What the server has already is not sent.

        Raises:
            OSError: the file cannot be read.
            ServiceError: the server refuses it.
        """
        sha256 = hashlib.sha256()
        size = 0
        for chunk in _chunks(source):
            sha256.update(chunk)
            size += len(chunk)
        header = artifacts_pb2.UploadArtifactRequest.Header(
            media_type=media_type, sha256=sha256.hexdigest(), size_bytes=size
        )

        def requests() -> Iterator[artifacts_pb2.UploadArtifactRequest]:
            yield artifacts_pb2.UploadArtifactRequest(header=header)
            for chunk in _chunks(source):
                yield artifacts_pb2.UploadArtifactRequest(data=chunk)

        try:
            stored = self.artifacts.GetArtifact(artifacts_pb2.GetArtifactRequest(name=f"artifacts/{header.sha256}"))
        except ServiceError as error:
            if error.code != code_pb2.NOT_FOUND:
                raise
            stored = self.artifacts.UploadArtifact(requests())
        ref: common_pb2.ArtifactRef = stored.ref
        return ref

    def download(self, ref: common_pb2.ArtifactRef | str, path: Path | str) -> Path:
        """Writes an artifact to the file `path`, which appears only when it is complete and its SHA-256 is right.

        `ref` is a reference or a SHA-256. An interrupted download goes on where it ended, from `<path>.<8
        digits>.part`.

        Raises:
            NotFound: no such artifact for this tenant.
            FailedPrecondition: the bytes that came are not the artifact's.
            OSError: the file cannot be written.
        """
        sha256 = ref if isinstance(ref, str) else ref.sha256
        path = Path(path)
        part = path.with_name(f"{path.name}.{sha256[:8]}.part")
        try:
            with open(part, "a+b") as file:
                digest = hashlib.sha256()
                file.seek(0)
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                for chunk in self._download(sha256, file.tell()):
                    file.write(chunk)
                    digest.update(chunk)
        except ServiceError as error:
            if not isinstance(error, _PASSING) or not part.stat().st_size:
                part.unlink()  # no later download could go on from it
            raise
        if digest.hexdigest() != sha256:
            part.unlink()
            raise FailedPrecondition(
                f"the bytes of artifacts/{sha256} do not have that SHA-256; download it again", reason="CHECKSUM"
            )
        os.replace(part, path)
        return path

    def read(self, ref: common_pb2.ArtifactRef | str) -> bytes:
        """An artifact's bytes, checked; for artifacts that fit in memory."""
        sha256 = ref if isinstance(ref, str) else ref.sha256
        data = b"".join(self._download(sha256, 0))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise FailedPrecondition(f"the bytes of artifacts/{sha256} do not have that SHA-256", reason="CHECKSUM")
        return data

    def _download(self, sha256: str, offset: int) -> Iterator[bytes]:
        attempts = 0
        while True:
            request = artifacts_pb2.DownloadArtifactRequest(name=f"artifacts/{sha256}", start_offset=offset)
            try:
                for message in self.artifacts.DownloadArtifact(request):
                    if message.HasField("summary"):
                        return
                    attempts = 0
                    offset += len(message.data)
                    yield message.data
            except Unavailable:
                attempts += 1
                if attempts > 5:
                    raise
                time.sleep(0.2 * 2**attempts)


def unpack(box: Any, kind: type[M]) -> M:
    """The message of type `kind` in a `google.protobuf.Any`; an empty one gives an empty message.

    Raises:
        TypeError: it holds another type.
    """
    message = kind()
    if box.type_url and not box.Unpack(message):
        raise TypeError(f"the response is a {box.TypeName()}, not a {kind.DESCRIPTOR.full_name}")
    return message


def errors_from(error: grpc.RpcError) -> ServiceError:
    """The error that the server raised, out of the status that came over the wire."""
    code = error.code().value[0]
    text = error.details() or error.code().name
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _STATUS_KEY:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            if status.code == code:
                return from_status(status)
    if code == code_pb2.RESOURCE_EXHAUSTED and "larger than max" in text:
        return ResourceExhausted(f"{text}; upload large data as an artifact and pass its reference")
    return from_code(code, text)


def service_config(*services: ServiceDescriptor) -> dict[str, Any]:
    """gRPC's own retries, for the methods that may be sent twice."""
    names = [
        {"service": service.full_name, "method": method.name}
        for service in services
        for method in service.methods
        if _repeatable(method)
    ]
    retry = {
        "maxAttempts": 5,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return {"methodConfig": [{"name": names, "retryPolicy": retry}]}


def _repeatable(method: MethodDescriptor) -> bool:
    """Reads by AIP's names or by the proto's option; and requests with an id, of which a repeat returns the first
    answer.
    """
    if method.client_streaming:
        return False
    return (
        method.name.startswith(("Get", "List"))
        or method.GetOptions().idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN
        or "request_id" in method.input_type.fields_by_name
    )


def _descriptor(module: Any) -> ServiceDescriptor:
    service: ServiceDescriptor = next(iter(module.DESCRIPTOR.services_by_name.values()))
    return service


class _Details(grpc.ClientCallDetails):
    def __init__(self, details: Any, timeout: float) -> None:
        self.method = details.method
        self.timeout = timeout
        self.metadata = details.metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _Calls(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Gives each call its deadline and request id, and its error as a ServiceError."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """One request, one answer."""
        return self._call(continuation, details, _identified(request), UNARY_SECONDS)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        """One request, many answers."""
        return self._call(continuation, details, _identified(request), STREAM_SECONDS)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Many requests, one answer."""
        return self._call(continuation, details, requests, STREAM_SECONDS)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Many requests, many answers."""
        return self._call(continuation, details, requests, STREAM_SECONDS)

    def _call(self, continuation: Any, details: Any, request: Any, seconds: float) -> Any:
        if details.timeout is None:
            details = _Details(details, seconds if self._timeout is None else self._timeout)
        return _Call(continuation(details, request))


def _identified(request: Any) -> Any:
    if "request_id" in request.DESCRIPTOR.fields_by_name and not request.request_id:
        # A copy: the caller may send the same request again and mean a new one.
        named = type(request)()
        named.CopyFrom(request)
        named.request_id = str(uuid.uuid4())
        return named
    return request


class _Call:
    """A call in progress: grpc's own, except that it raises ServiceErrors."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except grpc.RpcError as error:
            _raise(error)

    def result(self, timeout: float | None = None) -> Any:
        """The answer."""
        try:
            return self._call.result(timeout)
        except grpc.RpcError as error:
            _raise(error)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, or None."""
        error = self._call.exception(timeout)
        return errors_from(error) if isinstance(error, grpc.RpcError) else error


def _raise(error: grpc.RpcError) -> NoReturn:
    raise errors_from(error) from None


@contextlib.contextmanager
def _shown(
    progress: bool | Callable[[common_pb2.Progress], None] | None, name: str
) -> Iterator[Callable[[common_pb2.Progress], None] | None]:
    """What to call with each state of an operation: the caller's function, a bar, or nothing."""
    if callable(progress) or progress is False:
        yield progress or None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if progress is None and not (console.is_terminal or console.is_jupyter):
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counted]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=console.is_terminal) as bars:
        bar = bars.add_task(name, total=None, counted="")

        def show(state: common_pb2.Progress) -> None:
            counted = f"{state.completed}/{state.total}" if state.total else str(state.completed or "")
            metrics = " ".join(f"{key}={value:.4g}" for key, value in sorted(state.metrics.items())[:3])
            bars.update(
                bar,
                description=state.stage or name,
                completed=state.completed,
                total=state.total or None,
                counted=f"{counted} {metrics}".rstrip(),
            )

        yield show


def _chunks(source: Path | str | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        for start in range(0, len(source), CHUNK_BYTES):
            yield source[start : start + CHUNK_BYTES]
    else:
        with open(source, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
