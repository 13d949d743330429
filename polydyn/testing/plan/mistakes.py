"""Mistakes that a planner could make, planted in plans: each is a function of a plan and of random numbers.

It gives what was done and the plan with the mistake, or None where the plan has no place for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import TypeAlias

from polydyn.codegen.kernel import WORKSPACE
from polydyn.lowering.place import Placed
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.schedules.expr import Load
from polydyn.schedules.index import ONE, ZERO
from polydyn.testing.plan.planned import Planned

Planted: TypeAlias = "tuple[str, Planned] | None"
Mistake: TypeAlias = Callable[[Planned, Random], Planted]


# -- parts of plans --------------------------------------------------------------------------------------------------


def waves_of(plan: HostPlan) -> list[range]:
    """The launches of each wave."""
    out: list[range] = []
    for n in plan.waves or (1,) * len(plan.launches):
        first = out[-1].stop if out else 0
        out.append(range(first, first + n))
    return out


def reads(launch: Launch) -> list[str]:
    """The buffers that a launch only reads."""
    return [b for b in launch.buffers if b not in (launch.writes or ())]


def alike(plan: HostPlan, a: str, b: str) -> bool:
    """Whether two buffers have one shape and type, and no strides of the caller's."""
    x, y = plan.buffers[a], plan.buffers[b]
    return a != b and (x.shape, x.dtype, x.strides, y.strides) == (y.shape, y.dtype, (), ())


