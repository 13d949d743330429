"""Windows over small planes in a blocked layout (nChw16c): planes are interleaved on input and de-interleaved on
output.

A row of a small plane fills few lanes of a vector, and each load of it needs a mask. Interleaved planes fill all lanes
and need no mask. The copies cost two operations and a few shuffles per vector, and the weights need a second layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polydyn.codegen.cpu.windows import window_axes
from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.footprints import PIXEL, footprint_of, taps_of
from polydyn.lowering.group import LoweredGroup, Pack, TurnedWindow
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import Load, Op, Value, loads, substitute, symbols_of, transform, walk
from polydyn.schedules.index import ONE, Index, IndexLike
from polydyn.schedules.model import Array, Group, Statement, row_major, touched
from polydyn.schedules.tree.windows import KEEP, TURN

V = Index.of
PLANES, SUMS = "turned", "kept"
"""Locals: the interleaved image and the interleaved sums of a block of planes."""


def with_blocked_form(plan: FusionPlan, lowered: LoweredGroup, width: int) -> LoweredGroup:
    """Add the blocked form, whose vectors run over planes, if the group is a window between planes of pixels.

    The image must be float32. Its rows and columns must have separate coordinates (``footprints.footprint_of``), inside
    one guard for both. The weights must be a constant, which this form reads in panels of ``width`` planes.
    """
    group = lowered.group
    cores = [s for s in group.statements if s.reduce]
    if len(cores) != 1:
        return lowered
    (core,) = cores
    band = tuple(x for x in core.iterators if any(x in i.symbols() for i in core.index))
    if len(band) < 3 or isinstance(window_axes(group, band, width), Declined):
        return lowered
    planes, line, column = band[-3:]
    choice = next((v for v in walk(core.value) if isinstance(v, Op) and v.name == "where"), None)
    others = [x for x in loads(core.value) if choice is None or x not in loads(choice)]
    if choice is None or len(others) > 1 or not isinstance(choice.args[1], Load) or choice.dtype != "float32":
        return lowered
    written = [a.address(s.index) for s in group.statements if (a := group.arrays[s.array]).role == "output"]
    if planes in symbols_of(choice.args[0]) or any(i.split(column)[0] != ONE for i in written):
        return lowered
    image = _image(core, choice, band)
    if image is None:
        return lowered
    turn, read = image
    put: dict[Value, Load] = {choice.args[1]: read}
    for x in others:
        panels = _panels(plan, lowered, core, x, planes, width)
        if panels is None:
            return lowered
        pack, name, put[x] = panels
        buffers, packs = {**lowered.buffers, put[x].buffer: name}, {**lowered.packs, name: pack}
        lowered = replace(lowered, buffers=buffers, packs=packs)
        group = replace(group, arrays={**group.arrays, put[x].buffer: _dense(put[x], "constant", pack.shape)})
    value = transform(core.value, lambda v: put.get(v, v) if isinstance(v, Load) else v)
    blocked = _with_copies(group, turn, replace(core, value=value), band[-2:])
    return replace(lowered, blocked=TurnedWindow(blocked, (line, column)))


def _dense(x: Load, role: str, shape: Sequence[IndexLike]) -> Array:
    """Return the dense array that a load reads."""
    extents = tuple(map(V, shape))
    return Array(x.buffer, x.dtype, extents, role, row_major(extents))


def _image(core: Statement, choice: Op, band: tuple[str, ...]) -> tuple[Statement, Load] | None:
    """Return the statement that copies the image, and the load of this copy in the window. Returns None if there is
    none.
    """
    extents = dict(core.iters)
    reduction = tuple((x, e) for x, e in core.iters if x not in band)
    pixels, shared = band[-2:], band[:-2]
    taps = taps_of(choice, list(pixels), reduction)
    footprint = footprint_of(choice, [(x, extents[x]) for x in pixels], reduction, taps, pixels[-1])
    if footprint is None or len(footprint.places) != 2:
        return None
    ranges, at = footprint.inside(), {PIXEL + x: V(x) for x in pixels}
    counts = {x: (high - low).subs(footprint.sizes()) for x, (low, high) in ranges.items()}
    if len(ranges) != 2 or not all(e.constant is not None or e.is_symbol for e in counts.values()):
        return None
    whole = next(v for v in walk(footprint.value) if isinstance(v, Load))
    moved = substitute(whole, {x: V(x) + low for x, (low, _) in ranges.items()})
    front, places = tuple(map(V, shared)), [x for x, _ in footprint.places]
    iters = (*((x, extents[x]) for x in shared), *((x, counts[x]) for x in places))
    turn = Statement(TURN, iters, PLANES, (*front, *map(V, places)), moved)
    index = (*front, *(e.subs(at) - ranges[x][0] for x, e in footprint.places))
    return turn, Load(whole.dtype, PLANES, index)


def _panels(
    plan: FusionPlan, lowered: LoweredGroup, core: Statement, x: Load, planes: str, width: int
) -> tuple[Pack, str, Load] | None:
    """Return a constant in panels of ``width`` planes, its name, and the load of it.

    Returns None if it is not a constant, or depends on iterators other than planes and taps.
    """
    source, extents = lowered.buffers[x.buffer], dict(core.iters)
    steps = tuple((y, e.constant) for y, e in core.iters if y in x.index[0].symbols() and y != planes)
    count = extents[planes].constant
    known = tuple((y, e) for y, e in steps if e is not None)
    if source not in plan.graph.constants or count is None or x.index[0].symbols() != {planes, *dict(known)}:
        return None
    pack = Pack(source, (), (planes, count), known, x.index[0], width)
    name = f"{source}@{hashlib.sha256(repr(pack).encode()).hexdigest()[:12]}"
    index = (V(planes) // width, *(V(y) for y, _ in known), V(planes) % width)
    return pack, name, Load(x.dtype, f"a{len(lowered.buffers)}", index)


def _with_copies(group: Group, turn: Statement, core: Statement, pixels: tuple[str, ...]) -> Group:
    """Copy the image of a group first, and the results of the window last.

    Maps that are only read inside the group are inlined. If the result reads nothing along the pixels, it is computed
    before the last copy, while lanes are planes.
    """
    init, sums, point = group.init, group.arrays[core.array], core.index
    total, stored = Load(sums.dtype, core.array, point), Load(sums.dtype, SUMS, point)
    values: dict[str, Value] = {core.array: total}
    done: list[Statement] = []
    for s in group.statements:
        if s.name in (init.name, core.name):
            continue
        value = _put(s.value, values)
        if group.arrays[s.array].role == "local":
            values[s.array] = value
        else:
            done.append(replace(s, value=value))
    before: Value = total
    others = [i for s in done for x in loads(s.value) if x != total for i in x.index]
    if len(done) == 1 and done[0].value.dtype == sums.dtype and not any(i.symbols() & {*pixels} for i in others):
        before, done = done[0].value, [replace(done[0], value=stored)]
    done = [replace(s, value=_put(s.value, {core.array: stored})) for s in done]
    statements = (turn, init, core, Statement(KEEP, init.iters, SUMS, point, before), *done)
    extents = dict(turn.iters)
    shapes = {PLANES: tuple(extents[str(i)] for i in turn.index), SUMS: sums.shape}
    arrays = group.arrays | {n: _dense(Load(sums.dtype, n, ()), "local", x) for n, x in shapes.items()}
    return replace(group, arrays=touched(arrays, statements), statements=statements)


def _put(v: Value, values: Mapping[str, Value]) -> Value:
    return transform(v, lambda x: values.get(x.buffer, x) if isinstance(x, Load) else x)
