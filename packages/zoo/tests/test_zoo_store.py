import dataclasses
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from pathlib import Path

import filelock
import platformdirs
import pytest

import lyceum_zoo
from lyceum_zoo import Entry, File, ZooError
from lyceum_zoo import download as download_module

SMALL = b"smiles\tid\n" + b"CCO\t1\n" * 100
SRC = Path(lyceum_zoo.__file__).parents[1]

# A process of its own that fetches an entry given as JSON and prints where it is.
CHILD = """
import json, sys
from lyceum_zoo import Entry, File, path
fields = json.loads(sys.argv[1])
fields["files"] = {name: File(**file) for name, file in fields["files"].items()}
entry = Entry(**fields)
print(path(entry.name, table={entry.name: entry}))
"""


@pytest.fixture(autouse=True)
def _local_pip_and_empty_cache(tmp_path, monkeypatch):
    """pip sees one local folder of wheels and no network; the cache is empty."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("LYCEUM_CACHE", str(tmp_path / "cache"))


def _entry(contents, **changes):
    files = {
        name: File(f"pkg/data/{name}", hashlib.sha256(content).hexdigest(), len(content))
        for name, content in contents.items()
    }
    fields = {"name": "toy", "distribution": "toy-data", "version": "1.5", "licence": "MIT", "about": "A toy."}
    return Entry(**{**fields, "download_size": 1, "files": files, **changes})


def _wheel(folder, contents, *, compression=zipfile.ZIP_STORED):
    file = folder / "toy_data-1.5-py3-none-any.whl"
    info = "toy_data-1.5.dist-info"
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(f"pkg/data/{name}", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-data\nVersion: 1.5\nRequires-Python: >=99\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def _fetch(entry, file=None):
    return lyceum_zoo.path(entry.name, file, table={entry.name: entry})


def _spawn(entry, stderr=subprocess.PIPE):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), *filter(None, sys.path)])}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(dataclasses.asdict(entry))],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def _left_in(cache):
    return sorted(p.name for p in (cache / "zoo").iterdir())


def test_an_entry_is_downloaded_verified_and_kept_without_installing_it(tmp_path, capfd):
    contents = {"a.tsv": SMALL, "b.bin": b""}
    _wheel(tmp_path / "wheels", contents)
    folder = _fetch(_entry(contents))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == contents
    assert capfd.readouterr().err == "zoo: downloading toy-data==1.5 (1 bytes)\n"
    assert _left_in(tmp_path / "cache") == ["toy-1.5", "toy-1.5.lock"]
    # Again, without a source: the cache is enough, and says nothing.
    (tmp_path / "wheels" / "toy_data-1.5-py3-none-any.whl").unlink()
    assert _fetch(_entry(contents), "a.tsv") == folder / "a.tsv"
    assert capfd.readouterr() == ("", "")


def test_the_cache_is_used_read_only_once_it_is_filled(tmp_path, monkeypatch):
    _wheel(tmp_path / "wheels", {"a": SMALL})
    _fetch(_entry({"a": SMALL}))
    monkeypatch.setattr("lyceum_zoo.store.FileLock", None)
    assert _fetch(_entry({"a": SMALL}), "a").read_bytes() == SMALL


@pytest.mark.parametrize("damage", [SMALL[:-1], b"X" + SMALL[1:]])
def test_a_damaged_cached_file_is_noticed_and_fetched_again(tmp_path, damage):
    contents = {"a": SMALL, "b": b"untouched"}
    _wheel(tmp_path / "wheels", contents)
    file = _fetch(_entry(contents), "a")
    untouched = file.with_name("b").stat().st_ino
    file.write_bytes(damage)
    assert _fetch(_entry(contents), "a").read_bytes() == SMALL
    assert file.with_name("b").stat().st_ino == untouched


def test_damage_that_keeps_size_and_time_is_noticed_by_the_next_process(tmp_path):
    _wheel(tmp_path / "wheels", {"a": SMALL})
    entry = _entry({"a": SMALL})
    file = _fetch(entry, "a")
    before = file.stat()
    file.write_bytes(b"X" + SMALL[1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    child = _spawn(entry)
    assert child.communicate(timeout=60)[1].startswith("zoo: downloading")
    assert file.read_bytes() == SMALL


def test_a_damaged_file_that_cannot_be_fetched_again_is_removed(tmp_path):
    wheel = _wheel(tmp_path / "wheels", {"a": SMALL})
    file = _fetch(_entry({"a": SMALL}), "a")
    wheel.unlink()
    file.write_bytes(b"damaged")
    with pytest.raises(ZooError, match="pip cannot download"):
        _fetch(_entry({"a": SMALL}))
    assert not file.exists()


@pytest.mark.parametrize("served", [b"X" + SMALL[1:], SMALL + b"x"])
def test_a_file_with_another_hash_is_an_error_and_no_file(tmp_path, served):
    _wheel(tmp_path / "wheels", {"a": b"fine", "b": served})
    entry = _entry({"a": b"fine", "b": SMALL})
    with pytest.raises(
        ZooError, match=r"^zoo entry 'toy': b out of toy-data==1.5 is not the recorded file \(SHA-256"
    ) as error:
        _fetch(entry)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "cache/zoo/toy-1.5").iterdir()) == []
    assert _left_in(tmp_path / "cache") == ["toy-1.5", "toy-1.5.lock"]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_archive_is_an_error_and_no_file(tmp_path, compression):
    content = os.urandom(50_000)
    wheel = _wheel(tmp_path / "wheels", {"a": content}, compression=compression)
    damaged = bytearray(wheel.read_bytes())
    damaged[1_000:1_100] = bytes(100)
    wheel.write_bytes(damaged)
    with pytest.raises(ZooError, match=r"toy_data-1.5-py3-none-any.whl is damaged|is not the recorded file"):
        _fetch(_entry({"a": content}))
    assert list((tmp_path / "cache/zoo/toy-1.5").iterdir()) == []


def test_an_archive_without_the_file_is_an_error(tmp_path):
    _wheel(tmp_path / "wheels", {"other": SMALL})
    with pytest.raises(ZooError, match="no item named 'pkg/data/a' in the archive"):
        _fetch(_entry({"a": SMALL}))


def test_files_inside_an_sdist_are_fetched_too(tmp_path):
    backend = (
        "import os\n"
        "def prepare_metadata_for_build_wheel(folder, config_settings=None):\n"
        "    info = 'toy_data-1.5.dist-info'\n"
        "    os.mkdir(os.path.join(folder, info))\n"
        "    with open(os.path.join(folder, info, 'METADATA'), 'w') as file:\n"
        "        file.write('Metadata-Version: 2.1\\nName: toy-data\\nVersion: 1.5\\n')\n"
        "    return info\n"
        "def build_wheel(*args, **kwargs): raise SystemExit('not needed')\n"
    )
    members = {
        "PKG-INFO": b"Metadata-Version: 2.1\nName: toy-data\nVersion: 1.5\n",
        "pyproject.toml": b"[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "backend.py": backend.encode(),
        "pkg/data/a": SMALL,
    }
    with tarfile.open(tmp_path / "wheels" / "toy_data-1.5.tar.gz", "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"toy_data-1.5/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert _fetch(_entry({"a": SMALL}, sdist=True), "a").read_bytes() == SMALL


def test_an_installed_distribution_with_the_very_files_is_copied_without_pip(tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(_wheel(tmp_path, {"a": SMALL})) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(download_module, "_find_pip", None)
    file = _fetch(_entry({"a": SMALL}), "a")
    assert file.read_bytes() == SMALL
    assert file.is_relative_to(tmp_path / "cache")


def test_an_installed_distribution_with_other_files_is_not_used(tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(_wheel(tmp_path, {"a": SMALL[::-1]})) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    _wheel(tmp_path / "wheels", {"a": SMALL})
    assert _fetch(_entry({"a": SMALL}), "a").read_bytes() == SMALL


def test_a_process_killed_at_any_moment_leaves_a_correct_file_or_none(tmp_path):
    content = os.urandom(48 * 2**20)
    entry = _entry({"big": content})
    _wheel(tmp_path / "wheels", {"big": content})
    root, target = tmp_path / "cache/zoo", tmp_path / "cache/zoo/toy-1.5/big"

    def growing(pattern, at_least):
        return any(p.stat().st_size >= at_least for p in root.glob(pattern))

    moments = {
        "pip has just been started": lambda: growing(".toy-1.5.*/pip.log", 0),
        "pip writes the archive": lambda: (
            growing(".toy-1.5.*/pip-*/*.whl", 1) or growing(".toy-1.5.*/archive/*.whl", 1)
        ),
        "extraction has just begun": lambda: growing(".toy-1.5.*/verified/big", 1),
        "extraction is half done": lambda: growing(".toy-1.5.*/verified/big", len(content) // 2),
        "extraction is done": lambda: growing(".toy-1.5.*/verified/big", len(content)),
    }
    for moment, reached in moments.items():
        child = _spawn(entry)
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline:
            try:
                if reached():
                    break
            except FileNotFoundError:
                pass
            time.sleep(0.001)
        assert child.poll() is None, f"{moment}: missed it: {child.communicate()}"
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        assert not target.exists() or target.read_bytes() == content, moment
        target.unlink(missing_ok=True)
    assert _fetch(entry, "big").read_bytes() == content
    assert _left_in(tmp_path / "cache") == ["toy-1.5", "toy-1.5.lock"]


def test_four_processes_at_once_download_once_and_all_find_the_file(tmp_path):
    content = os.urandom(8 * 2**20)
    entry = _entry({"big": content})
    _wheel(tmp_path / "wheels", {"big": content})
    children = [_spawn(entry) for _ in range(4)]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * 4, outputs
    assert {out for out, _ in outputs} == {f"{tmp_path}/cache/zoo/toy-1.5\n"}
    assert sum(err.count("downloading") for _, err in outputs) == 1
    assert (tmp_path / "cache/zoo/toy-1.5/big").read_bytes() == content


def test_a_terminal_shows_a_progress_bar(tmp_path):
    _wheel(tmp_path / "wheels", {"a": SMALL})
    terminal, other_end = os.openpty()
    child = _spawn(_entry({"a": SMALL}, download_size=2_000_000), stderr=other_end)
    os.close(other_end)
    shown = b""
    try:
        while block := os.read(terminal, 2**16):
            shown += block
    except OSError:  # EIO: the child has closed the other end
        os.close(terminal)
    assert child.communicate(timeout=60)[0].endswith("zoo/toy-1.5\n")
    assert "2.0/2.0 MB" in shown.decode()


def test_without_a_network_the_error_is_one_line_that_names_the_package(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ZooError, match=r"pip install --no-deps toy-data==1\.5$") as error:
        _fetch(_entry({"a": SMALL}))
    assert "\n" not in str(error.value)
    assert "No matching distribution found for toy-data==1.5" in str(error.value)


def test_without_any_pip_the_error_says_how_to_get_one(monkeypatch):
    candidates = [["/nonexistent/pip"], [sys.executable, "-c", "1/0"]]
    monkeypatch.setattr(download_module, "_pip_candidates", lambda: candidates)
    download_module._find_pip.cache_clear()
    with pytest.raises(ZooError, match="needs pip to download with and found none; run `python -m ensurepip`"):
        _fetch(_entry({"a": SMALL}))


def test_an_environment_without_pip_uses_the_copy_that_python_carries(tmp_path):
    _wheel(tmp_path / "wheels", {"a": SMALL})
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for package in (filelock, platformdirs, lyceum_zoo):
        (libraries / package.__name__).symlink_to(Path(package.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": str(libraries), "PATH": ""}
    python = str(tmp_path / "venv/bin/python")
    assert subprocess.run([python, "-m", "pip"], env=environment, capture_output=True, check=False).returncode != 0
    command = [python, "-c", CHILD, json.dumps(dataclasses.asdict(_entry({"a": SMALL})))]
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert (tmp_path / "cache/zoo/toy-1.5/a").read_bytes() == SMALL


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LYCEUM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ZooError, match=r"cannot use the cache .*/file/zoo .*set LYCEUM_CACHE"):
        _fetch(_entry({"a": SMALL}))


def test_unknown_names_and_files_are_answered_with_the_known_ones():
    with pytest.raises(ZooError, match=r"unknown zoo entry 'thrombine'; known: dockstring, real1m, thrombin"):
        lyceum_zoo.path("thrombine")
    with pytest.raises(ZooError, match=r"has no file 'x'; it has: acids.smi"):
        lyceum_zoo.path("thrombin", "x")
    with pytest.raises(ZooError, match="unknown zoo entry"):
        lyceum_zoo.describe("nope")
