"""Artifacts: immutable blobs named by their SHA-256, and who may read them.

A blob is stored once however often it is put. Each tenant has its own row for it (`artifacts`), because knowing a hash
is no right to read. Resources and operations that refer to a blob are recorded beside it (`artifact_uses`); what
nothing has referred to for a grace time is swept by :meth:`ArtifactStore.gc`.
"""

import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import sqlalchemy as sa
from google.protobuf.message import Message

from lyceum.artifacts.v1 import artifacts_pb2
from lyceum.common.v1 import common_pb2
from lyceum_runtime.blobs import CHUNK_BYTES, Blobs, DamagedBlob, Staged
from lyceum_runtime.database import Database, metadata
from lyceum_runtime.definition import Call, ServiceDefinition
from lyceum_runtime.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from lyceum_runtime.filters import Cursor, Kind, after, page_size, parse_filter, parse_order
from lyceum_runtime.settings import Settings

DEFAULT_MEDIA_TYPE = "application/octet-stream"
DEFAULT_GRACE = timedelta(days=7)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_STAGING_SECONDS = 3600.0
"""A temporary file to which nothing was written for so long belongs to no upload any more."""

_artifacts = sa.Table(
    "artifacts",
    metadata,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("media_type", sa.String(255), nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("create_ms", sa.BigInteger, nullable=False),
    sa.Column("put_ms", sa.BigInteger, nullable=False, doc="when it was last put: the grace time runs from here"),
    sa.Index("artifacts_by_sha256", "sha256"),
)

_uses = sa.Table(
    "artifact_uses",
    metadata,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("owner", sa.String(512), primary_key=True, doc="operations/x, or service/resource name"),
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Index("artifact_uses_by_sha256", "tenant", "sha256"),
)


def _create_tables(connection: sa.Connection) -> None:
    metadata.create_all(connection, tables=[_artifacts, _uses])


_MIGRATIONS = [_create_tables]

Ref = common_pb2.ArtifactRef | str
"""An artifact, by reference or by its SHA-256 alone."""


@dataclass(frozen=True)
class Swept:
    """What a sweep removed: ownership rows, blobs, and the blobs' bytes."""

    artifacts: int
    blobs: int
    bytes: int


class ArtifactStore:
    """All tenants' artifacts: blobs at `settings.artifacts_url`, rows in the database. Thread-safe; one a process.

    Raises:
        StateError: the store or its tables cannot be used.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self.database = database
        self.blobs = Blobs(settings.artifacts_url)
        self.cache = settings.cache / "artifacts"
        self._url = settings.artifacts_url.rstrip("/")
        database.migrate("artifacts", _MIGRATIONS)

    def of(self, tenant: str, *, owner: str | None = None) -> "Artifacts":
        """One tenant's view. What is put with an `owner` (an operation's name) stays at least as long as that owner."""
        return Artifacts(self, tenant, owner)

    def uri(self, sha256: str) -> str:
        """Where a blob lies: its URL, or its resource name if the store is local: paths are the server's affair."""
        return f"artifacts/{sha256}" if self.blobs.local is not None else f"{self._url}/{_key(sha256)}"

    def gc(self, grace: timedelta = DEFAULT_GRACE) -> Swept:
        """Mark and sweep: removes what no resource or operation refers to and nobody has put for `grace`.

        Safe beside running services: a put that meets the sweep of the same blob writes it again.
        """
        used = sa.exists().where(_uses.c.tenant == _artifacts.c.tenant, _uses.c.sha256 == _artifacts.c.sha256)
        old = _artifacts.c.put_ms < self.database.now - int(grace.total_seconds() * 1000)
        with self.database.write() as connection:
            artifacts = connection.execute(sa.delete(_artifacts).where(old, ~used)).rowcount
        blobs = size = 0
        for stored in self.blobs.list("sha256"):
            sha256 = stored.key.rpartition("/")[2]
            if stored.age_seconds <= grace.total_seconds():
                continue
            with self.database.write() as connection:
                self.database.exclusive(connection, sha256)
                if connection.execute(sa.select(sa.literal(1)).where(_artifacts.c.sha256 == sha256).limit(1)).first():
                    continue
                self.blobs.delete(stored.key)  # inside the transaction: a put of it waits and then finds it missing
            blobs += 1
            size += stored.size_bytes
        self.blobs.sweep_staging(max(grace.total_seconds(), _STAGING_SECONDS))
        return Swept(artifacts, blobs, size)


