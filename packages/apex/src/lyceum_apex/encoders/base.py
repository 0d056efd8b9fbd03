"""What both encoders share: ragged features, reading SMILES, and initial weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lyceum_apex.assembly import Molecule, any_metal
from lyceum_apex.errors import FieldError
from lyceum_base import Streams

WIDTH = 64
"""d and H: size of product embeddings and of synthon features [repo]."""


@dataclass(frozen=True, eq=False)
class Features:
    """Molecules as rows of ragged arrays: molecule m owns rows `offsets[k][m] : offsets[k][m + 1]` of `arrays[k]`."""

    offsets: Mapping[str, npt.NDArray[np.int64]]
    arrays: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.offsets.values()))) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> "Features":
        """The molecules `rows`, in that order."""
        offsets, arrays = {}, {}
        for key, ends in self.offsets.items():
            counts = ends[rows + 1] - ends[rows]
            starts = _offsets(counts)
            offsets[key] = starts
            arrays[key] = self.arrays[key][np.repeat(ends[rows] - starts[:-1], counts) + np.arange(starts[-1])]
        return Features(offsets, arrays)

    @staticmethod
    def concatenate(parts: Sequence["Features"]) -> "Features":
        keys = list(parts[0].offsets)
        return Features(
            {k: _offsets(np.concatenate([np.diff(p.offsets[k]) for p in parts])) for k in keys},
            {k: np.concatenate([p.arrays[k] for p in parts]) for k in keys},
        )

    @staticmethod
    def from_lists(rows: Mapping[str, Sequence[npt.NDArray[Any]]]) -> "Features":
        """From one array per molecule for every key."""
        return Features(
            {k: _offsets(np.array([len(a) for a in arrays], np.int64)) for k, arrays in rows.items()},
            {k: np.concatenate(arrays) for k, arrays in rows.items()},
        )


def _offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


class Encoder(nn.Module, ABC):
    """From molecules to vectors. Weights are set by `initialise`, never by torch's global generator."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def featurise(cls, molecules: Sequence[Molecule]) -> Features:
        """Arrays of molecules whose attachment atoms are "*" (atomic number 0)."""

    @abstractmethod
    def forward(self, features: Features) -> torch.Tensor:
        """Float32 [n, 64]."""


def read(smiles: Sequence[str], first: int = 0) -> list[Molecule]:
    """Molecules with attachment metals replaced by "*"; FieldError on `smiles[first + i]` where RDKit cannot read
    one."""
    from rdkit import Chem, rdBase

    molecules = []
    with rdBase.BlockLogs():
        for i, text in enumerate(smiles):
            molecule = Chem.MolFromSmiles(text) if text else None
            if molecule is None:
                raise FieldError(f"smiles[{first + i}]", f"RDKit cannot read {text!r}")
            for (index,) in molecule.GetSubstructMatches(any_metal()):
                molecule.GetAtomWithIdx(index).SetAtomicNum(0)
            molecules.append(molecule)
    return molecules


def initialise(module: nn.Module, streams: Streams) -> None:
    """Kaiming-uniform matrices (He et al., arXiv 1502.01852), zero biases, unit LayerNorms.

    A part may carry `fan_in`, the number of inputs that count where most are 0, or infinity to start its map at 0.
    """
    generator = streams.torch_generator("apex.weights")
    with torch.no_grad():
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if isinstance(part, nn.LayerNorm):
                    parameter.fill_(1.0 if name == "weight" else 0.0)
                elif name == "bias":
                    parameter.zero_()
                else:
                    bound = math.sqrt(3.0 / getattr(part, "fan_in", parameter.shape[-1]))
                    parameter.uniform_(-bound, bound, generator=generator)
