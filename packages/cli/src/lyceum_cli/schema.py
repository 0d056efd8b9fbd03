"""A request's fields as rows: path, type and validation rules, as far as reflection tells (comments do not travel)."""

from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

if TYPE_CHECKING:
    from lyceum_cli.reflection import Server

_SCALARS = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_") and isinstance(value, int)
}


def fields_of(server: "Server", message: Descriptor) -> list[dict[str, Any]]:
    """Rows `path, type, rules` of a message and those in it, depth first; a type inside itself is not opened again."""
    rows: list[dict[str, Any]] = []
    _collect(server, message, "", (message.full_name,), rows)
    return rows


def _collect(
    server: "Server", message: Descriptor, prefix: str, inside: tuple[str, ...], rows: list[dict[str, Any]]
) -> None:
    for field in message.fields:
        path = f"{prefix}{field.name}" + ("[]" if field.is_repeated and not _is_map(field) else "")
        row: dict[str, Any] = {"path": path, "type": _type(field), "rules": _rules(server, field)}
        if field.containing_oneof is not None and not _is_optional(field):
            row["oneof"] = field.containing_oneof.name
        if field.enum_type is not None:
            row["values"] = [value.name for value in field.enum_type.values]
        rows.append(row)
        inner = field.message_type
        if inner is None or _is_map(field) or inner.full_name in inside:
            continue
        if not inner.full_name.startswith("google.protobuf."):
            _collect(server, inner, f"{path}.", (*inside, inner.full_name), rows)


def _type(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        parts = field.message_type.fields_by_name
        return f"map<{_type(parts['key'])}, {_type(parts['value'])}>" if _is_map(field) else field.message_type.name
    if field.enum_type is not None:
        return field.enum_type.name
    return ("optional " if _is_optional(field) else "") + _SCALARS[field.type]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_optional(field: FieldDescriptor) -> bool:
    """True for a proto3 `optional`, which the descriptor shows as a oneof of one field with an underscore."""
    oneof = field.containing_oneof
    return oneof is not None and len(oneof.fields) == 1 and oneof.name == f"_{field.name}"


def _rules(server: "Server", field: FieldDescriptor) -> dict[str, Any]:
    """protovalidate's rules of a field, flat: `{"max_len": 255}`; rules of a list's items are under `items.`."""
    found = server.options(field.GetOptions()).get("[buf.validate.field]", {})
    flat: dict[str, Any] = {}

    def flatten(rules: dict[str, Any], prefix: str) -> None:
        for name, value in rules.items():
            if name in _TYPED and isinstance(value, dict):
                flatten(value, prefix)
            elif name in ("items", "keys", "values") and isinstance(value, dict):
                flatten(value, f"{prefix}{name}.")
            elif name in ("cel", "cel_expression"):
                flat[f"{prefix}rule"] = "; ".join(map(_rule_text, value))
            else:
                flat[f"{prefix}{name}"] = value

    flatten(found, "")
    if field.message_type is not None:
        whole = server.options(field.message_type.GetOptions()).get("[buf.validate.message]", {})
        texts = [*([flat["rule"]] if "rule" in flat else []), *map(_rule_text, whole.get("cel", []))]
        if texts:
            flat["rule"] = "; ".join(texts)
    return flat


def _rule_text(rule: Any) -> str:
    """A CEL rule: its message if it has one, else its expression."""
    return str(rule.get("message") or rule.get("expression", "")) if isinstance(rule, dict) else str(rule)


_TYPED = {*_SCALARS.values(), "repeated", "map", "any", "duration", "timestamp", "field_mask"}
