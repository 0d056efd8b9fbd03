"""One process's operations: the whole life of an operation, request ids, lists, and what is stored."""

import base64
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from google.longrunning import operations_pb2
from google.protobuf import struct_pb2
from google.rpc import code_pb2
from opentelemetry import trace

from lyceum.artifacts.v1 import artifacts_pb2
from lyceum.common.v1 import common_pb2
from lyceum.operations.v1 import operations_pb2 as lyceum_operations_pb2
from lyceum.testing.v1 import testing_pb2
from lyceum_base.checkpoint import Checkpoint
from lyceum_runtime import dbos_runner, operations
from lyceum_runtime.artifacts import ArtifactStore
from lyceum_runtime.database import Database, StateError
from lyceum_runtime.definition import Call, LongMethod, ServiceDefinition
from lyceum_runtime.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError, Unavailable
from lyceum_runtime.operation_store import NewOperation
from lyceum_runtime.operations import OperationsEngine, operations_definitions
from lyceum_runtime.settings import Settings
from lyceum_runtime.testing_service import service as testing_service

TENANT = "default"


class Toy:
    """Methods of a second service, whose runs the tests can see and hold."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.trace_ids: set[int] = set()

    def hold(self, request: struct_pb2.Struct, call: Call, resume: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
        """Waits for the gate and never looks at should_stop before."""
        self.gate.wait(10)
        yield Checkpoint({"x": np.arange(4.0)}, "hold", 1, 1)

    def lose(self, request: struct_pb2.Struct, call: Call, resume: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
        """Loses a worker process when the gate opens."""
        yield Checkpoint({"x": 1}, "lose", 0, 1)
        self.gate.wait(10)
        raise BrokenPipeError("a worker ended")

    def crash(self, request: struct_pb2.Struct, call: Call, resume: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
        """Fails with a text that must stay inside."""
        yield Checkpoint({"x": 1}, "crash", 0, 1)
        raise ValueError("secret-patient-name")

    def store(self, request: struct_pb2.Struct, call: Call, resume: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
        """Puts an artifact, with ticks before and after the only state."""
        self.trace_ids.add(trace.get_current_span().get_span_context().trace_id)
        call.on_progress("read", 1, 2, {"rows": 3.0})
        yield Checkpoint(None, "read", 2, 2)
        yield Checkpoint({"text": "kept"}, "store", 1, 1)

    def finish(self, request: struct_pb2.Struct, state: Mapping[str, Any], call: Call) -> struct_pb2.Struct:
        """What was reached, and the artifact if there is a text."""
        self.trace_ids.add(trace.get_current_span().get_span_context().trace_id)
        response = struct_pb2.Struct()
        response["keys"] = sorted(state)
        if "text" in state:
            response["sha256"] = call.artifacts.put_bytes(state["text"].encode(), "text/plain").sha256
        return response

    def check(self, request: struct_pb2.Struct, call: Call) -> None:
        """Refuses what says so."""
        if "refuse" in request:
            raise InvalidArgument(("refuse", "refused"))

    def definition(self) -> ServiceDefinition:
        """The service `toy`."""

        def method(run: Any) -> LongMethod:
            return LongMethod(struct_pb2.Struct, struct_pb2.Struct, run, self.finish, self.check)

        runs = {"Hold": self.hold, "Crash": self.crash, "Store": self.store, "Lose": self.lose}
        methods = {name: method(run) for name, run in runs.items()}
        return ServiceDefinition("toy", "test.Toy", {}, methods)


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(state_dir=tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    yield database
    database.close()


@pytest.fixture(scope="module")
def artifacts(settings: Settings, database: Database) -> ArtifactStore:
    return ArtifactStore(settings, database)


@pytest.fixture(scope="module")
def engine(settings: Settings, database: Database, artifacts: ArtifactStore, toy: Toy) -> Iterator[OperationsEngine]:
    definitions = {"testing": testing_service.definition(), "toy": toy.definition()}
    engine = OperationsEngine(settings, database, artifacts, definitions.__getitem__)
    engine.launch(list(definitions))
    yield engine
    engine.close()


def train(engine: OperationsEngine, request_id: str = "", **fields: Any) -> operations_pb2.Operation:
    request = testing_pb2.TrainRequest(request_id=request_id, **fields)
    return engine.start("testing", "Train", request, TENANT, request_id)


def struct(**fields: Any) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(fields)
    return message


def done(engine: OperationsEngine, operation: operations_pb2.Operation) -> operations_pb2.Operation:
    finished = engine.wait(operation.name, TENANT, 30)
    assert finished.done
    return finished


def trained(operation: operations_pb2.Operation) -> testing_pb2.TrainResponse:
    assert operation.WhichOneof("result") == "response", operation.error
    response = testing_pb2.TrainResponse()
    assert operation.response.Unpack(response)
    return response


def progress(operation: operations_pb2.Operation) -> common_pb2.Progress:
    message = common_pb2.Progress()
    assert operation.metadata.Unpack(message)
    return message


def test_an_operation_ends_with_the_response_of_its_last_state(engine: OperationsEngine) -> None:
    operation = train(engine, steps=5, seed=common_pb2.Seed(value=3))
    assert operation.name.startswith("operations/r-")
    digest = (3).to_bytes(8, "little")
    for _ in range(5):
        digest = hashlib.sha256(digest).digest()
    finished = done(engine, operation)
    assert trained(finished).digest == digest
    assert (progress(finished).stage, progress(finished).completed, progress(finished).total) == ("train", 5, 5)
    assert engine.get(operation.name, TENANT) == finished


def test_an_unset_seed_is_drawn_once_and_told(engine: OperationsEngine) -> None:
    first, second = (trained(done(engine, train(engine, steps=1))) for _ in range(2))
    assert first.seed.value != second.seed.value
    assert first.digest == hashlib.sha256(first.seed.value.to_bytes(8, "little")).digest()


def test_a_service_error_is_the_operations_error(engine: OperationsEngine) -> None:
    finished = done(engine, train(engine, steps=5, fail_at=3))
    assert finished.error.code == code_pb2.FAILED_PRECONDITION
    assert "step 3" in finished.error.message
    assert finished.error.details
    assert progress(finished).completed == 2


def test_an_unexpected_error_is_internal_and_its_text_is_stored_nowhere(
    engine: OperationsEngine, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        finished = done(engine, engine.start("toy", "Crash", struct(), TENANT))
    assert finished.error.code == code_pb2.INTERNAL
    assert "reference" in finished.error.message
    assert not any(b"secret-patient-name" in cell for cell in cells(database))
    from_dbos = [record for record in caplog.records if record.name == "dbos"]
    assert not any(record.exc_info or "secret" in record.getMessage() for record in from_dbos)
    assert all(record.levelno <= logging.INFO for record in from_dbos)


def test_a_run_that_cannot_even_begin_fails_rather_than_hangs(
    engine: OperationsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(settings: Settings) -> None:
        raise ImportError("no module named joblib")

    monkeypatch.setattr("lyceum_runtime.operation_run.parallel_backend", broken)
    finished = done(engine, train(engine, steps=1))
    assert finished.error.code == code_pb2.INTERNAL
    assert "joblib" not in finished.error.message


def test_watch_shows_each_stage_and_ends_with_the_finished_operation(engine: OperationsEngine) -> None:
    operation = train(engine, steps=10, seconds_per_step=0.1)
    seen = list(engine.watch(operation.name, TENANT))
    assert [item.done for item in seen] == [False] * (len(seen) - 1) + [True]
    completed = [progress(item).completed for item in seen]
    assert completed == sorted(completed)
    assert len(set(completed)) >= 8
    assert 0 < progress(seen[-3]).eta_seconds < 2


def test_ticks_are_published_without_being_steps(engine: OperationsEngine, database: Database) -> None:
    finished = done(engine, engine.start("toy", "Store", struct(), TENANT))
    names = sa.text("SELECT function_name FROM operation_outputs WHERE workflow_uuid = :id")
    with database.read() as connection:
        steps: Sequence[str] = (
            connection.execute(names, {"id": finished.name.removeprefix("operations/")}).scalars().all()
        )
    assert steps.count("checkpoint") == 2  # its one state, and the end of the generator


def test_an_operation_runs_in_its_callers_trace(engine: OperationsEngine, toy: Toy) -> None:
    toy.trace_ids.clear()
    carrier = {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"}
    done(engine, engine.start("toy", "Store", struct(), TENANT, carrier=carrier))
    assert toy.trace_ids == {0xABC}


def test_check_refuses_before_anything_is_stored(engine: OperationsEngine) -> None:
    before = len(engine.list(TENANT, page_size=1000).operations)
    with pytest.raises(InvalidArgument):
        engine.start("toy", "Store", struct(refuse=True), TENANT)
    assert len(engine.list(TENANT, page_size=1000).operations) == before


def test_cancel_is_done_only_when_the_computation_has_stopped(engine: OperationsEngine, toy: Toy) -> None:
    toy.gate.clear()
    operation = engine.start("toy", "Hold", struct(), TENANT)
    deadline = time.monotonic() + 10
    while not engine._runs and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.cancel(operation.name, TENANT)
    assert not engine.wait(operation.name, TENANT, 0.5).done
    toy.gate.set()
    finished = engine.wait(operation.name, TENANT, 2)
    assert finished.done
    assert finished.error.code == code_pb2.CANCELLED


def test_cancel_takes_effect_within_two_seconds(engine: OperationsEngine) -> None:
    operation = train(engine, steps=100, seconds_per_step=30)
    time.sleep(1.5)
    begin = time.monotonic()
    engine.cancel(operation.name, TENANT)
    assert engine.wait(operation.name, TENANT, 5).error.code == code_pb2.CANCELLED
    assert time.monotonic() - begin < 2


def test_a_queued_operation_is_cancelled_at_once(engine: OperationsEngine, settings: Settings) -> None:
    running = [train(engine, steps=100, seconds_per_step=30) for _ in range(settings.max_workers)]
    deadline = time.monotonic() + 10
    while len(engine._runs) < len(running) and time.monotonic() < deadline:
        time.sleep(0.01)
    queued = train(engine, steps=1)
    engine.cancel(queued.name, TENANT)
    assert engine.get(queued.name, TENANT).error.code == code_pb2.CANCELLED
    for operation in running:
        engine.cancel(operation.name, TENANT)
        assert done(engine, operation).error.code == code_pb2.CANCELLED
    # The cancelled ones have left the queue: the next one runs.
    assert trained(done(engine, train(engine, steps=1))).steps == 1


def test_cancelling_a_finished_operation_changes_nothing(engine: OperationsEngine) -> None:
    finished = done(engine, train(engine, steps=1))
    engine.cancel(finished.name, TENANT)
    assert engine.get(finished.name, TENANT) == finished


def test_the_same_request_id_returns_the_first_operation(engine: OperationsEngine) -> None:
    request_id = str(uuid.uuid4())
    first = train(engine, request_id, steps=2)
    assert train(engine, request_id, steps=2).name == first.name
    done(engine, first)
    assert train(engine, request_id, steps=2).done


def test_the_same_request_id_with_another_request_is_refused(engine: OperationsEngine) -> None:
    request_id = str(uuid.uuid4())
    done(engine, train(engine, request_id, steps=2))
    with pytest.raises(FailedPrecondition, match=request_id):
        train(engine, request_id, steps=3)


def test_a_request_id_is_forgotten_after_a_day(engine: OperationsEngine, database: Database) -> None:
    request_id = str(uuid.uuid4())
    first = done(engine, train(engine, request_id, steps=2))
    age(database, first, timedelta(hours=25))
    second = train(engine, request_id, steps=3)
    assert second.name != first.name
    assert trained(done(engine, second)).steps == 3


def test_simultaneous_starts_with_one_request_id_make_one_operation(engine: OperationsEngine) -> None:
    request_id = str(uuid.uuid4())
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(train(engine, request_id, steps=2).name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 8
    assert len(set(names)) == 1


def test_a_failed_operation_can_be_tried_again_with_a_new_request_id(engine: OperationsEngine) -> None:
    for _ in range(2):
        finished = done(engine, train(engine, str(uuid.uuid4()), steps=2, fail_at=1))
        assert finished.error.code == code_pb2.FAILED_PRECONDITION


def test_twenty_operations_at_once_all_end_with_their_own_result(engine: OperationsEngine) -> None:
    started = [train(engine, steps=3, seconds_per_step=0.02, seed=common_pb2.Seed(value=value)) for value in range(20)]
    for value, operation in enumerate(started):
        digest = value.to_bytes(8, "little")
        for _ in range(3):
            digest = hashlib.sha256(digest).digest()
        assert trained(done(engine, operation)).digest == digest


def test_a_large_request_travels_through_the_artifact_store(engine: OperationsEngine, database: Database) -> None:
    text = "x" * (operations.INLINE_BYTES + 1)
    finished = done(engine, engine.start("toy", "Store", struct(text=text), TENANT))
    assert finished.WhichOneof("result") == "response"
    assert max(len(cell) for cell in cells(database)) < operations.INLINE_BYTES


def test_the_artifacts_of_an_operation_stay_as_long_as_it_does(
    engine: OperationsEngine, artifacts: ArtifactStore
) -> None:
    finished = done(engine, engine.start("toy", "Store", struct(), TENANT))
    response = struct_pb2.Struct()
    finished.response.Unpack(response)
    sha256 = str(response["sha256"])
    artifacts.gc(timedelta(0))
    assert artifacts.of(TENANT).read_bytes(sha256) == b"kept"
    for operation in engine.list(TENANT, page_size=1000).operations:
        if operation.done:
            engine.delete(operation.name, TENANT)
    artifacts.gc(timedelta(0))
    with pytest.raises(NotFound):
        artifacts.of(TENANT).read_bytes(sha256)


def test_a_request_that_names_a_foreign_artifact_is_refused(engine: OperationsEngine, artifacts: ArtifactStore) -> None:
    ref = artifacts.of("another").put_bytes(b"theirs")
    request = common_pb2.TableRef(artifact=ref)
    new = NewOperation("r-x", TENANT, "toy", "Store", "", "")
    with pytest.raises(NotFound, match=ref.sha256):
        engine._enqueue(new, request, {})


def test_a_resource_that_an_unfinished_operation_names_cannot_be_deleted(engine: OperationsEngine, toy: Toy) -> None:
    resources = engine._resources.of("toy", TENANT)
    resources.create("things/x", artifacts_pb2.Artifact())
    resources.create("things/x/parts/y", artifacts_pb2.Artifact())
    resources.create("things/other", artifacts_pb2.Artifact())
    toy.gate.clear()
    operation = engine.start("toy", "Hold", struct(deep=[{"part": "things/x/parts/y"}], none="things/none"), TENANT)
    for name in ("things/x", "things/x/parts/y"):
        with pytest.raises(FailedPrecondition, match=f"{name} is used by {operation.name}, which must end") as caught:
            resources.delete(name, artifacts_pb2.Artifact, force=True)
        assert caught.value.details[0].violations[0].type == "IN_USE"
    resources.delete("things/other", artifacts_pb2.Artifact)
    toy.gate.set()
    assert done(engine, operation).HasField("response")
    resources.delete("things/x", artifacts_pb2.Artifact, force=True)


def test_a_cancelled_operation_keeps_no_resource(engine: OperationsEngine, toy: Toy) -> None:
    resources = engine._resources.of("toy", TENANT)
    resources.create("things/z", artifacts_pb2.Artifact())
    toy.gate.clear()
    operation = engine.start("toy", "Hold", struct(thing="things/z"), TENANT)
    engine.cancel(operation.name, TENANT)
    toy.gate.set()
    assert done(engine, operation).error.code == code_pb2.CANCELLED
    resources.delete("things/z", artifacts_pb2.Artifact)


def test_a_process_that_runs_dbos_already_is_refused_and_not_disturbed(
    engine: OperationsEngine, database: Database
) -> None:
    with pytest.raises(StateError, match="runs DBOS for something else"):
        dbos_runner.DbosRunner(database, "second", lambda task: None, running_at_once=1).launch(["toy"])
    assert trained(done(engine, train(engine, steps=1))).steps == 1


def test_a_launch_that_fails_in_its_last_line_leaves_room_for_the_next(tmp_path: Path) -> None:
    program = """
