"""Where words go: results to standard output, everything else to standard error.

An error is one line that says what was wrong and what to do next; with `--json` it is one JSON object on standard
error. Exit status 1 means that a call or a check failed, 2 that the command line or its input was wrong.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
USAGE = 2
INTERRUPTED = 130
_PIPE_WIDTH = 10_000
_RAW_IN_JSON = re.compile("[\x7f-\x9f]")  # controls that JSON, unlike those below a blank, may hold as they are


class CliError(Exception):
    """An error for the user: one line (`message`), then what to do (`hint`)."""

    exit_code = FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_json(self) -> dict[str, Any]:
        """The form in which `--json` reports it."""
        return {"message": self.message, "hint": self.hint}

    def show(self) -> None:
        """Prints the error for a reader."""
        note(f"error: {one_line(self.message, self.hint)}", style="red")


class UsageError(CliError):
    """What the user typed, or the input it points at, is wrong."""

    exit_code = USAGE


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["lyceum.json"] = value
    return value


Json = Annotated[
    bool,
    typer.Option("--json", callback=_remember, is_eager=True, help="Print results as JSON, errors too (on stderr)."),
]


def wants_json(ctx: typer.Context) -> bool:
    """True if the running command, or one above it, was given `--json`."""
    return bool(ctx.meta.get("lyceum.json"))


@cache
def stdout() -> "Console":
    """Console for results."""
    from rich.console import Console

    return Console()


@cache
def stderr() -> "Console":
    """Console for notes, progress and errors."""
    from rich.console import Console

    return Console(stderr=True)


def one_line(message: str, hint: str = "") -> str:
    """Message and hint on one line."""
    text = " ".join(message.split())
    return f"{text.rstrip('.')}; {hint}" if hint else text


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal written out, an escape as `\\x1b`: names may be another's."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def note(text: str, *, style: str = "dim") -> None:
    """One line for the reader, on standard error; never wrapped, so that it can be searched for."""
    stderr().print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def emit(value: Any, *, pretty: bool = False) -> None:
    """A JSON value on standard output: one line, or indented (and coloured on a terminal) if `pretty`."""
    text = _json(value, indent=2 if pretty else None)
    if pretty and stdout().is_terminal:
        from rich.highlighter import JSONHighlighter
        from rich.text import Text

        stdout().print(JSONHighlighter()(Text(text)), soft_wrap=True)
        return
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _json(value: Any, indent: int | None = None) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _RAW_IN_JSON.sub(lambda control: f"\\u{ord(control[0]):04x}", text)


def emit_error(error: CliError, *, as_json: bool) -> None:
    """Reports an error on standard error."""
    if as_json:
        sys.stderr.write(_json({"error": error.as_json()}) + "\n")
    else:
        error.show()


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "", console: "Console | None" = None
) -> None:
    """A plain table; cells are strings or rich texts. In a pipe no cell is cut."""
    from rich.table import Table
    from rich.text import Text

    console = console or stdout()
    grid = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0)
    )
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*[cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row])
    render(grid, console)


def render(renderable: Any, console: "Console") -> None:
    """Prints a renderable; in a pipe at its full width and without trailing blanks."""
    if console.is_terminal:
        console.print(renderable)
        return
    from rich.console import Console

    wide = Console(width=_PIPE_WIDTH, color_system=None)
    with wide.capture() as captured:
        wide.print(renderable, crop=False)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    console.file.flush()  # who reads the pipe may wait for just this


def tick(good: bool) -> Any:
    """A coloured `yes` or `no`."""
    from rich.text import Text

    return Text("yes" if good else "no", style="green" if good else "bold red")
