"""`lyceum call` and `lyceum ops` against a real server, and against one that knows nothing of Lyceum."""

import base64
import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection
from typer.testing import CliRunner, Result

from lyceum.common.v1 import common_pb2
from lyceum.testing.v1 import testing_pb2
from lyceum_cli.app import app
from lyceum_cli.connection import connect
from lyceum_runtime import testing
from lyceum_runtime.testing_service import ENTRY

ECHO = "lyceum.testing.v1.EchoService"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One state directory for the server and the commands, so that both write their spans to one store."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LYCEUM_STATE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def target(state: Path) -> Iterator[str]:
    with testing.serve(ENTRY, state_dir=state) as served:
        yield served.target


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def lines(result: Result) -> list[object]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def error_line(result: Result) -> str:
    """The one line that a failed command ends with."""
    assert "Traceback" not in result.output
    found = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(found) == 1, result.stderr
    return found[0]


def call(target: str, *arguments: str, stdin: str | None = None) -> Result:
    return run("call", "testing", *arguments, "--target", target, stdin=stdin)


def test_unary_returns_the_response_with_the_protos_field_names(target: str) -> None:
    (response,) = lines(call(target, "Echo", '{"text": "grüße", "wait_seconds": 0.01, "values": [1, 2.5]}', "--json"))
    assert response == {"text": "grüße", "values": [1.0, 2.5], "padding": ""}


def test_without_json_a_response_is_indented_json(target: str) -> None:
    result = call(target, "echo", '{"text": "a"}')
    assert json.loads(result.stdout)["text"] == "a"
    assert len(result.stdout.splitlines()) > 1


def test_an_empty_request_is_the_default_message(target: str) -> None:
    assert lines(call(target, "Echo", "--json")) == [{"text": "", "values": [], "padding": ""}]


def test_a_request_comes_from_a_file_or_standard_input(target: str, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"text": "from a file"}')
    assert lines(call(target, "Echo", "--file", str(file), "--json"))[0]["text"] == "from a file"  # type: ignore[index]
    assert lines(call(target, "Echo", "-", "--json", stdin='{\n"text": "in"\n}'))[0]["text"] == "in"  # type: ignore[index]


def test_a_server_stream_is_one_json_line_a_message_in_order(target: str) -> None:
    assert lines(call(target, "Spin", '{"count": 4}')) == [{"index": str(index)} for index in range(4)]


def test_a_client_stream_takes_lines_an_array_or_objects_over_many_lines(target: str) -> None:
    expected = [{"sum": "3", "count": "2"}]
    assert lines(call(target, "Collect", "-", "--json", stdin='{"value": 1}\n\n{"value": 2}\n')) == expected
    assert lines(call(target, "Collect", '[{"value": 1}, {"value": "2"}]', "--json")) == expected
    assert lines(call(target, "Collect", "-", "--json", stdin='{\n  "value": 1\n}\n{\n  "value": 2\n}\n')) == expected


def test_a_conversation_answers_each_line_before_the_next_one_is_written(target: str) -> None:
    command = [sys.executable, "-m", "lyceum_cli", "call", "testing", "Converse", "-", "--target", target]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for index, text in enumerate(("one", "two")):
            child.stdin.write(json.dumps({"text": text}) + "\n")
            child.stdin.flush()
            assert json.loads(child.stdout.readline()) == {"index": str(index), "text": text}
        child.stdin.close()
        assert child.wait(10) == 0


def test_wait_prints_the_unpacked_response_of_an_operation(target: str) -> None:
    (response,) = lines(call(target, "Train", '{"steps": 3, "seed": {"value": 7}}', "--wait", "--json"))
    assert response == {"digest": _chain(7, 3), "seed": {"value": "7"}, "steps": 3}


def _chain(seed: int, steps: int) -> str:
    digest = seed.to_bytes(8, "little")
    for _ in range(steps):
        digest = hashlib.sha256(digest).digest()
    return base64.b64encode(digest).decode()


def test_a_failed_operation_ends_with_its_error_and_status_1(target: str) -> None:
    result = call(target, "Train", '{"steps": 3, "fail_at": 2}', "--wait")
    assert result.exit_code == 1
    assert "FAILED_PRECONDITION: fail_at asked for a failure at step 2" in error_line(result)
    assert "FAIL_AT" in result.stderr


