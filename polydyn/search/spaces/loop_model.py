"""TSCompiler's search space (5.1): block, warp and instruction tiles with hard and soft constraints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from polydyn.search.backbone import Backbone, Tile
from polydyn.search.hardware import Hardware, Instruction
from polydyn.search.spaces.space import Space, aligned, bind, collect, limit_of, roles, unit_tile, usage, violation

_STAGES = (2, 3, 4)
_MAX_WARPS = 16
_TRANSACTION = 8
"""Minimum tile of the innermost reduction on a GPU: one aligned memory transaction per row."""
_UNROLL = (1, 4)
"""Unroll factors of the innermost reduction loop on a CPU."""


def preferred(backbone: Backbone, hardware: Hardware) -> Instruction:
    """Return the preferred instruction (soft constraints): tensor before vector before scalar, if the loops allow it.

    An instruction is allowed if every loop that its tile extends over exists and is not known to be shorter than the
    tile. UnsupportedError: the hardware has no instruction for the dtype.
    """
    usable = hardware.usable(backbone.dtype)
    return next((i for i in usable if _fits(backbone, i)), usable[-1])


def _fits(backbone: Backbone, instruction: Instruction) -> bool:
    by_role = roles(backbone)
    for role, size in zip("mnk", instruction.tile, strict=True):
        loop = by_role.get(role)
        if size > 1 and (loop is None or (loop.extent is not None and loop.extent < size)):
            return False
    return True


@lru_cache(maxsize=1)  # consecutive groups often have equal loops
def loop_model(backbone: Backbone, hardware: Hardware) -> Space:
    """Return all (block, warp, instruction) tiles in which each level divides the next and all hard constraints hold.

    GPU: ``b`` thread block, ``w`` warp, ``v`` instruction, ``stages`` of the copy pipeline, all at compile time.
    CPU: ``b`` cache tile (of parallel loops at launch), ``w`` register tile (``w.k``: unrolling), ``v`` vector.
    """
    unit = unit_tile(backbone, preferred(backbone, hardware))
    return collect("tscompiler", _proposals(backbone, hardware, unit))


def _proposals(backbone: Backbone, hardware: Hardware, unit: dict[str, int]) -> Iterator[tuple[Tile, str | None]]:
    names = [x.name for x in backbone.loops]
    gpu = hardware.kind == "gpu"
    for warp in product(*(_warp_sizes(backbone, hardware, n, unit) for n in names)):
        for block in product(*(_block_sizes(backbone, hardware, n, w) for n, w in zip(names, warp, strict=True))):
            for stages in _STAGES if gpu else (1,):
                sizes = {f"b.{n}": v for n, v in zip(names, block, strict=True)}
                sizes |= {f"w.{n}": v for n, v in zip(names, warp, strict=True)}
                sizes |= {f"v.{n}": v for n, v in unit.items()}
                tile = bind(backbone, hardware, sizes | {"stages": stages} if gpu else sizes)
                used = usage(backbone, hardware, tile)
                rule = violation(hardware, used)
                if gpu and used.threads > _MAX_WARPS * hardware.lanes:
                    rule = rule or "warps per block"
                yield tile, rule


def _warp_sizes(backbone: Backbone, hardware: Hardware, name: str, unit: dict[str, int]) -> Sequence[int]:
    role_of = {x.name: role for role, x in roles(backbone).items()}
    role, step = role_of.get(name), unit[name]
    (loop,) = (x for x in backbone.loops if x.name == name)
    if role is None:
        return (1,)
    if hardware.kind == "gpu":
        return (step,) if role == "k" else aligned(step, limit_of(loop, step, 128))
    if role == "k":
        return _UNROLL
    rows = hardware.thread_registers if role == "m" else step * hardware.thread_registers
    return aligned(step, limit_of(loop, step, rows), thirds=True)


def _block_sizes(backbone: Backbone, hardware: Hardware, name: str, warp: int) -> Sequence[int]:
    role_of = {x.name: role for role, x in roles(backbone).items()}
    role = role_of.get(name)
    (loop,) = (x for x in backbone.loops if x.name == name)
    if role is None:
        return (1,)
    if hardware.kind == "gpu":
        step = max(warp, _TRANSACTION) if role == "k" else warp
        return aligned(step, limit_of(loop, step, 64 if role == "k" else 256))
    if role == "k":
        return aligned(192, limit_of(loop, 192, 1536))
    return (warp, 4 * warp, 16 * warp)
