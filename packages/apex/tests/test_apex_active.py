"""Active search: what it learns, what it asks, and that a search which is interrupted ends as if it had not been."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_apex import ContributionTable, FieldError, SynthonLibrary, properties
from lyceum_apex.active import (
    ActivePlan,
    ActiveResult,
    ActiveSearch,
    ActiveState,
    active_search,
    iter_active_search,
    leg_features,
)
from lyceum_apex.contributions import score
from lyceum_apex.leg_process import KERNELS, Variances, _estimate, _Labels, _solve, fit_process
from lyceum_apex.library import ProductBatch
from lyceum_base import Streams
from lyceum_runtime.client import Client
from lyceum_runtime.codec import from_arrow_batch
from lyceum_runtime.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound, ServiceError
from lyceum_runtime.testing import serve

SIZES = ((4, 5, 3), (6, 2), (2, 3, 2, 3))
ACIDS = ["C" * n + "C(=O)[U]" for n in range(1, 9)] + [
    "O=C([U])c1ccccc1",
    "O=C([U])C1CC1",
    "COCC(=O)[U]",
    "N#CCC(=O)[U]",
]
AMINES = ["C" * n + "N[U]" for n in range(1, 9)] + ["[U]Nc1ccccc1", "[U]NC1CC1", "COCCN[U]", "[U]N1CCOCC1"]
ROWS = [("amide", 1, f"a{i}", smiles) for i, smiles in enumerate(ACIDS)]
ROWS += [("amide", 2, f"b{i}", smiles) for i, smiles in enumerate(AMINES)]
OTHER = [("urea", 1, f"c{i}", f"{'C' * (i + 1)}NC(=O)[Np]") for i in range(5)]
OTHER += [("urea", 2, f"d{i}", f"[Np]N(C){'C' * (i + 1)}N[Pu]") for i in range(4)]
OTHER += [("urea", 3, f"e{i}", f"[Pu]C(=O){'C' * (i + 1)}F") for i in range(4)]
PRICE = [1.0 + i % 7 for i in range(len(ROWS))]


@pytest.fixture(scope="module")
def library() -> SynthonLibrary:
    return SynthonLibrary.from_rows(ROWS, None, {"price": PRICE})


def _logp(smiles: Sequence[str]) -> np.ndarray:
    return properties(list(smiles), ("logp",))[:, 0]


def _labels(seed: int, count: int = 60) -> tuple[_Labels, np.random.Generator]:
    rng = np.random.default_rng(seed)
    r = rng.integers(0, len(SIZES), count)
    s = np.full((count, 4), -1)
    for i, sizes in enumerate(SIZES[k] for k in r):
        s[i, : len(sizes)] = [rng.integers(n) for n in sizes]
    return _Labels(SIZES, rng.normal(size=(sum(map(sum, SIZES)), 4)), r, s), rng


# --- the process -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_products_with_the_covariance_equal_those_of_its_matrix(seed: int) -> None:
    labels, rng = _labels(seed)
    theta, v = rng.uniform(0.1, 1.0, len(KERNELS)), rng.normal(size=60)
    matrix = sum(t * k for t, k in zip(theta, labels.kernels()))
    np.testing.assert_allclose(labels.multiply(v, theta), matrix @ v, rtol=1e-9, atol=1e-9)
    assert np.linalg.eigvalsh(matrix)[0] > -1e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_the_table_is_the_posterior_mean_at_every_product(seed: int) -> None:
    """Kernels between the labels and themselves are known; the table must add up to the same sums."""
    labels, rng = _labels(seed)
    theta, alpha = rng.uniform(0.1, 1.0, len(KERNELS)), rng.normal(size=60)
    model = labels.model(alpha, theta, 0.7)
    pairs = model.interactions(("y",))
    table = ContributionTable(SIZES, model.values, model.bias, np.ones(1), ("y",), interactions=pairs)
    expected = 0.7 + sum(t * k for t, k in zip(theta, labels.kernels())) @ alpha
    np.testing.assert_allclose(score(table, labels.reaction, labels.synthons)[:, 0], expected, rtol=1e-8, atol=1e-8)


def test_conjugate_gradients_solve_the_system() -> None:
    labels, rng = _labels(3)
    variances = Variances(np.full(len(KERNELS), 0.3), 0.5)
    z = rng.normal(size=60)
    matrix = sum(0.3 * k for k in labels.kernels()) + 0.5 * np.eye(60)
    np.testing.assert_allclose(_solve(labels, variances, z, lambda: None), np.linalg.solve(matrix, z), atol=2e-3)


def test_variances_are_found_again() -> None:
    rng = np.random.default_rng(1)
    legs = rng.integers(0, 40, (800, 2))
    kernels = [(leg[:, None] == leg).astype(float) for leg in legs.T]
    first, second = 3.0**0.5 * rng.normal(size=40), rng.normal(size=40)
    z = first[legs[:, 0]] + second[legs[:, 1]] + 0.5 * rng.normal(size=800)
    found = _estimate(kernels, z, lambda: None)
    expected = [first.var(), second.var(), 0.25]
    np.testing.assert_allclose([*found.kernels, found.noise], expected, rtol=0.25)


def test_an_additive_score_is_learned_from_few_labels() -> None:
    library = SynthonLibrary.from_rows(ROWS + OTHER, None)
    rng = np.random.default_rng(0)
    truth = rng.normal(size=library.n_legs)
    batch = library.draw(150, range(library.n_reactions), Streams(1))

    def value(products: ProductBatch) -> np.ndarray:
        legs = library.legs(products)
        return np.asarray(np.where(legs >= 0, truth[legs], 0.0).sum(axis=1))

    model, _ = fit_process(
        library.sizes, leg_features(library), batch.r, batch.s, value(batch), mean=0.0, streams=Streams(0)
    )
    every = library.draw(library.n_products, range(library.n_reactions), Streams(2))
    sizes = tuple(map(tuple, library.sizes))
    pairs = model.interactions(("y",))
    table = ContributionTable(sizes, model.values, model.bias, np.ones(1), ("y",), interactions=pairs)
    error = score(table, every.r, every.s)[:, 0] - value(every)
    assert error.var() < 0.1 * value(every).var()


def test_features_are_like_the_similarity_of_synthons(library: SynthonLibrary) -> None:
    """Few synthons need few axes: there the inner products are the min-max similarities themselves."""
    from rdkit import Chem
    from rdkit.Chem import rdFingerprintGenerator

    phi = leg_features(library)
    assert phi.shape == (len(ROWS), 24)
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    molecules = [Chem.MolFromSmiles(smiles.replace("[U]", "*")) for *_, smiles in ROWS]
    counts = np.log1p([generator.GetCountFingerprintAsNumPy(molecule) for molecule in molecules])
    lesser = np.minimum(counts[:, None], counts).sum(axis=2)
    greater = np.maximum(counts[:, None], counts).sum(axis=2)
    np.testing.assert_allclose(phi @ phi.T, lesser / greater, atol=1e-6)


# --- the loop --------------------------------------------------------------------------------------------------------


def test_the_best_products_are_found_with_a_third_of_the_calls(library: SynthonLibrary) -> None:
    every = library.draw(library.n_products, [0], Streams(0))
    values = _logp([str(text) for text in library.products_smiles(every)])
    for maximize in (True, False):
        result = active_search(library, _logp, ActivePlan(budget=48, rounds=4, maximize=maximize, seed=1))
        best = np.sort(values)[::-1] if maximize else np.sort(values)
        np.testing.assert_array_equal(result.scores[:5], best[:5])
        assert (result.calls, result.failed) == (48, 0)


def test_no_product_is_asked_twice_and_each_round_has_its_share() -> None:
    library = SynthonLibrary.from_rows(ROWS + OTHER, None)
    result = active_search(library, _logp, ActivePlan(budget=90, rounds=3, initial=30, seed=2))
    asked = result.state.asked
    assert len({*map(tuple, np.column_stack([asked.r, asked.s]).tolist())}) == 90
    assert result.state.rounds == (30, 20, 20, 20)
    assert set(asked.r) == {0, 1}


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_library_smaller_than_the_budget_is_scored_whole(library: SynthonLibrary, rounds: int) -> None:
    result = active_search(library, _logp, ActivePlan(budget=1000, rounds=rounds))
    assert result.calls == library.n_products == len(result.scores)
    assert (np.diff(result.scores) <= 0).all()


def test_failed_scores_are_calls_and_no_finds(library: SynthonLibrary) -> None:
    def oracle(smiles: list[str]) -> np.ndarray:
        return np.where(["F" in text or len(text) % 3 == 0 for text in smiles], np.nan, _logp(smiles))

    result = active_search(library, oracle, ActivePlan(budget=60, rounds=3))
    assert result.calls == 60
    assert result.failed == np.isnan(result.state.scores).sum() > 0
    assert len(result.scores) == 60 - result.failed
    assert np.isfinite(result.scores).all()


def test_an_oracle_that_always_fails_ends_without_finds(library: SynthonLibrary) -> None:
    result = active_search(library, lambda smiles: np.full(len(smiles), np.nan), ActivePlan(budget=40, rounds=3))
    assert (result.calls, result.failed, len(result.scores)) == (40, 40, 0)
    asked = result.state.asked
    assert len({*map(tuple, asked.s.tolist())}) == 40


def test_equal_scores_are_no_obstacle(library: SynthonLibrary) -> None:
    assert active_search(library, lambda smiles: np.ones(len(smiles)), ActivePlan(budget=40, rounds=3)).calls == 40


def test_products_outside_the_constraints_are_never_asked(library: SynthonLibrary) -> None:
    table = _price_table(library)
    plan = ActivePlan(budget=20, rounds=2, constraints={"price": (None, 5.0)})
    result = active_search(library, _logp, plan, table=table)
    assert result.calls == 20
    assert (score(table, result.products.r, result.products.s)[:, 0] <= 5.0).all()
    every = library.draw(library.n_products, [0], Streams(0))
    affordable = int((score(table, every.r, every.s)[:, 0] <= 5.0).sum())
    assert active_search(library, _logp, replace(plan, budget=100), table=table).calls == affordable
    none = active_search(library, _logp, replace(plan, constraints={"price": (None, 0.5)}), table=table)
    assert none.calls == 0


def test_products_that_few_draws_would_meet_are_found_by_their_constraints(library: SynthonLibrary) -> None:
    """Four of 144 products cost two; twenty draws for the first call often meet none of them."""
    table = _price_table(library)
    for seed in range(6):
        plan = ActivePlan(budget=4, rounds=1, initial=1, constraints={"price": (None, 2.0)}, seed=seed)
        assert active_search(library, _logp, plan, table=table).calls == 4


def test_what_is_out_of_stock_is_never_asked(library: SynthonLibrary) -> None:
    available = np.arange(library.n_legs) % 2 == 0
    table = _price_table(library).with_availability(available)
    result = active_search(library, _logp, ActivePlan(budget=100, rounds=2), table=table)
    assert result.calls == 36  # 6 x 6 products are left
    legs = library.legs(result.products)
    assert available[legs[legs >= 0]].all()


def _price_table(library: SynthonLibrary) -> ContributionTable:
    sizes = tuple(map(tuple, library.sizes))
    return ContributionTable(sizes, library.columns["price"][:, None], np.zeros(1), np.ones(1), ("price",))


def test_a_search_resumed_anywhere_ends_with_the_same_bytes(library: SynthonLibrary) -> None:
    plan = ActivePlan(budget=50, rounds=3, seed=5)
    whole, states = _drive(library, plan, None)
    for state in states:
        again = ActiveState.from_bytes(state.to_bytes())
        assert again.to_bytes() == state.to_bytes()
        resumed, _ = _drive(library, plan, again)
        assert resumed.state.to_bytes() == whole.state.to_bytes()
        np.testing.assert_array_equal(resumed.scores, whole.scores)


def test_the_seed_decides_what_is_asked(library: SynthonLibrary) -> None:
    plan = ActivePlan(budget=30, rounds=1, seed=5)
    first, again = (active_search(library, _logp, plan).state for _ in range(2))
    assert first.to_bytes() == again.to_bytes()
    assert active_search(library, _logp, replace(plan, seed=6)).state.to_bytes() != first.to_bytes()


def _drive(
    library: SynthonLibrary, plan: ActivePlan, resume: ActiveState | None
) -> tuple[ActiveResult, list[ActiveState]]:
    states = []
    steps = iter_active_search(library, plan, batch=7, resume=resume)
    try:
        request = next(steps)
        while True:
            states.append(request.state)
            assert 1 <= len(request.products) <= 7
            request = steps.send(_logp([str(text) for text in library.products_smiles(request.products)]))
    except StopIteration as end:
        return end.value, states


def test_wrong_inputs_are_named(library: SynthonLibrary) -> None:
    for path, plan in (
        ("budget", {"budget": 0}),
        ("rounds", {"budget": 5, "rounds": -1}),
        ("initial", {"budget": 5, "initial": 6}),
        ("constraints[x].lower", {"budget": 5, "constraints": {"x": (2.0, 1.0)}}),
    ):
        with pytest.raises(FieldError) as caught:
            ActivePlan(**plan)
        assert caught.value.field == path
    with pytest.raises(FieldError, match=r"constraints\[mass\].*price"):
        ActiveSearch(library, ActivePlan(budget=5, constraints={"mass": (None, 1.0)}), _price_table(library))
    state = ActiveSearch(library, ActivePlan(budget=5)).propose(ActiveState.empty())
    for scores, path in (([], "scores"), ([1.0] * 9, "scores"), ([float("inf")], "scores[0]")):
        with pytest.raises(FieldError) as caught:
            state.tell(scores)
        assert caught.value.field == path
    with pytest.raises(ValueError, match="not an active search"):
        ActiveState.from_bytes(library.to_bytes())


# --- over gRPC -------------------------------------------------------------------------------------------------------

START = {"library": "libraries/tiny", "budget": 36, "rounds": 2, "batch_size": 5, "seed": common_pb2.Seed(value=4)}


@pytest.fixture(scope="module")
def apex() -> Iterator[Client]:
    lines = [f"{smiles}\t{name}\t{g}\t{reaction}\t{price}" for (reaction, g, name, smiles), price in zip(ROWS, PRICE)]
    text = "\n".join(["smiles\tsynthon_id\tposition\treaction_id\tprice", *lines]) + "\n"
    with serve("apex") as served:
        source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=served.client.upload(text.encode()))
        importing = apex_pb2.ImportLibraryRequest(library_id="tiny", tsv=source, additive_columns=["price"])
        served.client.wait(served.client.stub.ImportLibrary(importing), apex_pb2.Library)
        yield served.client


Reply = Callable[[apex_pb2.OracleRequest], apex_pb2.OracleResponse]


def _reply(asked: apex_pb2.OracleRequest) -> apex_pb2.OracleResponse:
    return apex_pb2.OracleResponse(scores=_logp(asked.smiles), products=asked.products)


@dataclass
class Dialogue:
    """What one stream said."""

    session: apex_pb2.ActiveSearchSession = field(default_factory=apex_pb2.ActiveSearchSession)
    asked: list[str] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    hits: list[dict[str, object]] = field(default_factory=list)
    summary: apex_pb2.ActiveSearchSummary | None = None
    error: ServiceError | None = None


def _talk(
    apex: Client, first: apex_pb2.RunActiveSearchRequest, reply: Reply = _reply, leave_at: int | None = None
) -> Dialogue:
    """Answers requests until the end, or leaves without a word when request number `leave_at` comes."""
    said, answers = Dialogue(), SimpleQueue[apex_pb2.RunActiveSearchRequest | None]()
    answers.put(first)
    stream = apex.stub.RunActiveSearch(iter(answers.get, None))
    try:
        for message in stream:
            kind = message.WhichOneof("update")
            if kind == "session":
                said.session = message.session
            elif kind == "oracle_request":
                if leave_at == len(said.rounds):
                    stream.cancel()
                    return said
                said.asked += message.oracle_request.products
                said.rounds.append(message.oracle_request.round)
                answers.put(apex_pb2.RunActiveSearchRequest(scores=reply(message.oracle_request)))
            elif kind == "hits":
                said.hits += from_arrow_batch(message.hits).to_pylist()
            else:
                said.summary = message.summary
    except ServiceError as error:
        said.error = error
    finally:
        answers.put(None)
    return said


def _start(**changes: object) -> apex_pb2.RunActiveSearchRequest:
    return apex_pb2.RunActiveSearchRequest(start=apex_pb2.ActiveSearchStart(**{**START, **changes}))  # type: ignore[arg-type]


def test_a_search_over_grpc_equals_one_in_python(apex: Client, library: SynthonLibrary) -> None:
    said = _talk(apex, _start())
    plan = ActivePlan(budget=36, rounds=2, seed=4)
    result = active_search(library, _logp, plan)
    names = [library.product_name(r, [g for g in s if g >= 0]) for r, s in zip(result.products.r, result.products.s)]
    assert [hit["product"] for hit in said.hits] == names
    assert [hit["score"] for hit in said.hits] == result.scores.tolist()
    assert said.hits[0]["smiles"] == library.product_smiles(*library.parse_name(names[0]))
    assert said.summary == apex_pb2.ActiveSearchSummary(call_count=36, failed_count=0, hit_count=36)
    assert sorted(said.asked) == sorted(names)
    assert set(said.rounds) == {0, 1, 2}


def test_a_stream_that_breaks_off_is_resumed_to_the_same_hits(apex: Client) -> None:
    whole = _talk(apex, _start())
    left = _talk(apex, _start(), leave_at=4)
    assert not left.hits
    resume = apex_pb2.RunActiveSearchRequest(session=left.session.name)
    again = _talk(apex, resume)
    assert again.session.call_count == len(left.asked)
    assert left.asked + again.asked == whole.asked
    assert (again.hits, again.summary) == (whole.hits, whole.summary)
    finished = _talk(apex, resume)  # the caller may also have left before the hits came
    assert (finished.asked, finished.hits) == ([], whole.hits)


def test_the_best_k_are_sent_and_constraints_hold(apex: Client, library: SynthonLibrary) -> None:
    limit = apex_pb2.Constraint(property="price", upper=5.0)
    said = _talk(apex, _start(k=3, constraints=[limit], direction=apex_pb2.DIRECTION_MINIMIZE))
    assert said.summary == apex_pb2.ActiveSearchSummary(call_count=36, failed_count=0, hit_count=3)
    assert [hit["score"] for hit in said.hits] == sorted(hit["score"] for hit in said.hits)  # type: ignore[type-var]
    table = _price_table(library)
    for name in said.asked:
        r, s = library.parse_name(name)
        assert score(table, [r], [[*s, -1, -1]])[0, 0] <= 5.0


def test_failed_scores_are_reported_over_grpc(apex: Client) -> None:
    def reply(asked: apex_pb2.OracleRequest) -> apex_pb2.OracleResponse:
        return apex_pb2.OracleResponse(scores=[np.nan, *_logp(asked.smiles)[1:]])

    said = _talk(apex, _start(), reply)
    assert said.summary is not None
    assert said.summary.failed_count == len(said.rounds)
    assert said.summary.hit_count == len(said.hits) == 36 - len(said.rounds)


@pytest.mark.parametrize(
    ("response", "path"),
    [
        ({"scores": [1.0] * 4}, "[1].scores.scores"),
        ({"scores": [1.0] * 6}, "[1].scores.scores"),
        ({"scores": [1.0, np.inf, 1.0, 1.0, 1.0]}, "[1].scores.scores[1]"),
        ({"scores": [1.0] * 5, "products": ["amide~a0~b0"]}, "[1].scores.products"),
        ({"scores": [1.0] * 5, "products": ["x"] * 5}, "[1].scores.products[0]"),
    ],
)
def test_a_wrong_answer_is_named_and_the_session_goes_on(apex: Client, response: dict[str, object], path: str) -> None:
    def reply(asked: apex_pb2.OracleRequest) -> apex_pb2.OracleResponse:
        if path.endswith("products"):
            response["products"] = asked.products[:1]
        return apex_pb2.OracleResponse(**response)  # type: ignore[arg-type]

    said = _talk(apex, _start(budget=7, rounds=0), reply)
    assert isinstance(said.error, InvalidArgument)
    assert _fields(said.error) == [path]
    again = _talk(apex, apex_pb2.RunActiveSearchRequest(session=said.session.name))
    assert again.asked[:5] == said.asked
    assert again.summary is not None
    assert again.summary.call_count == 7


def _fields(error: ServiceError) -> list[str]:
    return [violation.field for detail in error.details for violation in detail.field_violations]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"budget": 0}, "[0].start.budget"),
        ({"initial_count": 37}, "[0].start.initial_count"),
        ({"index": "libraries/other/indexes/x"}, "[0].start.index"),
        ({"constraints": [apex_pb2.Constraint(property="mass", upper=1.0)]}, "[0].start.constraints[0].property"),
        ({"constraints": [apex_pb2.Constraint(property="price", upper=1.0)] * 2}, "[0].start.constraints[1].property"),
    ],
)
def test_a_wrong_start_is_named(apex: Client, changes: dict[str, object], path: str) -> None:
    error = _talk(apex, _start(**changes)).error
    assert isinstance(error, InvalidArgument)
    assert _fields(error) == [path]


def test_messages_out_of_turn_are_named(apex: Client) -> None:
    error = _talk(apex, apex_pb2.RunActiveSearchRequest(scores=apex_pb2.OracleResponse(scores=[1.0]))).error
    assert isinstance(error, InvalidArgument)
    assert _fields(error) == ["[0].step"]
    stream = apex.stub.RunActiveSearch(iter([_start(), _start()]))
    with pytest.raises(InvalidArgument) as caught:
        list(stream)
    assert _fields(caught.value) == ["[1].step"]


def test_an_unknown_session_or_library_is_not_found(apex: Client) -> None:
    session = apex_pb2.RunActiveSearchRequest(session="activeSearches/none")
    for first in (session, _start(library="libraries/none"), _start(index="libraries/tiny/indexes/none")):
        assert isinstance(_talk(apex, first).error, NotFound)


def test_one_session_has_one_caller_at_a_time(apex: Client) -> None:
    left = _talk(apex, _start(), leave_at=1)
    resume = apex_pb2.RunActiveSearchRequest(session=left.session.name)
    inner: list[Dialogue] = []

    def reply(asked: apex_pb2.OracleRequest) -> apex_pb2.OracleResponse:
        if not inner:
            inner.append(_talk(apex, resume))
        return _reply(asked)

    assert isinstance(_talk(apex, resume, reply).error, Aborted)
    assert inner[0].summary is not None


def test_a_session_outlives_neither_its_library_nor_a_change_of_it(apex: Client) -> None:
    lines = ["smiles\tsynthon_id\tposition\treaction_id", *(f"{t}\t{n}\t{g}\t{r}" for r, g, n, t in ROWS)]

    def importing(rows: list[str]) -> None:
        source = apex_pb2.ImportLibraryRequest.TsvSource(synthons=apex.upload("\n".join(rows).encode()))
        request = apex_pb2.ImportLibraryRequest(library_id="brief", tsv=source)
        apex.wait(apex.stub.ImportLibrary(request), apex_pb2.Library)

    importing(lines)
    left = _talk(apex, _start(library="libraries/brief"), leave_at=1)
    resume = apex_pb2.RunActiveSearchRequest(session=left.session.name)
    apex.stub.DeleteLibrary(apex_pb2.DeleteLibraryRequest(name="libraries/brief"))
    assert isinstance(_talk(apex, resume).error, NotFound)
    importing(lines[:-1])
    assert isinstance(_talk(apex, resume).error, FailedPrecondition)
