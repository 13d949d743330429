"""``polydyn fuzz``: random models in the cells of a pairwise matrix, against ONNX Runtime and onnx.reference.

The campaign is in ``polydyn.testing``, which wheels do not have (docs/fuzzing.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydyn.build.cache import writable, write_atomically
from polydyn.cli.group import main
from polydyn.cli.machine import DIFFERENT, as_json
from polydyn.cli.output import answer
from polydyn.debug import needing_sources
from polydyn.errors import needing_extra

if TYPE_CHECKING:
    from polydyn.testing.campaign import Campaign

MARKDOWN = ".md"


@main.command()
@click.option("--models", default=100, show_default=True, type=click.IntRange(0), help="Number of models.")
@click.option("--first", default=0, show_default=True, type=int, help="Seed of the first model.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--theme", default="", help="Models of one kind: views, products, vision, operators ...")
@click.option("--cell", default="array", show_default=True, metavar="target=cpu:avx2,passes=none",
              help="One cell for all models; array: each seed has the next cell of the array.")  # fmt: skip
@click.option("--out", default="", help="Folder for models that fail, with their inputs and a script.")
@click.option("--coverage", type=click.Path(dir_okay=False, path_type=Path),
              help="Write a table of what was reached, as .json or .md.")  # fmt: skip
@click.option("--cells", is_flag=True, help="List the cells and what this machine lacks; run nothing.")
@click.option("--again", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Run a model of --out again, in its cell; repeatable.")  # fmt: skip
@as_json
@click.pass_context
def fuzz(
    ctx: click.Context, models: int, first: int, jobs: int, theme: str, cell: str, out: str, coverage: Path | None,
    cells: bool, files: tuple[Path, ...], as_json: bool,
) -> None:  # fmt: skip
    """Compare random models with ONNX Runtime; exit code 3 if one fails."""
    with needing_sources("polydyn fuzz", " with the extra test"), needing_extra("polydyn fuzz", "test"):
        from polydyn.testing import fuzz_models
        from polydyn.testing.campaign import fresh_cache
        from polydyn.testing.coverage import Coverage
        from polydyn.testing.random_onnx import THEMES
    if theme and theme not in THEMES:
        raise click.BadParameter(f"unknown theme {theme!r}; one of {', '.join(THEMES)}", ctx, param_hint="--theme")
    if cells:
        _list_cells(as_json)
        ctx.exit(0)
    with fresh_cache():
        if files:
            _run_again(ctx, files, as_json)
        settings = fuzz_models.Settings(theme, cell, compile=1, foreign=0, out=out)
        if cell != fuzz_models.ARRAY:
            settings.cell_of(first)  # an unknown cell is an error before anything runs
        campaign = fuzz_models.campaign(settings, range(first, first + models), jobs)
        if as_json:
            campaign.say = lambda _: None
        elif cell == fuzz_models.ARRAY:
            for line in _lacking():
                click.echo(line)
        failed = campaign.run()
    table = Coverage(campaign.reached)
    if coverage is not None:
        text = table.to_markdown() if coverage.suffix == MARKDOWN else json.dumps(table.to_json(), indent=1)
        with writable(coverage):
            write_atomically(coverage, text.encode())
    answer(as_json, _facts(campaign, models, table.never()), *_sentences(table.never()))
    ctx.exit(DIFFERENT if failed else 0)


def _facts(campaign: Campaign, models: int, never: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the result of a campaign as plain data."""
    failures = [
        {"seed": r.seed, "cell": r.where, "kind": r.finding.kind, "stage": r.finding.stage,
         "message": r.finding.message, "files": r.files}
        for r in campaign.failures if r.finding is not None
    ]  # fmt: skip
    counts, refusals = dict(sorted(campaign.counts.items())), dict(campaign.refusals.most_common())
    return {"models": models, "failures": failures, "counts": counts, "refused": refusals, "never reached": dict(never)}


def _sentences(never: Mapping[str, list[str]]) -> list[str]:
    return [f"{what} never reached: {', '.join(names)}" for what, names in never.items() if names]


def _lacking() -> list[str]:
    from polydyn.testing.cells import missing

    return [f"not tested here: {dimension}={value}: {why}" for (dimension, value), why in missing().items()]


def _list_cells(as_json: bool) -> None:
    from polydyn.testing.cells import array, missing, rows

    impossible = [sorted(map("=".join, pair)) for pair in array().impossible]
    lacking = {f"{dimension}={value}": why for (dimension, value), why in missing().items()}
    facts = {"cells": list(map(str, rows())), "not here": lacking, "impossible pairs": sorted(impossible)}
    answer(as_json, facts, *map(str, rows()), f"{len(rows())} cells cover every pair", *_lacking())


def _run_again(ctx: click.Context, files: tuple[Path, ...], as_json: bool) -> None:
    from polydyn.testing.fuzz_models import again

    found = {str(f): again(f).finding for f in files}
    said = {f: f"{x.kind}, {x.stage}: {x.message}" if x else "right" for f, x in found.items()}
    answer(as_json, {"models": said}, *(f"{f}: {text}" for f, text in said.items()))
    ctx.exit(DIFFERENT if any(found.values()) else 0)
