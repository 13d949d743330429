"""Lower the points of a register tile to instructions of a matrix unit (AMX), on 16 x 16 tiles of sums.

Before: loops over rows and columns of the tile around one store each, of zeros, of products that are added up, or of
the sums to memory. After: the same in calls of ``leaf/pd_amx.h``. If the rows are not a multiple of a tile's, the last
tile begins that many rows before their end: overlapping tiles compute equal values. Rows of an image may be in several
lines; then each tile has rows of one line, which have a constant pitch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Call, FlatLoad, For, Node, Pointer, Store, bodies, with_bodies
from polydyn.codegen.passes.tiles import COLUMN, ROW
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Const, FromIndex, Op, Value
from polydyn.schedules.index import ONE, ZERO, Atom, Index, IndexLike, polynomial_division

SIDE = 16
"""Maximum rows of a tile, and maximum 32-bit words in each of them."""
TILE_ROWS = "tile_rows"
"""Rows of a tile: at most ``SIDE``, the same for all tiles of a kernel."""
ROWS_OF_TILE = Index.of(TILE_ROWS)
TILE_PRODUCT_LEAF = {"dot2_bf16": "pd_amx_add_bf16", "dot4": "pd_amx_add_quads"}
"""The operation in a sum -> the instruction that accumulates a tile of it."""
LEFT_TILE, RIGHT_TILE = 4, 6
"""The first tiles of a product's left operand and of its columns; the tiles before them are sums."""


@dataclass(frozen=True)
class Unit:
    """The tiles of a micro-kernel.

    ``sums``: the buffer that is stored in tiles; ``rows`` and ``columns``: the starts of the tiles; ``words``: words of
    K steps per instruction; ``line``: the length of the lines that no tile crosses, if an address depends on them.
    """

    sums: str
    rows: tuple[Index, ...]
    columns: tuple[int, ...]
    words: int
    line: Index | None = None

    def number(self, row: int, column: int) -> int:
        """Return the number of the tile for the sums of a pair of operand tiles."""
        return row * len(self.columns) + column


def matrix_tiles(body: Body, unit: Unit) -> Body:
    """Lower every nest of such loops to instructions. CodegenError: one has none."""

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
    """Return the store that is the whole body of a nest of loops."""
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
    pitch, each = _distance(store.address, ROW, store.buffer), _distance(store.address, COLUMN, store.buffer)
    if each != ONE:
        raise CodegenError(f"sums are stored {each} elements apart")
    shape = ROWS_OF_TILE, Index.of(SIDE)
    return tuple(
        _moved("store", unit.number(r, c), store.buffer, store.address.subs(at), pitch, shape)
        for r, c, at in _places(unit)
    )


def _added(n: For, store: Store, unit: Unit) -> tuple[Node, ...]:
    """Lower the nest over words, several at a time in its last loop: tiles of the operands, all products of them."""
    value, step = store.value, _last_step(n)
    if not (isinstance(value, Op) and value.name in TILE_PRODUCT_LEAF and step is not None):
        raise CodegenError(f"tiles have no instruction for {value}")
    row, column = value.args
    if not (isinstance(row, FlatLoad) and isinstance(column, FlatLoad)):
        raise CodegenError("operands of tiles are loads")
    trips, rest = divmod(int(step.hi), unit.words)
    along = _distance(column.address, step.var, column.buffer)
    together = _distance(row.address, step.var, row.buffer)  # elements of a word
    if rest or along != SIDE or _lanes(column) != ONE or together.constant not in (1, 2, 4):
        raise CodegenError(f"the K packing of {row.buffer} and {column.buffer} does not match the AMX tile layout")
    pitch = _distance(_in_one_line(row.address, unit.line), ROW, row.buffer)
    words = Index.of(unit.words)
    body: list[Node] = []
    loaded: set[int] = set()
    for r, c, at in _places(unit):
        if LEFT_TILE + r not in loaded:
            shape = ROWS_OF_TILE, words
            body.append(_moved("load", LEFT_TILE + r, row.buffer, row.address.subs(at), pitch, shape))
        if RIGHT_TILE + c not in loaded:
            address = column.address.subs(at)
            shape = words, Index.of(SIDE)
            body.append(_moved("load", RIGHT_TILE + c, column.buffer, address, along, shape))
        loaded |= {LEFT_TILE + r, RIGHT_TILE + c}
        body.append(Call(TILE_PRODUCT_LEAF[value.name], _numbers(unit.number(r, c), LEFT_TILE + r, RIGHT_TILE + c)))
    inner = substitute(tuple(body), {step.var: Index.of(step.var) * unit.words})
    return (_with_last_loop(n, For(step.var, ZERO, Index.of(trips), inner)),)


def _last_step(n: For) -> For | None:
    """Return the innermost loop of the reduction, of the nest around the tile's rows and columns; None if it has none.
    """
    loops = []
    while isinstance(n, For) and n.var not in (ROW, COLUMN):
        loops.append(n)
        (n,) = n.body  # type: ignore[assignment]  # a nest around one store
    return loops[-1] if loops and loops[-1].lo == ZERO and loops[-1].hi.constant is not None else None


def _with_last_loop(n: For, last: For) -> For:
    """Return the loops of a nest around its loop ``last.var``, which becomes ``last``."""
    if n.var == last.var:
        return last
    assert isinstance(n.body[0], For)
    return replace(n, body=(_with_last_loop(n.body[0], last),))


def _in_one_line(address: Index, line: Index | None) -> Index:
    """Return an address without the row in quotients by multiples of ``line``: these are equal in all rows of a tile.
    """
    if line is None:
        return address

    def fixed(a: Atom) -> Index:
        if a.kind == "floordiv" and not polynomial_division(a.args[1], line)[1].terms:
            a = Atom(a.kind, (a.args[0].subs({ROW: 0}), a.args[1]))
        return a.normal()

    return address.rebuild(fixed)


def _places(unit: Unit) -> Sequence[tuple[int, int, dict[str, IndexLike]]]:
    """Return (row, column) of every tile of sums, and the points where it begins."""
    return [(r, c, {ROW: i, COLUMN: j}) for r, i in enumerate(unit.rows) for c, j in enumerate(unit.columns)]


def _distance(address: Index, var: str, buffer: str) -> Index:
    """Return the distance between points of a loop. CodegenError: it is not constant."""
    distance, rest = address.split(var)
    if var in distance.symbols() | rest.symbols():
        raise CodegenError(f"{address} of {buffer} is not a multiple of {var} plus a rest")
    return distance


def _lanes(column: FlatLoad) -> Index:
    """Return the distance between columns of one panel."""
    return column.address.subs({COLUMN: 1}) - column.address.subs({COLUMN: 0})


def _moved(verb: str, tile: int, buffer: str, at: Index, pitch: Index, shape: tuple[Index, Index]) -> Call:
    """Return the load or store of a tile: the address, the row pitch, the numbers of rows and of words per row."""
    rest = (FromIndex("int64", x) for x in (pitch, *shape))
    return Call(f"pd_amx_{verb}", (*_numbers(tile), Pointer("int32", buffer, at), *rest))


def _numbers(*numbers: int) -> tuple[Value, ...]:
    return tuple(FromIndex("int64", Index.of(n)) for n in numbers)
