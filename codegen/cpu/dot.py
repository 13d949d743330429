"""CPU kernels for contractions with few columns: the same tree, vectors along the reduction.

With two columns a vector of columns would waste seven lanes in eight. Here a register tile is ``rows x columns``
accumulators of partial sums. Each step loads one vector of every row and every column, and the lanes are added up at
the end. Columns that are not dense along the reduction are packed (constants by ``lowering``, others by PACK).
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cpu.plan import ContractTuple, Plan
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.register_tile import RegisterTile
from polydyn.codegen.cpu.scratch import Scratch
from polydyn.codegen.cpu.target import INDEPENDENT_FMAS
from polydyn.codegen.ir import Body, Compare, Def, For, If, Node, rewrite
from polydyn.codegen.operands import dense, operands
from polydyn.codegen.passes.prefetch import PREFETCH_DISTANCE, prefetch_next
from polydyn.codegen.passes.registers import keep_loads
from polydyn.codegen.passes.sums import sum_together
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.codegen.pipeline import Step
from polydyn.schedules.errors import CodegenError, Declined, first_refusal
from polydyn.schedules.expr import Load, loads
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.model import Group
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.names import a, p
from polydyn.schedules.tree.strategies import FIRST_ROW

ROWS = 8
TILE_COLUMNS = 4
"""Columns of a register tile if their number is unknown."""
PAGE = 1024
"""float32 elements of a memory page. Hardware prefetchers stop at its end."""
COLUMNS, LEAST_ROWS, LEAST_STEPS = 4, 4, 8
"""Maximum computed columns, and minimum rows and steps, for vectors along the reduction."""
V = Index.of


class PanelsOfSteps(Scratch):
    """Columns copied dense along the reduction."""

    def pack(self, body: Body) -> Body:
        """Lower the promotion statement: vectors along the reduction, the rest one by one."""
        w = self.product.target.width

        def f(n: Node) -> Node | Body:
            if not (isinstance(n, For) and n.var == a("k")):
                return n
            whole = n.hi // w * w
            vectors = vectorise_loop(replace(n, hi=whole), w)
            if isinstance(vectors, Declined):
                self.notes.append(f"columns are packed element by element: {vectors}")
                return n
            return (*vectors, replace(n, lo=whole))

        return rewrite(super().pack(body), f)


class PartialSums(RegisterTile):
    """A register tile with one vector of partial sums for each of its elements."""

    def masked(self, body: Body, width: int) -> Body:
        """Return the body unchanged: columns are not vectorised, so there are no masks."""
        return body

    def row_steps(self, rows: int) -> tuple[Step, ...]:
        """Return the steps for a number of live rows: scalar tile first, then lanes along the reduction."""
        lanes = Step("vectorise_reduction", "vectors along the reduction", lambda b: self._lanes_of_steps(b, rows))
        return (*self._register_steps(rows), lanes)

    def _lanes_of_steps(self, body: Body, rows: int) -> Body:
        sums = sum(isinstance(n, Def) and n.reg.startswith(self.name) for n in body)
        chains = max(1, INDEPENDENT_FMAS // max(1, sums))

        def f(n: Node) -> Node | Body:
            if not (isinstance(n, For) and n.var == p("k")):
                return n
            loops = vectorise_loop(n, self.product.target.width, chains)
            if isinstance(loops, Declined):
                raise CodegenError(f"the reduction cannot be vectorised: {loops}")  # ``refusal`` has checked it
            return keep_loads(sum_together(self._prefetched(loops, rows)))

        return rewrite(body, f)

    def _prefetched(self, body: Body, rows: int) -> Body:
        """Prefetch short rows if they do not fit the cache.

        The hardware prefetches long rows. For rows in the cache a prefetch would only take the place of loads.
        """
        steps = self.product.steps.constant
        if steps is not None and steps > PAGE:
            return body
        size = self.product.batches * self.product.rows * self.product.steps

        def f(n: Node) -> Node | Body:
            if not (isinstance(n, For) and n.var == p("k")):
                return n
            far = (Compare(">", size, V(self.product.target.core.floats)),)
            following = {FIRST_ROW: V(FIRST_ROW) + 2 * rows}  # the first rows of the next batch, after the last row
            if steps is not None:
                following = self.next_rows(rows, -(-PREFETCH_DISTANCE // (rows * max(1, steps))))
            return If(far, prefetch_next((n,), p("k"), following), (n,))

        first = next((i for i, n in enumerate(body) if isinstance(n, For)), None)
        return body if first is None else (*body[:first], *rewrite(body[first : first + 1], f), *body[first + 1 :])


class DotKernel(ContractKernel):
    """Builds the kernel of one contraction with few columns."""

    tile_kind, scratch_kind = PartialSums, PanelsOfSteps

    @staticmethod
    def refusal(group: Group, roles: Roles) -> Declined | None:
        """Return why this kernel is not added to others; None if both operands are computed, columns may be few, and
        rows are dense along the reduction.
        """
        acc = group.backbone
        extents, (row, col) = dict(acc.iters), operands(acc, roles)
        n, k = extents[roles.col].constant, extents[roles.block].constant
        if not (isinstance(row, Load) and isinstance(col, Load) and acc.value.dtype == "float32"):
            return Declined("its operands are not two float32 tensors")
        return first_refusal(
            (n is not None and n > COLUMNS, f"{n} columns are more than {COLUMNS}"),
            (k is not None and k < LEAST_STEPS, f"{k} steps are fewer than {LEAST_STEPS}"),
            (bool(roles.inner), "it has several reductions"),
            (group.arrays[col.buffer].role != "input", "its columns are a constant, which is packed"),
            (not dense(group, row, roles.block), "its rows do not have unit stride along the reduction"),
        )

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """Return a plan with one column per register and as many rows as there are accumulators.

        Columns that stay in the cache, such as a symbolic number of them, need no blocks of the reduction.
        """
        x, plan = self.product, super().sizes(chosen, fill)
        columns = x.columns.constant or TILE_COLUMNS
        rows = max(1, min(ROWS, x.target.core.sums // columns))
        loaded = [y for y in loads(x.operands[1]) if y.buffer not in x.packed]
        promote = not all(dense(x.group, y, x.roles.block) for y in loaded)
        plan = replace(plan, rows=rows, vectors=columns, lanes=1, promote=promote)
        size = (x.columns * x.steps).constant
        if not promote and x.columns.constant is not None and (size is None or size > x.target.core.shared):
            return plan
        return replace(plan, block=x.steps, blocks=ONE)
