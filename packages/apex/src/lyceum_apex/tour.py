"""The tour: the 1,000 best log P under MW and TPSA limits among 990,829 products, checked against RDKit.

Everything but the checking labels goes over gRPC: import the library, train a surrogate on 2,500 labelled products,
factorise it, search all products, and compare with the truth on a random part of the library.
"""

from collections.abc import Callable

import numpy as np

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_runtime.client import Client
from lyceum_runtime.codec import from_arrow_batch, from_tensor
from lyceum_runtime.tour import TourResult

TRAINING_PRODUCTS = 2_500
LABELLED_PRODUCTS = 2_000
K = 1_000
MW, TPSA = 500.0, 90.0
_TOP = 100
_RETURNED = 150


def run(client: Client, report: Callable[[str, str], None]) -> TourResult:
    """Runs the tour on a connected client and removes what it made."""
    apex = client.stub
    report("library", "importing real1m (42 reactions)")
    library = client.wait(apex.ImportLibrary(apex_pb2.ImportLibraryRequest(zoo="real1m")), apex_pb2.Library)
    report("surrogate", f"training on {TRAINING_PRODUCTS:,} products labelled by RDKit")
    training = apex_pb2.TrainSurrogateRequest(
        rdkit_sample=apex_pb2.RdkitSample(
            library=library.name, product_count=TRAINING_PRODUCTS, properties=["mw", "logp", "tpsa"]
        ),
        steps=250,
        seed=common_pb2.Seed(value=1),
    )
    surrogate = client.wait(apex.TrainSurrogate(training), apex_pb2.Surrogate)
    report("index", "factorising the surrogate over all synthons")
    building = apex_pb2.BuildIndexRequest(
        parent=library.name, surrogate=surrogate.name, steps=50, seed=common_pb2.Seed(value=1)
    )
    index = client.wait(apex.BuildIndex(building), apex_pb2.Index)
    constraints = [apex_pb2.Constraint(property="exact_mw", upper=MW), apex_pb2.Constraint(property="tpsa", upper=TPSA)]
    query = apex_pb2.Query(objective=[apex_pb2.ObjectiveTerm(property="logp")], constraints=constraints, k=K)
    report("search", f"the {K:,} best log P with MW <= {MW:g} and TPSA <= {TPSA:g}")
    # The first search and count of a machine compile their kernels, which are then kept.
    _search(client, index.name, apex_pb2.Query(objective=query.objective, constraints=constraints, k=1))
    apex.CountMatches(apex_pb2.CountMatchesRequest(index=index.name, constraints=constraints))
    hits, summary = _search(client, index.name, query)
    count = apex.CountMatches(apex_pb2.CountMatchesRequest(index=index.name, constraints=constraints))
    best = apex.ExplainProduct(apex_pb2.ExplainProductRequest(index=index.name, product=hits["product"][0]))
    report("truth", f"labelling the hits and {LABELLED_PRODUCTS:,} random products with RDKit")
    truth = _Truth(client, index.name, hits["smiles"], constraints)
    for name in (index.name, surrogate.name, library.name):
        _delete(client, name)
    touched = int(summary.touched_count) / int(summary.product_count)
    fidelity = {item.property: item.r2 for item in index.reconstruction}
    held_out = {item.name: item.r2_validation for item in surrogate.properties}
    passed = truth.hit_mean > truth.random_mean + 1.0 and truth.recall > 3 * _RETURNED / LABELLED_PRODUCTS
    return TourResult(
        headline=(
            f"{K:,} hits out of {int(summary.product_count):,} products in {summary.search_seconds:.3f} s: mean log P "
            f"{truth.hit_mean:.2f} by RDKit, {truth.random_mean:.2f} for random products"
        ),
        rows=[
            (
                "library",
                f"{library.reaction_count} reactions, {library.synthon_count} synthons",
            ),
            ("surrogate, held-out R2", ", ".join(f"{name} {value:.3f}" for name, value in held_out.items())),
            ("index against surrogate, R2", ", ".join(f"{name} {value:.3f}" for name, value in fidelity.items())),
            ("products within the limits", f"{int(count.count):,} ({count.fraction:.1%}), counted exactly"),
            (
                "time of the query",
                f"{summary.search_seconds * 1000:.0f} ms, and {summary.assembly_seconds:.1f} s for the SMILES",
            ),
            ("products touched", f"{touched:.2%}"),
            ("best hit", f"{best.smiles} (predicted log P {best.predictions['logp']:.2f})"),
            ("hits within the limits by RDKit", f"{truth.hits_feasible:.1%}"),
            (f"recall of the true top {_TOP} in {_RETURNED} of {LABELLED_PRODUCTS:,} labelled", truth.recall_text),
        ],
        passed=passed,
    )


