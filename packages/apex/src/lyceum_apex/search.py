"""The k best products of a library for a query, exactly.

`iter_search` is the whole search as a generator of progress that ends with the hits; `search` runs it to its end;
`merge_hits` joins searches over disjoint sets of reactions into what one search over all of them finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.brute import iter_brute
from lyceum_apex.contributions import MAX_RGROUPS, ContributionTable
from lyceum_apex.dual import with_dual_column
from lyceum_apex.forest import Spans, grow_forest, make_pairs, make_spans, product_counts, slots
from lyceum_apex.kernels import Columns
from lyceum_apex.lanes import Tick, thread_pool
from lyceum_apex.pruned import iter_pruned
from lyceum_apex.query import (
    Hits,
    Problem,
    Query,
    QueryError,
    SearchProgress,
    SearchStats,
    make_problem,
    queried_properties,
    rank,
)
from lyceum_apex.quotas import iter_within_quotas
from lyceum_apex.topk import TopK
from lyceum_base.checkpoint import Stopped


def search(
    table: ContributionTable,
    query: Query,
    *,
    reactions: Sequence[int] | None = None,
    should_stop: Callable[[], bool] | None = None,
    threads: int | None = None,
    max_seconds: float | None = None,
) -> Hits:
    """`iter_search` run to its end."""
    for update in iter_search(
        table, query, reactions=reactions, should_stop=should_stop, threads=threads, max_seconds=max_seconds
    ):
        if isinstance(update, Hits):
            return update
    raise AssertionError("a search ends with hits")


def iter_search(
    table: ContributionTable,
    query: Query,
    *,
    reactions: Sequence[int] | None = None,
    should_stop: Callable[[], bool] | None = None,
    threads: int | None = None,
    max_seconds: float | None = None,
) -> Iterator[SearchProgress | Hits]:
    """Yield progress several times a second, last the hits.

    Args:
        reactions: search these reactions only (a shard); all by default.
        should_stop: polled between rounds of some tens of milliseconds, at first also from the worker threads.
        threads: worker threads, one a core by default; never changes the result.
        max_seconds: stop then with the best seen so far (`complete` is False); the result then depends on the machine.

    Raises:
        QueryError: unknown property or reaction.
        Stopped: `should_stop()` returned True.
    """
    start = monotonic()
    if query.quotas is not None:

        def without_quotas(table: ContributionTable, query: Query) -> Iterator[SearchProgress | Hits]:
            left = None if max_seconds is None else max(max_seconds - (monotonic() - start), 0.0)
            return iter_search(
                table, query, reactions=reactions, should_stop=should_stop, threads=threads, max_seconds=left
            )

        yield from iter_within_quotas(table, query, query.quotas, without_quotas)
        return

    def check() -> None:
        if should_stop is not None and should_stop():
            raise Stopped

    problem = make_problem(table, query.weights, query.maximize, query.constraints)
    shard = _checked_reactions(table, reactions)
    spans = make_spans(table, problem)
    counts = product_counts(spans)
    shard = shard[[counts[r] > 0 for r in shard]]
    total = sum(counts[r] for r in shard)
    columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
    top = TopK(min(query.k, max(total, 1)))
    tick, blocks, complete = Tick(0, 0, 0), 0, True
    with thread_pool(threads) as pool:
        check()
        if query.engine == "brute":
            rounds = iter_brute(spans, shard, columns, top, pool)
        elif query.engine == "triton":
            rounds = _triton(spans, shard, columns, top)
        else:
            spans, columns = with_dual_column(spans, columns, shard, query.k)
            forest, roots = grow_forest(table, spans, pool, check)
            blocks = roots.leaf_tuples
            pairs = make_pairs(spans, forest, roots, columns)
            rounds = iter_pruned(forest, pairs, roots, shard, columns, top, pool)
        for tick in rounds:
            check()
            seconds = monotonic() - start
            best = problem.sign * top.threshold.objective if top.threshold.violation == 0 else None
            yield SearchProgress(tick.touched, tick.visited, tick.pending, best, seconds)
            if max_seconds is not None and seconds > max_seconds and tick.pending:
                complete = False
                break
    yield ranked_hits(table, query, problem, top, tick, total, blocks, complete, monotonic() - start)


def ranked_hits(
    table: ContributionTable,
    query: Query,
    problem: Problem,
    top: TopK,
    tick: Tick,
    total: int,
    blocks: int,
    complete: bool,
    seconds: float,
) -> Hits:
    """What an engine has found, in order, with all queried properties."""
    key, product = top.result()
    order = rank(key[:, 0], key[:, 1], product)
    key, product = key[order], product[order]
    reaction, synthons = product[:, 0].copy(), _from_slots(table, product)
    names, properties = queried_properties(table, query, reaction, synthons)
    objective = problem.sign * key[:, 1] + 0.0
    stats = SearchStats(
        products_total=total,
        products_touched=tick.touched,
        block_pairs_total=blocks,
        block_pairs_visited=tick.visited,
        threshold=float(objective[-1]) if len(objective) else float("nan"),
        seconds=seconds,
    )
    return Hits(reaction, synthons, objective, 0.0 - key[:, 0], properties, names, complete, stats)


def merge_hits(table: ContributionTable, query: Query, parts: Sequence[Hits]) -> Hits:
    """Hits of searches for one query over disjoint shards, merged: equal to the hits of one search over their union."""
    if not parts:
        raise ValueError("parts: empty; give at least one")
    reaction = np.concatenate([part.reaction for part in parts])
    synthons = np.concatenate([part.synthons for part in parts])
    objective = np.concatenate([part.objective for part in parts])
    slack = np.concatenate([part.slack for part in parts])
    sign = 1.0 if query.maximize else -1.0
    order = rank(-slack, sign * objective, np.column_stack([reaction, synthons]))[: query.k]
    stats = SearchStats(
        products_total=sum(part.stats.products_total for part in parts),
        products_touched=sum(part.stats.products_touched for part in parts),
        block_pairs_total=sum(part.stats.block_pairs_total for part in parts),
        block_pairs_visited=sum(part.stats.block_pairs_visited for part in parts),
        threshold=float(objective[order[-1]]) if len(order) else float("nan"),
        seconds=sum(part.stats.seconds for part in parts),
    )
    properties = np.concatenate([part.properties for part in parts])[order]
    complete = all(part.complete for part in parts)
    return Hits(
        reaction[order], synthons[order], objective[order], slack[order], properties, parts[0].names, complete, stats
    )


def _triton(spans: Spans, reactions: NDArray[np.int32], columns: Columns, top: TopK) -> Iterator[Tick]:
    """The engine is imported when it is asked for: its package is large and of no use without a GPU."""
    if find_spec("triton") is None:
        raise QueryError("engine", "'triton' needs the package triton, not installed here: pip install triton")
    from lyceum_apex.triton_engine import iter_triton

    return iter_triton(spans, reactions, columns, top)


def _checked_reactions(table: ContributionTable, reactions: Sequence[int] | None) -> NDArray[np.int32]:
    if reactions is None:
        return np.arange(table.reaction_count, dtype=np.int32)
    chosen = sorted(set(reactions))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < table.reaction_count:
        raise QueryError("reactions", f"{chosen[0]}..{chosen[-1]}; known are 0..{table.reaction_count - 1}")
    return np.array(chosen, dtype=np.int32)


def _from_slots(table: ContributionTable, product: NDArray[np.int32]) -> NDArray[np.int32]:
    """Products int32[n, 1 + 4] by slot as synthons int32[n, 4] by R-group, -1 padded."""
    column = np.full((table.reaction_count, MAX_RGROUPS), -1)
    for r, groups in enumerate(table.sizes):
        column[r, : len(groups)] = slots(len(groups))
    where = column[product[:, 0]]
    taken = np.take_along_axis(product[:, 1:], np.maximum(where, 0), axis=1)
    return np.where(where < 0, np.int32(-1), taken)
