"""How a method presents itself to the runtime.

A method's `service.py` has one function `definition()` that returns a :class:`ServiceDefinition`. Its `methods` map
each RPC's name to a plain function of (request, :class:`Call`): a unary RPC returns its response, a server stream is a
generator of messages, a client stream takes an iterator of requests. They run on worker threads and may block; an
`async def` runs on the event loop and must not. An RPC that returns `google.longrunning.Operation` is a
:class:`LongMethod`. None of them sees gRPC.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

if TYPE_CHECKING:
    from lyceum_base.checkpoint import Checkpoint
    from lyceum_runtime.artifacts import Artifacts
    from lyceum_runtime.resources import Resources


@dataclass(frozen=True)
class Call:
    """What one request, or one run of an operation, may use. Everything in it is bound to the caller's tenant."""

    service: str
    """Short name of the service, as in infra/services.toml."""
    tenant: str
    resources: "Resources"
    artifacts: "Artifacts"
    should_stop: Callable[[], bool]
    """True once the caller has left, the deadline has passed, or the operation was cancelled; poll it in long
    stretches.
    """
    on_progress: Callable[[str, int, int, Mapping[str, float]], None]
    """Reports (stage, completed, total, metrics) between checkpoints; a stage becomes a span."""


@dataclass(frozen=True)
class LongMethod:
    """One RPC that returns an Operation.

    `check(request, call)` refuses at once what can be refused (unknown names, wrong fields) by raising a ServiceError.
    `run(request, call, resume)` yields checkpoints; `resume` is the state of the last stored one, or None. Its last
    state is the result. `finish(request, state, call)` turns the last state into the response: it creates the resource
    and stores its artifacts, and must be safe to run again after a crash (the runtime gives `call.resources.create` the
    operation's own idempotency key).
    """

    request: type[Message]
    response: type[Message]
    run: Callable[[Any, Call, Mapping[str, Any] | None], Iterator["Checkpoint"]]
    finish: Callable[[Any, Mapping[str, Any], Call], Message]
    check: Callable[[Any, Call], None] = lambda request, call: None
    seeded: bool = False
    """True if the request has a `seed` field: an unset one is drawn once, before the operation is stored."""


@dataclass(frozen=True)
class ServiceDefinition:
    """One gRPC service of one method."""

    name: str
    """Short name, as in infra/services.toml."""
    service: str
    """Full gRPC name; its descriptor is in the default pool once the package's stubs are imported."""
    methods: Mapping[str, Callable[..., Any]]
    long_methods: Mapping[str, LongMethod]
