"""Active search: the best products by an oracle that is too dear to ask about all of them (docking, an assay).

First a random sample is scored.  Then, round by round, a Gaussian process over legs (`lyceum_apex.leg_process`) learns
from all scores so far, its posterior mean becomes a table of contributions, and the engine finds the products that are
best by it, exactly and over the whole library; those are scored next.  Two choices serve the top of the list: scores
worse than the median of the random sample are taken as that median, because how bad a bad product is says nothing of
the best; and every round takes what looks best, since products that disappoint correct the model where it matters.

A failed score (nan) is a call that found nothing: its product is not asked again and teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lyceum_apex.contributions import MAX_MAGNITUDE, MAX_RGROUPS, ContributionTable, Interactions, score
from lyceum_apex.errors import FieldError
from lyceum_apex.interactions import LegModel
from lyceum_apex.leg_process import WIDTH, fit_process
from lyceum_apex.library import ProductBatch, SynthonLibrary
from lyceum_apex.query import Bounds, Query, check_constraints, rank, slack
from lyceum_apex.search import search
from lyceum_base import ShouldStop, Stopped, Streams, decode_state, encode_state

FloatArray = NDArray[np.float64]

_SCORE = "score"
_GIVEN = "given "  # before the names of the given table, so that one of them may be "score"
_SPARE = 20  # products drawn for each one wanted, so that enough of them meet the constraints
_LANDMARKS = 512
_BRUTE = 10**7  # up to so many products a full scan is as fast as a pruned one


@dataclass(frozen=True, kw_only=True)
class ActivePlan:
    """How the calls of an oracle are spent.

    Args:
        budget: products scored in all, at least 1; a smaller library is scored whole.
        rounds: searches after the random sample, each for an equal share of what is left of the budget; 0 for none.
            More follow where a round met too few products within the constraints.
        initial: products of the random sample; None for a fifth of the budget.
        maximize: whether large scores are good.
        constraints: (lower, upper) by property of the table that `ActiveSearch` is given; products outside are never
            asked.
        seed: of the random sample.

    Raises:
        FieldError: `budget`, `rounds`, `initial`; QueryError for a bound.
    """

    budget: int
    rounds: int = 8
    initial: int | None = None
    maximize: bool = True
    constraints: Mapping[str, Bounds] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise FieldError("budget", f"{self.budget} given; at least 1")
        if self.rounds < 0:
            raise FieldError("rounds", f"{self.rounds} given; at least 0")
        if self.initial is not None and not 1 <= self.initial <= self.budget:
            raise FieldError("initial", f"{self.initial} given; 1 to the budget, {self.budget}")
        check_constraints(self.constraints)

    def shares(self, products: int) -> list[int]:
        """Products to ask in the random sample and in each round, for a library of so many."""
        budget = min(self.budget, products)
        first = budget if not self.rounds else min(self.initial or max(self.budget // 5, 1), budget)
        later = (budget - first) * np.arange(self.rounds + 1) // max(self.rounds, 1)
        return [first, *(int(n) for n in np.diff(later) if n)]


@dataclass(frozen=True, eq=False)
class ActiveState:
    """What has been asked and answered: all that a search needs to go on.

    asked: products in the order of asking.  scores float64[m]: of the first m of them, nan where the oracle failed.
    rounds: products asked in each round that has begun.
    """

    asked: ProductBatch
    scores: FloatArray
    rounds: tuple[int, ...] = ()

    @classmethod
    def empty(cls) -> Self:
        nothing = ProductBatch(np.empty(0, np.int32), np.empty((0, MAX_RGROUPS), np.int32))
        return cls(nothing, np.empty(0))

    @property
    def pending(self) -> ProductBatch:
        """Products that wait for a score."""
        return ProductBatch(self.asked.r[len(self.scores) :], self.asked.s[len(self.scores) :])

    def tell(self, scores: ArrayLike) -> Self:
        """With the scores of the first of the pending products, in their order. Raises FieldError (`scores`)."""
        values = np.asarray(scores, np.float64)
        if values.ndim != 1 or not 1 <= len(values) <= len(self.pending):
            raise FieldError("scores", f"shape {list(values.shape)} given; {len(self.pending)} products wait for one")
        wrong = np.flatnonzero(np.abs(values) > MAX_MAGNITUDE)
        if len(wrong):
            reason = f"{values[wrong[0]]} given; a score is at most {MAX_MAGNITUDE:g} in size, nan where it failed"
            raise FieldError(f"scores[{wrong[0]}]", reason)
        return replace(self, scores=np.concatenate([self.scores, values]))

    def to_bytes(self) -> bytes:
        """One safetensors blob; equal states give equal bytes."""
        arrays = {"r": self.asked.r, "s": self.asked.s, "scores": self.scores}
        return encode_state({"kind": "apex.active/1", "rounds": list(self.rounds), **arrays})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Inverse of `to_bytes`; raises ValueError for anything else."""
        state = decode_state(blob)
        if state.get("kind") != "apex.active/1":
            raise ValueError(f"not an active search: the blob says it is {state.get('kind')!r}")
        return cls(ProductBatch(state["r"], state["s"]), state["scores"], tuple(state["rounds"]))


