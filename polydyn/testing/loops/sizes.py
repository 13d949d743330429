"""Choose sizes at which a kernel executes most of its code: branches both ways, loops of no, one and several steps.

A kernel is right for all values of its group's parameters, whatever values a model's dims give them, and for all tile
sizes, because its schedule is proven for them. So both are drawn at random. A draw is kept if it executes something
new. A vector with a mask counts as three: no lanes, some lanes, all lanes.

Not every draw is a call. Parameters may depend on each other (the rows of a padded image), and windows need tiles of
whole vectors. A draw at which the kernel itself is wrong is counted and left out; at the model's own sizes it is an
error.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping

import numpy as np

from polydyn.codegen.ir import Body
from polydyn.codegen.kernel import Kernel
from polydyn.graph.dtypes import numpy_dtype
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.model import Group
from polydyn.testing.loops.check import (
    BELOW,
    SIZES,
    THREADS,
    Case,
    Skipped,
    case_of,
    cases_or_reasons,
    constants_of,
    dims_of,
    names_of,
    reason,
    values_of,
)  # fmt: skip
from polydyn.testing.loops.cuda import Unknown
from polydyn.testing.loops.statements import FLOATS_OF_SEED, all_magnitudes, arrays_of, expected
from polydyn.testing.plan.planned import Planned

DRAWS = 24
"""Number of draws for a kernel, in addition to ``SIZES``."""
EXTENTS = (
    1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 21, 24, 27, 31, 32, 33, 37, 40, 50, 64, 65, 70, 100, 131, 259, 800, 1100,
    1700,
)  # fmt: skip
"""Values of parameters: around multiples of vectors and tiles."""
TILES = (1, 2, 3, 4, 5, 8, 11, 16, 24, 64, 131)
"""Values of tile sizes, instead of the ones that a launch computes."""
THRESHOLDS = ("stream_bytes",)
"""Values of a launch other than tile sizes."""
ROOM = 1 << 16
"""Elements of an input until it is known which of them the statements read."""
MAX_WORK = 400_000
"""Maximum number of instances of a statement in a draw."""
REPEATS, FIRST_REPEAT = 20, 100
"""Maximum number of other inputs at the same sizes, and the seed of the first ones."""
REPEAT_SECONDS = 2.0
"""Maximum time for them."""
TOTAL = 15.0
"""Maximum seconds of all cases of a kernel together, so that a mutant that survives takes no longer."""
SECONDS = 12.0
"""Maximum time for the draws of a kernel."""


def cases_by_kernel(plans: Iterable[Planned], seconds: float, skipped: Counter[str]) -> dict[str, list[Case]]:
    """Return the cases of every kernel, quick ones first. Those that take longer than ``seconds`` are left out.

    ``skipped`` counts the reasons for all that is left out. Raises SystemExit if a kernel is wrong as it is.
    """
    found = defaultdict[str, list[tuple[float, int, Case]]](list)
    for planned in plans:
        executed = defaultdict[str, set[Hashable]](set)
        for k, sizes in enumerate(SIZES):
            for case in cases_or_reasons(planned, sizes, seed=k):
                if isinstance(case, Skipped):
                    skipped[case.reason] += 1
                elif (taken := _time(case, planned.loops, executed[case.kernel.name], seconds, skipped)) is not None:
                    found[case.kernel.name].append((taken, k, case))
        for p in planned.kernels.placed if planned.width else ():
            for kernel in (k for k in p.kernels if not k.name.endswith("_long")):
                kept = drawn(planned, p, kernel, executed[kernel.name], seconds, skipped)
                found[kernel.name] += [(taken, len(SIZES), case) for taken, case in kept]
                found[kernel.name] += _repeated(planned, p, kernel, seconds, skipped)
    return {name: _within(many) for name, many in found.items() if many}


def _within(many: list[tuple[float, int, Case]]) -> list[Case]:
    """Return cases, quick ones first, as many as run in ``TOTAL`` seconds."""
    many = sorted(many, key=lambda x: x[:2])
    ends = itertools.accumulate(taken for taken, _, _ in many)
    return [case for k, ((_, _, case), end) in enumerate(zip(many, ends, strict=True)) if k == 0 or end <= TOTAL]


def _repeated(
    planned: Planned, p: PlacedGroup, kernel: Kernel, seconds: float, skipped: Counter[str]
) -> Iterator[tuple[float, int, Case]]:
    """Yield the cases of two of a kernel's sizes with other inputs, in which few elements are equal."""
    start = time.monotonic()
    for seed in range(REPEATS):
        if time.monotonic() - start > REPEAT_SECONDS:
            return
        dims = dims_of(planned, SIZES[seed % 2 * 2])
        case = case_of(planned, p, kernel, dims, FIRST_REPEAT + seed, floats=all_magnitudes)
        if not isinstance(case, str) and (taken := _time(case, planned.loops, set(), seconds, skipped)) is not None:
            yield taken, FIRST_REPEAT + seed, case


