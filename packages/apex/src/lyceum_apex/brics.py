"""A combinatorial library out of ordinary molecules: cut them at BRICS bonds and recombine the pieces.

Every molecule is cut at all its BRICS bonds. A piece with one cut (one port) is an end, a piece with two is a linker.
Two ends whose BRICS environments may bond make a two-component reaction; a linker with an end on either side makes a
three-component one, one reaction per pair of linker environments.

Rules: Degen, Wegscheid-Gerlach, Zaliani, Rarey, "On the art of compiling and using 'drug-like' chemical fragment
    spaces", ChemMedChem 3 (2008) 1503, as in RDKit's BRICS module. This is how the APEX paper (arXiv 2510.24380,
    section 4) makes its benchmark.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lyceum_apex.assembly import METAL_NUMBERS, METALS
from lyceum_apex.errors import FieldError
from lyceum_base import Streams

SynthonRow = tuple[str, int, str, str]
"""(reaction id, R-group from 1, synthon id, SMILES)"""


@dataclass(frozen=True)
class Fragments:
    """Pieces with the metals already in place, sorted, by the BRICS environment of their ports."""

    ends: dict[str, tuple[str, ...]]  # environment -> SMILES with [U] at the port
    linkers: dict[
        tuple[str, str], tuple[str, ...]
    ]  # environments (sorted) -> SMILES with [U] at the first, [Np] at the second


@cache
def _partners() -> dict[str, tuple[str, ...]]:
    """Environment -> environments it may bond to."""
    from rdkit.Chem import BRICS

    partners: dict[str, set[str]] = defaultdict(set)
    for group in BRICS.reactionDefs:
        for left, right, _ in group:
            left, right = left.rstrip("ab"), right.rstrip("ab")
            partners[left].add(right)
            partners[right].add(left)
    return {label: tuple(sorted(others, key=int)) for label, others in partners.items()}


def _cut(molecule: Any) -> Iterator[Any]:
    """Pieces of a molecule cut at all its BRICS bonds; ports are dummy atoms whose isotope is the environment."""
    from rdkit import Chem
    from rdkit.Chem import BRICS

    editable = Chem.RWMol(molecule)
    for (begin, end), (begin_label, end_label) in BRICS.FindBRICSBonds(molecule):  # type: ignore[no-untyped-call]
        order = editable.GetBondBetweenAtoms(begin, end).GetBondType()
        editable.RemoveBond(begin, end)
        for atom, label in ((begin, begin_label), (end, end_label)):
            dummy = Chem.Atom(0)
            dummy.SetIsotope(int(label.rstrip("ab")))
            editable.AddBond(atom, editable.AddAtom(dummy), order)
    Chem.SanitizeMol(editable)
    yield from Chem.GetMolFrags(editable, asMols=True)


def fragment(smiles: Sequence[str], n_max: int, seed: int) -> Fragments:
    """Cut at most `n_max` of the molecules, drawn without replacement by `seed`; unreadable ones raise FieldError."""
    from rdkit import Chem, rdBase

    if n_max < 1:
        raise FieldError("max_molecules", f"{n_max} given; it must be at least 1")
    order = np.argsort(Streams(seed).uniform("apex.brics.molecules", shape=(len(smiles),)), kind="stable")
    pieces: set[str] = set()
    for index in np.sort(order[:n_max]):
        with rdBase.BlockLogs():
            molecule = Chem.MolFromSmiles(smiles[index])
        if molecule is None:
            raise FieldError(f"smiles[{index}]", f"RDKit cannot read {smiles[index]!r}")
        if any(atom.GetAtomicNum() in (0, *METAL_NUMBERS) for atom in molecule.GetAtoms()):
            marks = f"*, {', '.join(METALS)}"
            raise FieldError(f"smiles[{index}]", f"{smiles[index]!r} has one of the atoms that mark cuts: {marks}")
        pieces.update(Chem.MolToSmiles(piece, isomericSmiles=True) for piece in _cut(molecule))
    ends: dict[str, list[str]] = defaultdict(list)
    linkers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for piece in sorted(pieces):
        molecule = Chem.MolFromSmiles(piece)
        ports = sorted(
            (a for a in molecule.GetAtoms() if a.GetAtomicNum() == 0), key=lambda a: (a.GetIsotope(), a.GetIdx())
        )
        labels = [str(port.GetIsotope()) for port in ports]
        if len(ports) not in (1, 2):
            continue
        for port, number in zip(ports, (92, 93)):
            port.SetIsotope(0)
            port.SetAtomicNum(number)
        if len(ports) == 1:
            ends[labels[0]].append(Chem.MolToSmiles(molecule))
        else:
            linkers[labels[0], labels[1]].append(Chem.MolToSmiles(molecule))
    return Fragments(
        ends={label: tuple(ends[label]) for label in sorted(ends, key=int)},
        linkers={pair: tuple(linkers[pair]) for pair in sorted(linkers, key=lambda pair: (int(pair[0]), int(pair[1])))},
    )


def recombine(fragments: Fragments) -> list[SynthonRow]:
    """The synthon table of all two- and three-component reactions the fragments allow. Raises FieldError when there
    is none."""
    partners = _partners()
    rows: list[SynthonRow] = []
    ids: dict[str, str] = {}

    def add(reaction: str, rgroup: int, molecules: Sequence[str], metal: str = "U") -> None:
        for text in molecules:
            synthon_id = ids.setdefault(text, f"f{len(ids)}")
            rows.append((reaction, rgroup, synthon_id, text.replace("[U]", f"[{metal}]")))

    for left, molecules in fragments.ends.items():
        for right in partners[left]:
            if right in fragments.ends and int(left) <= int(right):
                add(f"b{left}-{right}", 1, molecules)
                add(f"b{left}-{right}", 2, fragments.ends[right])
    for (left, right), middles in fragments.linkers.items():
        sides = [[text for label in partners[side] for text in fragments.ends.get(label, ())] for side in (left, right)]
        if sides[0] and sides[1]:
            add(f"b{left}-x-{right}", 1, sides[0])
            add(f"b{left}-x-{right}", 2, middles)
            add(f"b{left}-x-{right}", 3, sides[1], "Np")
    if not rows:
        raise FieldError("smiles", "no two fragments of these molecules can bond; give more or larger molecules")
    return rows
