"""Starts one service from its PEX with an empty state, waits until it is healthy, and stops it.

Run with the PEX as the interpreter, so that the check needs only what the service ships; `tools/start-services` does.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# The first start of a PEX also unpacks it.
LIMIT_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_healthy(port: int, child: "subprocess.Popen[bytes]") -> None:
    """Returns when the server says SERVING; raises TimeoutError, or RuntimeError when it ends before."""
    deadline = time.monotonic() + LIMIT_SECONDS
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if child.poll() is not None:
                raise RuntimeError(f"it ended with {child.returncode} before it was healthy")
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                time.sleep(0.05)
    raise TimeoutError(f"not healthy after {LIMIT_SECONDS:.0f} s")


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(name: str, pex: str) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as state:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PEX_", "LYCEUM_"))}
        environment |= {"LYCEUM_PORT": str(port), "LYCEUM_STATE_DIR": state}
        started = time.monotonic()
        with subprocess.Popen([pex], env=environment) as child:
            try:
                wait_healthy(port, child)
                seconds, memory = time.monotonic() - started, resident_mib(child.pid)
                print(f"{name}: healthy after {seconds:.1f} s, {memory:.0f} MiB resident")
                child.send_signal(signal.SIGTERM)
                status = child.wait(timeout=LIMIT_SECONDS)
            finally:
                child.kill()
    if status:
        raise RuntimeError(f"{name}: ended with {status} after SIGTERM")


if __name__ == "__main__":
    main(*sys.argv[1:])
