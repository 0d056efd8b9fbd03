"""Low-rank interactions between R-groups, fitted to labelled products by alternating ridge regression.

f(x) = b + sum_g w[s_g] + sum_{g<h} <p_{g,h}[s_g], p_{h,g}[s_h]> is linear in everything that belongs to one R-group
once the other R-groups are held: an ordinary ridge regression for each of its legs, on what the partners in that leg's
products show to it.  Going round the R-groups lowers the penalised squared error with every step (alternating least
squares: Koren, Bell, Volinsky, "Matrix factorization techniques for recommender systems", Computer 42 (2009) 30).  The
legs of one R-group share nothing, so their normal equations are solved as one batch.  From a random start the first
rounds have a larger penalty: with a small one from the outset some fits end in poor local minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lyceum_apex.contributions import MAX_RANK, MAX_RGROUPS, Interactions, checked_products, leg_offsets
from lyceum_apex.errors import FieldError
from lyceum_base import Streams

FloatArray = NDArray[np.float64]

_BLOCK = 8192  # products whose outer products are in memory at once
_START = 0.25  # variance of the pair terms at the start, in units of that of the labels
_FIRST_PENALTIES = (10.0, 10.0, 10.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class LegModel:
    """Main effects and interactions of M properties: bias float64[M], values float64[L, M], factors float64[L, M, 4, q]
    (q may be 0) as in `contributions`."""

    bias: FloatArray
    values: FloatArray
    factors: FloatArray

    def interactions(self, names: Sequence[str]) -> Interactions | None:
        """The pair terms for a table whose properties have these names; None for rank 0."""
        return Interactions(tuple(names), self.factors) if self.factors.shape[3] else None


def fit_interactions(
    sizes: Sequence[Sequence[int]],
    reaction: ArrayLike,
    synthons: ArrayLike,
    residual: ArrayLike,
    *,
    rank: int,
    ridge: float = 1.0,
    iterations: int = 20,
    seed: int = 0,
    init: FloatArray | None = None,
) -> FloatArray:
    """Factors float64[L, M, 4, rank] of pair terms for what an additive model leaves over.

    Args:
        sizes: synthons of each R-group of each reaction, as in `ContributionTable`.
        reaction, synthons: the labelled products, int[n] and int[n, 4] (-1 pads).
        residual: float[n, M], label minus additive prediction.
        rank: 1 to 64.
        ridge: penalty on squared factors, in units of a property's mean squared residual; more than 0.
        iterations: rounds over the R-groups, after nine that lead up to them from a random start.
        seed: of the random factors to start from.
        init: factors to start from instead; legs that have none there start at random.

    Legs without a labelled product get zeros.  Raises FieldError.
    """
    if rank < 1:
        raise FieldError("rank", f"{rank} given; 1 to {MAX_RANK}")
    fit = _Fit.of(sizes, reaction, synthons, residual, "residual", rank, iterations)
    fit.check(ridge=ridge)
    parts = []
    for j, y in enumerate(fit.y.T):
        scale = float(np.sqrt((y**2).mean())) or 1.0
        factors = fit.start(j, seed, None if init is None else init[:, j] / np.sqrt(scale))
        fit.descend(y / scale, factors, None, None, fit.penalties(ridge, init is None), 0.0)
        parts.append(fit.canonical(factors) * np.sqrt(scale))
    return np.stack(parts, axis=1)


def fit_additive_and_interactions(
    sizes: Sequence[Sequence[int]],
    reaction: ArrayLike,
    synthons: ArrayLike,
    y: ArrayLike,
    *,
    rank: int,
    ridge: float = 1.0,
    ridge_main: float = 1.0,
    iterations: int = 20,
    seed: int = 0,
    init: LegModel | None = None,
) -> LegModel:
    """Main effects and pair terms together, from labels alone.

    Arguments as for `fit_interactions`, with labels `y` float[n, M] in place of residuals; rank 0 fits main effects
    only, `ridge_main` is their penalty, both in units of a property's variance.  Each reaction has a free intercept,
    spread over its legs; `bias` is the mean label.  Raises FieldError.
    """
    if rank < 0:
        raise FieldError("rank", f"{rank} given; 0 to {MAX_RANK}")
    fit = _Fit.of(sizes, reaction, synthons, y, "y", rank, iterations)
    fit.check(ridge=ridge, ridge_main=ridge_main)
    bias = fit.y.mean(axis=0)
    values, parts = [], []
    for j, labels in enumerate(fit.y.T):
        centred = labels - bias[j]
        scale = float(centred.std()) or 1.0
        known = None if init is None else init.factors[:, j] / np.sqrt(scale)
        main = np.zeros(fit.legs_total + 1)
        intercept = np.zeros(len(fit.sizes))
        nothing = np.zeros((fit.legs_total + 1, MAX_RGROUPS, 0))
        fit.descend(centred / scale, nothing, main, intercept, fit.penalties(ridge, False), ridge_main)
        factors = fit.start(j, seed, known)
        if rank:
            fit.descend(centred / scale, factors, main, intercept, fit.penalties(ridge, known is None), ridge_main)
        share = np.concatenate([np.full(sum(groups), c / len(groups)) for groups, c in zip(fit.sizes, intercept)])
        values.append((main[:-1] + share) * scale)
        parts.append(fit.canonical(factors) * np.sqrt(scale))
    return LegModel(bias, np.column_stack(values), np.stack(parts, axis=1))


@dataclass(frozen=True, eq=False)
class _Fit:
    """Labelled products by leg. Arrays of factors have one row more than there are legs: zeros, which leg -1 means."""

    sizes: tuple[tuple[int, ...], ...]
    reaction: NDArray[np.int64]  # [n]
    legs: NDArray[np.int64]  # [n, G], -1 where a reaction has no such R-group
    y: FloatArray  # [n, M]
    rank: int
    iterations: int

    @classmethod
    def of(
        cls,
        sizes: Sequence[Sequence[int]],
        reaction: ArrayLike,
        synthons: ArrayLike,
        y: ArrayLike,
        field: str,
        rank: int,
        iterations: int,
    ) -> _Fit:
        if rank > MAX_RANK:
            raise FieldError("rank", f"{rank} given; at most {MAX_RANK}")
        if iterations < 1:
            raise FieldError("iterations", f"{iterations} given; at least 1")
        r, s = checked_products(sizes, reaction, synthons)
        labels = np.asarray(y, np.float64)
        if labels.ndim != 2 or len(labels) != len(r) or 0 in labels.shape:
            raise FieldError(
                field, f"shape {list(labels.shape)} given; [{len(r)}, properties] expected, 1 row at least"
            )
        if not np.isfinite(labels).all():
            raise FieldError(f"{field}[{np.argwhere(~np.isfinite(labels))[0, 0]}]", "holds a number that is not finite")
        groups = max(len(groups) for groups in sizes)
        legs = np.where(s >= 0, leg_offsets(sizes)[r] + s, -1)[:, :groups]
        return cls(tuple(map(tuple, sizes)), r, legs, labels, rank, iterations)

    @property
    def legs_total(self) -> int:
        return sum(map(sum, self.sizes))

    @staticmethod
    def check(**penalties: float) -> None:
        for name, penalty in penalties.items():
            if not 0 < penalty < np.inf:
                raise FieldError(name, f"{penalty} given; a positive number")

    def penalties(self, ridge: float, cold: bool) -> list[float]:
        """Penalty of each round."""
        return [max(ridge, first) for first in _FIRST_PENALTIES if cold] + [ridge] * self.iterations

    def start(self, j: int, seed: int, init: FloatArray | None) -> FloatArray:
        """Factors [L + 1, 4, q] to start property j from: random for labelled legs that `init` knows nothing of."""
        deviation = (_START / max(self.rank, 1)) ** 0.25
        shape = (self.legs_total, MAX_RGROUPS, self.rank)
        factors = deviation * Streams(seed).normal("apex.interactions.start", j, shape=shape)
        if init is not None:
            if init.shape != shape:
                raise FieldError("init", f"factors {list(init.shape)} of a property; {list(shape)} expected")
            known = init.any(axis=(1, 2))
            factors[known] = init[known]
        labelled = np.zeros((self.legs_total, MAX_RGROUPS), bool)
        for g, own in enumerate(self.legs.T):
            for h, other in enumerate(self.legs.T):
                labelled[own[(own >= 0) & (other >= 0)], h] |= g != h
        factors[~labelled] = 0.0
        return np.concatenate([factors, np.zeros((1, *shape[1:]))])

    def descend(
        self,
        y: FloatArray,
        factors: FloatArray,
        main: FloatArray | None,
        intercept: FloatArray | None,
        penalties: Sequence[float],
        ridge_main: float,
    ) -> None:
        """One round over the R-groups for each penalty; changes `factors` [L + 1, 4, q], `main` [L + 1] and
        `intercept` [R] in place."""
        groups = range(self.legs.shape[1])
        by_leg = [_ByLeg.of(self.legs[:, g]) for g in groups]
        width = factors.shape[2]
        residual = y - self._predict(factors, main, intercept)
        for ridge in penalties:
            penalty = np.concatenate([[ridge_main] * (main is not None), np.full((len(groups) - 1) * width, ridge)])
            if intercept is not None:
                count = np.maximum(np.bincount(self.reaction, minlength=len(intercept)), 1)
                change = np.bincount(self.reaction, residual, len(intercept)) / count
                intercept += change
                residual -= change[self.reaction]
            for g in groups:
                others = np.array([h for h in groups if h != g])
                rows, legs = by_leg[g].rows, by_leg[g].legs
                shown = [factors[self.legs[rows, h], g] for h in others]  # of what the partners show to R-group g
                ones = [np.ones((len(rows), 1))] if main is not None else []
                x = np.concatenate([*ones, *shown], axis=1)
                own = [main[legs, None]] if main is not None else []
                old = np.concatenate([*own, factors[legs][:, others].reshape(len(legs), -1)], axis=1)
                target = residual[rows] + np.einsum("nd,nd->n", x, np.repeat(old, by_leg[g].counts, axis=0))
                new = by_leg[g].solve(x, target, penalty)
                residual[rows] = target - np.einsum("nd,nd->n", x, np.repeat(new, by_leg[g].counts, axis=0))
                if main is not None:
                    main[legs], new = new[:, 0], new[:, 1:]
                factors[np.ix_(legs, others)] = new.reshape(len(legs), len(others), width)

    def _predict(self, factors: FloatArray, main: FloatArray | None, intercept: FloatArray | None) -> FloatArray:
        total = np.zeros(len(self.legs))
        if intercept is not None:
            total += intercept[self.reaction]
        for h in range(self.legs.shape[1]):
            if main is not None:
                total += main[self.legs[:, h]]
            for g in range(h):
                total += np.einsum("nq,nq->n", factors[self.legs[:, g], h], factors[self.legs[:, h], g])
        return total

    def canonical(self, factors: FloatArray) -> FloatArray:
        """The same pair terms in principal axes, both sides of equal size: bounds by axes are tightest there."""
        result = np.zeros_like(factors[:-1])
        for starts, groups in zip(leg_offsets(self.sizes), self.sizes):
            for h in range(len(groups)):
                for g in range(h if self.rank else 0):
                    first, second = slice(starts[g], starts[g] + groups[g]), slice(starts[h], starts[h] + groups[h])
                    if not (factors[first, h].any() and factors[second, g].any()):
                        continue
                    q1, r1 = np.linalg.qr(factors[first, h])
                    q2, r2 = np.linalg.qr(factors[second, g])
                    u, size, v = np.linalg.svd(r1 @ r2.T, full_matrices=False)
                    kept = len(size)
                    result[first, h, :kept] = q1 @ u * np.sqrt(size)
                    result[second, g, :kept] = q2 @ v.T * np.sqrt(size)
        return result


@dataclass(frozen=True, eq=False)
class _ByLeg:
    """Products sorted by their leg in one R-group."""

    rows: NDArray[np.int64]  # of the products that have the R-group, sorted by leg
    legs: NDArray[np.int64]  # the distinct legs, ascending
    counts: NDArray[np.int64]  # products of each

    @classmethod
    def of(cls, legs: NDArray[np.int64]) -> _ByLeg:
        order = np.argsort(legs, kind="stable")
        order = order[legs[order] >= 0]
        distinct, counts = np.unique(legs[order], return_counts=True)
        return cls(order, distinct, counts)

    def solve(self, x: FloatArray, y: FloatArray, penalty: FloatArray) -> FloatArray:
        """Ridge coefficients [legs, d] of y [n] on x [n, d], rows sorted by leg; penalties [d]."""
        result = np.empty((len(self.legs), x.shape[1]))
        if not x.shape[1]:
            return result
        ends = np.cumsum(self.counts)
        first = 0
        while first < len(self.legs):
            start = ends[first] - self.counts[first]
            last = max(int(np.searchsorted(ends, start + _BLOCK, side="right")), first + 1)
            rows = slice(start, ends[last - 1])
            at = ends[first:last] - self.counts[first:last] - start
            gram = np.add.reduceat(x[rows, :, None] * x[rows, None, :], at, axis=0) + np.diag(penalty)
            moment = np.add.reduceat(x[rows] * y[rows, None], at, axis=0)
            result[first:last] = np.linalg.solve(gram, moment[:, :, None])[:, :, 0]
            first = last
        return result