def test_a_running_operation_is_listed_watched_cancelled_and_deleted(target: str) -> None:
    (operation,) = lines(call(target, "Train", '{"steps": 1000, "seconds_per_step": 0.02}', "--json"))
    name = operation["name"]  # type: ignore[index]
    assert operation["done"] is False  # type: ignore[index]
    listed = lines(run("ops", "list", "--target", target, "--json"))[0]["operations"]  # type: ignore[index]
    assert name in [item["name"] for item in listed]
    states: list[Result] = []
    watching = threading.Thread(target=lambda: states.append(_subprocess("ops", "watch", name, "--target", target)))
    watching.start()
    time.sleep(1.5)
    cancelled = run("ops", "cancel", name.removeprefix("operations/"), "--target", target, "--json")
    assert lines(cancelled) == [{"name": name}]
    watching.join(20)
    watch = states[0]
    seen = [json.loads(line) for line in watch.stdout.splitlines()]
    assert watch.exit_code == 1
    assert "CANCELLED" in watch.stderr
    assert [state["done"] for state in seen] == [False] * (len(seen) - 1) + [True]
    assert run("ops", "delete", name, "--target", target).exit_code == 0
    gone = run("ops", "get", name, "--target", target)
    assert gone.exit_code == 1
    assert "there is no operation" in error_line(gone)


class _Ended:
    """Result of a command in a process of its own, read as CliRunner's."""

    def __init__(self, ended: "subprocess.CompletedProcess[str]") -> None:
        self.exit_code, self.stdout, self.stderr = ended.returncode, ended.stdout, ended.stderr
        self.output = ended.stdout + ended.stderr


def _subprocess(*arguments: str) -> Result:
    command = [sys.executable, "-m", "lyceum_cli", *arguments]
    return _Ended(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False))  # type: ignore[return-value]


def test_waiting_gives_up_after_its_timeout_and_the_operation_goes_on(target: str) -> None:
    (operation,) = lines(call(target, "Train", '{"steps": 500, "seconds_per_step": 0.02}', "--json"))
    name = operation["name"]  # type: ignore[index]
    result = run("ops", "wait", name, "--timeout", "0.3", "--target", target)
    assert result.exit_code == 1
    assert "is not done after 0.3 s" in error_line(result)
    assert lines(run("ops", "get", name, "--target", target, "--json"))[0]["done"] is False  # type: ignore[index]
    run("ops", "cancel", name, "--target", target)


def test_field_violations_are_a_table_of_every_wrong_field(target: str) -> None:
    result = call(target, "Echo", '{"wait_seconds": 99, "constraints": [{"lower": 2, "upper": 1}]}')
    assert result.exit_code == 1
    assert "2 fields" in error_line(result)
    assert re.search(r"^constraints\[0\] +lower must not exceed upper$", result.stderr, re.MULTILINE)
    assert re.search(r"^wait_seconds +must be", result.stderr, re.MULTILINE)
    assert result.stdout == ""


def test_with_json_an_error_is_one_json_object_on_standard_error(target: str) -> None:
    result = call(target, "Echo", '{"wait_seconds": 99}', "--json")
    error = json.loads(result.stderr)["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert error["details"][0]["field_violations"][0]["field"] == "wait_seconds"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["Echo", '{"text":'], 2, "line 1, column 9"),
        (["Echo", "[1]"], 2, "EchoRequest is a JSON object, not int"),
        (["Echo", '{"txt": "a"}'], 2, "no field txt, did you mean text?"),
        (["Echo", '{"constraints": [{"lowr": 1}]}'], 2, "no field constraints[0].lowr, did you mean lower?"),
        (["Echo", '{"values": "many"}'], 2, "values"),
        (["Echo", '{"text": "a"} {"text": "b"}'], 2, "takes one request, not 2"),
        (["Echo", "[" * 100_000], 2, "nested too deeply"),
        (["Echo", '{"wait_seconds": ' + "9" * 5000 + "}"], 2, "too many digits"),
        (["Collect", "\n".join(['{"value": 1}', '{"value":']), "--timeout", "9"], 2, "is not JSON"),
        (["Echo", "{}", "--timeout", "inf"], 2, "less than or equal to"),
        (["Echo", "{}", "--file", "x.json"], 2, "given twice"),
        (["Echo", "--file", "/nonexistent/x.json"], 2, "cannot read /nonexistent/x.json"),
        (["Ecko"], 2, "did you mean Echo?"),
        (["Collect", '[{"value": 1}, {"valu": 2}]'], 2, "did you mean value?"),
        (["Collect", '[{"value": 1}, {"value": -2}]'], 1, "INVALID_ARGUMENT"),
        (["Echo", '{"wait_seconds": 5}', "--timeout", "0.2"], 1, "give it longer with --timeout"),
        (["Echo", "--bogus"], 2, "No such option: --bogus"),
        (["Fail", '{"code": 5, "message": "libraries/x does not exist"}'], 1, "NOT_FOUND: libraries/x does not exist"),
        (["other.Service/Get"], 2, "has no service other.Service"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(target: str, arguments: list[str], code: int, expected: str) -> None:
    result = call(target, *arguments)
    assert expected in error_line(result)
    assert result.exit_code == code


def test_bytes_that_are_not_text_and_a_closed_standard_input_are_one_line(target: str) -> None:
    command = [sys.executable, "-m", "lyceum_cli", "call", ECHO, "Echo", "-", "--target", target]
    result = subprocess.run(command, input=b'{"text": "\xff"}', capture_output=True, check=False)
    assert (result.returncode, b"text" in result.stderr, b"Traceback" in result.stderr) == (2, True, False)
    closed = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *command], capture_output=True, text=True, check=False)
    assert closed.returncode == 2
    assert "standard input is closed" in closed.stderr


