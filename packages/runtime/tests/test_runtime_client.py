"""The client: errors, deadlines, request ids, retries, waiting, artifacts."""

import dataclasses
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from google.longrunning import operations_pb2

from lyceum.artifacts.v1 import artifacts_pb2
from lyceum.operations.v1 import operations_pb2 as watching_pb2
from lyceum.testing.v1 import testing_pb2
from lyceum_runtime import client as clients
from lyceum_runtime import errors, testing
from lyceum_runtime.definition import Call, ServiceDefinition
from lyceum_runtime.testing_service import ENTRY
from lyceum_runtime.testing_service.service import definition

Echo = testing_pb2.EchoRequest
Train = testing_pb2.TrainRequest
MIB = 1 << 20


@pytest.fixture(scope="module")
def served() -> Iterator[testing.Served]:
    with testing.serve(ENTRY) as served:
        yield served


def test_the_address_comes_from_the_argument_the_variable_or_the_table(monkeypatch):
    with clients.connect("apex") as client:
        assert client.target == "127.0.0.1:50151"
    monkeypatch.setenv("LYCEUM_APEX_TARGET", "127.0.0.1:7")
    with clients.connect("apex") as client:
        assert client.target == "127.0.0.1:7"
    with clients.connect("apex", target="127.0.0.1:8") as client:
        assert client.target == "127.0.0.1:8"
        with pytest.raises(errors.Unavailable, match=r"no server at 127\.0\.0\.1:8; start it with: lyceum up apex"):
            client.ready(0.2)
    with pytest.raises(errors.ConfigurationError, match="known services: apex"):
        clients.connect("nothing")


def test_a_status_keeps_its_class_text_and_details_over_the_wire():
    raised = errors.FailedPrecondition("the index is older", reason="STALE", subject="libraries/x")

    def fail(request: testing_pb2.FailRequest, call: Call) -> testing_pb2.FailResponse:
        raise raised

    with (
        testing.serve(ServiceDefinition("toy", ENTRY.service, {"Fail": fail}, {})) as other,
        pytest.raises(errors.FailedPrecondition) as caught,
    ):
        other.client.stub.Fail(testing_pb2.FailRequest())
    assert caught.value.status() == raised.status()


def test_errors_of_all_kinds_of_calls_are_service_errors(served):
    stub = served.client.stub
    bad = testing_pb2.CollectRequest(value=-1)
    with pytest.raises(errors.InvalidArgument):
        stub.Collect(iter([bad]))
    with pytest.raises(errors.InvalidArgument):
        list(stub.Spin(testing_pb2.SpinRequest()))
    with pytest.raises(errors.InvalidArgument):
        list(stub.Converse(iter([testing_pb2.ConverseRequest()])))
    pending = stub.Echo.future(Echo(values=[float("nan")]))
    assert isinstance(pending.exception(), errors.InvalidArgument)
    with pytest.raises(errors.InvalidArgument):
        pending.result()


def test_a_call_without_a_timeout_has_the_clients_deadline(served):
    with served.connect("testing", timeout=0.2) as client:
        began = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded):
            client.stub.Echo(Echo(wait_seconds=30))
        assert time.monotonic() - began < 10
        assert client.stub.Echo(Echo(text="longer", wait_seconds=0.5), timeout=10).text == "longer"


def test_an_unset_request_id_is_drawn_for_each_call_and_the_callers_request_is_left_alone(served):
    request = Train(steps=1)
    first, second = (served.client.stub.Train(request) for _ in range(2))
    assert first.name != second.name
    assert request == Train(steps=1)
    request.request_id = str(uuid.uuid4())
    first, second = (served.client.stub.Train(request) for _ in range(2))
    assert first.name == second.name


