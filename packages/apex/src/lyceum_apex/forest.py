"""Blocks of similar legs: one binary tree over the legs of every R-group.

A node splits its legs at the median of the column that is widest in units of that column's spread; a leaf holds a few
legs, sorted by the objective.  Every node knows the range of every queried column, so a tuple of nodes, one an
R-group, bounds all products below it by a handful of additions.  Reactions with fewer than four R-groups are padded
with a single neutral leg (value 0, added exactly), which spares the kernels every special case; the last R-group
always sits in slot 3, where the scan runs along it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.contributions import MAX_RGROUPS, ContributionTable
from lyceum_apex.kernels import Columns, Pairs, grow, largest_norms
from lyceum_apex.pairs import Factors
from lyceum_apex.query import Problem

SCAN_LEAF = 64  # legs of the slot that the scan runs along
_OTHER_LEAF = {2: 64, 3: 8, 4: 4}  # legs of the other slots: a leaf tuple holds at most 4,096 products
MAX_TUPLE = 4096


class Spans(NamedTuple):
    """Legs that may appear, slot by slot: legs of slot g of reaction r are rows begin[r, g] .. end[r, g] of `legs`."""

    legs: NDArray[np.float64]  # [M, C]
    ids: NDArray[np.int32]  # [M] synthon index within the R-group
    begin: NDArray[np.int64]  # [R, 4]
    end: NDArray[np.int64]  # [R, 4]
    factors: Factors | None  # by row of `legs` and slot

    def columns(self) -> NDArray[np.float64]:
        """Legs, then their factors: float64[M, C], or [M, C + 4 K] with pair terms."""
        if self.factors is None:
            return self.legs
        return np.column_stack([self.legs, self.factors.values.reshape(len(self.legs), -1)])

    def slots(self) -> NDArray[np.int64]:
        """int64[M]: slot of each row of `legs`."""
        slot = np.zeros(len(self.legs), dtype=np.int64)
        for begin, end in zip(self.begin, self.end, strict=True):
            for g in range(MAX_RGROUPS):
                slot[begin[g] : end[g]] = g
        return slot


class Forest(NamedTuple):
    """Trees as arrays; node n has children child[n] and child[n] + 1, or is a leaf (child[n] = -1).

    With pair terms the columns of the legs are followed by 4 K columns of factors: see `kernels.Pairs`.
    """

    points: NDArray[np.float64]  # [C, M] legs in tree order, one row a column
    ids: NDArray[np.int32]  # [M]
    begin: NDArray[np.int64]  # [nodes] first point
    end: NDArray[np.int64]  # [nodes]
    child: NDArray[np.int32]  # [nodes]
    low: NDArray[np.float64]  # [nodes, C]
    high: NDArray[np.float64]  # [nodes, C]
    first: NDArray[np.int32]  # [nodes] smallest synthon index


@dataclass(frozen=True, eq=False)
class Roots:
    """Root node of each slot, int32[R, 4], and the number of leaf tuples and of products of the whole library."""

    nodes: NDArray[np.int32]
    leaf_tuples: int
    products: int


def slots(groups: int) -> tuple[int, ...]:
    """Slot of each R-group: in order, the last one in slot 3."""
    return (*range(groups - 1), MAX_RGROUPS - 1)


def make_spans(table: ContributionTable, problem: Problem) -> Spans:
    """Drop unavailable legs and put the others into slots; row 0 is the neutral leg of missing R-groups."""
    kept = [np.zeros((1, problem.values.shape[1]))]
    factors = problem.factors
    shown = [] if factors is None else [np.zeros((1, *factors.values.shape[1:]))]
    ids = [np.zeros(1, dtype=np.int32)]
    begin = np.zeros((table.reaction_count, MAX_RGROUPS), dtype=np.int64)
    end = np.ones((table.reaction_count, MAX_RGROUPS), dtype=np.int64)
    row = 1
    for r, groups in enumerate(table.sizes):
        for g, slot in enumerate(slots(len(groups))):
            start = int(table.offsets[r, g])
            here = slice(start, start + groups[g])
            index = np.arange(groups[g]) if table.available is None else np.flatnonzero(table.available[here])
            kept.append(problem.values[here][index])
            if factors is not None:
                by_slot = np.zeros((len(index), *factors.values.shape[1:]))
                by_slot[:, slots(len(groups))] = factors.values[here][index, : len(groups)]
                shown.append(by_slot)
            ids.append(index.astype(np.int32))
            begin[r, slot], end[r, slot] = row, row + len(index)
            row += len(index)
    by_row = None if factors is None else Factors(np.concatenate(shown), factors.start)
    return Spans(np.concatenate(kept), np.concatenate(ids), begin, end, by_row)


def product_counts(spans: Spans) -> list[int]:
    """Number of available products of each reaction, as Python ints."""
    return [prod(int(n) for n in sizes) for sizes in spans.end - spans.begin]


def grow_forest(
    table: ContributionTable, spans: Spans, pool: Executor, check: Callable[[], None]
) -> tuple[Forest, Roots]:
    """Build the trees of all R-groups, R-groups in parallel; `check` is polled between R-groups."""
    legs = spans.columns()
    count, columns = legs.shape
    weights = _split_weights(spans)
    roots = np.zeros((table.reaction_count, MAX_RGROUPS), dtype=np.int32)
    jobs = [(0, 1, 1, 0, weights(0, 0))]  # the neutral leg: node 0
    capacity = 1
    for r, groups in enumerate(table.sizes):
        for slot in slots(len(groups)):
            leaf = SCAN_LEAF if slot == MAX_RGROUPS - 1 else _OTHER_LEAF[len(groups)]
            begin, end = int(spans.begin[r, slot]), int(spans.end[r, slot])
            roots[r, slot] = capacity
            jobs.append((begin, end, leaf, capacity, weights(r, slot)))
            capacity += 2 * ((end - begin) // ((leaf + 1) // 2)) + 1
    forest = Forest(
        points=np.empty((columns, count)),
        ids=np.empty(count, dtype=np.int32),
        begin=np.zeros(capacity, dtype=np.int64),
        end=np.zeros(capacity, dtype=np.int64),
        child=np.full(capacity, -1, dtype=np.int32),
        low=np.zeros((capacity, columns)),
        high=np.zeros((capacity, columns)),
        first=np.zeros(capacity, dtype=np.int32),
    )
    leaves = np.zeros((table.reaction_count, MAX_RGROUPS), dtype=np.int64)

    def run(job: tuple[int, int, int, int, NDArray[np.float64]]) -> int:
        check()
        begin, end, leaf, node, weight = job
        return int(grow(legs, spans.ids, begin, end, leaf, node, weight, forest)) if end > begin else 0

    counts = list(pool.map(run, jobs))
    leaves[:] = counts[0]
    each = iter(counts[1:])
    for r, groups in enumerate(table.sizes):
        for slot in slots(len(groups)):
            leaves[r, slot] = next(each)
    tuples = sum(prod(int(n) for n in row) for row in leaves)
    return forest, Roots(roots, tuples, sum(product_counts(spans)))


def _split_weights(spans: Spans) -> Callable[[int, int], NDArray[np.float64]]:
    """What a unit of each column is worth to the bounds of R-group `slot` of reaction r, in spreads of the property.

    A factor is worth as much as the typical factor that it meets.
    """
    factors = spans.factors
    spread = spans.legs.std(axis=0)
    if factors is None:
        weight = np.divide(1.0, spread, out=np.zeros(len(spread)), where=spread > 0)
        return lambda r, slot: weight
    typical = np.zeros((len(spans.begin), MAX_RGROUPS, *factors.values.shape[1:]))  # [R, 4, 4, K]
    for r, (begin, end) in enumerate(zip(spans.begin, spans.end, strict=True)):
        for g in range(MAX_RGROUPS):
            if end[g] > begin[g] > 0:
                typical[r, g] = np.sqrt((factors.values[begin[g] : end[g]] ** 2).mean(axis=0))
    for c in range(factors.columns):
        own = typical[..., factors.start[c] : factors.start[c + 1]]
        pairs = np.sqrt(((own * own.swapaxes(1, 2)) ** 2).sum(axis=-1))  # [R, 4, 4]
        spread[c] = np.hypot(spread[c], pairs.max())
    weight = np.divide(1.0, spread, out=np.zeros(len(spread)), where=spread > 0)
    by_dimension = np.repeat(weight, np.diff(factors.start))
    return lambda r, slot: np.concatenate([weight, (typical[r, :, slot] * by_dimension).ravel()])


def make_pairs(spans: Spans, forest: Forest, roots: Roots, columns: Columns) -> Pairs | None:
    """The pair terms of a forest, or None.

    A product's sum has at most 4 + 6 K_c additions and as many roundings of products; so has the bound by norms. Each
    is off by at most 2^-53 times the sum of the sizes of all terms, which the largest legs and norms bound.
    """
    if spans.factors is None:
        return None
    start, width = spans.factors.start, spans.factors.values.shape[2]
    norm = np.empty((len(forest.begin), MAX_RGROUPS, len(columns.bias)))
    largest_norms(forest, start, width, norm)
    size = np.abs(columns.bias) + MAX_RGROUPS * np.abs(spans.legs).max(axis=0)
    shown = norm[roots.nodes]  # [R, 4 legs, 4 to, C]
    size += (shown * shown.swapaxes(1, 2)).sum(axis=(1, 2)).max(axis=0)
    return Pairs(
        start, width, np.ascontiguousarray(forest.points.T), norm, 2.0**-52 * (32 + 16 * np.diff(start)) * size
    )