class Artifacts:
    """One tenant's artifacts. Thread-safe."""

    def __init__(self, store: ArtifactStore, tenant: str, owner: str | None = None) -> None:
        self._store = store
        self._tenant = tenant
        self._owner = owner

    def put_bytes(self, data: bytes, media_type: str = DEFAULT_MEDIA_TYPE) -> common_pb2.ArtifactRef:
        """Stores `data` and returns its reference."""
        return self.put_chunks([data], media_type)

    def put_file(self, path: Path, media_type: str = DEFAULT_MEDIA_TYPE) -> common_pb2.ArtifactRef:
        """Stores a file's content, read in chunks of 1 MiB."""
        with open(path, "rb") as file:
            return self.put_chunks(iter(lambda: file.read(CHUNK_BYTES), b""), media_type)

    def put_chunks(
        self,
        chunks: Iterable[bytes],
        media_type: str = DEFAULT_MEDIA_TYPE,
        *,
        expected_sha256: str = "",
        expected_bytes: int = 0,
    ) -> common_pb2.ArtifactRef:
        """Stores what `chunks` yield, one chunk in memory at a time. If they raise, nothing is stored.

        Raises:
            InvalidArgument: the bytes have another checksum or length than expected.
            ResourceExhausted: the disk is full.
        """
        try:
            with self._store.blobs.stage(chunks) as staged:
                if expected_bytes and staged.size_bytes != expected_bytes:
                    raise InvalidArgument(
                        ("header.size_bytes", f"{expected_bytes} was stated, {staged.size_bytes} bytes came")
                    )
                if expected_sha256 and staged.sha256 != expected_sha256:
                    raise InvalidArgument(
                        ("header.sha256", f"{expected_sha256} was stated, the bytes have {staged.sha256}")
                    )
                return self._commit(staged, media_type or DEFAULT_MEDIA_TYPE)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ResourceExhausted("the artifact store is full", reason="DISK_FULL") from error
            raise

    def _commit(self, staged: Staged, media_type: str) -> common_pb2.ArtifactRef:
        blobs, database, key = self._store.blobs, self._store.database, _key(staged.sha256)
        if blobs.local is None and blobs.size(key) != staged.size_bytes:
            blobs.commit(staged, key)  # an upload takes long: not inside the transaction, where a local rename is done
        with database.write() as connection:
            database.exclusive(connection, staged.sha256)
            if (
                blobs.size(key) != staged.size_bytes
            ):  # new, damaged or just swept; no sweep can run during this transaction
                blobs.commit(staged, key)
            where = (_artifacts.c.tenant == self._tenant, _artifacts.c.sha256 == staged.sha256)
            if not connection.execute(sa.update(_artifacts).where(*where).values(put_ms=database.now)).rowcount:
                row = {
                    "tenant": self._tenant,
                    "sha256": staged.sha256,
                    "media_type": media_type,
                    "size_bytes": staged.size_bytes,
                }
                connection.execute(sa.insert(_artifacts).values(**row, create_ms=database.now, put_ms=database.now))
            if self._owner is not None:
                use = {"tenant": self._tenant, "owner": self._owner, "sha256": staged.sha256}
                if not connection.execute(sa.select(_uses).filter_by(**use)).first():
                    connection.execute(sa.insert(_uses).values(**use))
            return self._store_ref(_require(connection, self._tenant, staged.sha256))

    def stat(self, ref: Ref) -> artifacts_pb2.Artifact:
        """What is known of an artifact.

        Raises:
            NotFound: the tenant has no such artifact; so do the functions below.
        """
        with self._store.database.read() as connection:
            return self._message(_require(connection, self._tenant, _sha256(ref)))

    def open(self, ref: Ref) -> BinaryIO:
        """An artifact's bytes as a seekable file. The checksum is not verified; use `read_bytes` or `local_path` for
        that.
        """
        sha256 = self.stat(ref).ref.sha256
        with _explained(sha256):
            return self._store.blobs.open(_key(sha256))

    def chunks(self, ref: Ref) -> Iterator[bytes]:
        """An artifact's bytes in chunks of 1 MiB, verified at the end."""
        sha256 = self.stat(ref).ref.sha256
        with _explained(sha256):
            yield from self._store.blobs.chunks(_key(sha256), sha256)

    def read_bytes(self, ref: Ref) -> bytes:
        """All bytes of an artifact, verified."""
        return b"".join(self.chunks(ref))

    def local_path(self, ref: Ref) -> Path:
        """A read-only local file with the artifact's bytes, for libraries that open files themselves.

        In a local store it is the blob itself; from elsewhere it is copied to the cache once, verified.
        """
        sha256 = self.stat(ref).ref.sha256
        blobs = self._store.blobs
        if blobs.local is not None:
            if blobs.size(_key(sha256)) is None:
                raise _damaged(sha256)
            return blobs.local / _key(sha256)
        cache = Blobs(str(self._store.cache))
        if cache.size(_key(sha256)) is None:
            with _explained(sha256), cache.stage(blobs.chunks(_key(sha256), sha256)) as staged:
                cache.commit(staged, _key(sha256))
        return self._store.cache / _key(sha256)

    def list(
        self, *, page_size: int = 0, page_token: str = "", filter: str = "", order_by: str = ""
    ) -> artifacts_pb2.ListArtifactsResponse:
        """A page of the tenant's artifacts. Filter fields: media_type, size_bytes. Order: name, create_time."""
        return _list(self, page_size, page_token, filter, order_by)

    def _store_ref(self, row: sa.RowMapping) -> common_pb2.ArtifactRef:
        return common_pb2.ArtifactRef(
            uri=self._store.uri(row["sha256"]),
            sha256=row["sha256"],
            media_type=row["media_type"],
            size_bytes=row["size_bytes"],
        )

    def _message(self, row: sa.RowMapping) -> artifacts_pb2.Artifact:
        artifact = artifacts_pb2.Artifact(name=f"artifacts/{row['sha256']}", ref=self._store_ref(row))
        artifact.create_time.FromMilliseconds(row["create_ms"])
        return artifact


