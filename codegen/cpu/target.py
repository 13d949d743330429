"""The CPU that a kernel is generated for."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files

LEAVES = ("pd_cpu.h", "pd_math.h", "pd_storage.h", "pd_order.h", "pd_amx.h", "pd_amx_emulated.h")
"""Headers of CPU kernels; the first includes the others."""


STARTED, LOADED, LATENCY = 2, 2, 4
"""Vector multiply-adds, and loads of a vector from the first cache, in a cycle; cycles that one multiply-add takes."""
IN_FLIGHT = STARTED * LATENCY
"""Independent multiply-adds that hide the latency of one."""
MOST_ROWS = 16
"""Of a register tile: each has a pointer."""
FEW_ROWS, CROWDED = 8, 0.94
"""Rows of a register tile that stay in the first cache together whatever their stride is; the speed of more of them
(measured with 8 ways and with 12: 0.87 to 1.0)."""
OVERLAP = 6
"""How nearly the least of what a tile does is hidden behind the most (the exponent of a norm)."""


@dataclass(frozen=True)
class Core:
    """What sizes of kernels follow from, of a core. The defaults stand for one that nobody has asked or measured.

    ``registers``: of vectors. ``l2``: bytes of its second data cache; ``read``: bytes that come from there in a cycle.
    """

    registers: int = 32
    l2: int = 1 << 20
    read: int = 32

    @property
    def sums(self) -> int:
        """Registers of a tile that hold sums; the others hold operands."""
        return self.registers * 3 // 4

    @property
    def floats(self) -> int:
        """Elements of float32 that the second cache holds."""
        return self.l2 // 4

    @property
    def shared(self) -> int:
        """Elements of a column operand that all blocks of rows read from there: half of it."""
        return self.floats // 2

    @property
    def strip(self) -> int:
        """Bytes of a footprint that stay there beside the columns."""
        return self.l2 * 3 // 8


@dataclass(frozen=True)
class CpuTarget:
    """What code generation needs to know of a processor.

    ``name``: ``avx512``, ``avx2``, ``neon`` or ``generic``. ``width``: float32 lanes. ``narrow``: lanes of a narrower
    vector, whose operations take half the time where a wide one is made of two; 0: there is none. ``quads``: it
    multiplies four unsigned bytes by four signed ones in each lane and adds them up (VNNI). ``amx``: it has a matrix
    unit, which multiplies tiles of 16 rows of words by 16 columns. ``core``: no part of what records know a group by.
    """

    name: str
    width: int
    narrow: int = 0
    quads: bool = False
    amx: bool = False
    core: Core = field(default=Core(), repr=False)

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Register tiles (rows, vectors) that fill the registers: beside the sums one is left for each vector of
        columns, and one for a row.
        """
        sums, registers = self.core.sums, self.core.registers
        return tuple((min(MOST_ROWS, sums // v), v) for v in range(1, 5) if sums % v == 0 and sums + v < registers)

    def share(self, rows: int, vectors: int) -> float:
        """The share of the peak that a tile reaches: in each step of a reduction the multiply-adds hide the loads of
        rows and columns and the columns' way from the second cache, if there are enough of them.
        """
        sums = rows * vectors
        others = (rows + vectors) / LOADED, vectors * self.width * 4 / self.core.read
        hidden: float = (1 + sum((x * STARTED / sums) ** OVERLAP for x in others)) ** (-1 / OVERLAP)
        return hidden * min(1.0, sums / IN_FLIGHT) * (CROWDED if rows > FEW_ROWS else 1)


AVX512 = CpuTarget("avx512", 16, 8)
AVX2 = CpuTarget("avx2", 8, core=Core(registers=16))
NEON = CpuTarget("neon", 4)


def leaf_headers(width: int) -> dict[str, str]:
    """File name -> text of the headers that kernels for vectors of ``width`` lanes include."""
    folder = files("polydyn.codegen") / "leaf"
    texts = {name: (folder / name).read_text() for name in LEAVES}
    return texts | {LEAVES[0]: f"#define PD_W {width}\n{texts[LEAVES[0]]}"}
