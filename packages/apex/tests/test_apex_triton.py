"""The GPU engine through Triton's interpreter, against brute force. Without triton only its refusal is tested."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from lyceum_apex.contributions import ContributionTable, Interactions
from lyceum_apex.query import Query, QueryError
from lyceum_apex.search import search

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# A process of its own, since triton reads TRITON_INTERPRET when it is imported. Prints a line for each query.
COMPARE = """
import json
import numpy as np
from lyceum_apex import triton_engine
from lyceum_apex.contributions import ContributionTable
from lyceum_apex.query import Query
from lyceum_apex.search import search

rng = np.random.default_rng(0)
BOUNDS = [(None, 0.5), (-0.5, None), (-1.0, 1.0), (5.0, 6.0), (-31.0, -30.0)]
LARGEST = {2: 70, 3: 14, 4: 8}
for trial in range(24):
    triton_engine._BUFFER = (4096, 256)[trial % 2]  # 256: one tile's products
    sizes = tuple(tuple(rng.integers(1, LARGEST[g], g).tolist()) for g in rng.integers(2, 5, 2).tolist())
    values = rng.normal(size=(sum(map(sum, sizes)), 4)) * 10.0 ** rng.integers(-3, 4)
    if trial % 3 == 0:
        values = np.round(values * 2)  # ties
    elif trial % 3 == 1:
        values = 1000.0 + 1e-4 * rng.normal(size=values.shape)  # differences that float32 hardly sees
    available = rng.random(len(values)) < 0.9
    table = ContributionTable(sizes, values, rng.normal(size=4), rng.uniform(0.5, 2.0, 4), tuple("abcd"), available)
    chosen = {name: BOUNDS[rng.integers(5)] for name in "bcd" if rng.random() < 0.6 and trial % 3 != 1}
    query = {"objective": {"a": 1.0, "d": 0.5}, "k": int(rng.choice([7, 1000])), "constraints": chosen}
    query["maximize"] = bool(rng.random() < 0.5)
    expected = search(table, Query(**query, engine="brute"))
    hits = search(table, Query(**query, engine="triton"))
    fields = ("reaction", "synthons", "objective", "slack", "properties")
    same = all(np.array_equal(getattr(hits, field), getattr(expected, field)) for field in fields)
    infeasible = bool(len(hits) and hits.slack[-1] < 0)
    print(json.dumps([same, len(hits), infeasible]))
"""

LARGE = """
import json
import numpy as np
from dataclasses import replace
from lyceum_apex.contributions import ContributionTable
from lyceum_apex.forest import make_spans
from lyceum_apex.kernels import Columns
from lyceum_apex.query import Query, QueryError, make_problem
from lyceum_apex.search import search
from lyceum_apex.triton_engine import _Scan

values = np.random.default_rng(1).normal(size=(320, 5))
table = ContributionTable(((160, 160),), values, np.zeros(5), np.full(5, 1.4), tuple("abcde"))
query = {"objective": "a", "k": 50, "constraints": dict.fromkeys("bcde", (None, 0.5))}
expected, hits = (search(table, Query(**query, engine=engine)) for engine in ("brute", "triton"))
np.testing.assert_array_equal(hits.synthons, expected.synthons)
np.testing.assert_array_equal(hits.objective, expected.objective)
print(json.dumps([len(hits), bool((hits.slack == 0).all()), hits.stats.products_touched]))
# The largest error of the filter's sums, in units of the bound on it.
problem = make_problem(table, {"a": 1.0}, True, query["constraints"])
columns = Columns(problem.bias, problem.lower, problem.upper, problem.weight)
scan = _Scan(make_spans(table, problem), 0, columns)
sums = scan._sums(np.arange(160))[1]
side = scan._side(np.arange(160), sums)
approximate = (side.values[0][:, None] + scan.b.values[0]).numpy().astype(float)
exact = sums[side.source, 0][:, None] + scan.spans.legs[scan.b.source, 0]
print(json.dumps(abs(approximate - exact).max() / scan.objective_error))
try:
    search(replace(table, values=1e40 * values), Query(**query, engine="triton"))
except QueryError as error:
    print(json.dumps(str(error)))
"""


def _interpret(code):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@needs_triton
def test_the_gpu_engine_finds_what_brute_force_finds_bit_for_bit_also_when_its_buffer_overflows():
    rows = _interpret(COMPARE)
    assert [same for same, _, _ in rows] == [True] * 24
    assert {infeasible for _, _, infeasible in rows} == {True, False}  # some lists are filled up
    assert all(found > 0 for _, found, _ in rows)


@needs_triton
def test_the_gpu_engine_skips_tiles_of_25600_products_and_refuses_numbers_that_float32_cannot_hold():
    (found, feasible, touched), error, refusal = _interpret(LARGE)
    assert (found, feasible) == (50, True)
    assert 50 <= touched < 25_600
    assert 0.01 < error <= 1.0
    assert refusal == "engine: 'triton' computes in float32: numbers beyond 1e+30; use 'pruned'"


def _search(table):
    return search(table, Query(objective="a", k=1, engine="triton"))


def test_the_gpu_engine_refuses_what_it_cannot_do_by_naming_the_engine(monkeypatch):
    table = ContributionTable(((2, 2),), np.ones((4, 1)), np.zeros(1), np.ones(1), ("a",))
    if importlib.util.find_spec("triton") is not None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(QueryError, match="engine: 'triton' needs a CUDA device and finds none"):
            _search(table)
        factors = np.zeros((4, 1, 4, 1))
        factors[:2, 0, 1] = factors[2:, 0, 0] = 1.0
        pairs = ContributionTable(
            table.sizes, table.values, table.bias, table.scale, ("a",), interactions=Interactions(("a",), factors)
        )
        with pytest.raises(QueryError, match="engine: 'triton' knows no interactions"):
            _search(pairs)
    monkeypatch.setattr("lyceum_apex.search.find_spec", lambda name: None)
    with pytest.raises(QueryError, match="engine: 'triton' needs the package triton, not installed here"):
        _search(table)
