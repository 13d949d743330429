"""Structures of random models (``motifs``) that pad, pool or convolve a view: a resized, tiled, padded, transposed or
reversed map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polydyn.testing.drafts import Draft, Rejected
from polydyn.testing.motifs import cut, roll, transpose, unary

MIN_RANK = 3
"""Rank of a map with one spatial axis, after batch and channels."""


def moved_window(b: Draft) -> None:
    """Add one to three views of a map, perhaps with a map between them, then a window or a padding, perhaps two."""
    t = b.pick(lambda s: b.rank(s) >= MIN_RANK)
    for _ in range(b.random.choice([1, 1, 2, 2, 3])):
        t = b.random.choice(MOVES)(b, t)
        if b.random.random() < 0.2:
            t = unary(b, t)
    for _ in range(b.random.choice([1, 1, 1, 2])):
        t = b.random.choice(WINDOWS)(b, t)
    b.extra.append(t)


# -- views -------------------------------------------------------------------------------------------------------------


def resized(b: Draft, t: str) -> str:
    """Resize spatial axes by scales or to sizes, in any mode."""
    if b.opset < 11:
        raise Rejected("modes of coordinates came with opset 11")
    mode = b.random.choice(["nearest", "nearest", "nearest", "linear", "cubic"])
    where = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    more: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": b.random.choice(where)}
    if mode == "nearest":
        more["nearest_mode"] = b.random.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
    spatial = b.rank(t) - 2
    roi = b.const(np.zeros(0), "float32") if b.opset < 13 else ""
    if b.random.random() < 0.7:
        factors = [b.random.choice([1, 2, 2, 3, 0.5, 1.5]) for _ in range(spatial)]
        return b.add("Resize", [t, roi, b.const(np.array([1, 1, *factors], np.float32), "float32")], **more)
    sizes = [b.random.choice([1, 2, 4, 5, 9]) for _ in range(spatial)]
    first = _leading(b, t)
    empty = b.const(np.zeros(0), "float32") if b.opset < 13 else ""
    return b.add("Resize", [t, roi, empty, b.add("Concat", [first, b.ints(*sizes)], axis=0)], **more)


def _leading(b: Draft, t: str) -> str:
    """Return the sizes of batch and channels, computed from the shape."""
    return b.add("Slice", [b.add("Shape", [t]), b.ints(0), b.ints(2)])


def tiled(b: Draft, t: str) -> str:
    """Repeat some axes."""
    return b.add("Tile", [t, b.ints(*(b.random.choice([1, 1, 2, 3]) for _ in range(b.rank(t))))])


def backwards(b: Draft, t: str) -> str:
    """Read some spatial axis backwards, or every second or third element."""
    axis = b.random.randrange(1, b.rank(t))
    low, high, step = b.random.choice([(-1, -(2**31) + 1, -1), (-1, -(2**31) + 1, -2), (-2, -(2**31) + 1, -1),
                                       (0, 2**31 - 1, 2), (1, 2**31 - 1, 3), (1, -1, 1)])  # fmt: skip
    return cut(b, t, axis, low, high, step)


def padded(b: Draft, t: str) -> str:
    """Pad spatial axes, or crop them by negative pads."""
    modes = ["reflect", "edge", "constant", *(["wrap"] if b.opset > 18 else [])]
    mode, rank = b.random.choice(modes), b.rank(t)
    least = -1 if b.random.random() < 0.3 else 0

    def side() -> list[int]:
        return [0, 0, *(b.random.choice([least, 0, 1, 1, 2, 3]) for _ in range(rank - 2))]

    pads = [*side(), *side()]
    if b.opset < 11:
        return b.add("Pad", [t], mode=mode, pads=pads)
    value = [b.const(b.random.choice([0.0, 1.5]))] if mode == "constant" and b.random.random() < 0.5 else []
    return b.add("Pad", [t, b.ints(*pads), *value], mode=mode)


def doubled_up(b: Draft, t: str) -> str:
    """Repeat each element along a spatial axis by Unsqueeze, Expand and Reshape, as exporters write nearest scaling."""
    axis, by = b.random.randrange(2, b.rank(t)), b.random.choice([2, 3])
    if b.opset < 13 or b.rank(t) > 4:
        raise Rejected("axes as an input came with opset 13")
    y = b.add("Unsqueeze", [t, b.ints(axis + 1)])
    y = b.add("Expand", [y, b.ints(*[1] * (axis + 1), by, *[1] * (b.rank(t) - axis - 1))])
    return b.add("Reshape", [y, b.ints(*[0] * axis, -1, *(b.fixed(t, a) or 0 for a in range(axis + 1, b.rank(t))))])


MOVES: Sequence[Callable[[Draft, str], str]] = (
    resized, resized, tiled, transpose, backwards, padded, padded, doubled_up, roll
)  # fmt: skip


# -- windows -----------------------------------------------------------------------------------------------------------


def _attributes(b: Draft, spatial: int) -> tuple[list[int], dict[str, Any]]:
    """Return the sizes of a window and its strides, pads and dilations."""
    kernel = [b.random.choice([1, 2, 3, 3, 5]) for _ in range(spatial)]
    more: dict[str, Any] = {"strides": [b.random.choice([1, 1, 2, 3]) for _ in range(spatial)]}
    if b.random.random() < 0.2:
        more["auto_pad"] = b.random.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    else:
        more["pads"] = [b.random.randrange(k) for k in (*kernel, *kernel)]
    return kernel, more


def convolved(b: Draft, t: str) -> str:
    """Convolve a map of any number of spatial axes."""
    c = b.fixed(t, 1)
    if not c or b.rank(t) > 5:
        raise Rejected("no channels")
    kernel, more = _attributes(b, b.rank(t) - 2)
    group = c if b.random.random() < 0.3 else 1
    if b.random.random() < 0.2 and "auto_pad" not in more:
        more["dilations"] = [b.random.choice([1, 2]) for _ in kernel]
    weight = b.weight(b.random.choice([1, 2, 3]) * group, c // group, *kernel)
    return b.add("Conv", [t, weight], group=group, **more)


def pooled(b: Draft, t: str) -> str:
    """Pool a map: largest element, mean or norm, perhaps with a partial last window."""
    if b.rank(t) > 5:
        raise Rejected("too many axes")
    kernel, more = _attributes(b, b.rank(t) - 2)
    op = b.random.choice(["MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool"])
    if b.opset > 9 and op != "LpPool" and b.random.random() < 0.3:
        more["ceil_mode"] = 1
    if op == "AveragePool" and b.random.random() < 0.5:
        more["count_include_pad"] = 1
    if op == "MaxPool" and b.opset > 9 and b.random.random() < 0.2 and "auto_pad" not in more:
        more["dilations"] = [2 for _ in kernel]
    return b.add(op, [t], kernel_shape=kernel, **more)


def transposed_convolution(b: Draft, t: str) -> str:
    """Add a transposed convolution."""
    c = b.fixed(t, 1)
    if not c or b.rank(t) > 4:
        raise Rejected("no channels")
    kernel, more = _attributes(b, b.rank(t) - 2)
    return b.add("ConvTranspose", [t, b.weight(c, b.random.choice([1, 2, 3]), *kernel)], **more)


WINDOWS: Sequence[Callable[[Draft, str], str]] = (
    convolved, convolved, pooled, pooled, padded, transposed_convolution
)  # fmt: skip
