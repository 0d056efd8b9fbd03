"""A Gaussian process over the products of a library whose posterior mean is a table of contributions.

What is unknown about a product is a sum of terms of its legs and of pairs of its legs.  With phi[l] the features of the
synthon at leg l, the covariance of two products with legs l_g and m_g is a sum, each kernel with its own variance, of

    reaction   [same reaction]
    shared     <sum_g phi[l_g], sum_g phi[m_g]>                                           in all reactions
    similar    sum_g <phi[l_g], phi[m_g]>                                                 from here on in one reaction
    own        sum_g [l_g = m_g]
    pairs      sum_{g<h} <phi[l_g], phi[m_g]> <phi[l_h], phi[m_h]>
    own pairs  sum_{g!=h} <phi[l_g], phi[m_g]> [l_h = m_h]

so a label teaches something about the same synthons, about similar ones, and about pairs of either.  The posterior mean
sum_i alpha_i k(x, x_i) is again such a sum: main effects and pair terms of rank 2 d, which the engines search exactly.
Variances come from the labels by restricted steps of Zhou, Hu, Qiao, Cho, "MM algorithms for variance components
models", JCGS 28 (2019) 350, equation 6; alpha from conjugate gradients, whose products with the covariance cost
O(n d^2) and never form it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve
from scipy.sparse import csr_matrix

from lyceum_apex.contributions import MAX_RGROUPS, leg_offsets
from lyceum_apex.interactions import LegModel
from lyceum_base import Streams

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

WIDTH = 32
"""Features of a synthon: pair terms have twice that rank, which is what a table holds."""
KERNELS = ("reaction", "shared", "similar", "own", "pairs", "own_pairs")

_VARIANCE_ROWS = 1000  # labels that the variances are estimated from: the cost is cubic in them
_VARIANCE_STEPS = 20
_SMALLEST = 1e-7  # of a variance, in units of that of the labels
_TOLERANCE = 1e-3  # of alpha: the residual, relative to the labels
_MAX_STEPS = 500


@dataclass(frozen=True, eq=False)
class Variances:
    """Variances float64[6] of `KERNELS`, and that of the noise: what no sum over pairs of legs explains."""

    kernels: FloatArray
    noise: float


def fit_process(
    sizes: Sequence[Sequence[int]],
    features: FloatArray,
    reaction: NDArray[np.integer],
    synthons: NDArray[np.integer],
    y: FloatArray,
    *,
    mean: float,
    streams: Streams,
    check: Callable[[], None] = lambda: None,
) -> tuple[LegModel, Variances]:
    """Posterior mean given labels y float64[n] of products int[n], int[n, 4], and the variances behind it.

    Args:
        sizes: synthons of each R-group of each reaction.
        features: phi, float64[L, d] with d <= `WIDTH`; all zeros leave only the kernels that know a leg by itself.
        mean: prior mean of every product.
        streams: key of the labels that the variances are estimated from.
        check: called between steps; raises to stop.
    """
    labels = _Labels(sizes, np.asarray(features), np.asarray(reaction, np.int64), np.asarray(synthons, np.int64))
    scale = float(np.sqrt(((y - mean) ** 2).mean())) or 1.0
    z = (y - mean) / scale
    rows = np.arange(len(z))
    if len(z) > _VARIANCE_ROWS:
        rows = np.sort(np.argsort(streams.uniform("apex.process.rows", shape=len(z)), kind="stable")[:_VARIANCE_ROWS])
    variances = _estimate(labels.take(rows).kernels(), z[rows], check)
    alpha = _solve(labels, variances, z, check)
    return labels.model(alpha * scale, variances.kernels, mean), variances


def _estimate(kernels: list[FloatArray], z: FloatArray, check: Callable[[], None]) -> Variances:
    """Variances that raise the likelihood of labels z [n] step by step, from equal shares for all kernels."""
    n = len(z)
    traces = np.array([np.trace(k) / n for k in kernels] + [1.0])
    present = traces > 0
    theta = np.where(present, 1.0 / (present.sum() * np.where(present, traces, 1.0)), 0.0)
    for _ in range(_VARIANCE_STEPS):
        check()
        covariance = np.zeros((n, n))
        for variance, kernel in zip(theta, kernels):
            covariance += variance * kernel
        covariance[np.diag_indices(n)] += theta[-1]
        inverse = cho_solve((np.linalg.cholesky(covariance), True), np.eye(n))
        alpha = inverse @ z
        quadratic = np.array([alpha @ k @ alpha for k in kernels] + [alpha @ alpha])
        trace = np.array([np.vdot(inverse, k) for k in kernels] + [np.trace(inverse)])
        theta = np.where(
            present, np.maximum(theta * np.sqrt(quadratic / np.where(present, trace, 1.0)), _SMALLEST), 0.0
        )
    return Variances(theta[:-1], float(theta[-1]))


def _solve(labels: _Labels, variances: Variances, z: FloatArray, check: Callable[[], None]) -> FloatArray:
    """alpha [n] = (K + noise)^-1 z by conjugate gradients (Hestenes and Stiefel 1952)."""
    alpha, residual = np.zeros_like(z), z.copy()
    direction, size = residual.copy(), float(residual @ residual)
    goal = _TOLERANCE**2 * size
    for _ in range(_MAX_STEPS):
        if size <= goal:
            break
        check()
        image = labels.multiply(direction, variances.kernels) + variances.noise * direction
        step = size / float(direction @ image)
        alpha += step * direction
        residual -= step * image
        size, before = float(residual @ residual), size
        direction = residual + size / before * direction
    return alpha


class _Labels:
    """Labelled products sorted into what each kernel sums over; rows stay in the caller's order."""

    def __init__(
        self, sizes: Sequence[Sequence[int]], features: FloatArray, reaction: IntArray, synthons: IntArray
    ) -> None:
        self.sizes = sizes
        self.features = features
        self.reaction = reaction
        self.synthons = synthons
        groups = max(map(len, sizes))
        self.legs = np.where(synthons >= 0, leg_offsets(sizes)[reaction] + synthons, -1)[:, :groups]
        self.phi = np.concatenate([features, np.zeros((1, features.shape[1]))])[self.legs.T]  # [G, n, d]
        self.total = self.phi.sum(axis=0)

    def take(self, rows: IntArray) -> _Labels:
        return _Labels(self.sizes, self.features, self.reaction[rows], self.synthons[rows])

    @cached_property
    def by_reaction(self) -> list[IntArray]:
        order = np.argsort(self.reaction, kind="stable")
        ends = np.cumsum(np.bincount(self.reaction, minlength=len(self.sizes)))
        return [rows for rows in np.split(order, ends[:-1]) if len(rows)]

    @cached_property
    def by_leg(self) -> list[csr_matrix]:
        """For each R-group the matrix [L + 1, n] that sums rows by leg; row -1 is empty."""
        matrices = []
        for own in self.legs.T:
            rows = np.flatnonzero(own >= 0)
            shape = (len(self.features) + 1, len(own))
            matrices.append(csr_matrix((np.ones(len(rows)), (own[rows], rows)), shape=shape))
        return matrices

    def parts(self) -> Iterator[tuple[IntArray, tuple[int, ...]]]:
        """Rows and R-groups of each reaction that has labels."""
        for rows in self.by_reaction:
            yield rows, tuple(range(len(self.sizes[self.reaction[rows[0]]])))

    def kernels(self) -> list[FloatArray]:
        """The matrices [n, n] of `KERNELS`; meant for few labels."""
        reaction = (self.reaction[:, None] == self.reaction).astype(np.float64)
        similar = [p @ p.T * reaction for p in self.phi]
        own = [((leg[:, None] == leg) & (leg >= 0)).astype(np.float64) for leg in self.legs.T]
        groups = range(len(own))
        zero = np.zeros_like(reaction)
        return [
            reaction,
            self.total @ self.total.T,
            sum(similar, zero),
            sum(own, zero),
            sum((similar[g] * similar[h] for g, h in combinations(groups, 2)), zero),
            sum((similar[g] * own[h] for g, h in permutations(groups, 2)), zero),
        ]

    def multiply(self, v: FloatArray, theta: FloatArray) -> FloatArray:
        """sum_k theta_k K_k v for v [n]."""
        reaction, shared, similar, own, pairs, own_pairs = theta
        result: FloatArray = shared * (self.total @ (self.total.T @ v))
        result += reaction * np.bincount(self.reaction, v)[self.reaction]
        for g, matrix in enumerate(self.by_leg):
            result += own * (matrix @ v)[self.legs[:, g]]
        for rows, groups in self.parts():
            phi, part = self.phi[:, rows], v[rows]
            change = np.zeros_like(part)
            for g in groups:
                change += similar * (phi[g] @ (phi[g].T @ part))
            for g, h in combinations(groups, 2):
                core = phi[g].T @ (part[:, None] * phi[h])
                change += pairs * np.einsum("nd,nd->n", phi[g] @ core, phi[h])
            result[rows] += change
        for g, h in permutations(range(len(self.by_leg)), 2):
            sums = self.by_leg[h] @ (v[:, None] * self.phi[g])
            result += own_pairs * np.einsum("nd,nd->n", sums[self.legs[:, h]], self.phi[g])
        return result

    def model(self, alpha: FloatArray, theta: FloatArray, mean: float) -> LegModel:
        """sum_i alpha_i k(x, x_i) + mean as main effects and pair terms."""
        reaction, shared, similar, own, pairs, own_pairs = theta
        width = self.features.shape[1]
        values = self.features @ (shared * (self.total.T @ alpha))
        factors = np.zeros((len(self.features), MAX_RGROUPS, 2 * width))
        sums = [[matrix @ (alpha[:, None] * phi) for phi in self.phi] for matrix in self.by_leg]
        for matrix in self.by_leg:
            values += own * (matrix @ alpha)[:-1]
        offsets = leg_offsets(self.sizes)
        for rows, groups in self.parts():
            r = self.reaction[rows[0]]
            span = [slice(offsets[r, g], offsets[r, g] + self.sizes[r][g]) for g in groups]
            phi, part = self.phi[:, rows], alpha[rows]
            values[span[0]] += reaction * part.sum()
            for g in groups:
                values[span[g]] += similar * (self.features[span[g]] @ (phi[g].T @ part))
            for g, h in combinations(groups, 2):
                core = phi[g].T @ (part[:, None] * phi[h])
                later = pairs * (self.features[span[h]] @ core.T) + own_pairs * sums[h][g][span[h]]
                first = np.concatenate([self.features[span[g]], own_pairs * sums[g][h][span[g]]], axis=1)
                second = np.concatenate([later, self.features[span[h]]], axis=1)
                factors[span[g], h], factors[span[h], g] = _balanced(first, second)
        return LegModel(np.array([mean]), values[:, None], factors[:, None])


def _balanced(first: FloatArray, second: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same products first @ second' in principal axes, both sides of equal size: an engine's bounds are tight."""
    q1, r1 = np.linalg.qr(first)
    q2, r2 = np.linalg.qr(second)
    u, size, v = np.linalg.svd(r1 @ r2.T, full_matrices=False)
    root = np.sqrt(size)
    result = np.zeros_like(first), np.zeros_like(second)
    result[0][:, : len(size)] = q1 @ u * root
    result[1][:, : len(size)] = q2 @ v.T * root
    return result
