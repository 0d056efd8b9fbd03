"""The commands and their one way of failing."""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from lyceum_cli import artifacts, bench, call, health, operations, tour, trace, up
from lyceum_cli.output import INTERRUPTED, USAGE, CliError, emit_error, wants_json


class Commands(TyperGroup):
    """Ends every command that fails with one line, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # carries the help text; typer prints it
                raise
            problem = _problem(error)
            if problem is None:
                raise
            emit_error(problem, as_json=wants_json(ctx))
            if isinstance(error, OSError):
                _drop_output()
            raise typer.Exit(problem.exit_code) from None


def _drop_output() -> None:
    """What could not be written stays in the buffer; Python would try again at exit and end with another status."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _problem(error: Exception) -> CliError | None:
    """The error as the user's; None means that a developer asked for the traceback."""
    from lyceum_runtime.errors import ConfigurationError, ServiceError

    if isinstance(error, CliError):
        return error
    problem: CliError
    if isinstance(error, TyperException):
        problem = CliError(error.format_message(), "--help shows what is accepted")
        problem.exit_code = USAGE
        return problem
    if isinstance(error, ConfigurationError):
        problem = CliError(str(error))
        problem.exit_code = USAGE
        return problem
    if isinstance(error, ServiceError):
        from lyceum_cli.failure import CallFailed

        return CallFailed(error.status())
    if os.environ.get("LYCEUM_DEBUG"):
        return None
    if isinstance(error, OSError) and error.strerror:
        return CliError(f"{error.filename or 'cannot write the output'}: {error.strerror}")
    return CliError(f"unexpected {type(error).__name__}: {error}", "LYCEUM_DEBUG=1 shows where; please report it")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Machine-learning methods as gRPC services: start them, call them, watch them.",
)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"lyceum {version('lyceum-cli')}")
        except PackageNotFoundError:
            typer.echo("lyceum (run from its source)")
        raise typer.Exit


@app.callback()
def lyceum(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Machine-learning methods as gRPC services: start them, call them, watch them."""


app.command()(tour.tour)
app.command()(up.up)
app.command()(health.ls)
app.command()(health.health)
app.command()(call.call)
app.add_typer(operations.app, name="ops")
app.add_typer(trace.app, name="trace")
app.add_typer(artifacts.app, name="artifacts")
app.command()(bench.bench)
