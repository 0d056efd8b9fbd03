"""ApexService: decode a request, call the core, encode the answer.

Libraries, surrogates and indexes are resources whose content is one artifact each. Loaded ones are kept in memory by the hash of
their content, so repeated queries of an index do not read it again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import empty_pb2
from google.protobuf.message import Message

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_apex.errors import FieldError, VersionError
from lyceum_base.checkpoint import Checkpoint
from lyceum_runtime import codec
from lyceum_runtime.definition import Call, LongMethod, ServiceDefinition
from lyceum_runtime.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from lyceum_runtime.resources import resource_name

if TYPE_CHECKING:
    from lyceum_apex.index import ApexIndex
    from lyceum_apex.library import ProductBatch, SynthonLibrary
    from lyceum_apex.query import Hits, Query
    from lyceum_apex.surrogate import Surrogate

MASS = "exact_mw"
"""Name of the exact column that every library has: molecular weight in g/mol."""

SAFETENSORS = "application/vnd.lyceum.safetensors"
PARQUET = "application/vnd.apache.parquet"

STREAM_K = 100_000
"""Most hits of one stream."""

MAX_CONTRIBUTION_BYTES = 4 << 30
MIN_ROWS = 100
_BRICS_MOLECULES = 20_000
_BATCH_ROWS = 1_000
_PART_ROWS = 20_000
_LABEL_ROWS = 2_000
_ENCODERS = {apex_pb2.ENCODER_UNSPECIFIED: "ecfp", apex_pb2.ENCODER_ECFP: "ecfp", apex_pb2.ENCODER_MPNN: "mpnn"}
_ENCODER_VALUES = {"ecfp": apex_pb2.ENCODER_ECFP, "mpnn": apex_pb2.ENCODER_MPNN}


def definition() -> ServiceDefinition:
    """ApexService as the runtime serves it."""
    return ServiceDefinition(
        name="apex",
        service="lyceum.apex.v1.ApexService",
        methods={
            "GetLibrary": lambda request, call: call.resources.get(request.name, apex_pb2.Library),
            "ListLibraries": list_libraries,
            "DeleteLibrary": _deleter(apex_pb2.Library),
            "GetSurrogate": lambda request, call: call.resources.get(request.name, apex_pb2.Surrogate),
            "ListSurrogates": list_surrogates,
            "DeleteSurrogate": _deleter(apex_pb2.Surrogate),
            "GetIndex": lambda request, call: call.resources.get(request.name, apex_pb2.Index),
            "ListIndexes": list_indexes,
            "DeleteIndex": _deleter(apex_pb2.Index),
            "SearchLibrary": search_library,
            "CountMatches": count_matches,
            "ScoreProducts": score_products,
            "ExplainProduct": explain_product,
        },
        long_methods={
            "ImportLibrary": LongMethod(
                request=apex_pb2.ImportLibraryRequest,
                response=apex_pb2.Library,
                check=check_import,
                run=run_import,
                finish=finish_import,
                seeded=True,
            ),
            "TrainSurrogate": LongMethod(
                request=apex_pb2.TrainSurrogateRequest,
                response=apex_pb2.Surrogate,
                check=check_train,
                run=run_train,
                finish=finish_train,
                seeded=True,
            ),
            "AddProbe": LongMethod(
                request=apex_pb2.AddProbeRequest,
                response=apex_pb2.Surrogate,
                check=check_probe,
                run=run_probe,
                finish=finish_probe,
            ),
            "BuildIndex": LongMethod(
                request=apex_pb2.BuildIndexRequest,
                response=apex_pb2.Index,
                check=check_build,
                run=run_build,
                finish=finish_build,
                seeded=True,
            ),
            "StartSearch": LongMethod(
                request=apex_pb2.StartSearchRequest,
                response=apex_pb2.SearchResult,
                check=check_search,
                run=run_search,
                finish=finish_search,
            ),
        },
    )


# --- resources -------------------------------------------------------------------------------------------------------


def list_libraries(request: apex_pb2.ListLibrariesRequest, call: Call) -> apex_pb2.ListLibrariesResponse:
    """One page of libraries."""
    fields = ("display_name", "reaction_count", "synthon_count", "create_time")
    page = call.resources.list("libraries", apex_pb2.Library, **_paging(request), fields=fields)
    return apex_pb2.ListLibrariesResponse(
        libraries=page.items, next_page_token=page.next_page_token, total_size=page.total_size
    )


def list_surrogates(request: apex_pb2.ListSurrogatesRequest, call: Call) -> apex_pb2.ListSurrogatesResponse:
    """One page of surrogates."""
    fields = ("display_name", "create_time")
    page = call.resources.list("surrogates", apex_pb2.Surrogate, **_paging(request), fields=fields)
    return apex_pb2.ListSurrogatesResponse(
        surrogates=page.items, next_page_token=page.next_page_token, total_size=page.total_size
    )


def list_indexes(request: apex_pb2.ListIndexesRequest, call: Call) -> apex_pb2.ListIndexesResponse:
    """One page of a library's indexes."""
    fields = ("display_name", "create_time")
    page = call.resources.list(f"{request.parent}/indexes", apex_pb2.Index, **_paging(request), fields=fields)
    return apex_pb2.ListIndexesResponse(
        indexes=page.items, next_page_token=page.next_page_token, total_size=page.total_size
    )


