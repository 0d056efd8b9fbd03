"""Quotas against a walk of every product, and filters of synthons."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum_apex import filters
from lyceum_apex import index as indexes
from lyceum_apex.contributions import ContributionTable
from lyceum_apex.errors import VersionError
from lyceum_apex.library import SynthonLibrary
from lyceum_apex.query import Hits, Query, QueryError, Quotas, SearchProgress
from lyceum_apex.quotas import iter_within_quotas
from lyceum_apex.search import merge_hits, search
from lyceum_base.checkpoint import Stopped

NAMES = ("a", "b")


def random_table(rng: np.random.Generator) -> ContributionTable:
    """Up to some thousand products, half of the tables with integer legs, hence ties."""
    sizes = []
    for _ in range(int(rng.integers(1, 5))):
        groups = int(rng.integers(2, 5))
        sizes.append(tuple(int(n) for n in rng.integers(1, {2: 40, 3: 10, 4: 5}[groups], groups)))
    values = rng.normal(size=(sum(map(sum, sizes)), 2))
    values = np.rint(values) if rng.random() < 0.5 else values
    available = rng.random(len(values)) < 0.8 if rng.random() < 0.3 else None
    return ContributionTable(tuple(sizes), values, rng.normal(size=2).round(1), np.ones(2), NAMES, available)


def walked(table: ContributionTable, query: Query, quotas: Quotas) -> list[tuple[int, ...]]:
    """The greedy walk itself, over the ranked list of all products."""
    everything = search(table, replace(query, k=table.product_count, quotas=None), threads=1)
    kept, used = [], Counter[tuple[int, ...]]()
    for r, s in zip(everything.reaction.tolist(), everything.synthons.tolist(), strict=True):
        legs = [(r, g, synthon) for g, synthon in enumerate(s) if synthon >= 0]
        if quotas.max_per_reaction is not None and used[(r,)] >= quotas.max_per_reaction:
            continue
        if quotas.max_per_synthon is not None and any(used[leg] >= quotas.max_per_synthon for leg in legs):
            continue
        kept.append((r, *s))
        used.update([(r,), *legs])
        if len(kept) == query.k:
            break
    return kept


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.sampled_from([1, 3, 20, 400]),
    per_synthon=st.none() | st.integers(1, 5),
    per_reaction=st.none() | st.integers(1, 30),
    ahead=st.sampled_from([1, 7, 256]),
    maximize=st.booleans(),
)
def test_quotas_keep_what_a_walk_of_the_whole_ranked_list_keeps(
    seed: int, k: int, per_synthon: int | None, per_reaction: int | None, ahead: int, maximize: bool
) -> None:
    rng = np.random.default_rng(seed)
    table = random_table(rng)
    quotas = Quotas(max_per_synthon=per_synthon, max_per_reaction=per_reaction)
    constraints = {"b": (None, float(np.rint(rng.normal())))} if rng.random() < 0.5 else {}
    query = Query(objective="a", k=k, maximize=maximize, constraints=constraints, quotas=quotas)
    with pytest.MonkeyPatch.context() as patch:  # few products a round: several rounds on a small library
        patch.setattr("lyceum_apex.quotas._LEAST_AHEAD", ahead)
        hits = search(table, query, threads=1)
    assert [(r, *s) for r, s in zip(hits.reaction.tolist(), hits.synthons.tolist())] == walked(table, query, quotas)
    owner = rng.integers(0, 2, table.reaction_count)
    parts = [search(table, query, reactions=np.flatnonzero(owner == shard).tolist(), threads=1) for shard in (0, 1)]
    merged = merge_hits(table, query, parts)
    np.testing.assert_array_equal(merged.synthons, hits.synthons)
    np.testing.assert_array_equal(merged.objective, hits.objective)


def test_every_synthon_once_in_a_library_of_ten_to_the_ten() -> None:
    n = 100_000
    values = np.concatenate([np.arange(n), np.arange(n)]).astype(float)[:, None]
    table = ContributionTable(((n, n),), values, np.zeros(1), np.ones(1), ("a",))
    hits = search(table, Query(objective="a", k=200, quotas=Quotas(max_per_synthon=1)))
    for g in (0, 1):
        assert len(set(hits.synthons[:, g].tolist())) == 200
    assert (np.diff(hits.objective) <= 0).all()
    # Ties go to the smaller index, so the walk takes (n-1, n-1) first, then the pairs of sum 2n-4, and so on.
    assert hits.objective.tolist() == [float(2 * (n - 1) - 2 * i) for i in range(200)]


def test_a_search_with_quotas_stops_when_asked() -> None:
    table = random_table(np.random.default_rng(0))
    with pytest.raises(Stopped):
        search(table, Query(objective="a", k=3, quotas=Quotas(max_per_synthon=1)), should_stop=lambda: True)


def test_a_search_cut_short_in_a_later_round_adds_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lyceum_apex.quotas._LEAST_AHEAD", 1)
    rng = np.random.default_rng(3)
    values = rng.normal(size=(160, 1)) + np.repeat([0.5, 0.0], 80)[:, None]  # reaction 0 is better and used up first
    table = ContributionTable(((40, 40), (40, 40)), values, np.zeros(1), np.ones(1), ("a",))
    quotas, asked = Quotas(max_per_reaction=20), list[int]()

    def cut_short(table: ContributionTable, query: Query) -> Iterator[SearchProgress | Hits]:
        asked.append(query.k)
        # The first round to its end; then the best seen so far, which need not begin with the best.
        late = replace(query, maximize=False)
        yield search(table, query) if len(asked) == 1 else replace(search(table, late), complete=False)

    query = Query(objective="a", k=30, quotas=quotas)
    *_, hits = iter_within_quotas(table, query, quotas, cut_short)
    assert isinstance(hits, Hits)
    assert len(asked) == 2
    assert asked[1] > 30 - len(hits)  # kept products would come again
    assert not hits.complete
    found = [(r, *s) for r, s in zip(hits.reaction.tolist(), hits.synthons.tolist(), strict=True)]
    assert 20 < len(found) < 30
    assert found == walked(table, query, quotas)[: len(found)]


@pytest.mark.parametrize("name", ["max_per_synthon", "max_per_reaction"])
@pytest.mark.parametrize("most", [0, 1.5, True])
def test_a_bad_quota_names_its_field(name: str, most: object) -> None:
    with pytest.raises(QueryError) as caught:
        Quotas(**{name: most})  # type: ignore[arg-type]
    assert caught.value.field == f"quotas.{name}"


def small_library() -> SynthonLibrary:
    rows = [
        (reaction, g, f"s{i}", smiles)
        for reaction in ("amide", "other")
        for g, group in ((1, ["CC(=O)[U]", "CCC(=O)[U]", "CCCC(=O)[U]"]), (2, ["CN[U]", "CCN[U]", "CCCN[U]"]))
        for i, smiles in enumerate(group)
    ]
    prices = [10.0, 60.0, 20.0, 5.0, 70.0, 50.0] * 2
    flags = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    return SynthonLibrary.from_rows(rows, None, {"price": prices, "in_stock": flags})


def test_a_filter_leaves_exactly_the_products_all_of_whose_synthons_pass() -> None:
    library = small_library()
    legs = np.arange(library.n_legs, dtype=float)
    index = indexes.ApexIndex.from_leg_table(library, ["f"], legs[:, None])
    query = Query(objective="f", k=100)
    for chosen, expected in (
        (
            filters.SynthonFilter(columns={"price": (None, 50.0)}),
            {(r, a, b) for r in (0, 1) for a in (0, 2) for b in (0, 2)},
        ),
        (filters.SynthonFilter(columns={"in_stock": (1.0, None)}), set(itertools.product([0], [0, 1], [0, 1, 2]))),
        (filters.SynthonFilter(allowed_reactions=["other"]), set(itertools.product([1], range(3), range(3)))),
        (filters.SynthonFilter(forbidden_reactions=["other"]), set(itertools.product([0], range(3), range(3)))),
        (filters.SynthonFilter(allowed_reactions=[]), set()),
    ):
        narrow = index.restricted(library, chosen)
        hits = narrow.search(query)
        assert {(r, *s[:2]) for r, s in zip(hits.reaction.tolist(), hits.synthons.tolist())} == expected
        assert narrow.count({}).count == len(expected)
    twice = index.restricted(library, filters.SynthonFilter(columns={"price": (None, 50.0)}))
    assert twice.restricted(library, filters.SynthonFilter(allowed_reactions=["amide"])).count({}).count == 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"columns": {"mass": (0.0, None)}}, "columns[mass]"),
        ({"columns": {"price": (2.0, 1.0)}}, "columns[price].lower"),
        ({"allowed_reactions": ["amide", "none"]}, "allowed_reactions[1]"),
        ({"forbidden_reactions": ["none"]}, "forbidden_reactions[0]"),
    ],
)
def test_a_bad_filter_names_its_field(options: dict[str, object], field: str) -> None:
    with pytest.raises(QueryError) as caught:
        filters.SynthonFilter(**options).mask(small_library())  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_filter_needs_the_library_of_the_index() -> None:
    library = small_library()
    index = indexes.ApexIndex.from_leg_table(library, ["f"], np.zeros((library.n_legs, 1)))
    other = replace(library, reaction_ids=("amide", "ester"))
    with pytest.raises(VersionError):
        index.restricted(other, filters.SynthonFilter())
