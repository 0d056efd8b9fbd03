"""Libraries: importers, products, names, samples and exact columns."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lyceum_apex import ApexIndex, AssemblyError, FieldError, SynthonLibrary, properties
from lyceum_zoo import path as zoo_path

ACYLS = ("CC(=O)[U]", "O=C([U])c1ccccc1", "O=C([U])C1CC1")
AMINES = ("CN[U]", "C1CCN([U])C1")


@pytest.fixture(scope="module")
def real1m() -> SynthonLibrary:
    folder = zoo_path("real1m")
    return SynthonLibrary.from_tsv(folder / "synthon_space_1M.tsv", folder / "synthon_space_1M.reactions.tsv")


def write_tsv(folder: Path, rows: list[tuple[str, str, str, str]]) -> Path:
    """Rows are (reaction, position, id, SMILES)."""
    text = "smiles\tsynthon_id\tposition\treaction_id\n"
    file = folder / "synthons.tsv"
    file.write_text(text + "".join(f"{smiles}\t{name}\t{g}\t{r}\n" for r, g, name, smiles in rows))
    return file


AMIDES = [("amide", "1", f"a{i}", smiles) for i, smiles in enumerate(ACYLS)] + [
    ("amide", "2", f"n{i}", smiles) for i, smiles in enumerate(AMINES)
]


def test_real1m_has_42_reactions_and_990829_products(real1m: SynthonLibrary) -> None:
    assert (real1m.n_reactions, real1m.n_products, real1m.n_legs) == (42, 990_829, 6_273)
    assert sorted(map(len, real1m.sizes)) == [2] * 40 + [3] * 2
    assert all(real1m.smarts)


def test_500_random_products_of_real1m_assemble(real1m: SynthonLibrary) -> None:
    assert None not in real1m.products_smiles(real1m.sample(500, seed=3))


def test_acceptance_04_weight_of_legs_adds_up_to_rdkits_weight_of_products(real1m: SynthonLibrary) -> None:
    library = real1m.with_weight().with_heavy_atoms()
    batch = library.sample(2_000, seed=4)
    legs = library.legs(batch)
    added = np.where(legs >= 0, library.columns["mw"][legs], 0.0).sum(1)
    smiles = [text for text in library.products_smiles(batch) if text is not None]
    np.testing.assert_allclose(added, properties(smiles, ["mw"])[:, 0], rtol=0, atol=1e-9)


def test_acceptance_04_all_four_metals_weigh_nothing() -> None:
    smiles = ("[Am]CC[U]", "[U]CC[Np]", "[Np]CC[Pu]", "[Pu]CO[Am]")
    library = SynthonLibrary.from_rows([("ring", g + 1, "s", text) for g, text in enumerate(smiles)], None)
    library = library.with_weight().with_heavy_atoms()
    product = library.product_smiles(0, [0, 0, 0, 0])
    assert product == "C1CCCOCCC1"
    assert library.columns["mw"].sum() == pytest.approx(properties([product], ["mw"])[0, 0], abs=1e-9)
    assert library.columns["heavy_atoms"].sum() == 8


def test_acceptance_04_real1m_has_353663_products_up_to_500_and_45148_up_to_350_daltons(real1m: SynthonLibrary) -> None:
    library = real1m.with_weight()
    index = ApexIndex.from_leg_table(library, ["zero"], np.zeros((library.n_legs, 1)))
    assert index.count({"mw": (None, 500.0)}).count == 353_663
    assert index.count({"mw": (None, 350.0)}).count == 45_148


def test_product_names_are_unique_and_parse_back(real1m: SynthonLibrary) -> None:
    # Three ids of real1m stand for two synthons of one R-group; the second is told apart by "#2".
    assert sum(name.endswith("#2") for name in real1m.synthon_ids) == 3
    batch = real1m.sample(300, seed=5)
    for r, row in zip(batch.r.tolist(), batch.s.tolist(), strict=True):
        s = tuple(x for x in row if x >= 0)
        assert real1m.parse_name(real1m.product_name(r, s)) == (r, s)


@pytest.mark.parametrize("name", ["nothing~1~2", "amide~a0", "amide~a0~n9", "amide", ""])
def test_a_name_the_library_does_not_have_is_told(tmp_path: Path, name: str) -> None:
    library = SynthonLibrary.from_tsv(write_tsv(tmp_path, AMIDES))
    with pytest.raises(FieldError) as caught:
        library.parse_name(name, "products[3]")
    assert caught.value.field == "products[3]"


def test_double_bonds_and_rings_join(tmp_path: Path) -> None:
    rows = [("olefin", "1", "a", "CC=[U]"), ("olefin", "2", "b", "[U]=C1CCCC1")]
    ring = [("ring", "1", "a", "CC([Np])=N[U]"), ("ring", "2", "b", "[U]C=C(C)O[Np]")]
    library = SynthonLibrary.from_tsv(write_tsv(tmp_path, rows + ring))
    assert library.product_smiles(0, [0, 0]) == "CC=C1CCCC1"
    assert library.product_smiles(1, [0, 0]) == "Cc1cnc(C)o1"


def test_indices_out_of_range_and_unjoined_synthons_are_errors(tmp_path: Path) -> None:
    library = SynthonLibrary.from_tsv(write_tsv(tmp_path, AMIDES))
    with pytest.raises(FieldError, match="synthons\\[1\\]: 2 given"):
        library.product_smiles(0, [0, 2])
    from lyceum_apex.assembly import join, parse_synthon

    with pytest.raises(AssemblyError, match="no partner"):
        join([parse_synthon("C[U]", "a"), parse_synthon("C[Np]", "b")])


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([("r", "1", "a", "C[U]")], "reactions[0]"),
        ([("r", "1", "a", "C[U]"), ("r", "3", "b", "C[U]")], "reactions[0].rgroups[2]"),
        ([("r", "1", "a", "C[U]"), ("r", "5", "b", "C[U]")], "synthons[1].rgroup"),
        ([("r", "1", "a", "C[U]"), ("r", "x", "b", "C[U]")], "synthons[1].position"),
        ([("r", "1", "a", "C[U]"), ("r", "9" * 5000, "b", "C[U]")], "synthons[1].position"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C[U] \x00")], "synthons[1].smiles"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C" * 200_000)], "synthons"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C")], "synthons[1].smiles"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C[U]"), ("r", "2", "c", "C=[U]")], "synthons[2].smiles"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C=[U]")], "reactions[0]"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C[Np]")], "reactions[0]"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C[U]C")], "synthons[1].smiles"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "[U]CC[U]")], "synthons[1].smiles"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "not a molecule")], "synthons[1].smiles"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C[U]"), ("r", "2", "b", "C[U]")], "synthons[2]"),
        ([("r", "1", "a", "F[CH3]([U])"), ("r", "2", "b", "C[U]")], "synthons[0].smiles"),
        ([("r", "1", "a", "C[UH]"), ("r", "2", "b", "C[U]")], "synthons[0].smiles"),
        ([("r", "1", "a", "C[235U]"), ("r", "2", "b", "C[U]")], "synthons[0].smiles"),
        ([("r", "1", "a", "C[U+]"), ("r", "2", "b", "C[U]")], "synthons[0].smiles"),
        ([("r", "1", "a~b", "C[U]")], "synthons[0].synthon_id"),
        ([("", "1", "a", "C[U]")], "synthons[0].reaction_id"),
        ([("r", "1", "a", "C[U]"), ("r", "2", "b", "C[U]"), *[("r", g, "c", "C[Np]") for g in "34"]], "reactions[0]"),
        ([], "synthons"),
    ],
)
def test_a_wrong_row_is_refused_by_its_path(tmp_path: Path, rows: list[tuple[str, str, str, str]], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        SynthonLibrary.from_tsv(write_tsv(tmp_path, rows))
    assert caught.value.field == field


def test_parquet_and_text_give_the_same_library(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    reactions, ids, groups = (["amide"] * 5, [row[2] for row in AMIDES], [int(row[1]) for row in AMIDES])
    table = {"reaction_id": reactions, "synthon_id": ids, "rgroup": groups, "smiles": [row[3] for row in AMIDES]}
    pq.write_table(pa.table(table), tmp_path / "s.parquet")
    pq.write_table(pa.table({"reaction_id": ["amide"], "smarts": [""]}), tmp_path / "r.parquet")
    library = SynthonLibrary.from_parquet(tmp_path / "r.parquet", tmp_path / "s.parquet")
    assert library.to_bytes() == SynthonLibrary.from_tsv(write_tsv(tmp_path, AMIDES)).to_bytes()
    pq.write_table(pa.table({k: v for k, v in table.items() if k != "rgroup"}), tmp_path / "s.parquet")
    with pytest.raises(FieldError, match=r"synthons.rgroup: no such column"):
        SynthonLibrary.from_parquet(tmp_path / "r.parquet", tmp_path / "s.parquet")
    with pytest.raises(FieldError, match="not a Parquet file"):
        SynthonLibrary.from_parquet(tmp_path / "synthons.tsv", tmp_path / "s.parquet")


def test_a_reaction_that_its_table_lists_twice_is_refused_by_its_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    groups = {"reaction_id": ["amide"] * 5, "rgroup": [int(row[1]) for row in AMIDES]}
    synthons = {**groups, "synthon_id": [row[2] for row in AMIDES], "smiles": [row[3] for row in AMIDES]}
    pq.write_table(pa.table(synthons), tmp_path / "s.parquet")
    ids, smarts = ["amide", "ester", "amide"], ["[C:1]>>[C:1]", "", "[N:1]>>[N:1]"]
    pq.write_table(pa.table({"reaction_id": ids, "smarts": smarts}), tmp_path / "r.parquet")
    (tmp_path / "r.tsv").write_text("\n".join(["reaction_id\tReaction", *map("\t".join, zip(ids, smarts))]) + "\n")
    for read in (
        lambda: SynthonLibrary.from_parquet(tmp_path / "r.parquet", tmp_path / "s.parquet"),
        lambda: SynthonLibrary.from_tsv(write_tsv(tmp_path, AMIDES), tmp_path / "r.tsv"),
    ):
        with pytest.raises(FieldError, match="'amide' is repeated") as caught:
            read()
        assert caught.value.field == "reactions[2].reaction_id"


def test_a_smiles_of_two_lines_is_refused() -> None:
    with pytest.raises(FieldError, match=r"synthons\[0\].smiles"):
        SynthonLibrary.from_rows([("r", 1, "a", "C[U]\nCC"), ("r", 2, "b", "C[U]")], None)


def test_a_file_that_is_not_text_is_refused_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = write_tsv(tmp_path, AMIDES)
    marked = tmp_path / "marked.tsv"
    marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert SynthonLibrary.from_tsv(marked).to_bytes() == SynthonLibrary.from_tsv(path).to_bytes()
    path.write_bytes(path.read_bytes() + b"\xff\xfe")
    with pytest.raises(FieldError, match="synthons: is not UTF-8 text"):
        SynthonLibrary.from_tsv(path)


def test_a_parquet_table_that_would_break_the_library_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"reaction_id": ["r"], "smarts": [""]}), tmp_path / "r.parquet")
    rows: dict[str, list[Any]] = {"reaction_id": ["r", "r"], "synthon_id": ["a", "b"], "rgroup": [1, 2]}

    def field(smiles: list[str], columns: tuple[str, ...] = (), damage: bool = False, **more: list[float]) -> str:
        path = tmp_path / "s.parquet"
        pq.write_table(pa.table({**rows, "smiles": smiles, **more}), path, compression="NONE")
        if damage:
            path.write_bytes(path.read_bytes().replace(b"CCCCC", b"CC\xffCC"))
        with pytest.raises(FieldError) as caught:
            SynthonLibrary.from_parquet(tmp_path / "r.parquet", path, columns=columns)
        return caught.value.field

    assert field(["C[U] a\nname", "CC[U]"]) == "synthons[0].smiles"  # the stored file would have one line too many
    assert field(["CCCCC[U]", "CC[U]"], damage=True) == "synthons"
    assert field(["C[U]", "CC[U]"], ("price",), price=[1.0, float("nan")]) == "synthons[1].price"
    assert field(["C[U]", "CC[U]"], ("price",), price=[1e300, 1.0]) == "synthons[0].price"


def test_an_error_comes_whole_out_of_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(FieldError("smiles[3]", "RDKit cannot read 'oops'")))
    assert (str(error), error.field) == ("smiles[3]: RDKit cannot read 'oops'", "smiles[3]")


def test_a_library_comes_back_from_its_bytes(tmp_path: Path) -> None:
    library = SynthonLibrary.from_tsv(write_tsv(tmp_path, AMIDES)).with_weight()
    again = SynthonLibrary.from_bytes(library.to_bytes())
    assert again.to_bytes() == library.to_bytes()
    assert again.fingerprint == library.fingerprint
    assert again.product_smiles(0, [1, 1]) == library.product_smiles(0, [1, 1]) == "O=C(c1ccccc1)N1CCCC1"


def test_samples_are_distinct_reproducible_and_stratified(real1m: SynthonLibrary) -> None:
    first, second, other = (real1m.sample(420, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.s, second.s)
    assert not np.array_equal(first.s, other.s)
    assert np.bincount(first.r).tolist() == [10] * 42
    assert len(np.unique(np.column_stack([first.r, first.s]), axis=0)) == 420
    uniform = real1m.sample(4_000, seed=1, stratify=False)
    share = np.isin(uniform.r, [r for r, groups in enumerate(real1m.sizes) if len(groups) == 3]).mean()
    assert abs(share - 2 * 73**3 / 990_829) < 4 * np.sqrt(0.785 * 0.215 / 4_000)  # four standard errors


def test_a_sample_of_everything_is_everything(tmp_path: Path) -> None:
    rows = [*AMIDES, ("tiny", "1", "a", "C[U]"), ("tiny", "2", "b", "CC[U]")]
    library = SynthonLibrary.from_tsv(write_tsv(tmp_path, rows))
    for stratify in (True, False):
        batch = library.sample(7, seed=0, stratify=stratify)
        assert len({(int(r), *s) for r, s in zip(batch.r, batch.s.tolist(), strict=True)}) == 7
    with pytest.raises(FieldError, match="n: 8 given"):
        library.sample(8, seed=0)


def test_reagents_become_synthons_of_the_same_products() -> None:
    smarts = (
        "[C:1](=[O:2])[OH].[NH2:3][C:4][C:5](=[O:6])[OH].[NH2:7][C:8][C:9](=[O:10])[OH:11]"
        ">>[C:1](=[O:2])[N:3][C:4][C:5](=[O:6])[N:7][C:8][C:9](=[O:10])[O:11]"
    )
    acids, amino_acids = ["OC(=O)c1ccccc1", "CC(=O)O"], ["NCC(=O)O", "N[C@@H](C)C(=O)O"]
    library = SynthonLibrary.from_reagents(smarts, [acids, amino_acids, amino_acids])
    assert library.product_smiles(0, [1, 0, 1]) == "CC(=O)NCC(=O)N[C@@H](C)C(=O)O"
    from rdkit import Chem
    from rdkit.Chem import rdChemReactions

    reagents = tuple(Chem.MolFromSmiles(s) for s in (acids[0], amino_acids[1], amino_acids[0]))
    ((product,),) = rdChemReactions.ReactionFromSmarts(smarts).RunReactants(reagents)
    assert library.product_smiles(0, [0, 1, 0]) == Chem.MolToSmiles(Chem.MolFromSmiles(Chem.MolToSmiles(product)))


@pytest.mark.parametrize(
    ("smarts", "lists", "field"),
    [
        ("[C:1](=[O:2])[OH].[NH2:3]>>[C:1](=[O:2])[N:3]", [["CC(=O)O"], ["CC"]], "lists[1][0]"),
        ("[C:1](=[O:2])[OH].[NH2:3]>>[C:1](=[O:2])[N:3]", [["CC(=O)O"], []], "lists[1]"),
        ("[C:1](=[O:2])[OH].[NH2:3]>>[C:1](=[O:2])[N:3]", [["CC(=O)O"]], "lists"),
        ("[C:1][OH]>>[C:1]", [["CO"]], "smarts"),
        ("[C:1][OH].[N:2]>>[C:1].[N:2]", [["CO"], ["N"]], "smarts"),
        ("nonsense", [["CO"], ["N"]], "smarts"),
    ],
)
def test_a_wrong_reaction_or_reagent_is_refused_by_its_path(smarts: str, lists: list[list[str]], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        SynthonLibrary.from_reagents(smarts, lists)
    assert caught.value.field == field


def test_columns_must_fit_the_legs(tmp_path: Path) -> None:
    library = SynthonLibrary.from_tsv(write_tsv(tmp_path, AMIDES))
    with pytest.raises(FieldError, match=r"leg_values: shape \[4\] given"):
        library.with_columns("price", np.ones(4))
    with pytest.raises(FieldError, match=r"leg_values\[2\]: not finite"):
        library.with_columns("price", [1, 2, np.nan, 4, 5])
    with pytest.raises(FieldError, match="is taken"):
        library.with_weight().with_weight()


MOLECULES = [
    "CCOC(=O)c1ccc(NC(=O)C2CCCC2)cc1",
    "CC(=O)Nc1ccc(OC)cc1",
    "O=C(c1ccccc1)N1CCOCC1",
    "CCN(CC)S(=O)(=O)c1ccccc1",
]


def test_brics_fragments_recombine_to_the_molecules_they_came_from() -> None:
    from rdkit import Chem

    library = SynthonLibrary.from_brics(MOLECULES, n_max=10, seed=0)
    assert library.to_bytes() == SynthonLibrary.from_brics(MOLECULES, n_max=10, seed=5).to_bytes()
    assert {len(groups) for groups in library.sizes} == {2, 3}
    batch = library.sample(library.n_products, seed=0)
    products = library.products_smiles(batch)
    assert None not in products
    assert Chem.CanonSmiles(MOLECULES[2]) in products


def test_brics_takes_n_max_molecules_by_seed_and_names_a_bad_one() -> None:
    small = {SynthonLibrary.from_brics(MOLECULES[:3], n_max=1, seed=seed).smiles for seed in range(8)}
    assert 1 < len(small) <= 3
    with pytest.raises(FieldError, match=r"smiles\[1\]"):
        SynthonLibrary.from_brics([MOLECULES[0], "oops"], n_max=5, seed=0)
    with pytest.raises(FieldError, match=r"smiles\[0\].*mark cuts"):
        SynthonLibrary.from_brics(["*C(=O)NCC"], n_max=5, seed=0)
    with pytest.raises(FieldError, match="no two fragments"):
        SynthonLibrary.from_brics(["CC", "c1ccccc1"], n_max=5, seed=0)