@dataclass(frozen=True, eq=False)
class ActiveResult:
    """Scored products from the best down, ties by reaction and synthons: products, scores float64[n].

    calls: scores received, those of failed products included.  failed: how many were nan.
    """

    products: ProductBatch
    scores: FloatArray
    calls: int
    failed: int
    state: ActiveState


class ActiveSearch:
    """The plan for one library. `propose` is a function of the state alone, so a stored state goes on as if nothing
    had happened.

    Args:
        library: what is searched.
        plan: how.
        table: contributions of the properties that the plan's constraints name, with stock; None without constraints.

    Raises:
        FieldError: `constraints[name]` that the table does not have.
    """

    def __init__(self, library: SynthonLibrary, plan: ActivePlan, table: ContributionTable | None = None) -> None:
        known = () if table is None else table.names
        for name in plan.constraints:
            if name not in known:
                raise FieldError(f"constraints[{name}]", f"unknown property; known are {', '.join(known) or 'none'}")
        self.library = library
        self.plan = plan
        self.table = table
        self._features: FloatArray | None = None

    @property
    def features(self) -> FloatArray:
        """phi float64[L, d] of the legs; made when it is first used."""
        if self._features is None:
            self._features = leg_features(self.library)
        return self._features

    def propose(self, state: ActiveState, *, should_stop: ShouldStop | None = None) -> ActiveState:
        """With the products of the next round pending; as it is when some are pending still, or nothing is left to ask.

        Raises Stopped.
        """
        shares = np.cumsum(self.plan.shares(self.library.n_products))
        while not len(state.pending) and len(state.asked) < shares[-1]:
            planned = len(state.rounds) < len(shares)
            if not planned and not state.rounds[-1]:
                break  # no product is left that meets the constraints
            wanted = int(shares[len(state.rounds)] if planned else shares[-1]) - len(state.asked)
            model = self._model(state, should_stop)
            batch = self._random(state, wanted) if model is None else self._best(state, wanted, model, should_stop)
            if not len(batch) and model is None:  # too few products meet the constraints to be met at random
                batch = self._best(state, wanted, _nothing(self.library), should_stop)
            asked = ProductBatch(np.concatenate([state.asked.r, batch.r]), np.concatenate([state.asked.s, batch.s]))
            state = ActiveState(asked, state.scores, (*state.rounds, len(batch)))
        return state

    def result(self, state: ActiveState) -> ActiveResult:
        """What has been found so far."""
        found = np.flatnonzero(np.isfinite(state.scores))
        products, scores = ProductBatch(state.asked.r[found], state.asked.s[found]), state.scores[found]
        sign = 1.0 if self.plan.maximize else -1.0
        order = rank(np.zeros(len(found)), sign * scores, np.column_stack([products.r, products.s]))
        return ActiveResult(
            ProductBatch(products.r[order], products.s[order]),
            scores[order],
            len(state.scores),
            len(state.scores) - len(found),
            state,
        )

    def _model(self, state: ActiveState, should_stop: ShouldStop | None) -> LegModel | None:
        """The process given all scores of the state, signed so that large is good; None for fewer than two scores."""

        def check() -> None:
            if should_stop is not None and should_stop():
                raise Stopped

        y = (1.0 if self.plan.maximize else -1.0) * state.scores
        known = np.isfinite(y)
        if np.count_nonzero(known) < 2:
            return None
        sample = y[: state.rounds[0]][known[: state.rounds[0]]]
        sample = sample if len(sample) else y[known]
        worst = float(np.median(sample))
        model, _ = fit_process(
            self.library.sizes,
            self.features,
            state.asked.r[: len(y)][known],
            state.asked.s[: len(y)][known],
            np.maximum(y[known], worst),
            mean=float(np.maximum(sample, worst).mean()),
            streams=Streams(self.plan.seed).child("apex.active.fit", len(state.rounds)),
            check=check,
        )
        return model

    def _random(self, state: ActiveState, wanted: int) -> ProductBatch:
        """New products drawn at random, as many as wanted if so many of those drawn meet the constraints."""
        streams = Streams(self.plan.seed).child("apex.active.sample", len(state.rounds))
        spare = _SPARE if self.plan.constraints else 1
        drawn = min(self.library.n_products, spare * wanted + len(state.asked))
        batch = self.library.draw(drawn, range(self.library.n_reactions), streams)
        kept = ~_among(batch, state.asked)
        if self.table is not None:
            kept &= slack(self.table, score(self.table, batch.r, batch.s), self.plan.constraints) == 0
            if self.table.available is not None:
                legs = self.library.legs(batch)
                kept &= (self.table.available[legs] | (legs < 0)).all(axis=1)
        rows = np.flatnonzero(kept)[:wanted]
        return ProductBatch(batch.r[rows], batch.s[rows])

    def _best(self, state: ActiveState, wanted: int, model: LegModel, should_stop: ShouldStop | None) -> ProductBatch:
        """The new products that look best to the model and meet the constraints."""
        query = Query(
            objective=_SCORE,
            k=wanted + len(state.asked),  # so many that enough new ones are among them
            constraints={f"{_GIVEN}{name}": bounds for name, bounds in self.plan.constraints.items()},
            engine="brute" if self.library.n_products <= _BRUTE else "pruned",
        )
        hits = search(_with_score(self.library, self.table, model), query, should_stop=should_stop)
        batch = ProductBatch(hits.reaction, hits.synthons)
        rows = np.flatnonzero(~_among(batch, state.asked) & (hits.slack == 0))[:wanted]
        return ProductBatch(batch.r[rows], batch.s[rows])


