"""An operand's way through shared memory: direction, width and swizzle of the copies, loads of fragments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from polydyn.codegen.cuda.instructions import Instruction, load
from polydyn.codegen.ir import Alloc, Apply, Body, Call, Compare, FlatLoad, If, Pointer, Store, Tile, walk, walk_value
from polydyn.codegen.lower import flat
from polydyn.codegen.passes.hoist import comparison
from polydyn.codegen.passes.widen import Multiples, multiples, stored_value, widen
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import STORAGE, WRITE
from polydyn.schedules.expr import ITEMSIZE, Const, FromIndex, Op, Value, conjuncts, indices, map_index, substitute
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, maximum, minimum, product
from polydyn.schedules.model import Group, stored
from polydyn.schedules.ranges import is_nonnegative, simplify
from polydyn.schedules.tree.names import Coord, extent

V = Index.of
PART = "part"
"""Of a vector: an element."""
VALUES, WORDS = "values", "words"
"""A vector that a copy computes, in registers, and the 16 bytes that it is in memory."""


@dataclass(frozen=True)
class Operand:
    """An operand of a product: its value, and where it is in tile space.

    ``tile``, ``fragment``: its buffers in shared memory and in registers. ``copy``, ``load``: the statements that
    write them, at whose coordinates ``places`` says where it is. ``axis``: of its own, ``steps``: of the reduction;
    ``extents``: of the tile along both; ``loops``: of the copy, likewise. ``slot``: the loop that counts tiles in the
    ring, None where there is one tile. ``column``: it is the column operand.
    """

    tile: str
    fragment: str
    value: Value
    axis: str
    steps: str
    extents: tuple[int, int]
    copy: str
    load: str
    loops: tuple[Coord, Coord]
    places: Places
    slot: Coord | None
    column: bool


@dataclass(frozen=True)
class Copy:
    """How one operand gets to shared memory.

    ``along_k``: memory is contiguous along the reduction (a tile row holds reduction steps), else along the operand's
    own iterator. ``vector``: elements of one copy; ``asynchronous``: by cp.async, else through registers.
    ``multiples``: what must be multiples of which number for copies as wide as this; ``stages``: of the ring.
    """

    operand: Operand
    group: Group
    stages: int
    along_k: bool
    vector: int
    asynchronous: bool
    chunk: int
    multiples: Multiples

    @property
    def name(self) -> str:
        """The shared array."""
        return self.operand.tile

    @property
    def dtype(self) -> str:
        """Storage dtype."""
        return self.operand.value.dtype

    @property
    def bytes(self) -> int:
        """Width of a copy."""
        return self.vector * ITEMSIZE[self.dtype]

    @property
    def by_element(self) -> bool:
        """Whether neighbours along the operand's own axis are loaded and stored one by one."""
        if self.vector > 1 or self.along_k or self.asynchronous:
            return False
        x = self.operand
        at = {str(y.coord): V(y.coord) for y in x.places.map.views[x.copy].loops}
        return guarded_load(self.value(at)) is not None

    @property
    def elements(self) -> int:
        """Elements of one tile."""
        return self.operand.extents[0] * self.operand.extents[1]

    @property
    def innermost(self) -> Coord:
        """The loop of the copy along which memory is contiguous."""
        return self.operand.loops[self.along_k]

    def trips(self) -> dict[str, int]:
        """Extents of the copy loops, vectors counted once."""
        pairs = zip(self.operand.loops, self.operand.extents, strict=True)
        return {extent(x): n // (self.vector if x == self.innermost else 1) for x, n in pairs}

    def value(self, a: Mapping[str, Index], part: IndexLike = PART, repeat: bool = False) -> Value:
        """An element of the vector at a place of the tile, with divisions resolved that all of a tile, or of a vector,
        agrees in. ``repeat``: behind the last vector of the operand's own axis comes the last one again.
        """
        x = self.operand
        ranges = {c: V(self.trips()[extent(c)]) for c in x.loops} | {PART: V(self.vector)}
        at = {**a, self.innermost: a[self.innermost] * self.vector}
        own = x.loops[0]
        if repeat and not self._surely(x.places.left(x.copy, x.axis, at)):
            last = x.places.left(x.copy, x.axis, {**at, own: ZERO}) - (self.vector if own == self.innermost else 1)
            at[own] = minimum(at[own], last)
        at[self.innermost] += V(PART)
        inside = map_index(substitute(x.value, x.places.env(x.copy, at)), lambda i: simplify(i, ranges))
        return flat(self.group, substitute(inside, {PART: V(part)}), {}, lambda x: None)

    def tile(self, a: Mapping[str, Index], mn: Index, k: Index) -> Tile:
        """An element of the tile that an instance at ``a`` means."""
        (whole, steps), slot = self.operand.extents, self.operand.slot
        row, column, pitch = (mn, k, steps) if self.along_k else (k, mn, whole)
        first = a[slot] % self.stages * self.elements if slot else ZERO
        return Tile(self.dtype, self.name, first, row, column, pitch, self.chunk)

    def asked(self, a: Mapping[str, Index]) -> Multiples | None:
        """What addresses must be multiples of for copies as wide as this; None: elements of a vector are not
        neighbours, or some of them alone are outside.
        """
        read = guarded_load(self.value(a))
        if read is None:
            return None
        load, guard = read
        cut = guard is not None and any(PART in i.symbols() for i in indices(guard))
        if not _has_unit_stride(load.address) or (cut and self.vector > 1):
            return None
        return multiples(load.address.split(PART)[1], self.vector, frozenset(a))

    def issue(self, a: Mapping[str, Index], whole: bool = False, repeat: bool = False) -> Body:
        """One copy: of a vector by cp.async, or of an element through a register; zeros outside the operand.

        ``whole``: all steps of the tile exist. ``repeat``: what lies beyond the operand's own axis need not be 0, as
        only sums that nobody reads depend on it; a vector that exists is copied in its place where that asks nothing.
        """
        x, at = self.operand, {**a, self.innermost: a[self.innermost] * self.vector}
        mn, k = (at[c] for c in x.loops)
        live, steps = (x.places.left(x.copy, axis, at) for axis in (x.axis, x.steps))
        left = [live] if whole else [live, steps]
        place = self.tile(a, mn, k)
        if not self.asynchronous and self.vector > 1:
            return self._computed(a, place, left)
        if not self.asynchronous:
            return (_through_register(place, self.value(a, 0), left),)
        line = (ZERO if whole else steps) if self.along_k else live
        vectors = self._never_cut(line)
        repeat = repeat and (self.along_k or vectors)
        read = guarded_load(self.value(a, 0, repeat))
        assert read is not None
        load, guard = read
        source = Pointer(load.dtype, load.buffer, load.address)
        if vectors:
            parts = [_positive(i) for i in left[repeat:] if not self._surely(i)]
            parts += [guard] if guard is not None else []
            if not parts:
                return (Call(f"pd_cp_async<{self.bytes}>", (place, source, Const("int32", self.bytes))),)
            there = reduce(lambda a, b: Op("bool", "and", (a, b)), parts)
            return (Call(f"pd_cp_async_if<{self.bytes}>", (place, source, there)),)
        others = [i for i in left[repeat:] if i is not line]
        inside = product(minimum(1, maximum(0, i)) for i in others) * minimum(self.vector, maximum(0, line))
        size: Value = FromIndex("int32", inside * ITEMSIZE[self.dtype])
        if guard is not None:
            size = Op("int32", "where", (guard, size, Const("int32", 0)))
        return (Call(f"pd_cp_async<{self.bytes}>", (place, source, size)),)

    def _whole_lines(self, line: Index) -> Multiples | None:
        """What must be multiples of the vector for what is left of a line to be one."""
        return multiples(line, self.vector, line.symbols() - set(self.group.params))

    def _never_cut(self, line: Index) -> bool:
        """Whether what is left of a line is a multiple of the vector wherever the copies may be launched."""
        needed = self._whole_lines(line)
        return needed is not None and set(needed) <= set(self.multiples)

    def computed(self, a: Mapping[str, Index]) -> tuple[tuple[Compare, ...], Body, Multiples] | None:
        """A vector that is computed of vectors of memory: the guard outside of which it is 0, the statements that leave
        it in registers, what addresses must be multiples of. None: it has no such form.
        """
        guard, value = _guarded(self.value(a))
        compared = [comparison(x) for x in conjuncts(guard)] if guard is not None else []
        conditions = tuple(c for c in compared if c is not None)
        element, buffers = Store(VALUES, V(PART), stored_value(value)), stored(self.group.arrays)
        made = widen((element,), PART, self.vector, buffers, frozenset((*a, PART)))
        x = self.operand
        whole = self._whole_lines(x.places.left(x.copy, x.steps, {**a, self.innermost: V(PART) * self.vector}))
        cut = any(PART in i.symbols() for c in conditions for i in (c.left, c.right))
        if None in compared or cut or made is None or whole is None or self.dtype not in buffers.values():
            return None
        if not any(isinstance(n, Call) for n in walk(made[0])):
            return None  # nothing is a vector in memory
        return conditions, made[0], tuple(dict.fromkeys((*made[1], *whole)))

    def _computed(self, a: Mapping[str, Index], place: Tile, left: Sequence[Index]) -> Body:
        """One vector, computed in registers; ``left``: of axes of which something must be left."""
        found = self.computed(a)
        assert found is not None
        guard, body, _ = found
        there = tuple(Compare(">", i, ZERO) for i in left if not self._surely(i))
        words, values = Pointer("uint32", WORDS, ZERO), Pointer(self.dtype, VALUES, ZERO)
        kind = next(n for n, t in stored(self.group.arrays).items() if t == self.dtype)
        pack = Call(f"pd_pack<{self.vector}>", (Pointer(self.dtype, kind, ZERO), words, values))
        zeros = tuple(Store(WORDS, V(n), Const("uint32", 0)) for n in range(4))
        inside = If((*there, *guard), (Alloc(VALUES, self.dtype, V(self.vector), "register", (*body, pack)),))
        return (Alloc(WORDS, "uint32", V(4), "register", (*zeros, inside, Call("pd_sts_wide<4>", (place, words)))),)

    def _surely(self, left: Index) -> bool:
        """Whether something is left of an axis in every tile."""
        places, ranges = self.operand.places, dict[str, Index]()
        counts = {n: e for n, (_, e) in places.map.sizes().items()}
        ranges |= {str(x.coord): x.extent.subs(counts) for x in places.map.views[self.operand.copy].loops}
        ranges |= {str(c): V(self.trips()[extent(c)]) for c in self.operand.loops}
        return is_nonnegative(left - 1, ranges)

    def load(self, by: Instruction, a: Mapping[str, Index], keys: bool = False, first: Index = ZERO) -> Body:
        """Shared memory -> registers: an element, or what a warp's instructions need of 16 rows or columns.

        ``keys``: the columns are the steps of another product. ``first``: where its registers begin, counted in loads.
        """
        x = self.operand
        cell = x.places.cell(x.load, x.tile, a)
        mn, k = (cell[axis] for axis in (x.axis, x.steps))
        number = x.places.number(x.load, x.fragment, x.axis, a, by.loads) + first
        if not by.warp:
            return (Store(x.fragment, number, self.tile(a, mn, k)),)
        return load(by, int(x.column), self.along_k, partial(self.tile, a), x.fragment, number, mn, k, keys)


def guarded_load(v: Value) -> tuple[FlatLoad, Value | None] | None:
    """The load that a value is, and the guard outside of which it is 0 instead; None: it is more than that."""
    guard, load = _guarded(v)
    return (load, guard) if isinstance(load, FlatLoad) else None


def _guarded(v: Value) -> tuple[Value | None, Value]:
    """The guard outside of which a value is 0, which reads no memory, and what the value is inside; None: no guard."""
    if not isinstance(v, Op) or v.name != "where":
        return None, v
    guard, inside, other = v.args
    by_data = any(isinstance(x, FlatLoad) for x in walk_value(guard))
    return (guard, inside) if isinstance(other, Const) and other.value == 0 and not by_data else (None, v)


def _positive(i: Index) -> Value:
    """Of a clamped number: 32 bits hold it whatever the width of indices."""
    return Op("bool", "gt", (FromIndex("int32", minimum(1, i)), FromIndex("int32", ZERO)))


def _through_register(place: Tile, value: Value, left: Sequence[Index]) -> Call:
    """One element; ``left``: of axes of which something must be left."""
    exists = reduce(lambda a, b: Op("bool", "and", (a, b)), map(_positive, left))
    element: Value = Op(value.dtype, "where", (exists, value, Const(value.dtype, 0.0)))
    if value.dtype in WRITE:
        element = Apply(value.dtype, WRITE[value.dtype], (element,))
    return Call(f"pd_sts<{STORAGE[value.dtype]}>", (place, element))


def copy_of(group: Group, x: Operand, stages: int, width: int, by: Instruction) -> Copy:
    """Decides how an operand is copied, by at most ``width`` bytes at once, for an instruction ``by``.

    Threads of ``fma`` read it along its own iterator one element each, so a tile contiguous along the reduction is
    permuted by single elements. Lanes that round float32 read eight elements of four steps from a tile contiguous along
    its own side: eight stay together. Rows of bytes have no load that transposes: their tile is along the reduction in
    any case, copied byte by byte where memory is not. Constant bytes have pitches that always allow the widest copies
    (pass ``steps``), which they have whatever the width of the rows' copies.

    What is more than a load, or has unit stride nowhere, as pixels of all lines, is copied element by element. Unless
    memory is contiguous along the reduction, threads take neighbours along the operand's own iterator: what a pixel
    costs is then computed once, not for every step, and lanes read neighbours.
    """
    column = x.column
    across = column and not by.warp
    size = ITEMSIZE[x.value.dtype]
    together = 16 // size
    base = Copy(x, group, stages, True, 1, False, together, ())
    a: dict[str, Index] = {y.coord: V(y.coord) for y in x.places.map.views[x.copy].loops}
    value = base.value(a)
    for along_k in (True, False)[: 2 if column or not by.of_bytes else 1] if guarded_load(value) else ():
        most = 1 if along_k and across else max(1, width // size)
        chunk = 1 if along_k and across else 8 if by.rounds and not along_k else together
        way = replace(base, along_k=along_k, chunk=chunk)
        if by.of_bytes and replace(way, vector=together).asked(a) == ():
            most = together  # always, whatever the other operand asks for
        for vector in _widths(most, size):
            made = replace(way, vector=vector, asynchronous=vector * size >= 4)
            asked = made.asked(a)
            if asked is not None:
                return replace(made, multiples=asked)
    wide = replace(base, vector=together)
    found = wide.computed(a) if width == 16 and not column and by.warp and not guarded_load(value) else None
    if found is not None:
        return replace(wide, multiples=found[2])
    read = [v.address for v in walk_value(value) if isinstance(v, FlatLoad)]
    along = (by.of_bytes and not column) or any(map(_has_unit_stride, read))
    chunk = 1 if along and across else 8 if by.rounds and not along else together
    return replace(base, along_k=along, chunk=chunk, asynchronous=guarded_load(value) is not None and size >= 4)


def _has_unit_stride(address: Index) -> bool:
    stride, rest = address.split(PART)
    return stride == ONE and PART not in rest.symbols()


def _widths(most: int, size: int) -> Iterator[int]:
    """Elements of copies, the most first; cp.async has 4 bytes or more."""
    vector = most
    while vector > 1:
        yield vector
        vector = vector // 2 if vector * size > 4 else 1
    yield 1
