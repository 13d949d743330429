"""Names as values: loops, marks, roles of statements. A misspelt one is an undefined Python name.

No code takes a name apart. The name of a loop is also the kernel's variable: ``b("i")`` is ``b_i``.
"""

from __future__ import annotations

from enum import Enum
from typing import NewType

Coord = NewType("Coord", str)
"""A loop of tile space: one coordinate of a statement's instances. Its text is its name in trees and kernels."""


class Level:
    """A level of tiling: ``Level("b")("i")`` is the loop ``b_i``."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def __call__(self, axis: str) -> Coord:
        """Return the loop of this level along an axis."""
        return Coord(f"{self.letter}_{axis}" if self.letter else axis)


a, b, c, e, f, g, h, p, q, s, v, w = map(Level, "abcefghpqsvw")
"""The levels.

a: copy; b: block; c: register tile, or block of a cluster; e: epilogue; f: fragment; g: load, or warpgroup; h: warp
of a warpgroup; p: point; q: vector of a point, or point of a warpgroup; s: tile in shared memory; v: vector of a
copy; w: unit (warp or thread)."""
lanes = Level("l")
"""Lanes of a warp that run one loop."""
it = Level("")
"""An iterator that is not tiled."""
LANE = Coord("lane")


def extent(loop: Coord) -> str:
    """Return the parameter of a tree for the extent of a loop: ``b_i`` has ``B_i``, ``r`` has ``E_r``."""
    return loop[0].upper() + loop[1:] if loop[1:2] == "_" or loop == LANE else f"E_{loop}"


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__

    def __format__(self, form: str) -> str:
        return format(str(self.value), form)


class MarkName(_Text):
    """Positions in a tree. Exactly one pass of code generation consumes each mark."""

    TASK = "task"
    SHARE = "share"
    KBLOCK = "kblock"
    BLOCK = "block"
    MICRO = "micro"
    MICRO1 = "micro1"
    MICRO2 = "micro2"
    REDUCE = "reduce"
    PROMOTE = "promote"
    FILL = "fill"
    ROWS = "rows"
    ROW = "row"
    STAGE = "stage"
    TILE = "tile"
    ROLES = "roles"
    PIPELINE = "pipeline"
    COPY = "copy"
    MULTIPLY = "multiply"
    INSTRUCTION = "instruction"
    EPILOGUE = "epilogue"
    STORE = "store"
    COMBINE = "combine"
    START = "start"
    RESCALE = "rescale"
    FINISH = "finish"


class Role(_Text):
    """The purpose of a statement in a tree. The first four are the group's own; transformations add the others."""

    INIT = "init"
    BACKBONE = "backbone"
    EPILOGUE = "epilogue"
    MAP = "map"
    COPY = "copy"
    LOAD = "load"
    SAVE = "save"


class End(_Text):
    """The step of a loop at which a sunk statement runs, in the solved matrix."""

    FIRST = "first"
    LAST = "last"


class Meets(_Text):
    """The kind of a statement's access to a buffer."""

    READS = "reads"
    WRITES = "writes"
    UPDATES = "updates"
