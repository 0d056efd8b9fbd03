"""The interactions of an index: what its surrogate sees in products and a sum over legs cannot say.

A surrogate embeds whole molecules, so it can score pairs of synthons as more than the sum of their legs; the
factorisation loses that. Here sampled products are embedded, and pair terms are fitted to f - f^, the surrogate's
prediction minus the additive one, property by property. A property keeps its pair terms only if they lower the error on
products held out of the fit.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lyceum_apex import ridge
from lyceum_apex.contributions import MAX_RGROUPS, ContributionTable, Interactions, score
from lyceum_apex.errors import FieldError, VersionError
from lyceum_apex.factorizer import Factorizer
from lyceum_apex.features import featurise_products
from lyceum_apex.interactions import FloatArray, fit_interactions
from lyceum_apex.library import ProductBatch, SynthonLibrary
from lyceum_apex.surrogate import Surrogate, embed_features
from lyceum_base import Checkpoint, ShouldStop, Stopped, Streams

MAX_RANK = 8
PER_LEG = 20.0  # products sampled for each leg: a leg has up to 3 q factors to learn
MAX_PRODUCTS = 100_000
PENALTIES = (10.0, 3.0, 1.0, 0.3)
_ROUNDS = 8
_HELD_OUT = 10  # one product in so many chooses the penalty
_BLOCK = 2048  # products between two ticks


def iter_fit_residuals(
    library: SynthonLibrary,
    surrogate: Surrogate,
    factorizer: Factorizer,
    rank: int,
    *,
    seed: int = 0,
    should_stop: ShouldStop | None = None,
) -> Iterator[Checkpoint]:
    """Progress, last the state {names, factors [L, M, 4, rank], reconstruction}: properties with pair terms, and R2 of
    f^ with them against f on the factoriser's held-out products (by property; empty when it knows another library).

    Stage: interactions. Raises FieldError (`interactions_rank`), VersionError, AssemblyError, Stopped.
    """
    if not 1 <= rank <= MAX_RANK:
        raise FieldError("interactions_rank", f"{rank} given; 1 to {MAX_RANK}, or 0 for none")
    if factorizer.surrogate != surrogate.fingerprint:
        raise VersionError("the factoriser was fitted to another surrogate; fit it again to this one")
    beta = np.stack([probe.beta for probe in surrogate.probes]).T
    names = surrogate.names
    table = ContributionTable(
        sizes=tuple(map(tuple, library.sizes)),
        values=factorizer.leg_embeddings(library) @ beta,
        bias=np.zeros(len(names)),
        scale=np.ones(len(names)),
        names=names,
    )
    drawn = _draw(library, factorizer, seed)
    truth = np.empty((len(drawn), len(names)))
    for first in range(0, len(drawn), _BLOCK):
        yield Checkpoint(None, "interactions", first, len(drawn))
        if should_stop is not None and should_stop():
            raise Stopped
        block = ProductBatch(drawn.r[first : first + _BLOCK], drawn.s[first : first + _BLOCK])
        features = featurise_products(surrogate.encoder.name, library, block)
        truth[first : first + _BLOCK] = embed_features(surrogate.encoder, features, should_stop) @ beta
    residual = truth - score(table, drawn.r, drawn.s)
    kept, factors = _fit(table, drawn, residual, rank, seed, should_stop)
    pairs = Interactions(tuple(names[j] for j in kept), factors) if kept else None
    state = {
        "names": [names[j] for j in kept],
        "factors": factors,
        "reconstruction": _report(table, pairs, library, factorizer, beta),
    }
    yield Checkpoint(state, "interactions", len(drawn), len(drawn))


def _draw(library: SynthonLibrary, factorizer: Factorizer, seed: int) -> ProductBatch:
    """Products of every reaction, `PER_LEG` for each leg and about `MAX_PRODUCTS` in all, but none of those that the
    factoriser holds out; in a library too small to hold any out, all."""
    streams = Streams(seed)
    per_leg = min(PER_LEG, MAX_PRODUCTS / library.n_legs)
    parts = []
    for r in range(library.n_reactions):
        n = min(library.products_of[r], max(1, int(per_leg * sum(library.sizes[r]))))
        parts.append(library.draw(n, [r], streams.child("apex.residuals", r)))
    batch = ProductBatch(np.concatenate([p.r for p in parts]), np.concatenate([p.s for p in parts]))
    if factorizer.library != library.fingerprint:
        return batch
    both = np.concatenate([factorizer.held_legs, library.legs(batch)])
    code = np.unique(both, axis=0, return_inverse=True)[1].ravel()
    spare = ~np.isin(code[len(factorizer.held_legs) :], code[: len(factorizer.held_legs)])
    return ProductBatch(batch.r[spare], batch.s[spare]) if spare.any() else batch


def _fit(
    table: ContributionTable,
    products: ProductBatch,
    residual: FloatArray,
    rank: int,
    seed: int,
    should_stop: ShouldStop | None,
) -> tuple[list[int], FloatArray]:
    """Which properties gain on held-out products, with the best penalty for each, and their factors [L, M, 4, q]."""
    held = np.arange(len(products)) % _HELD_OUT == _HELD_OUT - 1

    def fit(rows: NDArray[np.bool_], columns: list[int], penalty: float, init: FloatArray | None) -> FloatArray:
        if should_stop is not None and should_stop():
            raise Stopped
        return fit_interactions(
            table.sizes,
            products.r[rows],
            products.s[rows],
            residual[rows][:, columns],
            rank=rank,
            ridge=penalty,
            iterations=_ROUNDS,
            seed=seed,
            init=init,
        )

    everything = list(range(len(table.names)))
    errors = [(residual[held] ** 2).mean(axis=0)]
    fits: list[FloatArray] = []
    for penalty in PENALTIES:  # each starts where the one before ended
        fits.append(fit(~held, everything, penalty, fits[-1] if fits else None))
        pairs = Interactions(table.names, fits[-1])
        estimate = score(_pairs_only(table, pairs), products.r[held], products.s[held])
        errors.append(((residual[held] - estimate) ** 2).mean(axis=0))
    best = np.argmin(np.stack(errors), axis=0)  # 0: without
    factors = np.zeros((table.leg_count, len(everything), MAX_RGROUPS, rank))
    for i, penalty in enumerate(PENALTIES, start=1):
        columns = np.flatnonzero(best == i).tolist()
        if columns:
            factors[:, columns] = fit(np.ones(len(held), bool), columns, penalty, fits[i - 1][:, columns])
    kept = np.flatnonzero(best).tolist()
    return kept, factors[:, kept]


def _pairs_only(table: ContributionTable, pairs: Interactions) -> ContributionTable:
    return ContributionTable(
        table.sizes, np.zeros_like(table.values), np.zeros(len(table.names)), table.scale, table.names, None, pairs
    )


def _report(
    table: ContributionTable,
    pairs: Interactions | None,
    library: SynthonLibrary,
    factorizer: Factorizer,
    beta: FloatArray,
) -> dict[str, float]:
    if factorizer.library != library.fingerprint:
        return {}
    first = np.where(table.offsets >= 0, table.offsets, np.iinfo(np.int64).max)
    reaction = np.searchsorted(first[:, 0], factorizer.held_legs[:, 0], side="right") - 1
    synthons = np.where(factorizer.held_legs >= 0, factorizer.held_legs - table.offsets[reaction], -1)
    with_pairs = ContributionTable(table.sizes, table.values, table.bias, table.scale, table.names, interactions=pairs)
    r2 = ridge.r_squared(factorizer.held_embeddings @ beta, score(with_pairs, reaction, synthons))
    return {name: float(value) for name, value in zip(table.names, r2)}
