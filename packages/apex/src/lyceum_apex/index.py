"""The index: a library, a surrogate and leg embeddings put together as one table of contributions, ready to be
searched.

W = U beta': leg u of product x adds beta_i . u to property i, so a query scans sums of a few numbers per product and
no network runs (Pedawi et al., arXiv 2510.24380, section 3). A property trained later on the same encoder is one more
column, W_new = U beta_new. The exact columns of the library (molecular weight, price) are appended as they are.
With `interactions_rank`, properties also get pair terms for what the sum over legs misses (`lyceum_apex.residuals`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from lyceum_apex.contributions import ContributionTable, Explanation, Interactions, explain, score
from lyceum_apex.counting import CountResult, count
from lyceum_apex.errors import FieldError, VersionError
from lyceum_apex.library import SynthonLibrary
from lyceum_apex.query import Bounds, Hits, Query, SearchProgress, slack
from lyceum_apex.search import iter_search, search
from lyceum_base import ShouldStop, decode_state, encode_state, run_to_end

if TYPE_CHECKING:
    from lyceum_apex.factorizer import Factorizer
    from lyceum_apex.filters import SynthonFilter
    from lyceum_apex.grids import Axis
    from lyceum_apex.quantiles import Distribution
    from lyceum_apex.surrogate import Probe, Surrogate

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ApexIndex:
    """Immutable; make one by `build`, `from_leg_table`, `from_bytes` or `load`.

    Args:
        table: contributions of all properties, exact columns last, with their interactions.
        library: fingerprint of the library.
        embeddings: u, float64 [L, d]; None for a user's own leg table.
        encoder: fingerprint of the surrogate's encoder; "" for a user's own leg table.
        reconstruction: R2 of f^ against the surrogate's f on products held out of the factorisation, by property; empty
            when the factoriser was fitted to another library.
    """

    table: ContributionTable
    library: str
    embeddings: FloatArray | None
    encoder: str
    reconstruction: Mapping[str, float]

    @classmethod
    def build(
        cls,
        library: SynthonLibrary,
        surrogate: "Surrogate",
        factorizer: "Factorizer",
        *,
        interactions_rank: int = 0,
        seed: int = 0,
    ) -> Self:
        """All probes of the surrogate over a library, which need not be the one the factoriser was fitted to.

        With a rank of 1 to 8, pair terms are fitted to the surrogate's own predictions of sampled products, for the
        properties that gain by them. Raises VersionError when the factoriser was fitted to another surrogate,
        FieldError (`interactions_rank`).
        """
        index = cls._additive(library, surrogate, factorizer)
        if not interactions_rank:
            return index
        from lyceum_apex.residuals import iter_fit_residuals

        fit = iter_fit_residuals(library, surrogate, factorizer, interactions_rank, seed=seed)
        return index.with_residuals(run_to_end(fit))

    @classmethod
    def _additive(cls, library: SynthonLibrary, surrogate: "Surrogate", factorizer: "Factorizer") -> Self:
        if factorizer.surrogate != surrogate.fingerprint:
            raise VersionError("the factoriser was fitted to another surrogate; fit it again to this one")
        u = factorizer.leg_embeddings(library)
        probes = surrogate.probes
        table = ContributionTable(
            sizes=tuple(map(tuple, library.sizes)),
            values=u @ np.stack([probe.beta for probe in probes]).T,
            bias=np.array([probe.bias for probe in probes]),
            scale=np.array([probe.scale for probe in probes]),
            names=surrogate.names,
        )
        own = factorizer.library == library.fingerprint  # its held-out products are those of its own library
        report = factorizer.reconstruction_report(library, surrogate) if own else {}
        return cls(_with_exact(table, library), library.fingerprint, u, surrogate.fingerprint, report)

    def with_residuals(self, state: Mapping[str, Any]) -> Self:
        """With the pair terms and the fidelity that `lyceum_apex.residuals.iter_fit_residuals` ends with."""
        pairs = Interactions(tuple(state["names"]), state["factors"]) if state["names"] else None
        report = {**self.reconstruction, **state["reconstruction"]}
        return replace(self, table=replace(self.table, interactions=pairs), reconstruction=report)

    @classmethod
    def from_leg_table(
        cls,
        library: SynthonLibrary,
        names: Sequence[str],
        values: npt.ArrayLike,
        *,
        bias: npt.ArrayLike | None = None,
        scale: npt.ArrayLike | None = None,
        interactions: Interactions | None = None,
    ) -> Self:
        """A user's own contributions [L, P], for example of an additive model fitted elsewhere, and pair terms.

        `bias` [P] is 0 by default. `scale` [P] makes violations of several constraints comparable; by default it is
        the standard deviation of the legs' sum over products drawn with the same weight for every reaction.
        """
        legs = np.asarray(values, np.float64)
        if legs.shape != (library.n_legs, len(names)):
            raise FieldError(
                "values", f"shape {list(legs.shape)} given; [{library.n_legs}, {len(names)}] expected (legs, names)"
            )
        bias = np.zeros(len(names)) if bias is None else bias
        sigma = _product_scale(library, legs) if scale is None else scale
        table = ContributionTable(
            sizes=tuple(map(tuple, library.sizes)),
            values=legs,
            bias=np.asarray(bias, np.float64),
            scale=np.asarray(sigma, np.float64),
            names=tuple(names),
            interactions=interactions,
        )
        return cls(_with_exact(table, library), library.fingerprint, None, "", {})

    def with_probe(self, probe: "Probe") -> Self:
        """One more property from a probe trained on the same encoder; nothing is encoded again. Raises FieldError,
        VersionError."""
        if self.embeddings is None or probe.encoder != self.encoder:
            raise VersionError(
                f"probe {probe.name!r} belongs to another encoder than this index; build an index with its surrogate"
            )
        if probe.name in self.table.names:
            raise FieldError("property", f"{probe.name!r} is in the index already")
        table = self.table
        return replace(
            self,
            table=replace(
                table,
                values=np.column_stack([table.values, self.embeddings @ probe.beta]),
                bias=np.append(table.bias, probe.bias),
                scale=np.append(table.scale, probe.scale),
                names=(*table.names, probe.name),
            ),
        )

    def restricted(self, library: SynthonLibrary, synthons: "SynthonFilter") -> Self:
        """The index without the products that a filter leaves out. Raises QueryError; VersionError for another
        library."""
        if library.fingerprint != self.library:
            raise VersionError("the index was built for another library; give its own")
        used = synthons.mask(library)
        if self.table.available is not None:
            used &= self.table.available
        return replace(self, table=self.table.with_availability(used))

    # --- questions ---------------------------------------------------------------------------------------------------

    def search(self, query: Query, *, should_stop: ShouldStop | None = None, threads: int | None = None) -> Hits:
        """The k best products: see `lyceum_apex.search`."""
        return search(self.table, query, should_stop=should_stop, threads=threads)

    def iter_search(
        self, query: Query, *, should_stop: ShouldStop | None = None, threads: int | None = None
    ) -> Iterator[SearchProgress | Hits]:
        """Progress, last the hits."""
        return iter_search(self.table, query, should_stop=should_stop, threads=threads)

    def count(
        self,
        constraints: Mapping[str, Bounds],
        *,
        objective: str | Mapping[str, float] | None = None,
        maximize: bool = True,
        cutoff: float | None = None,
        should_stop: ShouldStop | None = None,
        threads: int | None = None,
    ) -> CountResult:
        """How many products lie within bounds, and reach `cutoff` if given: see `lyceum_apex.counting`."""
        return count(
            self.table,
            constraints,
            objective=objective,
            maximize=maximize,
            cutoff=cutoff,
            should_stop=should_stop,
            threads=threads,
        )

    def describe(
        self,
        objective: str | Mapping[str, float],
        constraints: Mapping[str, Bounds] | None = None,
        *,
        bins: int = 0,
        quantiles: Sequence[float] = (),
        values: Sequence[float] = (),
        should_stop: ShouldStop | None = None,
        threads: int | None = None,
    ) -> "Distribution":
        """Quantiles, histogram and ranks of values of an objective: see `lyceum_apex.quantiles`."""
        from lyceum_apex.quantiles import describe

        return describe(
            self.table,
            objective,
            constraints,
            bins=bins,
            quantiles=quantiles,
            values=values,
            should_stop=should_stop,
            threads=threads,
        )

    def count_grid(
        self,
        axes: Sequence["Axis"],
        constraints: Mapping[str, Bounds] | None = None,
        *,
        minimum: tuple[Mapping[str, float], float] | None = None,
        should_stop: ShouldStop | None = None,
        threads: int | None = None,
    ) -> list[int]:
        """Counts for every combination of alternative bounds: see `lyceum_apex.grids`."""
        from lyceum_apex.grids import count_grid

        return count_grid(self.table, axes, constraints, minimum=minimum, should_stop=should_stop, threads=threads)

    def score(self, r: npt.ArrayLike, s: npt.ArrayLike) -> FloatArray:
        """Properties [n, P] of products r [n], s [n, 4] (-1 pads)."""
        return score(self.table, r, s)

    def slack(self, properties: FloatArray, constraints: Mapping[str, Bounds]) -> FloatArray:
        """Slack [n] of scored products: 0 where all constraints hold, else minus the violations in units of sigma."""
        return slack(self.table, properties, constraints)

    def explain(self, r: int, s: Sequence[int]) -> Explanation:
        """Contributions of the legs of one product and of their pairs; with the bias they sum to its score."""
        return explain(self.table, r, s)

    # --- storage -----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """One safetensors blob; equal indexes give equal bytes."""
        state = {
            "kind": "apex.index/1",
            "sizes": [list(groups) for groups in self.table.sizes],
            "names": list(self.table.names),
            "library": self.library,
            "encoder": self.encoder,
            "reconstruction": dict(self.reconstruction),
            "values": self.table.values,
            "bias": self.table.bias,
            "scale": self.table.scale,
        }
        if self.embeddings is not None:
            state["embeddings"] = self.embeddings
        if self.table.interactions is not None:
            state["interactions.names"] = list(self.table.interactions.names)
            state["interactions.factors"] = self.table.interactions.factors
        return encode_state(state)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Inverse of `to_bytes`; raises ValueError for anything else."""
        state = decode_state(blob)
        if state.get("kind") != "apex.index/1":
            raise ValueError(f"not an index: the blob says it is {state.get('kind')!r}")
        table = ContributionTable(
            sizes=tuple(map(tuple, state["sizes"])),
            values=state["values"],
            bias=state["bias"],
            scale=state["scale"],
            names=tuple(state["names"]),
            interactions=Interactions(tuple(state["interactions.names"]), state["interactions.factors"])
            if "interactions.names" in state
            else None,
        )
        return cls(table, state["library"], state.get("embeddings"), state["encoder"], state["reconstruction"])

    def save(self, path: Path) -> None:
        path.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls.from_bytes(path.read_bytes())


