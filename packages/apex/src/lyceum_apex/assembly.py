"""Products out of synthons, and synthons out of reagents.

A synthon carries one metal atom (U, Np, Pu, Am: Enamine's convention) for every joint. Two synthons that carry the
same metal are joined there: the metals go, their neighbours are bonded with the order of the bond to the metal. A
ring-forming joint is two such joints between the same synthons. RDKit's `molzip` does this without running a
reaction.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from lyceum_apex.errors import AssemblyError, FieldError

METALS = ("U", "Np", "Pu", "Am")
_SYMBOLS = {"SINGLE": "-", "DOUBLE": "=", "TRIPLE": "#"}
METAL_NUMBERS = {92: "U", 93: "Np", 94: "Pu", 95: "Am"}

Molecule = Any  # rdkit.Chem.Mol, whose stubs cover little
Attachments = tuple[tuple[str, str], ...]
"""The joints of a synthon, sorted: (metal, bond order), for example `(("Np", "SINGLE"), ("U", "DOUBLE"))`."""


def parse_synthon(smiles: str, field: str) -> Molecule:
    """The molecule of a synthon; raises FieldError on `field` when RDKit cannot read it."""
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(smiles) if smiles else None
    if molecule is None:
        raise FieldError(
            field, f"RDKit cannot read the SMILES {smiles!r}; give one valid molecule with its attachment atoms"
        )
    return molecule


def attachments(molecule: Molecule, field: str) -> Attachments:
    """The joints of a synthon. Raises FieldError when it has none, repeats a metal, binds a metal to more than one
    atom, or writes one as more than its symbol (its mass would not be the element's)."""
    found: list[tuple[str, str]] = []
    for atom in molecule.GetAtoms():
        metal = METAL_NUMBERS.get(atom.GetAtomicNum())
        if metal is None:
            continue
        if atom.GetDegree() != 1:
            raise FieldError(
                field, f"attachment atom {metal} has {atom.GetDegree()} neighbours; it must have exactly one"
            )
        if atom.GetTotalNumHs() or atom.GetIsotope() or atom.GetFormalCharge():
            raise FieldError(field, f"attachment atom {metal} has hydrogen, an isotope or a charge; write [{metal}]")
        order = str(atom.GetBonds()[0].GetBondType())
        if order not in _SYMBOLS:  # RDKit makes the bond dative where the neighbour has no valence left
            raise FieldError(field, f"the bond to {metal} is {order.lower()}; it must be single, double or triple")
        found.append((metal, order))
    metals = [metal for metal, _ in found]
    if not found:
        raise FieldError(field, f"no attachment atom; a synthon needs at least one of {', '.join(METALS)}")
    if len(set(metals)) < len(metals):
        raise FieldError(
            field, f"attachment atoms {', '.join(sorted(metals))} repeat; each metal may occur once in a synthon"
        )
    return tuple(sorted(found))


def describe(joints: Attachments) -> str:
    """Joints as chemists write them: `[U]=, [Np]-`."""
    return ", ".join(f"[{metal}]{_SYMBOLS[order]}" for metal, order in joints)


@cache
def _zip_parameters() -> Any:
    from rdkit import Chem

    parameters = Chem.MolzipParams()
    parameters.label = Chem.MolzipLabel.AtomType
    parameters.setAtomSymbols(list(METALS))
    return parameters


@cache
def any_metal() -> Molecule:
    """The query that matches attachment atoms."""
    from rdkit import Chem

    return Chem.MolFromSmarts(f"[{','.join(METALS)}]")


def join(synthons: Sequence[Molecule]) -> Molecule:
    """The sanitised product of `synthons`; raises AssemblyError. Sanitising comes last: an aromatic joint is valid
    only whole."""
    from rdkit import Chem, rdBase

    mixture = synthons[0]
    for synthon in synthons[1:]:
        mixture = Chem.CombineMols(mixture, synthon)
    with rdBase.BlockLogs():
        try:
            product = Chem.molzip(mixture, _zip_parameters())
            Chem.SanitizeMol(product)
        except (ValueError, RuntimeError) as error:
            raise AssemblyError(
                f"the synthons do not join to a valid molecule: {str(error).strip().splitlines()[0]}"
            ) from error
    if product.HasSubstructMatch(any_metal()):
        raise AssemblyError("the synthons do not join to one molecule: an attachment atom found no partner")
    return product


def join_many(products: Iterable[Sequence[str]]) -> Iterator[Molecule]:
    """Products of synthon SMILES, each distinct synthon parsed once; raises AssemblyError."""
    from rdkit import Chem

    molecules: dict[str, Molecule] = {}
    for product in products:
        for smiles in product:
            if smiles not in molecules:
                molecules[smiles] = Chem.MolFromSmiles(smiles)
        yield join([molecules[smiles] for smiles in product])


def join_smiles(products: Sequence[Sequence[str]]) -> list[str | None]:
    """Product SMILES for synthon SMILES, one chunk of work; None where the product does not assemble."""
    from rdkit import Chem

    molecules = {smiles: Chem.MolFromSmiles(smiles) for product in products for smiles in product}
    result: list[str | None] = []
    for product in products:
        try:
            result.append(Chem.MolToSmiles(join([molecules[smiles] for smiles in product])))
        except AssemblyError:
            result.append(None)
    return result


def split_reaction(smarts: str) -> list[Any]:
    """Half-reactions that turn the reagents of each R-group into synthons.

    The product template is cut at every bond whose two ends come from different reactants, and a metal is put on both
    ends; the piece of reactant g is the product of half-reaction g. Unmapped product atoms stay with the mapped
    neighbour they hang on. Raises FieldError on `smarts`.
    """
    from rdkit import Chem, rdBase
    from rdkit.Chem import rdChemReactions

    with rdBase.BlockLogs():
        try:
            reaction = rdChemReactions.ReactionFromSmarts(smarts)
        except ValueError as error:
            raise FieldError("smarts", f"RDKit cannot read the reaction {smarts!r}") from error
    reactants = list(reaction.GetReactants())
    if not 2 <= len(reactants) <= 4:
        raise FieldError("smarts", f"the reaction has {len(reactants)} reactants; 2 to 4 are supported")
    if reaction.GetNumProductTemplates() != 1:
        raise FieldError(
            "smarts", f"the reaction has {reaction.GetNumProductTemplates()} products; exactly 1 is supported"
        )
    owner_of_map = {
        a.GetAtomMapNum(): g for g, reactant in enumerate(reactants) for a in reactant.GetAtoms() if a.GetAtomMapNum()
    }
    product = Chem.RWMol(reaction.GetProductTemplate(0))
    owner = {
        a.GetIdx(): owner_of_map[a.GetAtomMapNum()] for a in product.GetAtoms() if a.GetAtomMapNum() in owner_of_map
    }
    grew = True
    while grew:
        grew = False
        for bond in product.GetBonds():
            ends = (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx())
            for near, far in (ends, ends[::-1]):
                if near in owner and far not in owner:
                    owner[far] = owner[near]
                    grew = True
    cut = [b for b in product.GetBonds() if owner.get(b.GetBeginAtomIdx()) != owner.get(b.GetEndAtomIdx())]
    if not cut or len(cut) > len(METALS) or set(owner.values()) != set(range(len(reactants))):
        raise FieldError(
            "smarts",
            f"the product joins its {len(reactants)} reactants by {len(cut)} bonds; 1 to 4 must join all of them",
        )
    joints = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx(), b.GetBondType()) for b in cut]
    for metal, (begin, end, order) in zip(METALS, joints):
        if order not in (Chem.BondType.SINGLE, Chem.BondType.DOUBLE, Chem.BondType.TRIPLE):
            raise FieldError(
                "smarts", "a bond that joins two reactants is aromatic; write the product template in Kekule form"
            )
        product.RemoveBond(begin, end)
        for side in (begin, end):
            product.AddBond(side, product.AddAtom(Chem.Atom(metal)), order)
    halves = []
    pieces = Chem.GetMolFrags(product, asMols=False)
    for g, reactant in enumerate(reactants):
        atoms = [i for piece in pieces for i in piece if any(owner.get(j) == g for j in piece)]
        template = Chem.MolFragmentToSmarts(product, atoms)
        half = rdChemReactions.ReactionFromSmarts(f"({Chem.MolToSmarts(reactant)})>>({template})")
        half.Initialize()
        halves.append(half)
    return halves


def synthon_of(half: Any, reagent: str, field: str) -> str:
    """The synthon SMILES of a reagent: RDKit's first match of the half-reaction. Raises FieldError on `field`."""
    from rdkit import Chem, rdBase

    molecule = parse_synthon(reagent, field)
    with rdBase.BlockLogs():
        for (product,) in half.RunReactants((molecule,)):
            try:
                Chem.SanitizeMol(product)
            except ValueError:
                continue
            return str(Chem.MolToSmiles(product))
    raise FieldError(
        field,
        f"the reagent {reagent!r} does not match the reactant template {Chem.MolToSmarts(half.GetReactantTemplate(0))}",
    )
