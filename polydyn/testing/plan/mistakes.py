"""Mistakes that a planner could make, planted in plans: each gives the places that a plan has for it.

A place is what would be done, in words, and what does it; ``mistake`` draws one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from random import Random
from typing import TypeAlias, TypeVar

from polydyn.codegen.kernel import WORKSPACE
from polydyn.lowering.place import Placed
from polydyn.program.memory import Slot
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.schedules.expr import Load
from polydyn.schedules.index import ONE, ZERO
from polydyn.schedules.model import Array
from polydyn.testing.plan.planned import Planned

T = TypeVar("T")
Places: TypeAlias = "Iterator[tuple[str, Callable[[], T]]]"
Mistake: TypeAlias = Callable[[Planned, Random], "tuple[str, Planned] | None"]


def mistake(places: Callable[[T], Places[T]]) -> Callable[[T, Random], tuple[str, T] | None]:
    """Draws one of the places that a plan has for a mistake; None: it has none."""

    @wraps(places)
    def planted(made: T, r: Random) -> tuple[str, T] | None:
        every = list(places(made))
        if not every:
            return None
        what, change = r.choice(every)
        return what, change()

    return planted


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


def with_names(made: Planned, names: Mapping[str, str], which: str = "rw", only: int | None = None) -> Planned:
    """The plan with launches on other buffers, as ``renamed``; ``only``: one of them."""
    launches = enumerate(made.plan.launches)
    return with_launches(made, *(renamed(x, names, which) if only in (None, k) else x for k, x in launches))


def with_launches(made: Planned, *launches: Launch) -> Planned:
    """The plan with other launches."""
    return replace(made, plan=replace(made.plan, launches=launches))


def with_launch(made: Planned, k: int, launch: Launch) -> Planned:
    """The plan with one other launch."""
    return with_launches(made, *(launch if j == k else x for j, x in enumerate(made.plan.launches)))


def with_candidates(made: Planned, k: int, change: Callable[[Candidate], Candidate]) -> Planned:
    """The plan with each candidate of a launch changed."""
    launch = made.plan.launches[k]
    return with_launch(made, k, replace(launch, candidates=tuple(map(change, launch.candidates))))


def with_array(made: Planned, k: int, array: Array) -> Planned:
    """The plan whose place ``k`` has another array of that name."""
    p = made.kernels.placed[k]
    group = replace(p.lowered.group, arrays=p.lowered.group.arrays | {array.name: array})
    placed: list[Placed] = [*made.kernels.placed]
    placed[k] = replace(p, lowered=replace(p.lowered, group=group))
    return replace(made, kernels=replace(made.kernels, placed=placed))


def without_launch(made: Planned, k: int) -> Planned:
    """The plan without a launch."""
    counts = [len(w) - (k in w) for w in waves_of(made.plan)]
    launches = tuple(x for j, x in enumerate(made.plan.launches) if j != k)
    checks = tuple(replace(c, launch=c.launch - (c.launch > k)) for c in made.plan.index_checks if c.launch != k)
    plan = replace(made.plan, launches=launches, waves=tuple(n for n in counts if n), index_checks=checks)
    return replace(made, plan=plan)


def dependent(plan: HostPlan) -> list[tuple[int, int]]:
    """Pairs of launches of which the second one reads a buffer that the first one writes."""
    n = range(len(plan.launches))
    written = [set(x.writes or ()) for x in plan.launches]
    return [(j, k) for k in n for j in range(k) if written[j] & set(reads(plan.launches[k]))]


# -- launches --------------------------------------------------------------------------------------------------------


@mistake
def wrong_source(made: Planned) -> Places[Planned]:
    """A launch reads another tensor of that shape."""
    plan = made.plan
    for k, x in enumerate(plan.launches):
        for a in reads(x):
            for b in plan.buffers:
                roles = plan.buffers[a].role != "constant" != plan.buffers[b].role
                if roles and WORKSPACE not in a and alike(plan, a, b) and b not in x.buffers:
                    yield f"'{x.label}' reads {b} instead of {a}", partial(with_names, made, {a: b}, "r", k)


@mistake
def swapped_places(made: Planned) -> Places[Planned]:
    """Two tensors of one shape change places for those who write them."""
    own = [b for b, x in made.plan.buffers.items() if x.role in ("intermediate", "output")]
    for a, b in ((a, b) for a in own for b in own if a < b and alike(made.plan, a, b)):
        if not any({a, b} <= set(x.writes or ()) for x in made.plan.launches):
            yield f"writers of {a} and {b} swapped", partial(with_names, made, {a: b, b: a}, "w")


@mistake
def too_early(made: Planned) -> Places[Planned]:
    """A reader runs in front of its writer."""

    def moved(j: int, k: int) -> Planned:
        launches = list(made.plan.launches)
        launches.insert(j, launches.pop(k))
        plan = replace(made.plan, launches=tuple(launches), waves=(1,) * len(launches), index_checks=())
        return replace(made, plan=plan)

    for j, k in dependent(made.plan):
        yield f"'{made.plan.launches[k].label}' before '{made.plan.launches[j].label}'", partial(moved, j, k)


@mistake
def one_wave(made: Planned) -> Places[Planned]:
    """Two waves of which the second one needs the first one become one."""

    def joined(w: int) -> Planned:
        counts = [len(x) for x in waves]
        counts[w : w + 2] = [sum(counts[w : w + 2])]
        return replace(made, plan=replace(made.plan, waves=tuple(counts)))

    waves, pairs = waves_of(made.plan), dependent(made.plan)
    for w in range(len(waves) - 1):
        if any(j in waves[w] and k in waves[w + 1] for j, k in pairs):
            yield f"waves {w} and {w + 1} joined", partial(joined, w)


@mistake
def missing(made: Planned) -> Places[Planned]:
    """There is no such launch."""
    for k, x in enumerate(made.plan.launches):
        yield f"without '{x.label}'", partial(without_launch, made, k)


@mistake
def of_no_elements(made: Planned) -> Places[Planned]:
    """A launch is said to write nothing, so it is skipped."""
    for k, x in enumerate(made.plan.launches):
        yield f"'{x.label}' of no elements", partial(with_launch, made, k, replace(x, elements=ZERO))


@mistake
def in_place(made: Planned) -> Places[Planned]:
    """A launch writes over a tensor that it, and another one behind it, reads."""
    plan = made.plan
    for k, x in enumerate(plan.launches):
        for a, b in ((a, b) for a in reads(x) for b in x.writes or ()):
            both = plan.buffers[a].role == "intermediate" == plan.buffers[b].role and alike(plan, a, b)
            if both and any(a in reads(y) for y in plan.launches[k + 1 :]):
                yield f"'{x.label}' writes {b} in place of {a}", partial(with_names, made, {b: a})


@mistake
def one_memory(made: Planned) -> Places[Planned]:
    """An intermediate lies where a model output lies, and both live."""
    outs = [b for b in made.plan.outputs if made.plan.buffers[b].role == "output"]
    own = [b for b, x in made.plan.buffers.items() if x.role == "intermediate"]
    for a, b in ((a, b) for a in own for b in outs if alike(made.plan, a, b)):
        yield f"{a} lies where {b} lies", partial(with_names, made, {a: b})


# -- what launches are told ------------------------------------------------------------------------------------------


@mistake
def one_less(made: Planned) -> Places[Planned]:
    """A size that a kernel is told is one too small."""

    def less(name: str, c: Candidate) -> Candidate:
        return replace(c, symbols=tuple(e - (n == name) for n, e in zip(c.names, c.symbols, strict=True)))

    for k, x in enumerate(made.plan.launches):
        first = x.candidates[0]
        for n, e in zip(first.names, first.symbols, strict=True):
            if n.startswith("n") and e.constant is None:
                yield f"'{x.label}': {n} less 1", partial(with_candidates, made, k, partial(less, n))


@mistake
def one_task_less(made: Planned) -> Places[Planned]:
    """A kernel has one task less."""
    for k, x in enumerate(made.plan.launches):
        change = partial(with_candidates, made, k, lambda c: replace(c, tasks=c.tasks - 1))
        yield f"'{x.label}': a task less", change


@mistake
def no_scratch(made: Planned) -> Places[Planned]:
    """Threads have no scratch."""
    for k, x in enumerate(made.plan.launches):
        if all(c.scratch != ZERO for c in x.candidates):
            yield f"'{x.label}': no scratch", partial(with_candidates, made, k, lambda c: replace(c, scratch=ZERO))


@mistake
def other_constant(made: Planned) -> Places[Planned]:
    """A launch takes another constant of that size."""
    constants, buffers = made.plan.constants, made.plan.buffers
    for k, x in enumerate(made.plan.launches):
        for a in (a for a in reads(x) if a in constants):
            for b in (b for b in constants if b in buffers and b not in x.buffers):
                same = constants[a].tobytes() == constants[b].tobytes()
                if constants[a].shape == constants[b].shape and not same:
                    yield f"'{x.label}' reads {b} instead of {a}", partial(with_names, made, {a: b}, "r", k)


@mistake
def swapped_outputs(made: Planned) -> Places[Planned]:
    """Two outputs of one shape change names."""
    outs = [b for b in made.plan.outputs if made.plan.buffers[b].role == "output"]
    for a, b in ((a, b) for a in outs for b in outs if a < b and alike(made.plan, a, b)):
        yield f"outputs {a} and {b} swapped", partial(with_names, made, {a: b, b: a})


@mistake
def other_copy(made: Planned) -> Places[Planned]:
    """With a cache in place another launch is left out than the copy of the cache."""

    def moved(j: int, k: int) -> Planned:
        x, y = made.plan.launches[j], made.plan.launches[k]
        changed = with_launch(made, k, replace(y, skip_if_same=x.skip_if_same))
        return with_launch(changed, j, replace(x, skip_if_same=None))

    for j, x in enumerate(made.plan.launches):
        for k, y in enumerate(made.plan.launches):
            if x.skip_if_same and x.skip_if_same[1] in (y.writes or ()) and not y.skip_if_same:
                yield f"'{y.label}' is left out", partial(moved, j, k)


@mistake
def wrong_alias(made: Planned) -> Places[Planned]:
    """A copy is left out, as if its source and its result were one memory."""

    def left_out(k: int, a: str, b: str) -> Planned:
        return with_names(without_launch(made, k), {a: b})

    for k, x in enumerate(made.plan.launches):
        p, _ = made.place_of(x)
        s, *more = p.lowered.group.statements if p else (None,)
        if p is None or s is None or more or not isinstance(s.value, Load) or s.reduce is not None:
            continue
        a, b = p.lowered.buffers[s.value.buffer], p.lowered.buffers[s.array]
        if made.plan.buffers[a].role == "intermediate" and made.plan.buffers[a].dtype == made.plan.buffers[b].dtype:
            yield f"{a} is taken to be {b}", partial(left_out, k, a, b)


# -- kernels ---------------------------------------------------------------------------------------------------------


@mistake
def moved_window(made: Planned) -> Places[Planned]:
    """A kernel writes its part of a concatenation further on, or before."""
    for k, p in enumerate(made.kernels.placed):
        for n, a in p.lowered.group.arrays.items():
            if a.role == "output" and p.lowered.buffers[n] not in p.fused.outputs:
                for by in (1, -1, 2):
                    change = partial(with_array, made, k, replace(a, offset=a.offset + by))
                    yield f"window of {p.fused.outputs} moved by {by}", change


@mistake
def turned_output(made: Planned) -> Places[Planned]:
    """The strides of the two last axes of an output are swapped."""
    for k, p in enumerate(made.kernels.placed):
        for a in p.lowered.group.arrays.values():
            if a.role == "output" and len(a.strides) > 1 and a.shape[-2] != ONE != a.shape[-1]:
                turned = replace(a, strides=(*a.strides[:-2], a.strides[-1], a.strides[-2]))
                yield f"strides of {p.fused.outputs} swapped", partial(with_array, made, k, turned)


# -- the arena -------------------------------------------------------------------------------------------------------


def lives(plan: HostPlan) -> dict[str, tuple[int, int]]:
    """The first and the last wave that names each intermediate."""
    out: dict[str, tuple[int, int]] = {}
    for w, wave in enumerate(waves_of(plan)):
        for b in (b for k in wave for b in plan.launches[k].buffers if plan.buffers[b].role == "intermediate"):
            out[b] = (out.get(b, (w, w))[0], w)
    return out


def with_tenants(made: Planned, into: Slot, more: Slot, moved: tuple[str, ...]) -> Planned:
    """The plan in which tenants of one slot are those of another one, which is as large as both."""
    larger = replace(into, tenants=into.tenants + moved, sizes=tuple(dict.fromkeys(into.sizes + more.sizes)))
    rest = replace(more, tenants=tuple(t for t in more.tenants if t not in moved))
    slots = (larger if s is into else rest if s is more else s for s in made.slots)
    return replace(made, slots=tuple(s for s in slots if s.tenants))


def two_slots(made: Planned) -> Iterator[tuple[Slot, Slot]]:
    """All pairs of different ones."""
    return ((a, b) for a in made.slots for b in made.slots if a is not b)


@mistake
def joined_slots(made: Planned) -> Places[Planned]:
    """Two slots whose tenants live at the same time are one."""
    life = lives(made.plan)
    for a, b in two_slots(made):
        if any(life[x][0] <= life[y][1] and life[y][0] <= life[x][1] for x in a.tenants for y in b.tenants):
            yield f"slots of {a.tenants} and {b.tenants} joined", partial(with_tenants, made, a, b, b.tenants)


@mistake
def freed_early(made: Planned) -> Places[Planned]:
    """A tensor lies where another one does that the wave that writes it still reads."""
    life = lives(made.plan)
    for a, b in two_slots(made):
        for x, y in ((x, y) for x in a.tenants for y in b.tenants if life[x][0] < life[x][1] == life[y][0]):
            yield f"{y} where {x} is still read", partial(with_tenants, made, a, b, (y,))


@mistake
def small_arena(made: Planned) -> Places[Planned]:
    """A slot is half as large."""
    for s in made.slots:
        half = replace(s, sizes=tuple(x // 2 for x in s.sizes))
        slots = tuple(half if t is s else t for t in made.slots)
        yield f"slot of {s.tenants} halved", partial(replace, made, slots=slots)


ON_LAUNCHES: tuple[Mistake, ...] = (
    wrong_source, swapped_places, too_early, one_wave, missing, of_no_elements, in_place, one_memory, one_less,
    other_constant, swapped_outputs, other_copy, wrong_alias,
)  # fmt: skip
"""Those after which slots and C text are made again."""
ON_KERNELS: tuple[Mistake, ...] = (moved_window, turned_output)
ON_SLOTS: tuple[Mistake, ...] = (joined_slots, freed_early, small_arena)
ON_LOOPS: tuple[Mistake, ...] = (one_task_less, no_scratch)
"""Those that only the loops of kernels show."""
