"""``polydyn compare | verify | trace``: compare programs with others and with the reference."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydyn.cli.group import main
from polydyn.cli.machine import DIFFERENT, SHAPES, CompileSettings, as_json, of_machine, of_program
from polydyn.cli.output import answer, keep_source
from polydyn.cli.parsing import sizes
from polydyn.cli.timing import Plan, measured, shape_text
from polydyn.errors import InputError

if TYPE_CHECKING:
    from polydyn.runtime.program import Program


@main.command()
@click.argument("first")
@click.argument("second")
@SHAPES
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1),
              help="Number of timed calls per program. Programs alternate.")  # fmt: skip
@as_json
@of_program
def compare(
    first: str, second: str, shapes: tuple[dict[str, int], ...], rounds: int, as_json: bool, settings: CompileSettings
) -> None:
    """Compare two programs (artifacts or models): kernels, times and results at each shape; exit code 3 if results
    differ.
    """
    from polydyn.runtime.explain import text_table
    from polydyn.verification import TOLERANCE
    from polydyn.verification import compare as compare_arrays

    a, b = settings.open(first), settings.open(second)
    facts = [_facts(first, a), _facts(second, b)]
    rows = []
    for shape, times, results in measured(a, shapes, {"first": a.run, "second": b.run}, Plan(rounds)):
        common = [n for n in results["first"] if n in results["second"]]
        checks = [compare_arrays(n, results["second"][n], results["first"][n], TOLERANCE) for n in common
                  if results["first"][n].shape == results["second"][n].shape]  # fmt: skip
        ms = [times[n].median * 1e3 for n in ("first", "second")]
        ok = len(checks) == len(results["first"]) == len(results["second"]) and all(c.ok for c in checks)
        rows.append({"shape": shape, "ms": ms, "error": max((c.error for c in checks), default=0.0), "ok": ok})
    both = {k["name"] for k in a.manifest["kernels"]} & {k["name"] for k in b.manifest["kernels"]}
    table = [
        (f["path"], f["target"], str(f["launches"]), str(f["kernels"]), str(f["kernels"] - len(both)),
         f"{f['weight_bytes'] / 1e6:.2f}")
        for f in facts
    ]  # fmt: skip
    answer(
        as_json, {"programs": facts, "shapes": rows},
        text_table(("", "target", "launches", "kernels", "only here", "weights MB"), table),
        text_table(("shape", "first ms", "second ms", "second / first", "error", ""), list(map(_row, rows))),
    )  # fmt: skip
    sys.exit(0 if all(r["ok"] for r in rows) else DIFFERENT)


def _facts(path: str, p: Program) -> dict[str, Any]:
    return {
        "path": path, "target": p.manifest["target"], "launches": len(p.launches), "kernels": p.kernel_count,
        "weight_bytes": p.weight_bytes, "threads": p.threads,
    }  # fmt: skip


def _row(r: Mapping[str, Any]) -> tuple[str, ...]:
    x, y = r["ms"]
    shape, last = shape_text(r["shape"]), "" if r["ok"] else "differs"
    return shape, f"{x:.3f}", f"{y:.3f}", f"{y / x:.2f}", f"{r['error']:.1e}", last


@main.command()
@click.argument("model")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes for generated inputs, as in B=1,L=8.")
@click.option("--input", "files", multiple=True, help="An input from a file, as in name=array.npy.")
@click.option(
    "--tolerance",
    default=1e-4,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Tolerance of floats, relative to the scale.",
)
@as_json
@of_machine
def verify(
    model: str,
    shape: dict[str, int] | None,
    files: tuple[str, ...],
    tolerance: float,
    as_json: bool,
    settings: CompileSettings,
) -> None:
    """Recompute every group of MODEL by the reference, from the program's own intermediates; exit code 3 if one
    differs.

    Kernels check every memory access, which is slow: choose small sizes.
    """
    from polydyn.cli.inputs import feeds_for, named_files
    from polydyn.cli.progress import working
    from polydyn.runtime.artifact import is_artifact
    from polydyn.verification import check_target, verify_model

    if is_artifact(model):
        raise InputError(f"{model} is a saved program", rule="verify needs the graph", remedy="give the .onnx file")
    check_target(settings.target)
    feeds = feeds_for(settings.open(model), shape or {}, named_files(files))
    with working("recomputing every group"):
        checks = verify_model(
            model, feeds, target=settings.target, dims=dict(settings.dims), options=settings.options,
            tolerance=tolerance,
        )  # fmt: skip
    bad, worst = [c for c in checks if not c.ok], max(checks, key=lambda c: c.error, default=None)
    if bad:
        c = bad[0]
        values = f"element {list(c.at)} is {c.got:.8g}, the reference has {c.want:.8g}"
        line = f"{c.tensor} {list(c.shape)} differs first: {values} (error {c.error:.1e} of its scale); "
        line += f"{len(bad)} of {len(checks)} tensors differ"
    else:
        largest = f"largest error {worst.error:.1e} of its scale, in {worst.tensor}" if worst else "nothing to compare"
        line = f"{len(checks)} tensors equal the reference; {largest}"
    data = {"checked": len(checks), "different": [asdict(c) for c in bad], "worst": worst.error if worst else 0.0}
    answer(as_json, data, line)
    sys.exit(DIFFERENT if bad else 0)


@main.command()
@click.argument("program")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes for generated inputs, as in B=1,L=8.")
@click.option("--input", "files", multiple=True, help="An input from a file, as in name=array.npy.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The trace file.")
@as_json
@of_program
def trace(
    program: str,
    shape: dict[str, int] | None,
    files: tuple[str, ...],
    output: Path,
    as_json: bool,
    settings: CompileSettings,
) -> None:
    """Write the work of each thread in a call of PROGRAM as a trace for chrome://tracing or Perfetto (fastest of 5).

    Launches on a device, and launches between host steps, are timed one by one and shown in one row.
    """
    from polydyn.cli.inputs import feeds_for, named_files
    from polydyn.session.trace import call_events, write_trace

    keep_source(program, output)
    opened = settings.open(program)
    events = call_events(opened, feeds_for(opened, shape or {}, named_files(files)), repeats=5)
    write_trace(output, events)
    spent = max((e["ts"] + e["dur"] for e in events), default=0.0) / 1e3
    rows = len({e["tid"] for e in events})
    facts = {"output": str(output), "spans": len(events), "rows": rows, "ms": spent}
    answer(as_json, facts, f"{output}: {len(events)} spans in {rows} rows, {spent:.3f} ms")
