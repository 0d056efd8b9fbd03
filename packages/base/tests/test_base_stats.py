import math

import numpy as np
import pytest
from scipy import stats

from lyceum_base import (
    Interval,
    Streams,
    binomial_interval,
    bootstrap,
    clopper_pearson,
    conformal_quantile,
    paired_bootstrap,
)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_clopper_pearson_equals_scipys_exact_interval_for_every_count(level):
    counts = [(k, n) for n in (1, 2, 7, 50, 1000) for k in {0, 1, n // 3, n - 1, n}]
    low, high = clopper_pearson([k for k, _ in counts], [n for _, n in counts], level=level)
    oracle = [stats.binomtest(k, n).proportion_ci(level, method="exact") for k, n in counts]
    # scipy finds the bounds by a root search that stops at about 1e-12.
    np.testing.assert_allclose(low, [ci.low for ci in oracle], rtol=0, atol=1e-11)
    np.testing.assert_allclose(high, [ci.high for ci in oracle], rtol=0, atol=1e-11)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_clopper_pearson_covers_every_probability_at_least_at_its_level(level):
    # The coverage is a finite sum, so this is exact: no simulation.
    n, p = 30, np.linspace(0.001, 0.999, 999)[:, None]
    k = np.arange(n + 1)
    low, high = clopper_pearson(k, n, level=level)
    coverage = np.sum(stats.binom.pmf(k, n, p) * ((low <= p) & (p <= high)), axis=1)
    assert coverage.min() >= level
    assert coverage.min() < level + 0.04  # and it is not simply very wide


def test_clopper_pearson_broadcasts_and_knows_nothing_without_trials():
    low, high = clopper_pearson(np.array([[0], [1]]), np.array([1, 2, 3]))
    assert low.shape == high.shape == (2, 3)
    low, high = clopper_pearson(0, 0)
    assert (low, high) == (0, 1)


def test_binomial_interval_carries_its_fields():
    interval = binomial_interval(3, 10)
    assert (interval.estimate, interval.level, interval.sample_count, interval.method) == (
        0.3,
        0.95,
        10,
        "exact_binomial",
    )
    assert (interval.low, interval.high) == (pytest.approx(0.06673951117773448), pytest.approx(0.6524528500599972))


@pytest.mark.parametrize(("k", "n"), [(-1, 3), (4, 3), (0, 0), (1.5, 3)])
def test_impossible_counts_are_refused(k, n):
    with pytest.raises(ValueError, match="trials"):
        binomial_interval(k, n)


class _OurResamples(np.random.Generator):
    """Gives scipy the very resamples that `bootstrap` draws, so that the two must agree to rounding."""

    def __init__(self, streams):
        super().__init__(np.random.Philox(0))
        self._streams = streams

    def integers(self, low, high=None, size=None, dtype=np.int64, endpoint=False):
        assert low == 0
        return self._streams.integers("bootstrap", 0, high=high, shape=size)


@pytest.mark.parametrize("statistic", [np.mean, np.median, np.std])
@pytest.mark.parametrize("level", [0.68, 0.95])
def test_bootstrap_equals_scipys_bca_on_the_same_resamples(statistic, level):
    sample, streams = np.random.default_rng(1).lognormal(size=25), Streams(2)
    ours = bootstrap(sample, statistic, streams=streams, level=level, resamples=2000)
    oracle = stats.bootstrap(
        (sample,), statistic, n_resamples=2000, confidence_level=level, method="BCa", rng=_OurResamples(streams)
    ).confidence_interval
    assert (ours.low, ours.high) == (pytest.approx(oracle.low, rel=1e-12), pytest.approx(oracle.high, rel=1e-12))
    assert ours.estimate == pytest.approx(statistic(sample))
    assert (ours.sample_count, ours.method, ours.level) == (25, "bootstrap", level)


def _ratio_of_medians(x, y, axis=-1):
    return np.median(x, axis=axis) / np.median(y, axis=axis)


def test_paired_bootstrap_equals_scipys_on_the_same_resamples():
    rng, streams = np.random.default_rng(3), Streams(4)
    x = rng.lognormal(size=30)
    y = x * rng.lognormal(0.1, 0.2, size=30)
    ours = paired_bootstrap(x, y, _ratio_of_medians, streams=streams, resamples=2000)
    oracle = stats.bootstrap(
        (x, y), _ratio_of_medians, n_resamples=2000, paired=True, method="BCa", rng=_OurResamples(streams)
    ).confidence_interval
    assert (ours.low, ours.high) == (pytest.approx(oracle.low, rel=1e-12), pytest.approx(oracle.high, rel=1e-12))
    assert ours.method == "paired_bootstrap"


def test_pairing_uses_the_common_part_of_two_samples():
    # x and y differ by little but vary by much: only a paired interval can tell them apart.
    common = 10 * Streams(0).normal("common", shape=100)
    x, y = common + 0.1 + 0.1 * Streams(0).normal("noise", shape=100), common
    interval = paired_bootstrap(x, y, streams=Streams(5), resamples=2000)
    assert 0 < interval.low < 0.1 < interval.high < 0.2


def test_bootstrap_of_a_mean_covers_at_about_its_level():
    # 1,000 samples of 40 from an exponential. BCa's coverage error is O(1/n); the measured one must lie within
    # 0.02 + 3 standard errors (0.0069 each) of the level, which a percentile of the wrong tail misses.
    samples = -np.log1p(-Streams(6).uniform("exponential", shape=(1000, 40)))
    covered = 0
    for i, sample in enumerate(samples):
        interval = bootstrap(sample, streams=Streams(6).child("resamples", i), resamples=499)
        covered += interval.low <= 1 <= interval.high
    assert abs(covered / 1000 - 0.95) < 0.02 + 3 * 0.0069


def test_bootstrap_is_keyed_and_does_not_depend_on_other_draws():
    sample = np.arange(20.0) ** 2
    first = bootstrap(sample, streams=Streams(1), resamples=200)
    assert first == bootstrap(sample, streams=Streams(1), resamples=200)
    assert first != bootstrap(sample, streams=Streams(1).child("other"), resamples=200)


def test_bootstrap_in_chunks_equals_the_quantiles_of_one_piece(monkeypatch):
    sample = np.arange(30.0) ** 2
    whole = bootstrap(sample, streams=Streams(1), resamples=4000)
    monkeypatch.setattr("lyceum_base.stats._CHUNK_ELEMENTS", 30 * 7)
    pieces = bootstrap(sample, streams=Streams(1), resamples=4000)
    # Other resamples, same distribution: bounds agree within their Monte Carlo error.
    scale = whole.high - whole.low
    assert abs(pieces.low - whole.low) < 0.05 * scale
    assert abs(pieces.high - whole.high) < 0.05 * scale


def test_bootstrap_of_a_constant_sample_is_the_constant():
    interval = bootstrap(np.full(10, 3.0), streams=Streams(0), resamples=100)
    assert (interval.low, interval.estimate, interval.high) == (3, 3, 3)


@pytest.mark.parametrize(
    ("sample", "message"), [([1.0], "n >= 2"), ([[1.0, 2.0]], "n >= 2"), ([1.0, math.nan], "finite"), ([], "n >= 2")]
)
def test_samples_that_cannot_be_resampled_are_refused(sample, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(sample, streams=Streams(0))


def test_pairs_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="same n"):
        paired_bootstrap([1.0, 2.0], [1.0, 2.0, 3.0], streams=Streams(0))


def test_conformal_quantile_is_the_stated_order_statistic():
    scores = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0, 7.0, 6.0]
    assert conformal_quantile(scores, level=0.9) == 9  # ceil(10 * 0.9) = 9th of 9
    assert conformal_quantile(scores, level=0.8) == 8
    assert conformal_quantile(scores, level=0.81) == 9
    assert conformal_quantile(scores, level=0.91) == math.inf
    assert conformal_quantile(range(1, 100), level=0.55) == 55  # 100 * 0.55 is 55.00000000000001 in floating point


def test_conformal_quantile_covers_a_new_score_with_the_exact_probability():
    # For continuous scores the coverage is Beta(k, n+1-k), k = ceil((n+1) * level): mean k/(n+1) = 0.9 with n = 19.
    rows = Streams(7).normal("scores", shape=(20_000, 20))
    covered = np.mean([row[-1] <= conformal_quantile(row[:-1], level=0.9) for row in rows])
    assert abs(covered - 0.9) < 4 * math.sqrt(0.09 / 20_000)


@pytest.mark.parametrize("scores", [[], [1.0, math.nan], [[1.0]]])
def test_calibration_scores_that_rank_nowhere_are_refused(scores):
    with pytest.raises(ValueError, match="scores"):
        conformal_quantile(scores, level=0.9)


@pytest.mark.parametrize("level", [0, 1, -0.1, math.nan])
def test_levels_outside_the_open_unit_interval_are_refused(level):
    with pytest.raises(ValueError, match="level"):
        conformal_quantile([1.0], level=level)
    with pytest.raises(ValueError, match="level"):
        binomial_interval(1, 2, level=level)
    with pytest.raises(ValueError, match="level"):
        bootstrap([1.0, 2.0], streams=Streams(0), level=level)


def test_an_interval_encloses_its_estimate():
    with pytest.raises(ValueError, match="low=2"):
        Interval(1.0, 2.0, 3.0, 0.95, 10, "bootstrap")
