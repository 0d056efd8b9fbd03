"""APEX: approximate-but-exhaustive search of combinatorial synthesis libraries.

    library = SynthonLibrary.from_tsv(synthons).with_weight("mw")
    surrogate = Surrogate.fit(smiles, values, ["logp", "tpsa"])
    index = ApexIndex.build(library, surrogate, Factorizer.fit(library, surrogate))
    hits = index.search(Query(objective="logp", k=1000, constraints={"mw": (None, 500), "tpsa": (None, 90)}))

Names are loaded when they are first used, so that importing the package is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lyceum_apex.chemistry import properties
    from lyceum_apex.contributions import ContributionTable, Explanation, Interactions
    from lyceum_apex.counting import CountResult, count
    from lyceum_apex.errors import AssemblyError, FieldError, VersionError
    from lyceum_apex.factorizer import Factorizer
    from lyceum_apex.index import ApexIndex
    from lyceum_apex.interactions import LegModel, fit_additive_and_interactions, fit_interactions
    from lyceum_apex.library import ProductBatch, SynthonLibrary
    from lyceum_apex.query import Hits, Query, QueryError
    from lyceum_apex.search import iter_search, merge_hits
    from lyceum_apex.surrogate import Probe, Surrogate

_HOMES = {
    "ApexIndex": "index",
    "AssemblyError": "errors",
    "ContributionTable": "contributions",
    "CountResult": "counting",
    "Explanation": "contributions",
    "Factorizer": "factorizer",
    "FieldError": "errors",
    "Hits": "query",
    "Interactions": "contributions",
    "LegModel": "interactions",
    "Probe": "surrogate",
    "ProductBatch": "library",
    "Query": "query",
    "QueryError": "query",
    "Surrogate": "surrogate",
    "SynthonLibrary": "library",
    "VersionError": "errors",
    "count": "counting",
    "fit_additive_and_interactions": "interactions",
    "fit_interactions": "interactions",
    "iter_search": "search",
    "merge_hits": "search",
    "properties": "chemistry",
}

__all__ = [
    "ApexIndex",
    "AssemblyError",
    "ContributionTable",
    "CountResult",
    "Explanation",
    "Factorizer",
    "FieldError",
    "Hits",
    "Interactions",
    "LegModel",
    "Probe",
    "ProductBatch",
    "Query",
    "QueryError",
    "Surrogate",
    "SynthonLibrary",
    "VersionError",
    "count",
    "fit_additive_and_interactions",
    "fit_interactions",
    "iter_search",
    "merge_hits",
    "properties",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
