"""The surrogate: f_i(x) = b_i + beta_i . e(x), linear probes on one encoder shared by all properties.

Source: Pedawi et al., "APEX", arXiv 2510.24380, section 3. The encoder is trained so that ridge regression inside
every batch predicts each row from the others (leave-one-out, `lyceum_apex.ridge`); Gaussian noise of scale 1 on the
embeddings keeps their scale from collapsing and prepares the probes for the factoriser's error. Because f is linear
in e, whatever writes e(x) as a sum over synthons writes every property as such a sum: `lyceum_apex.factorizer`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from lyceum_apex import ridge
from lyceum_apex.contributions import MAX_MAGNITUDE
from lyceum_apex.encoders import WIDTH, Encoder, initialise, make_encoder
from lyceum_apex.errors import FieldError
from lyceum_apex.features import Features, featurise
from lyceum_apex.training import descend, load_weights, one_thread, weights
from lyceum_base import (
    Checkpoint,
    ShouldStop,
    State,
    Stopped,
    Streams,
    decode_state,
    encode_state,
    run_to_end,
    sha256_arrays,
)

BATCH = 200  # [paper]
NOISE = 1.0  # [paper][repo]
PROBE_EPS = 1.0  # [repo]
REFIT_ROWS = 50_000
DEFAULT_STEPS = {"ecfp": 500, "mpnn": 300}  # [choice] held-out R2 changes little after these; the paper takes 100,000
_LEARNING_RATE = {"ecfp": 1e-2, "mpnn": 2e-3}  # [choice] for so few steps; the paper takes 1e-3
_STATE_EVERY = {"ecfp": 250, "mpnn": 25}
_MIN_ROWS = 50
_BLOCK = 2048  # molecules between two ticks
_EMBED_CHUNK = 512

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Probe:
    """One property as a linear function of the embedding: bias + beta . e.

    `scale` is the property's standard deviation in training (sigma), `mean` its mean, `r2` the R2 on rows held out of
    the fit; `encoder` is the fingerprint of the encoder it belongs to.
    """

    name: str
    beta: FloatArray
    bias: float
    mean: float
    scale: float
    r2: float
    encoder: str


@dataclass(frozen=True, eq=False)
class Surrogate:
    """A frozen encoder and its probes; make one by `fit`, `from_state` or `from_bytes`."""

    encoder: Encoder
    probes: tuple[Probe, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(probe.name for probe in self.probes)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the encoder; probes added later do not change it."""
        return _fingerprint(self.encoder)

    def probe(self, name: str) -> Probe:
        """Raises FieldError on `property`."""
        for probe in self.probes:
            if probe.name == name:
                return probe
        raise FieldError("property", f"{name!r} given; the surrogate has {', '.join(self.names)}")

    def embed(self, smiles: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embeddings [n, 64]. Raises FieldError on `smiles[i]`."""
        return embed_features(self.encoder, featurise(self.encoder.name, smiles))

    def predict(self, smiles: Sequence[str]) -> FloatArray:
        """Properties [n, P] in the order of `names`."""
        beta = np.stack([probe.beta for probe in self.probes])
        values: FloatArray = self.embed(smiles).astype(np.float64) @ beta.T
        values += np.array([probe.bias for probe in self.probes])
        return values

    def add_probe(self, name: str, smiles: Sequence[str], y: npt.ArrayLike, *, seed: int = 0) -> Self:
        """A surrogate with one more property, fitted by ridge on the frozen embedding. A tenth of the rows is held
        out for its R2."""
        if name in self.names:
            raise FieldError("property", f"{name!r} is there already")
        values = check_table(smiles, y, [name])
        train, held = _split(len(smiles), seed)
        _check_varies(values[train], [name])
        (probe,) = _probes(self.embed(smiles), values, [name], train, held, seed, self.fingerprint)
        return replace(self, probes=(*self.probes, probe))

    # --- training ----------------------------------------------------------------------------------------------------

    @classmethod
    def iter_fit(
        cls,
        smiles: Sequence[str],
        y: npt.ArrayLike,
        names: Sequence[str],
        *,
        encoder: str = "ecfp",
        steps: int | None = None,
        seed: int = 0,
        resume: State | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[Checkpoint]:
        """Train on molecules and their properties `y` [n, P]; the last state is read by `from_state`.

        `ecfp` is a perceptron on Morgan counts, `mpnn` the paper's message-passing network, about 20 times slower on
        a CPU. `steps` defaults to 500 and 300. A tenth of the rows is held out; the final probes are one float64
        ridge on up to 50,000 of the others. Stages: featurise, train, refit. Raises FieldError (`smiles[i]`, `y`,
        `names`, `encoder`, `steps`), Stopped.
        """
        values = check_table(smiles, y, names)
        train, held = _split(len(smiles), seed)
        _check_varies(values[train], names)
        network = make_encoder(encoder)
        steps = DEFAULT_STEPS[encoder] if steps is None else steps
        if steps < 1:
            raise FieldError("steps", f"{steps} given; at least 1")
        if resume is not None and "probes" in resume:
            yield Checkpoint(resume, "refit", 1, 1)
            return
        streams = Streams(seed)
        initialise(network, streams)
        parts = []
        for first in range(0, len(smiles), _BLOCK):
            yield Checkpoint(None, "featurise", first, len(smiles))
            if should_stop is not None and should_stop():
                raise Stopped
            parts.append(featurise(network.name, smiles[first : first + _BLOCK], first))
        features = Features.concatenate(parts)
        mean, scale = values[train].mean(0), values[train].std(0, ddof=1)
        targets = torch.from_numpy(((values - mean) / scale).astype(np.float32))
        batches = _Batches(train, streams)

        def loss_at(step: int) -> torch.Tensor:
            rows = batches.at(step)
            embedding = network(features.take(rows))
            noise = torch.from_numpy(
                streams.normal("apex.surrogate.noise", step, shape=tuple(embedding.shape)).astype(np.float32)
            )
            return ridge.leave_one_out(embedding + NOISE * noise, targets[torch.from_numpy(rows)], PROBE_EPS).loss

        yield from descend(
            network,
            loss_at,
            stage="train",
            steps=steps,
            learning_rate=_LEARNING_RATE[encoder],
            state_every=_STATE_EVERY[encoder],
            resume=resume,
            should_stop=should_stop,
        )
        yield Checkpoint(None, "refit", 0, 1)
        embeddings = embed_features(network, features, should_stop)
        probes = _probes(embeddings, values, names, train, held, seed, _fingerprint(network))
        metrics = {f"r2_{i}": probe.r2 for i, probe in enumerate(probes[:64])}
        yield Checkpoint(cls(network, tuple(probes)).to_state(), "refit", 1, 1, metrics)

    @classmethod
    def fit(
        cls,
        smiles: Sequence[str],
        y: npt.ArrayLike,
        names: Sequence[str],
        *,
        encoder: str = "ecfp",
        steps: int | None = None,
        seed: int = 0,
    ) -> Self:
        """`iter_fit` run to its end."""
        return cls.from_state(run_to_end(cls.iter_fit(smiles, y, names, encoder=encoder, steps=steps, seed=seed)))

    # --- storage -----------------------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        return {
            "kind": "apex.surrogate/1",
            "encoder": self.encoder.name,
            **weights(self.encoder),
            "probes": [
                {"name": p.name, "bias": p.bias, "mean": p.mean, "scale": p.scale, "r2": p.r2} for p in self.probes
            ],
            "beta": np.stack([p.beta for p in self.probes]),
        }

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Inverse of `to_state`; raises ValueError for anything else."""
        if state.get("kind") != "apex.surrogate/1":
            raise ValueError(f"not a surrogate: the state says it is {state.get('kind')!r}")
        encoder = make_encoder(state["encoder"])
        load_weights(encoder, state)
        encoder.requires_grad_(False)
        fingerprint = _fingerprint(encoder)
        probes = [Probe(beta=beta, encoder=fingerprint, **entry) for entry, beta in zip(state["probes"], state["beta"])]
        return cls(encoder, tuple(probes))

    def to_bytes(self) -> bytes:
        return encode_state(self.to_state())

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        return cls.from_state(decode_state(blob))


def check_table(smiles: Sequence[str], y: npt.ArrayLike, names: Sequence[str]) -> FloatArray:
    """`y` as float64 [n, P]. Raises FieldError for a wrong shape or a number that is not finite."""
    values = np.asarray(y, np.float64)
    if values.ndim == 1:
        values = values[:, None]
    if not names or len(set(names)) != len(names) or not all(names):
        raise FieldError("names", f"{list(names)} given; at least one name, all different and not empty")
    if values.shape != (len(smiles), len(names)):
        raise FieldError(
            "y",
            f"shape {list(values.shape)} given; [{len(smiles)}, {len(names)}] expected (molecules, names)",
        )
    if len(smiles) < _MIN_ROWS:
        raise FieldError("smiles", f"{len(smiles)} molecules given; at least {_MIN_ROWS} are needed")
    bad = np.argwhere(~(np.abs(values) <= MAX_MAGNITUDE))
    if len(bad):
        value = values[tuple(bad[0])]
        limits = f"every value must be finite and at most {MAX_MAGNITUDE:g} in size"
        raise FieldError(f"y[{bad[0][0]}]", f"{names[bad[0][1]]} is {value}; {limits}")
    return values


def _check_varies(training: FloatArray, names: Sequence[str]) -> None:
    """Raises FieldError for a property without variation over the rows that are trained on."""
    constant = np.flatnonzero(training.max(0) - training.min(0) < 1 / MAX_MAGNITUDE)
    if len(constant):
        raise FieldError(
            f"names[{constant[0]}]",
            f"{names[constant[0]]} has the same value in every training row; there is nothing to learn",
        )


def embed_features(
    encoder: Encoder, features: Features, should_stop: ShouldStop | None = None
) -> npt.NDArray[np.float32]:
    """Embeddings [n, 64] of featurised molecules."""
    result = np.empty((len(features), WIDTH), np.float32)
    for first in range(0, len(features), _EMBED_CHUNK):
        if should_stop is not None and should_stop():
            raise Stopped
        rows = np.arange(first, min(first + _EMBED_CHUNK, len(features)))
        with torch.no_grad(), one_thread():
            result[rows] = encoder(features.take(rows)).numpy()
    return result


class _Batches:
    """Rows of batch t: epoch after epoch in an order keyed by the epoch; what does not fill a batch is left for other
    epochs."""

    def __init__(self, rows: npt.NDArray[np.int64], streams: Streams) -> None:
        self._rows, self._streams = rows, streams
        self._size = min(BATCH, len(rows))
        self._epoch, self._order = -1, rows

    def at(self, step: int) -> npt.NDArray[np.int64]:
        epoch, place = divmod(step, len(self._rows) // self._size)
        if epoch != self._epoch:
            keys = self._streams.uniform("apex.surrogate.order", epoch, shape=(len(self._rows),))
            self._epoch, self._order = epoch, self._rows[np.argsort(keys, kind="stable")]
        return self._order[place * self._size : (place + 1) * self._size]


def _split(n: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Training rows and a tenth held out, both ascending."""
    order = np.argsort(Streams(seed).uniform("apex.surrogate.held_out", shape=(n,)), kind="stable")
    held = max(n // 10, 1)
    return np.sort(order[held:]), np.sort(order[:held])


def _probes(
    embeddings: npt.NDArray[np.float32],
    values: FloatArray,
    names: Sequence[str],
    train: npt.NDArray[np.int64],
    held: npt.NDArray[np.int64],
    seed: int,
    fingerprint: str,
) -> list[Probe]:
    if len(train) > REFIT_ROWS:
        keys = Streams(seed).uniform("apex.surrogate.refit", shape=(len(train),))
        train = np.sort(train[np.argsort(keys, kind="stable")[:REFIT_ROWS]])
    beta, bias = ridge.fit(embeddings[train], values[train], PROBE_EPS)
    r2 = ridge.r_squared(values[held], embeddings[held] @ beta.T + bias)
    mean, scale = values[train].mean(0), values[train].std(0, ddof=1)
    return [
        Probe(name, beta[i], float(bias[i]), float(mean[i]), float(scale[i]), float(r2[i]), fingerprint)
        for i, name in enumerate(names)
    ]


def _fingerprint(encoder: Encoder) -> str:
    return sha256_arrays(weights(encoder))
