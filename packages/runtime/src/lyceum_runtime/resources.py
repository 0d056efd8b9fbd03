"""Resources: named, versioned messages of one service and one tenant, kept in the database.

A resource is any message whose field 1 is its `name`. The store fills the standard fields that the message has: `name`,
`create_time`, `update_time`, `etag`, `expire_time`. Beside the bytes it keeps which artifacts a resource refers to (so
that they stay), and which other resources a resource or an unfinished operation uses (so that those cannot be deleted
under it).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Generic, TypeVar

import sqlalchemy as sa
from google.protobuf.message import Message

from lyceum_runtime.artifacts import Ref, record_uses, release_uses
from lyceum_runtime.database import Database, metadata, name_type
from lyceum_runtime.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from lyceum_runtime.filters import Cursor, Filter, Kind, page_size, parse_filter, parse_order
from lyceum_runtime.identifiers import new_id
from lyceum_runtime.message_fields import kind_of, sort_key, value_of

M = TypeVar("M", bound=Message)

_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z][\w-]*(/[\w-]+)+", re.ASCII)
_MAX_NAME = 512
_OPERATION = "operations/"
_IDEMPOTENCY_MILLISECONDS = 24 * 3600 * 1000

_resources = sa.Table(
    "resources",
    metadata,
    sa.Column("service", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("name", name_type(_MAX_NAME), primary_key=True),
    sa.Column(
        "collection",
        name_type(_MAX_NAME),
        nullable=False,
        doc="the name without its last part: libraries, libraries/x/indexes",
    ),
    sa.Column("type", sa.String(255), nullable=False, doc="full name of the message"),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Column("etag", sa.String(32), nullable=False),
    sa.Column("create_ms", sa.BigInteger, nullable=False),
    sa.Column("expire_ms", sa.BigInteger),
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("fingerprint", sa.String(64), doc="SHA-256 of what the first create with this key asked for"),
    sa.Index("resources_by_collection", "service", "tenant", "collection", "name"),
    sa.Index("resources_by_idempotency_key", "service", "tenant", "idempotency_key", unique=True),
)

_links = sa.Table(
    "resource_links",
    metadata,
    sa.Column("service", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("user", name_type(_MAX_NAME), primary_key=True, doc="the resource or operation that needs the other"),
    sa.Column("used", name_type(_MAX_NAME), primary_key=True),
    sa.Index("resource_links_by_used", "service", "tenant", "used"),
)


def _create_tables(connection: sa.Connection) -> None:
    metadata.create_all(connection, tables=[_resources, _links])


_MIGRATIONS = [_create_tables]


@dataclass(frozen=True)
class Page(Generic[M]):
    """One page of a list."""

    items: list[M]
    next_page_token: str
    """Empty on the last page."""
    total_size: int
    """Number of items that match, over all pages."""


def resource_name(collection: str, resource_id: str, field: str) -> str:
    """`{collection}/{resource_id}`, with a new id (`r-` and a UUIDv7) if the client chose none.

    Raises:
        InvalidArgument: on `field`, the request's field of the id.
    """
    if resource_id and not _ID.fullmatch(resource_id):
        raise InvalidArgument((field, f"{resource_id!r} must match ^[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?$"))
    return f"{collection}/{resource_id or new_id()}"


class ResourceStore:
    """All services' resources. Thread-safe; one a process.

    Raises:
        StateError: the tables cannot be used.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        database.migrate("resources", _MIGRATIONS)

    def of(self, service: str, tenant: str, *, operation: str | None = None) -> "Resources":
        """One service's and tenant's view. With an `operation`, a create that is run again returns what the first one
        created.
        """
        return Resources(self, service, tenant, operation)

    def sweep_expired(self) -> int:
        """Deletes expired resources with their children; returns how many."""
        with self.database.read() as connection:
            expired = connection.execute(
                sa.select(_resources.c.service, _resources.c.tenant, _resources.c.name)
                .where(_resources.c.expire_ms <= self.database.now)
                .limit(1000)
            ).all()
        for row in expired:
            with self.database.write() as connection:
                self.of(row.service, row.tenant)._remove(connection, row.name)
        return len(expired)