def _with_exact(table: ContributionTable, library: SynthonLibrary) -> ContributionTable:
    if not library.columns:
        return table
    for name in library.columns:
        if name in table.names:
            raise FieldError(
                "columns", f"{name!r} is an exact column of the library and a property; rename one of them"
            )
    columns = np.column_stack(list(library.columns.values()))
    return table.with_columns(list(library.columns), columns, _product_scale(library, columns))


def _product_scale(library: SynthonLibrary, legs: FloatArray) -> FloatArray:
    """Standard deviation of additive columns over products, every reaction with the same weight; 1 for a constant
    column.

    Within a reaction the variance of a sum over independent legs is the sum of their variances: no product is visited.
    """
    means = np.empty((library.n_reactions, legs.shape[1]))
    within = np.empty_like(means)
    for r, (starts, sizes) in enumerate(zip(library.first_leg, library.sizes)):
        groups = [legs[start : start + size] for start, size in zip(starts, sizes)]
        means[r] = sum(group.mean(0) for group in groups)
        within[r] = sum(group.var(0) for group in groups)
    sigma = np.sqrt(within.mean(0) + means.var(0))
    rounding = 1e-12 * np.abs(legs).max(0)  # a constant column does not come out at exactly 0
    return np.where(sigma > rounding, sigma, 1.0)
