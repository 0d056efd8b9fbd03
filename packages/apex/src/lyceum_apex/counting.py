"""How many products satisfy bounds, exactly and mostly without looking at them.

Block tuples wholly inside the bounds count in one step, those wholly outside not at all; only tuples that straddle a
bound are opened, down to single rows of products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isnan

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.contributions import MAX_RGROUPS, ContributionTable
from lyceum_apex.forest import SCAN_LEAF, grow_forest, make_pairs, make_spans
from lyceum_apex.kernels import Columns, count_below
from lyceum_apex.lanes import LANE_WORK, LANES, thread_pool
from lyceum_apex.pairs import joined
from lyceum_apex.query import Bounds, Problem, Query, QueryError, make_problem
from lyceum_base.checkpoint import Stopped


@dataclass(frozen=True)
class CountResult:
    """`count` of `products_total` available products lie within the bounds; `fraction` is their ratio (0 of 0 is 0)."""

    count: int
    products_total: int
    products_touched: int

    @property
    def fraction(self) -> float:
        return float(Fraction(self.count, self.products_total)) if self.products_total else 0.0


def count(
    table: ContributionTable,
    constraints: Mapping[str, Bounds],
    *,
    objective: str | Mapping[str, float] | None = None,
    maximize: bool = True,
    cutoff: float | None = None,
    should_stop: Callable[[], bool] | None = None,
    threads: int | None = None,
) -> CountResult:
    """Count products with l_i <= f_i <= u_i and, if given, an objective at least as good as the cutoff.

    Raises:
        QueryError: unknown property, bad bound, or only one of objective and cutoff given.
        Stopped: `should_stop()` returned True.
    """
    if (objective is None) != (cutoff is None):
        raise QueryError("cutoff", "an objective and a cutoff go together; give both or neither")
    if cutoff is not None and isnan(cutoff):
        raise QueryError("cutoff", "is NaN; give a number")
    query = Query(
        objective=table.names[0] if objective is None else objective, k=1, maximize=maximize, constraints=constraints
    )
    problem = bounded(make_problem(table, query.weights, maximize, constraints), cutoff)

    def check() -> None:
        if should_stop is not None and should_stop():
            raise Stopped

    spans = make_spans(table, problem)
    columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
    inside = touched = 0
    with thread_pool(threads) as pool:
        forest, roots = grow_forest(table, spans, pool, check)
        pairs = make_pairs(spans, forest, roots, columns)
        filled = (spans.end > spans.begin).all(axis=1)
        reactions = np.flatnonzero(filled).astype(np.int32)
        pending = np.column_stack([reactions, roots.nodes[reactions]]).astype(np.int32)
        budget = 1 << 14  # small at first, so that the lanes soon have something to share

        def run(mine: NDArray[np.int32]) -> tuple[NDArray[np.int32], int, int]:
            stack = np.empty((len(mine) + 512, 1 + MAX_RGROUPS), dtype=np.int32)
            stack[: len(mine)] = mine
            prefix, value = np.empty((MAX_RGROUPS - 1, len(columns.bias))), np.empty(SCAN_LEAF)
            fine = np.empty(SCAN_LEAF, dtype=np.int64)
            left, within, evaluated = count_below(forest, columns, pairs, stack, len(mine), budget, prefix, fine, value)
            return stack[:left], int(within), int(evaluated)

        while len(pending):
            check()
            parts = list(pool.map(run, [pending[i::LANES] for i in range(min(LANES, len(pending)))]))
            pending = np.concatenate([left for left, _, _ in parts])
            inside += sum(within for _, within, _ in parts)
            touched += sum(evaluated for _, _, evaluated in parts)
            budget = min(2 * budget, LANE_WORK)
    return CountResult(inside, roots.products, touched)


def bounded(problem: Problem, cutoff: float | None) -> Problem:
    """Columns that have a bound, the objective among them when there is a cutoff; without any, column 0 stays, open."""
    lower = problem.lower.copy()
    if cutoff is not None:
        lower[0] = problem.sign * cutoff
    bounded = np.flatnonzero((lower > -np.inf) | (problem.upper < np.inf))
    kept = bounded if len(bounded) else np.array([0])
    return Problem(
        np.ascontiguousarray(problem.values[:, kept]),
        problem.bias[kept],
        lower[kept],
        problem.upper[kept],
        problem.weight[kept],
        problem.sign,
        None if problem.factors is None else joined([problem.factors.of(c) for c in kept]),
    )