def _time(
    case: Case, loops: Mapping[str, Body], executed: set[Hashable], seconds: float, skipped: Counter[str]
) -> float | None:
    """Return the seconds of a case, or None if it is left out. SystemExit: it is wrong."""
    start = time.monotonic()
    try:
        wrong = case.run(loops, executed)
    except Unknown as e:
        skipped[str(e)] += 1
        return None
    if wrong:
        raise SystemExit(f"{case.name} is wrong: {wrong}")
    taken = time.monotonic() - start
    if taken > seconds:
        skipped["too slow"] += 1
    return taken if taken <= seconds else None


def drawn(
    planned: Planned, p: PlacedGroup, kernel: Kernel, executed: set[Hashable], seconds: float, skipped: Counter[str]
) -> Iterator[tuple[float, Case]]:
    """Yield (seconds, case) of the draws that execute something that is not yet in ``executed``, which grows."""
    numbers, start = random.Random(kernel.name), time.monotonic()
    for k in range(DRAWS):
        if time.monotonic() - start > SECONDS:
            return
        case, begin, points = draw(planned, p, kernel, numbers, k), time.monotonic(), set[Hashable]()
        if isinstance(case, str):
            skipped[f"drawn: {case}"] += 1
        elif case.run(planned.loops, points):
            skipped["drawn: values that depend on each other in the model"] += 1
        elif points - executed and (taken := time.monotonic() - begin) <= seconds:
            executed |= points
            yield taken, case


def draw(planned: Planned, p: PlacedGroup, kernel: Kernel, numbers: random.Random, seed: int) -> Case | str:
    """Return a kernel at random sizes and tile sizes.

    Every second draw sets the dims of the model. Other draws set the parameters of the group, and their inputs end
    after the last element that the statements read.
    """
    group = planned.groups.get(kernel.name, p.lowered.group)
    dims = dims_of(planned, {n: numbers.choice(EXTENTS) for n in names_of(planned)})
    params = {n: numbers.choice(EXTENTS) for n in p.lowered.params}
    values = values_of(p, kernel, dims) if seed % 2 else kernel.values(params, THREADS)
    for n in kernel.launch:
        if n not in THRESHOLDS and (values[n] == 0 or numbers.random() < 0.7):
            values[n] = numbers.choice(TILES)
    if seed % 2:
        return case_of(planned, p, kernel, dims, seed // 2, values, MAX_WORK)
    return reason(p, kernel, group, values, MAX_WORK) or _case(planned, p, kernel, group, values, seed // 2)


def _case(
    planned: Planned, p: PlacedGroup, kernel: Kernel, group: Group, values: Mapping[str, int], seed: int
) -> Case | str:
    constants, form = constants_of(planned, p, group), planned.forms.get(p.key)
    elements = {}
    named = set().union(*(i.symbols() for a in group.arrays.values() for i in (*a.shape, *a.strides, a.offset)))
    if not named <= values.keys():
        return "a pass names the strides of its arrays"
    for n, a in group.arrays.items():
        last = [max(0, e.evaluate(values) - 1) * s.evaluate(values) for e, s in zip(a.shape, a.strides, strict=True)]
        elements[n] = a.offset.evaluate(values) + sum(last) + 1 if a.role == "output" else ROOM
    if sum(x * numpy_dtype(group.arrays[n].dtype).itemsize for n, x in elements.items()) > 1 << 24:
        return "too much memory"
    for below in BELOW:
        arrays = arrays_of(group, elements, np.random.default_rng(seed), below, FLOATS_OF_SEED[seed % 2]) | constants
        try:
            memory = expected(group, form, arrays, values)
        except IndexError:  # integers that are subscripts out of range
            continue
        whole = {*constants, *(n for n, a in group.arrays.items() if a.role == "output")}
        ends = {n: a if n in whole else a[: memory.ends[n]] for n, a in arrays.items()}
        return Case(kernel, group, values, ends, memory, kernel.lanes or planned.width)
    return "no random integers are subscripts in range"
