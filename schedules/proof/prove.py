"""The proof of a scheduled group: one proof for every tree, every tile size and every extent.

It uses the digits of the tile map instead of elements, so that everything is affine although tile sizes are symbols
(the lemma in ``tree.tilemap``). A kernel's sizes do not matter, so equal forms share one proof.

    1 map       a statement's loops run the digits of its iterators, each once                       no isl
    2 tails     statements are cut at every digit, or padded where that is neutral; copies are cut
                no finer than their readers                                                          no isl
    3 order     every dependence of the group runs strictly forwards in the tree
    4 parallel  no dependence leads from one task, or unit, to another
    5 storage   what is read from a buffer was written last for the same cell and epoch; sums are read and
                initialised around all their updates; units share no cell (``prove_storage``)

Not proven here: later passes over the tree, rings of stages and barriers, lanes, addresses (docs/adr/0004).
"""

from __future__ import annotations

from functools import lru_cache

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import Op
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import read_accesses, reads
from polydyn.schedules.group.skeleton import Form, accesses, check_instance, form, skeleton
from polydyn.schedules.index import ONE, ZERO, Index, product
from polydyn.schedules.model import Statement
from polydyn.schedules.proof.elements import in_elements
from polydyn.schedules.proof.order import check_tree
from polydyn.schedules.proof.storage import Storage
from polydyn.schedules.ranges import is_nonnegative
from polydyn.schedules.tree.names import Meets
from polydyn.schedules.tree.nodes import to_isl
from polydyn.schedules.tree.scheduled import Buffer, Scheduled
from polydyn.schedules.tree.space import Space, Structure, structure
from polydyn.schedules.tree.tilemap import Digit, Loop, Origin, TileMap, When

V = Index.of


def prove(t: Scheduled) -> None:
    """Raise LegalityError with a witness unless the tree computes the group.

    A group's skeleton is proven once for all groups that are its instances. If the skeleton has no proof (it may need a
    relation between constants), the group itself is proven.
    """
    check_map(t)
    check_tails(t)
    check_locals(t)
    s, own, seen = skeleton(t.group), form(t.group), structure(t)
    if s is None or own is None:
        raise ScheduleError(f"{t.group.name} reads its results at positions known only at run time", rule="digit space")
    check_instance(s, t.group)
    try:
        _prove(accesses(s.form), seen)
    except (LegalityError, ScheduleError) as first:
        try:
            if s.form == own:
                raise
            _prove(accesses(own), seen)
        except LegalityError as e:
            raise in_elements(e, t) from first


@lru_cache(maxsize=512)
def _prove(form: Form, structure: Structure) -> None:
    space = Space(form.group(), structure)
    dependences = space.dependences(analyse(space.bare, positive=False))
    schedule = to_isl(space.tree(), space.statements, space.params)
    check_tree(space.group, dependences, space.images(), schedule, space.context)
    space.check_parallel(dependences)
    Storage(space, schedule).check()


# -- the map and the tails -------------------------------------------------------------------------------------------


def check_map(t: Scheduled) -> None:
    """Check coverage, by the lemma: a statement's loops run exactly the digits of its iterators, each once."""
    for s in t.group.statements:
        want = [d for x in s.iterators for d in t.map.axes[t.map.iterators[s.name, x]]]
        has = list(t.map.views[s.name].digits)
        lost = [d for d in want if d not in has]
        more = [d for d in has if d not in want or has.count(d) > 1]
        if len(want) != len(set(want)):
            raise LegalityError(f"two iterators of {s.name} are one axis", node=s.name, rule="coverage")
        if lost or more:
            what = f"digits {lost} are run by no loop" if lost else f"digits {more} are run twice, or are not its own"
            example = _example(t, s.name, (lost or more)[0])
            raise LegalityError(f"{s.name}: {what}\n  {example}", node=s.name, rule="coverage")
    for n, view in t.map.views.items():
        for loop in view.loops:
            _check_loop(t, n, loop)
    _check_copies(t)
    _check_sent(t)
    _check_carried(t)
    _check_places(t)
    for axis, digits in t.map.axes.items():
        _check_axis(t.map, axis, digits)
    for axis in t.map.joined:
        _check_joined(t.map, axis)


