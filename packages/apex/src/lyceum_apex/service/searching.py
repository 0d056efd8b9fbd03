"""SearchLibrary, StartSearch, ScoreProducts and ExplainProduct: questions to an index about single products."""

import csv
import io
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import json_format

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_apex.service.decoding import by_place, constraints_of, load_restricted, query_of
from lyceum_apex.service.storing import PARQUET, fields, load_index, load_library
from lyceum_base.checkpoint import Checkpoint, Stopped
from lyceum_runtime import codec
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from lyceum_apex.library import ProductBatch, SynthonLibrary
    from lyceum_apex.query import Hits

STREAM_K = 100_000
"""Most hits of one stream."""

CSV = "text/csv"

_BATCH_ROWS = 1_000
_PART_ROWS = 20_000


def search_library(request: apex_pb2.SearchLibraryRequest, call: Call) -> Iterator[apex_pb2.SearchLibraryResponse]:
    """Progress, hits in batches, one summary."""
    from lyceum_apex.query import Hits

    if request.query.k > STREAM_K:
        raise InvalidArgument(("query.k", f"{request.query.k} hits; a stream has at most {STREAM_K}, use StartSearch"))
    index = load_restricted(call, request.index, request.query.synthon_filter, "query.synthon_filter")
    library = load_library(call, request.index.partition("/indexes/")[0])
    query = query_of(request.query, index)
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
    yield apex_pb2.SearchLibraryResponse(index=len(hits), summary=_summary(hits, assembly_seconds))


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
    """Hits `start` to `end` as Arrow: product, smiles, objective, slack, predicted_<property> of each queried one."""
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
    query_of(request.query, load_restricted(call, request.index, request.query.synthon_filter, "query.synthon_filter"))


def run_search(
    request: apex_pb2.StartSearchRequest, call: Call, resume: Mapping[str, Any] | None
) -> Iterator[Checkpoint]:
    """Stages: search, write. A resumed run searches again, which is fast and finds the same, and goes on writing."""
    import pyarrow as pa

    from lyceum_apex.query import Hits

    index = load_restricted(call, request.index, request.query.synthon_filter, "query.synthon_filter")
    library = load_library(call, request.index.partition("/indexes/")[0])
    hits: Hits | None = None
    for update in index.iter_search(query_of(request.query, index), should_stop=call.should_stop):
        if isinstance(update, Hits):
            hits = update
        else:
            yield Checkpoint(None, stage="search", completed=update.products_touched, total=0)
    assert hits is not None  # a search ends with hits
    parts: list[str] = list(resume["parts"]) if resume else []
    seconds = float(resume["assembly_seconds"]) if resume else 0.0
    csv_wanted = request.format == apex_pb2.HITS_FORMAT_CSV
    for start in range(
        len(parts) * _PART_ROWS, max(len(hits), 1), _PART_ROWS
    ):  # without a hit one part has the columns
        begun = monotonic()
        tables = []
        for first in range(start, min(start + _PART_ROWS, max(len(hits), 1)), _BATCH_ROWS):
            end = min(first + _BATCH_ROWS, start + _PART_ROWS)
            tables.append(_table(library, hits, first, end, request.omit_smiles))
            yield Checkpoint(None, stage="write", completed=min(end, len(hits)), total=len(hits))
        table = pa.concat_tables(tables)
        if csv_wanted:
            ref = call.artifacts.put_bytes(_csv(table, header=start == 0), CSV)
        else:
            ref = call.artifacts.put_bytes(_parquet(table), PARQUET)
        parts.append(ref.sha256)
        seconds += monotonic() - begun
        done = min(start + _PART_ROWS, len(hits))
        state = {"parts": parts.copy(), "assembly_seconds": seconds, "summary": _encoded(_summary(hits, seconds))}
        yield Checkpoint(state, stage="write", completed=done, total=len(hits))
    if resume and len(parts) == len(resume["parts"]):
        yield Checkpoint(dict(resume), stage="write", completed=len(hits), total=len(hits))


