"""Cost models: the papers' formulas in the form used (``docs/papers.md`` has them as printed, with the errata).

Each model returns the cost of one kernel as an ``Index`` over the extents of the dynamic loops; lower is better. Times
are whole picoseconds, so sums are exact, and the same expression can be evaluated here, explained, and printed into the
host program. Values stay below 2**63 for times below 100 days and grids below 10**7 blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from polydyn.schedules.index import Index, IndexLike, maximum, minimum, product
from polydyn.search.backbone import Backbone, Shape, Tile
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.space import Usage

PICO = 10**12
_UNIT = 1 << 10
"""The number 1 as a fixed-point ratio inside an Index."""


@dataclass(frozen=True)
class MacroKernel:
    """A kernel with its resources and measured times.

    Times are seconds from records or from an analytical model. A full wave (as many blocks as fit the machine) takes
    ``fixed`` + ``step`` per block step of the reduction; ``alone_*`` is the same with one block per unit. ``one_row``,
    ``three_rows``: on a CPU, the time of a register tile with that many live rows relative to a full one. With dynamic
    columns there is also ``one_vector``, the relative time of one vector of all rows, and ``least``, the relative time
    of one vector of one row.
    """

    tile: Tile
    used: Usage
    fixed: float
    step: float
    alone_fixed: float
    alone_step: float
    one_row: float = 0.0
    three_rows: float = 0.0
    one_vector: float = 0.0
    least: float = 0.0


def picoseconds(seconds: float) -> int:
    """Return whole picoseconds; a time above zero is at least one."""
    return max(math.ceil(seconds * PICO - 1e-6), 0)


def grid(backbone: Backbone, tile: Tile) -> Index:
    """Return the number of blocks: the product of the parallel loops' tile counts."""
    block = tile.level("b")
    return product(backbone.extent(x.name).ceildiv(block[x.name]) for x in backbone.parallel)


