"""Recall on real docking truth: how many of the best products are found with so many calls of the oracle.

The `thrombin` data set has a docking score for each of its 130 x 62 x 62 products, lower is better.  Every product that
an arm asks for is a call, those of the first random sample included; recall_j is the fraction of the true best j among
all products asked.  Ceilings need no oracle: models fitted to all scores, ranked, and cut at k products.

What is fixed in the active search (rounds, size of the random sample, the median as the worst score that counts) was
settled by looking at this data set, which flatters it somewhat; variances are estimated from each run's own scores.

Peers run in the same run at equal calls, in an environment of their own: `LYCEUM_APEX_PEERS` holds the command, such as
`peers/bin/python packages/apex/benchmarks/peers/run.py`; without it there are only our own arms.  They have their
packages' defaults, but for one arm of TACTICS whose number of warm-up trials found most of this very truth.
"""

import csv
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.active import ActivePlan, iter_active_search
from lyceum_apex.library import SynthonLibrary
from lyceum_base import Interval, Streams, bootstrap
from lyceum_runtime.bench_report import Row, report

CALLS = 10_000
SEEDS = (0, 1, 2, 3, 4)
TOPS = (100, 1000)
EVERY = 250  # calls between two points of a curve
OURS = "apex, active search"
TARGETS = {100: ">= 0.62", 1000: ">= 0.45"}
PEERS_VARIABLE = "LYCEUM_APEX_PEERS"
PEERS = {
    "random": ("random_pw",),
    "synthonbench TS": ("ts",),
    "synthonbench GA": ("ga",),
    "synthonbench BB*": ("bb",),
    "TACTICS recommended": ("tactics-recommended", "5"),
    "TACTICS recommended_rws": ("tactics-recommended_rws", "5"),
    "TACTICS recommended_rws, 10 trials": ("tactics-recommended_rws", "10"),
    "TACTICS legacy_rws": ("tactics-legacy_rws", "5"),
}
"""Arms of the peers' command, for TACTICS with its number of warm-up trials."""

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Thrombin:
    """The library and the scores float64[130, 62, 62] of its products, lower is better."""

    library: SynthonLibrary
    scores: NDArray[np.float64]

    @classmethod
    def load(cls, folder: Path) -> "Thrombin":
        """From the data set's files. The reagents become synthons: an acid loses its hydroxyl, an amino acid a hydrogen
        of its amine, and the last acid of the chain is an amide, as in the data set's own products."""
        acids, amino = _reagents(folder / "acids.smi"), _reagents(folder / "amino_acids_no_fmoc.smi")
        rows = [("thrombin", 1, name, _synthon(smiles, None, 92)) for name, smiles in acids.items()]
        rows += [("thrombin", 2, name, _synthon(smiles, 92, 93)) for name, smiles in amino.items()]
        rows += [("thrombin", 3, name, _synthon(smiles, 93, None)) for name, smiles in amino.items()]
        places = [{name: i for i, name in enumerate(group)} for group in (acids, amino, amino)]
        scores = np.full([len(group) for group in places], np.nan)
        with (folder / "product_scores.csv").open() as file:
            codes = csv.reader(file)
            next(codes)
            for code, score in codes:
                scores[tuple(group[name] for group, name in zip(places, code.split("_")))] = float(score)
        return cls(SynthonLibrary.from_rows(rows, None), scores)

    def best(self, top: int) -> NDArray[np.int64]:
        """Flat places of the true best, ties by place."""
        return np.argsort(self.scores.ravel(), kind="stable")[:top]

    def recall(self, asked: Places, top: int) -> float:
        """Fraction of the true best among products [n, 3]."""
        return float(np.isin(self.best(top), np.ravel_multi_index(tuple(asked.T), self.scores.shape)).mean())


def recall(quick: bool, out_dir: Path) -> Iterator[Row]:
    """Rows of ceilings, our arm and the peers; curves of recall against calls in `out_dir`/recall.json."""
    from lyceum_zoo import path

    folder = path("thrombin")
    data = Thrombin.load(folder)
    rows = list(ceilings(data))
    yield from rows
    seeds = SEEDS[:2] if quick else SEEDS
    command = shlex.split(os.environ.get(PEERS_VARIABLE, ""))
    runs: dict[str, list[Places]] = {}
    for name, arm in {OURS: (), **(PEERS if command else {})}.items():
        begun = time.perf_counter()
        runs[name] = [
            _ask_peer(command, arm, seed, folder)
            if arm
            else ask_apex(data, ActivePlan(budget=CALLS, maximize=False, seed=seed))
            for seed in seeds
        ]
        context = f"{(time.perf_counter() - begun) / len(seeds):.0f} s a run"
        context = f"{arm[1]} warm-up trials, {context}" if len(arm) > 1 else context
        of_arm = list(_rows(data, name, runs[name], context, TARGETS if name == OURS else {}))
        yield from of_arm
        rows += of_arm
    results = report("apex recall", rows, seed=SEEDS[0], quick=quick, sizes={"calls": CALLS}, packages=("numpy",))
    curves = {name: {top: [_curve(data, asked, top) for asked in of] for top in TOPS} for name, of in runs.items()}
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "recall.json").write_text(json.dumps(results | {"every": EVERY, "curves": curves}, indent=1) + "\n")