def renamed(launch: Launch, names: Mapping[str, str], which: str = "rw") -> Launch:
    """The launch on other buffers; ``which``: those that it only reads, those that it writes, or both."""
    written = set(launch.writes or ())

    def of(b: str) -> str:
        return names.get(b, b) if ("w" if b in written else "r") in which else b

    def candidate(c: Candidate) -> Candidate:
        return replace(c, buffers=tuple(map(of, c.buffers)), after=tuple(map(candidate, c.after)))

    def every(some: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if some is None else tuple(map(of, some))

    return replace(
        launch, candidates=tuple(map(candidate, launch.candidates)), writes=every(launch.writes),
        reads=every(launch.reads),
    )  # fmt: skip


def with_launches(made: Planned, change: Callable[[int, Launch], Launch]) -> Planned:
    """The plan with each launch changed."""
    launches = tuple(change(k, x) for k, x in enumerate(made.plan.launches))
    return replace(made, plan=replace(made.plan, launches=launches))


def with_launch(made: Planned, k: int, launch: Launch) -> Planned:
    """The plan with one other launch."""
    return with_launches(made, lambda j, x: launch if j == k else x)


def dependent(plan: HostPlan) -> list[tuple[int, int]]:
    """Pairs of launches of which the second one reads a buffer that the first one writes."""
    n = range(len(plan.launches))
    written = [set(x.writes or ()) for x in plan.launches]
    return [(j, k) for k in n for j in range(k) if written[j] & set(reads(plan.launches[k]))]


def pick(r: Random, found: Iterator[tuple[object, ...]]) -> tuple[object, ...] | None:
    """Any of them."""
    every = list(found)
    return r.choice(every) if every else None


# -- launches --------------------------------------------------------------------------------------------------------


def wrong_source(made: Planned, r: Random) -> Planted:
    """A launch reads another tensor of that shape."""
    plan = made.plan
    every = [
        (k, a, b) for k, x in enumerate(plan.launches) for a in reads(x) for b in plan.buffers
        if WORKSPACE not in a and plan.buffers[a].role != "constant" != plan.buffers[b].role
        and alike(plan, a, b) and b not in x.buffers
    ]  # fmt: skip
    if not every:
        return None
    k, a, b = r.choice(every)
    launch = plan.launches[k]
    return f"'{launch.label}' reads {b} instead of {a}", with_launch(made, k, renamed(launch, {a: b}, "r"))


def swapped_places(made: Planned, r: Random) -> Planted:
    """Two tensors of one shape change places for those who write them."""
    plan = made.plan
    own = [b for b, x in plan.buffers.items() if x.role in ("intermediate", "output")]
    every = [(a, b) for a in own for b in own if a < b and alike(plan, a, b)]
    every = [(a, b) for a, b in every if not any({a, b} <= set(x.writes or ()) for x in plan.launches)]
    if not every:
        return None
    a, b = r.choice(every)
    return f"writers of {a} and {b} swapped", with_launches(made, lambda k, x: renamed(x, {a: b, b: a}, "w"))


def too_early(made: Planned, r: Random) -> Planted:
    """A reader runs in front of its writer."""
    every = dependent(made.plan)
    if not every:
        return None
    j, k = r.choice(every)
    launches = list(made.plan.launches)
    launches.insert(j, launches.pop(k))
    plan = replace(made.plan, launches=tuple(launches), waves=(1,) * len(launches), index_checks=())
    return f"'{launches[j].label}' before '{launches[j + 1].label}'", replace(made, plan=plan)


def one_wave(made: Planned, r: Random) -> Planted:
    """Two waves of which the second one needs the first one become one."""
    waves, pairs = waves_of(made.plan), dependent(made.plan)
    every = [w for w in range(len(waves) - 1) if any(j in waves[w] and k in waves[w + 1] for j, k in pairs)]
    if not every:
        return None
    w, counts = r.choice(every), [len(x) for x in waves]
    counts[w : w + 2] = [sum(counts[w : w + 2])]
    return f"waves {w} and {w + 1} joined", replace(made, plan=replace(made.plan, waves=tuple(counts)))


def missing(made: Planned, r: Random) -> Planted:
    """There is no such launch."""
    k = r.randrange(len(made.plan.launches))
    counts = [len(w) - (k in w) for w in waves_of(made.plan)]
    launches = tuple(x for j, x in enumerate(made.plan.launches) if j != k)
    checks = tuple(replace(c, launch=c.launch - (c.launch > k)) for c in made.plan.index_checks if c.launch != k)
    plan = replace(made.plan, launches=launches, waves=tuple(n for n in counts if n), index_checks=checks)
    return f"without '{made.plan.launches[k].label}'", replace(made, plan=plan)


def of_no_elements(made: Planned, r: Random) -> Planted:
    """A launch is said to write nothing, so it is skipped."""
    k = r.randrange(len(made.plan.launches))
    launch = made.plan.launches[k]
    return f"'{launch.label}' of no elements", with_launch(made, k, replace(launch, elements=ZERO))


def in_place(made: Planned, r: Random) -> Planted:
    """A launch writes over a tensor that it, and another one behind it, reads."""
    plan = made.plan
    every = [
        (x, a, b) for k, x in enumerate(plan.launches) for a in reads(x) for b in x.writes or ()
        if plan.buffers[a].role == "intermediate" == plan.buffers[b].role and alike(plan, a, b)
        and any(a in reads(y) for y in plan.launches[k + 1 :])
    ]  # fmt: skip
    if not every:
        return None
    x, a, b = r.choice(every)
    return f"'{x.label}' writes {b} in place of {a}", with_launches(made, lambda k, y: renamed(y, {b: a}))


def one_memory(made: Planned, r: Random) -> Planted:
    """An intermediate lies where a model output lies, and both live."""
    plan = made.plan
    outs = [b for b in plan.outputs if plan.buffers[b].role == "output"]
    every = [(a, b) for a, x in plan.buffers.items() if x.role == "intermediate" for b in outs if alike(plan, a, b)]
    if not every:
        return None
    a, b = r.choice(every)
    return f"{a} lies where {b} lies", with_launches(made, lambda k, y: renamed(y, {a: b}))


# -- what launches are told ------------------------------------------------------------------------------------------


def one_less(made: Planned, r: Random) -> Planted:
    """A size that a kernel is told is one too small."""
    every = [
        (k, n) for k, x in enumerate(made.plan.launches) for c in x.candidates[:1]
        for n, e in zip(c.names, c.symbols, strict=True) if n.startswith("n") and e.constant is None
    ]  # fmt: skip
    if not every:
        return None
    k, name = r.choice(every)
    launch = made.plan.launches[k]

    def of(c: Candidate) -> Candidate:
        return replace(c, symbols=tuple(e - (n == name) for n, e in zip(c.names, c.symbols, strict=True)))

    return f"'{launch.label}': {name} less 1", with_launch(
        made, k, replace(launch, candidates=tuple(map(of, launch.candidates)))
    )


def one_task_less(made: Planned, r: Random) -> Planted:
    """A kernel has one task less."""
    return _candidates(made, r, "a task less", lambda c: replace(c, tasks=c.tasks - 1))


def no_scratch(made: Planned, r: Random) -> Planted:
    """Threads have no scratch."""
    return _candidates(made, r, "no scratch", lambda c: replace(c, scratch=ZERO), lambda c: c.scratch != ZERO)


def _candidates(
    made: Planned, r: Random, what: str, change: Callable[[Candidate], Candidate],
    fits: Callable[[Candidate], bool] = lambda c: True,
) -> Planted:  # fmt: skip
    every = [k for k, x in enumerate(made.plan.launches) if all(map(fits, x.candidates))]
    if not every:
        return None
    k = r.choice(every)
    launch = made.plan.launches[k]
    changed = replace(launch, candidates=tuple(map(change, launch.candidates)))
    return f"'{launch.label}': {what}", with_launch(made, k, changed)


def other_constant(made: Planned, r: Random) -> Planted:
    """A launch takes another constant of that size."""
    plan = made.plan
    every = [
        (k, a, b) for k, x in enumerate(plan.launches) for a in reads(x) for b in plan.constants
        if a in plan.constants and b in plan.buffers and plan.constants[a].shape == plan.constants[b].shape
        and plan.constants[a].tobytes() != plan.constants[b].tobytes() and b not in x.buffers
    ]  # fmt: skip
    if not every:
        return None
    k, a, b = r.choice(every)
    launch = plan.launches[k]
    return f"'{launch.label}' reads {b} instead of {a}", with_launch(made, k, renamed(launch, {a: b}, "r"))


def swapped_outputs(made: Planned, r: Random) -> Planted:
    """Two outputs of one shape change names."""
    plan = made.plan
    outs = [b for b in plan.outputs if plan.buffers[b].role == "output"]
    every = [(a, b) for a in outs for b in outs if a < b and alike(plan, a, b)]
    if not every:
        return None
    a, b = r.choice(every)
    return f"outputs {a} and {b} swapped", with_launches(made, lambda k, x: renamed(x, {a: b, b: a}))


def other_copy(made: Planned, r: Random) -> Planted:
    """With a cache in place another launch is left out than the copy of the cache."""
    plan = made.plan
    every = [
        (j, k) for j, x in enumerate(plan.launches) if x.skip_if_same for k, y in enumerate(plan.launches)
        if x.skip_if_same[1] in (y.writes or ()) and not y.skip_if_same
    ]  # fmt: skip
    if not every:
        return None
    j, k = r.choice(every)
    skip = plan.launches[j].skip_if_same
    changed = with_launch(made, k, replace(plan.launches[k], skip_if_same=skip))
    changed = with_launch(changed, j, replace(plan.launches[j], skip_if_same=None))
    return f"'{plan.launches[k].label}' is left out", changed


# -- kernels ---------------------------------------------------------------------------------------------------------


def _with_place(made: Planned, k: int, place: Placed) -> Planned:
    placed = [place if j == k else p for j, p in enumerate(made.kernels.placed)]
    return replace(made, kernels=replace(made.kernels, placed=placed))


def moved_window(made: Planned, r: Random) -> Planted:
    """A kernel writes its part of a concatenation one element further on, or before."""
    every = [
        (k, a) for k, p in enumerate(made.kernels.placed) for n, a in p.lowered.group.arrays.items()
        if a.role == "output" and p.lowered.buffers[n] not in p.fused.outputs
    ]  # fmt: skip
    if not every:
        return None
    k, a = r.choice(every)
    p, by = made.kernels.placed[k], r.choice([1, -1, 2])
    arrays = p.lowered.group.arrays | {a.name: replace(a, offset=a.offset + by)}
    lowered = replace(p.lowered, group=replace(p.lowered.group, arrays=arrays))
    return f"window of {p.fused.outputs} moved by {by}", _with_place(made, k, replace(p, lowered=lowered))


def turned_output(made: Planned, r: Random) -> Planted:
    """The strides of the two last axes of an output are swapped."""
    every = [
        (k, a) for k, p in enumerate(made.kernels.placed) for a in p.lowered.group.arrays.values()
        if a.role == "output" and len(a.strides) > 1 and a.shape[-2] != ONE != a.shape[-1]
    ]  # fmt: skip
    if not every:
        return None
    k, a = r.choice(every)
    p = made.kernels.placed[k]
    turned = replace(a, strides=(*a.strides[:-2], a.strides[-1], a.strides[-2]))
    group = replace(p.lowered.group, arrays=p.lowered.group.arrays | {a.name: turned})
    changed = _with_place(made, k, replace(p, lowered=replace(p.lowered, group=group)))
    return f"strides of {p.fused.outputs} swapped", changed


def wrong_alias(made: Planned, r: Random) -> Planted:
    """A copy is left out, as if its source and its result were one memory."""
    plan, every = made.plan, list[tuple[int, str, str]]()
    for k, x in enumerate(plan.launches):
        p, _ = made.place_of(x)
        s, *more = p.lowered.group.statements if p else (None, None)
        if p is None or s is None or more or not isinstance(s.value, Load) or s.reduce is not None:
            continue
        a, b = p.lowered.buffers[s.value.buffer], p.lowered.buffers[s.array]
        if plan.buffers[a].role == "intermediate" and plan.buffers[a].dtype == plan.buffers[b].dtype:
            every.append((k, a, b))
    if not every:
        return None
    k, a, b = r.choice(every)
    found = missing(made, _Always(k))
    assert found is not None
    return f"{a} is taken to be {b}", with_launches(found[1], lambda j, y: renamed(y, {a: b}))


class _Always(Random):
    """Draws one number."""

    def __init__(self, value: int) -> None:
        super().__init__(0)
        self.value = value

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        """The number."""
        return self.value


# -- the arena -------------------------------------------------------------------------------------------------------


def lives(plan: HostPlan) -> dict[str, tuple[int, int]]:
    """The first and the last wave that names each intermediate."""
    out: dict[str, tuple[int, int]] = {}
    for w, wave in enumerate(waves_of(plan)):
        for b in (b for k in wave for b in plan.launches[k].buffers if plan.buffers[b].role == "intermediate"):
            out[b] = (out.get(b, (w, w))[0], w)
    return out


def joined_slots(made: Planned, r: Random) -> Planted:
    """Two slots whose tenants live at the same time are one."""
    life = lives(made.plan)

    def together(a: str, b: str) -> bool:
        return life[a][0] <= life[b][1] and life[b][0] <= life[a][1]

    every = [(a, b) for a in made.slots for b in made.slots
             if a is not b and any(together(x, y) for x in a.tenants for y in b.tenants)]  # fmt: skip
    if not every:
        return None
    a, b = r.choice(every)
    one = replace(a, tenants=a.tenants + b.tenants, sizes=tuple(dict.fromkeys(a.sizes + b.sizes)))
    slots = tuple(one if s is a else s for s in made.slots if s is not b)
    return f"slots of {a.tenants} and {b.tenants} joined", replace(made, slots=slots)


def freed_early(made: Planned, r: Random) -> Planted:
    """A tensor lies where another one does that the wave that writes it still reads."""
    life = lives(made.plan)
    every = [(a, b, x, y) for a in made.slots for b in made.slots if a is not b for x in a.tenants for y in b.tenants
             if life[x][0] < life[x][1] == life[y][0]]  # fmt: skip
    if not every:
        return None
    a, b, x, y = r.choice(every)
    into = replace(a, tenants=(*a.tenants, y), sizes=tuple(dict.fromkeys((*a.sizes, *b.sizes))))
    left = replace(b, tenants=tuple(t for t in b.tenants if t != y))
    slots = tuple(s for s in (into if s is a else left if s is b else s for s in made.slots) if s.tenants)
    return f"{y} where {x} is still read", replace(made, slots=slots)


def small_arena(made: Planned, r: Random) -> Planted:
    """A slot is half as large."""
    if not made.slots:
        return None
    s = r.choice(made.slots)
    half = replace(s, sizes=tuple(x // 2 for x in s.sizes))
    return f"slot of {s.tenants} halved", replace(made, slots=tuple(half if t is s else t for t in made.slots))


ON_LAUNCHES: tuple[Mistake, ...] = (
    wrong_source, swapped_places, too_early, one_wave, missing, of_no_elements, in_place, one_memory, one_less,
    other_constant, swapped_outputs, other_copy, wrong_alias,
)  # fmt: skip
"""Those after which slots and C text are made again."""
ON_KERNELS: tuple[Mistake, ...] = (moved_window, turned_output)
ON_SLOTS: tuple[Mistake, ...] = (joined_slots, freed_early, small_arena)
ON_LOOPS: tuple[Mistake, ...] = (one_task_less, no_scratch)
"""Those that only the loops of kernels show."""