def _search(client: Client, index: str, query: apex_pb2.Query) -> tuple[dict[str, list[str]], apex_pb2.SearchSummary]:
    hits: dict[str, list[str]] = {"product": [], "smiles": []}
    summary = apex_pb2.SearchSummary()
    for update in client.stub.SearchLibrary(apex_pb2.SearchLibraryRequest(index=index, query=query)):
        if update.HasField("hits"):
            table = from_arrow_batch(update.hits)
            for name in hits:
                hits[name] += table.column(name).to_pylist()
        elif update.HasField("summary"):
            summary = update.summary
    return hits, summary


def _delete(client: Client, name: str) -> None:
    if "/indexes/" in name:
        client.stub.DeleteIndex(apex_pb2.DeleteIndexRequest(name=name))
    elif name.startswith("surrogates/"):
        client.stub.DeleteSurrogate(apex_pb2.DeleteSurrogateRequest(name=name))
    else:
        client.stub.DeleteLibrary(apex_pb2.DeleteLibraryRequest(name=name))


class _Truth:
    """RDKit's view of the hits and of a random part of the library, and the index's ranking of that part."""

    def __init__(self, client: Client, index: str, hits: list[str], constraints: list[apex_pb2.Constraint]) -> None:
        from lyceum_apex.chemistry import properties
        from lyceum_apex.library import ProductBatch, SynthonLibrary
        from lyceum_base.stats import clopper_pearson
        from lyceum_zoo import path

        logp, mw, tpsa = properties([smiles for smiles in hits if smiles], ("logp", "mw", "tpsa")).T
        self.hit_mean = float(logp.mean())
        self.hits_feasible = float(((mw <= MW) & (tpsa <= TPSA)).mean())

        folder = path("real1m")
        library = SynthonLibrary.from_tsv(folder / "synthon_space_1M.tsv", folder / "synthon_space_1M.reactions.tsv")
        batch = library.sample(LABELLED_PRODUCTS, seed=20, stratify=False)
        smiles = library.products_smiles(batch)
        kept = np.array([text is not None for text in smiles])
        batch = ProductBatch(batch.r[kept], batch.s[kept])
        logp, mw, tpsa = properties([text for text in smiles if text is not None], ("logp", "mw", "tpsa")).T
        self.random_mean = float(logp.mean())
        names = [
            library.product_name(int(r), [int(g) for g in s if g >= 0]) for r, s in zip(batch.r, batch.s, strict=True)
        ]
        request = apex_pb2.ScoreProductsRequest(index=index, products=names, constraints=constraints)
        scored = client.stub.ScoreProducts(request)
        predicted = from_tensor(scored.values)[:, list(scored.properties).index("logp")]
        returned = np.lexsort([-predicted, -from_tensor(scored.slack)])[:_RETURNED]
        feasible = np.flatnonzero((mw <= MW) & (tpsa <= TPSA))
        top = feasible[np.argsort(-logp[feasible], kind="stable")[:_TOP]]
        found = int(np.isin(top, returned).sum())
        low, high = clopper_pearson(found, len(top))
        self.recall = found / len(top)
        self.recall_text = f"{self.recall:.2f} (95% interval {float(low):.2f} to {float(high):.2f})"
