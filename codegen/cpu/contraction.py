"""A matmul-like group on a CPU: its operands and extents, and the sizes that its kernel is built for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from polydyn.codegen.cpu.plan import REDUCTION_BLOCK, ROW_UNROLL, ContractTuple, Plan
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.operands import dense, operands
from polydyn.codegen.passes.epilogues import is_long
from polydyn.codegen.passes.prefetch import LINE
from polydyn.schedules.expr import DOTS, Op, Value, is_decoded, loads, read_of, symbols_of
from polydyn.schedules.group.footprint import Footprint
from polydyn.schedules.index import ONE, Index, maximum, product
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tiling import Roles

V = Index.of
SHORT_STEPS = 512
"""Maximum reduction steps of a window with few channels."""
LEAST_SUMS = 16
"""Minimum vectors of sums in a tile that hide the overhead around so few steps."""
TIE_RATIO = 1.01
"""Ratio of times below which the taller tile is taken."""


@dataclass(frozen=True)
class Contraction:
    """A matmul-like group and the processor that its kernel is for.

    ``packed``: arrays that are stored in panels along the column iterator. ``footprint``: the footprint of the row
    operand if that is copied. ``shares``: the number of K splits; they are independent, like batches.
    """

    group: Group
    roles: Roles
    target: CpuTarget
    packed: frozenset[str] = frozenset()
    footprint: Footprint | None = None
    shares: Index = ONE

    @cached_property
    def accumulation(self) -> Statement:
        """The statement that accumulates the product."""
        return self.group.backbone

    @cached_property
    def extents(self) -> dict[str, Index]:
        """Iterator of the accumulation -> extent."""
        return dict(self.accumulation.iters)

    @property
    def rows(self) -> Index:
        """M, the number of rows."""
        return self.extents[self.roles.row]

    @property
    def columns(self) -> Index:
        """N, the number of columns."""
        return self.extents[self.roles.col]

    @property
    def steps(self) -> Index:
        """K, the steps of the blocked reduction, of all K splits together."""
        return self.extents[self.roles.block]

    @property
    def batches(self) -> Index:
        """The number of independent products: batches times K splits."""
        return product(self.extents[x] for x in self.roles.batch) * self.shares

    @property
    def inner(self) -> list[tuple[str, Index]]:
        """(iterator, extent) of the reductions inside a block."""
        return [(x, self.extents[x]) for x in self.roles.inner]

    @property
    def inner_steps(self) -> Index:
        """The number of steps of the reductions inside a block, taken together."""
        return product(e for _, e in self.inner)

    @cached_property
    def operands(self) -> tuple[Value, Value]:
        """(row operand, column operand)."""
        return operands(self.accumulation, self.roles)

    @property
    def decodes(self) -> bool:
        """Whether columns are weights of a few bits, which the loop or PACK converts to floats."""
        return is_decoded(self.operands[1])

    @property
    def in_bytes(self) -> bool:
        """Whether rows are scaled bytes, whose products with such weights are integer sums within a block."""
        return self.target.quads and self.decodes and any(x.dtype == "int8" for x in loads(self.operands[0]))

    @property
    def short(self) -> bool:
        """Whether windows have so few steps that computing the rows' start addresses matters."""
        steps = (self.steps * self.inner_steps).constant
        return self.footprint is not None and steps is not None and steps <= SHORT_STEPS

    @property
    def long_epilogues(self) -> bool:
        """Whether epilogues are a loop after the register tile."""
        return is_long(self.group.epilogues)

    def column_step(self, lanes: int) -> int:
        """Return the column granularity of micro-kernels: they exist for every multiple.

        The last vector may be narrow.
        """
        floats = self.accumulation.value.dtype == "float32" and not (self.in_words or self.decodes)
        narrow = lanes == self.target.width and floats
        return self.target.narrow if narrow and self.target.narrow else lanes

    @property
    def panel_vectors(self) -> int:
        """The number of adjacent column vectors in panels of packed words."""
        read = next((v for v in loads(self.operands[1]) if v.buffer in self.packed), None)
        if read is None or not self.in_words:
            return 1
        address = self.group.arrays[read.buffer].address(read.index)
        return (address.split((self.roles.block, *self.roles.inner)[-1])[0].constant or 1) // self.target.width

    @property
    def in_words(self) -> bool:
        """Whether the product multiplies packed words of several K steps."""
        value = self.accumulation.value
        return isinstance(value, Op) and value.name in DOTS

    @property
    def panels_of_constants(self) -> frozenset[str]:
        """Constants whose innermost dim is a vector of columns."""
        arrays = self.group.arrays.items()
        return frozenset(n for n, a in arrays if a.role == "constant" and a.shape[-1] == self.target.width)