from dbos import DBOS
from dbos import _dbos
from lyceum.testing.v1 import testing_pb2
from lyceum_runtime import testing
from lyceum_runtime.testing_service import ENTRY

def fail(*arguments, **options):
    raise RuntimeError("no queue")

register, DBOS.register_queue = DBOS.register_queue, fail
try:
    with testing.serve(ENTRY):
        pass
except RuntimeError as error:
    assert str(error) == "no queue"
assert _dbos._dbos_global_instance is None
DBOS.register_queue = register
with testing.serve(ENTRY) as served:
    operation = served.client.stub.Train(testing_pb2.TrainRequest(steps=3))
    print(served.client.wait(operation, testing_pb2.TrainResponse, timeout=30).steps)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert ended.stdout.splitlines() == ["3"], ended.stderr


def test_only_a_finished_operation_can_be_deleted(engine: OperationsEngine, database: Database) -> None:
    operation = train(engine, steps=100, seconds_per_step=30)
    with pytest.raises(FailedPrecondition):
        engine.delete(operation.name, TENANT)
    engine.cancel(operation.name, TENANT)
    done(engine, operation)
    engine.delete(operation.name, TENANT)
    with pytest.raises(NotFound):
        engine.get(operation.name, TENANT)
    assert not any(operation.name.removeprefix("operations/").encode() in cell for cell in cells(database))


