"""Libraries, surrogates and indexes as resources whose content is one artifact each.

Loaded ones are kept in memory by the hash of their content, so repeated queries of an index do not read it again.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf import empty_pb2
from google.protobuf.message import Message

from lyceum.apex.v1 import apex_pb2
from lyceum.common.v1 import common_pb2
from lyceum_apex.errors import FieldError, VersionError
from lyceum_runtime.definition import Call
from lyceum_runtime.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

if TYPE_CHECKING:
    from lyceum_apex.index import ApexIndex
    from lyceum_apex.library import SynthonLibrary
    from lyceum_apex.surrogate import Surrogate

T = TypeVar("T")

SAFETENSORS = "application/vnd.lyceum.safetensors"
PARQUET = "application/vnd.apache.parquet"

_KEPT = 8


def list_libraries(request: apex_pb2.ListLibrariesRequest, call: Call) -> apex_pb2.ListLibrariesResponse:
    """One page of libraries."""
    known = ("display_name", "reaction_count", "synthon_count", "create_time")
    page = call.resources.list("libraries", apex_pb2.Library, **_paging(request), fields=known)
    return apex_pb2.ListLibrariesResponse(
        libraries=page.items, next_page_token=page.next_page_token, total_size=page.total_size
    )


def list_surrogates(request: apex_pb2.ListSurrogatesRequest, call: Call) -> apex_pb2.ListSurrogatesResponse:
    """One page of surrogates."""
    known = ("display_name", "create_time")
    page = call.resources.list("surrogates", apex_pb2.Surrogate, **_paging(request), fields=known)
    return apex_pb2.ListSurrogatesResponse(
        surrogates=page.items, next_page_token=page.next_page_token, total_size=page.total_size
    )


def list_indexes(request: apex_pb2.ListIndexesRequest, call: Call) -> apex_pb2.ListIndexesResponse:
    """One page of a library's indexes."""
    known = ("display_name", "create_time")
    page = call.resources.list(f"{request.parent}/indexes", apex_pb2.Index, **_paging(request), fields=known)
    return apex_pb2.ListIndexesResponse(
        indexes=page.items, next_page_token=page.next_page_token, total_size=page.total_size
    )


def _paging(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("page_size", "page_token", "filter", "order_by")}


def deleter(kind: type[Message]) -> Callable[[Any, Call], empty_pb2.Empty]:
    def delete(request: Any, call: Call) -> empty_pb2.Empty:
        call.resources.delete(request.name, kind, etag=request.etag)
        return empty_pb2.Empty()

    return delete


def require_free(call: Call, name: str, kind: type[Message]) -> None:
    """Refuses a taken name before the work rather than after it."""
    try:
        call.resources.get(name, kind)
    except NotFound:
        return
    raise AlreadyExists(name)


_loaded: OrderedDict[str, Any] = OrderedDict()
_loaded_lock = threading.Lock()


def _load(call: Call, ref: common_pb2.ArtifactRef, read: Callable[[bytes], T]) -> T:
    """What an artifact holds, from memory if it was read lately. The caller has shown that the tenant owns it."""
    with _loaded_lock:
        if ref.sha256 in _loaded:
            _loaded.move_to_end(ref.sha256)
            kept: T = _loaded[ref.sha256]
            return kept
    value = read(call.artifacts.read_bytes(ref))
    with _loaded_lock:
        _loaded[ref.sha256] = value
        while len(_loaded) > _KEPT:
            _loaded.popitem(last=False)
    return value


def load_library(call: Call, name: str) -> "SynthonLibrary":
    from lyceum_apex.library import SynthonLibrary

    return _load(call, call.resources.get(name, apex_pb2.Library).artifact, SynthonLibrary.from_bytes)


def load_surrogate(call: Call, name: str) -> "Surrogate":
    from lyceum_apex.surrogate import Surrogate

    return _load(call, call.resources.get(name, apex_pb2.Surrogate).artifact, Surrogate.from_bytes)


def load_index(call: Call, name: str) -> "ApexIndex":
    from lyceum_apex.index import ApexIndex

    return _load(call, call.resources.get(name, apex_pb2.Index).artifact, ApexIndex.from_bytes)


@contextmanager
def fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Turns the core's complaint about its argument into one about the request's field."""
    try:
        yield
    except FieldError as error:
        raise InvalidArgument((rename(error.field), error.reason)) from error
    except VersionError as error:
        raise FailedPrecondition(str(error), reason="VERSION") from error
