"""Randomness by name: a number depends on (seed, purpose, indices) and on nothing else.

`Streams(seed).normal("noise", step, row, shape=(d,))` gives the same numbers whenever and wherever it is called, so
work can be reordered, split over processes or resumed without carrying a generator's position. Each (purpose, indices)
keys its own Philox-4x64-10 counter generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011);
the key is BLAKE2b of seed, purpose and indices. Only raw 64-bit words are taken from NumPy: the mapping to numbers is
written here, because the methods of `numpy.random.Generator` may change between NumPy versions.
"""

from __future__ import annotations

import hashlib
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = int | tuple[int, ...]


@dataclass(frozen=True)
class Streams:
    """All random streams of one uint64 seed (0 is a seed like any other).

    `purpose` says what the numbers are for, `indices` (signed integers of up to 128 bits) which of them: step, row.
    Two calls with the same purpose and indices return the same numbers, so every independent use needs its own.
    A smaller `shape` returns the first numbers, in C order, of a larger one.

    Raises:
        ValueError: the seed is not in [0, 2**64).
    """

    seed: int

    def __post_init__(self) -> None:
        seed = operator.index(self.seed)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed} must be in [0, 2**64)")
        object.__setattr__(self, "seed", seed)

    def uniform(self, purpose: str, *indices: int, shape: Shape = ()) -> NDArray[np.float64]:
        """Uniform on the 2**53 multiples of 2**-53 in [0, 1): the top 53 bits of one word each."""
        words = self._philox(purpose, indices).random_raw(_count(shape))
        return (words >> np.uint64(11)).astype(np.float64).reshape(shape) * 2.0**-53

    def normal(self, purpose: str, *indices: int, shape: Shape = ()) -> NDArray[np.float64]:
        """Standard normal by inversion, one word each.

        The argument of the inverse is a midpoint of 2**52 cells, so it is exact in float64 and never 0 or 1 (of 2**53
        cells the last midpoint would round to 1 and give inf). |z| <= 8.21.
        """
        from scipy.special import ndtri

        words = self._philox(purpose, indices).random_raw(_count(shape))
        midpoints = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return np.asarray(ndtri(midpoints), dtype=np.float64).reshape(shape)

    def integers(self, purpose: str, *indices: int, low: int = 0, high: int, shape: Shape = ()) -> NDArray[np.int64]:
        """Uniform int64 in [low, high), without bias: words of the last incomplete period of `high - low` are skipped.

        Raises:
            ValueError: the range is empty or not within int64.
        """
        if not -(2**63) <= low < high <= 2**63:
            raise ValueError(f"[low={low}, high={high}) must be a non-empty range within int64")
        span = high - low
        philox, count = self._philox(purpose, indices), _count(shape)
        words = philox.random_raw(count)
        if span < 2**64:
            last = np.uint64(2**64 - 2**64 % span - 1)
            words = words[words <= last]
            while len(words) < count:
                more = philox.random_raw(count - len(words))
                words = np.concatenate([words, more[more <= last]])
            words = words % np.uint64(span)
        # uint64 arithmetic wraps, which is two's complement addition of `low`.
        return (words + np.uint64(low % 2**64)).view(np.int64).reshape(shape)

    def generator(self, purpose: str, *indices: int) -> np.random.Generator:
        """A NumPy generator for inner functions that want one; its methods' results belong to the NumPy version."""
        return np.random.Generator(self._philox(purpose, indices))

    def torch_generator(self, purpose: str, *indices: int, device: str = "cpu") -> torch.Generator:
        """A torch generator for inner functions that want one; its numbers belong to the torch version and device.

        torch's CPU generator keeps 32 bits of its seed, so among 10,000 such generators two coincide with probability
        0.01: make one per stage of the work, not one per row.
        """
        import torch

        return torch.Generator(device=device).manual_seed(self.child(purpose, *indices).seed)

    def child(self, purpose: str, *indices: int) -> Streams:
        """Streams with a seed of their own, to hand to a part of the work that chooses its own purposes."""
        return Streams(self._key(purpose, indices) % 2**64)

    def _philox(self, purpose: str, indices: tuple[int, ...]) -> np.random.Philox:
        return np.random.Philox(key=self._key(purpose, indices))

    def _key(self, purpose: str, indices: tuple[int, ...]) -> int:
        """128 bits. The message is injective: fixed-size seed, length of the purpose, purpose, 16 bytes an index."""
        name = purpose.encode()
        digest = hashlib.blake2b(self.seed.to_bytes(8, "little"), digest_size=16, person=b"lyceum.streams.1")
        digest.update(len(name).to_bytes(8, "little") + name)
        for index in indices:
            digest.update(operator.index(index).to_bytes(16, "little", signed=True))
        return int.from_bytes(digest.digest(), "little")


def _count(shape: Shape) -> int:
    return math.prod(shape) if isinstance(shape, tuple) else shape
