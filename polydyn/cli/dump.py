"""``polydyn dump``: every text of every stage of a compilation, as files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import click

from polydyn.build.cache import writable
from polydyn.cli.machine import How, as_json, is_artifact, of_machine
from polydyn.cli.main import answer, main
from polydyn.cli.progress import working
from polydyn.compiler import plan_program
from polydyn.errors import InputError


@main.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="A new folder.")
@as_json
@of_machine
def dump(model: str, output: Path, as_json: bool, how: How) -> None:
    """Write what every stage and pass makes of MODEL into a folder: graphs, groups, matrices, trees, loops, C or CUDA.

    Or, of a saved program, its sources and its manifest. docs/debugging.md says what is in the files. When compiling
    fails, what the stages before it made stays: it shows how far it came.
    """
    if output.exists() and any(output.iterdir()):
        raise InputError(f"{output} is not empty", rule="polydyn dump", remedy="name a new folder")
    with writable(output):
        output.mkdir(parents=True, exist_ok=True)
    try:
        _saved(model, output, how) if is_artifact(model) else _stages(model, output, how)
    except BaseException:
        if not any(f.is_file() for f in output.rglob("*")):
            shutil.rmtree(output)
        raise
    files = sorted(str(f.relative_to(output)) for f in output.rglob("*") if f.is_file())
    answer(as_json, {"output": str(output), "files": files}, f"{output}: {len(files)} files")


def _stages(model: str, output: Path, how: How) -> None:
    before = os.environ.get("POLYDYN_DUMP_DIR")
    os.environ["POLYDYN_DUMP_DIR"] = str(output)
    try:
        with working(f"compiling {model}"):
            plan_program(model, target=how.target, dims=dict(how.dims), options=how.options, records=how.records)
    finally:
        os.environ.pop("POLYDYN_DUMP_DIR")
        if before is not None:
            os.environ["POLYDYN_DUMP_DIR"] = before


def _saved(path: str, output: Path, how: How) -> None:
    program = how.open(path)
    for name, text in program.sources.items():
        (output / name).write_text(text, encoding="utf-8")
    text = json.dumps(dict(program.manifest), indent=1, sort_keys=True, ensure_ascii=False)
    (output / "manifest.json").write_text(text + "\n", encoding="utf-8")
