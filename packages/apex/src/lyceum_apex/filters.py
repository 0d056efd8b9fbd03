"""Which synthons and reactions may be used at all: a mask over the legs, made anew for each question.

Unlike a constraint, which bounds a property of the whole product, a filter looks at each synthon by itself: in stock,
not dearer than 50.  What it leaves out has no products: they are neither searched nor counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lyceum_apex.library import SynthonLibrary
from lyceum_apex.query import Bounds, QueryError, check_constraints


@dataclass(frozen=True, kw_only=True)
class SynthonFilter:
    """Bounds on exact columns of the library, which every synthon of a product must meet, and reactions by their ids.

    Args:
        columns: (lower, upper) by column, each end inclusive and None when open; a flag column has 0 and 1.
        allowed_reactions: only these; None for all.
        forbidden_reactions: none of these.
    """

    columns: Mapping[str, Bounds] = field(default_factory=dict)
    allowed_reactions: Sequence[str] | None = None
    forbidden_reactions: Sequence[str] = ()

    def mask(self, library: SynthonLibrary) -> NDArray[np.bool_]:
        """bool[L]: legs that may be used. Raises QueryError: `columns[price]`, `allowed_reactions[2]`."""
        for name in self.columns:
            if name not in library.columns:
                known = ", ".join(library.columns) or "none"
                raise QueryError(f"columns[{name}]", f"{name!r} is not an exact column of the library: {known}")
        try:
            check_constraints(self.columns)
        except QueryError as error:
            raise QueryError(error.field.replace("constraints", "columns", 1), error.reason) from error
        used = np.ones(library.n_legs, dtype=bool)
        for name, (lower, upper) in self.columns.items():
            values = library.columns[name]
            used &= (values >= (-np.inf if lower is None else lower)) & (values <= (np.inf if upper is None else upper))
        reactions = np.repeat(np.arange(library.n_reactions), [sum(groups) for groups in library.sizes])
        if self.allowed_reactions is not None:
            used &= np.isin(reactions, _indices(library, self.allowed_reactions, "allowed_reactions"))
        used &= ~np.isin(reactions, _indices(library, self.forbidden_reactions, "forbidden_reactions"))
        return used


def _indices(library: SynthonLibrary, ids: Sequence[str], where: str) -> list[int]:
    index = {name: r for r, name in enumerate(library.reaction_ids)}
    for i, name in enumerate(ids):
        if name not in index:
            raise QueryError(f"{where}[{i}]", f"the library has no reaction {name!r}")
    return [index[name] for name in ids]