@dataclass(frozen=True, eq=False)
class Request:
    """Products to score, and the state in which they are asked: `resume=state` asks them again."""

    products: ProductBatch
    state: ActiveState


def iter_active_search(
    library: SynthonLibrary,
    plan: ActivePlan,
    *,
    table: ContributionTable | None = None,
    batch: int = 1000,
    resume: ActiveState | None = None,
    should_stop: ShouldStop | None = None,
) -> Generator[Request, ArrayLike, ActiveResult]:
    """Yields requests of at most `batch` products, takes their scores by `send`, returns the result.

    Raises FieldError (`scores`), Stopped.
    """
    plans = ActiveSearch(library, plan, table)
    state = resume or ActiveState.empty()
    while len((state := plans.propose(state, should_stop=should_stop)).pending):
        pending = state.pending
        scores = yield Request(ProductBatch(pending.r[:batch], pending.s[:batch]), state)
        if np.shape(scores) != (min(batch, len(pending)),):
            reason = f"shape {list(np.shape(scores))} given; {min(batch, len(pending))} products were asked"
            raise FieldError("scores", reason)
        state = state.tell(scores)
    return plans.result(state)


def active_search(
    library: SynthonLibrary,
    oracle: Callable[[list[str]], ArrayLike],
    plan: ActivePlan,
    *,
    table: ContributionTable | None = None,
    batch: int = 1000,
    should_stop: ShouldStop | None = None,
) -> ActiveResult:
    """`iter_active_search` with an oracle that scores SMILES, nan where it fails.

    Products that do not assemble count as failed calls; the oracle never sees them.
    """
    steps = iter_active_search(library, plan, table=table, batch=batch, should_stop=should_stop)
    try:
        request = next(steps)
        while True:
            smiles = library.products_smiles(request.products)
            whole = [text for text in smiles if text is not None]
            scores = np.full(len(smiles), np.nan)
            if whole:
                scores[[text is not None for text in smiles]] = oracle(whole)
            request = steps.send(scores)
    except StopIteration as end:
        result: ActiveResult = end.value
        return result