def _paging(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("page_size", "page_token", "filter", "order_by")}


def _deleter(kind: type[Message]) -> Callable[[Any, Call], empty_pb2.Empty]:
    def delete(request: Any, call: Call) -> empty_pb2.Empty:
        call.resources.delete(request.name, kind, etag=request.etag)
        return empty_pb2.Empty()

    return delete


def _require_free(call: Call, name: str, kind: type[Message]) -> None:
    """Refuses a taken name before the work rather than after it."""
    try:
        call.resources.get(name, kind)
    except NotFound:
        return
    raise AlreadyExists(name)


# --- what resources hold ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _cached(kind: str, sha256: str, read: "_Reader") -> Any:
    blob = read.artifacts.read_bytes(sha256)
    if kind == "library":
        from lyceum_apex.library import SynthonLibrary

        return SynthonLibrary.from_bytes(blob)
    if kind == "surrogate":
        from lyceum_apex.surrogate import Surrogate

        return Surrogate.from_bytes(blob)
    from lyceum_apex.index import ApexIndex

    return ApexIndex.from_bytes(blob)


class _Reader:
    """The artifacts to read from, outside the cache's key: a hash decides what an artifact holds."""

    def __init__(self, call: Call) -> None:
        self.artifacts = call.artifacts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reader)

    def __hash__(self) -> int:
        return 0


def _library(call: Call, name: str) -> "SynthonLibrary":
    library = call.resources.get(name, apex_pb2.Library)
    loaded: SynthonLibrary = _cached("library", library.artifact.sha256, _Reader(call))
    return loaded


def _surrogate(call: Call, name: str) -> "Surrogate":
    surrogate = call.resources.get(name, apex_pb2.Surrogate)
    loaded: Surrogate = _cached("surrogate", surrogate.artifact.sha256, _Reader(call))
    return loaded


def _index(call: Call, name: str) -> "ApexIndex":
    index = call.resources.get(name, apex_pb2.Index)
    loaded: ApexIndex = _cached("index", index.artifact.sha256, _Reader(call))
    return loaded


