"""`lyceum bench`: reruns a method's claims beside its peers and baselines.

A benchmark is the module `<package>.bench` with `run(case, quick, out_dir)`: it runs one case (None for all), prints
its table, writes `results.json` to `out_dir` and returns the results as JSON values. `runtime` measures the chassis.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lyceum_cli.connection import complete_service, entry_of
from lyceum_cli.output import CliError, Json, emit


def bench(
    name: Annotated[str, typer.Argument(help="A service, or `runtime`.", autocompletion=complete_service)],
    case: Annotated[
        str | None, typer.Option("--case", help="Only this case. Default: all.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: does it run, not how fast is it.")] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Where results.json and figures go.", file_okay=False)] = Path(
        "benchmarks"
    ),
    readme: Annotated[
        Path | None, typer.Option("--readme", help="Page whose table is written from the results.", exists=True)
    ] = None,
    as_json: Json = False,
) -> None:
    """Run benchmarks and write their results."""
    package = "lyceum_runtime" if name == "runtime" else entry_of(name).package
    module = f"{package}.bench"
    try:
        benchmark = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (package, module):
            raise CliError(f"{name}'s benchmarks need {error.name}", "install it beside this package") from None
        if error.name == package:
            raise CliError(f"{package} is not installed", f"pip install {package.replace('_', '-')}") from None
        raise CliError(f"{name} has no benchmarks", "try `lyceum bench runtime`") from None
    out_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        results: Any = benchmark.run(case, quick, out_dir)
    if readme is not None:
        from lyceum_runtime.bench_report import write_readme

        write_readme(readme, results)
    if as_json:
        emit(results)
