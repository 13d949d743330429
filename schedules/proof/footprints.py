"""Prove that a copied footprint has what rows read: each place that is read has been filled with exactly that element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.group.footprint import HIGH, LOW, Footprint, first, last, size
from polydyn.schedules.index import Index, product
from polydyn.schedules.isl_util import at_least, below, between, frame, param_set, sample, with_parameters
from polydyn.schedules.model import Group
from polydyn.schedules.ranges import is_nonnegative
from polydyn.schedules.tree.names import Meets
from polydyn.schedules.tree.scheduled import Scheduled, flat, path

V = Index.of
SHARE = "S"
"""Symbol: the number of row tiles that an allocation is made for."""


@dataclass(frozen=True)
class Strip:
    """A kernel's copy of a footprint.

    ``copy``: the copying statement; ``loops``: its loop for each place; ``box``: as in ``Footprint.box``; ``size``:
    elements allocated for ``SHARE`` tiles of ``rows`` rows. ``taps``: the steps that a run of rows executes, as in
    ``Footprint.taps``.
    """

    footprint: Footprint
    copy: str
    loops: Mapping[str, str]
    box: Mapping[str, tuple[Index, Index]]
    size: Index
    rows: int
    taps: Mapping[str, tuple[Index, Index]]


def check_strip(t: Scheduled, strip: Strip) -> None:
    """Raise LegalityError unless every row of a task finds the elements of its windows in the copied footprint.

    1. The operand that the group reads is the value at the row's places: the copy has the right elements. Packed words:
    the word of the values at consecutive steps, which are contiguous. Past the last step, where columns are 0, they are
    finite numbers. 2. For first pixels LOW <= h <= HIGH every place that is read is in the box (isl, all sizes). A row
    of the task has such an h, as ``row // line`` grows with the row. 3. The box is no larger than the hull of the
    reads, so the copy stays inside the tensor. 4. The copy runs over the whole box, in loops that contain no reader: it
    is complete when the first reader runs. 5. The allocation holds the box: n rows have at most ``(n + line - 2) //
    line + 1`` values of the first pixel. It also holds the elements past the box that the last word of a window reads.
    6. Steps that are skipped read zeros for all pixels of their rows (isl, all sizes).
    """
    _check_value(t.group, strip.footprint)
    _check_inside(strip)
    _check_hull(strip)
    _check_loops(t, strip)
    _check_size(strip)
    _check_taps(strip)


def _refuse(message: str) -> LegalityError:
    return LegalityError(message, tensor="rows", rule="footprint")


def _check_value(group: Group, f: Footprint) -> None:
    value = group.backbone.value
    if f.mistake:
        raise _refuse(f.mistake)
    if f.operand() not in getattr(value, "args", ()):
        raise _refuse(f"the operand of {group.backbone.name} is not {f.value} at the places {dict(f.places)}")
    extents = dict(group.backbone.iters)
    steps = [*f.steps[:-1], (f.steps[-1][0], f.steps[-1][1].ceildiv(f.parts))]
    if any(extents.get(x) != e for x, e in steps):
        raise _refuse(f"the steps {dict(f.steps)} are not those of {group.backbone.name}")


def _check_inside(strip: Strip) -> None:
    f = strip.footprint
    (h, _), inner = f.pixels[0], [x for x, _ in (*f.pixels[1:], *f.steps)]
    sizes = tuple(size(x) for x in inner)
    space = frame("read", (LOW, HIGH, h, *inner), sizes)
    read = [at_least(LOW, 0), *between(LOW, h, V(HIGH) + 1), *(c for x in inner for c in between(0, x, V(size(x))))]
    context = param_set(sizes)
    for x, at in f.places:
        low, count = strip.box[x]
        for missed in (below(at, low), at_least(at, low + count)):
            bad = space.where([*read, missed]).intersect_params(context)
            if not bad.is_empty():
                raise _refuse(
                    f"place {x} = {at} is read outside [{low}, {low + count}), which is copied\n"
                    f"  for example {sample(bad)}"
                )


def _check_hull(strip: Strip) -> None:
    f = strip.footprint
    for x, at in f.places:
        begin, count = strip.box[x]
        ends = {n: V(size(n)) - 1 for n in at.symbols()}
        low, high = (at.subs({**dict.fromkeys(ends, 0), f.pixels[0][0]: LOW}), at.subs({**ends, f.pixels[0][0]: HIGH}))
        if begin != low or begin + count - 1 != high:
            raise _refuse(f"place {x} is copied from {begin} to {begin + count - 1}, read from {low} to {high}")


def _check_loops(t: Scheduled, strip: Strip) -> None:
    tree = flat(t.tree)
    readers = {f.statement for f in t.flow if f.meets is Meets.READS and _writes(t, strip.copy, f.buffer)}
    shared = {k for n in readers for k in path(tree, n)}
    own = [k for k in path(tree, strip.copy) if k not in shared]
    if own != [strip.loops[x] for x, _ in strip.footprint.places]:
        raise _refuse(f"{strip.copy} runs {own} by itself, its box has the loops {list(strip.loops.values())}")


def _writes(t: Scheduled, statement: str, buffer: str) -> bool:
    return any(f.statement == statement and f.buffer == buffer and f.meets is Meets.WRITES for f in t.flow)


def _check_size(strip: Strip) -> None:
    f = strip.footprint
    rows = V(SHARE) * strip.rows
    lines = {LOW: V(0), HIGH: (rows + f.line - 2) // f.line}
    needed = product(count.subs(lines) for _, count in strip.box.values()).subs(f.sizes()) + f.beyond
    if strip.size != needed and not is_nonnegative(strip.size - needed):
        raise _refuse(f"{strip.size} elements do not hold the {needed} of a strip")


def _check_taps(strip: Strip) -> None:
    f = strip.footprint
    for step, (low, high) in strip.taps.items():
        x, at = next((x, at) for x, at in f.places if step in at.symbols())
        inside = f.inside().get(x)
        if inside is None:
            raise _refuse(f"steps {step} are left out, and the operand is not 0 outside of any range of place {x}")
        pixels = [n for n in at.symbols() if n != step]
        dims = (step, *(g for n in pixels for g in (first(n), n, last(n))))
        begin, end, least, most = (*inside, low, high)
        (begin, end, least, most), sizes = with_parameters((begin, end, least, most), dims)
        space = frame("left_out", dims, tuple(sorted({size(step), *sizes})))
        read = [*between(0, step, size(step)), *between(begin, at, end)]
        read += [c for n in pixels for c in between(first(n), n, V(last(n)) + 1)]
        for missed in (below(step, least), at_least(step, most)):
            bad = space.where([*read, missed])
            if not bad.is_empty():
                raise _refuse(
                    f"step {step} is left out outside [{low}, {high}), where {x} = {at} reads an element\n"
                    f"  for example {sample(bad)}"
                )
