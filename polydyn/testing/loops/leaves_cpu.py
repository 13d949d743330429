"""Meaning of the leaf functions that kernels of CPUs call (``codegen/leaf``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from polydyn.codegen.ir import Call, Pointer
from polydyn.schedules.expr import FromIndex, Value
from polydyn.testing.loops.indices import Env, Run
from polydyn.testing.loops.rooms import Broken, Room, poisoned
from polydyn.testing.loops.values import fit

if TYPE_CHECKING:
    from polydyn.testing.loops.cpu import CpuRun

Action = Callable[[Env], None]
FIRST_OPERAND, SECOND_OPERAND, TILES, SIDE = 4, 6, 8, 16
"""Tiles of the matrix unit: sums from 0, left operands from 4, right operands from 6. ``SIDE``: rows and words."""


def leaf(name: str, table: Mapping[str, Any]) -> Any:
    """Return the entry of a leaf, by its name or by the longest prefix. Raises Broken if there is none."""
    for length in range(len(name), 2, -1):
        if name[:length] in table:
            return table[name[:length]]
    raise Broken(f"a leaf without meaning: {name}")


class Tiles:
    """The registers of the matrix unit.

    ``rows``: the rows of left operands and of sums. ``words``: the words in a row of a left operand, or 0 if the unit
    is off.
    """

    def __init__(self) -> None:
        self.rows, self.words, self.data = 0, 0, np.zeros((TILES, SIDE, SIDE), np.uint32)

    def shape(self, t: int) -> tuple[int, int]:
        """Return the rows and the words of a row of a tile. Raises Broken if the unit is off."""
        if not self.words:
            raise Broken("a tile of the matrix unit is used before pd_amx_begin")
        left = FIRST_OPERAND <= t < SECOND_OPERAND
        return (self.rows if t < SECOND_OPERAND else self.words, self.words if left else SIDE)


def _number(run: CpuRun, v: Value) -> Run:
    assert isinstance(v, FromIndex)
    return run.indices.compile(v.index)


def _place(run: CpuRun, v: Value) -> tuple[Room, Run]:
    assert isinstance(v, Pointer)
    return run.room(v.buffer, v.dtype), run.indices.compile(v.address)


def _nothing(run: CpuRun, n: Call) -> Action:
    return lambda e: None


def _transpose(run: CpuRun, n: Call) -> Action:
    """``to[column * pitch + row] = from[row * stride + column]``; without a pitch the other lanes become 0."""
    (to, at), (source, start) = _place(run, n.args[0]), _place(run, n.args[1])
    stride, rows, columns, *more = (_number(run, v) for v in n.args[2:])
    width, whole = run.width, not more

    def act(e: Env) -> None:
        r, c, first, target = min(rows(e), width), min(columns(e), width), start(e), at(e)
        if r <= 0 or c <= 0:
            return
        places = first + stride(e) * np.arange(r)[:, None] + np.arange(c)
        source.check(places.min(), places.max())
        run.note(source, places, False)
        block = np.zeros((c, width if whole else r), to.data.dtype)
        block[:, :r] = source.data[places].T
        targets = target + (width if whole else more[0](e)) * np.arange(c)[:, None] + np.arange(block.shape[1])
        to.check(targets.min(), targets.max())
        run.note(to, targets, True)
        to.data[targets] = block

    return act


def _sums(run: CpuRun, n: Call) -> Action:
    """Store the sum of the lanes of each vector."""
    to, at = _place(run, n.args[0])
    vectors = [run.values.compile(v) for v in n.args[1:]]

    def act(e: Env) -> None:
        first = at(e)
        to.check(first, first + len(vectors) - 1)
        run.note(to, np.arange(first, first + len(vectors)), True)
        to.data[first : first + len(vectors)] = [np.sum(fit(v(e), run.width), dtype=np.float32) for v in vectors]

    return act


def _first(run: CpuRun, n: Call) -> Action:
    """Write the positions of the first elements of a line in sorted order. Equal elements keep their order."""
    (source, start), (to, target) = _place(run, n.args[0]), _place(run, n.args[5])
    stride, count, most, largest = (_number(run, v) for v in n.args[1:5])
    step, (room, _) = _number(run, n.args[6]), _place(run, n.args[7])

    def act(e: Env) -> None:
        places = start(e) + stride(e) * np.arange(count(e))
        if not places.size or most(e) <= 0:
            return
        source.check(places.min(), places.max())
        room.check(0, 2 * len(places) - 1)
        line = source.data[places]
        keys = line.astype(np.float64) if line.dtype.kind not in "iu" else line.astype(object)
        order = np.argsort(-keys if largest(e) else keys, kind="stable")[: most(e)]
        targets = target(e) + step(e) * np.arange(len(order))
        to.check(targets.min(), targets.max())
        run.note(source, places, False)
        run.note(to, targets, True)
        to.data[targets] = order

    return act


# -- the matrix unit ---------------------------------------------------------------------------------------------------


def _begin(run: CpuRun, n: Call) -> Action:
    rows, words = (_number(run, v) for v in n.args)

    def act(e: Env) -> None:
        if run.tiles.words:
            raise Broken("pd_amx_begin while the matrix unit is on")
        run.tiles.rows, run.tiles.words = rows(e), words(e)
        if not (1 <= run.tiles.rows <= SIDE and 1 <= run.tiles.words <= SIDE):
            raise Broken(f"pd_amx_begin with {run.tiles.rows} rows of {run.tiles.words} words")
        run.tiles.data = poisoned((TILES, SIDE, SIDE), "uint32")

    return act


def _end(run: CpuRun, n: Call) -> Action:
    def act(e: Env) -> None:
        run.tiles.words = 0

    return act


def _zero(run: CpuRun, n: Call) -> Action:
    tile = _number(run, n.args[0])

    def act(e: Env) -> None:
        run.tiles.shape(tile(e))
        run.tiles.data[tile(e)] = 0

    return act


def _load_tile(run: CpuRun, n: Call) -> Action:
    tile, (source, start), pitch = _number(run, n.args[0]), _place(run, n.args[1]), _number(run, n.args[2])

    def act(e: Env) -> None:
        rows, words = run.tiles.shape(tile(e))
        each = 4 // source.data.dtype.itemsize
        places = start(e) + pitch(e) * np.arange(rows)[:, None] + np.arange(words * each)
        source.check(places.min(), places.max())
        run.tiles.data[tile(e), :rows, :words] = np.ascontiguousarray(source.data[places]).view(np.uint32)

    return act


def _store_tile(run: CpuRun, n: Call) -> Action:
    tile, (to, start), pitch = _number(run, n.args[0]), _place(run, n.args[1]), _number(run, n.args[2])

    def act(e: Env) -> None:
        rows, words = run.tiles.shape(tile(e))
        places = start(e) + pitch(e) * np.arange(rows)[:, None] + np.arange(words)
        to.check(places.min(), places.max())
        to.data[places] = run.tiles.data[tile(e), :rows, :words].view(to.data.dtype)

    return act


def _add(run: CpuRun, n: Call, floats: bool) -> Action:
    numbers = [_number(run, v) for v in n.args]

    def act(e: Env) -> None:
        total, left, right = (f(e) for f in numbers)
        rows, words = run.tiles.shape(left)
        a, b = run.tiles.data[left, :rows, :words], run.tiles.data[right, :words]
        if floats:
            pairs = [((x << 16).view(np.float32), (x & np.uint32(0xFFFF0000)).view(np.float32)) for x in (a, b)]
            more = sum(np.matmul(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(*pairs, strict=True))
            sums = run.tiles.data[total, :rows].view(np.float32)
            run.tiles.data[total, :rows] = (sums + more).astype(np.float32).view(np.uint32)
            return
        one = np.ascontiguousarray(a).view(np.uint8).reshape(rows, 4 * words).astype(np.int64)
        two = np.ascontiguousarray(b).view(np.int8).reshape(words, SIDE, 4).transpose(0, 2, 1).reshape(4 * words, SIDE)
        sums = run.tiles.data[total, :rows].astype(np.int64)
        run.tiles.data[total, :rows] = (sums + one @ two.astype(np.int64)).astype(np.uint32)

    return act


CALLS: Mapping[str, Callable[[CpuRun, Call], Action]] = {
    "pd_drain": _nothing, "pd_in_memory": _nothing, "pd_written_soon": _nothing, "pd_prefetch": _nothing,
    "pd_transpose_f32": _transpose, "pd_transpose_rows_f32": _transpose, "pd_sums_f32": _sums,
    "pd_first_": _first, "pd_amx_begin": _begin, "pd_amx_end": _end, "pd_amx_zero": _zero, "pd_amx_load": _load_tile,
    "pd_amx_store": _store_tile, "pd_amx_add_bf16": lambda run, n: _add(run, n, True),
    "pd_amx_add_quads": lambda run, n: _add(run, n, False),
}  # fmt: skip
"""Leaf, or the prefix of its name -> the action of a call."""


def _every(width: int, a: Any, b: Any, first: int) -> Any:
    """Every second lane of two vectors, one after the other."""
    return np.concatenate([fit(a, width), fit(b, width)])[first::2]


def _spread(times: int) -> Callable[[int, Any], Any]:
    return lambda width, v: fit(v, width)[np.arange(width) // times * times]


def _repeat(width: int, v: Any, times: Any, phase: Any) -> Any:
    return fit(v, width)[(np.arange(width) + int(phase)) // int(times)]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "vkeep_f32": lambda width, v: v,
    "vevens_f32": lambda width, a, b: _every(width, a, b, 0),
    "vodds_f32": lambda width, a, b: _every(width, a, b, 1),
    **{f"vspread{m}_f32": _spread(m) for m in (2, 4, 8, 16)},
    "vrepeat_f32": _repeat,
    "vremainder_i32": lambda width, v, m: fit(v, width) % int(m),
}  # fmt: skip
"""Leaf -> its value, from the lanes of a whole vector and the arguments."""
