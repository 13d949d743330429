"""Plants mistakes in plans, and counts who sees them: the interpreter, and the verifiers of the product.

    python -m polydyn.testing.plan.plant MODEL.onnx|SEED ... [--each 2] [--loops]

``SEED``: a model of ``polydyn/testing/random_onnx.py``. Plans that are not without faults before are left out. Exits
with 1 when the interpreter misses one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from polydyn.errors import PolydynError
from polydyn.graph.importer import ModelLike
from polydyn.program.verify import verify_host_plan
from polydyn.program.verify_memory import verify_slots
from polydyn.testing.plan.check import Faulty, check_planned, sizes_in_shares
from polydyn.testing.plan.mistakes import ON_KERNELS, ON_LAUNCHES, ON_LOOPS, ON_SLOTS, Mistake
from polydyn.testing.plan.planned import Planned, plans_of, with_text
from polydyn.testing.random_onnx import random_case

SIZES = (2, 3, 5)
"""Of every dim, one call after the other until a fault shows; at last those with reductions in shares."""


@dataclass(frozen=True)
class Trial:
    """A mistake and who sees it. ``seen``: the interpreter's first fault; ``refused``: the product's error."""

    kind: str
    what: str
    seen: str
    refused: str


def trials(model: ModelLike, each: int, r: Random, loops: bool = False) -> Iterator[Trial]:
    """Mistakes planted in all plans of a model, ``each`` so many times. ``loops``: also those that only loops show."""
    for made in plans_of(model):
        if not made.plan.launches or first_fault(made):
            continue
        for mistake in (*ON_LAUNCHES, *ON_KERNELS, *ON_SLOTS, *(ON_LOOPS if loops else ())):
            done: set[str] = set()
            for _ in range(each):
                planted = mistake(made, r)
                if planted and planted[0] not in done:
                    done.add(planted[0])
                    yield trial(mistake, *planted)


def trial(mistake: Mistake, what: str, made: Planned) -> Trial:
    """Who sees a mistake. A plan of which no host program can be made is refused; it is run in the old slots."""
    refused = ""
    if mistake in ON_SLOTS:
        made = replace(made, text="")
    elif mistake not in ON_KERNELS:
        try:
            made = with_text(made)
        except (PolydynError, KeyError, IndexError, ValueError) as e:
            refused, made = f"{type(e).__name__}: {e}", replace(made, text="")
    refused = refused or error_of(lambda: verify_host_plan(made.plan))
    refused = refused or error_of(lambda: verify_slots(made.plan, made.slots))
    try:
        seen = first_fault(made, loops=mistake in ON_LOOPS)
        text = str(seen.fault) if seen else ""
    except (KeyError, IndexError, ValueError) as e:
        text = f"the interpreter stops: {type(e).__name__}: {e}"
    return Trial(mistake.__name__, what, text, refused)


def first_fault(made: Planned, loops: bool = False) -> Faulty | None:
    """The first fault that shows."""
    for size in SIZES:
        found = check_planned(made, {}, default=size, loops=loops)
        if found:
            return found[0]
    shares = None if loops else sizes_in_shares(made)
    found = check_planned(made, shares) if shares else None
    return found[0] if found else None


def error_of(verify: Callable[[], None]) -> str:
    """What a verifier of the product says; empty: nothing."""
    try:
        verify()
    except PolydynError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def table(found: Iterable[Trial]) -> str:
    """A line for each kind of mistake: how many, how many the interpreter sees, how many the product's verifiers."""
    count: Counter[tuple[str, str]] = Counter()
    for t in found:
        for kind in (t.kind, "all"):
            count[kind, "planted"] += 1
            count[kind, "seen"] += bool(t.seen)
            count[kind, "refused"] += bool(t.refused)
    kinds = sorted({k for k, _ in count}, key=lambda k: (k == "all", k))
    head = f"{'mistake':16} planted  interpreter  verifiers"
    rows = (f"{k:16} {count[k, 'planted']:7} {count[k, 'seen']:12} {count[k, 'refused']:10}" for k in kinds)
    return "\n".join([head, *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--loops", action="store_true")
    args = parser.parse_args(argv)
    found: list[Trial] = []
    for name in args.models:
        model = random_case(int(name)).model if name.isdigit() else name
        try:
            of_model = list(trials(model, args.each, Random(name), args.loops))
        except PolydynError as e:
            print(f"{name} is refused: {e}")
            continue
        found += of_model
        for t in of_model:
            if not t.seen:
                print(f"{name}: {t.kind}: {t.what}: not seen; verifiers: {t.refused or 'nothing'}", flush=True)
    print(table(found))
    return int(any(not t.seen for t in found))


if __name__ == "__main__":
    sys.exit(main())
