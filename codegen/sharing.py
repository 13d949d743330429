"""How tasks share one reduction (split-K). Every kernel has one of these values:

    Sharing      a task computes whole sums
    SplitLaunch  slices of the reduction are tasks; a second launch adds their sums
    Counted      slices are blocks; the last block to arrive adds their sums (``codegen.cuda.sharing``)
    Cluster      slices are blocks of a cluster, which read each other's sums (``codegen.cuda.sharing``)

The value has the additional buffers, the launch, what a block does after it has stored its sums, and the work. Sums are
always added in the order of the slices, so equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from polydyn.codegen.ir import Body, Compare
from polydyn.codegen.kernel import WORKSPACE, Kernel, Work
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.index import ONE, Index, product
from polydyn.schedules.model import SHARES, Array, Group

V = Index.of


@dataclass(frozen=True)
class Sharing:
    """A task computes whole sums. ``parts``: the number of blocks that share a task.

    ``buffers``: additional buffers of the kernel. ``cluster``: whether the blocks of a task are a cluster.
    """

    parts: int = 1
    word: ClassVar[str] = ""
    buffers: ClassVar[tuple[str, ...]] = ()
    cluster: ClassVar[bool] = False

    @property
    def slices(self) -> Index:
        """The number of slices that are tasks."""
        return ONE

    @property
    def label(self) -> str:
        """The sharing in the names of versions."""
        return f"{self.word}_{self.parts}" if self.parts > 1 else self.word

    def arrays(self, tasks: Index) -> dict[str, Array]:
        """Return the arrays of ``buffers`` for a number of tasks."""
        return {}

    def meet(self) -> Body:
        """Return the synchronisation after a block has stored its sums."""
        return ()

    def finish(self, body: Body) -> Body:
        """Return the epilogues, in the blocks that run them."""
        return body

    def launched(self, kernel: Kernel) -> Kernel:
        """Return the kernel with the launch of all blocks. Its ``tasks`` are those without sharing."""
        return replace(kernel, tasks=kernel.tasks * self.parts)

    def work(self, work: Work) -> Work:
        """Add the work of adding sums to a block's work on its slice."""
        return work


UNSHARED = Sharing()


@dataclass(frozen=True)
class SplitLaunch(Sharing):
    """Slices are tasks, which store their sums in the workspace. The kernel that ``add`` builds adds them.

    ``group``: the group of a slice (``split.partial_group``). ``count``: the number of slices over its parameters
    except ``SHARES``; a launch with fewer than two slices takes another kernel.
    """

    group: Group = field(kw_only=True)
    count: Index = field(kw_only=True)
    add: Callable[[], Kernel] = field(kw_only=True)
    word: ClassVar[str] = "split"

    @property
    def slices(self) -> Index:
        """The number of slices that are tasks, a launch-time symbol."""
        return V(SHARES)

    @cached_property
    def after(self) -> Kernel:
        """The kernel that adds the sums of all slices."""
        return self.add()

    def launch(self, launch: Mapping[str, Index]) -> dict[str, Index]:
        """Return launch-time symbols and the number of slices, on which they may depend."""
        return {SHARES: self.count} | {n: e.subs({SHARES: self.count}) for n, e in launch.items()}

    def launched(self, kernel: Kernel) -> Kernel:
        """Return the kernel with its workspace, the number of slices, and the kernel after it."""
        sums = self.group.arrays[WORKSPACE]
        several = (Compare(">=", self.slices, V(2)),) if kernel.block else ()  # on a CPU the host program decides
        return replace(
            kernel, conditions=(*several, *kernel.conditions), launch=self.launch(kernel.launch), after=(self.after,),
            workspace=product(sums.shape) * ITEMSIZE[sums.dtype],
        )  # fmt: skip
