"""The contribution table: what a factorised surrogate knows about a combinatorial library.

A *leg* is a triple (reaction r, R-group g, synthon s); every property i of a product x = (r, s_1..s_G) is f_i(x) =
b_i + sum_g w_i[r, g, s_g] (Pedawi et al. 2025, arXiv 2510.24380, section 3).  The table holds `w` as one row a leg
(legs contiguous in the order reaction, R-group, synthon), the biases `b` and the scales `sigma_i` that make
violations of different properties comparable.  Beyond the paper, a property may have low-rank `Interactions`: one
inner product for each pair of R-groups.

Sums are always formed in one order, in float64: ((b + w_1) + w_2) + ..., and right after w_g the pair terms of leg g
with legs 1..g-1, one product of two factors at a time.  Scores, both search engines and the counter then agree bit
for bit, ties included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_RGROUPS = 4
MAX_MAGNITUDE = 1e100  # sums and scaled violations of such numbers stay finite
MAX_FACTOR = 1e50  # and so do products of two such numbers
MAX_RANK = 64


@dataclass(frozen=True, eq=False)
class Interactions:
    """Low-rank pair terms: property names[j] gains sum over R-groups g < h of <factors[l, j, h], factors[m, j, g]>,
    where l is the leg in R-group g and m the leg in R-group h.

    Args:
        names: M >= 1 distinct properties of the table.
        factors: float64[L, M, 4, q], 1 <= q <= 64: what leg l shows to each of the R-groups; zero for its own R-group
            and for R-groups that its reaction lacks.

    Raises:
        ValueError: a shape or a number does not fit; the message starts with the argument's name.
    """

    names: tuple[str, ...]
    factors: NDArray[np.float64]

    def __post_init__(self) -> None:
        names = tuple(self.names)
        if not names or len(set(names)) != len(names):
            raise ValueError(f"interactions.names: {names!r}; give at least one name, all distinct")
        factors = np.array(self.factors, dtype=np.float64, order="C")
        if factors.ndim != 4 or factors.shape[1:3] != (len(names), MAX_RGROUPS):
            raise ValueError(
                f"interactions.factors: shape {factors.shape}; expected (legs, {len(names)}, {MAX_RGROUPS}, rank)"
            )
        if not 1 <= factors.shape[3] <= MAX_RANK:
            raise ValueError(f"interactions.factors: rank {factors.shape[3]}; a rank is 1 to {MAX_RANK}")
        if not (np.abs(factors) <= MAX_FACTOR).all():
            raise ValueError(f"interactions.factors: holds a number that is not finite or above {MAX_FACTOR:g} in size")
        factors.flags.writeable = False
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "factors", factors)

    @property
    def rank(self) -> int:
        return int(self.factors.shape[3])

    def of(self, names: Sequence[str]) -> Interactions | None:
        """The pair terms of these properties only, in this object's order; None when none of them has any."""
        kept = [j for j, name in enumerate(self.names) if name in names]
        if not kept:
            return None
        return Interactions(tuple(self.names[j] for j in kept), self.factors[:, kept])