@contextmanager
def _fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Turns the core's complaint about its argument into one about the request's field."""
    try:
        yield
    except FieldError as error:
        raise InvalidArgument((rename(error.field), error.reason)) from error
    except VersionError as error:
        raise FailedPrecondition(str(error), reason="VERSION") from error


# --- ImportLibrary ---------------------------------------------------------------------------------------------------


def check_import(request: apex_pb2.ImportLibraryRequest, call: Call) -> None:
    """The name is free, the artifacts exist, the data set is known."""
    if request.library_id:
        _require_free(call, f"libraries/{request.library_id}", apex_pb2.Library)
    source = request.WhichOneof("source")
    if source == "zoo":
        if request.zoo != "real1m":
            raise InvalidArgument(("zoo", f"{request.zoo!r} is not a library; the data set with one is real1m"))
    else:
        for field, ref in getattr(request, source).ListFields():
            if isinstance(ref, common_pb2.ArtifactRef):
                _require_artifact(call, ref, f"{source}.{field.name}")
    if request.additive_columns and source not in ("parquet", "tsv"):
        raise InvalidArgument(("additive_columns", "only parquet and tsv have columns; leave it empty"))
    if MASS in request.additive_columns:
        raise InvalidArgument(("additive_columns", f"{MASS} is computed for every library; leave it out"))


def _require_artifact(call: Call, ref: common_pb2.ArtifactRef, field: str) -> None:
    try:
        call.artifacts.stat(ref)
    except NotFound as error:
        raise InvalidArgument((field, f"artifacts/{ref.sha256} does not exist; upload it first")) from error


def run_import(
    request: apex_pb2.ImportLibraryRequest, call: Call, resume: Mapping[str, Any] | None
) -> Iterator[Checkpoint]:
    """Stages: read, assemble. The state is the whole library."""
    from lyceum_apex.library import SynthonLibrary

    yield Checkpoint(None, stage="read", completed=0, total=1)
    source = request.WhichOneof("source")
    columns = tuple(request.additive_columns)
    with _fields(lambda field: f"{source}.{field}" if source != "zoo" else "zoo"):
        if source == "zoo":
            from lyceum_zoo import path

            folder = path(request.zoo)
            library = SynthonLibrary.from_tsv(
                folder / "synthon_space_1M.tsv", folder / "synthon_space_1M.reactions.tsv"
            )
        elif source == "parquet":
            library = SynthonLibrary.from_parquet(
                call.artifacts.local_path(request.parquet.reactions),
                call.artifacts.local_path(request.parquet.synthons),
                columns=columns,
            )
        elif source == "tsv":
            reactions = request.tsv.reactions if request.tsv.HasField("reactions") else None
            library = SynthonLibrary.from_tsv(
                call.artifacts.local_path(request.tsv.synthons),
                None if reactions is None else call.artifacts.local_path(reactions),
                columns=columns,
            )
        else:
            with _text("brics.smiles"):
                text = call.artifacts.read_bytes(request.brics.smiles).decode()
            library = SynthonLibrary.from_brics(
                [line.strip() for line in text.splitlines() if line.strip()],
                request.brics.max_molecules or _BRICS_MOLECULES,
                request.seed.value,
            )
        yield Checkpoint(None, stage="assemble", completed=0, total=1)
        blob = library.with_weight(MASS).to_bytes()
    yield Checkpoint({"library": np.frombuffer(blob, np.uint8)}, stage="assemble", completed=1, total=1)


@contextmanager
def _text(field: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise InvalidArgument((field, f"is not UTF-8 text (byte {error.start})")) from error


def finish_import(
    request: apex_pb2.ImportLibraryRequest, state: Mapping[str, Any], call: Call
) -> apex_pb2.Library:
    """The library as a resource."""
    from lyceum_apex.library import SynthonLibrary

    blob = state["library"].tobytes()
    library = SynthonLibrary.from_bytes(blob)
    ref = call.artifacts.put_bytes(blob, SAFETENSORS)
    return call.resources.create(
        resource_name("libraries", request.library_id, "library_id"),
        apex_pb2.Library(
            display_name=request.display_name,
            reaction_count=library.n_reactions,
            rgroup_count=sum(map(len, library.sizes)),
            synthon_count=library.n_legs,
            product_count=str(library.n_products),
            additive_columns=library.columns,
            artifact=ref,
        ),
        artifacts=[ref],
    )


# --- TrainSurrogate, AddProbe ----------------------------------------------------------------------------------------


def check_train(request: apex_pb2.TrainSurrogateRequest, call: Call) -> None:
    """The name is free and the training data exist."""
    if request.surrogate_id:
        _require_free(call, f"surrogates/{request.surrogate_id}", apex_pb2.Surrogate)
    if request.WhichOneof("training_data") == "table":
        if not request.property_names:
            raise InvalidArgument(("property_names", "name at least one column of the table"))
        _require_artifact(call, request.table.artifact, "table.artifact")
    else:
        if request.property_names:
            raise InvalidArgument(("property_names", "leave it empty: rdkit_sample.properties names the properties"))
        library = call.resources.get(request.rdkit_sample.library, apex_pb2.Library)
        if int(library.product_count) < request.rdkit_sample.product_count:
            raise InvalidArgument(
                ("rdkit_sample.product_count", f"the library has {library.product_count} products; ask for fewer")
            )


def run_train(
    request: apex_pb2.TrainSurrogateRequest, call: Call, resume: Mapping[str, Any] | None
) -> Iterator[Checkpoint]:
    """Stages: label, featurise, train, refit. States carry the labelled rows, so a resumed run does not label again."""
    from lyceum_apex.surrogate import Surrogate

    if resume is None:
        if request.WhichOneof("training_data") == "table":
            names = list(request.property_names)
            smiles, values = _labelled(request.table, names, call)
        else:
            names = list(request.rdkit_sample.properties)
            smiles, values = yield from _label(request, call)
        rows: dict[str, Any] = {"rows.smiles": smiles, "rows.names": names, "rows.values": values}
        yield Checkpoint(rows, stage="label", completed=len(smiles), total=len(smiles))
        state = None
    else:
        rows = {key: value for key, value in resume.items() if key.startswith("rows.")}
        state = {key: value for key, value in resume.items() if not key.startswith("rows.")} or None
    with _fields(lambda field: _training_field(request, field)):
        for checkpoint in Surrogate.iter_fit(
            rows["rows.smiles"],
            rows["rows.values"],
            rows["rows.names"],
            encoder=_ENCODERS[request.encoder],
            steps=request.steps or None,
            seed=request.seed.value,
            resume=state,
            should_stop=call.should_stop,
        ):
            yield _with_rows(checkpoint, rows)


def _with_rows(checkpoint: Checkpoint, rows: Mapping[str, Any]) -> Checkpoint:
    if checkpoint.state is None:
        return checkpoint
    return Checkpoint(
        {**checkpoint.state, **rows}, checkpoint.stage, checkpoint.completed, checkpoint.total, checkpoint.metrics
    )


def _training_field(request: apex_pb2.TrainSurrogateRequest, field: str) -> str:
    """The request's name for an argument of the fit."""
    if request.WhichOneof("training_data") == "rdkit_sample":
        return "rdkit_sample" if field.startswith(("smiles", "y", "names")) else field
    for prefix, name in (("names", "property_names"), ("smiles", "table.smiles"), ("y", "table")):
        if field.startswith(prefix):
            return name + field[len(prefix) :]
    return field


