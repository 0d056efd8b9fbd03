"""Calls to any gRPC server from what the server says about itself.

Server reflection gives the descriptors; they go into a descriptor pool of our own, so that a server of another version
is never read with this package's stubs. A message is JSON for the user, with the field names of the proto. An `Any` is
unpacked through the same pool, and a `lyceum.common.v1.ArrowBatch` is shown as rows where pyarrow is installed.
"""

import base64
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool, empty_pb2, json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from lyceum_cli.failure import of_rpc_error
from lyceum_cli.output import CliError, UsageError
from lyceum_runtime import telemetry

REFLECTION_SECONDS = 10.0
ARROW_BATCH = "lyceum.common.v1.ArrowBatch"
OPERATION = "google.longrunning.Operation"
_CLOSE_NAME = 0.5
_FIELDS = "`--describe` shows its fields"


@dataclass(frozen=True)
class Rpc:
    """One RPC of the server."""

    descriptor: MethodDescriptor

    @property
    def name(self) -> str:
        return str(self.descriptor.name)

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    @property
    def kind(self) -> str:
        """unary, server stream, client stream or bidirectional."""
        streams = (bool(self.descriptor.client_streaming), bool(self.descriptor.server_streaming))
        return {
            (False, False): "unary",
            (False, True): "server stream",
            (True, False): "client stream",
            (True, True): "bidirectional",
        }[streams]

    @property
    def takes_stream(self) -> bool:
        return bool(self.descriptor.client_streaming)

    @property
    def gives_stream(self) -> bool:
        return bool(self.descriptor.server_streaming)

    @property
    def is_long(self) -> bool:
        """True if it returns an Operation."""
        return bool(self.descriptor.output_type.full_name == OPERATION) and not self.gives_stream


class _Deadline(grpc.StreamStreamClientInterceptor):
    """Gives the reflection client, which sets none, a deadline."""

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(timeout=REFLECTION_SECONDS), requests)


