"""How much a busy neighbour costs: beside busy processes, and in a process where other libraries' threads spin.

usage: python -m benchmarks.busy [MODEL.onnx ...] [--shapes B=1,L=32 ...] [--busy 0 1 2] [--rounds 9] [--threads 2]
                                 [--no-mixed] [--chain]

Contestants are polydyn and ONNX Runtime with and without spinning, each in a process of its own, in turns as
``benchmarks.protocol`` has them; ``busy`` processes that never wait run all the time. ``mixed``: before every call its
process computes a product by torch and one by numpy, on as many threads; their times do not count. Times are p50, p90
and p99 over the calls of all turns. ``behind``: ONNX Runtime without spinning over polydyn is less than 0.9 at p50.
``--chain``: the pool alone too, in launches of known length (``pool_chain.c``), beside 0, 1, 2 busy processes, a
spinning thread and OpenMP regions. Leave the machine alone meanwhile. Without models: three of the zoo, at two
shapes each.
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
ALLOWED = 0.9
"""ONNX Runtime's time without spinning over ours: 10 % behind at most."""
FEWEST_CALLS = 3
Times = dict[str, list[float]]
QUANTILES = (0.5, 0.9, 0.99)


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that never wait; they end with the block, or with this process."""
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
    """Seconds of every call of every player, in turns."""
    repeats = {}
    for name, p in players.items():
        repeats[name] = max(FEWEST_CALLS, min(1000, round(TURN_SECONDS / warm_up(p, shape))))
        wait_until_quiet(list(players.values()))
    found: Times = {name: [] for name in players}
    for _ in range(rounds):
        for name, p in players.items():
            wait_until_quiet(list(players.values()))
            found[name] += p.run(shape, repeats[name])
    return found


def row(model: str, shape: Mapping[str, int], where: str, found: Times) -> dict[str, Any]:
    """One line of the result; times in milliseconds."""
    ms = {n: [float(q) * 1e3 for q in np.quantile(t, QUANTILES)] for n, t in found.items()}
    ours, nospin = ms["polydyn"][0], ms["onnxruntime-nospin"][0]
    return {"model": model, "shape": dict(shape), "where": where, "ms": ms, "ratio": nospin / ours,
            "behind": nospin / ours < ALLOWED}  # fmt: skip


def measure(path: Path, given: Sequence[Mapping[str, int]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of one model."""
    for mixed in (False, True)[: 1 + args.mixed]:
        with contextlib.ExitStack() as stack:
            kind = "+torch+numpy" if mixed else ""
            players = {n: stack.enter_context(Contestant(n + kind, path, args.threads)) for n in CONTESTANTS}
            for count in [0] if mixed else args.busy:
                for shape in given:
                    with busy_processes(count):
                        found = times(players, shape, args.rounds)
                    yield row(path.stem, shape, "mixed" if mixed else f"{count} busy", found)


def chain_program(folder: Path) -> Path:
    """``pool_chain.c`` with the run time's pool, compiled."""
    for name, text in sources().items():
        (folder / name).write_text(text)
    flags = ["-std=gnu11", "-O2", "-march=native", "-fopenmp", "-pthread", f"-I{folder}"]
    files = [str(Path(__file__).parent / "pool_chain.c"), str(folder / "pool.c")]
    subprocess.run([*find_compiler().command, *flags, *files, "-o", str(folder / "pool_chain")], check=True)
    return folder / "pool_chain"


def chain_times(program: Path, seconds: float, how: str) -> dict[str, list[float]]:
    """Kind of run -> p50, p90, p99 in microseconds; ``how``: ``-``, ``spin`` or ``omp``."""
    command = [str(program), str(seconds), how]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: list(map(float, us)) for name, *us in map(str.split, lines)}


def chain(seconds: float) -> dict[str, dict[str, list[float]]]:
    """The pool alone, by environment."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = chain_program(Path(folder))
        for where, count, how in (("0 busy", 0, "-"), ("1 busy", 1, "-"), ("2 busy", 2, "-"),
                                  ("spinning thread", 0, "spin"), ("OpenMP regions", 0, "omp")):  # fmt: skip
            with busy_processes(count):
                found[where] = chain_times(program, seconds, how)
    return found


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
    parser.add_argument("--seconds", type=float, default=2.0, help="of each kind of run of the chain")
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
