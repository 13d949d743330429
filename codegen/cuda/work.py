"""The work of a block of a CUDA kernel, in numbers for a model of launch times (``polydyn.program.estimates``).

Each family of kernels computes it from the tile that it was built with. Nothing here depends on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, prod

from polydyn.codegen.cuda.copies import Copy
from polydyn.codegen.cuda.slots import is_fast, of_value
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.ir import Body, Call, For, If, Pointer, Store
from polydyn.codegen.ir import walk as walk_nodes
from polydyn.codegen.kernel import Work
from polydyn.schedules.expr import ITEMSIZE, Const, Op, loads, walk
from polydyn.schedules.group.footprint import together
from polydyn.schedules.index import ONE, Index, maximum, product
from polydyn.schedules.model import Group, Statement, stored

WARP, WAVEFRONT, REGISTERS = 32, 128, 65536
"""Threads of a warp; bytes of shared memory that a warp reads at once; 32-bit registers of a multiprocessor."""
ASYNC_COPY, GUARDED_COPY, REGISTER_COPY, DIVIDING_COPY = 4, 8, 12, 36
"""Instructions of a copy.

ASYNC_COPY: address, bounds and cp.async. GUARDED_COPY: the same for pixels, whose taps may be outside.
REGISTER_COPY: address, bounds, load, selection and store. DIVIDING_COPY: the same for a pixel's element whose tap each
thread finds by divisions."""
UNITS = {"float32": "f32", "int32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "s8", "uint8": "s8",
         "float8_e4m3fn": "f8", "float8_e5m2": "f8"}  # fmt: skip
"""The peak rate (``polydyn.gpu.hardware.Hardware.peak_tflops``) that bounds the products of a dtype."""
MIN_BLOCKS_TO_FILL_GPU = 192
"""Number of blocks that fills a large GPU. Split-K pays only if it at least doubles the number of blocks."""
SPLIT_K_FACTORS = (2, 4, 8)
"""Numbers of blocks that K may be split over."""
STAGED_RESULT = 2
"""Instructions per result in addition to its arithmetic: load from shared memory, conversion, store, several at a
time."""
FLOAT = 4
"""Bytes of a float32. Narrower types need a conversion."""
OF_A_LINE, OF_TAPS = 14, 5
"""Instructions of window tiles per image row and per row of taps, in addition to the counted ones: addresses, the
loop, zeros outside."""
UNROLLED_LOADS, SERIAL_LOADS = 4, 8
"""Iterations of a loop whose loads are in flight at the same time: a loop mapped to lanes, a loop of one thread."""


def split_k_factor(columns: Index, steps: Index) -> int:
    """Return the number of blocks that K is split over, for one row of ``columns`` tiles.

    It is the smallest that fills the GPU, or the largest if the number of columns is unknown. Each block has at least
    one of the ``steps``.
    """
    most = [x for x in SPLIT_K_FACTORS if steps.constant is None or x <= steps.constant]
    if columns.constant is None:
        return max(most, default=1)
    if 2 * columns.constant >= MIN_BLOCKS_TO_FILL_GPU:
        return 1
    return next((x for x in most if x * columns.constant >= MIN_BLOCKS_TO_FILL_GPU), max(most, default=1))


def bounded_registers(threads: int, blocks: int) -> int:
    """Return the registers that the compiler may give a thread for ``blocks`` blocks per multiprocessor."""
    return min(255, REGISTERS // (threads * blocks) // 8 * 8)


def product_work(tile: CudaTile, copies: Sequence[Copy], steps: Index, blocks: int, row_each: bool = False) -> Work:
    """Return the work of a product tile whose operands pass through a ring, with warp or thread instructions.

    ``row_each``: a thread copies the elements of one row.
    """
    cores, item = not tile.kind.warp, max(ITEMSIZE[c.dtype] for c in copies)
    instructions = sum(-(-c.elements // c.vector // WARP) * _of_a_copy(c, row_each) for c in copies)
    units = tile.bm // tile.wm * (tile.bn // tile.wn)
    # threads of a warp read one element each, many of them equal: one wavefront per element
    shared = units * (tile.wm + tile.wn) * tile.bk * (WAVEFRONT // WARP if cores else item)
    flops = 2 * tile.bm * tile.bn * tile.bk * tile.kind.times
    instructions += shared // WAVEFRONT + (flops // (2 * WARP) if cores else 0)
    unit = "tf32" if tile.kind.rounds else UNITS[copies[0].dtype]
    traffic = sum(c.elements * ITEMSIZE[c.dtype] for c in copies)
    return Work(
        steps, bounded_registers(tile.threads, blocks), unit, flops, shared, traffic, instructions, 1, tile.stages - 1,
        tile.bm * tile.bn,
    )  # fmt: skip


def with_epilogues(work: Work, group: Group, statements: Sequence[Statement], parts: int = 1) -> Work:
    """Add the work on a block's results: the arithmetic, loads and stores of ``statements``.

    Operands along only one side of a tile, such as a bias, are cached when they are read again. ``parts``: blocks that
    split the results.
    """
    buffers, fast = stored(group.arrays), is_fast(a.dtype for a in group.arrays.values() if a.role == "output")
    slots, moved = STAGED_RESULT, 0
    for s in statements:
        read = {x for x in loads(s.value) if x.buffer in buffers}
        every = {i for x in s.index for i in x.symbols()}
        slots += of_value(s.value, fast) + len(read)
        moved += sum(ITEMSIZE[x.dtype] for x in read if every <= {i for a in x.index for i in a.symbols()})
        moved += ITEMSIZE[buffers[s.array]] if s.array in buffers else 0
    elements = work.elements // parts
    return replace(work, last=elements * slots // WARP, results=elements * moved)


def _of_a_copy(c: Copy, row_each: bool) -> int:
    """Return the instructions of a copy; a computed vector takes them for each element."""
    operations = [x for x in walk(c.operand.value) if isinstance(x, Op) and x.name != "cast"]
    if c.asynchronous:
        return GUARDED_COPY if operations else ASYNC_COPY
    if operations and c.by_element and not row_each:
        return DIVIDING_COPY
    return REGISTER_COPY + (c.vector * (len(operations) + 1) if c.vector > 1 else 0)


def row_work(
    group: Group, prefix: tuple[str, ...], threads: int, per: int, lanes: int, registers: int, held: bool = False
) -> Work:
    """Return the work of element-wise and row kernels: ``per`` threads split the inner loops of a row.

    Each thread takes ``lanes`` elements. A loop that reads global memory waits for it; data of earlier loops is in
    shared memory. ``held``: registers keep a row, which is read once. If threads have elements of their own, elements
    that several threads of a block read come from L2 once (``l2_bytes_per_step``).
    """
    buffers, inner = stored(group.arrays), [s for s in group.statements if len(s.iters) > len(prefix)]
    statements = inner or list(group.statements)
    trips = [product(e for _, e in s.iters[len(prefix) :]).ceildiv(per) for s in inner]
    touched = [x for s in statements for x in _touched(s, buffers)]
    traffic = sum(ITEMSIZE[buffers[x]] for x in (dict.fromkeys(touched) if held else touched)) * threads * lanes
    requests = 0
    if per == 1:
        box = points(statements[0], prefix, threads * lanes)
        written = sum(ITEMSIZE[buffers[s.array]] for s in statements if s.array in buffers)
        traffic = written * threads * lanes + sum(l2_bytes_per_step(group, s, box) for s in statements)
        read = [x for s in statements for x in set(loads(s.value)) if x.buffer in buffers]
        requests = sum(max(WAVEFRONT, WARP * lanes * ITEMSIZE[x.dtype]) for x in read) * threads // WARP
    fast = is_fast(a.dtype for a in group.arrays.values() if a.role == "output")
    guards = {x for s in statements for x in walk(s.value) if isinstance(x, Op) and x.dtype == "bool" and not loads(x)}
    choices = len(guards)  # for all lanes together
    arithmetic = sum(of_value(s.value, fast) for s in statements) - choices
    reads = sum(len(set(loads(s.value))) for s in statements)
    operations = lanes * (arithmetic + reads) + choices + 2 * len(statements) + reads  # a vector is loaded once
    flight = SERIAL_LOADS if per == 1 else UNROLLED_LOADS
    waits = 1 if held else sum(any(x.buffer in buffers for x in loads(s.value)) for s in statements)
    return Work(
        maximum(*trips) if trips else ONE, registers, shared=requests, traffic=traffic,
        instructions=threads // WARP * operations, waits=max(1, waits), flight=flight if trips else 1,
        by_warps=False,
    )  # fmt: skip


def window_work(group: Group, box: Mapping[str, int], body: Body, threads: int, lanes: int, registers: int) -> Work:
    """Return the work of a window with several outputs per thread. The loads of a step are all in flight.

    ``body``: the statements of a thread. ``box``: outputs of a block, iterator -> count (``l2_bytes_per_step``).
    """
    core, loops = group.backbone, [n for n in walk_nodes(body) if isinstance(n, For) and n.kind != "unroll"]
    inside = loops[-1].body if loops else ()
    steps, taps = product(n.hi for n in loops), product(e for x, e in core.iters if x not in box)
    fast, warps = is_fast(a.dtype for a in group.arrays.values() if a.role == "output"), threads // WARP
    of_a_step, of_all = _vector_slots(inside, lanes, fast), _vector_slots(body, lanes, fast)
    loaded = [ITEMSIZE[p.dtype] for p in vectors(inside, "pd_ldg_wide")]
    moved = [ITEMSIZE[p.dtype] for f in ("pd_ldg_wide", "pd_stg_wide") for p in vectors(body, f)]
    return Work(
        steps, registers, shared=sum(loaded) * lanes * threads,
        traffic=l2_bytes_per_step(group, core, box) * int(taps // steps),
        instructions=warps * of_a_step, by_warps=False, last=warps * (of_all - of_a_step),
        results=(sum(moved) - sum(loaded)) * lanes * threads,
    )  # fmt: skip


def tile_work(
    group: Group, box: Mapping[str, int], body: Body, threads: int, lanes: int, registers: int, lines: int,
    shares: tuple[Fraction, Fraction],
) -> Work:  # fmt: skip
    """Return the work of a window with a tile of outputs per thread.

    A step loads an image row, then each of the ``lines`` rows of the tile applies its taps. ``box`` as for a window.
    ``shares``: the fraction of steps that load a row, and the fraction of (tile row, step) pairs that have taps.
    """
    core, (rows,) = group.backbone, [n for n in walk_nodes(body) if isinstance(n, For) and n.kind != "unroll"]
    fast, warps = is_fast(a.dtype for a in group.arrays.values() if a.role == "output"), threads // WARP
    whole = asked.then if len(rows.body) == 1 and isinstance(asked := rows.body[0], If) else rows.body
    line, parts, taps = whole[:-lines], whole[-lines:], product(e for x, e in core.iters if x not in box)
    slots = _vector_slots(line, lanes, fast), OF_TAPS * lines + _vector_slots(parts, lanes, fast)
    of_all = _vector_slots(body, lanes, fast) - _vector_slots(rows.body, lanes, fast)
    line_bytes, part_bytes, all_bytes = (_moved(x, "pd_ldg_wide") for x in (line, parts, body))
    results = all_bytes - line_bytes - part_bytes + _moved(body, "pd_stg_wide")
    return Work(
        rows.hi, registers, shared=ceil(line_bytes * shares[0] + part_bytes * shares[1]) * lanes * threads,
        traffic=ceil(Fraction(l2_bytes_per_step(group, core, box) * int(taps), int(rows.hi))),
        instructions=warps * ceil(OF_A_LINE + slots[0] * shares[0] + slots[1] * shares[1]),
        by_warps=False, last=warps * of_all, results=results * lanes * threads,
    )  # fmt: skip


def _moved(body: Body, function: str) -> int:
    """Return the bytes that the vector accesses of a lane move."""
    return sum(ITEMSIZE[p.dtype] for p in vectors(body, function))


def vectors(body: Body, function: str) -> list[Pointer]:
    """Return the addresses of the vectors that a function loads or stores."""
    calls = (n for n in walk_nodes(body) if isinstance(n, Call) and n.function.startswith(function))
    return [p for n in calls for p in n.args[function == "pd_ldg_wide" :][:1] if isinstance(p, Pointer)]


def _vector_slots(body: Body, lanes: int, fast: bool) -> int:
    """Return a thread's instructions with vectors: arithmetic of all lanes, accesses with conversions, bounds checks.

    ``python -m benchmarks.gpu.sass`` counts 228 in the machine code of three taps of four outputs, this 225.
    """
    total = 0
    for n in walk_nodes(body):
        if isinstance(n, Store) and isinstance(n.value, Const):
            total += lanes * ITEMSIZE[n.value.dtype] // FLOAT
        elif isinstance(n, Store):
            casts = sum(x.name == "cast" for x in {*walk(n.value)} if isinstance(x, Op))
            total += lanes * max(of_value(n.value, fast) - casts, n.reduce is not None)
        elif isinstance(n, Call):
            halves = any(isinstance(p, Pointer) and ITEMSIZE[p.dtype] < FLOAT for p in n.args)
            total += 1 + lanes * halves
        elif isinstance(n, If):
            total += len(n.cond)
    return total


def points(s: Statement, band: Sequence[str], count: int) -> dict[str, int]:
    """Return ``count`` adjacent points of a band as a box: iterator -> count. An unknown extent takes the rest."""
    extents, left, found = dict(s.iters), count, dict[str, int]()
    for x in reversed(band):
        most = extents[x].constant
        found[x] = left if most is None else min(left, most)
        left = -(-left // max(1, found[x]))
    return found


def l2_bytes_per_step(group: Group, s: Statement, box: Mapping[str, int]) -> int:
    """Return the bytes that a block loads from L2 for the loads of a statement, averaged over steps of its inner loops.

    Each element of a window's taps counts once, for all outputs that read it. ``box``: the outputs of the block,
    iterator of the band -> count. A tap moves a fraction of an output's distance; loops of unknown extent, or of 0,
    have no shared elements and count as a step. Ferrante, Sarkar and Thrash, "On estimating and enhancing cache
    effectiveness" (1991), count the elements of a reference in this way. L1 holds them: a few tens of KB per block.
    """
    total = Fraction(0)
    taps = {x: int(e) for x, e in s.iters if x not in box and e.constant}
    for load in {x for x in loads(s.value) if x.buffer in stored(group.arrays)}:
        address, share = group.arrays[load.buffer].address(load.index), Fraction(ITEMSIZE[load.dtype])
        along = {j: _outputs_along(address, j, box) for j in taps}
        for x, n in box.items():
            if x not in address.symbols():
                continue
            own = {j: r for j, (y, r) in along.items() if y == x}
            places = {Fraction(u) for u in range(n)} if own else set()
            for j, r in own.items():
                places = {p + r * k for p in places for k in range(taps[j])}
            share *= Fraction(len(places), prod(taps[j] for j in own)) if own else n
        total += share
    return ceil(total)


def _outputs_along(address: Index, tap: str, band: Iterable[str]) -> tuple[str, Fraction]:
    """Return the iterator of the band that a tap moves along with, and its ratio; ("", 0) if there is none."""
    steps = {x: together(address.split(tap)[0], address.split(x)[0]) for x in band}
    found = [(x, r) for x, r in steps.items() if r is not None]
    return min(found, key=lambda x: max(x[1].numerator, x[1].denominator), default=("", Fraction(0)))


def _touched(s: Statement, buffers: Mapping[str, str]) -> list[str]:
    """Return the buffers that an iteration loads from and stores to."""
    return [a for a in (*(x.buffer for x in set(loads(s.value))), s.array) if a in buffers]
