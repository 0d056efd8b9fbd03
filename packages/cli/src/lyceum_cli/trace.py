"""`lyceum trace`: recent traces, and one trace as a waterfall in the terminal."""

import os
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lyceum_cli.output import CliError, Json, emit, note, printable, render, stdout, table

if TYPE_CHECKING:
    from rich.text import Text

    from lyceum_runtime.spans import Span, SpanStore

app = typer.Typer(no_args_is_help=True, help="Look at traces: which service did what, when, for one request.")

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
_PIPE_WIDTH = 120
_RUN = 3
_BAR_WIDTH = (16, 60)


def complete_trace(incomplete: str) -> list[str]:
    """Shell completion of a trace's id."""
    try:
        return [span.trace_id for span in span_store().recent(20) if span.trace_id.startswith(incomplete)]
    except Exception:
        return []  # completion never disturbs the command line


@app.command("list")
def list_traces(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most traces to show.")] = 20, as_json: Json = False
) -> None:
    """List the newest traces."""
    store = span_store()
    spans = read(store, lambda: store.recent(limit))
    if not spans:
        require_possible(store.path.parent)
    if as_json:
        emit({"traces": [span_json(span) for span in spans]})
        return
    rows = [
        (span.trace_id, _clock(span.start_ns), span.service, span.name, _took(span), _status(span)) for span in spans
    ]
    table(("trace", "began", "service", "first span", "took", "status"), rows)
    if not spans:
        note(f"no traces in {store.path}; a call through `lyceum call` or `lyceum tour` makes one")


@app.command()
def show(
    trace: Annotated[
        str, typer.Argument(metavar="ID", help="Trace id, or the beginning of one.", autocompletion=complete_trace)
    ],
    everything: Annotated[bool, typer.Option("--all", help="Draw repeated calls too, each on its own line.")] = False,
    as_json: Json = False,
) -> None:
    """Draw a trace as a waterfall: a bar for each span, under its parent."""
    store = span_store()
    try:
        spans = read(store, lambda: store.trace(trace))
    except ValueError as error:
        raise CliError(str(error), "`lyceum trace list` shows them") from None
    if not spans:
        require_possible(store.path.parent)
        raise CliError(f"there is no trace {trace} in {store.path}", "`lyceum trace list` shows what there is")
    missing = missing_parents(spans)
    if as_json:
        emit({"trace_id": spans[0].trace_id, "missing_parents": missing, "spans": [span_json(span) for span in spans]})
        return
    _draw(spans if everything else _folded(spans))
    if missing:
        note(f"{len(missing)} spans have a parent that has not ended or was not exported", style="yellow")


def span_store() -> "SpanStore":
    """The store of this user's spans."""
    from lyceum_runtime.settings import load_settings
    from lyceum_runtime.spans import SpanStore

    return SpanStore(load_settings().state_dir / "spans.db")


def require_possible(folder: Path) -> None:
    """Refuses a state directory in which no process can ever have written a trace. One that is yet to be made is none.

    Raises:
        CliError: it is no directory, or it is not there and cannot be made.
    """
    try:
        if os.path.lexists(folder):
            os.listdir(folder)
            return
        there = next(parent for parent in folder.parents if os.path.lexists(parent))
        with tempfile.TemporaryDirectory(dir=there):  # asking for the permission is not enough, as in /proc
            pass
    except OSError as error:
        problem = f"the state directory {folder} cannot be used: {error.strerror}"
        raise CliError(problem, "set LYCEUM_STATE_DIR to one that can") from None


def read(store: "SpanStore", query: Callable[[], "list[Span]"]) -> "list[Span]":
    """Runs a query on the store.

    Raises:
        CliError: the file is no span store, or broken.
    """
    try:
        return query()
    except (sqlite3.DatabaseError, OSError) as error:
        raise CliError(f"cannot read {store.path} ({error})", "move it away; the next call starts a new one") from None


def missing_parents(spans: "Sequence[Span]") -> list[str]:
    """Ids of the spans whose parent is not among them."""
    known = {span.span_id for span in spans}
    return [span.span_id for span in spans if span.parent_id is not None and span.parent_id not in known]


def span_json(span: "Span") -> dict[str, Any]:
    """A span as JSON."""
    from dataclasses import asdict

    seconds = (span.end_ns - span.start_ns) / 1e9
    return {**asdict(span), "attributes": dict(span.attributes), "duration_seconds": seconds}