def _curve(data: Thrombin, asked: Places, top: int) -> list[float]:
    """Recall after every `EVERY` calls, from none."""
    hit = np.isin(np.ravel_multi_index(tuple(asked.T), data.scores.shape), data.best(top))
    found = np.concatenate([[0], np.cumsum(hit)]) / top
    return [round(float(found[min(calls, len(asked))]), 4) for calls in range(0, CALLS + 1, EVERY)]


def ceilings(data: Thrombin) -> Iterator[Row]:
    """What models fitted to all scores reach: main effects, and all pair terms."""
    y = data.scores
    for name, fitted in (("main effects", main_effects(y)), ("all pair terms", pair_effects(y))):
        where = f"{name}, all scores known"
        r2 = 1 - ((y - fitted) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        yield Row(where, "R2", float(r2), unit="")
        for top, k in ((100, 1000), (1000, CALLS)):
            first = np.stack(np.unravel_index(np.argsort(fitted.ravel(), kind="stable")[:k], y.shape), axis=1)
            yield Row(where, f"recall of the best {top:,} in {k:,}", data.recall(first, top), unit="")


def main_effects(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least-squares fit of a full table [a, b, c] by a sum over its axes: means over the other two."""
    mean = y.mean()
    parts = [y.mean(axis=tuple(j for j in range(3) if j != i), keepdims=True) - mean for i in range(3)]
    fitted: NDArray[np.float64] = mean + parts[0] + parts[1] + parts[2]
    return fitted


def pair_effects(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least-squares fit by main effects and all pair terms (inclusion and exclusion of means)."""
    single = [y.mean(axis=tuple(j for j in range(3) if j != i), keepdims=True) for i in range(3)]
    double = [y.mean(axis=i, keepdims=True) for i in range(3)]
    fitted: NDArray[np.float64] = double[0] + double[1] + double[2] - single[0] - single[1] - single[2] + y.mean()
    return fitted


def ask_apex(data: Thrombin, plan: ActivePlan) -> Places:
    """Products [calls, 3] in the order in which the active search asks for them."""
    steps = iter_active_search(data.library, plan)
    try:
        request = next(steps)
        while True:
            places = request.products.s[:, :3]
            request = steps.send(data.scores[tuple(places.T)])
    except StopIteration as end:
        return np.asarray(end.value.state.asked.s[:, :3], np.int64)


def _ask_peer(command: list[str], arm: tuple[str, ...], seed: int, folder: Path) -> Places:
    with tempfile.TemporaryDirectory(prefix="lyceum-") as scratch:
        out = Path(scratch) / "asked.npy"
        arguments = [arm[0], str(seed), str(CALLS), str(folder), str(out), *arm[1:]]
        subprocess.run([*command, *arguments], check=True, capture_output=True)
        asked: Places = np.load(out)
    return asked


def _rows(data: Thrombin, name: str, runs: list[Places], context: str, targets: dict[int, str]) -> Iterator[Row]:
    calls = min(map(len, runs))
    for top in TOPS:
        interval = over_seeds([data.recall(asked[:CALLS], top) for asked in runs])
        text = f"{interval.low:.3f} to {interval.high:.3f} over {len(runs)} seeds, {calls:,} calls; {context}"
        yield Row(name, f"recall of the best {top:,}", interval.estimate, "", targets.get(top, ""), text)


def over_seeds(values: list[float]) -> Interval:
    """Mean over seeds with a 95 % bootstrap interval; all equal values give an interval of no width."""
    if len(set(values)) == 1:
        return Interval(values[0], values[0], values[0], 0.95, len(values), "bootstrap")
    return bootstrap(values, streams=Streams(0))


def _reagents(path: Path) -> dict[str, str]:
    return {name: smiles for smiles, name in (line.split() for line in path.read_text().splitlines())}


def _synthon(smiles: str, amine: int | None, acid: int | None) -> str:
    """A reagent with the metal `amine` on its amine and `acid` in place of the acid's hydroxyl; None for the acid makes
    it an amide."""
    from rdkit import Chem

    molecule: Any = Chem.RWMol(Chem.MolFromSmiles(smiles))
    ((_, _, hydroxyl),) = molecule.GetSubstructMatches(Chem.MolFromSmarts("[CX3](=O)[OX2H1]"))
    oxygen = molecule.GetAtomWithIdx(hydroxyl)
    oxygen.SetNumExplicitHs(0)
    oxygen.SetAtomicNum(acid or 7)
    oxygen.SetNoImplicit(acid is not None)
    if amine is not None:
        ((index,),) = molecule.GetSubstructMatches(Chem.MolFromSmarts("[NX3;H1,H2;!$(N-C=[O,N,S]);!$(N-S)]"))
        nitrogen = molecule.GetAtomWithIdx(index)
        nitrogen.SetNumExplicitHs(max(nitrogen.GetNumExplicitHs() - 1, 0))
        molecule.AddBond(index, molecule.AddAtom(Chem.Atom(amine)), Chem.BondType.SINGLE)
    Chem.SanitizeMol(molecule)
    return str(Chem.MolToSmiles(molecule))
