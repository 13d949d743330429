"""Transformations of storage: where sums, rows and copies of operands are stored while a part of the tree runs.

Footprints are not computed. A buffer holds the elements whose digits are free below a loop; the digits that are fixed
there identify the contents. Both are read off the tile map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.index import Index
from polydyn.schedules.model import Statement
from polydyn.schedules.tree.names import Coord, End, Meets, Role, a, extent
from polydyn.schedules.tree.nodes import Band, Leaf, Sequence, Tree
from polydyn.schedules.tree.scheduled import (
    Buffer,
    Carried,
    Flow,
    Scheduled,
    all_of,
    flat,
    path,
    refuse,
    relist,
    rewrite,
    the,
)
from polydyn.schedules.tree.tilemap import Digit, Loop, View

V = Index.of
MEMORY = "memory"
"""The buffer of sums between two steps of the reduction: an output of the group."""


def keep(
    t: Scheduled, array: str, name: str, below: Coord, scope: tuple[Coord, ...] = (), storage: str = ""
) -> Scheduled:
    """Give a local of the group storage for one step of loop ``below``: registers, or rows of scratch.

    ``name``: the name of the buffer; ``scope``: loops of units that have a storage each; ``storage``: the name of the
    storage if several buffers share one.
    isl: none; Halide: store_at; TVM: set_scope; exo: set_memory; TC: promotion.
    Before: acc[i, j]. After: acc[p_i, p_j] inside each step of c_i.
    Refuses: ``below`` is not a loop of all statements that access the array, because one would read another one's
    elements; a subscript that is not an iterator.
    """
    meets = _accessing(t, array)
    first = meets[0]
    axes = _axes(t, first, first.index)
    if axes is None:
        raise refuse(f"{array} is written at {list(first.index)}: not its iterators")
    fixed: set[Digit] = set()
    for s in meets:
        order = path(flat(t.tree), s.name)
        if below not in order:
            raise refuse(f"{below} is not a loop of {s.name}, which accesses {array}: {list(order)}")
        fixed = {d for d in _digits(t, s.name, order[: order.index(below) + 1]) if d.axis in axes}
    flow = tuple(Flow(s.name, how, name) for s in meets for how in _access_kinds(s, array))
    buffer = Buffer(name, array, axes, frozenset(fixed), scope, storage)
    return replace(t, buffers=(*t.buffers, buffer), flow=(*t.flow, *flow))


def accumulate(t: Scheduled, below: Coord, name: str = "acc", scope: tuple[Coord, ...] = ()) -> Scheduled:
    """Apply ``keep`` to the array that the only reduction sums into, so that its sums stay in registers.

    isl: none; Halide: compute_at of the sums; TVM: cache_write.
    Before: acc[i, j]. After: acc[p_i, p_j] in each step of ``below``.
    Refuses: what ``keep`` refuses.
    """
    return keep(t, t.group.backbone.array, name, below, scope)


def carry(t: Scheduled, loop: Coord, load: str = "LOAD", save: str = "SAVE") -> Scheduled:
    """Pass sums through memory from one step of ``loop`` to the next: LOAD before the accumulation, SAVE after it.

    The memory is the first epilogue's output that has the sums' dtype. That epilogue's own store comes last.
    Before: INIT at b_k = 0; ACC; DONE at b_k = B_k-1. After: INIT; LOAD at b_k >= 1; ACC; SAVE at b_k < B_k-1; DONE.
    isl: none; Halide: none, an update's sums stay in memory; TVM: cache_read and cache_write of the sums.
    Refuses: no initialiser is sunk into ``loop`` (then sums stay in place); the sums have no buffer.
    """
    acc = t.group.backbone
    init = the(
        [n for n, w in t.map.views.items() if (x := w.loop(loop)) and x.at is End.FIRST],
        f"no initialiser is sunk into {loop}: sums stay in place",
    )
    register = the(
        [x.buffer for x in t.flow if x.statement == acc.name and x.meets is Meets.UPDATES], "the sums have no buffer"
    )
    step = t.view(acc.name).loop(loop)
    assert step is not None
    loops = tuple(step if x.coord == loop else x for x in t.view(init).loops)
    views = {load: View(loops, Role.LOAD, guard=((loop, 1, 0),)), save: View(loops, Role.SAVE, guard=((loop, 0, 1),))}

    def f(node: Tree, _: frozenset[str]) -> Tree | None:
        if not isinstance(node, Sequence) or not {init, acc.name} <= {x for n, _ in node.children for x in n}:
            return None
        each = next(x for n, x in node.children if init in n)
        if acc.name in next(n for n, x in node.children if init in n):
            return None
        out: list[tuple[frozenset[str], Tree]] = []
        for n, x in node.children:
            around = acc.name in n
            out += [(frozenset((load,)), each)] * around + [(n, x)] + [(frozenset((save,)), each)] * around
        return Sequence(tuple(out))

    buffer = t.buffer(register)
    done = [x.name for x in t.group.epilogues if x.value.dtype == acc.value.dtype]
    flow = (Flow(load, Meets.WRITES, register), Flow(save, Meets.READS, register), Flow(load, Meets.READS, MEMORY),
            Flow(save, Meets.WRITES, MEMORY), *(Flow(n, Meets.WRITES, MEMORY) for n in done[:1]))  # fmt: skip
    iterators = {(n, x): ax for n in (load, save) for (s, x), ax in t.map.iterators.items() if s == init}
    tm = replace(t.map, views={**t.map.views, **views}, iterators={**t.map.iterators, **iterators})
    return replace(
        t, tree=relist(rewrite(t.tree, all_of(t), f)), map=tm, flow=(*t.flow, *flow),
        buffers=(*t.buffers, Buffer(MEMORY, buffer.array, buffer.axes, frozenset())),
        carried=(*t.carried, Carried(loop, register, MEMORY)),
    )  # fmt: skip


def promote(
    t: Scheduled,
    array: str,
    along: str,
    name: str,
    into: str,
    below: Coord,
    readers: Seq[str],
    loops: Mapping[Coord, Seq[str]],
    hidden: Seq[str] = (),
    scope: tuple[Coord, ...] = (),
    over: Seq[str] = (),
) -> Scheduled:
    """Add a statement ``name`` that copies the elements read in one step of loop ``below`` into buffer ``into``.

    ``along``: an axis that identifies the operand (both may read one array). ``loops``: the copy's loop -> names of its
    digits; ``hidden``: digits that one instance copies (as an instruction does). ``over``: axes that the copy runs over
    even if no subscript does (the copied values are then equal along them). The copy reads from the readers' current
    source: memory, or the buffer of an earlier promotion.
    isl: graft; Halide: compute_at; TVM: cache_read; exo: stage_mem; TC: promoteToShared. TSCompiler 5.3.
    Before: band b_k: ACC reads W. After: band b_k: PACK writes panel; ACC reads panel.
    Refuses: ``below`` is not a loop of the reader; a digit of a step is not copied, or copied twice.
    """
    reader = readers[0]
    order = path(flat(t.tree), reader)
    if below not in order:
        raise refuse(f"{below} is not a loop of {reader}: {list(order)}")
    outer = order[: order.index(below) + 1]
    above = tuple(x for k in outer if (x := t.view(reader).loop(k)))
    axes = tuple(dict.fromkeys((*operand_axes(t, reader, array, along), *over)))
    fixed = {d for x in above for d in x.digits if d.axis in axes}
    free = {d.name: d for ax in axes for d in t.map.axes[ax] if d not in fixed}
    listed = [n for ds in loops.values() for n in ds] + list(hidden)
    if sorted(listed) != sorted(free):
        raise refuse(f"{name} copies the digits {sorted(listed)}, one step of {below} accesses {sorted(free)}")
    own = tuple(Loop(k, tuple(free[n] for n in ds)) for k, ds in loops.items())
    view = View((*above, *own), Role.COPY, tuple(free[n] for n in hidden))
    copy: tuple[frozenset[str], Tree] = (frozenset((name,)), Band(tuple(loops)) if loops else Leaf())

    held = {x.name for x in t.buffers if x.array == array and set(x.axes) == set(axes)}
    source = next((x.buffer for x in t.flow if x.statement == reader and x.buffer in held), None)
    flow = [x for x in t.flow if not (x.statement in readers and x.meets is Meets.READS and x.buffer == source)]
    flow += [Flow(name, Meets.WRITES, into), *(Flow(r, Meets.READS, into) for r in readers)]
    flow += [Flow(name, Meets.READS, source)] if source else []
    buffer = Buffer(into, array, axes, frozenset(fixed), scope)
    iterators = {(name, x): ax for (s, x), ax in t.map.iterators.items() if s == reader}
    tm = replace(t.map, views={**t.map.views, name: view}, iterators={**t.map.iterators, **iterators})
    tree = relist(_insert_part(t, reader, below, copy, before=True))
    return replace(t, tree=tree, map=tm, buffers=(*t.buffers, buffer), flow=tuple(flow))


def spread(t: Scheduled, copy: str, places: Seq[str]) -> Scheduled:
    """Make a copy that hides all digits of its buffer run loops ``a_x`` over places of a footprint instead.

    The digits identify the contents and their readers, the places the elements. The proof of a footprint
    (``proof/footprints.py``) shows that both agree.
    isl: a map's range; Halide: bounds inference; TVM: the region of compute_at.
    Before: b_k: FILL; ACC. After: b_k: band a_x, a_y: FILL; ACC.
    Refuses: a copy with loops of its own.
    """
    view = t.view(copy)
    own = {x: Digit(x, a(x), V(extent(a(x)))) for x in places}

    def f(node: Tree, names: frozenset[str]) -> Tree | None:
        if names != {copy}:
            return None
        if not isinstance(node, Leaf):
            raise refuse(f"{copy} has loops of its own")
        return Band(tuple(map(a, places)))

    tree = rewrite(t.tree, all_of(t), f)
    loops = (*view.loops, *(Loop(a(x), (d,)) for x, d in own.items()))
    axes = {**t.map.axes, **{x: (d,) for x, d in own.items()}}
    extents = {**t.map.extents, **{x: d.size for x, d in own.items()}}
    views = {**t.map.views, copy: replace(view, loops=loops)}
    return replace(t, tree=tree, map=replace(t.map, axes=axes, extents=extents, views=views))


def send(
    t: Scheduled,
    of: str,
    name: str,
    into: str,
    below: Coord,
    loops: Mapping[Coord, Seq[str]],
    scope: tuple[Coord, ...] = (),
) -> Scheduled:
    """Keep results of ``of`` in buffer ``into`` for one step of loop ``below``, then send them to memory.

    The new statement ``name`` sends them. ``loops``: its loops -> names of their digits; one instance sends all other
    digits of a step, as the copy of a box does.
    isl: graft; Halide: a Func's in(); TVM: cache_write; exo: stage_mem.
    Before: band c_i, p_i: DONE writes y. After: band c_i: band p_i: DONE writes out; SEND reads out.
    Refuses: ``below`` is not a loop of ``of``; a statement that reads the results from memory; a digit that is
    not below.
    """
    order = path(flat(t.tree), of)
    if below not in order:
        raise refuse(f"{below} is not a loop of {of}: {list(order)}")
    s, view = t.group.statement(of), t.view(of)
    readers = [x.name for x in _accessing(t, s.array) if x.name != of]
    if readers:
        raise refuse(f"{readers} access {s.array}, which {of} has not sent by then")
    above = tuple(x for k in order[: order.index(below) + 1] if (x := view.loop(k)))
    fixed = frozenset(d for x in above for d in x.digits)
    free = {d.name: d for d in view.digits if d not in fixed}
    own = {k: tuple(ds) for k, ds in loops.items()}
    if lost := [n for ds in own.values() for n in ds if n not in free]:
        raise refuse(f"{name} runs the digits {lost}, one step of {below} has {sorted(free)}")
    hidden = tuple(d for n, d in free.items() if all(n not in ds for ds in own.values()))
    mine = View((*above, *(Loop(k, tuple(free[n] for n in ds)) for k, ds in own.items())), Role.SAVE, hidden)
    sent: tuple[frozenset[str], Tree] = (frozenset((name,)), Band(tuple(own)) if own else Leaf())

    axes = tuple(dict.fromkeys(t.map.iterators[of, x] for x in s.iterators))
    flow = (Flow(of, Meets.WRITES, into), Flow(name, Meets.READS, into))
    iterators = {(name, x): ax for (n, x), ax in t.map.iterators.items() if n == of}
    tm = replace(t.map, views={**t.map.views, name: mine}, iterators={**t.map.iterators, **iterators})
    tree = relist(_insert_part(t, of, below, sent, before=False))
    buffers = (*t.buffers, Buffer(into, s.array, axes, fixed, scope))
    return replace(t, tree=tree, map=tm, buffers=buffers, flow=(*t.flow, *flow))


def _insert_part(t: Scheduled, statement: str, below: Coord, added: tuple[frozenset[str], Tree], before: bool) -> Tree:
    """Insert another filtered part into each step of a loop of ``statement``, before or after the existing step."""

    def f(node: Tree, names: frozenset[str]) -> Tree | None:
        if statement not in names or not isinstance(node, Band) or below not in node.members:
            return None
        n = node.members.index(below) + 1
        rest = names, Band(node.members[n:], node.child) if node.members[n:] else node.child
        return Band(node.members[:n], Sequence((added, rest) if before else (rest, added)))

    return rewrite(flat(t.tree), all_of(t), f)


def operand_axes(t: Scheduled, reader: str, array: str, along: str) -> tuple[str, ...]:
    """Return the axes of an operand's subscripts: those of the read of ``array`` that runs along axis ``along``."""
    on = {x: ax for (s, x), ax in t.map.iterators.items() if s == reader}
    for x in read_accesses(t.group.statement(reader)):
        axes = tuple(dict.fromkeys(on[n] for i in x.index for n in sorted(i.symbols()) if n in on))
        if x.array == array and along in axes:
            return axes
    raise refuse(f"{reader} does not read {array} along {along}")


def _accessing(t: Scheduled, array: str) -> list[Statement]:
    return [s for s in t.group.statements if s.array == array or any(x.array == array for x in read_accesses(s))]


def _access_kinds(s: Statement, array: str) -> tuple[Meets, ...]:
    if s.array != array:
        return (Meets.READS,)
    reads = any(x.array == array for x in read_accesses(s))
    return (Meets.UPDATES,) if s.reduce else (Meets.READS, Meets.WRITES) if reads else (Meets.WRITES,)


def _axes(t: Scheduled, s: Statement, index: Iterable[object]) -> tuple[str, ...] | None:
    names = [t.map.iterators.get((s.name, str(i))) for i in index]
    return None if None in names else tuple(n for n in names if n is not None)


def _digits(t: Scheduled, statement: str, loops: Iterable[Coord]) -> set[Digit]:
    return {d for k in loops if (x := t.view(statement).loop(k)) for d in x.digits}
