"""The search engines against an oracle that writes every product down (acceptance lines 1, 2 and 7)."""

from __future__ import annotations

import itertools
import resource
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum_apex.contributions import ContributionTable, score
from lyceum_apex.dual import with_dual_column
from lyceum_apex.forest import make_spans
from lyceum_apex.kernels import Columns
from lyceum_apex.query import Engine, Hits, Query, QueryError, SearchProgress, make_problem, slack
from lyceum_apex.search import iter_search, merge_hits, search
from lyceum_base.checkpoint import Stopped

NAMES = ("a", "b", "c", "d")


def random_table(rng: np.random.Generator, *, masked: bool = False, most_reactions: int = 4) -> ContributionTable:
    """A library of up to some 10^4 products; every second one has integer legs, hence many exact ties."""
    reactions = int(rng.integers(1, most_reactions + 1))
    sizes = []
    for _ in range(reactions):
        groups = int(rng.integers(2, 5))
        sizes.append(tuple(int(n) for n in rng.integers(1, {2: 150, 3: 24, 4: 10}[groups], groups)))
    legs = sum(map(sum, sizes))
    values = rng.normal(size=(legs, len(NAMES)))
    values[:, 1] += 0.7 * values[:, 0]
    if rng.random() < 0.5:
        values = np.rint(values)
    available = rng.random(legs) < 0.8 if masked else None
    bias, scale = rng.normal(size=len(NAMES)).round(2), rng.uniform(0.3, 30, len(NAMES))
    return ContributionTable(tuple(sizes), values, bias, scale, NAMES, available)


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
        lists = []
        for g, size in enumerate(groups):
            start = table.offsets[r, g]
            mask = np.ones(size, bool) if table.available is None else table.available[start : start + size]
            lists.append(np.flatnonzero(mask).tolist())
        here = np.array(list(itertools.product(*lists)), dtype=np.int32).reshape(-1, len(groups))
        reaction.append(np.full(len(here), r, dtype=np.int32))
        synthons.append(np.pad(here, ((0, 0), (0, 4 - len(groups))), constant_values=-1))
    return np.concatenate(reaction), np.concatenate(synthons)


def oracle(table: ContributionTable, query: Query) -> dict[str, np.ndarray]:
    """Every product written down and sorted with numpy.lexsort."""
    reaction, synthons = all_products(table)
    properties = score(table, reaction, synthons)
    legs = np.zeros(table.leg_count)
    bias = 0.0
    for name, weight in query.weights.items():
        legs = legs + weight * table.values[:, NAMES.index(name)]
        bias = bias + weight * table.bias[NAMES.index(name)]
    weighted = ContributionTable(table.sizes, legs[:, None], np.array([bias]), np.ones(1), ("objective",))
    objective = score(weighted, reaction, synthons)[:, 0]
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


def test_acceptance_01_pruned_equals_brute_equals_lexsort_on_200_random_libraries() -> None:
    rng = np.random.default_rng(1)
    infeasible = tied = 0
    for case in range(200):
        table = random_table(rng, masked=case % 4 == 0)
        query = random_query(rng, (1, 7, 1000)[case % 3])
        expected = oracle(table, query)
        infeasible += bool((expected["slack"] < 0).any())
        tied += len(np.unique(expected["objective"])) < len(expected["objective"])
        for engine in ("pruned", "brute"):
            assert_equal_hits(search(table, replace(query, engine=engine), threads=2), expected)
    assert infeasible > 20  # the cases do exercise the slack order
    assert tied > 20  # and the tie-break


def test_acceptance_02_analytic_ten_billion_products() -> None:
    n = 100_000
    values = np.concatenate([np.arange(n), np.arange(n)]).astype(float)[:, None]
    table = ContributionTable(((n, n),), values, np.zeros(1), np.ones(1), ("f",))
    search(ContributionTable(((2, 2),), np.zeros((4, 1)), np.zeros(1), np.ones(1), ("f",)), Query(objective="f", k=1))
    start = time.monotonic()
    hits = search(table, Query(objective="f", k=1000), threads=2)
    assert hits.objective[-1] == 199_954.0
    assert hits.objective[0] == 199_998.0
    assert hits.stats.products_total == 10**10
    assert time.monotonic() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KiB


