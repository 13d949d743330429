"""A program again and again without Python in between: the bodies of loops (``pd_repeat``).

Standard library and numpy only.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from polydyn.runtime.native import Context, Native
from polydyn.runtime.program import Program

ENDED, GOING, ROOM, SHAPE = 0, 1, 2, 3
"""``PD_ENDED`` ...: why runs have ended."""
Move = tuple[int, int, int, int]
"""``pd_moving``: where an array lies in even runs, in odd ones, in the first one of a call (0: as in the others), and
by how many bytes it moves with the number of the run."""


class Grown(ctypes.Structure):
    """``pd_grown``."""

    _fields_ = (("input", ctypes.c_int32), ("output", ctypes.c_int32), ("room", ctypes.c_int64))


class Growth(ctypes.Structure):
    """``pd_growth``."""

    _fields_ = (
        ("grown", ctypes.c_void_p), ("count", ctypes.c_int32), ("inputs", ctypes.c_void_p),
        ("output_dims", ctypes.c_void_p),
    )  # fmt: skip


class Repeats:
    """A context whose inputs have their shapes. ``shapes``: of the outputs, by name. ``next``: the run that comes next,
    or that has failed. ``state``: why runs have ended.
    """

    def __init__(self, native: Native, context: Context, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """``inputs``, ``outputs``: names in the program's order."""
        self._native, self._context, self._names = native, context, (inputs, outputs)
        self._moves = [(ctypes.c_int64 * (4 * len(n) + 1))() for n in (inputs, outputs)]
        self._pack = [struct.Struct(f"{4 * len(n)}q").pack_into for n in (inputs, outputs)]
        self.shapes = dict(zip(outputs, context.output_shapes, strict=True))
        self._next, self._state = ctypes.c_int64(0), ctypes.c_int32(GOING)

    @property
    def next(self) -> int:
        """The run that comes next, or that has failed."""
        return self._next.value

    @property
    def state(self) -> int:
        """Why runs have ended."""
        return self._state.value

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input in the run that comes next."""
        return self._context.input_shape(self._names[0].index(name))

    def run(
        self, reads: Mapping[str, Move], writes: Mapping[str, Move], first: int, end: int, number: int | None,
        condition: int | None, grown: Sequence[tuple[str, str, int]] = (),
    ) -> None:  # fmt: skip
        """Runs ``first`` to ``end``, or as ``state`` says; ``number``, ``condition``: where they lie. ``grown``: input,
        output and bytes of room of what may have another shape in each run. InputError: a check of run ``next`` failed.
        """
        for pack, moves, names, places in zip(self._pack, self._moves, self._names, (reads, writes), strict=True):
            pack(moves, 0, *[x for n in names for x in places[n]])
        self._next.value = first
        growth = self._growth(grown) if grown else None
        code = self._native.library.pd_repeat(
            self._context.handle, *self._moves, growth, ctypes.c_void_p(number), ctypes.c_void_p(condition),
            ctypes.c_int64(end), ctypes.byref(self._next), ctypes.byref(self._state),
        )  # fmt: skip
        if code:
            self._native.check(code)

    def _growth(self, grown: Sequence[tuple[str, str, int]]) -> object:
        """As an argument; from now on the context is prepared for no shapes that Python knows of."""
        self._context.key = None
        inputs, outputs = self._names
        self._grown = (Grown * len(grown))(*(Grown(inputs.index(i), outputs.index(o), room) for i, o, room in grown))
        tensors, dims = self._context.shape_memory()
        return ctypes.byref(Growth(ctypes.addressof(self._grown), len(grown), tensors, dims))


@contextmanager
def repeats(program: Program, feeds: Mapping[str, Any]) -> Iterator[Repeats]:
    """For runs of a program on aligned arrays of these shapes and strides, at places that move from run to run."""
    with program._context() as context:
        program._bind(context, feeds)
        yield Repeats(program._native, context, [*program.inputs], [*program.outputs])
