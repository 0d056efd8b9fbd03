"""Molecules as arrays: what the encoders read, cut out once by RDKit.

No torch here: the chunks run in worker processes, which would each take seconds to import it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lyceum_apex.assembly import Molecule, any_metal, join_many
from lyceum_apex.errors import FieldError
from lyceum_apex.library import ProductBatch, SynthonLibrary

BITS = 2048
ELEMENTS = (
    1,
    5,
    6,
    7,
    8,
    9,
    14,
    15,
    16,
    17,
    33,
    34,
    35,
    53,
)  # the 15th class is everything else, attachment atoms included
DEGREES = 7  # 1..7
CHARGES = 7  # -3..3
ORDERS = 4  # single, double, triple, other

_CHUNK = 1024


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


def featurise(encoder: str, smiles: Sequence[str], first: int = 0) -> Features:
    """Features of molecules for the encoder of that name, in chunks that run wherever `joblib.parallel_config` says.

    Raises FieldError on `smiles[first + i]`.
    """
    from joblib import Parallel, delayed

    starts = range(0, max(len(smiles), 1), _CHUNK)
    return Features.concatenate(
        Parallel()(delayed(_chunk)(encoder, list(smiles[i : i + _CHUNK]), first + i) for i in starts)
    )


def featurise_products(encoder: str, library: SynthonLibrary, batch: ProductBatch) -> Features:
    """Features of products of a library, without writing their SMILES. Raises AssemblyError."""
    from joblib import Parallel, delayed

    parts = library.synthon_smiles(batch)
    starts = range(0, max(len(parts), 1), _CHUNK)
    return Features.concatenate(Parallel()(delayed(_product_chunk)(encoder, parts[i : i + _CHUNK]) for i in starts))


def _chunk(encoder: str, smiles: list[str], first: int) -> Features:
    return _FEATURES[encoder](read(smiles, first))


def _product_chunk(encoder: str, products: list[list[str]]) -> Features:
    return _FEATURES[encoder](list(join_many(products)))


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


def morgan_counts(molecules: Sequence[Molecule]) -> Features:
    """Morgan counts as (bit, log(1 + count)) pairs; attachment atoms are "*" (atomic number 0)."""
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=BITS)
    bits, counts = [], []
    for molecule in molecules:
        found = generator.GetCountFingerprint(molecule).GetNonzeroElements()
        bits.append(np.fromiter(found.keys(), np.int32, len(found)))
        counts.append(np.log1p(np.fromiter(found.values(), np.float32, len(found))))
    return Features.from_lists({"bit": bits, "count": counts})


def graphs(molecules: Sequence[Molecule]) -> Features:
    """Kekulised graphs: classes of atoms, ends and orders of bonds; attachment atoms are "*" (atomic number 0)."""
    from rdkit import Chem

    element = {number: i for i, number in enumerate(ELEMENTS)}
    order = {Chem.BondType.SINGLE: 0, Chem.BondType.DOUBLE: 1, Chem.BondType.TRIPLE: 2}
    atoms, bonds = [], []
    for molecule in molecules:
        # Iterating by index: RDKit's sequences of atoms and bonds cost more than what is read from them.
        molecule = Chem.Mol(molecule)
        Chem.Kekulize(molecule, clearAromaticFlags=True)
        rows = [
            (
                element.get(a.GetAtomicNum(), len(ELEMENTS)),
                min(max(a.GetDegree(), 1), DEGREES) - 1,
                min(max(a.GetFormalCharge(), -3), 3) + 3,
            )
            for a in map(molecule.GetAtomWithIdx, range(molecule.GetNumAtoms()))
        ]
        atoms.append(np.array(rows, np.int16).reshape(-1, 3))
        ends = [
            (b.GetBeginAtomIdx(), b.GetEndAtomIdx(), order.get(b.GetBondType(), 3))
            for b in map(molecule.GetBondWithIdx, range(molecule.GetNumBonds()))
        ]
        bonds.append(np.array(ends, np.int16).reshape(-1, 3))
    return Features.from_lists({"atom": atoms, "bond": bonds})


_FEATURES: dict[str, Callable[[Sequence[Molecule]], Features]] = {"ecfp": morgan_counts, "mpnn": graphs}