@dataclass(frozen=True, eq=False)
class ContributionTable:
    """Leg contributions of every property.

    Args:
        sizes: `sizes[r][g]` = number of synthons of R-group g of reaction r; 2 to 4 R-groups a reaction.
        values: float64[L, P], one row a leg.
        bias: float64[P].
        scale: float64[P], the training standard deviation sigma_i > 0 of each property.
        names: P distinct property names.
        available: bool[L] or None; legs marked False (out of stock) never appear in a product.
        interactions: pair terms of some of the properties, or None.

    Raises:
        ValueError: a shape, a number or a name does not fit; the message starts with the argument's name.
    """

    sizes: tuple[tuple[int, ...], ...]
    values: NDArray[np.float64]
    bias: NDArray[np.float64]
    scale: NDArray[np.float64]
    names: tuple[str, ...]
    available: NDArray[np.bool_] | None = None
    interactions: Interactions | None = None

    def __post_init__(self) -> None:
        sizes = tuple(tuple(int(n) for n in groups) for groups in self.sizes)
        names = tuple(self.names)
        if not sizes:
            raise ValueError("sizes: a library needs at least one reaction")
        for r, groups in enumerate(sizes):
            if not 2 <= len(groups) <= MAX_RGROUPS:
                raise ValueError(f"sizes[{r}]: {len(groups)} R-groups; a reaction has 2 to {MAX_RGROUPS}")
            if min(groups) < 1:
                raise ValueError(f"sizes[{r}]: R-group {groups.index(min(groups))} is empty; give at least one synthon")
        if not names or len(set(names)) != len(names) or not all(names):
            raise ValueError(f"names: {names!r}; give at least one name, all distinct and not empty")
        legs = sum(map(sum, sizes))
        for field, value, shape in (
            ("values", self.values, (legs, len(names))),
            ("bias", self.bias, (len(names),)),
            ("scale", self.scale, (len(names),)),
        ):
            array = np.array(value, dtype=np.float64, order="C")
            if array.shape != shape:
                raise ValueError(f"{field}: shape {array.shape}; expected {shape} (legs, properties)")
            if not (np.abs(array) <= MAX_MAGNITUDE).all():
                raise ValueError(f"{field}: holds a number that is not finite or above {MAX_MAGNITUDE:g} in magnitude")
            array.flags.writeable = False
            object.__setattr__(self, field, array)
        if (self.scale < 1 / MAX_MAGNITUDE).any():
            worst = int(np.argmin(self.scale))
            raise ValueError(f"scale[{worst}]: {self.scale[worst]} ({names[worst]}); a scale is positive")
        if self.available is not None:
            mask = np.array(self.available)
            if mask.dtype != np.bool_ or mask.shape != (legs,):
                raise ValueError(f"available: {mask.dtype}{mask.shape}; expected bool({legs},)")
            mask.flags.writeable = False
            object.__setattr__(self, "available", mask)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "names", names)
        if self.interactions is not None:
            self._check_interactions(self.interactions)

    def _check_interactions(self, interactions: Interactions) -> None:
        unknown = [name for name in interactions.names if name not in self.names]
        if unknown:
            raise ValueError(f"interactions.names: {unknown[0]!r} is not a property: {', '.join(self.names)}")
        if len(interactions.factors) != self.leg_count:
            raise ValueError(f"interactions.factors: {len(interactions.factors)} legs; expected {self.leg_count}")
        shown = interactions.factors.any(axis=(1, 3)) & ~self.partners
        if shown.any():
            leg, group = np.argwhere(shown)[0]
            raise ValueError(
                f"interactions.factors[{leg}]: not zero for R-group {group}, the leg's own or missing in its reaction"
            )

    @property
    def reaction_count(self) -> int:
        return len(self.sizes)

    @property
    def leg_count(self) -> int:
        return len(self.values)

    @property
    def product_count(self) -> int:
        """N, out-of-stock legs included: a Python int, because libraries exceed 2**63 products."""
        return sum(prod(groups) for groups in self.sizes)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """int64[R, 4]: row of the first leg of each R-group, -1 where a reaction has fewer R-groups."""
        return leg_offsets(self.sizes)

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """int64[L]: R-group of each leg."""
        return np.concatenate([np.repeat(np.arange(len(sizes)), sizes) for sizes in self.sizes])

    @cached_property
    def partners(self) -> NDArray[np.bool_]:
        """bool[L, 4]: the R-groups that a leg's reaction has, without the leg's own."""
        counts = np.concatenate([np.full(sum(sizes), len(sizes)) for sizes in self.sizes])
        groups = np.arange(MAX_RGROUPS)
        partners: NDArray[np.bool_] = (groups < counts[:, None]) & (groups != self.groups[:, None])
        return partners

    def with_columns(
        self, names: Sequence[str], values: ArrayLike, scale: ArrayLike | None = None
    ) -> ContributionTable:
        """Append exactly additive columns (mass, price, stock counts) with bias 0.

        Args:
            names: new property names.
            values: [L, len(names)], or [L] for one name.
            scale: sigma of each new column; by default the standard deviation over legs (1 for a constant column).
        """
        legs = np.asarray(values, dtype=np.float64)
        legs = legs.reshape(len(legs), -1)
        if legs.shape != (self.leg_count, len(names)):
            raise ValueError(f"values: shape {legs.shape}; expected {(self.leg_count, len(names))} (legs, new columns)")
        if scale is None:
            deviation = legs.std(axis=0)
            scale = np.where(legs.max(axis=0) > legs.min(axis=0), deviation, 1.0)
        return replace(
            self,
            values=np.concatenate([self.values, legs], axis=1),
            bias=np.concatenate([self.bias, np.zeros(len(names))]),
            scale=np.concatenate([self.scale, np.asarray(scale, dtype=np.float64).reshape(-1)]),
            names=(*self.names, *names),
        )

    def with_availability(self, available: NDArray[np.bool_] | None) -> ContributionTable:
        """The same table with another stock mask; contributions do not move."""
        return replace(self, available=available)