class Resources:
    """One service's resources of one tenant. Thread-safe; an instance made for an operation is used by one run at a
    time.
    """

    def __init__(self, store: ResourceStore, service: str, tenant: str, operation: str | None = None) -> None:
        self._database: Database = store.database
        self._service = service
        self._tenant = tenant
        self._operation = operation
        self._created = 0

    def create(
        self,
        name: str,
        message: M,
        *,
        artifacts: Iterable[Ref] = (),
        uses: Iterable[str] = (),
        idempotency_key: str | None = None,
        expire: timedelta | None = None,
    ) -> M:
        """Stores a copy of `message` under `name` and returns it with the standard fields filled.

        `artifacts` stay as long as the resource; the resources named in `uses` cannot be deleted before it. A repeat
        with the same `idempotency_key` (the request id) within 24 h returns what the first call created.

        Raises:
            AlreadyExists: the name is taken.
            NotFound: the parent, a used resource or an artifact does not exist.
            FailedPrecondition: the idempotency key came with another message before.
        """
        # Inside an operation the k-th create of a run is the k-th create of every run of it, whatever name it draws.
        by_operation = idempotency_key is None and self._operation is not None
        if by_operation:
            self._created += 1
            idempotency_key = f"{self._operation}/{self._created}"
        fingerprint = _fingerprint(message)
        with self._database.write() as connection:
            self._database.exclusive(connection, f"resources/{self._service}/{self._tenant}")
            if idempotency_key is not None:
                first = self._first_of_key(
                    connection, idempotency_key, None if by_operation else fingerprint, type(message)
                )
                if first is not None:
                    return first
            if self._row(connection, name) is not None:
                raise AlreadyExists(name)
            self._remove(connection, name)  # an expired one that was not swept yet
            collection = name.rpartition("/")[0]
            parent = collection.rpartition("/")[0]
            if parent and self._row(connection, parent) is None:
                raise NotFound(parent)
            now = connection.execute(sa.select(self._database.now)).scalar_one()
            expire_ms = None if expire is None else now + int(expire.total_seconds() * 1000)
            stored = _stamped(message, name, create_ms=now, update_ms=now, expire_ms=expire_ms)
            connection.execute(
                sa.insert(_resources).values(
                    service=self._service,
                    tenant=self._tenant,
                    name=name,
                    collection=collection,
                    type=message.DESCRIPTOR.full_name,
                    data=stored.SerializeToString(deterministic=True),
                    etag=_etag(stored),
                    create_ms=now,
                    expire_ms=expire_ms,
                    idempotency_key=idempotency_key,
                    fingerprint=fingerprint,
                )
            )
            self._link(connection, name, uses)
            record_uses(connection, self._tenant, self._owner(name), artifacts)
        return stored

    def get(self, name: str, kind: type[M]) -> M:
        """The resource `name`, a message of type `kind`.

        Raises:
            NotFound: there is none of this name and type.
        """
        with self._database.read() as connection:
            return _decoded(self._required(connection, name, kind), kind)

    def list(
        self,
        collection: str,
        kind: type[M],
        *,
        page_size: int = 0,
        page_token: str = "",
        filter: str = "",
        order_by: str = "",
        fields: Sequence[str] = (),
    ) -> Page[M]:
        """A page of a collection (`libraries`, or `libraries/x/indexes`).

        `fields` are the message's fields that `filter` and `order_by` may name; `name` may always order.

        Raises:
            InvalidArgument: on `page_size`, `page_token`, `filter` or `order_by`.
            NotFound: the parent does not exist.
        """
        return _list(self, collection, kind, page_size, page_token, filter, order_by, fields)

    def update(
        self, message: M, *, etag: str = "", artifacts: Iterable[Ref] | None = None, uses: Iterable[str] | None = None
    ) -> M:
        """Replaces the resource `message.name` and returns what is stored. None leaves artifacts or links as they are.

        Raises:
            NotFound: there is none of this name and type.
            Aborted: `etag` is not the stored one (empty: no check).
        """
        name: str = message.name  # type: ignore[attr-defined]
        with self._database.write() as connection:
            self._database.exclusive(connection, f"resources/{self._service}/{self._tenant}")
            row = self._required(connection, name, type(message))
            _check_etag(name, etag, row["etag"])
            now = connection.execute(sa.select(self._database.now)).scalar_one()
            stored = _stamped(message, name, create_ms=row["create_ms"], update_ms=now, expire_ms=row["expire_ms"])
            connection.execute(
                sa.update(_resources)
                .where(*self._where(_resources, name))
                .values(data=stored.SerializeToString(deterministic=True), etag=_etag(stored))
            )
            if uses is not None:
                self._link(connection, name, uses)
            if artifacts is not None:
                record_uses(connection, self._tenant, self._owner(name), artifacts)
        return stored

    def delete(self, name: str, kind: type[Message], *, etag: str = "", force: bool = False) -> None:
        """Deletes a resource; with `force` also its children.

        Raises:
            NotFound: there is none of this name and type.
            Aborted: `etag` is not the stored one (empty: no check).
            FailedPrecondition: it has children (without `force`), or other resources or unfinished operations use it;
                the message names some of them.
        """
        with self._database.write() as connection:
            self._database.exclusive(connection, f"resources/{self._service}/{self._tenant}")
            _check_etag(name, etag, self._required(connection, name, kind)["etag"])
            children = self._names(connection, _resources.c.name, _resources, _below(_resources.c.name, name))
            if children and not force:
                raise FailedPrecondition(
                    f"{name} has {_some(children)}; delete them first or ask for force",
                    reason="HAS_CHILDREN",
                    subject=name,
                )
            itself = sa.or_(_links.c.used == name, _below(_links.c.used, name))
            inside = sa.or_(_links.c.user == name, _below(_links.c.user, name))
            users = self._names(connection, _links.c.user, _links, sa.and_(itself, ~inside))
            running = [user for user in users if user.startswith(_OPERATION)]
            if running:
                raise FailedPrecondition(
                    f"{name} is used by {_some(running)}, which must end first; wait for it or cancel it",
                    reason="IN_USE",
                    subject=name,
                )
            if users:
                raise FailedPrecondition(
                    f"{name} is used by {_some(users)}; delete them first", reason="IN_USE", subject=name
                )
            self._remove(connection, name)

    def hold(self, connection: sa.Connection, operation: str, request: Message) -> None:
        """Records, inside the transaction that starts `operation`, that it uses the resources whose names stand in its
        request. They can be deleted again after `release`.
        """
        named = sorted({text for text in _texts(request) if len(text) <= _MAX_NAME and _NAME.fullmatch(text)})
        if named:
            self._database.exclusive(connection, f"resources/{self._service}/{self._tenant}")
            self._link(connection, operation, [name for name in named if self._row(connection, name) is not None])

    def used_by(self, name: str) -> Sequence[str]:
        """Names of the resources and the unfinished operations that use this one."""
        with self._database.read() as connection:
            return self._names(connection, _links.c.user, _links, _links.c.used == name)

    def _first_of_key(self, connection: sa.Connection, key: str, fingerprint: str | None, kind: type[M]) -> M | None:
        """What the first create with this key made. A key older than 24 h is forgotten, unless it is an operation's."""
        where = (
            _resources.c.service == self._service,
            _resources.c.tenant == self._tenant,
            _resources.c.idempotency_key == key,
        )
        row = (
            connection.execute(sa.select(_resources, self._database.now.label("now")).where(*where)).mappings().first()
        )
        if row is None:
            return None
        if fingerprint is not None:
            if row["now"] - row["create_ms"] > _IDEMPOTENCY_MILLISECONDS:
                connection.execute(sa.update(_resources).where(*where).values(idempotency_key=None))
                return None
            if row["fingerprint"] != fingerprint:
                raise request_id_reused(key)
        return _decoded(row, kind)

    def _row(self, connection: sa.Connection, name: str) -> sa.RowMapping | None:
        query = sa.select(_resources).where(*self._where(_resources, name), *self._alive())
        return connection.execute(query).mappings().first()

    def _required(self, connection: sa.Connection, name: str, kind: type[Message]) -> sa.RowMapping:
        row = self._row(connection, name)
        if row is None or row["type"] != kind.DESCRIPTOR.full_name:
            raise NotFound(name)
        return row

    def _remove(self, connection: sa.Connection, name: str) -> None:
        """Removes a resource and all below it."""
        below = sa.or_(_resources.c.name == name, _below(_resources.c.name, name))
        for gone in self._names(connection, _resources.c.name, _resources, below):
            release_uses(connection, self._tenant, self._owner(gone))
            self._link(connection, gone, ())
            connection.execute(sa.delete(_resources).where(*self._where(_resources, gone)))

    def _link(self, connection: sa.Connection, name: str, uses: Iterable[str]) -> None:
        scope = {"service": self._service, "tenant": self._tenant, "user": name}
        connection.execute(sa.delete(_links).where(*(_links.c[column] == value for column, value in scope.items())))
        for used in sorted(set(uses)):
            if self._row(connection, used) is None:
                raise NotFound(used)
            connection.execute(sa.insert(_links).values(**scope, used=used))

    def _names(
        self, connection: sa.Connection, column: sa.Column[str], table: sa.Table, condition: sa.ColumnElement[bool]
    ) -> Sequence[str]:
        query = sa.select(column).where(table.c.service == self._service, table.c.tenant == self._tenant, condition)
        return connection.execute(query.order_by(column)).scalars().all()

    def _where(self, table: sa.Table, name: str) -> tuple[sa.ColumnElement[bool], ...]:
        return (table.c.service == self._service, table.c.tenant == self._tenant, table.c.name == name)

    def _alive(self) -> tuple[sa.ColumnElement[bool], ...]:
        return (sa.or_(_resources.c.expire_ms.is_(None), _resources.c.expire_ms > self._database.now),)

    def _owner(self, name: str) -> str:
        return f"{self._service}/{name}"


