"""Docking as an oracle: SMILES in, AutoDock Vina's scores out (kcal/mol, lower is better).

    with VinaOracle("PARP1") as oracle:
        scores = oracle(["NC(=O)c1cccc2c1OCCN2"])

A molecule gets hydrogens as drawn (nothing is protonated for a pH) and one conformer (RDKit, ETKDGv3: Wang et al.,
J. Chem. Inf. Model. 60, 2020; a stereocentre that is not specified gets the one that the seed gives); Meeko turns it
into PDBQT with its torsions; Vina 1.2 (Eberhardt et al., J. Chem. Inf. Model. 61, 2021) searches poses in the target's
box. The score is that of the best pose. It depends on the molecule (however it is written), the target, the
exhaustiveness, the seed and the versions of RDKit, Meeko and Vina; not on the other molecules or on `cpus`.

Docking runs in a process of its own, `python -m lyceum_apex.docking`, the server. It computes the target's grid maps
once and forks a child for each molecule: children share the maps (some hundred MB), and one that crashes, or whose
alarm ends it, costs one score. Only the server imports vina, meeko and gemmi.
"""

import importlib
import importlib.util
import json
import math
import os
import select
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lyceum_apex.errors import FieldError
from lyceum_base import Stopped, Streams

REQUIREMENTS = ("vina", "meeko", "gemmi")
_POSES = 9
"""Poses that Vina keeps: its command line's default."""
_POLL_MILLISECONDS = 200
_LONGEST_REASON = 300


class DockingError(RuntimeError):
    """Nothing can be docked: the one-line message says why and what to do."""


@dataclass(frozen=True)
class Receptor:
    """A rigid receptor and the box to dock in.

    Args:
        pdbqt: file with the receptor's atoms, charges and AutoDock types.
        center: of the box, in angstroms.
        size: of the box along each axis, in angstroms.
    """

    pdbqt: Path
    center: tuple[float, float, float]
    size: tuple[float, float, float]

    @classmethod
    def of(cls, target: str) -> Self:
        """One of the 58 targets of the data set `dockstring`, downloaded once. Raises FieldError (`target`)."""
        from lyceum_zoo import ENTRIES, path

        known = [name.removesuffix("_conf.txt") for name in ENTRIES["dockstring"].files if name.endswith("_conf.txt")]
        if target not in known:
            raise FieldError("target", f"{target!r} given; known: {', '.join(known)}")
        lines = path("dockstring", f"{target}_conf.txt").read_text().splitlines()
        box = {key.strip(): float(value) for key, _, value in (line.partition("=") for line in lines if line.strip())}
        center = (box["center_x"], box["center_y"], box["center_z"])
        return cls(path("dockstring", f"{target}_target.pdbqt"), center, (box["size_x"], box["size_y"], box["size_z"]))


