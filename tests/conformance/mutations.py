"""Breaks a valid message in every way that its proto's rules forbid, one rule at a time.

`violations(message)` walks the message's descriptor, reads the `buf.validate` options and yields one broken copy for
each rule with the path of the field that the server must name. Rules in CEL are free text and are left to the
service's own tests.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from buf.validate import validate_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_BYTES = 8 << 20
"""Longer values are not built: the transport's own limit would answer first."""

NUMERIC = {"int32", "int64", "uint32", "uint64", "double", "float"}


@dataclass(frozen=True)
class Violation:
    """A broken message: `path` is the field that must be named, `rule` what was broken."""

    path: str
    rule: str
    message: Message


def violations(message: Message) -> Iterator[Violation]:
    """Yields a broken copy of `message` for each rule of its fields and of the messages inside it."""
    yield from _message(message, "", lambda change: _changed(message, change))


def _changed(message: Message, change: Callable[[Any], None]) -> Message:
    copy = type(message)()
    copy.CopyFrom(message)
    change(copy)
    return copy


Change = Callable[[Callable[[Any], None]], Message]
"""Applies a change to one sub-message of a fresh copy of the whole message, and returns the copy."""


def _message(message: Message, prefix: str, build: Change) -> Iterator[Violation]:
    for oneof in message.DESCRIPTOR.oneofs:
        if oneof.GetOptions().Extensions[validate_pb2.oneof].required:
            names = [field.name for field in oneof.fields]
            cleared = build(lambda target, names=names: [target.ClearField(name) for name in names] and None)
            yield Violation(prefix + oneof.name, "oneof.required", cleared)
    for field in message.DESCRIPTOR.fields:
        rules = field.GetOptions().Extensions[validate_pb2.field]
        path = prefix + field.name
        yield from _field(message, field, rules, path, build)
        if field.message_type is None or field.message_type.full_name.startswith("google."):
            continue
        if field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            values = getattr(message, field.name)
            inner = values[0] if values else _new(field)

            def first(change: Callable[[Any], None], name: str = field.name) -> Message:
                def apply(target: Any) -> None:
                    items = getattr(target, name)
                    change(items[0] if items else items.add())

                return build(apply)

            yield from _message(inner, f"{path}[0].", first)
        else:

            def inside(change: Callable[[Any], None], name: str = field.name) -> Message:
                def apply(target: Any) -> None:
                    getattr(target, name).SetInParent()
                    change(getattr(target, name))

                return build(apply)

            yield from _message(getattr(message, field.name), f"{path}.", inside)


def _new(field: FieldDescriptor) -> Message:
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(field.message_type)()


def _field(message: Message, field: FieldDescriptor, rules: Any, path: str, build: Change) -> Iterator[Violation]:
    def assign(value: Any) -> Message:
        return build(lambda target: setattr(target, field.name, value))

    if rules.required and field.message_type is not None and not field.is_repeated:
        yield Violation(path, "required", build(lambda target: target.ClearField(field.name)))
    kind = rules.WhichOneof("type")
    if kind is None:
        return
    rule = getattr(rules, kind)
    if kind == "repeated":
        yield from _repeated(message, field, rule, path, build)
    elif kind == "map":
        pairs = {f"key{i}": "value" for i in range(rule.max_pairs + 1)}
        if field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
            yield Violation(path, "map.max_pairs", build(lambda target: getattr(target, field.name).update(pairs)))
    else:
        for name, value in _scalars(kind, rule):
            yield Violation(path, f"{kind}.{name}", assign(value))


def _scalars(kind: str, rule: Any) -> Iterator[tuple[str, Any]]:
    """Yields (rule, forbidden value) for one scalar's rules."""
    if kind == "string":
        if rule.HasField("pattern"):
            yield "pattern", "\t not in the pattern!"
        if rule.HasField("min_len"):
            yield "min_len", "x" * (rule.min_len - 1)
        if rule.HasField("max_len"):
            yield "max_len", "x" * (rule.max_len + 1)
        if len(getattr(rule, "in")):
            yield "in", "certainly-not-in-the-list"
    elif kind == "bytes":
        if rule.HasField("max_len") and rule.max_len < MAX_BYTES:
            yield "max_len", b"x" * (rule.max_len + 1)
    elif kind == "enum":
        if rule.defined_only:
            yield "defined_only", 9999
        for value in rule.not_in:
            yield "not_in", value
    elif kind in NUMERIC:
        step = 1.0 if kind in {"double", "float"} else 1
        if rule.HasField("gte"):
            yield "gte", rule.gte - step
        if rule.HasField("gt"):
            yield "gt", rule.gt
        if rule.HasField("lte"):
            yield "lte", rule.lte + step
        if rule.HasField("lt"):
            yield "lt", rule.lt
        if kind == "double" and rule.finite:
            yield "finite", math.nan
            yield "finite", math.inf


def _repeated(message: Message, field: FieldDescriptor, rule: Any, path: str, build: Change) -> Iterator[Violation]:
    present = list(getattr(message, field.name))
    sample = present[0] if present else (_new(field) if field.message_type is not None else _example(field))

    def fill(values: list[Any]) -> Message:
        def apply(target: Any) -> None:
            target.ClearField(field.name)
            getattr(target, field.name).extend(values)

        return build(apply)

    if rule.min_items:
        yield Violation(path, "repeated.min_items", fill([sample] * (rule.min_items - 1)))
    if rule.HasField("max_items") and rule.max_items <= 20_000:
        yield Violation(path, "repeated.max_items", fill([sample] * (rule.max_items + 1)))
    if rule.unique:
        yield Violation(path, "repeated.unique", fill([sample, sample]))
    kind = rule.items.WhichOneof("type")
    if kind is not None:
        for name, value in _scalars(kind, getattr(rule.items, kind)):
            yield Violation(f"{path}[0]", f"items.{kind}.{name}", fill([value, *present[1:]]))


def _example(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return "x"
    return b"x" if field.type == FieldDescriptor.TYPE_BYTES else 1