class Server:
    """A connected server, known by reflection.

    `name` is the service's short name, for hints, and may be empty; `options` are those of `lyceum ops` that lead here.
    """

    def __init__(self, channel: grpc.Channel, target: str, name: str, options: str) -> None:
        self.channel = channel
        self.target = target
        self.name = name
        self.options_here = options
        self._database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, _Deadline()))
        self._pool = descriptor_pool.DescriptorPool(cast(Any, self._database))

    def services(self) -> list[str]:
        """Full names of the services it serves, without gRPC's own."""
        try:
            names = list(self._database.get_services())
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise CliError(
                    f"the server at {self.target} has no reflection", "start it with reflection on"
                ) from None
            raise self.failure(error) from None
        return [name for name in names if not name.startswith("grpc.")]

    def service(self, name: str) -> ServiceDescriptor:
        """A service by its full name, or by any name of it that is unique here: `Apex`, `ApexService`, `apex`."""
        served = self.services()
        wanted = name.lower()
        found = [full for full in served if full == name] or [full for full in served if wanted in _short_names(full)]
        if len(found) != 1:
            problem = f"{name} is ambiguous at {self.target}" if found else f"{self.target} has no service {name}"
            raise UsageError(problem, f"it serves {', '.join(found or served) or 'nothing'}")
        return self._find_service(found[0])

    def rpc(self, service: ServiceDescriptor, name: str) -> Rpc:
        """An RPC of a service by name; case does not matter."""
        methods = {method.name: Rpc(method) for method in service.methods}
        for known, rpc in methods.items():
            if known.lower() == name.lower():
                return rpc
        close = difflib.get_close_matches(name, methods, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(methods)}"
        raise UsageError(f"{service.full_name} has no RPC {name}", hint)

    def method(self, path: str) -> Rpc | None:
        """An RPC by `package.Service/Method`, or None if the server does not serve it."""
        service, _, name = path.partition("/")
        if service not in self.services():
            return None
        descriptor = self._find_service(service)
        return Rpc(descriptor.methods_by_name[name]) if name in descriptor.methods_by_name else None

    def request(self, rpc: Rpc, value: Any) -> Message:
        """A request message from its JSON form.

        Raises:
            UsageError: a field that does not exist, or a value of the wrong type; says which.
        """
        descriptor = rpc.descriptor.input_type
        message: Message = GetMessageClass(descriptor)()
        if not isinstance(value, Mapping):
            raise UsageError(f"{descriptor.name} is a JSON object, not {type(value).__name__}", _FIELDS)
        try:
            json_format.ParseDict(dict(value), message, descriptor_pool=self._pool)
        except json_format.ParseError as error:
            raise UsageError(f"{descriptor.name}: {_parse_problem(str(error), descriptor)}", _FIELDS) from None
        return message

    def call(self, rpc: Rpc, requests: Iterator[Message], *, timeout: float | None) -> Iterator[Message]:
        """Sends the requests (one, unless the RPC takes a stream) and yields the responses as they arrive.

        Raises:
            CallFailed: the call ended with an error.
        """
        arity = ("stream" if rpc.takes_stream else "unary") + "_" + ("stream" if rpc.gives_stream else "unary")
        # Only the user's own calls are traced, not what it takes to know the server.
        channel = grpc.intercept_channel(self.channel, *telemetry.client_interceptors())
        invoke = getattr(channel, arity)(
            rpc.path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(rpc.descriptor.output_type).FromString,
        )
        # gRPC reads the requests on a thread of its own and hides what goes wrong there: keep it.
        problems: list[CliError] = []
        sent: Any = next(requests) if not rpc.takes_stream else _kept(requests, problems)
        try:
            if not rpc.gives_stream:
                yield invoke(sent, timeout=timeout)
                return
            responses = invoke(sent, timeout=timeout)
            try:
                yield from responses
            finally:
                responses.cancel()
        except grpc.RpcError as error:
            raise (problems[0] if problems else self.failure(error)) from None

    def ask(self, path: str, value: Mapping[str, Any], *, timeout: float | None = REFLECTION_SECONDS) -> Message:
        """One unary call by path, as `google.longrunning.Operations/GetOperation`.

        Raises:
            CliError: the server does not serve it, or the call failed.
        """
        rpc = self.method(path)
        if rpc is None:
            raise CliError(f"{self.target} does not serve {path.partition('/')[0]}", "is it a Lyceum server?")
        return next(self.call(rpc, iter([self.request(rpc, value)]), timeout=timeout))

    def to_json(self, message: Message) -> Any:
        """A message as JSON values; 64-bit integers are strings and bytes base64, as JSON of protobuf has them."""
        value = json_format.MessageToDict(
            message,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
            descriptor_pool=cast(Any, _Types(self._find_message)),
        )
        return self._shown(message, value)

    def unpack(self, box: Message) -> Message | None:
        """The message in an `Any`, or None if the server cannot tell its type."""
        try:
            descriptor = self._find_message(cast(Any, box).type_url.rpartition("/")[2])
        except KeyError:
            return None
        inner: Message = GetMessageClass(descriptor)()
        try:
            inner.ParseFromString(cast(Any, box).value)
        except DecodeError:
            return None
        return inner

    def options(self, options: Message) -> dict[str, Any]:
        """Options with the extensions that the server knows, as JSON: `{"[buf.validate.field]": ...}`."""
        try:
            descriptor = self._find_message(options.DESCRIPTOR.full_name)
        except KeyError:
            return {}
        own = GetMessageClass(descriptor).FromString(options.SerializeToString())
        return json_format.MessageToDict(own, preserving_proto_field_name=True, descriptor_pool=self._pool)

    def failure(self, error: grpc.RpcError) -> CliError:
        """The user's form of an error of this server."""
        return of_rpc_error(error, self.target, self.name)

    def _find_service(self, name: str) -> ServiceDescriptor:
        try:
            return self._pool.FindServiceByName(name)
        except (KeyError, TypeError) as error:
            problem = f"{self.target} cannot describe {name} ({type(error).__name__})"
            raise CliError(problem, "the server's reflection is incomplete") from None
        except grpc.RpcError as error:
            raise self.failure(error) from None

    def _find_message(self, name: str) -> Descriptor:
        try:
            return self._pool.FindMessageTypeByName(name)
        except grpc.RpcError:
            raise KeyError(name) from None

    def _shown(self, message: Message, value: Any) -> Any:
        """`value`, the plain JSON of `message`, with Arrow batches as rows and unknown Any types kept as base64."""
        name = message.DESCRIPTOR.full_name
        if name == "google.protobuf.Any":
            return self._shown_any(message, value)
        if name == ARROW_BATCH:
            return _rows(message, value)
        if name.startswith("google.protobuf."):
            return value
        for field, content in message.ListFields():
            if field.message_type is None:
                continue
            shown = value[field.name]
            if _is_map(field):
                if field.message_type.fields_by_name["value"].message_type is not None:
                    value[field.name] = {_key(key): self._shown(content[key], shown[_key(key)]) for key in content}
            elif field.is_repeated:
                value[field.name] = [self._shown(item, plain) for item, plain in zip(content, shown)]
            else:
                value[field.name] = self._shown(content, shown)
        # json_format puts the fields that are set first; a reader wants the proto's order.
        return {field.name: value[field.name] for field in message.DESCRIPTOR.fields if field.name in value}

    def _shown_any(self, box: Any, value: dict[str, Any]) -> Any:
        if not box.type_url:
            return value
        inner = self.unpack(box)
        if inner is None:
            return {"@type": box.type_url, "value": base64.b64encode(box.value).decode()}
        if inner.DESCRIPTOR.full_name.startswith("google.protobuf."):
            return value
        fields = {key: part for key, part in value.items() if key != "@type"}
        return {"@type": box.type_url, **self._shown(inner, fields)}


