"""The real entries, fetched through the user's own pip once a cache."""

import csv
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

import lyceum_zoo
from lyceum_zoo.__main__ import main


def test_entries_are_well_formed():
    for entry in lyceum_zoo.entries():
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", entry.name)
        assert lyceum_zoo.ENTRIES[entry.name] is entry
        assert "LICENSE" in entry.files
        for file in entry.files.values():
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
            assert file.size > 0


def test_real1m_is_a_space_of_990829_products():
    with lyceum_zoo.path("real1m", "synthon_space_1M.tsv").open(newline="") as file:
        synthons = list(csv.DictReader(file, delimiter="\t"))
    with lyceum_zoo.path("real1m", "synthon_space_1M.reactions.tsv").open(newline="") as file:
        reactions = list(csv.DictReader(file, delimiter="\t"))
    assert list(synthons[0]) == ["smiles", "synthon_id", "position", "reaction_id"]
    assert (len(synthons), len(reactions)) == (6_273, 42)
    sizes = defaultdict(Counter)
    for synthon in synthons:
        sizes[synthon["reaction_id"]][synthon["position"]] += 1
    assert {r["reaction_id"]: int(r["components"]) for r in reactions} == {r: len(s) for r, s in sizes.items()}
    assert sum(math.prod(s.values()) for s in sizes.values()) == 990_829
    # What an importer must know: an id can stand for two synthons of the same R-group; the SMILES tells them apart.
    by_id = Counter((s["reaction_id"], s["position"], s["synthon_id"]) for s in synthons)
    assert sum(count > 1 for count in by_id.values()) == 3
    assert len({(s["reaction_id"], s["position"], s["smiles"]) for s in synthons}) == 6_273


def test_thrombin_scores_every_product_of_its_reagents():
    folder = lyceum_zoo.path("thrombin")
    reagents = {
        name: [line.split()[1] for line in (folder / name).read_text().splitlines()]
        for name in ("acids.smi", "amino_acids_no_fmoc.smi", "coupled_aa_sub.smi")
    }
    acids, amino_acids, coupled = reagents.values()
    assert acids == [f"CA{i}" for i in range(130)]
    assert amino_acids == [f"AA{i}" for i in range(62)]
    assert coupled == [f"{a}_{b}" for a in amino_acids for b in amino_acids]
    with (folder / "product_scores.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["Product_Code", "Scores"]
    scores = {code: float(score) for code, score in rows}
    assert len(rows) == len(scores) == 499_720
    assert scores.keys() == {f"{acid}_{pair}" for acid in acids for pair in coupled}
    assert min(scores.values()) == -17.828762
    assert all(math.isfinite(score) for score in scores.values())


def test_dockstring_has_58_receptors_each_with_a_box_of_30_angstroms():
    folder = lyceum_zoo.path("dockstring")
    targets = {file.name.removesuffix("_conf.txt") for file in folder.glob("*_conf.txt")}
    assert targets == {file.name.removesuffix("_target.pdbqt") for file in folder.glob("*_target.pdbqt")}
    assert len(targets) == 58
    assert targets >= {"PARP1", "MET", "DRD2", "F10", "ESR1"}
    sizes = {}
    for target in targets:
        lines = (folder / f"{target}_conf.txt").read_text().splitlines()
        values = {key.strip(): float(value) for key, _, value in (line.partition("=") for line in lines if line)}
        assert list(values) == [f"{what}_{axis}" for what in ("center", "size") for axis in "xyz"]
        sizes[target] = [values[f"size_{axis}"] for axis in "xyz"]
        atoms = (folder / f"{target}_target.pdbqt").read_text().splitlines()
        assert sum(line.startswith(("ATOM", "HETATM")) for line in atoms) > 1_000
    assert {target: size for target, size in sizes.items() if size != [30, 30, 30]} == {"DRD2": [30, 30, 32]}


def test_describe_names_source_licence_and_files():
    text = lyceum_zoo.describe("thrombin")
    assert "from chem-tactics==1.2.0 (3,600,736 bytes), licence MIT" in text
    assert "product_scores.csv (12,717,157 bytes)" in text


def test_the_command_fetches_and_prints_folders():
    command = [sys.executable, "-m", "lyceum_zoo", "fetch", "real1m", "thrombin"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [str(lyceum_zoo.path("real1m")), str(lyceum_zoo.path("thrombin"))]


def test_the_command_answers_an_unknown_name_with_one_line_and_status_1(capsys):
    assert main(["fetch", "nope"]) == 1
    assert capsys.readouterr() == ("", "error: unknown zoo entry 'nope'; known: dockstring, real1m, thrombin\n")


def test_the_command_lists_the_entries(capsys):
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith("dockstring: 58 protein targets")


def test_importing_the_package_loads_neither_rich_nor_numpy():
    code = "import sys, lyceum_zoo; print(sorted({'rich', 'numpy', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("entry", lyceum_zoo.entries(), ids=lambda entry: entry.name)
def test_every_real_entry_can_be_had(entry):
    assert {p.name for p in lyceum_zoo.path(entry.name).iterdir()} == set(entry.files)
