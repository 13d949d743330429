"""Products of few rows with weights of a few bits: decoded in registers, each from memory once (docs/cpu.md 1).

The register tile of other products, whose column operand is an expression over panels of words: a shift and a look-up
for each vector of weights. The scale of a block of steps comes out of its sum where registers are left for a second
one: a multiplication for a block instead of one for every step. Many rows have their columns decoded by PACK.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cpu.plan import ContractTuple, Plan
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.register_tile import RegisterTile
from polydyn.codegen.cpu.target import Core
from polydyn.codegen.ir import Body, Def, For, walk
from polydyn.codegen.passes.factors import factors_out, in_integers
from polydyn.codegen.passes.prefetch import STREAM, prefetch_ahead
from polydyn.codegen.passes.registers import partial_unroll, split_chains
from polydyn.codegen.pipeline import Step
from polydyn.schedules.expr import NIBBLES
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.tree.names import p

FEW_ROWS = 64
"""Rows up to which every row tile decodes for itself."""
ROWS = 4
"""Of a register tile: each sum has a second one for the current block."""
SUMS = 6
"""Up to so many sums each is made in two chains, which hides the latency of an addition."""
V = Index.of


def tile_vectors(core: Core) -> int:
    """Vectors of columns of a register tile, and of a panel of words, which is one stream of memory then."""
    return -(-core.sums // (2 * ROWS))


class DecodingTile(RegisterTile):
    """A register tile that decodes its columns."""

    def row_steps(self, rows: int) -> tuple[Step, ...]:
        """As ``RegisterTile``, factors taken out of the sums of blocks before loads are shared."""
        unrolled, in_registers, shared = self._register_steps(rows)
        factors = Step("factors", "the scale of a block comes out of its sum", self._factors)
        reduction = Step("reduction", "several steps in flight", lambda b: self._reduction(b, rows))
        return unrolled, in_registers, factors, shared, reduction

    def _factors(self, body: Body) -> Body:
        return in_integers(factors_out(body)) if self.product.in_bytes else factors_out(body)

    def _sums(self, body: Body) -> list[Def]:
        return [n for n in body if isinstance(n, Def) and n.reg.startswith(f"{self.name}_")]

    def _reduction(self, body: Body, rows: int) -> Body:
        """The steps of a word unrolled, where their numbers become shifts; few sums in chains."""
        step = [n.var for n in walk(body) if isinstance(n, For)][-1]
        split = split_chains(body, step, 2) if len(self._sums(body)) <= SUMS else body
        return prefetch_ahead(partial_unroll(split, step, NIBBLES), p("k"), STREAM)


class DecodingKernel(ContractKernel):
    """Builds the kernel of a product of few rows with weights of a few bits."""

    tile_kind = DecodingTile

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """One block of the reduction, so that the weights are one stream; nothing is packed."""
        plan = super().sizes(chosen or ContractTuple(ROWS, tile_vectors(self.target.core)), fill)
        return replace(plan, promote=False, block=self.product.steps, blocks=ONE, carrier=None)
