"""What is asked of a library and what comes back.

Products are ranked lexicographically: first by slack, s(x) = -sum_i [relu(l_i - f_i(x)) + relu(f_i(x) - u_i)] / sigma_i
(0 when every constraint holds), then by the objective, then by (reaction, synthon indices) ascending.  If fewer than k
products are feasible the least-violating ones therefore fill the list.

`Problem` is the query as columns: column 0 is the objective, signed so that larger is better, the others are the
constrained properties.  Negation and the order of additions commute exactly in floating point, so minimising equals
maximising the negated column to the last bit; a weighted objective is one column, weighted leg by leg.  Its pair terms
are those of its properties side by side, each weighted on the earlier leg: a sum of low-rank terms is one of the summed
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.contributions import MAX_MAGNITUDE, MAX_RGROUPS, ContributionTable, score
from lyceum_apex.errors import FieldError
from lyceum_apex.pairs import Factors, joined, weighted

Bounds = tuple[float | None, float | None]
Engine = Literal["pruned", "brute", "triton"]


class QueryError(FieldError):
    """A query that cannot be answered; `field` is the path of the culprit, e.g. `constraints[logp].lower`."""


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """Diversity: a product is passed over if a synthon of its (one of its reaction's R-group), or its reaction, has
    been taken so often. None for no limit. Raises QueryError."""

    max_per_synthon: int | None = None
    max_per_reaction: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_per_synthon", "max_per_reaction"):
            most = getattr(self, name)
            if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
                raise QueryError(f"quotas.{name}", f"{most!r}; a quota is an integer of at least 1, or None")


@dataclass(frozen=True, kw_only=True)
class Query:
    """The k best products for an objective under constraints.

    Args:
        objective: a property name, or weights by property name (weights may be negative).
        maximize: whether large objectives are good.
        k: number of products wanted, at least 1; a library with fewer products returns them all.
        constraints: (lower, upper) by property name, each end inclusive and None when open.
        engine: `pruned` skips blocks that provably hold no hit, `brute` scans all, `triton` is for a GPU; the answers
            are identical.
        quotas: limits on hits with the same synthon or reaction: see `lyceum_apex.quotas`.

    Raises:
        QueryError: on construction for numbers that make no sense; unknown names are found when a table is at hand.
    """

    objective: str | Mapping[str, float]
    k: int
    maximize: bool = True
    constraints: Mapping[str, Bounds] = field(default_factory=dict)
    engine: Engine = "pruned"
    quotas: Quotas | None = None

    def __post_init__(self) -> None:
        if not self.weights:
            raise QueryError("objective", "is empty; name a property or give at least one weight")
        for name, weight in self.weights.items():
            if not abs(weight) <= MAX_MAGNITUDE:
                raise QueryError(
                    f"objective[{name}]", f"weight {weight}; a weight is at most {MAX_MAGNITUDE:g} in size"
                )
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise QueryError("k", f"{self.k!r}; k is an integer of at least 1")
        if self.engine not in get_args(Engine):
            raise QueryError("engine", f"{self.engine!r}; engines are {', '.join(map(repr, get_args(Engine)))}")
        check_constraints(self.constraints)

    @property
    def weights(self) -> dict[str, float]:
        if isinstance(self.objective, str):
            return {self.objective: 1.0} if self.objective else {}
        return dict(self.objective)


def check_constraints(constraints: Mapping[str, Bounds]) -> None:
    """Raises QueryError for a NaN bound or a lower bound above the upper one."""
    for name, (lower, upper) in constraints.items():
        for end, bound in (("lower", lower), ("upper", upper)):
            if bound is not None and isnan(bound):
                raise QueryError(f"constraints[{name}].{end}", "is NaN; give a number or leave the end open")
            if bound is not None and MAX_MAGNITUDE < abs(bound) < np.inf:
                raise QueryError(f"constraints[{name}].{end}", f"{bound}; beyond {MAX_MAGNITUDE:g} leave the end open")
        if lower is not None and upper is not None and lower > upper:
            raise QueryError(f"constraints[{name}].lower", f"{lower} is above the upper bound {upper}; swap the bounds")
        if lower == np.inf:
            raise QueryError(f"constraints[{name}].lower", "is +inf, which no product reaches; leave the end open")
        if upper == -np.inf:
            raise QueryError(f"constraints[{name}].upper", "is -inf, which no product reaches; leave the end open")


@dataclass(frozen=True, eq=False)
class Problem:
    """A query against a table as C columns: 0 is the signed objective, the rest are constrained properties.

    values float64[L, C]; bias, lower, upper, weight (= 1/sigma) float64[C].  `lower` and `upper` of column 0 are open.
    `factors` are by leg and R-group; None when no column has pair terms.
    """

    values: NDArray[np.float64]
    bias: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    weight: NDArray[np.float64]
    sign: float
    factors: Factors | None


def make_problem(
    table: ContributionTable, weights: Mapping[str, float], maximize: bool, constraints: Mapping[str, Bounds]
) -> Problem:
    """Raises QueryError for a property the table does not have."""
    objective_values, objective_bias = np.zeros(table.leg_count), 0.0
    for name, weight in weights.items():
        column = _column(table, name, f"objective[{name}]")
        objective_values = objective_values + weight * table.values[:, column]
        objective_bias = objective_bias + weight * float(table.bias[column])
    sign = 1.0 if maximize else -1.0
    columns = sorted(_column(table, name, f"constraints[{name}]") for name in constraints)
    bounds = [constraints[table.names[c]] for c in columns]
    return Problem(
        values=np.column_stack([sign * objective_values, table.values[:, columns]]),
        bias=np.concatenate([[sign * objective_bias], table.bias[columns]]),
        lower=np.array([-np.inf] + [-np.inf if low is None else low for low, _ in bounds], dtype=np.float64),
        upper=np.array([np.inf] + [np.inf if high is None else high for _, high in bounds], dtype=np.float64),
        weight=np.concatenate([[0.0], 1.0 / table.scale[columns]]),
        sign=sign,
        factors=_factors(table, {name: sign * weight for name, weight in weights.items()}, columns),
    )


def _factors(table: ContributionTable, weights: Mapping[str, float], columns: list[int]) -> Factors | None:
    """Pair terms of the objective, then of each constrained column."""
    interactions = table.interactions
    if interactions is None:
        return None

    def of(name: str) -> NDArray[np.float64]:
        if name not in interactions.names:
            return np.zeros((table.leg_count, MAX_RGROUPS, 0))
        return interactions.factors[:, interactions.names.index(name)]

    objective = weighted([of(name) for name in weights], list(weights.values()), table.groups)
    return joined([objective, *(of(table.names[c]) for c in columns)])


def slack(
    table: ContributionTable, properties: NDArray[np.float64], constraints: Mapping[str, Bounds]
) -> NDArray[np.float64]:
    """Slack float64[n] of products whose properties float64[n, P] come from `score`; 0 where all constraints hold."""
    check_constraints(constraints)
    violation = np.zeros(len(properties))
    for column, name in sorted((_column(table, name, f"constraints[{name}]"), name) for name in constraints):
        lower, upper = constraints[name]
        value = properties[:, column]
        below = np.maximum((-np.inf if lower is None else lower) - value, 0.0)
        above = np.maximum(value - (np.inf if upper is None else upper), 0.0)
        violation = violation + (below + above) * (1.0 / table.scale[column])
    return 0.0 - violation


def _column(table: ContributionTable, name: str, path: str) -> int:
    if name not in table.names:
        raise QueryError(path, f"unknown property {name!r}; this index has {', '.join(table.names)}")
    return table.names.index(name)


@dataclass(frozen=True)
class SearchStats:
    """What a search cost.  `threshold` is the objective of the last hit (NaN when there is none)."""

    products_total: int
    products_touched: int
    block_pairs_total: int
    block_pairs_visited: int
    threshold: float
    seconds: float


@dataclass(frozen=True)
class SearchProgress:
    """A running search: the current k-th objective is None until k feasible products are known."""

    products_touched: int
    blocks_visited: int
    blocks_pending: int
    threshold: float | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Hits:
    """Ranked products, best first.

    reaction int32[n], synthons int32[n, 4] (-1 pads), objective and slack float64[n], properties float64[n,
    len(names)] of every queried property.  `complete` is False when the time limit ended the search: the list is then
    the best seen so far.
    """

    reaction: NDArray[np.int32]
    synthons: NDArray[np.int32]
    objective: NDArray[np.float64]
    slack: NDArray[np.float64]
    properties: NDArray[np.float64]
    names: tuple[str, ...]
    complete: bool
    stats: SearchStats

    def __len__(self) -> int:
        return len(self.reaction)


def rank(
    violation: NDArray[np.float64], signed_objective: NDArray[np.float64], products: NDArray[np.int32]
) -> NDArray[np.intp]:
    """Order of products: violation ascending, objective descending, then product indices int32[n, 1 + 4] ascending."""
    keys = [products[:, c] for c in range(products.shape[1] - 1, -1, -1)] + [-signed_objective, violation]
    varying = [key for key in keys if len(key) and key.min() != key.max()]
    return np.lexsort(varying) if varying else np.arange(len(violation))


def queried_properties(
    table: ContributionTable, query: Query, reaction: NDArray[np.int32], synthons: NDArray[np.int32]
) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Names, in the table's order, and values [n, names] of the properties that the query mentions."""
    names = tuple(name for name in table.names if name in query.weights or name in query.constraints)
    columns = [table.names.index(name) for name in names]
    narrow = ContributionTable(
        table.sizes,
        table.values[:, columns],
        table.bias[columns],
        table.scale[columns],
        names,
        interactions=None if table.interactions is None else table.interactions.of(names),
    )
    return names, score(narrow, reaction, synthons)
