"""The steps of a schedule that people write. Each is a composition of the transformations of ``schedules.tree``.

A step takes a draft and returns another one. It refuses what has no meaning. Whether the result computes the group is
for the proof to say, which runs after every step (``apply``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.group.polyhedra import padded_read, read_accesses, reads
from polydyn.schedules.handmade.draft import Draft
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tree.buffers import accumulate, carry, keep, promote
from polydyn.schedules.tree.limits import assign, clip
from polydyn.schedules.tree.loops import Size, begins, pull_out, tile
from polydyn.schedules.tree.names import Coord, Level, b, c, p
from polydyn.schedules.tree.nodes import Band, Tree
from polydyn.schedules.tree.nodes import Sequence as Parts
from polydyn.schedules.tree.scheduled import Scheduled, all_of, flat, rewrite
from polydyn.schedules.tree.strategies import statements_along

INNER, OUTER = -1, 0
"""The loop that an axis alone stands for, where a step prefers one."""
MOST_COPIES = 2048
"""Maximum copies of one statement by unrolled loops."""
LARGEST_TILE = 1 << 16
"""Maximum elements of a tile along one axis."""
Sizes = int | Sequence[int]


@dataclass(frozen=True)
class Step:
    """A step as data: its name in ``STEPS``, its positional and its named arguments. Names are those of the group."""

    name: str
    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, *arguments: Any, **named: Any) -> Step:
        """Return the step of a call. Lists become tuples, so that steps are values."""
        return cls(name, tuple(map(_value, arguments)), tuple((k, _value(v)) for k, v in named.items()))

    def __str__(self) -> str:
        words = [*map(repr, self.arguments), *(f"{k}={v!r}" for k, v in self.named)]
        return f"{self.name}({', '.join(words)})"


def _value(x: Any) -> Any:
    return tuple(map(_value, x)) if isinstance(x, (list, tuple)) else x


def apply(draft: Draft, step: Step) -> Draft:
    """Return the draft after a step, proven.

    ScheduleError: the step does not fit. LegalityError with a witness: the result does not compute the group.
    """
    if step.name not in STEPS:
        raise ScheduleError(f"no step {step.name}", rule="steps", remedy=f"the steps are {', '.join(STEPS)}, and pack")
    try:
        out = STEPS[step.name](draft, *step.arguments, **dict(step.named))
    except TypeError as e:
        what = str(e).replace(STEPS[step.name].__name__, step.name)
        raise ScheduleError(f"{step}: {what}", rule="arguments of a step", remedy=f"help(Schedule.{step.name})") from e
    prove(out.scheduled)
    return out


# -- loops -----------------------------------------------------------------------------------------------------------


def tiled(draft: Draft, **sizes: Sizes) -> Draft:
    """Cut axes into tiles. Loops over tiles inside tiles are around reductions, loops over elements inside them."""
    if not sizes:
        raise ScheduleError("no axis is given", rule="tile", remedy="tile(i=8)")
    t, ranks, reduced = draft.scheduled, dict[Coord, int](), _reduced(draft)
    for axis, size in sizes.items():
        loop = draft.loop(axis)
        if draft.names[loop] not in draft.axes:
            raise ScheduleError(f"{axis} is a loop of a tiled axis", dim=axis, rule="tile", remedy="tile(i=(64, 8))")
        if loop in draft.unrolled or loop in draft.vectors:
            what = "unrolled" if loop in draft.unrolled else "in vectors"
            remedy = "make this step an earlier one"
            raise ScheduleError(f"{axis} is {what} already", dim=axis, rule="tile", remedy=remedy)
        if any(axis in x.axes for x in t.buffers):
            reason = f"a buffer has the axis {axis} already"
            raise ScheduleError(reason, dim=axis, rule="tile", remedy="tile before accumulate, cache and store")
        levels = _levels(axis, size)
        t = tile(t, axis, *levels)
        cut = {x.statement for x in t.clips if x.axis == axis}
        t = clip(t, axis, *(n for n in statements_along(t, axis) if n not in cut))
        ranks |= {c(axis): 2 if axis in reduced else 1, p(axis): 3 if axis in reduced else 4}
    middle = any(isinstance(size, (tuple, list)) for size in sizes.values())
    sums = {loop for axis in reduced for loop in draft.axes[axis]} if middle else set()

    def order(loops: Sequence[Coord]) -> Sequence[Coord]:
        return sorted(loops, key=lambda x: ranks.get(x, 2 if x in sums else 0))

    return replace(draft, scheduled=t).reordered(order)


def evened(draft: Draft, *axes: str) -> Draft:
    """Make the tiles of an axis nearly equal: 25 elements in tiles of 12 are 8, 8 and 9 instead of 12, 12 and 1."""
    t = draft.scheduled
    for axis in axes:
        loops = draft.axes.get(axis, ())
        if len(loops) != 2 or axis in _reduced(draft) or axis in t.map.origins:
            if axis in t.map.origins:
                raise ScheduleError(f"{axis} is even already", dim=axis, rule="even")
            reason = f"{axis} is not an axis of results with two loops"
            raise ScheduleError(reason, dim=axis, rule="even", remedy="tile(i=12).even('i')")
        t = begins(t, axis, loops[0], f"o_{axis}", even=True)
    return replace(draft, scheduled=t)


def _reduced(draft: Draft) -> set[str]:
    """Return the axes of reductions."""
    axis = draft.scheduled.map.iterators
    summed = [s for s in draft.group.statements if s.reduce]
    return {axis[s.name, x] for s in summed for x in s.iterators if all(x not in i.symbols() for i in s.index)}


def _levels(axis: str, size: Any) -> tuple[tuple[Level, Size], ...]:
    """Return the levels of a tiled axis. ScheduleError: a size is no number of elements, or does not divide."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if not 1 <= len(sizes) <= 2 or not all(type(n) is int and 1 <= n <= LARGEST_TILE for n in sizes):
        raise ScheduleError(
            f"{axis}={size!r} is not the size of a tile", dim=axis, rule="tile",
            remedy=f"a number from 1 to {LARGEST_TILE}, or two, the larger one first",
        )  # fmt: skip
    if sizes[0] % sizes[-1]:
        raise ScheduleError(f"tiles of {sizes[-1]} do not divide tiles of {sizes[0]}", dim=axis, rule="tile")
    if len(sizes) == 1:
        return (b, f"B_{axis}"), (p, sizes[0])
    return (b, f"B_{axis}"), (c, sizes[0] // sizes[1]), (p, sizes[1])


def reordered(draft: Draft, *loops: str) -> Draft:
    """Put these loops of one band in this order. The other loops keep their places."""
    wanted = [draft.loop(x) for x in loops]
    if len(wanted) < 2:
        raise ScheduleError("reorder needs two loops", rule="reorder", remedy="reorder('j', 'i')")
    if len(set(wanted)) < len(wanted):
        raise ScheduleError(f"{loops} names a loop twice", rule="reorder")
    hit = False

    def order(band: Sequence[Coord]) -> Sequence[Coord]:
        nonlocal hit
        if not set(wanted) <= set(band):
            return band
        hit = True
        new = iter(wanted)
        return [next(new) if x in wanted else x for x in band]

    out = draft.reordered(order)
    if not hit:
        listed = "; ".join(", ".join(draft.names[x] for x in y) for y in _bands(draft))
        raise ScheduleError(
            f"{', '.join(loops)} are not loops of one band", rule="reorder", remedy=f"the bands are: {listed}"
        )
    return out


def _bands(draft: Draft) -> list[tuple[Coord, ...]]:
    found: list[tuple[Coord, ...]] = []

    def f(node: Any, _: frozenset[str]) -> None:
        if isinstance(node, Band):
            found.append(tuple(x for x in map(Coord, node.members) if x in draft.names))

    rewrite(flat(draft.scheduled.tree), all_of(draft.scheduled), f)
    return found


def parallel(draft: Draft, *loops: str) -> Draft:
    """Distribute the outermost loops over threads."""
    t = draft.scheduled
    if t.parallel or not loops:
        reason = "the schedule has parallel loops already" if t.parallel else "no loop is given"
        raise ScheduleError(reason, rule="parallel")
    wanted = tuple(draft.loop(x, OUTER) for x in loops)
    for name, loop in zip(loops, wanted, strict=True):
        if draft.names[loop].partition(".")[0] in _reduced(draft):
            free = ", ".join(n for n in draft.names.values() if n.partition(".")[0] not in _reduced(draft))
            reason = f"{name} runs a reduction: its steps update one result"
            raise ScheduleError(reason, dim=name, rule="parallel", remedy=f"other loops are {free}")
    for n in t.map.views:
        if set(draft.order(n)[: len(wanted)]) != set(wanted):
            has = ", ".join(draft.names.get(x, x) for x in draft.order(n))
            raise ScheduleError(
                f"the outermost loops of {n} are not {', '.join(loops)}; its loops are {has}", node=n, rule="parallel",
                remedy="reorder(...) moves loops outwards",
            )  # fmt: skip
    return replace(draft, scheduled=assign(t, "task", *draft.order(next(iter(t.map.views)))[: len(wanted)]))


# -- storage ---------------------------------------------------------------------------------------------------------


def accumulated(draft: Draft, at: str) -> Draft:
    """Keep the sums of one step of a loop in a buffer, and run what comes before and after them around their loops."""
    t, below = draft.scheduled, draft.loop(at, OUTER)
    sums = [x for x in t.group.statements if x.reduce]
    if len(sums) != 1:
        raise ScheduleError(f"the group has {len(sums)} reductions", rule="accumulate", remedy="store(...)")
    _refuse_second(draft, sums[0].array)
    acc = sums[0].name
    order = draft.order(acc)
    if below not in order:
        raise ScheduleError(f"{at} is not a loop of {acc}", node=acc, rule="accumulate")
    summed = {k for w in t.map.views.values() for x in w.loops if x.at for k in (x.coord,)}
    outer, inner = order[: order.index(below) + 1], order[order.index(below) + 1 :]
    within = [x for x in inner if x in summed]
    if not within:
        raise ScheduleError(f"no loop of the reduction is inside {at}", dim=at, rule="accumulate")
    first = next(n for n, x in enumerate(inner) if x in summed)
    kept = [x for x in inner[:first] if x not in summed]
    if kept:  # what is outside of the reduction belongs to every part
        listed = ", ".join(draft.names[x] for x in kept)
        remedy = f"accumulate(at={draft.names[kept[-1]]!r}), or reorder"
        raise ScheduleError(f"{listed} would be inside {at} and around the reduction", dim=at, rule="accumulate",
                            remedy=remedy)  # fmt: skip
    t = accumulate(pull_out(t, *within), below)
    for loop in (x for x in outer if x in summed):
        had = set(t.map.views)
        t = carry(t, loop)
        for x in t.clips:  # the statements that move sums are cut like the initialiser
            if x.statement == t.group.init.name:
                t = clip(t, x.axis, *(n for n in t.map.views if n not in had))
    return replace(draft, scheduled=t)


def cached(draft: Draft, tensor: str, at: str, order: Sequence[str] = ()) -> Draft:
    """Copy what one step of a loop reads of a tensor into a buffer."""
    t, below = draft.scheduled, draft.loop(at, OUTER)
    readers = [s for s in t.group.statements if any(x.array == tensor for x in read_accesses(s))]
    if not readers:
        raise ScheduleError(f"no statement reads {tensor}", tensor=tensor, rule="cache", remedy=_arrays(draft))
    guarded = any(x.guarded for s in readers for x in reads(s) if x.access.array == tensor)
    if guarded and (len(readers) > 1 or padded_read(readers[0], tensor) is None):
        reason = f"{tensor} is read only where a condition holds, which a copy would not ask"
        raise ScheduleError(reason, tensor=tensor, rule="cache", remedy="leave its elements where they are")
    first, copy = readers[0].name, f"COPY_{tensor}"
    axes = _axes_of(draft, first, tensor)
    if not axes:
        raise ScheduleError(f"{first} reads {tensor} along no axis", tensor=tensor, rule="cache")
    if copy in t.map.views:
        raise ScheduleError(f"{tensor} is copied already", tensor=tensor, rule="cache")
    if not set(order) <= set(axes) or len(set(order)) < len(order):
        remedy = f"each of {', '.join(axes)} at most once"
        raise ScheduleError(f"{first} does not read {tensor} along {', '.join(order)}", tensor=tensor, rule="cache",
                            remedy=remedy)  # fmt: skip
    around = draft.order(first)
    if below not in around:
        raise ScheduleError(f"{at} is not a loop of {first}, which reads {tensor}", tensor=tensor, rule="cache")
    fixed, ordered = set(around[: around.index(below) + 1]), (*(x for x in axes if x not in order), *order)
    free = [d.name for x in ordered for d, k in zip(t.map.axes[x], draft.axes[x], strict=True) if k not in fixed]
    loops: dict[Coord, Sequence[str]] = {Coord(f"a_{x}"): (x,) for x in free}
    t = promote(t, tensor, axes[0], copy, f"{tensor}_copy", below, [s.name for s in readers], loops)
    moved = tuple(replace(x, axes=ordered) if x.name == f"{tensor}_copy" else x for x in t.buffers)
    for axis in axes:
        cut = len(t.map.axes[axis]) > 1 or t.map.has_empty_step(axis)
        t = clip(t, axis, copy) if cut else t
    return replace(draft, scheduled=replace(t, buffers=moved))


def _axes_of(draft: Draft, reader: str, tensor: str) -> tuple[str, ...]:
    """Return the axes that a statement reads an array along, as ``operand_axes`` lists them."""
    on = {x: axis for (s, x), axis in draft.scheduled.map.iterators.items() if s == reader}
    for x in read_accesses(draft.group.statement(reader)):
        axes = dict.fromkeys(on[n] for i in x.index for n in sorted(i.symbols()) if n in on)
        if x.array == tensor and axes:
            return tuple(axes)
    return ()


def _arrays(draft: Draft) -> str:
    return f"the group reads {', '.join(n for n, a in draft.group.arrays.items() if a.role != 'output')}"


def stored(draft: Draft, tensor: str, at: str) -> Draft:
    """Keep a tensor that exists only inside the group in a buffer, for one step of a loop."""
    array = draft.group.arrays.get(tensor)
    if array is None or array.role != "local":
        local = ", ".join(n for n, a in draft.group.arrays.items() if a.role == "local") or "none"
        raise ScheduleError(
            f"{tensor} is not a tensor inside the group", tensor=tensor, rule="store", remedy=f"there are: {local}"
        )
    _refuse_second(draft, tensor)
    return replace(draft, scheduled=keep(draft.scheduled, tensor, tensor, draft.loop(at, OUTER)))


def _refuse_second(draft: Draft, array: str) -> None:
    """Refuse a second buffer of a tensor inside the group."""
    if any(x.array == array for x in draft.scheduled.buffers):
        raise ScheduleError(f"{array} has a buffer already", tensor=array, rule="storage of a schedule")


def with_storage(draft: Draft) -> Draft:
    """Keep the tensors inside the group that no step stored, each for one step of the innermost loop that can hold it.

    ScheduleError: no loop is around all uses of one. LegalityError: no such loop can hold it.
    """
    for n, a in draft.group.arrays.items():
        if a.role == "local" and all(x.array != n for x in draft.scheduled.buffers):
            draft = replace(draft, scheduled=_kept(draft, n))
    return draft


def _kept(draft: Draft, array: str) -> Scheduled:
    t = draft.scheduled
    users = {s.name for s in t.group.statements if s.array == array or any(x.array == array for x in read_accesses(s))}
    around = _loops_around(flat(t.tree), users)
    if not around:
        remedy = "results of a whole tensor have no loop outside of their reduction: the group keeps its own kernel"
        reason = f"no loop is around all uses of {array}"
        raise ScheduleError(reason, tensor=array, rule="storage of a schedule", remedy=remedy)
    for loop in reversed(around):
        kept = keep(t, array, array, loop)
        try:
            prove(kept)
        except LegalityError:
            if loop == around[0]:
                raise
            continue
        return kept
    raise AssertionError("the outermost loop was kept or refused")


def _loops_around(tree: Tree, users: set[str]) -> tuple[Coord, ...]:
    """Return the loops that all users share, outermost first: one loop each, not several of one name."""
    if isinstance(tree, Band):
        return (*map(Coord, tree.members), *_loops_around(tree.child, users))
    if isinstance(tree, Parts):
        return next((_loops_around(x, users) for names, x in tree.children if users <= names), ())
    return ()


# -- instructions ----------------------------------------------------------------------------------------------------


def vectorized(draft: Draft, name: str) -> Draft:
    """Move a loop inside the other loops of its bands, and run its steps in vectors."""
    loop = draft.loop(name, INNER)
    if loop in draft.vectors:
        raise ScheduleError(f"{name} is in vectors already", dim=name, rule="vectorize")
    out = draft.reordered(lambda band: [*(x for x in band if x != loop), *(x for x in band if x == loop)])
    if not any(band and band[-1] == loop and _is_innermost(out, loop) for band in _bands(out)):
        raise ScheduleError(
            f"other loops are inside {name}", dim=name, rule="vectorize", remedy="reorder, or accumulate"
        )
    return replace(out, vectors=(*draft.vectors, loop))


def _is_innermost(draft: Draft, loop: Coord) -> bool:
    def f(node: Any, _: frozenset[str]) -> None:
        leaves = isinstance(node, Band) and isinstance(node.child, Parts) and not any(
            isinstance(x, Band) for _, x in node.child.children
        )  # fmt: skip
        if isinstance(node, Band) and loop in node.members and not leaves and isinstance(node.child, (Band, Parts)):
            inside.append(node)

    inside: list[Band] = []
    rewrite(flat(draft.scheduled.tree), all_of(draft.scheduled), f)
    return not inside


def unrolled(draft: Draft, *names: str, factor: int = 0) -> Draft:
    """Unroll loops: whole ones, whose sums then live in registers, or by a factor."""
    loops, extents = [draft.loop(x, INNER) for x in names], draft.scheduled.extents()
    if type(factor) is not int or not (factor == 0 or 2 <= factor <= 16) or not names:
        remedy = "loops, and a factor from 2 to 16, or none for whole loops"
        raise ScheduleError(f"unroll{names} with factor={factor!r}", rule="unroll", remedy=remedy)
    unrolled = {**draft.unrolled, **dict.fromkeys(loops, factor)}
    for name, loop in zip(names, loops, strict=True):
        if not factor and extents[loop].constant is None:
            raise ScheduleError(f"{name} has no constant number of steps", dim=name, rule="unroll", remedy="tile it")
    copies = math.prod(extents[x].constant or 1 for x, n in unrolled.items() if not n)
    if copies > MOST_COPIES:
        remedy = f"at most {MOST_COPIES} together"
        raise ScheduleError(f"{copies} copies of a statement", dim=names[0], rule="unroll", remedy=remedy)
    return replace(draft, unrolled=unrolled)


STEPS: Mapping[str, Callable[..., Draft]] = {
    "tile": tiled, "even": evened, "reorder": reordered, "accumulate": accumulated, "cache": cached, "store": stored,
    "vectorize": vectorized, "unroll": unrolled, "parallel": parallel,
}  # fmt: skip
"""Name of a step -> its function."""