def test_only_repeatable_calls_are_sent_again_when_the_server_is_unavailable():
    """Train has a request id and is sent again; Echo has none and is not."""
    attempts = {"Echo": 0, "Fail": 0, "Train": 0}

    def echo(request: Echo, call: Call) -> testing_pb2.EchoResponse:
        attempts["Echo"] += 1
        raise errors.Unavailable("away")

    config = clients.service_config(ENTRY.descriptor())
    names = config["methodConfig"][0]["name"]
    assert names == [{"service": ENTRY.service, "method": "Train"}]
    with testing.serve(ServiceDefinition("toy", ENTRY.service, {"Echo": echo}, {})) as other:
        with pytest.raises(errors.Unavailable):
            other.client.stub.Echo(Echo())
        assert attempts["Echo"] == 1


def test_a_read_is_sent_again_until_the_server_is_back(monkeypatch):
    """ListArtifacts, which fails twice with UNAVAILABLE before it answers."""
    from lyceum_runtime import artifacts

    calls = []
    real = artifacts.artifacts_definition

    def flaky() -> ServiceDefinition:
        own = real()

        def listed(request: artifacts_pb2.ListArtifactsRequest, call: Call) -> artifacts_pb2.ListArtifactsResponse:
            calls.append(time.monotonic())
            if len(calls) < 3:
                raise errors.Unavailable("not yet")
            answer: artifacts_pb2.ListArtifactsResponse = own.methods["ListArtifacts"](request, call)
            return answer

        return dataclasses.replace(own, methods={**own.methods, "ListArtifacts": listed})

    monkeypatch.setattr(artifacts, "artifacts_definition", flaky)
    with testing.serve(dataclasses.replace(definition(), long_methods={})) as other:
        assert other.client.artifacts.ListArtifacts(artifacts_pb2.ListArtifactsRequest()).total_size == 0
    assert len(calls) == 3


# Operations ----------------------------------------------------------------------------------------------------------


def test_wait_shows_progress_and_returns_the_response(served):
    seen = []
    operation = served.client.stub.Train(Train(steps=30, seconds_per_step=0.1))
    assert not operation.done
    answer = served.client.wait(operation.name, testing_pb2.TrainResponse, progress=seen.append)
    assert answer.steps == 30
    completed = [state.completed for state in seen]
    assert completed == sorted(completed)
    assert completed[-1] == 30
    assert seen[-1].stage == "train"
    assert len(set(completed)) > 3


def test_a_bar_is_drawn_on_standard_error_when_asked(served, capsys):
    operation = served.client.stub.Train(Train(steps=25, seconds_per_step=0.1))
    served.client.wait(operation, testing_pb2.TrainResponse, progress=True)
    captured = capsys.readouterr()
    assert "train" in captured.err
    assert "25/25" in captured.err
    assert captured.out == ""
    served.client.wait(operation, testing_pb2.TrainResponse)
    assert capsys.readouterr().err == ""


def test_wait_raises_the_operations_own_error(served):
    operation = served.client.stub.Train(Train(steps=30, seconds_per_step=0.1, fail_at=25))
    with pytest.raises(errors.FailedPrecondition, match="failure at step 25") as caught:
        served.client.wait(operation, testing_pb2.TrainResponse)
    assert caught.value.details[0].violations[0].type == "FAIL_AT"


def test_a_wait_that_runs_out_leaves_the_operation_running_and_a_cancel_ends_it(served):
    operation = served.client.stub.Train(Train(steps=1000, seconds_per_step=0.1))
    with pytest.raises(errors.DeadlineExceeded, match="it goes on, wait for it again"):
        served.client.wait(operation, testing_pb2.TrainResponse, timeout=0.5)
    waiting = threading.Thread(
        target=lambda: served.client.operations.CancelOperation(
            operations_pb2.CancelOperationRequest(name=operation.name)
        )
    )
    waiting.start()
    began = time.monotonic()
    with pytest.raises(errors.Cancelled):
        served.client.wait(operation, testing_pb2.TrainResponse, timeout=30)
    assert time.monotonic() - began < 10
    waiting.join()


