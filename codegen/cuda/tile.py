"""The tile of a CUDA product: what one binary is built for."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.codegen.cuda.instructions import INSTRUCTIONS, Instruction
from polydyn.schedules.tree.gpu import GpuTile


@dataclass(frozen=True)
class CudaTile:
    """A binary's tile: block ``bm x bn x bk`` elements, a unit's share ``wm x wn``, ``stages`` of the ring.

    ``instruction``: its name; ``blocks``: wanted per multiprocessor (bounds the registers).
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
        """Loads of row and of column fragments."""
        return self.wm // self.kind.loads, self.wn // self.kind.loads

    @property
    def sets(self) -> int:
        """Sets of registers for fragments: two where those of an instruction step are loaded during the one before."""
        return 2 if self.kind.warp and self.bk > self.shape[2] else 1

    def sizes(self) -> GpuTile:
        """The sizes as schedules want them."""
        m, n, k = self.shape
        fragments, (rows, columns) = (self.wm // m, self.wn // n), self.loads
        return GpuTile(
            (self.bm // self.wm, self.bn // self.wn), fragments, (m, n), (self.bk // k, k),
            (fragments[0] // rows, fragments[1] // columns), not self.kind.warp, self.kind.warp,
        )  # fmt: skip
