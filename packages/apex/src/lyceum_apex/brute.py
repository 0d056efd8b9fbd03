"""Exact top-k by evaluating every product: the plain peer of the pruned engine, and the check on it.

Products are scanned in tiles, vectorised along the last R-group, in parallel, against the same rank-key threshold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.forest import Spans
from lyceum_apex.kernels import Columns, Lane, Pairs, Threshold, scan_range
from lyceum_apex.lanes import LANE_WORK, LANES, Tick, make_lane
from lyceum_apex.topk import TopK

_TILE = 256  # products; a tile without a candidate is rejected by its objective alone


def iter_brute(
    spans: Spans, reactions: NDArray[np.int32], columns: Columns, top: TopK, pool: Executor
) -> Iterator[Tick]:
    """Fill `top` from the given reactions; yields after every round."""
    legs = spans.columns()
    points = np.ascontiguousarray(legs.T)
    pairs = None
    if spans.factors is not None:  # a full scan needs no bounds
        pairs = Pairs(spans.factors.start, spans.factors.values.shape[2], legs, np.empty((0, 4, 0)), np.empty(0))
    lanes = [make_lane(len(columns.bias), _TILE) for _ in range(LANES)]
    todo: deque[tuple[int, int, int]] = deque()  # reaction, tiles first..last
    for r in reactions.tolist():
        n0, n1, n2, n3 = (spans.end[r] - spans.begin[r]).tolist()
        todo.append((r, 0, n0 * n1 * n2 * -(-n3 // _TILE)))
    share, touched = 16, 0  # tiles a lane: few at first, so that a threshold is known early
    while todo:
        jobs: list[tuple[int, int, int]] = []
        while todo and len(jobs) < LANES:
            r, first, last = todo.popleft()
            middle = min(first + share, last)
            if middle < last:
                todo.appendleft((r, middle, last))
            jobs.append((r, first, middle))
        run = _scanner(spans, points, columns, pairs, top.threshold)
        for lane, job, (reached, found, evaluated) in zip(lanes, jobs, pool.map(run, lanes, jobs)):
            top.add(lane.key[:found], lane.product[:found])
            touched += evaluated
            if reached < job[2]:
                todo.appendleft((job[0], reached, job[2]))
        share = min(2 * share, LANE_WORK // _TILE)
        yield Tick(touched, 0, len(todo))


def _scanner(
    spans: Spans, points: NDArray[np.float64], columns: Columns, pairs: Pairs | None, threshold: Threshold
) -> Callable[[Lane, tuple[int, int, int]], tuple[int, int, int]]:
    def run(lane: Lane, job: tuple[int, int, int]) -> tuple[int, int, int]:
        r, first, last = job
        result: tuple[int, int, int] = scan_range(
            points, spans.ids, spans.begin[r], spans.end[r], r, first, last, _TILE, columns, pairs, threshold, lane
        )
        return result

    return run
