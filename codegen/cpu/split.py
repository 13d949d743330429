"""CPU kernels for long reductions into few results (split-K): K slices are tasks, a second launch adds their sums.

The tree is that of other products, with the slice as one more loop over tasks (docs/adr/0012-cpu-kernels.md, Split
reductions). The number of slices depends only on sizes, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from polydyn.codegen.cpu.dot import DotKernel
from polydyn.codegen.cpu.plan import ContractTuple, Plan
from polydyn.codegen.cpu.product import PRODUCT, ContractKernel
from polydyn.codegen.cpu.rows import NEST, NestForm, NestKernel
from polydyn.codegen.cpu.shares import FEW_TILES, LEAST_SHARES, reduction_shares, share_of_steps, where_few
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.family import Family, Rule
from polydyn.codegen.ir import Body, Let
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.passes.prefetch import LINE
from polydyn.codegen.passes.tiles import share_steps
from polydyn.codegen.sharing import SplitLaunch
from polydyn.codegen.split import combining_group, partial_group
from polydyn.schedules.errors import Declined, first_refusal
from polydyn.schedules.index import ONE, Index, minimum, product
from polydyn.schedules.model import SHARE, SHARES, Group
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.names import b, p
from polydyn.schedules.tree.rewrites import split_reduction
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import cpu_product

FIRST_STEP, END_STEP = "k_lo", "k_hi"
"""The first step and the end of a K slice."""
SHARE_ELEMENTS = 1 << 15
"""Minimum elements that a slice of a row reduction reads: several microseconds from memory."""
MOST_SHARES = 64
"""Maximum slices of a row reduction. No machine needs more tasks."""
V = Index.of


def share_around(body: Body, steps: Index, share: str) -> Body:
    """Bind the steps of the slice that the loop ``share`` counts."""
    first, end = share_of_steps(steps, V(share))
    return (Let(FIRST_STEP, first, (Let(END_STEP, end, body),)),)


class SplitKernel(ContractKernel):
    """Builds the kernel that stores the sums of each K slice in the workspace. ``sums`` builds the kernel after it."""

    def __init__(self, name: str, group: Group, roles: Roles, target: CpuTarget, packed: frozenset[str]) -> None:
        """Plan the kernel. ``group`` and ``roles`` are those of the whole product, not yet solved."""
        super().__init__(name, partial_group(group), roles, target, packed)
        self.whole = self.product
        self.product = replace(self.whole, shares=V(SHARES))
        self.sums = NestKernel(f"{name}_sum", *combining_group(group), target)

    @property
    def count(self) -> Index:
        """The number of K slices, over the group's parameters; 0 if the kernel is not launched."""
        return reduction_shares(self.whole, self.plan)

    @cached_property
    def sharing(self) -> SplitLaunch:
        """The slices, and the kernel that adds their sums."""
        return SplitLaunch(group=self.product.group, count=self.count, add=self.sums.build)

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """Return the sizes of other products, except that a slice is one block."""
        return replace(super().sizes(chosen, fill), block=self.product.steps, blocks=ONE, accumulator_output=None)

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map, like ``ContractKernel.schedule`` plus the loop over slices."""
        return cpu_product(self.product.group, self.product.roles, self.plan.sizes, split=True)

    def build(self) -> Kernel:
        """Build the kernel, and the one after it."""
        return self.sharing.launched(super().build())

    @property
    def launch(self) -> dict[str, Index]:
        """Launch-time values, like ``ContractKernel.launch`` plus the number of slices."""
        return self.sharing.launch(super().launch)

    @property
    def family(self) -> Family[Any]:
        """The tables of other products, preceded by the rule that restricts the reduction to a slice."""
        return SPLIT_PRODUCT

    def share(self, body: Body) -> Body:
        """Bind the scratch of a task as in other products, and the steps of its slice."""
        return share_around(super().share(body), self.product.steps, b("s"))


class SplitDot(SplitKernel, DotKernel):
    """Builds the split-K kernel for few columns, with vectors along a slice's steps."""


