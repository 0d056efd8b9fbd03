"""Surrogate, factoriser and index on a small library: reproducible, resumable, and right where a right answer is
known."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lyceum_apex import ApexIndex, Factorizer, FieldError, Query, Surrogate, SynthonLibrary, VersionError, properties
from lyceum_base import Checkpoint, Stopped, decode_state, encode_state

TAILS = [
    "C",
    "CC",
    "CCC",
    "C(C)C",
    "CCO",
    "CCN",
    "CF",
    "CCl",
    "c1ccccc1",
    "c1ccncc1",
    "C1CCCC1",
    "CC#N",
    "CCOC",
    "C(F)(F)F",
]
NAMES = ["mw", "logp", "tpsa"]


def rows() -> list[tuple[str, int, str, str]]:
    """Amides, ethers, and amides of amino acids in three parts."""
    table = []
    for i, tail in enumerate(TAILS):
        table += [("amide", 1, f"a{i}", f"O=C([U]){tail}"), ("amide", 2, f"n{i}", f"[U]N{tail}")]
        table += [("ether", 1, f"o{i}", f"[U]O{tail}"), ("ether", 2, f"c{i}", f"[U]CC{tail}")]
        table += [("peptide", 1, f"a{i}", f"O=C([U]){tail}"), ("peptide", 2, f"m{i}", f"[U]NC({tail})C(=O)[Np]")]
        table += [("peptide", 3, f"n{i}", f"[Np]N{tail}")]
    return table


@pytest.fixture(scope="module")
def library() -> SynthonLibrary:
    return SynthonLibrary.from_rows(rows(), None).with_weight("weight")


@pytest.fixture(scope="module")
def training(library: SynthonLibrary) -> tuple[list[str], np.ndarray]:
    smiles = [text for text in library.products_smiles(library.sample(400, seed=1)) if text is not None]
    return smiles, properties(smiles, NAMES)


@pytest.fixture(scope="module")
def surrogate(training: tuple[list[str], np.ndarray]) -> Surrogate:
    return Surrogate.fit(*training, NAMES, steps=100, seed=1)


@pytest.fixture(scope="module")
def factorizer(library: SynthonLibrary, surrogate: Surrogate) -> Factorizer:
    return Factorizer.fit(library, surrogate, steps=20, seed=1)


@pytest.fixture(scope="module")
def index(library: SynthonLibrary, surrogate: Surrogate, factorizer: Factorizer) -> ApexIndex:
    return ApexIndex.build(library, surrogate, factorizer)


def states(run: Iterator[Checkpoint]) -> list[bytes]:
    return [encode_state(checkpoint.state) for checkpoint in run if checkpoint.state is not None]


@pytest.mark.parametrize(("encoder", "steps"), [("ecfp", 30), ("mpnn", 4)])
def test_a_resumed_surrogate_equals_an_uninterrupted_one_byte_for_byte(
    training: tuple[list[str], np.ndarray], monkeypatch: pytest.MonkeyPatch, encoder: str, steps: int
) -> None:
    monkeypatch.setattr("lyceum_apex.surrogate._STATE_EVERY", {"ecfp": 12, "mpnn": 3})
    smiles, y = training[0][:120], training[1][:120]
    arguments = {"encoder": encoder, "steps": steps, "seed": 7}
    whole = states(Surrogate.iter_fit(smiles, y, NAMES, **arguments))
    assert len(whole) == {"ecfp": 3, "mpnn": 2}[encoder]
    for position in range(len(whole)):
        resumed = states(Surrogate.iter_fit(smiles, y, NAMES, **arguments, resume=decode_state(whole[position])))
        assert resumed[-1] == whole[-1]
    other = states(Surrogate.iter_fit(smiles, y, NAMES, **{**arguments, "seed": 8}))
    assert other[-1] != whole[-1]


def test_embeddings_in_training_get_gaussian_noise_of_scale_1(
    training: tuple[list[str], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from lyceum_apex import ridge
    from lyceum_apex.encoders import initialise, make_encoder
    from lyceum_apex.features import featurise
    from lyceum_apex.surrogate import _Batches, _split
    from lyceum_base import Streams

    seen: list[torch.Tensor] = []
    real = ridge.leave_one_out

    def watched(x: torch.Tensor, y: torch.Tensor, eps: float) -> ridge.LeaveOneOut:
        seen.append(x.detach())
        return real(x, y, eps)

    monkeypatch.setattr(ridge, "leave_one_out", watched)
    smiles, y = training
    Surrogate.fit(smiles, y, NAMES, steps=1, seed=5)
    encoder = make_encoder("ecfp")
    initialise(encoder, Streams(5))
    batch = _Batches(_split(len(smiles), 5)[0], Streams(5)).at(0)
    with torch.no_grad():
        noise = (seen[0] - encoder(featurise("ecfp", smiles).take(batch))).numpy()
    assert noise.shape == (200, 64)
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs(noise.std() - 1) < 4 / np.sqrt(2 * noise.size)


def test_a_resumed_factoriser_equals_an_uninterrupted_one_byte_for_byte(
    library: SynthonLibrary, surrogate: Surrogate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lyceum_apex.factorizer._STATE_EVERY", 4)
    whole = states(Factorizer.iter_fit(library, surrogate, steps=10, seed=3))
    assert len(whole) == 3
    for position in range(len(whole)):
        resumed = Factorizer.iter_fit(library, surrogate, steps=10, seed=3, resume=decode_state(whole[position]))
        assert states(resumed)[-1] == whole[-1]


def test_training_stops_when_asked(
    training: tuple[list[str], np.ndarray], surrogate: Surrogate, library: SynthonLibrary
) -> None:
    polls = itertools.count()
    with pytest.raises(Stopped):
        list(Surrogate.iter_fit(*training, NAMES, steps=1000, should_stop=lambda: next(polls) > 2))
    assert next(polls) == 4
    with pytest.raises(Stopped):
        list(Factorizer.iter_fit(library, surrogate, steps=1000, should_stop=lambda: True))


def test_the_surrogate_predicts_molecules_it_has_not_seen(surrogate: Surrogate, library: SynthonLibrary) -> None:
    # Weight, log P and TPSA are sums over small fragments, which is what the fingerprint counts.
    assert min(probe.r2 for probe in surrogate.probes) > 0.85
    fresh = [text for text in library.products_smiles(library.sample(300, seed=77, stratify=False)) if text is not None]
    truth = properties(fresh, NAMES)
    residual = ((truth - surrogate.predict(fresh)) ** 2).mean(0)
    assert (residual < 0.15 * truth.var(0)).all()


def test_a_surrogate_comes_back_from_its_bytes(surrogate: Surrogate) -> None:
    again = Surrogate.from_bytes(surrogate.to_bytes())
    assert again.to_bytes() == surrogate.to_bytes()
    assert again.fingerprint == surrogate.fingerprint
    np.testing.assert_array_equal(again.predict(TAILS[:4]), surrogate.predict(TAILS[:4]))
    with pytest.raises(ValueError, match="not a surrogate"):
        Surrogate.from_bytes(encode_state({"kind": "other"}))


def test_embeddings_do_not_depend_on_atom_order_or_on_the_batch() -> None:
    import torch

    from lyceum_apex.encoders import initialise, make_encoder
    from lyceum_apex.features import featurise
    from lyceum_base import Streams

    spellings = ["OC(=O)c1ccccc1N", "Nc1ccccc1C(O)=O", "c1cccc(N)c1C(=O)O"]
    for name in ("ecfp", "mpnn"):
        encoder = make_encoder(name)
        initialise(encoder, Streams(0))
        with torch.no_grad():
            alone = encoder(featurise(encoder.name, spellings)).numpy()
            mixed = encoder(featurise(encoder.name, [*TAILS, spellings[0]])).numpy()[-1]
        scale = np.abs(alone).max()
        # Kekule forms may differ between spellings of an aromatic ring; this ring has one up to symmetry.
        np.testing.assert_allclose(alone[0], mixed, atol=1e-5 * scale)
        np.testing.assert_allclose(alone[1:], alone[:1].repeat(2, 0), atol=(1e-5 if name == "ecfp" else 0.2) * scale)


def test_legs_follow_their_synthons_when_lists_are_permuted(library: SynthonLibrary, factorizer: Factorizer) -> None:
    order = np.random.default_rng(0).permutation(len(rows()))
    shuffled = SynthonLibrary.from_rows([rows()[i] for i in order], dict.fromkeys(library.reaction_ids, ""))
    plain = replace(factorizer, library="")  # without the correction, which belongs to leg numbers
    first, second = (plain.leg_embeddings(part) for part in (library, shuffled))
    place = {}
    for r, starts in enumerate(shuffled.first_leg):
        for g, start in enumerate(starts):
            for s in range(shuffled.sizes[r][g]):
                place[r, g, shuffled.synthon_ids[start + s]] = start + s
    matched = [
        place[r, g, library.synthon_ids[start + s]]
        for r, starts in enumerate(library.first_leg)
        for g, start in enumerate(starts)
        for s in range(library.sizes[r][g])
    ]
    np.testing.assert_allclose(first, second[matched], atol=1e-4 * np.abs(first).max())


def test_leg_embeddings_follow_the_papers_formula(library: SynthonLibrary) -> None:
    import torch

    from lyceum_apex.encoders import initialise
    from lyceum_apex.factorizer import LegNetwork
    from lyceum_apex.features import featurise
    from lyceum_base import Streams

    network = LegNetwork("ecfp", 5)
    initialise(network, Streams(0))
    groups = [[0, 1, 2], [3, 4], [5], [1, 6, 7, 8]]
    reactions = [0, 0, 1, 1]
    with torch.no_grad():
        features = featurise("ecfp", library.smiles)
        u = network(features, [torch.tensor(group) for group in groups], reactions).numpy()
        h = network.synthons(features)
        expected = []
        for group, reaction in zip(groups, reactions, strict=True):
            rho = [network.p1(sum(network.p0(h[s]) for s in other) / len(other)) for other in groups]
            kappa = network.q1(sum(network.q0(rho[g]) for g in range(4) if reactions[g] == reaction))
            key = network.key(rho[groups.index(group)] + kappa).reshape(64, 5)
            expected += [(key @ network.val(h[s])).numpy() for s in group]
    np.testing.assert_allclose(u, expected, atol=1e-5 * np.abs(expected).max())


def test_the_mean_embedding_is_shared_out_among_the_legs_of_a_product(
    library: SynthonLibrary, factorizer: Factorizer
) -> None:
    moved = replace(factorizer, centre=factorizer.centre + 1.0)
    shift = moved.leg_embeddings(library) - factorizer.leg_embeddings(library)
    legs = library.legs(library.sample(30, seed=2))
    for row in legs:
        np.testing.assert_allclose(shift[row[row >= 0]].sum(0), 1.0, rtol=1e-9)


def test_the_penalty_of_main_effects_is_chosen_by_products_left_out() -> None:
    from lyceum_apex.factorizer import PENALTIES, Pool, main_effects

    # Pure noise on all 6 x 6 products: products left out ask for the largest penalty, products fitted for the smallest.
    table = [("r", g, f"s{i}", f"{'C' * (i + 1)}[U]") for g in (1, 2) for i in range(6)]
    library = SynthonLibrary.from_rows(table, None)
    products = library.sample(36, seed=0)
    e = np.random.default_rng(0).normal(size=(36, 64)).astype(np.float32)
    effects = main_effects(library, Pool(products, e, np.array([0, 36])), np.zeros((12, 64)))
    design = np.zeros((36, 12))
    for column in library.legs(products)[:, :2].T:
        design[np.arange(36), column] = 1.0
    expected = np.linalg.solve(design.T @ design + max(PENALTIES) * np.eye(12), design.T @ e)
    np.testing.assert_allclose(effects, expected, rtol=1e-9, atol=1e-9)


def test_the_descent_is_adam_with_clipped_gradients_and_cosine_steps() -> None:
    import torch

    from lyceum_apex.training import descend

    def network() -> torch.nn.Linear:
        linear = torch.nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        return linear

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
    ours, theirs = network(), network()
    run = descend(
        ours,
        lambda step: (ours(x) - step).square().sum(),
        stage="s",
        steps=20,
        learning_rate=0.05,
        state_every=100,
        resume=None,
        should_stop=None,
    )
    assert all(checkpoint.state is None for checkpoint in run)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=20)
    for step in range(20):
        adam.zero_grad()
        (theirs(x) - step).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adam.step()
        schedule.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach(), other.detach(), rtol=1e-4, atol=1e-5)


def test_main_effects_are_exact_where_embeddings_are_sums(library: SynthonLibrary) -> None:
    from lyceum_apex.factorizer import Pool, _sum_legs, main_effects

    rng = np.random.default_rng(0)
    truth = rng.normal(size=(library.n_legs, 64))
    products = library.sample(library.n_products, seed=0)
    order = np.argsort(products.r, kind="stable")
    products = replace(products, r=products.r[order], s=products.s[order])
    legs = library.legs(products)
    starts = np.searchsorted(products.r, np.arange(library.n_reactions + 1))
    pool = Pool(products, _sum_legs(truth, legs).astype(np.float32), starts)
    estimate = _sum_legs(main_effects(library, pool, np.zeros_like(truth)), legs)
    # The smallest penalty, 0.03 against at least 14 products a leg, leaves 0.2 % of a main effect.
    assert np.abs(estimate - pool.embeddings).max() < 0.01 * np.abs(truth).max()


def test_the_factorised_surrogate_follows_the_surrogate(index: ApexIndex) -> None:
    assert set(index.reconstruction) == set(NAMES)
    assert min(index.reconstruction.values()) > 0.9


def test_a_factoriser_serves_another_library_and_refuses_another_surrogate(
    factorizer: Factorizer, training: tuple[list[str], np.ndarray], library: SynthonLibrary, surrogate: Surrogate
) -> None:
    other = SynthonLibrary.from_rows([("r", 1, "a", "CCC[U]"), ("r", 2, "b", "CO[U]"), ("r", 2, "c", "CN[U]")], None)
    elsewhere = ApexIndex.build(other, surrogate, factorizer)
    assert np.isfinite(elsewhere.table.values).all()
    assert elsewhere.reconstruction == {}
    assert len(elsewhere.search(Query(objective="logp", k=5))) == 2
    again = Factorizer.from_bytes(factorizer.to_bytes())
    np.testing.assert_array_equal(again.leg_embeddings(library), factorizer.leg_embeddings(library))
    stranger = Surrogate.fit(*training, NAMES, steps=1, seed=2)
    with pytest.raises(VersionError):
        ApexIndex.build(library, stranger, factorizer)
    with pytest.raises(VersionError):
        factorizer.reconstruction_report(other, stranger)


def test_scores_are_additive_within_a_reaction_and_exact_columns_are_exact(
    index: ApexIndex, library: SynthonLibrary
) -> None:
    s = np.array([[0, 0, -1, -1], [5, 7, -1, -1], [0, 7, -1, -1], [5, 0, -1, -1]])
    a, b, c, d = index.score(np.zeros(4, np.int32), s)
    assert np.abs(a + b - c - d).max() < 1e-6 * np.abs(index.table.values).max()
    weight = index.score([0], s[1:2])[0, index.table.names.index("weight")]
    assert abs(weight - properties([library.product_smiles(0, [5, 7])], ["mw"])[0, 0]) < 1e-9
    np.testing.assert_allclose(index.explain(0, [5, 7]).legs.sum(0) + index.table.bias, b, rtol=1e-12)


def test_interactions_bring_an_index_nearer_to_its_surrogate_and_are_the_same_each_time(
    library: SynthonLibrary, surrogate: Surrogate, factorizer: Factorizer, index: ApexIndex
) -> None:
    nearer = ApexIndex.build(library, surrogate, factorizer, interactions_rank=2, seed=5)
    assert nearer.table.interactions is not None
    gains = [nearer.reconstruction[name] - index.reconstruction[name] for name in nearer.table.interactions.names]
    assert min(gains) > 0
    assert ApexIndex.from_bytes(nearer.to_bytes()).to_bytes() == nearer.to_bytes()
    again = ApexIndex.build(library, surrogate, factorizer, interactions_rank=2, seed=5)
    assert again.to_bytes() == nearer.to_bytes()
    with pytest.raises(FieldError, match="interactions_rank: 9 given; 1 to 8"):
        ApexIndex.build(library, surrogate, factorizer, interactions_rank=9)


def test_search_returns_what_sorting_all_scores_does(index: ApexIndex, library: SynthonLibrary) -> None:
    everything = library.sample(library.n_products, seed=0)
    values = index.score(everything.r, everything.s)
    logp, weight = (values[:, index.table.names.index(name)] for name in ("logp", "weight"))
    expected = np.sort(logp[weight <= 250.0])[::-1][:20]
    hits = index.search(Query(objective="logp", k=20, constraints={"weight": (None, 250.0)}))
    np.testing.assert_allclose(hits.objective, expected, atol=1e-9)
    assert index.count({"weight": (None, 250.0)}).count == (weight <= 250.0).sum()


def test_a_new_probe_joins_the_index_without_encoding(
    index: ApexIndex,
    library: SynthonLibrary,
    factorizer: Factorizer,
    surrogate: Surrogate,
    training: tuple[list[str], np.ndarray],
) -> None:
    smiles, _ = training
    extended = surrogate.add_probe("hba", smiles, properties(smiles, ["hba"]))
    assert extended.fingerprint == surrogate.fingerprint
    joined = index.with_probe(extended.probe("hba"))
    rebuilt = ApexIndex.build(library, extended, factorizer)
    batch = library.sample(50, seed=9)
    for name in ("hba", "logp", "weight"):
        first, second = (i.score(batch.r, batch.s)[:, i.table.names.index(name)] for i in (joined, rebuilt))
        np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-12)
    with pytest.raises(FieldError, match="'hba' is in the index already"):
        joined.with_probe(extended.probe("hba"))
    with pytest.raises(VersionError):
        index.with_probe(replace(extended.probe("hba"), encoder="other"))


def test_an_index_comes_back_from_its_bytes(index: ApexIndex, tmp_path) -> None:  # type: ignore[no-untyped-def]
    index.save(tmp_path / "index")
    again = ApexIndex.load(tmp_path / "index")
    assert again.to_bytes() == index.to_bytes()
    np.testing.assert_array_equal(again.table.values, index.table.values)
    assert dict(again.reconstruction) == dict(index.reconstruction)


def only_held_out_rows_differ() -> np.ndarray:
    from lyceum_apex.surrogate import _split

    y = np.random.default_rng(0).normal(size=(60, 3))
    y[:, 1] = 0.0
    y[_split(60, 0)[1], 1] = 1.0
    return y


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"y": np.zeros((3, 3))}, "y"),
        ({"y": np.full((60, 3), np.nan)}, "y[0]"),
        ({"y": np.zeros((60, 3))}, "names[0]"),
        ({"y": only_held_out_rows_differ()}, "names[1]"),
        ({"names": ["a", "a", "b"]}, "names"),
        ({"smiles": ["C"] * 3, "y": np.zeros((3, 3))}, "smiles"),
        ({"smiles": ["C"] * 59 + ["oops"]}, "smiles[59]"),
        ({"encoder": "gpt"}, "encoder"),
        ({"steps": 0}, "steps"),
    ],
)
def test_a_wrong_training_argument_is_refused_by_its_field(change: dict[str, object], field: str) -> None:
    arguments = {"smiles": ["C"] * 60, "y": np.random.default_rng(0).normal(size=(60, 3)), "names": NAMES, **change}
    with pytest.raises(FieldError) as caught:
        Surrogate.fit(**arguments)
    assert caught.value.field == field


def test_a_bad_molecule_far_down_a_table_is_named_by_its_row() -> None:
    smiles = ["C"] * 3000 + ["oops"]
    y = np.random.default_rng(0).normal(size=(3001, 1))
    with pytest.raises(FieldError, match=r"smiles\[3000\]"):
        Surrogate.fit(smiles, y, ["a"], steps=1)
    with pytest.raises(FieldError, match=r"smiles\[3000\]"):
        properties(smiles)


def test_a_constant_column_has_scale_1_although_its_deviation_does_not_round_to_0(library: SynthonLibrary) -> None:
    values = np.full((library.n_legs, 1), 0.3)
    two_part = SynthonLibrary.from_rows([row for row in rows() if row[0] != "peptide"], None)
    index = ApexIndex.from_leg_table(two_part, ["price"], values[: two_part.n_legs])
    assert index.table.scale.tolist() == [1.0]
    assert ApexIndex.from_leg_table(library, ["price"], values).table.scale[0] == pytest.approx(0.3 * np.sqrt(2) / 3)


def test_properties_have_their_published_values() -> None:
    # Aspirin: average weight 180.159; TPSA 63.60 (Ertl 2000); Crippen log P 1.3101 and QED 0.5501 of RDKit's own tests.
    values = properties(["CC(=O)Oc1ccccc1C(=O)O"], ["mw", "tpsa", "logp", "hbd", "hba", "rings", "fsp3", "qed"])[0]
    np.testing.assert_allclose(values[:3], [180.159, 63.60, 1.3101], atol=1e-3)
    assert values[3:6].tolist() == [1, 3, 1]
    np.testing.assert_allclose(values[6:], [1 / 9, 0.550], atol=1e-3)
    assert 1.0 <= properties(["CC(=O)Oc1ccccc1C(=O)O"], ["sa"])[0, 0] <= 2.5
    with pytest.raises(FieldError, match=r"smiles\[1\]"):
        properties(["C", "oops"])
    with pytest.raises(FieldError, match=r"names\[0\]"):
        properties(["C"], ["beauty"])


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "('torch', 'rdkit', 'numba', 'pyarrow', 'scipy')"
    code = f"import sys, lyceum_apex; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
