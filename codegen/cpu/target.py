"""The CPU that a kernel is generated for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

LEAVES = ("pd_cpu.h", "pd_math.h", "pd_storage.h", "pd_order.h", "pd_amx.h", "pd_amx_emulated.h")
"""Headers of CPU kernels; the first includes the others."""


@dataclass(frozen=True)
class CpuTarget:
    """What code generation needs to know of a processor.

    ``name``: ``avx512``, ``avx2``, ``neon`` or ``generic``. ``width``: float32 lanes. ``tiles``: register tiles
    (rows, vectors) with their share of the peak (docs/cpu.md 2), best first. ``narrow``: lanes of a narrower vector,
    whose operations take half the time where a wide one is made of two; 0: there is none. ``quads``: it multiplies four
    unsigned bytes by four signed ones in each lane and adds them up (VNNI). ``amx``: it has a matrix unit, which
    multiplies tiles of 16 rows of words by 16 columns.
    """

    name: str
    width: int
    tiles: tuple[tuple[int, int, float], ...]
    narrow: int = 0
    quads: bool = False
    amx: bool = False


AVX512 = CpuTarget("avx512", 16, ((8, 3, 1.0), (6, 4, 0.99), (12, 2, 0.94), (16, 1, 0.75)), 8)
AVX2 = CpuTarget("avx2", 8, ((6, 2, 1.0), (4, 3, 0.97), (12, 1, 0.75)))
NEON = CpuTarget("neon", 4, ((8, 2, 1.0), (6, 4, 0.99), (12, 1, 0.8)))


def leaf_headers(width: int) -> dict[str, str]:
    """File name -> text of the headers that kernels for vectors of ``width`` lanes include."""
    folder = files("polydyn.codegen") / "leaf"
    texts = {name: (folder / name).read_text() for name in LEAVES}
    return texts | {LEAVES[0]: f"#define PD_W {width}\n{texts[LEAVES[0]]}"}
