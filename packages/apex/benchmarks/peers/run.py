"""Runs one peer on the thrombin library and writes which products it asked for, in order.

    python run.py ARM SEED CALLS FOLDER OUT [warm-up trials]

FOLDER is what `lyceum_zoo.path("thrombin")` gives, OUT a .npy file of int64[calls, 3].  A call is a product that was
not asked before: a peer that asks twice is answered from memory and not charged.  ARM is a method of synthonbench 0.2.0
(random_pw, ts, ga, bb) or a preset of chem-tactics 1.2.0 (tactics-recommended, tactics-recommended_rws,
tactics-baseline, tactics-legacy_rws) in the three-component view: 130 acids and twice 62 amino acids.  Presets are
built from their own strategy and warm-up; what they ask of a synthesis pipeline is not needed to look scores up.
"""

import csv
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

FILES = ("acids.smi", "amino_acids_no_fmoc.smi", "amino_acids_no_fmoc.smi")


class Spent(Exception):
    """The calls are used up."""


class Oracle:
    """Docking scores by product; remembers what was asked first."""

    def __init__(self, folder: Path, calls: int) -> None:
        self.calls = calls
        self.asked: dict[tuple[int, ...], None] = {}
        self.places = [
            {line.split()[1]: i for i, line in enumerate((folder / name).read_text().splitlines())} for name in FILES
        ]
        with (folder / "product_scores.csv").open() as file:
            rows = csv.reader(file)
            next(rows)
            self.scores = {self.place(code): float(score) for code, score in rows}

    def place(self, code: str) -> tuple[int, ...]:
        return tuple(places[name] for places, name in zip(self.places, code.split("_")))

    def __call__(self, product: tuple[int, ...]) -> float:
        if product not in self.asked:
            if len(self.asked) == self.calls:
                raise Spent
            self.asked[product] = None
        return self.scores[product]


def synthonbench(arm: str, seed: int, oracle: Oracle, folder: Path) -> None:
    """A method with its defaults, driven by the package's own runner."""
    from synthonbench.baselines import create_optimizer  # pants: no-infer-dep
    from synthonbench.runner import run_optimizer  # pants: no-infer-dep
    from synthonbench.space import Synthon, SynthonSpace  # pants: no-infer-dep
    from synthonbench.task import GlobalSynthonTask  # pants: no-infer-dep

    rows = [
        Synthon(i, position + 1, "thrombin", line.split()[0])
        for position, name in enumerate(FILES)
        for i, line in enumerate((folder / name).read_text().splitlines())
    ]
    space = SynthonSpace(rows)
    task = GlobalSynthonTask(
        space, lambda _, ids: oracle(tuple(ids)), budget=oracle.calls, seed=seed, direction="minimize"
    )
    run_optimizer(create_optimizer(arm, space=space, seed=seed), task, method=arm)


def tactics(arm: str, seed: int, oracle: Oracle, folder: Path, trials: int) -> None:
    """A preset, minimising, with `trials` warm-up trials (the presets have 5)."""
    sys.modules["useful_rdkit_utils"] = ModuleType("useful_rdkit_utils")  # for evaluators that are not used here
    from TACTICS.thompson_sampling import presets  # pants: no-infer-dep
    from TACTICS.thompson_sampling.core.evaluators import LookupEvaluator  # pants: no-infer-dep
    from TACTICS.thompson_sampling.core.sampler import ThompsonSampler  # pants: no-infer-dep
    from TACTICS.thompson_sampling.factories import create_strategy, create_warmup  # pants: no-infer-dep

    class Recorder(LookupEvaluator):
        def __init__(self) -> None:
            self.num_evaluations = 0

        def evaluate(self, product_name: str) -> float:
            self.num_evaluations += 1
            return oracle(oracle.place(product_name))

    random.seed(seed)  # its warm-up shuffles with the global generators
    np.random.seed(seed)  # noqa: NPY002
    presets.ThompsonSamplingConfig = SimpleNamespace  # without its check of the pipeline
    preset = presets.get_preset(arm, synthesis_pipeline=None, evaluator_config=None, mode="minimize")
    sampler = ThompsonSampler(
        SimpleNamespace(num_steps=1, num_components=3),
        create_strategy(preset.strategy_config),
        create_warmup(preset.warmup_config),
        batch_size=preset.batch_size,
        max_resamples=getattr(preset, "max_resamples", None),
        use_boltzmann_weighting=getattr(preset, "use_boltzmann_weighting", False),
        seed=seed,
    )
    sampler.hide_progress = True
    sampler.set_evaluator(Recorder())
    sampler.read_reagents([str(folder / name) for name in FILES])
    sampler.warm_up(num_warmup_trials=trials or preset.num_warmup_trials)
    left = oracle.calls - len(oracle.asked)
    sampler.search(num_cycles=10 * left, max_evaluations=left)
    sampler.search(num_cycles=10 * left, max_evaluations=left)  # asked twice was not charged: until the calls are spent


def main(arm: str, seed: str, calls: str, folder: str, out: str, trials: str = "0") -> None:
    oracle = Oracle(Path(folder), int(calls))
    try:
        if arm.startswith("tactics-"):
            tactics(arm.removeprefix("tactics-"), int(seed), oracle, Path(folder), int(trials))
        else:
            synthonbench(arm, int(seed), oracle, Path(folder))
    except Spent:
        pass
    np.save(out, np.array(list(oracle.asked), np.int64))


if __name__ == "__main__":
    main(*sys.argv[1:])
