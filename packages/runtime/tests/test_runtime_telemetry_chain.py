"""One request through everything that a trace must survive: client, server, worker thread, operation, child process,
loky worker.
"""

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lyceum.testing.v1 import testing_pb2
from lyceum_base.checkpoint import Checkpoint
from lyceum_runtime import telemetry, testing
from lyceum_runtime.definition import Call, LongMethod, ServiceDefinition
from lyceum_runtime.parallel import parallel_backend
from lyceum_runtime.process import call_in_process
from lyceum_runtime.settings import Settings
from lyceum_runtime.spans import Span, SpanStore

CHILD = """
import os
from lyceum_runtime import telemetry

def child_work(argument):
    with telemetry.stage("in_child", pid=os.getpid()):
        return argument + 1
"""


@pytest.fixture(autouse=True)
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    (tmp_path / "chained_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)


def toy(settings: Settings) -> ServiceDefinition:
    def work() -> int:
        from joblib import Parallel, delayed

        def worker_work(x: int) -> int:  # local, so that it travels by value: a worker cannot import this file
            with telemetry.stage("in_worker", pid=os.getpid()):
                return x

        with telemetry.stage("in_thread", pid=os.getpid()):
            answer: int = call_in_process("chained_child:child_work", 41, settings=settings, timeout_seconds=60)
            with parallel_backend(settings):
                Parallel(n_jobs=2)(delayed(worker_work)(x) for x in range(4))
        return answer

    def echo(request: testing_pb2.EchoRequest, call: Call) -> testing_pb2.EchoResponse:
        return testing_pb2.EchoResponse(values=[work()])

    def run(request: Any, call: Call, resume: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
        yield Checkpoint({"answer": work()}, stage="train", completed=1, total=1, metrics={})

    def finish(request: Any, state: Mapping[str, Any], call: Call) -> testing_pb2.TrainResponse:
        return testing_pb2.TrainResponse(steps=state["answer"])

    train = LongMethod(testing_pb2.TrainRequest, testing_pb2.TrainResponse, run, finish, seeded=True)
    return ServiceDefinition("testing", "lyceum.testing.v1.EchoService", {"Echo": echo}, {"Train": train})


def chain(spans: list[Span], last: Span) -> list[str]:
    """The names from the root down to `last`."""
    by_id = {span.span_id: span for span in spans}
    names = [last.name]
    while last.parent_id is not None:
        last = by_id[last.parent_id]
        names.append(last.name)
    return names[::-1]


def test_one_trace_reaches_from_the_client_into_every_process(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    with testing.serve(toy(settings), state_dir=tmp_path) as served, telemetry.span("caller"):
        response = served.client.stub.Echo(testing_pb2.EchoRequest())
        assert list(response.values) == [42]
        request = testing_pb2.TrainRequest(steps=1, request_id=str(uuid.uuid4()))
        result = served.client.wait(served.client.stub.Train(request), testing_pb2.TrainResponse, progress=False)
        assert result.steps == 42

    store = SpanStore(tmp_path / "spans.db")
    (caller,) = [span for span in store.recent() if span.name == "caller"]
    spans = store.trace(caller.trace_id)
    assert store.missing_parents(caller.trace_id) == []
    rpc = "lyceum.testing.v1.EchoService/Echo"
    thread = ["caller", rpc, rpc, "in_thread"]
    chains = [chain(spans, span) for span in spans]
    assert [*thread, "child process", "child_work", "in_child"] in chains
    assert chains.count([*thread, "parallel batch", "in_worker"]) == 4
    in_operation = [names for names in chains if "lyceum.testing.v1.EchoService/Train" in names]
    for end in (["in_thread", "child process", "child_work", "in_child"], ["in_thread", "parallel batch", "in_worker"]):
        assert [names for names in in_operation if names[-len(end) :] == end]
    pids = {span.attributes["pid"] for span in spans if span.name in ("in_child", "in_worker")}
    assert len(pids) >= 3  # two children and at least one worker
    assert os.getpid() not in pids


def _names(state_dir: Path) -> list[list[str]]:
    """The chain of names of every span that one call leaves."""

    def echo(request: testing_pb2.EchoRequest, call: Call) -> testing_pb2.EchoResponse:
        with telemetry.stage("inside"):
            return testing_pb2.EchoResponse()

    definition = ServiceDefinition("testing", "lyceum.testing.v1.EchoService", {"Echo": echo}, {})
    with testing.serve(definition, state_dir=state_dir) as served:
        served.client.stub.Echo(testing_pb2.EchoRequest())
    store = SpanStore(state_dir / "spans.db")
    recent = store.recent()
    spans = store.trace(recent[0].trace_id) if recent else []
    return sorted(chain(spans, span) for span in spans)


@pytest.mark.parametrize("sampler", ["always_on", "parentbased_traceidratio", "parentbased_always_off"])
def test_a_sampler_of_the_environment_decides_whether_and_not_which_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    default = _names(tmp_path / "default")
    assert [len(names) for names in default] == [1, 2, 3]  # client, server, stage
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1.0")
    assert _names(tmp_path / "sampled") == ([] if sampler.endswith("off") else default)
