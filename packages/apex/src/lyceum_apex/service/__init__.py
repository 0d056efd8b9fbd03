"""ApexService: decode a request, call the core, encode the answer; one module for each part of the API."""

from lyceum.apex.v1 import apex_pb2
from lyceum_apex.service import active, building, describing, importing, searching, storing
from lyceum_runtime.definition import LongMethod, ServiceDefinition


def definition() -> ServiceDefinition:
    """ApexService as the runtime serves it."""
    return ServiceDefinition(
        name="apex",
        service="lyceum.apex.v1.ApexService",
        methods={
            "GetLibrary": lambda request, call: call.resources.get(request.name, apex_pb2.Library),
            "ListLibraries": storing.list_libraries,
            "DeleteLibrary": storing.deleter(apex_pb2.Library),
            "GetSurrogate": lambda request, call: call.resources.get(request.name, apex_pb2.Surrogate),
            "ListSurrogates": storing.list_surrogates,
            "DeleteSurrogate": storing.deleter(apex_pb2.Surrogate),
            "GetIndex": lambda request, call: call.resources.get(request.name, apex_pb2.Index),
            "ListIndexes": storing.list_indexes,
            "DeleteIndex": storing.deleter(apex_pb2.Index),
            "SearchLibrary": searching.search_library,
            "CountMatches": describing.count_matches,
            "DescribeDistribution": describing.describe_distribution,
            "ScoreProducts": searching.score_products,
            "ExplainProduct": searching.explain_product,
            "RunActiveSearch": active.run_active_search,
        },
        long_methods={
            "ImportLibrary": LongMethod(
                request=apex_pb2.ImportLibraryRequest,
                response=apex_pb2.Library,
                check=importing.check_import,
                run=importing.run_import,
                finish=importing.finish_import,
                seeded=True,
            ),
            "TrainSurrogate": LongMethod(
                request=apex_pb2.TrainSurrogateRequest,
                response=apex_pb2.Surrogate,
                check=building.check_train,
                run=building.run_train,
                finish=building.finish_train,
                seeded=True,
            ),
            "AddProbe": LongMethod(
                request=apex_pb2.AddProbeRequest,
                response=apex_pb2.Surrogate,
                check=building.check_probe,
                run=building.run_probe,
                finish=building.finish_probe,
            ),
            "BuildIndex": LongMethod(
                request=apex_pb2.BuildIndexRequest,
                response=apex_pb2.Index,
                check=building.check_build,
                run=building.run_build,
                finish=building.finish_build,
                seeded=True,
            ),
            "StartSearch": LongMethod(
                request=apex_pb2.StartSearchRequest,
                response=apex_pb2.SearchResult,
                check=searching.check_search,
                run=searching.run_search,
                finish=searching.finish_search,
            ),
        },
    )
