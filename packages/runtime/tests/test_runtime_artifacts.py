"""Artifacts: content addressing, ownership, streaming, sweeping, and what a crash leaves."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from lyceum.artifacts.v1 import artifacts_pb2
from lyceum.common.v1 import common_pb2
from lyceum_runtime.artifacts import ArtifactStore, artifacts_definition, record_uses, referenced, release_uses
from lyceum_runtime.blobs import CHUNK_BYTES
from lyceum_runtime.database import Database, StateError
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound
from lyceum_runtime.resources import ResourceStore
from lyceum_runtime.settings import Settings

NOW = timedelta(0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "state", cache=tmp_path / "cache")


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    yield database
    database.close()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, settings: Settings, database: Database, tmp_path: Path) -> ArtifactStore:
    if request.param == "memory":
        settings = settings.model_copy(update={"artifacts_url": f"memory://{tmp_path.name}/store"})
    return ArtifactStore(settings, database)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_what_was_put_can_be_read_under_its_checksum(store: ArtifactStore, tmp_path: Path) -> None:
    artifacts = store.of("a")
    data = os.urandom(3 * CHUNK_BYTES + 17)
    (tmp_path / "file").write_bytes(data)
    ref = artifacts.put_file(tmp_path / "file", "text/x")
    assert (ref.sha256, ref.media_type, ref.size_bytes) == (sha(data), "text/x", len(data))
    assert artifacts.read_bytes(ref) == data
    assert artifacts.read_bytes(ref.sha256) == data
    assert artifacts.local_path(ref).read_bytes() == data
    with artifacts.open(ref) as file:
        file.seek(CHUNK_BYTES)
        assert file.read(10) == data[CHUNK_BYTES : CHUNK_BYTES + 10]
    assert artifacts.put_bytes(b"").size_bytes == 0


def test_a_blob_is_stored_once_for_all_tenants(store: ArtifactStore) -> None:
    for tenant in ("a", "b", "a"):
        store.of(tenant).put_bytes(b"same")
    assert [stored.size_bytes for stored in store.blobs.list("sha256")] == [4]


def test_knowing_a_checksum_is_no_right_to_read(store: ArtifactStore) -> None:
    ref = store.of("a").put_bytes(b"private")
    other = store.of("b")
    for read in (other.stat, other.open, other.read_bytes, other.local_path):
        with pytest.raises(NotFound):
            read(ref)
    assert other.list().total_size == 0


def test_a_name_that_is_no_checksum_is_refused(store: ArtifactStore) -> None:
    for bad in ("", "../../etc/passwd", "A" * 64, common_pb2.ArtifactRef()):
        with pytest.raises(InvalidArgument):
            store.of("a").read_bytes(bad)


def test_half_an_upload_leaves_nothing(store: ArtifactStore) -> None:
    def broken() -> Iterator[bytes]:
        yield b"first"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        store.of("a").put_chunks(broken())
    assert list(store.blobs.list("")) == []
    assert store.of("a").list().total_size == 0


def test_other_bytes_than_announced_are_refused_and_leave_nothing(store: ArtifactStore) -> None:
    artifacts = store.of("a")
    with pytest.raises(InvalidArgument) as error:
        artifacts.put_chunks([b"x"], expected_sha256=sha(b"y"))
    assert error.value.violations[0][0] == "header.sha256"
    with pytest.raises(InvalidArgument) as error:
        artifacts.put_chunks([b"x"], expected_bytes=2)
    assert error.value.violations[0][0] == "header.size_bytes"
    assert list(store.blobs.list("")) == []


def test_a_damaged_blob_is_noticed_when_read_and_healed_when_put_again(settings: Settings, database: Database) -> None:
    store = ArtifactStore(settings, database)
    artifacts = store.of("a")
    ref = artifacts.put_bytes(b"good bytes")
    path = artifacts.local_path(ref)
    assert not os.stat(path).st_mode & 0o222
    path.chmod(0o600)
    path.write_bytes(b"evil bytes")
    with pytest.raises(FailedPrecondition, match="damaged"):
        artifacts.read_bytes(ref)
    path.write_bytes(b"short")
    artifacts.put_bytes(b"good bytes")
    assert artifacts.read_bytes(ref) == b"good bytes"
    path.unlink()
    with pytest.raises(FailedPrecondition, match="damaged"):
        artifacts.open(ref)


def test_a_store_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path, database: Database) -> None:
    (tmp_path / "file").touch()
    for bad in (str(tmp_path / "file" / "store"), "nosuchscheme://x/y"):
        with pytest.raises(StateError, match="LYCEUM_ARTIFACTS_URL") as error:
            ArtifactStore(Settings(state_dir=tmp_path, artifacts_url=bad), database)
        assert "\n" not in str(error.value)


def test_a_sweep_keeps_what_is_referred_to_or_young(store: ArtifactStore, database: Database) -> None:
    artifacts = store.of("a")
    used, loose = artifacts.put_bytes(b"used"), artifacts.put_bytes(b"loose")
    store.of("b").put_bytes(b"loose")
    by_operation = store.of("a", owner="operations/x").put_bytes(b"made by an operation")
    with database.write() as connection:
        record_uses(connection, "a", "apex/libraries/x", [used])
    assert store.gc(timedelta(hours=1)).artifacts == 0
    time.sleep(0.05)
    swept = store.gc(NOW)
    assert (swept.artifacts, swept.blobs, swept.bytes) == (2, 1, 5)
    assert artifacts.read_bytes(used) == b"used"
    assert artifacts.read_bytes(by_operation)
    with pytest.raises(NotFound):
        artifacts.read_bytes(loose)
    with database.write() as connection:
        release_uses(connection, "a", "apex/libraries/x")
    store.gc(NOW)
    with pytest.raises(NotFound):
        artifacts.read_bytes(used)
    assert artifacts.read_bytes(artifacts.put_bytes(b"loose")) == b"loose"


def test_puts_beside_sweeps_never_lose_a_blob(settings: Settings, database: Database) -> None:
    store = ArtifactStore(settings, database)
    ending = threading.Event()

    def sweep() -> None:
        while not ending.is_set():
            store.gc(NOW)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    artifacts = store.of("a", owner="operations/x")
    try:
        for index in range(60):
            data = b"%d" % (index % 3)
            assert artifacts.read_bytes(artifacts.put_bytes(data)) == data
            with database.write() as connection:
                release_uses(connection, "a", "operations/x")
    finally:
        ending.set()
        sweeper.join()


def test_use_of_a_foreign_artifact_is_refused(store: ArtifactStore, database: Database) -> None:
    ref = store.of("a").put_bytes(b"mine")
    with pytest.raises(NotFound), database.write() as connection:
        record_uses(connection, "b", "apex/libraries/x", [ref])


def test_references_are_found_at_any_depth() -> None:
    table = common_pb2.TableRef(artifact=common_pb2.ArtifactRef(sha256="1" * 64), columns={"a": "b"})
    progress = common_pb2.Progress(
        metrics={"x": 1.0}, previews=[common_pb2.ArtifactRef(sha256="2" * 64), common_pb2.ArtifactRef(sha256="3" * 64)]
    )
    assert [ref.sha256[0] for ref in referenced(table)] == ["1"]
    assert [ref.sha256[0] for ref in referenced(progress)] == ["2", "3"]


def test_lists_page_filter_and_order(store: ArtifactStore) -> None:
    artifacts = store.of("a")
    for index in range(7):
        artifacts.put_bytes(b"x" * (index + 1), "text/plain" if index % 2 else "image/png")
    for order in ("", "create_time", "create_time desc"):
        names: list[str] = []
        token = ""
        while True:
            page = artifacts.list(page_size=3, page_token=token, order_by=order)
            assert page.total_size == 7
            names += [artifact.name for artifact in page.artifacts]
            token = page.next_page_token
            if not token:
                break
        assert len(set(names)) == 7
        if not order:
            assert names == sorted(names)
    found = artifacts.list(filter='media_type = "text/plain" AND size_bytes > 2')
    assert sorted(artifact.ref.size_bytes for artifact in found.artifacts) == [4, 6]
    for fields in ({"page_size": -1}, {"page_token": "x"}, {"filter": "x = 1"}, {"order_by": "size"}):
        with pytest.raises(InvalidArgument) as error:
            artifacts.list(**fields)
        assert error.value.violations[0][0] in fields


class Wire:
    """ArtifactService called as the server calls it."""

    def __init__(self, store: ArtifactStore, database: Database) -> None:
        self.left = False
        self.call = Call(
            service="artifacts",
            tenant="a",
            resources=ResourceStore(database).of("artifacts", "a"),
            artifacts=store.of("a"),
            should_stop=lambda: self.left,
            on_progress=lambda *_: None,
        )
        self.methods = artifacts_definition().methods

    def upload(self, *chunks: bytes, **header: object) -> artifacts_pb2.Artifact:
        first = artifacts_pb2.UploadArtifactRequest(
            header=artifacts_pb2.UploadArtifactRequest.Header(**header)  # type: ignore[arg-type]
        )
        requests = [first, *(artifacts_pb2.UploadArtifactRequest(data=chunk) for chunk in chunks)]
        artifact: artifacts_pb2.Artifact = self.methods["UploadArtifact"](iter(requests), self.call)
        return artifact

    def download(self, name: str, offset: int = 0) -> list[artifacts_pb2.DownloadArtifactResponse]:
        request = artifacts_pb2.DownloadArtifactRequest(name=name, start_offset=offset)
        return list(self.methods["DownloadArtifact"](request, self.call))


@pytest.fixture
def wire(store: ArtifactStore, database: Database) -> Wire:
    return Wire(store, database)


def test_an_upload_can_be_downloaded_whole_and_from_an_offset(wire: Wire) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 5)
    artifact = wire.upload(data[:100], data[100:], sha256=sha(data), size_bytes=len(data))
    assert artifact.name == f"artifacts/{sha(data)}"
    assert wire.methods["GetArtifact"](artifacts_pb2.GetArtifactRequest(name=artifact.name), wire.call) == artifact
    for offset in (0, 1, CHUNK_BYTES, len(data)):
        *parts, last = wire.download(artifact.name, offset)
        assert b"".join(part.data for part in parts) == data[offset:]
        assert [part.index for part in parts] == [offset + i * CHUNK_BYTES for i in range(len(parts))]
        assert all(len(part.data) <= CHUNK_BYTES for part in parts)
        assert last.index == len(data)
        assert last.summary.ref == artifact.ref
    with pytest.raises(InvalidArgument):
        wire.download(artifact.name, len(data) + 1)


def test_an_upload_without_its_header_is_refused(wire: Wire) -> None:
    upload = wire.methods["UploadArtifact"]
    data = artifacts_pb2.UploadArtifactRequest(data=b"x")
    header = artifacts_pb2.UploadArtifactRequest(header=artifacts_pb2.UploadArtifactRequest.Header())
    for requests in ([], [data], [header, header]):
        with pytest.raises(InvalidArgument):
            upload(iter(requests), wire.call)


def test_an_upload_whose_caller_left_stores_nothing(wire: Wire, store: ArtifactStore) -> None:
    wire.left = True
    with pytest.raises(Cancelled):
        wire.upload(b"half")
    assert list(store.blobs.list("")) == []


KILLED = """
import os, sys
sys.path[:] = sys.argv[2].split(os.pathsep)
from lyceum_runtime.artifacts import ArtifactStore
from lyceum_runtime.database import Database
from lyceum_runtime.settings import Settings
settings = Settings(state_dir=sys.argv[1])
artifacts = ArtifactStore(settings, Database(settings.database_url)).of("a")
def chunks():
    for index in range(10**9):
        if index == 3:
            print("half", flush=True)
        yield bytes(1 << 16)
artifacts.put_chunks(chunks())
"""


def test_a_kill_in_the_middle_of_an_upload_leaves_nothing_visible(settings: Settings, database: Database) -> None:
    store = ArtifactStore(settings, database)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(settings.state_dir), path], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert store.of("a").list().total_size == 0
    assert list(store.blobs.list("sha256")) == []
    (left,) = (settings.state_dir / "artifacts" / "staging").iterdir()
    store.gc(NOW)
    assert left.exists()  # it might be an upload's that is still coming
    os.utime(left, (0, 0))
    store.gc(NOW)
    assert list(store.blobs.list("staging")) == []
    with database.read() as connection:
        assert connection.execute(sa.text("PRAGMA integrity_check")).scalar() == "ok"