def _check_loop(t: Scheduled, name: str, x: Loop) -> None:
    """Check that the digits of a loop are digits of the axes, and that parts of uneven size are visited in order."""
    for d in x.digits:
        if d not in t.map.axes.get(d.axis, ()):
            has = t.map.axes.get(d.axis)
            raise LegalityError(f"{name}: loop {x.coord} runs digit {d} of {has}", node=name, rule="tile map")
    for axis in dict.fromkeys(d.axis for d in x.digits) if len(x.digits) > 1 else ():
        share, origin, digits = t.map.shares.get(axis), t.map.origins.get(axis), t.map.axes[axis]
        even = origin is not None and origin.even
        if not share and not even:
            continue
        tile = origin.tile if origin and even else digits[1]
        order = digits[digits.index(tile) :] if even else (tile, *x.digits[1:])
        if (share and share.block in x.digits) or (tile in x.digits and x.digits != order):
            what = f"{name}: loop {x.coord} runs {x.digits} of axis {axis}, whose parts are not all equal, out of order"
            raise LegalityError(what, node=name, rule="tile map")


def _check_places(t: Scheduled) -> None:
    """Check that loops of tasks, units and storage run the same digits in all statements.

    A statement that accesses the storage of a unit belongs to a unit. Buffers that share storage have the same cells.
    """
    first: dict[str, Buffer] = {}
    for own in t.buffers:
        other = first.setdefault(own.place, own)
        if (own.axes, own.fixed, own.scope) != (other.axes, other.fixed, other.scope):
            what = f"{own.name} and {other.name} share the storage {own.place}, but have not the same cells"
            raise LegalityError(what, tensor=own.name, rule="storage")
    places = {k for _, loops in t.parallel for k in loops} | {k for x in t.buffers for k in x.scope}
    for k in sorted(places):
        runs = {n: x.digits for n, view in t.map.views.items() if (x := view.loop(k))}
        if len(set(runs.values())) > 1:
            raise LegalityError(f"loop {k} is a place, but runs {runs}", rule="tile map")
    for f in t.flow:
        for k in t.buffer(f.buffer).scope:
            if t.view(f.statement).loop(k) is None:
                what = f"{f.statement} meets {f.buffer}, of which every {k} has its own, without such a loop"
                raise LegalityError(what, node=f.statement, tensor=f.buffer, rule="storage")


def _check_copies(t: Scheduled) -> None:
    """Check that a copy's iterators are those of the statements that read it."""
    for f in t.flow:
        if f.statement in {s.name for s in t.group.statements} or f.meets is not Meets.WRITES:
            continue
        axes = t.buffer(f.buffer).axes
        for r in (x.statement for x in t.flow if x.buffer == f.buffer and x.meets is not Meets.WRITES):
            for (s, x), axis in t.map.iterators.items():
                mine = t.map.iterators.get((f.statement, x))
                if s == r and (axis in axes or mine in axes) and mine != axis:
                    what = f"{f.statement} takes iterator {x} of {r} for axis {mine}, it is {axis}"
                    raise LegalityError(what, node=f"{f.statement} -> {r}", tensor=f.buffer, rule="tile map")


def _check_sent(t: Scheduled) -> None:
    """Check that results in a buffer are sent to memory, each element exactly once and to its own address."""
    own = {s.name: s for s in t.group.statements if t.group.arrays[s.array].role == "output"}
    kept = [f for f in t.flow if f.meets is Meets.WRITES and f.statement in own]
    for f in (f for f in kept if t.buffer(f.buffer).array == own[f.statement].array):
        n, senders = f.statement, [x.statement for x in t.flow if x.buffer == f.buffer and x.meets is Meets.READS]
        has, want = [d for m in senders for d in t.view(m).digits], t.view(n).digits
        if sorted(map(repr, has)) != sorted(map(repr, want)):
            what = f"{senders} send the digits {has} of what {n} writes, which are {list(want)}"
            raise LegalityError(what, node=n, tensor=f.buffer, rule="coverage")
        for m, x in ((m, x) for m in senders for x in own[n].iterators):
            if (axis := t.map.iterators.get((m, x))) != t.map.iterators[n, x]:
                what = f"{m} takes iterator {x} of {n} for axis {axis}, it is {t.map.iterators[n, x]}"
                raise LegalityError(what, node=f"{n} -> {m}", tensor=f.buffer, rule="tile map")


def _check_carried(t: Scheduled) -> None:
    """Check that sums in memory have a cell for each element, as in the output that holds them: other tasks write the
    cells beside it.
    """
    for x in t.carried:
        memory, register = t.buffer(x.memory), t.buffer(x.register)
        if memory.fixed or memory.axes != register.axes:
            what = f"{x.memory} has no cell for each value of {sorted(d.name for d in memory.fixed)}"
            if memory.axes != register.axes:
                what = f"{x.memory} has the axes {list(memory.axes)}, its sums {list(register.axes)}"
            raise LegalityError(what, tensor=x.memory, rule="sums in memory")


