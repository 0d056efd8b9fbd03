"""The factoriser: e(x), the embedding of a product, as a sum of one vector per leg.

Source: Pedawi et al., "APEX", arXiv 2510.24380, section 3. With h_s the features of synthon s from a network of their own,

    rho_{r,g}  = P1( mean_{s in S_{r,g}} P0(h_s) )          R-group feature, invariant to the order of the list
    kappa_r    = Q1( sum_g Q0(rho_{r,g}) )                  reaction feature
    K_{r,g}    = Key(rho_{r,g} + kappa_r)  in R^{d x a}     associative key
    v_s        = Val(h_s) in R^a                            associative value
    u_{r,g,s}  = K_{r,g} v_s in R^d                         leg embedding
    e^(x)      = sum_g u_{r,g,s_g}

The weights know nothing of a particular library, so they apply to another one. Encoding a library costs one pass over its distinct synthons
and one over its R-groups, however many products there are.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lyceum_apex import ridge
from lyceum_apex.encoders import WIDTH, featurise, featurise_products, initialise, make_encoder
from lyceum_apex.encoders.base import Features
from lyceum_apex.errors import FieldError, VersionError
from lyceum_apex.library import ProductBatch, SynthonLibrary
from lyceum_apex.surrogate import Surrogate, embed_features
from lyceum_apex.training import descend, load_weights, one_thread, weights
from lyceum_base import Checkpoint, ShouldStop, State, Streams, decode_state, encode_state, run_to_end

FloatArray = npt.NDArray[np.float64]

BLOCKS = 4  # [paper][repo]
ASSOCIATIVE_DIM = 64  # a [paper][repo]
BATCH = 300  # products of one reaction [paper][repo]
DEFAULT_STEPS = {"ecfp": 1000, "mpnn": 3000}
POOL_PER_LEG = 2.0
_LEARNING_RATE = 2e-3
_STATE_EVERY = 250
_VARIANCE_FLOOR = 1e-6


class ResNet(nn.Module):
    """Residual perceptron of width H: four blocks of (LayerNorm, ReLU, Linear) twice, the last Linear starting at 0, then a Linear."""

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


class Factorizer:
    """A trained factoriser; make one by `fit`, `from_state` or `from_bytes`.

    It works on standardised embeddings, (e - centre) / spread; `centre` goes to the legs in equal parts, so that e^ is the plain sum of legs.
    """

    def __init__(self, network: LegNetwork, centre: FloatArray, spread: FloatArray, surrogate: str) -> None:
        self.network = network
        self.centre = centre
        self.spread = spread
        self.surrogate = surrogate

    def leg_embeddings(self, library: SynthonLibrary) -> FloatArray:
        """u, float64 [L, 64]: e^(x) is the sum over the legs of x."""
        features = featurise(self.network.synthons, library.smiles)
        groups, reactions = [], []
        for r, (starts, sizes) in enumerate(zip(library.first_leg, library.sizes)):
            for start, size in zip(starts, sizes):
                groups.append(torch.from_numpy(library.leg_smiles[start : start + size]).long())
                reactions.append(r)
        with torch.no_grad(), one_thread():
            u = self.network(features, groups, reactions).numpy().astype(np.float64)
        share = np.concatenate([np.full(sum(sizes), 1.0 / len(sizes)) for sizes in library.sizes])
        return u * self.spread + share[:, None] * self.centre

    # --- training ------------------------------------------------------------------------------------------------------------

    @classmethod
    def iter_fit(
        cls,
        library: SynthonLibrary,
        surrogate: Surrogate,
        *,
        steps: int | None = None,
        batch: int = BATCH,
        associative_dim: int = ASSOCIATIVE_DIM,
        seed: int = 0,
        resume: State | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[Checkpoint]:
        """Fit to a library; the last state is read by `from_state`.

        Each step takes `batch` products of one reaction, drawn uniformly from a pool that was assembled and embedded once. Stages:
        assemble, train. Raises FieldError (`steps`, `batch`, `associative_dim`), AssemblyError, Stopped.
        """
        steps = DEFAULT_STEPS[surrogate.encoder.name] if steps is None else steps
        for name, value in (("steps", steps), ("batch", batch), ("associative_dim", associative_dim)):
            if value < 1:
                raise FieldError(name, f"{value} given; at least 1")
        if resume is not None and "centre" in resume:
            yield Checkpoint(resume, "train", steps, steps)
            return
        streams = Streams(seed)
        network = LegNetwork(surrogate.encoder.name, associative_dim)
        initialise(network, streams.child("apex.factorizer"))
        yield Checkpoint(None, "assemble", 0)
        pool = Pool.draw(library, surrogate, streams)
        synthons = featurise(network.synthons, library.smiles)
        centre, spread = pool.moments()
        targets = torch.from_numpy(((pool.embeddings - centre) / spread).astype(np.float32))

        def loss_at(step: int) -> torch.Tensor:
            r = int(streams.integers("apex.factorizer.reaction", step, high=library.n_reactions))
            first, last = pool.starts[r], pool.starts[r + 1]
            order = np.argsort(streams.uniform("apex.factorizer.products", step, shape=(last - first,)), kind="stable")
            rows = first + order[:batch]
            present, place, offset = [], [], 0
            for start, column in zip(library.first_leg[r], pool.products.s[rows].T):
                legs, inverse = np.unique(start + column, return_inverse=True)
                present.append(legs)
                place.append(inverse + offset)
                offset += len(legs)
            keys, inverse = np.unique(library.leg_smiles[np.concatenate(present)], return_inverse=True)
            groups = torch.from_numpy(inverse).split([len(legs) for legs in present])
            u = network(synthons.take(keys.astype(np.int64)), groups, [0] * len(groups))
            estimate = sum(u.index_select(0, torch.from_numpy(column)) for column in place)
            e = targets[torch.from_numpy(rows)]
            variance = e.var(0, correction=0).clamp_min(_VARIANCE_FLOOR)
            return ((e - estimate).square().mean(0) / variance).mean()

        yield from descend(
            network,
            loss_at,
            stage="train",
            steps=steps,
            learning_rate=_LEARNING_RATE,
            state_every=_STATE_EVERY,
            extra=dict,
            resume=resume,
            should_stop=should_stop,
        )
        yield Checkpoint(cls(network, centre, spread, surrogate.fingerprint).to_state(), "train", steps, steps)

    @classmethod
    def fit(
        cls,
        library: SynthonLibrary,
        surrogate: Surrogate,
        *,
        steps: int | None = None,
        batch: int = BATCH,
        associative_dim: int = ASSOCIATIVE_DIM,
        seed: int = 0,
    ) -> Self:
        """`iter_fit` run to its end."""
        run = cls.iter_fit(library, surrogate, steps=steps, batch=batch, associative_dim=associative_dim, seed=seed)
        return cls.from_state(run_to_end(run))

    # --- storage -------------------------------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        return {
            "kind": "apex.factorizer/1",
            "encoder": self.network.synthons.name,
            "associative_dim": self.network.associative_dim,
            "surrogate": self.surrogate,
            "centre": self.centre,
            "spread": self.spread,
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
        return cls(network, state["centre"], state["spread"], state["surrogate"])

    def to_bytes(self) -> bytes:
        return encode_state(self.to_state())

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        return cls.from_state(decode_state(blob))


class Pool:
    """Products of every reaction with their embeddings; those of reaction r are rows `starts[r]` to `starts[r + 1]`."""

    def __init__(self, products: ProductBatch, embeddings: npt.NDArray[np.float32], starts: npt.NDArray[np.int64]) -> None:
        self.products = products
        self.embeddings = embeddings
        self.starts = starts

    @classmethod
    def draw(cls, library: SynthonLibrary, surrogate: Surrogate, streams: Streams) -> Self:
        parts = []
        for r in range(library.n_reactions):
            n = min(library.products_of[r], max(BATCH, int(POOL_PER_LEG * sum(library.sizes[r]))))
            parts.append(library.draw(n, [r], streams.child("apex.factorizer.pool", r)))
        products = ProductBatch(np.concatenate([p.r for p in parts]), np.concatenate([p.s for p in parts]))
        features = featurise_products(surrogate.encoder, library, products)
        return cls(products, embed_features(surrogate.encoder, features), np.cumsum([0] + [len(p) for p in parts]))

    def moments(self) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation [64] with equal weight for every reaction."""
        weight = np.repeat(1.0 / np.diff(self.starts), np.diff(self.starts)) / (len(self.starts) - 1)
        e = self.embeddings.astype(np.float64)
        centre = weight @ e
        return centre, np.sqrt(np.maximum(weight @ (e - centre) ** 2, _VARIANCE_FLOOR))
