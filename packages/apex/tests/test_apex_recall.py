"""The benchmark of recall on docking truth: its data, its ceilings, and what it counts."""

import numpy as np
import pytest

from lyceum_apex.active import ActivePlan
from lyceum_apex.bench_recall import Thrombin, ask_apex, ceilings, main_effects, over_seeds, pair_effects
from lyceum_zoo import path


@pytest.fixture(scope="module")
def thrombin() -> Thrombin:
    return Thrombin.load(path("thrombin"))


def test_acceptance_08_ceilings_with_all_scores_known(thrombin: Thrombin) -> None:
    found = {(row.case, row.measured): row.value for row in ceilings(thrombin)}
    additive = "main effects, all scores known"
    assert found[additive, "R2"] == pytest.approx(0.512, abs=0.002)
    assert found[additive, "recall of the best 100 in 1,000"] == pytest.approx(0.23, abs=0.01)
    assert found[additive, "recall of the best 1,000 in 10,000"] == pytest.approx(0.376, abs=0.005)
    assert found["all pair terms, all scores known", "R2"] == pytest.approx(0.807, abs=0.002)


def test_acceptance_08_active_search_finds_more_than_main_effects_fitted_to_all_scores(thrombin: Thrombin) -> None:
    """The claim itself, 10,000 calls and five seeds, is the benchmark `recall`; here is one seed of 3,000 calls, which
    beat the 0.23 of 1,000 products that are best by the main effects of all 499,720 scores."""
    asked = ask_apex(thrombin, ActivePlan(budget=3_000, rounds=2, initial=2_000, maximize=False))
    assert len(np.unique(asked, axis=0)) == 3_000
    assert thrombin.recall(asked, 100) > 0.23


def test_synthons_join_to_the_products_of_the_data_set(thrombin: Thrombin) -> None:
    """The data set has SMILES of the amino acids' couplings; a tritium stands here where the acid would be."""
    from rdkit import Chem

    rows = [("pairs", 1, "tritium", "[3H][U]")]
    library = thrombin.library
    for g in (1, 2):
        first = library.first_leg[0][g]
        legs = range(first, first + library.sizes[0][g])
        rows += [("pairs", g + 1, library.synthon_ids[leg], library.smiles[library.leg_smiles[leg]]) for leg in legs]
    pairs = type(library).from_rows(rows, None)
    lines = (path("thrombin") / "coupled_aa_sub.smi").read_text().splitlines()
    assert len(lines) == 62 * 62
    for line in lines[::37]:
        smiles, code = line.split()
        _, product = pairs.parse_name("~".join(["pairs", "tritium", *code.split("_")]))
        joined = pairs.product_smiles(0, product).replace("[3H]", "[H]")
        assert len({Chem.MolToSmiles(Chem.MolFromSmiles(text)) for text in (joined, smiles)}) == 1


def test_a_full_table_of_main_effects_is_fitted_exactly() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=shape) for shape in ((4, 1, 1), (1, 5, 1), (1, 1, 6))]
    additive = parts[0] + parts[1] + parts[2]
    np.testing.assert_allclose(main_effects(additive), additive)
    pairwise = additive + rng.normal(size=(4, 5, 1)) + rng.normal(size=(1, 5, 6)) + rng.normal(size=(4, 1, 6))
    np.testing.assert_allclose(pair_effects(pairwise), pairwise)
    assert not np.allclose(main_effects(pairwise), pairwise)


def test_an_interval_of_equal_runs_has_no_width() -> None:
    assert (over_seeds([0.5] * 3).low, over_seeds([0.5] * 3).high) == (0.5, 0.5)
    wide = over_seeds([0.4, 0.5, 0.6])
    assert wide.low < wide.estimate < wide.high
