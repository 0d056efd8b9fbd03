"""Scores, explanations and counts of a contribution table (acceptance line 3, additive half)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum_apex.contributions import ContributionTable, explain, score
from lyceum_apex.counting import count
from lyceum_apex.query import QueryError
from lyceum_base.checkpoint import Stopped

NAMES = ("a", "b", "c")


def make_table(seed: int, *, integer: bool = False, masked: bool = False) -> ContributionTable:
    rng = np.random.default_rng(seed)
    sizes = ((130, 90), (20, 30, 25), (7, 9, 8, 10))
    values = rng.normal(size=(sum(map(sum, sizes)), 3))
    if integer:
        values = np.rint(2 * values)
    bias = rng.normal(size=3)
    if integer:  # scores then meet bounds exactly
        bias = np.rint(bias)
    mask = rng.random(len(values)) < 0.7 if masked else None
    return ContributionTable(sizes, values, bias, np.array([1.0, 2.0, 3.0]), NAMES, mask)


def every_score(table: ContributionTable) -> np.ndarray:
    scores = []
    for r, groups in enumerate(table.sizes):
        synthons = np.array(list(itertools.product(*map(range, groups))))
        if table.available is not None:
            keep = np.ones(len(synthons), bool)
            for g in range(len(groups)):
                keep &= table.available[table.offsets[r, g] + synthons[:, g]]
            synthons = synthons[keep]
        padded = np.pad(synthons, ((0, 0), (0, 4 - len(groups))), constant_values=-1)
        scores.append(score(table, np.full(len(padded), r), padded))
    return np.concatenate(scores)


def test_acceptance_03_interaction_contrast_of_scores_vanishes() -> None:
    table = make_table(0)
    rng = np.random.default_rng(1)
    a, a2 = rng.integers(0, 130, (2, 1000))
    b, b2 = rng.integers(0, 90, (2, 1000))
    missing = np.full(1000, -1)

    def f(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return score(table, np.zeros(1000, int), np.column_stack([first, second, missing, missing]))

    contrast = f(a, b) + f(a2, b2) - f(a, b2) - f(a2, b)
    assert (np.abs(contrast) < 1e-6 * table.scale).all()
    assert np.abs(f(a, b) - f(a2, b)).max() > 1  # the scores themselves do vary


def test_explained_contributions_and_bias_sum_to_the_score() -> None:
    table = make_table(0)
    explained = explain(table, 1, [3, 4, 5])
    parts = explained.legs
    assert parts.shape == (3, 3)
    assert not explained.pairs.any()
    total = ((table.bias + parts[0]) + parts[1]) + parts[2]
    np.testing.assert_array_equal(total, score(table, [1], [[3, 4, 5, -1]])[0])


def test_exact_columns_add_up_without_bias() -> None:
    table = make_table(0)
    mass = np.arange(table.leg_count, dtype=float)
    wider = table.with_columns(["mass"], mass)
    assert wider.names == (*NAMES, "mass")
    legs = table.offsets[2] + [1, 2, 3, 4]
    assert score(wider, [2], [[1, 2, 3, 4]])[0, 3] == mass[legs].sum()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    integer=st.booleans(),
    masked=st.booleans(),
    bounds=st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(-4, 4), st.integers(0, 5)), max_size=3),
    open_ends=st.sampled_from(["", "lower", "upper"]),
    cutoff=st.none() | st.integers(-3, 3),
    maximize=st.booleans(),
)
def test_counting_equals_counting_every_product(
    seed: int,
    integer: bool,
    masked: bool,
    bounds: dict[str, tuple[int, int]],
    open_ends: str,
    cutoff: int | None,
    maximize: bool,
) -> None:
    table = make_table(seed, integer=integer, masked=masked)
    constraints = {
        name: (None if open_ends == "lower" else float(low), None if open_ends == "upper" else float(low + width))
        for name, (low, width) in bounds.items()
    }
    scores = every_score(table)
    inside = np.ones(len(scores), bool)
    for name, (low, high) in constraints.items():
        value = scores[:, NAMES.index(name)]
        inside &= (value >= (-np.inf if low is None else low)) & (value <= (np.inf if high is None else high))
    if cutoff is None:
        result = count(table, constraints, threads=2)
    else:
        inside &= scores[:, 0] >= cutoff if maximize else scores[:, 0] <= cutoff
        result = count(table, constraints, objective="a", maximize=maximize, cutoff=float(cutoff), threads=1)
    assert result.count == inside.sum()
    assert result.products_total == len(scores)
    assert result.fraction == inside.sum() / max(len(scores), 1)


def test_a_count_beyond_64_bits_is_exact() -> None:
    n = 100_000
    table = ContributionTable(((n, n, n, n),), np.zeros((4 * n, 1)), np.ones(1), np.ones(1), ("f",))
    assert count(table, {}).count == 10**20
    assert count(table, {"f": (1.0, 1.0)}).count == 10**20
    assert count(table, {"f": (None, 0.999)}).count == 0


def test_an_infinite_cutoff_is_reached_by_none_or_by_all() -> None:
    table = make_table(0)
    within = {"b": (-1.0, 1.0)}
    for maximize, cutoff, expected in (
        (True, np.inf, 0),
        (True, -np.inf, count(table, within).count),
        (False, np.inf, count(table, within).count),
        (False, -np.inf, 0),
    ):
        assert count(table, within, objective="a", maximize=maximize, cutoff=cutoff).count == expected


def test_counting_ten_billion_products_touches_few_of_them() -> None:
    n = 100_000
    values = np.concatenate([np.arange(n), np.arange(n)]).astype(float)[:, None]
    table = ContributionTable(((n, n),), values, np.zeros(1), np.ones(1), ("f",))
    result = count(table, {"f": (100_000.0, 150_000.0)})
    expected = sum(min(s, 2 * n - 2 - s) + 1 for s in range(100_000, 150_001))
    assert result.count == expected
    assert result.products_touched < 1e-2 * 10**10


def test_counting_stops_when_asked() -> None:
    with pytest.raises(Stopped):
        count(make_table(0), {"a": (0.0, 1.0)}, should_stop=lambda: True)


def test_a_cutoff_needs_an_objective() -> None:
    with pytest.raises(QueryError, match="cutoff"):
        count(make_table(0), {}, cutoff=1.0)
    with pytest.raises(QueryError, match=r"constraints\[z\]"):
        count(make_table(0), {"z": (0.0, 1.0)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ((3,),)}, r"sizes\[0\]: 1 R-groups"),
        ({"sizes": ((2, 0),)}, r"sizes\[0\]: R-group 1 is empty"),
        ({"values": np.zeros((3, 2))}, r"values: shape \(3, 2\)"),
        ({"values": np.full((4, 2), np.nan)}, "values: holds a number that is not finite"),
        ({"scale": np.array([1.0, 0.0])}, r"scale\[1\]"),
        ({"names": ("f", "f")}, "names"),
        ({"available": np.ones(4)}, "available"),
    ],
)
def test_a_bad_table_names_its_field(changes: dict[str, object], message: str) -> None:
    two = np.ones(2)
    good = {"sizes": ((2, 2),), "values": np.zeros((4, 2)), "bias": two, "scale": two, "names": ("f", "g")}
    with pytest.raises(ValueError, match=message):
        ContributionTable(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("synthons", [[0, 90, -1, -1], [0, 0, 0, -1], [-1, 0, -1, -1]])
def test_a_product_outside_the_library_is_refused(synthons: list[int]) -> None:
    with pytest.raises(ValueError, match=r"synthons\[0\]"):
        score(make_table(0), [0], [synthons])