def test_ten_to_the_twenty_products_without_constraints_take_seconds() -> None:
    n = 100_000
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4 * n, 1))
    table = ContributionTable(((n, n, n, n),), values, np.zeros(1), np.ones(1), ("f",))
    start = time.monotonic()
    hits = search(table, Query(objective="f", k=1000, maximize=False), threads=2)
    assert time.monotonic() - start < 20
    assert hits.stats.products_total == 10**20
    best = np.zeros(1)  # rounding is monotone, so the best 1000 partial sums are enough to go on with
    for g in range(4):
        legs = np.sort(values[g * n : (g + 1) * n, 0])[:1000]
        best = np.sort((best[:, None] + legs).ravel())[:1000]
    np.testing.assert_array_equal(hits.objective, best)


def test_a_plateau_of_ten_to_the_twenty_equal_products_is_ranked_by_index() -> None:
    n = 100_000
    table = ContributionTable(((n, n, n, n),), np.ones((4 * n, 1)), np.zeros(1), np.ones(1), ("f",))
    hits = search(table, Query(objective="f", k=1500), threads=2)
    np.testing.assert_array_equal(hits.synthons[:, 3], np.arange(1500))
    assert not hits.synthons[:, :3].any()


def test_slack_is_the_sum_of_violations_in_units_of_sigma() -> None:
    values, bias = np.array([[3.0, 1, 0, 0], [4, 1, 0, 0]]), np.array([0, 0.5, 0, 0])
    table = ContributionTable(((1, 1),), values, bias, np.array([2, 0.25, 1, 1]), NAMES)
    query = Query(objective="c", k=1, constraints={"a": (None, 2), "b": (3.0, 4.0), "d": (0.0, 0.0)})
    for engine in ("pruned", "brute"):  # a = 7 is 5 above 2, in halves; b = 2.5 is 0.5 below 3, in quarters
        assert search(table, replace(query, engine=engine)).slack.tolist() == [-(5 / 2 + 0.5 / 0.25)]
    assert slack(table, score(table, [0], [[0, 0, -1, -1]]), query.constraints).tolist() == [-4.5]


def test_numbers_near_the_limits_of_float64_change_no_answer() -> None:
    rng = np.random.default_rng(4)
    cases = ((1e100, 1.0, 0.0, 1e100, 0.5), (1e50, 1e-155, 0.0, 1e100, 1e-155), (1e-300, 1.0, 0.0, 1.0, 0.5))
    for large, small, bias, weight, bound in (*cases, (1e50, 1e-155, 1e20, 1e100, 1e20)):
        values = rng.normal(size=(300, 2))
        values[:, 1] += values[:, 0]
        table = ContributionTable(
            ((150, 150),), values / 8 * [large, small], np.array([0, bias]), np.ones(2), ("a", "b")
        )
        query = Query(objective={"a": weight}, k=50, constraints={"b": (None, bound)})
        problem = make_problem(table, query.weights, query.maximize, query.constraints)
        columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
        with np.errstate(over="ignore"):
            hits = search(table, query, threads=1)
            spans, dual = with_dual_column(make_spans(table, problem), columns, np.zeros(1, np.int32), query.k)
        assert all(np.isfinite(numbers).all() for numbers in (hits.objective, spans.legs, dual.bias))
        assert_equal_hits(search(table, replace(query, engine="brute"), threads=1), hits)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_dual_column_bounds_the_objective_of_every_feasible_product(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, query = random_table(rng), random_query(rng, 7)
    problem = make_problem(table, query.weights, query.maximize, query.constraints)
    columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
    spans = make_spans(table, problem)
    legs, dual = with_dual_column(spans, columns, np.arange(table.reaction_count, dtype=np.int32), query.k)
    if len(dual.bias) == len(columns.bias):
        return  # no constraint fights the objective
    reaction, synthons = all_products(table)
    total = np.full(len(reaction), dual.bias[-1])
    for g in range(4):
        offsets = table.offsets[reaction, g]
        rows = np.flatnonzero(offsets >= 0)
        total[rows] += legs.legs[1 + offsets[rows] + synthons[rows, g], -1]
    everything = oracle(table, replace(query, k=len(reaction)))
    order = np.lexsort((*synthons.T[::-1], reaction))
    back = np.lexsort((*everything["synthons"].T[::-1], everything["reaction"]))
    feasible = everything["slack"][back] == 0
    objective = problem.sign * everything["objective"][back]
    assert (total[order][feasible] >= objective[feasible]).all()


def test_bounds_met_to_the_last_bit_do_not_cost_a_product() -> None:
    # Objective and constrained property are one: the dual column equals the bound for every product, up to rounding,
    # and many products share or nearly share the best objective.
    for seed in range(40):
        rng = np.random.default_rng(seed)
        legs = rng.integers(-20, 20, (400, 1)) * 0.1
        table = ContributionTable(((200, 200),), np.repeat(legs, 2, axis=1), rng.normal(size=2), np.ones(2), ("a", "b"))
        table = replace(table, bias=table.bias[[0, 0]])
        bound = float(score(table, [0], [[*rng.integers(0, 200, 2), -1, -1]])[0, 1])
        query = Query(objective="a", k=20, constraints={"b": (None, bound)})
        hits = search(table, query, threads=1)
        assert hits.objective[0] == bound
        assert_equal_hits(search(table, replace(query, engine="brute"), threads=1), hits)


def test_the_dual_column_spares_most_of_the_work_when_a_constraint_fights_the_objective() -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=(6000, 4))
    values[:, 1] = 0.97 * values[:, 0] + 0.2 * values[:, 1]
    table = ContributionTable(((3000, 3000),), values, np.zeros(4), np.ones(4), NAMES)
    query = Query(objective="a", k=100, constraints={"b": (None, 0.5), "c": (None, 0.5)})
    hits = search(table, query, threads=2)
    assert hits.stats.products_touched < 0.02 * 9e6
    assert_equal_hits(search(table, replace(query, engine="brute"), threads=2), hits)


