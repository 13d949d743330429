"""Tokens per second of one decoder in polydyn and beside it in other tools that generate text on a CPU.

usage: python -m benchmarks.language [--quick | --smoke] [--weights float32 4 8] [--threads 1 2] [--only TOOL ...]

The decoder is a Llama-like one with random weights (``benchmarks.language_models``; ``--layers --hidden --vocabulary``)
in float32, and with weights of 4 and 8 bits in blocks of 32. Cases: prompts of 16 to 2048 ids (``--prompts``), a token
behind 0 to 4096 others (``--behind``), and a token of each of 4 and 8 texts (``--batches``) behind 128. ``--quick`` is
a sample: 4 bits, one thread, a prompt of 128, a token behind 0 and 1024, 4 texts behind 128, three rounds. ``--smoke``
is the quick sample of a decoder that has almost no weights, to see that every tool runs; its rates mean nothing.

Tools alternate, each in its own process, as in all benchmarks (``protocol.py``). A rate is the geometric mean over
turns, with its 95 % interval (Student's t, of logarithms); ``x best`` is polydyn's rate over that of the fastest other
tool, with the interval of the paired turns, and ``same`` if 1 is inside it or the ratio is within the spread of an A/A
run. ``share`` is the part of the read bandwidth that a step's weights and caches need; the read loop runs before every
case. ``error``: largest difference of logits from ONNX Runtime in float32, relative to the largest. Opening: seconds to
open and to the first token, and peak memory after a prompt of 128 ids, in fresh processes. A tool that cannot be
installed, imported or run is named with its error.

Every run appends lines to benchmarks/results/language.jsonl: one with versions, machine and options, then one for each
case and each opening. Quick runs, and other sizes than the default, write to benchmarks/out/results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import arguments, limits, record
from benchmarks.language_models import SMOKE, WEIGHTS, Made, Size, folder_of, made
from benchmarks.protocol import Contestant, verdict
from benchmarks.rows import Effort, alternate

Row = dict[str, Any]
Shape = Mapping[str, int]

OTHERS = (
    "openvino", "openvino-default", "openvino-genai", "torch", "llama.cpp", "llama.cpp-plain", "onnxruntime-genai",
    "polydyn",
)  # fmt: skip
"""Tools after ONNX Runtime. ``-default``: bfloat16 where the processor has it; ``-plain``: without flash attention."""
BATCH_BEHIND = 128
TIMES = 3
"""Fresh processes for each opening."""
OPENED = {"batch": 1, "behind": 0, "tokens": 128}
CHECKED = {"batch": 1, "behind": 0, "tokens": 16}
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Half of the 95 % interval of Student's distribution by degrees of freedom; the last for more."""
BITS_16 = ("llama.cpp", "llama.cpp-plain")
"""Tools whose caches have 16 bits."""


class Tool(Contestant):
    """A contestant that opens decoders."""

    worker = "benchmarks.language_worker"

    def memory(self) -> dict[str, int]:
        """Return bytes of its process: ``peak``, ``resident`` and ``anonymous``."""
        return self._ask(do="memory")