def _check_axis(tm: TileMap, axis: str, digits: tuple[Digit, ...]) -> None:
    """Check that the first digit counts, the others have sizes, and shares and origins refer to the first digits."""
    shared = tm.shares.get(axis)
    counts = digits[1] if shared and len(digits) > 1 else digits[0]
    most = product(d.size for d in digits)
    if not _counts(counts) and not is_nonnegative(most - tm.extents[axis]):
        what = f"the digits {digits} of {axis} do not count its {tm.extents[axis]} elements"
        raise LegalityError(what, rule="coverage")
    for d in digits:
        if d is not counts and (d.when is When.COUNT or (d.size.constant is not None and d.size.constant < 1)):
            raise LegalityError(f"digit {d} of {axis} has no size", rule="coverage")
        if d.axis != axis:
            raise LegalityError(f"digit {d} is of axis {d.axis}, not of {axis}", rule="tile map")
    if len(set(digits)) != len(digits):
        raise LegalityError(f"axis {axis} has a digit twice: {digits}", rule="tile map")
    origin = tm.origins.get(axis)
    if shared and shared.block != digits[0]:
        raise LegalityError(f"blocks of {axis} are counted by {shared.block}, not by its first digit", rule="tile map")
    if origin and digits.index(origin.tile) != (1 if shared else 0):
        raise LegalityError(f"tiles of {axis} are counted by {origin.tile} of {digits}", rule="tile map")
    if origin and origin.lines:
        _check_lines(tm, axis, origin)


def _check_lines(tm: TileMap, axis: str, origin: Origin) -> None:
    """Check that runs cover an axis, and that the digits below a tile count the elements of all its runs."""
    lines, digits = origin.lines, tm.axes[axis]
    assert lines is not None
    if lines.extent != tm.extents[axis] or not origin.even:
        what = f"runs cover {lines.extent} elements, {axis} has {tm.extents[axis]}"
        raise LegalityError(what, rule="lines")
    below = product(d.size for d in digits[digits.index(origin.tile) + 1 :])
    if min(lines.most, lines.runs) < 1 or not is_nonnegative(below - lines.runs * lines.most):
        what = f"{lines.runs} runs of {lines.most} elements do not fit a tile of {below}"
        raise LegalityError(what, rule="lines")


def _check_joined(tm: TileMap, axis: str) -> None:
    """Check that an axis that was split is the mixed radix of its parts.

    Each part counts groups of the elements of the parts below it, and the first one counts. Statements' iterators
    agree.
    """
    rest, parts, weight = tm.joined[axis], list(tm.parts(axis)), ONE
    wrong = LegalityError(f"axis {axis} is not the number {rest} of its parts {parts}", rule="coverage")
    axes = {x: V(on) for (_, x), on in tm.iterators.items()}
    if rest not in [e.subs(axes) for e in tm.derived.values()]:
        raise wrong
    while parts:
        found = [x for x in parts if rest.split(x)[0] == weight]
        if not found:
            raise wrong
        part = min(found, key=lambda x: tm.extents[x] != ONE)  # a part of one element is below the others
        parts.remove(part)
        rest = rest.split(part)[1]
        if parts:
            weight = weight * tm.extents[part]
        elif tm.extents[part] != tm.extents[axis].ceildiv(weight):
            raise wrong
    if rest != ZERO:
        raise wrong


def check_tails(t: Scheduled) -> None:
    """Check the points past the extents.

    Exact statements are cut at every digit, padded ones are neutral, and copies are cut no finer than their readers,
    and only along axes of their array.

    Then properties of whole tiles also hold for cut ones. The writer of a cell that a live read accesses has the same
    digits on those axes, so it is live too. Of a sum, any subset of the updates lies between its initialiser and
    readers.
    """
    cut = {(x.statement, x.axis): x.whole for x in t.clips}
    for s in t.group.statements:
        if s.name in t.padded:
            _check_neutral(t, s)
            continue
        for x in s.iterators:
            axis = t.map.iterators[s.name, x]
            if not _exact(t.map, axis) and cut.get((s.name, axis)) != 0:
                raise _uncut(t, s.name, axis)
        of = {t.map.iterators[s.name, x] for x in s.iterators}
        for axis in t.map.joined.keys() - t.map.open:
            if of.issuperset(t.map.parts(axis)) and cut.get((s.name, axis)) != 0:
                raise _uncut(t, s.name, axis)
    readers = {
        x.name: [y.statement for y in t.flow if y.buffer == x.name and y.meets is not Meets.WRITES] for x in t.buffers
    }
    for f in t.flow:
        for (n, axis), whole in cut.items():
            if f.meets is Meets.WRITES and n == f.statement:
                for m in sorted(set(readers[f.buffer]) - {n}):
                    if axis not in t.buffer(f.buffer).axes or cut.get((m, axis), len(t.map.axes[axis])) > whole:
                        raise LegalityError(
                            f"{n} writes {f.buffer} only where {axis} < {t.map.extents[axis]}, {m} reads it beyond\n"
                            f"  for example in the last tile of {axis}",
                            node=f"{n} -> {m}", tensor=f.buffer, rule="tails",
                        )  # fmt: skip