def release(connection: sa.Connection, service: str, tenant: str, operation: str) -> None:
    """Records, inside the transaction that ends `operation`, that it uses no resource any more."""
    mine = (_links.c.service == service, _links.c.tenant == tenant, _links.c.user == operation)
    connection.execute(sa.delete(_links).where(*mine))


def _texts(message: Message) -> Iterator[str]:
    """Every text in a message, at any depth."""
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        items = value.values() if is_map else value if field.is_repeated else (value,)
        for item in items:
            if isinstance(item, str):
                yield item
            elif isinstance(item, Message):
                yield from _texts(item)


def request_id_reused(request_id: str) -> FailedPrecondition:
    """The refusal of a request id that came with another request before."""
    return FailedPrecondition(
        f"request_id {request_id} was used for another request within 24 h; draw a new one",
        reason="REQUEST_ID_REUSED",
        subject="request_id",
    )


def _list(
    resources: Resources,
    collection: str,
    kind: type[M],
    size: int,
    token: str,
    filter_text: str,
    order_by: str,
    fields: Sequence[str],
) -> Page[M]:
    size = page_size(size)
    kinds = {field: kind_of(kind, field) for field in fields}
    filter = parse_filter(filter_text, kinds)
    order, descending = parse_order(order_by, ["name", *(field for field in fields if field != "name")])
    cursor = Cursor((resources._service, resources._tenant, collection, filter_text, order_by))
    parent = collection.rpartition("/")[0]
    where = [
        _resources.c.service == resources._service,
        _resources.c.tenant == resources._tenant,
        _resources.c.collection == collection,
        _resources.c.type == kind.DESCRIPTOR.full_name,
        *resources._alive(),
    ]
    with resources._database.read() as connection:
        if parent and resources._row(connection, parent) is None:
            raise NotFound(parent)
        if order == "name" and not descending and not filter.terms:
            return _page_by_name(connection, where, kind, cursor, token, size)
        rows = connection.execute(sa.select(_resources.c.data).where(*where)).mappings().all()
    return _page_by_scan((_decoded(row, kind) for row in rows), filter, order, descending, kinds, cursor, token, size)


