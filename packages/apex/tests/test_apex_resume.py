"""An index whose building is killed with -9 is, after a restart, the one that an uninterrupted build gives."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from google.longrunning import operations_pb2

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_runtime.client import connect, unpack

STEPS = 200  # a state is stored every 50
ACIDS = [f"{'C' * n}C(=O)[U]\ta{n}\t1\tamide" for n in range(1, 15)]
AMINES = [f"{'C' * n}N[U]\tb{n}\t2\tamide" for n in range(1, 15)]
TABLE = "\n".join(["smiles\tsynthon_id\tposition\treaction_id", *ACIDS, *AMINES]) + "\n"


def _start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "LYCEUM_STATE_DIR": str(folder),
        "LYCEUM_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen([sys.executable, "-m", "lyceum_apex"], env=environment)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _building(seed: int) -> apex_pb2.BuildIndexRequest:
    return apex_pb2.BuildIndexRequest(
        parent="libraries/tiny",
        surrogate="surrogates/tiny",
        steps=STEPS,
        seed=common_pb2.Seed(value=seed),
        interactions_rank=1,
    )


def test_acceptance_07_a_killed_build_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    port = _free_port()
    process = _start(tmp_path, port)
    try:
        with connect("apex", target=f"127.0.0.1:{port}") as apex:
            apex.ready(60)
            source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=apex.upload(TABLE.encode()))
            importing = apex_pb2.ImportLibraryRequest(library_id="tiny", tsv=source)
            apex.wait(apex.stub.ImportLibrary(importing), apex_pb2.Library)
            sample = apex_pb2.RdkitSample(library="libraries/tiny", product_count=150, properties=["logp"])
            training = apex_pb2.TrainSurrogateRequest(
                surrogate_id="tiny", rdkit_sample=sample, steps=20, seed=common_pb2.Seed(value=1)
            )
            apex.wait(apex.stub.TrainSurrogate(training), apex_pb2.Surrogate)
            whole = apex.wait(apex.stub.BuildIndex(_building(5)), apex_pb2.Index)

            operation = apex.stub.BuildIndex(_building(5))
            assert not operation.done
            for state in apex.watch(operation.name):
                progress = unpack(state.metadata, common_pb2.Progress)
                if progress.completed > STEPS // 2 and progress.total == STEPS:
                    break
            assert not state.done
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = _start(tmp_path, port)
            apex.ready(60)
            resumed = apex.wait(operations_pb2.Operation(name=operation.name), apex_pb2.Index, timeout=120)
            assert resumed.name != whole.name
            assert resumed.artifact.sha256 == whole.artifact.sha256
    finally:
        process.terminate()
        process.wait(30)
