"""Transformations of storage: where the sums, the rows and the copies of operands live while a part of the tree runs.

Footprints are not computed. A buffer holds the elements whose digits are free below a loop, and the digits that are
fixed there say which contents are meant; both are read off the tile map.
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
"""The buffer of sums on their way from one step of the reduction to the next: an output of the group."""


def keep(
    t: Scheduled, array: str, name: str, below: Coord, scope: tuple[Coord, ...] = (), storage: str = ""
) -> Scheduled:
    """A local of the group gets storage for one step of loop ``below``: registers, or rows of scratch.

    ``name``: of the buffer; ``scope``: loops of units that have a storage each; ``storage``: its name where several
    buffers share one. isl: none; Halide: store_at; TVM: set_scope; exo: set_memory; TC: promotion.
    Before: acc[i, j]. After: acc[p_i, p_j] inside each step of c_i.
    Refuses: ``below`` is no loop of all that meet the array, for then one of them would find another one's elements;
    a subscript that is no iterator.
    """
    meets = _meeting(t, array)
    first = meets[0]
    axes = _axes(t, first, first.index)
    if axes is None:
        raise refuse(f"{array} is written at {list(first.index)}: not its iterators")
    fixed: set[Digit] = set()
    for s in meets:
        order = path(flat(t.tree), s.name)
        if below not in order:
            raise refuse(f"{below} is no loop of {s.name}, which meets {array}: {list(order)}")
        fixed = {d for d in _digits(t, s.name, order[: order.index(below) + 1]) if d.axis in axes}
    flow = tuple(Flow(s.name, how, name) for s in meets for how in _how(s, array))
    buffer = Buffer(name, array, axes, frozenset(fixed), scope, storage)
    return replace(t, buffers=(*t.buffers, buffer), flow=(*t.flow, *flow))


def accumulate(t: Scheduled, below: Coord, name: str = "acc", scope: tuple[Coord, ...] = ()) -> Scheduled:
    """``keep`` for the array that the only reduction sums into: its sums are in registers.

    isl: none; Halide: compute_at of the sums; TVM: cache_write. Before: acc[i, j]. After: acc[p_i, p_j] in each step of
    ``below``. Refuses: what ``keep`` refuses.
    """
    return keep(t, t.group.backbone.array, name, below, scope)


def carry(t: Scheduled, loop: Coord, load: str = "LOAD", save: str = "SAVE") -> Scheduled:
    """Sums pass through memory from one step of ``loop`` to the next: LOAD before, SAVE behind the accumulation.

    The memory is the output of the first epilogue of the sums' dtype, whose own store ends the way.
    Before: INIT at b_k = 0; ACC; DONE at b_k = B_k-1.
    After: INIT; LOAD at b_k >= 1; ACC; SAVE at b_k < B_k-1; DONE.
    isl: none; Halide: none, an update's sums stay in memory; TVM: cache_read and cache_write of the sums.
    Refuses: no initialiser is sunk into ``loop`` (then sums stay where they are); the sums have no buffer.
    """
    acc = t.group.backbone
    init = the(
        [n for n, w in t.map.views.items() if (x := w.loop(loop)) and x.at is End.FIRST],
        f"no initialiser is sunk into {loop}: sums stay where they are",
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
    """A statement ``name`` copies what one step of loop ``below`` reads of an array into buffer ``into``.

    ``along``: an axis, which says which operand is meant (both may read one array). ``loops``: the copy's loop -> names
    of its digits; ``hidden``: digits that one instance copies (an instruction does). ``over``: axes that the copy runs
    although no subscript may (what is copied is then the same along them). It reads from where the readers
    found the array until now: memory, or the buffer of an earlier promotion.
    isl: graft; Halide: compute_at; TVM: cache_read; exo: stage_mem; TC: promoteToShared. TSCompiler 5.3.
    Before: band b_k: ACC reads W. After: band b_k: PACK writes panel; ACC reads panel.
    Refuses: ``below`` is no loop of the reader; a digit that a step touches is not copied, or copied twice.
    """
    reader = readers[0]
    order = path(flat(t.tree), reader)
    if below not in order:
        raise refuse(f"{below} is no loop of {reader}: {list(order)}")
    outer = order[: order.index(below) + 1]
    above = tuple(x for k in outer if (x := t.view(reader).loop(k)))
    axes = tuple(dict.fromkeys((*operand_axes(t, reader, array, along), *over)))
    fixed = {d for x in above for d in x.digits if d.axis in axes}
    free = {d.name: d for ax in axes for d in t.map.axes[ax] if d not in fixed}
    listed = [n for ds in loops.values() for n in ds] + list(hidden)
    if sorted(listed) != sorted(free):
        raise refuse(f"{name} copies the digits {sorted(listed)}, one step of {below} touches {sorted(free)}")
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
    tree = relist(_beside(t, reader, below, copy, before=True))
    return replace(t, tree=tree, map=tm, buffers=(*t.buffers, buffer), flow=tuple(flow))


def spread(t: Scheduled, copy: str, places: Seq[str]) -> Scheduled:
    """A copy that hides all digits of its buffer runs loops ``a_x`` over places of what it copies instead.

    The digits say when the contents are meant and who reads them, the places what they are: that these are those is
    the proof's of a footprint (``proof/footprints.py``). isl: a map's range; Halide: bounds inference; TVM: the region
    of compute_at. Before: b_k: FILL; ACC. After: b_k: band a_x, a_y: FILL; ACC.
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
    """Results of statement ``of`` stay in buffer ``into`` for one step of loop ``below``; then a statement ``name``
    sends them to memory.

    ``loops``: its loops -> names of their digits; all other digits of a step one instance sends, as the copy of a box
    does. isl: graft; Halide: a Func's in(); TVM: cache_write; exo: stage_mem.
    Before: band c_i, p_i: DONE writes y. After: band c_i: band p_i: DONE writes out; SEND reads out.
    Refuses: ``below`` is no loop of ``of``; a statement that finds the results in memory; a digit that is not below.
    """
    order = path(flat(t.tree), of)
    if below not in order:
        raise refuse(f"{below} is no loop of {of}: {list(order)}")
    s, view = t.group.statement(of), t.view(of)
    readers = [x.name for x in _meeting(t, s.array) if x.name != of]
    if readers:
        raise refuse(f"{readers} meet {s.array}, which {of} has not sent by then")
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
    tree = relist(_beside(t, of, below, sent, before=False))
    buffers = (*t.buffers, Buffer(into, s.array, axes, fixed, scope))
    return replace(t, tree=tree, map=tm, buffers=buffers, flow=(*t.flow, *flow))


