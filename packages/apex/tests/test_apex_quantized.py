"""The 8-bit filter: no product is lost, few survive (acceptance line 6)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum_apex.contributions import ContributionTable, Interactions
from lyceum_apex.forest import make_spans
from lyceum_apex.kernels import Columns, Threshold
from lyceum_apex.quantized import _limits, quantize, search_quantized
from lyceum_apex.query import Hits, Query, QueryError, make_problem
from lyceum_apex.search import search
from lyceum_base.checkpoint import Stopped

NAMES = ("a", "b", "c", "d")


def random_table(rng: np.random.Generator) -> ContributionTable:
    sizes = []
    for _ in range(int(rng.integers(1, 4))):
        groups = int(rng.integers(2, 5))
        sizes.append(tuple(int(n) for n in rng.integers(1, {2: 400, 3: 40, 4: 14}[groups], groups)))
    values = rng.normal(size=(sum(map(sum, sizes)), 4)) * 10.0 ** rng.integers(-3, 4)
    values[:, 1] += 0.7 * values[:, 0]
    values = np.rint(values) if rng.random() < 0.3 else values
    available = rng.random(len(values)) < 0.8 if rng.random() < 0.3 else None
    return ContributionTable(tuple(sizes), values, rng.normal(size=4), rng.uniform(0.3, 30, 4), NAMES, available)


def random_query(rng: np.random.Generator, table: ContributionTable) -> Query:
    objective = {str(name): float(rng.normal()) for name in rng.choice(NAMES, int(rng.integers(1, 3)), replace=False)}
    spread = table.values.std(axis=0) * 1.5
    constraints: dict[str, tuple[float | None, float | None]] = {}
    for name in rng.choice(NAMES, int(rng.integers(0, 4)), replace=False):
        low, high = np.sort(rng.normal(size=2) * spread[NAMES.index(name)])
        kind = int(rng.integers(4))
        if kind == 3:
            low, high = high + 40 * spread.max(), high + 41 * spread.max()
        constraints[str(name)] = (None if kind == 1 else float(low), None if kind == 0 else float(high))
    k = int(rng.choice([1, 7, 300]))
    return Query(objective=objective, k=k, maximize=bool(rng.random() < 0.5), constraints=constraints)


def assert_equal(hits: Hits, expected: Hits) -> None:
    for name in ("reaction", "synthons", "objective", "slack", "properties"):
        np.testing.assert_array_equal(getattr(hits, name), getattr(expected, name), err_msg=name)


def test_acceptance_06_the_8_bit_filter_finds_the_set_of_float64_for_100_random_queries() -> None:
    rng = np.random.default_rng(6)
    ratios = []
    for _ in range(100):
        table = random_table(rng)
        query = random_query(rng, table)
        found = search_quantized(table, query, threads=2)
        assert_equal(found, search(table, replace(query, engine="brute"), threads=2))
        if len(found) and (found.slack == 0).all() and found.stats.products_total > 100 * query.k:
            ratios.append(found.stats.products_touched / found.stats.products_total)
    assert len(ratios) > 10
    print(f"survivors: median {np.median(ratios):.2%}, largest {max(ratios):.2%} of {len(ratios)} feasible queries")
    assert np.median(ratios) < 0.2  # it does filter, also in these small libraries


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_error_bound_and_the_limits_on_integers_hold_for_every_product(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = random_table(rng)
    query = random_query(rng, table)
    problem = make_problem(table, query.weights, query.maximize, query.constraints)
    columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
    spans = make_spans(table, problem)
    filled = np.flatnonzero((spans.end > spans.begin).all(axis=1)).astype(np.int32)
    quantized = quantize(spans, columns, filled)
    for r in filled.tolist():
        picks = [rng.integers(spans.begin[r, g], spans.end[r, g], 500) for g in range(4)]
        value, level = columns.bias.copy(), np.zeros((500, len(columns.bias)), dtype=int)
        for rows in picks:
            value = value + spans.legs[rows]
            level = level + quantized.levels[:, rows].T
        assert np.abs(level).max() <= 508
        assert (np.abs(value - (quantized.offset[r] + quantized.step[r] * level)) <= quantized.error[r]).all()
        for i in range(0, 500, 10):  # bounds met to the last bit by one of the products
            bounds = columns._replace(lower=value[i].copy(), upper=value[i].copy())
            threshold = Threshold(0.0, float(value[i, 0]), np.zeros(5, dtype=np.int32))
            least, most = _limits(quantized, bounds, threshold, r).T
            assert (level[:, 0][value[:, 0] >= value[i, 0]] >= least[0]).all()
            for c in range(1, len(columns.bias)):
                assert (level[:, c][value[:, c] >= value[i, c]] >= least[c]).all()
                assert (level[:, c][value[:, c] <= value[i, c]] <= most[c]).all()


def test_numbers_near_the_limits_of_float64_lose_no_product() -> None:
    rng = np.random.default_rng(4)
    for large, small in ((1e100, 1.0), (1e-300, 1.0), (1.0, 1e-100), (5e-324, 1.0)):
        values = rng.normal(size=(300, 2)) / 8 * [large, small]
        table = ContributionTable(((150, 150),), values, np.zeros(2), np.ones(2), ("a", "b"))
        query = Query(objective="a", k=50, constraints={"b": (None, 0.1 * small)})
        with np.errstate(over="ignore"):
            found = search_quantized(table, query, threads=1)
        assert_equal(found, search(table, replace(query, engine="brute"), threads=1))


def test_interactions_are_refused() -> None:
    table = ContributionTable(((2, 2),), np.zeros((4, 1)), np.zeros(1), np.ones(1), ("a",))
    factors = np.zeros((4, 1, 4, 1))
    factors[:2, :, 1], factors[2:, :, 0] = 1.0, 1.0
    table = replace(table, interactions=Interactions(("a",), factors))
    with pytest.raises(QueryError, match="objective"):
        search_quantized(table, Query(objective="a", k=1))


def test_a_search_in_8_bits_stops_when_asked() -> None:
    with pytest.raises(Stopped):
        search_quantized(random_table(np.random.default_rng(0)), Query(objective="a", k=1), should_stop=lambda: True)
