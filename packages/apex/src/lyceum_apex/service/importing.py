"""ImportLibrary: a combinatorial library out of tables, molecules or a data set that packages carry."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_apex.service.storing import SAFETENSORS, fields, require_free
from lyceum_base.checkpoint import Checkpoint
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import FailedPrecondition, InvalidArgument
from lyceum_runtime.resources import resource_name

MASS = "exact_mw"
"""Name of the exact column that every library has: molecular weight in g/mol."""

_BRICS_MOLECULES = 20_000


def check_import(request: apex_pb2.ImportLibraryRequest, call: Call) -> None:
    """The name is free, the artifacts exist, the data set is known."""
    if request.library_id:
        require_free(call, f"libraries/{request.library_id}", apex_pb2.Library)
    source = request.WhichOneof("source")
    if source == "zoo":
        if request.zoo != "real1m":
            raise InvalidArgument(("zoo", f"{request.zoo!r} is not a library; the data set with one is real1m"))
    else:
        for _, ref in getattr(request, source or "").ListFields():
            if isinstance(ref, common_pb2.ArtifactRef):
                call.artifacts.stat(ref)
    if request.additive_columns and source not in ("parquet", "tsv"):
        raise InvalidArgument(("additive_columns", "only parquet and tsv have columns; leave it empty"))
    if MASS in request.additive_columns:
        raise InvalidArgument(("additive_columns", f"{MASS} is computed for every library; leave it out"))


def run_import(
    request: apex_pb2.ImportLibraryRequest, call: Call, resume: Mapping[str, Any] | None
) -> Iterator[Checkpoint]:
    """Stages: read, assemble. The state is the whole library."""
    from lyceum_apex.library import SynthonLibrary

    yield Checkpoint(None, stage="read", completed=0, total=1)
    source = request.WhichOneof("source")
    columns = tuple(request.additive_columns)
    with fields(lambda field: f"{source}.{field}" if source != "zoo" else "zoo"):
        if source == "zoo":
            from lyceum_zoo import ZooError, path

            try:
                folder = path(request.zoo)
            except ZooError as error:  # no network, a full disk: the server's, and the operator can mend it
                raise FailedPrecondition(str(error), reason="DATA_UNAVAILABLE", subject=request.zoo) from error
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


def finish_import(request: apex_pb2.ImportLibraryRequest, state: Mapping[str, Any], call: Call) -> apex_pb2.Library:
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