@pytest.mark.parametrize("engine", ["pruned", "brute"])
def test_acceptance_07_thread_count_changes_nothing_not_even_the_work(engine: Engine) -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(size=(2 * 700 + 3 * 60, 4))
    table = ContributionTable(((700, 700), (60, 60, 60)), values, np.zeros(4), np.ones(4), NAMES)
    query = Query(
        objective={"a": 1.0, "b": -0.5}, k=5000, constraints={"c": (-0.5, 0.5), "d": (None, 0.1)}, engine=engine
    )
    one, two, seven = (search(table, query, threads=n) for n in (1, 2, 7))
    assert_equal_hits(two, one)
    assert_equal_hits(seven, one)
    assert one.stats.products_touched == two.stats.products_touched == seven.stats.products_touched


def test_acceptance_07_permuted_synthons_give_the_same_products() -> None:
    rng = np.random.default_rng(8)
    sizes = ((200, 150), (40, 30, 20))
    values = rng.normal(size=(sum(map(sum, sizes)), 4))
    order = [rng.permutation(n) for groups in sizes for n in groups]
    starts = np.cumsum([0] + [len(p) for p in order])
    shuffled = np.concatenate([start + p for start, p in zip(starts, order, strict=False)])
    bias, scale = np.ones(4), np.ones(4)
    query = Query(objective="a", k=500, constraints={"b": (None, 1.0), "c": (0.0, None)})
    plain = search(ContributionTable(sizes, values, bias, scale, NAMES), query)
    moved = search(ContributionTable(sizes, values[shuffled], bias, scale, NAMES), query)
    back = moved.synthons.copy()
    table = ContributionTable(sizes, values, bias, scale, NAMES)
    for row, r in enumerate(moved.reaction):
        for g in range(len(sizes[r])):
            flat = int(np.searchsorted(starts, table.offsets[r, g]))
            back[row, g] = order[flat][moved.synthons[row, g]]
    np.testing.assert_array_equal(back, plain.synthons)
    np.testing.assert_array_equal(moved.objective, plain.objective)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.sampled_from([1, 10, 300]), shards=st.sampled_from([1, 2, 7]))
