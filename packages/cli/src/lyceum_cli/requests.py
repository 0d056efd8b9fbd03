"""Requests typed by a user: JSON from the command line, a file or standard input.

One request is one JSON object. A stream of requests is JSON Lines, an array, or objects one after another; lines are
read as they come, so that a person or a program at the other end of a pipe can converse with a bidirectional RPC.
"""

import json
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from lyceum_cli.output import UsageError


def read_requests(text: str | None, file: Path | None, *, stream: bool) -> Iterator[Any]:
    """Yields the JSON values of the requests: exactly one, unless `stream`.

    Args:
        text: JSON, `-` for standard input, or None for an empty request.
        file: a file to read instead.
        stream: whether the RPC takes a stream.

    Raises:
        UsageError: no such file, not JSON (with line and column), or more than one request where one is wanted.
    """
    if text is not None and file is not None:
        raise UsageError("a request is given twice", "give either JSON or --file")
    if file is not None:
        source = str(file)
        try:
            content = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read {file}: {reason}", "give a file of JSON text") from None
        values = _values(content, source)
    elif text == "-":
        stdin = _stdin()
        values = _lines(stdin, "standard input") if stream else _values(stdin.read(), "standard input")
    else:
        values = _values("{}" if text is None and not stream else text or "", "the request")
    if stream:
        yield from values
        return
    found = list(values)
    if len(found) != 1:
        raise UsageError(f"this RPC takes one request, not {len(found)}", "give one JSON object")
    yield found[0]


def _stdin() -> TextIO:
    """Standard input as UTF-8; bytes that are none end up in the error about their line or field."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", "pipe the request into it, or give it as JSON")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def _values(text: str, source: str) -> Iterator[Any]:
    """JSON values one after another; an array at the top stands for its items."""
    decoder = json.JSONDecoder()
    position = 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _bad_json(error, source) from None
        yield from value if isinstance(value, list) else [value]


def _lines(stream: TextIO, source: str) -> Iterator[Any]:
    """One JSON value a line as it arrives; if the first line is only a value's beginning, everything is read first."""
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > 1:
                raise _bad_json(error, f"{source}, line {number},") from None
            yield from _values(line + stream.read(), source)
            return
        yield from value if isinstance(value, list) else [value]


def _bad_json(error: ValueError | RecursionError, source: str) -> UsageError:
    if isinstance(error, json.JSONDecodeError):
        reason = f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
    elif isinstance(error, RecursionError):
        reason = "is nested too deeply"
    else:
        reason = "has a number of too many digits"
    return UsageError(f"{source} {reason}", """write it as '{"field": 1}'""")