def _draw(spans: "Sequence[Span]") -> None:
    from rich.table import Table
    from rich.text import Text

    begin, end = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    services = list(dict.fromkeys(span.service for span in spans))
    colours = {service: _COLOURS[index % len(_COLOURS)] for index, service in enumerate(services)}
    tree = _tree(spans)
    labels = [f"{guide}{printable(span.name)}" for guide, span in tree]
    console = stdout()
    width = console.width if console.is_terminal else _PIPE_WIDTH
    taken = max(map(len, labels)) + max(map(len, services)) + 10 + 8
    bar_width = min(max(width - taken, _BAR_WIDTH[0]), _BAR_WIDTH[1])

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    grid.add_column("span", overflow="ellipsis", no_wrap=True)
    grid.add_column("service", no_wrap=True)
    grid.add_column("took", justify="right", no_wrap=True)
    grid.add_column(f"0 - {_duration(end - begin)}", no_wrap=True, min_width=bar_width)
    for (guide, span), label in zip(tree, labels):
        failed = span.status == "ERROR"
        name = Text(label, style="bold red" if failed else "")
        name.stylize("dim", 0, len(guide))
        if failed:
            name.append(f"  {printable(_reason(span))}", style="red")
        grid.add_row(
            name,
            Text(printable(span.service), style=colours[span.service]),
            _took(span),
            _bar(span, begin, end, bar_width, "red" if failed else colours[span.service]),
        )
    heading = Text(f"trace {spans[0].trace_id}", style="bold").append(
        f"  {len(spans)} spans, {_clock(begin)}", style="dim"
    )
    console.print(heading, soft_wrap=True)
    render(grid, console)


def _folded(spans: "Sequence[Span]") -> "list[Span]":
    """The spans with long runs of the same call under one parent shortened: the first `_RUN`, then one for the rest.

    A span that stands for others has the name `... N more <name>`, and reaches from the first one's start to the last
    one's end; what is below the others is left out.
    """
    from dataclasses import replace

    children: dict[str | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        children[span.parent_id].append(span)
    dropped: set[str] = set()
    stand_ins: dict[str, Span] = {}
    for siblings in list(children.values()):
        for _, run in groupby(siblings, key=lambda span: (span.name, span.service, span.status)):
            rest = list(run)[_RUN:]
            if len(rest) > 1:
                name = f"... {len(rest)} more {rest[0].name}"
                stand_ins[rest[0].span_id] = replace(rest[0], name=name, end_ns=max(span.end_ns for span in rest))
                dropped.update(span.span_id for span in rest[1:])
                dropped.update(span.span_id for span in children[rest[0].span_id])
    kept = []
    for span in sorted(spans, key=lambda span: span.start_ns):  # a parent begins before its children
        if span.parent_id in dropped or span.span_id in dropped:
            dropped.add(span.span_id)
        else:
            kept.append(stand_ins.get(span.span_id, span))
    return kept


def _reason(span: "Span") -> str:
    """Why a span failed, in one word."""
    return str(span.attributes.get("error.type") or span.attributes.get("rpc.response.status_code") or "error")


def _tree(spans: "Sequence[Span]") -> "list[tuple[str, Span]]":
    """(guide, span), parents first, each level by start; a span whose parent is missing stands at the root."""
    known = {span.span_id for span in spans}
    children: dict[str | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        children[span.parent_id if span.parent_id in known else None].append(span)
    rows: list[tuple[str, Span]] = []
    # Deep traces must not meet the recursion limit: a stack of (span, guide of it, guide of its children).
    stack = [(span, "", "") for span in reversed(children[None])]
    while stack:
        span, guide, below = stack.pop()
        rows.append((guide, span))
        own = children[span.span_id]
        for index, child in reversed(list(enumerate(own))):
            last = index == len(own) - 1
            stack.append((child, below + ("└ " if last else "├ "), below + ("  " if last else "│ ")))
    return rows


def _bar(span: "Span", begin: int, end: int, width: int, colour: str) -> "Text":
    from rich.text import Text

    total = max(end - begin, 1)
    start = min((span.start_ns - begin) * width // total, width - 1)
    length = min(round((span.end_ns - span.start_ns) * width / total), width - start)
    return Text(" " * start + ("█" * length or "▏"), style=colour)


def _took(span: "Span") -> str:
    return _duration(span.end_ns - span.start_ns)


def _duration(nanoseconds: int) -> str:
    seconds = nanoseconds / 1e9
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _clock(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _status(span: "Span") -> "Text":
    from rich.text import Text

    return Text("error", style="red") if span.status == "ERROR" else Text("ok", style="green")
