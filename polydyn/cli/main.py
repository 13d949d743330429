"""``polydyn compile | run | inspect | explain | profile | doctor``; the other commands have files of their own.

A PolydynError is printed without a traceback and gives exit code 1; ``--debug`` shows where it comes from.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import polydyn
from polydyn.cli.doctor import findings
from polydyn.cli.inputs import dim_sizes, feeds_for, file_names, named_files, sizes
from polydyn.compiler import Options
from polydyn.compiler import compile as compile_model
from polydyn.errors import InputError, PolydynError
from polydyn.fusion.pipeline import NAMES
from polydyn.program.explain import declared, text_table
from polydyn.program.program import Program, load

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


class Commands(click.Group):
    """The group of commands; turns errors that polydyn raises on purpose into text and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except PolydynError as e:
            if ctx.params.get("debug"):
                raise
            errors.print(f"error ({type(e).__name__}): {e}", markup=False)
            ctx.exit(1)


DIM_HELP = "Sizes of a dim; L=8:512:8 for multiples of 8, L=1:512@128,384 (or @128:0.6,384:0.4) for likely ones."


def of_machine(f: Any) -> Any:
    """Options that every command takes which may have to compile."""
    f = click.option("--threads", type=click.IntRange(1, 256), help="Per call; default all cores.")(f)
    f = click.option("--target", default="cpu", show_default=True, help="cpu, cpu:avx2, cpu:avx512, cuda:sm_80 ...")(f)
    switch = click.Choice(NAMES)
    f = click.option("--without", type=switch, multiple=True, help="A fusion pass to leave out, as in stitch.")(f)
    return click.option("--dim", "dims", type=dim_sizes, metavar="B=1:64", multiple=True, help=DIM_HELP)(f)


def open_program(
    path: str, dims: tuple[Any, ...], target: str, threads: int | None, without: tuple[str, ...]
) -> Program:
    """The program in an artifact, or a model compiled now (fast when the cache has its kernels).

    InputError: an artifact with options that only compiling heeds.
    """
    try:
        with open(path, "rb") as f:
            artifact = f.read(4) == b"PK\x03\x04"
    except OSError:
        artifact = False  # compile says what is wrong with the path
    if artifact:
        program = load(path, threads=threads)
        if dims or without or target not in ("cpu", program.manifest["target"]):
            raise InputError(
                f"{path} is compiled already, for {program.manifest['target']}",
                rule="--dim, --without and --target are for models",
                remedy="leave them out, or give the model",
            )
        return program
    return compile_model(path, target=target, dims=dict(dims), threads=threads, options=Options(frozenset(without)))


@click.group(cls=Commands)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(polydyn.__version__, prog_name="polydyn")
def main(debug: bool) -> None:
    """Compile an ONNX model once, for every shape."""


@main.command("compile")
@click.argument("model")
@click.option("-o", "--output", required=True, help="The artifact to write.")
@click.option("--records", help="A record file of polydyn tune, which chooses tiles; it is only read.")
@click.option("--strategy", default=Options.strategy, show_default=True, help="Whose searches in the records count.")
@click.option("--tf32", is_flag=True, help="On CUDA, float32 products on tensor cores, operands rounded to 10 bits.")
@of_machine
def compile_(
    model: str, output: str, records: str | None, strategy: str, tf32: bool, dims: tuple[Any, ...], target: str,
    threads: int | None, without: tuple[str, ...],
) -> None:  # fmt: skip
    """Compile MODEL and write an artifact, which runs without a compiler."""
    start = time.perf_counter()
    options = Options(frozenset(without), strategy, tf32)
    program = compile_model(model, target=target, dims=dict(dims), threads=threads, options=options, records=records)
    seconds = time.perf_counter() - start
    program.save(output)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    console.print(
        f"compiled in {seconds:.1f} s: {len(program.launches)} kernels, {program.kernel_count} unique, "
        f"{program.compilations} translation units compiled (the others were in the cache), peak memory {peak:.0f} MB"
    )
    console.print(f"{output}: {Path(output).stat().st_size / 1e6:.1f} MB")


