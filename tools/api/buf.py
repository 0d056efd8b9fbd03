"""buf's checks on the API, and the API as one file: ``tools/buf``, ``tools/buf image FILE``.

buf reads a descriptor image, not the .proto sources, because two of the imported files exist as descriptors only.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import protoc

ROOT = Path("protos")
CONFIG = ROOT / "buf.yaml"
# The imported files in the image are their owners' business.
OWN = "--path=lyceum"
MAIN_BRANCHES = ("origin/main", "main")


def buf(*arguments: str) -> int:
    binary = Path(sys.executable).parent / "buf"
    return subprocess.run([binary, *arguments], check=False).returncode


def git(*arguments: str) -> str | None:
    """What git prints, or None when it fails."""
    done = subprocess.run(["git", *arguments], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def base_commit() -> str | None:
    """The commit of main this tree grew from; on main itself, the one before. None when there is nothing to compare."""
    head = git("rev-parse", "HEAD")
    for branch in MAIN_BRANCHES:
        base = git("merge-base", "HEAD", branch)
        if base and base != head:
            return base
    return git("rev-parse", "HEAD~1") if head else None


def breaking(current: Path, directory: Path) -> int:
    base = base_commit()
    if base is None or not git("ls-tree", "--name-only", base, f"{ROOT}/lyceum"):
        print("buf breaking: no earlier API to compare with")
        return 0
    archive = directory / "base.tar"
    subprocess.run(["git", "archive", f"--output={archive}", base, str(ROOT)], check=True)
    subprocess.run(["tar", "-xf", archive, "-C", directory], check=True)
    before = directory / "before.binpb"
    before.write_bytes(protoc.image(directory / ROOT))
    return buf("breaking", str(current), f"--against={before}", f"--config={CONFIG}", OWN)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["image", target]:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_bytes(protoc.image(ROOT))
            return 0
        case [] | ["lint"] | ["breaking"]:
            wanted = arguments or ["lint", "breaking"]
        case _:
            print("tools/buf: say nothing (lint and breaking), lint, breaking, or image FILE", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as name:
        current = Path(name, "current.binpb")
        current.write_bytes(protoc.image(ROOT))
        status = 0
        if "lint" in wanted:
            status = buf("lint", str(current), f"--config={CONFIG}", OWN)
        if "breaking" in wanted:
            status = breaking(current, Path(name)) or status
        return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
