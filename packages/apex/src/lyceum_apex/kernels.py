"""The loops, compiled by numba without the interpreter lock.

Bounds are exact without any tolerance: rounding is monotone, so adding the largest (smallest) leg of every slot *in
the order in which a product's own legs are added* gives a number that no rounded product sum exceeds (undercuts).
The same holds for violations, whose terms are non-negative and added in column order, and for pair terms: a product of
two factors is monotone in each, so over two ranges it lies between the products of their ends, rounded or not. Only the
bound |p| |q| on a whole inner product comes from other arithmetic; it carries a margin above all rounding.

Pair terms are an optional argument, `pairs`: without them it is None, and numba compiles the loops as if it were not
there.

Arrays and named tuples of arrays are `Any` to mypy: numba checks them when it compiles. Counters that a kernel passes
on start as np.int64(0): a literal 0 would be a type of its own and compile the callee twice. A rank key is
(violation, objective, reaction, synthons...): less violation first, then more objective, then smaller indices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray


class Columns(NamedTuple):
    """The queried columns; column 0 is the objective.

    `bias` has one entry more than the others when the last column is the dual one (see `dual`): no constraint, but an
    upper bound of the objective of feasible products.
    """

    bias: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    weight: NDArray[np.float64]


class Pairs(NamedTuple):
    """Pair terms: column c has dimensions start[c] .. start[c + 1] of `width`.

    What a leg shows to slot h in dimension k is row C + h * width + k of the points of the forest, C = bias.size.
    `legs` holds the points once more, for legs that are looked up one at a time: a leg's numbers side by side.
    """

    start: NDArray[np.int64]  # [C + 1]
    width: int
    legs: NDArray[np.float64]  # [M, C + 4 * width]
    norm: NDArray[np.float64]  # [nodes, 4, C] largest norm of what the node's legs show to each slot
    margin: NDArray[np.float64]  # [C] above the rounding error of a column's sum


class Threshold(NamedTuple):
    """Rank key of the k-th best product known; (inf, -inf, ...) while fewer than k are known."""

    violation: float
    objective: float
    product: NDArray[np.int32]  # [5] reaction, synthons


class Lane(NamedTuple):
    """Working memory of one task: a stack of pending node tuples, products found, node tuples put off."""

    stack: NDArray[np.int32]  # [S, 5] reaction, nodes
    stack_key: NDArray[np.float64]  # [S, 2] violation bound, objective bound
    product: NDArray[np.int32]  # [F, 5] reaction, synthons
    key: NDArray[np.float64]  # [F, 2] violation, objective
    put_off: NDArray[np.int32]  # [D, 5]
    put_off_key: NDArray[np.float64]  # [D, 2]
    prefix: NDArray[np.float64]  # [3, C] sums over slots 0, 0..1, 0..2
    violation: NDArray[np.float64]  # [T] one row of products
    values: NDArray[np.float64]  # [C, T'] a row's sums, with pair terms
    zero: NDArray[np.float64]  # [C] zeros


@njit(cache=True, nogil=True)
def grow(legs: Any, ids: Any, begin: int, end: int, leaf_size: int, node: int, weight: Any, forest: Any) -> Any:
    """Tree over legs begin..end, its nodes numbered from `node` on; returns the number of leaves."""
    columns = legs.shape[1]
    order = np.arange(begin, end)
    forest.begin[node], forest.end[node] = begin, end
    free, leaves = node + 1, 0
    current = node
    while current < free:
        first, last = forest.begin[current] - begin, forest.end[current] - begin
        low, high = forest.low[current], forest.high[current]
        for c in range(columns):
            low[c], high[c] = np.inf, -np.inf
        smallest = ids[order[first]]
        for i in range(first, last):
            row = order[i]
            smallest = min(smallest, ids[row])
            for c in range(columns):
                low[c], high[c] = min(low[c], legs[row, c]), max(high[c], legs[row, c])
        forest.first[current] = smallest
        if last - first <= leaf_size:
            leaves += 1
            for i in range(first, last):  # insertion sort: objective descending, then id
                row = order[i]
                j = i
                while j > first and (
                    legs[order[j - 1], 0] < legs[row, 0]
                    or (legs[order[j - 1], 0] == legs[row, 0] and ids[order[j - 1]] > ids[row])
                ):
                    order[j] = order[j - 1]
                    j -= 1
                order[j] = row
        else:
            widest: Any = np.int64(-1)
            width = 0.0
            for c in range(columns):
                if (high[c] - low[c]) * weight[c] > width:
                    widest, width = c, (high[c] - low[c]) * weight[c]
            middle = first + (last - first) // 2
            if widest >= 0:  # legs that agree in every column stay in the order of their ids
                _select(order, legs, widest, first, last - 1, middle)
            forest.child[current] = free
            forest.begin[free], forest.end[free] = first + begin, middle + begin
            forest.begin[free + 1], forest.end[free + 1] = middle + begin, last + begin
            free += 2
        current += 1
    for i in range(end - begin):
        forest.ids[begin + i] = ids[order[i]]
        for c in range(columns):
            forest.points[c, begin + i] = legs[order[i], c]
    return leaves


@njit(cache=True, nogil=True)
def _select(order: Any, legs: Any, column: int, left: int, right: int, middle: int) -> None:
    """Hoare's quickselect: order[left..middle-1] <= order[middle..right] in the column."""
    while left < right:
        pivot = legs[order[(left + right) // 2], column]
        i, j = left, right
        while i <= j:
            while legs[order[i], column] < pivot:
                i += 1
            while legs[order[j], column] > pivot:
                j -= 1
            if i <= j:
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
        if middle <= j:
            right = j
        elif middle >= i:
            left = i
        else:
            return


@njit(cache=True, nogil=True)
def _bound(forest: Any, columns: Any, tuple_: Any) -> Any:
    """Lower bound of the violation and upper bound of the objective over a node tuple."""
    n0, n1, n2, n3 = tuple_[1], tuple_[2], tuple_[3], tuple_[4]
    high, low = forest.high, forest.low
    objective = (((columns.bias[0] + high[n0, 0]) + high[n1, 0]) + high[n2, 0]) + high[n3, 0]
    violation = 0.0
    d = columns.lower.size
    for c in range(1, d):
        most = (((columns.bias[c] + high[n0, c]) + high[n1, c]) + high[n2, c]) + high[n3, c]
        least = (((columns.bias[c] + low[n0, c]) + low[n1, c]) + low[n2, c]) + low[n3, c]
        violation += (max(columns.lower[c] - most, 0.0) + max(least - columns.upper[c], 0.0)) * columns.weight[c]
    if violation == 0.0 and d < columns.bias.size:
        dual = (((columns.bias[d] + high[n0, d]) + high[n1, d]) + high[n2, d]) + high[n3, d]
        objective = min(objective, dual)
    return violation, objective


@njit(cache=True, nogil=True)
def largest_norms(forest: Any, start: Any, width: int, norm: Any) -> None:
    """Fill `norm` of `Pairs`; rounded up, and by more than all that may have underflowed."""
    points, size = forest.points, len(start) - 1
    for node in range(len(forest.begin) - 1, -1, -1):  # children are numbered after their parent
        child = forest.child[node]
        for h in range(4):
            for c in range(size):
                most = 0.0
                if child >= 0:
                    most = max(norm[child, h, c], norm[child + 1, h, c])
                elif start[c] < start[c + 1]:
                    for i in range(forest.begin[node], forest.end[node]):
                        square = 0.0
                        for k in range(start[c], start[c + 1]):
                            square += points[size + h * width + k, i] ** 2
                        most = max(most, square)
                    most = np.sqrt(most) * (1.0 + 1e-13) + 1e-150
                norm[node, h, c] = most


@njit(cache=True, nogil=True)
def column_range(forest: Any, columns: Any, pairs: Any, tuple_: Any, c: int) -> Any:
    """Smallest and largest value of column c over a node tuple, pair terms included."""
    size, width, low, high = columns.bias.size, pairs.width, forest.low, forest.high
    first, last = pairs.start[c], pairs.start[c + 1]
    least, most = columns.bias[c], columns.bias[c]  # by ranges, in the order in which a product's own sum is formed
    lower, upper = least, most  # by ranges or norms, whichever is tighter for a pair
    for s in range(4):
        n = tuple_[1 + s]
        if n == 0:  # the neutral leg
            continue
        least, most = least + low[n, c], most + high[n, c]
        lower, upper = lower + low[n, c], upper + high[n, c]
        for g in range(s):
            m = tuple_[1 + g]
            if m == 0 or first == last:
                continue
            there, here = size + s * width, size + g * width
            below, above = 0.0, 0.0
            for k in range(first, last):
                a, b = low[m, there + k], high[m, there + k]
                u, v = low[n, here + k], high[n, here + k]
                smallest = min(a * u, a * v, b * u, b * v)
                largest = max(a * u, a * v, b * u, b * v)
                least, most = least + smallest, most + largest
                below, above = below + smallest, above + largest
            product = pairs.norm[m, s, c] * pairs.norm[n, g, c]
            lower, upper = lower + max(below, -product), upper + min(above, product)
    return max(least, lower - pairs.margin[c]), min(most, upper + pairs.margin[c])


@njit(cache=True, nogil=True)
def _bound_pairs(forest: Any, columns: Any, pairs: Any, tuple_: Any) -> Any:
    """`_bound` of columns with pair terms."""
    violation = 0.0
    d = columns.lower.size
    for c in range(1, d):
        least, most = column_range(forest, columns, pairs, tuple_, c)
        violation += (max(columns.lower[c] - most, 0.0) + max(least - columns.upper[c], 0.0)) * columns.weight[c]
    objective = column_range(forest, columns, pairs, tuple_, 0)[1]
    if violation == 0.0 and d < columns.bias.size:
        objective = min(objective, column_range(forest, columns, pairs, tuple_, d)[1])
    return violation, objective


@njit(cache=True, nogil=True)
def _beaten(forest: Any, violation: float, objective: float, tuple_: Any, threshold: Any) -> Any:
    """Whether no product below a node tuple ranks before the threshold."""
    if violation != threshold.violation:
        return violation > threshold.violation
    if objective != threshold.objective:
        return objective < threshold.objective
    if tuple_[0] != threshold.product[0]:
        return tuple_[0] > threshold.product[0]
    for g in range(1, 5):
        smallest = forest.first[tuple_[g]]
        if smallest != threshold.product[g]:
            return smallest > threshold.product[g]
    return True


@njit(cache=True, nogil=True)
def _scan_row(
    points: Any,
    ids: Any,
    begin: int,
    end: int,
    row: Any,
    columns: Any,
    threshold: Any,
    product: Any,
    lane: Any,
    found: Any,
) -> Any:
    """Keep the products of one row (all slots but the last fixed, prefix sums `row`) that rank before the threshold."""
    count = end - begin
    violation = lane.violation
    for j in range(count):
        violation[j] = 0.0
    for c in range(1, columns.lower.size):
        base, lower, upper, weight = row[c], columns.lower[c], columns.upper[c], columns.weight[c]
        column = points[c, begin:end]
        for j in range(count):
            value = base + column[j]
            violation[j] += (max(lower - value, 0.0) + max(value - upper, 0.0)) * weight
    base = row[0]
    column = points[0, begin:end]
    candidates = 0
    for j in range(count):  # a loop without branches is vectorised; hits are rare
        candidates += (violation[j] < threshold.violation) | (
            (violation[j] == threshold.violation) & (base + column[j] >= threshold.objective)
        )
    if candidates == 0:
        return found
    for j in range(count):
        objective = base + column[j]
        if violation[j] > threshold.violation:
            continue
        if violation[j] == threshold.violation:
            if objective < threshold.objective:
                continue
            if objective == threshold.objective:
                product[4] = ids[begin + j]
                later = True
                for g in range(5):
                    if product[g] != threshold.product[g]:
                        later = product[g] > threshold.product[g]
                        break
                if later:
                    continue
        lane.key[found, 0], lane.key[found, 1] = violation[j], objective
        for g in range(4):
            lane.product[found, g] = product[g]
        lane.product[found, 4] = ids[begin + j]
        found += 1
    return found


@njit(cache=True, nogil=True)
def _scan_tuple(forest: Any, columns: Any, threshold: Any, tuple_: Any, lane: Any, found: Any) -> Any:
    """Scan the products of a tuple of leaves; returns the number of products in `lane` and of those evaluated."""
    points, ids, size, d = forest.points, forest.ids, columns.bias.size, columns.lower.size
    prefix = lane.prefix
    n3 = tuple_[4]
    begin, end = forest.begin[n3], forest.end[n3]
    low, high = forest.low[n3], forest.high[n3]
    product = np.empty(5, dtype=np.int32)
    product[0] = tuple_[0]
    touched = 0
    for i0 in range(forest.begin[tuple_[1]], forest.end[tuple_[1]]):
        product[1] = ids[i0]
        for c in range(size):
            prefix[0, c] = columns.bias[c] + points[c, i0]
        for i1 in range(forest.begin[tuple_[2]], forest.end[tuple_[2]]):
            product[2] = ids[i1]
            for c in range(size):
                prefix[1, c] = prefix[0, c] + points[c, i1]
            for i2 in range(forest.begin[tuple_[3]], forest.end[tuple_[3]]):
                product[3] = ids[i2]
                violation = 0.0
                for c in range(size):
                    total = prefix[1, c] + points[c, i2]
                    prefix[2, c] = total
                    if 0 < c < d:
                        below = max(columns.lower[c] - (total + high[c]), 0.0)
                        violation += (below + max((total + low[c]) - columns.upper[c], 0.0)) * columns.weight[c]
                if violation > threshold.violation:
                    continue
                stop = end
                if (
                    violation == threshold.violation == 0.0
                    and d < size
                    and prefix[2, d] + high[d] < threshold.objective
                ):
                    continue
                if violation == threshold.violation:  # at best a tie: the leaf is sorted, so a prefix of it suffices
                    left = begin
                    while left < stop:
                        middle = (left + stop) // 2
                        if prefix[2, 0] + points[0, middle] < threshold.objective:
                            stop = middle
                        else:
                            left = middle + 1
                    if stop == begin:
                        continue
                touched += stop - begin
                found = _scan_row(points, ids, begin, stop, prefix[2], columns, threshold, product, lane, found)
    return found, touched


@njit(cache=True, nogil=True)
def add_leg(columns: Any, pairs: Any, at: Any, slot: int, prefix: Any, last: int) -> Any:
    """prefix[slot] = prefix[last], the sums over the slots before (the bias for -1), plus leg at[slot] and its pair
    terms with the legs before. Returns the row of `prefix` with the sums: `last` if the leg is the neutral one."""
    size, width, legs = columns.bias.size, pairs.width, pairs.legs
    leg = at[slot]
    if leg == 0:
        return last
    for c in range(size):
        total = (columns.bias[c] if last < 0 else prefix[last, c]) + legs[leg, c]
        for g in range(slot):
            if at[g] > 0:
                for k in range(pairs.start[c], pairs.start[c + 1]):
                    total += legs[at[g], size + slot * width + k] * legs[leg, size + g * width + k]
        prefix[slot, c] = total
    return slot


@njit(cache=True, nogil=True)
def with_pairs(forest: Any, pairs: Any, at: Any, node: int, c: int, size: int, least: float, most: float) -> Any:
    """The range least..most of column c along a leaf of slot 3, widened by the pair terms with the legs `at`."""
    legs, low, high, width = pairs.legs, forest.low, forest.high, pairs.width
    for g in range(3):
        if at[g] == 0:
            continue
        for k in range(pairs.start[c], pairs.start[c + 1]):
            factor, q = legs[at[g], size + 3 * width + k], size + g * width + k
            one, other = factor * low[node, q], factor * high[node, q]
            least, most = least + min(one, other), most + max(one, other)
    return least, most


@njit(cache=True, nogil=True)
def row_values(
    points: Any, columns: Any, pairs: Any, row: Any, at: Any, begin: int, end: int, c: int, out: Any
) -> None:
    """Values of column c along a row of products, legs begin..end of slot 3."""
    size, width = columns.bias.size, pairs.width
    base, column = row[c], points[c, begin:end]
    for j in range(end - begin):
        out[j] = base + column[j]
    for g in range(3):
        if at[g] == 0:
            continue
        for k in range(pairs.start[c], pairs.start[c + 1]):
            factor, column = pairs.legs[at[g], size + 3 * width + k], points[size + g * width + k, begin:end]
            for j in range(end - begin):
                out[j] += factor * column[j]


@njit(cache=True, nogil=True)
def _scan_row_pairs(
    points: Any,
    ids: Any,
    begin: int,
    end: int,
    row: Any,
    at: Any,
    columns: Any,
    pairs: Any,
    threshold: Any,
    product: Any,
    lane: Any,
    found: Any,
) -> Any:
    """`_scan_row` of columns with pair terms: the row's sums are formed first."""
    values = lane.values
    row_values(points, columns, pairs, row, at, begin, end, 0, values[0])
    if threshold.violation == 0.0:  # only feasible products that reach the objective matter: mostly none in a row
        candidates = 0
        for j in range(end - begin):
            candidates += values[0, j] >= threshold.objective
        if candidates == 0:
            return found
    for c in range(1, columns.lower.size):
        row_values(points, columns, pairs, row, at, begin, end, c, values[c])
    return _scan_row(values, ids[begin:end], 0, end - begin, lane.zero, columns, threshold, product, lane, found)


@njit(cache=True, nogil=True)
def _scan_tuple_pairs(forest: Any, columns: Any, pairs: Any, threshold: Any, tuple_: Any, lane: Any, found: Any) -> Any:
    """`_scan_tuple` of columns with pair terms."""
    points, ids, size, d = forest.points, forest.ids, columns.bias.size, columns.lower.size
    prefix = lane.prefix
    n3 = tuple_[4]
    begin, end = forest.begin[n3], forest.end[n3]
    low, high = forest.low[n3], forest.high[n3]
    product, at = np.empty(5, dtype=np.int32), np.zeros(3, dtype=np.int64)
    product[0] = tuple_[0]
    touched = 0
    for i0 in range(forest.begin[tuple_[1]], forest.end[tuple_[1]]):
        product[1], at[0] = ids[i0], i0
        first = add_leg(columns, pairs, at, 0, prefix, -1)
        for i1 in range(forest.begin[tuple_[2]], forest.end[tuple_[2]]):
            product[2], at[1] = ids[i1], i1
            second = add_leg(columns, pairs, at, 1, prefix, first)
            for i2 in range(forest.begin[tuple_[3]], forest.end[tuple_[3]]):
                product[3], at[2] = ids[i2], i2
                row = add_leg(columns, pairs, at, 2, prefix, second)
                if threshold.violation == 0.0 and d < size:  # of use for feasible products only, but often all it takes
                    total = prefix[row, d]
                    most = with_pairs(forest, pairs, at, n3, d, size, total + low[d], total + high[d])[1]
                    if most < threshold.objective:
                        continue
                violation = 0.0
                for c in range(1, d):
                    total = prefix[row, c]
                    least, most = with_pairs(forest, pairs, at, n3, c, size, total + low[c], total + high[c])
                    violation += (max(columns.lower[c] - most, 0.0) + max(least - columns.upper[c], 0.0)) * (
                        columns.weight[c]
                    )
                if violation > threshold.violation:
                    continue
                stop = end
                if violation == threshold.violation:  # the leaf is sorted by the legs' own part of the objective
                    left, middle = begin, begin  # the first product first: mostly even that falls short
                    while left < stop:
                        total = prefix[row, 0] + points[0, middle]
                        most = with_pairs(forest, pairs, at, n3, 0, size, total, total)[1]
                        if most < threshold.objective:
                            stop = middle
                        else:
                            left = middle + 1
                        middle = (left + stop) // 2
                    if stop == begin:
                        continue
                touched += stop - begin
                found = _scan_row_pairs(
                    points, ids, begin, stop, prefix[row], at, columns, pairs, threshold, product, lane, found
                )
    return found, touched


@njit(cache=True, nogil=True)
def explore(
    forest: Any,
    columns: Any,
    pairs: Any,
    threshold: Any,
    horizon: Any,
    lane: Any,
    stacked: int,
    budget: int,
    largest: int,
) -> Any:
    """Depth-first search below the stacked node tuples, as far as they rank within the horizon.

    Node tuples beaten by the threshold are dropped, those beyond the `horizon` (violation, objective) are put off.
    Ends when the stack is empty, when `budget` evaluations are spent or when a buffer might overflow (a tuple of
    leaves holds at most `largest` products).  Returns the numbers of tuples left on the stack, of products found, of
    tuples put off, of products evaluated and of leaf tuples scanned.
    """
    stack, stack_key = lane.stack, lane.stack_key
    found: Any = np.int64(0)
    put_off, touched, visited, work = 0, 0, 0, 0
    current = np.empty(5, dtype=np.int32)
    sibling = np.empty(5, dtype=np.int32)
    while (
        stacked > 0
        and work < budget
        and found + largest <= len(lane.product)
        and put_off + 2 <= len(lane.put_off)
        and stacked + 2 <= len(stack)
    ):
        stacked -= 1
        for g in range(5):
            current[g] = stack[stacked, g]
        if _beaten(forest, stack_key[stacked, 0], stack_key[stacked, 1], current, threshold):
            continue
        slot, size = 0, 0
        for g in range(1, 5):
            node = current[g]
            if forest.child[node] >= 0 and forest.end[node] - forest.begin[node] > size:
                slot, size = g, forest.end[node] - forest.begin[node]
        if slot == 0:
            if pairs is None:
                found, here = _scan_tuple(forest, columns, threshold, current, lane, found)
            else:
                found, here = _scan_tuple_pairs(forest, columns, pairs, threshold, current, lane, found)
            touched += here
            visited += 1
            work += here + 256
            continue
        work += 64
        for g in range(5):
            sibling[g] = current[g]
        current[slot] = forest.child[current[slot]]
        sibling[slot] = current[slot] + 1
        if pairs is None:
            v, o = _bound(forest, columns, current)
            sv, so = _bound(forest, columns, sibling)
        else:
            v, o = _bound_pairs(forest, columns, pairs, current)
            sv, so = _bound_pairs(forest, columns, pairs, sibling)
        if sv < v or (sv == v and (so > o or (so == o and forest.first[sibling[slot]] < forest.first[current[slot]]))):
            current[slot], sibling[slot] = sibling[slot], current[slot]
            v, o, sv, so = sv, so, v, o
        for step in range(2):  # the worse child first, so that the better one is popped next
            child = sibling if step == 0 else current
            violation, objective = (sv, so) if step == 0 else (v, o)
            if _beaten(forest, violation, objective, child, threshold):
                continue
            if violation > horizon[0] or (violation == horizon[0] and objective < horizon[1]):
                for g in range(5):
                    lane.put_off[put_off, g] = child[g]
                lane.put_off_key[put_off, 0], lane.put_off_key[put_off, 1] = violation, objective
                put_off += 1
            else:
                for g in range(5):
                    stack[stacked, g] = child[g]
                stack_key[stacked, 0], stack_key[stacked, 1] = violation, objective
                stacked += 1
    return stacked, found, put_off, touched, visited


@njit(cache=True, nogil=True)
def bound_tuples(forest: Any, columns: Any, pairs: Any, tuples: Any, key: Any) -> None:
    """key float64[n, 2] = (violation bound, objective bound) of node tuples int32[n, 5]."""
    for i in range(len(tuples)):
        if pairs is None:
            key[i, 0], key[i, 1] = _bound(forest, columns, tuples[i])
        else:
            key[i, 0], key[i, 1] = _bound_pairs(forest, columns, pairs, tuples[i])


@njit(cache=True, nogil=True)
def scan_range(
    points: Any,
    ids: Any,
    begin: Any,
    end: Any,
    reaction: int,
    first: int,
    last: int,
    tile: int,
    columns: Any,
    pairs: Any,
    threshold: Any,
    lane: Any,
) -> Any:
    """Brute force over tiles first..last of a reaction (a tile: one row of `tile` legs of slot 3).

    Stops early when `lane` might overflow; returns the next tile and the numbers of products kept and evaluated.
    """
    size = columns.bias.size
    tiles = (end[3] - begin[3] + tile - 1) // tile
    n1, n2 = end[1] - begin[1], end[2] - begin[2]
    product, at = np.empty(5, dtype=np.int32), np.zeros(3, dtype=np.int64)
    product[0] = reaction
    row = lane.prefix[2]
    found: Any = np.int64(0)
    touched = 0
    index = first
    while index < last and found + tile <= len(lane.product):
        position = index // tiles
        i2 = begin[2] + position % n2
        i1 = begin[1] + (position // n2) % n1
        i0 = begin[0] + position // (n2 * n1)
        product[1], product[2], product[3] = ids[i0], ids[i1], ids[i2]
        start = begin[3] + (index % tiles) * tile
        stop = min(start + tile, end[3])
        touched += stop - start
        index += 1
        if pairs is not None:
            at[0], at[1], at[2] = i0, i1, i2
            done = add_leg(columns, pairs, at, 0, lane.prefix, -1)
            done = add_leg(columns, pairs, at, 1, lane.prefix, done)
            sums = lane.prefix[add_leg(columns, pairs, at, 2, lane.prefix, done)]
            found = _scan_row_pairs(points, ids, start, stop, sums, at, columns, pairs, threshold, product, lane, found)
            continue
        for c in range(size):
            row[c] = ((columns.bias[c] + points[c, i0]) + points[c, i1]) + points[c, i2]
        if threshold.violation == 0.0:  # only feasible products that reach the objective matter: mostly none in a tile
            base, column = row[0], points[0, start:stop]
            candidates = 0
            for j in range(stop - start):
                candidates += base + column[j] >= threshold.objective
            if candidates == 0:
                continue
        found = _scan_row(points, ids, start, stop, row, columns, threshold, product, lane, found)
    return index, found, touched


@njit(cache=True, nogil=True)
def count_below(
    forest: Any, columns: Any, pairs: Any, stack: Any, stacked: int, budget: int, prefix: Any, fine: Any, value: Any
) -> Any:
    """Count the products within all column bounds below the stacked node tuples.

    A tuple wholly inside counts in one step, one wholly outside not at all.  Returns the numbers of tuples left on
    the stack (budget spent), of products inside and of products evaluated one by one.  `prefix` float64[3, C],
    `fine` int64[legs of a leaf] and `value` float64[legs of a leaf] are scratch.
    """
    size = columns.bias.size
    points, low, high = forest.points, forest.low, forest.high
    inside, touched, work = 0, 0, 0
    current = np.empty(5, dtype=np.int32)
    while stacked > 0 and work < budget and stacked + 2 <= len(stack) and inside < 2**61:
        stacked -= 1
        for g in range(5):
            current[g] = stack[stacked, g]
        n0, n1, n2, n3 = current[1], current[2], current[3], current[4]
        work += 64
        whole, empty = True, False
        for c in range(size):
            if pairs is None:
                most = (((columns.bias[c] + high[n0, c]) + high[n1, c]) + high[n2, c]) + high[n3, c]
                least = (((columns.bias[c] + low[n0, c]) + low[n1, c]) + low[n2, c]) + low[n3, c]
            else:
                least, most = column_range(forest, columns, pairs, current, c)
            empty |= (most < columns.lower[c]) | (least > columns.upper[c])
            whole &= (least >= columns.lower[c]) & (most <= columns.upper[c])
        if empty:
            continue
        slot, widest = 0, 0
        products, exact = 1, 1.0
        for g in range(1, 5):
            node = current[g]
            count = forest.end[node] - forest.begin[node]
            exact *= count
            products *= count
            if forest.child[node] >= 0 and count > widest:
                slot, widest = g, count
        if whole and exact < 2.0**60:  # larger tuples are split, so that the integer sum cannot overflow
            inside += products
            continue
        if slot > 0:
            child = forest.child[current[slot]]
            for step in range(2):
                current[slot] = child + step
                for g in range(5):
                    stack[stacked, g] = current[g]
                stacked += 1
            continue
        if pairs is None:
            for i0 in range(forest.begin[n0], forest.end[n0]):
                for c in range(size):
                    prefix[0, c] = columns.bias[c] + points[c, i0]
                for i1 in range(forest.begin[n1], forest.end[n1]):
                    for c in range(size):
                        prefix[1, c] = prefix[0, c] + points[c, i1]
                    for i2 in range(forest.begin[n2], forest.end[n2]):
                        for c in range(size):
                            prefix[2, c] = prefix[1, c] + points[c, i2]
                        inside += _count_row(forest, n3, prefix[2], columns, fine)
        else:
            inside += _count_tuple_pairs(forest, columns, pairs, current, prefix, fine, value)
        evaluated = int(exact)
        touched += evaluated
        work += evaluated
    return stacked, inside, touched


@njit(cache=True, nogil=True)
def _count_row(forest: Any, node: int, row: Any, columns: Any, fine: Any) -> Any:
    """Number of products within the bounds among one row along a leaf, which is sorted by column 0, descending."""
    points, low, high = forest.points, forest.low[node], forest.high[node]
    begin, end = forest.begin[node], forest.end[node]
    for c in range(columns.bias.size):
        if row[c] + high[c] < columns.lower[c] or row[c] + low[c] > columns.upper[c]:
            return 0
    base = row[0]
    first, right = begin, end
    while first < right:
        middle = (first + right) // 2
        if base + points[0, middle] > columns.upper[0]:
            first = middle + 1
        else:
            right = middle
    last, right = first, end
    while last < right:
        middle = (last + right) // 2
        if base + points[0, middle] >= columns.lower[0]:
            last = middle + 1
        else:
            right = middle
    count = last - first
    for j in range(count):
        fine[j] = 1
    for c in range(1, columns.bias.size):
        base, lower, upper = row[c], columns.lower[c], columns.upper[c]
        if base + low[c] >= lower and base + high[c] <= upper:
            continue
        column = points[c, first:last]
        for j in range(last - first):  # a loop without branches is vectorised
            value = base + column[j]
            fine[j] &= np.int64(value >= lower) & np.int64(value <= upper)
        count = 0
        for j in range(last - first):
            count += fine[j]
    return count


@njit(cache=True, nogil=True)
def _count_tuple_pairs(forest: Any, columns: Any, pairs: Any, tuple_: Any, prefix: Any, fine: Any, value: Any) -> Any:
    """Number of products within the bounds below a tuple of leaves, pair terms included."""
    at = np.zeros(3, dtype=np.int64)
    inside: Any = np.int64(0)
    for i0 in range(forest.begin[tuple_[1]], forest.end[tuple_[1]]):
        at[0] = i0
        first = add_leg(columns, pairs, at, 0, prefix, -1)
        for i1 in range(forest.begin[tuple_[2]], forest.end[tuple_[2]]):
            at[1] = i1
            second = add_leg(columns, pairs, at, 1, prefix, first)
            for i2 in range(forest.begin[tuple_[3]], forest.end[tuple_[3]]):
                at[2] = i2
                row = add_leg(columns, pairs, at, 2, prefix, second)
                inside += _count_row_pairs(forest, columns, pairs, tuple_[4], prefix[row], at, fine, value)
    return inside


@njit(cache=True, nogil=True)
def _count_row_pairs(forest: Any, columns: Any, pairs: Any, node: int, row: Any, at: Any, fine: Any, value: Any) -> Any:
    """`_count_row` of columns with pair terms."""
    begin, end = forest.begin[node], forest.end[node]
    for j in range(end - begin):
        fine[j] = 1
    for c in range(columns.bias.size):
        lower, upper = columns.lower[c], columns.upper[c]
        least, most = row[c] + forest.low[node, c], row[c] + forest.high[node, c]
        least, most = with_pairs(forest, pairs, at, node, c, columns.bias.size, least, most)
        if most < lower or least > upper:
            return 0
        if least >= lower and most <= upper:
            continue
        row_values(forest.points, columns, pairs, row, at, begin, end, c, value)
        for j in range(end - begin):
            fine[j] &= np.int64(value[j] >= lower) & np.int64(value[j] <= upper)
    count = 0
    for j in range(end - begin):
        count += fine[j]
    return count
