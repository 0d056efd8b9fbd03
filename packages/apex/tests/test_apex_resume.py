"""What is killed with -9 while an index is built or an oracle asked ends, after a restart, as if it had not been."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from google.longrunning import operations_pb2

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_runtime.client import Client, connect, unpack
from lyceum_runtime.errors import Unavailable

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


def test_an_active_search_whose_server_is_killed_goes_on_to_the_same_hits(tmp_path: Path) -> None:
    port = _free_port()
    process = _start(tmp_path, port)
    start = apex_pb2.ActiveSearchStart(
        library="libraries/tiny", budget=20, rounds=2, batch_size=4, seed=common_pb2.Seed(value=1)
    )
    try:
        with connect("apex", target=f"127.0.0.1:{port}") as apex:
            apex.ready(60)
            source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=apex.upload(TABLE.encode()))
            importing = apex_pb2.ImportLibraryRequest(library_id="tiny", tsv=source)
            apex.wait(apex.stub.ImportLibrary(importing), apex_pb2.Library)
            whole = _scored_by_length(apex, apex_pb2.RunActiveSearchRequest(start=start))
            dying = _scored_by_length(apex, apex_pb2.RunActiveSearchRequest(start=start), 3, process)
            process.wait()
        process = _start(tmp_path, port)
        with connect(
            "apex", target=f"127.0.0.1:{port}"
        ) as apex:  # the old channel may still wait before it tries again
            apex.ready(60)
            resumed = _scored_by_length(apex, apex_pb2.RunActiveSearchRequest(session=dying.session))
    finally:
        process.kill()
        process.wait()
    assert len(dying.asked) == 12
    assert dying.asked + resumed.asked == whole.asked
    assert resumed.hits == whole.hits
    assert len(whole.hits) == 1


@dataclass
class _Dialogue:
    session: str = ""
    asked: list[str] = field(default_factory=list)
    hits: list[common_pb2.ArrowBatch] = field(default_factory=list)


def _scored_by_length(
    apex: Client,
    first: apex_pb2.RunActiveSearchRequest,
    answers: int | None = None,
    process: subprocess.Popen[bytes] | None = None,
) -> _Dialogue:
    """Answers requests, or kills the server when one comes after so many `answers`."""
    said, waiting = _Dialogue(), SimpleQueue[apex_pb2.RunActiveSearchRequest | None]()
    waiting.put(first)
    try:
        for message in apex.stub.RunActiveSearch(iter(waiting.get, None)):
            if message.HasField("session"):
                said.session = message.session.name
            elif message.HasField("hits"):
                said.hits.append(message.hits)
            elif message.HasField("oracle_request"):
                if process is not None and len(said.asked) == 4 * (answers or 0):
                    process.send_signal(signal.SIGKILL)
                    continue
                said.asked += message.oracle_request.products
                scores = apex_pb2.OracleResponse(scores=[len(text) for text in message.oracle_request.smiles])
                waiting.put(apex_pb2.RunActiveSearchRequest(scores=scores))
    except Unavailable:
        assert process is not None
    finally:
        waiting.put(None)
    return said
