"""The benchmark of the chassis runs, and reports what it measured."""

import json
from pathlib import Path

import pytest

from lyceum_runtime import bench
from lyceum_runtime.bench_report import BEGIN, END, Row, report, write_readme


def test_health_is_measured_while_two_methods_compute(tmp_path: Path) -> None:
    results = bench.run("health", True, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    (row,) = results["rows"]
    assert row["measured"].startswith("p99")
    assert 0 < row["value"] < 1000
    assert row["met"] is (row["value"] <= 100)
    assert {"python", "grpcio", "dbos"} <= set(results["versions"])
    assert results["machine"]["cores"] > 0


def test_echo_compares_both_kinds_of_function_at_both_loads(tmp_path: Path) -> None:
    rows = bench.run("echo", True, tmp_path)["rows"]
    assert [(row["case"], row["measured"]) for row in rows] == [
        (f"echo {payload}, {kind}", measured)
        for payload in ("tensor", "checked")
        for kind in ("sync", "async")
        for measured in ("median latency, 1 client", "median latency, 64 clients", "throughput, 64 clients")
    ]
    assert all(row["value"] > 0 for row in rows)


def test_unknown_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no case 'speed'; there are echo, start, health"):
        bench.run("speed", True, tmp_path)


@pytest.mark.parametrize(("value", "target", "met"), [(1.5, "<= 1.6", True), (0.5, ">= 0.6", False), (9, "", None)])
def test_row_knows_whether_its_target_is_met(value: float, target: str, met: bool | None) -> None:
    assert Row("case", "what", value, target=target).met() is met


def test_readme_table_is_written_between_its_markers_and_missed_targets_are_said(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rows = [Row("search", "recall", 0.5, "", ">= 0.9", "a | b"), Row("search", "time", 12.345, "s")]
    results = report("toy", rows, seed=3, quick=False, sizes={"n_items": 5}, packages=["nothing-like-it"])
    write_readme(readme, results)
    write_readme(readme, results)  # a second time changes nothing
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| case |")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "| search | recall | 0.5  (missed) | >= 0.9 | a / b |" in text
    assert "| search | time | 12.3 s |  |  |" in text
    assert "seed 3; n items 5; python 3." in text
    assert "old" not in text
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="has no lines <!-- benchmark:begin -->"):
        write_readme(readme, results)