def record_uses(connection: sa.Connection, tenant: str, owner: str, refs: Iterable[Ref]) -> None:
    """Records, inside the owner's transaction, that `owner` refers to these artifacts from now on, and to no others.

    Raises:
        NotFound: the tenant has no such artifact.
    """
    release_uses(connection, tenant, owner)
    for sha256 in sorted({_sha256(ref) for ref in refs}):
        _require(connection, tenant, sha256)
        connection.execute(sa.insert(_uses).values(tenant=tenant, owner=owner, sha256=sha256))


def release_uses(connection: sa.Connection, tenant: str, owner: str) -> None:
    """Records, inside the owner's transaction, that `owner` is gone."""
    connection.execute(sa.delete(_uses).where(_uses.c.tenant == tenant, _uses.c.owner == owner))


def referenced(message: Message) -> Iterator[common_pb2.ArtifactRef]:
    """Every ArtifactRef inside a message, at any depth."""
    if isinstance(message, common_pb2.ArtifactRef):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            items = value.values() if field.message_type.fields_by_name["value"].message_type is not None else ()
        else:
            items = [value] if isinstance(value, Message) else value
        for item in items:
            yield from referenced(item)


def artifacts_definition() -> ServiceDefinition:
    """lyceum.artifacts.v1.ArtifactService, which every server has beside its own services."""
    return ServiceDefinition(
        name="artifacts",
        service="lyceum.artifacts.v1.ArtifactService",
        methods={
            "UploadArtifact": _upload,
            "GetArtifact": lambda request, call: call.artifacts.stat(_id(request.name)),
            "ListArtifacts": lambda request, call: call.artifacts.list(
                page_size=request.page_size,
                page_token=request.page_token,
                filter=request.filter,
                order_by=request.order_by,
            ),
            "DownloadArtifact": _download,
        },
        long_methods={},
    )


def _upload(requests: Iterator[artifacts_pb2.UploadArtifactRequest], call: Call) -> artifacts_pb2.Artifact:
    first = next(iter(requests), None)
    if first is None or first.WhichOneof("part") != "header":
        raise InvalidArgument(("header", "the first message must be the header"))

    def data() -> Iterator[bytes]:
        for index, request in enumerate(requests):
            if request.WhichOneof("part") != "data":
                raise InvalidArgument(("data", f"message {index + 1} has no data; only the first message is a header"))
            yield request.data
        if call.should_stop():  # the caller left; what came is not all
            raise Cancelled("the upload was cancelled")

    header = first.header
    ref = call.artifacts.put_chunks(
        data(), header.media_type, expected_sha256=header.sha256, expected_bytes=header.size_bytes
    )
    return call.artifacts.stat(ref)


