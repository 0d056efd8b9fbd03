"""What a method's tour is: `lyceum tour` shows a method at work on real data over gRPC.

A method package may have a module `tour` with `run(client, report) -> TourResult`. `client` is connected to the running
services; `report(what, value)` tells the user what is happening while it happens. Every call that `run` makes belongs
to one trace.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TourResult:
    """What a tour found."""

    headline: str
    """The method's main effect in one sentence with its numbers."""
    rows: list[tuple[str, str]]
    """What was measured and its value, with unit, in the order to show."""
    passed: bool
    """Whether the effect is there and points the way the paper says."""
