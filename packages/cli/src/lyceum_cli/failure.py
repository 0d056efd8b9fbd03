"""A failed call as one line and, where fields were wrong, a small table.

The reading side of `lyceum_runtime.errors`: a `google.rpc.Status` with its details, from a call or from an operation.
"""

from typing import TYPE_CHECKING, Any

from google.protobuf import any_pb2, json_format
from google.rpc import code_pb2, error_details_pb2, status_pb2

from lyceum_cli.output import CliError, note, one_line, stderr, table

if TYPE_CHECKING:
    import grpc

_DETAILS = (
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
    error_details_pb2.PreconditionFailure,
    error_details_pb2.QuotaFailure,
    error_details_pb2.ResourceInfo,
    error_details_pb2.ErrorInfo,
    error_details_pb2.Help,
    error_details_pb2.LocalizedMessage,
    error_details_pb2.RequestInfo,
)


class CallFailed(CliError):
    """A call or an operation that ended with a `google.rpc.Status`."""

    def __init__(self, status: status_pb2.Status, hint: str = "") -> None:
        super().__init__(f"{code_name(status.code)}: {status.message}", hint or _hint(status))
        self.status = status

    def as_json(self) -> dict[str, Any]:
        details = []
        for box in self.status.details:
            detail = _unpack(box)
            body = {} if detail is None else json_format.MessageToDict(detail, preserving_proto_field_name=True)
            details.append({"@type": box.type_url, **body})
        return {
            "code": code_name(self.status.code),
            "message": self.status.message,
            "hint": self.hint,
            "details": details,
        }

    def show(self) -> None:
        violations = [
            (violation.field, violation.description)
            for detail in self._details(error_details_pb2.BadRequest)
            for violation in detail.field_violations
        ]
        if violations:
            fields = "a field" if len(violations) == 1 else f"{len(violations)} fields"
            note(f"error: {one_line(f'INVALID_ARGUMENT: {fields} of the request refused', self.hint)}", style="red")
            table(("field", "what is wrong"), violations, console=stderr())
            return
        super().show()
        rows = [
            (violation.type, violation.subject or "-", violation.description)
            for detail in self._details(error_details_pb2.PreconditionFailure)
            for violation in detail.violations
        ]
        if rows:
            table(("reason", "subject", "description"), rows, console=stderr())

    def _details(self, kind: type[Any]) -> list[Any]:
        found = [_unpack(box) for box in self.status.details]
        return [detail for detail in found if isinstance(detail, kind)]


def of_rpc_error(error: "grpc.RpcError", target: str, service: str) -> CliError:
    """The error of a call to `service` (its short name, or empty) at `target`, for the user."""
    from lyceum_runtime.services import load_services

    status = _status_of(error)
    if status.code == code_pb2.UNAVAILABLE and not status.details and _not_connected(status.message):
        known = service in load_services()
        start = f"start it with `lyceum up {service}`" if known else "start it, or give another --target"
        unreachable = status_pb2.Status(code=status.code, message=f"no server answers at {target}")
        return CallFailed(unreachable, start)
    return CallFailed(status)


def code_name(code: int) -> str:
    """`NOT_FOUND` for 5; a code from the future keeps its number."""
    return str(code_pb2.Code.Name(code)) if code in code_pb2.Code.values() else f"CODE_{code}"


def _status_of(error: "grpc.RpcError") -> status_pb2.Status:
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the details disagree with the call's own code: the code is what the server meant
        status = None
    if status is not None:
        return status
    return status_pb2.Status(code=error.code().value[0], message=error.details() or "")


def _not_connected(message: str) -> bool:
    words = ("failed to connect", "connection refused", "dns resolution failed", "name resolution", "no such file")
    return any(word in message.lower() for word in words)


def _unpack(box: any_pb2.Any) -> Any:
    for kind in _DETAILS:
        if box.Is(kind.DESCRIPTOR):
            detail = kind()
            box.Unpack(detail)
            return detail
    return None


def _hint(status: status_pb2.Status) -> str:
    for box in status.details:
        detail = _unpack(box)
        if isinstance(detail, error_details_pb2.RetryInfo):
            delay = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
            return f"try again in {delay:g} s"
    hints = {
        code_pb2.INVALID_ARGUMENT: "`--describe` shows what the request may hold",
        code_pb2.DEADLINE_EXCEEDED: "give it longer with --timeout",
        code_pb2.UNAVAILABLE: "try again; `lyceum health` tells what is serving",
    }
    return hints.get(status.code, "")
