"""CUDA kernels for long reductions into few results: slices of the reduction have separate threads.

A second launch adds their sums. Examples are means over pixels, channels last, and sums of columns. A thread has a
vector of adjacent results.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cpu.split import END_STEP, FIRST_STEP, SplitNest, share_around, split_rule
from polydyn.codegen.cuda.row_loops import THREADS
from polydyn.codegen.cuda.rows import MOST_LANES, WIDE, CudaNestKernel, Version
from polydyn.codegen.family import Family
from polydyn.codegen.ir import Body
from polydyn.codegen.kernel import WORKERS, Kernel, with_block
from polydyn.codegen.sharing import SplitLaunch
from polydyn.codegen.split import combining_group, partial_group
from polydyn.schedules.errors import Declined, first_refusal
from polydyn.schedules.expr import ITEMSIZE, loads
from polydyn.schedules.index import Index, maximum, minimum, product
from polydyn.schedules.model import SHARE, Group
from polydyn.schedules.tree.rewrites import split_reduction

LEAST_STEPS = 16
"""Minimum steps of a slice: twice the loads that a thread has in flight."""
BLOCKS, MOST_SHARES = 4, 1024
"""Blocks per multiprocessor that the slices should give; maximum slices, which the second launch reads one by one."""
V = Index.of


class CudaSplitNest(CudaNestKernel):
    """Builds the kernels of ``group``, one reduction and maps of its results over the iterators ``band``."""

    bound = FIRST_STEP, END_STEP

    def __init__(self, name: str, group: Group, band: tuple[str, ...]) -> None:
        partial = split_reduction(partial_group(group))
        phases = {s.name: int(s.role == "epilogue") for s in partial.statements}
        super().__init__(f"{name}_split", partial, (SHARE, *band), phases)
        self.steps_of = partial.backbone.iterators[len(self.prefix)]
        self.sums = CudaNestKernel(f"{name}_sum", *combining_group(group))

    @staticmethod
    def refusal(group: Group, band: tuple[str, ...]) -> Declined | None:
        """Return why a group is no such reduction, long enough for slices; None if it is."""
        if not band:
            return Declined("its results are one number")
        if refusal := SplitNest.refusal(group, band):
            return refusal
        steps = dict(group.backbone.iters)[group.backbone.iterators[len(band)]].constant
        few = steps is not None and steps < 2 * LEAST_STEPS
        return first_refusal((few, f"{steps} steps are fewer than {2 * LEAST_STEPS}"))

    @property
    def shares(self) -> Index:
        """The number of slices, over the group's parameters: enough threads to fill the device, or fewer."""
        vectors = product(self.plain.extents[x] for x in self.prefix[1:]) // self._vector()
        threads = V(WORKERS) * (BLOCKS * THREADS)
        steps = self.plain.extents[self.steps_of]
        return minimum(MOST_SHARES, threads // maximum(1, vectors), steps // LEAST_STEPS)

    def versions(self) -> tuple[Kernel, ...]:
        """Build the slices by vectors, followed by their sum; return nothing without vectors."""
        sharing = SplitLaunch(group=self.group, count=self.shares, add=lambda: self.sums.build("columns")[-1])

        def shared(k: Kernel) -> Kernel:
            work = k.device.work.shared_by(sharing.slices) if k.device.work else None
            return replace(sharing.launched(with_block(k, work=work)), version=f"{sharing.label}_{k.version}")

        return tuple(map(shared, self.wide()))

    def _vector(self) -> int:
        """Return the elements of a vector. The loads determine it: sums are float32, stored in pieces of 16 bytes."""
        return min(MOST_LANES, 16 // max(ITEMSIZE[x.dtype] for x in loads(self.group.backbone.value)))

    @property
    def of_vectors(self) -> Family[Version]:
        """The tables of other nests, preceded by the rule that restricts the reduction to a slice."""
        return SPLIT_ROWS

    def around(self, body: Body) -> Body:
        """Bind the steps of a slice."""
        return share_around(body, self.plain.extents[self.steps_of], SHARE)


SPLIT_ROWS = replace(WIDE, first=(split_rule(lambda x: str(x.of.steps_of)),))