def _labelled(table: common_pb2.TableRef, names: Sequence[str], call: Call) -> tuple[list[str], Any]:
    """SMILES and properties [n, P] of a table."""
    columns = codec.read_table(table, call.artifacts, {"smiles": "string", **dict.fromkeys(names, "number")}, "table")
    smiles = columns.column("smiles").to_pylist()
    if len(smiles) < MIN_ROWS:
        raise InvalidArgument(("table", f"has {len(smiles)} rows; at least {MIN_ROWS} are needed"))
    return smiles, np.column_stack([columns.column(name).to_numpy().astype(np.float64) for name in names])


def _label(request: apex_pb2.TrainSurrogateRequest, call: Call) -> Iterator[Checkpoint]:
    """Assembles a sample of products and labels it. Products that do not assemble are left out."""
    from lyceum_apex.chemistry import properties
    from lyceum_apex.library import ProductBatch
    from lyceum_base.checkpoint import Stopped

    sample = request.rdkit_sample
    library = _library(call, sample.library)
    batch = library.sample(sample.product_count, request.seed.value)
    smiles: list[str] = []
    values = []
    for start in range(0, len(batch), _LABEL_ROWS):
        if call.should_stop():
            raise Stopped
        rows = slice(start, start + _LABEL_ROWS)
        part = [text for text in library.products_smiles(ProductBatch(batch.r[rows], batch.s[rows])) if text]
        smiles += part
        values.append(properties(part, tuple(sample.properties)))
        yield Checkpoint(None, stage="label", completed=min(start + _LABEL_ROWS, len(batch)), total=len(batch))
    return smiles, np.concatenate(values)


def finish_train(
    request: apex_pb2.TrainSurrogateRequest, state: Mapping[str, Any], call: Call
) -> apex_pb2.Surrogate:
    """The surrogate as a resource."""
    from lyceum_apex.surrogate import Surrogate

    surrogate = Surrogate.from_state({key: value for key, value in state.items() if not key.startswith("rows.")})
    ref = call.artifacts.put_bytes(surrogate.to_bytes(), SAFETENSORS)
    return call.resources.create(
        resource_name("surrogates", request.surrogate_id, "surrogate_id"),
        apex_pb2.Surrogate(
            display_name=request.display_name,
            properties=_properties(surrogate),
            encoder=_ENCODER_VALUES[surrogate.encoder.name],
            artifact=ref,
            training_row_count=len(state["rows.smiles"]),
            seed=request.seed,
        ),
        artifacts=[ref],
    )


