"""`lyceum artifacts`: put files into the artifact store, get them back, list them, and sweep what nothing refers to."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyceum_cli.connection import Target, address_of, complete_service, entry_of
from lyceum_cli.output import CliError, Json, UsageError, emit, note, table

if TYPE_CHECKING:
    from lyceum.artifacts.v1 import artifacts_pb2
    from lyceum_runtime.client import Client

READY_SECONDS = 5.0
SAFE_GRACE = timedelta(hours=1)
"""The least grace that needs no --force: an upload that no request has named yet is younger than this."""

_MEDIA_TYPES = {
    ".arrow": "application/vnd.apache.arrow.file",
    ".npy": "application/x-npy",
    ".parquet": "application/vnd.apache.parquet",
    ".safetensors": "application/vnd.safetensors",
}

app = typer.Typer(no_args_is_help=True, help="Put, get, list and sweep artifacts: files named by their SHA-256.")

Service = Annotated[
    str | None,
    typer.Option(
        "--service",
        "-s",
        help="Service whose server to ask. Default: the first that answers.",
        autocompletion=complete_service,
        show_default=False,
    ),
]


@app.command()
def put(
    file: Annotated[Path, typer.Argument(help="File to upload.", exists=True, dir_okay=False, readable=True)],
    media_type: Annotated[
        str, typer.Option("--media-type", help="Such as application/vnd.apache.parquet. Default: by the file's name.")
    ] = "",
    service: Service = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Upload a file and print its reference, as requests take it."""
    with _client(service, target) as client:
        emit(_ref_json(client.upload(file, media_type=media_type or _media_type(file))), pretty=not as_json)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="SHA-256 or artifacts/SHA-256.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write. Default: standard output, into a pipe.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    service: Service = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Download an artifact and verify its checksum."""
    sha256 = name.removeprefix("artifacts/")
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise UsageError(f"{name} is no SHA-256 (64 hexadecimal digits)", "`lyceum artifacts ls` shows them")
    if out is None and (as_json or sys.stdout.isatty()):
        raise UsageError("an artifact is bytes, not text", "give a file with --out, or pipe it")
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists", "give --force to replace it")
    with _client(service, target) as client:
        if out is None:
            sys.stdout.buffer.write(client.read(sha256))
            sys.stdout.buffer.flush()
            return
        try:
            client.download(sha256, out)
        except OSError as error:
            raise CliError(f"cannot write {out}: {error.strerror}", "give another --out") from None
    size = out.stat().st_size
    if as_json:
        emit({"sha256": sha256, "size_bytes": str(size), "path": str(out)})
    else:
        note(f"{out}: {_size(size)}", style="none")


@app.command("ls")
def list_artifacts(
    filter_text: Annotated[
        str, typer.Option("--filter", help="AIP-160: size_bytes > 1000, on fields media_type, size_bytes.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most artifacts to show.")] = 50,
    service: Service = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """List artifacts."""
    from lyceum.artifacts.v1 import artifacts_pb2

    found: list[artifacts_pb2.Artifact] = []
    token = ""
    with _client(service, target) as client:
        while len(found) < limit:
            request = artifacts_pb2.ListArtifactsRequest(
                page_size=min(limit - len(found), 1000), page_token=token, filter=filter_text
            )
            page = client.artifacts.ListArtifacts(request)
            found.extend(page.artifacts)
            token = page.next_page_token
            if not token:
                break
    if as_json:
        emit({"artifacts": [_ref_json(artifact.ref) for artifact in found]})
        return
    rows = [(a.ref.sha256, _size(a.ref.size_bytes), a.ref.media_type, _stored(a)) for a in found]
    table(("sha256", "size", "media type", "stored"), rows)
    if token:
        note(f"there are more than {limit}; --limit shows more")


@app.command()
def gc(
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Keep what was put within this time, as 7d, 12h or 30m.")
    ] = "7d",
    force: Annotated[bool, typer.Option("--force", help="Allow a grace under an hour.")] = False,
    as_json: Json = False,
) -> None:
    """Remove artifacts of the local state directory that no resource and no operation refers to.

    Services may run meanwhile: what is referred to stays, and what was put within the grace time stays.
    """
    keep = _duration(grace)
    if keep < SAFE_GRACE and not force:
        raise UsageError(
            f"a grace of {grace} would remove uploads that a request is about to name",
            "give at least 1h, or --force while nobody uploads",
        )
    from sqlalchemy.exc import SQLAlchemyError

    from lyceum_runtime.artifacts import ArtifactStore
    from lyceum_runtime.database import Database
    from lyceum_runtime.settings import load_settings

    settings = load_settings()
    if not settings.state_dir.is_dir():
        raise CliError(f"there is no state in {settings.state_dir}", "set LYCEUM_STATE_DIR, or start with `lyceum up`")
    database = Database(settings.database_url)
    try:
        swept = ArtifactStore(settings, database).gc(keep)
    except SQLAlchemyError as error:
        reason = str(error.__cause__ or error)
        raise CliError(f"the database of {settings.state_dir} failed: {reason}", "restore it from a backup") from None
    finally:
        database.close()
    if as_json:
        emit({"artifacts": swept.artifacts, "blobs": swept.blobs, "bytes": swept.bytes})
    else:
        note(f"removed {swept.artifacts} artifacts, {swept.blobs} files, {_size(swept.bytes)}", style="none")


@contextmanager
def _client(service: str | None, target: str | None) -> Iterator["Client"]:
    """A client of the server asked for, or of the first one that answers."""
    from lyceum_cli.health import DOWN, check
    from lyceum_runtime.client import Client
    from lyceum_runtime.services import load_services

    services = load_services()
    if service is not None:
        entry = entry_of(service)
    elif target is not None:
        entry = next(iter(services.values()))  # artifacts are on every server, whichever service it is
    else:
        rows = check([(entry, address_of(entry)) for entry in services.values()])
        up = [row.service for row in rows if row.health != DOWN]
        if not up:
            raise CliError("no service answers", "start them with `lyceum up`, or give --target HOST:PORT")
        entry = services[up[0]]
    with Client(entry, target=target) as client:
        yield client.ready(READY_SECONDS)


def _duration(text: str) -> timedelta:
    units = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
    match = re.fullmatch(r"(\d{1,6})([dhms])", text)
    if match is None:
        raise UsageError(f"{text} is no time", "write it as 7d, 12h, 30m or 90s")
    return timedelta(**{units[match[2]]: int(match[1])})


def _media_type(file: Path) -> str:
    import mimetypes

    return _MEDIA_TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"


def _ref_json(ref: Any) -> dict[str, Any]:
    from google.protobuf import json_format

    return json_format.MessageToDict(ref, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _stored(artifact: "artifacts_pb2.Artifact") -> str:
    return artifact.create_time.ToDatetime().strftime("%Y-%m-%d %H:%M UTC")


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    power, unit = next(((n, u) for n, u in ((1, "KiB"), (2, "MiB")) if count < 1024 ** (n + 1)), (3, "GiB"))
    return f"{count / 1024**power:.1f} {unit}"
