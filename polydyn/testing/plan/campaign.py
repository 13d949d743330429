"""Random models (``polydyn/testing/random_onnx.py``) through the interpreter of host plans.

    python -m polydyn.testing.plan.campaign [COUNT] [--first SEED] [--theme NAME] [--loops]

Every model is planned and run at the sizes of its calls. A fault is printed with its seed. Exits with 1 when there is
one, or the interpreter stops with an error of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from polydyn.errors import PolydynError
from polydyn.testing.drafts import Case
from polydyn.testing.plan.check import Faulty, bound_sizes, check_planned, dims_of
from polydyn.testing.plan.planned import Planned, plans_of
from polydyn.testing.random_onnx import random_case

SHOWN = 3
"""Faults of a model that are printed."""


def check_case(case: Case, counts: Counter[str], loops: bool = False) -> list[Faulty]:
    """The faults of a model at the sizes of its calls; counts what was run. Raises PolydynError: it is refused."""
    plans, names = plans_of(case.model), dims_of(case.model)
    counts["models"] += 1
    counts["plans"] += len(plans)
    found: list[Faulty] = []
    for planned in plans:
        counts["launches"] += len(planned.plan.launches)
        for sizes in case.calls:
            found += _call(planned, bound_sizes(planned, names, sizes), counts, loops)
    return found


def _call(planned: Planned, sizes: Mapping[str, int], counts: Counter[str], loops: bool) -> list[Faulty]:
    found = check_planned(planned, sizes, loops=loops)
    counts["calls" if found is not None else "calls that are refused"] += 1
    return found or []


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--theme", default="")
    parser.add_argument("--loops", action="store_true")
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    begin = time.process_time()
    for seed in range(args.first, args.first + args.count):
        case = random_case(seed, args.theme)
        try:
            found = check_case(case, counts, args.loops)
        except PolydynError as e:
            counts[f"refused ({type(e).__name__})"] += 1
            continue
        except Exception as e:
            counts["the interpreter stops"] += 1
            print(f"{case.name}: {type(e).__name__}: {str(e)[:200]}", flush=True)
            continue
        counts["models with faults"] += bool(found)
        for f in found[:SHOWN]:
            print(f"{case.name}: {f}", flush=True)
        if (seed + 1 - args.first) % 50 == 0:
            print(f"{seed + 1 - args.first} seeds, {time.process_time() - begin:.0f} s: {dict(counts)}", flush=True)
    print(f"{time.process_time() - begin:.0f} s: {dict(counts)}")
    return int(counts["models with faults"] + counts["the interpreter stops"] > 0)


if __name__ == "__main__":
    sys.exit(main())