def _counts(d: Digit) -> bool:
    """Whether a digit has as many values as its axis needs."""
    return d.when is When.COUNT and d.size.constant is None


def _exact(tm: TileMap, axis: str) -> bool:
    """Whether the digits of an axis represent its elements and no others.

    An axis at whose first or last step another statement runs has a step even if it has no elements.
    """
    digits = tm.axes[axis]
    whole = len(digits) == 1 and _counts(digits[0]) and not tm.has_empty_step(axis)
    return whole or product(d.size for d in digits) == tm.extents[axis]


def _uncut(t: Scheduled, name: str, axis: str) -> LegalityError:
    return LegalityError(
        f"tile-space instances run that the group does not have: {name}\n  for example at {axis} ="
        f" {t.map.extents[axis]}, in a tile that is not full: it is neither cut there nor padded",
        node=name, rule="coverage",
    )  # fmt: skip


def check_locals(t: Scheduled) -> None:
    """Check that every access to a local stays at the point of its own instance.

    A local without a buffer has storage for one task's point of the band, which the next task reuses. The first
    subscripts of an access are that point.
    """
    tasks = t.parallel[0][1] if t.parallel else ()
    own = dict.fromkeys(d.axis for w in t.map.views.values() for k in tasks if (x := w.loop(k)) for d in x.digits)
    buffered = {x.array for x in t.buffers}
    place: dict[str, tuple[str | None, ...]] = {}
    for s in t.group.statements:
        for access in (s.write, *read_accesses(s)):
            if t.group.arrays[access.array].role != "local" or access.array in buffered:
                continue
            front = tuple(t.map.iterators.get((s.name, str(i))) for i in access.index[: len(own)])
            if set(front) != set(own) or place.setdefault(access.array, front) != front:
                raise LegalityError(
                    f"{s.name} touches {access.array}{list(access.index)} outside its own row {list(own)}",
                    node=s.name, tensor=access.array, rule="locals live in one row",
                )  # fmt: skip


def _check_neutral(t: Scheduled, s: Statement) -> None:
    """Check that padding is neutral for a statement.

    A padded statement stores into a local, and reads inputs of the group from copies, or guarded. Along its subscripts
    it writes elements that are never read. Along its reduction it adds products, which are zero because copies are
    filled with zeros.
    """
    group, known = t.group, {str(i) for i in s.index}
    beyond = any(not _exact(t.map, t.map.iterators[s.name, x]) for x in s.iterators if x not in known)
    sums = not beyond or (s.reduce == "sum" and isinstance(s.value, Op) and s.value.name == "mul")
    if group.arrays[s.array].role != "local" or not sums:
        what = f"padding is not neutral for {s.name}: it is not a sum of products into a local"
        raise LegalityError(what, node=s.name, rule="neutral fill")
    copied = [set(t.buffer(f.buffer).axes) for f in t.flow if f.statement == s.name and f.meets is Meets.READS]
    for r in reads(s):
        axes = {t.map.iterators[s.name, x] for i in r.access.index for x in i.symbols() & set(s.iterators)}
        if group.arrays[r.access.array].role != "local" and not r.guarded and not any(axes <= x for x in copied):
            what = f"padding is not neutral for {s.name}: it reads {r.access.array} beyond its elements"
            raise LegalityError(what, node=s.name, tensor=r.access.array, rule="neutral fill")


def _example(t: Scheduled, name: str, digit: Digit) -> str:
    """Return two elements that an instance cannot distinguish, or one that it accesses twice."""
    digits = t.map.axes.get(digit.axis, ())
    if digit not in digits:
        return f"for example at {digit.axis} = 0"
    weight = product(d.size for d in digits[digits.index(digit) + 1 :])
    return f"for example {name} at {digit.axis} = 0 and at {digit.axis} = {weight} have the same coordinates"
