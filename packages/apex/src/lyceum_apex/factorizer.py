"""The factoriser: e(x), the embedding of a product, as a sum of one vector per leg.

Source: Pedawi et al., "APEX", arXiv 2510.24380, section 3. With h_s the features of synthon s from a network of their
own,

    rho_{r,g}  = P1( mean_{s in S_{r,g}} P0(h_s) )          R-group feature, invariant to the order of the list
    kappa_r    = Q1( sum_g Q0(rho_{r,g}) )                  reaction feature
    K_{r,g}    = Key(rho_{r,g} + kappa_r)  in R^{d x a}     associative key
    v_s        = Val(h_s) in R^a                            associative value
    u_{r,g,s}  = K_{r,g} v_s in R^d                         leg embedding
    e^(x)      = sum_g u_{r,g,s_g}

The weights know nothing of a particular library, so they apply to another one. Encoding a library costs one pass over
its distinct synthons and one over its R-groups, however many products there are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lyceum_apex import ridge
from lyceum_apex.encoders import WIDTH, initialise, make_encoder
from lyceum_apex.errors import FieldError, VersionError
from lyceum_apex.features import Features, featurise, featurise_products
from lyceum_apex.library import ProductBatch, SynthonLibrary
from lyceum_apex.surrogate import Surrogate, embed_features
from lyceum_apex.training import descend, load_weights, one_thread, weights
from lyceum_base import Checkpoint, ShouldStop, State, Stopped, Streams, decode_state, encode_state, run_to_end

FloatArray = npt.NDArray[np.float64]

BLOCKS = 4  # [paper][repo]
ASSOCIATIVE_DIM = 64  # a [paper][repo]
BATCH = 300  # products of one reaction [paper][repo]
DEFAULT_STEPS = {"ecfp": 200, "mpnn": 3000}
POOL_PER_LEG = 2.0
POOL_MAX = 100_000
MAX_EFFECTS = 2_000  # legs of a reaction whose main effects are solved for directly
HELD_OUT = 12  # one product of the pool in so many
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_LEARNING_RATE = 2e-3
_STATE_EVERY = 50  # steps; some seconds
_BLOCK = 2048  # products between two ticks
_VARIANCE_FLOOR = 1e-6


class ResNet(nn.Module):
    """Residual perceptron of width H: four blocks of (LayerNorm, ReLU, Linear) twice, the last Linear starting at 0,
    then a Linear."""

    def __init__(self, size_out: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.output = nn.Linear(WIDTH, size_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        y: torch.Tensor = self.output(x)
        return y


class _Block(nn.Sequential):
    def __init__(self) -> None:
        last = nn.Linear(WIDTH, WIDTH)
        last.fan_in = math.inf  # type: ignore[assignment]
        super().__init__(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), last)


class LegNetwork(nn.Module):
    """From synthon features and the shape of a library (or of a part of one) to leg embeddings."""

    def __init__(self, encoder: str, associative_dim: int) -> None:
        super().__init__()
        self.associative_dim = associative_dim
        self.synthons = make_encoder(encoder)
        self.p0, self.p1, self.q0, self.q1 = (ResNet(WIDTH) for _ in range(4))
        self.key = ResNet(WIDTH * associative_dim)
        self.key.output.fan_in = float(WIDTH * associative_dim)  # type: ignore[assignment]
        self.val = ResNet(associative_dim)

    def forward(self, features: Features, groups: Sequence[torch.Tensor], reactions: Sequence[int]) -> torch.Tensor:
        """Leg embeddings [legs, 64].

        Args:
            features: M synthons.
            groups: for each R-group, which of the M synthons its legs have.
            reactions: for each R-group, its reaction, numbered from 0 in this call.
        """
        h = self.synthons(features)
        p0, values = self.p0(h), self.val(h)
        rho = self.p1(torch.stack([p0.index_select(0, group).mean(0) for group in groups]))
        owner = torch.tensor(list(reactions))
        kappa = self.q1(torch.zeros(int(owner.max()) + 1, WIDTH).index_add(0, owner, self.q0(rho)))
        keys = self.key(rho + kappa.index_select(0, owner)).view(len(groups), WIDTH, self.associative_dim)
        return torch.cat([values.index_select(0, group) @ key.T for group, key in zip(groups, keys)])


@dataclass(frozen=True, eq=False)
class Factorizer:
    """A trained factoriser; make one by `fit`, `from_state` or `from_bytes`.

    Args:
        network: works on standardised embeddings, (e - centre) / spread.
        centre, spread: float64 [64]; `centre` goes to the legs of a product in equal parts, so e^ is a plain sum.
        correction: float64 [L, 64], what a ridge fit on the pool adds to the legs of the library it was fitted to.
        library, surrogate: fingerprints of what it was fitted to.
        held_legs, held_embeddings: leg numbers [n, 4] and e [n, 64] of products kept out of the fit, for the report.
    """

    network: LegNetwork
    centre: FloatArray
    spread: FloatArray
    correction: FloatArray
    library: str
    surrogate: str
    held_legs: npt.NDArray[np.int32]
    held_embeddings: npt.NDArray[np.float32]

    def leg_embeddings(self, library: SynthonLibrary) -> FloatArray:
        """u, float64 [L, 64]: e^(x) is the sum over the legs of x.

        Any library will do, but only the one it was fitted to gets the correction.
        """
        features = featurise(self.network.synthons.name, library.smiles)
        u = _network_legs(self.network, library, features) * self.spread + _shares(library) * self.centre
        return u + self.correction if library.fingerprint == self.library else u

    def reconstruction_report(self, library: SynthonLibrary, surrogate: Surrogate) -> dict[str, float]:
        """R2 of f^ against f on the held-out products, by property.

        Raises VersionError for another library or surrogate.
        """
        if library.fingerprint != self.library or surrogate.fingerprint != self.surrogate:
            raise VersionError(
                "the factoriser was fitted to another library or surrogate; its held-out products belong to those"
            )
        beta = np.stack([probe.beta for probe in surrogate.probes]).T
        estimate = _sum_legs(self.leg_embeddings(library), self.held_legs)
        r2 = ridge.r_squared(self.held_embeddings @ beta, estimate @ beta)
        return {name: float(value) for name, value in zip(surrogate.names, r2)}

    # --- training ----------------------------------------------------------------------------------------------------

    @classmethod
    def iter_fit(
        cls,
        library: SynthonLibrary,
        surrogate: Surrogate,
        *,
        steps: int | None = None,
        batch: int = BATCH,
        associative_dim: int = ASSOCIATIVE_DIM,
        encoder: str = "ecfp",
        seed: int = 0,
        resume: State | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[Checkpoint]:
        """Fit to a library; the last state is read by `from_state`.

        A pool of products of every reaction is assembled and embedded once; each step takes up to `batch` of them from
        one reaction drawn uniformly, so that small reactions count as much as large ones. `encoder` is the synthon
        network: `mpnn` as in the paper, or `ecfp`, 20 times faster on a CPU and the default here. At the end the main
        effects that the network has missed on the pool are fitted in closed form. Stages: sample, factorise. Raises
        FieldError (`encoder`, `steps`, `batch`, `associative_dim`), AssemblyError, Stopped.
        """
        if encoder not in DEFAULT_STEPS:
            raise FieldError("encoder", f"{encoder!r} given; accepted: {', '.join(DEFAULT_STEPS)}")
        steps = DEFAULT_STEPS[encoder] if steps is None else steps
        for name, value in (("steps", steps), ("batch", batch), ("associative_dim", associative_dim)):
            if value < 1:
                raise FieldError(name, f"{value} given; at least 1")
        if resume is not None and "correction" in resume:
            yield Checkpoint(resume, "factorise", steps, steps)
            return
        streams = Streams(seed)
        network = LegNetwork(encoder, associative_dim)
        initialise(network, streams.child("apex.factorizer"))
        drawn = _draw(library, streams)
        embeddings = np.empty((len(drawn), WIDTH), np.float32)
        for first in range(0, len(drawn), _BLOCK):
            yield Checkpoint(None, "sample", first, len(drawn))
            if should_stop is not None and should_stop():
                raise Stopped
            block = ProductBatch(drawn.r[first : first + _BLOCK], drawn.s[first : first + _BLOCK])
            features = featurise_products(surrogate.encoder.name, library, block)
            embeddings[first : first + _BLOCK] = embed_features(surrogate.encoder, features)
        pool, held = split_pool(drawn, embeddings, library.n_reactions)
        synthons = featurise(network.synthons.name, library.smiles)
        centre, spread = pool.moments()
        targets = torch.from_numpy(((pool.embeddings - centre) / spread).astype(np.float32))

        def loss_at(step: int) -> torch.Tensor:
            r = int(streams.integers("apex.factorizer.reaction", step, high=library.n_reactions))
            first, last = pool.starts[r], pool.starts[r + 1]
            keys = streams.uniform("apex.factorizer.products", step, shape=(last - first,))
            rows = first + np.argsort(keys, kind="stable")[:batch]
            e = targets[torch.from_numpy(rows)]
            return _loss(network, library, synthons, r, pool.products.s[rows], e)

        yield from descend(
            network,
            loss_at,
            stage="factorise",
            steps=steps,
            learning_rate=_LEARNING_RATE,
            state_every=_STATE_EVERY,
            resume=resume,
            should_stop=should_stop,
        )
        u = _network_legs(network, library, synthons) * spread + _shares(library) * centre
        fitted = cls(
            network,
            centre,
            spread,
            main_effects(library, pool, u),
            library.fingerprint,
            surrogate.fingerprint,
            library.legs(held.products),
            held.embeddings,
        )
        yield Checkpoint(fitted.to_state(), "factorise", steps, steps)

    @classmethod
    def fit(
        cls,
        library: SynthonLibrary,
        surrogate: Surrogate,
        *,
        steps: int | None = None,
        batch: int = BATCH,
        associative_dim: int = ASSOCIATIVE_DIM,
        encoder: str = "ecfp",
        seed: int = 0,
    ) -> Self:
        """`iter_fit` run to its end."""
        run = cls.iter_fit(
            library,
            surrogate,
            steps=steps,
            batch=batch,
            associative_dim=associative_dim,
            encoder=encoder,
            seed=seed,
        )
        return cls.from_state(run_to_end(run))

    # --- storage -----------------------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        return {
            "kind": "apex.factorizer/1",
            "encoder": self.network.synthons.name,
            "associative_dim": self.network.associative_dim,
            "centre": self.centre,
            "spread": self.spread,
            "correction": self.correction,
            "library": self.library,
            "surrogate": self.surrogate,
            "held_legs": self.held_legs,
            "held_embeddings": self.held_embeddings,
            **weights(self.network),
        }

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Inverse of `to_state`; raises ValueError for anything else."""
        if state.get("kind") != "apex.factorizer/1":
            raise ValueError(f"not a factoriser: the state says it is {state.get('kind')!r}")
        network = LegNetwork(state["encoder"], state["associative_dim"])
        load_weights(network, state)
        network.requires_grad_(False)
        return cls(network, **{field.name: state[field.name] for field in fields(cls) if field.name != "network"})

    def to_bytes(self) -> bytes:
        return encode_state(self.to_state())

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        return cls.from_state(decode_state(blob))


