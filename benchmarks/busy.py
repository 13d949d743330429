"""The cost of a busy neighbour: with busy processes, and in a process where threads of other libraries spin.

usage: python -m benchmarks.busy [MODEL.onnx ...] [--shapes B=1,L=32 ...] [--busy 0 1 2] [--rounds 9] [--threads 2]
                                 [--no-mixed] [--chain]

Contestants are polydyn and ONNX Runtime with and without spinning, each in its own process. Measurements alternate as
in ``benchmarks.protocol``, while ``busy`` processes that never wait run all the time. ``mixed``: before every call the
contestant's process computes one product with torch and one with numpy, on as many threads; their times do not count.
Times are p50, p90 and p99 over all measured calls. ``behind``: ONNX Runtime without spinning takes less than 0.9 of
polydyn's time at p50. ``--chain`` also measures the pool alone, in launches of known length (``pool_chain.c``), with 0,
1, 2 busy processes, a spinning thread and OpenMP regions. Leave the machine alone meanwhile. Without model arguments,
three models of the zoo run at two shapes each.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.arguments import parse_shape
from benchmarks.protocol import TURN_SECONDS, Contestant, wait_until_quiet, warm_up
from polydyn.build.compiler import find_compiler
from polydyn.runtime.c import sources
from polydyn.testing.inputs import shapes

CONTESTANTS = ("polydyn", "onnxruntime", "onnxruntime-nospin")
MODELS = {"bert_base": ("B=1,L=32", "B=4,L=61"), "gpt2": ("B=1,L=8", "B=1,L=64"),
          "resnet50": ("N=1,H=96,W=160", "N=1,H=224,W=224")}  # fmt: skip
FOLDER = Path(__file__).parent / "out" / "models"
MIN_RATIO = 0.9
"""Minimum ratio of ONNX Runtime's time without spinning to polydyn's time: at most 10 % behind."""
FEWEST_CALLS = 3
Times = dict[str, list[float]]
QUANTILES = (0.5, 0.9, 0.99)


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Start ``count`` processes that never wait; they end with the block, or with this process."""
    hogs = [multiprocessing.get_context("spawn").Process(target=_spin, args=(os.getpid(),), daemon=True)
            for _ in range(count)]  # fmt: skip
    try:
        for hog in hogs:
            hog.start()
        yield
    finally:
        for hog in hogs:
            hog.terminate()
            hog.join()


def times(players: Mapping[str, Contestant], shape: Mapping[str, int], rounds: int) -> Times:
    """Return the seconds of every call of every player; the players alternate."""
    repeats = {}
    for name, p in players.items():
        repeats[name] = max(FEWEST_CALLS, min(1000, round(TURN_SECONDS / warm_up(p, shape))))
        wait_until_quiet(list(players.values()))
    seconds: Times = {name: [] for name in players}
    for _ in range(rounds):
        for name, p in players.items():
            wait_until_quiet(list(players.values()))
            seconds[name] += p.run(shape, repeats[name])
    return seconds


def row(model: str, shape: Mapping[str, int], where: str, seconds: Times) -> dict[str, Any]:
    """Return one row of the result; times are in milliseconds."""
    ms = {n: [float(q) * 1e3 for q in np.quantile(t, QUANTILES)] for n, t in seconds.items()}
    ours, nospin = ms["polydyn"][0], ms["onnxruntime-nospin"][0]
    return {"model": model, "shape": dict(shape), "where": where, "ms": ms, "ratio": nospin / ours,
            "behind": nospin / ours < MIN_RATIO}  # fmt: skip


def measure(path: Path, shapes: Sequence[Mapping[str, int]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all rows of one model."""
    for mixed in (False, True)[: 1 + args.mixed]:
        with contextlib.ExitStack() as stack:
            kind = "+torch+numpy" if mixed else ""
            players = {n: stack.enter_context(Contestant(n + kind, path, args.threads)) for n in CONTESTANTS}
            for count in [0] if mixed else args.busy:
                for shape in shapes:
                    with busy_processes(count):
                        seconds = times(players, shape, args.rounds)
                    yield row(path.stem, shape, "mixed" if mixed else f"{count} busy", seconds)


def chain_program(folder: Path) -> Path:
    """Compile ``pool_chain.c`` with the run time's pool."""
    for name, text in sources().items():
        (folder / name).write_text(text)
    flags = ["-std=gnu11", "-O2", "-march=native", "-fopenmp", "-pthread", f"-I{folder}"]
    files = [str(Path(__file__).parent / "pool_chain.c"), str(folder / "pool.c")]
    subprocess.run([*find_compiler().command, *flags, *files, "-o", str(folder / "pool_chain")], check=True)
    return folder / "pool_chain"


def chain_times(program: Path, seconds: float, mode: str) -> dict[str, list[float]]:
    """Map each kind of run to p50, p90, p99 in microseconds; ``mode`` is ``-``, ``spin`` or ``omp``."""
    command = [str(program), str(seconds), mode]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: list(map(float, us)) for name, *us in map(str.split, lines)}


def chain(seconds: float) -> dict[str, dict[str, list[float]]]:
    """Measure the pool alone in each environment."""
    quantiles: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = chain_program(Path(folder))
        for where, count, mode in (("0 busy", 0, "-"), ("1 busy", 1, "-"), ("2 busy", 2, "-"),
                                  ("spinning thread", 0, "spin"), ("OpenMP regions", 0, "omp")):  # fmt: skip
            with busy_processes(count):
                quantiles[where] = chain_times(program, seconds, mode)
    return quantiles


def _text(ms: Sequence[float]) -> str:
    return "/".join(f"{t:.4g}" for t in ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each kind of run of the chain")
    args = parser.parse_args()
    console = Console()
    rows = []
    table = Table("model", "shape", "where", *(f"{n} p50/p90/p99 ms" for n in CONTESTANTS), "nospin / ours", "")
    for path in args.models or [FOLDER / f"{name}.onnx" for name in MODELS]:
        given = list(map(parse_shape, args.shapes or MODELS.get(path.stem, ()))) or shapes(path.stem)[-2:]
        for r in measure(path, given, args):
            rows.append(r)
            shape = ",".join(f"{k}={v}" for k, v in r["shape"].items())
            cells = (r["model"], shape, r["where"], *(_text(r["ms"][n]) for n in CONTESTANTS), f"{r['ratio']:.2f}")
            console.print(*cells, sep=" | ")
            table.add_row(*cells, "BEHIND" if r["behind"] else "")
    console.print(table)
    print(f"{sum(r['behind'] for r in rows)} of {len(rows)} more than 10 % behind ONNX Runtime without spinning")
    pool = chain(args.seconds) if args.chain else {}
    if pool:
        kinds = list(pool["0 busy"])
        table = Table("pool alone, p50/p90/p99 us", *kinds)
        for where, found in pool.items():
            table.add_row(where, *(_text(found[k]) for k in kinds))
        console.print(table)
    path = record.save("busy", threads=args.threads, rounds=args.rounds, rows=rows, pool=pool)
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
