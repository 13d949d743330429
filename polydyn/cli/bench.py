"""``polydyn bench``: times of a model in polydyn and in other runtimes."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydyn.cli.group import main
from polydyn.cli.machine import DIFFERENT, SHAPES, CompileSettings, as_json, of_machine
from polydyn.cli.output import answer, keep_source
from polydyn.cli.timing import PERCENTILES, Plan, Times, allowed_error, largest_error, measured, shape_text
from polydyn.errors import InputError

if TYPE_CHECKING:
    from polydyn.cli.baselines import Call
    from polydyn.runtime.program import Program

MAX_CATEGORIES = 4
"""Maximum number of sizes of one dim that are drawn as categories. More are drawn on an axis of numbers."""


@main.command()
@click.argument("model")
@SHAPES
@click.option(
    "--against",
    default="onnxruntime",
    show_default=True,
    help="Baselines, separated by commas: onnxruntime, openvino, torch, inductor; none for polydyn alone.",
)
@click.option(
    "--module",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The same model for torch and inductor, written by torch.export.save.",
)
@click.option(
    "--rounds",
    default=20,
    show_default=True,
    type=click.IntRange(1),
    help="Timed calls of each caller per runtime. Runtimes alternate.",
)
@click.option(
    "-t",
    "--duration",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Measure each shape for this time instead, shared by all runtimes.",
)
@click.option(
    "--warmup",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Calls before the timed ones; the results of the first are compared.",
)
@click.option(
    "--concurrency",
    default=1,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Callers at once, each in a thread of its own.",
)
@click.option(
    "--csv",
    "table",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a table: a row for each shape and runtime.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the times: a .svg or .html file.")
@as_json
@of_machine
def bench(
    model: str, shapes: tuple[dict[str, int], ...], against: str, module: Path | None, rounds: int,
    duration: float | None, warmup: int, concurrency: int, table: Path | None, plot: Path | None, as_json: bool,
    settings: CompileSettings,
) -> None:  # fmt: skip
    """Time MODEL and other runtimes at each shape, alternating, and compare the results; exit code 3 if they differ.

    The times are those of whole calls from Python: p50 (the median), p90 and p99, and the calls per second of all
    callers together. A difference smaller than the machine's noise means nothing: the column spread is the
    interquartile range relative to the median.
    """
    from polydyn.runtime.explain import text_table

    keep_source(model, table, plot)
    baselines = _checked(model, against, plot)
    program = settings.open(model)
    calls = _opened(program, model, module, baselines)
    plan = Plan(rounds, duration, warmup, concurrency)
    rows = [_row(*x) for x in measured(program, shapes, calls, plan)]
    worst = max((e for row in rows for e in row["error"].values()), default=0.0)
    lines = [line for row in rows for line in _lines(row)]
    if table is not None:
        _write_csv(table, lines)
    if plot is not None:
        _draw(plot, Path(model).name, rows)
    heading = ("shape", "runtime", *(f"p{p} ms" for p in PERCENTILES), "calls/s", "spread", "times polydyn's", "error")
    facts = {"model": model, "threads": program.threads, **vars(plan), "shapes": rows}
    answer(
        as_json, facts, text_table(heading, list(map(_texts, lines)), optional=("spread", "p90 ms", "error")),
        f"{program.threads} threads per call, {concurrency} caller{'s' * (concurrency > 1)}, "
        f"{min(row['calls'] for row in rows)} alternating calls per runtime and shape",
    )  # fmt: skip
    sys.exit(DIFFERENT if worst > allowed_error(program) else 0)


def _checked(model: str, against: str, plot: Path | None) -> list[str]:
    """Check the arguments and return the names of the baselines. InputError and UsageError: one is wrong."""
    from polydyn.cli.baselines import baseline_names
    from polydyn.runtime.artifact import is_artifact

    if is_artifact(model):
        raise InputError(f"{model} is a saved program", rule="bench compares runtimes of one model",
                         remedy="give the .onnx file, or compare two programs with polydyn compare")  # fmt: skip
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise click.UsageError(f"{plot} does not end in .svg or .html")
    return [] if against == "none" else baseline_names(against)


def _opened(program: Program, model: str, module: Path | None, baselines: Sequence[str]) -> dict[str, Call]:
    """Return polydyn and the baselines as functions of a call's inputs."""
    from polydyn.cli.baselines import Source, open_baseline

    inputs, outputs = (tuple(x["name"] for x in program.manifest[kind]) for kind in ("inputs", "outputs"))
    source = Source(model, module, inputs, outputs, program.threads)
    calls: dict[str, Call] = {"polydyn": program.run}
    return calls | {n: open_baseline(n, source) for n in baselines}


def _row(
    shape: Mapping[str, int], times: Mapping[str, Times], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the numbers of one shape, each by runtime; milliseconds."""
    return {
        "shape": dict(shape),
        "calls": min(len(t.seconds) for t in times.values()),
        "ms": {n: t.median * 1e3 for n, t in times.items()},
        **{f"p{p}_ms": {n: t.percentile(p) * 1e3 for n, t in times.items()} for p in PERCENTILES},
        "calls_per_second": {n: t.throughput for n, t in times.items()},
        "spread": times["polydyn"].spread,
        "spreads": {n: t.spread for n, t in times.items()},
        "error": {n: largest_error(results["polydyn"], r) for n, r in results.items() if n != "polydyn"},
    }


def _lines(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each runtime of a shape."""
    return [
        {"shape": shape_text(row["shape"]), "runtime": n, **{f"p{p}_ms": row[f"p{p}_ms"][n] for p in PERCENTILES},
         "calls_per_second": row["calls_per_second"][n], "spread": row["spreads"][n],
         "times_polydyn": ms / row["ms"]["polydyn"], "error": row["error"].get(n), "calls": row["calls"]}
        for n, ms in row["ms"].items()
    ]  # fmt: skip


def _texts(line: Mapping[str, Any]) -> tuple[str, ...]:
    times = [f"{line[f'p{p}_ms']:.3f}" for p in PERCENTILES]
    error = "" if line["error"] is None else f"{line['error']:.1e}"
    rates = f"{line['calls_per_second']:.1f}", f"{line['spread']:.0%}", f"{line['times_polydyn']:.2f}"
    return line["shape"], line["runtime"], *times, *rates, error


def _write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of numbers. UnwritableError: the file cannot be written."""
    from polydyn.build.cache import writable, write_atomically

    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    with writable(path):
        write_atomically(path, text.getvalue().encode())


def _draw(path: Path, model: str, rows: list[dict[str, Any]]) -> None:
    """Plot the times over the dim that varies, or over the shapes as categories if several or none do.

    UnwritableError: the file cannot be written.
    """
    from polydyn.explore.pictures import lines

    dims = [n for n in rows[0]["shape"] if len({r["shape"].get(n) for r in rows}) > 1]
    numeric = len(dims) == 1 and len(rows) > MAX_CATEGORIES
    xs = [float(r["shape"][dims[0]]) for r in rows] if numeric else list(map(float, range(len(rows))))
    series = {n: {x: r["ms"][n] / 1e3 for x, r in zip(xs, rows, strict=True)} for n in rows[0]["ms"]}
    names = [] if numeric else [shape_text(r["shape"]) for r in rows]
    lines(series, dims[0] if numeric else "", "s", f"{model}: seconds of a call", names=names).save(path)