def test_acceptance_07_one_two_or_seven_shards_give_what_a_single_pass_does(seed: int, k: int, shards: int) -> None:
    rng = np.random.default_rng(seed)
    table, query = random_table(rng, most_reactions=9), random_query(rng, k)
    owner = rng.integers(0, shards, table.reaction_count)  # a shard may get nothing
    parts = [
        search(table, query, reactions=np.flatnonzero(owner == shard).tolist(), threads=1) for shard in range(shards)
    ]
    assert_equal_hits(merge_hits(table, query, parts), search(table, query, threads=2))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_hits_rescore_to_their_own_properties_and_slack(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, query = random_table(rng, masked=True), random_query(rng, 50)
    hits = search(table, query, threads=1)
    scored = score(table, hits.reaction, hits.synthons)
    np.testing.assert_array_equal(scored[:, [NAMES.index(name) for name in hits.names]], hits.properties)
    np.testing.assert_array_equal(slack(table, scored, query.constraints), hits.slack)
    assert (np.diff(hits.slack) <= 0).all()


def test_a_library_smaller_than_k_is_returned_whole() -> None:
    table = ContributionTable(((2, 3),), np.arange(5.0)[:, None], np.zeros(1), np.ones(1), ("f",))
    hits = search(table, Query(objective="f", k=100))
    assert len(hits) == 6
    assert hits.complete
    np.testing.assert_array_equal(np.unique(hits.synthons[:, :2], axis=0), list(itertools.product(range(2), range(3))))


def test_a_reaction_without_available_synthons_has_no_products() -> None:
    values = np.arange(8.0)[:, None]
    mask = np.array([False, False, True, True, True, True, True, False])
    table = ContributionTable(((2, 2), (2, 2)), values, np.zeros(1), np.ones(1), ("f",), mask)
    for engine in ("pruned", "brute"):
        hits = search(table, Query(objective="f", k=10, engine=engine))
        assert set(hits.reaction.tolist()) == {1}
        assert hits.synthons[:, :2].tolist() == [[1, 0], [0, 0]]
    nothing = replace(table, available=np.zeros(8, bool))
    assert len(search(nothing, Query(objective="f", k=10))) == 0


def test_a_search_reports_progress_and_stops_when_asked() -> None:
    rng = np.random.default_rng(3)
    table = ContributionTable(((30_000, 30_000),), rng.normal(size=(60_000, 4)), np.zeros(4), np.ones(4), NAMES)
    query = Query(objective="a", k=1000, engine="brute")
    polls: list[float] = []

    def should_stop() -> bool:
        polls.append(time.monotonic())
        return len(polls) > 15

    seen: list[SearchProgress | Hits] = []
    with pytest.raises(Stopped):
        seen.extend(iter_search(table, query, should_stop=should_stop, threads=2))
    assert len(seen) > 3
    touched = [update.products_touched for update in seen if isinstance(update, SearchProgress)]
    assert touched == sorted(touched)
    assert isinstance(seen[-1], SearchProgress)
    assert seen[-1].threshold is not None
    assert max(np.diff(polls)) < 2.0  # generous: the machine is shared


def test_a_time_limit_gives_the_best_so_far_and_says_so() -> None:
    rng = np.random.default_rng(3)
    table = ContributionTable(((30_000, 30_000),), rng.normal(size=(60_000, 4)), np.zeros(4), np.ones(4), NAMES)
    hits = search(table, Query(objective="a", k=100, engine="brute"), max_seconds=0.01)
    assert not hits.complete
    assert len(hits) == 100
    assert hits.stats.products_touched < hits.stats.products_total


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"k": 0}, "k"),
        ({"k": 2.0}, "k"),
        ({"k": True}, "k"),
        ({"objective": ""}, "objective"),
        ({"objective": {}}, "objective"),
        ({"objective": {"a": float("inf")}}, "objective[a]"),
        ({"objective": {"a": float("nan")}}, "objective[a]"),
        ({"objective": "logp"}, "objective[logp]"),
        ({"engine": "quick"}, "engine"),
        ({"constraints": {"mass": (0.0, None)}}, "constraints[mass]"),
        ({"constraints": {"a": (2.0, 1.0)}}, "constraints[a].lower"),
        ({"constraints": {"a": (None, float("nan"))}}, "constraints[a].upper"),
        ({"constraints": {"a": (None, 1e300)}}, "constraints[a].upper"),
        ({"constraints": {"a": (float("inf"), None)}}, "constraints[a].lower"),
    ],
)
def test_a_bad_query_names_its_field(changes: dict[str, object], path: str) -> None:
    table = random_table(np.random.default_rng(0))
    with pytest.raises(QueryError) as error:
        search(table, Query(**{"objective": "a", "k": 1, **changes}))  # type: ignore[arg-type]
    assert error.value.field == path
