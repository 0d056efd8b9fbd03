"""Parts of requests as the core has them: queries, constraints, objectives, filters.

The core names a wrong number by its property, `constraints[logp].lower`; a caller is told its place in the request.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lyceum.apex.v1 import apex_pb2
from lyceum_apex.service.storing import fields, load_index, load_library
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from lyceum_apex.index import ApexIndex
    from lyceum_apex.query import Query


def load_restricted(call: Call, name: str, wanted: apex_pb2.SynthonFilter, where: str) -> "ApexIndex":
    """The index without the products that the filter, the request's field `where`, leaves out."""
    index = load_index(call, name)
    if not (wanted.columns or wanted.allowed_reactions or wanted.forbidden_reactions):
        return index
    from lyceum_apex.filters import SynthonFilter

    columns: dict[str, tuple[float | None, float | None]] = {}
    for i, item in enumerate(wanted.columns):
        if item.column in columns:
            raise InvalidArgument((f"{where}.columns[{i}].column", f"{item.column!r} is named twice; name it once"))
        lower = item.lower if item.HasField("lower") else None
        columns[item.column] = (lower, item.upper if item.HasField("upper") else None)
    chosen = SynthonFilter(
        columns=columns,
        allowed_reactions=list(wanted.allowed_reactions) or None,
        forbidden_reactions=list(wanted.forbidden_reactions),
    )
    with fields(lambda field: f"{where}.{_column_by_place(field, columns)}"):
        return index.restricted(load_library(call, name.partition("/indexes/")[0]), chosen)


def _column_by_place(field: str, columns: Mapping[str, Any]) -> str:
    for i, name in enumerate(columns):
        if field == f"columns[{name}]":
            return f"columns[{i}].column"
        if field.startswith(f"columns[{name}]."):
            return f"columns[{i}]" + field.removeprefix(f"columns[{name}]")
    return field


def query_of(request: apex_pb2.Query, index: "ApexIndex") -> "Query":
    """The core's query; a property named twice or unknown to the index is refused."""
    from lyceum_apex.query import Query, Quotas

    quotas = None
    if request.quotas.max_per_synthon or request.quotas.max_per_reaction:
        quotas = Quotas(
            max_per_synthon=request.quotas.max_per_synthon or None,
            max_per_reaction=request.quotas.max_per_reaction or None,
        )
    constraints = constraints_of(request.constraints, index, "query.constraints")
    weights = weights_of(request.objective, index, "query.objective")
    with fields(lambda field: f"query.{by_place(field, constraints, weights)}"):
        return Query(
            objective=weights,
            k=request.k,
            maximize=request.direction != apex_pb2.DIRECTION_MINIMIZE,
            constraints=constraints,
            engine="brute" if request.engine == apex_pb2.ENGINE_BRUTE else "pruned",
            quotas=quotas,
        )


def constraints_of(
    items: Sequence[apex_pb2.Constraint], index: "ApexIndex", field: str
) -> dict[str, tuple[float | None, float | None]]:
    found: dict[str, tuple[float | None, float | None]] = {}
    for i, item in enumerate(items):
        _require_property(item.property, index, found, f"{field}[{i}].property")
        lower = item.lower if item.HasField("lower") else None
        upper = item.upper if item.HasField("upper") else None
        found[item.property] = (lower, upper)
    return found


def weights_of(items: Sequence[apex_pb2.ObjectiveTerm], index: "ApexIndex", field: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for i, item in enumerate(items):
        _require_property(item.property, index, found, f"{field}[{i}].property")
        found[item.property] = item.weight or 1.0
    return found


def by_place(field: str, constraints: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """The request's path for the core's, which has the property for the place: `constraints[logp].lower`."""
    for kind, names in (("constraints", constraints), ("objective", weights)):
        for i, name in enumerate(names):
            place = f"{kind}[{name}]"
            if field == place or field.startswith(f"{place}."):
                return f"{kind}[{i}]" + (field[len(place) :] if kind == "constraints" else ".weight")
    return field


def _require_property(name: str, index: "ApexIndex", found: Mapping[str, Any], field: str) -> None:
    if name not in index.table.names:
        raise InvalidArgument((field, f"{name!r} is not a property of the index: {', '.join(index.table.names)}"))
    if name in found:
        raise InvalidArgument((field, f"{name!r} is named twice; name each property once"))
