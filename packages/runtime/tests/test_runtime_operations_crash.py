"""Operations across processes: each test starts real processes that run an engine, and kills or freezes them."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.longrunning import operations_pb2
from google.rpc import code_pb2

from lyceum.common.v1 import common_pb2
from lyceum.testing.v1 import testing_pb2
from lyceum_runtime.artifacts import ArtifactStore
from lyceum_runtime.database import Database
from lyceum_runtime.operations import OperationsEngine
from lyceum_runtime.settings import Settings

CHILD = """
import importlib, json, sys
from lyceum.testing.v1 import testing_pb2
from lyceum_runtime.artifacts import ArtifactStore
from lyceum_runtime.database import Database
from lyceum_runtime.operations import Durability, OperationsEngine
from lyceum_runtime.settings import Settings

arguments = json.loads(sys.argv[1])
sys.path[:0] = arguments["path"]
settings = Settings(state_dir=arguments["state_dir"])
database = Database(settings.database_url)
load = lambda name: importlib.import_module(arguments["module"]).definition()
durability = Durability(**arguments["durability"])
engine = OperationsEngine(settings, database, ArtifactStore(settings, database), load, durability=durability)
if arguments["module"] == "toy":
    load("")  # so that what the file registers with DBOS is a part of DBOS's hash of the source
