"""Uncertainty of what is reported: exact binomial intervals, the bootstrap, split-conformal quantiles.

Every interval comes as an `Interval`. Resampling draws from keyed `Streams`, so an interval is reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lyceum_base.streams import Streams

Statistic: TypeAlias = Callable[..., Any]
"""`statistic(*samples, axis=-1)`, reducing that axis; `np.mean` and `np.median` are such functions."""

_CHUNK_ELEMENTS = 2**22  # resampled numbers held at once: 32 MiB a sample


@dataclass(frozen=True)
class Interval:
    """A two-sided interval.

    `level` is its nominal coverage, in (0, 1); `sample_count` the number of independent units behind it; `method` names
    a value of `lyceum.common.v1.IntervalMethod` in lower case: `exact_binomial`, `bootstrap`, `paired_bootstrap` here.

    Raises:
        ValueError: not low <= estimate <= high, or a level outside (0, 1).
    """

    estimate: float
    low: float
    high: float
    level: float
    sample_count: int
    method: str

    def __post_init__(self) -> None:
        _check_level(self.level)
        if not self.low <= self.estimate <= self.high:
            raise ValueError(f"low={self.low} <= estimate={self.estimate} <= high={self.high} does not hold")


def clopper_pearson(
    successes: ArrayLike, trials: ArrayLike, *, level: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(low, high) of the exact interval for a probability, elementwise over broadcast counts.

    With k successes in n trials and a = 1 - level: low is the a/2 quantile of Beta(k, n-k+1), or 0 at k = 0; high is
    the 1 - a/2 quantile of Beta(k+1, n-k), or 1 at k = n (Clopper and Pearson, Biometrika 26, 1934). The coverage is at
    least `level` for every probability.

    Raises:
        ValueError: counts that are not integers with 0 <= successes <= trials.
    """
    from scipy.special import betaincinv

    _check_level(level)
    k, n = np.broadcast_arrays(np.asarray(successes), np.asarray(trials))
    if k.dtype.kind not in "iu" or n.dtype.kind not in "iu" or np.any(k < 0) or np.any(k > n):
        raise ValueError("successes and trials must be integers with 0 <= successes <= trials")
    k, n = k.astype(np.float64), n.astype(np.float64)
    tail = (1 - level) / 2
    # The shape parameters are kept positive where the bound is 0 or 1 by definition.
    low = np.where(k == 0, 0.0, betaincinv(np.maximum(k, 1), n - k + 1, tail))
    high = np.where(k == n, 1.0, betaincinv(k + 1, np.maximum(n - k, 1), 1 - tail))
    return low, high


def binomial_interval(successes: int, trials: int, *, level: float = 0.95) -> Interval:
    """`clopper_pearson` of one count, as an `Interval` about successes / trials.

    Raises:
        ValueError: trials < 1, or successes outside [0, trials].
    """
    if trials < 1:
        raise ValueError(f"trials={trials} must be at least 1")
    low, high = clopper_pearson(successes, trials, level=level)
    return Interval(successes / trials, float(low), float(high), level, trials, "exact_binomial")


def bootstrap(
    sample: ArrayLike, statistic: Statistic = np.mean, *, streams: Streams, level: float = 0.95, resamples: int = 9999
) -> Interval:
    """BCa bootstrap interval of `statistic` over independent units (clips, windows, seeds), never over their parts.

    Takes `resamples` + n evaluations of the statistic on n numbers, in blocks of bounded memory.

    Args:
        sample: [n] one number a unit, n >= 2.
        statistic: called with arrays [..., n] and `axis=-1`.
        streams: the resamples' key; pass a `child` to draw others.
        resamples: B; the Monte Carlo error of a bound falls as B**-1/2.

    Raises:
        ValueError: fewer than two units, or a number that is not finite.
    """
    return _bca((sample,), statistic, streams, level, resamples, "bootstrap")