def test_unknown_and_foreign_names_are_not_found(engine: OperationsEngine) -> None:
    operation = done(engine, train(engine, steps=1))
    for name, tenant in (("operations/r-nothing", TENANT), (operation.name, "another")):
        for call in (engine.get, engine.cancel, engine.delete):
            with pytest.raises(NotFound):
                call(name, tenant)
        with pytest.raises(NotFound):
            next(engine.watch(name, tenant))
        with pytest.raises(NotFound):
            engine.wait(name, tenant, 1)


def test_lists_page_completely_in_the_order_of_starting(engine: OperationsEngine) -> None:
    started = [train(engine, steps=1).name for _ in range(7)]
    listed: list[str] = []
    token = ""
    while True:
        page = engine.list(TENANT, page_size=3, page_token=token)
        listed += [operation.name for operation in page.operations]
        token = page.next_page_token
        if not token:
            break
    assert listed[-7:] == started
    assert len(set(listed)) == len(listed)


def test_lists_filter_by_done_service_and_rpc(engine: OperationsEngine) -> None:
    short = done(engine, train(engine, steps=1)).name
    long = train(engine, steps=100, seconds_per_step=30).name
    stored = done(engine, engine.start("toy", "Store", struct(), TENANT)).name

    def names(filter: str) -> set[str]:
        return {operation.name for operation in engine.list(TENANT, page_size=1000, filter=filter).operations}

    assert long in names("done = false")
    assert short not in names("done = false")
    assert stored in names('service = "toy" AND done = true')
    assert short not in names('service = "toy"')
    assert short in names("rpc = Train")
    engine.cancel(long, TENANT)
    done(engine, engine.get(long, TENANT))
    for bad in ("tenant = x", "done = maybe", "done", "done = true OR done = false"):
        with pytest.raises(InvalidArgument) as error:
            engine.list(TENANT, filter=bad)
        assert error.value.violations[0][0] == "filter"


