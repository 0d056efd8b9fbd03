"""What every service must do, tested for each one in the table of services over a real port, from its examples."""

import random
import re
import time
from collections.abc import Iterator

import grpc
import pytest
from conformance.mutations import violations
from conformance.subject import Outcome, Subject, comparable, renamed
from google.protobuf import descriptor_pb2
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lyceum.operations.v1 import operations_pb2 as watching_pb2  # noqa: F401  (its messages are in answers)
from lyceum_runtime import telemetry
from lyceum_runtime.services import load_services
from lyceum_runtime.spans import SpanStore
from lyceum_runtime.testing import serve
from lyceum_runtime.testing_service import ENTRY

ENTRIES = {ENTRY.name: ENTRY, **load_services()}
FORBIDDEN = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
STOP_SECONDS = 2.0


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A served service whose examples have been run in order, all but the deletions."""
    entry = ENTRIES[request.param]
    with serve(entry) as served:
        subject = Subject(entry, served)
        for rpc, messages in subject.load():
            if rpc.startswith("Delete"):
                continue
            outcome = subject.call(rpc, messages)
            if subject.long_running(rpc) and outcome.code is grpc.StatusCode.OK:
                outcome.messages = [subject.finished(outcome)]
            subject.answers.setdefault(rpc, outcome)
        yield subject
        subject.channel.close()


def test_every_rpc_has_an_example_that_succeeds(subject: Subject) -> None:
    assert set(subject.examples) == set(subject.methods)
    for rpc, outcome in subject.answers.items():
        if subject.entry is ENTRY and rpc == "Fail":
            continue
        assert outcome.code is grpc.StatusCode.OK, f"{rpc}: {outcome.code} {outcome.text}"
        if subject.long_running(rpc):
            assert outcome.messages[0].WhichOneof("result") == "response", f"{rpc}: {outcome.messages[0].error}"


def test_health_is_reported_for_the_service_and_for_all(subject: Subject) -> None:
    stub = health_pb2_grpc.HealthStub(subject.channel)
    for name in ("", subject.entry.service):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_gives_the_whole_schema(subject: Subject) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(subject.channel)
    listed = next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
    assert subject.entry.service in {item.name for item in listed.list_services_response.service}
    wanted, seen = [subject.service.file.name], set()
    while wanted:
        name = wanted.pop()
        answer = next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(file_by_filename=name)])))
        assert not answer.HasField("error_response"), name
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name not in seen:
                seen.add(file.name)
                wanted += [dependency for dependency in file.dependency if dependency not in seen]


def test_each_broken_rule_is_refused_and_its_field_named(subject: Subject) -> None:
    tried = 0
    for rpc, messages in subject.examples.items():
        for violation in violations(messages[0]):
            outcome = subject.call(rpc, [violation.message, *messages[1:]])
            where = f"{rpc}: {violation.path} ({violation.rule})"
            assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT, f"{where}: {outcome.code} {outcome.text}"
            ends = tuple(
                name for name in outcome.fields if name == violation.path or name.endswith("." + violation.path)
            )
            assert ends, f"{where}: names {outcome.fields}"
            tried += 1
    assert tried > len(subject.methods) / 2


def test_random_bytes_are_never_an_internal_error(subject: Subject) -> None:
    source = random.Random(1)
    for rpc in subject.methods:
        for _ in range(30):
            outcome = subject.call(rpc, [source.randbytes(source.randrange(1, 200))])
            assert outcome.code not in FORBIDDEN or _asked_to_fail(subject, rpc), (
                f"{rpc}: {outcome.code} {outcome.text}"
            )


def test_messages_with_random_fields_are_never_an_internal_error(subject: Subject) -> None:
    source = random.Random(2)
    for rpc, messages in subject.examples.items():
        if rpc.startswith("Delete") or _asked_to_fail(subject, rpc):
            continue
        for _ in range(15):
            outcome = subject.call(rpc, [_shaken(message, source) for message in messages], timeout=5)
            assert outcome.code not in FORBIDDEN, f"{rpc}: {outcome.code} {outcome.text}"
            if subject.long_running(rpc) and outcome.code is grpc.StatusCode.OK:
                operation = subject.finished(outcome)
                assert operation.error.code not in {code_pb2.INTERNAL, code_pb2.UNKNOWN}, f"{rpc}: {operation.error}"


def _asked_to_fail(subject: Subject, rpc: str) -> bool:
    return subject.entry is ENTRY and rpc == "Fail"


def _shaken(message: object, source: random.Random) -> object:
    """A copy in which one field has another value or none."""
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]
    fields = copy.DESCRIPTOR.fields  # type: ignore[attr-defined]
    chosen = source.choice(list(fields)) if fields else None
    if chosen is None:
        return copy
    if chosen.message_type is not None or chosen.is_repeated or source.random() < 0.3:
        copy.ClearField(chosen.name)  # type: ignore[attr-defined]
    elif chosen.type == chosen.TYPE_STRING:
        setattr(copy, chosen.name, source.choice(["", "a", "ä€\u0000", "x" * 300, "libraries/zzz", "0"]))
    elif chosen.type == chosen.TYPE_BYTES:
        setattr(copy, chosen.name, source.randbytes(20))
    elif chosen.type == chosen.TYPE_BOOL:
        setattr(copy, chosen.name, source.random() < 0.5)
    elif chosen.type in {chosen.TYPE_DOUBLE, chosen.TYPE_FLOAT}:
        setattr(copy, chosen.name, source.choice([0.0, 0.001]))
    else:
        setattr(copy, chosen.name, source.choice([0, 1]))
    return copy


def test_a_deadline_ends_every_call_and_frees_its_thread(subject: Subject) -> None:
    for rpc, messages in subject.examples.items():
        if rpc.startswith("Delete") or subject.long_running(rpc):
            continue
        outcome = subject.call(rpc, messages, timeout=0.002)
        assert outcome.code not in FORBIDDEN or _asked_to_fail(subject, rpc), f"{rpc}: {outcome.code}"
    _quiet(subject)


def test_a_cancelled_call_frees_its_thread(subject: Subject) -> None:
    for rpc, messages in subject.examples.items():
        method = subject.methods[rpc]
        if not method.server_streaming or method.client_streaming:
            continue
        path = f"/{subject.service.full_name}/{rpc}"
        stream = subject.channel.unary_stream(path, request_serializer=lambda m: m.SerializeToString())(messages[0])
        next(iter(stream))
        stream.cancel()
    _quiet(subject)


def _quiet(subject: Subject) -> None:
    end = time.monotonic() + STOP_SECONDS
    while subject.served.server.abandoned and time.monotonic() < end:
        time.sleep(0.01)
    assert subject.served.server.abandoned == 0


def test_a_cancelled_operation_is_done_within_two_seconds(subject: Subject) -> None:
    from google.longrunning import operations_pb2

    for rpc in filter(subject.long_running, subject.examples):
        outcome = subject.call(rpc, [renamed(subject.examples[rpc][0], "-cancelled")])
        if outcome.code is not grpc.StatusCode.OK:
            continue  # what can be asked once only
        operation = outcome.messages[0]
        begun = time.monotonic()
        subject.served.client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))
        operation = subject.finished(outcome)
        assert time.monotonic() - begun < STOP_SECONDS, rpc
        assert operation.WhichOneof("result") == "response" or operation.error.code == code_pb2.CANCELLED, rpc


def test_the_same_seed_gives_the_same_answer(subject: Subject) -> None:
    for rpc, messages in subject.examples.items():
        if rpc.startswith(("Delete", "List")) or subject.answers[rpc].code is not grpc.StatusCode.OK:
            continue
        outcome = subject.call(rpc, [renamed(message, "-again") for message in messages])
        if subject.long_running(rpc):
            if outcome.code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}:
                continue  # what can be asked once only, such as adding a property
            first, second = subject.answers[rpc].messages[0].response, subject.finished(outcome).response
            assert first.type_url == second.type_url, rpc
            assert comparable(_unpacked(first)) == comparable(_unpacked(second)), rpc
        else:
            assert outcome.code is grpc.StatusCode.OK, f"{rpc}: {outcome.text}"
            assert _content(outcome) == _content(subject.answers[rpc]), rpc


def _unpacked(box: object) -> object:
    from google.protobuf import descriptor_pool, message_factory

    name = box.type_url.rpartition("/")[2]  # type: ignore[attr-defined]
    message = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))()
    box.Unpack(message)  # type: ignore[attr-defined]
    return message


def _content(outcome: Outcome) -> list[object]:
    """The messages without how far the work had come when somebody looked."""
    return [
        comparable(message)
        for message in outcome.messages
        if "progress" not in {f.name for f, _ in message.ListFields()}
    ]


def test_lists_page_completely(subject: Subject) -> None:
    for rpc, messages in subject.examples.items():
        if not rpc.startswith("List"):
            continue
        whole = subject.call(rpc, [_paged(messages[0], 1000, "")]).messages[0]
        (items,) = [f.name for f in whole.DESCRIPTOR.fields if f.is_repeated]
        names, token = [], ""
        while True:
            page = subject.call(rpc, [_paged(messages[0], 1, token)]).messages[0]
            assert len(getattr(page, items)) <= 1
            assert page.total_size == whole.total_size
            names += [item.name for item in getattr(page, items)]
            token = page.next_page_token
            if not token:
                break
        assert names == [item.name for item in getattr(whole, items)], rpc
        assert len(names) == whole.total_size >= 1
        for bad in ("no-token", token + "x"):
            outcome = subject.call(rpc, [_paged(messages[0], 1, bad)])
            assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
            assert outcome.fields == ["page_token"]


def _paged(message: object, size: int, token: str) -> object:
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]
    copy.page_size, copy.page_token = size, token  # type: ignore[attr-defined]
    return copy


def test_unknown_names_are_not_found(subject: Subject) -> None:
    name = re.compile(r"[a-z][A-Za-z]*/[a-z0-9-]+(/[a-z][A-Za-z]*/[a-z0-9-]+)*")
    for rpc, messages in subject.examples.items():
        for descriptor, value in messages[0].ListFields():
            if descriptor.type != descriptor.TYPE_STRING or descriptor.is_repeated or not name.fullmatch(value):
                continue
            copy = renamed(messages[0], "-unknown")
            setattr(copy, descriptor.name, value.rpartition("/")[0] + "/no-such-thing")
            outcome = subject.call(rpc, [copy])
            assert outcome.code is grpc.StatusCode.NOT_FOUND, f"{rpc} {descriptor.name}: {outcome.code} {outcome.text}"


def test_the_callers_trace_goes_on_in_the_server(subject: Subject) -> None:
    trace, parent = f"{random.Random(3).getrandbits(128):032x}", f"{random.Random(4).getrandbits(64):016x}"
    rpc = next(rpc for rpc in subject.examples if not rpc.startswith("Delete") and not subject.long_running(rpc))
    subject.call(rpc, subject.examples[rpc], metadata=(("traceparent", f"00-{trace}-{parent}-01"),))
    store = SpanStore(subject.served.settings.state_dir / "spans.db")
    end = time.monotonic() + 10.0
    while not (spans := [span for span in store.trace(trace) if span.name.endswith(rpc)]) and time.monotonic() < end:
        telemetry.flush()
    assert [span.parent_id for span in spans] == [parent]
