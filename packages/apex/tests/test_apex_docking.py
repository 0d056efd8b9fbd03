"""The docking oracle, on small molecules in a part of the PARP1 box, whose maps take a second."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lyceum.apex.v1 import apex_pb2
from lyceum_apex.bench_docking import search_with_oracle
from lyceum_apex.docking import DockingError, Receptor, VinaOracle
from lyceum_apex.errors import FieldError
from lyceum_base import Stopped
from lyceum_runtime.testing import serve

# Vina's place is taken by something that behaves badly; the rest is as it is served.
BAD_VINA = """
import json, os, signal
import meeko  # as the server has
from lyceum_apex.docking import _dock_all, _Task

class Bad:
    def set_ligand_from_string(self, text):
        self.atoms = sum(line.startswith("ATOM") for line in text.splitlines())
    def dock(self, *, exhaustiveness, n_poses):
        if self.atoms == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.atoms == 3:
            while True:
                pass
    def energies(self, *, n_poses):
        return [] if self.atoms == 4 else [[-1.0 - self.atoms]]

task = _Task("", (), (), 1, 1, 1, cpus=2, ligand_seconds=2.0)
answers = sorted(_dock_all(Bad(), ["C", "CC", "CCC", "CCCC", "CCCCC"], task), key=lambda answer: answer["number"])
print(json.dumps([[answer.get("score"), answer["reason"]] for answer in answers]))
"""


@pytest.fixture(scope="module")
def receptor():
    return replace(Receptor.of("PARP1"), size=(12.0, 12.0, 12.0))


@pytest.fixture(scope="module")
def oracle(receptor):
    with VinaOracle(receptor, cpus=2) as oracle:
        yield oracle


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_target_is_its_receptor_and_box():
    receptor = Receptor.of("DRD2")
    assert receptor.pdbqt.name == "DRD2_target.pdbqt"
    assert (receptor.center, receptor.size) == ((9.25, 6.167, -7.0), (30.0, 30.0, 32.0))


def test_acceptance_11_small_molecules_dock_to_finite_negative_scores_that_the_seed_repeats(receptor, oracle):
    scores = oracle(["Oc1ccccc1", "NC(=O)c1ccccc1"])
    assert np.isfinite(scores).all()
    assert (scores < 0).all()
    with VinaOracle(receptor, cpus=1) as other:
        # one at a time, in another order, another way to write them
        np.testing.assert_array_equal(other(["c1cccc(c1)C(N)=O", "c1ccccc1O"]), scores[::-1])
    with VinaOracle(receptor, seed=1) as other:
        assert (other(["Oc1ccccc1", "NC(=O)c1ccccc1"]) != scores).any()


def test_acceptance_11_an_active_search_over_grpc_completes_with_docking_as_its_oracle(oracle):
    rows = ["CC(=O)[U]\ta1\t1", "CCC(=O)[U]\ta2\t1", "CN[U]\tb1\t2", "CCN[U]\tb2\t2", "OCCN[U]\tb3\t2"]
    text = "".join(f"{row}\n" for row in ["smiles\tsynthon_id\tposition\treaction_id", *(f"{row}\tr" for row in rows)])
    with serve("apex") as served:
        source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=served.client.upload(text.encode()))
        importing = served.client.stub.ImportLibrary(apex_pb2.ImportLibraryRequest(tsv=source))
        library = served.client.wait(importing, apex_pb2.Library)
        start = apex_pb2.ActiveSearchStart(library=library.name, budget=4, rounds=1, initial_count=2)
        start.direction = apex_pb2.DIRECTION_MINIMIZE
        scores, summary = search_with_oracle(served.client, start, oracle)
    assert (summary.call_count, summary.failed_count, summary.hit_count) == (4, 0, 4)
    assert scores == sorted(scores)
    assert np.isfinite(scores).all()
    assert max(scores) < 0


def test_a_molecule_that_cannot_be_docked_is_nan_with_a_reason_and_costs_no_other(oracle):
    seen = []
    oracle._progress = lambda done, total: seen.append((done, total))
    scores = oracle(["C1CC", "CO", "CO.CO", "C[Se]C", "", "OB(O)C"])
    np.testing.assert_array_equal(np.isfinite(scores), [False, True, False, False, False, False])
    assert seen == [(i, 6) for i in range(1, 7)]
    assert oracle.failures["C1CC"] == oracle.failures[""] == "RDKit cannot read the SMILES"
    assert oracle.failures["CO.CO"] == "several molecules in one SMILES; give one, without counter-ions"
    assert oracle.failures["C[Se]C"].startswith("Meeko cannot write it as PDBQT")
    assert oracle.failures["OB(O)C"].startswith("PDBQT parsing error: Atom type B is not a valid AutoDock type")
    assert "CO" not in oracle.failures
    assert oracle([]).shape == (0,)


def test_a_crash_a_hang_or_no_pose_costs_one_score_only():
    result = subprocess.run([sys.executable, "-c", BAD_VINA], capture_output=True, text=True, check=True)
    assert result.stdout == (
        '[[-2.0, null], [null, "the docking process was ended by SIGSEGV"], [null, "docking took longer than 2 s"],'
        ' [null, "Vina finds no pose in the box"], [-6.0, null]]\n'
    )


def test_should_stop_ends_the_call_with_all_its_processes_and_the_next_call_works(receptor):
    with VinaOracle(receptor, cpus=2) as oracle:
        processes = []

        def both_dock():
            processes[:] = [oracle._server.pid, *_children(oracle._server.pid)]
            return len(processes) == 3

        oracle._should_stop = both_dock
        with pytest.raises(Stopped):
            oracle(["C" * 60] * 3)  # minutes each
        time.sleep(0.1)
        assert [pid for pid in processes if _is_running(pid)] == []
        oracle._should_stop = None
        assert oracle(["CO"])[0] < 0


def test_a_killed_server_is_an_error_and_the_next_call_starts_another(receptor, oracle):
    assert oracle(["CO"])[0] < 0
    os.kill(oracle._server.pid, signal.SIGKILL)
    with pytest.raises(DockingError, match="the docking server was ended by SIGKILL"):
        oracle(["CO"])
    assert oracle(["CO"])[0] < 0


def test_a_file_that_is_no_receptor_is_an_error(tmp_path, receptor):
    (tmp_path / "wrong.pdbqt").write_text("ATOM what\n")
    for name in ("wrong.pdbqt", "missing.pdbqt"):
        with pytest.raises(DockingError, match=rf"cannot prepare .*{name} for docking: .+"):
            VinaOracle(replace(receptor, pdbqt=tmp_path / name))(["CO"])


def test_arguments_are_checked_where_they_are_given(receptor):
    with pytest.raises(FieldError, match=r"target: 'PARP9' given; known: ABL1, .*, PARP1"):
        VinaOracle("PARP9")
    for field, value in (("exhaustiveness", 0), ("cpus", 0), ("ligand_seconds", 0.0), ("ligand_seconds", np.nan)):
        with pytest.raises(FieldError, match=f"^{field}: {value} given"):
            VinaOracle(receptor, **{field: value})


def test_without_its_packages_docking_says_what_to_install(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "meeko" else find_spec(name))
    with pytest.raises(DockingError, match=r"^docking needs meeko, not installed here: pip install vina meeko gemmi$"):
        VinaOracle("PARP1")


def test_the_caller_imports_none_of_the_docking_packages():
    code = (
        "import sys, lyceum_apex.docking as d; d.VinaOracle();"
        "print(sorted({'vina', 'meeko', 'gemmi', 'rdkit'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
