"""The functions of EchoService."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lyceum.common.v1 import common_pb2
from lyceum.testing.v1 import testing_pb2
from lyceum_base.checkpoint import Checkpoint, Stopped
from lyceum_runtime.definition import Call, LongMethod, ServiceDefinition
from lyceum_runtime.errors import FailedPrecondition, from_code

_POLL_SECONDS = 0.005


def definition() -> ServiceDefinition:
    """EchoService as the runtime serves it."""
    return ServiceDefinition(
        name="testing",
        service="lyceum.testing.v1.EchoService",
        methods={"Echo": echo, "Spin": spin, "Collect": collect, "Converse": converse, "Fail": fail},
        long_methods={
            "Train": LongMethod(
                request=testing_pb2.TrainRequest,
                response=testing_pb2.TrainResponse,
                run=run_train,
                finish=finish_train,
                seeded=True,
            )
        },
    )


def echo(request: testing_pb2.EchoRequest, call: Call) -> testing_pb2.EchoResponse:
    """The request's own fields, after `wait_seconds`."""
    _sleep(request.wait_seconds, call)
    response = testing_pb2.EchoResponse(text=request.text, values=request.values, padding=bytes(request.padding_bytes))
    if request.HasField("tensor"):
        response.tensor.CopyFrom(request.tensor)
    return response


def spin(request: testing_pb2.SpinRequest, call: Call) -> Iterator[testing_pb2.SpinResponse]:
    """Holds the interpreter for `period_seconds` before each message, as a Python-bound method does."""
    for index in range(request.count):
        end = time.monotonic() + request.period_seconds
        while time.monotonic() < end:
            if call.should_stop():
                raise Stopped
        yield testing_pb2.SpinResponse(index=index)


def collect(requests: Iterator[testing_pb2.CollectRequest], call: Call) -> testing_pb2.CollectResponse:
    """Sum and number of the values."""
    response = testing_pb2.CollectResponse()
    for request in requests:
        response.sum += request.value
        response.count += 1
    return response


def converse(requests: Iterator[testing_pb2.ConverseRequest], call: Call) -> Iterator[testing_pb2.ConverseResponse]:
    """Each message's text, as it comes."""
    for index, request in enumerate(requests):
        yield testing_pb2.ConverseResponse(index=index, text=request.text)


def fail(request: testing_pb2.FailRequest, call: Call) -> testing_pb2.FailResponse:
    """Raises: a ServiceError of the asked code, or an ordinary exception whose text must not leave the server."""
    if request.code:
        raise from_code(request.code, request.message)
    raise RuntimeError(request.message)


def run_train(request: testing_pb2.TrainRequest, call: Call, resume: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
    """One state a step: (step, digest). digest_0 is the seed's 8 bytes, digest_{k+1} = SHA-256(digest_k)."""
    step = int(resume["step"]) if resume else 0
    digest = bytes.fromhex(resume["digest"]) if resume else request.seed.value.to_bytes(8, "little")
    while step < request.steps:
        _sleep(request.seconds_per_step, call)
        step += 1
        if step == request.fail_at:
            raise FailedPrecondition(f"fail_at asked for a failure at step {step}", reason="FAIL_AT", subject="fail_at")
        digest = hashlib.sha256(digest).digest()
        yield Checkpoint(
            {"step": step, "digest": digest.hex()},
            stage="train",
            completed=step,
            total=request.steps,
            metrics={"first_byte": digest[0]},
        )


def finish_train(request: testing_pb2.TrainRequest, state: Mapping[str, Any], call: Call) -> testing_pb2.TrainResponse:
    """The last digest and the seed."""
    return testing_pb2.TrainResponse(
        digest=bytes.fromhex(state["digest"]),
        seed=common_pb2.Seed(value=request.seed.value),
        steps=state["step"],
    )


def _sleep(seconds: float, call: Call) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if call.should_stop():
            raise Stopped
        time.sleep(min(left, _POLL_SECONDS))
