"""Threads for kernels that release the interpreter lock.

A round hands at most `LANES` pieces of work to a pool and waits for all of them.  What a piece is and which threshold
it sees depends on the number of lanes, never on the number of threads, so that the whole course of a search is
reproducible on any machine.  Rounds last some tens of milliseconds: between two of them the caller polls for a stop.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lyceum_apex.contributions import MAX_RGROUPS
from lyceum_apex.kernels import Lane

LANES = 8
LANE_WORK = 1 << 23  # product evaluations a lane and round
_STACK, _FOUND, _PUT_OFF = (1 << 13) + 512, 1 << 16, 1 << 15


@dataclass(frozen=True)
class Tick:
    """Work done so far by an engine."""

    touched: int
    visited: int
    pending: int


def thread_pool(threads: int | None) -> ThreadPoolExecutor:
    """A pool of `threads` workers, by default one a core this process may use."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads: {threads}; give at least 1, or None for all cores")
    return ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), thread_name_prefix="apex-search")


def make_lane(columns: int, row: int) -> Lane:
    """Working memory for that many columns and rows of at most `row` products."""
    return Lane(
        stack=np.empty((_STACK, 1 + MAX_RGROUPS), dtype=np.int32),
        stack_key=np.empty((_STACK, 2)),
        product=np.empty((_FOUND, 1 + MAX_RGROUPS), dtype=np.int32),
        key=np.empty((_FOUND, 2)),
        put_off=np.empty((_PUT_OFF, 1 + MAX_RGROUPS), dtype=np.int32),
        put_off_key=np.empty((_PUT_OFF, 2)),
        prefix=np.empty((MAX_RGROUPS - 1, columns)),
        violation=np.empty(_FOUND),
        values=np.empty((columns, row)),
        zero=np.zeros(columns),
    )
