"""Low-rank interactions: scores, both engines, counts, fits and storage (acceptance line 3, second half)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum_apex.contributions import ContributionTable, Interactions, explain, score
from lyceum_apex.counting import count
from lyceum_apex.dual import with_dual_column
from lyceum_apex.errors import FieldError
from lyceum_apex.forest import grow_forest, make_pairs, make_spans
from lyceum_apex.index import ApexIndex
from lyceum_apex.interactions import LegModel, fit_additive_and_interactions, fit_interactions
from lyceum_apex.kernels import Columns, bound_tuples
from lyceum_apex.lanes import thread_pool
from lyceum_apex.library import SynthonLibrary
from lyceum_apex.query import Hits, Query, make_problem, slack
from lyceum_apex.search import merge_hits, search

NAMES = ("a", "b", "c", "d")
SIZES = ((60, 50), (30, 20, 25))


def random_table(rng: np.random.Generator, *, masked: bool = False, most_reactions: int = 4) -> ContributionTable:
    """Up to some 10^4 products; half of the tables are integer, hence full of ties, and half of the factors are."""
    sizes = []
    for _ in range(int(rng.integers(1, most_reactions + 1))):
        groups = int(rng.integers(2, 5))
        sizes.append(tuple(int(n) for n in rng.integers(1, {2: 150, 3: 24, 4: 10}[groups], groups)))
    legs = sum(map(sum, sizes))
    integer = rng.random() < 0.5
    values = rng.normal(size=(legs, len(NAMES)))
    values[:, 1] += 0.7 * values[:, 0]
    available = rng.random(legs) < 0.8 if masked else None
    bias, scale = rng.normal(size=len(NAMES)).round(2), rng.uniform(0.3, 30, len(NAMES))
    table = ContributionTable(tuple(sizes), np.rint(values) if integer else values, bias, scale, NAMES, available)
    names = rng.choice(NAMES, int(rng.integers(1, 5)), replace=False)
    return with_interactions(rng, table, tuple(map(str, names)), int(rng.integers(1, 5)), integer=integer)


def with_interactions(
    rng: np.random.Generator, table: ContributionTable, names: tuple[str, ...], rank: int, *, integer: bool = False
) -> ContributionTable:
    factors = 0.7 * rng.normal(size=(table.leg_count, len(names), 4, rank))
    factors = (np.rint(factors) if integer else factors) * table.partners[:, None, :, None]
    return replace(table, interactions=Interactions(names, factors))


def random_query(rng: np.random.Generator, k: int) -> Query:
    objective: str | dict[str, float] = str(rng.choice(NAMES))
    if rng.random() < 0.4:
        objective = {str(name): float(rng.normal()) for name in rng.choice(NAMES, 2, replace=False)}
    constraints: dict[str, tuple[float | None, float | None]] = {}
    for name in rng.choice(NAMES, int(rng.integers(0, 4)), replace=False):
        low, high = np.sort(rng.normal(scale=2.0, size=2).round(1))
        kind = int(rng.integers(4))
        if kind == 3:  # infeasible, or nearly so
            low, high = high + 50, high + 50.5
        constraints[str(name)] = (None if kind == 1 else float(low), None if kind == 0 else float(high))
    return Query(objective=objective, k=k, maximize=bool(rng.random() < 0.5), constraints=constraints)


def all_products(table: ContributionTable) -> tuple[np.ndarray, np.ndarray]:
    """reaction [N] and synthons [N, 4] of every available product."""
    reaction, synthons = [], []
    for r, groups in enumerate(table.sizes):
        here = np.array(list(itertools.product(*map(range, groups))), dtype=np.int32)
        if table.available is not None:
            here = here[table.available[table.offsets[r, : len(groups)] + here].all(axis=1)]
        reaction.append(np.full(len(here), r, dtype=np.int32))
        synthons.append(np.pad(here, ((0, 0), (0, 4 - len(groups))), constant_values=-1))
    return np.concatenate(reaction), np.concatenate(synthons)


def objectives(table: ContributionTable, query: Query, reaction: np.ndarray, synthons: np.ndarray) -> np.ndarray:
    """The weighted objective as a property of its own: weights go to the legs, and to the earlier leg of a pair."""
    legs, bias = np.zeros(table.leg_count), 0.0
    interactions, parts = table.interactions, []
    assert interactions is not None
    for name, weight in query.weights.items():
        legs = legs + weight * table.values[:, NAMES.index(name)]
        bias = bias + weight * table.bias[NAMES.index(name)]
        if name in interactions.names:
            part = interactions.factors[:, interactions.names.index(name)].copy()
            for h in range(4):
                part[table.groups < h, h] *= weight
            parts.append(part)
    pairs = Interactions(("objective",), np.concatenate(parts, axis=2)[:, None]) if parts else None
    weighted = ContributionTable(table.sizes, legs[:, None], np.array([bias]), np.ones(1), ("objective",), None, pairs)
    return score(weighted, reaction, synthons)[:, 0]


def oracle(table: ContributionTable, query: Query) -> dict[str, np.ndarray]:
    """Every product written down and sorted with numpy.lexsort."""
    reaction, synthons = all_products(table)
    properties, objective = score(table, reaction, synthons), objectives(table, query, reaction, synthons)
    loss = slack(table, properties, query.constraints)
    best = -objective if query.maximize else objective
    order = np.lexsort((*synthons.T[::-1], reaction, best, -loss))[: query.k]
    columns = [c for c, name in enumerate(NAMES) if name in query.weights or name in query.constraints]
    return {
        "reaction": reaction[order],
        "synthons": synthons[order],
        "objective": objective[order],
        "slack": loss[order],
        "properties": properties[order][:, columns],
    }


def assert_equal_hits(hits: Hits, expected: dict[str, np.ndarray] | Hits) -> None:
    for name in ("reaction", "synthons", "objective", "slack", "properties"):
        want = expected[name] if isinstance(expected, dict) else getattr(expected, name)
        np.testing.assert_array_equal(getattr(hits, name), want, err_msg=name)


# --- scores ----------------------------------------------------------------------------------------------------------


def test_acceptance_03_interaction_contrast_is_that_of_a_rank_1_model_built_by_hand() -> None:
    p, q = np.array([1.0, -2.0]), np.array([0.5, 3.0, 1.0])
    factors = np.zeros((5, 1, 4, 1))
    factors[:2, 0, 1, 0], factors[2:, 0, 0, 0] = p, q
    additive = ContributionTable(((2, 3),), np.arange(5.0)[:, None], np.ones(1), np.ones(1), ("f",))
    table = replace(additive, interactions=Interactions(("f",), factors))

    def contrast(of: ContributionTable, a: int, a2: int, b: int, b2: int) -> float:
        synthons = [[a, b, -1, -1], [a2, b2, -1, -1], [a, b2, -1, -1], [a2, b, -1, -1]]
        one, two, three, four = score(of, [0] * 4, synthons)[:, 0]
        return float(one + two - three - four)

    for b, b2 in itertools.combinations(range(3), 2):
        assert contrast(table, 0, 1, b, b2) == (p[0] - p[1]) * (q[b] - q[b2])
        assert abs(contrast(table, 0, 1, b, b2)) > 0
        assert abs(contrast(additive, 0, 1, b, b2)) < 1e-6 * additive.scale[0]


def test_a_score_is_the_sum_over_pairs_of_what_the_legs_show_to_each_other() -> None:
    table = random_table(np.random.default_rng(3))
    pairs = table.interactions
    assert pairs is not None
    reaction, synthons = all_products(table)
    expected = score(replace(table, interactions=None), reaction, synthons)
    for row, (r, s) in enumerate(zip(reaction, synthons, strict=True)):
        legs = [table.offsets[r, g] + s[g] for g in range(len(table.sizes[r]))]
        for g, h in itertools.combinations(range(len(legs)), 2):
            for j, name in enumerate(pairs.names):
                expected[row, NAMES.index(name)] += pairs.factors[legs[g], j, h] @ pairs.factors[legs[h], j, g]
    np.testing.assert_allclose(score(table, reaction, synthons), expected, rtol=1e-12, atol=1e-12)


def test_factors_of_zero_change_nothing_to_the_last_bit() -> None:
    rng = np.random.default_rng(5)
    table = random_table(rng)
    assert table.interactions is not None
    zero = Interactions(NAMES, np.zeros((table.leg_count, 4, 4, 3)))
    additive, query = replace(table, interactions=None), random_query(rng, 300)
    assert_equal_hits(search(replace(table, interactions=zero), query), search(additive, query))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_explained_legs_and_pairs_and_bias_sum_to_the_score(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = random_table(rng)
    r = int(rng.integers(table.reaction_count))
    s = [int(rng.integers(n)) for n in table.sizes[r]]
    parts = explain(table, r, s)
    assert parts.legs.shape == (len(s), 4)
    assert not parts.pairs[np.tril_indices(len(s))].any()
    total = table.bias + parts.legs.sum(axis=0) + parts.pairs.sum(axis=(0, 1))
    np.testing.assert_allclose(total, score(table, [r], [s + [-1] * (4 - len(s))])[0], rtol=1e-12, atol=1e-12)


# --- search and count ------------------------------------------------------------------------------------------------


def test_pruned_equals_brute_equals_lexsort_on_150_random_libraries_with_interactions() -> None:
    rng = np.random.default_rng(1)
    infeasible = tied = 0
    for case in range(150):
        table = random_table(rng, masked=case % 4 == 0)
        query = random_query(rng, (1, 7, 1000)[case % 3])
        expected = oracle(table, query)
        infeasible += bool((expected["slack"] < 0).any())
        tied += len(np.unique(expected["objective"])) < len(expected["objective"])
        for engine in ("pruned", "brute"):
            assert_equal_hits(search(table, replace(query, engine=engine), threads=2), expected)
    assert infeasible > 20
    assert tied > 20


def test_pruning_a_larger_library_touches_little_and_finds_what_brute_force_does() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(6000, 4))
    table = ContributionTable(((3000, 3000),), values, np.zeros(4), np.ones(4), NAMES)
    for names in (("a",), ("a", "b")):
        wide = with_interactions(rng, table, names, 4)
        for constraints, most in (({}, 0.1), ({"b": (None, 0.5)}, 0.5)):
            query = Query(objective="a", k=100, constraints=constraints)
            hits = search(wide, query, threads=2)
            assert_equal_hits(search(wide, replace(query, engine="brute"), threads=2), hits)
            assert hits.stats.products_touched < most * 9e6


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shards=st.sampled_from([1, 2, 7]), k=st.sampled_from([1, 10, 300]))
def test_shards_and_threads_change_nothing(seed: int, shards: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    table, query = random_table(rng, most_reactions=9), random_query(rng, k)
    owner = rng.integers(0, shards, table.reaction_count)
    parts = [search(table, query, reactions=np.flatnonzero(owner == i).tolist(), threads=1) for i in range(shards)]
    assert_equal_hits(merge_hits(table, query, parts), search(table, query, threads=3))


def test_permuted_synthons_give_the_same_products() -> None:
    rng = np.random.default_rng(8)
    sizes = ((200, 150), (40, 30, 20))
    values = rng.normal(size=(sum(map(sum, sizes)), 4))
    table = ContributionTable(sizes, values, np.ones(4), np.ones(4), NAMES)
    table = with_interactions(rng, table, ("b", "a"), 3)
    assert table.interactions is not None
    order = [rng.permutation(n) for groups in sizes for n in groups]
    starts = np.cumsum([0] + [len(p) for p in order])
    shuffled = np.concatenate([start + p for start, p in zip(starts, order, strict=False)])
    moved_table = replace(
        table, values=values[shuffled], interactions=Interactions(("b", "a"), table.interactions.factors[shuffled])
    )
    query = Query(objective="a", k=500, constraints={"b": (None, 1.0), "c": (0.0, None)})
    plain, moved = search(table, query), search(moved_table, query)
    back = moved.synthons.copy()
    for row, r in enumerate(moved.reaction):
        for g in range(len(sizes[r])):
            flat = int(np.searchsorted(starts, table.offsets[r, g]))
            back[row, g] = order[flat][moved.synthons[row, g]]
    np.testing.assert_array_equal(back, plain.synthons)
    np.testing.assert_array_equal(moved.objective, plain.objective)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-160, 1e-3, 1.0, 1e45]), offset=st.sampled_from([0, 3]))
def test_bounds_hold_for_every_product_to_the_last_bit(seed: int, size: float, offset: float) -> None:
    rng = np.random.default_rng(seed)
    table = random_table(rng, most_reactions=2)
    assert table.interactions is not None
    side = np.where(rng.random(4) < 0.5, -offset, offset)[table.groups]  # factors of one sign, or of the other
    factors = table.interactions.factors + side[:, None, None, None] * table.partners[:, None, :, None]
    factors = factors * size
    table = replace(table, interactions=Interactions(table.interactions.names, factors))
    query = random_query(rng, 7)
    problem = make_problem(table, query.weights, query.maximize, query.constraints)
    columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
    spans = make_spans(table, problem)
    spans, columns = with_dual_column(spans, columns, np.arange(table.reaction_count, dtype=np.int32), query.k)
    with thread_pool(1) as pool:
        forest, roots = grow_forest(table, spans, pool, lambda: None)
    pairs = make_pairs(spans, forest, roots, columns)
    tuples = np.array([_random_tuple(rng, forest, roots.nodes, table) for _ in range(30)], dtype=np.int32)
    key = np.empty((len(tuples), 2))
    bound_tuples(forest, columns, pairs, tuples, key)
    everything = oracle(table, replace(query, k=table.product_count))
    for (r, *nodes), (violation, objective) in zip(tuples.tolist(), key, strict=True):
        groups = len(table.sizes[r])
        inside = everything["reaction"] == r
        for g, node in enumerate((*nodes[: groups - 1], nodes[3])):
            legs = forest.ids[forest.begin[node] : forest.end[node]]
            inside &= np.isin(everything["synthons"][:, g], legs)
        if inside.any():
            best = -everything["slack"][inside].max()
            assert violation <= best
            same = inside & (everything["slack"] == -best)
            assert violation < best or objective >= (problem.sign * everything["objective"][same]).max()


def test_bounds_of_single_products_whose_factors_are_parallel_are_not_below_their_values() -> None:
    # |p| |q| then is the pair term itself, so that only rounding can put the bound by norms below the value.
    rng = np.random.default_rng(0)
    sizes = ((1, 1), (1, 1, 1), (1, 1, 1, 1)) * 100
    values = 1e6 * rng.normal(size=(sum(map(sum, sizes)), 4))
    table = ContributionTable(sizes, values, np.zeros(4), np.ones(4), NAMES)
    direction = rng.normal(size=5)
    factors = direction * np.exp(rng.normal(size=(table.leg_count, 1, 4, 1))) * table.partners[:, None, :, None]
    table = replace(table, interactions=Interactions(("a",), factors))
    problem = make_problem(table, {"a": 1.0}, True, {})
    columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
    spans = make_spans(table, problem)
    with thread_pool(1) as pool:
        forest, roots = grow_forest(table, spans, pool, lambda: None)
    tuples = np.column_stack([np.arange(len(sizes)), roots.nodes]).astype(np.int32)
    key = np.empty((len(tuples), 2))
    bound_tuples(forest, columns, make_pairs(spans, forest, roots, columns), tuples, key)
    np.testing.assert_array_equal(key[:, 1], score(table, *all_products(table))[:, 0])


def _random_tuple(rng: np.random.Generator, forest: object, roots: np.ndarray, table: ContributionTable) -> list[int]:
    r = int(rng.integers(table.reaction_count))
    nodes = roots[r].tolist()
    for g in range(4):
        while forest.child[nodes[g]] >= 0 and rng.random() < 0.8:  # type: ignore[attr-defined]
            nodes[g] = int(forest.child[nodes[g]]) + int(rng.integers(2))  # type: ignore[attr-defined]
    return [r, *nodes]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), masked=st.booleans(), cutoff=st.none() | st.integers(-3, 3))
def test_counting_equals_counting_every_product(seed: int, masked: bool, cutoff: int | None) -> None:
    rng = np.random.default_rng(seed)
    table, query = random_table(rng, masked=masked), random_query(rng, 1)
    reaction, synthons = all_products(table)
    properties = score(table, reaction, synthons)
    inside = slack(table, properties, query.constraints) == 0
    if cutoff is None:
        result = count(table, query.constraints, threads=2)
    else:
        objective = objectives(table, query, reaction, synthons)
        inside &= objective >= cutoff if query.maximize else objective <= cutoff
        result = count(
            table, query.constraints, objective=query.objective, maximize=query.maximize, cutoff=float(cutoff)
        )
    assert result.count == inside.sum()
    assert result.products_total == len(reaction)


# --- fits ------------------------------------------------------------------------------------------------------------


def planted(seed: int, rank: int = 2) -> ContributionTable:
    rng = np.random.default_rng(seed)
    legs = sum(map(sum, SIZES))
    table = ContributionTable(SIZES, rng.normal(size=(legs, 2)), np.array([1.0, 2.0]), np.ones(2), ("a", "b"))
    return with_interactions(rng, table, ("a", "b"), rank)


def labelled(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    reaction = rng.integers(0, len(SIZES), n)
    synthons = np.full((n, 4), -1)
    for r, groups in enumerate(SIZES):
        for g, size in enumerate(groups):
            synthons[reaction == r, g] = rng.integers(0, size, (reaction == r).sum())
    return reaction, synthons


def r_squared(truth: np.ndarray, estimate: np.ndarray) -> float:
    return float((1 - ((truth - estimate) ** 2).sum(0) / ((truth - truth.mean(0)) ** 2).sum(0)).min())


def table_of(model: LegModel) -> ContributionTable:
    names = ("a", "b")
    return ContributionTable(SIZES, model.values, model.bias, np.ones(2), names, None, model.interactions(names))


def test_alternating_least_squares_recovers_a_planted_rank_2_model() -> None:
    truth, rng = planted(0), np.random.default_rng(1)
    additive = replace(truth, interactions=None)
    products, held = labelled(rng, 3000), labelled(rng, 1000)
    residual = score(truth, *products) - score(additive, *products)
    factors = fit_interactions(SIZES, *products, residual, rank=2, ridge=0.1, seed=3)
    fitted = replace(additive, interactions=Interactions(("a", "b"), factors))
    assert r_squared(score(truth, *held), score(fitted, *held)) > 0.99
    np.testing.assert_array_equal(factors, fit_interactions(SIZES, *products, residual, rank=2, ridge=0.1, seed=3))


def test_fitting_main_effects_and_interactions_together_beats_main_effects_alone_on_held_out_products() -> None:
    truth, rng = planted(4), np.random.default_rng(5)
    products, held = labelled(rng, 3000), labelled(rng, 1000)
    y = score(truth, *products) + 0.3 * rng.normal(size=(3000, 2))
    r2 = {}
    for rank in (0, 2):
        model = fit_additive_and_interactions(SIZES, *products, y, rank=rank, seed=1)
        r2[rank] = r_squared(score(truth, *held), score(table_of(model), *held))
    assert r2[0] < 0.8
    assert r2[2] > 0.97


def test_rank_0_is_ridge_regression_on_the_legs() -> None:
    truth, rng = planted(6), np.random.default_rng(7)
    products = labelled(rng, 2000)
    y = score(truth, *products)
    model = fit_additive_and_interactions(SIZES, *products, y, rank=0, ridge_main=2.0, iterations=200)
    legs = np.where(products[1] >= 0, truth.offsets[products[0]] + products[1], -1)
    design = np.zeros((2000, truth.leg_count + len(SIZES)))
    for column in legs.T:
        rows = np.flatnonzero(column >= 0)
        design[rows, column[rows]] = 1.0
    design[np.arange(2000), truth.leg_count + products[0]] = 1.0  # unpenalised intercepts
    penalty = np.diag([2.0] * truth.leg_count + [0.0] * len(SIZES))
    solution = np.linalg.solve(design.T @ design + penalty, design.T @ (y - y.mean(0)))
    np.testing.assert_allclose(score(table_of(model), *products), design @ solution + y.mean(0), atol=1e-4)


def test_legs_without_labels_stay_at_zero_and_a_warm_start_keeps_what_it_knows() -> None:
    truth, rng = planted(8), np.random.default_rng(9)
    reaction, synthons = labelled(rng, 3000)
    seen = synthons[:, 0] < 15
    y = score(truth, reaction, synthons)
    few = fit_additive_and_interactions(SIZES, reaction[seen], synthons[seen], y[seen], rank=2)
    assert not few.factors[15:60].any()
    assert not few.factors[60 + 50 + 15 : 60 + 50 + 30].any()
    knowing = fit_additive_and_interactions(SIZES, reaction, synthons, y, rank=2, ridge=0.1)
    one_round = {"rank": 2, "ridge": 0.1, "iterations": 1}
    warm = fit_additive_and_interactions(SIZES, reaction, synthons, y, **one_round, init=knowing)  # type: ignore[arg-type]
    assert r_squared(y, score(table_of(warm), reaction, synthons)) > 0.99
    unknowing = replace(knowing, factors=np.zeros_like(knowing.factors))
    cold = fit_additive_and_interactions(SIZES, reaction, synthons, y, **one_round, init=unknowing)  # type: ignore[arg-type]
    assert r_squared(y, score(table_of(cold), reaction, synthons)) < 0.99


# --- storage and errors ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> SynthonLibrary:
    acids, amines = ["C", "CC", "CCC", "c1ccccc1"], ["C", "CC", "CCO"]
    rows = [("amide", 1, f"a{i}", f"O=C([U]){tail}") for i, tail in enumerate(acids)]
    rows += [("amide", 2, f"n{i}", f"[U]N{tail}") for i, tail in enumerate(amines)]
    return SynthonLibrary.from_rows(rows, None)


def test_an_index_with_interactions_is_stored_and_read_back(library: SynthonLibrary, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 2))
    plain = ApexIndex.from_leg_table(library, ["f", "g"], values)
    factors = with_interactions(rng, plain.table, ("g",), 2).interactions
    index = ApexIndex.from_leg_table(library, ["f", "g"], values, interactions=factors)
    index.save(tmp_path / "index")
    back = ApexIndex.load(tmp_path / "index")
    assert back.to_bytes() == index.to_bytes()
    everything = library.sample(12, seed=0)
    np.testing.assert_array_equal(back.score(everything.r, everything.s), index.score(everything.r, everything.s))
    assert (
        ApexIndex.from_bytes(plain.to_bytes()).table.interactions is None
    )  # as blobs without interactions always were
    assert np.abs(index.score(everything.r, everything.s) - plain.score(everything.r, everything.s))[:, 1].min() > 0


def test_exact_columns_and_stock_keep_interactions() -> None:
    table = planted(0)
    wider = table.with_columns(["mass"], np.arange(table.leg_count, dtype=float))
    assert wider.interactions is table.interactions
    stocked = wider.with_availability(np.arange(table.leg_count) % 2 == 0)
    hits = search(stocked, Query(objective="a", k=50, constraints={"mass": (None, 150.0)}))
    legs = np.where(hits.synthons >= 0, table.offsets[hits.reaction] + hits.synthons, 0)
    assert not (legs % 2).any()
    np.testing.assert_array_equal(score(table, hits.reaction, hits.synthons)[:, 0], hits.objective)


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        ((), {}, "interactions.names"),
        (("a", "a"), {}, "interactions.names"),
        (("z",), {}, "interactions.names: 'z' is not a property"),
        (("a",), {"factors": np.zeros((185, 2, 4, 1))}, r"interactions.factors: shape \(185, 2, 4, 1\)"),
        (("a",), {"factors": np.zeros((185, 1, 4, 0))}, "interactions.factors: rank 0"),
        (("a",), {"factors": np.zeros((9, 1, 4, 1))}, "interactions.factors: 9 legs; expected 185"),
        (("a",), {"factors": np.full((185, 1, 4, 1), np.nan)}, "not finite"),
        (("a",), {"factors": np.full((185, 1, 4, 1), 1e60)}, "above 1e.50"),
        (("a",), {"factors": np.ones((185, 1, 4, 1))}, r"interactions.factors\[0\]: not zero for R-group 0"),
    ],
)
def test_bad_interactions_name_their_field(names: tuple[str, ...], change: dict[str, np.ndarray], message: str) -> None:
    table = replace(planted(0), interactions=None)
    factors = change.get("factors", np.zeros((table.leg_count, len(names), 4, 1)))
    with pytest.raises(ValueError, match=message):
        replace(table, interactions=Interactions(names, factors))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 65}, "rank"),
        ({"ridge": 0.0}, "ridge"),
        ({"iterations": 0}, "iterations"),
        ({"residual": np.zeros((3, 2))}, "residual"),
        ({"residual": np.full((10, 2), np.inf)}, "residual[0]"),
        ({"init": np.zeros((185, 2, 4, 5))}, "init"),
    ],
)
def test_a_fit_that_cannot_be_done_names_its_argument(change: dict[str, object], field: str) -> None:
    reaction, synthons = labelled(np.random.default_rng(0), 10)
    arguments = {"residual": np.ones((10, 2)), "rank": 2, **change}
    with pytest.raises(FieldError) as error:
        fit_interactions(SIZES, reaction, synthons, **arguments)  # type: ignore[arg-type]
    assert error.value.field == field