def blocks_at(backbone: Backbone, tile: Tile, sizes: Shape) -> int:
    """Evaluate ``grid`` for given extents, in plain integers."""
    block = tile.level("b")
    return math.prod(-(-sizes[x.name] // block[x.name]) for x in backbone.parallel)


def steps(backbone: Backbone, tile: Tile) -> Index:
    """Return the block steps of the reduction per block (0 for an empty reduction, 1 if there is none)."""
    block = tile.level("b")
    return product(backbone.extent(x.name).ceildiv(block[x.name]) for x in backbone.reduction)


# -- TSCompiler 6: waves -------------------------------------------------------------------------------------


def blocks_per_unit(used: Usage, hardware: Hardware) -> int:
    """Return the blocks resident on one unit: the *floor* of each resource quotient, and the thread and block limits.

    It is 0 if a single block does not fit. The printed formula has no floors and only two of the four limits.
    """
    if hardware.kind == "cpu":
        return 1
    limits = [hardware.unit_blocks, hardware.unit_threads // used.threads]
    if used.local:
        limits.append(hardware.local_bytes // used.local)
    if used.registers:
        limits.append(hardware.registers // (used.registers * used.threads))
    return min(limits)


def wave_cost(wave: IndexLike, blocks: IndexLike, per_wave: int) -> Index:
    """TSCompiler: ``T_s * ceil(blocks / blocks per wave)``."""
    return Index.of(wave) * Index.of(blocks).ceildiv(per_wave)


def tscompiler(backbone: Backbone, hardware: Hardware, kernel: MacroKernel) -> Index:
    """Return TSCompiler's estimate: the measured wave latency times the number of waves."""
    wave = picoseconds(kernel.fixed) + picoseconds(kernel.step) * steps(backbone, kernel.tile)
    per_wave = hardware.units * max(1, blocks_per_unit(kernel.used, hardware))
    return wave_cost(wave, grid(backbone, kernel.tile), per_wave)


# -- Vortex 5.2: recursion over levels -----------------------------------------------------------------------


def temporal_cost(load: int, store: int, lower: IndexLike, spatial: IndexLike = 1, reduction: IndexLike = 1) -> Index:
    """Return Vortex Eq. 2 for ``spatial * reduction`` serial iterations, in picoseconds.

    ``load + (n-1) max(load, lower) + lower + store`` equals ``n max + min + store``. The second form is also right for
    an empty loop, and each spatial iteration stores its own result (Algorithm 1, line 11).
    """
    s, low = Index.of(spatial), Index.of(lower)
    n = s * Index.of(reduction)
    return n * maximum(load, low) + minimum(load, low) * minimum(n, 1) + s * store


def parallel_factor(iterations: IndexLike, units: int) -> Index:
    """Return Vortex Eq. 3: rounds of the parallel loop over the hardware's units."""
    return Index.of(iterations).ceildiv(units)


def vortex(backbone: Backbone, hardware: Hardware, kernel: MacroKernel) -> Index:
    """Return Vortex's run-time estimate: the top level analytically (Eq. 2-4), the level below measured (hybrid).

    Loads and stores use the unit's share of the memory bandwidth; ``alone_step`` is the measured cost of the level
    below. The level-1 loop is the reduction; the grid (level 2) is parallel over the units. On a CPU, polydyn's kernels
    copy nothing at level 1 (Table 1's "-"): they read memory at level 0, which is measured.
    """
    block = kernel.tile.level("b")
    read, written = backbone.bytes_moved(block) if hardware.kind == "gpu" else (0, 0)
    share = hardware.memory_bandwidth / hardware.units
    lower = picoseconds(kernel.alone_step)
    inner = temporal_cost(
        picoseconds(read / share), picoseconds(written / share), lower, 1, steps(backbone, kernel.tile)
    )
    return parallel_factor(grid(backbone, kernel.tile), hardware.units) * inner


# -- DietCode 5.3: local, spatial and padding factors --------------------------------------------------------


def padded(size: int, step: int) -> int:
    """Return ``pad(size, step)``, the next multiple."""
    return -(-size // step) * step


def dietcode(backbone: Backbone, hardware: Hardware, kernel: MacroKernel) -> Index:
    """Return DietCode's estimate (Eq. 3 to 5) as a time, with k = 1: a grid takes whole waves.

    ``f_spatial`` is then the blocks over the blocks rounded up to full waves. Work over ``f_local * f_spatial * f_pad``
    is the time of a wave times the number of waves: TSCompiler's estimate.
    """
    return tscompiler(backbone, hardware, kernel)


# -- FTuner 4-5: synthesis index analysis --------------------------------------------------------------------


def padding_tile(backbone: Backbone, hardware: Hardware, tile: Tile) -> dict[str, int]:
    """Return the padding sizes of a kernel: its block, or on a CPU, where tiles are exact, its register tile without
    reductions."""
    if hardware.kind == "gpu":
        return tile.level("b")
    return {**tile.level("w"), **{x.name: 1 for x in backbone.reduction}}


def pad_ratio(backbone: Backbone, hardware: Hardware, tile: Tile, shape: Shape) -> float:
    """Return FTuner Eq. 2 (K.pad): bytes of the workload over its bytes padded to the tile; 1 is no padding."""
    block, sizes = padding_tile(backbone, hardware, tile), backbone.sizes(shape)
    rounded = {n: padded(v, block[n]) for n, v in sizes.items()}
    full = sum(backbone.bytes_moved(rounded))
    return sum(backbone.bytes_moved(sizes)) / full if full else 1.0


def occupancy_ratio(blocks: int, units: int) -> float:
    """Return FTuner Eq. 3 (K.occ): blocks over blocks rounded up to the units; 1 for an empty grid."""
    return blocks / padded(blocks, units) if blocks else 1.0


def memory_seconds(backbone: Backbone, hardware: Hardware, tile: Tile, shape: Shape) -> float:
    """Return FTuner Eq. 7 (K_mem): the slower of global and local-memory traffic of the whole workload."""
    sizes, block = backbone.sizes(shape), tile.level("b")
    blocks = blocks_at(backbone, tile, sizes)
    walk = math.prod(-(-sizes[x.name] // block[x.name]) for x in backbone.reduction)
    inner_tile = tile.level("t") or tile.level("w")
    read, written = backbone.bytes_moved(block)
    inner = math.prod(-(-block[n] // inner_tile[n]) for n in block)
    to_local = blocks * walk * read
    from_local = blocks * walk * inner * sum(o.footprint(inner_tile) for o in backbone.inputs)
    outer = (to_local + blocks * written) / hardware.memory_bandwidth
    return max(outer, (to_local + from_local) / (hardware.local_bandwidth * hardware.units))


def compute_ratio(backbone: Backbone, hardware: Hardware, tile: Tile, shape: Shape) -> float:
    """Return FTuner Eq. 6 (compute_eff): arithmetic time over memory time of the workload; > 1 is compute bound."""
    flops = backbone.flops(backbone.sizes(shape))
    memory = memory_seconds(backbone, hardware, tile, shape)
    return flops / hardware.peak(backbone.dtype) / memory if memory else 0.0


def ftuner(backbone: Backbone, hardware: Hardware, kernel: MacroKernel) -> Index:
    """Return FTuner's ranking as a cost: 3 minus the SIA score (Eq. 1) in units of 2**-20. It is not a time.

    It ranks the kernels of one shape. The compute-to-memory ratio is mapped to [0, 1) like the other two terms, as
    ``cmr / (1 + cmr)``. Padding counts loop points, where Eq. 2 counts bytes.

    The memory time is Eq. 7: the slower of global traffic and local-memory traffic. Only the local traffic
    distinguishes register tiles of one block.
    """
    one, tile = 1 << 20, kernel.tile
    g, walk = grid(backbone, tile), steps(backbone, tile)
    units = hardware.units
    inner_tile = tile.level("t") or tile.level("w")
    block = {n: min(b, backbone.extent(n).constant or b) for n, b in tile.level("b").items()}
    read, written = backbone.bytes_moved(block)
    count = math.prod(-(-block[n] // inner_tile[n]) for n in block)
    inner = count * sum(o.footprint(inner_tile) for o in backbone.inputs)
    rate, local = hardware.memory_bandwidth, hardware.local_bandwidth * units
    memory = maximum(
        g * (walk * picoseconds(read / rate) + picoseconds(written / rate)),
        g * walk * picoseconds((read + inner) / local),
    )
    sizes = [backbone.extent(x.name) for x in backbone.loops]
    step = padding_tile(backbone, hardware, tile)
    room = [backbone.extent(x.name).ceildiv(step[x.name]) * step[x.name] for x in backbone.loops]
    per_point = max(1, round(backbone.ops / hardware.peak(backbone.dtype) * PICO * _UNIT))
    compute = (product(sizes) * per_point) // _UNIT
    cmr = (compute * _UNIT) // maximum(1, (compute + memory) // _UNIT)
    pad = (product(sizes) * _UNIT) // maximum(1, product(room))
    occ = (g * _UNIT) // maximum(1, g.ceildiv(units) * units)
    return 3 * one - cmr - pad * _UNIT - occ * _UNIT


# -- polydyn -------------------------------------------------------------------------------------------------


def polydyn(backbone: Backbone, hardware: Hardware, kernel: MacroKernel) -> Index:
    """Return polydyn's estimate: small grids, long reductions and bandwidth in one closed form.

    A unit with u blocks, o of them resident, needs at least ``u`` times a block's part of a full wave, and at least
    ``ceil(u / o)`` times the latency of a single block. The machine needs at least the time of its memory traffic. The
    two overlap except for an eighth of the shorter one; this also ranks kernels that are memory bound. On a
    CPU tiles are exact (``_exact``).
    """
    tile = kernel.tile
    if hardware.kind == "cpu":
        busy, traffic = _exact(backbone, hardware, kernel), _traffic(backbone, hardware)
        return maximum(busy, traffic) + minimum(busy, traffic) // 8
    per_unit = max(1, blocks_per_unit(kernel.used, hardware))
    walk, share = steps(backbone, tile), grid(backbone, tile).ceildiv(hardware.units)
    block = picoseconds(kernel.fixed / per_unit) + picoseconds(kernel.step / per_unit) * walk
    alone = picoseconds(kernel.alone_fixed) + picoseconds(kernel.alone_step) * walk
    busy = maximum(share * block, share.ceildiv(per_unit) * alone)
    traffic = _traffic(backbone, hardware)
    return maximum(busy, traffic) + minimum(busy, traffic) // 8


def by_rates(backbone: Backbone, hardware: Hardware) -> Index:
    """Return the time of all operations at the machine's peak, or of its memory traffic if that takes longer.

    It is the estimate of a kernel without tiles, before measurements correct it.
    """
    step = max(1, round(PICO * _UNIT * backbone.ops / hardware.peak(backbone.dtype)))
    busy = product(backbone.extent(x.name) for x in backbone.loops) * step // _UNIT
    return maximum(1, busy, _traffic(backbone, hardware))


def _exact(backbone: Backbone, hardware: Hardware, kernel: MacroKernel) -> Index:
    """Return the time of the exact iteration space on a CPU's threads, which take whole tasks.

    M rows are ``t = ceil(M / r)`` register tiles of ``M // t`` rows or one more. A dynamic N has full tiles and a
    remainder. The reduction is not padded. The estimate is the sum over these tiles (``_register_tile``).
    """
    tile = kernel.tile
    *batch, m, n = ("", "", *(x.name for x in backbone.parallel))
    rows, r = (backbone.extent(m), tile[f"w.{m}"]) if m else (Index.of(1), 1)
    full = picoseconds(kernel.fixed) + _per(backbone, tile, picoseconds(kernel.step))
    one = _register_tile(backbone, kernel, m, n, full)
    tiles = rows.ceildiv(r)
    least = rows // maximum(1, tiles)
    longer = rows - least * tiles
    busy = product(backbone.extent(x) for x in batch if x) * ((tiles - longer) * one(least) + longer * one(least + 1))
    if hardware.units == 1:
        return busy
    tasks = maximum(1, grid(backbone, tile))
    return busy.ceildiv(tasks) * tasks.ceildiv(hardware.units)


def _per(backbone: Backbone, tile: Tile, step: int) -> Index:
    """Return the time of the whole reduction from that of a block step: static loops have whole steps, dynamic loops
    proportional time."""
    total = Index.of(step)
    for x in backbone.reduction:
        block = tile[f"b.{x.name}"]
        total = total * -(-x.extent // block) if x.extent is not None else (total * Index.of(x.name)).ceildiv(block)
    return total


def _register_tile(backbone: Backbone, kernel: MacroKernel, m: str, n: str, full: Index) -> Callable[[Index], Index]:
    """Return the time of register tiles as a function of their rows x, for all columns. A block takes ``full``.

    A tile takes its part of a full block, but at least the time of its loads and of the latency of few multiply-adds:
    a linear fit to the measured times of one and of three rows. Dynamic columns have a similar fit between one vector
    and all vectors, and take at least the time of one vector of one row.
    """
    tile, block = kernel.tile, kernel.tile.level("b")
    r = tile[f"w.{m}"] if m else 1
    first, slope = (round(_UNIT * x) for x in (kernel.one_row, (kernel.three_rows - kernel.one_row) / 2))
    row = _share(backbone, n, block, full, entire=True)
    row = _share(backbone, m, block, row, entire=False) if m else row
    if backbone.extent(n).constant is not None:
        return lambda x: maximum(row * x, (row * r * (first + (x - 1) * slope)) // _UNIT)
    lanes = tile.get(f"v.{n}")
    c = max(1, tile[f"w.{n}"] // lanes)
    loop = (_share(backbone, m, block, full, entire=False) if m else full) * (r * c * lanes)
    time = loop.ceildiv(block[n])
    vector, few = round(_UNIT * kernel.one_vector), round(_UNIT * kernel.least)
    step = (_UNIT - vector) // max(1, c - 1) if vector else 0

    def part(x: Index, y: Index) -> Index:
        high = maximum((x * _UNIT) // r, first + (x - 1) * slope) * y // c
        wide = maximum((y * _UNIT) // c, vector + (y - 1) * step) * x // r
        return (time * maximum(high, wide, few)) // _UNIT

    vectors = backbone.extent(n).ceildiv(lanes)
    return lambda x: vectors // c * part(x, Index.of(c)) + minimum(1, vectors % c) * part(x, vectors % c)


def _share(backbone: Backbone, name: str, block: Shape, full: Index, entire: bool) -> Index:
    """Convert a block's time to that of the ``entire`` loop or of one iteration. Blocks divide a static loop evenly."""
    extent = backbone.extent(name)
    if extent.constant is None:
        return (full * extent).ceildiv(block[name]) if entire else full.ceildiv(block[name])
    every = full * max(1, -(-extent.constant // block[name]))
    return every if entire else every.ceildiv(max(1, extent.constant))


def _traffic(backbone: Backbone, hardware: Hardware) -> Index:
    """Return the time to move every operand once at memory bandwidth (1/1024 ps per byte)."""
    per_byte = max(1, round(PICO * _UNIT / hardware.memory_bandwidth))
    total = Index.of(0)
    for o in backbone.operands:
        total = total + product(_size(backbone, dim) for dim in o.dims) * o.bytes
    return (total * per_byte) // _UNIT


def _size(backbone: Backbone, dim: tuple[tuple[str, int], ...]) -> Index:
    return sum(((backbone.extent(n) - 1) * abs(c) for n, c in dim), Index.of(1))
