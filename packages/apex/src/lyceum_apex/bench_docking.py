"""The case `docking` of `lyceum bench apex`: an active search over gRPC whose caller docks products of real1m."""

import resource
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from lyceum.apex.v1 import apex_pb2
from lyceum_apex.docking import VinaOracle
from lyceum_runtime.bench_report import Row
from lyceum_runtime.client import Client
from lyceum_runtime.codec import from_arrow_batch
from lyceum_runtime.testing import serve

SEED = 0
TARGET = "PARP1"

Oracle = Callable[[list[str]], npt.NDArray[np.float64]]


def docking(quick: bool) -> Iterator[Row]:
    """24 products in three rounds; a third of them again by another oracle, since the seed is to repeat the scores."""
    budget = 6 if quick else 24
    asked: list[str] = []
    answers: list[float] = []
    seconds, used = 0.0, _children_seconds()

    with serve("apex") as served, VinaOracle(TARGET, seed=SEED) as oracle:
        begun = time.perf_counter()
        oracle(["C"])
        maps = time.perf_counter() - begun

        def dock(smiles: list[str]) -> npt.NDArray[np.float64]:
            nonlocal seconds
            begun = time.perf_counter()
            scores = oracle(smiles)
            seconds += time.perf_counter() - begun
            asked.extend(smiles)
            answers.extend(scores.tolist())
            return scores

        library = import_one_reaction(served.client)
        start = apex_pb2.ActiveSearchStart(
            library=library.name,
            direction=apex_pb2.DIRECTION_MINIMIZE,
            budget=budget,
            rounds=2,
            initial_count=budget // 3,
        )
        start.seed.value = SEED
        scores, summary = search_with_oracle(served.client, start, dock)

    where = f"active search for {budget} of {library.product_count} products, {TARGET}, exhaustiveness 1"
    failed = "; ".join(f"{smiles}: {reason}" for smiles, reason in oracle.failures.items()) or "none"
    used = _children_seconds() - used
    context = f"{used:.0f} s of processor time; before it, start and maps {maps:.1f} s"
    yield Row(where, "docking time", seconds, unit="s", target="<= 300", context=context)
    context = f"{summary.call_count} calls, from {min(scores):.1f} to {max(scores):.1f} kcal/mol; failed: {failed}"
    yield Row(where, "scores below 0", sum(score < 0 for score in scores), "", f">= {budget}", context)

    again = slice(0, len(asked), 3)
    with VinaOracle(TARGET, seed=SEED, cpus=1) as other:
        equal = int(np.array_equal(other(asked[again]), answers[again], equal_nan=True))
    yield Row(where, "scores repeated by another oracle", equal, "", ">= 1", f"{len(asked[again])} products, 1 if all")


def _children_seconds() -> float:
    """Processor time of child processes that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def search_with_oracle(
    client: Client, start: apex_pb2.ActiveSearchStart, oracle: Oracle
) -> tuple[list[float], apex_pb2.ActiveSearchSummary]:
    """The whole stream with an oracle that takes SMILES: scores from the best down, and the summary."""
    sent: SimpleQueue[apex_pb2.RunActiveSearchRequest | None] = SimpleQueue()
    sent.put(apex_pb2.RunActiveSearchRequest(start=start))
    scores: list[float] = []
    summary = apex_pb2.ActiveSearchSummary()
    try:
        for message in client.stub.RunActiveSearch(iter(sent.get, None)):
            if message.HasField("oracle_request"):
                request = message.oracle_request
                answer = apex_pb2.OracleResponse(scores=oracle(list(request.smiles)), products=request.products)
                sent.put(apex_pb2.RunActiveSearchRequest(scores=answer))
            elif message.HasField("hits"):
                scores += from_arrow_batch(message.hits).column("score").to_pylist()
            elif message.HasField("summary"):
                summary = message.summary
    finally:
        sent.put(None)  # also when the oracle fails: the stream's thread waits for the next message
    return scores, summary


def import_one_reaction(client: Client) -> apex_pb2.Library:
    """The first reaction of real1m, as a library of the service."""
    from lyceum_zoo import path

    header, *rows = path("real1m", "synthon_space_1M.tsv").read_text().splitlines()
    reaction = rows[0].split("\t")[header.split("\t").index("reaction_id")]
    text = "\n".join([header, *(row for row in rows if reaction in row.split("\t"))]) + "\n"
    source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=client.upload(text.encode()))
    return client.wait(client.stub.ImportLibrary(apex_pb2.ImportLibraryRequest(tsv=source)), apex_pb2.Library)
