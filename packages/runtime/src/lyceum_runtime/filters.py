"""List requests: `filter`, `order_by` and `page_token`, each parsed once, here.

A filter is the AIP-160 subset `field op literal (AND field op literal)*` on the fields that the RPC lists. Operators
are `=`, `!=`, `<`, `<=`, `>`, `>=` and `:` ("has": a string that contains the literal, a list with that element;
`field:*` means the field is set). A literal is a quoted string, or a bare word: a number, `true`, `false`, or text
without spaces, such as an RFC 3339 time.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import sqlalchemy as sa

from lyceum_runtime.errors import InvalidArgument

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
_MAX_TERMS = 32


class Kind(Enum):
    """What a field holds, and so what its literals must be."""

    STRING = "a string"
    NUMBER = "a number"
    BOOL = "true or false"
    TIME = "an RFC 3339 time"
    """Held as milliseconds since 1970."""


@dataclass(frozen=True)
class Term:
    """One comparison. `value` has the field's type; None stands for `*`, "is set"."""

    field: str
    op: str
    value: str | float | int | bool | None


_TOKEN = re.compile(
    r"""\s*(?:(?P<op><=|>=|!=|=|<|>|:)|(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[^\s"'=<>!:()]+))"""
)
# A time has colons, so a bare literal may hold them although a field name may not.
_LITERAL = re.compile(r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[^\s"'=<>!()]+))""")

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@dataclass(frozen=True)
class Filter:
    """A conjunction of terms; without terms it matches everything."""

    terms: tuple[Term, ...] = ()

    def matches(self, value_of: Callable[[str], Any]) -> bool:
        """Whether all terms hold. `value_of(field)` is a field's value: a list if repeated, None if unset."""
        return all(_holds(term, value_of(term.field)) for term in self.terms)

    def clauses(self, columns: Mapping[str, sa.ColumnElement[Any]]) -> list[sa.ColumnElement[bool]]:
        """The same as SQL conditions."""
        return [_clause(term, columns[term.field]) for term in self.terms]


def parse_filter(text: str, fields: Mapping[str, Kind]) -> Filter:
    """Parses `text`; `fields` are the fields that this RPC can filter by.

    Raises:
        InvalidArgument: on `filter`, saying where and what was expected.
    """
    terms: list[Term] = []
    position = 0
    while text[position:].strip():
        if len(terms) == _MAX_TERMS:
            raise _bad(f"has more than {_MAX_TERMS} terms")
        if terms:
            word, position = _take(text, position, _TOKEN, "word", "AND")
            if word != "AND":
                raise _bad(
                    f"expected AND at character {position - len(word) + 1}, found {word!r}; only AND joins terms"
                )
        name, position = _take(text, position, _TOKEN, "word", "a field name")
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none here"
            raise _bad(f"{name!r} is not a field to filter by; fields: {known}")
        op, position = _take(text, position, _TOKEN, "op", "one of = != < <= > >= :")
        literal, position = _literal(text, position)
        terms.append(_term(name, op, literal, fields[name]))
    return Filter(tuple(terms))


def parse_order(text: str, fields: Sequence[str]) -> tuple[str, bool]:
    """`"field"` or `"field desc"` as (field, descending); an empty text is (`name`, False).

    Raises:
        InvalidArgument: on `order_by`.
    """
    words = text.split() or ["name"]
    if len(words) > 2 or words[0] not in fields or (len(words) == 2 and words[1] not in ("asc", "desc")):
        raise InvalidArgument(
            ("order_by", f"{text!r} is not accepted; give one of {', '.join(fields)}, then desc if wanted")
        )
    return words[0], words[-1] == "desc" and len(words) == 2


def page_size(requested: int) -> int:
    """The page size to use: 0 is the default of 50, more than 1,000 is 1,000.

    Raises:
        InvalidArgument: on `page_size`, if negative.
    """
    if requested < 0:
        raise InvalidArgument(("page_size", f"{requested} is negative; give 0 for the default of {DEFAULT_PAGE_SIZE}"))
    return min(requested or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


@dataclass(frozen=True)
class Cursor:
    """Page tokens of one query. A token holds the key of the last item sent and a digest of the query that it belongs
    to.
    """

    query: tuple[str, ...]
    """Everything that decides which items come and in which order: service, tenant, collection, filter, order."""

    def token(self, key: Sequence[str | int | float | bool]) -> str:
        """The token of the page after the item with this key."""
        body = json.dumps([self._digest(), *key], separators=(",", ":"))
        return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")

    def key(self, token: str, types: Sequence[type]) -> list[Any] | None:
        """The key inside a token, one value of each type; None for the first page.

        Raises:
            InvalidArgument: on `page_token`: not a token, or one of another query.
        """
        if not token:
            return None
        try:
            body = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
            digest: str | None = body[0]
            key: list[Any] = body[1:]
            json.dumps(key, ensure_ascii=False).encode()  # half a surrogate pair is a string that no database takes
        except (ValueError, TypeError, LookupError, RecursionError, binascii.Error):
            digest, key = None, []
        typed = len(key) == len(types) and all(type(v) is t for v, t in zip(key, types))
        if digest != self._digest() or not typed:
            raise InvalidArgument(
                (
                    "page_token",
                    "is not a token of this query; send the last answer's next_page_token with the same request",
                )
            )
        return key

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.query).encode()).hexdigest()[:16]


