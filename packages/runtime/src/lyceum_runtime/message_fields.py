"""Fields of messages as filters and orders see them: by path, as plain values."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from lyceum_runtime.filters import Kind


def value_of(message: Message, path: str) -> Any:
    """The value at `path` (`display_name`, `schema.row_count`): an enum by its name, a time as milliseconds since 1970,
    a repeated field as a list, and None for what is unset.
    """
    value: Any = message
    field: Any = None
    for part in path.split("."):
        field = value.DESCRIPTOR.fields_by_name[part]
        if field.has_presence and not value.HasField(part):
            return None
        value = getattr(value, part)
    if field.is_repeated:
        return list(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    return value if field.message_type is None else value.ToMilliseconds()


def kind_of(message: type[Message], path: str) -> Kind:
    """What the field at `path` holds.

    Raises:
        TypeError: it is a message other than a Timestamp, which no filter can compare.
    """
    scope: Any = message.DESCRIPTOR
    field: Any = None
    for part in path.split("."):
        field = scope.fields_by_name[part]
        scope = field.message_type
    if scope is not None:
        if scope.full_name != "google.protobuf.Timestamp":
            raise TypeError(f"{path} of {message.DESCRIPTOR.full_name} is a message; filters compare plain fields")
        return Kind.TIME
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_ENUM):
        return Kind.STRING
    return Kind.BOOL if field.type == FieldDescriptor.TYPE_BOOL else Kind.NUMBER


def sort_key(value: Any) -> tuple[bool, Any]:
    """A value's place in an order; what is unset comes first."""
    return (value is not None, 0 if value is None else value)
