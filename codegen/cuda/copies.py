"""The path of an operand through shared memory: direction, width and swizzle of the copies, loads of fragments."""

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
from polydyn.codegen.printers.cuda_values import STORAGE, TO_STORAGE
from polydyn.schedules.expr import ITEMSIZE, Const, FromIndex, Op, Value, conjuncts, indices, map_index, substitute
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, maximum, minimum, product
from polydyn.schedules.model import Group, stored
from polydyn.schedules.ranges import is_nonnegative, simplify
from polydyn.schedules.tree.names import Coord, extent

V = Index.of
PART = "part"
"""The iterator over the elements of a vector."""
VALUES, WORDS = "values", "words"
"""A vector that a copy computes, in registers, and its 16 bytes as stored."""


@dataclass(frozen=True)
class Operand:
    """An operand of a product: its value, and its position in tile space.

    ``tile``, ``fragment``: its buffers in shared memory and in registers. ``copy``, ``load``: the statements that write
    them; ``places`` maps their coordinates to elements. ``axis`` is the operand's own axis and ``steps`` its reduction
    axis. ``extents`` gives the tile size along both, ``loops`` the copy loops along both. ``slot``: the loop that
    counts tiles in the ring, None for a single tile. ``column``: it is the column operand.
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
    """The copy of one operand to shared memory.

    ``along_k``: memory is contiguous along the reduction (a tile row holds reduction steps), else along the operand's
    own iterator. ``vector``: elements of one copy; ``asynchronous``: by cp.async, else through registers.
    ``multiples``: the alignment that copies of this width require; ``stages``: slots of the ring.
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
        """The width of a copy in bytes."""
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
        """Return the extents of the copy loops; a vector counts once."""
        pairs = zip(self.operand.loops, self.operand.extents, strict=True)
        return {extent(x): n // (self.vector if x == self.innermost else 1) for x, n in pairs}

    def value(self, a: Mapping[str, Index], part: IndexLike = PART, repeat: bool = False) -> Value:
        """Return an element of the vector at a position of the tile.

        Divisions that are uniform in a tile or vector are resolved.

        ``repeat``: past the end of the operand's own axis, load the last vector again.
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
        """Return the element of the tile that an instance at ``a`` accesses."""
        (whole, steps), slot = self.operand.extents, self.operand.slot
        row, column, pitch = (mn, k, steps) if self.along_k else (k, mn, whole)
        first = a[slot] % self.stages * self.elements if slot else ZERO
        return Tile(self.dtype, self.name, first, row, column, pitch, self.chunk)

    def required_multiples(self, a: Mapping[str, Index]) -> Multiples | None:
        """Return the alignment required by copies of this width.

        Return None if the elements of a vector are not contiguous or may straddle the end of the operand.
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
        """Issue one copy, of a vector by cp.async or of an element through a register, with zeros outside the operand.

        ``whole``: all steps of the tile exist. ``repeat``: elements past the end of the operand's own axis may have any
        value, because only unused sums depend on them. If it needs no bounds check, an existing vector is copied in
        their place.
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
        """Return the alignment under which the rest of a line is a whole number of vectors."""
        return multiples(line, self.vector, line.symbols() - set(self.group.params))

    def _never_cut(self, line: Index) -> bool:
        """Whether the rest of a line is a whole number of vectors whenever the copies may be launched."""
        needed = self._whole_lines(line)
        return needed is not None and set(needed) <= set(self.multiples)

    def computed(self, a: Mapping[str, Index]) -> tuple[tuple[Compare, ...], Body, Multiples] | None:
        """Return a vector that is computed from vectors in memory, or None if it has no such form.

        The result has the guard outside which the vector is 0, the statements that leave it in registers, and the
        required alignment.
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
        """Issue one vector, computed in registers. ``left``: remaining elements of axes, which must be positive."""
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
        """Whether an axis has remaining elements in every tile."""
        places, ranges = self.operand.places, dict[str, Index]()
        counts = {n: e for n, (_, e) in places.map.sizes().items()}
        ranges |= {str(x.coord): x.extent.subs(counts) for x in places.map.views[self.operand.copy].loops}
        ranges |= {str(c): V(self.trips()[extent(c)]) for c in self.operand.loops}
        return is_nonnegative(left - 1, ranges)

    def load(self, by: Instruction, a: Mapping[str, Index], keys: bool = False, first: Index = ZERO) -> Body:
        """Load from shared memory to registers: an element, or the operand fragments of 16 rows or columns for a warp.

        ``keys``: the columns are the steps of another product. ``first``: the start of its registers, counted in loads.
        """
        x = self.operand
        cell = x.places.cell(x.load, x.tile, a)
        mn, k = (cell[axis] for axis in (x.axis, x.steps))
        number = x.places.number(x.load, x.fragment, x.axis, a, by.loads) + first
        if not by.warp:
            return (Store(x.fragment, number, self.tile(a, mn, k)),)
        return load(by, int(x.column), self.along_k, partial(self.tile, a), x.fragment, number, mn, k, keys)


def guarded_load(v: Value) -> tuple[FlatLoad, Value | None] | None:
    """Return the load that a value is, and the guard outside which it is 0; None if it is anything else."""
    guard, load = _guarded(v)
    return (load, guard) if isinstance(load, FlatLoad) else None


def _guarded(v: Value) -> tuple[Value | None, Value]:
    """Return (guard, inside) of a value that is 0 outside a guard that reads no memory; the guard is None without one.
    """
    if not isinstance(v, Op) or v.name != "where":
        return None, v
    guard, inside, other = v.args
    by_data = any(isinstance(x, FlatLoad) for x in walk_value(guard))
    return (guard, inside) if isinstance(other, Const) and other.value == 0 and not by_data else (None, v)


def _positive(i: Index) -> Value:
    """Return a test for a positive number. It is clamped, so that 32 bits hold it for every index width."""
    return Op("bool", "gt", (FromIndex("int32", minimum(1, i)), FromIndex("int32", ZERO)))


def _through_register(place: Tile, value: Value, left: Sequence[Index]) -> Call:
    """Copy one element. ``left``: remaining elements of axes, which must be positive."""
    exists = reduce(lambda a, b: Op("bool", "and", (a, b)), map(_positive, left))
    element: Value = Op(value.dtype, "where", (exists, value, Const(value.dtype, 0.0)))
    if value.dtype in TO_STORAGE:
        element = Apply(value.dtype, TO_STORAGE[value.dtype], (element,))
    return Call(f"pd_sts<{STORAGE[value.dtype]}>", (place, element))


def copy_of(group: Group, x: Operand, stages: int, width: int, by: Instruction) -> Copy:
    """Decide how an operand is copied, by at most ``width`` bytes at once, for an instruction ``by``.

    Threads of ``fma`` read one element each along the operand's own iterator, so a tile that is contiguous along the
    reduction is permuted by single elements. Lanes that round float32 read eight elements of four steps from a tile
    that is contiguous along its own side: groups of eight stay together. No load transposes rows of bytes: their tile
    always has the reduction contiguous, and is copied byte by byte if memory has not. Constant bytes have pitches that
    always allow the widest copies (pass ``steps``), whatever the width of the rows' copies.

    Values that are more than a load, or without unit stride, such as pixels of all image rows, are copied element by
    element. Unless memory is contiguous along the reduction, threads take neighbours along the operand's own iterator:
    then the address of a pixel is computed once instead of for every step, and lanes read neighbours.
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
        if by.of_bytes and replace(way, vector=together).required_multiples(a) == ():
            most = together  # always, for every alignment of the other operand
        for vector in _widths(most, size):
            made = replace(way, vector=vector, asynchronous=vector * size >= 4)
            asked = made.required_multiples(a)
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
    """Yield the elements of copies, widest first; cp.async copies at least 4 bytes."""
    vector = most
    while vector > 1:
        yield vector
        vector = vector // 2 if vector * size > 4 else 1
    yield 1
