"""ApexService over gRPC: answers equal the core's, and each mistake of a caller gets its own error."""

import csv
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from google.longrunning import operations_pb2
from google.rpc import code_pb2

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_apex import SynthonLibrary
from lyceum_runtime.client import Client
from lyceum_runtime.codec import from_arrow_batch, from_tensor
from lyceum_runtime.errors import Cancelled, FailedPrecondition, InvalidArgument, ServiceError
from lyceum_runtime.testing import serve

ACIDS = ["CC(=O)[U]", "CCC(=O)[U]", "O=C([U])C1CC1", "O=C([U])c1ccccc1", "O=C([U])c1ccncc1", "COCC(=O)[U]"]
ACIDS += ["N#CCC(=O)[U]", "O=C([U])c1ccc(F)cc1", "CCCC(=O)[U]", "CC(C)C(=O)[U]", "O=C([U])c1ccco1"]
AMINES = ["CN[U]", "CCN[U]", "[U]NC1CC1", "[U]Nc1ccccc1", "[U]NCc1ccccc1", "[U]N1CCOCC1", "COCCN[U]"]
AMINES += ["[U]N1CCCC1", "[U]NCC#N", "[U]Nc1ccc(Cl)cc1", "CCCN[U]"]
HEADER = "smiles\tsynthon_id\tposition\treaction_id\tprice"


def _rows(reaction: str = "amide") -> list[str]:
    acids = [f"{smiles}\ta{i}\t1\t{reaction}\t{1.5 + i}" for i, smiles in enumerate(ACIDS)]
    return acids + [f"{smiles}\tb{i}\t2\t{reaction}\t{2.25 + i}" for i, smiles in enumerate(AMINES)]


@dataclass
class Apex:
    """A served library with its index."""

    client: Client
    library: apex_pb2.Library
    surrogate: apex_pb2.Surrogate
    index: apex_pb2.Index
    core: SynthonLibrary

    def upload(self, text: str) -> common_pb2.ArtifactRef:
        return self.client.upload(text.encode(), media_type="text/tab-separated-values")

    def search(
        self, query: apex_pb2.Query, **options: object
    ) -> tuple[list[dict[str, object]], apex_pb2.SearchSummary]:
        rows: list[dict[str, object]] = []
        request = apex_pb2.SearchLibraryRequest(index=self.index.name, query=query, **options)  # type: ignore[arg-type]
        for message in self.client.stub.SearchLibrary(request):
            if message.HasField("hits"):
                rows += from_arrow_batch(message.hits).to_pylist()
        assert message.HasField("summary")
        return rows, message.summary


@pytest.fixture(scope="module")
def apex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apex]:
    path = tmp_path_factory.mktemp("library") / "synthons.tsv"
    text = "\n".join([HEADER, *_rows()]) + "\n"
    path.write_text(text)
    with serve("apex") as served:
        client, stub = served.client, served.client.stub
        importing = apex_pb2.ImportLibraryRequest(
            tsv=apex_pb2.ImportLibraryRequest.TsvSource(synthons=client.upload(text.encode())),
            additive_columns=["price"],
        )
        library = client.wait(stub.ImportLibrary(importing), apex_pb2.Library)
        sample = apex_pb2.RdkitSample(library=library.name, product_count=110, properties=["logp", "tpsa"])
        training = apex_pb2.TrainSurrogateRequest(rdkit_sample=sample, steps=30, seed=common_pb2.Seed(value=3))
        surrogate = client.wait(stub.TrainSurrogate(training), apex_pb2.Surrogate)
        building = apex_pb2.BuildIndexRequest(
            parent=library.name, surrogate=surrogate.name, steps=30, seed=common_pb2.Seed(value=3)
        )
        index = client.wait(stub.BuildIndex(building), apex_pb2.Index)
        core = SynthonLibrary.from_tsv(path, columns=("price",)).with_weight("exact_mw")
        yield Apex(client, library, surrogate, index, core)


def _query(k: int = 10, **fields: object) -> apex_pb2.Query:
    fields.setdefault("objective", [apex_pb2.ObjectiveTerm(property="logp")])
    return apex_pb2.Query(k=k, **fields)  # type: ignore[arg-type]


