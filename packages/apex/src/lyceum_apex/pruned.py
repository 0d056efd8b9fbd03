"""Exact top-k by branch and bound over tuples of blocks.

A tuple holds one tree node for every R-group and stands for all products below it; its bound is the best rank key any
of them could have.  Tuples of all reactions wait in one list.  A round takes the most promising quarter, whose worst
bound is the *horizon*, and explores below them in parallel as far as the horizon; what lies beyond returns to the
list.  Products found raise the threshold (the k-th best key so far), tuples that cannot beat it are dropped, and when
none is left the k best are exact. Feasibility needs no phase of its own: the violation is the first part of the key,
so infeasible products are looked at exactly when fewer than k feasible ones exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.forest import MAX_TUPLE, SCAN_LEAF, Forest, Roots
from lyceum_apex.kernels import Columns, Lane, Pairs, Threshold, bound_tuples, explore
from lyceum_apex.lanes import LANE_WORK, LANES, Tick, make_lane
from lyceum_apex.topk import Key, TopK, smallest

_LEAST_DEALT, _MAX_DEALT = 32, 1 << 16
_MAX_PENDING = 1 << 21  # 75 MB; beyond it a round explores depth first and puts nothing off


def iter_pruned(
    forest: Forest,
    pairs: Pairs | None,
    roots: Roots,
    reactions: NDArray[np.int32],
    columns: Columns,
    top: TopK,
    pool: Executor,
) -> Iterator[Tick]:
    """Fill `top` from the given reactions; yields after every round."""
    tuples = np.column_stack([reactions, roots.nodes[reactions]]).astype(np.int32)
    key = np.empty((len(tuples), 2))
    bound_tuples(forest, columns, pairs, tuples, key)
    lanes = [make_lane(len(columns.bias), SCAN_LEAF) for _ in range(LANES)]
    touched = visited = 0
    while len(tuples):
        best = smallest(_deal(len(tuples)), len(tuples), _keys(forest, tuples, key))
        horizon = key[best].max(axis=0)
        horizon[1] = key[best[key[best, 0] == horizon[0]], 1].min()
        if len(tuples) > _MAX_PENDING:
            horizon[:] = np.inf, -np.inf
        stacked = []
        for i, lane in enumerate(lanes):
            mine = best[i::LANES]
            lane.stack[: len(mine)], lane.stack_key[: len(mine)] = tuples[mine], key[mine]
            stacked.append(len(mine))
        keep = np.ones(len(tuples), dtype=bool)
        keep[best] = False
        rest, rest_key = [tuples[keep]], [key[keep]]
        run = _explorer(forest, pairs, columns, top.threshold, horizon)
        busy = lanes[: len(best)]
        for lane, (left, found, put_off, evaluated, scanned) in zip(busy, pool.map(run, busy, stacked)):
            top.add(lane.key[:found], lane.product[:found])
            rest += [lane.stack[:left], lane.put_off[:put_off]]
            rest_key += [lane.stack_key[:left], lane.put_off_key[:put_off]]
            touched, visited = touched + evaluated, visited + scanned
        tuples, key = _unbeaten(np.concatenate(rest), np.concatenate(rest_key), top.threshold)
        yield Tick(touched, visited, len(tuples))


def _deal(pending: int) -> int:
    """A quarter of what is pending; of a short list up to half, since a round has a price of its own."""
    return min(max(pending // 4, min(_LEAST_DEALT, (pending + 1) // 2)), _MAX_DEALT)


def _explorer(
    forest: Forest, pairs: Pairs | None, columns: Columns, threshold: Threshold, horizon: NDArray[np.float64]
) -> Callable[[Lane, int], tuple[int, int, int, int, int]]:
    def run(lane: Lane, stacked: int) -> tuple[int, int, int, int, int]:
        result: tuple[int, int, int, int, int] = explore(
            forest, columns, pairs, threshold, horizon, lane, stacked, LANE_WORK, MAX_TUPLE
        )
        return result

    return run


def _keys(forest: Forest, tuples: NDArray[np.int32], key: NDArray[np.float64]) -> list[Key]:
    """Best bound first; ties (whole plateaus, with integer properties) by the smallest product indices below."""
    reaction_then_nodes: list[Key] = [lambda at: tuples[at, 0], *(_first(forest, tuples, g) for g in range(1, 5))]
    return [lambda at: key[at, 0], lambda at: -key[at, 1], *reaction_then_nodes]


def _first(forest: Forest, tuples: NDArray[np.int32], slot: int) -> Key:
    return lambda at: forest.first[tuples[at, slot]]


def _unbeaten(
    tuples: NDArray[np.int32], key: NDArray[np.float64], threshold: Threshold
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    violation, objective = key[:, 0], key[:, 1]
    keep = (violation < threshold.violation) | ((violation == threshold.violation) & (objective >= threshold.objective))
    return tuples[keep], key[keep]