@dataclass(frozen=True)
class Interval:
    """A geometric mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Return the interval of positive values."""
        logs = [math.log(v) for v in values]
        middle = statistics.fmean(logs)
        if len(logs) < 2:
            return Interval(math.exp(middle), 0.0, math.inf)
        half = T_95[min(len(logs) - 1, len(T_95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
        return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half))

    def plain(self) -> list[float]:
        """Return mean, low and high."""
        return [self.mean, self.low, self.high]


@dataclass(frozen=True)
class Matrix:
    """What is measured."""

    weights: Sequence[str]
    threads: Sequence[int]
    prompts: Sequence[int]
    behind: Sequence[int]
    batches: Sequence[int]

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """Yield the name and the shape of every case."""
        for n in self.prompts:
            yield f"prompt of {n}", {"batch": 1, "behind": 0, "tokens": n}
        for n in self.behind:
            yield f"behind {n}", {"batch": 1, "behind": n, "tokens": 1}
        for b in self.batches:
            yield f"{b} texts behind {BATCH_BEHIND}", {"batch": b, "behind": BATCH_BEHIND, "tokens": 1}


WHOLE = Matrix(WEIGHTS, (1, 2), (16, 128, 512, 2048), (0, 128, 1024, 4096), (4, 8))
QUICK = Matrix(("4",), (1,), (128,), (0, 1024), (4,))


class Lines:
    """The record: a line of JSON for each fact, written at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def add(self, kind: str, **fields: Any) -> None:
        """Append a line."""
        with self.path.open("a") as f:
            f.write(json.dumps({"kind": kind, **fields}) + "\n")


class Field(contextlib.ExitStack):
    """The tools that have opened the decoder with some weights on some threads."""

    def __init__(self, tools: Sequence[str], folder: Path, size: Size, weights: str, threads: int) -> None:
        super().__init__()
        self.size, self.weights, self.threads = size, weights, threads
        self.made: dict[str, Made] = {}
        self.players: dict[str, Tool] = {}
        self.refused: dict[str, str] = {}
        for name in tools:
            try:
                self.made[name] = made(folder, size, weights, name)
                self.players[name] = self.enter_context(Tool(name, None, threads))
                self.players[name].load(self.made[name].path, weights=weights)
            except Exception as error:  # of any class and any tool: it is named in the report
                self.refused[name] = reason(error)
                self.players.pop(name, None)

    def opening(self, times: int) -> dict[str, Row]:
        """Open every tool in fresh processes, alternating. Return seconds, and bytes of the last process."""
        seconds: dict[str, list[tuple[float, float]]] = {n: [] for n in self.players}
        bytes_of: dict[str, dict[str, int]] = {}
        for _ in range(times):
            for name in self.players:
                with Tool(name, None, self.threads) as tool:
                    answer = tool.load(self.made[name].path, weights=self.weights)
                    seconds[name].append((answer["ready"], answer["ready"] + answer["first"]))
                    tool.run(OPENED)
                    bytes_of[name] = tool.memory()
        return {
            n: {"open": Interval.of([a for a, _ in s]).plain(), "first": Interval.of([b for _, b in s]).plain(),
                "read_bytes": self.made[n].read_bytes, "seconds_to_make": self.made[n].seconds,
                "version": self.players[n].version, **bytes_of[n]}
            for n, s in seconds.items()
        }  # fmt: skip

    def errors(self, expected: Sequence[float]) -> dict[str, float | None]:
        """Return the largest difference of logits by tool, relative to the largest expected one; None: not seen."""
        scale = max(map(abs, expected))
        got = {n: p.sample(CHECKED) for n, p in self.players.items()}

        def error(values: Sequence[float]) -> float | None:
            return max(abs(a - b) for a, b in zip(values, expected, strict=True)) / scale if values else None

        return {n: error(values) for n, values in got.items()}

    def measure(self, shape: Shape, effort: Effort, bandwidth: float) -> Row:
        """Measure a case. ``bandwidth``: bytes that the read loop reads in a second."""
        turns = alternate(self.players, shape, effort)
        ids = shape["batch"] * shape["tokens"]
        tools = {}
        for name, series in turns.series.items():
            rate = Interval.of([ids / t for t in series.turns])
            tools[name] = {"rate": rate.plain(), "turns": list(series.turns)}
            if shape["tokens"] == 1:
                read = self.made[name].read_bytes + self.cache_bytes(name, shape)
                tools[name]["share"] = read * rate.mean / ids / bandwidth
        return {"shape": dict(shape), "bandwidth": bandwidth, "rounds": turns.rounds, "spread": turns.noise,
                "tools": tools, "refused": dict(turns.refused), **judged(tools, turns.noise)}  # fmt: skip

    def cache_bytes(self, name: str, shape: Shape) -> int:
        """Return the bytes of keys and values that a step reads."""
        whole = self.size.cache_bytes * shape["batch"] * shape["behind"]
        return whole // 2 if name in BITS_16 else whole


def reason(error: Exception) -> str:
    """Return the class of an error and the first lines of its text."""
    text = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    return text if len(text) < 400 else text[:400] + " ..."


def judged(tools: Mapping[str, Row], noise: float) -> Row:
    """Return the fastest other tool, the ratio of polydyn's rate to its rate with its interval, and what that means."""
    rivals = {n: t["rate"][0] for n, t in tools.items() if n != "polydyn"}
    if "polydyn" not in tools or not rivals:
        return {}
    best = max(rivals, key=lambda n: rivals[n])
    pairs = zip(tools[best]["turns"], tools["polydyn"]["turns"], strict=True)
    ratio = Interval.of([theirs / ours for theirs, ours in pairs])
    inside = ratio.low <= 1 <= ratio.high
    return {"best": best, "ratio": ratio.plain(), "verdict": "same" if inside else verdict(ratio.mean, noise)}


def reference(folder: Path, size: Size) -> list[float]:
    """Return logits of ONNX Runtime in float32."""
    with Tool("onnxruntime", None, 1) as tool:
        tool.load(made(folder, size, "float32", "onnxruntime").path, weights="float32")
        return tool.sample(CHECKED)


# -- tables ------------------------------------------------------------------------------------------------------------


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, its first column aligned to the left."""
    t = Table(title=title)
    for k, head in enumerate(heads):
        t.add_column(head, justify="right" if k else "left")
    for row in rows:
        t.add_row(*row)
    Console(width=210).print(t)


def rate_text(tool: Row | None) -> str:
    """Format a rate with half of its interval in percent."""
    if not tool:
        return "-"
    mean, low, high = tool["rate"]
    half = (high - low) / 2 / mean
    return f"{mean:.4g} ±{half:.0%}" if half < 1 else f"{mean:.4g} ±>100%"


def short(name: str) -> str:
    """Return the name of a tool for the head of a column."""
    return name.replace("onnxruntime", "ORT").replace("openvino", "OV").replace("-", " ")


def show_rates(rows: Sequence[Row], title: str) -> None:
    """Print the rates of the cases of one form of the weights and one number of threads, in tokens per second."""
    names = list(dict.fromkeys(n for r in rows for n in r["tools"]))

    def cells(r: Row) -> list[str]:
        ours, best = r["tools"].get("polydyn", {}), r["tools"].get(r.get("best"), {})
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*r["ratio"]) if "ratio" in r else "-"
        share = f"{ours['share']:.0%}, {best['share']:.0%}" if "share" in ours and "share" in best else "-"
        return [r["case"], *(rate_text(r["tools"].get(n)) for n in names), short(r.get("best", "-")), ratio,
                r.get("verdict", "-"), share]  # fmt: skip

    heads = ["tokens per second", *map(short, names), "best rival", "x best", "verdict", "share, its"]
    table(title, heads, [cells(r) for r in rows])


def show_opening(opened: Mapping[str, Row], title: str) -> None:
    """Print seconds, bytes and errors."""
    heads = ["tool", "version", "open s", "with first token s", "peak MB", "resident MB", "not of files MB",
             "read a step MB", "error"]  # fmt: skip
    table(title, heads, [
        [n, r["version"].split("-releases")[0],
         "{:.3g} [{:.3g}, {:.3g}]".format(*r["open"]), "{:.3g} [{:.3g}, {:.3g}]".format(*r["first"]),
         *(f"{r[k] / 1e6:.1f}" for k in ("peak", "resident", "anonymous", "read_bytes")),
         "-" if r["error"] is None else f"{r['error']:.1e}"]
        for n, r in opened.items()
    ])  # fmt: skip


# -- the run -----------------------------------------------------------------------------------------------------------


def run_group(
    field: Field, matrix: Matrix, effort: Effort, expected: Sequence[float], lines: Lines
) -> tuple[list[Row], dict[str, Row]]:
    """Measure one form of the weights on some threads, print both tables, and write the lines."""
    about = {"weights": field.weights, "threads": field.threads}
    title = f"{field.weights}{' bits' * field.weights.isdigit()}, {field.threads} thread{'s' * (field.threads > 1)}"
    errors = field.errors(expected)
    opened = {n: r | {"error": errors[n]} for n, r in field.opening(TIMES).items()}
    lines.add("opening", **about, tools=opened, refused=field.refused)
    bandwidth, rows = 0.0, list[Row]()
    for case, shape in matrix.shapes():
        bandwidth = max(bandwidth, limits.read_bandwidth(field.threads))
        row = {"case": case, **about, **field.measure(shape, effort, bandwidth)}
        lines.add("rate", **row)
        rows.append(row)
        print(f"  {title}, {case}: {rate_text(row['tools'].get('polydyn'))}, best of others "
              f"{rate_text(row['tools'].get(row.get('best')))} ({row.get('best')})", flush=True)  # fmt: skip
    peaks = {n: p.memory()["peak"] for n, p in field.players.items() if not any(n in r["refused"] for r in rows)}
    lines.add("memory", **about, peak_of_all_cases=peaks)
    show_rates(rows, f"{title}; read loop {bandwidth / 1e9:.1f} GB/s")
    show_opening(opened, f"opening, {title}")
    print("peak of all cases, MB: " + ", ".join(f"{n} {b / 1e6:.0f}" for n, b in peaks.items()))
    for name, text in field.refused.items():
        print(f"NOT MEASURED: {name}: {text}")
    for row in rows:
        for name, text in row["refused"].items():
            print(f"NOT MEASURED at {row['case']}: {name}: {text}")
    return rows, opened


def run(
    matrix: Matrix, size: Size, root: Path, effort: Effort, only: Sequence[str], lines: Lines, **options: Any
) -> list[Row]:
    """Measure everything and return the rows of the rates."""
    lines.add("run", **record.header(), size=size.config(), matrix=vars(matrix), effort=vars(effort), **options)
    folder, rows = folder_of(root, size), list[Row]()
    expected = reference(folder, size)
    for weights in matrix.weights:
        for threads in matrix.threads:
            tools = [n for n in (*arguments.onnxruntimes(threads), *OTHERS) if not only or n in only]
            with Field(tools, folder, size, weights, threads) as field:
                rows += run_group(field, matrix, effort, expected, lines)[0]
    return rows


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="a sample of the cases, three rounds")
    p.add_argument("--smoke", action="store_true", help="the quick sample of a decoder with almost no weights")
    p.add_argument("--weights", nargs="+", choices=WEIGHTS)
    p.add_argument("--threads", nargs="+", type=int)
    for name in ("prompts", "behind", "batches"):
        p.add_argument(f"--{name}", nargs="*", type=int)
    p.add_argument("--only", nargs="+", default=[], choices=[*arguments.onnxruntimes(2), *OTHERS], metavar="TOOL")
    p.add_argument("--rounds", type=int, default=9, help="maximum number of rounds (9)")
    p.add_argument("--seconds", type=float, default=20.0, help="time budget per case; three rounds always run")
    for name in ("layers", "hidden", "vocabulary"):
        p.add_argument(f"--{name}", type=int, default=getattr(Size(), name))
    p.add_argument("--folder", type=Path, default=record.SCRATCH.parent / "language", help="where models are kept")
    return p


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """See the module's docstring."""
    a = parser().parse_args(argv)
    a.quick |= a.smoke
    given = {k: getattr(a, k) for k in vars(WHOLE) if getattr(a, k) is not None}
    matrix = replace(QUICK if a.quick else WHOLE, **given)
    size = SMOKE if a.smoke else Size(a.layers, a.hidden, a.vocabulary)
    scratch = a.quick or bool(a.only) or size != Size()
    lines = Lines((record.SCRATCH if scratch else record.RESULTS) / "language.jsonl")
    rows = run(matrix, size, a.folder, arguments.effort(a), a.only, lines, quick=a.quick)
    print(f"written: {lines.path.name}")
    return rows


if __name__ == "__main__":
    main()
