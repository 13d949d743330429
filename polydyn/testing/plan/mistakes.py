"""Plant mistakes in plans that a planner could make. Each mistake yields the sites in a plan where it can be planted.

A site is a description and a function that returns the changed plan. ``mistake`` draws one site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from random import Random
from typing import TypeAlias, TypeVar

from polydyn.codegen.kernel import WORKSPACE
from polydyn.lowering.place import PlacedGroup
from polydyn.program.memory import Slot
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.schedules.expr import Load
from polydyn.schedules.index import ONE, ZERO
from polydyn.schedules.model import Array
from polydyn.testing.plan.planned import Planned

T = TypeVar("T")
Sites: TypeAlias = "Iterator[tuple[str, Callable[[], T]]]"
Mistake: TypeAlias = Callable[[Planned, Random], "tuple[str, Planned] | None"]


def mistake(places: Callable[[T], Sites[T]]) -> Callable[[T, Random], tuple[str, T] | None]:
    """Turn a generator of sites into a function that plants one at random, or returns None if there is no site."""

    @wraps(places)
    def planted(planned: T, r: Random) -> tuple[str, T] | None:
        every = list(places(planned))
        if not every:
            return None
        what, change = r.choice(every)
        return what, change()

    return planted


# -- parts of plans --------------------------------------------------------------------------------------------------


def waves_of(plan: HostPlan) -> list[range]:
    """Return the launches of each wave."""
    out: list[range] = []
    for n in plan.waves or (1,) * len(plan.launches):
        first = out[-1].stop if out else 0
        out.append(range(first, first + n))
    return out


def reads(launch: Launch) -> list[str]:
    """Return the buffers that a launch only reads."""
    return [b for b in launch.buffers if b not in (launch.writes or ())]


def same_layout(plan: HostPlan, a: str, b: str) -> bool:
    """Return whether two different buffers have equal shape and type, and no caller-defined strides."""
    x, y = plan.buffers[a], plan.buffers[b]
    return a != b and (x.shape, x.dtype, x.strides, y.strides) == (y.shape, y.dtype, (), ())


def renamed(launch: Launch, names: Mapping[str, str], which: str = "rw") -> Launch:
    """Rename buffers of a launch: those that it only reads ("r"), writes ("w"), or both ("rw")."""
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


def with_names(planned: Planned, names: Mapping[str, str], which: str = "rw", only: int | None = None) -> Planned:
    """Return the plan with ``renamed`` applied to all launches, or to launch ``only``."""
    launches = enumerate(planned.plan.launches)
    return with_launches(planned, *(renamed(x, names, which) if only in (None, k) else x for k, x in launches))


def with_launches(planned: Planned, *launches: Launch) -> Planned:
    """Return the plan with other launches."""
    return replace(planned, plan=replace(planned.plan, launches=launches))


def with_launch(planned: Planned, k: int, launch: Launch) -> Planned:
    """Return the plan with launch ``k`` replaced."""
    return with_launches(planned, *(launch if j == k else x for j, x in enumerate(planned.plan.launches)))


def with_candidates(planned: Planned, k: int, change: Callable[[Candidate], Candidate]) -> Planned:
    """Return the plan with each candidate of launch ``k`` changed."""
    launch = planned.plan.launches[k]
    return with_launch(planned, k, replace(launch, candidates=tuple(map(change, launch.candidates))))


def with_array(planned: Planned, k: int, array: Array) -> Planned:
    """Return the plan with one array of placed group ``k`` replaced."""
    p = planned.kernels.placed[k]
    group = replace(p.lowered.group, arrays=p.lowered.group.arrays | {array.name: array})
    placed: list[PlacedGroup] = [*planned.kernels.placed]
    placed[k] = replace(p, lowered=replace(p.lowered, group=group))
    return replace(planned, kernels=replace(planned.kernels, placed=placed))


def without_launch(planned: Planned, k: int) -> Planned:
    """Return the plan without launch ``k``."""
    counts = [len(w) - (k in w) for w in waves_of(planned.plan)]
    launches = tuple(x for j, x in enumerate(planned.plan.launches) if j != k)
    checks = tuple(replace(c, launch=c.launch - (c.launch > k)) for c in planned.plan.index_checks if c.launch != k)
    plan = replace(planned.plan, launches=launches, waves=tuple(n for n in counts if n), index_checks=checks)
    return replace(planned, plan=plan)


def dependent(plan: HostPlan) -> list[tuple[int, int]]:
    """Return pairs (writer, reader) of launches that access the same buffer."""
    n = range(len(plan.launches))
    written = [set(x.writes or ()) for x in plan.launches]
    return [(j, k) for k in n for j in range(k) if written[j] & set(reads(plan.launches[k]))]


# -- launches --------------------------------------------------------------------------------------------------------


@mistake
def wrong_source(planned: Planned) -> Sites[Planned]:
    """A launch reads another tensor of the same shape."""
    plan = planned.plan
    for k, x in enumerate(plan.launches):
        for a in reads(x):
            for b in plan.buffers:
                roles = plan.buffers[a].role != "constant" != plan.buffers[b].role
                if roles and WORKSPACE not in a and same_layout(plan, a, b) and b not in x.buffers:
                    yield f"'{x.label}' reads {b} instead of {a}", partial(with_names, planned, {a: b}, "r", k)


@mistake
def swapped_places(planned: Planned) -> Sites[Planned]:
    """The writers of two tensors of one shape are swapped."""
    own = [b for b, x in planned.plan.buffers.items() if x.role in ("intermediate", "output")]
    for a, b in ((a, b) for a in own for b in own if a < b and same_layout(planned.plan, a, b)):
        if not any({a, b} <= set(x.writes or ()) for x in planned.plan.launches):
            yield f"writers of {a} and {b} swapped", partial(with_names, planned, {a: b, b: a}, "w")


@mistake
def too_early(planned: Planned) -> Sites[Planned]:
    """A reader runs before its writer."""

    def moved(j: int, k: int) -> Planned:
        launches = list(planned.plan.launches)
        launches.insert(j, launches.pop(k))
        plan = replace(planned.plan, launches=tuple(launches), waves=(1,) * len(launches), index_checks=())
        return replace(planned, plan=plan)

    for j, k in dependent(planned.plan):
        yield f"'{planned.plan.launches[k].label}' before '{planned.plan.launches[j].label}'", partial(moved, j, k)


@mistake
def one_wave(planned: Planned) -> Sites[Planned]:
    """Two dependent waves are joined."""

    def joined(w: int) -> Planned:
        counts = [len(x) for x in waves]
        counts[w : w + 2] = [sum(counts[w : w + 2])]
        return replace(planned, plan=replace(planned.plan, waves=tuple(counts)))

    waves, pairs = waves_of(planned.plan), dependent(planned.plan)
    for w in range(len(waves) - 1):
        if any(j in waves[w] and k in waves[w + 1] for j, k in pairs):
            yield f"waves {w} and {w + 1} joined", partial(joined, w)


@mistake
def missing(planned: Planned) -> Sites[Planned]:
    """A launch is missing."""
    for k, x in enumerate(planned.plan.launches):
        yield f"without '{x.label}'", partial(without_launch, planned, k)


@mistake
def of_no_elements(planned: Planned) -> Sites[Planned]:
    """A launch has zero elements and is skipped."""
    for k, x in enumerate(planned.plan.launches):
        yield f"'{x.label}' of no elements", partial(with_launch, planned, k, replace(x, elements=ZERO))


@mistake
def in_place(planned: Planned) -> Sites[Planned]:
    """A launch overwrites its input, which a later launch also reads."""
    plan = planned.plan
    for k, x in enumerate(plan.launches):
        for a, b in ((a, b) for a in reads(x) for b in x.writes or ()):
            both = plan.buffers[a].role == "intermediate" == plan.buffers[b].role and same_layout(plan, a, b)
            if both and any(a in reads(y) for y in plan.launches[k + 1 :]):
                yield f"'{x.label}' writes {b} in place of {a}", partial(with_names, planned, {b: a})


@mistake
def one_memory(planned: Planned) -> Sites[Planned]:
    """An intermediate shares memory with a live model output."""
    outs = [b for b in planned.plan.outputs if planned.plan.buffers[b].role == "output"]
    own = [b for b, x in planned.plan.buffers.items() if x.role == "intermediate"]
    for a, b in ((a, b) for a in own for b in outs if same_layout(planned.plan, a, b)):
        yield f"{a} shares the memory of {b}", partial(with_names, planned, {a: b})


# -- arguments of launches -------------------------------------------------------------------------------------------


@mistake
def one_less(planned: Planned) -> Sites[Planned]:
    """A size argument of a kernel is too small by one."""

    def less(name: str, c: Candidate) -> Candidate:
        return replace(c, symbols=tuple(e - (n == name) for n, e in zip(c.names, c.symbols, strict=True)))

    for k, x in enumerate(planned.plan.launches):
        first = x.candidates[0]
        for n, e in zip(first.names, first.symbols, strict=True):
            if n.startswith("n") and e.constant is None:
                yield f"'{x.label}': {n} less 1", partial(with_candidates, planned, k, partial(less, n))


@mistake
def one_task_less(planned: Planned) -> Sites[Planned]:
    """A kernel has one task too few."""
    for k, x in enumerate(planned.plan.launches):
        change = partial(with_candidates, planned, k, lambda c: replace(c, tasks=c.tasks - 1))
        yield f"'{x.label}': a task less", change


@mistake
def no_scratch(planned: Planned) -> Sites[Planned]:
    """Threads have no scratch."""
    for k, x in enumerate(planned.plan.launches):
        if all(c.scratch != ZERO for c in x.candidates):
            yield f"'{x.label}': no scratch", partial(with_candidates, planned, k, lambda c: replace(c, scratch=ZERO))


@mistake
def other_constant(planned: Planned) -> Sites[Planned]:
    """A launch reads another constant of the same shape."""
    constants, buffers = planned.plan.constants, planned.plan.buffers
    for k, x in enumerate(planned.plan.launches):
        for a in (a for a in reads(x) if a in constants):
            for b in (b for b in constants if b in buffers and b not in x.buffers):
                same = constants[a].tobytes() == constants[b].tobytes()
                if constants[a].shape == constants[b].shape and not same:
                    yield f"'{x.label}' reads {b} instead of {a}", partial(with_names, planned, {a: b}, "r", k)


@mistake
def swapped_outputs(planned: Planned) -> Sites[Planned]:
    """Two outputs of one shape are swapped."""
    outs = [b for b in planned.plan.outputs if planned.plan.buffers[b].role == "output"]
    for a, b in ((a, b) for a in outs for b in outs if a < b and same_layout(planned.plan, a, b)):
        yield f"outputs {a} and {b} swapped", partial(with_names, planned, {a: b, b: a})


@mistake
def other_copy(planned: Planned) -> Sites[Planned]:
    """With an in-place cache, another launch is skipped instead of the cache copy."""

    def moved(j: int, k: int) -> Planned:
        x, y = planned.plan.launches[j], planned.plan.launches[k]
        changed = with_launch(planned, k, replace(y, skip_if_same=x.skip_if_same))
        return with_launch(changed, j, replace(x, skip_if_same=None))

    for j, x in enumerate(planned.plan.launches):
        for k, y in enumerate(planned.plan.launches):
            if x.skip_if_same and x.skip_if_same[1] in (y.writes or ()) and not y.skip_if_same:
                yield f"'{y.label}' is left out", partial(moved, j, k)


@mistake
def wrong_alias(planned: Planned) -> Sites[Planned]:
    """A copy is dropped, as if its source and result shared memory."""

    def left_out(k: int, a: str, b: str) -> Planned:
        return with_names(without_launch(planned, k), {a: b})

    for k, x in enumerate(planned.plan.launches):
        p, _ = planned.place_of(x)
        s, *more = p.lowered.group.statements if p else (None,)
        if p is None or s is None or more or not isinstance(s.value, Load) or s.reduce is not None:
            continue
        a, b = p.lowered.buffers[s.value.buffer], p.lowered.buffers[s.array]
        source, target = planned.plan.buffers[a], planned.plan.buffers[b]
        if source.role == "intermediate" and source.dtype == target.dtype:
            yield f"{a} is taken to be {b}", partial(left_out, k, a, b)


# -- kernels ---------------------------------------------------------------------------------------------------------


@mistake
def moved_window(planned: Planned) -> Sites[Planned]:
    """A kernel writes its part of a concatenation at a wrong offset."""
    for k, p in enumerate(planned.kernels.placed):
        for n, a in p.lowered.group.arrays.items():
            if a.role == "output" and p.lowered.buffers[n] not in p.fused.outputs:
                for by in (1, -1, 2):
                    change = partial(with_array, planned, k, replace(a, offset=a.offset + by))
                    yield f"window of {p.fused.outputs} moved by {by}", change


@mistake
def turned_output(planned: Planned) -> Sites[Planned]:
    """The strides of the last two axes of an output are swapped."""
    for k, p in enumerate(planned.kernels.placed):
        for a in p.lowered.group.arrays.values():
            if a.role == "output" and len(a.strides) > 1 and a.shape[-2] != ONE != a.shape[-1]:
                turned = replace(a, strides=(*a.strides[:-2], a.strides[-1], a.strides[-2]))
                yield f"strides of {p.fused.outputs} swapped", partial(with_array, planned, k, turned)


# -- the arena -------------------------------------------------------------------------------------------------------


def lives(plan: HostPlan) -> dict[str, tuple[int, int]]:
    """Return the first and last wave that uses each intermediate."""
    out: dict[str, tuple[int, int]] = {}
    for w, wave in enumerate(waves_of(plan)):
        for b in (b for k in wave for b in plan.launches[k].buffers if plan.buffers[b].role == "intermediate"):
            out[b] = (out.get(b, (w, w))[0], w)
    return out


def with_tenants(planned: Planned, into: Slot, source: Slot, moved: tuple[str, ...]) -> Planned:
    """Return the plan with ``moved`` tenants of slot ``source`` in slot ``into``, which grows to fit them."""
    larger = replace(into, tenants=into.tenants + moved, sizes=tuple(dict.fromkeys(into.sizes + source.sizes)))
    rest = replace(source, tenants=tuple(t for t in source.tenants if t not in moved))
    slots = (larger if s is into else rest if s is source else s for s in planned.slots)
    return replace(planned, slots=tuple(s for s in slots if s.tenants))


def two_slots(planned: Planned) -> Iterator[tuple[Slot, Slot]]:
    """Yield all ordered pairs of different slots."""
    return ((a, b) for a in planned.slots for b in planned.slots if a is not b)


@mistake
def joined_slots(planned: Planned) -> Sites[Planned]:
    """Two slots with simultaneously live tenants are joined."""
    life = lives(planned.plan)
    for a, b in two_slots(planned):
        if any(life[x][0] <= life[y][1] and life[y][0] <= life[x][1] for x in a.tenants for y in b.tenants):
            yield f"slots of {a.tenants} and {b.tenants} joined", partial(with_tenants, planned, a, b, b.tenants)


@mistake
def freed_early(planned: Planned) -> Sites[Planned]:
    """A tensor takes the memory of an input that its own wave still reads."""
    life = lives(planned.plan)
    for a, b in two_slots(planned):
        for x, y in ((x, y) for x in a.tenants for y in b.tenants if life[x][0] < life[x][1] == life[y][0]):
            yield f"{y} where {x} is still read", partial(with_tenants, planned, a, b, (y,))


@mistake
def small_arena(planned: Planned) -> Sites[Planned]:
    """A slot has half its size."""
    for s in planned.slots:
        half = replace(s, sizes=tuple(x // 2 for x in s.sizes))
        slots = tuple(half if t is s else t for t in planned.slots)
        yield f"slot of {s.tenants} halved", partial(replace, planned, slots=slots)


ON_LAUNCHES: tuple[Mistake, ...] = (
    wrong_source, swapped_places, too_early, one_wave, missing, of_no_elements, in_place, one_memory, one_less,
    other_constant, swapped_outputs, other_copy, wrong_alias,
)  # fmt: skip
"""Mistakes in launches. Slots and C text are computed again after them."""
ON_KERNELS: tuple[Mistake, ...] = (moved_window, turned_output)
ON_SLOTS: tuple[Mistake, ...] = (joined_slots, freed_early, small_arena)
ON_LOOPS: tuple[Mistake, ...] = (one_task_less, no_scratch)
"""Mistakes that only the loops of kernels reveal."""
