"""How many predicted hits to look at so that the truly best products are among them.

Given the true values of n products drawn uniformly from the library, look at the s best of them and at the predictions
that they got.  A further product drawn in the same way, given that it is among the s + 1 best of all n + 1, is
exchangeable with those s, so its prediction falls short of their m-th smallest with probability at most m / (s + 1):
split conformal prediction (Vovk, Gammerman, Shafer, "Algorithmic Learning in a Random World", 2005) among the best.
That prediction is the cutoff, and the number of products that reach it, counted exactly, the length of the list.

The promise is the expected share of the truly best fraction (s + 1) / (n + 1), whatever the errors look like; it is not
that none of the very best is missed, which n labels cannot tell of a library of far more than n products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lyceum_apex.contributions import MAX_RGROUPS, ContributionTable, checked_products
from lyceum_apex.errors import FieldError
from lyceum_apex.quantiles import describe
from lyceum_apex.query import Query, make_problem

_ROUNDING = 1e-9  # 0.1 * 10 is meant as 1


@dataclass(frozen=True)
class ListSize:
    """`k` products reach the predicted `cutoff`; `labels_used` of the labelled ones were the best."""

    k: int
    cutoff: float
    labels_used: int


def list_size(
    table: ContributionTable,
    objective: str | Mapping[str, float],
    reaction: ArrayLike,
    synthons: ArrayLike,
    truth: ArrayLike,
    *,
    top_fraction: float,
    recall: float = 0.9,
    maximize: bool = True,
    should_stop: Callable[[], bool] | None = None,
    threads: int | None = None,
) -> ListSize:
    """The shortest list of the best predictions expected to hold the share `recall` of the truly best `top_fraction`.

    Args:
        objective: what the list is ranked by: a property, or weights by property.
        reaction, synthons: n products drawn uniformly from all products, int[n] and int[n, 4] (-1 pads), as by
            `SynthonLibrary.sample(n, seed, stratify=False)`; not those that the predictions were fitted to.
        truth: float[n], their true values.
        top_fraction: 0 to 1, exclusive; the labels must be enough to show it: n >= 1 / (top_fraction (1 - recall)).
        recall: 0 to 1, exclusive.

    Raises:
        FieldError: a shape or number does not fit, or the labels are too few.
        Stopped: `should_stop()` returned True.
    """
    for name, share in (("top_fraction", top_fraction), ("recall", recall)):
        if not 0 < share < 1:
            raise FieldError(name, f"{share} given; more than 0 and less than 1")
    r, s = checked_products(table.sizes, reaction, synthons)
    y = np.asarray(truth, dtype=np.float64)
    if y.shape != (len(r),) or not np.isfinite(y).all():
        raise FieldError("truth", f"shape {y.shape}; one finite number for each of the {len(r)} products")
    best = min(ceil(top_fraction * (len(y) + 1) - _ROUNDING) - 1, len(y))
    below = int((1 - recall) * (best + 1) + _ROUNDING)
    if below < 1:
        enough = ceil(1 / (top_fraction * (1 - recall)) - _ROUNDING)
        raise FieldError("truth", f"{len(y)} labels; top_fraction and recall need at least {enough}")
    sign = 1.0 if maximize else -1.0
    weights = {name: sign * weight for name, weight in Query(objective=objective, k=1).weights.items()}
    predicted = _predicted(table, weights, r, s)
    chosen = np.argsort(-sign * y, kind="stable")[:best]
    cutoff = float(np.sort(predicted[chosen])[below - 1])
    found = describe(table, weights, values=[cutoff], should_stop=should_stop, threads=threads)
    return ListSize(found.at_least[0], sign * cutoff + 0.0, best)


def _predicted(
    table: ContributionTable, weights: Mapping[str, float], r: NDArray[np.int64], s: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The weighted objective of products, summed as the engines and counts sum it: a cutoff is met to the last bit."""
    problem = make_problem(table, weights, True, {})
    factors = None if problem.factors is None else problem.factors.of(0)
    legs = table.offsets[r] + s
    total = np.full(len(r), problem.bias[0])
    for g in range(MAX_RGROUPS):
        rows = np.flatnonzero(table.offsets[r, g] >= 0)
        total[rows] += problem.values[legs[rows, g], 0]
        if factors is None:
            continue
        for h, k in product(range(g), range(factors.shape[2])):
            total[rows] += factors[legs[rows, h], g, k] * factors[legs[rows, g], h, k]
    return total