class VinaOracle:
    """Docks molecules into one receptor; call it with SMILES. One thread at a time may use it.

    Args:
        target: a name of the data set `dockstring`, or a receptor of your own.
        exhaustiveness: independent searches for each molecule, at least 1; time grows in proportion.
        seed: of conformers and searches.
        cpus: molecules docked at the same time, one for each core by default.
        ligand_seconds: a molecule that takes longer, on the clock on the wall, has no score.
        progress: called with (docked, all) of the present call, after each molecule.
        should_stop: polled several times a second; True ends the call with Stopped.

    Raises:
        FieldError: an argument is out of range.
        DockingError: a package is missing.
    """

    def __init__(
        self,
        target: str | Receptor = "PARP1",
        *,
        exhaustiveness: int = 1,
        seed: int = 0,
        cpus: int | None = None,
        ligand_seconds: float = 300.0,
        progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus
        for field, value in (("exhaustiveness", exhaustiveness), ("cpus", cpus)):
            if value < 1:
                raise FieldError(field, f"{value} given; at least 1")
        if not 0 < ligand_seconds < math.inf:
            raise FieldError("ligand_seconds", f"{ligand_seconds} given; positive and finite")
        missing = [name for name in REQUIREMENTS if importlib.util.find_spec(name) is None]
        if missing:
            raise DockingError(
                f"docking needs {', '.join(missing)}, not installed here: pip install {' '.join(REQUIREMENTS)}"
            )
        receptor = Receptor.of(target) if isinstance(target, str) else target
        streams = Streams(seed)
        self._task = _Task(
            receptor=str(receptor.pdbqt.absolute()),
            center=receptor.center,
            size=receptor.size,
            exhaustiveness=exhaustiveness,
            # Vina takes seed 0 for "draw one".
            embed_seed=int(streams.integers("apex.docking.embed", low=1, high=2**31)),
            vina_seed=int(streams.integers("apex.docking.search", low=1, high=2**31)),
            cpus=cpus,
            ligand_seconds=ligand_seconds,
        )
        self._progress = progress
        self._should_stop = should_stop
        self._server: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self.failures: dict[str, str] = {}
        """Why each molecule without a score has none, by its SMILES as given, over all calls."""

    def __call__(self, smiles: Sequence[str]) -> npt.NDArray[np.float64]:
        """Scores [n] in kcal/mol, lower is better; NaN for a molecule that cannot be docked (see `failures`).

        Raises:
            DockingError: the receptor cannot be used, or the server has died.
            Stopped: `should_stop()` returned True; what was docked in this call is lost.
        """
        scores = np.full(len(smiles), np.nan)
        if not len(smiles):
            return scores
        try:
            server = self._server or self._start()
            _send(server, list(smiles))
            for done, reply in enumerate(self._replies(server), start=1):
                if "error" in reply:
                    raise DockingError(reply["error"])
                number = reply["number"]
                if reply["reason"] is None:
                    scores[number] = reply["score"]
                else:
                    self.failures[smiles[number]] = reply["reason"]
                if self._progress is not None:
                    self._progress(done, len(smiles))
                if done == len(smiles):
                    return scores
        except BaseException:
            self.close()  # what is under way must not be taken for an answer to the next call
            raise
        raise AssertionError("replies end with an error or with the last molecule")

    def close(self) -> None:
        """End the server; the next call starts another."""
        self._end()
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "lyceum_apex.docking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,  # so that it can be killed with its children
        )
        self._end = weakref.finalize(self, _kill, self._server)  # runs once: here, or when nobody refers to this
        _send(self._server, asdict(self._task))
        return self._server

    def _replies(self, server: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        assert server.stdout is not None
        poll = select.poll()
        poll.register(server.stdout, select.POLLIN)
        rest = b""
        while True:
            if self._should_stop is not None and self._should_stop():
                raise Stopped
            if poll.poll(_POLL_MILLISECONDS):
                data = server.stdout.read(2**16)
                if not data:
                    raise DockingError(f"the docking server {_how(server.wait())}")
                *lines, rest = (rest + data).split(b"\n")
                yield from map(json.loads, lines)
            elif (code := server.poll()) is not None:  # its children still hold the pipe
                raise DockingError(f"the docking server {_how(code)}")


def _send(server: subprocess.Popen[bytes], message: Any) -> None:
    assert server.stdin is not None
    left = memoryview(json.dumps(message).encode() + b"\n")
    try:
        while left:
            left = left[server.stdin.write(left) :]
    except BrokenPipeError:
        raise DockingError(f"the docking server {_how(server.wait())} before it could be asked") from None


def _kill(server: subprocess.Popen[bytes]) -> None:
    if server.returncode is None:  # else its number may be another process's by now, and its children have alarms
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    for pipe in (server.stdin, server.stdout):
        if pipe is not None:
            pipe.close()


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# --- the server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """The server's first message."""

    receptor: str
    center: Sequence[float]
    size: Sequence[float]
    exhaustiveness: int
    embed_seed: int
    vina_seed: int
    cpus: int
    ligand_seconds: float


def main() -> None:
    """The server: a task, then lists of SMILES on standard input, each a line of JSON; for each molecule, in the order
    in which they are done, a line {number, score, reason} on standard output. It ends with its standard input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up among the replies

    def reply(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    task = _Task(**json.loads(sys.stdin.readline()))
    try:
        vina = _with_maps(task)
    except Exception as error:
        reply({"error": f"cannot prepare {task.receptor} for docking: {_reason(error)}"})
        return
    for line in sys.stdin:
        for message in _dock_all(vina, json.loads(line), task):
            reply(message)


def _with_maps(task: _Task) -> Any:
    for name in ("meeko", "rdkit.Chem.rdDistGeom"):  # here, so that no child has to
        importlib.import_module(name)
    vina = importlib.import_module("vina").Vina(sf_name="vina", cpu=1, seed=task.vina_seed, verbosity=0)
    vina.set_receptor(task.receptor)
    vina.compute_vina_maps(center=list(task.center), box_size=list(task.size))
    return vina


def _dock_all(vina: Any, smiles: Sequence[str], task: _Task) -> Iterator[dict[str, Any]]:
    waiting, running = deque(enumerate(smiles)), dict[int, tuple[int, int]]()
    while waiting or running:
        while waiting and len(running) < task.cpus:
            number, text = waiting.popleft()
            child, pipe = _fork(vina, text, task)
            running[child] = (number, pipe)
        child, status = os.wait()
        number, pipe = running.pop(child)
        with open(pipe, "rb") as file:
            answer = file.read()
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            yield {"number": number, **json.loads(answer)}
        elif code == -signal.SIGALRM:
            yield {"number": number, "reason": f"docking took longer than {task.ligand_seconds:g} s"}
        else:
            yield {"number": number, "reason": f"the docking process {_how(code)}"}


def _fork(vina: Any, smiles: str, task: _Task) -> tuple[int, int]:
    """A child that docks, and the pipe its answer comes through."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    try:
        # The alarm ends the child also inside C++ code, and when nobody is left to end it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, task.ligand_seconds)
        answer: dict[str, Any]
        try:
            answer = {"score": _dock(vina, _prepare(smiles, task.embed_seed), task.exhaustiveness), "reason": None}
        except Exception as error:
            answer = {"reason": _reason(error)}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _prepare(smiles: str, seed: int) -> str:
    """The molecule as PDBQT with one conformer. Raises ValueError."""
    meeko: Any = importlib.import_module("meeko")
    from rdkit import Chem, rdBase
    from rdkit.Chem import rdDistGeom

    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(smiles)
        if molecule is None or not molecule.GetNumAtoms():
            raise ValueError("RDKit cannot read the SMILES")
        if len(Chem.GetMolFrags(molecule)) > 1:
            raise ValueError("several molecules in one SMILES; give one, without counter-ions")
        # Through its canonical SMILES, so that the order of the atoms as written does not matter.
        molecule = Chem.AddHs(Chem.MolFromSmiles(Chem.MolToSmiles(molecule)))
        parameters: Any = rdDistGeom.ETKDGv3()
        parameters.randomSeed = seed
        if rdDistGeom.EmbedMolecule(molecule, parameters) < 0:
            parameters.useRandomCoords = True  # slower; finds coordinates of crowded molecules
            if rdDistGeom.EmbedMolecule(molecule, parameters) < 0:
                raise ValueError("RDKit finds no conformer")
        setups = meeko.MoleculePreparation().prepare(molecule)
        text, fine, message = meeko.PDBQTWriterLegacy.write_string(setups[0])
    if not fine:
        raise ValueError(f"Meeko cannot write it as PDBQT: {message}")
    return str(text)


def _dock(vina: Any, ligand: str, exhaustiveness: int) -> float:
    """The best pose's score. Raises ValueError; Vina raises other errors."""
    vina.set_ligand_from_string(ligand)
    vina.dock(exhaustiveness=exhaustiveness, n_poses=_POSES)
    energies = vina.energies(n_poses=1)
    if not len(energies) or not math.isfinite(energies[0][0]):
        raise ValueError("Vina finds no pose in the box")
    return float(energies[0][0])


def _reason(error: Exception) -> str:
    """One line that fits into a pipe's buffer."""
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__


if __name__ == "__main__":
    main()
