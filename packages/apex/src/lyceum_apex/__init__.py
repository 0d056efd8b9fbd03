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
    from lyceum_apex.active import (
        ActivePlan,
        ActiveResult,
        ActiveSearch,
        ActiveState,
        active_search,
        iter_active_search,
    )
    from lyceum_apex.budget import ListSize, list_size
    from lyceum_apex.chemistry import properties
    from lyceum_apex.contributions import ContributionTable, Explanation, Interactions
    from lyceum_apex.counting import CountResult, count
    from lyceum_apex.docking import DockingError, Receptor, VinaOracle
    from lyceum_apex.errors import AssemblyError, FieldError, VersionError
    from lyceum_apex.factorizer import Factorizer
    from lyceum_apex.filters import SynthonFilter
    from lyceum_apex.grids import Axis
    from lyceum_apex.index import ApexIndex
    from lyceum_apex.interactions import LegModel, fit_additive_and_interactions, fit_interactions
    from lyceum_apex.library import ProductBatch, SynthonLibrary
    from lyceum_apex.quantiles import Distribution
    from lyceum_apex.quantized import search_quantized
    from lyceum_apex.query import Hits, Query, QueryError, Quotas
    from lyceum_apex.search import iter_search, merge_hits
    from lyceum_apex.surrogate import Probe, Surrogate

_HOMES = {
    "ActivePlan": "active",
    "ActiveResult": "active",
    "ActiveSearch": "active",
    "ActiveState": "active",
    "ApexIndex": "index",
    "AssemblyError": "errors",
    "Axis": "grids",
    "ContributionTable": "contributions",
    "CountResult": "counting",
    "Distribution": "quantiles",
    "DockingError": "docking",
    "Explanation": "contributions",
    "Factorizer": "factorizer",
    "FieldError": "errors",
    "Hits": "query",
    "Interactions": "contributions",
    "LegModel": "interactions",
    "ListSize": "budget",
    "Probe": "surrogate",
    "ProductBatch": "library",
    "Query": "query",
    "QueryError": "query",
    "Quotas": "query",
    "Receptor": "docking",
    "Surrogate": "surrogate",
    "SynthonFilter": "filters",
    "SynthonLibrary": "library",
    "VersionError": "errors",
    "VinaOracle": "docking",
    "active_search": "active",
    "count": "counting",
    "fit_additive_and_interactions": "interactions",
    "fit_interactions": "interactions",
    "iter_active_search": "active",
    "iter_search": "search",
    "list_size": "budget",
    "merge_hits": "search",
    "properties": "chemistry",
    "search_quantized": "quantized",
}

__all__ = [
    "ActivePlan",
    "ActiveResult",
    "ActiveSearch",
    "ActiveState",
    "ApexIndex",
    "AssemblyError",
    "Axis",
    "ContributionTable",
    "CountResult",
    "Distribution",
    "DockingError",
    "Explanation",
    "Factorizer",
    "FieldError",
    "Hits",
    "Interactions",
    "LegModel",
    "ListSize",
    "Probe",
    "ProductBatch",
    "Query",
    "QueryError",
    "Quotas",
    "Receptor",
    "Surrogate",
    "SynthonFilter",
    "SynthonLibrary",
    "VersionError",
    "VinaOracle",
    "active_search",
    "count",
    "fit_additive_and_interactions",
    "fit_interactions",
    "iter_active_search",
    "iter_search",
    "list_size",
    "merge_hits",
    "properties",
    "search_quantized",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
