"""Plant mistakes in plans, and count how many the interpreter and the product's verifiers detect.

    python -m polydyn.testing.plan.plant MODEL.onnx|SEED ... [--each 2] [--loops]

``SEED``: a model of ``polydyn/testing/random_onnx.py``. Plans that are faulty already are skipped.
Exits with 1 if the interpreter misses a mistake.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

SIZES = (2, 3, 5, 16)
"""Sizes of all dims, tried until a fault appears. Images of few pixels have no windows. A call that splits a reduction
comes last.
"""


@dataclass(frozen=True)
class Trial:
    """A planted mistake. ``seen``: first fault of the interpreter; ``refused``: error of the product; "" if none."""

    kind: str
    what: str
    seen: str
    refused: str


def trials(model: ModelLike, each: int, r: Random, loops: bool = False) -> Iterator[Trial]:
    """Plant each mistake up to ``each`` times in all plans of a model. ``loops``: include mistakes in kernel loops."""
    for made in plans_of(model):
        if not made.plan.launches or first_fault(made):
            continue
        shares = sizes_in_shares(made)
        for mistake in (*ON_LAUNCHES, *ON_KERNELS, *ON_SLOTS, *(ON_LOOPS if loops else ())):
            done: set[str] = set()
            for _ in range(each):
                planted = mistake(made, r)
                if planted and planted[0] not in done:
                    done.add(planted[0])
                    yield trial(mistake, *planted, shares)


def trial(mistake: Mistake, site: str, planned: Planned, shares: Mapping[str, int] | None = None) -> Trial:
    """Run one trial. If the host program cannot be built, the product rejects the plan; it runs with the old slots.

    ``shares``: sizes at which the right plan splits a reduction (``sizes_in_shares``). The wrong one may not say.
    """
    refused = ""
    if mistake in ON_SLOTS:
        planned = replace(planned, text="")
    elif mistake not in ON_KERNELS:
        try:
            planned = with_text(planned)
        except (PolydynError, KeyError, IndexError, ValueError) as e:
            refused, planned = f"{type(e).__name__}: {e}", replace(planned, text="")
    refused = refused or error_of(lambda: verify_host_plan(planned.plan))
    refused = refused or error_of(lambda: verify_slots(planned.plan, planned.slots))
    try:
        seen = first_fault(planned, loops=mistake in ON_LOOPS, shares=shares)
        text = str(seen.fault) if seen else ""
    except (KeyError, IndexError, ValueError) as e:
        text = f"the interpreter stops: {type(e).__name__}: {e}"
    return Trial(mistake.__name__, site, text, refused)


def first_fault(planned: Planned, loops: bool = False, shares: Mapping[str, int] | None = None) -> Faulty | None:
    """Return the first fault at ``SIZES`` and at sizes that split a reduction (``shares``), or None."""
    for size in SIZES:
        found = check_planned(planned, {}, default=size, loops=loops)
        if found:
            return found[0]
    shares = None if loops else shares or sizes_in_shares(planned)
    found = check_planned(planned, shares) if shares else None
    return found[0] if found else None


def error_of(verify: Callable[[], None]) -> str:
    """Return the error of a verifier, or an empty string."""
    try:
        verify()
    except PolydynError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def table(trials_found: Iterable[Trial]) -> str:
    """Format a table: mistakes of each kind, how many the interpreter detects, and how many the verifiers detect."""
    count: Counter[tuple[str, str]] = Counter()
    for t in trials_found:
        for kind in (t.kind, "all"):
            count[kind, "planted"] += 1
            count[kind, "seen"] += bool(t.seen)
            count[kind, "refused"] += bool(t.refused)
    kinds = sorted({k for k, _ in count}, key=lambda k: (k == "all", k))
    head = f"{'mistake':16} planted  interpreter  verifiers"
    rows = (f"{k:16} {count[k, 'planted']:7} {count[k, 'seen']:12} {count[k, 'refused']:10}" for k in kinds)
    return "\n".join([head, *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
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
