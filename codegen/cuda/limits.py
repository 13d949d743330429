"""Limits of a CUDA product's tile: the hard constraints of the code generator, in one place.

``broken_rule`` names the rule that a tile breaks before its text is generated. The rules cover the support of
``product.TiledProduct``, the proof (``schedules.prove``), and the block limits of all devices. ``shared_bytes`` and
``registers`` give the demands to compare with a particular device. The real register count of a kernel is known only
after compilation.
"""

from __future__ import annotations

from polydyn.codegen.cuda.instructions import INSTRUCTIONS
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.work import WARP, bounded_registers
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.schedules.expr import FLOAT8, ITEMSIZE
from polydyn.schedules.tree.gpu import SLAB, STAGED

LANES = (4, 8)
"""Rows and columns of threads that act as a warp if each thread multiplies its own elements."""
TF32 = "tf32"
"""The name that replaces the dtype of float32 operands that are rounded to tf32."""
PRODUCT_INSTRUCTION = {
    "float32": "fma", "int32": "fma", TF32: "tf32", **dict.fromkeys(HALF, "mma"), **dict.fromkeys(BYTES, "imma"),
    **dict.fromkeys(FLOAT8, "qmma"),
}  # fmt: skip
"""Dtype of stored operands -> the instruction of their tiles."""
MOST_THREADS, MOST_REGISTERS = 1024, 255
"""Maximum threads of a block, and registers of a thread."""
ADDRESSES = 32
"""Registers of a thread in addition to sums and fragments."""
WIDEST_COPY_BYTES = 16
"""Bytes of the widest copy: shared arrays begin at multiples of it."""


def grain(instruction: str) -> tuple[int, int, int]:
    """Return (rows, columns, steps) that the part of a warp must be a multiple of.

    Warp instructions load fragments of columns in pairs and stage them by slabs. Threads have one element each.
    """
    m, _, k = INSTRUCTIONS[instruction].shape
    return (m, SLAB, k) if INSTRUCTIONS[instruction].warp else (*LANES, k)


def of_warp(instruction: str, rows: int, columns: int) -> tuple[int, int]:
    """Convert a warp's part to a unit's part: the same, or the part of one of its threads."""
    return (rows, columns) if INSTRUCTIONS[instruction].warp else (rows // LANES[0], columns // LANES[1])


def warp_part(tile: CudaTile) -> tuple[int, int]:
    """Return the rows and columns of a warp, the inverse of ``of_warp``."""
    return (tile.wm, tile.wn) if tile.kind.warp else (tile.wm * LANES[0], tile.wn * LANES[1])


def shared_bytes(tile: CudaTile, dtypes: tuple[str, str], sums: str) -> int:
    """Return a block's bytes of shared memory: the ring, later reused for the staged rows of the warps' sums."""
    sides = zip((tile.bm, tile.bn), dtypes, strict=True)
    ring = sum(_align(mn * tile.bk * tile.stages * ITEMSIZE[d]) for mn, d in sides)
    stage = tile.threads // WARP * STAGED * SLAB * ITEMSIZE[sums] if tile.kind.warp else 0
    return max(ring, stage)


def _align(size: int) -> int:
    return -(-size // WIDEST_COPY_BYTES) * WIDEST_COPY_BYTES


def registers(tile: CudaTile) -> int:
    """Estimate the registers of a thread: sums, fragments of both operands, addresses."""
    (m, n, _), kind = tile.shape, tile.kind
    rows, columns = tile.wm // m, tile.wn // n
    sums = rows * columns * (4 if kind.warp else 1)
    return sums + (rows * kind.registers[0] + columns * kind.registers[1]) * tile.sets + ADDRESSES


def broken_rule(tile: CudaTile, dtypes: tuple[str, str]) -> str | None:
    """Return the name of the rule that a tile breaks for operands of these dtypes, or None."""
    kind = INSTRUCTIONS.get(tile.instruction)
    if kind is None or tile.instruction not in PRODUCT_INSTRUCTION.values() or not set(dtypes) <= set(kind.dtypes):
        return f"{tile.instruction} does not multiply {' and '.join(dict.fromkeys(dtypes))}"
    sizes = (tile.bm, tile.bn, tile.bk, tile.wm, tile.wn)
    if min(*sizes, tile.blocks) < 1 or any(b & (b - 1) for b in sizes[:3]):
        return "sides of a block are powers of two, which swizzles permute"
    rows, columns, steps = grain(tile.instruction) if kind.warp else (1, 1, 1)
    least = 2 * WIDEST_COPY_BYTES  # a copy is a nest of two loops
    sides = zip((least if kind.of_bytes else tile.bm, tile.bn), dtypes, strict=True)
    rules = {
        f"a unit takes multiples of {rows} x {columns}": tile.wm % rows or tile.wn % columns,
        f"a step of the ring is a multiple of {steps}": tile.bk % steps,
        f"sides and steps of a block are at least {least} bytes": any(
            min(mn, tile.bk) * ITEMSIZE[d] < least for mn, d in sides
        ),
        "units divide the block": tile.bm % tile.wm or tile.bn % tile.wn,
        "a ring has at least two stages": tile.stages < 2,
    }
    for rule, wrong in rules.items():
        if wrong:
            return rule
    if tile.threads % WARP or tile.threads > MOST_THREADS:
        return f"{tile.threads} threads: a block has whole warps, at most {MOST_THREADS} threads"
    most = bounded_registers(tile.threads, tile.blocks)
    if registers(tile) > min(most, MOST_REGISTERS):
        return f"{registers(tile)} registers of a thread, {tile.blocks} blocks of a multiprocessor leave {most}"
    return None