def test_a_watch_tries_again_with_longer_and_longer_pauses_until_the_server_is_back(served, monkeypatch):
    clock, pauses = [1000.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(clients, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    running, ended = (operations_pb2.Operation(name="operations/x", done=done) for done in (False, True))
    gone, late = errors.Unavailable("gone"), errors.DeadlineExceeded("late")
    rounds = [[gone]] * 6 + [[running, gone], [running, late], [gone], [running, ended]]

    class Watching:
        def WatchOperation(self, request, timeout):
            for step in rounds.pop(0) if rounds else [gone]:
                if isinstance(step, Exception):
                    raise step
                yield watching_pb2.WatchOperationResponse(operation=step)

    monkeypatch.setattr(served.client, "_watching", Watching())
    assert [state.done for state in served.client.watch("operations/x")] == [False, False, False, True]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.2, 0.2]  # a state in between begins anew
    pauses.clear()
    with pytest.raises(errors.Unavailable):
        list(served.client.watch("operations/x"))
    assert 60 <= sum(pauses) <= 63
    pauses.clear()
    with pytest.raises(errors.DeadlineExceeded, match="not done after 5 s"):
        list(served.client.watch("operations/x", timeout=5))
    assert 5 <= sum(pauses) <= 7


def test_an_unknown_operation_is_not_found(served):
    with pytest.raises(errors.NotFound):
        served.client.wait("operations/nothing", testing_pb2.TrainResponse)


def test_unpack_refuses_another_type(served):
    operation = served.client.stub.Train(Train(steps=1))
    with pytest.raises(TypeError, match=r"is a lyceum\.testing\.v1\.TrainResponse, not a"):
        served.client.wait(operation, testing_pb2.EchoResponse)


# Artifacts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blob(served: testing.Served) -> tuple[bytes, str]:
    data = bytes(range(256)) * (3 * MIB // 256) + b"tail"
    ref = served.client.upload(data, media_type="text/plain")
    assert (ref.sha256, ref.size_bytes, ref.media_type) == (hashlib.sha256(data).hexdigest(), len(data), "text/plain")
    return data, ref.sha256


def test_an_upload_of_a_file_is_the_upload_of_its_bytes(served, blob, tmp_path):
    data, sha256 = blob
    (tmp_path / "file").write_bytes(data)
    assert served.client.upload(tmp_path / "file").sha256 == sha256
    assert served.client.read(sha256) == data


def test_a_download_appears_whole_and_goes_on_where_it_ended(served, blob, tmp_path, monkeypatch):
    data, sha256 = blob
    path = tmp_path / "copy"
    part = tmp_path / f"copy.{sha256[:8]}.part"
    part.write_bytes(data[:MIB])
    offsets = []
    download = served.client._download
    monkeypatch.setattr(served.client, "_download", lambda name, at: offsets.append(at) or download(name, at))
    assert served.client.download(sha256, path) == path
    assert path.read_bytes() == data
    assert offsets == [MIB]
    assert not part.exists()


def test_a_damaged_download_is_refused_and_leaves_nothing(served, blob, tmp_path):
    data, sha256 = blob
    part = tmp_path / f"copy.{sha256[:8]}.part"
    part.write_bytes(b"wrong" + data[5:MIB])
    with pytest.raises(errors.FailedPrecondition, match="do not have that SHA-256"):
        served.client.download(sha256, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_artifact_is_not_found_and_leaves_no_file(served, tmp_path):
    with pytest.raises(errors.NotFound):
        served.client.download("0" * 64, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_that_is_damaged_in_the_store_leaves_no_part_of_it(served, tmp_path):
    ref = served.client.upload(os.urandom(3 * MIB))
    [stored] = served.settings.state_dir.glob(f"artifacts/sha256/*/{ref.sha256}")
    stored.chmod(0o600)
    with stored.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"damage")
    with pytest.raises(errors.FailedPrecondition, match="is damaged in the store"):
        served.client.download(ref, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_interrupted_keeps_its_part_to_go_on_from(served, blob, tmp_path, monkeypatch):
    data, sha256 = blob

    def broken(name, at):
        yield data[at : at + MIB]
        raise errors.Unavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(served.client, "_download", broken)
        with pytest.raises(errors.Unavailable):
            served.client.download(sha256, tmp_path / "copy")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [data[:MIB]]
    assert served.client.download(sha256, tmp_path / "copy").read_bytes() == data
