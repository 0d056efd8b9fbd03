"""Filters, orders and page tokens of list requests."""

import base64
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from lyceum_runtime.errors import InvalidArgument
from lyceum_runtime.filters import Cursor, Filter, Kind, page_size, parse_filter, parse_order

FIELDS = {"name": Kind.STRING, "count": Kind.NUMBER, "done": Kind.BOOL, "create_time": Kind.TIME, "tags": Kind.STRING}
NOON = round(datetime(2026, 12, 1, 12, tzinfo=UTC).timestamp() * 1000)
ROW: dict[str, Any] = {"name": 'a "b" c', "count": 5, "done": True, "create_time": NOON, "tags": ["x", "yz"]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        'name = "a \\"b\\" c"',
        "name='a \"b\" c'",
        'name != "other"',
        'name : "b"',
        'name < "b" AND name >= "a"',
        "count=5 AND count>=5 AND count<=5.0 AND count>-1 AND count<1e3 AND count!=6",
        "done = true AND done != false",
        "create_time >= 2026-12-01T12:00:00Z AND create_time < 2026-12-01T13:00:00+00:00",
        'create_time = "2026-12-01T13:00:00+01:00"',
        'tags:x AND tags:"yz"',
        "name:*",
        "count < 123456789012345678901234567890",
    ],
)
def test_a_filter_that_holds_matches_in_python_and_in_sql(text: str) -> None:
    parsed = parse_filter(text, FIELDS)
    assert parsed.matches(ROW.__getitem__)
    if "tags" not in text:
        assert in_sql(parsed) == 1


@pytest.mark.parametrize(
    "text",
    [
        'name = "A \\"b\\" c"',
        'name : "B"',
        'name : "%"',
        "name < a",
        "count != 5",
        "count > 5",
        "done = false",
        "create_time > 2026-12-01T12:00:00Z",
        "tags:y",
        "count = 5 AND done = false",
    ],
)
def test_a_filter_that_does_not_hold_matches_neither_in_python_nor_in_sql(text: str) -> None:
    parsed = parse_filter(text, FIELDS)
    assert not parsed.matches(ROW.__getitem__)
    if "tags" not in text:
        assert in_sql(parsed) == 0


def in_sql(parsed: Filter) -> int:
    table = sa.table("t", *(sa.column(name) for name in FIELDS if name != "tags"))
    values = {column.name: ROW[column.name] for column in table.c}
    rows = sa.select(*(sa.literal(value).label(name) for name, value in values.items())).subquery()
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        query = sa.select(sa.func.count()).select_from(rows).where(*parsed.clauses(dict(rows.c)))
        count: int = connection.execute(query).scalar_one()
    engine.dispose()
    return count


def test_an_unset_field_is_only_unequal() -> None:
    for text, expected in (("count = 0", False), ("count != 0", True), ("count < 1", False), ("count:*", False)):
        assert parse_filter(text, FIELDS).matches(lambda field: None) is expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("other = 1", "not a field"),
        ("count", "expected one of"),
        ("count =", "expected a value"),
        ("count = many", "a number"),
        ('count = "5"', "a number"),
        ("count = nan", "a number"),
        ("done = yes", "true or false"),
        ("done < true", "only = and !="),
        ("create_time > yesterday", "RFC 3339"),
        ("count = 1 OR count = 2", "expected AND"),
        ("count = 1 count = 2", "expected AND"),
        ("count = 1 and count = 2", "expected AND"),
        ("count = 1 AND", "expected"),
        ("(count = 1)", "expected a field"),
        ("NOT done", "not a field"),
        ('name = "open', "expected a value"),
        ('name : ""', "empty"),
        (" AND ".join(["count = 1"] * 33), "more than 32"),
        ("\x00", "not a field"),
    ],
)
def test_a_wrong_filter_is_an_invalid_argument_that_says_why(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_filter(text, FIELDS).matches(ROW.__getitem__)
    assert error.value.violations[0][0] == "filter"
    assert words in error.value.violations[0][1]


def test_page_sizes_are_bounded() -> None:
    assert [page_size(size) for size in (0, 1, 1000, 1001, 2**31 - 1)] == [50, 1, 1000, 1000, 1000]
    with pytest.raises(InvalidArgument) as error:
        page_size(-1)
    assert error.value.violations[0][0] == "page_size"


def test_orders_name_a_field_and_a_direction() -> None:
    assert parse_order("", ["name"]) == ("name", False)
    assert parse_order("count desc", ["name", "count"]) == ("count", True)
    assert parse_order("count asc", ["name", "count"]) == ("count", False)
    for bad in ("other", "name down", "name desc desc", "name, count"):
        with pytest.raises(InvalidArgument) as error:
            parse_order(bad, ["name", "count"])
        assert error.value.violations[0][0] == "order_by"


def test_a_token_returns_its_key_to_the_same_query_only() -> None:
    cursor = Cursor(("apex", "default", "libraries", "", ""))
    token = cursor.token([3, "libraries/x"])
    assert cursor.key(token, (int, str)) == [3, "libraries/x"]
    assert cursor.key("", (int, str)) is None
    other = Cursor(("apex", "default", "libraries", "count = 1", ""))
    for query, text, types in (
        (other, token, (int, str)),
        (cursor, token[:-3], (int, str)),
        (cursor, "?", (int, str)),
        (cursor, "bnVsbA", (int, str)),
        (cursor, "ü", (int, str)),
        (cursor, token, (str, str)),
        (cursor, token, (int,)),
        (cursor, cursor.token([3, "\ud800"]), (int, str)),
        (cursor, base64.urlsafe_b64encode(b"[" * 3000).decode(), (int, str)),
    ):
        with pytest.raises(InvalidArgument) as error:
            query.key(text, types)
        assert error.value.violations[0][0] == "page_token"
