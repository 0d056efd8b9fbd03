"""One more column that makes bounds tight when constraints fight the objective.

For multipliers x_j >= 0 of the constraints g_j >= 0 (g = u - f or f - l), every feasible product has
objective <= objective + sum_j x_j g_j, which is additive over legs as well: the *dual column*.  A block's box of
ranges forgets how properties hang together (large molecules dock well and are heavy); the dual column remembers, so
its maximum over a block bounds the objective of feasible products far better than the objective's own.  The pair terms
of a weighted sum are pair terms again, so the same holds with interactions.  Any x is
valid; a good one minimises the Chernoff bound on the k-th best feasible objective,

    T_k <= min over tau > 0, x >= 0 of  tau (log sum_products exp((objective + sum_j x_j g_j) / tau) - log k),

a convex problem whose sum factorises over R-groups.  It is solved on a sample of legs: x has to be good, not exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from lyceum_apex.forest import Spans
from lyceum_apex.kernels import Columns
from lyceum_apex.pairs import joined, weighted

_SAMPLE = 1 << 13  # legs in all, spread evenly over R-groups
_LEAST_SAMPLE = 64  # legs an R-group
_MOST_REACTIONS = 256
_STEPS = 25
_LARGEST = 30.0  # multipliers in units of spread of objective / spread of property; infeasible problems would go beyond


def with_dual_column(spans: Spans, columns: Columns, reactions: NDArray[np.int32], k: int) -> tuple[Spans, Columns]:
    """Append the dual column to the legs and its bias to `columns.bias`, if some constraint is worth it.

    The bias includes a margin above the rounding error of all sums involved: the bound holds for rounded products.
    """
    upper, lower = np.isfinite(columns.upper), np.isfinite(columns.lower)
    at = np.concatenate([np.flatnonzero(upper), np.flatnonzero(lower)])  # constrained column of each bound
    side = np.concatenate([np.ones(upper.sum()), -np.ones(lower.sum())])
    bound = np.concatenate([columns.upper[upper], columns.lower[lower]])
    spread = spans.legs.std(axis=0)
    if len(at) == 0 or len(reactions) == 0 or not 0 < spread[0] < np.inf:
        return spans, columns
    multipliers = _multipliers(spans, columns, reactions, k, at, side, bound, spread)
    if not multipliers.any():
        return spans, columns
    weight = np.zeros(len(columns.bias))
    np.add.at(weight, at, -side * multipliers)
    weight[0] = 1.0
    size = np.zeros(len(columns.bias))
    np.add.at(size, at, multipliers)
    size[0] = 1.0
    largest = np.abs(columns.bias) + 4 * np.abs(spans.legs).max(axis=0)
    terms, factors = 2 * len(weight) + 16, spans.factors
    if factors is not None:
        used = np.flatnonzero(weight)
        parts = [factors.of(c) for c in range(factors.columns)]
        dual = weighted([parts[c] for c in used], weight[used].tolist(), spans.slots())
        if not np.abs(dual).max(initial=0.0) < 1e150:
            return spans, columns
        for c, part in enumerate(parts):
            largest[c] += 6 * part.shape[2] * float(np.abs(part).max(initial=0.0)) ** 2
        terms += 16 * dual.shape[2]
        factors = joined([*parts, dual])
    magnitude = float(size @ largest + multipliers @ np.abs(bound))
    if not np.isfinite(magnitude):
        return spans, columns
    margin = terms * 2.0**-52 * magnitude
    dual_bias = float(columns.bias @ weight + (multipliers * side) @ bound + margin)
    legs = np.column_stack([spans.legs, spans.legs @ weight])
    return spans._replace(legs=legs, factors=factors), columns._replace(bias=np.append(columns.bias, dual_bias))


def _multipliers(
    spans: Spans,
    columns: Columns,
    reactions: NDArray[np.int32],
    k: int,
    at: NDArray[np.intp],
    side: NDArray[np.float64],
    bound: NDArray[np.float64],
    spread: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Minimise the Chernoff bound; in units of the spreads, so that one step size fits all."""
    unit = np.divide(spread[0], spread[at], out=np.zeros(len(at)), where=spread[at] > 0)
    legs, log_weight = _sample(spans, reactions[:: -(-len(reactions) // _MOST_REACTIONS)])
    gain = (
        np.concatenate([legs[:, :, :1], -(unit * side) * legs[:, :, at]], axis=2) / spread[0]
    )  # [R * 4, m, 1 + bounds]
    constant = unit * side * (bound - columns.bias[at]) / spread[0]

    def chernoff(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        tau, x = np.exp(point[0]), np.append(1.0, point[1:])
        exponent = gain @ x / tau + log_weight
        top = exponent.max(axis=1, keepdims=True)
        share = np.exp(exponent - top)
        total = share.sum(axis=1, keepdims=True)
        by_reaction = (top + np.log(total)).reshape(-1, 4).sum(axis=1)
        highest = by_reaction.max()
        reaction_share = np.exp(by_reaction - highest)
        log_sum = highest + np.log(reaction_share.sum())
        reaction_share /= reaction_share.sum()
        mean = np.einsum("gm,gmb->gb", share / total, gain)
        mean = reaction_share @ mean.reshape(len(by_reaction), 4, -1).sum(axis=1)
        value = constant @ x[1:] + tau * (log_sum - np.log(k))
        slope = np.append(tau * (log_sum - np.log(k)) - mean @ x, constant + mean[1:])
        return float(value), slope

    start = np.append(np.log(0.3), np.full(len(at), 0.1))
    limits = [(-7.0, 5.0)] + [(0.0, _LARGEST)] * len(at)
    found = minimize(chernoff, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": _STEPS})
    x: NDArray[np.float64] = found.x[1:] * unit
    return np.where(found.x[1:] > 1e-3, x, 0.0)


def _sample(spans: Spans, reactions: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Legs [R * 4, m, C] of each slot at evenly spaced ranks of the objective; the log of how many each stands for."""
    slots = [(int(b), int(e)) for r in reactions for b, e in zip(spans.begin[r], spans.end[r])]
    most = max(_LEAST_SAMPLE, _SAMPLE // len(slots))
    most = min(most, max(end - begin for begin, end in slots))
    legs = np.zeros((len(slots), most, spans.legs.shape[1]))
    log_weight = np.full((len(slots), most), -np.inf)
    for i, (begin, end) in enumerate(slots):
        count = min(end - begin, most)
        rank = ((np.arange(count) + 0.5) * (end - begin) / count).astype(np.int64)
        legs[i, :count] = spans.legs[begin + np.argsort(spans.legs[begin:end, 0])[rank]]
        log_weight[i, :count] = np.log((end - begin) / count)
    return legs, log_weight
