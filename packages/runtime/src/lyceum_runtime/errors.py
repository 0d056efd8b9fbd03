"""Errors that travel: each is one `google.rpc.Status` with the details a client can act on.

A service raises these; the server turns them into the call's status, an operation stores them as its error. An
exception of any other type becomes INTERNAL with a reference to the log, and its text never reaches the wire.
"""

from collections.abc import Iterable, Mapping

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

_ELLIPSIS = " ..."
_LEAST_TEXT_BYTES = 128  # a shorter text tells too little; then rather fewer of them


class ServiceError(Exception):
    """Base of all errors with a status: `code` is a `google.rpc.Code`, `details` are `google.rpc` detail messages."""

    code: int = code_pb2.INTERNAL

    def __init__(self, message: str, *, details: Iterable[Message] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)

    def status(self) -> status_pb2.Status:
        """The error as `google.rpc.Status`, the form in which it is sent and stored."""
        packed = []
        for detail in self.details:
            box = any_pb2.Any()
            box.Pack(detail)
            packed.append(box)
        return status_pb2.Status(code=self.code, message=self.message, details=packed)


class InvalidArgument(ServiceError):
    """The request itself is wrong: INVALID_ARGUMENT with one field violation for each wrong field.

    `violations` are (field path, description) pairs; a path is written as in the proto: `constraints[2].lower`.
    """

    code = code_pb2.INVALID_ARGUMENT

    def __init__(self, *violations: tuple[str, str]) -> None:
        self.violations = violations
        bad = error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=field, description=text) for field, text in violations
            ]
        )
        super().__init__("; ".join(f"{field}: {text}" for field, text in violations), details=[bad])


class NotFound(ServiceError):
    """No such resource for this tenant: NOT_FOUND with `ResourceInfo`."""

    code = code_pb2.NOT_FOUND

    def __init__(self, name: str) -> None:
        info = error_details_pb2.ResourceInfo(resource_name=name)
        super().__init__(f"{name} does not exist", details=[info])


class AlreadyExists(ServiceError):
    """A client-chosen id is taken: ALREADY_EXISTS with `ResourceInfo`."""

    code = code_pb2.ALREADY_EXISTS

    def __init__(self, name: str) -> None:
        info = error_details_pb2.ResourceInfo(resource_name=name)
        super().__init__(f"{name} exists already; delete it first or choose another id", details=[info])


class FailedPrecondition(ServiceError):
    """The request is well formed but the state does not allow it: FAILED_PRECONDITION with the reason."""

    code = code_pb2.FAILED_PRECONDITION

    def __init__(self, message: str, *, reason: str, subject: str = "") -> None:
        violation = error_details_pb2.PreconditionFailure.Violation(type=reason, subject=subject, description=message)
        super().__init__(message, details=[error_details_pb2.PreconditionFailure(violations=[violation])])


class Aborted(ServiceError):
    """Another writer came first (etag mismatch, second writer): ABORTED."""

    code = code_pb2.ABORTED


class ResourceExhausted(ServiceError):
    """The server cannot take this now (`retry_after_seconds`) or at all (`reason` TOO_LARGE): RESOURCE_EXHAUSTED."""

    code = code_pb2.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_seconds: float | None = None, reason: str = "TOO_LARGE") -> None:
        detail: Message
        if retry_after_seconds is None:
            detail = error_details_pb2.ErrorInfo(reason=reason, domain="lyceum")
        else:
            nanos = round(retry_after_seconds * 1e9)
            delay = duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
            detail = error_details_pb2.RetryInfo(retry_delay=delay)
        super().__init__(message, details=[detail])


class PermissionDenied(ServiceError):
    """The caller may not do this: PERMISSION_DENIED."""

    code = code_pb2.PERMISSION_DENIED


class Unavailable(ServiceError):
    """The server is stopping or a dependency is away; trying again may help: UNAVAILABLE."""

    code = code_pb2.UNAVAILABLE