engine.launch(arguments["services"])
print("ready", flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command[0] == "start":
        request = testing_pb2.TrainRequest.FromString(bytes.fromhex(command[2]))
        print(engine.start(command[1], "Train", request, "default").name, flush=True)
    else:
        engine.drain(command[1])
        print("drained", flush=True)
        sys.exit(0)
"""

TOY = '''
"""Train as testing_service has it, but in a file that the test can edit."""
import hashlib, os, time
from lyceum.testing.v1 import testing_pb2
from lyceum_base.checkpoint import Checkpoint, Stopped
from lyceum_runtime.definition import LongMethod, ServiceDefinition

def run(request, call, resume):
    step, digest = (resume["step"], bytes.fromhex(resume["digest"])) if resume else (0, bytes(8))
    while step < request.steps:
        time.sleep(request.seconds_per_step)
        if call.should_stop():
            raise Stopped
        {body}
        step += 1
        digest = hashlib.sha256(digest).digest()
        yield Checkpoint({{"step": step, "digest": digest.hex()}}, "train", step, request.steps)

def finish(request, state, call):
    return testing_pb2.TrainResponse(digest=bytes.fromhex(state["digest"]), steps=state["step"])

def definition():
    method = LongMethod(testing_pb2.TrainRequest, testing_pb2.TrainResponse, run, finish)
    return ServiceDefinition("testing", "lyceum.testing.v1.EchoService", {{}}, {{"Train": method}})
'''


EDIT = """
from dbos import DBOS

@DBOS.workflow()
def another_workflow():
    pass
"""


def chain(steps: int, seed: int = 0) -> bytes:
    """The result of an uninterrupted Train, by its definition."""
    digest = seed.to_bytes(8, "little")
    for _ in range(steps):
        digest = hashlib.sha256(digest).digest()
    return digest


class World:
    """A state directory, the processes that share it, and an engine here that only looks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings(state_dir=folder)
        self.database = Database(self.settings.database_url)
        store = ArtifactStore(self.settings, self.database)
        self.observer = OperationsEngine(self.settings, self.database, store, lambda name: pytest.fail("not here"))
        self.children: list[subprocess.Popen[str]] = []

    def child(
        self,
        *,
        services: tuple[str, ...] = ("testing",),
        module: str = "lyceum_runtime.testing_service.service",
        **durability: float,
    ) -> subprocess.Popen[str]:
        """A process that has launched its engine."""
        arguments = {
            "state_dir": str(self.folder),
            "services": services,
            "module": module,
            "durability": durability,
            "path": [str(self.folder)],
        }
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def start(self, child: subprocess.Popen[str], *, service: str = "testing", **fields: Any) -> str:
        """Starts Train with the seed 0 in a child; returns the operation's name."""
        request = testing_pb2.TrainRequest(**{"seed": common_pb2.Seed(value=0)} | fields)
        return self.tell(child, "start", service, request.SerializeToString().hex())

    def tell(self, child: subprocess.Popen[str], *command: object) -> str:
        """Sends a command and returns the line that the child answers."""
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(command) + "\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    def count_steps(self) -> Path:
        """Writes the toy service so that each step that it really computes leaves one byte in the file returned."""
        executed = self.folder / "executed"
        (self.folder / "toy.py").write_text(TOY.format(body=f"open({str(executed)!r}, 'ab').write(b'.')"))
        return executed

    def completed(self, name: str) -> int:
        """Steps done so far."""
        return unpack(self.observer.get(name, "default")).completed

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> float:
        """Waits for a condition; how long it took."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < seconds, "timed out"
            time.sleep(0.01)
        return time.monotonic() - begin

    def result(self, name: str, seconds: float = 30.0) -> testing_pb2.TrainResponse:
        """The response of an operation that must succeed."""
        operation = self.observer.wait(name, "default", seconds)
        assert operation.done
        assert operation.WhichOneof("result") == "response", operation.error
        response = testing_pb2.TrainResponse()
        operation.response.Unpack(response)
        return response


def unpack(operation: operations_pb2.Operation) -> common_pb2.Progress:
    progress = common_pb2.Progress()
    operation.metadata.Unpack(progress)
    return progress


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for child in world.children:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
        child.kill()
        child.communicate()
    world.observer.close()
    world.database.close()


def test_ten_kills_at_random_moments_give_the_uninterrupted_result(world: World) -> None:
    steps, kills = 300, 10
    executed = world.count_steps()
    moments = random.Random(20261201)
    child = world.child(module="toy", max_attempts=100)
    name = world.start(child, steps=steps, seconds_per_step=0.005)
    reached = 0
    for _ in range(kills):  # each start takes a second or more
        time.sleep(moments.uniform(0.0, 0.4))
        child.kill()
        child.wait()
        assert world.completed(name) >= reached, "recorded work was lost"
        reached = world.completed(name)
        child = world.child(module="toy", max_attempts=100)
    assert world.result(name).digest == chain(steps)
    assert executed.stat().st_size <= steps + kills, "a kill costs more than the step it falls into"
    assert not any((world.folder / "artifacts" / "operations").rglob("*.*")), "checkpoints of a finished operation stay"


def test_a_killed_process_resumes_at_once_and_not_from_the_start(world: World) -> None:
    executed = world.count_steps()
    child = world.child(module="toy")
    name = world.start(child, steps=60, seconds_per_step=0.05)
    world.until(lambda: world.completed(name) >= 20)
    child.kill()
    child.wait()
    reached = world.completed(name)
    world.child(module="toy")
    # The lease has 20 s to run: only the file lock can tell so soon that the first process is dead.
    assert world.until(lambda: world.completed(name) > reached, seconds=10) < 10
    assert world.result(name).digest == chain(60)
    assert executed.stat().st_size <= 61, "it computed again what was recorded"


def test_a_damaged_checkpoint_costs_work_but_not_the_result(world: World) -> None:
    child = world.child()
    name = world.start(child, steps=60, seconds_per_step=0.05)
    world.until(lambda: world.completed(name) >= 10)
    child.kill()
    child.wait()
    checkpoints = (world.folder / "artifacts" / name).iterdir()
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
    newest.chmod(0o600)
    newest.write_bytes(newest.read_bytes()[:-1])
    world.child()
    assert world.result(name).digest == chain(60)


def test_an_edited_source_still_resumes(world: World) -> None:
    (world.folder / "toy.py").write_text(TOY.format(body="pass"))
    child = world.child(module="toy")
    name = world.start(child, steps=40, seconds_per_step=0.05)
    world.until(lambda: world.completed(name) >= 5)
    child.kill()
    child.wait()
    reached = world.completed(name)  # its record may have come too late by one step
    (world.folder / "toy.py").write_text(TOY.format(body=f"assert step >= {reached - 1}, 'resumed too early'") + EDIT)
    world.child(module="toy")
    assert world.result(name).digest == chain(40)


def test_another_process_adopts_when_the_lease_expires_and_the_sleeper_gives_way(world: World) -> None:
    first = world.child(lease_seconds=1.5, renew_seconds=0.3)
    name = world.start(first, steps=50, seconds_per_step=0.05)
    world.until(lambda: world.completed(name) >= 5)
    first.send_signal(signal.SIGSTOP)  # alive, with its file lock, but it renews no lease
    reached = world.completed(name)
    second = world.child(lease_seconds=1.5, renew_seconds=0.3)
    world.until(lambda: world.completed(name) > reached, seconds=10)
    first.send_signal(signal.SIGCONT)
    assert world.result(name).digest == chain(50)
    # Both are well: each can still start and finish an operation.
    for child in (first, second):
        assert world.result(world.start(child, steps=2)).digest == chain(2)


def test_a_live_lease_is_not_adopted(world: World) -> None:
    first = world.child(lease_seconds=4.0, renew_seconds=0.5)
    world.child(lease_seconds=4.0, renew_seconds=0.5)
    name = world.start(first, steps=120, seconds_per_step=0.05)
    runs = sa.text("SELECT run FROM operations WHERE id = :id")
    assert world.result(name).digest == chain(120)
    with world.database.read() as connection:
        assert connection.execute(runs, {"id": name.removeprefix("operations/")}).scalar() == 1


def test_a_process_runs_only_its_own_services_operations(world: World) -> None:
    owner = world.child(services=("testing",))
    name = world.start(owner, steps=20, seconds_per_step=0.1)
    world.until(lambda: world.completed(name) >= 2)
    owner.kill()
    owner.wait()
    reached = world.completed(name)
    world.child(services=("another",))
    time.sleep(2.5)
    assert world.completed(name) == reached
    assert not world.observer.get(name, "default").done
    world.child(services=("testing",))
    assert world.result(name).digest == chain(20)


def test_a_drained_process_parks_and_another_continues_at_once(world: World) -> None:
    first = world.child()
    second = world.child()
    name = world.start(first, steps=100, seconds_per_step=0.05)
    world.until(lambda: world.completed(name) >= 5)
    with world.database.read() as connection:
        executor_id: str = connection.execute(sa.text("SELECT executor_id FROM operations")).scalar_one()
    lock = world.folder / "executors" / executor_id
    assert lock.exists()
    # Either of the two may have taken it from the queue.
    holder = first if holds(first, lock) else second
    assert world.tell(holder, "drain", 5) == "drained"
    assert holder.wait(10) == 0
    reached = world.completed(name)
    assert 5 <= reached < 100
    assert world.until(lambda: world.completed(name) > reached, seconds=5) < 3
    assert world.result(name).digest == chain(100)


def holds(child: subprocess.Popen[str], path: Path) -> bool:
    """Whether a process has a file open."""
    return any(os.path.realpath(link) == str(path.resolve()) for link in Path(f"/proc/{child.pid}/fd").iterdir())


def test_cancel_from_another_process_stops_the_computation_within_two_seconds(world: World) -> None:
    child = world.child()
    name = world.start(child, steps=1000, seconds_per_step=0.5)
    world.until(lambda: world.completed(name) >= 1)
    begin = time.monotonic()
    world.observer.cancel(name, "default")
    operation = world.observer.wait(name, "default", 5)
    assert operation.error.code == code_pb2.CANCELLED
    assert time.monotonic() - begin < 2
    reached = world.completed(name)
    time.sleep(1.2)
    assert world.completed(name) == reached


def test_an_operation_that_kills_its_process_again_and_again_fails(world: World) -> None:
    (world.folder / "toy.py").write_text(TOY.format(body="os._exit(9)"))
    child = world.child(module="toy", max_attempts=3)
    name = world.start(child, steps=5)
    assert child.wait(20) == 9
    for _ in range(2):
        child = world.child(module="toy", max_attempts=3)
        assert child.wait(20) == 9
        assert not world.observer.get(name, "default").done
    child = world.child(module="toy", max_attempts=3)
    operation = world.observer.wait(name, "default", 10)
    assert operation.error.code == code_pb2.RESOURCE_EXHAUSTED
    assert "died 3 times" in operation.error.message
    assert child.poll() is None
