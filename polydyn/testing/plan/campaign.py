"""Run random models (``polydyn/testing/random_onnx.py``) through the interpreter of host plans.

    python -m polydyn.testing.plan.campaign [COUNT] [--first SEED] [--theme NAME] [--loops]

Every model is planned and run at the sizes of its calls. A fault is printed with its seed. Exits with 1 if there is a
fault, or if the interpreter stops with an error of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from polydyn.backends import target_of
from polydyn.errors import PolydynError
from polydyn.graph.expand import import_parts
from polydyn.testing.drafts import Case
from polydyn.testing.plan.check import Faulty, bound_sizes, check_planned, dims_of, faults_of, sizes_in_shares
from polydyn.testing.plan.framed import programs_of
from polydyn.testing.plan.planned import Planned
from polydyn.testing.random_onnx import random_case

FAULTY, STOPS = "models with faults", "models at which the interpreter stops"
MODELS_PER_PROCESS = 100
"""Number of models after which the worker process is replaced."""
MAX_PRINTED_FAULTS = 3
"""Maximum number of faults that are printed for a model."""


def check_case(case: Case, counts: Counter[str], loops: bool = False) -> list[Faulty]:
    """Return the faults of a model at the sizes of its calls. Raises PolydynError if it is rejected."""
    programs, names = programs_of(import_parts(case.model), target_of("cpu", None)), dims_of(case.model)
    counts["models"] += 1
    counts["plans"] += len(programs.plans)
    counts["frames between parts"] += len(programs.frames)
    found = faults_of(programs.frames)
    for planned in programs.plans:
        counts["launches"] += len(planned.plan.launches)
        for sizes in case.calls:
            found += _call(planned, bound_sizes(planned, names, sizes), counts, loops)
        shares = sizes_in_shares(planned)
        if shares is not None:
            counts["calls with reductions in shares"] += 1
            found += _call(planned, shares, counts, loops=False)
    return found


def _call(planned: Planned, sizes: Mapping[str, int], counts: Counter[str], loops: bool) -> list[Faulty]:
    found = check_planned(planned, sizes, loops=loops)
    counts["calls" if found is not None else "calls that are refused"] += 1
    return found or []


def run_seed(seed: int, theme: str, loops: bool) -> tuple[Counter[str], list[str]]:
    """Return the counts and the printed lines of one model."""
    counts: Counter[str] = Counter()
    case = random_case(seed, theme)
    try:
        found = check_case(case, counts, loops)
    except PolydynError as e:
        return Counter({f"refused ({type(e).__name__})": 1}), []
    except Exception as e:
        return Counter({STOPS: 1}), [f"{case.name}: {type(e).__name__}: {str(e)[:200]}"]
    counts[FAULTY] += bool(found)
    return counts, [f"{case.name}: {f}" for f in found[:MAX_PRINTED_FAULTS]]


def results(seeds: Sequence[int], theme: str, loops: bool) -> Iterator[tuple[Counter[str], list[str]]]:
    """Yield the result of each model. Models run in a worker process, because ONNX Runtime may crash it."""
    waiting = list(seeds)
    while waiting:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                for seed in waiting[:MODELS_PER_PROCESS]:
                    yield pool.submit(run_seed, seed, theme, loops).result()
                    waiting.pop(0)
            except BrokenProcessPool:
                waiting.pop(0)
                yield Counter({"models that stop ONNX Runtime": 1}), []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--theme", default="")
    parser.add_argument("--loops", action="store_true")
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for k, (more, lines) in enumerate(results(range(args.first, args.first + args.count), args.theme, args.loops), 1):
        counts.update(more)
        print(*(f"{x}\n" for x in lines), sep="", end="", flush=True)
        if k % 50 == 0 or k == args.count:
            print(f"{k} seeds, {time.monotonic() - begin:.0f} s: {dict(counts)}", flush=True)
    return int(counts[FAULTY] + counts[STOPS] > 0)


if __name__ == "__main__":
    sys.exit(main())
