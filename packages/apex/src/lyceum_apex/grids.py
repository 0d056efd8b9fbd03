"""What constraints cost: exact counts for alternative bounds of one or several properties.

Along one axis the counts of all bounds come from one pass, because they are sums of the bins between the bounds;
combinations of several axes take one such pass for each combination of the other axes' bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import isnan, prod
from typing import Literal

import numpy as np

from lyceum_apex.binning import Binner
from lyceum_apex.contributions import MAX_MAGNITUDE, ContributionTable
from lyceum_apex.query import Bounds, QueryError, check_constraints, make_problem

MAX_CELLS = 1000


@dataclass(frozen=True)
class Axis:
    """Alternative bounds of one property, each in addition to all constraints."""

    property: str
    values: tuple[float, ...]
    side: Literal["lower", "upper"] = "upper"


def count_grid(
    table: ContributionTable,
    axes: Sequence[Axis],
    constraints: Mapping[str, Bounds] | None = None,
    *,
    minimum: tuple[Mapping[str, float], float] | None = None,
    should_stop: Callable[[], bool] | None = None,
    threads: int | None = None,
) -> list[int]:
    """Products within the constraints and one bound of each axis, for every combination, the last axis fastest.

    Args:
        axes: one or more; the product of their lengths is at most 1,000.
        minimum: (weights, value): only products count whose weighted sum is at least that value.

    Raises:
        QueryError: unknown property, bad bound, too many cells; `grid[i].values[j]` names a value.
        Stopped: `should_stop()` returned True.
    """
    constraints = constraints or {}
    cells = prod(len(axis.values) for axis in axes)
    if not axes or not 1 <= cells <= MAX_CELLS:
        raise QueryError("grid", f"{cells if axes else 0} cells; a grid has 1 to {MAX_CELLS}")
    for i, axis in enumerate(axes):
        if axis.property not in table.names:
            known = ", ".join(table.names)
            raise QueryError(f"grid[{i}].property", f"unknown property {axis.property!r}; this index has {known}")
        for j, value in enumerate(axis.values):
            if isnan(value) or abs(value) > MAX_MAGNITUDE:
                limits = f"a bound is at most {MAX_MAGNITUDE:g} in size"
                raise QueryError(f"grid[{i}].values[{j}]", f"{value} given; {limits}")
    if minimum is not None and isnan(minimum[1]):
        raise QueryError("minimum", "is NaN; give a number")
    check_constraints(constraints)
    make_problem(table, {} if minimum is None else minimum[0], True, constraints)  # unknown names, also of empty cells
    longest = max(range(len(axes)), key=lambda i: len(axes[i].values))
    counts = np.zeros([len(axis.values) for axis in axes], dtype=object)
    along = axes[longest]
    lines = np.moveaxis(counts, longest, -1)  # a view
    others = [range(len(axis.values)) if i != longest else range(1) for i, axis in enumerate(axes)]
    for place in product(*others):
        bounds = dict(constraints)
        for i, (axis, j) in enumerate(zip(axes, place, strict=True)):
            if i != longest:
                bounds[axis.property] = _tighter(bounds.get(axis.property, (None, None)), axis, axis.values[j])
        if all(lower is None or upper is None or lower <= upper for lower, upper in bounds.values()):
            binner = Binner(
                table, {along.property: 1.0}, bounds, minimum=minimum, should_stop=should_stop, threads=threads
            )
            lines[place[:longest] + place[longest + 1 :]] = _along(binner, along)
    return [int(number) for number in counts.ravel()]


def _tighter(bounds: Bounds, axis: Axis, value: float) -> Bounds:
    lower, upper = bounds
    if axis.side == "lower":
        return (value if lower is None else max(lower, value), upper)
    return (lower, value if upper is None else min(upper, value))


def _along(binner: Binner, axis: Axis) -> list[int]:
    """Counts for every bound of one axis; an upper bound includes itself, so its edge is the next number."""
    upper = axis.side == "upper"
    values = np.array(axis.values) + 0.0
    places = np.nextafter(values, np.inf) if upper else values
    edges = np.unique(places)
    below = list(accumulate(binner.count(edges)))
    at = np.searchsorted(edges, places).tolist()
    return [below[i] if upper else below[-1] - below[i] for i in at]
