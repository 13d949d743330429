"""A program again and again without Python in between: the bodies of loops (``pd_repeat``).

Standard library and numpy only.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from polydyn.runtime.program import Program

ENDED, GOING, ROOM, SHAPE = 0, 1, 2, 3
"""``PD_ENDED`` ...: why runs have ended."""


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
    """Runs of a program on aligned arrays of some shapes and strides, at places that move from run to run.

    ``shapes``: of the outputs, by name. It has a context of its own, which goes back when nobody has the Repeats.
    """

    def __init__(self, program: Program, feeds: Mapping[str, Any]) -> None:
        """``feeds``: arrays of the shapes of the first run."""
        context = program._take()
        weakref.finalize(self, program._take_back, context).atexit = False
        program._bind(context, feeds)
        self._native, self._context, self._names = program._native, context, ([*program.inputs], [*program.outputs])
        self._key = context.key
        inputs, outputs = self._names
        self._inputs = {n: 4 * k for k, n in enumerate(inputs)}
        self._outputs = {n: 4 * k for k, n in enumerate(outputs)}
        self._reads, self._writes = [0] * (4 * len(inputs)), [0] * (4 * len(outputs))
        self._moves = [(ctypes.c_int64 * (4 * len(n) + 1))() for n in self._names]
        self._pack = [struct.Struct(f"{4 * len(n)}q").pack_into for n in self._names]
        self.shapes = dict(zip(self._names[1], context.output_shapes, strict=True))
        self._next, self._state = ctypes.c_int64(0), ctypes.c_int32(GOING)

    def start(self) -> None:
        """Before the runs of a call: the shapes are those of its first run."""
        self._state.value = GOING
        if self._key is not None and self._context.key != self._key:
            self._context.prepare(self._key)

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

    def read(self, name: str, even: int, odd: int | None = None, step: int = 0) -> None:
        """Where an input lies: its address in even runs, in odd ones (as in even ones), and by how many bytes it moves
        with the number of the run.
        """
        at = self._inputs[name]
        self._reads[at : at + 2] = even, even if odd is None else odd
        self._reads[at + 3] = step

    def first(self, name: str, address: int) -> None:
        """Where an input lies in the first run, instead; 0: as in the others."""
        self._reads[self._inputs[name] + 2] = address

    def write(self, name: str, even: int, odd: int | None = None, step: int = 0) -> None:
        """Where an output goes, as ``read``."""
        at = self._outputs[name]
        self._writes[at : at + 4] = even, even if odd is None else odd, 0, step

    def run(
        self, first: int, end: int, number: int | None, condition: int | None, grown: Sequence[tuple[str, str, int]]
    ) -> None:  # fmt: skip
        """Runs ``first`` to ``end``, or as ``state`` says; ``number``, ``condition``: where they lie. ``grown``: input,
        output and bytes of room of what may have another shape in each run. InputError: a check of run ``next`` failed.
        """
        reads, writes = self._moves
        self._pack[0](reads, 0, *self._reads)
        self._pack[1](writes, 0, *self._writes)
        self._next.value = first
        growth = self._growth(grown) if grown else None
        code = self._native.library.pd_repeat(
            self._context.handle, reads, writes, growth, ctypes.c_void_p(number), ctypes.c_void_p(condition),
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
