"""Skinny GEMM with weights of a few bits, which are decoded in registers, each once (docs/cpu.md 1).

The register tile is that of other products. Its column operand is an expression over panels of words: a shift and a
look-up for each vector of weights. The scale of a block of steps is hoisted out of its sum if registers suffice for a
second sum: one multiplication per block instead of one per step. With many rows, PACK decodes the columns.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cpu.plan import ContractTuple, Plan
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.register_tile import RegisterTile
from polydyn.codegen.cpu.target import Core
from polydyn.codegen.ir import Body, Def, For, walk
from polydyn.codegen.passes.factors import hoist_factors, in_integers
from polydyn.codegen.passes.prefetch import STREAM, prefetch_ahead
from polydyn.codegen.passes.registers import partial_unroll, split_chains
from polydyn.codegen.pipeline import Step
from polydyn.schedules.expr import NIBBLES
from polydyn.schedules.index import ONE
from polydyn.schedules.tree.names import p

FEW_ROWS = 64
"""Maximum rows for which every row tile decodes for itself."""
ROWS = 4
"""Rows of a register tile. Each sum has a second one for the current block."""
SUMS = 6
"""Maximum number of sums that are split into two chains each, which hides the latency of an addition."""


def tile_vectors(core: Core) -> int:
    """Return the column vectors of a register tile and of a panel of words. A panel is then one stream from memory."""
    return -(-core.sums // (2 * ROWS))


class DecodingTile(RegisterTile):
    """A register tile that decodes its columns."""

    def row_steps(self, rows: int) -> tuple[Step, ...]:
        """Return the steps of ``RegisterTile``, but hoist factors out of the sums of blocks before loads are shared."""
        unrolled, in_registers, shared = self._register_steps(rows)
        factors = Step("factors", "the scale of a block is hoisted out of its sum", self._factors)
        reduction = Step("reduction", "several steps in flight", lambda b: self._reduction(b, rows))
        return unrolled, in_registers, factors, shared, reduction

    def _factors(self, body: Body) -> Body:
        return in_integers(hoist_factors(body)) if self.product.in_bytes else hoist_factors(body)

    def _sums(self, body: Body) -> list[Def]:
        return [n for n in body if isinstance(n, Def) and n.reg.startswith(f"{self.name}_")]

    def _reduction(self, body: Body, rows: int) -> Body:
        """Unroll the steps of a word, so that element numbers become shifts, and split few sums into chains."""
        step = [n.var for n in walk(body) if isinstance(n, For)][-1]
        split = split_chains(body, step, 2) if len(self._sums(body)) <= SUMS else body
        return prefetch_ahead(partial_unroll(split, step, NIBBLES), p("k"), STREAM)


class DecodingKernel(ContractKernel):
    """Builds the kernel of a skinny GEMM with weights of a few bits."""

    tile_kind = DecodingTile

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """Return a plan with one block of the reduction, so that the weights are one stream; nothing is packed."""
        plan = super().sizes(chosen or ContractTuple(ROWS, tile_vectors(self.target.core)), fill)
        return replace(plan, promote=False, block=self.product.steps, blocks=ONE, accumulator_output=None)
