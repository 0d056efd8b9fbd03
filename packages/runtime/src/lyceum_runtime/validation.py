"""Requests against the rules in their protos: one violation for each wrong field, its path written as in the proto.

The rules are protovalidate's; each message type's are compiled when it is first seen, so a server compiles those it
serves beforehand.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from lyceum_runtime import quick_rules
from lyceum_runtime.errors import InvalidArgument

MAX_VIOLATION_BYTES = 1500
"""Violations reported at once. A status travels in HTTP/2 headers, of which clients accept 8 KiB."""

_QUICK_BYTES = 2**20  # the quick test copies what it looks at

_MAX_PATH = 200  # a map's key can be of any length


@cache
def _validator() -> Any:
    import protovalidate

    return protovalidate.Validator()


def compile_rules(descriptors: Iterable[Descriptor]) -> None:
    """Compiles the rules of these messages, so that the first request does not wait for it."""
    for descriptor in descriptors:
        message = GetMessageClass(descriptor)()
        quick_rules.surely_valid(message)
        _validator().collect_violations(message)


def violations(message: Message) -> list[tuple[str, str]]:
    """(field path, what is accepted) for each broken rule of `message`; a rule over the whole message has an empty
    path.
    """
    found = []
    for violation in _validator().collect_violations(message):
        broken = violation.proto
        path = _path(broken.field.elements) if broken.field else ""
        if broken.rule_id == "required" and "oneof" in broken.message:
            text = "exactly one of its alternatives must be set"
        else:
            text = broken.message or broken.rule_id
        found.append((path, text))
    return found


def check(message: Message, *, index: int | None = None) -> None:
    """Refuses a message that breaks a rule. `index`, its place in a client's stream, begins each path: `[3].value`.

    Raises:
        InvalidArgument: naming each wrong field.
    """
    if message.ByteSize() <= _QUICK_BYTES and quick_rules.surely_valid(message):
        return
    found = violations(message)
    if found:
        prefix = "" if index is None else f"[{index}]"
        named: list[tuple[str, str]] = []
        size = 0
        for path, text in found:
            path = _join(prefix, path)[:_MAX_PATH] or "request"
            size += len(path.encode()) + len(text.encode())
            if named and size > MAX_VIOLATION_BYTES:
                named.append(("request", f"{len(found) - len(named)} more fields are wrong"))
                break
            named.append((path, text))
        raise InvalidArgument(*named)


def parse(kind: type[Message], data: bytes, *, index: int | None = None) -> Any:
    """The checked message of type `kind` in `data`.

    Raises:
        InvalidArgument: the bytes are no such message, or it breaks a rule.
    """
    try:
        message = kind.FromString(data)
    except DecodeError:
        where = "request" if index is None else f"[{index}]"
        raise InvalidArgument((where, f"the bytes are not a {kind.DESCRIPTOR.full_name}")) from None
    check(message, index=index)
    return message


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix + path


def _path(elements: Iterable[Any]) -> str:
    path = ""
    for element in elements:
        path = _join(path, element.field_name)
        if element.subscript is not None:
            key = element.subscript.value
            path += f'["{key}"]' if isinstance(key, str) else f"[{key}]"
    return path