def after(columns: Sequence[sa.ColumnElement[Any]], key: Sequence[Any], descending: bool) -> sa.ColumnElement[bool]:
    """The SQL condition "comes after the item with this key", when (first column, unique name) decide the order.

    `descending` turns the first column; the name is always ascending.
    """
    first, name = columns
    beyond = first.op("<" if descending else ">", is_comparison=True)(key[0])
    return sa.or_(beyond, sa.and_(first == key[0], name > key[1]))


def _take(text: str, position: int, pattern: re.Pattern[str], group: str, expected: str) -> tuple[str, int]:
    match = pattern.match(text, position)
    if match is None or match.group(group) is None:
        found = (
            repr(match.group().strip())
            if match
            else (repr(text[position:].strip()[:1]) if text[position:].strip() else "the end")
        )
        raise _bad(f"expected {expected} at character {position + 1}, found {found}")
    return match.group(group), match.end()


def _literal(text: str, position: int) -> tuple[str | tuple[str], int]:
    """A bare word as a string, a quoted one as a 1-tuple."""
    match = _LITERAL.match(text, position)
    if match is None:
        raise _bad(f"expected a value at character {position + 1}; quote a text that has spaces or signs")
    quoted = match.group("quoted")
    if quoted is None:
        return match.group("word"), match.end()
    return (re.sub(r"\\(.)", r"\1", quoted[1:-1]),), match.end()


def _term(name: str, op: str, literal: str | tuple[str], kind: Kind) -> Term:
    bare = isinstance(literal, str)
    text = literal if isinstance(literal, str) else literal[0]
    if op == ":" and bare and text == "*":
        return Term(name, op, None)
    if kind is Kind.BOOL and op not in ("=", "!=", ":"):
        raise _bad(f"{name} is {kind.value}; only = and != compare it")
    value = _value(text, kind, bare)
    if value is None:
        raise _bad(f"{name} is {kind.value}, {text!r} is not")
    if op == ":" and value == "":
        raise _bad(f"{name} has the empty text always; write {name}:* for a field that is set")
    return Term(name, op, value)


def _value(text: str, kind: Kind, bare: bool) -> str | float | int | bool | None:
    if kind is Kind.STRING:
        return text
    if kind is Kind.BOOL:
        return {"true": True, "false": False}.get(text) if bare else None
    if kind is Kind.TIME:
        return _time(text)
    if not bare:
        return None
    if re.fullmatch(r"[+-]?\d{1,40}", text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return None if number != number else number


def _time(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _holds(term: Term, value: Any) -> bool:
    if term.value is None:
        return value not in (None, "", [], {})
    if isinstance(value, list | tuple | dict):  # a repeated field: ":" asks for an element, the others do not apply
        return term.op == ":" and term.value in value
    if value is None:
        return term.op == "!="
    if term.op == ":":
        return str(term.value) in value if isinstance(value, str) else bool(value == term.value)
    return _COMPARE[term.op](value, term.value)


def _clause(term: Term, column: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    if term.value is None:
        return column.is_not(None)
    if term.op == ":":
        # Not LIKE: SQLite's ignores case.
        return (
            sa.func.replace(column, term.value, "") != column if isinstance(term.value, str) else column == term.value
        )
    value = term.value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value)  # drivers refuse to send it as an integer
    return column.is_distinct_from(value) if term.op == "!=" else column.op(term.op, is_comparison=True)(value)


def _bad(reason: str) -> InvalidArgument:
    return InvalidArgument(("filter", reason))