def leg_offsets(sizes: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """int64[R, 4]: row of the first leg of each R-group, -1 where a reaction has fewer R-groups."""
    offsets = np.full((len(sizes), MAX_RGROUPS), -1, dtype=np.int64)
    start = 0
    for r, groups in enumerate(sizes):
        for g, size in enumerate(groups):
            offsets[r, g] = start
            start += size
    return offsets


def score(table: ContributionTable, reaction: ArrayLike, synthons: ArrayLike) -> NDArray[np.float64]:
    """Properties float64[n, P] of products given as reaction int[n] and synthons int[n, 4] (-1 = no such R-group).

    Raises:
        ValueError: an index is out of range or the padding does not match the reaction; names the row.
    """
    r, s = checked_products(table.sizes, reaction, synthons)
    total = np.repeat(table.bias[None, :], len(r), axis=0)
    legs = table.offsets[r] + s
    for g in range(MAX_RGROUPS):
        rows = np.flatnonzero(table.offsets[r, g] >= 0)
        total[rows] += table.values[legs[rows, g]]
        if table.interactions is not None:
            _add_pairs(table, table.interactions, legs[rows], g, total, rows)
    return total


def _add_pairs(
    table: ContributionTable,
    interactions: Interactions,
    legs: NDArray[np.int64],
    g: int,
    total: NDArray[np.float64],
    rows: NDArray[np.intp],
) -> None:
    """Add to total[rows] the pair terms of the legs in R-group g with those in R-groups 0..g-1; legs int64[rows, 4]."""
    at = np.ix_(rows, np.array([table.names.index(name) for name in interactions.names]))
    for h in range(g):
        earlier = interactions.factors[legs[:, h], :, g]
        later = interactions.factors[legs[:, g], :, h]
        for k in range(interactions.rank):
            total[at] += earlier[:, :, k] * later[:, :, k]


@dataclass(frozen=True, eq=False)
class Explanation:
    """Where a product's score comes from: score = bias + legs.sum(0) + pairs.sum((0, 1)), up to rounding.

    legs float64[G, P]: what each leg adds by itself.  pairs float64[G, G, P]: what the legs in R-groups g < h add
    together, at [g, h]; 0 elsewhere.
    """

    legs: NDArray[np.float64]
    pairs: NDArray[np.float64]


def explain(table: ContributionTable, reaction: int, synthons: Sequence[int]) -> Explanation:
    """The contributions of the legs of one product, and of their pairs. Raises ValueError as `score`."""
    padded = [*synthons, *([-1] * (MAX_RGROUPS - len(synthons)))]
    r, s = checked_products(table.sizes, [reaction], [padded])
    groups = len(table.sizes[reaction])
    legs = table.offsets[r[0], :groups] + s[0, :groups]
    pairs = np.zeros((groups, groups, len(table.names)))
    if table.interactions is not None:
        columns = [table.names.index(name) for name in table.interactions.names]
        factors = table.interactions.factors[legs][:, :, :groups]  # [G, M, G, q]
        together = np.einsum("gmhq,hmgq->ghm", factors, factors)
        pairs[:, :, columns] = np.where(np.triu(np.ones((groups, groups)), 1)[:, :, None] > 0, together, 0.0)
    return Explanation(table.values[legs], pairs)


def checked_products(
    sizes: Sequence[Sequence[int]], reaction: ArrayLike, synthons: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """reaction int64[n] and synthons int64[n, 4] of a library of these sizes. Raises ValueError as `score`."""
    r = np.asarray(reaction).reshape(-1)
    s = np.asarray(synthons)
    if s.shape != (len(r), MAX_RGROUPS) or (r.size and not (r.dtype.kind in "iu" and s.dtype.kind in "iu")):
        raise ValueError(f"synthons: {s.dtype}{s.shape}; expected integers of shape ({len(r)}, {MAX_RGROUPS})")
    r, s = r.astype(np.int64), s.astype(np.int64)
    wrong = np.flatnonzero((r < 0) | (r >= len(sizes)))
    if wrong.size:
        raise ValueError(f"reaction[{wrong[0]}]: {r[wrong[0]]}; the library has {len(sizes)} reactions")
    limits = np.zeros((len(sizes), MAX_RGROUPS), dtype=np.int64)
    for index, groups in enumerate(sizes):
        limits[index, : len(groups)] = groups
    limit = limits[r]
    row, g = np.nonzero(np.where(limit > 0, (s < 0) | (s >= limit), s != -1))
    if row.size:
        raise ValueError(
            f"synthons[{row[0]}]: R-group {g[0]} has index {s[row[0], g[0]]}; reaction {r[row[0]]} has "
            f"{limit[row[0], g[0]]} synthons there (-1 pads a missing R-group)"
        )
    return r, s
