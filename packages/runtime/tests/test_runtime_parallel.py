"""Traces across processes: a killable child and loky's workers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lyceum_runtime import telemetry
from lyceum_runtime.errors import Cancelled, DeadlineExceeded
from lyceum_runtime.parallel import parallel_backend
from lyceum_runtime.process import ChildFailed, call_in_process
from lyceum_runtime.settings import Settings
from lyceum_runtime.spans import SpanStore

CHILD = """
import os, subprocess, sys, time
from pathlib import Path
from lyceum_runtime import telemetry

def double(argument):
    print("a stray print")
    with telemetry.stage("compute", pid=os.getpid()):
        return {"doubled": 2 * argument["x"], "threads": os.environ.get("OMP_NUM_THREADS")}

def fail(argument):
    raise ValueError("secret text")

def die(argument):
    os.kill(os.getpid(), 11)

def allocate(argument):
    return len(bytearray(argument))

def linger(pid_file):
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(60)

def hang(pid_file):
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(pid_file).write_text(str(grandchild.pid))
    time.sleep(60)
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    (tmp_path / "traced_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings(state_dir=tmp_path)
    telemetry.setup(settings, "apex")
    yield settings
    telemetry.shutdown()


def tasks() -> Any:
    """What workers run. Local functions travel by value: a worker cannot import this file."""

    def square(x: int) -> int:
        with telemetry.stage("square", pid=os.getpid()):
            time.sleep(0.01)
            return x * x

    def fail_on_three(x: int) -> int:
        if x == 3:
            raise ValueError(x)
        return x

    def threads(_: int) -> str:
        return os.environ["OMP_NUM_THREADS"]

    return SimpleNamespace(square=square, fail_on_three=fail_on_three, threads=threads)


def only_trace(settings: Any) -> tuple[SpanStore, list[Any]]:
    telemetry.flush()
    store = SpanStore(settings.state_dir / "spans.db")
    (root,) = store.recent()
    assert store.missing_parents(root.trace_id) == []
    return store, store.trace(root.trace_id)


def test_child_process_computes_in_the_callers_trace(settings: Any) -> None:
    with telemetry.span("caller"):
        result = call_in_process("traced_child:double", {"x": 4}, settings=settings, timeout_seconds=30)
    assert result["doubled"] == 8
    _, spans = only_trace(settings)
    assert [span.name for span in spans] == ["caller", "child process", "double", "compute"]
    assert [span.parent_id for span in spans[1:]] == [span.span_id for span in spans[:-1]]
    assert spans[-1].attributes["pid"] != os.getpid()
    assert {span.service for span in spans} == {"apex"}


@pytest.mark.parametrize(("function", "how"), [("fail", "failed with exit code 1"), ("die", "was killed by SIGSEGV")])
def test_child_that_fails_is_reported_without_its_text(settings: Any, function: str, how: str) -> None:
    with pytest.raises(ChildFailed, match=f"^traced_child:{function} {how}$"):
        call_in_process(f"traced_child:{function}", None, settings=settings, timeout_seconds=30)


def test_child_has_no_more_memory_than_allowed(settings: Any) -> None:
    def allocate(size: int) -> Any:
        return call_in_process(
            "traced_child:allocate", size, settings=settings, timeout_seconds=30, memory_bytes=2 * 2**30
        )

    assert allocate(2**20) == 2**20
    with pytest.raises(ChildFailed):
        allocate(3 * 2**30)


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("stop", "error"), [(False, DeadlineExceeded), (True, Cancelled)])
def test_child_is_killed_with_its_own_children(settings: Any, stop: bool, error: type[Exception]) -> None:
    pid_file = settings.state_dir / "pid"
    with pytest.raises(error):
        call_in_process(
            "traced_child:hang",
            str(pid_file),
            settings=settings,
            timeout_seconds=30 if stop else 4,
            should_stop=lambda: stop and pid_file.exists() and bool(pid_file.read_text()),
        )
    grandchild = int(pid_file.read_text())
    for _ in range(50):
        if not _alive(grandchild):
            break
        time.sleep(0.05)
    assert not _alive(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has no signal for a parent's death")
def test_child_ends_with_a_parent_that_is_killed(settings: Any) -> None:
    pid_file = settings.state_dir / "pid"
    program = (
        "import sys; from pathlib import Path; from lyceum_runtime.process import call_in_process; "
        "from lyceum_runtime.settings import Settings; settings = Settings(state_dir=Path(sys.argv[1])); "
        "call_in_process('traced_child:linger', sys.argv[2], settings=settings, timeout_seconds=60)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program, str(settings.state_dir), str(pid_file)]
    with subprocess.Popen(command, env=environment) as parent:
        while not (pid_file.exists() and pid_file.read_text()):
            assert parent.poll() is None
            time.sleep(0.05)
        child = int(pid_file.read_text())
        assert _alive(child)
        parent.kill()
    for _ in range(100):
        if not _alive(child):
            break
        time.sleep(0.05)
    assert not _alive(child)


def test_plain_joblib_in_a_thread_reports_into_the_callers_trace(settings: Any) -> None:
    from joblib import Parallel, delayed

    with telemetry.span("caller"), parallel_backend(settings):
        assert Parallel(n_jobs=2)(delayed(tasks().square)(x) for x in range(20)) == [x * x for x in range(20)]
        assert set(Parallel(n_jobs=2)(delayed(tasks().threads)(x) for x in range(4))) == {"1"}
    _, spans = only_trace(settings)
    caller, *rest = spans
    batches = {span.span_id: span for span in rest if span.name == "parallel batch"}
    squares = [span for span in rest if span.name == "square"]
    assert len(squares) == 20
    assert {span.parent_id for span in squares} <= set(batches)
    assert {span.parent_id for span in batches.values()} == {caller.span_id}
    assert sum(int(str(batch.attributes["tasks"])) for batch in batches.values()) == 24
    assert os.getpid() not in {span.attributes["pid"] for span in squares}


def test_workers_kept_from_one_trace_report_into_the_next(settings: Any) -> None:
    from joblib import Parallel, delayed

    for name in ("first", "second"):
        with telemetry.span(name), parallel_backend(settings):
            Parallel(n_jobs=2)(delayed(tasks().square)(x) for x in range(4))
    telemetry.flush()
    store = SpanStore(settings.state_dir / "spans.db")
    roots = store.recent()
    assert {root.name for root in roots} == {"first", "second"}
    assert [len([s for s in store.trace(root.trace_id) if s.name == "square"]) for root in roots] == [4, 4]
    pids = [{s.attributes["pid"] for s in store.trace(root.trace_id) if s.name == "square"} for root in roots]
    assert pids[0] & pids[1]


def test_failing_task_raises_its_own_error_and_marks_its_span(settings: Any) -> None:
    from joblib import Parallel, delayed

    with telemetry.span("caller"), parallel_backend(settings), pytest.raises(ValueError, match="3"):
        Parallel(n_jobs=2, batch_size=1)(delayed(tasks().fail_on_three)(x) for x in range(4))
    _, spans = only_trace(settings)
    failed = [span for span in spans if span.status == "ERROR"]
    assert [(span.name, span.attributes["error.type"]) for span in failed] == [("parallel batch", "ValueError")]


def test_spans_of_a_worker_are_stored_before_its_result_is_returned(settings: Any) -> None:
    from joblib import Parallel, delayed

    with telemetry.span("caller"), parallel_backend(settings):
        trace_id = telemetry.carrier()["traceparent"].split("-")[1]
        Parallel(n_jobs=2)(delayed(tasks().square)(x) for x in range(4))
        stored = SpanStore(settings.state_dir / "spans.db").trace(trace_id)  # this process has flushed nothing
    assert [span.name for span in stored].count("square") == 4


def test_runtime_telemetry_imports_without_grpc_or_the_sdk() -> None:
    code = "import sys, lyceum_runtime.telemetry; sys.exit('opentelemetry.sdk' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