def _properties(surrogate: "Surrogate") -> list[apex_pb2.PropertySummary]:
    return [
        apex_pb2.PropertySummary(name=probe.name, mean=probe.mean, std=probe.scale, r2_validation=probe.r2)
        for probe in surrogate.probes
    ]


def check_probe(request: apex_pb2.AddProbeRequest, call: Call) -> None:
    """The surrogate exists, is the expected one, and does not know the property."""
    surrogate = call.resources.get(request.surrogate, apex_pb2.Surrogate)
    if request.etag and request.etag != surrogate.etag:
        from lyceum_runtime.errors import Aborted

        raise Aborted(f"{request.surrogate} has changed: its etag is not {request.etag}; read it again")
    if any(known.name == request.property_name for known in surrogate.properties):
        raise InvalidArgument(("property_name", f"{request.property_name!r} is there already"))
    _require_artifact(call, request.table.artifact, "table.artifact")


def run_probe(
    request: apex_pb2.AddProbeRequest, call: Call, resume: Mapping[str, Any] | None
) -> Iterator[Checkpoint]:
    """Stages: featurise, probe. The state is the whole surrogate."""
    yield Checkpoint(None, stage="featurise", completed=0, total=1)
    smiles, values = _labelled(request.table, [request.property_name], call)
    surrogate = _surrogate(call, request.surrogate)
    with _fields(lambda field: {"property": "property_name"}.get(field, f"table.{field}")):
        extended = surrogate.add_probe(request.property_name, smiles, values[:, 0])
    yield Checkpoint(
        {"surrogate": np.frombuffer(extended.to_bytes(), np.uint8)}, stage="probe", completed=1, total=1
    )


def finish_probe(request: apex_pb2.AddProbeRequest, state: Mapping[str, Any], call: Call) -> apex_pb2.Surrogate:
    """The surrogate with its new probe."""
    from lyceum_apex.surrogate import Surrogate

    blob = state["surrogate"].tobytes()
    ref = call.artifacts.put_bytes(blob, SAFETENSORS)
    resource = call.resources.get(request.surrogate, apex_pb2.Surrogate)
    if resource.artifact.sha256 == ref.sha256:
        return resource  # a crash came between the update and the record of it
    resource.artifact.CopyFrom(ref)
    del resource.properties[:]
    resource.properties.extend(_properties(Surrogate.from_bytes(blob)))
    return call.resources.update(resource, etag=request.etag, artifacts=[ref])


# --- BuildIndex ------------------------------------------------------------------------------------------------------


def check_build(request: apex_pb2.BuildIndexRequest, call: Call) -> None:
    """Library and surrogate exist, the name is free, the contributions fit in memory."""
    library = call.resources.get(request.parent, apex_pb2.Library)
    surrogate = call.resources.get(request.surrogate, apex_pb2.Surrogate)
    if request.index_id:
        _require_free(call, f"{request.parent}/indexes/{request.index_id}", apex_pb2.Index)
    size = 8 * library.synthon_count * (len(surrogate.properties) + len(library.additive_columns))
    if size > MAX_CONTRIBUTION_BYTES:
        raise ResourceExhausted(
            f"the contributions need {size} bytes, more than {MAX_CONTRIBUTION_BYTES}; index fewer properties"
        )
    clash = {known.name for known in surrogate.properties} & set(library.additive_columns)
    if clash:
        raise FailedPrecondition(
            f"the surrogate predicts {', '.join(sorted(clash))}, which the library has as exact columns; rename one",
            reason="PROPERTY_CLASH",
            subject=request.surrogate,
        )


def run_build(
    request: apex_pb2.BuildIndexRequest, call: Call, resume: Mapping[str, Any] | None
) -> Iterator[Checkpoint]:
    """Stages: sample, factorise, encode."""
    from lyceum_apex.factorizer import Factorizer

    with _fields(lambda field: field):
        yield from Factorizer.iter_fit(
            _library(call, request.parent),
            _surrogate(call, request.surrogate),
            steps=request.steps or None,
            seed=request.seed.value,
            resume=resume,
            should_stop=call.should_stop,
        )


