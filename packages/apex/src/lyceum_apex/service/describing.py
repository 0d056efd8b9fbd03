"""CountMatches and DescribeDistribution: questions to an index about all products at once."""

from typing import TYPE_CHECKING

from lyceum.apex.v1 import apex_pb2
from lyceum_apex.service.decoding import by_place, constraints_of, load_restricted, weights_of
from lyceum_apex.service.storing import fields
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from lyceum_apex.grids import Axis


def count_matches(request: apex_pb2.CountMatchesRequest, call: Call) -> apex_pb2.CountMatchesResponse:
    """An exact count over all products, and one for each cell of the grid."""
    index = load_restricted(call, request.index, request.synthon_filter, "synthon_filter")
    constraints = constraints_of(request.constraints, index, "constraints")
    weights = weights_of(request.objective, index, "objective")
    if request.HasField("min_objective") != bool(weights):
        field = "min_objective" if weights else "objective"
        raise InvalidArgument((field, "objective and min_objective go together; give both or neither"))
    axes = _axes(request)
    with fields(lambda field: "min_objective" if field == "cutoff" else by_place(field, constraints, weights)):
        found = index.count(
            constraints,
            objective=weights or None,
            cutoff=request.min_objective if weights else None,
            should_stop=call.should_stop,
        )
        minimum = (weights, request.min_objective) if weights else None
        cells = index.count_grid(axes, constraints, minimum=minimum, should_stop=call.should_stop) if axes else []
    return apex_pb2.CountMatchesResponse(
        count=str(found.count),
        fraction=found.fraction,
        product_count=str(found.products_total),
        grid_counts=map(str, cells),
    )


def _axes(request: apex_pb2.CountMatchesRequest) -> list["Axis"]:
    from lyceum_apex.grids import Axis

    lower = apex_pb2.BOUND_SIDE_LOWER
    return [
        Axis(axis.property, tuple(axis.values), "lower" if axis.side == lower else "upper") for axis in request.grid
    ]


def describe_distribution(
    request: apex_pb2.DescribeDistributionRequest, call: Call
) -> apex_pb2.DescribeDistributionResponse:
    """Quantiles, ranks and a histogram over all products, exactly."""
    index = load_restricted(call, request.index, request.synthon_filter, "synthon_filter")
    constraints = constraints_of(request.constraints, index, "constraints")
    weights = weights_of(request.objective, index, "objective")
    with fields(lambda field: by_place(field, constraints, weights)):
        found = index.describe(
            weights,
            constraints,
            bins=request.bins,
            quantiles=request.quantiles,
            values=request.values,
            should_stop=call.should_stop,
        )
    response = apex_pb2.DescribeDistributionResponse(
        count=str(found.count),
        product_count=str(found.products_total),
        bin_edges=found.edges,
        bin_counts=map(str, found.bin_counts),
        at_least_counts=map(str, found.at_least),
    )
    if found.count:
        response.minimum, response.maximum = found.minimum, found.maximum
        response.quantiles.extend(found.quantiles)
    return response