class _Types:
    """What json_format asks of a pool; an unknown type reads as Empty, and `_shown_any` then puts the bytes back."""

    def __init__(self, find: Callable[[str], Descriptor]) -> None:
        self._find = find

    def FindMessageTypeByName(self, name: str) -> Descriptor:
        try:
            return self._find(name)
        except KeyError:
            return empty_pb2.Empty.DESCRIPTOR


def _kept(requests: Iterator[Message], problems: list[CliError]) -> Iterator[Message]:
    try:
        yield from requests
    except CliError as error:
        problems.append(error)
        raise


def _short_names(full: str) -> set[str]:
    """Names that mean `lyceum.apex.v1.ApexService`: apexservice, and apex from both its parts."""
    *package, last = full.lower().split(".")
    words = [part for part in package if not (part.startswith("v") and part[1:2].isdigit())]
    return {last, last.removesuffix("service"), *words[-1:]}


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _parse_problem(text: str, descriptor: Descriptor) -> str:
    """json_format's message on one line; an unknown field gets the nearest name there is."""
    first = text.split("\n", 1)[0].rstrip()
    marker = 'has no field named "'
    if marker not in first:
        return first.removeprefix("Failed to parse ").strip()
    name, _, rest = first.partition(marker)[2].partition('"')
    where = rest.partition('at "')[2].partition('"')[0]
    path = f"{where.partition('.')[2]}.{name}".lstrip(".") if where else name
    listed = text.partition("Available Fields(except extensions):")[2].strip()
    known = (
        [field.strip(" '\"[]") for field in listed.split(",")]
        if listed
        else [field.name for field in descriptor.fields]
    )
    close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE_NAME)
    return f"there is no field {path}" + (f", did you mean {close[0]}?" if close else "")


def _rows(batch: Any, value: dict[str, Any]) -> dict[str, Any]:
    """An Arrow batch as a list of rows, where pyarrow is there and the bytes are what they say."""
    try:
        import pyarrow
    except ImportError:
        return value
    try:
        rows = pyarrow.ipc.open_stream(batch.ipc_stream).read_all().to_pylist()
    except (pyarrow.ArrowInvalid, OSError):
        return value
    return {"row_count": value["row_count"], "rows": [_plain(row) for row in rows]}


def _plain(value: Any) -> Any:
    """A Python value of pyarrow in the terms of protobuf's JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
