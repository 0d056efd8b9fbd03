"""TrainSurrogate, AddProbe and BuildIndex: from labelled molecules to an index that can be searched."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_apex.service.storing import (
    SAFETENSORS,
    fields,
    load_library,
    load_surrogate,
    require_free,
)
from lyceum_base.checkpoint import Checkpoint, Stopped
from lyceum_runtime import codec
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import Aborted, FailedPrecondition, InvalidArgument, ResourceExhausted
from lyceum_runtime.resources import resource_name

if TYPE_CHECKING:
    from lyceum_apex.surrogate import Surrogate

MIN_ROWS = 100
MAX_CONTRIBUTION_BYTES = 4 << 30
_LABEL_ROWS = 2_000
_PAIRS = "interactions."  # before the names of the interactions' part of a state
_ENCODERS = {apex_pb2.ENCODER_UNSPECIFIED: "ecfp", apex_pb2.ENCODER_ECFP: "ecfp", apex_pb2.ENCODER_MPNN: "mpnn"}
_ENCODER_VALUES = {"ecfp": apex_pb2.ENCODER_ECFP, "mpnn": apex_pb2.ENCODER_MPNN}


def check_train(request: apex_pb2.TrainSurrogateRequest, call: Call) -> None:
    """The name is free and the training data exist."""
    if request.surrogate_id:
        require_free(call, f"surrogates/{request.surrogate_id}", apex_pb2.Surrogate)
    if request.WhichOneof("training_data") == "table":
        if not request.property_names:
            raise InvalidArgument(("property_names", "name at least one column of the table"))
        call.artifacts.stat(request.table.artifact)
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
    with fields(lambda field: _training_field(request, field)):
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


def _label(request: apex_pb2.TrainSurrogateRequest, call: Call) -> Generator[Checkpoint, None, tuple[list[str], Any]]:
    """Assembles a sample of products and labels it. Products that do not assemble are left out."""
    from lyceum_apex.chemistry import properties
    from lyceum_apex.library import ProductBatch

    sample = request.rdkit_sample
    library = load_library(call, sample.library)
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


def finish_train(request: apex_pb2.TrainSurrogateRequest, state: Mapping[str, Any], call: Call) -> apex_pb2.Surrogate:
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
        raise Aborted(f"{request.surrogate} has changed: its etag is not {request.etag}; read it again")
    if any(known.name == request.property_name for known in surrogate.properties):
        raise InvalidArgument(("property_name", f"{request.property_name!r} is there already"))
    call.artifacts.stat(request.table.artifact)


def run_probe(request: apex_pb2.AddProbeRequest, call: Call, resume: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
    """Stages: featurise, probe. The state is the whole surrogate."""
    yield Checkpoint(None, stage="featurise", completed=0, total=1)
    smiles, values = _labelled(request.table, [request.property_name], call)
    surrogate = load_surrogate(call, request.surrogate)
    with fields(lambda field: {"property": "property_name"}.get(field, f"table.{field}")):
        extended = surrogate.add_probe(request.property_name, smiles, values[:, 0])
    yield Checkpoint({"surrogate": np.frombuffer(extended.to_bytes(), np.uint8)}, stage="probe", completed=1, total=1)


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


def check_build(request: apex_pb2.BuildIndexRequest, call: Call) -> None:
    """Library and surrogate exist, the name is free, the contributions fit in memory."""
    library = call.resources.get(request.parent, apex_pb2.Library)
    surrogate = call.resources.get(request.surrogate, apex_pb2.Surrogate)
    if request.index_id:
        require_free(call, f"{request.parent}/indexes/{request.index_id}", apex_pb2.Index)
    pair_terms = 4 * request.interactions_rank * len(surrogate.properties)
    size = 8 * library.synthon_count * (len(surrogate.properties) + len(library.additive_columns) + pair_terms)
    if size > MAX_CONTRIBUTION_BYTES:
        raise ResourceExhausted(
            f"the contributions need {size} bytes, more than {MAX_CONTRIBUTION_BYTES}; index fewer properties "
            "or take a lower rank"
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
    """Stages: sample, factorise, interactions. The last state is the factoriser's, with that of the interactions."""
    from lyceum_apex.factorizer import Factorizer
    from lyceum_apex.residuals import iter_fit_residuals

    library, surrogate = load_library(call, request.parent), load_surrogate(call, request.surrogate)
    factorised: Mapping[str, Any] | None = None
    with fields(lambda field: field):
        for checkpoint in Factorizer.iter_fit(
            library,
            surrogate,
            steps=request.steps or None,
            seed=request.seed.value,
            resume=resume,
            should_stop=call.should_stop,
        ):
            factorised = checkpoint.state or factorised
            yield checkpoint
        if not request.interactions_rank:
            return
        assert factorised is not None  # a fit ends with its state
        if f"{_PAIRS}factors" in factorised:
            return
        factorizer = Factorizer.from_state(factorised)
        for checkpoint in iter_fit_residuals(
            library,
            surrogate,
            factorizer,
            request.interactions_rank,
            seed=request.seed.value,
            should_stop=call.should_stop,
        ):
            yield _with_factorizer(checkpoint, factorised)


def _with_factorizer(checkpoint: Checkpoint, factorised: Mapping[str, Any]) -> Checkpoint:
    state = checkpoint.state
    if state is not None:
        state = {**factorised, **{f"{_PAIRS}{key}": value for key, value in state.items()}}
    return Checkpoint(state, checkpoint.stage, checkpoint.completed, checkpoint.total, checkpoint.metrics)


def finish_build(request: apex_pb2.BuildIndexRequest, state: Mapping[str, Any], call: Call) -> apex_pb2.Index:
    """The index as a resource."""
    from lyceum_apex.factorizer import Factorizer
    from lyceum_apex.index import ApexIndex

    index = ApexIndex.build(
        load_library(call, request.parent), load_surrogate(call, request.surrogate), Factorizer.from_state(state)
    )
    if request.interactions_rank:
        keys = ("names", "factors", "reconstruction")
        index = index.with_residuals({key: state[f"{_PAIRS}{key}"] for key in keys})
    interactions = index.table.interactions
    ref = call.artifacts.put_bytes(index.to_bytes(), SAFETENSORS)
    return call.resources.create(
        resource_name(f"{request.parent}/indexes", request.index_id, "index_id"),
        apex_pb2.Index(
            display_name=request.display_name,
            surrogate=request.surrogate,
            properties=index.table.names,
            reconstruction=[apex_pb2.Reconstruction(property=name, r2=r2) for name, r2 in index.reconstruction.items()],
            contribution_bytes=index.table.values.nbytes + (interactions.factors.nbytes if interactions else 0),
            artifact=ref,
            seed=request.seed,
            interacting_properties=interactions.names if interactions else (),
        ),
        artifacts=[ref],
        uses=[request.surrogate],
    )
