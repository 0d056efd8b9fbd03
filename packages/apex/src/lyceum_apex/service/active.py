"""RunActiveSearch: a search whose oracle is the caller, stored after every answer."""

import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from lyceum.apex.v1 import apex_pb2
from lyceum_apex.service.storing import SAFETENSORS, fields, load_index, load_library
from lyceum_base.checkpoint import Stopped
from lyceum_runtime import codec
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import FailedPrecondition, InvalidArgument
from lyceum_runtime.resources import resource_name

if TYPE_CHECKING:
    from lyceum_apex.active import ActiveResult, ActiveSearch, ActiveState
    from lyceum_apex.contributions import ContributionTable
    from lyceum_apex.library import ProductBatch, SynthonLibrary

DEFAULT_ROUNDS = 8
DEFAULT_BATCH = 100
KEPT = timedelta(days=30)

_HIT_ROWS = 1_000


def run_active_search(
    requests: Iterator[apex_pb2.RunActiveSearchRequest], call: Call
) -> Iterator[apex_pb2.RunActiveSearchResponse]:
    """The session, requests to the oracle, hits in batches, one summary."""
    from lyceum_apex.active import ActiveState

    session = _opened(next(requests, None), call)
    library = load_library(call, session.start.library)
    search = _search(session.start, library, call)
    yield apex_pb2.RunActiveSearchResponse(session=session)
    state = ActiveState.empty()
    if session.HasField("state"):
        state = ActiveState.from_bytes(call.artifacts.read_bytes(session.state))
    received = 0
    while True:
        proposed = search.propose(state, should_stop=call.should_stop)
        if proposed is not state:
            state = proposed
            session = _stored(session, state, call)
        if not len(state.pending):
            break
        smiles = library.products_smiles(_next(session, state))
        whole = [i for i, text in enumerate(smiles) if text is not None]
        scores = np.full(len(smiles), np.nan)
        if whole:
            asked = _oracle_request(library, state, smiles)
            yield apex_pb2.RunActiveSearchResponse(oracle_request=asked)
            received += 1
            scores[whole] = _answer(next(requests, None), asked, f"[{received}]")
        with fields(lambda field, place=f"[{received}].scores": f"{place}.{field}"):  # type: ignore[misc]
            state = state.tell(scores)
        session = _stored(session, state, call)
    yield from _hits(library, search.result(state), session.start.k, call)


def _opened(first: apex_pb2.RunActiveSearchRequest | None, call: Call) -> apex_pb2.ActiveSearchSession:
    """The session that the first message starts or resumes."""
    step = None if first is None else first.WhichOneof("step")
    if first is None or step not in ("start", "session"):
        raise InvalidArgument(("[0].step", f"{step or 'nothing'} given; the first message has `start` or `session`"))
    if step == "session":
        session = call.resources.get(first.session, apex_pb2.ActiveSearchSession)
        if list(session.input_sha256) != _inputs(session.start, call):
            raise FailedPrecondition(
                f"{session.start.library} or its index is not what {session.name} was started with; start a new search",
                reason="VERSION",
                subject=session.name,
            )
        return session
    start = apex_pb2.ActiveSearchStart()
    start.CopyFrom(first.start)
    if not start.HasField("seed"):
        start.seed.value = secrets.randbits(64)
    if not start.HasField("rounds"):
        start.rounds = DEFAULT_ROUNDS
    start.batch_size = start.batch_size or DEFAULT_BATCH
    inputs = _inputs(start, call)
    _search(start, load_library(call, start.library), call)  # refuses wrong fields before anything is stored
    return call.resources.create(
        resource_name("activeSearches", "", "session"),
        apex_pb2.ActiveSearchSession(start=start, input_sha256=inputs),
        expire=KEPT,
    )


def _inputs(start: apex_pb2.ActiveSearchStart, call: Call) -> list[str]:
    if start.index and not start.index.startswith(f"{start.library}/"):
        raise InvalidArgument(("[0].start.index", f"{start.index} is not an index of {start.library}"))
    found = [call.resources.get(start.library, apex_pb2.Library).artifact.sha256]
    if start.index:
        found.append(call.resources.get(start.index, apex_pb2.Index).artifact.sha256)
    return found


def _search(start: apex_pb2.ActiveSearchStart, library: "SynthonLibrary", call: Call) -> "ActiveSearch":
    from lyceum_apex.active import ActivePlan, ActiveSearch

    table = load_index(call, start.index).table if start.index else _exact_columns(library)
    constraints: dict[str, tuple[float | None, float | None]] = {}
    places = {"initial": "initial_count"}
    for i, item in enumerate(start.constraints):
        place = f"constraints[{i}]"
        if item.property in constraints:
            raise InvalidArgument((f"[0].start.{place}.property", f"{item.property!r} is named twice"))
        lower = item.lower if item.HasField("lower") else None
        upper = item.upper if item.HasField("upper") else None
        constraints[item.property] = (lower, upper)
        places |= {f"constraints[{item.property}]{end}": f"{place}{end}" for end in (".lower", ".upper")}
        places[f"constraints[{item.property}]"] = f"{place}.property"
    with fields(lambda field: f"[0].start.{places.get(field, field)}"):
        plan = ActivePlan(
            budget=start.budget,
            rounds=start.rounds,
            initial=start.initial_count or None,
            maximize=start.direction != apex_pb2.DIRECTION_MINIMIZE,
            constraints=constraints,
            seed=start.seed.value,
        )
        return ActiveSearch(library, plan, table)