@main.command()
@click.argument("program")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes for made-up inputs, as in B=1,L=8.")
@click.option("--input", "files", multiple=True, help="An input from a file, as in name=array.npy.")
@click.option("--output-dir", type=click.Path(file_okay=False), help="Where to write the outputs as .npy files.")
@of_machine
def run(
    program: str, shape: dict[str, int] | None, files: tuple[str, ...], output_dir: str | None,
    dims: tuple[Any, ...], target: str, threads: int | None, without: tuple[str, ...],
) -> None:  # fmt: skip
    """Run PROGRAM (an artifact or a model) once and describe its outputs.

    Inputs without a file are made up: seeded normal numbers, and zeros and ones for integers.
    """
    opened = open_program(program, dims, target, threads, without)
    feeds = feeds_for(opened, shape or {}, named_files(files))
    start = time.perf_counter()
    results = opened.run(feeds)
    milliseconds = (time.perf_counter() - start) * 1e3
    table = Table("output", "dtype", "shape", "min", "mean", "max")
    for name, a in results.items():
        wide = a.astype(np.float64)
        numbers = [f"{x:.6g}" for x in (wide.min(), wide.mean(), wide.max())] if a.size else ["-"] * 3
        table.add_row(name, str(a.dtype), "x".join(map(str, a.shape)) or "scalar", *numbers)
    console.print(table)
    console.print(f"first call {milliseconds:.3f} ms")
    if output_dir:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in file_names(results).items():
            np.save(folder / file, results[name])
            console.print(f"written: {folder / file}")


@main.command()
@click.argument("program")
@of_machine
def inspect(
    program: str, dims: tuple[Any, ...], target: str, threads: int | None, without: tuple[str, ...]
) -> None:
    """Say what PROGRAM (an artifact or a model) takes, gives, demands and consists of."""
    opened = open_program(program, dims, target, threads, without)
    m = opened.manifest
    sections = {
        "symbols": [f"{s}: {where}" for s, where in opened.symbols.items()],
        "inputs": [f"{n}: {t}" for n, t in opened.inputs.items()],
        "outputs": [f"{n}: {t}" for n, t in opened.outputs.items()],
        "compiled for": [f"{name}: {sizes}" for name, sizes in declared(m).items()] or ["any size of every symbol"],
        "guards, checked on every call": opened.guards,
        "indices, checked on every call": [f"{c['rule']}: {c['message']}" for c in m["index_checks"]],
        "host operators": ["none: every operator is compiled (native: 0, python: 0)"],
        f"launches ({len(opened.launches)} of {opened.kernel_count} kernels)": [
            f"{' | '.join(dict.fromkeys(c['kernel'] for c in x['candidates']))}  {x['label']}" for x in m["launches"]
        ],
        "notes": list(m["notes"]),
    }
    console.print(f"{m['name'] or 'model'}: polydyn {m['polydyn']}, target {m['target']}, {m['compiler']}")
    console.print(f"weights {opened.weight_bytes / 1e6:.1f} MB")
    for title, lines in sections.items():
        console.print(f"\n{title}", style="bold")
        console.print("\n".join(f"  {line}" for line in lines) or "  none", markup=False)


@main.command()
@click.argument("program")
@click.option("--shape", type=sizes, metavar="B=1,L=8", required=True, help="Sizes of the dims, as in B=1,L=8.")
@click.option("--why", is_flag=True, help="Also sizes, scratch and the reason for every fused primitive.")
@click.option("--peak", type=float, help="GFLOP/s of the machine: adds the least time of the shape.")
@click.option("--bandwidth", type=float, help="GB/s of the machine, with --peak.")
@of_machine
def explain(
    program: str, shape: dict[str, int], why: bool, peak: float | None, bandwidth: float | None,
    dims: tuple[Any, ...], target: str, threads: int | None, without: tuple[str, ...],
) -> None:  # fmt: skip
    """Which kernel every launch of PROGRAM uses at a shape, with its tiles, work and reasons."""
    explained = open_program(program, dims, target, threads, without).explain(**shape)
    console.print(explained.details() if why else str(explained), markup=False)
    if peak and bandwidth:
        least = sum(x.seconds(peak * 1e9, bandwidth * 1e9) for x in explained.launches)
        console.print(f"\nleast time at {peak:g} GFLOP/s and {bandwidth:g} GB/s: {least * 1e3:.3f} ms")


@main.command()
@click.argument("program")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes for made-up inputs, as in B=1,L=8.")
@click.option("--input", "files", multiple=True, help="An input from a file, as in name=array.npy.")
@of_machine
def profile(
    program: str, shape: dict[str, int] | None, files: tuple[str, ...],
    dims: tuple[Any, ...], target: str, threads: int | None, without: tuple[str, ...],
) -> None:  # fmt: skip
    """The time of every kernel of PROGRAM at a shape (medians of five calls)."""
    opened = open_program(program, dims, target, threads, without)
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
    console.print(text_table(heading, table), markup=False)
    console.print(f"{len(times)} launches, {total / 1e6:.3f} ms, {opened.threads} threads")


@main.command()
def doctor() -> None:
    """What this machine offers: compiler, processor, cache, packages."""
    ok = True
    for finding in findings():
        ok &= finding.ok
        console.print(f"{'ok ' if finding.ok else '-- '} {finding.what}: {finding.text}", markup=False)
    sys.exit(0 if ok else 1)
