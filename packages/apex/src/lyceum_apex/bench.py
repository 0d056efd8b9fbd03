"""`lyceum bench apex`: time, memory and work of exact search beside brute force and numpy, on the same libraries.

Legs are Gaussian; four properties other than the objective have an upper bound of 0.5, and one of them is correlated
0.7 with the objective. Brute force (our own threaded kernel) and numpy (all products materialised, then argpartition)
run up to 10^8 products and must find the same hits; above that the pruned engine runs alone. With interactions the
objective also has a pair term of standard deviation 1, beside legs of the same. `fidelity` is on real data.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lyceum_apex.bench_docking import docking
from lyceum_apex.bench_recall import recall
from lyceum_apex.contributions import ContributionTable, Interactions
from lyceum_apex.counting import count
from lyceum_apex.grids import Axis, count_grid
from lyceum_apex.quantiles import describe
from lyceum_apex.quantized import search_quantized
from lyceum_apex.query import Bounds, Engine, Hits, Query, Quotas
from lyceum_apex.search import search
from lyceum_runtime.bench_report import Row, report, save, show

SEED = 0
NAMES = ("objective", "correlated", "p2", "p3", "p4")
FOUR: dict[str, Bounds] = dict.fromkeys(NAMES[1:], (None, 0.5))
BRUTE_LARGEST = 10**8  # numpy then holds 0.8 GB a column
RANK = 4
PACKAGES = ("meeko", "numba", "numpy", "rdkit", "vina")
T = TypeVar("T")


def run(case: str | None, quick: bool, out_dir: Path) -> dict[str, Any]:
    """Measure `case` (None: all of :data:`CASES`), print the table, write `out_dir`/results.json and return its
    content.

    Raises:
        ValueError: no such case.
    """
    cases: dict[str, Callable[[bool], Iterator[Row]]] = {**CASES, "recall": partial(recall, out_dir=out_dir)}
    if case is not None and case not in cases:
        raise ValueError(f"no case {case!r}; there are {', '.join(cases)}")
    _warm()
    rows = [row for name, measure in cases.items() if case in (None, name) for row in measure(quick)]
    results = report("apex", rows, seed=SEED, quick=quick, sizes={"constraints": len(FOUR)}, packages=PACKAGES)
    show(results)
    save(results, out_dir)
    return results


def engines(quick: bool) -> Iterator[Row]:
    """The pruned engine against brute force and numpy on one two-component reaction, k = 1,000."""
    for products in (10**6, 10**7) if quick else (10**6, 10**7, BRUTE_LARGEST):
        side = round(products**0.5)
        table = gaussian_library(((side, side),))
        for constraints in ({}, FOUR):
            where = f"{products:.0e} products, {len(constraints)} constraints"
            pruned, seconds = _timed(lambda t=table, c=constraints: _search(t, 1000, c))  # type: ignore[misc]
            brute, brute_seconds = _timed(lambda t=table, c=constraints: _search(t, 1000, c, "brute"))  # type: ignore[misc]
            best, numpy_seconds = _timed(lambda t=table, c=constraints: numpy_top_k(t, 1000, c))  # type: ignore[misc]
            np.testing.assert_array_equal(brute.synthons, pruned.synthons)
            np.testing.assert_array_equal(best, pruned.objective)
            context = f"pruned {seconds:.3f} s, touched {_touched(pruned):.1e}"
            yield Row(where, "brute force over pruned, time", brute_seconds / seconds, context=context)
            yield Row(where, "numpy over pruned, time", numpy_seconds / seconds, context=f"numpy {numpy_seconds:.2f} s")


def large(quick: bool) -> Iterator[Row]:
    """Libraries that are not scanned: the pruned engine alone."""
    side = 10_000 if quick else 100_000
    flat = gaussian_library(((side, side),))
    infeasible: dict[str, Bounds] = {"correlated": (None, -12.0)}
    root, fourth = round(side ** (2 / 3)), round(side**0.5)
    cases: list[tuple[str, ContributionTable, int, dict[str, Bounds], str]] = [
        ("2 R-groups, no constraint", flat, 1000, {}, ""),
        ("2 R-groups, 4 constraints", flat, 1000, FOUR, "<= 15"),
        ("2 R-groups, 4 constraints", flat, 100_000, FOUR, ""),
        ("2 R-groups, correlation 0.97", gaussian_library(((side, side),), correlation=0.97), 1000, FOUR, ""),
        ("2 R-groups, infeasible", flat, 1000, infeasible, ""),
        ("3 R-groups, 4 constraints", gaussian_library(((root,) * 3,)), 1000, FOUR, ""),
        ("4 R-groups, 4 constraints", gaussian_library(((fourth,) * 4,)), 1000, FOUR, ""),
        ("4 R-groups, no constraint", gaussian_library(((side,) * 4,)), 1000, {}, ""),
    ]
    for where, table, k, constraints, target in cases:
        hits, seconds = _timed(lambda t=table, k=k, c=constraints: _search(t, k, c))  # type: ignore[misc]
        name = f"{table.product_count:.0e} products, {where}, k={k:,}"
        yield Row(name, "time", seconds, unit="s", target=target, context=f"touched {_touched(hits):.1e}")


def counting(quick: bool) -> Iterator[Row]:
    """Exact counts without enumeration."""
    side = 3_162 if quick else 31_623
    table = gaussian_library(((side, side),))
    one: dict[str, Bounds] = {"objective": (1.0, None)}
    for constraints in (one, FOUR):
        found, seconds = _timed(lambda c=constraints: count(table, c))  # type: ignore[misc]
        where = f"count in {table.product_count:.0e} products, {len(constraints)} bounds"
        yield Row(where, "time", seconds, unit="s", context=f"{found.count:,} match ({found.fraction:.2%})")


def interactions(quick: bool) -> Iterator[Row]:
    """The pruned engine with and without an objective of rank 4; brute force up to 10^9 products."""
    for products in (10**7, 10**8) if quick else (BRUTE_LARGEST, 10**9, 10**10):
        side = round(products**0.5)
        additive = gaussian_library(((side, side),))
        table = with_interactions(additive, RANK)
        for constraints in ({}, FOUR):
            where = f"{products:.0e} products, 2 R-groups, {len(constraints)} constraints, rank {RANK}"
            hits, seconds = _timed(lambda t=table, c=constraints: _search(t, 1000, c))  # type: ignore[misc]
            plain, plain_seconds = _timed(lambda t=additive, c=constraints: _search(t, 1000, c))  # type: ignore[misc]
            beside = f"touched {_touched(hits):.1e}; additive {plain_seconds:.3f} s, touched {_touched(plain):.1e}"
            yield Row(where, "time", seconds, unit="s", context=beside)
            if products <= 10**9:
                brute, brute_seconds = _timed(lambda t=table, c=constraints: _search(t, 1000, c, "brute"))  # type: ignore[misc]
                np.testing.assert_array_equal(brute.synthons, hits.synthons)
                yield Row(where, "brute force over pruned, time", brute_seconds / seconds)
        if products <= 10**9:
            found, seconds = _timed(lambda t=table: count(t, {"objective": (1.0, None)}))  # type: ignore[misc]
            where = f"count in {products:.0e} products, 1 bound, rank {RANK}"
            yield Row(where, "time", seconds, unit="s", context=f"{found.count:,} match ({found.fraction:.2%})")


def fidelity(quick: bool) -> Iterator[Row]:
    """R2 of an index of real1m against its own surrogate, on products held out of both fits, by rank."""
    from lyceum_apex import ApexIndex, Factorizer, Surrogate, SynthonLibrary, properties
    from lyceum_zoo import path

    names = ("logp", "tpsa", "qed")
    library = SynthonLibrary.from_tsv(path("real1m") / "synthon_space_1M.tsv")
    smiles = [text for text in library.products_smiles(library.sample(2000, seed=SEED)) if text]
    surrogate = Surrogate.fit(smiles, properties(smiles, names), names, steps=100 if quick else None, seed=SEED)
    factorizer = Factorizer.fit(library, surrogate, steps=50 if quick else None, seed=SEED)
    for rank in (0, 2) if quick else (0, 2, RANK):
        index, seconds = _timed(
            lambda q=rank: ApexIndex.build(library, surrogate, factorizer, interactions_rank=q, seed=SEED)  # type: ignore[misc]
        )
        for name in names:
            context = f"index built in {seconds:.0f} s"
            where, r2 = f"real1m, {name}, rank {rank}", index.reconstruction[name]
            yield Row(where, "R2 against the surrogate", r2, unit="", context=context)


def distribution(quick: bool) -> Iterator[Row]:
    """Histograms and quantiles over all products, and counts for many bounds at once."""
    side = 1_000 if quick else 10_000
    table = gaussian_library(((side, side),))
    axis = Axis("p2", tuple(np.linspace(-3, 3, 100).tolist()))
    for constraints in ({}, FOUR):
        where = f"{table.product_count:.0e} products, {len(constraints)} constraints"
        for name, work in (
            ("histogram of 100 bins", lambda c: describe(table, "objective", c, bins=100)),
            ("median", lambda c: describe(table, "objective", c, quantiles=[0.5])),
            ("counts for 100 bounds", lambda c: count_grid(table, [axis], c)),
        ):
            _, seconds = _timed(lambda w=work, c=constraints: w(c))  # type: ignore[misc]
            _, single = _timed(lambda c=constraints: count(table, c, objective="objective", cutoff=0.0))  # type: ignore[misc]
            yield Row(f"{name}, {where}", "time", seconds, unit="s", context=f"one count {single:.3f} s")


def quotas(quick: bool) -> Iterator[Row]:
    """Diverse hits beside the plain ones."""
    side = 10_000 if quick else 100_000
    table = gaussian_library(((side, side),))
    plain, plain_seconds = _timed(lambda: _search(table, 1000, FOUR))
    for most in (1, 10):
        query = Query(objective="objective", k=1000, constraints=FOUR, quotas=Quotas(max_per_synthon=most))
        hits, seconds = _timed(lambda q=query: search(table, q))  # type: ignore[misc]
        where = f"{table.product_count:.0e} products, 4 constraints, k=1,000, at most {most} of a synthon"
        worst = f"1,000th objective {hits.objective[-1]:.2f}, without quotas {plain.objective[-1]:.2f}"
        yield Row(where, "time", seconds, unit="s", context=f"without quotas {plain_seconds:.3f} s; {worst}")


def quantized(quick: bool) -> Iterator[Row]:
    """A full scan that looks at 8 bits first, beside the float64 scan and the pruned engine; k = 1,000."""
    for products in (10**6, 10**7) if quick else (10**6, 10**7, BRUTE_LARGEST):
        side = round(products**0.5)
        table = gaussian_library(((side, side),))
        for constraints in ({}, FOUR):
            where = f"{products:.0e} products, {len(constraints)} constraints"
            query = Query(objective="objective", k=1000, constraints=constraints)
            hits, seconds = _timed(lambda t=table, q=query: search_quantized(t, q))  # type: ignore[misc]
            brute, brute_seconds = _timed(lambda t=table, c=constraints: _search(t, 1000, c, "brute"))  # type: ignore[misc]
            _, pruned_seconds = _timed(lambda t=table, c=constraints: _search(t, 1000, c))  # type: ignore[misc]
            np.testing.assert_array_equal(brute.synthons, hits.synthons)
            context = f"8 bits {seconds:.3f} s, survivors {_touched(hits):.1e}; pruned {pruned_seconds:.3f} s"
            yield Row(where, "brute force over 8 bits, time", brute_seconds / seconds, context=context)


CASES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "engines": engines,
    "large": large,
    "counting": counting,
    "interactions": interactions,
    "distribution": distribution,
    "quotas": quotas,
    "quantized": quantized,
    "fidelity": fidelity,
    "docking": docking,
}
"""What `--case` takes."""


def gaussian_library(sizes: tuple[tuple[int, ...], ...], correlation: float = 0.7) -> ContributionTable:
    """Standard normal contributions; property 1 has the given correlation with the objective."""
    values = np.random.default_rng(SEED).normal(size=(sum(map(sum, sizes)), len(NAMES)))
    values[:, 1] = correlation * values[:, 0] + np.sqrt(1 - correlation**2) * values[:, 1]
    return ContributionTable(sizes, values, np.zeros(len(NAMES)), np.full(len(NAMES), np.sqrt(2)), NAMES)


def with_interactions(table: ContributionTable, rank: int) -> ContributionTable:
    """An objective with pair terms of standard deviation 1."""
    shape = (table.leg_count, 1, 4, rank)
    factors = np.random.default_rng(SEED + 1).normal(scale=rank**-0.25, size=shape) * table.partners[:, None, :, None]
    return replace(table, interactions=Interactions(NAMES[:1], factors))


def numpy_top_k(table: ContributionTable, k: int, constraints: dict[str, Bounds]) -> np.ndarray[Any, Any]:
    """Objectives of the k best feasible products of a two-component reaction: all materialised, then argpartition."""
    first = table.sizes[0][0]
    objective = np.add.outer(table.values[:first, 0], table.values[first:, 0])
    for name, (_, upper) in constraints.items():
        c = table.names.index(name)
        objective[np.add.outer(table.values[:first, c], table.values[first:, c]) > upper] = -np.inf
    flat = objective.ravel()
    return np.sort(flat[np.argpartition(flat, len(flat) - k)[len(flat) - k :]])[::-1]


def _search(table: ContributionTable, k: int, constraints: dict[str, Bounds], engine: Engine = "pruned") -> Hits:
    return search(table, Query(objective="objective", k=k, constraints=constraints, engine=engine))


def _touched(hits: Hits) -> float:
    return hits.stats.products_touched / hits.stats.products_total


def _warm() -> None:
    """Compiles the kernels, or loads them from their cache."""
    small = gaussian_library(((9, 9),))
    for table in (small, with_interactions(small, RANK)):
        _search(table, 5, FOUR)
        _search(table, 5, FOUR, "brute")
        count(table, {**FOUR, "objective": (0.0, None)})
        describe(table, "objective", FOUR, bins=2, quantiles=[0.5])
    search_quantized(small, Query(objective="objective", k=5, constraints=FOUR))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    begun = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begun