def _exact_columns(library: "SynthonLibrary") -> "ContributionTable | None":
    from lyceum_apex.contributions import ContributionTable

    if not library.columns:
        return None
    values = np.column_stack(list(library.columns.values()))
    count = values.shape[1]
    sizes = tuple(map(tuple, library.sizes))
    return ContributionTable(sizes, values, np.zeros(count), np.ones(count), tuple(library.columns))


def _stored(session: apex_pb2.ActiveSearchSession, state: "ActiveState", call: Call) -> apex_pb2.ActiveSearchSession:
    """The session with its new state. Raises Aborted when another stream has gone on with it meanwhile."""
    ref = call.artifacts.put_bytes(state.to_bytes(), SAFETENSORS)
    changed = apex_pb2.ActiveSearchSession()
    changed.CopyFrom(session)
    changed.state.CopyFrom(ref)
    changed.call_count = len(state.scores)
    return call.resources.update(changed, etag=session.etag, artifacts=[ref])


def _next(session: apex_pb2.ActiveSearchSession, state: "ActiveState") -> "ProductBatch":
    from lyceum_apex.library import ProductBatch

    return ProductBatch(state.pending.r[: session.start.batch_size], state.pending.s[: session.start.batch_size])


def _oracle_request(
    library: "SynthonLibrary", state: "ActiveState", smiles: list[str | None]
) -> apex_pb2.OracleRequest:
    from lyceum_apex.library import ProductBatch

    names = _names(library, ProductBatch(state.pending.r[: len(smiles)], state.pending.s[: len(smiles)]))
    asked = [(name, text) for name, text in zip(names, smiles, strict=True) if text is not None]
    return apex_pb2.OracleRequest(
        round=len(state.rounds) - 1,
        products=[name for name, _ in asked],
        smiles=[text for _, text in asked],
        call_count=len(state.scores),
    )


def _names(library: "SynthonLibrary", batch: "ProductBatch") -> list[str]:
    return [library.product_name(int(r), [int(g) for g in s if g >= 0]) for r, s in zip(batch.r, batch.s, strict=True)]


def _answer(message: apex_pb2.RunActiveSearchRequest | None, asked: apex_pb2.OracleRequest, field: str) -> Any:
    """Scores [n] for the asked products. Raises InvalidArgument, Stopped."""
    if message is None:
        raise Stopped  # the caller has sent all it wants to send; the session waits
    if message.WhichOneof("step") != "scores":
        raise InvalidArgument((f"{field}.step", f"{message.WhichOneof('step')} given; `scores` answer a request"))
    count = len(asked.products)
    if len(message.scores.scores) != count:
        found = len(message.scores.scores)
        raise InvalidArgument((f"{field}.scores.scores", f"{found} given; the request has {count} products"))
    for i, (given, wanted) in enumerate(zip(message.scores.products, asked.products)):
        if given != wanted:
            raise InvalidArgument((f"{field}.scores.products[{i}]", f"{given!r} given; {wanted!r} was asked there"))
    if len(message.scores.products) not in (0, count):
        found = len(message.scores.products)
        raise InvalidArgument((f"{field}.scores.products", f"{found} given; the request has {count}, or give none"))
    return np.array(message.scores.scores)


def _hits(
    library: "SynthonLibrary", result: "ActiveResult", k: int, call: Call
) -> Iterator[apex_pb2.RunActiveSearchResponse]:
    import pyarrow as pa

    from lyceum_apex.library import ProductBatch

    count = min(k or len(result.scores), len(result.scores))
    for start in range(0, count, _HIT_ROWS):
        if call.should_stop():
            raise Stopped
        rows = slice(start, min(start + _HIT_ROWS, count))
        batch = ProductBatch(result.products.r[rows], result.products.s[rows])
        table = pa.table(
            {
                "product": pa.array(_names(library, batch), pa.string()),
                "smiles": pa.array(library.products_smiles(batch), pa.string()),
                "score": result.scores[rows],
            }
        )
        yield apex_pb2.RunActiveSearchResponse(index=start, hits=codec.to_arrow_batch(table))
    summary = apex_pb2.ActiveSearchSummary(call_count=result.calls, failed_count=result.failed, hit_count=count)
    yield apex_pb2.RunActiveSearchResponse(index=count, summary=summary)
