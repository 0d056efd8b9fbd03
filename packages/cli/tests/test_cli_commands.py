"""The command line itself, and the commands that start services, look at them and sweep their state."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lyceum_cli import tour, up
from lyceum_cli.app import app
from lyceum_cli.output import CliError, emit
from lyceum_runtime import services, testing
from lyceum_runtime.testing_service import ENTRY
from lyceum_runtime.tour import TourResult

START_SECONDS = 30.0


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LYCEUM_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, state: Path) -> Iterator[str]:
    """The toy service as the only one of the table, and running; gives its address."""
    monkeypatch.setattr(services, "load_services", lambda: {"testing": ENTRY})
    monkeypatch.setattr(services, "find_entry", lambda name: ENTRY)
    with testing.serve(ENTRY, state_dir=state) as served:
        monkeypatch.setenv("LYCEUM_TESTING_TARGET", served.target)
        yield served.target


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def error_line(result: Result) -> str:
    found = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(found) == 1, result.stderr
    return found[0]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_help_loads_neither_grpc_nor_a_method_nor_rich_tables() -> None:
    heavy = "{'grpc', 'torch', 'numpy', 'pydantic_settings', 'sqlalchemy', 'opentelemetry', 'pyarrow', 'lyceum_apex'}"
    program = f"import sys, lyceum_cli.app; print(sorted({heavy} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_help_takes_less_than_half_a_second_of_processor_time() -> None:
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "lyceum_cli", "--help"], capture_output=True, check=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.5


def test_every_command_takes_json_and_has_help() -> None:
    commands = [
        ["tour"], ["up"], ["ls"], ["health"], ["call"], ["bench"],
        *[["ops", name] for name in ("list", "get", "watch", "wait", "cancel", "delete")],
        *[["trace", name] for name in ("list", "show")],
        *[["artifacts", name] for name in ("put", "get", "ls", "gc")],
    ]  # fmt: skip
    for command in commands:
        result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, command
        assert "--json" in result.stdout, command


def test_version_is_printed() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("lyceum ")


def test_an_unknown_command_is_one_line_and_status_2() -> None:
    result = run("cal")
    assert result.exit_code == 2
    assert "No such command 'cal'" in error_line(result)
    assert "call" in error_line(result)


def test_a_wrong_setting_is_one_line_naming_the_variable(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    monkeypatch.setenv("LYCEUM_MAX_WORKERS", "many")
    result = run("trace", "list")
    assert result.exit_code == 2
    assert "LYCEUM_MAX_WORKERS=many" in error_line(result)


def test_completion_offers_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "_LYCEUM_COMPLETE": "complete_bash", "COMP_WORDS": "lyceum call ap", "COMP_CWORD": "2"}
    program = "from lyceum_cli.app import app; app(prog_name='lyceum')"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert "apex" in ended.stdout.split()


def test_a_service_that_is_down_is_listed_and_fails_the_health_check(
    monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    monkeypatch.setattr(services, "load_services", lambda: {"testing": ENTRY})
    monkeypatch.setenv("LYCEUM_TESTING_TARGET", f"127.0.0.1:{closed_port()}")
    listed = run("ls", "--json")
    assert listed.exit_code == 0
    assert json.loads(listed.stdout)["services"][0]["health"] == "down"
    checked = run("health")
    assert checked.exit_code == 1
    assert "lyceum up testing" in checked.stderr


def test_a_serving_service_is_healthy(toy: str) -> None:
    result = run("health", "testing", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["services"] == [
        {"service": "testing", "address": toy, "health": "serving", "version": None}
    ]


def test_versions_are_listed_where_packages_are_installed_and_left_out_in_a_checkout(
    toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = run("ls")
    assert listed.exit_code == 0
    assert [line.split() for line in listed.stdout.splitlines()] == [
        ["service", "address", "health"],
        ["testing", toy, "serving"],
    ]
    monkeypatch.setattr("lyceum_cli.health._version", lambda entry: "1.2.3")
    assert [line.split()[-1] for line in run("ls").stdout.splitlines()] == ["version", "1.2.3"]


def test_an_artifact_comes_back_as_it_was_put(toy: str, tmp_path: Path) -> None:
    source, copy = tmp_path / "table.parquet", tmp_path / "copy"
    source.write_bytes(os.urandom(3 * 2**20 + 1))
    put = run("artifacts", "put", str(source), "--json")
    assert put.exit_code == 0, put.stderr
    ref = json.loads(put.stdout)
    assert ref["media_type"] == "application/vnd.apache.parquet"
    assert ref["size_bytes"] == str(3 * 2**20 + 1)
    listed = json.loads(run("artifacts", "ls", "--json").stdout)["artifacts"]
    assert [item["sha256"] for item in listed] == [ref["sha256"]]
    got = run("artifacts", "get", f"artifacts/{ref['sha256']}", "--out", str(copy))
    assert got.exit_code == 0, got.stderr
    assert copy.read_bytes() == source.read_bytes()
    again = run("artifacts", "get", ref["sha256"], "--out", str(copy))
    assert again.exit_code == 2
    assert "--force" in error_line(again)
    piped = run("artifacts", "get", ref["sha256"])
    assert piped.stdout_bytes == source.read_bytes()


def test_a_media_type_that_would_steer_the_terminal_is_refused_and_none_is_printed_raw(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a"
    source.write_text("x")
    for media_type in ("text/\x1b[2J", "text/plain\n", "text", "text/plain; charset=utf-8", "a/" + "b" * 300):
        refused = run("artifacts", "put", str(source), "--media-type", media_type)
        assert refused.exit_code == 1
        assert "header.media_type" in refused.stderr
    assert run("artifacts", "put", str(source), "--media-type", "image/svg+xml").exit_code == 0
    hostile = "a/\x1b[2J\x9b31m\u202eb\r\n"  # as a server without the rule would store it
    monkeypatch.setattr("lyceum_cli.artifacts._stored", lambda artifact: hostile)
    listed = run("artifacts", "ls")
    assert r"a/\x1b[2J\x9b31m\u202eb\r\n" in listed.stdout
    assert listed.stdout.replace("\n", "").isprintable()


def test_json_has_no_raw_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"name": "\x1b\x7f\x9bé"})
    assert capsys.readouterr().out == r'{"name": "\u001b\u007f\u009bé"}' + "\n"


def test_an_artifact_that_is_not_there_leaves_no_file(toy: str, tmp_path: Path) -> None:
    result = run("artifacts", "get", "0" * 64, "--out", str(tmp_path / "copy"))
    assert result.exit_code == 1
    assert "NOT_FOUND" in error_line(result)
    assert not (tmp_path / "copy").exists()


def test_the_sweep_keeps_what_is_younger_than_the_grace(toy: str, tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("unreferenced")
    run("artifacts", "put", str(source))
    assert json.loads(run("artifacts", "gc", "--json").stdout)["blobs"] == 0
    refused = run("artifacts", "gc", "--grace", "0s")
    assert refused.exit_code == 2
    assert "--force" in error_line(refused)
    time.sleep(0.05)
    swept = json.loads(run("artifacts", "gc", "--grace", "0s", "--force", "--json").stdout)
    assert swept == {"artifacts": 1, "blobs": 1, "bytes": len("unreferenced")}


def test_a_sweep_without_state_is_one_line(state: Path) -> None:
    result = run("artifacts", "gc")
    assert result.exit_code == 1
    assert "there is no state" in error_line(result)


def test_a_sweep_of_a_corrupt_database_is_one_line(state: Path) -> None:
    state.mkdir()
    (state / "lyceum.db").write_bytes(b"this is no database" * 1000)
    result = run("artifacts", "gc")
    assert result.exit_code != 0
    assert "lyceum.db" in error_line(result)


def toy_table(package: str = "lyceum_runtime.testing_service", port: int = 0) -> str:
    """A program that is the command line with the toy service as its table: (name, package, port)."""
    return (
        "from dataclasses import replace\n"
        "from lyceum_runtime import services\n"
        "from lyceum_runtime.testing_service import ENTRY\n"
        f"entry = replace(ENTRY, package={package!r}, port={port})\n"
        "services.load_services = lambda: {'testing': entry}\n"
        "services.find_entry = lambda name: entry\n"
        "from lyceum_cli.app import app\n"
        "app(prog_name='lyceum')\n"
    )


def start(*arguments: str, package: str = "lyceum_runtime.testing_service", port: int = 0) -> "subprocess.Popen[str]":
    program = [sys.executable, "-c", toy_table(package, port), *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def first_address(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.communicate()[1]
    return str(json.loads(line)["services"][0]["address"])


def health_of(address: str) -> str:
    from lyceum_cli.health import check

    return check([(ENTRY, address)])[0].health


def test_up_serves_and_ends_with_status_0_on_sigterm(state: Path) -> None:
    with start("up", "--port", "0", "--json") as child:
        address = first_address(child)
        assert health_of(address) == "serving"
        child.send_signal(signal.SIGTERM)
        assert child.wait(START_SECONDS) == 0
    assert health_of(address) == "down"


def test_up_on_a_taken_port_is_one_line(state: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with start("up", "--port", str(port)) as child:
            _, errors = child.communicate(timeout=START_SECONDS)
    assert child.returncode == 2
    assert f"port {port}" in errors
    assert "Traceback" not in errors


def test_an_isolated_service_that_is_killed_is_started_again(state: Path) -> None:
    with start("up", "--isolated", "--json", port=closed_port()) as child:
        address = first_address(child)
        (process,) = _children(child.pid)
        os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + START_SECONDS
        while _children(child.pid) in ([], [process]) or health_of(address) != "serving":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=START_SECONDS)
    assert child.returncode == 0
    assert "testing died (signal SIGKILL); starting it again in 0.5 s" in errors
    assert health_of(address) == "down"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has no signal for a parent's death")
def test_an_isolated_service_ends_with_a_supervisor_that_is_killed(state: Path) -> None:
    with start("up", "--isolated", "--json", port=closed_port()) as child:
        address = first_address(child)
        assert health_of(address) == "serving"
        child.kill()
    _await_down(address)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has no signal for a parent's death")
def test_the_services_of_a_tour_end_with_a_tour_that_is_killed(state: Path) -> None:
    program = (
        f"import sys, time; sys.executable = {_toy_python(state)!r}; from lyceum_cli import tour; "
        "from lyceum_runtime.testing_service import ENTRY\n"
        "with tour._started([ENTRY]) as places: print(places['testing'], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        assert health_of(address) == "serving"
        child.kill()
    _await_down(address)


def _await_down(address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while health_of(address) != "down":
        assert time.monotonic() < deadline, "the service is still there"
        time.sleep(0.1)


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_an_isolated_service_that_cannot_start_is_given_up(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    monkeypatch.setattr(up, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(up, "MAX_QUICK_DEATHS", 3)
    broken = services.ServiceEntry("broken", "lyceum_runtime.spans", "a.B", port=1, cpus=1, memory_gib=1)
    monkeypatch.setattr(services, "load_services", lambda: {"broken": broken})
    result = run("up", "--isolated")
    assert result.exit_code == 1
    assert "broken died 3 times soon after its start" in error_line(result)
    assert result.stderr.count("starting it again") == 2


def test_a_tour_is_one_whole_trace_and_fails_if_a_method_fails(
    toy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lyceum.testing.v1 import testing_pb2

    def walk(client: Any, report: Any) -> TourResult:
        report("echo", "two calls")
        texts = [client.stub.Echo(testing_pb2.EchoRequest(text=text)).text for text in ("a", "b")]
        return TourResult("both came back", [("answers", ", ".join(texts))], texts == ["a", "b"])

    module = ModuleType("lyceum_runtime.testing_service.tour")
    module.run = walk  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    result = run("tour", "--running", "--json")
    assert result.exit_code == 0, result.output
    (method,) = json.loads(result.stdout)["methods"]
    assert method["passed"]
    assert method["rows"] == [["answers", "a, b"]]
    assert method["missing_parents"] == 0
    assert method["spans"] >= 5  # the tour, and two calls seen from both sides
    shown = json.loads(run("trace", "show", method["trace_id"], "--json").stdout)
    assert [span["name"] for span in shown["spans"] if span["parent_id"] is None] == ["tour testing"]

    def fail(client: Any, report: Any) -> TourResult:
        raise OSError("no network; install chem-tactics")

    module.run = fail  # type: ignore[attr-defined]
    failed = run("tour", "--running")
    assert failed.exit_code == 1
    assert "no network; install chem-tactics" in failed.stdout
    assert "Traceback" not in failed.output


def test_a_tour_starts_and_stops_its_own_services(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", _toy_python(state))
    with tour._started([ENTRY]) as places:
        address = places["testing"]
        assert health_of(address) == "serving"
    assert health_of(address) == "down"
    assert not (state / "lyceum.db").exists()


def _toy_python(state: Path) -> str:
    """An interpreter whose `-m lyceum_cli` has the toy service as its table."""
    state.mkdir(exist_ok=True)
    program = state / "toy.py"
    program.write_text(toy_table())
    script = state / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{program}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_services_that_do_not_start_fail_the_tour_with_their_reason(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LYCEUM_MAX_PENDING", "0")
    monkeypatch.setattr(sys, "executable", _toy_python(state))
    with pytest.raises(CliError, match="LYCEUM_MAX_PENDING"), tour._started([ENTRY]):
        pass


def test_bench_hands_case_size_and_folder_to_the_packages_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    module = ModuleType("lyceum_runtime.testing_service.bench")

    def measure(case: str | None, quick: bool, out_dir: Path) -> dict[str, Any]:
        seen.append((case, quick, out_dir))
        sys.stdout.write("a table\n")
        return {"ratio": 2.0}

    module.run = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(services, "load_services", lambda: {"testing": ENTRY})
    out = tmp_path / "out"
    result = run("bench", "testing", "--case", "B1", "--quick", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    assert seen == [("B1", True, out)]
    assert json.loads(result.stdout) == {"ratio": 2.0}
    assert out.is_dir()


def test_bench_of_a_method_without_benchmarks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "load_services", lambda: {"testing": ENTRY})
    result = run("bench", "testing")
    assert result.exit_code == 1
    assert "testing has no benchmarks" in error_line(result)


def test_an_unexpected_error_is_one_line_and_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(services, "load_services", broken)
    result = run("ls")
    assert result.exit_code == 1
    assert "unexpected ZeroDivisionError: by zero; LYCEUM_DEBUG=1" in error_line(result)
