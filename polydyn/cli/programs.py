"""``polydyn compile | run | inspect | explain | profile | doctor``; the other commands have their own files."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydyn.cli.group import main
from polydyn.cli.machine import CompileSettings, as_json, of_machine, of_program
from polydyn.cli.output import answer, keep_source, print_json, print_text
from polydyn.cli.parsing import sizes

if TYPE_CHECKING:
    from polydyn.runtime.explain import Explanation
    from polydyn.runtime.program import Program


@main.command("compile")
@click.argument("model")
@click.option("-o", "--output", help="The artifact to write; by default MODEL.polydyn in this folder.")
@click.option("--timing", is_flag=True, help="Show where the time goes. A stored program only opens; see --no-cache.")
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), help="Give up after this many seconds.")
@as_json
@of_machine
def compile_(
    model: str, output: str | None, timing: bool, deadline: float | None, as_json: bool, settings: CompileSettings
) -> None:
    """Compile MODEL into an artifact, which runs without a compiler.

    MODEL is an ONNX file, or a folder that Hugging Face's transformers wrote.
    """
    from polydyn.program_cache import within
    from polydyn.runtime.tables import counted

    output = output or default_output(model)
    keep_source(model, output)
    start = time.perf_counter()
    if settings.foreign:
        from polydyn.build.features import architecture

        with within(deadline):
            arch = settings.write(model, output).manifest["architecture"]
        result = {"output": output, "bytes": Path(output).stat().st_size, "architecture": arch}
        needs = "" if arch != architecture() else " with the processor features of its target"
        answer(as_json, result, f"{output}: {result['bytes'] / 1e6:.1f} MB, opens on {arch}{needs}")
        return
    with within(deadline):
        program = settings.compile(model)
    seconds = time.perf_counter() - start
    program.save(output)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    size = Path(output).stat().st_size
    facts = {
        "output": output, "bytes": size, "seconds": seconds, "launches": len(program.launches),
        "kernels": program.kernel_count, "compilations": program.compilations, "peak_bytes": int(peak * 2**20),
    }  # fmt: skip
    contents = f"{counted(len(program.launches), 'launch')}, {counted(program.kernel_count, 'kernel')}"
    made = f"opened from the cache in {seconds:.1f} s: {contents}"
    if program.timing and program.timing.is_compilation:
        made = f"compiled in {seconds:.1f} s: {contents}, "
        made += f"{counted(program.compilations, 'translation unit')} compiled (the others were in the cache)"
    facts |= {"timing": program.timing.to_json()} if timing and program.timing else {}
    answer(
        as_json, facts, *([f"{program.timing}\n"] if timing else []),
        f"{made}, peak memory {peak:.0f} MB",
        f"{output}: {size / 1e6:.1f} MB",
    )  # fmt: skip


def default_output(model: str) -> str:
    """Return the name of a model's artifact: the file's without its ending, or the folder's."""
    path = Path(os.path.abspath(model))
    return f"{path.name if path.is_dir() else path.stem}.polydyn"


@main.command()
@click.argument("program")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes for generated inputs, as in B=1,L=8.")
@click.option("--input", "files", multiple=True, help="An input from a file, as in name=array.npy.")
@click.option("--output-dir", type=click.Path(file_okay=False), help="Folder for the outputs as .npy files.")
@as_json
@of_program
def run(
    program: str, shape: dict[str, int] | None, files: tuple[str, ...], output_dir: str | None,
    as_json: bool, settings: CompileSettings,
) -> None:  # fmt: skip
    """Run PROGRAM (an artifact or a model) once and describe its outputs.

    Inputs without a file are generated: seeded normal numbers, and zeros and ones for integers.
    """
    import numpy as np

    from polydyn.build.cache import replacing, writable
    from polydyn.cli.inputs import feeds_for, file_names, named_files
    from polydyn.runtime.explain import text_table

    opened = settings.open(program)
    feeds = feeds_for(opened, shape or {}, named_files(files))
    start = time.perf_counter()
    results = opened.run(feeds)
    milliseconds = (time.perf_counter() - start) * 1e3
    if output_dir:
        folder = Path(output_dir)
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, file in file_names(results).items():
                with replacing(folder / file) as f:
                    np.save(f, results[name])
    if as_json:
        shapes = {n: {"dtype": str(a.dtype), "shape": list(a.shape)} for n, a in results.items()}
        print_json({"outputs": shapes, "first_call_ms": milliseconds, "output_dir": output_dir})
        return
    rows = []
    dtypes = {o["name"]: o["dtype"] for o in opened.manifest["outputs"]}
    for name, a in results.items():
        wide, exact = a.astype(np.float64), dtypes[name] == str(a.dtype)  # else the bits of a type that numpy lacks
        numbers = [f"{x:.6g}" for x in (wide.min(), wide.mean(), wide.max())] if a.size and exact else ["-"] * 3
        rows.append((name, dtypes[name], "x".join(map(str, a.shape)) or "scalar", *numbers))
    print_text(text_table(("output", "dtype", "shape", "min", "mean", "max"), rows, optional=("dtype", "min", "max")))
    print_text(f"first call {milliseconds:.3f} ms")
    for file in file_names(results).values() if output_dir else ():
        print_text(f"written: {Path(output_dir or '') / file}")


