"""Store the constant weights of large windows in float32, so that threads need no conversions."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from polydyn.codegen.cuda.window_tiles import tile_axes
from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.group import LoweredGroup, Pack
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import Load, Op, Value, transform
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.model import Array, row_major, touched

V = Index.of


def with_float_weights(plan: FusionPlan, lowered: LoweredGroup) -> LoweredGroup:
    """Convert the 16-bit constants that a large window multiplies by to float32, in their order of use.

    They are read at a channel, the innermost iterator of the band, and at taps. Other groups do not change.
    """
    cores = [s for s in lowered.group.statements if s.reduce]
    if len(cores) != 1:
        return lowered
    (core,) = cores
    band = tuple(x for x in core.iterators if any(x in i.symbols() for i in core.index))
    if isinstance(tile_axes(lowered.group, band), Declined):
        return lowered
    group, packs, buffers = lowered.group, dict(lowered.packs), dict(lowered.buffers)
    extents, arrays = {x: e.constant for x, e in core.iters}, dict(group.arrays)

    def widened(v: Value) -> Value:
        read = v.args[0] if isinstance(v, Op) and v.name == "cast" and v.dtype == "float32" else None
        if not isinstance(read, Load) or read.buffer not in buffers or len(read.index) != 1:
            return v
        source, (address,) = buffers[read.buffer], read.index
        steps = tuple((x, e) for x in core.iterators[len(band) :] if (e := extents[x]) is not None)
        count = extents[band[-1]]
        if source not in plan.graph.constants or count is None or address.symbols() - {band[-1], *dict(steps)}:
            return v
        pack = Pack(source, (), (band[-1], count), steps, address, count, dtype="float32")
        name = f"{source}@{hashlib.sha256(repr((pack, pack.dtype)).encode()).hexdigest()[:12]}"
        array = next((a for a, x in buffers.items() if x == name), f"a{len(buffers)}")
        packs[name], buffers[array] = pack, name
        arrays[array] = Array(
            array, "float32", tuple(map(V, pack.shape)), "constant", row_major(tuple(map(V, pack.shape)))
        )
        return Load("float32", array, (ZERO, *(V(x) for x, _ in steps), V(band[-1])))

    value = transform(core.value, widened)
    if value is core.value or not packs:
        return lowered
    statements = tuple(replace(s, value=value) if s is core else s for s in group.statements)
    arrays = touched(arrays, statements)
    used = {a: x for a, x in buffers.items() if a in arrays}
    return replace(lowered, group=replace(group, arrays=arrays, statements=statements), packs=packs, buffers=used)