def _download(
    request: artifacts_pb2.DownloadArtifactRequest, call: Call
) -> Iterator[artifacts_pb2.DownloadArtifactResponse]:
    ref = call.artifacts.stat(_id(request.name)).ref
    if request.start_offset > ref.size_bytes:
        raise InvalidArgument(
            ("start_offset", f"{request.start_offset} is past the end; the artifact has {ref.size_bytes} bytes")
        )
    offset = request.start_offset
    for chunk in call.artifacts.chunks(ref) if offset == 0 else _from(call.artifacts, ref, offset):
        if call.should_stop():
            return
        yield artifacts_pb2.DownloadArtifactResponse(index=offset, data=chunk)
        offset += len(chunk)
    yield artifacts_pb2.DownloadArtifactResponse(
        index=ref.size_bytes, summary=artifacts_pb2.DownloadArtifactResponse.Summary(ref=ref)
    )


def _from(artifacts: Artifacts, ref: common_pb2.ArtifactRef, offset: int) -> Iterator[bytes]:
    """The rest of a blob; the caller, who has its beginning, verifies the whole."""
    with artifacts.open(ref) as file:
        file.seek(offset)
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


_FILTER_FIELDS: Mapping[str, Kind] = {"media_type": Kind.STRING, "size_bytes": Kind.NUMBER}


def _list(
    artifacts: Artifacts, size: int, token: str, filter: str, order_by: str
) -> artifacts_pb2.ListArtifactsResponse:
    size = page_size(size)
    where = [_artifacts.c.tenant == artifacts._tenant]
    where += parse_filter(filter, _FILTER_FIELDS).clauses({name: _artifacts.c[name] for name in _FILTER_FIELDS})
    field, descending = parse_order(order_by, ["name", "create_time"])
    first = {"name": _artifacts.c.sha256, "create_time": _artifacts.c.create_ms}[field]
    columns = [first, _artifacts.c.sha256]
    cursor = Cursor(("artifacts", artifacts._tenant, filter, order_by))
    key = cursor.key(token, (str if field == "name" else int, str))
    query = sa.select(_artifacts).where(*where)
    if key is not None:
        query = query.where(after(columns, key, descending))
    query = query.order_by(first.desc() if descending else first, _artifacts.c.sha256).limit(size + 1)
    with artifacts._store.database.read() as connection:
        total = connection.execute(sa.select(sa.func.count()).select_from(_artifacts).where(*where)).scalar_one()
        rows = connection.execute(query).mappings().all()
    response = artifacts_pb2.ListArtifactsResponse(
        artifacts=[artifacts._message(row) for row in rows[:size]], total_size=total
    )
    if len(rows) > size:
        last = rows[size - 1]
        response.next_page_token = cursor.token([last[first.name], last["sha256"]])
    return response


def _require(connection: sa.Connection, tenant: str, sha256: str) -> sa.RowMapping:
    row = (
        connection.execute(sa.select(_artifacts).where(_artifacts.c.tenant == tenant, _artifacts.c.sha256 == sha256))
        .mappings()
        .first()
    )
    if row is None:
        raise NotFound(f"artifacts/{sha256}")
    return row


@contextmanager
def _explained(sha256: str) -> Iterator[None]:
    try:
        yield
    except DamagedBlob as error:
        raise _damaged(sha256) from error


def _damaged(sha256: str) -> FailedPrecondition:
    name = f"artifacts/{sha256}"
    return FailedPrecondition(
        f"{name} is damaged in the store; upload it again", reason="ARTIFACT_DAMAGED", subject=name
    )


def _sha256(ref: Ref) -> str:
    sha256 = ref if isinstance(ref, str) else ref.sha256
    if not _SHA256.fullmatch(sha256):
        raise InvalidArgument(("sha256", f"{sha256!r} is not a SHA-256 of 64 lower-case hexadecimal digits"))
    return sha256


def _id(name: str) -> str:
    return name.removeprefix("artifacts/")


def _key(sha256: str) -> str:
    return f"sha256/{sha256[:2]}/{sha256}"
