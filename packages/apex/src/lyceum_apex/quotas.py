"""The k best products with at most so many from each synthon and each reaction.

Walk the ranked list of all products and keep a product unless one of its synthons, or its reaction, is exhausted:
kept as often as its quota allows.  The list is not walked product by product.  Once a synthon is exhausted every later
product with it is passed over, so it may as well be missing from the library.  Without the exhausted synthons the
ranked list begins with those kept products that have none of them, because all that was passed over did have one; the
walk goes on right behind them.  Hence a few searches of ever smaller libraries find what the walk keeps.

A synthon is meant as one of its reaction's R-group, so quotas act within reactions and shards of reactions merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lyceum_apex.contributions import ContributionTable
from lyceum_apex.query import Hits, Query, Quotas, SearchProgress, SearchStats

_NO_LIMIT = 2**62
_LEAST_AHEAD = 256  # products to walk in a round: a search of a few costs as much

Search = Callable[[ContributionTable, Query], Iterator[SearchProgress | Hits]]


def iter_within_quotas(
    table: ContributionTable, query: Query, quotas: Quotas, search: Search
) -> Iterator[SearchProgress | Hits]:
    """Progress, last the hits; `search` answers a query without quotas."""
    start = monotonic()
    walk = _Walk(table, quotas)
    parts: list[Hits] = []
    kept: list[NDArray[np.intp]] = []
    count, touched = 0, 0
    while True:
        behind = walk.found_again()
        wanted = behind + max(query.k - count, _LEAST_AHEAD)
        found: Hits | None = None
        rest = replace(query, k=wanted, quotas=None)
        for update in search(table.with_availability(walk.available), rest):
            if isinstance(update, Hits):
                found = update
            else:
                seconds = monotonic() - start
                # The k-th of all hits is not known before the last round.
                yield replace(
                    update, products_touched=touched + update.products_touched, threshold=None, seconds=seconds
                )
        assert found is not None  # a search ends with hits
        touched += found.stats.products_touched
        # A search cut short does not begin with the kept products: what it adds cannot be told.
        taken = walk.take(found, behind if found.complete or not behind else len(found), query.k - count)
        parts.append(found)
        kept.append(taken)
        count += len(taken)
        if count >= query.k or len(found) < wanted or not found.complete:
            break
    yield _joined(parts, kept, touched, monotonic() - start)


class _Walk:
    """What is used up, and what is kept."""

    def __init__(self, table: ContributionTable, quotas: Quotas) -> None:
        self._offsets = table.offsets
        self._legs_of = np.array([sum(groups) for groups in table.sizes])
        self._per_leg = quotas.max_per_synthon or _NO_LIMIT
        self._per_reaction = quotas.max_per_reaction or _NO_LIMIT
        self._used = np.zeros(table.leg_count, dtype=np.int64)
        self._used_of = np.zeros(table.reaction_count, dtype=np.int64)
        mask = table.available
        self.available = np.ones(table.leg_count, dtype=bool) if mask is None else mask.copy()
        self._kept = np.empty((0, table.offsets.shape[1]), dtype=np.int64)  # legs, -1 where there is none

    def found_again(self) -> int:
        """Kept products that a search of what is left finds first; the others are forgotten."""
        left = (self.available[self._kept] | (self._kept < 0)).all(axis=1)
        self._kept = self._kept[left]
        return len(self._kept)

    def take(self, found: Hits, begin: int, wanted: int) -> NDArray[np.intp]:
        """Positions of the hits from `begin` on that are kept, at most `wanted`."""
        legs = np.where(found.synthons >= 0, self._offsets[found.reaction] + found.synthons, -1)
        taken = np.empty(min(wanted, len(found)), dtype=np.intp)
        count = _take(
            legs,
            found.reaction,
            begin,
            self._per_leg,
            self._per_reaction,
            self._offsets[:, 0],
            self._legs_of,
            self._used,
            self._used_of,
            self.available,
            taken,
        )
        self._kept = np.concatenate([self._kept, legs[taken[:count]]])
        return taken[:count]


@njit(cache=True, nogil=True)
def _take(
    legs: Any,
    reaction: Any,
    begin: int,
    per_leg: int,
    per_reaction: int,
    first_leg: Any,
    legs_of: Any,
    used: Any,
    used_of: Any,
    available: Any,
    taken: Any,
) -> Any:
    """Walk the products from `begin` on, fill `taken`, and use up legs and reactions; returns the number taken."""
    count = 0
    for i in range(begin, len(legs)):
        if count == len(taken):
            break
        free = True
        for leg in legs[i]:
            free &= leg < 0 or available[leg]
        if not free:
            continue
        taken[count] = i
        count += 1
        for leg in legs[i]:
            if leg >= 0:
                used[leg] += 1
                available[leg] = used[leg] < per_leg
        r = reaction[i]
        used_of[r] += 1
        if used_of[r] >= per_reaction:
            available[first_leg[r] : first_leg[r] + legs_of[r]] = False
    return count


def _joined(parts: list[Hits], kept: list[NDArray[np.intp]], touched: int, seconds: float) -> Hits:
    reaction, synthons, objective, slack, properties = (
        np.concatenate([getattr(part, name)[rows] for part, rows in zip(parts, kept, strict=True)])
        for name in ("reaction", "synthons", "objective", "slack", "properties")
    )
    stats = SearchStats(
        products_total=parts[0].stats.products_total,
        products_touched=touched,
        block_pairs_total=sum(part.stats.block_pairs_total for part in parts),
        block_pairs_visited=sum(part.stats.block_pairs_visited for part in parts),
        threshold=float(objective[-1]) if len(objective) else float("nan"),
        seconds=seconds,
    )
    return Hits(reaction, synthons, objective, slack, properties, parts[0].names, parts[-1].complete, stats)
