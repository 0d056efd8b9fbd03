"""The end of things: each service deletes what it made, and drains without losing a request that it has accepted."""

import threading
import time

import grpc
import pytest
from conformance.subject import Outcome, Subject

from lyceum_runtime.services import load_services
from lyceum_runtime.testing import serve
from lyceum_runtime.testing_service import ENTRY

ENTRIES = {ENTRY.name: ENTRY, **load_services()}


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_deletions_in_order_leave_nothing_behind(name: str) -> None:
    with serve(ENTRIES[name]) as served:
        subject = Subject(ENTRIES[name], served)
        for rpc, messages in subject.load():
            outcome = subject.call(rpc, messages)
            if rpc.startswith("Delete"):
                assert outcome.code is grpc.StatusCode.OK, f"{rpc}: {outcome.text}"
                assert subject.call(rpc, messages).code is grpc.StatusCode.NOT_FOUND, rpc
            elif subject.long_running(rpc):
                subject.finished(outcome)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_a_drain_loses_no_accepted_request(name: str) -> None:
    with serve(ENTRIES[name]) as served:
        subject = Subject(ENTRIES[name], served)
        examples = dict(subject.load())
        quick = [rpc for rpc in examples if rpc == "Echo" or rpc.startswith("List")]
        rpc = (quick or [rpc for rpc in examples if not subject.long_running(rpc)])[0]
        outcomes: list[tuple[float, Outcome]] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                outcomes.append((time.monotonic(), subject.call(rpc, examples[rpc])))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(outcomes) < 20:
            time.sleep(0.01)
        stopped = time.monotonic()
        served.stop(5.0)
        over.set()
        for thread in threads:
            thread.join()
    before = {outcome.code for begun, outcome in outcomes if begun < stopped}
    after = {outcome.code for begun, outcome in outcomes if begun >= stopped}
    assert before <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, before
    assert grpc.StatusCode.OK in before
    # gRPC cancels what arrives in the moment in which it closes, before any handler has seen it.
    assert after <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}, after
