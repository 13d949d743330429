"""Names as values: loops, marks, roles of statements. A misspelt one is an undefined Python name.

Nothing takes a name apart. A loop's name is the kernel's variable, so it is text in the end: ``b("i")`` is ``b_i``.
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
        """The loop of this level along an axis."""
        return Coord(f"{self.letter}_{axis}" if self.letter else axis)


a, b, c, e, f, g, h, p, q, s, v, w = map(Level, "abcefghpqsvw")
"""a: of a copy; b: block; c: register tile, or block of a cluster; e: of an epilogue; f: fragment; g: load, or
warpgroup; h: warp of one; p: point; q: vector of a point, or point of a warpgroup; s: of a tile in shared memory;
v: vector of a copy; w: unit (warp or thread)."""
lanes = Level("l")
"""Lanes of a warp that share a loop."""
it = Level("")
"""An iterator that is not tiled."""
LANE = Coord("lane")


def extent(loop: Coord) -> str:
    """The parameter of a tree that stands for the extent of a loop: ``b_i`` has ``B_i``, ``r`` has ``E_r``."""
    return loop[0].upper() + loop[1:] if loop[1:2] == "_" or loop == LANE else f"E_{loop}"


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__

    def __format__(self, form: str) -> str:
        return format(str(self.value), form)


class MarkName(_Text):
    """Places in a tree; every one is consumed by exactly one pass of code generation."""

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
    """What a statement of a tree is for. The first four are the group's own, transformations add the others."""

    INIT = "init"
    BACKBONE = "backbone"
    EPILOGUE = "epilogue"
    MAP = "map"
    COPY = "copy"
    LOAD = "load"
    SAVE = "save"


class End(_Text):
    """The step of a solved matrix where a statement runs that does not run the loop."""

    FIRST = "first"
    LAST = "last"


class Meets(_Text):
    """How a statement meets a buffer."""

    READS = "reads"
    WRITES = "writes"
    UPDATES = "updates"