def _parquet(table: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


def _csv(table: Any, *, header: bool) -> bytes:
    """RFC 4180; floats as Python writes them, the shortest digits that read back as the same number."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if header:
        writer.writerow(table.column_names)
    writer.writerows(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return text.getvalue().encode()


def _encoded(summary: apex_pb2.SearchSummary) -> str:
    return json.dumps(json_format.MessageToDict(summary, preserving_proto_field_name=True), sort_keys=True)


def finish_search(request: apex_pb2.StartSearchRequest, state: Mapping[str, Any], call: Call) -> apex_pb2.SearchResult:
    """The parts joined to one file, one part in memory at a time."""
    summary = json_format.Parse(state["summary"], apex_pb2.SearchSummary())
    with tempfile.TemporaryDirectory(prefix="lyceum-") as folder:
        path = Path(folder) / "hits"
        if request.format == apex_pb2.HITS_FORMAT_CSV:
            with path.open("wb") as joined:
                for sha256 in state["parts"]:
                    with call.artifacts.open(sha256) as file:
                        shutil.copyfileobj(file, joined)
            ref = call.artifacts.put_file(path, CSV)
        else:
            _join_parquet(path, state["parts"], call)
            ref = call.artifacts.put_file(path, PARQUET)
    return apex_pb2.SearchResult(hits=common_pb2.TableRef(artifact=ref, row_count=summary.hit_count), summary=summary)


def _join_parquet(path: Path, parts: Sequence[str], call: Call) -> None:
    import pyarrow.parquet as pq

    writer: Any = None
    for sha256 in parts:
        with call.artifacts.open(sha256) as file:
            table = pq.read_table(file)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def score_products(request: apex_pb2.ScoreProductsRequest, call: Call) -> apex_pb2.ScoreProductsResponse:
    """Predictions and slack of named products."""
    index = load_index(call, request.index)
    library = load_library(call, request.index.partition("/indexes/")[0])
    constraints = constraints_of(request.constraints, index, "constraints")
    reaction = np.empty(len(request.products), np.int32)
    synthons = np.full((len(request.products), 4), -1, np.int32)
    for i, name in enumerate(request.products):
        with fields(lambda field: field):
            reaction[i], parts = library.parse_name(name, f"products[{i}]")
        synthons[i, : len(parts)] = parts
    values = index.score(reaction, synthons)
    with fields(lambda field: by_place(field, constraints, {})):
        slack = index.slack(values, constraints)
    return apex_pb2.ScoreProductsResponse(
        values=codec.to_tensor(values), properties=index.table.names, slack=codec.to_tensor(slack)
    )


def explain_product(request: apex_pb2.ExplainProductRequest, call: Call) -> apex_pb2.ExplainProductResponse:
    """The legs of one product and what each adds."""
    from lyceum_apex.errors import AssemblyError

    index = load_index(call, request.index)
    library = load_library(call, request.index.partition("/indexes/")[0])
    with fields(lambda field: field):
        r, s = library.parse_name(request.product, "product")
    names = index.table.names
    explained = index.explain(r, s)
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
                contributions=dict(zip(names, explained.legs[g].tolist(), strict=True)),
            )
        )
    interactions = index.table.interactions
    interacting = [] if interactions is None else [names.index(name) for name in interactions.names]
    pairs = [
        apex_pb2.PairContribution(
            first_rgroup=g + 1,
            second_rgroup=h + 1,
            contributions={names[c]: float(explained.pairs[g, h, c]) for c in interacting},
        )
        for h in range(len(s))
        for g in range(h if interacting else 0)
    ]
    return apex_pb2.ExplainProductResponse(
        smiles=smiles,
        legs=legs,
        intercepts=dict(zip(names, index.table.bias.tolist(), strict=True)),
        predictions=dict(zip(names, prediction.tolist(), strict=True)),
        pairs=pairs,
    )
