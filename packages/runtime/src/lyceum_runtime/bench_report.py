"""What every benchmark reports: its measurements with their targets, and where they were made.

A benchmark returns :func:`report`'s dictionary, which :func:`save` writes to `results.json`; a README's table comes
from that file between two markers (:func:`write_readme`), never from a hand.
"""

import json
import operator
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"

_COMPARISONS = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Row:
    """One measurement: a ratio where there is something to compare with, absolute numbers in `context`."""

    case: str
    measured: str
    value: float
    unit: str = "x"
    target: str = ""
    """Such as "<= 1.6"; empty if there is none."""
    context: str = ""

    def met(self) -> bool | None:
        """Whether the value keeps the target; None without one."""
        if not self.target:
            return None
        comparison, bound = self.target.split()
        return bool(_COMPARISONS[comparison](self.value, float(bound)))


def report(
    name: str, rows: Iterable[Row], *, seed: int, quick: bool, sizes: Mapping[str, Any], packages: Iterable[str]
) -> dict[str, Any]:
    """The benchmark's results as JSON values, with the seed, sizes, versions of `packages` and the machine."""
    return {
        "benchmark": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "quick": quick,
        "sizes": dict(sizes),
        "rows": [asdict(row) | {"met": row.met()} for row in rows],
        "versions": versions(packages),
        "machine": machine(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version and that of each installed distribution."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory, system, and how busy it was."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def save(results: Mapping[str, Any], out_dir: Path) -> Path:
    """Write `out_dir`/results.json."""
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "results.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    return path


def show(results: Mapping[str, Any]) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "measured", "value", "target", "met", "context", title=f"lyceum bench {results['benchmark']}")
    for row in results["rows"]:
        met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row["met"]]
        table.add_row(row["case"], row["measured"], _value(row), row["target"], met, row["context"])
    console = Console()
    console.print(table)
    console.print(_footnote(results), style="dim")


def markdown(results: Mapping[str, Any]) -> str:
    """The same table for a README."""
    lines = ["| case | measured | value | target | context |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        missed = " (missed)" if row["met"] is False else ""
        cells = (row["case"], row["measured"], _value(row) + missed, row["target"], row["context"])
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, "", _footnote(results)])


def write_readme(readme: Path, results: Mapping[str, Any]) -> None:
    """Replace what is between the markers in `readme` by the results' table.

    Raises:
        ValueError: the file has no such markers.
    """
    text = readme.read_text()
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"{readme} has no lines {BEGIN} and {END} to write between")
    readme.write_text(f"{text[: begin + len(BEGIN)]}\n{markdown(results)}\n{text[end:]}")


def _value(row: Mapping[str, Any]) -> str:
    return f"{row['value']:.3g}{'' if row['unit'] == 'x' else ' '}{row['unit']}"


def _footnote(results: Mapping[str, Any]) -> str:
    made, place = results["measured_at"][:10], results["machine"]
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in results["sizes"].items())
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return (
        f"Measured {made} on {place['cores']} cores of {place['processor']} (load {place['load_1min']}), "
        f"seed {results['seed']}; {sizes}; {packages}."
    )
