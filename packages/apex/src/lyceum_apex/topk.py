"""The k best products seen so far and the rank key that a newcomer has to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.contributions import MAX_RGROUPS
from lyceum_apex.kernels import Threshold

Key = Callable[[NDArray[np.intp]], NDArray[np.float64] | NDArray[np.int32]]
"""Values of one part of a rank key at the given positions; later parts are looked up for ties only."""


def smallest(count: int, total: int, keys: Sequence[Key]) -> NDArray[np.intp]:
    """Positions (in no order) of the `count` lexicographically smallest of `total` entries, in O(total)."""
    chosen: list[NDArray[np.intp]] = []
    rest = np.arange(total)
    for key in keys:
        if count >= len(rest) or count == 0:
            break
        values = key(rest)
        if values.min() == values.max():
            continue
        pivot = np.partition(values, count - 1)[count - 1]
        below = rest[values < pivot]
        chosen.append(below)
        count -= len(below)
        rest = rest[values == pivot]
    return np.concatenate([*chosen, rest[:count]])


def largest_one(total: int, keys: Sequence[Key]) -> int:
    """Position of the lexicographically largest entry."""
    rest = np.arange(total)
    for key in keys:
        values = key(rest)
        rest = rest[values == values.max()]
        if len(rest) == 1:
            break
    return int(rest[0])


class TopK:
    """Collects products and forgets all but the k best; an order of arrival never matters, because rank keys are
    distinct.

    key float64[n, 2] = (violation, signed objective); product int32[n, 5] = (reaction, synthon of each slot).
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.threshold = Threshold(np.inf, -np.inf, np.full(1 + MAX_RGROUPS, -1, dtype=np.int32))
        self._keys: list[NDArray[np.float64]] = []
        self._products: list[NDArray[np.int32]] = []
        self._count = 0
        self._compact_at = k

    def add(self, key: NDArray[np.float64], product: NDArray[np.int32]) -> None:
        """Arrays are copied."""
        if len(key) == 0:
            return
        self._keys.append(key.copy())
        self._products.append(product.copy())
        self._count += len(key)
        if self._count >= self._compact_at:
            self._compact()

    def result(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Keys and products of the at most k best, in no order."""
        self._compact()
        return self._keys[0], self._products[0]

    def _compact(self) -> None:
        key = np.concatenate([np.empty((0, 2)), *self._keys])
        product = np.concatenate([np.empty((0, 1 + MAX_RGROUPS), dtype=np.int32), *self._products])
        if len(key) >= self.k:
            best = smallest(self.k, len(key), rank_keys(key, product))
            key, product = key.take(best, axis=0), product.take(best, axis=0)
            last = largest_one(self.k, rank_keys(key, product))
            self.threshold = Threshold(float(key[last, 0]), float(key[last, 1]), product[last].copy())
            self._compact_at = 2 * self.k
        self._keys, self._products, self._count = [key], [product], len(key)


def rank_keys(key: NDArray[np.float64], product: NDArray[np.int32]) -> list[Key]:
    """The parts of the rank key, most important first."""
    return [lambda at: key[at, 0], lambda at: -key[at, 1], *(_column(product, c) for c in range(product.shape[1]))]


def _column(array: NDArray[np.int32], column: int) -> Key:
    return lambda at: array[at, column]