def _scores(apex: Apex) -> tuple[list[str], dict[str, np.ndarray]]:
    """All product names and every property of them, by ScoreProducts."""
    names = [f"amide~a{i}~b{j}" for i, j in itertools.product(range(len(ACIDS)), range(len(AMINES)))]
    scored = apex.client.stub.ScoreProducts(apex_pb2.ScoreProductsRequest(index=apex.index.name, products=names))
    return names, dict(zip(scored.properties, from_tensor(scored.values).T))


def test_a_library_reports_its_size_and_columns(apex: Apex) -> None:
    assert apex.library.product_count == str(len(ACIDS) * len(AMINES))
    assert (apex.library.reaction_count, apex.library.rgroup_count) == (1, 2)
    assert list(apex.library.additive_columns) == ["price", "exact_mw"]
    assert list(apex.index.properties) == ["logp", "tpsa", "price", "exact_mw"]


@pytest.mark.parametrize("engine", [apex_pb2.ENGINE_PRUNED, apex_pb2.ENGINE_BRUTE])
@pytest.mark.parametrize("direction", [apex_pb2.DIRECTION_MAXIMIZE, apex_pb2.DIRECTION_MINIMIZE])
def test_hits_are_the_best_of_all_scored_products(
    apex: Apex, engine: apex_pb2.Engine.ValueType, direction: apex_pb2.Direction.ValueType
) -> None:
    names, values = _scores(apex)
    limit = float(np.median(values["exact_mw"]))
    constraints = [apex_pb2.Constraint(property="exact_mw", upper=limit)]
    rows, summary = apex.search(_query(7, engine=engine, direction=direction, constraints=constraints))
    feasible = np.flatnonzero(values["exact_mw"] <= limit)
    sign = -1.0 if direction == apex_pb2.DIRECTION_MAXIMIZE else 1.0
    order = feasible[np.argsort(sign * values["logp"][feasible], kind="stable")][:7]
    assert [row["product"] for row in rows] == [names[i] for i in order]
    assert [row["predicted_logp"] for row in rows] == [values["logp"][i] for i in order]
    assert {row["slack"] for row in rows} == {0.0}
    assert (summary.hit_count, summary.feasible_count) == (7, 7)
    assert rows[0]["smiles"] == apex.core.product_smiles(*apex.core.parse_name(str(rows[0]["product"])))


def test_an_interrupted_stream_resumes_at_its_index(apex: Apex) -> None:
    whole, _ = apex.search(_query(100))
    assert apex.search(_query(100), start_index=40)[0] == whole[40:]


def test_a_search_as_an_operation_writes_the_same_hits(apex: Apex) -> None:
    request = apex_pb2.StartSearchRequest(index=apex.index.name, query=_query(50))
    result = apex.client.wait(apex.client.stub.StartSearch(request), apex_pb2.SearchResult)
    table = pq.read_table(io.BytesIO(apex.client.read(result.hits.artifact)))
    assert table.to_pylist() == apex.search(_query(50))[0]
    assert result.hits.row_count == result.summary.hit_count == 50


def test_counts_equal_counting_scored_products(apex: Apex) -> None:
    _, values = _scores(apex)
    request = apex_pb2.CountMatchesRequest(
        index=apex.index.name,
        constraints=[apex_pb2.Constraint(property="price", lower=5.0, upper=12.0)],
        objective=[apex_pb2.ObjectiveTerm(property="logp", weight=-1.0)],
        min_objective=-1.0,
    )
    counted = apex.client.stub.CountMatches(request)
    inside = (values["price"] >= 5.0) & (values["price"] <= 12.0) & (-values["logp"] >= -1.0)
    assert counted.count == str(int(inside.sum()))
    assert counted.fraction == pytest.approx(inside.mean())
    assert 0 < int(counted.count) < len(inside)


