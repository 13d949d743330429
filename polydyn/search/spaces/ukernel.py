"""FTuner's uKernels (4): alignment rules, CrossPick, SetBound and multi-axis analysis (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from polydyn.search.backbone import Backbone, Loop, Shape, Tile, no_rule
from polydyn.search.cost import blocks_at, compute_ratio, occupancy_ratio, pad_ratio
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.loop_model import preferred
from polydyn.search.spaces.space import Space, Usage, bind, collect, roles, unit_tile, usage, violation


@dataclass(frozen=True)
class Filter:
    """Algorithm 1's hyperparameters, with the paper's values for a V100.

    ``pad``, ``occ``: (min, max) of the thresholds; ``pad_step`` and ``occ_step`` their strides (10 : 1). ``active``:
    zeta, blocks per unit. ``ratio``: psi, the minimum compute-to-memory ratio.
    """

    pad: tuple[float, float] = (0.50, 0.95)
    occ: tuple[float, float] = (0.90, 0.95)
    pad_step: float = 0.01
    occ_step: float = 0.001
    active: int = 2
    ratio: float = 1.0


def factors(n: int) -> set[int]:
    """Return all divisors of a positive number."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return {*small, *(n // d for d in small)}


def axis_sizes(lengths: Iterable[int]) -> list[int]:
    """Return the divisors of an axis' lengths (RegTileRule); for a prime those of its neighbours (53: 52 and 54)."""
    sizes = {1}
    for n in lengths:
        divisors = factors(n) if n > 0 else set()
        sizes |= divisors if len(divisors) != 2 else factors(n - 1) | factors(n + 1)
    return sorted(sizes)


def align(backbone: Backbone, hardware: Hardware, shapes: Sequence[Shape]) -> Iterator[Tile]:
    """Yield every register tile with every local tile that the alignment rules allow (HardwareAlign).

    GPU: ``t`` is the tile of one thread (the paper's uKernels use no tensor cores). CPU: ``w`` is the register tile.
    The innermost parallel axis (row-major) takes whole transactions or vectors; k advances in multiples of 8.
    """
    unit = unit_tile(backbone, preferred(backbone, hardware)) if hardware.kind == "cpu" else {}
    level = "w" if hardware.kind == "cpu" else "t"
    lengths = {x.name: _lengths(backbone, x, shapes) for x in backbone.loops}
    register = [_register_sizes(backbone, hardware, x, unit, lengths[x.name]) for x in backbone.loops]
    for reg in product(*register):
        local = [
            _local_sizes(backbone, hardware, x, r, lengths[x.name]) for x, r in zip(backbone.loops, reg, strict=True)
        ]
        for block in product(*local):
            sizes = {f"b.{x.name}": v for x, v in zip(backbone.loops, block, strict=True)}
            sizes |= {f"{level}.{x.name}": v for x, v in zip(backbone.loops, reg, strict=True)}
            sizes |= {f"v.{n}": v for n, v in unit.items()}
            yield bind(backbone, hardware, sizes)


def _lengths(backbone: Backbone, loop: Loop, shapes: Sequence[Shape]) -> list[int]:
    return sorted({backbone.sizes(s)[loop.name] for s in shapes}) if loop.extent is None else [loop.extent]


def _register_sizes(
    backbone: Backbone, hardware: Hardware, loop: Loop, unit: Mapping[str, int], lengths: list[int]
) -> list[int]:
    role_of = {x.name: role for role, x in roles(backbone).items()}
    role, step = role_of.get(loop.name), unit.get(loop.name, 1)
    if role is None or role == "k":
        return [1]
    if step > 1:
        return [step * f for f in (1, 2, 3, 4)]
    return [f for f in axis_sizes(lengths) if f <= (hardware.ways + 6 if hardware.kind == "cpu" else 16)]


def _local_sizes(backbone: Backbone, hardware: Hardware, loop: Loop, register: int, lengths: list[int]) -> list[int]:
    """Return the local tile sizes (SmemTileRule): the major axis first, the others grow with the register tile."""
    role_of = {x.name: role for role, x in roles(backbone).items()}
    role = role_of.get(loop.name)
    if role is None:
        return [1]
    if hardware.kind == "cpu":
        return [192, 384, 768] if role == "k" else [register, 4 * register, 16 * register]
    if role == "k":
        return [8, 16, 32]
    if role == "n":
        return [register * p for p in (4, 8, 16, 32)]
    allowed = {f for f in axis_sizes(lengths) if f % register == 0 and f <= 64 * register}
    return sorted(allowed | {register})