def finish_build(request: apex_pb2.BuildIndexRequest, state: Mapping[str, Any], call: Call) -> apex_pb2.Index:
    """The index as a resource."""
    from lyceum_apex.factorizer import Factorizer
    from lyceum_apex.index import ApexIndex

    index = ApexIndex.build(
        _library(call, request.parent), _surrogate(call, request.surrogate), Factorizer.from_state(state)
    )
    ref = call.artifacts.put_bytes(index.to_bytes(), SAFETENSORS)
    return call.resources.create(
        resource_name(f"{request.parent}/indexes", request.index_id, "index_id"),
        apex_pb2.Index(
            display_name=request.display_name,
            surrogate=request.surrogate,
            properties=index.table.names,
            reconstruction=[
                apex_pb2.Reconstruction(property=name, r2=r2) for name, r2 in index.reconstruction.items()
            ],
            contribution_bytes=index.table.values.nbytes,
            artifact=ref,
            seed=request.seed,
        ),
        artifacts=[ref],
        uses=[request.surrogate],
    )


# --- queries ---------------------------------------------------------------------------------------------------------


def _query(request: apex_pb2.Query, index: "ApexIndex") -> "Query":
    """The core's query; a property named twice or unknown to the index is refused."""
    from lyceum_apex.query import Query

    constraints = _constraints(request.constraints, index, "query.constraints")
    weights = _weights(request.objective, index, "query.objective")
    with _fields(lambda field: f"query.{field}"):
        return Query(
            objective=weights,
            k=request.k,
            maximize=request.direction != apex_pb2.DIRECTION_MINIMIZE,
            constraints=constraints,
            engine="brute" if request.engine == apex_pb2.ENGINE_BRUTE else "pruned",
        )


def _constraints(
    items: Sequence[apex_pb2.Constraint], index: "ApexIndex", field: str
) -> dict[str, tuple[float | None, float | None]]:
    found: dict[str, tuple[float | None, float | None]] = {}
    for i, item in enumerate(items):
        _require_property(item.property, index, found, f"{field}[{i}].property")
        lower = item.lower if item.HasField("lower") else None
        upper = item.upper if item.HasField("upper") else None
        found[item.property] = (lower, upper)
    return found


