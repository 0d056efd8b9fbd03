"""`lyceum trace`: the waterfall of a stored trace, and a store that is missing, empty or broken."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lyceum_cli.app import app
from lyceum_runtime.spans import SCHEMA

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SECOND = 10**9
T0 = 1_750_000_000 * SECOND


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LYCEUM_STATE_DIR", str(tmp_path))
    return tmp_path


def store(state: Path, *rows: tuple[str, str | None, str, str, float, float, str], trace: str = TRACE) -> None:
    """Rows (span, parent, name, service, start and end in seconds, status)."""
    with closing(sqlite3.connect(state / "spans.db")) as connection, connection:
        connection.executescript(SCHEMA)
        for span, parent, name, service, start, end, status in rows:
            times = (T0 + int(start * SECOND), T0 + int(end * SECOND))
            connection.execute(
                "INSERT INTO spans VALUES (?,?,?,?,?,?,?,?,?,?)",
                (trace, span, parent, name, service, *times, status, '{"error.type": "NotFound"}', "[]"),
            )


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_a_waterfall_has_children_under_parents_and_bars_at_their_times(state: Path) -> None:
    store(
        state,
        ("a", None, "tour apex", "tour", 0, 4, "OK"),
        ("c", "a", "second", "apex", 2, 4, "ERROR"),
        ("b", "a", "first", "apex", 0, 2, "OK"),
        ("d", "b", "inner", "apex", 1, 2, "UNSET"),
    )
    result = run("show", TRACE[:6])
    assert result.exit_code == 0
    heading, columns, *rows = result.stdout.splitlines()
    assert TRACE in heading
    assert "4 spans" in heading
    assert "4.00 s" in columns
    assert [row.split()[0] for row in rows] == ["tour", "├", "│", "└"]
    assert ["first" in rows[1], "inner" in rows[2], "second" in rows[3]] == [True] * 3
    bars = [(row.index("█"), row.count("█")) for row in rows]
    left, whole = bars[0]
    assert bars[1] == (left, whole // 2)
    assert bars[2] == (left + whole // 4, whole // 4)
    assert bars[3] == (left + whole // 2, whole // 2)
    assert "NotFound" in rows[3]
    assert "NotFound" not in rows[1]


def test_a_span_whose_parent_is_missing_is_shown_and_counted(state: Path) -> None:
    store(state, ("a", "lost", "orphan", "apex", 0, 1, "OK"))
    shown = run("show", TRACE)
    assert "orphan" in shown.stdout
    assert "1 spans have a parent" in shown.stderr
    assert json.loads(run("show", TRACE, "--json").stdout)["missing_parents"] == ["a"]


def test_a_chain_deeper_than_the_recursion_limit_is_drawn(state: Path) -> None:
    store(state, *[(str(i), str(i - 1) if i else None, f"level{i}", "apex", 0, 1, "OK") for i in range(1500)])
    result = run("show", TRACE)
    assert result.exit_code == 0
    assert "level1499" in result.stdout


def test_a_long_run_of_the_same_call_is_one_line_unless_all_is_asked_for(state: Path) -> None:
    polls = [(f"p{i}", "a", "Poll", "cli", i, i + 1, "OK") for i in range(20)]
    served = [(f"s{i}", f"p{i}", "Poll", "apex", i, i + 1, "OK") for i in range(20)]
    store(state, ("a", None, "wait", "cli", 0, 21, "OK"), *polls, *served, ("z", "a", "last", "cli", 20, 21, "OK"))
    rows = run("show", TRACE).stdout.splitlines()[2:]
    assert len(rows) == 1 + 3 * 2 + 1 + 1
    assert "... 17 more Poll" in rows[7]
    assert "last" in rows[8]
    assert len(run("show", TRACE, "--all").stdout.splitlines()[2:]) == 42


def test_recent_traces_are_listed_newest_first(state: Path) -> None:
    store(state, ("a", None, "old", "cli", 0, 1, "OK"))
    store(state, ("b", None, "new", "cli", 9, 10, "OK"), trace="5" * 32)
    listed = json.loads(run("list", "--json").stdout)["traces"]
    assert [span["name"] for span in listed] == ["new", "old"]
    assert listed[0]["duration_seconds"] == 1.0
    assert json.loads(run("list", "-n", "1", "--json").stdout)["traces"][0]["name"] == "new"


@pytest.mark.parametrize("broken", [False, True])
def test_no_store_and_a_broken_one_are_one_line(state: Path, broken: bool) -> None:
    if broken:
        (state / "spans.db").write_bytes(b"this is no database" * 1000)
    result = run("show", "abc")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert ("cannot read" if broken else "there is no trace abc") in result.stderr
    assert "spans.db" in result.stderr


def test_a_prefix_of_two_traces_is_refused(state: Path) -> None:
    store(state, ("a", None, "one", "cli", 0, 1, "OK"), trace="a" * 32)
    store(state, ("a", None, "two", "cli", 0, 1, "OK"), trace="ab" * 16)
    result = run("show", "a")
    assert result.exit_code == 1
    assert "give more of its id" in result.stderr


def test_without_traces_the_list_says_how_to_make_one(state: Path) -> None:
    result = run("list")
    assert result.exit_code == 0
    assert "lyceum tour" in result.stderr


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/none/state"])
def test_a_state_directory_that_cannot_be_is_an_error_and_not_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "state"}.get(place, Path(place))
    monkeypatch.setenv("LYCEUM_STATE_DIR", str(folder))
    for command in (["list"], ["show", "abc"]):
        result = run(*command)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: the state directory {folder} cannot be used")
        assert "set LYCEUM_STATE_DIR" in line


def test_a_state_directory_that_is_yet_to_be_made_is_empty_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LYCEUM_STATE_DIR", str(tmp_path / "a" / "b"))
    assert run("list").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_would_steer_the_terminal_is_written_out(state: Path) -> None:
    store(state, ("a", None, "evil\x1b[2J", "cli\x9b", 0, 1, "OK"))
    for result in (run("show", TRACE), run("list")):
        assert r"evil\x1b[2J" in result.stdout
        assert r"cli\x9b" in result.stdout
        assert result.stdout.replace("\n", "").isprintable()
