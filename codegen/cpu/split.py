"""CPU kernels for long reductions into few results: shares of the reduction are tasks, a second launch adds their sums.

The same tree as other products, with the share as one more loop over tasks (docs/adr/0012-cpu-kernels.md, Split
reductions). How many shares there are depends on sizes alone, so results do not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from polydyn.codegen.cpu.plan import ContractTuple, Plan
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.rows import NestKernel
from polydyn.codegen.cpu.shares import reduction_shares, share_of_steps
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.ir import Body, Let
from polydyn.codegen.kernel import WORKSPACE, Kernel
from polydyn.codegen.passes.tiles import share_steps
from polydyn.codegen.pipeline import Step
from polydyn.codegen.split import combining_group, partial_group
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.index import ONE, Index, product
from polydyn.schedules.model import Group
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.names import b, p
from polydyn.schedules.tree.rewrites import SHARES
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import cpu_product

FIRST_STEP, END_STEP = "k_lo", "k_hi"
"""Steps of a share of the reduction: the first one, and the one behind the last."""
V = Index.of


class SplitKernel(ContractKernel):
    """Builds the kernel that leaves the sums of each share of the reduction in the workspace. ``sums``: what builds the
    kernel after it.
    """

    def __init__(self, name: str, group: Group, roles: Roles, target: CpuTarget, packed: frozenset[str]) -> None:
        """``group``, ``roles``: of the whole product, not yet solved."""
        super().__init__(name, partial_group(group), roles, target, packed)
        self.whole = self.product
        self.product = replace(self.whole, shares=V(SHARES))
        self.sums = NestKernel(f"{name}_sum", *combining_group(group), target)

    @property
    def count(self) -> Index:
        """The shares of the reduction, over the group's parameters; 0 where the kernel is not launched."""
        return reduction_shares(self.whole, self.plan)

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """As other products, but a share is one block."""
        return replace(super().sizes(chosen, fill), block=self.product.steps, blocks=ONE, carrier=None)

    @cached_property
    def schedule(self) -> Scheduled:
        """As of other products, with shares."""
        return cpu_product(self.product.group, self.product.roles, self.plan.sizes, split=True)

    def build(self) -> Kernel:
        """The kernel, and the one after it."""
        group = self.product.group
        size = product(group.arrays[WORKSPACE].shape) * ITEMSIZE[group.arrays[WORKSPACE].dtype]
        return replace(super().build(), after=(self.sums.build(),), workspace=size)

    @property
    def launch(self) -> dict[str, Index]:
        """As of other products, with the number of shares."""
        return {SHARES: self.count} | {n: e.subs({SHARES: self.count}) for n, e in super().launch.items()}

    def steps(self) -> tuple[Step, ...]:
        """As of other products; before anything else the reduction runs over a share's steps."""
        ends = V(FIRST_STEP), V(END_STEP)
        split = Step(
            "split", "a share of the reduction", lambda x: share_steps(x, p("k"), *ends), (FIRST_STEP, END_STEP)
        )
        return (split, *super().steps())

    def _shares(self, body: Body) -> Body:
        first, end = share_of_steps(self.product.steps, V(b("s")))
        return (Let(FIRST_STEP, first, (Let(END_STEP, end, super()._shares(body)),)),)
