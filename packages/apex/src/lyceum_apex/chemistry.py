"""Properties of molecules by RDKit: the labels of examples, tests and benchmarks.

mw: molecular weight, g/mol. logp: Crippen's octanol-water log P. tpsa: topological polar surface area, square
    angstroms. hbd, hba: hydrogen-bond donors, acceptors. rotb: rotatable bonds. qed: quantitative estimate of
    drug-likeness (Bickerton 2012), 0 to 1. rings: ring count. fsp3: fraction of sp3 carbons. sa: synthetic
    accessibility (Ertl, Schuffenhauer 2009), 1 easy to 10 hard, where RDKit's Contrib is installed.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lyceum_apex.errors import FieldError

PROPERTIES = ("mw", "logp", "tpsa", "hbd", "hba", "rotb", "qed", "rings", "fsp3", "sa")
_CHUNK = 512


def properties(smiles: Sequence[str], names: Sequence[str] = ("mw", "logp", "tpsa")) -> npt.NDArray[np.float64]:
    """Properties [n, len(names)], in chunks that run wherever `joblib.parallel_config` says. Raises FieldError
    (`smiles[i]`, `names[i]`)."""
    from joblib import Parallel, delayed

    for i, name in enumerate(names):
        if name not in PROPERTIES:
            raise FieldError(f"names[{i}]", f"{name!r} given; known: {', '.join(PROPERTIES)}")
    starts = range(0, max(len(smiles), 1), _CHUNK)
    return np.concatenate(
        Parallel()(delayed(properties_chunk)(list(smiles[i : i + _CHUNK]), tuple(names), i) for i in starts)
    )


def properties_chunk(smiles: Sequence[str], names: Sequence[str], first: int = 0) -> npt.NDArray[np.float64]:
    """One chunk of `properties`; `first` is the number of its first molecule in error messages."""
    from rdkit import Chem, rdBase

    functions = [_function(name) for name in names]
    result = np.empty((len(smiles), len(names)))
    with rdBase.BlockLogs():
        for i, text in enumerate(smiles):
            molecule = Chem.MolFromSmiles(text) if text else None
            if molecule is None:
                raise FieldError(f"smiles[{first + i}]", f"RDKit cannot read {text!r}")
            result[i] = [function(molecule) for function in functions]
    return result


@cache
def _function(name: str) -> Callable[[Any], float]:
    from rdkit.Chem import QED, Descriptors, rdMolDescriptors

    if name == "sa":
        return _synthetic_accessibility()
    known: dict[str, Callable[[Any], float]] = {
        "mw": Descriptors.MolWt,  # type: ignore[attr-defined]  # defined when RDKit is imported
        "logp": lambda molecule: float(rdMolDescriptors.CalcCrippenDescriptors(molecule)[0]),
        "tpsa": rdMolDescriptors.CalcTPSA,
        "hbd": rdMolDescriptors.CalcNumHBD,
        "hba": rdMolDescriptors.CalcNumHBA,
        "rotb": rdMolDescriptors.CalcNumRotatableBonds,
        "qed": QED.qed,
        "rings": rdMolDescriptors.CalcNumRings,
        "fsp3": rdMolDescriptors.CalcFractionCSP3,
    }
    return known[name]


def _synthetic_accessibility() -> Callable[[Any], float]:
    """RDKit ships the scorer as a file beside its library, not as a module."""
    from pathlib import Path

    from rdkit.Chem import RDConfig

    path = Path(RDConfig.RDContribDir) / "SA_Score" / "sascorer.py"
    spec = importlib.util.spec_from_file_location("lyceum_apex_sascorer", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FieldError("names", "'sa' needs RDKit's Contrib folder, which this RDKit does not carry; leave it out")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score: Callable[[Any], float] = module.calculateScore
    return score
