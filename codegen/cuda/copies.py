"""Promotion of an operand's tile to shared memory: direction, width and swizzle of the copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polydyn.codegen.cuda.instructions import Instruction
from polydyn.codegen.ir import Apply, Body, Call, FlatLoad, Pointer, Tile
from polydyn.codegen.lower import flat
from polydyn.codegen.passes.widen import multiples
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import STORAGE, WRITE
from polydyn.schedules.expr import ITEMSIZE, Const, FromIndex, Load, Op, Value
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum
from polydyn.schedules.model import Group
from polydyn.schedules.tree.names import b, s

V = Index.of


@dataclass(frozen=True)
class Operand:
    """An operand of the product: its value, the axis of its own (``i`` or ``j``), its tile's extent along it.

    ``copied``: the statement that copies it, at whose coordinates ``places`` says where it is.
    """

    name: str
    value: Value
    axis: str
    extent: int
    copied: str
    places: Places


@dataclass(frozen=True)
class Copy:
    """How one operand gets to shared memory.

    ``along_k``: memory is contiguous along the reduction (a tile row holds reduction steps), else along the operand's
    own iterator. ``vector``: elements of one copy; ``asynchronous``: by cp.async, else through registers.
    ``multiples``: what must be multiples of which number for copies as wide as this.
    """

    operand: Operand
    group: Group
    bk: int
    along_k: bool
    vector: int
    asynchronous: bool
    chunk: int
    multiples: tuple[tuple[Index, int], ...]

    @property
    def name(self) -> str:
        """The shared array."""
        return self.operand.name

    @property
    def own(self) -> str:
        """The operand's own copy coordinate."""
        return s(self.operand.axis)

    @property
    def dtype(self) -> str:
        """Storage dtype."""
        return self.operand.value.dtype

    @property
    def bytes(self) -> int:
        """Width of a copy."""
        return self.vector * ITEMSIZE[self.dtype]

    @property
    def elements(self) -> int:
        """Elements of one tile."""
        return self.operand.extent * self.bk

    def trips(self) -> dict[str, int]:
        """Extents of the copy loops, vectors counted once."""
        own, k = self.operand.extent, self.bk
        return {"s_k": k // self.vector, self.own: own} if self.along_k else {"s_k": k, self.own: own // self.vector}

    def tile(self, b_k: Index, own: Index, k: Index, stages: int) -> Tile:
        """An element of the tile of reduction block ``b_k``."""
        row, column, pitch = (own, k, self.bk) if self.along_k else (k, own, self.operand.extent)
        return Tile(self.dtype, self.name, b_k % stages * self.elements, row, column, pitch, self.chunk)

    def issue(self, a: Mapping[str, Index], stages: int, slot: Index | None = None) -> Body:
        """One copy: of a vector by cp.async, or of an element through a register; zeros outside the operand.

        ``slot``: what counts the tiles in the ring, the reduction's tile when not given.
        """
        scale = self.vector
        own, k = (a[self.own], a["s_k"] * scale) if self.along_k else (a[self.own] * scale, a["s_k"])
        x, at = self.operand, {**a, self.own: own, s("k"): k}
        live, steps = (x.places.left(x.copied, axis, at) for axis in (x.axis, "k"))
        value = flat(self.group, x.value, x.places.env(x.copied, at), lambda x: None)
        place = self.tile(a["b_k"] if slot is None else slot, own, k, stages)
        if not self.asynchronous:
            return (_through_register(place, value, live, steps),)
        assert isinstance(value, FlatLoad)
        whole, line = (live, steps) if self.along_k else (steps, live)
        inside = minimum(1, maximum(0, whole)) * minimum(self.vector, maximum(0, line))
        size = FromIndex("int32", inside * ITEMSIZE[self.dtype])
        source = Pointer(value.dtype, value.buffer, value.address)
        return (Call(f"pd_cp_async<{self.bytes}>", (place, source, size)),)


def _through_register(place: Tile, value: Value, live: Index, steps: Index) -> Call:
    def positive(i: Index) -> Value:
        return Op("bool", "gt", (FromIndex("int64", i), FromIndex("int64", ZERO)))

    inside = Op("bool", "and", (positive(live), positive(steps)))
    guarded: Value = Op(value.dtype, "where", (inside, value, Const(value.dtype, 0.0)))
    if value.dtype in WRITE:
        guarded = Apply(value.dtype, WRITE[value.dtype], (guarded,))
    return Call(f"pd_sts<{STORAGE[value.dtype]}>", (place, guarded))


def copy_of(
    group: Group, x: Operand, bk: int, width: int, by: Instruction, column: bool
) -> Copy:
    """Decides how an operand is copied, by at most ``width`` bytes at once, for an instruction ``by``.

    ``column``: it is the column operand. Threads of ``fma`` read it along its own iterator one element each, so a tile
    contiguous along the reduction is permuted by single elements. Lanes of ``tf32`` read eight elements of four steps
    from a tile contiguous along its own side: eight stay together. Rows of ``imma`` have no load that transposes: their
    tile is along the reduction in any case, copied byte by byte where memory is not. Constant bytes have pitches that
    always allow the widest copies (pass ``steps``), which they have whatever the width of the rows' copies.
    """
    across = column and not by.warp
    size = ITEMSIZE[x.value.dtype]
    together = 16 // size
    base = Copy(x, group, bk, True, 1, False, together, ())
    single = replace(base, chunk=1 if across else together)
    if not isinstance(x.value, Load):
        return single
    a = {c: V(c) for c in (*(n for y in group.statements for n, _ in y.iters), b("i"), b("j"), b("k"))}
    own = s(x.axis)
    env = x.places.env(x.copied, {**a, own: V(own), s("k"): V(s("k"))})
    address = flat(group, x.value, env, lambda v: None)
    assert isinstance(address, FlatLoad)
    single = replace(single, asynchronous=size >= 4)
    ways = ((True, s("k")), (False, own))
    for along_k, unit in ways if column or by.name != "imma" else ways[:1]:
        stride, rest = address.address.split(unit)
        if stride != ONE or unit in rest.symbols():
            continue
        iterators = frozenset((*a, own, s("k")))
        most = 1 if along_k and across else max(1, width // size)
        if by.name == "imma" and multiples(rest, together, iterators) == ():
            most = together  # always, whatever the other operand asks for
        vector, wanted = _widest(rest, most, size, iterators)
        kept = 1 if along_k and across else 8 if by.name == "tf32" and not along_k else together
        return replace(base, along_k=along_k, vector=vector, asynchronous=vector * size >= 4, chunk=kept,
                       multiples=wanted)  # fmt: skip
    return single


def _widest(rest: Index, most: int, size: int, iterators: frozenset[str]) -> tuple[int, tuple[tuple[Index, int], ...]]:
    """Elements of a copy, at most ``most``, that addresses may allow, and what it asks for; cp.async has 4 bytes."""
    vector = most
    while vector > 1:
        wanted = multiples(rest, vector, iterators)
        if wanted is not None:
            return vector, wanted
        vector = vector // 2 if vector * size > 4 else 1
    return 1, ()
