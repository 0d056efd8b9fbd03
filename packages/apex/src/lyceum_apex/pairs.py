"""Pair terms of the queried columns, as one array of factors.

A pair term of column c is an inner product <p, q> over the dimensions that belong to c, p from the leg in the earlier
R-group and q from the one in the later.  A weighted sum of columns has the dimensions of all of them, p multiplied by
the weights: its rank is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.contributions import MAX_RGROUPS


class Factors(NamedTuple):
    """values float64[rows, 4, K]: what each leg shows to the legs of each R-group (or slot), zero where there is none.
    start int64[C + 1]: column c has dimensions start[c] .. start[c + 1]."""

    values: NDArray[np.float64]
    start: NDArray[np.int64]

    def of(self, column: int) -> NDArray[np.float64]:
        """float64[rows, 4, dimensions of the column]."""
        return self.values[:, :, self.start[column] : self.start[column + 1]]

    @property
    def columns(self) -> int:
        return len(self.start) - 1


def joined(parts: Sequence[NDArray[np.float64]]) -> Factors | None:
    """The factors of columns [rows, 4, K_c] as one; None when none of them has a dimension."""
    start = np.cumsum([0, *(part.shape[2] for part in parts)])
    return Factors(np.ascontiguousarray(np.concatenate(parts, axis=2)), start) if start[-1] else None


def weighted(
    parts: Sequence[NDArray[np.float64]], weights: Sequence[float], place: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The factors [rows, 4, sum of K_c] of a weighted sum of columns; `place` int64[rows] is each leg's R-group (or
    slot)."""
    earlier = (np.arange(MAX_RGROUPS) > place[:, None])[:, :, None]
    scaled = [np.where(earlier, weight * part, part) for part, weight in zip(parts, weights, strict=True)]
    return np.concatenate([np.zeros((len(place), MAX_RGROUPS, 0)), *scaled], axis=2)