def test_finished_operations_are_swept_after_thirty_days(engine: OperationsEngine, database: Database) -> None:
    old, young = (done(engine, train(engine, steps=1)) for _ in range(2))
    age(database, old, timedelta(days=31))
    age(database, young, timedelta(days=29))
    engine.sweep()
    with pytest.raises(NotFound):
        engine.get(old.name, TENANT)
    assert engine.get(young.name, TENANT).done


def test_a_finished_operation_leaves_no_blob_behind(engine: OperationsEngine, artifacts: ArtifactStore) -> None:
    done(engine, train(engine, steps=5))
    done(engine, train(engine, steps=5, fail_at=4))
    deadline = time.monotonic() + 5
    while list(artifacts.blobs.list("operations")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(artifacts.blobs.list("operations")) == []


def test_no_more_than_two_checkpoints_are_kept(engine: OperationsEngine, artifacts: ArtifactStore) -> None:
    operation = train(engine, steps=20, seconds_per_step=0.02)
    most = 0
    while not engine.get(operation.name, TENANT).done:
        most = max(most, len(list(artifacts.blobs.list(operation.name))))
        time.sleep(0.005)
    assert 1 <= most <= 3  # the third for the moment between a new one's arrival and the oldest one's removal


def test_no_stored_cell_is_a_pickle(engine: OperationsEngine, database: Database) -> None:
    done(engine, train(engine, steps=3))
    done(engine, train(engine, steps=3, fail_at=2))
    protocols = [bytes([0x80, version]) for version in range(2, 6)]
    for cell in cells(database):
        assert b"pickle" not in cell
        try:
            raw = base64.b64decode(cell, validate=True)
        except ValueError:
            raw = b""
        assert not any(data.startswith(start) and data.endswith(b".") for data in (cell, raw) for start in protocols)


def test_the_serializer_keeps_bytes_and_errors_and_drops_unexpected_texts() -> None:
    value = {"args": [{"data": b"\x00\xff", "n": 1, "s": "ä"}], "kwargs": {}}
    assert dbos_runner.from_json(dbos_runner.to_json(value)) == value
    error = dbos_runner.from_json(dbos_runner.to_json(InvalidArgument(("seed", "wrong"))))
    assert isinstance(error, InvalidArgument)
    assert error.violations == (("seed", "wrong"),)
    unexpected = dbos_runner.to_json(ValueError("secret"))
    assert "secret" not in unexpected
    assert isinstance(dbos_runner.from_json(unexpected), ServiceError)


def test_dbos_is_the_version_whose_private_parts_are_known(engine: OperationsEngine) -> None:
    from importlib.metadata import version

    from dbos import DBOS, error
    from dbos._dbos import _get_dbos_instance

    assert version("dbos") == "3.4.0"
    assert callable(DBOS._recover_pending_workflows)
    assert _get_dbos_instance().background_thread_stop_events
    assert callable(_get_dbos_instance()._sys_db.check_workflow_result)
    # The precedent for Parked: DBOS lets a BaseException through without recording it.
    for kind in (error.DBOSWorkflowCancelledError, error.DBOSWorkflowConflictIDError):
        assert not issubclass(kind, Exception)


def test_the_operations_services_serve_every_rpc(engine: OperationsEngine) -> None:
    longrunning, own = operations_definitions(engine)
    assert set(longrunning.methods) == {
        "ListOperations",
        "GetOperation",
        "DeleteOperation",
        "CancelOperation",
        "WaitOperation",
    }
    call = engine._call("longrunning", TENANT)
    operation = train(engine, steps=2, seconds_per_step=0.1)
    watch = own.methods["WatchOperation"](lyceum_operations_pb2.WatchOperationRequest(name=operation.name), call)
    assert [response.operation.done for response in watch][-1]
    waited = longrunning.methods["WaitOperation"](operations_pb2.WaitOperationRequest(name=operation.name), call)
    assert trained(waited).steps == 2
    longrunning.methods["DeleteOperation"](operations_pb2.DeleteOperationRequest(name=operation.name), call)
    with pytest.raises(NotFound):
        longrunning.methods["GetOperation"](operations_pb2.GetOperationRequest(name=operation.name), call)
    with pytest.raises(InvalidArgument):
        longrunning.methods["ListOperations"](operations_pb2.ListOperationsRequest(name="projects/x"), call)


def test_zz_a_draining_engine_takes_no_operation_and_parks_what_runs(engine: OperationsEngine, toy: Toy) -> None:
    """Last, because it ends the module's engine."""
    toy.gate.clear()
    operation = train(engine, steps=100, seconds_per_step=0.2)
    broken = engine.start("toy", "Lose", struct(), TENANT)
    deadline = time.monotonic() + 10
    while len(engine._runs) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    begin = time.monotonic()
    threading.Timer(0.5, toy.gate.set).start()
    engine.drain(5)
    assert time.monotonic() - begin < 5
    assert not engine.get(operation.name, TENANT).done
    assert not engine.get(broken.name, TENANT).done  # what breaks in a process that ends is tried again in another
    with pytest.raises(Unavailable):
        train(engine, steps=1)


def cells(database: Database) -> Iterator[bytes]:
    """Every value of every column of every table, as bytes."""
    tables = sa.MetaData()
    tables.reflect(database.engine)
    with database.read() as connection:
        for table in tables.tables.values():
            for row in connection.execute(sa.select(table)):
                for value in row:
                    yield value if isinstance(value, bytes) else str(value).encode()


def age(database: Database, operation: operations_pb2.Operation, by: timedelta) -> None:
    """Moves an operation into the past."""
    shift = int(by.total_seconds() * 1000)
    update = sa.text("UPDATE operations SET create_ms = create_ms - :ms, done_ms = done_ms - :ms WHERE id = :id")
    with database.write() as connection:
        connection.execute(update, {"ms": shift, "id": operation.name.removeprefix("operations/")})


def test_state_dir_is_used_for_everything(settings: Settings, engine: OperationsEngine) -> None:
    assert {path.name for path in Path(settings.state_dir).iterdir()} >= {"lyceum.db", "artifacts", "executors"}
