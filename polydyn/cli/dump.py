"""``polydyn dump``: the texts of every stage of a compilation, as files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import click

from polydyn.build.cache import writable
from polydyn.cli.group import main
from polydyn.cli.machine import CompileSettings, as_json, of_machine
from polydyn.cli.output import answer
from polydyn.cli.progress import compiling
from polydyn.compiler import plan_program
from polydyn.errors import DebugError, InputError, UnwritableError
from polydyn.logs import reporting
from polydyn.runtime.artifact import is_artifact, read_artifact
from polydyn.runtime.tables import counted


@main.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="A new folder.")
@as_json
@of_machine
def dump(model: str, output: Path, as_json: bool, settings: CompileSettings) -> None:
    """Write the result of every stage and pass for MODEL into a folder: graphs, groups, matrices, trees, loops, C or
    CUDA.

    For a saved program, write its sources and its manifest; none of its code runs. docs/debugging.md describes the
    files. If compilation fails, the files of the earlier stages remain.
    """
    if output.exists() and any(output.iterdir()):
        raise InputError(f"{output} is not empty", rule="polydyn dump", remedy="name a new folder")
    with writable(output):
        output.mkdir(parents=True, exist_ok=True)
    try:
        _saved(model, output, settings) if is_artifact(model) else _stages(model, output, settings)
    except BaseException as e:
        if not any(f.is_file() and f.stat().st_size for f in output.rglob("*")):
            shutil.rmtree(output)
        if isinstance(e, DebugError) and isinstance(e.__cause__, OSError):
            raise UnwritableError.of(output, e.__cause__) from e
        raise
    files = sorted(str(f.relative_to(output)) for f in output.rglob("*") if f.is_file())
    answer(as_json, {"output": str(output), "files": files}, f"{output}: {counted(len(files), 'file')}")


def _stages(model: str, output: Path, settings: CompileSettings) -> None:
    before = os.environ.get("POLYDYN_DUMP_DIR")
    os.environ["POLYDYN_DUMP_DIR"] = str(output)
    try:
        with compiling(f"compiling {Path(model).name}") as report, reporting(report):
            plan_program(model, **settings.arguments)
    finally:
        os.environ.pop("POLYDYN_DUMP_DIR")
        if before is not None:
            os.environ["POLYDYN_DUMP_DIR"] = before


def _saved(path: str, output: Path, settings: CompileSettings) -> None:
    """Write the texts of a saved program; none of its code runs, so it may be another machine's."""
    artifact = read_artifact(path, check_machine=False)
    settings.check_saved(path, artifact.manifest["target"])
    for name, text in artifact.sources.items():
        file = output / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    text = json.dumps(dict(artifact.manifest), indent=1, sort_keys=True, ensure_ascii=False)
    (output / "manifest.json").write_text(text + "\n", encoding="utf-8")
