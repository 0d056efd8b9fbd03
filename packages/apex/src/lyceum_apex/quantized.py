"""Exact top-k by a full scan that looks at every product in 8 bits first.

In one reaction, column c of a leg of slot s is w = m_s + delta q + e with an integer |q| <= 127, the same step delta
for all slots and |e| <= E_s.  A product's value is then within E = sum_s E_s, plus the rounding of the float64 sums, of
O + delta Q, where Q is the sum of its integers and O that of the middles and the bias.  So a product whose Q says that
even O + delta Q + E falls short of the k-th best objective found so far, or of a bound, is none of the k best.  The
others, the survivors, are scored in float64 as everywhere else: the answer is that of the engines, ties included.

A row of integers takes an eighth of the memory of a row of float64 and its tests as much less work.  Pair terms are not
sums of legs, so a query with them is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lyceum_apex.contributions import MAX_RGROUPS, ContributionTable
from lyceum_apex.forest import Spans, make_spans, product_counts
from lyceum_apex.kernels import Columns, Lane, Threshold
from lyceum_apex.lanes import LANE_WORK, LANES, Tick, make_lane, thread_pool
from lyceum_apex.query import Hits, Query, QueryError, make_problem
from lyceum_apex.search import ranked_hits
from lyceum_apex.topk import TopK
from lyceum_base.checkpoint import Stopped

_TILE = 512  # products that are tested together
_LEVELS = 127


@dataclass(frozen=True, eq=False)
class Quantized:
    """The legs of all slots in 8 bits.

    levels int8[C, M]: q of each row of `Spans.legs`.  step, offset and error float64[R, C]: delta, O and E by
    reaction.
    """

    levels: NDArray[np.int8]
    step: NDArray[np.float64]
    offset: NDArray[np.float64]
    error: NDArray[np.float64]


def quantize(spans: Spans, columns: Columns, reactions: NDArray[np.int32]) -> Quantized:
    """The legs of these reactions, none of whose slots is empty."""
    count, width = spans.legs.shape
    levels = np.zeros((width, count), dtype=np.int8)
    shape = (len(spans.begin), width)
    step, offset, error = np.ones(shape), np.zeros(shape), np.zeros(shape)
    for r in reactions.tolist():
        slots = [spans.legs[spans.begin[r, g] : spans.end[r, g]] for g in range(MAX_RGROUPS)]
        middles = [legs.min(axis=0) / 2 + legs.max(axis=0) / 2 for legs in slots]
        widest = np.max([np.abs(legs - middle).max(axis=0) for legs, middle in zip(slots, middles)], axis=0)
        step[r] = np.where(widest > 0, widest / _LEVELS, 1.0)
        size = np.abs(columns.bias)
        offset[r] = columns.bias
        for g, (legs, middle) in enumerate(zip(slots, middles)):
            q = np.clip(np.rint((legs - middle) / step[r]), -_LEVELS, _LEVELS)
            levels[:, spans.begin[r, g] : spans.end[r, g]] = q.T
            error[r] += np.abs(legs - (middle + step[r] * q)).max(axis=0)
            offset[r] += middle
            size = size + np.abs(legs).max(axis=0) + np.abs(middle) + _LEVELS * step[r]
        # Some 30 roundings, here, in a product's sum and in the tests: each is below 2^-52 of the sum of all sizes.
        error[r] += 2.0**-46 * size
    return Quantized(levels, step, offset, error)


def search_quantized(
    table: ContributionTable,
    query: Query,
    *,
    should_stop: Callable[[], bool] | None = None,
    threads: int | None = None,
) -> Hits:
    """The hits of `lyceum_apex.search.search`, whatever `query.engine` says; products touched are the survivors.

    Raises:
        QueryError: unknown property, quotas, or a queried property with pair terms.
        Stopped: `should_stop()` returned True.
    """
    start = monotonic()
    if query.quotas is not None:
        raise QueryError("quotas", "the search in 8 bits has none; use `search`")
    problem = make_problem(table, query.weights, query.maximize, query.constraints)
    if problem.factors is not None:
        raise QueryError(
            "objective", "it or a constraint has interactions, the search in 8 bits has none; use `search`"
        )
    spans = make_spans(table, problem)
    counts = product_counts(spans)
    reactions = np.flatnonzero([count > 0 for count in counts]).astype(np.int32)
    columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
    top, done = TopK(min(query.k, max(sum(counts), 1))), Tick(0, 0, 0)
    with thread_pool(threads) as pool:
        rounds = _rounds(spans, reactions, columns, top, pool)
        while (tick := next(rounds, None)) is not None:
            done = tick
            if should_stop is not None and should_stop():
                raise Stopped
    return ranked_hits(table, query, problem, top, done, sum(counts), 0, True, monotonic() - start)


def _rounds(spans: Spans, reactions: NDArray[np.int32], columns: Columns, top: TopK, pool: Executor) -> Iterator[Tick]:
    """Fill `top` from the given reactions; yields after every round."""
    quantized = quantize(spans, columns, reactions)
    points = np.ascontiguousarray(spans.legs.T)
    lanes = [make_lane(len(columns.bias), _TILE) for _ in range(LANES)]
    todo: deque[tuple[int, int, int]] = deque()  # reaction, tiles first..last
    for r in reactions.tolist():
        n0, n1, n2, n3 = (spans.end[r] - spans.begin[r]).tolist()
        todo.append((r, 0, n0 * n1 * n2 * -(-n3 // _TILE)))
    share, touched = 1, 0  # tiles a lane: few at first, so that a threshold is known early
    while todo:
        jobs: list[tuple[int, int, int]] = []
        while todo and len(jobs) < LANES:
            r, first, last = todo.popleft()
            middle = min(first + share, last)
            if middle < last:
                todo.appendleft((r, middle, last))
            jobs.append((r, first, middle))
        run = _scanner(spans, points, quantized, columns, top.threshold)
        for lane, job, (reached, found, survivors) in zip(lanes, jobs, pool.map(run, lanes, jobs)):
            top.add(lane.key[:found], lane.product[:found])
            touched += survivors
            if reached < job[2]:
                todo.appendleft((job[0], reached, job[2]))
        share = min(2 * share, LANE_WORK // _TILE)
        yield Tick(touched, 0, len(todo))


def _scanner(
    spans: Spans, points: NDArray[np.float64], quantized: Quantized, columns: Columns, threshold: Threshold
) -> Callable[[Lane, tuple[int, int, int]], tuple[int, int, int]]:
    def run(lane: Lane, job: tuple[int, int, int]) -> tuple[int, int, int]:
        r, first, last = job
        limits = _limits(quantized, columns, threshold, r)
        result: tuple[int, int, int] = _scan(
            points,
            quantized.levels,
            spans.ids,
            spans.begin[r],
            spans.end[r],
            r,
            first,
            last,
            columns,
            limits,
            quantized.step[r],
            quantized.offset[r],
            quantized.error[r],
            threshold,
            lane,
        )
        return result

    return run


def _limits(quantized: Quantized, columns: Columns, threshold: Threshold, r: int) -> NDArray[np.int16]:
    """Smallest and largest Q, int16[C, 2], of products that may be among the k best, once k feasible ones are known.

    They are rounded outwards, and |Q| <= 508, so that clipping leaves an impossible limit impossible.
    """
    lower, upper = columns.lower.copy(), columns.upper
    lower[0] = threshold.objective
    step, offset, error = quantized.step[r], quantized.offset[r], quantized.error[r]
    least = np.floor((lower - offset - error) / step)
    most = np.ceil((upper - offset + error) / step)
    limits: NDArray[np.int16] = np.clip(np.column_stack([least, most]), -1000, 1000).astype(np.int16)
    return limits


@njit(cache=True, nogil=True)
def _scan(
    points: Any,
    levels: Any,
    ids: Any,
    begin: Any,
    end: Any,
    reaction: int,
    first: int,
    last: int,
    columns: Any,
    limits: Any,
    step: Any,
    offset: Any,
    error: Any,
    threshold: Any,
    lane: Any,
) -> Any:
    """Scan tiles first..last of a reaction, along slot 3; returns the tile reached (the lane may be full), the number
    of products found and of survivors."""
    size = columns.bias.size
    n1, n2 = end[1] - begin[1], end[2] - begin[2]
    per_row = -((begin[3] - end[3]) // _TILE)
    product = np.empty(5, dtype=np.int32)
    product[0] = reaction
    base, row, total = np.empty(size, dtype=np.int16), np.empty(size), np.empty(size)
    passed = np.empty(_TILE, dtype=np.uint8)
    found: Any = np.int64(0)
    survivors: Any = np.int64(0)
    feasible_known = threshold.violation == 0.0
    tile = first
    while tile < last and found + _TILE <= len(lane.product):
        rest, position = tile // per_row, tile % per_row
        i2, rest = begin[2] + rest % n2, rest // n2
        i1, i0 = begin[1] + rest % n1, begin[0] + rest // n1
        start = begin[3] + position * _TILE
        count = min(_TILE, end[3] - start)
        tile += 1
        for c in range(size):
            base[c] = np.int16(levels[c, i0]) + np.int16(levels[c, i1]) + np.int16(levels[c, i2])
        if feasible_known:
            column = levels[0, start : start + count]
            least = np.int16(limits[0, 0] - base[0])
            any_ = np.int64(0)
            for j in range(count):  # loops without branches over small integers are vectorised
                passed[j] = np.uint8(np.int16(column[j]) >= least)
            for j in range(count):
                any_ |= passed[j]
            if any_ == 0:
                continue
            for c in range(1, size):
                column = levels[c, start : start + count]
                least, most = np.int16(limits[c, 0] - base[c]), np.int16(limits[c, 1] - base[c])
                for j in range(count):
                    value = np.int16(column[j])
                    passed[j] &= np.uint8(value >= least) & np.uint8(value <= most)
        else:
            for j in range(count):
                violation = 0.0
                for c in range(1, size):
                    middle = offset[c] + step[c] * (base[c] + levels[c, start + j])
                    below = max(columns.lower[c] - (middle + error[c]), 0.0)
                    violation += (below + max((middle - error[c]) - columns.upper[c], 0.0)) * columns.weight[c]
                passed[j] = np.uint8(violation * (1.0 - 1e-12) <= threshold.violation)
        ready = False
        for j in range(count):
            if passed[j] == 0:
                continue
            if not ready:
                for c in range(size):
                    row[c] = ((columns.bias[c] + points[c, i0]) + points[c, i1]) + points[c, i2]
                product[1], product[2], product[3] = ids[i0], ids[i1], ids[i2]
                ready = True
            survivors += 1
            violation = 0.0
            for c in range(size):
                total[c] = row[c] + points[c, start + j]
                if c > 0:
                    below = max(columns.lower[c] - total[c], 0.0)
                    violation += (below + max(total[c] - columns.upper[c], 0.0)) * columns.weight[c]
            product[4] = ids[start + j]
            if _before(violation, total[0], product, threshold):
                lane.key[found, 0], lane.key[found, 1] = violation, total[0]
                for g in range(5):
                    lane.product[found, g] = product[g]
                found += 1
    return tile, found, survivors


@njit(cache=True, nogil=True)
def _before(violation: float, objective: float, product: Any, threshold: Any) -> Any:
    """Whether a product ranks before the threshold."""
    if violation != threshold.violation:
        return violation < threshold.violation
    if objective != threshold.objective:
        return objective > threshold.objective
    for g in range(5):
        if product[g] != threshold.product[g]:
            return product[g] < threshold.product[g]
    return False
