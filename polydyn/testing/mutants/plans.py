"""Mutants of host plans and of the frames between parts, which the interpreter of plans kills.

``testing/plan`` plants the mistakes: in launches, arguments, kernels, the arena, loops, rooms and bodies. The
interpreter calls no function that makes or verifies plans.
"""

from __future__ import annotations

from functools import partial
from random import Random

from polydyn.backends import target_of
from polydyn.graph.expand import import_parts
from polydyn.testing.mutants.score import Score
from polydyn.testing.plan.check import sizes_in_shares
from polydyn.testing.plan.frame_mistakes import ON_FRAMES
from polydyn.testing.plan.framed import programs_of
from polydyn.testing.plan.frames import check_frame
from polydyn.testing.plan.mistakes import ON_KERNELS, ON_LAUNCHES, ON_LOOPS, ON_SLOTS
from polydyn.testing.plan.planned import plans_of
from polydyn.testing.plan.plant import first_fault, trial
from polydyn.testing.random_onnx import random_case

SEEDS = range(1, 13)
"""Random models whose plans are changed."""
CONTROL = (10, 32)
"""Random models with branches and loops, whose frames are changed."""


def score(each: int, seed: int, seeds: range = SEEDS) -> Score:
    """Return the score of mistakes in plans: of each kind at most ``each`` for every 12 models, and in every frame."""
    total, numbers = Score("plan"), Random(seed)
    most = max(1, each // len(SEEDS))
    models = {k: random_case(k).model for k in seeds}  # before any is compiled, which changes what is drawn
    for k, model in models.items():
        for planned in plans_of(model):
            if not planned.plan.launches:
                continue
            if fault := first_fault(planned):
                raise SystemExit(f"the plan of the random model {k} is wrong: {fault}")
            shares = sizes_in_shares(planned)
            for mistake in (*ON_LAUNCHES, *ON_KERNELS, *ON_SLOTS, *ON_LOOPS):
                for site, changed in dict(p for p in (mistake(planned, numbers) for _ in range(most)) if p).items():
                    what = f"random model {k}: {mistake.__name__}: {site}"
                    one = partial(trial, mistake, site, changed, shares)
                    total.add(what, lambda t=one: bool(t().seen))  # type: ignore[misc]
    for k in CONTROL:
        for framed in programs_of(import_parts(random_case(k, "control").model), target_of("cpu", None)).frames:
            for change in ON_FRAMES:
                for site, frame in dict(p for p in (change(framed, numbers) for _ in range(most)) if p).items():
                    what = f"frame of random model {k}: {change.__name__}: {site}"
                    total.add(what, lambda f=frame: bool(check_frame(f)))  # type: ignore[misc]
    return total
