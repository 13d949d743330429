"""CPU kernels for contractions with few columns: the same tree, vectors along the reduction.

With two columns a vector of columns would waste seven lanes in eight. Here a register tile is ``rows x columns``
accumulators of partial sums, each step loads one vector of every row and every column (constants are packed by
columns), and the lanes are added up at the end.
"""

from __future__ import annotations

from polydyn.codegen.cpu_contract import ContractKernel
from polydyn.codegen.ir import Body, For, Node, rewrite
from polydyn.codegen.kernel import CpuTarget
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.registers import registers, share_loads, unroll
from polydyn.codegen.passes.vectorise import vectorise_loop

ACCUMULATORS = 20
"""Vector accumulators of a register tile; the other registers hold the operands."""
ROWS = 8
CHAINS = 8
"""Independent accumulators that hide the latency of an addition."""


class DotKernel(ContractKernel):
    """Builds the kernel of one contraction with few columns."""

    @staticmethod
    def lanes(target: CpuTarget) -> int:
        """One column for each register."""
        return 1

    def tile(self) -> tuple[int, int]:
        """As many rows as there are accumulators for."""
        columns = int(self.N)
        return max(1, min(ROWS, ACCUMULATORS // columns)), columns

    def masked(self, body: Body, width: int) -> Body:
        """Columns are not vectorised, nothing is masked."""
        return body

    def rows(self, body: Body, rows: int) -> Body:
        """The micro-kernel for a number of live rows: scalar tile first, then lanes along the reduction."""
        body = unroll(bind(body, {"P_i": rows}), ("p_i",), self.copies)
        body = share_loads(registers(body, self.tile_name, self.acc.value.dtype), self.shared_name)
        chains = max(1, CHAINS // (rows * int(self.N)))

        def f(n: Node) -> Node | Body:
            return vectorise_loop(n, self.target.width, chains) if isinstance(n, For) and n.var == "p_k" else n

        return rewrite(body, f)