@main.command()
@click.argument("program")
@as_json
@of_program
def inspect(program: str, as_json: bool, settings: CompileSettings) -> None:
    """Show the inputs, outputs, guards, kernels and notes of PROGRAM (an artifact or a model)."""
    from polydyn.runtime.explain import declared, refused_sizes

    opened = settings.open(program)
    m = opened.manifest
    if as_json:
        print_json({
            "name": m["name"], "polydyn": m["polydyn"], "target": m["target"], "weight_bytes": opened.weight_bytes,
            "symbols": opened.symbols, "inputs": opened.inputs, "outputs": opened.outputs, "guards": opened.guards,
            "compiled_for": {n: str(z) for n, z in declared(m).items()}, "launches": opened.launches,
            "kernels": opened.kernel_count, "notes": list(m["notes"]),
        })  # fmt: skip
        return
    sections = {
        "symbols": [f"{s}: {where}" for s, where in opened.symbols.items()],
        "inputs": [f"{n}: {t}" for n, t in opened.inputs.items()],
        "outputs": [f"{n}: {t}" for n, t in opened.outputs.items()],
        "compiled for": [f"{name}: {sizes}" for name, sizes in declared(m).items()] or ["any size of every symbol"],
        **({"sizes of these that the model refuses": list(refused.values())} if (refused := refused_sizes(m)) else {}),
        "guards, checked on every call": opened.guards,
        "indices, checked on every call": [f"{c['rule']}: {c['message']}" for c in m["index_checks"]],
        "host operators": opened.steps or ["none: every operator is compiled (native: 0, python: 0)"],
        f"launches ({len(opened.launches)} of {opened.kernel_count} kernels)": [
            f"{' | '.join(dict.fromkeys(c['kernel'] for c in x['candidates']))}  {x['label']}" for x in m["launches"]
        ],
        **{f"launches of {name}": body.launches for name, body in opened.bodies.items()},
        "notes": list(m["notes"]),
    }
    print_text(f"{m['name'] or 'model'}: polydyn {m['polydyn']}, target {m['target']}, {m['compiler']}")
    print_text(f"weights {opened.weight_bytes / 1e6:.1f} MB")
    for title, lines in sections.items():
        print_text(f"\n{title}", style="bold")
        print_text("\n".join(f"  {line}" for line in lines) or "  none")


@main.command()
@click.argument("program")
@click.option("--shape", type=sizes, metavar="B=1,L=8", required=True, help="Sizes of the dims, as in B=1,L=8.")
@click.option("--why", is_flag=True, help="Add sizes, scratch and the reason for every fused primitive.")
@click.option("--peak", type=float, help="Peak GFLOP/s of the machine; adds the minimum time of the shape.")
@click.option("--bandwidth", type=float, help="GB/s of the machine; use it with --peak.")
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path),
              help="Write one HTML page: times, roofline (with --peak), memory plan, sources.")  # fmt: skip
