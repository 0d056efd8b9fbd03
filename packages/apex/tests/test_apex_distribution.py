"""Distributions and grids of counts against every product written down."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum_apex.contributions import ContributionTable, Interactions, score
from lyceum_apex.grids import Axis, count_grid
from lyceum_apex.quantiles import describe
from lyceum_apex.query import Bounds, QueryError
from lyceum_base.checkpoint import Stopped

NAMES = ("a", "b", "c")


def random_table(seed: int) -> ContributionTable:
    """Up to some thousand products: integer legs (ties) or not, with stock and pair terms or not."""
    rng = np.random.default_rng(seed)
    sizes = []
    for _ in range(int(rng.integers(1, 4))):
        groups = int(rng.integers(2, 5))
        sizes.append(tuple(int(n) for n in rng.integers(1, {2: 70, 3: 16, 4: 7}[groups], groups)))
    legs = sum(map(sum, sizes))
    values, bias = rng.normal(size=(legs, 3)), rng.normal(size=3)
    factors = 0.7 * rng.normal(size=(legs, 2, 4, 2))
    if integer := rng.random() < 0.5:
        values, bias, factors = np.rint(2 * values), np.rint(bias), np.rint(factors)
    available = rng.random(legs) < 0.8 if rng.random() < 0.4 else None
    table = ContributionTable(tuple(sizes), values, bias, np.ones(3), NAMES, available)
    if rng.random() < 0.5:
        pairs = Interactions(("a", "c") if integer else ("b", "a"), factors * table.partners[:, None, :, None])
        table = ContributionTable(tuple(sizes), values, bias, np.ones(3), NAMES, available, pairs)
    return table


def every_score(table: ContributionTable) -> np.ndarray:
    scores = []
    for r, groups in enumerate(table.sizes):
        here = np.array(list(itertools.product(*map(range, groups))))
        if table.available is not None:
            here = here[table.available[table.offsets[r, : len(groups)] + here].all(axis=1)]
        padded = np.pad(here, ((0, 0), (0, 4 - len(groups))), constant_values=-1)
        scores.append(score(table, np.full(len(padded), r), padded))
    return np.concatenate(scores)


def random_constraints(seed: int) -> dict[str, Bounds]:
    rng = np.random.default_rng(seed)
    found: dict[str, Bounds] = {}
    for name in rng.choice(NAMES, int(rng.integers(0, 3)), replace=False):
        low, high = np.sort(np.rint(rng.normal(scale=3.0, size=2)))
        kind = int(rng.integers(3))
        found[str(name)] = (None if kind == 1 else float(low), None if kind == 0 else float(high))
    return found


def rank_of(level: float, count: int) -> int:
    return max(1, ceil(Fraction(level) * count))


def within(scores: np.ndarray, constraints: dict[str, Bounds]) -> np.ndarray:
    inside = np.ones(len(scores), bool)
    for name, (low, high) in constraints.items():
        value = scores[:, NAMES.index(name)]
        inside &= (value >= (-np.inf if low is None else low)) & (value <= (np.inf if high is None else high))
    return inside


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bins=st.integers(0, 60),
    levels=st.lists(st.floats(0, 1), max_size=4),
    values=st.lists(st.integers(-8, 8).map(float) | st.floats(-9, 9), max_size=4),
)
def test_a_distribution_equals_that_of_every_product(
    seed: int, bins: int, levels: list[float], values: list[float]
) -> None:
    table, constraints = random_table(seed), random_constraints(seed)
    scores = every_score(table)
    objective = np.sort(scores[within(scores, constraints), 0])
    found = describe(table, "a", constraints, bins=bins, quantiles=levels, values=values, threads=2)
    assert found.products_total == len(scores)
    assert found.count == len(objective)
    assert list(found.at_least) == [int((objective >= value).sum()) for value in values]
    if len(objective) == 0:
        assert np.isnan([found.minimum, found.maximum, *found.quantiles]).all()
        assert found.bin_counts == ()
        return
    assert (found.minimum, found.maximum) == (objective[0], objective[-1])
    assert list(found.quantiles) == [objective[rank_of(level, len(objective)) - 1] for level in levels]
    if bins:
        edges = np.array(found.edges)
        assert len(edges) == bins + 1
        assert (np.diff(edges) >= 0).all()
        assert (edges[0], edges[-1]) == (objective[0], objective[-1])
        place = np.minimum(np.searchsorted(edges[1:-1], objective, side="right"), bins - 1)
        assert list(found.bin_counts) == np.bincount(place, minlength=bins).tolist()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), levels=st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_quantiles_ascend_and_ranks_invert_them(seed: int, levels: list[float]) -> None:
    table, weights = random_table(seed), {"a": 0.5, "b": -1.25}
    found = describe(table, weights, quantiles=sorted(levels), threads=1)
    if found.count == 0:
        return
    assert list(found.quantiles) == sorted(found.quantiles)
    ranks = describe(table, weights, values=found.quantiles, threads=1).at_least
    assert list(ranks) == sorted(ranks, reverse=True)
    for level, reached in zip(sorted(levels), ranks, strict=True):
        assert reached >= found.count - rank_of(level, found.count) + 1


def test_a_quantile_among_many_distinct_values_is_found_by_sorting_the_last_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lyceum_apex import quantiles

    rng = np.random.default_rng(0)
    table = ContributionTable(((400, 300),), rng.normal(size=(700, 1)), np.zeros(1), np.ones(1), ("a",))
    expected = np.sort(np.add.outer(table.values[:400, 0], table.values[400:, 0]).ravel())
    for few in (0, 50, 1 << 17):  # bisection to the last bit, some passes, none
        monkeypatch.setattr(quantiles, "_FEW", few)
        found = describe(table, "a", quantiles=[0.0, 0.3, 0.300001, 0.5, 1.0], threads=2)
        assert list(found.quantiles) == [expected[i] for i in (0, 35_999, 36_000, 59_999, 119_999)]


def test_a_distribution_of_ten_to_the_twenty_products_is_exact() -> None:
    n = 100_000
    values = np.concatenate([np.repeat([0.0, 1.0], [n - n // 4, n // 4]), np.zeros(3 * n)])[:, None]
    table = ContributionTable(((n, n, n, n),), values, np.zeros(1), np.ones(1), ("a",))
    found = describe(table, "a", bins=2, quantiles=[0.75, np.nextafter(0.75, 1)], values=[1.0])
    assert found.count == 10**20
    assert found.bin_counts == (75 * 10**18, 25 * 10**18)
    assert found.at_least == (25 * 10**18,)
    assert found.quantiles == (0.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    data=st.lists(
        st.tuples(
            st.sampled_from(NAMES), st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=4), st.booleans()
        ),
        min_size=1,
        max_size=3,
    ),
    cutoff=st.none() | st.integers(-4, 4).map(float),
)
def test_a_grid_equals_counting_every_cell(
    seed: int, data: list[tuple[str, list[float], bool]], cutoff: float | None
) -> None:
    table, constraints, weights = random_table(seed), random_constraints(seed), {"b": 1.0}
    axes = [Axis(name, tuple(values), "upper" if upper else "lower") for name, values, upper in data]
    scores = every_score(table)
    inside = within(scores, constraints)
    minimum = None
    if cutoff is not None:
        minimum = (weights, cutoff)
        inside &= scores[:, 1] >= cutoff
    expected = []
    for bounds in itertools.product(*(axis.values for axis in axes)):
        cell = inside.copy()
        for axis, bound in zip(axes, bounds, strict=True):
            value = scores[:, NAMES.index(axis.property)]
            cell &= value <= bound if axis.side == "upper" else value >= bound
        expected.append(int(cell.sum()))
    assert count_grid(table, axes, constraints, minimum=minimum, threads=2) == expected


def test_distributions_and_grids_stop_when_asked() -> None:
    table = random_table(1)
    with pytest.raises(Stopped):
        describe(table, "a", bins=3, should_stop=lambda: True)
    with pytest.raises(Stopped):
        count_grid(table, [Axis("a", (1.0,))], should_stop=lambda: True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"bins": 201}, "bins"),
        ({"quantiles": [0.5, 1.5]}, "quantiles[1]"),
        ({"quantiles": [float("nan")]}, "quantiles[0]"),
        ({"values": [float("inf")]}, "values[0]"),
        ({"objective": "z"}, "objective[z]"),
        ({"constraints": {"z": (0.0, 1.0)}}, "constraints[z]"),
    ],
)
def test_a_bad_description_names_its_field(options: dict[str, object], field: str) -> None:
    with pytest.raises(QueryError) as caught:
        describe(random_table(0), **{"objective": "a", **options})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("axes", "field"),
    [
        ([], "grid"),
        ([Axis("a", tuple(range(40))), Axis("b", tuple(range(26)))], "grid"),
        ([Axis("a", (1.0,)), Axis("z", (1.0,))], "grid[1].property"),
        ([Axis("a", (1.0, float("nan")))], "grid[0].values[1]"),
    ],
)
def test_a_bad_grid_names_its_field(axes: list[Axis], field: str) -> None:
    with pytest.raises(QueryError) as caught:
        count_grid(random_table(0), axes)
    assert caught.value.field == field
