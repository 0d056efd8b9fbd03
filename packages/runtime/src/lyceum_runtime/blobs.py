"""Immutable bytes by key on any fsspec file system: written whole or not at all, verified when read.

A blob is staged in a temporary file while its SHA-256 is computed, flushed to the disk, and then put under its key by
one rename (on a local directory) or one upload (elsewhere). A process that dies in between leaves a temporary file and
nothing else.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from lyceum_runtime.database import StateError

CHUNK_BYTES = 1 << 20
_STAGING = "staging"


class DamagedBlob(Exception):
    """A stored blob is missing or its bytes do not have the checksum under which they were stored."""


@dataclass(frozen=True)
class Stored:
    """One stored object: key, length and age."""

    key: str
    size_bytes: int
    age_seconds: float


class Blobs:
    """A folder of blobs at an fsspec URL. A path without a scheme is a local directory, created for its owner only.

    Raises:
        StateError: the URL's file system is not installed, or the directory cannot be written.
    """

    def __init__(self, url: str) -> None:
        # fsspec takes 50 ms to import, which a local directory does not need.
        self.local: Path | None = Path(url.removeprefix("file://")).absolute() if _is_local(url) else None
        self._fs: Any = None
        if self.local is None:
            import fsspec

            try:
                self._fs, root = fsspec.core.url_to_fs(url)
            except (ImportError, ValueError) as error:
                raise StateError(
                    f"artifact store {url}: {error}; set LYCEUM_ARTIFACTS_URL to a store that can be reached"
                ) from None
            self._root = str(root).rstrip("/")
            return
        try:
            (self.local / _STAGING).mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.local / _STAGING):
                pass
        except OSError as error:
            raise StateError(
                f"artifact store {self.local}: {error.strerror}; set LYCEUM_ARTIFACTS_URL to one that can be written"
            ) from None

    @contextlib.contextmanager
    def stage(self, chunks: Iterable[bytes]) -> Iterator["Staged"]:
        """Reads all chunks into a temporary file, one at a time; the file is gone after the block unless it was
        committed.
        """
        folder = None if self.local is None else self.local / _STAGING
        handle, name = tempfile.mkstemp(dir=folder)
        path = Path(name)
        try:
            digest = hashlib.sha256()
            size = 0
            with os.fdopen(handle, "wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield Staged(path, digest.hexdigest(), size)
        finally:
            path.unlink(missing_ok=True)

    def commit(self, staged: "Staged", key: str) -> None:
        """Puts the staged bytes under `key`, replacing what is there."""
        if self.local is None:
            self._fs.makedirs(self._remote(key).rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(staged.path), self._remote(key))
            return
        target = self.local / key
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(staged.path, 0o400)  # immutable, also for a library that was given the path
        os.replace(staged.path, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)

    def size(self, key: str) -> int | None:
        """Length of a blob in bytes, or None if there is none."""
        try:
            return (
                (self.local / key).stat().st_size if self.local is not None else int(self._fs.size(self._remote(key)))
            )
        except FileNotFoundError:
            return None

    def open(self, key: str) -> BinaryIO:
        """A blob for reading, in bounded memory.

        Raises:
            DamagedBlob: there is none.
        """
        try:
            return cast(
                BinaryIO,
                open(self.local / key, "rb") if self.local is not None else self._fs.open(self._remote(key), "rb"),
            )
        except FileNotFoundError:
            raise DamagedBlob(f"{key} is missing") from None

    def chunks(self, key: str, sha256: str) -> Iterator[bytes]:
        """A blob's bytes in chunks of 1 MiB.

        Raises:
            DamagedBlob: there is none, or, after the last chunk, the bytes do not have this checksum.
        """
        digest = hashlib.sha256()
        with self.open(key) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
        if digest.hexdigest() != sha256:
            raise DamagedBlob(f"{key} does not have the checksum {sha256}")

    def delete(self, key: str) -> None:
        """Deletes a blob, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            if self.local is not None:
                (self.local / key).unlink()
            else:
                self._fs.rm_file(self._remote(key))

    def delete_folder(self, prefix: str) -> None:
        """Deletes everything below `prefix`."""
        for stored in self.list(prefix):
            self.delete(stored.key)
        if self.local is not None:
            with contextlib.suppress(OSError):  # it is not there, or a blob arrived meanwhile
                (self.local / prefix).rmdir()

    def list(self, prefix: str) -> Iterator[Stored]:
        """All blobs below `prefix`, in no order."""
        now = time.time()
        if self.local is not None:
            for folder, _, names in os.walk(self.local / prefix):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        yield Stored(path.relative_to(self.local).as_posix(), status.st_size, now - status.st_mtime)
            return
        try:
            found = self._fs.find(self._remote(prefix), detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            modified = info.get("LastModified") or info.get("mtime") or info.get("created")
            moment = modified.timestamp() if hasattr(modified, "timestamp") else modified
            # A store that tells no times never has anything old enough to sweep.
            yield Stored(path[len(self._root) + 1 :], int(info["size"]), now - moment if moment is not None else 0.0)

    def sweep_staging(self, older_than_seconds: float) -> None:
        """Deletes temporary files that a killed process left."""
        if self.local is not None:
            for stored in self.list(_STAGING):
                if stored.age_seconds > older_than_seconds:
                    self.delete(stored.key)

    def _remote(self, key: str) -> str:
        return f"{self._root}/{key}"


@dataclass(frozen=True)
class Staged:
    """Bytes in a temporary file, not yet visible under any key."""

    path: Path
    sha256: str
    size_bytes: int


def _is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")
