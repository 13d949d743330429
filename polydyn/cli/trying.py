"""``polydyn try``: is a model right here, is it faster, what is left to ONNX Runtime, how long does compiling take."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polydyn.cli.group import main
from polydyn.cli.machine import DIFFERENT, CompileSettings, as_json, of_machine
from polydyn.cli.output import answer, keep_source
from polydyn.cli.parsing import sizes
from polydyn.cli.timing import Plan, allowed_error, largest_error, measured, shape_text
from polydyn.errors import InputError
from polydyn.onnx_runtime import FALLBACK, RUNS, ort_classes
from polydyn.runtime.tables import counted

if TYPE_CHECKING:
    from polydyn.runtime.program import Program
    from polydyn.shapes.sizes import Sizes

NOT_FASTER = 4
"""Exit code of a model whose results are right and which is not faster."""
LEVELS = ("small", "middle", "large")
BATCHES, LENGTHS = (1, 2, 8), (8, 64, 160)
"""Sizes of first axes, and of others, that no range says; the small, the middle and the large one."""


@dataclass(frozen=True)
class Row:
    """A shape: medians of both runtimes in seconds, the larger of their spreads, the largest error of an output."""

    shape: dict[str, int]
    ours: float
    theirs: float
    spread: float
    error: float

    @property
    def faster(self) -> float:
        """How many times as fast as ONNX Runtime."""
        return self.theirs / self.ours

    @property
    def verdict(self) -> str:
        """faster, slower, or equal: the difference is within the spread."""
        if abs(self.faster - 1) <= self.spread:
            return "equal"
        return "faster" if self.faster > 1 else "slower"


@dataclass(frozen=True)
class Trial:
    """What was found: ``left`` are the nodes that ONNX Runtime runs, each with the reason. ``compiled``: whether it was
    compiled now, or opened from the cache."""

    model: str
    rows: tuple[Row, ...]
    limit: float
    left: tuple[str, ...]
    seconds: float
    compiled: bool
    threads: int
    launches: int
    target: str

    @property
    def right(self) -> bool:
        """Whether every output is within the tolerance."""
        return all(r.error <= self.limit for r in self.rows)

    @property
    def speed(self) -> str:
        """faster: at some shape, and slower at none; slower: at some shape; else equal."""
        found = {r.verdict for r in self.rows}
        return next((v for v in ("slower", "faster") if v in found), "equal")

    @property
    def mean(self) -> float:
        """Geometric mean over the shapes of how many times as fast it is."""
        return statistics.geometric_mean(r.faster for r in self.rows)

    @property
    def code(self) -> int:
        """The exit code."""
        return DIFFERENT if not self.right else 0 if self.speed == "faster" else NOT_FASTER


@main.command("try")
@click.argument("model")
@click.option("--shape", "shapes", type=sizes, metavar="B=1,L=8", multiple=True,
              help="Sizes to try; may be repeated. By default three, chosen from --dim.")  # fmt: skip
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(4),
              help="Number of timed calls per runtime. Runtimes alternate.")  # fmt: skip
@click.option("--tolerance", type=click.FloatRange(min=0), help="Allowed error, relative to the largest value.")
@click.option("-o", "--output", "page", type=click.Path(dir_okay=False, path_type=Path),
              help="Write one HTML page that needs no other file.")  # fmt: skip
@as_json
@of_machine
def try_(
    model: str, shapes: tuple[dict[str, int], ...], rounds: int, tolerance: float | None, page: Path | None,
    as_json: bool, settings: CompileSettings,
) -> None:  # fmt: skip
    """Say whether MODEL (a file or a folder) is right here, and whether it is faster than ONNX Runtime.

    Exit code 0: right and faster; 3: an output differs; 4: right, and not faster. Nodes that polydyn does not compile
    are left to ONNX Runtime and listed. Times are medians of alternating calls from Python, on generated inputs.
    """
    keep_source(model, page)
    trial = tried(model, shapes, rounds, tolerance, settings)
    if page is not None:
        from polydyn.build.cache import writable, write_atomically

        with writable(page):
            write_atomically(page, report_page(trial).encode())
    rows = [{**asdict(r), "faster": r.faster, "verdict": r.verdict} for r in trial.rows]
    data = {**asdict(trial), "rows": rows, "right": trial.right, "speed": trial.speed, "mean": trial.mean}
    answer(as_json, data, *_lines(trial), *([f"written: {page}"] if page else []))
    sys.exit(trial.code)


def tried(
    model: str, shapes: Sequence[dict[str, int]], rounds: int, tolerance: float | None, settings: CompileSettings
) -> Trial:
    """Compile a model, compare and time it. UnsupportedError: ONNX Runtime is not installed, or an input cannot be
    generated. InputError: the model is a saved program, or no shape was found."""
    from polydyn.cli.baselines import Source, open_baseline
    from polydyn.cli.progress import working
    from polydyn.runtime.artifact import is_artifact

    ort_classes()
    if is_artifact(model):
        raise InputError(f"{model} is a saved program", rule="try compares a model with ONNX Runtime",
                         remedy="give the model, or use polydyn compare for two programs")  # fmt: skip
    settings = replace(settings, fallback=settings.fallback or FALLBACK)
    read, arguments = settings.read(model)
    start = time.perf_counter()
    with working(f"compiling {model}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the nodes that are left to ONNX Runtime are listed below
        program = settings.compile_model(read, arguments)
    seconds = time.perf_counter() - start
    chosen = list(shapes) or chosen_shapes(program)
    inputs, outputs = (tuple(x["name"] for x in program.manifest[kind]) for kind in ("inputs", "outputs"))
    source = Source(read if isinstance(read, str) else read.SerializeToString(), None, inputs, outputs, program.threads)
    calls = {"polydyn": program.run, "onnxruntime": open_baseline("onnxruntime", source)}
    rows = []
    for shape, times, results in measured(program, chosen, calls, Plan(rounds)):
        ours, theirs = (times[n] for n in calls)
        error = largest_error(results["polydyn"], results["onnxruntime"])
        rows.append(Row(shape, ours.median, theirs.median, max(ours.spread, theirs.spread), error))
    limit = allowed_error(program) if tolerance is None else tolerance
    left = tuple(n for n in program.manifest["notes"] if f") {RUNS}: " in n)
    compiled = bool(program.timing and program.timing.is_compilation)
    return Trial(
        Path(model).name, tuple(rows), limit, left, seconds, compiled, program.threads, len(program.launches),
        program.manifest["target"],
    )  # fmt: skip


def chosen_shapes(program: Program) -> list[dict[str, int]]:
    """Return a small, a middle and a large shape, fewer where they are equal. InputError: the guards of the model
    refuse them all."""
    found: list[dict[str, int]] = []
    refused = None
    for level in range(len(LEVELS)):
        try:
            shape = _shape(program, level)
        except InputError as e:
            refused = e
            continue
        if shape not in found:
            found.append(shape)
    if not found:
        raise InputError("no sizes were found that this model accepts", rule=str(refused and refused.args[0]),
                         remedy="give some: --shape B=1,L=8")  # fmt: skip
    return found


def _shape(program: Program, level: int) -> dict[str, int]:
    """Return the sizes of a level: every dim that does not follow from the ones before gets one."""
    from polydyn.runtime.explain import declared, resolve_dims

    axes = {s["symbol"]: s["axis"] for s in program.manifest["symbols"]}
    ranges, shape = declared(program.manifest), dict[str, int]()
    for _ in axes:
        try:
            resolve_dims(program.manifest, shape)
            break
        except InputError as e:
            if e.dim is None or e.dim not in axes or e.dim in shape:
                raise
            shape[e.dim] = _size(ranges.get(e.dim), BATCHES if axes[e.dim] == 0 else LENGTHS, level)
    resolve_dims(program.manifest, shape)
    return shape


def _size(given: Sizes | None, usual: Sequence[int], level: int) -> int:
    """Return a size of a dim: a likely one, else one of its range, else a usual one."""
    if given is None:
        return usual[level]
    if given.likely:
        return sorted(given.likely)[(len(given.likely) - 1) * level // (len(LEVELS) - 1)]
    low, high = given.bounds
    low = max(low, given.multiple if low == 0 else low, 1 if low == 0 else low)
    if high is None:
        high = max(low, usual[-1] // given.multiple * given.multiple)
    middle = (low + (high - low) // 8) // given.multiple * given.multiple
    return (low, max(low, middle), high)[level]


def _lines(trial: Trial) -> Iterator[str]:
    """Yield the report for a terminal."""
    from polydyn.runtime.explain import text_table

    yield from _sentences(trial)
    yield ""
    heading = ("shape", "polydyn ms", "onnxruntime ms", "times as fast", "spread", "error", "")
    yield text_table(heading, [
        (shape_text(r.shape) or "fixed", f"{r.ours * 1e3:.3f}", f"{r.theirs * 1e3:.3f}", f"{r.faster:.2f}",
         _percent(r.spread), f"{r.error:.1e}", r.verdict if r.error <= trial.limit else "differs")
        for r in trial.rows
    ])  # fmt: skip
    if trial.left:
        yield f"\nleft to ONNX Runtime ({counted(len(trial.left), 'node')}):"
        yield from (f"  {n}" for n in trial.left)


def _percent(spread: float) -> str:
    """Return a spread as text."""
    return f"{spread:.0%}" if spread < 10 else "above 999%"


def _sentences(trial: Trial) -> Iterator[str]:
    """Yield the answers to the questions."""
    worst = max(r.error for r in trial.rows)
    within = f"largest error {worst:.1e}, allowed {trial.limit:.1e}"
    yield f"right: {'yes' if trial.right else 'no'} ({within})"
    means = {"faster": "yes", "slower": "no", "equal": "no, the difference is within the spread"}
    yield f"faster: {means[trial.speed]} ({trial.mean:.2f} times as fast as ONNX Runtime, {trial.threads} threads)"
    parts = counted(len(trial.left), "node") if trial.left else "nothing"
    yield f"left to ONNX Runtime: {parts}; {counted(trial.launches, 'launch')} compiled"
    how = "compiled" if trial.compiled else "opened from the cache (--no-cache compiles)"
    yield f"{how} in {trial.seconds:.1f} s, for {trial.target}"


STYLE = """
:root{color-scheme:light dark;--ours:#2f7d4f;--theirs:#8a8f98;--quiet:#565b64}
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:46rem;padding:0 1rem;overflow-wrap:anywhere}
h1{font-size:1.4rem} h2{font-size:1.1rem;margin-top:2rem}
dl{display:grid;grid-template-columns:minmax(4rem,7rem) 1fr;gap:.3rem 1rem}
dt{font-weight:600} dd{margin:0} figure{margin:0 0 1.2rem} figcaption{font-weight:600}
.b{display:grid;grid-template-columns:6.5rem 1fr 5rem;gap:.5rem;align-items:center;font-size:.9rem}
.b i{display:block;height:.9rem;border-radius:2px;background:var(--theirs)} .b i.o{background:var(--ours)}
.b span:last-child{text-align:right} small{color:var(--quiet)}
@media(prefers-color-scheme:dark){:root{--ours:#5fbf86;--theirs:#7d838d;--quiet:#b0b6c0}}
"""


def report_page(trial: Trial) -> str:
    """Return the report as one HTML page that loads nothing."""
    speeds = {"equal": "as fast as ONNX Runtime within the spread"}
    speed = speeds.get(trial.speed, f"{trial.speed}: {trial.mean:.2f} times as fast as ONNX Runtime")
    title = f"{trial.model}: {'right' if trial.right else 'wrong'}, {speed}"
    answers = "".join(
        f"<dt>{escape(question)}<dd>{escape(said.strip() or question)}"
        for question, _, said in (s.partition(":") if ":" in s else ("time", "", s) for s in _sentences(trial))
    )
    figures = "".join(_figure(r, trial.limit) for r in trial.rows)
    left = "".join(f"<li>{escape(n)}" for n in trial.left)
    section = f"<h2>Left to ONNX Runtime</h2><ul>{left}</ul>" if left else ""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1><dl>{answers}</dl>"
        f"<h2>Times of a call</h2>{figures}{section}"
        "<p><small>Medians of alternating calls from Python on generated inputs; polydyn try.</small></html>\n"
    )


def _figure(row: Row, limit: float) -> str:
    """Return the bars of one shape."""
    longest = max(row.ours, row.theirs)
    bars = "".join(
        f"<div class=b><span>{name}</span><i{mark} style='width:{max(1.0, 100 * t / longest):.1f}%'></i>"
        f"<span>{t * 1e3:.3f} ms</span></div>"
        for name, t, mark in (("polydyn", row.ours, " class=o"), ("ONNX Runtime", row.theirs, ""))
    )
    verdict = row.verdict if row.error <= limit else "differs"
    text = f"{verdict}: {row.faster:.2f} times as fast, spread {_percent(row.spread)}, error {row.error:.1e}"
    heading = escape(shape_text(row.shape) or "fixed sizes")
    return f"<figure><figcaption>{heading}</figcaption>{bars}<small>{text}</small></figure>"
