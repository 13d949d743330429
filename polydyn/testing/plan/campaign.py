"""Run random models (``polydyn/testing/random_onnx.py``) through the interpreter of host plans.

    python -m polydyn.testing.plan.campaign [SEEDS] [--first SEED] [--jobs 1] [--theme NAME] [--loops]

Every model is planned and run at the sizes of its calls. A fault is printed with its seed. Exits with 1 if there is a
fault, or if the interpreter stops with an error of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from polydyn.backends import target_of
from polydyn.errors import PolydynError
from polydyn.graph.expand import import_parts
from polydyn.testing.campaign import Campaign, Finding, Kinds, Result, parser_of, seeds_of
from polydyn.testing.drafts import Case
from polydyn.testing.fuzz_models import ask
from polydyn.testing.plan.check import Faulty, bound_sizes, check_planned, dims_of, faults_of, sizes_in_shares
from polydyn.testing.plan.framed import programs_of
from polydyn.testing.plan.planned import Planned
from polydyn.testing.random_onnx import random_case

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


def run_seed(seed: int, seen_kinds: Kinds = frozenset(), theme: str = "", loops: bool = False) -> Result:
    """Return the counts and the faults of one model."""
    counts: Counter[str] = Counter()
    case = random_case(seed, theme)
    try:
        found = check_case(case, counts, loops)
    except PolydynError as e:
        return Result(seed, case.name, Counter({f"refused ({type(e).__name__})": 1}))
    except Exception as e:
        return Result(seed, case.name, counts, Finding("error", "interpreter", f"{type(e).__name__}: {str(e)[:200]}"))
    said = "; ".join(map(str, found[:MAX_PRINTED_FAULTS]))
    return Result(seed, case.name, counts, Finding("wrong", "plan", said) if found else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--theme", default="")
    parser.add_argument("--loops", action="store_true")
    args = parser.parse_args(argv)
    run = partial(run_seed, theme=args.theme, loops=args.loops)
    return Campaign(run, seeds_of(args), args.jobs, partial(ask, theme=args.theme)).run()


if __name__ == "__main__":
    sys.exit(main())
