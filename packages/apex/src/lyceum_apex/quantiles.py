"""How one objective is distributed over all products: quantiles, ranks of values and a histogram, without enumeration.

A histogram is the number of products between its edges, which `binning` counts exactly.  The quantile of level q is
the value at rank max(1, ceil(q n)) from below among the n products within the constraints, an attained value (the
inverse of the empirical distribution function; definition 1 of Hyndman and Fan, "Sample quantiles in statistical
packages", Am. Stat. 50 (1996) 361).  It is found by bisection over the float64 numbers themselves, numbered in their
order: each pass narrows every bracket by some hundred edges, until the values of the few products left in it can be
written down, or until a single number is left, which all of them share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite
from struct import pack, unpack

import numpy as np

from lyceum_apex.binning import Binner
from lyceum_apex.contributions import ContributionTable
from lyceum_apex.query import Bounds, Query, QueryError
from lyceum_apex.search import search

MAX_BINS = 200
_PASS_EDGES = 127
_FEW = 1 << 17  # so many values are written down and sorted


@dataclass(frozen=True)
class Distribution:
    """The distribution of an objective over the products that meet the constraints.

    Args:
        count: products that meet the constraints, of `products_total` available ones.
        minimum, maximum: smallest and largest value; NaN when `count` is 0.
        edges: B + 1 edges of B bins of equal width from minimum to maximum; empty when `count` is 0.
        bin_counts: products from edges[b] to below edges[b + 1]; the last bin includes its upper edge.
        quantiles: one value for each level asked for; NaN when `count` is 0.
        at_least: for each value asked for, how many products reach it.
        products_touched: products evaluated one by one, over all passes.
    """

    count: int
    products_total: int
    minimum: float
    maximum: float
    edges: tuple[float, ...]
    bin_counts: tuple[int, ...]
    quantiles: tuple[float, ...]
    at_least: tuple[int, ...]
    products_touched: int


def describe(
    table: ContributionTable,
    objective: str | Mapping[str, float],
    constraints: Mapping[str, Bounds] | None = None,
    *,
    bins: int = 0,
    quantiles: Sequence[float] = (),
    values: Sequence[float] = (),
    should_stop: Callable[[], bool] | None = None,
    threads: int | None = None,
) -> Distribution:
    """Describe an objective over the products within constraints, exactly.

    Args:
        objective: a property name, or weights by property name.
        bins: bins of the histogram, 0 (none) to 200.
        quantiles: levels, 0 (the minimum) to 1 (the maximum).
        values: numbers whose rank from above is asked for.

    Raises:
        QueryError: unknown property, bad bound, level, value or number of bins.
        Stopped: `should_stop()` returned True.
    """
    constraints = constraints or {}
    if not 0 <= bins <= MAX_BINS:
        raise QueryError("bins", f"{bins} given; a histogram has 1 to {MAX_BINS} bins, 0 leaves it out")
    for i, level in enumerate(quantiles):
        if not 0 <= level <= 1:
            raise QueryError(f"quantiles[{i}]", f"{level} given; a level is 0 to 1")
    for i, value in enumerate(values):
        if not isfinite(value):
            raise QueryError(f"values[{i}]", f"{value} given; a value is finite")
    query = Query(objective=objective, k=1, constraints=constraints)
    binner = Binner(table, query.weights, constraints, should_stop=should_stop, threads=threads)
    edges = np.unique(np.asarray(values, dtype=np.float64))
    reached = binner.count(edges)
    total = sum(reached)
    at_least = tuple(sum(reached[np.searchsorted(edges, value) + 1 :]) for value in values)
    if total == 0:
        nothing = tuple([float("nan")] * len(quantiles))
        return Distribution(
            0, binner.products_total, float("nan"), float("nan"), (), (), nothing, at_least, binner.products_touched
        )
    least, most = (
        float(
            search(
                table,
                Query(objective=objective, k=1, maximize=maximize, constraints=constraints),
                should_stop=should_stop,
                threads=threads,
            ).objective[0]
        )
        for maximize in (False, True)
    )
    found = _at_ranks(binner, least, most, total, [max(1, ceil(Fraction(level) * total)) for level in quantiles])
    bin_edges, bin_counts = _histogram(binner, least, most, bins)
    return Distribution(
        total, binner.products_total, least, most, bin_edges, bin_counts, found, at_least, binner.products_touched
    )


def _histogram(binner: Binner, least: float, most: float, bins: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    if bins == 0:
        return (), ()
    # Halves, because the difference of two numbers near the limit of float64 overflows.
    step = most / bins - least / bins
    edges = np.array([least, *(min(max(least + step * b, least), most) for b in range(1, bins)), most])
    inner = np.unique(edges[1:-1])
    counted = binner.count(inner)
    starts = np.searchsorted(inner, edges[1:-1], side="right")  # equal edges leave the bins between them empty
    counts, begin = [], 0
    for end in [*starts.tolist(), len(counted)]:
        counts.append(sum(counted[begin:end]))
        begin = max(begin, end)
    return tuple(edges.tolist()), tuple(counts)


@dataclass(frozen=True)
class _Bracket:
    """The product at a rank has a value numbered low..high, like `inside` products; `below` products have less."""

    low: int
    high: int
    below: int
    inside: int


def _at_ranks(binner: Binner, least: float, most: float, total: int, ranks: Sequence[int]) -> tuple[float, ...]:
    """The values at these ranks, from 1, of all `total` products in ascending order."""
    brackets = {rank: _Bracket(_number(least), _number(most), 0, total) for rank in ranks}
    while True:
        unknown = {rank: bracket for rank, bracket in brackets.items() if bracket.low < bracket.high}
        if not unknown:
            return tuple(_float(brackets[rank].low) for rank in ranks)
        rank = min(unknown, key=lambda rank: unknown[rank].inside)
        chosen = brackets[rank]
        if chosen.inside <= _FEW:
            few = binner.values(_float(chosen.low), _float(chosen.high), chosen.inside)
            for other in unknown:
                if chosen.below < other <= chosen.below + chosen.inside:
                    number = _number(float(few[other - chosen.below - 1]))
                    brackets[other] = _Bracket(number, number, chosen.below, chosen.inside)
            continue
        share = max(_PASS_EDGES // len(unknown), 1)
        ends: set[int] = set()
        for bracket in unknown.values():
            size = bracket.high - bracket.low + 1
            parts = min(share + 1, size)
            ends.update(bracket.low + size * i // parts for i in range(parts + 1))
        edges = sorted(ends)
        wanted = np.zeros(len(edges) + 1, dtype=bool)
        for bracket in unknown.values():  # bin b + 1 begins at edges[b]
            wanted[bisect_left(edges, bracket.low) + 1 : bisect_left(edges, bracket.high + 1) + 1] = True
        counted = binner.count(np.array([_float(n) for n in edges]), wanted)
        for rank, bracket in unknown.items():
            b, below = bisect_left(edges, bracket.low), bracket.below
            while below + counted[b + 1] < rank:
                b, below = b + 1, below + counted[b + 1]
            brackets[rank] = _Bracket(edges[b], edges[b + 1] - 1, below, counted[b + 1])


def _number(value: float) -> int:
    """Numbers of float64 values ascend with them, without gaps: 0.0 and -0.0 are 0, the next above is 1."""
    bits: int = unpack("<q", pack("<d", value))[0]
    return bits if bits >= 0 else -(bits & (2**63 - 1))


def _float(number: int) -> float:
    value: float = unpack("<d", pack("<q", abs(number)))[0]
    return value if number >= 0 else -value