def _beside(t: Scheduled, of: str, below: Coord, added: tuple[frozenset[str], Tree], before: bool) -> Tree:
    """The tree with another filtered part in each step of a loop of ``of``, before or behind what the step does."""

    def f(node: Tree, names: frozenset[str]) -> Tree | None:
        if of not in names or not isinstance(node, Band) or below not in node.members:
            return None
        n = node.members.index(below) + 1
        rest = names, Band(node.members[n:], node.child) if node.members[n:] else node.child
        return Band(node.members[:n], Sequence((added, rest) if before else (rest, added)))

    return rewrite(flat(t.tree), all_of(t), f)


def operand_axes(t: Scheduled, reader: str, array: str, along: str) -> tuple[str, ...]:
    """The axes that an operand's subscripts run: of the read of ``array`` that runs axis ``along``."""
    on = {x: ax for (s, x), ax in t.map.iterators.items() if s == reader}
    for x in read_accesses(t.group.statement(reader)):
        axes = tuple(dict.fromkeys(on[n] for i in x.index for n in sorted(i.symbols()) if n in on))
        if x.array == array and along in axes:
            return axes
    raise refuse(f"{reader} does not read {array} along {along}")


def _meeting(t: Scheduled, array: str) -> list[Statement]:
    return [s for s in t.group.statements if s.array == array or any(x.array == array for x in read_accesses(s))]


def _how(s: Statement, array: str) -> tuple[Meets, ...]:
    if s.array != array:
        return (Meets.READS,)
    reads = any(x.array == array for x in read_accesses(s))
    return (Meets.UPDATES,) if s.reduce else (Meets.READS, Meets.WRITES) if reads else (Meets.WRITES,)


def _axes(t: Scheduled, s: Statement, index: Iterable[object]) -> tuple[str, ...] | None:
    names = [t.map.iterators.get((s.name, str(i))) for i in index]
    return None if None in names else tuple(n for n in names if n is not None)


def _digits(t: Scheduled, statement: str, loops: Iterable[Coord]) -> set[Digit]:
    return {d for k in loops if (x := t.view(statement).loop(k)) for d in x.digits}
