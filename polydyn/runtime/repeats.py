"""A program again and again without Python in between: the bodies of loops (``pd_repeat``).

Standard library and numpy only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from polydyn.runtime.native import Context, Native


class Moving(ctypes.Structure):
    """``pd_moving``: in run k an array begins at ``even`` or ``odd``, as k is, plus ``k * step`` bytes."""

    _fields_ = (("even", ctypes.c_void_p), ("odd", ctypes.c_void_p), ("step", ctypes.c_int64))


class Repeats:
    """A context whose inputs have their shapes, and where each array lies in run k.

    ``shapes``: of the outputs, by name. ``next``: the run that comes next, or that has failed. ``going``: whether the
    condition of the last run says so.
    """

    def __init__(self, native: Native, context: Context, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """``inputs``, ``outputs``: names in the program's order."""
        self._native, self._context = native, context
        self._inputs, self._outputs = (Moving * (len(inputs) + 1))(), (Moving * (len(outputs) + 1))()
        self._read = dict(zip(inputs, self._inputs, strict=False))
        self._written = dict(zip(outputs, self._outputs, strict=False))
        self.shapes = dict(zip(outputs, context.output_shapes, strict=True))
        self._next, self._going = ctypes.c_int64(0), ctypes.c_int32(1)

    @property
    def next(self) -> int:
        """The run that comes next, or that has failed."""
        return self._next.value

    @property
    def going(self) -> bool:
        """Whether the condition of the last run says so."""
        return bool(self._going.value)

    def read(self, name: str, even: int, odd: int, step: int = 0) -> None:
        """Where an input lies in runs of even and of odd number."""
        _put(self._read[name], even, odd, step)

    def write(self, name: str, even: int, odd: int, step: int = 0) -> None:
        """Where an output lies in runs of even and of odd number."""
        _put(self._written[name], even, odd, step)

    def run(self, first: int, end: int, number: int | None, condition: int | None) -> None:
        """Runs ``first`` to ``end``, or until a condition is 0; ``number``, ``condition``: where they lie. InputError:
        an index outside its axis, in run ``next``.
        """
        self._next.value = first
        code = self._native.library.pd_repeat(
            self._context.handle, self._inputs, self._outputs, ctypes.c_void_p(number), ctypes.c_void_p(condition),
            ctypes.c_int64(end), ctypes.byref(self._next), ctypes.byref(self._going),
        )  # fmt: skip
        self._native.check(code)


def _put(m: Moving, even: int, odd: int, step: int) -> None:
    m.even, m.odd, m.step = even, odd, step