def _page_by_name(
    connection: sa.Connection,
    where: Sequence[sa.ColumnElement[bool]],
    kind: type[M],
    cursor: Cursor,
    token: str,
    size: int,
) -> Page[M]:
    """The common case, in SQL: by name, unfiltered."""
    key = cursor.key(token, (str,))
    total = connection.execute(sa.select(sa.func.count()).select_from(_resources).where(*where)).scalar_one()
    query = sa.select(_resources.c.name, _resources.c.data).where(*where)
    if key is not None:
        query = query.where(_resources.c.name > key[0])
    rows = connection.execute(query.order_by(_resources.c.name).limit(size + 1)).mappings().all()
    more = cursor.token([rows[size - 1]["name"]]) if len(rows) > size else ""
    return Page([_decoded(row, kind) for row in rows[:size]], more, total)


def _page_by_scan(
    messages: Iterable[M],
    filter: Filter,
    order: str,
    descending: bool,
    kinds: Mapping[str, Kind],
    cursor: Cursor,
    token: str,
    size: int,
) -> Page[M]:
    """Filtered or ordered by a field: the fields lie inside the messages, so all of the collection is read."""
    found = [message for message in messages if filter.matches(partial(value_of, message))]
    found.sort(key=lambda message: message.name)  # type: ignore[attr-defined]
    if order != "name" or descending:
        # Two stable sorts: ties stay in the order of their names.
        found.sort(key=lambda message: sort_key(value_of(message, order)), reverse=descending)
    start = 0
    key = cursor.key(token, (str,))
    if key is not None:
        names = [message.name for message in found]  # type: ignore[attr-defined]
        if key[0] not in names:
            raise InvalidArgument(
                ("page_token", "is stale: the item where it continues no longer matches; start again")
            )
        start = names.index(key[0]) + 1
    page = found[start : start + size]
    more = cursor.token([page[-1].name]) if len(found) > start + size else ""  # type: ignore[attr-defined]
    return Page(page, more, len(found))


