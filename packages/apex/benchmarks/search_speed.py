"""Case B3: exact top-k on synthetic libraries, pruned against brute force against numpy.

    python packages/apex/benchmarks/search_speed.py [--largest 1e10] [--threads 2] [--json out.json]

One two-component reaction with Gaussian legs and four upper bounds, of which one is on a property correlated 0.7 with
the objective; then libraries of three and four R-groups, of many reactions, an infeasible query and a count.  Brute
force and numpy run up to 10^8 products (`--brute` raises that for brute force) and must agree with the pruned engine.
`cpu` is processor time over all threads: on a busy machine it says more than `wall`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from lyceum_apex.contributions import ContributionTable
from lyceum_apex.counting import count
from lyceum_apex.query import Bounds, Hits, Query
from lyceum_apex.search import search

NAMES = ("objective", "correlated", "p2", "p3", "p4")
FOUR: dict[str, Bounds] = dict.fromkeys(NAMES[1:], (None, 0.5))
NUMPY_LARGEST = 10**8  # 0.8 GB a materialised column
T = TypeVar("T")


def gaussian_library(sizes: tuple[tuple[int, ...], ...], correlation: float = 0.7, seed: int = 0) -> ContributionTable:
    values = np.random.default_rng(seed).normal(size=(sum(map(sum, sizes)), len(NAMES)))
    values[:, 1] = correlation * values[:, 0] + np.sqrt(1 - correlation**2) * values[:, 1]
    return ContributionTable(sizes, values, np.zeros(len(NAMES)), np.full(len(NAMES), np.sqrt(2)), NAMES)


def numpy_top_k(table: ContributionTable, k: int, constraints: dict[str, Bounds]) -> np.ndarray:
    """Objectives of the k best feasible products of a two-component reaction: everything materialised, argpartition."""
    first = table.sizes[0][0]
    objective = np.add.outer(table.values[:first, 0], table.values[first:, 0])
    for name, (_, upper) in constraints.items():
        c = table.names.index(name)
        objective[np.add.outer(table.values[:first, c], table.values[first:, c]) > upper] = -np.inf
    flat = objective.ravel()
    return np.sort(flat[np.argpartition(flat, len(flat) - k)[len(flat) - k :]])[::-1]


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=float, default=1e10, help="products of the largest two-component library")
    parser.add_argument("--brute", type=float, default=1e8, help="largest library that brute force and numpy scan")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []

    def report(case: str, engine: str, k: int, wall: float, cpu: float, hits: Hits | None = None) -> None:
        row: dict[str, object] = {"case": case, "engine": engine, "k": k, "wall": wall, "cpu": cpu}
        row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        if hits is not None:
            stats = hits.stats
            row |= {
                "products": str(stats.products_total),
                "touched": stats.products_touched / stats.products_total,
                "blocks_visited": stats.block_pairs_visited,
                "blocks_total": str(stats.block_pairs_total),
                "threshold": stats.threshold,
            }
        rows.append(row)
        touched = f"{row['touched']:9.1e}" if hits is not None else " " * 9
        print(f"{case:34} {engine:7} k={k:<8} {wall:8.3f} s {cpu:8.3f} s {touched} {row['peak_mb']:6} MB", flush=True)

    def run(
        case: str, table: ContributionTable, k: int, constraints: dict[str, Bounds], engine: str = "pruned"
    ) -> Hits:
        query = Query(objective="objective", k=k, constraints=constraints, engine=engine)  # type: ignore[arg-type]
        hits, wall, cpu = timed(lambda: search(table, query, threads=options.threads))
        report(case, engine, k, wall, cpu, hits)
        return hits

    print(f"{'case':34} {'engine':7} {'':10} {'wall':>10} {'cpu':>10} {'touched':>9} {'peak':>9}")
    for engine in ("pruned", "brute"):
        run("compilation, or loading its cache", gaussian_library(((9, 9),)), 5, FOUR, engine)
    count(gaussian_library(((9, 9),)), FOUR)
    materialised: list[tuple[str, ContributionTable, dict[str, Bounds], Hits]] = []
    for products in (10**6, 10**7, 10**8, 10**9, 10**10):
        if products > options.largest:
            break
        side = round(products**0.5)
        table = gaussian_library(((side, side),))
        for constraints in ({}, FOUR):
            case = f"{products:.0e}, {len(constraints)} constraints"
            for k in (1_000, 100_000):
                hits = run(case, table, k, constraints)
                if k == 1_000 and products <= options.brute:
                    brute = run(case, table, k, constraints, "brute")
                    np.testing.assert_array_equal(brute.synthons, hits.synthons)
                    np.testing.assert_array_equal(brute.objective, hits.objective)
                if k == 1_000 and products <= min(options.brute, NUMPY_LARGEST):
                    materialised.append((case, table, constraints, hits))
    if options.largest >= 1e10:
        side = 100_000
        run("1e10, 4 constraints", gaussian_library(((side, side),)), 1_000_000, FOUR)
        strong = gaussian_library(((side, side),), correlation=0.97)
        run("1e10, 4 constraints, corr. 0.97", strong, 1_000, FOUR)
        run("1e10, infeasible", gaussian_library(((side, side),)), 1_000, {"correlated": (None, -12.0)})
        run("1e10 of 3 R-groups", gaussian_library(((2154, 2154, 2154),)), 1_000, FOUR)
        run("1e10 of 4 R-groups", gaussian_library(((316, 316, 316, 316),)), 1_000, FOUR)
        run("60 reactions of 3000 x 1000", gaussian_library(((3000, 1000),) * 60), 1_000, FOUR)
        huge = gaussian_library(((side,) * 4,))
        run("1e20 of 4 R-groups", huge, 1_000, {})
        run("1e20 of 4 R-groups, 4 constraints", huge, 1_000, FOUR)
        table = gaussian_library(((31_623, 31_623),))
        for bounds in ({"objective": (1.0, None)}, FOUR):
            result, wall, cpu = timed(lambda b=bounds: count(table, b, threads=options.threads))  # type: ignore[misc]
            report(f"count in 1e9, {len(bounds)} bounds: {result.fraction:.4f}", "count", 0, wall, cpu)
    for case, table, constraints, hits in materialised:  # last, because it sets the peak of memory
        best, wall, cpu = timed(lambda t=table, c=constraints: numpy_top_k(t, 1_000, c))  # type: ignore[misc]
        report(case, "numpy", 1_000, wall, cpu)
        np.testing.assert_array_equal(best, hits.objective)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