@as_json
@of_program
def explain(
    program: str, shape: dict[str, int], why: bool, peak: float | None, bandwidth: float | None, page: Path | None,
    as_json: bool, settings: CompileSettings,
) -> None:  # fmt: skip
    """Show the kernel that every launch of PROGRAM uses at a shape, with tiles, work and reasons."""
    for name, value in (("--peak", peak), ("--bandwidth", bandwidth)):
        if value is not None and not value > 0:
            raise click.UsageError(f"{name} must be a realistic machine limit, not {value:g}")
    if (peak is None) != (bandwidth is None):
        raise click.UsageError("--peak and --bandwidth belong together")
    keep_source(program, page)
    opened = settings.open(program)
    explained = opened.explain(**shape)
    if page is not None:
        _write_page(page, opened, explained, shape, (peak or 0.0, bandwidth or 0.0))
        if not as_json:
            print_text(f"{page}: {page.stat().st_size / 1e6:.2f} MB")
            return
    if as_json:
        names = ("kernel", "label", "wave", "tasks", "threads", "flops", "bytes")
        rows = [{n: getattr(x, n, None) for n in names} for x in explained.launches]
        print_json({"shape": shape, "launches": rows})
        return
    print_text(explained.details() if why else str(explained))
    if peak and bandwidth:
        minimum = sum(x.seconds(peak * 1e9, bandwidth * 1e9) for x in explained.launches)
        print_text(f"\nminimum time at {peak:g} GFLOP/s and {bandwidth:g} GB/s: {minimum * 1e3:.3f} ms")


def _write_page(
    path: Path, program: Program, explained: Explanation, shape: dict[str, int], limit: tuple[float, float]
) -> None:
    """Write the page of ``explain --html``; launches on threads are timed. InputError: it cannot be written."""
    from polydyn.build.cache import writable, write_atomically
    from polydyn.cli.inputs import feeds_for
    from polydyn.explore.pictures.page import explain_page, limits
    from polydyn.runtime.spans import has_spans

    times, spans = None, None
    if has_spans(program.manifest):
        feeds = feeds_for(program, shape, {})
        times, spans = program.profile(feeds), program.trace(feeds)
    hardware = limits(limit[0] * 1e9, limit[1] * 1e9, program.threads) if all(limit) else None
    with writable(path):
        write_atomically(path, explain_page(program, explained, times, spans, hardware).encode())


@main.command()
@click.argument("program")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes for generated inputs, as in B=1,L=8.")
@click.option("--input", "files", multiple=True, help="An input from a file, as in name=array.npy.")
@as_json
@of_program
def profile(
    program: str, shape: dict[str, int] | None, files: tuple[str, ...],
    as_json: bool, settings: CompileSettings,
) -> None:  # fmt: skip
    """Show the time of every kernel of PROGRAM at a shape (medians of five calls)."""
    from polydyn.cli.inputs import feeds_for, named_files
    from polydyn.runtime.explain import text_table

    opened = settings.open(program)
    times = opened.profile(feeds_for(opened, shape or {}, named_files(files)))
    total = sum(t.nanoseconds for t in times) or 1
    heading = ("kernel", "first launch", "calls", "time us", "GFLOP/s", "GB/s", "share")
    table: list[tuple[str, ...]] = []
    groups: dict[str, list[Any]] = {}
    for t in times:
        groups.setdefault(t.kernel, []).append(t)
    for name, rows in sorted(groups.items(), key=lambda g: -sum(t.nanoseconds for t in g[1])):
        ns, flops, moved = (sum(getattr(t, f) for t in rows) for f in ("nanoseconds", "flops", "bytes"))
        rates = [f"{x / ns:.1f}" if ns else "-" for x in (flops, moved)]
        table.append((name, rows[0].label, str(len(rows)), f"{ns / 1e3:.1f}", *rates, f"{ns / total:.1%}"))
    answer(
        as_json, {"threads": opened.threads, "launches": [asdict(t) for t in times]},
        text_table(heading, table, optional=("GB/s", "calls", "first launch")),
        f"{len(times)} launches, {total / 1e6:.3f} ms, {opened.threads} threads",
    )  # fmt: skip


@main.command()
@as_json
def doctor(as_json: bool) -> None:
    """Show what this machine offers: compiler, processor, cache, packages."""
    from polydyn.cli.doctor import findings

    report = list(findings())
    answer(as_json, [asdict(f) for f in report], *map(str, report))
    sys.exit(0 if all(f.ok for f in report) else 1)
