"""The length of a list that holds a promised share of the truly best products, on synthetic truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lyceum_apex.budget import _predicted, list_size
from lyceum_apex.contributions import ContributionTable, Interactions
from lyceum_apex.errors import FieldError

SIDE = 120


def library(rng: np.random.Generator) -> tuple[ContributionTable, np.ndarray]:
    """A two-component library and its predictions [SIDE, SIDE]."""
    values = rng.normal(size=(2 * SIDE, 1))
    table = ContributionTable(((SIDE, SIDE),), values, np.zeros(1), np.ones(1), ("f",))
    return table, np.add.outer(values[:SIDE, 0], values[SIDE:, 0])


def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    flat = rng.choice(SIDE * SIDE, n, replace=False)
    return np.zeros(n, int), np.column_stack([flat // SIDE, flat % SIDE, np.full((n, 2), -1)])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_lists_hold_the_promised_share_of_the_truly_best_also_with_skewed_errors(sign: float) -> None:
    rng = np.random.default_rng(7)
    shares, sizes = [], []
    for _ in range(60):
        table, predicted = library(rng)
        noise = rng.exponential(size=predicted.shape) * np.exp(0.3 * sign * predicted)  # larger for the best
        truth = predicted + sign * noise
        r, s = draw(rng, 2000)
        found = list_size(
            table, "f", r, s, truth[s[:, 0], s[:, 1]], top_fraction=0.02, recall=0.8, maximize=sign > 0, threads=1
        )
        best = sign * truth >= np.sort(sign * truth, axis=None)[-int(0.02 * truth.size)]
        listed = sign * predicted >= sign * found.cutoff
        assert found.k == listed.sum()
        shares.append(listed[best].mean())
        sizes.append(found.k / truth.size)
    spread = np.std(shares) / np.sqrt(len(shares))
    assert np.mean(shares) > 0.8 - 3 * spread  # the promise
    assert np.mean(shares) < 0.8 + 0.03 + 3 * spread  # and no list much longer than it needs; 1/41 is one label
    assert np.mean(sizes) < 0.5


def test_a_perfect_prediction_needs_a_list_of_just_the_share() -> None:
    rng = np.random.default_rng(1)
    table, predicted = library(rng)
    r, s = draw(rng, 4000)
    found = list_size(table, "f", r, s, predicted[s[:, 0], s[:, 1]], top_fraction=0.1, recall=0.9)
    assert found.labels_used == 400
    assert found.k / predicted.size == pytest.approx(0.09, abs=0.015)  # three deviations of 360 of 4,000 labels


def test_the_cutoff_is_met_to_the_last_bit_with_interactions_and_weights() -> None:
    rng = np.random.default_rng(2)
    sizes = ((20, 20), (8, 9, 7))
    legs = sum(map(sum, sizes))
    table = ContributionTable(sizes, rng.normal(size=(legs, 2)), rng.normal(size=2), np.ones(2), ("f", "g"))
    factors = rng.normal(size=(legs, 1, 4, 3)) * table.partners[:, None, :, None]
    table = replace(table, interactions=Interactions(("g",), factors))
    three = np.array([[a, b, c, -1] for a in range(8) for b in range(9) for c in range(7)])
    two = np.array([[a, b, -1, -1] for a in range(20) for b in range(20)])
    r, s = np.repeat([1, 0], [len(three), len(two)]), np.concatenate([three, two])
    truth = rng.normal(size=len(r))
    for recall in (0.5, 0.7, 0.9):
        found = list_size(table, {"f": 0.3, "g": -1.7}, r, s, truth, top_fraction=0.9, recall=recall)
        # All products are labelled, so those below the cutoff are known: a cutoff off by one bit would miscount one.
        best = np.argsort(-truth, kind="stable")[: found.labels_used]
        predicted = _predicted(table, {"f": 0.3, "g": -1.7}, r, s)
        assert found.k == (predicted >= found.cutoff).sum()
        assert (predicted[best] < found.cutoff).sum() == int((1 - recall) * (found.labels_used + 1) + 1e-9) - 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_fraction": 0.0}, "top_fraction"),
        ({"recall": 1.0}, "recall"),
        ({"truth": np.zeros(99)}, "truth"),
        ({"truth": np.full(100, np.nan)}, "truth"),
        ({"top_fraction": 0.01}, "truth"),
    ],
)
def test_a_bad_request_names_its_field(options: dict[str, object], field: str) -> None:
    rng = np.random.default_rng(0)
    table, _ = library(rng)
    r, s = draw(rng, 100)
    good = {"truth": np.zeros(100), "top_fraction": 0.5, "recall": 0.9}
    with pytest.raises(FieldError) as caught:
        list_size(table, "f", r, s, **{**good, **options})  # type: ignore[arg-type]
    assert caught.value.field == field