class Unimplemented(ServiceError):
    """The RPC is not built: UNIMPLEMENTED."""

    code = code_pb2.UNIMPLEMENTED


class Internal(ServiceError):
    """A fault of the server, known by its reference only: INTERNAL."""

    code = code_pb2.INTERNAL


class Cancelled(ServiceError):
    """The caller cancelled the work: CANCELLED."""

    code = code_pb2.CANCELLED


class DeadlineExceeded(ServiceError):
    """The deadline passed before the work was done: DEADLINE_EXCEEDED."""

    code = code_pb2.DEADLINE_EXCEEDED


class ConfigurationError(Exception):
    """A setting or the surroundings stop the start; the message is one line that says what to change. Never on the
    wire.
    """


def fitted(status: status_pb2.Status, *, text_bytes: int, status_bytes: int) -> status_pb2.Status:
    """A copy of `status` for a place with room for `status_bytes` only, such as the headers of a call.

    First the texts in it are shortened, and a shortened one ends in " ..."; if that is not enough, the last violations
    are left out, and in the end whole details. What is not known of :mod:`google.rpc` is left out first.
    """
    message = _shortened(status.message, text_bytes)
    details = list(from_status(status).details)
    limit = text_bytes
    while True:
        packed = ServiceError(message, details=details).status()
        packed.code = status.code
        if not details or packed.ByteSize() <= status_bytes:
            return packed
        if limit > _LEAST_TEXT_BYTES:
            limit //= 2
            for detail in details:
                _shorten(detail, limit)
        elif not _drop_last(details[-1]):
            details.pop()


def _shortened(text: str, limit: int) -> str:
    """`text` of at most `limit` bytes in UTF-8, and an ellipsis."""
    data = text.encode()
    return text if len(data) <= limit else data[:limit].decode(errors="ignore").removesuffix(_ELLIPSIS) + _ELLIPSIS


def _shorten(message: Message, limit: int) -> None:
    """Shortens every text in a message, at any depth."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, _shortened(value, limit))
        elif field.type == field.TYPE_MESSAGE:
            for part in value if field.is_repeated else (value,):
                if isinstance(part, Message):
                    _shorten(part, limit)


def _drop_last(message: Message) -> bool:
    """Takes the last items, about an eighth, off a detail's list; False if that would leave none."""
    for field, value in message.ListFields():
        if field.is_repeated and not isinstance(value, Mapping) and len(value) > 1:
            del value[-max(1, len(value) // 8) :]
            return True
    return False


def from_code(code: int, message: str, *, details: Iterable[Message] = ()) -> ServiceError:
    """The ServiceError of a `google.rpc.Code` with the given details, for a status that came over the wire."""
    error = ServiceError.__new__(_CLASSES.get(code, ServiceError))
    ServiceError.__init__(error, message, details=details)
    error.code = code
    return error


def from_status(status: status_pb2.Status) -> ServiceError:
    """The ServiceError that a `google.rpc.Status` describes; details of unknown types are left out."""
    details: list[Message] = []
    for box in status.details:
        kind = _DETAILS.get(box.TypeName())
        if kind is not None:
            detail = kind()
            box.Unpack(detail)
            details.append(detail)
    error = from_code(status.code, status.message, details=details)
    if isinstance(error, InvalidArgument):
        error.violations = tuple(
            (violation.field, violation.description)
            for detail in details
            if isinstance(detail, error_details_pb2.BadRequest)
            for violation in detail.field_violations
        )
    return error


_CLASSES: dict[int, type[ServiceError]] = {kind.code: kind for kind in ServiceError.__subclasses__()}
_DETAILS: dict[str, type[Message]] = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (
        error_details_pb2.BadRequest,
        error_details_pb2.ErrorInfo,
        error_details_pb2.Help,
        error_details_pb2.LocalizedMessage,
        error_details_pb2.PreconditionFailure,
        error_details_pb2.QuotaFailure,
        error_details_pb2.RequestInfo,
        error_details_pb2.ResourceInfo,
        error_details_pb2.RetryInfo,
    )
}