def test_a_grid_of_counts_equals_counting_each_cell(apex: Apex) -> None:
    _, values = _scores(apex)
    request = apex_pb2.CountMatchesRequest(
        index=apex.index.name,
        constraints=[apex_pb2.Constraint(property="price", upper=18.0)],
        objective=[apex_pb2.ObjectiveTerm(property="logp")],
        min_objective=0.5,
        grid=[
            apex_pb2.GridAxis(property="tpsa", values=[40.0, 60.0, 1e6]),
            apex_pb2.GridAxis(property="price", values=[5.0, 20.0], side=apex_pb2.BOUND_SIDE_LOWER),
        ],
    )
    counted = apex.client.stub.CountMatches(request)
    inside = (values["price"] <= 18.0) & (values["logp"] >= 0.5)
    cells = itertools.product([40.0, 60.0, 1e6], [5.0, 20.0])
    expected = [str(int((inside & (values["tpsa"] <= t) & (values["price"] >= p)).sum())) for t, p in cells]
    assert list(counted.grid_counts) == expected
    assert counted.count == str(int(inside.sum()))
    assert expected[4] != "0"


def test_a_distribution_equals_that_of_scored_products(apex: Apex) -> None:
    _, values = _scores(apex)
    inside = values["price"] <= 15.0
    logp = np.sort(values["logp"][inside])
    request = apex_pb2.DescribeDistributionRequest(
        index=apex.index.name,
        objective=[apex_pb2.ObjectiveTerm(property="logp")],
        constraints=[apex_pb2.Constraint(property="price", upper=15.0)],
        bins=7,
        quantiles=[0.0, 0.25, 1.0],
        values=[float(logp[10])],
    )
    found = apex.client.stub.DescribeDistribution(request)
    assert (found.count, found.product_count) == (str(len(logp)), str(len(inside)))
    assert (found.minimum, found.maximum) == (logp[0], logp[-1])
    assert [int(number) for number in found.bin_counts] == np.histogram(logp, np.array(found.bin_edges))[0].tolist()
    assert list(found.quantiles) == [logp[0], logp[-(-len(logp) // 4) - 1], logp[-1]]
    assert list(found.at_least_counts) == [str(int((logp >= logp[10]).sum()))]
    request.constraints[0].upper = -1.0
    nothing = apex.client.stub.DescribeDistribution(request)
    assert (nothing.count, list(nothing.quantiles), nothing.HasField("minimum")) == ("0", [], False)


def test_quotas_bound_how_often_a_synthon_is_among_the_hits(apex: Apex) -> None:
    rows, summary = apex.search(_query(9, quotas=apex_pb2.Quotas(max_per_synthon=2)), omit_smiles=True)
    everything, _ = apex.search(_query(len(ACIDS) * len(AMINES)), omit_smiles=True)
    kept: list[object] = []
    used: dict[str, int] = {}
    for row in everything:
        synthons = str(row["product"]).split("~")[1:]
        if len(kept) < 9 and all(used.get(synthon, 0) < 2 for synthon in synthons):
            kept.append(row["product"])
            used.update({synthon: used.get(synthon, 0) + 1 for synthon in synthons})
    assert [row["product"] for row in rows] == kept
    assert summary.hit_count == 9


def test_a_synthon_filter_restricts_searches_counts_and_distributions(apex: Apex) -> None:
    names, values = _scores(apex)
    cheap = apex_pb2.SynthonFilter(columns=[apex_pb2.ColumnBound(column="price", upper=5.0)])
    usable = [
        i
        for i, name in enumerate(names)
        if all(float(part[1:]) + {"a": 1.5, "b": 2.25}[part[0]] <= 5.0 for part in name.split("~")[1:])
    ]
    rows, summary = apex.search(_query(100, synthon_filter=cheap), omit_smiles=True)
    assert {str(row["product"]) for row in rows} == {names[i] for i in usable}
    assert summary.product_count == str(len(usable))
    stub, index = apex.client.stub, apex.index.name
    assert stub.CountMatches(apex_pb2.CountMatchesRequest(index=index, synthon_filter=cheap)).count == str(len(usable))
    described = stub.DescribeDistribution(
        apex_pb2.DescribeDistributionRequest(
            index=index, objective=[apex_pb2.ObjectiveTerm(property="logp")], synthon_filter=cheap
        )
    )
    assert described.maximum == values["logp"][usable].max()
    nothing = apex_pb2.SynthonFilter(forbidden_reactions=["amide"])
    assert apex.search(_query(5, synthon_filter=nothing))[0] == []


def test_a_search_writes_csv_that_reads_back_as_the_same_hits(apex: Apex) -> None:
    request = apex_pb2.StartSearchRequest(index=apex.index.name, query=_query(30), format=apex_pb2.HITS_FORMAT_CSV)
    result = apex.client.wait(apex.client.stub.StartSearch(request), apex_pb2.SearchResult)
    text = apex.client.read(result.hits.artifact).decode()
    assert result.hits.artifact.media_type == "text/csv"
    assert text.count("\r\n") == 31
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    expected, _ = apex.search(_query(30))
    assert [[*row] for row in rows] == [[*row] for row in expected]
    assert [{k: v if k in ("product", "smiles") else float(v) for k, v in row.items()} for row in rows] == expected
    request.query.synthon_filter.forbidden_reactions.append("amide")
    for file_format, header in (
        (apex_pb2.HITS_FORMAT_CSV, b"product,smiles,objective"),
        (apex_pb2.HITS_FORMAT_PARQUET, b"PAR1"),
    ):
        request.format = file_format
        result = apex.client.wait(apex.client.stub.StartSearch(request), apex_pb2.SearchResult)
        assert result.hits.row_count == 0
        assert apex.client.read(result.hits.artifact).startswith(header)


def test_csv_quotes_what_rfc_4180_says() -> None:
    import pyarrow as pa

    from lyceum_apex.service.searching import _csv

    table = pa.table({"product": ['a,b~"c"', "plain"], "smiles": [None, "CC"], "objective": [0.1, 1e-300]})
    assert _csv(table, header=True) == b'product,smiles,objective\r\n"a,b~""c""",,0.1\r\nplain,CC,1e-300\r\n'
    assert _csv(table.slice(1), header=False) == b"plain,CC,1e-300\r\n"


@pytest.mark.parametrize(
    ("synthons", "field"),
    [
        ({"columns": [apex_pb2.ColumnBound(column="mass", upper=1.0)]}, "columns[0].column"),
        ({"columns": [apex_pb2.ColumnBound(column="price", upper=1.0)] * 2}, "columns[1].column"),
        ({"columns": [apex_pb2.ColumnBound(column="price", lower=2.0, upper=1.0)]}, "columns[0]"),
        ({"columns": [apex_pb2.ColumnBound(column="price", upper=1e200)]}, "columns[0].upper"),
        ({"allowed_reactions": ["amide", "none"]}, "allowed_reactions[1]"),
        ({"forbidden_reactions": ["none"]}, "forbidden_reactions[0]"),
    ],
)
def test_a_bad_filter_names_its_field(apex: Apex, synthons: dict[str, object], field: str) -> None:
    chosen = apex_pb2.SynthonFilter(**synthons)  # type: ignore[arg-type]
    stub, index = apex.client.stub, apex.index.name
    with pytest.raises(InvalidArgument) as caught:
        apex.search(_query(synthon_filter=chosen))
    assert [violated for violated, _ in caught.value.violations] == [f"query.synthon_filter.{field}"]
    with pytest.raises(InvalidArgument) as caught:
        stub.CountMatches(apex_pb2.CountMatchesRequest(index=index, synthon_filter=chosen))
    assert [violated for violated, _ in caught.value.violations] == [f"synthon_filter.{field}"]


def test_a_bad_grid_names_its_field(apex: Apex) -> None:
    stub, index = apex.client.stub, apex.index.name
    wide = [apex_pb2.GridAxis(property="logp", values=range(40)), apex_pb2.GridAxis(property="tpsa", values=range(26))]
    unknown = [apex_pb2.GridAxis(property="qed", values=[1.0])]
    huge = [apex_pb2.GridAxis(property="logp", values=[0.0, 1e200])]
    for grid, field in ((wide, "grid"), (unknown, "grid[0].property"), (huge, "grid[0].values[1]")):
        with pytest.raises(InvalidArgument) as caught:
            stub.CountMatches(apex_pb2.CountMatchesRequest(index=index, grid=grid))
        assert [violated for violated, _ in caught.value.violations] == [field]


def test_exact_columns_are_exact(apex: Apex) -> None:
    from rdkit import Chem
    from rdkit.Chem import Descriptors

    names, values = _scores(apex)
    smiles = [apex.core.product_smiles(*apex.core.parse_name(name)) for name in names]
    weights = [Descriptors.MolWt(Chem.MolFromSmiles(text)) for text in smiles]
    np.testing.assert_allclose(values["exact_mw"], weights, rtol=0, atol=1e-9)


def test_acceptance_03_the_interaction_contrast_of_scores_vanishes(apex: Apex) -> None:
    _, values = _scores(apex)
    for value in values.values():
        grid = value.reshape(len(ACIDS), len(AMINES))
        contrast = grid[1:, 1:] + grid[:1, :1] - grid[1:, :1] - grid[:1, 1:]
        assert np.abs(contrast).max() < 1e-6 * np.abs(value).max()


def test_an_explanation_adds_up_to_the_prediction(apex: Apex) -> None:
    explained = apex.client.stub.ExplainProduct(
        apex_pb2.ExplainProductRequest(index=apex.index.name, product="amide~a3~b4")
    )
    assert [(leg.rgroup, leg.synthon_id) for leg in explained.legs] == [(1, "a3"), (2, "b4")]
    for name, prediction in explained.predictions.items():
        total = explained.intercepts[name] + sum(leg.contributions[name] for leg in explained.legs)
        assert total == pytest.approx(prediction, abs=1e-12)


def test_an_index_with_interactions_is_nearer_to_its_surrogate_and_explains_them(apex: Apex) -> None:
    stub = apex.client.stub
    request = apex_pb2.BuildIndexRequest(
        parent=apex.library.name, surrogate=apex.surrogate.name, steps=30, seed=apex.index.seed, interactions_rank=2
    )
    index = apex.client.wait(stub.BuildIndex(request), apex_pb2.Index)
    assert index.interacting_properties
    assert not apex.index.interacting_properties
    before = {item.property: item.r2 for item in apex.index.reconstruction}
    after = {item.property: item.r2 for item in index.reconstruction}
    assert all(after[name] > before[name] for name in index.interacting_properties)
    assert index.contribution_bytes > apex.index.contribution_bytes
    explained = stub.ExplainProduct(apex_pb2.ExplainProductRequest(index=index.name, product="amide~a3~b4"))
    (pair,) = explained.pairs
    assert (pair.first_rgroup, pair.second_rgroup) == (1, 2)
    assert set(pair.contributions) == set(index.interacting_properties)
    for name, prediction in explained.predictions.items():
        total = explained.intercepts[name] + sum(leg.contributions[name] for leg in explained.legs)
        assert total + pair.contributions.get(name, 0.0) == pytest.approx(prediction, abs=1e-12)
    interacting = replace(apex, index=index)
    query = _query(20, constraints=[apex_pb2.Constraint(property="tpsa", upper=60.0)])
    pruned, _ = interacting.search(query, omit_smiles=True)
    query.engine = apex_pb2.ENGINE_BRUTE
    assert interacting.search(query, omit_smiles=True)[0] == pruned


def test_slack_is_the_scaled_violation(apex: Apex) -> None:
    constraints = [apex_pb2.Constraint(property="logp", upper=0.0)]
    request = apex_pb2.ScoreProductsRequest(
        index=apex.index.name, products=["amide~a3~b9", "amide~a0~b0"], constraints=constraints
    )
    scored = apex.client.stub.ScoreProducts(request)
    logp = from_tensor(scored.values)[:, list(scored.properties).index("logp")]
    (sigma,) = (item.std for item in apex.surrogate.properties if item.name == "logp")
    np.testing.assert_allclose(from_tensor(scored.slack), -np.maximum(logp, 0.0) / sigma, atol=1e-12)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (_query(objective=[apex_pb2.ObjectiveTerm(property="qed")]), "query.objective[0].property"),
        (_query(constraints=[apex_pb2.Constraint(property="qed", upper=1.0)]), "query.constraints[0].property"),
        (_query(constraints=[apex_pb2.Constraint(property="logp", lower=2.0, upper=1.0)]), "query.constraints[0]"),
        (_query(constraints=[apex_pb2.Constraint(property="logp")]), "query.constraints[0]"),
        (_query(constraints=[apex_pb2.Constraint(property="logp", upper=float("nan"))]), "query.constraints[0].upper"),
        (_query(constraints=[apex_pb2.Constraint(property="logp", upper=1.0)] * 2), "query.constraints[1].property"),
        (_query(objective=[apex_pb2.ObjectiveTerm(property="logp")] * 2), "query.objective[1].property"),
        (_query(0), "query.k"),
        (_query(100_001), "query.k"),
    ],
)
def test_a_bad_query_names_its_field(apex: Apex, query: apex_pb2.Query, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        apex.search(query)
    assert field in [violated for violated, _ in caught.value.violations]


def test_numbers_too_large_to_add_up_name_their_field_by_its_place(apex: Apex) -> None:
    huge = [apex_pb2.Constraint(property="tpsa", upper=90.0), apex_pb2.Constraint(property="logp", upper=1e200)]
    heavy = [apex_pb2.ObjectiveTerm(property="tpsa"), apex_pb2.ObjectiveTerm(property="logp", weight=1e200)]
    index, stub = apex.index.name, apex.client.stub
    counting = apex_pb2.CountMatchesRequest(index=index, constraints=huge)
    weighing = apex_pb2.CountMatchesRequest(index=index, objective=heavy, min_objective=0.0)
    scoring = apex_pb2.ScoreProductsRequest(index=index, products=["amide~a0~b0"], constraints=huge)
    calls = [
        ("query.constraints[1].upper", lambda: apex.search(_query(constraints=huge))),
        ("query.objective[1].weight", lambda: apex.search(_query(objective=heavy))),
        ("constraints[1].upper", lambda: stub.CountMatches(counting)),
        ("objective[1].weight", lambda: stub.CountMatches(weighing)),
        ("constraints[1].upper", lambda: stub.ScoreProducts(scoring)),
    ]
    for field, call in calls:
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert [violated for violated, _ in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([HEADER.removesuffix("\tprice"), "CC[U]\ta\t1\tr"], "2 to 4"),
        ([HEADER, *_rows()[:12], "CC[Np]\tx\t2\tamide\t1"], "joints"),
        ([HEADER, *_rows(), _rows()[0]], "repeated"),
        ([HEADER, *_rows()[:11], "CN[U]\tb0\t3\tamide\t1"], "empty"),
        ([HEADER, *_rows()[:5], "not smiles\tx\t1\tamide\t1"], "smiles"),
        ([HEADER, *_rows()[:5], "CC(=O)[U]\tx\tfirst\tamide\t1"], "position"),
        (["smiles\tsynthon_id", "CC[U]\ta"], "no such column"),
        ([HEADER], "no rows"),
    ],
)
def test_a_bad_library_is_refused_with_the_place_in_it(apex: Apex, rows: list[str], said: str) -> None:
    source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=apex.upload("\n".join(rows) + "\n"))
    operation = apex.client.stub.ImportLibrary(apex_pb2.ImportLibraryRequest(tsv=source))
    with pytest.raises(InvalidArgument) as caught:
        apex.client.wait(operation, apex_pb2.Library)
    assert said in str(caught.value)
    assert caught.value.violations[0][0].startswith("tsv.")


