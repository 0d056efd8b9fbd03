"""How many products fall between given values of one objective, within bounds: exactly and mostly without looking.

Node tuples whose products all lie between two neighbouring edges and within the bounds count in one step, as in
`counting`; the others are split, and along a row of a leaf the products are sorted by the objective, so that their
bins are found by walking.  All edges are counted in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lyceum_apex.contributions import MAX_RGROUPS, ContributionTable
from lyceum_apex.counting import bounded
from lyceum_apex.forest import SCAN_LEAF, grow_forest, make_pairs, make_spans
from lyceum_apex.kernels import Columns, add_leg, column_range, row_values, with_pairs
from lyceum_apex.lanes import LANE_WORK, LANES, thread_pool
from lyceum_apex.pairs import joined
from lyceum_apex.query import Bounds, Problem, make_problem
from lyceum_base.checkpoint import Stopped

FloatArray = NDArray[np.float64]


class _Scratch(NamedTuple):
    prefix: FloatArray  # [3, C] sums over slots 0, 0..1, 0..2
    fine: NDArray[np.int64]  # one row of products: within the bounds
    value: FloatArray  # their values of column 0
    other: FloatArray  # and of another column


class Binner:
    """Products within `constraints` by their value of the weighted sum `weights`; its trees are grown once.

    `minimum` restricts another weighted sum, given as (weights, least value), besides.

    Raises:
        QueryError: unknown property or bad bound.
        Stopped: `should_stop()` returned True; also from `count`.
    """

    def __init__(
        self,
        table: ContributionTable,
        weights: Mapping[str, float],
        constraints: Mapping[str, Bounds],
        *,
        minimum: tuple[Mapping[str, float], float] | None = None,
        should_stop: Callable[[], bool] | None = None,
        threads: int | None = None,
    ) -> None:
        self._should_stop, self._threads = should_stop, threads
        objective = make_problem(table, weights, True, {})
        others, cutoff = ({next(iter(weights)): 1.0}, None) if minimum is None else minimum
        problem = _beside(objective, bounded(make_problem(table, others, True, constraints), cutoff))
        spans = make_spans(table, problem)
        self._columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
        with thread_pool(threads) as pool:
            self._forest, roots = grow_forest(table, spans, pool, self._check)
        self._pairs = make_pairs(spans, self._forest, roots, self._columns)
        filled = (spans.end > spans.begin).all(axis=1)
        reactions = np.flatnonzero(filled).astype(np.int32)
        self._start = np.column_stack([reactions, roots.nodes[reactions]]).astype(np.int32)
        self.products_total = roots.products
        self.products_touched = 0

    def count(self, edges: FloatArray, wanted: NDArray[np.bool_] | None = None) -> list[int]:
        """len(edges) + 1 numbers: of products below edges[0], from edges[0] to below edges[1], ..., from edges[-1] on.

        `edges` float64[m] ascend strictly.  Bins that are not `wanted` bool[m + 1] are spared the work and come out
        as 0.
        """
        wanted = np.ones(len(edges) + 1, dtype=bool) if wanted is None else wanted
        totals = [0] * len(wanted)
        for bins, _ in self._pass(edges, wanted, 0):
            totals = [total + more for total, more in zip(totals, bins.tolist(), strict=True)]
        return totals

    def values(self, low: float, high: float, count: int) -> FloatArray:
        """The values from `low` to `high`, ascending; there are `count` of them, as `count` says."""
        edges = np.array([low, np.nextafter(high, np.inf)])
        found = [kept for _, kept in self._pass(edges, np.array([False, True, False]), count)]
        return np.sort(np.concatenate(found))

    def _pass(
        self, edges: FloatArray, wanted: NDArray[np.bool_], most: int
    ) -> Iterator[tuple[NDArray[np.int64], FloatArray]]:
        """Counts of wanted bins, and with `most` > 0, at least their sum, also the values in them; to be added up."""
        forest, columns, pairs = self._forest, self._columns, self._pairs
        before = np.cumsum(np.concatenate([[0], wanted]))
        pending, budget = self._start, 1 << 14

        def run(mine: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64], FloatArray, int]:
            stack = np.empty((len(mine) + 512, 1 + MAX_RGROUPS), dtype=np.int32)
            stack[: len(mine)] = mine
            prefix, fine = np.empty((MAX_RGROUPS - 1, len(columns.bias))), np.empty(SCAN_LEAF, dtype=np.int64)
            scratch = _Scratch(prefix, fine, np.empty(SCAN_LEAF), np.empty(SCAN_LEAF))
            bins, kept = np.zeros(len(wanted), dtype=np.int64), np.empty(most)
            left, inside, touched = _bin_below(
                forest, columns, pairs, edges, before, stack, len(mine), budget, scratch, bins, kept
            )
            return stack[:left], bins, kept[:inside].copy() if most else kept, int(touched)

        with thread_pool(self._threads) as pool:
            while len(pending):
                self._check()
                parts = list(pool.map(run, [pending[i::LANES] for i in range(min(LANES, len(pending)))]))
                pending = np.concatenate([left for left, _, _, _ in parts])
                for _, bins, kept, touched in parts:
                    self.products_touched += touched
                    yield bins, kept
                budget = min(2 * budget, LANE_WORK)

    def _check(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise Stopped


def _beside(first: Problem, second: Problem) -> Problem:
    """The columns of two problems over the same legs side by side."""
    parts: list[FloatArray] = []
    for problem in (first, second):
        empty = np.zeros((len(problem.values), MAX_RGROUPS, 0))
        columns = range(problem.values.shape[1])
        parts += [empty if problem.factors is None else problem.factors.of(c) for c in columns]
    return Problem(
        values=np.concatenate([first.values, second.values], axis=1),
        bias=np.concatenate([first.bias, second.bias]),
        lower=np.concatenate([first.lower, second.lower]),
        upper=np.concatenate([first.upper, second.upper]),
        weight=np.concatenate([first.weight, second.weight]),
        sign=first.sign,
        factors=joined(parts),
    )


@njit(cache=True, nogil=True)
def _bin_below(
    forest: Any,
    columns: Any,
    pairs: Any,
    edges: Any,
    before: Any,
    stack: Any,
    stacked: int,
    budget: int,
    scratch: Any,
    bins: Any,
    kept: Any,
) -> Any:
    """Add the products below the stacked node tuples, within all column bounds, to the wanted bins of column 0.

    before[b] is the number of wanted bins below bin b.  If `kept` has room, it gets the values besides.  Returns the
    numbers of tuples left on the stack (budget spent), of products added and of products evaluated one by one.
    """
    size = columns.bias.size
    points, low, high, prefix = forest.points, forest.low, forest.high, scratch.prefix
    touched, work = 0, 0
    inside: Any = np.int64(0)
    current, at = np.empty(5, dtype=np.int32), np.zeros(3, dtype=np.int64)
    while stacked > 0 and work < budget and stacked + 2 <= len(stack) and inside < 2**61:
        stacked -= 1
        for g in range(5):
            current[g] = stack[stacked, g]
        n0, n1, n2, n3 = current[1], current[2], current[3], current[4]
        work += 64
        whole, empty = len(kept) == 0, False
        first: Any = np.int64(0)
        last: Any = np.int64(0)
        for c in range(size):
            if pairs is None:
                most = (((columns.bias[c] + high[n0, c]) + high[n1, c]) + high[n2, c]) + high[n3, c]
                least = (((columns.bias[c] + low[n0, c]) + low[n1, c]) + low[n2, c]) + low[n3, c]
            else:
                least, most = column_range(forest, columns, pairs, current, c)
            if c == 0:
                first = _bin_of(edges, least, 0, len(edges))
                last = _bin_of(edges, most, first, len(edges))
                whole &= first == last
                empty = before[first] == before[last + 1]
            else:
                empty |= (most < columns.lower[c]) | (least > columns.upper[c])
                whole &= (least >= columns.lower[c]) & (most <= columns.upper[c])
        if empty:
            continue
        slot, widest = 0, 0
        products, exact = 1, 1.0
        for g in range(1, 5):
            node = current[g]
            count = forest.end[node] - forest.begin[node]
            exact *= count
            products *= count
            if forest.child[node] >= 0 and count > widest:
                slot, widest = g, count
        if whole and exact < 2.0**60:  # larger tuples are split, so that the integer sum cannot overflow
            bins[first] += products
            inside += products
            continue
        if slot > 0:
            child = forest.child[current[slot]]
            for step in range(2):
                current[slot] = child + step
                for g in range(5):
                    stack[stacked, g] = current[g]
                stacked += 1
            continue
        while before[first] == before[first + 1]:
            first += 1
        while before[last] == before[last + 1]:
            last -= 1
        for i0 in range(forest.begin[n0], forest.end[n0]):
            at[0] = i0
            one = _prefix(points, columns, pairs, at, 0, prefix, -1)
            for i1 in range(forest.begin[n1], forest.end[n1]):
                at[1] = i1
                two = _prefix(points, columns, pairs, at, 1, prefix, one)
                for i2 in range(forest.begin[n2], forest.end[n2]):
                    at[2] = i2
                    row = prefix[_prefix(points, columns, pairs, at, 2, prefix, two)]
                    begin, end = forest.begin[n3], forest.end[n3]
                    if pairs is None:
                        base, column = row[0], points[0]
                        if last < len(edges):
                            begin = _first_below(column, base, begin, end, edges[last])
                        if first > 0:
                            end = _first_below(column, base, begin, end, edges[first - 1])
                        for j in range(end - begin):
                            scratch.value[j] = base + column[begin + j]
                    else:
                        row_values(points, columns, pairs, row, at, begin, end, 0, scratch.value)
                    touched += end - begin
                    work += end - begin + 8
                    if begin == end or not _within(forest, n3, row, columns, pairs, at, begin, end, scratch):
                        continue
                    here = last
                    for j in range(end - begin):
                        value = scratch.value[j]
                        if pairs is None:  # values descend along the leaf
                            while here > first and value < edges[here - 1]:
                                here -= 1
                        else:
                            here = _bin_of(edges, value, 0, len(edges))
                            if here < first or here > last:
                                continue
                        if scratch.fine[j] and before[here] != before[here + 1]:
                            bins[here] += 1
                            if len(kept) > 0:
                                kept[inside] = value
                            inside += 1
    return stacked, inside, touched


@njit(cache=True, nogil=True)
def _bin_of(edges: Any, value: float, first: int, last: int) -> Any:
    """Number of edges that are at most `value`, which is known to be first..last."""
    while first < last:
        middle = (first + last) // 2
        if edges[middle] <= value:
            first = middle + 1
        else:
            last = middle
    return first


@njit(cache=True, nogil=True)
def _first_below(column: Any, base: float, begin: int, end: int, edge: float) -> Any:
    """First of the positions begin..end where base plus the column, which descends, is below the edge."""
    while begin < end:
        middle = (begin + end) // 2
        if base + column[middle] >= edge:
            begin = middle + 1
        else:
            end = middle
    return begin


@njit(cache=True, nogil=True)
def _prefix(points: Any, columns: Any, pairs: Any, at: Any, slot: int, prefix: Any, last: int) -> Any:
    """Leg at[slot] added to prefix[last], the sums over the slots before (the bias for -1); the row with the sums."""
    if pairs is not None:
        return add_leg(columns, pairs, at, slot, prefix, last)
    for c in range(columns.bias.size):
        prefix[slot, c] = (columns.bias[c] if last < 0 else prefix[last, c]) + points[c, at[slot]]
    return slot


@njit(cache=True, nogil=True)
def _within(
    forest: Any, node: int, row: Any, columns: Any, pairs: Any, at: Any, begin: int, end: int, scratch: Any
) -> Any:
    """Mark in `fine` which products begin..end of a row are within the bounds; whether any may be."""
    fine, count = scratch.fine, end - begin
    for j in range(count):
        fine[j] = 1
    for c in range(1, columns.bias.size):
        lower, upper = columns.lower[c], columns.upper[c]
        least, most = row[c] + forest.low[node, c], row[c] + forest.high[node, c]
        if pairs is not None:
            least, most = with_pairs(forest, pairs, at, node, c, columns.bias.size, least, most)
        if most < lower or least > upper:
            return False
        if least >= lower and most <= upper:
            continue
        if pairs is None:
            base, column = row[c], forest.points[c, begin:end]
            for j in range(count):  # a loop without branches is vectorised
                total = base + column[j]
                fine[j] &= np.int64(total >= lower) & np.int64(total <= upper)
        else:
            row_values(forest.points, columns, pairs, row, at, begin, end, c, scratch.other)
            for j in range(count):
                fine[j] &= np.int64(scratch.other[j] >= lower) & np.int64(scratch.other[j] <= upper)
    return True
