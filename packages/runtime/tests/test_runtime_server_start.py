"""A server as a process: settings, refusals in one line, SIGTERM, start-up time and idle memory."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lyceum.testing.v1 import testing_pb2
from lyceum_runtime import services
from lyceum_runtime.client import Client
from lyceum_runtime.errors import ConfigurationError
from lyceum_runtime.settings import load_settings
from lyceum_runtime.testing_service import ENTRY


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in [name for name in os.environ if name.startswith("LYCEUM_")]:
        monkeypatch.delenv(variable)
    return monkeypatch


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("LYCEUM_PORT", "many", "LYCEUM_PORT=many: .*integer"),
        ("LYCEUM_PORT", "70000", "LYCEUM_PORT=70000: .*65535"),
        ("LYCEUM_MAX_WORKERS", "0", "LYCEUM_MAX_WORKERS=0: .*greater than or equal to 1"),
        ("LYCEUM_LOG_LEVEL", "loud", "LYCEUM_LOG_LEVEL=LOUD: .*'DEBUG', 'INFO'"),
        ("LYCEUM_HOST", "0.0.0.0", r"LYCEUM_HOST=0\.0\.0\.0: .*only loopback"),
        ("LYCEUM_HOST", "example.org", r"LYCEUM_HOST=example\.org: .*only loopback"),
        ("LYCEUM_MAX_PENDING", "1", "max_pending=1 must be at least max_workers"),
        ("LYCEUM_MAX_WORKRES", "3", "LYCEUM_MAX_WORKRES is not a setting; did you mean LYCEUM_MAX_WORKERS"),
        ("LYCEUM_STATEDIR", "x", "did you mean LYCEUM_STATE_DIR"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_its_variable(clean, variable, value, says):
    clean.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_settings()
    assert "\n" not in str(caught.value)


def test_arguments_win_over_variables_and_variables_over_defaults(clean, tmp_path):
    clean.setenv("LYCEUM_STATE_DIR", str(tmp_path))
    clean.setenv("LYCEUM_MAX_PENDING", "")
    clean.setenv("LYCEUM_APEX_TARGET", "127.0.0.1:1")
    settings = load_settings(max_workers=3)
    assert settings.max_workers == 3
    assert settings.max_pending >= 64
    assert settings.database_url == f"sqlite:///{tmp_path}/lyceum.db"
    assert settings.artifacts_url == f"{tmp_path}/artifacts"
    assert "secret" not in repr(load_settings(database_url="postgresql://me:secret@db/lyceum"))


def test_the_table_beside_the_package_is_the_one_in_infra():
    table = services.load_services()
    assert table["apex"].service == "lyceum.apex.v1.ApexService"
    assert len({entry.port for entry in (*table.values(), ENTRY)}) == len(table) + 1
    with pytest.raises(ConfigurationError, match="unknown service 'apox'; known services: apex"):
        services.find_entry("apox")


def test_a_service_whose_package_is_missing_is_named_with_what_to_install():
    entry = services.ServiceEntry("nowhere", "lyceum_nowhere", "lyceum.nowhere.v1.NowhereService", 1, 1, 1)
    with pytest.raises(ConfigurationError, match="install lyceum-nowhere"):
        services.require_installed(entry)


# As a process --------------------------------------------------------------------------------------------------------


def start(state: Path, port: int, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LYCEUM_", "OTEL_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"LYCEUM_STATE_DIR": str(state), "LYCEUM_PORT": str(port), **variables}
    return subprocess.Popen(
        [sys.executable, *(arguments or ("-m", "lyceum_runtime.testing_service"))],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_healthy(port: int, seconds: float = 60.0) -> float:
    """Seconds until the server on `port` says that it serves."""
    began = time.monotonic()
    options = [(f"grpc.{name}_reconnect_backoff_ms", 50) for name in ("initial", "min", "max")]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=ENTRY.service), timeout=seconds, wait_for_ready=True
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    return time.monotonic() - began


def refused(state: Path, port: int, **variables: str) -> str:
    """What a server that does not start says; it must be one line, and a failure."""
    process = start(state, port, **variables)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 2
    [line] = text.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_server_that_cannot_start_says_why_in_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(tmp_path / "a", port)
        assert f"port {port} of service 'testing'" in line
        assert "LYCEUM_PORT" in line
    (tmp_path / "file").write_text("")
    assert "LYCEUM_STATE_DIR" in refused(tmp_path / "file" / "state", 0)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "lyceum.db").write_bytes(b"this is no database" * 100)
    assert "lyceum.db" in refused(tmp_path / "bad", 0)


def test_a_process_starts_quickly_stays_small_drains_on_sigterm_and_goes_on_after_its_restart(tmp_path):
    """3 s and 120 MiB are the stated limits, measured on an idle machine; the time here has room for a busy one."""
    port = free_port()
    process = start(tmp_path, port)
    try:
        assert wait_healthy(port) < 15.0
        status = Path(f"/proc/{process.pid}/status")
        if status.exists():
            time.sleep(1.0)
            [resident] = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
            assert int(resident.split()[1]) < 130 * 1024
        with Client(ENTRY, target=f"127.0.0.1:{port}") as client:
            running = client.stub.Echo.future(testing_pb2.EchoRequest(text="accepted", wait_seconds=1.0))
            operation = client.stub.Train(testing_pb2.TrainRequest(steps=60, seconds_per_step=0.1))
            assert not operation.done
            again = client.stub.Echo.future(testing_pb2.EchoRequest(text="accepted", wait_seconds=1.0))
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert running.result(timeout=10).text == "accepted"
            assert again.result(timeout=10).text == "accepted"
            assert process.wait(timeout=30) == 0
            process = start(tmp_path, port)
            answer = client.wait(operation, testing_pb2.TrainResponse, timeout=60)
            assert answer.steps == 60
    finally:
        process.kill()
        process.communicate()


def test_a_wait_goes_on_over_the_death_and_the_restart_of_its_server(tmp_path):
    port = free_port()
    process = start(tmp_path, port)
    try:
        wait_healthy(port)
        with Client(ENTRY, target=f"127.0.0.1:{port}") as client, futures.ThreadPoolExecutor(1) as thread:
            operation = client.stub.Train(testing_pb2.TrainRequest(steps=40, seconds_per_step=0.1))
            seen: list[int] = []
            waiting = thread.submit(
                client.wait,
                operation,
                testing_pb2.TrainResponse,
                timeout=60,
                progress=lambda state: seen.append(state.completed),
            )
            time.sleep(1.0)
            process.kill()
            process.wait()
            before = len(seen)
            time.sleep(1.0)
            assert not waiting.done()
            process = start(tmp_path, port)
            assert waiting.result(timeout=60).steps == 40
            assert seen[before] > 0  # it goes on from where it was
    finally:
        process.kill()
        process.communicate()


def test_a_computation_that_does_not_poll_cannot_hold_up_the_exit(tmp_path):
    port = free_port()
    script = (
        "import time\n"
        "from lyceum_runtime import server, testing_service\n"
        "from lyceum_runtime.testing_service import service\n"
        "service.echo.__code__ = (lambda request, call: time.sleep(120)).__code__\n"
        "server.main([testing_service.ENTRY])\n"
    )
    process = start(tmp_path, port, "-c", script, LYCEUM_DRAIN_SECONDS="0.2")
    try:
        wait_healthy(port)
        with Client(ENTRY, target=f"127.0.0.1:{port}") as client:
            stuck = client.stub.Echo.future(testing_pb2.EchoRequest())
            time.sleep(0.5)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
            assert time.monotonic() - began < 15.0
            assert stuck.exception(timeout=5) is not None
    finally:
        process.kill()
        process.communicate()


PARALLEL = """
import os
from lyceum.testing.v1 import testing_pb2
from lyceum_runtime import server, testing_service
from lyceum_runtime.parallel import parallel_backend
from lyceum_runtime.settings import load_settings
from lyceum_runtime.testing_service import service

def echo(request, call):
    from joblib import Parallel, delayed
    with parallel_backend(load_settings()):
        pids = Parallel(n_jobs=2)(delayed(os.getpid)() for _ in range(4))
    return testing_pb2.EchoResponse(text=" ".join(map(str, pids)))

service.echo = echo
server.main([testing_service.ENTRY])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_worker_processes_end_with_their_server(tmp_path, number):
    port = free_port()
    process = start(tmp_path, port, "-c", PARALLEL)
    workers: set[int] = set()
    try:
        wait_healthy(port)
        with Client(ENTRY, target=f"127.0.0.1:{port}") as client:
            workers = {int(pid) for pid in client.stub.Echo(testing_pb2.EchoRequest()).text.split()}
        assert all(alive(worker) for worker in workers)
        process.send_signal(number)
        process.wait(timeout=30)
        end = time.monotonic() + 15
        while any(alive(worker) for worker in workers):
            assert time.monotonic() < end, "the workers outlive their server"
            time.sleep(0.1)
        _, said = process.communicate(timeout=30)
        assert number is signal.SIGKILL or "leaked" not in said
    finally:
        process.kill()
        for worker in workers:
            if alive(worker):
                os.kill(worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