def _stamped(message: M, name: str, *, create_ms: int, update_ms: int, expire_ms: int | None) -> M:
    """A copy of `message` with the standard fields that its type has."""
    copy = type(message)()
    copy.CopyFrom(message)
    fields = copy.DESCRIPTOR.fields_by_name
    copy.name = name  # type: ignore[attr-defined]
    for field, value in (("create_time", create_ms), ("update_time", update_ms), ("expire_time", expire_ms)):
        if field in fields and value is not None:
            getattr(copy, field).FromMilliseconds(value)
    if "etag" in fields:
        copy.etag = _etag(copy)  # type: ignore[attr-defined]
    return copy


def _etag(message: Message) -> str:
    return _fingerprint(message)[:16]


def _fingerprint(message: Message) -> str:
    """SHA-256 of the message without its etag."""
    if "etag" in message.DESCRIPTOR.fields_by_name:
        copy = type(message)()
        copy.CopyFrom(message)
        copy.ClearField("etag")
        message = copy
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _check_etag(name: str, given: str, stored: str) -> None:
    if given and given != stored:
        raise Aborted(f"{name} was changed meanwhile: its etag is {stored}, not {given}; read it again and repeat")


def _decoded(row: sa.RowMapping, kind: type[M]) -> M:
    return kind.FromString(row["data"])


def _below(column: sa.Column[str], name: str) -> sa.ColumnElement[bool]:
    """Names that start with `{name}/`; as a range, which an index serves (`0` is the character after `/`)."""
    return sa.and_(column > f"{name}/", column < f"{name}0")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
