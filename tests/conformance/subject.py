"""A service under test: served on a real port, with one example request for each RPC.

`examples/<service>.json` is an ordered list of {"rpc", "request"} (or "requests" for a client stream); running it in
order gives every later request what it names. In it {"$artifact": text} stands for the reference of that text,
uploaded, and {"$table": columns} for that of a Parquet file.
"""

import io
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.longrunning import operations_pb2
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from lyceum_runtime.services import ServiceEntry
from lyceum_runtime.testing import Served

EXAMPLES = Path(__file__).parent / "examples"
STATUS_KEY = "grpc-status-details-bin"


@dataclass
class Outcome:
    """What came back: status code, text, details, and the messages."""

    code: grpc.StatusCode
    text: str = ""
    status: status_pb2.Status = field(default_factory=status_pb2.Status)
    messages: list[Any] = field(default_factory=list)

    @property
    def fields(self) -> list[str]:
        """The fields that a bad request names."""
        named = []
        for detail in self.status.details:
            bad = error_details_pb2.BadRequest()
            if detail.Unpack(bad):
                named += [violation.field for violation in bad.field_violations]
        return named


class Subject:
    """One service on a running server."""

    def __init__(self, entry: ServiceEntry, served: Served) -> None:
        self.entry = entry
        self.served = served
        entry.descriptor()  # imports the stubs
        self.service = descriptor_pool.Default().FindServiceByName(entry.service)
        self.methods: dict[str, MethodDescriptor] = {method.name: method for method in self.service.methods}
        self.channel = grpc.insecure_channel(served.target, options=[("grpc.max_send_message_length", -1)])
        self.examples: dict[str, list[Any]] = {}
        """Request messages of each RPC's example."""
        self.answers: dict[str, Outcome] = {}
        """What the example of each RPC gave when it was run in order."""

    def load(self) -> Iterator[tuple[str, list[Any]]]:
        """The examples in the file's order."""
        for item in json.loads((EXAMPLES / f"{self.entry.name}.json").read_text()):
            method = self.methods[item["rpc"]]
            requests = item["requests"] if method.client_streaming else [item["request"]]
            kind = GetMessageClass(method.input_type)
            messages = [json_format.ParseDict(self._filled(request), kind()) for request in requests]
            self.examples.setdefault(method.name, messages)
            yield method.name, messages

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            if "$artifact" in value:
                ref = self.served.client.upload(value["$artifact"].encode(), media_type="text/plain")
                return json_format.MessageToDict(ref, preserving_proto_field_name=True)
            if "$table" in value:
                ref = self.served.client.upload(_parquet(value["$table"]), media_type="application/vnd.apache.parquet")
                return json_format.MessageToDict(ref, preserving_proto_field_name=True)
            return {key: self._filled(inner) for key, inner in value.items()}
        return [self._filled(inner) for inner in value] if isinstance(value, list) else value

    def call(
        self, rpc: str, messages: list[Any], *, timeout: float = 60.0, metadata: tuple[tuple[str, str], ...] = ()
    ) -> Outcome:
        """Sends messages (or raw bytes) and collects everything."""
        method = self.methods[rpc]
        path = f"/{self.service.full_name}/{rpc}"
        kind = ("stream" if method.client_streaming else "unary") + "_"
        kind += "stream" if method.server_streaming else "unary"
        invoke = getattr(self.channel, kind)(path, request_serializer=_bytes, response_deserializer=bytes)
        sent = iter(messages) if method.client_streaming else messages[0]
        answer = GetMessageClass(method.output_type)
        got: list[Any] = []
        try:
            result = invoke(sent, timeout=timeout, metadata=metadata)
            for data in result if method.server_streaming else [result]:
                got.append(answer.FromString(data))  # noqa: PERF401  (what came before an error counts)
        except grpc.RpcError as error:
            status = status_pb2.Status()
            for key, value in error.trailing_metadata() or ():
                if key == STATUS_KEY:
                    status.ParseFromString(value)
            return Outcome(error.code(), error.details() or "", status, got)
        return Outcome(grpc.StatusCode.OK, messages=got)

    def finished(self, outcome: Outcome, timeout: float = 120.0) -> operations_pb2.Operation:
        """The operation of an outcome, once it is done."""
        operation = outcome.messages[0]
        for state in self.served.client.watch(operation.name, timeout=timeout):
            operation = state
        return operation

    def long_running(self, rpc: str) -> bool:
        """Whether the RPC returns an operation."""
        return bool(self.methods[rpc].output_type.full_name == "google.longrunning.Operation")


def renamed(message: Any, suffix: str) -> Any:
    """A copy that asks for another resource: its id field gets a suffix and its request id is new."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name, descriptor in copy.DESCRIPTOR.fields_by_name.items():
        if name == "request_id" and copy.request_id:
            copy.request_id = str(uuid.uuid4())
        elif name.endswith("_id") and descriptor.type == descriptor.TYPE_STRING and getattr(copy, name):
            setattr(copy, name, getattr(copy, name) + suffix)
    return copy


def comparable(message: Message) -> Message:
    """A copy without what differs between two runs of the same work: names, times, etags and measured seconds."""
    copy = type(message)()
    copy.CopyFrom(message)
    for descriptor, value in copy.ListFields():
        volatile = {"name", "create_time", "update_time", "etag", "expire_time"}
        if descriptor.name in volatile or descriptor.name.endswith("_seconds"):
            copy.ClearField(descriptor.name)
        elif descriptor.message_type is not None and not descriptor.is_repeated:
            value.CopyFrom(comparable(value))
    return copy


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()
