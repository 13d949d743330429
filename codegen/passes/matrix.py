"""The points of a register tile as instructions of a matrix unit (AMX), on tiles of 16 rows and 16 columns of sums.

Before: loops over rows and columns of the tile around one store each, of zeros, of products that are added up, or of
the sums to memory. After: the same in calls of ``leaf/pd_amx.h``. Rows that are no multiple of 16 end with a tile that
begins 16 rows before their end: what two tiles compute is the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Call, FlatLoad, For, Node, Pointer, Store, bodies, with_bodies
from polydyn.codegen.passes.tiles import COLUMN, ROW
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Const, FromIndex, Op, Value
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike
from polydyn.schedules.tree.names import p

SIDE = 16
"""Rows of a tile, and words of 32 bits in each of them, at most."""
STEP = p("k")
"""The loop over words of steps."""
ADDED = {"dot2_bf16": "pd_amx_add_bf16", "dot4": "pd_amx_add_quads"}
"""What is added up -> the instruction that adds up a tile of it."""
LEFT, RIGHT = 4, 6
"""The first tiles of a product's left operand and of its columns; sums have those before."""


@dataclass(frozen=True)
class Unit:
    """What a micro-kernel computes: the buffer ``sums`` that is tiles, where these begin in ``rows`` and ``columns``,
    the ``words`` of steps that one instruction takes.
    """

    sums: str
    rows: tuple[Index, ...]
    columns: tuple[int, ...]
    words: int

    def number(self, row: int, column: int) -> int:
        """Which tile the sums of a pair of tiles of operands are."""
        return row * len(self.columns) + column


def matrix_tiles(body: Body, unit: Unit) -> Body:
    """The body with every nest of such loops in instructions. CodegenError: one has none."""

    def f(n: Node) -> tuple[Node, ...]:
        store = _only_store(n)
        if store is None:
            return (with_bodies(n, tuple(matrix_tiles(b, unit) for b in bodies(n))),)
        if store.buffer != unit.sums:
            return _stored(store, unit)
        if store.reduce is None:
            return _zeros(store, unit)
        assert isinstance(n, For)
        return _added(n, store, unit)

    return tuple(x for n in body for x in f(n))


def _only_store(n: Node) -> Store | None:
    """The store that is all of a nest of loops."""
    while isinstance(n, For) and len(n.body) == 1:
        n = n.body[0]
    return n if isinstance(n, Store) else None


def _zeros(store: Store, unit: Unit) -> tuple[Node, ...]:
    if not (isinstance(store.value, Const) and store.value.value == 0):
        raise CodegenError(f"sums in tiles begin with 0, not with {store.value}")
    return tuple(Call("pd_amx_zero", _numbers(unit.number(r, c))) for r, c, _ in _places(unit))


def _stored(store: Store, unit: Unit) -> tuple[Node, ...]:
    if not (isinstance(store.value, FlatLoad) and store.value.buffer == unit.sums and store.reduce is None):
        raise CodegenError(f"tiles have no instruction for a store to {store.buffer}")
    pitch, each = _apart(store.address, ROW, store.buffer), _apart(store.address, COLUMN, store.buffer)
    if each != ONE:
        raise CodegenError(f"sums are stored {each} elements apart")
    return tuple(
        _moved("store", unit.number(r, c), store.buffer, store.address.subs(at), pitch, (SIDE, SIDE))
        for r, c, at in _places(unit)
    )


def _added(n: For, store: Store, unit: Unit) -> tuple[Node, ...]:
    """The loop over words, so many at a time: tiles of the operands, and all products of them."""
    value = store.value
    if not (isinstance(value, Op) and value.name in ADDED and n.var == STEP and n.lo == ZERO):
        raise CodegenError(f"tiles have no instruction for {value}")
    row, column = value.args
    if not (isinstance(row, FlatLoad) and isinstance(column, FlatLoad)):
        raise CodegenError("operands of tiles are loads")
    trips, rest = divmod(int(n.hi), unit.words)
    along = _apart(column.address, STEP, column.buffer)
    together = row.address.subs({STEP: 1}) - row.address.subs({STEP: 0})  # elements of a word
    if rest or along != SIDE or _lanes(column) != ONE or together.constant not in (1, 2, 4):
        raise CodegenError(f"words of {row.buffer} and {column.buffer} do not lie as tiles want them")
    pitch = _apart(row.address, ROW, row.buffer)
    body: list[Node] = []
    loaded: set[int] = set()
    for r, c, at in _places(unit):
        if LEFT + r not in loaded:
            body.append(_moved("load", LEFT + r, row.buffer, row.address.subs(at), pitch, (SIDE, unit.words)))
        if RIGHT + c not in loaded:
            body.append(_moved("load", RIGHT + c, column.buffer, column.address.subs(at), along, (unit.words, SIDE)))
        loaded |= {LEFT + r, RIGHT + c}
        body.append(Call(ADDED[value.name], _numbers(unit.number(r, c), LEFT + r, RIGHT + c)))
    return (For(STEP, ZERO, Index.of(trips), substitute(tuple(body), {STEP: Index.of(STEP) * unit.words})),)


def _places(unit: Unit) -> Sequence[tuple[int, int, dict[str, IndexLike]]]:
    """(row, column) of every tile of sums, and the points where it begins."""
    return [(r, c, {ROW: i, COLUMN: j}) for r, i in enumerate(unit.rows) for c, j in enumerate(unit.columns)]


def _apart(address: Index, var: str, buffer: str) -> Index:
    """How far points of a loop lie apart. CodegenError: not always as far."""
    distance, rest = address.split(var)
    if var in distance.symbols() | rest.symbols():
        raise CodegenError(f"{address} of {buffer} is no multiple of {var} and something else")
    return distance


def _lanes(column: FlatLoad) -> Index:
    """How far columns of one panel lie apart."""
    return column.address.subs({COLUMN: 1}) - column.address.subs({COLUMN: 0})


def _moved(verb: str, tile: int, buffer: str, at: Index, pitch: Index, shape: tuple[int, int]) -> Call:
    """A tile loaded or stored: where, how far its rows are apart, how many rows of how many words."""
    rest = (FromIndex("int64", x) for x in (pitch, *map(Index.of, shape)))
    return Call(f"pd_amx_{verb}", (*_numbers(tile), Pointer("int32", buffer, at), *rest))


def _numbers(*numbers: int) -> tuple[Value, ...]:
    return tuple(FromIndex("int64", Index.of(n)) for n in numbers)