class SplitNest(NestKernel):
    """Builds the split kernel of a reduction that is not a product. ``sums`` builds the kernel after it."""

    def __init__(self, name: str, group: Group, band: tuple[str, ...], target: CpuTarget) -> None:
        """Plan the kernel.

        ``group``: one reduction and maps of its results, over the iterators ``band`` that they share.
        """
        partial = split_reduction(partial_group(group))
        phases = {s.name: int(s.role == "epilogue") for s in partial.statements}
        super().__init__(name, partial, (SHARE, *band), phases, target, tiled=None if band else False)
        self.steps_of, *others = partial.backbone.iterators[1 + len(band) :]
        self.others = product(self.extents[x] for x in others)
        self.results = [self.extents[x] for x in band]
        self.sums = NestKernel(f"{name}_sum", *combining_group(group), target)

    @staticmethod
    def refusal(group: Group, band: tuple[str, ...]) -> Declined | None:
        """Return why a group is not one float32 reduction and maps of its results; None if it is."""
        if len(group.statements) < 3 or group.around is not None:
            return Declined("it has no reduction")
        init, acc, *done = group.statements
        maps = init.iterators == band and all(s.iterators == band and not s.reduce for s in done)
        return first_refusal(
            (init.role != "init" or acc.reduce not in ("sum", "max", "min"), "it is not one sum, maximum or minimum"),
            (acc.value.dtype != "float32", f"it reduces {acc.value.dtype}"),
            (len(acc.iterators) <= len(band) or not maps, "it is not one reduction and maps of its results"),
        )

    @property
    def count(self) -> Index:
        """The number of slices of the reduction, over the group's parameters; 0 if the kernel is not launched."""
        elements = product(self.results) * self.others * self.extents[self.steps_of]
        shares = minimum(MOST_SHARES, elements // SHARE_ELEMENTS, self.extents[self.steps_of] // LINE)
        return where_few(shares, self._tiles())

    @cached_property
    def sharing(self) -> SplitLaunch:
        """The slices, and the kernel that adds their sums."""
        return SplitLaunch(group=self.group, count=self.count, add=self.sums.build)

    @property
    def useless(self) -> Declined | None:
        """Why the reduction is split at no size; None if it is at some."""
        tiles, row = self._tiles(), self.extents[self.steps_of] * self.others
        most = FEW_TILES * (self._elements() if self.tiled else 1) * (row.constant or SHARE_ELEMENTS)
        many = tiles.evaluate(dict.fromkeys(tiles.symbols(), 1)) > FEW_TILES
        return first_refusal(
            (many, f"it has more than {FEW_TILES} tasks"),
            (most < LEAST_SHARES * SHARE_ELEMENTS, "its rows are too short for slices"),
        )

    def _tiles(self) -> Index:
        """Return the tasks of the whole result."""
        *rows, last = self.results or [ONE]
        return product(rows) * (last.ceildiv(self._elements()) if self.tiled else last)

    def build(self) -> Kernel:
        """Build the kernel, and the one after it."""
        return self.sharing.launched(super().build())

    @property
    def launch(self) -> dict[str, Index]:
        """Launch-time values, like ``NestKernel.launch`` plus the number of slices."""
        return self.sharing.launch(super().launch)

    @property
    def family(self) -> Family[NestForm]:
        """The tables of other nests, preceded by the rule that restricts the reduction to a slice."""
        return SPLIT_NEST

    def row(self, body: Body) -> Body:
        """Declare row registers as in other nests, around all rows or vectors of a slice."""
        body = super().row(body)
        return body if self.tiled else share_around(body, self.extents[self.steps_of], SHARE)

    def vector_tile(self, body: Body) -> Body:
        """Build the tile as in other nests, with the steps of a slice around it."""
        return share_around(super().vector_tile(body), self.extents[self.steps_of], SHARE)


def split_rule(loop: Callable[[Any], str]) -> Rule[Any]:
    """Return the rule that runs the loop of the reduction over the steps of a slice, which ``share_around`` binds."""
    return Rule(
        "split", "a slice of the reduction", lambda x, body: share_steps(body, loop(x), V(FIRST_STEP), V(END_STEP)),
        opens=(FIRST_STEP, END_STEP),
    )  # fmt: skip


SPLIT_PRODUCT = replace(PRODUCT, first=(split_rule(lambda _: p("k")),))
SPLIT_NEST = replace(NEST, first=(split_rule(lambda x: str(x.of.steps_of)),))