def plan_product(x: Contraction, fill: bool = False, chosen: ContractTuple | None = None) -> Plan:
    """Return the sizes of a kernel. ``fill``: FILL copies the rows; ``chosen``: tuned sizes."""
    value = x.operands[1]
    columns = [y for y in loads(value) if x.roles.col in symbols_of(y)]
    in_place = all(y.buffer in x.packed or dense(x.group, y, x.roles.col) for y in columns)
    promote = not (read_of(value) is not None and in_place)
    rows, vectors = register_tile(x, chosen)
    return _blocked(x, Plan(rows, vectors, x.target.width, x.steps, ONE, promote, fill), chosen)


def _blocked(x: Contraction, plan: Plan, chosen: ContractTuple | None) -> Plan:
    """Return a plan with blocks of the reduction, if an epilogue's output can hold the sums between two blocks.

    A footprint serves all steps and would be copied again for every block, so it has one block.
    """
    if x.footprint is not None:
        return replace(plan, unroll=chosen.unroll if chosen else ROW_UNROLL)
    accumulator_output = next((s for s in x.group.epilogues if s.value.dtype == x.accumulation.value.dtype), None)
    k, r = x.steps.constant, x.inner_steps.constant
    stays = x.target.core.floats // 4 // plan.columns // LINE * LINE  # steps whose panel fits a quarter of the cache
    steps, unroll = (chosen.block, chosen.unroll) if chosen else (max(LINE, min(REDUCTION_BLOCK, stays)), ROW_UNROLL)
    plan = replace(plan, accumulator_output=accumulator_output, unroll=unroll)
    block = max(1 if plan.fill else 16, steps // r) if r else steps
    if accumulator_output is None or (k is not None and k <= block * 4 // 3):
        return plan
    return replace(plan, block=V(block), blocks=maximum(1, x.steps.ceildiv(block)))


def plan_part(x: Contraction, rows: int) -> Plan:
    """Return the sizes of a product inside an attention: ``rows`` of a register tile, one block."""
    most = max((v for r, v in x.target.tiles if r >= rows), default=1)
    n = x.columns.constant
    vectors = most if n is None else min(most, max(1, -(-n // x.target.width)))
    return replace(plan_product(x), rows=rows, vectors=vectors, block=x.steps, blocks=ONE)


def register_tile(x: Contraction, chosen: ContractTuple | None) -> tuple[int, int]:
    """Return the (rows, vectors) that take the least time for all columns; a symbolic number counts as large.

    If times are within ``TIE_RATIO``, the tallest tile is preferred because it needs fewer tiles.
    """
    n, w = x.columns.constant, x.target.width
    if chosen:
        return chosen.rows, chosen.vectors if n is None else min(chosen.vectors, max(1, -(-n // w)))
    step = x.column_step(w)

    def time(tile: tuple[int, int]) -> float:
        rows, vectors = tile
        if n is None:
            return 1 / x.target.share(rows, vectors)
        full, rest = divmod(-(-n // step) * step / w, vectors)
        sums = rows * min(vectors, -(-n // w))
        waits = min(1.0, sums / LEAST_SUMS) if x.short else 1.0
        tail = rest / x.target.share(rows, math.ceil(rest)) if rest else 0.0
        return (full * vectors / x.target.share(rows, vectors) + tail) / waits

    tiles = [t for t in x.target.tiles if x.panel_vectors in (1, t[1])] or x.target.tiles
    times = {tile: time(tile) for tile in tiles}
    rows, vectors = max(t for t in times if times[t] <= TIE_RATIO * min(times.values()))
    return rows, vectors if n is None else min(vectors, max(1, -(-n // w)))