def test_a_column_that_is_no_number_is_refused(apex: Apex) -> None:
    source = apex_pb2.ImportLibraryRequest.TsvSource(
        synthons=apex.upload("\n".join([HEADER, *_rows(), "CC(C)(C)C(=O)[U]\tx\t1\tamide\tcheap"]) + "\n")
    )
    request = apex_pb2.ImportLibraryRequest(tsv=source, additive_columns=["price"])
    with pytest.raises(InvalidArgument, match="'cheap' is not a number"):
        apex.client.wait(apex.client.stub.ImportLibrary(request), apex_pb2.Library)


def test_names_that_do_not_exist_and_names_that_are_taken(apex: Apex) -> None:
    stub = apex.client.stub
    sample = apex_pb2.RdkitSample(library="libraries/none", product_count=100, properties=["logp"])
    calls = [
        (code_pb2.NOT_FOUND, lambda: stub.TrainSurrogate(apex_pb2.TrainSurrogateRequest(rdkit_sample=sample))),
        (
            code_pb2.NOT_FOUND,
            lambda: stub.BuildIndex(apex_pb2.BuildIndexRequest(parent=apex.library.name, surrogate="surrogates/none")),
        ),
        (
            code_pb2.NOT_FOUND,
            lambda: stub.ImportLibrary(
                apex_pb2.ImportLibraryRequest(
                    tsv=apex_pb2.ImportLibraryRequest.TsvSource(synthons=common_pb2.ArtifactRef(sha256="0" * 64))
                )
            ),
        ),
        (
            code_pb2.ALREADY_EXISTS,
            lambda: stub.ImportLibrary(
                apex_pb2.ImportLibraryRequest(library_id=apex.library.name.partition("/")[2], zoo="real1m")
            ),
        ),
        (code_pb2.INVALID_ARGUMENT, lambda: stub.ImportLibrary(apex_pb2.ImportLibraryRequest(zoo="thrombin"))),
        (
            code_pb2.FAILED_PRECONDITION,
            lambda: stub.DeleteLibrary(apex_pb2.DeleteLibraryRequest(name=apex.library.name)),
        ),
        (
            code_pb2.FAILED_PRECONDITION,
            lambda: stub.DeleteSurrogate(apex_pb2.DeleteSurrogateRequest(name=apex.surrogate.name)),
        ),
        (
            code_pb2.ABORTED,
            lambda: stub.DeleteIndex(apex_pb2.DeleteIndexRequest(name=apex.index.name, etag="another")),
        ),
    ]
    for code, call in calls:
        with pytest.raises(ServiceError) as caught:
            call()
        assert caught.value.code == code, caught.value