def _shares(backbone: Backbone, hardware: Hardware, tile: Tile, shape: Shape) -> tuple[float, float]:
    blocks = blocks_at(backbone, tile, backbone.sizes(shape))
    return pad_ratio(backbone, hardware, tile, shape), occupancy_ratio(blocks, hardware.units)


def crosses(pad: float, occ: float, rule: Filter) -> bool:
    """Return whether some step of the trade-off between padding and full units is satisfied (CrossPick).

    This is true if some step i has ``pad >= pad_min + i*pad_step`` and ``occ >= occ_max - i*occ_step``.

    The thresholds move in opposite directions, so it is enough to test the last step that ``pad`` still passes.
    """
    last = round(min((rule.pad[1] - rule.pad[0]) / rule.pad_step, (rule.occ[1] - rule.occ[0]) / rule.occ_step))
    if pad < rule.pad[0]:
        return False
    i = min(last, int((pad - rule.pad[0]) / rule.pad_step + 1e-9))
    return occ >= rule.occ[1] - i * rule.occ_step - 1e-12


def in_bound(hardware: Hardware, used: Usage, blocks: int, rule: Filter) -> bool:
    """Return whether the block's registers fit the unit, together with the workload's active blocks (SetBound, Eq. 4).

    For a workload with fewer blocks than units, the printed ``min(K.wkl.block, zeta)`` is below 1; here it is at least
    one block.
    """
    bound = max(1, min(-(-blocks // hardware.units), rule.active))
    return hardware.kind == "cpu" or used.registers * used.threads * bound <= hardware.registers


def saturates(backbone: Backbone, hardware: Hardware, tile: Tile, shape: Shape, rule: Filter) -> bool:
    """Return whether there are enough blocks for every unit, and the work is compute bound (Eq. 5 and 6)."""
    active = hardware.units * (1 if hardware.kind == "cpu" else rule.active)
    blocks = blocks_at(backbone, tile, backbone.sizes(shape))
    return blocks >= active and compute_ratio(backbone, hardware, tile, shape) >= rule.ratio


def ukernel_space(
    backbone: Backbone,
    hardware: Hardware,
    shapes: Sequence[Shape],
    rule: Filter | None = None,
    generator: Callable[[Tile], str | None] = no_rule,
) -> Space:
    """Return FTuner's uKernel set for the given workloads: the union of the tiles that pass all four filters.

    ``generator``: returns the rule of the code generator that a tile breaks; it runs before the filters, like
    alignment.

    A workload that is too small or too memory bound for Eq. 5 and 6 keeps its ten tiles with the highest SIA inputs
    instead. The printed algorithm would leave it without a kernel.
    """
    rule = rule or Filter()
    used: dict[Tile, Usage] = {}
    dropped: list[tuple[Tile, str | None]] = []
    for tile in align(backbone, hardware, shapes):
        usage_of = usage(backbone, hardware, tile)
        broken = generator(tile) or violation(hardware, usage_of)
        if broken:
            dropped.append((tile, broken))
        else:
            used[tile] = usage_of
    tiles = {t for shape in shapes for t in _for_shape(backbone, hardware, used, shape, rule)}
    return collect("ftuner", [*dropped, *((t, None if t in tiles else "Algorithm 1") for t in used)])


def _for_shape(
    backbone: Backbone, hardware: Hardware, tiles: Mapping[Tile, Usage], shape: Shape, rule: Filter
) -> list[Tile]:
    sizes = backbone.sizes(shape)
    bounded = [t for t, use in tiles.items() if in_bound(hardware, use, blocks_at(backbone, t, sizes), rule)]
    shares = {t: _shares(backbone, hardware, t, shape) for t in bounded}
    picked = [t for t in bounded if crosses(*shares[t], rule)]
    full = [t for t in picked if saturates(backbone, hardware, t, shape, rule)]
    return full or sorted(picked or bounded, key=lambda t: (-sum(shares[t]), t))[:10]