def test_an_output_that_cannot_be_written_is_one_line(target: str) -> None:
    command = [sys.executable, "-m", "lyceum_cli", "call", ECHO, "Echo", "{}", "--target", target, "--json"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert "unexpected" not in result.stderr


def test_an_unexpected_error_of_the_server_shows_only_its_reference(target: str) -> None:
    result = call(target, "Fail", '{"message": "secret"}')
    assert re.search("INTERNAL: .* reference [0-9a-f]+", error_line(result))
    assert "secret" not in error_line(result)


def test_operations_of_another_service_in_the_same_database_are_not_listed_as_a_service_s_own(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LYCEUM_APEX_TARGET", target)
    started = lines(run("call", "testing", "Train", '{"steps": 1}', "--target", target, "--json"))[0]["name"]  # type: ignore[index]

    def listed(*where: str) -> list[str]:
        (answer,) = lines(run("ops", "list", *where, "--json"))
        return [operation["name"] for operation in answer["operations"]]  # type: ignore[index]

    assert started in listed("--target", target)
    assert started not in listed("--service", "apex")


def test_a_server_that_is_down_is_one_line_saying_how_to_start_it(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        monkeypatch.setenv("LYCEUM_APEX_TARGET", address)
        result = run("call", "apex", "GetLibrary")
    assert f"no server answers at {address}; start it with `lyceum up apex`" in error_line(result)
    assert result.exit_code == 1


def test_a_server_of_no_known_service_is_not_said_to_be_started_by_its_name(state: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        result = run("call", "testing", "Echo", "--target", address)
    assert error_line(result).endswith(f"no server answers at {address}; start it, or give another --target")
    assert "lyceum up" not in result.stderr
    assert result.exit_code == 1


def test_an_error_comes_first_and_the_trace_that_explains_it_last(target: str) -> None:
    failed = call(target, "Fail", '{"code": 5, "message": "libraries/x"}')
    assert failed.exit_code == 1
    error, trace = failed.stderr.splitlines()
    assert error.startswith("error: NOT_FOUND")
    assert re.fullmatch("trace [0-9a-f]{32}", trace)
    refused = call(target, "Echo", '{"wait_seconds": 99}')
    assert re.fullmatch("trace [0-9a-f]{32}", refused.stderr.splitlines()[-1])
    assert "trace" not in call(target, "Fail", '{"code": 5}', "--json").stderr


def test_an_unknown_service_is_one_line_with_the_nearest_name(state: Path) -> None:
    result = run("call", "apxe", "GetLibrary")
    assert "there is no service apxe; did you mean apex?" in error_line(result)
    assert result.exit_code == 2


def test_without_an_rpc_the_rpcs_are_listed_with_their_kinds(target: str) -> None:
    (listing,) = lines(call(target, "--json"))
    rows = {row["rpc"]: (row["kind"], row["response"]) for row in listing["rpcs"]}  # type: ignore[index]
    assert rows["Spin"] == ("server stream", "SpinResponse")
    assert rows["Converse"][0] == "bidirectional"
    assert rows["Train"] == ("operation", "Operation -> TrainResponse")
    assert re.search(r"^Train +operation", call(target).stdout, re.MULTILINE)


def test_describe_shows_types_and_rules_of_nested_fields(target: str) -> None:
    (described,) = lines(call(target, "Echo", "--describe", "--json"))
    fields = {field["path"]: field for field in described["fields"]}  # type: ignore[index]
    assert fields["text"]["type"] == "string"
    assert fields["text"]["rules"] == {"max_len": "1000000"}
    assert fields["values[]"]["rules"] == {"max_items": "1000", "items.finite": True}
    assert fields["constraints[]"]["rules"]["rule"] == "lower must not exceed upper"
    assert fields["constraints[].lower"]["type"] == "double"
    assert "DATA_TYPE_FLOAT64" in fields["tensor.dtype"]["values"]
    assert re.search(r"^text +string +max_len 1000000$", call(target, "Echo", "--describe").stdout, re.MULTILINE)


def test_a_call_and_its_server_share_one_trace_without_missing_parents(target: str) -> None:
    result = _subprocess("call", "testing", "Echo", '{"text": "traced"}', "--target", target)
    trace_id = re.search(r"^trace ([0-9a-f]{32})$", result.stderr, re.MULTILINE)
    assert trace_id is not None
    deadline = time.monotonic() + 10
    while True:
        shown = run("trace", "show", trace_id[1][:12], "--json")
        found = json.loads(shown.stdout) if shown.exit_code == 0 else {"spans": [], "missing_parents": []}
        if len(found["spans"]) >= 3 and not found["missing_parents"]:
            break  # the command, its call, and the server's side of it
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    assert found["trace_id"] == trace_id[1]
    roots = [span["name"] for span in found["spans"] if span["parent_id"] is None]
    assert roots == ["lyceum call"]


@pytest.fixture
def foreign() -> Iterator[str]:
    """A plain gRPC server with types that this process's default pool has never seen, and with reflection."""
    file = descriptor_pb2.FileDescriptorProto(name="zoo/v1/zoo.proto", package="zoo.v1", syntax="proto3")
    file.dependency.extend(["google/protobuf/any.proto", "lyceum/common/v1/common.proto"])
    message = file.message_type.add(name="Box")
    kinds = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="big_name", number=1, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    for number, (name, kind) in enumerate(
        [("inside", ".google.protobuf.Any"), ("batch", ".lyceum.common.v1.ArrowBatch")], 2
    ):
        message.field.add(name=name, number=number, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_OPTIONAL, type_name=kind)
    file.service.add(name="Zoo").method.add(name="Swap", input_type=".zoo.v1.Box", output_type=".zoo.v1.Box")
    pool = descriptor_pool.DescriptorPool()
    _add_with_dependencies(pool, common_pb2.DESCRIPTOR, set())
    _add_with_dependencies(pool, descriptor_pool.Default().FindFileByName("google/protobuf/any.proto"), set())
    pool.AddSerializedFile(file.SerializeToString())

    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: request)  # bytes in, the same bytes out
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("zoo.v1.Zoo", {"Swap": handler}),))
    reflection.enable_server_reflection(["zoo.v1.Zoo"], server, pool=pool)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def _add_with_dependencies(pool: descriptor_pool.DescriptorPool, file: object, added: set[str]) -> None:
    for dependency in file.dependencies:  # type: ignore[attr-defined]
        _add_with_dependencies(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)  # type: ignore[attr-defined]
    pool.AddSerializedFile(proto.SerializeToString())


def test_any_server_with_reflection_can_be_called(foreign: str, state: Path) -> None:
    request = {
        "big_name": "9007199254740993",
        "inside": {"@type": "type.googleapis.com/zoo.v1.Box", "big_name": "5"},
    }
    (response,) = lines(run("call", "zoo", "Swap", json.dumps(request), "--target", foreign, "--json"))
    assert response == request


def test_an_any_of_an_unknown_type_keeps_its_bytes(foreign: str, state: Path) -> None:
    inner = testing_pb2.SpinResponse(index=3).SerializeToString()
    with connect("zoo", foreign) as server:
        rpc = server.rpc(server.service("Zoo"), "swap")
        request = server.request(rpc, {})
        request.inside.type_url = "type.googleapis.com/nowhere.v1.Thing"  # type: ignore[attr-defined]
        request.inside.value = inner  # type: ignore[attr-defined]
        (response,) = server.call(rpc, iter([request]), timeout=5)
        shown = server.to_json(response)["inside"]
    assert shown == {"@type": "type.googleapis.com/nowhere.v1.Thing", "value": "CAM="}


def test_an_arrow_batch_is_shown_as_rows(foreign: str, state: Path) -> None:
    rows = [{"smiles": "CCO", "score": 1.5}, {"smiles": "C", "score": float("nan")}]
    batch = pa.RecordBatch.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with connect("zoo", foreign) as server:
        rpc = server.rpc(server.service("Zoo"), "Swap")
        request = server.request(rpc, {"batch": {"row_count": 2}})
        request.batch.ipc_stream = sink.getvalue().to_pybytes()  # type: ignore[attr-defined]
        (response,) = server.call(rpc, iter([request]), timeout=5)
        shown = server.to_json(response)["batch"]
    assert shown == {
        "row_count": "2",
        "rows": [{"smiles": "CCO", "score": 1.5}, {"smiles": "C", "score": "NaN"}],
    }


def test_a_server_without_reflection_is_named_as_such(state: Path) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    result = run("call", "zoo", "Swap", "--target", f"127.0.0.1:{port}")
    server.stop(None)
    assert "has no reflection" in error_line(result)
    assert result.exit_code == 1