def paired_bootstrap(
    x: ArrayLike,
    y: ArrayLike,
    statistic: Statistic | None = None,
    *,
    streams: Streams,
    level: float = 0.95,
    resamples: int = 9999,
) -> Interval:
    """`bootstrap` of `statistic(x, y, axis=-1)` where x[i] and y[i] belong to the same unit and are drawn together.

    The default statistic is mean(x) - mean(y).

    Raises:
        ValueError: samples of unequal length, or as for `bootstrap`.
    """
    return _bca((x, y), statistic or _mean_difference, streams, level, resamples, "paired_bootstrap")


def conformal_quantile(scores: ArrayLike, *, level: float) -> float:
    """The ceil((n+1) * level)-th smallest of n calibration scores, inf if n is too small for the level.

    A new exchangeable score is at most this with probability >= level (Lei et al., "Distribution-free predictive
    inference for regression", JASA 113, 2018, Theorem 2.2).

    Raises:
        ValueError: no scores, nan among them, or not one-dimensional.
    """
    _check_level(level)
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or np.isnan(values).any():
        raise ValueError(f"scores must be a non-empty list of numbers without nan, not shape {values.shape}")
    # Rounded first: in floating point 100 * 0.55 lies just above 55.
    rank = math.ceil(round((values.size + 1) * level, 9))
    return math.inf if rank > values.size else float(np.partition(values, rank - 1)[rank - 1])


def _bca(
    samples: tuple[ArrayLike, ...], statistic: Statistic, streams: Streams, level: float, resamples: int, method: str
) -> Interval:
    """Bias-corrected and accelerated percentiles.

    Efron and Tibshirani, "An Introduction to the Bootstrap" (1993): equations 14.10 (levels), 14.14 (z0), 14.15 (a).
    """
    from scipy.special import ndtr, ndtri

    _check_level(level)
    data = [np.asarray(sample, dtype=np.float64) for sample in samples]
    n = data[0].size
    if any(values.shape != (n,) for values in data) or n < 2:
        raise ValueError(f"each sample must be [n] with the same n >= 2, not {[values.shape for values in data]}")
    if not all(np.isfinite(values).all() for values in data):
        raise ValueError("samples must be finite")
    if resamples < 1:
        raise ValueError(f"resamples={resamples} must be at least 1")

    def of_units(units: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(statistic(*(values[units] for values in data), axis=-1), dtype=np.float64)

    estimate = float(of_units(np.arange(n)))
    rows = max(1, _CHUNK_ELEMENTS // n)
    replicates = np.concatenate(
        [
            of_units(streams.integers("bootstrap", start, high=n, shape=(min(rows, resamples - start), n)))
            for start in range(0, resamples, rows)
        ]
    )

    below = np.mean((replicates < estimate) + 0.5 * (replicates == estimate))
    z0 = ndtri(np.clip(below, 0.5 / resamples, 1 - 0.5 / resamples))
    left_out = np.concatenate([of_units(_all_but_one(n, i, min(i + rows, n))) for i in range(0, n, rows)])
    influence = left_out.mean() - left_out
    spread = np.sum(influence**2) ** 1.5
    acceleration = np.sum(influence**3) / (6 * spread) if spread > 0 else 0.0
    shifted = z0 + ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    low, high = np.quantile(replicates, ndtr(z0 + shifted / (1 - acceleration * shifted)))
    # BCa does not promise to enclose the estimate; an Interval does.
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate), level, n, method)


def _all_but_one(n: int, start: int, stop: int) -> NDArray[np.int64]:
    """Row i holds the units 0..n-1 without unit start+i: [stop-start, n-1]."""
    columns = np.arange(n - 1)
    return columns + (columns >= np.arange(start, stop)[:, None])


def _mean_difference(x: NDArray[np.float64], y: NDArray[np.float64], axis: int) -> Any:
    return np.mean(x, axis=axis) - np.mean(y, axis=axis)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level} must be in (0, 1)")