@pytest.mark.parametrize("product", ["amide", "amide~a0", "amide~a0~b99", "ether~a0~b0", "~"])
def test_an_unknown_product_is_refused_by_its_place(apex: Apex, product: str) -> None:
    request = apex_pb2.ScoreProductsRequest(index=apex.index.name, products=["amide~a0~b0", product])
    with pytest.raises(InvalidArgument) as caught:
        apex.client.stub.ScoreProducts(request)
    assert caught.value.violations[0][0] == "products[1]"


def test_a_probe_adds_a_property_and_old_indexes_keep_working(apex: Apex) -> None:
    import pyarrow as pa

    smiles = ["C" * n + end for n in range(1, 41) for end in ("", "O", "N")]
    sink = io.BytesIO()
    pq.write_table(pa.table({"structure": smiles, "length": [float(len(text)) for text in smiles]}), sink)
    ref = apex.client.upload(sink.getvalue())
    request = apex_pb2.AddProbeRequest(
        surrogate=apex.surrogate.name,
        property_name="length",
        table=common_pb2.TableRef(artifact=ref, columns={"smiles": "structure"}),
    )
    surrogate = apex.client.wait(apex.client.stub.AddProbe(request), apex_pb2.Surrogate)
    assert [item.name for item in surrogate.properties] == ["logp", "tpsa", "length"]
    assert surrogate.properties[2].r2_validation > 0.5
    assert surrogate.etag != apex.surrogate.etag
    assert len(apex.search(_query(5))[0]) == 5
    with pytest.raises(InvalidArgument) as caught:
        apex.client.stub.AddProbe(request)
    assert caught.value.violations[0][0] == "property_name"