def leg_features(library: SynthonLibrary) -> FloatArray:
    """phi float64[L, d], d <= `WIDTH`, whose inner products are close to the similarity of two synthons.

    Similarity is min-max (Tanimoto for counts: Ralaivola et al., "Graph kernels for chemical informatics", Neural
    Networks 18 (2005) 1093) of log(1 + Morgan counts).  phi are its principal axes by the Nystroem method (Williams and
    Seeger, NIPS 13 (2001) 682) on at most `_LANDMARKS` synthons.
    """
    from scipy.sparse import csc_matrix, csr_matrix

    from lyceum_apex.features import BITS, morgan_counts, read

    counts = morgan_counts(read(library.smiles))
    shape = (len(library.smiles), BITS)
    rows = csr_matrix((counts.arrays["count"].astype(np.float64), counts.arrays["bit"], counts.offsets["bit"]), shape)
    total = np.asarray(rows.sum(axis=1)).ravel()
    order = np.argsort(Streams(0).uniform("apex.active.landmarks", shape=len(total)), kind="stable")
    landmarks = np.sort(order[:_LANDMARKS])
    similar = np.empty((len(total), len(landmarks)))
    columns = csc_matrix(rows)
    for i, landmark in enumerate(landmarks):
        own = rows[landmark]
        shared = np.minimum(columns[:, own.indices].toarray(), own.data).sum(axis=1)
        similar[:, i] = shared / np.maximum(total + total[landmark] - shared, 1e-9)
    size, axes = np.linalg.eigh(similar[landmarks])
    kept = np.flatnonzero(size > 1e-9 * size[-1])[::-1][:WIDTH]
    phi: FloatArray = similar @ axes[:, kept] / np.sqrt(size[kept])
    return phi[library.leg_smiles]


def _nothing(library: SynthonLibrary) -> LegModel:
    """A model to which all products are equal."""
    return LegModel(np.zeros(1), np.zeros((library.n_legs, 1)), np.zeros((library.n_legs, 1, MAX_RGROUPS, 1)))


def _among(batch: ProductBatch, asked: ProductBatch) -> NDArray[np.bool_]:
    """Which products of the batch have been asked."""
    both = np.concatenate([np.column_stack([b.r, b.s]) for b in (batch, asked)])
    code = np.unique(both, axis=0, return_inverse=True)[1].ravel()
    return np.isin(code[: len(batch)], code[len(batch) :])


def _with_score(library: SynthonLibrary, given: ContributionTable | None, model: LegModel) -> ContributionTable:
    """The given table's properties and, last, the score."""
    pairs = model.factors
    if given is None:
        return ContributionTable(
            tuple(map(tuple, library.sizes)),
            model.values,
            model.bias,
            np.ones(1),
            (_SCORE,),
            interactions=Interactions((_SCORE,), pairs),
        )
    names = [f"{_GIVEN}{name}" for name in given.names]
    interacting = [_SCORE]
    if given.interactions is not None:
        width = max(pairs.shape[3], given.interactions.rank)
        pairs = np.concatenate([_padded(given.interactions.factors, width), _padded(pairs, width)], axis=1)
        interacting = [*(f"{_GIVEN}{name}" for name in given.interactions.names), _SCORE]
    return ContributionTable(
        given.sizes,
        np.concatenate([given.values, model.values], axis=1),
        np.concatenate([given.bias, model.bias]),
        np.append(given.scale, 1.0),
        (*names, _SCORE),
        given.available,
        Interactions(tuple(interacting), pairs),
    )


def _padded(factors: FloatArray, width: int) -> FloatArray:
    return np.pad(factors, ((0, 0), (0, 0), (0, 0), (0, width - factors.shape[3])))