@dataclass(frozen=True, eq=False)
class Pool:
    """Products with their embeddings; those of reaction r are rows `starts[r]` to `starts[r + 1]`."""

    products: ProductBatch
    embeddings: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int64]

    def moments(self) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation [64] with equal weight for every reaction."""
        weight = np.repeat(1.0 / np.diff(self.starts), np.diff(self.starts)) / (len(self.starts) - 1)
        e = self.embeddings.astype(np.float64)
        centre = weight @ e
        return centre, np.sqrt(np.maximum(weight @ (e - centre) ** 2, _VARIANCE_FLOOR))


def _draw(library: SynthonLibrary, streams: Streams) -> ProductBatch:
    """Products of every reaction: `POOL_PER_LEG` for each leg, about `POOL_MAX` in all, never less than a batch."""
    per_leg = min(POOL_PER_LEG, POOL_MAX / library.n_legs)
    parts = []
    for r in range(library.n_reactions):
        n = min(library.products_of[r], max(BATCH, int(per_leg * sum(library.sizes[r]))))
        parts.append(library.draw(n, [r], streams.child("apex.factorizer.pool", r)))
    return ProductBatch(np.concatenate([p.r for p in parts]), np.concatenate([p.s for p in parts]))


def split_pool(drawn: ProductBatch, embeddings: npt.NDArray[np.float32], n_reactions: int) -> tuple[Pool, Pool]:
    """A pool to fit to and, one product in `HELD_OUT` of every reaction, one held out.

    In a library too small to spare products both are the same.
    """
    bounds = np.searchsorted(drawn.r, np.arange(n_reactions + 1))
    place = np.arange(len(drawn)) - bounds[drawn.r]
    held = place < (np.diff(bounds) // HELD_OUT)[drawn.r]
    if held.sum() < HELD_OUT:
        pool = Pool(drawn, embeddings, bounds)
        return pool, pool
    pools = []
    for rows in (~held, held):
        products = ProductBatch(drawn.r[rows], drawn.s[rows])
        pools.append(Pool(products, embeddings[rows], np.searchsorted(products.r, np.arange(n_reactions + 1))))
    return pools[0], pools[1]


def _loss(
    network: LegNetwork,
    library: SynthonLibrary,
    synthons: Features,
    r: int,
    s: npt.NDArray[np.int32],
    e: torch.Tensor,
) -> torch.Tensor:
    """mean over dimensions of (e - e^)^2 / Var(e) over products `s` [n, 4] of reaction r with embeddings `e` [n, 64].

    R-group means are taken over the synthons that occur in the batch [repo].
    """
    groups, places, total = [], [], 0
    for start, column in zip(library.first_leg[r], s.T):
        present, place = np.unique(start + column, return_inverse=True)
        places.append(torch.from_numpy(place + total))
        groups.append(present)
        total += len(present)
    distinct, inverse = np.unique(library.leg_smiles[np.concatenate(groups)], return_inverse=True)
    parts = torch.split(torch.from_numpy(inverse), [len(group) for group in groups])
    u = network(synthons.take(distinct.astype(np.int64)), parts, [0] * len(parts))
    estimate = torch.stack([u.index_select(0, place) for place in places]).sum(0)
    variance = e.var(0, correction=0).clamp_min(_VARIANCE_FLOOR)
    return ((e - estimate).square().mean(0) / variance).mean()


def main_effects(library: SynthonLibrary, pool: Pool, u: FloatArray) -> FloatArray:
    """What ridge regression of e - e^ on the legs, reaction by reaction, adds to leg embeddings `u`; float64 [L, 64].

    The best sum of legs for a reaction is its main-effects analysis of variance; the network comes near it for all
    reactions at once, this closes the rest where products were seen. The penalty, one for all reactions, is the one
    of `PENALTIES` with the smallest leave-one-out error on the pool (the identity of `lyceum_apex.ridge`): large
    where the network is good, small where it is not.
    """
    legs = library.legs(pool.products)
    residual = pool.embeddings - _sum_legs(u, legs)
    variance = np.maximum(residual.var(0), _VARIANCE_FLOOR)
    errors = np.zeros(len(PENALTIES))
    solutions = []
    for r, groups in enumerate(library.sizes):
        rows = slice(pool.starts[r], pool.starts[r + 1])
        first = library.first_leg[r][0]
        if sum(groups) > MAX_EFFECTS:
            solutions.append([np.zeros((sum(groups), WIDTH))] * len(PENALTIES))
            continue
        design = np.zeros((rows.stop - rows.start, sum(groups)))
        for column in legs[rows, : len(groups)].T:
            design[np.arange(len(design)), column - first] = 1.0
        with one_thread():  # NumPy's products and eigenvectors round differently on another number of threads
            x, y = torch.from_numpy(design), torch.from_numpy(residual[rows])
            values, vectors = torch.linalg.eigh(x.T @ x)
            rotated = x @ vectors
            moment = rotated.T @ y
            by_penalty = []
            for i, penalty in enumerate(PENALTIES):
                weight = 1.0 / (values.clamp_min(0.0) + penalty)
                effect = weight[:, None] * moment
                leverage = rotated.square() @ weight
                left_out = ((y - rotated @ effect) / (1.0 - leverage)[:, None]).numpy()
                errors[i] += (left_out**2 / variance).mean()
                by_penalty.append((vectors @ effect).numpy())
        solutions.append(by_penalty)
    best = int(np.argmin(errors))
    return np.concatenate([by_penalty[best] for by_penalty in solutions])


def _network_legs(network: LegNetwork, library: SynthonLibrary, features: Features) -> FloatArray:
    """The network's standardised leg embeddings of a whole library, float64 [L, 64]."""
    groups, reactions = [], []
    for r, (starts, sizes) in enumerate(zip(library.first_leg, library.sizes)):
        for start, size in zip(starts, sizes):
            groups.append(torch.from_numpy(library.leg_smiles[start : start + size]).long())
            reactions.append(r)
    with torch.no_grad(), one_thread():
        legs = network(features, groups, reactions).numpy()
    u: FloatArray = legs.astype(np.float64)
    return u


def _shares(library: SynthonLibrary) -> FloatArray:
    """1 / (number of R-groups) of each leg, [L, 1]."""
    return np.concatenate([np.full((sum(sizes), 1), 1.0 / len(sizes)) for sizes in library.sizes])


def _sum_legs(u: FloatArray, legs: npt.NDArray[np.int32]) -> FloatArray:
    """e^ [n, 64] of products given by leg numbers [n, 4], -1 where there is none."""
    total: FloatArray = np.where(legs[:, :, None] >= 0, u[legs], 0.0).sum(1)
    return total