def test_what_a_running_operation_reads_cannot_be_deleted_under_it(apex: Apex) -> None:
    stub = apex.client.stub
    source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=apex.upload("\n".join([HEADER, *_rows()]) + "\n"))
    library = apex.client.wait(stub.ImportLibrary(apex_pb2.ImportLibraryRequest(tsv=source)), apex_pb2.Library)
    sample = apex_pb2.RdkitSample(library=library.name, product_count=110, properties=["logp"])
    operation = stub.TrainSurrogate(apex_pb2.TrainSurrogateRequest(rdkit_sample=sample, steps=100_000))
    assert not operation.done
    with pytest.raises(FailedPrecondition, match=f"{library.name} is used by {operation.name}, which must end"):
        stub.DeleteLibrary(apex_pb2.DeleteLibraryRequest(name=library.name))
    apex.client.operations.CancelOperation(operations_pb2.CancelOperationRequest(name=operation.name))
    with pytest.raises(Cancelled):
        apex.client.wait(operation, apex_pb2.Surrogate)
    stub.DeleteLibrary(apex_pb2.DeleteLibraryRequest(name=library.name))


def test_an_import_that_cannot_have_its_data_says_why(apex: Apex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYCEUM_CACHE", "/dev/null/cache")
    importing = apex_pb2.ImportLibraryRequest(library_id="unreachable", zoo="real1m")
    with pytest.raises(FailedPrecondition, match="set LYCEUM_CACHE to a folder that can be written"):
        apex.client.wait(apex.client.stub.ImportLibrary(importing), apex_pb2.Library)
