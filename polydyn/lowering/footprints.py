"""Compute the footprint of a convolution's row operand from its addresses: which iterators move together.

A pixel and a tap move together if all subscripts move ``s*u`` for a step of one and ``d*u`` for a step of the other,
and their ranges overlap. Windows of neighbouring pixels then share elements, and both iterators become one coordinate
``s*h + d*kh``.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.collapse import in_order, split_divided
from polydyn.lowering.flatten import FlatNode
from polydyn.lowering.implicit_gemm import merge_pixels, operands
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import Op, Value, indices, loads, map_index, substitute, symbols_of
from polydyn.schedules.group.footprint import Axis, Footprint
from polydyn.schedules.index import Index
from polydyn.schedules.tiling import Roles

V = Index.of
PIXEL = "pixel."
"""Prefix of the names of pixels. The merged row keeps the plain name of one of their iterators."""


def match_footprint(
    plan: FusionPlan, nodes: tuple[FlatNode, ...]
) -> tuple[tuple[FlatNode, ...], Roles, Footprint] | Declined:
    """Return the nodes of a windowed convolution over (batch.., row, column), the roles, and the footprint of its rows.

    Rows are the pixels from the first windowed one on. Pixels before it are batches, so that a footprint consists of
    rows of one image. Declined if there is no window, a subscript is not a sum of coordinates, or pixels do not
    become one row.
    """
    nodes = split_divided(nodes)
    core = nodes[0]
    product_operands = operands(plan, core)
    if isinstance(product_operands, Declined):
        return product_operands
    assert isinstance(core.body, Op)
    value = core.body.args[1 - product_operands.column]
    extents = dict((*core.shared, *core.reduction))
    rows = [x for x, _ in core.shared if x in product_operands.rows]
    taps = taps_of(value, rows, core.reduction)
    if not taps:
        return Declined("no window moves over its pixels")
    pixels = rows[rows.index(next(x for x in rows if x in taps)) :]
    nodes, roles = merge_pixels(nodes, replace(product_operands, rows=tuple(pixels)))
    footprint = footprint_of(value, [(x, extents[x]) for x in pixels], core.reduction, taps, roles.row)
    if footprint is None or set(pixels) & set(roles.batch):
        return Declined("the elements of its rows do not form a box of an image")
    body = nodes[0].body
    assert isinstance(body, Op)
    args = tuple(v if k == product_operands.column else footprint.operand() for k, v in enumerate(body.args))
    block, *inner = (x for x, _ in footprint.steps)
    roles = replace(roles, block=block, inner=tuple(inner))
    return (replace(nodes[0], body=replace(body, args=args), reduction=footprint.steps), *nodes[1:]), roles, footprint


def taps_of(v: Value, pixels: list[str], reduction: tuple[Axis, ...]) -> dict[str, tuple[str, Fraction]]:
    """Map each pixel to the reduction that moves together with it, and to the distance that this moves per step of the
    pixel.

    If several reductions do (with numeric sizes, image rows are a fixed number of columns), the one that moves least is
    used. Windows overlap, or adjoin (patches) if a padding's guard has both iterators, which tells taps from
    channels.
    """
    nearest: dict[str, tuple[Fraction, str]] = {}
    guards = [i.symbols() for i in set(indices(v)) - {i for x in loads(v) for i in x.index}]
    for pixel in pixels:
        ratios = ((_ratio(v, pixel, x), x, (e.constant or 0) - 1) for x, e in reduction)
        near = [
            (ratio, x) for ratio, x, last in ratios
            if ratio is not None and (last + any({pixel, x} <= g for g in guards)) * ratio >= 1
        ]  # fmt: skip
        if near:
            ratio, tap = min(near)
            nearest[tap] = min(nearest.get(tap, (ratio, pixel)), (ratio, pixel))
    return {pixel: (tap, ratio) for tap, (ratio, pixel) in nearest.items()}


def _ratio(v: Value, pixel: str, tap: str) -> Fraction | None:
    """Return how far every subscript moves for a step of the tap, in steps of the pixel.

    Returns None if this is not a number, or not the same number everywhere.
    """
    ratios: set[Fraction] = set()
    for i in indices(v):
        a, rest = i.split(pixel)
        b, rest = rest.split(tap)
        if {pixel, tap} & (rest.symbols() | a.symbols() | b.symbols()) or a.terms.keys() != b.terms.keys():
            return None
        ratios |= {Fraction(b.terms[m], c) for m, c in a.terms.items()}
    return ratios.pop() if len(ratios) == 1 and min(ratios) > 0 else None


def footprint_of(
    value: Value, pixels: list[Axis], reduction: tuple[Axis, ...], taps: dict[str, tuple[str, Fraction]], row: str
) -> Footprint | None:
    """Return the footprint, or None. Its coordinates and steps are ordered by the operand's stride, largest first."""
    joined = {t for t, _ in taps.values()}
    alone = [x for x, _ in reduction if x not in joined]
    names = {x: f"f{k}" for k, x in enumerate((*(x for x, _ in pixels), *alone))}
    at = {x: V(PIXEL + x) for x, _ in pixels} | {x: V(x) for x in alone}
    at |= {x: at[x] * r.denominator + V(t) * r.numerator for x, (t, r) in taps.items()}

    def moved(i: Index) -> Index:
        for x, name in names.items():
            stride, rest = i.split(x)
            tap, ratio = taps.get(x, ("", Fraction(1)))
            step = Index({m: c // ratio.denominator for m, c in stride.terms.items()})
            i = rest.subs({tap: 0}) + step * name
        return i

    new = map_index(value, moved)
    back = substitute(new, {names[x]: e.subs({PIXEL + x: V(x)}) for x, e in at.items()})
    left = symbols_of(new)
    if back != value or not left.issuperset(names.values()) or left & {*names, *joined}:
        return None  # an iterator inside a quotient or a minimum has no coordinate
    wide = max(loads(new), key=lambda x: len(x.index[0].symbols()))
    places = in_order(tuple((names[x], e) for x, e in at.items()), wide.index[0])
    steps = tuple((x, e) for _, p in places for x, e in reduction if x in p.symbols())
    return Footprint(new, places, tuple((PIXEL + x, e) for x, e in pixels), steps, row)
