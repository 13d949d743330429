"""The tile of a CUDA product: the compile-time configuration of one binary."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.codegen.cuda.instructions import INSTRUCTIONS, Instruction
from polydyn.schedules.tree.gpu import GpuTile


@dataclass(frozen=True)
class CudaTile:
    """A binary's tile: block ``bm x bn x bk`` elements, a unit's part ``wm x wn``, ``stages`` of the ring.

    ``instruction``: its name; ``blocks``: targeted blocks per multiprocessor (bounds the registers).
    """

    instruction: str
    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int
    blocks: int = 1

    @property
    def kind(self) -> Instruction:
        """The instruction."""
        return INSTRUCTIONS[self.instruction]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.bm // self.wm * (self.bn // self.wn) * self.kind.threads

    @property
    def shape(self) -> tuple[int, int, int]:
        """The instruction's m, n, k."""
        return self.kind.shape

    @property
    def loads(self) -> tuple[int, int]:
        """Numbers of loads of row fragments and of column fragments."""
        return self.wm // self.kind.loads, self.wn // self.kind.loads

    @property
    def sets(self) -> int:
        """Register sets for fragments: two if the fragments of an instruction step are loaded during the previous step.
        """
        return 2 if self.kind.warp and self.bk > self.shape[2] else 1

    def sizes(self) -> GpuTile:
        """Return the sizes for schedules."""
        m, n, k = self.shape
        fragments, (rows, columns) = (self.wm // m, self.wn // n), self.loads
        return GpuTile(
            (self.bm // self.wm, self.bn // self.wn), fragments, (m, n), (self.bk // k, k),
            (fragments[0] // rows, fragments[1] // columns), not self.kind.warp, self.kind.warp,
        )  # fmt: skip
