"""The CPU that a kernel is generated for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.resources import files

LEAVES = (
    "pd_cpu.h", "pd_clang.h", "pd_math.h", "pd_functions.h", "pd_double.h", "pd_storage.h", "pd_short.h",
    "pd_order.h", "pd_amx.h", "pd_amx_emulated.h",
)  # fmt: skip
"""Headers of CPU kernels. The first one includes the others."""


FMAS_PER_CYCLE, LOADS_PER_CYCLE, FMA_LATENCY = 2, 2, 4
"""Vector multiply-adds started, and vectors loaded from L1, per cycle; latency of a multiply-add in cycles."""
INDEPENDENT_FMAS = FMAS_PER_CYCLE * FMA_LATENCY
"""Independent multiply-adds that hide the latency of one."""
MOST_ROWS = 16
"""Maximum rows of a register tile: each has a pointer."""
FEW_ROWS, MANY_ROWS_SPEED = 8, 0.94
"""Rows of a register tile that fit L1 together for every stride, and the relative speed of tiles with more rows
(measured with 8 ways and with 12: 0.87 to 1.0)."""
LEAST_LANES = 4
"""Minimum lanes of the vectors of a kernel."""
OVERLAP = 6
"""Exponent of the norm that models how well compute hides loads."""


@dataclass(frozen=True)
class Core:
    """The properties of a core that determine kernel sizes. The defaults are for an unknown, unmeasured core.

    ``registers``: vector registers. ``l2``: bytes of the L2 data cache; ``read``: bytes per cycle from L2.
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
        """float32 elements that L2 holds."""
        return self.l2 // 4

    @property
    def shared(self) -> int:
        """Elements of a column operand that all blocks of rows read from L2: half of it."""
        return self.floats // 2

    @property
    def strip(self) -> int:
        """Bytes of a footprint that stay in L2 next to the columns."""
        return self.l2 * 3 // 8


@dataclass(frozen=True)
class CpuTarget:
    """The properties of a processor that code generation uses.

    ``name``: ``avx512``, ``avx2``, ``neon`` or ``generic``. ``width``: float32 lanes. ``narrow``: lanes of a narrower
    vector whose operations take half the time, if the processor splits wide vectors in two; otherwise 0. ``quads``: it
    multiplies four unsigned bytes by four signed bytes in each lane and adds the products (VNNI). ``amx``: it has a
    matrix unit, which multiplies tiles of 16 rows of words by 16 columns. ``core``: not part of the key of a group in
    records.
    """

    name: str
    width: int
    narrow: int = 0
    quads: bool = False
    amx: bool = False
    core: Core = field(default=Core(), repr=False)

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Register tiles (rows, vectors) that fill the registers.

        One register per column vector and one for a row remain.
        """
        sums, registers = self.core.sums, self.core.registers
        return tuple((min(MOST_ROWS, sums // v), v) for v in range(1, 5) if sums % v == 0 and sums + v < registers)

    @property
    def for_doubles(self) -> CpuTarget:
        """The description for kernels of 8-byte elements: vectors and caches hold half as many elements."""
        if self.width <= LEAST_LANES:
            return self
        core = replace(self.core, l2=self.core.l2 // 2, read=self.core.read // 2)
        return replace(self, width=self.width // 2, narrow=0, quads=False, amx=False, core=core)

    def share(self, rows: int, vectors: int) -> float:
        """Return the fraction of peak performance that a tile reaches.

        In each step of the reduction, the multiply-adds hide the loads of rows and columns, and the transfer of columns
        from L2, if there are enough of them.
        """
        sums = rows * vectors
        others = (rows + vectors) / LOADS_PER_CYCLE, vectors * self.width * 4 / self.core.read
        hidden: float = (1 + sum((x * FMAS_PER_CYCLE / sums) ** OVERLAP for x in others)) ** (-1 / OVERLAP)
        return hidden * min(1.0, sums / INDEPENDENT_FMAS) * (MANY_ROWS_SPEED if rows > FEW_ROWS else 1)


AVX512 = CpuTarget("avx512", 16, 8)
AVX2 = CpuTarget("avx2", 8, core=Core(registers=16))
NEON = CpuTarget("neon", 4)


def leaf_headers(width: int) -> dict[str, str]:
    """Return file name -> text of the headers that kernels for vectors of ``width`` lanes include."""
    folder = files("polydyn.codegen") / "leaf"
    texts = {name: (folder / name).read_text() for name in LEAVES}
    return texts | {LEAVES[0]: f"#ifndef PD_W\n{lanes_text(width)}#endif\n{texts[LEAVES[0]]}"}


def lanes_text(width: int) -> str:
    """Return the line at the beginning of a unit whose vectors have ``width`` lanes; empty for 0, which keeps the
    width of the headers.
    """
    return f"#define PD_W {width}\n" if width else ""
