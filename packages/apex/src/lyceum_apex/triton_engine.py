"""Exact top-k on a GPU: a filter in float32 by a Triton kernel, then float64.

A reaction has two sides: A, all combinations of the R-groups but the last, taken in chunks; B, the last R-group. Both
are sorted by the objective and cut into tiles. For every pair of tiles whose bounds may hold a hit one program adds
the columns of a TA x TB tile of products, accumulates their violations until no product is left, and appends the
indices of the products left to a buffer: a prefix sum inside the tile, one atomic addition for the tile. The host
scores them again in float64, in the order of addition of all engines, and raises the threshold between launches.

The filter drops no hit. A float32 sum differs from the float64 one by at most 2^-23 (4 + C) times the sum of the sizes
of what was added (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2, doubled); thresholds are
lowered by that much. A launch that fills the buffer is taken back and done again in two halves.

Import this module only with a CUDA device, or with TRITON_INTERPRET=1 in the environment, which runs the kernel in
Python: for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton  # pants: no-infer-dep
import triton.language as tl  # pants: no-infer-dep
from numpy.typing import NDArray

from lyceum_apex.forest import Spans
from lyceum_apex.kernels import Columns, Threshold
from lyceum_apex.lanes import Tick
from lyceum_apex.query import QueryError
from lyceum_apex.topk import TopK

INTERPRETED = bool(triton.knobs.runtime.interpret)
_TILE = 16 if INTERPRETED else 64  # legs of each side
_CHUNK = 1 << 16  # combinations of side A held at once
_BUFFER = 1 << 12 if INTERPRETED else 1 << 22  # products a launch may find; at least one tile's
_LAUNCH = 1 << 6, 1 << 17  # pairs of tiles in the first launch of a chunk, and at most
_LARGEST = 1e30  # float32 ends at 3e38


class _Side(NamedTuple):
    """Sorted legs of one side, on the device, and the ranges of their tiles."""

    source: NDArray[np.int64]  # [n] combination (A) or row of the spans (B)
    values: torch.Tensor  # float32 [C, n]
    low: torch.Tensor  # float32 [C, tiles]
    high: torch.Tensor


@triton.jit
def _filter(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    lower_ptr: tl.tensor,
    upper_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    count_ptr: tl.tensor,
    found_ptr: tl.tensor,
    a_count: tl.tensor,
    b_count: tl.tensor,
    column_count: tl.tensor,
    least_objective: tl.tensor,
    most_violation: tl.tensor,
    capacity: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """One pair of tiles: append a * b_count + b of each product that may be a hit."""
    pair = tl.program_id(0)
    a = tl.load(pair_ptr + 2 * pair) * tile + tl.arange(0, tile)
    b = tl.load(pair_ptr + 2 * pair + 1) * tile + tl.arange(0, tile)
    in_a, in_b = a < a_count, b < b_count
    objective = tl.load(a_ptr + a, mask=in_a, other=0.0)[:, None] + tl.load(b_ptr + b, mask=in_b, other=0.0)[None, :]
    keep = (in_a[:, None] & in_b[None, :]) & (objective >= least_objective)
    violation = tl.zeros((tile, tile), dtype=tl.float32)
    left = tl.sum(tl.sum(keep.to(tl.int32), axis=1), axis=0)
    column = 1
    while (column < column_count) & (left > 0):
        of_a = tl.load(a_ptr + column * a_count + a, mask=in_a, other=0.0)
        of_b = tl.load(b_ptr + column * b_count + b, mask=in_b, other=0.0)
        value = of_a[:, None] + of_b[None, :]
        below = tl.maximum(tl.load(lower_ptr + column) - value, 0.0)
        violation += below + tl.maximum(value - tl.load(upper_ptr + column), 0.0)
        keep = keep & (violation <= most_violation)
        left = tl.sum(tl.sum(keep.to(tl.int32), axis=1), axis=0)
        column += 1
    if left > 0:
        flags = tl.reshape(keep.to(tl.int32), (tile * tile,))
        slot = tl.atomic_add(count_ptr, left) + tl.cumsum(flags, axis=0) - 1
        product = tl.reshape(a.to(tl.int64)[:, None] * b_count + b[None, :], (tile * tile,))
        tl.store(found_ptr + slot, product, mask=(flags > 0) & (slot < capacity))


def iter_triton(spans: Spans, reactions: NDArray[np.int32], columns: Columns, top: TopK) -> Iterator[Tick]:
    """Fill `top` from the given reactions; yields after every launch.

    Raises:
        QueryError: pair terms, numbers beyond 1e30 in size or no device.
    """
    if spans.factors is not None:
        raise QueryError("engine", "'triton' knows no interactions; use 'pruned' or 'brute'")
    if not INTERPRETED and not torch.cuda.is_available():
        raise QueryError("engine", "'triton' needs a CUDA device and finds none; use 'pruned' or 'brute'")
    touched = visited = 0
    for r in reactions.tolist():
        scan = _Scan(spans, r, columns)
        for first in range(0, scan.a_total, _CHUNK):
            for products, tiles, pending in scan.chunk(first, min(first + _CHUNK, scan.a_total), top):
                touched, visited = touched + products, visited + tiles
                yield Tick(touched, visited, pending)


class _Scan:
    """One reaction."""

    def __init__(self, spans: Spans, reaction: int, columns: Columns) -> None:
        self.spans, self.reaction, self.columns = spans, reaction, columns
        self.begin, self.end = spans.begin[reaction], spans.end[reaction]
        self.sizes = (self.end - self.begin).tolist()
        self.a_total = self.sizes[0] * self.sizes[1] * self.sizes[2]
        self.device = torch.device("cpu" if INTERPRETED else "cuda")
        # Violations are in units of sigma from here on: one number a column less for the kernel.
        self.unit = np.concatenate([[1.0], columns.weight[1:]])
        slots = [np.abs(spans.legs[self.begin[g] : self.end[g]]).max(axis=0) for g in range(4)]
        bounds = [np.where(np.isfinite(bound), np.abs(bound), 0.0) for bound in (columns.lower, columns.upper)]
        size = self.unit * (np.abs(columns.bias) + sum(slots) + np.maximum(*bounds))
        if not size.max() < _LARGEST:
            raise QueryError("engine", f"'triton' computes in float32: numbers beyond {_LARGEST:g}; use 'pruned'")
        error = 2.0**-23 * (4 + len(size)) * size + 1e-36  # the last for what underflows
        self.objective_error, self.violation_error = float(error[0]), float(error[1:].sum())
        self.lower, self.upper = self._device(self.unit * columns.lower), self._device(self.unit * columns.upper)
        rows = np.arange(self.begin[3], self.end[3])
        self.b = self._side(rows, spans.legs[rows])
        self.count = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.found = torch.empty(_BUFFER, dtype=torch.int64, device=self.device)

    def chunk(self, first: int, last: int, top: TopK) -> Iterator[tuple[int, int, int]]:
        """Search combinations first..last of side A; yields the numbers of products and of pairs of tiles scanned by a
        launch, and of pairs of tiles that wait."""
        combinations = np.arange(first, last)
        a = self._side(combinations, self._sums(combinations)[1])
        waiting = self._bounds(a)
        launch = _LAUNCH[0]
        while len(waiting[0]):
            waiting = self._unbeaten(waiting, top.threshold)
            pairs = waiting[0][:launch]
            if not len(pairs):
                break
            found = self._launch(a, pairs, top.threshold)
            if found is None:
                launch = (len(pairs) + 1) // 2
                continue
            self._rescore(a, found, top)
            waiting = tuple(part[len(pairs) :] for part in waiting)  # type: ignore[assignment]
            launch = min(2 * launch, _LAUNCH[1])
            at = pairs.to(torch.int64)
            rows = torch.clamp(len(a.source) - at[:, 0] * _TILE, max=_TILE)
            others = torch.clamp(len(self.b.source) - at[:, 1] * _TILE, max=_TILE)
            yield int((rows * others).sum()), len(pairs), len(waiting[0])

    def _launch(self, a: _Side, pairs: torch.Tensor, threshold: Threshold) -> NDArray[np.int64] | None:
        """Packed indices of the products that may beat the threshold; None if they do not fit into the buffer."""
        least, most = self._limits(threshold)
        self.count.zero_()
        _filter[(len(pairs),)](
            a.values,
            self.b.values,
            self.lower,
            self.upper,
            pairs,
            self.count,
            self.found,
            len(a.source),
            len(self.b.source),
            len(self.unit),
            least,
            most,
            _BUFFER,
            tile=_TILE,
            enable_fp_fusion=False,
        )
        count = int(self.count.item())
        return None if count > _BUFFER else self.found[:count].cpu().numpy()

    def _limits(self, threshold: Threshold) -> tuple[float, float]:
        """Least objective and largest violation that the filter lets through, as float32 numbers."""
        least = threshold.objective - self.objective_error if threshold.violation == 0.0 else -np.inf
        most = threshold.violation + self.violation_error
        return float(_float32(np.array(least), down=True)), float(_float32(np.array(most), down=False))

    def _rescore(self, a: _Side, found: NDArray[np.int64], top: TopK) -> None:
        at, b = np.divmod(found, len(self.b.source))
        rows, sums = self._sums(a.source[at])
        row = self.b.source[b]
        sums = sums + self.spans.legs[row]
        violation = np.zeros(len(sums))
        for c in range(1, len(self.unit)):
            below = np.maximum(self.columns.lower[c] - sums[:, c], 0.0)
            above = np.maximum(sums[:, c] - self.columns.upper[c], 0.0)
            violation = violation + (below + above) * self.columns.weight[c]
        key = np.column_stack([violation, sums[:, 0]])
        limit = top.threshold
        good = (violation < limit.violation) | ((violation == limit.violation) & (sums[:, 0] >= limit.objective))
        synthons = [self.spans.ids[part][:, None] for part in (*rows, row)]
        product = np.hstack([np.full((len(key), 1), self.reaction, dtype=np.int32), *synthons])
        top.add(key[good], product[good])

    def _sums(self, combinations: NDArray[np.int64]) -> tuple[list[NDArray[np.int64]], NDArray[np.float64]]:
        """Rows of the legs of the first three slots, and their sums float64[n, C] with the bias."""
        n1, n2 = self.sizes[1], self.sizes[2]
        parts = (combinations // (n1 * n2), combinations // n2 % n1, combinations % n2)
        rows = [self.begin[g] + part for g, part in enumerate(parts)]
        legs = self.spans.legs
        return rows, ((self.columns.bias + legs[rows[0]]) + legs[rows[1]]) + legs[rows[2]]

    def _side(self, index: NDArray[np.int64], values: NDArray[np.float64]) -> _Side:
        order = np.argsort(-values[:, 0], kind="stable")
        sorted_ = self._device(np.ascontiguousarray((values[order] * self.unit).T))
        tiles = -(-len(order) // _TILE)
        missing = tiles * _TILE - len(order)
        padded = torch.cat([sorted_, sorted_[:, -1:].expand(-1, missing)], dim=1).reshape(len(self.unit), tiles, _TILE)
        return _Side(index[order], sorted_, padded.amin(dim=2), padded.amax(dim=2))

    def _bounds(self, a: _Side) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All pairs of tiles int32[n, 2], most promising first, with lower bounds of the violation and upper bounds of
        the objective, float32[n], up to the filter's error."""
        objective = a.high[0][:, None] + self.b.high[0]
        violation = torch.zeros_like(objective)
        for c in range(1, len(self.unit)):
            most = a.high[c][:, None] + self.b.high[c]
            least = a.low[c][:, None] + self.b.low[c]
            violation += torch.relu(self.lower[c] - most) + torch.relu(least - self.upper[c])
        objective, violation = objective.reshape(-1), violation.reshape(-1)
        order = torch.argsort(objective, descending=True, stable=True)
        order = order[torch.argsort(violation[order], stable=True)]
        tiles = self.b.high.shape[1]
        pairs = torch.stack([order // tiles, order % tiles], dim=1).to(torch.int32)
        return pairs, violation[order], objective[order]

    def _unbeaten(
        self, waiting: tuple[torch.Tensor, torch.Tensor, torch.Tensor], threshold: Threshold
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pairs, violation, objective = waiting
        least, most = self._limits(threshold)
        keep = (violation <= most) & (objective >= least)
        return pairs[keep].contiguous(), violation[keep], objective[keep]

    def _device(self, values: NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self.device)


def _float32(value: NDArray[np.float64], *, down: bool) -> Any:
    """The nearest float32 that is not above (down) or not below the value."""
    near = value.astype(np.float32)
    if down:
        return np.nextafter(near, np.float32(-np.inf)) if near > value else near
    return np.nextafter(near, np.float32(np.inf)) if near < value else near