def _weights(items: Sequence[apex_pb2.ObjectiveTerm], index: "ApexIndex", field: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for i, item in enumerate(items):
        _require_property(item.property, index, found, f"{field}[{i}].property")
        found[item.property] = item.weight or 1.0
    return found


def _require_property(name: str, index: "ApexIndex", found: Mapping[str, Any], field: str) -> None:
    if name not in index.table.names:
        raise InvalidArgument((field, f"{name!r} is not a property of the index: {', '.join(index.table.names)}"))
    if name in found:
        raise InvalidArgument((field, f"{name!r} is named twice; name each property once"))


def search_library(
    request: apex_pb2.SearchLibraryRequest, call: Call
) -> Iterator[apex_pb2.SearchLibraryResponse]:
    """Progress, hits in batches, one summary."""
    from lyceum_apex.query import Hits
    from lyceum_base.checkpoint import Stopped

    if request.query.k > STREAM_K:
        raise InvalidArgument(("query.k", f"{request.query.k} hits; a stream has at most {STREAM_K}, use StartSearch"))
    index = _index(call, request.index)
    library = _library(call, request.index.partition("/indexes/")[0])
    query = _query(request.query, index)
    if request.start_index > request.query.k:
        raise InvalidArgument(("start_index", f"{request.start_index} is behind the last hit ({request.query.k})"))
    hits: Hits | None = None
    for update in index.iter_search(query, should_stop=call.should_stop):
        if isinstance(update, Hits):
            hits = update
        else:
            call.on_progress("search", update.products_touched, 0, {})
            yield apex_pb2.SearchLibraryResponse(progress=_progress(update))
    assert hits is not None  # a search ends with hits
    assembly_seconds = 0.0
    for start in range(request.start_index, len(hits), _BATCH_ROWS):
        if call.should_stop():
            raise Stopped
        begun = monotonic()
        batch = _table(library, hits, start, start + _BATCH_ROWS, request.omit_smiles)
        assembly_seconds += monotonic() - begun
        yield apex_pb2.SearchLibraryResponse(index=start, hits=codec.to_arrow_batch(batch))
    yield apex_pb2.SearchLibraryResponse(
        index=len(hits), summary=_summary(hits, assembly_seconds)
    )


def _progress(update: Any) -> apex_pb2.SearchProgress:
    blocks = update.blocks_visited + update.blocks_pending
    progress = apex_pb2.SearchProgress(
        stage="search", decided_fraction=update.blocks_visited / blocks if blocks else 1.0
    )
    if update.threshold is not None:
        progress.threshold = update.threshold
    return progress


def _summary(hits: "Hits", assembly_seconds: float) -> apex_pb2.SearchSummary:
    return apex_pb2.SearchSummary(
        hit_count=len(hits),
        feasible_count=int(np.count_nonzero(hits.slack == 0)),
        product_count=str(hits.stats.products_total),
        touched_count=str(hits.stats.products_touched),
        search_seconds=hits.stats.seconds,
        assembly_seconds=assembly_seconds,
    )


def _table(library: "SynthonLibrary", hits: "Hits", start: int, end: int, omit_smiles: bool) -> Any:
    """Hits `start` to `end` as an Arrow table: product, smiles, objective, slack, one column for each queried property."""
    import pyarrow as pa

    from lyceum_apex.library import ProductBatch

    rows = slice(start, min(end, len(hits)))
    batch = ProductBatch(hits.reaction[rows], hits.synthons[rows])
    columns: dict[str, Any] = {"product": pa.array(_names(library, batch), pa.string())}
    if not omit_smiles:
        columns["smiles"] = pa.array(library.products_smiles(batch), pa.string())
    columns["objective"] = hits.objective[rows]
    columns["slack"] = hits.slack[rows]
    for i, name in enumerate(hits.names):
        columns[f"predicted_{name}"] = hits.properties[rows, i]
    return pa.table(columns)


def _names(library: "SynthonLibrary", batch: "ProductBatch") -> list[str]:
    return [library.product_name(int(r), [int(g) for g in s if g >= 0]) for r, s in zip(batch.r, batch.s, strict=True)]


def check_search(request: apex_pb2.StartSearchRequest, call: Call) -> None:
    """The index exists and knows the query's properties."""
    _query(request.query, _index(call, request.index))


def run_search(
    request: apex_pb2.StartSearchRequest, call: Call, resume: Mapping[str, Any] | None
) -> Iterator[Checkpoint]:
    """Stages: search, write. A resumed run searches again, which is fast and gives the same hits, and goes on writing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lyceum_apex.query import Hits

    index = _index(call, request.index)
    library = _library(call, request.index.partition("/indexes/")[0])
    hits: Hits | None = None
    for update in index.iter_search(_query(request.query, index), should_stop=call.should_stop):
        if isinstance(update, Hits):
            hits = update
        else:
            yield Checkpoint(None, stage="search", completed=update.products_touched, total=0)
    assert hits is not None  # a search ends with hits
    parts: list[str] = list(resume["parts"]) if resume else []
    seconds = float(resume["assembly_seconds"]) if resume else 0.0
    summary = resume["summary"] if resume else None
    for start in range(len(parts) * _PART_ROWS, len(hits), _PART_ROWS):
        begun = monotonic()
        tables = []
        for first in range(start, min(start + _PART_ROWS, len(hits)), _BATCH_ROWS):
            end = min(first + _BATCH_ROWS, start + _PART_ROWS)
            tables.append(_table(library, hits, first, end, request.omit_smiles))
            yield Checkpoint(None, stage="write", completed=min(end, len(hits)), total=len(hits))
        sink = pa.BufferOutputStream()
        pq.write_table(pa.concat_tables(tables), sink)
        parts.append(call.artifacts.put_bytes(sink.getvalue().to_pybytes(), PARQUET).sha256)
        seconds += monotonic() - begun
        done = min(start + _PART_ROWS, len(hits))
        summary = _encoded(_summary(hits, seconds))
        state = {"parts": parts.copy(), "assembly_seconds": seconds, "summary": summary}
        yield Checkpoint(state, stage="write", completed=done, total=len(hits))
    if summary is None:
        state = {"parts": [], "assembly_seconds": 0.0, "summary": _encoded(_summary(hits, 0.0))}
        yield Checkpoint(state, stage="write", completed=0, total=0)
    elif resume and len(parts) == len(resume["parts"]):
        yield Checkpoint(dict(resume), stage="write", completed=len(hits), total=len(hits))


def _encoded(summary: apex_pb2.SearchSummary) -> str:
    from google.protobuf.json_format import MessageToDict

    return json.dumps(MessageToDict(summary, preserving_proto_field_name=True), sort_keys=True)


def finish_search(request: apex_pb2.StartSearchRequest, state: Mapping[str, Any], call: Call) -> apex_pb2.SearchResult:
    """The parts joined to one Parquet file, one part in memory at a time."""
    import tempfile
    from pathlib import Path

    import pyarrow.parquet as pq
    from google.protobuf.json_format import Parse

    with tempfile.TemporaryDirectory(prefix="lyceum-") as folder:
        path = Path(folder) / "hits.parquet"
        rows = 0
        writer: Any = None
        for sha256 in state["parts"]:
            with call.artifacts.open(sha256) as file:
                table = pq.read_table(file)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            rows += table.num_rows
        writer.close()
        ref = call.artifacts.put_file(path, PARQUET)
    return apex_pb2.SearchResult(
        hits=common_pb2.TableRef(artifact=ref, row_count=rows),
        summary=Parse(state["summary"], apex_pb2.SearchSummary()),
    )


def count_matches(request: apex_pb2.CountMatchesRequest, call: Call) -> apex_pb2.CountMatchesResponse:
    """An exact count over all products."""
    index = _index(call, request.index)
    constraints = _constraints(request.constraints, index, "constraints")
    weights = _weights(request.objective, index, "objective")
    if request.HasField("min_objective") != bool(weights):
        field = "min_objective" if weights else "objective"
        raise InvalidArgument((field, "objective and min_objective go together; give both or neither"))
    found = index.count(
        constraints,
        objective=weights or None,
        cutoff=request.min_objective if weights else None,
        should_stop=call.should_stop,
    )
    return apex_pb2.CountMatchesResponse(
        count=str(found.count), fraction=found.fraction, product_count=str(found.products_total)
    )


def score_products(request: apex_pb2.ScoreProductsRequest, call: Call) -> apex_pb2.ScoreProductsResponse:
    """Predictions and slack of named products."""
    index = _index(call, request.index)
    library = _library(call, request.index.partition("/indexes/")[0])
    constraints = _constraints(request.constraints, index, "constraints")
    reaction = np.empty(len(request.products), np.int32)
    synthons = np.full((len(request.products), 4), -1, np.int32)
    for i, name in enumerate(request.products):
        with _fields(lambda field: field):
            reaction[i], parts = library.parse_name(name, f"products[{i}]")
        synthons[i, : len(parts)] = parts
    values = index.score(reaction, synthons)
    return apex_pb2.ScoreProductsResponse(
        values=codec.to_tensor(values),
        properties=index.table.names,
        slack=codec.to_tensor(index.slack(values, constraints)),
    )


def explain_product(request: apex_pb2.ExplainProductRequest, call: Call) -> apex_pb2.ExplainProductResponse:
    """The legs of one product and what each adds."""
    from lyceum_apex.errors import AssemblyError

    index = _index(call, request.index)
    library = _library(call, request.index.partition("/indexes/")[0])
    with _fields(lambda field: field):
        r, s = library.parse_name(request.product, "product")
    names = index.table.names
    contributions = index.explain(r, s)
    padded = np.array([[*s, *([-1] * (4 - len(s)))]], np.int32)
    (prediction,) = index.score(np.array([r], np.int32), padded)
    try:
        smiles = library.product_smiles(r, s)
    except AssemblyError as error:
        raise FailedPrecondition(f"{request.product}: {error}", reason="ASSEMBLY", subject=request.product) from error
    legs = []
    for g, synthon in enumerate(s):
        leg = library.first_leg[r][g] + synthon
        legs.append(
            apex_pb2.LegContribution(
                rgroup=g + 1,
                synthon_id=library.synthon_ids[leg],
                smiles=library.smiles[library.leg_smiles[leg]],
                contributions=dict(zip(names, contributions[g].tolist(), strict=True)),
            )
        )
    return apex_pb2.ExplainProductResponse(
        smiles=smiles,
        legs=legs,
        intercepts=dict(zip(names, index.table.bias.tolist(), strict=True)),
        predictions=dict(zip(names, prediction.tolist(), strict=True)),
    )
