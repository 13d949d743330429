"""DFT and STFT as products with matrices of cosines and sines."""

from __future__ import annotations

import numpy as np

from polydyn.graph.bodies import Body, body


def _angles(b: Body, rows: str, columns: str, period: str, dtype: str) -> tuple[str, str]:
    """Return cosine and sine of ``2 pi i j / period`` for i below ``rows`` and j below ``columns``: [rows, columns]
    each.

    The product is taken modulo the period before it becomes a float, so that large products lose no digits. Angles are
    float64, so that the sine of half a turn is 0.
    """
    zero, one = b.constant(0), b.constant(1)
    sizes = [b.op("Squeeze", x, b.constant([0])) for x in (rows, columns)]
    i = b.op("Unsqueeze", b.op("Range", zero, sizes[0], one), b.constant([1]))
    j = b.op("Range", zero, sizes[1], one)
    turns = b.op("Div", b.cast(b.op("Mod", b.op("Mul", i, j), period), "float64"), b.cast(period, "float64"))
    angle = b.op("Mul", turns, b.constant(2 * np.pi, "float64"))
    return b.cast(b.op("Cos", angle), dtype), b.cast(b.op("Sin", angle), dtype)


def transform(b: Body, parts: tuple[str, str], length: str, dtype: str, inverse: bool, onesided: bool) -> list[str]:
    """Return real and imaginary part of the DFT along the last axis of both parts (the imaginary one may be ``""``).

    Forward and one-sided keeps half of the bins plus one; inverse and one-sided adds the conjugates and is real.
    """
    real, imaginary = parts
    half = b.op("Add", b.op("Div", length, b.constant([2])), b.constant([1]))
    input_length = half if inverse and onesided else length
    real, imaginary = (_fitted(b, x, input_length) if x else "" for x in (real, imaginary))
    if inverse and onesided:
        return [_real_inverse(b, real, imaginary, length, half, dtype)]
    output_length = half if onesided else length
    cosine, sine = _angles(b, length, output_length, length, dtype)
    a = b.op("MatMul", real, cosine)
    c = b.op("MatMul", real, sine)
    if not inverse:
        c = b.op("Neg", c)
    if imaginary:
        other = b.op("MatMul", imaginary, sine)
        a = b.op("Sub" if inverse else "Add", a, other)
        c = b.op("Add", c, b.op("MatMul", imaginary, cosine))
    if inverse:
        n = b.cast(length, dtype)
        a, c = b.op("Div", a, n), b.op("Div", c, n)
    return [a, c]


def _real_inverse(b: Body, real: str, imaginary: str, length: str, half: str, dtype: str) -> str:
    """Count every bin twice, for its conjugate, except the first one and the middle one of an even length."""
    cosine, sine = _angles(b, half, length, length, dtype)
    k = b.op("Range", b.constant(0), b.op("Squeeze", half, b.constant([0])), b.constant(1))
    single = b.op("Or", b.op("Equal", k, b.constant(0)), b.op("Equal", b.op("Mul", k, b.constant(2)), length))
    weight = b.op("Where", single, b.constant(1, dtype), b.constant(2, dtype))
    total = b.op("MatMul", b.op("Mul", real, weight), cosine)
    if imaginary:
        total = b.op("Sub", total, b.op("MatMul", b.op("Mul", imaginary, weight), sine))
    return b.op("Div", total, b.cast(length, dtype))


def _fitted(b: Body, x: str, length: str) -> str:
    """Take the first elements along the last axis, zero-padded if there are fewer."""
    first_elements = b.op("Slice", x, b.constant([0]), length, b.constant([-1]))
    missing = b.op("Sub", length, b.op("Shape", first_elements, start=-1))
    return b.op("Pad", first_elements, b.shape(0, missing), "", b.constant([-1]))


def _pair(b: Body, parts: list[str]) -> str:
    """Join parts along a new last axis."""
    columns = [b.op("Unsqueeze", x, b.constant([-1])) for x in parts]
    return columns[0] if len(columns) == 1 else b.op("Concat", *columns, axis=-1)


def _parts(b: Body, x: str, count: int) -> tuple[str, str]:
    """Split a tensor into real and imaginary part. Its last axis holds ``count`` of them."""
    if count not in (1, 2):
        raise b.refuse(f"a last axis of {count}")
    real = b.op("Gather", x, b.constant(0), axis=-1)
    return real, b.op("Gather", x, b.constant(1), axis=-1) if count == 2 else ""


@body("DFT")
def dft(b: Body) -> None:
    """Compute the discrete Fourier transform along one axis. The last axis holds real and imaginary parts."""
    x = b.tensor(b.input(0))
    rank, count = len(x.shape), x.shape[-1].constant
    inverse, onesided = bool(b.attribute("inverse", 0)), bool(b.attribute("onesided", 0))
    axis = b.attribute("axis", 1)
    if b.node.opset >= 20:
        axis = -2
        if b.input(2):
            known = b.ctx.constant(b.input(2))
            if known is None:
                raise b.refuse("an axis that is not constant", "make the axis an initializer")
            axis = int(known.reshape(-1)[0])
    axis = axis % rank
    if axis == rank - 1 or count is None:
        raise b.refuse(f"axis {axis} of {rank}")
    perm = [a for a in range(rank) if a not in (axis, rank - 1)]
    moved = b.op("Transpose", x.name, perm=(*perm, axis, rank - 1))
    if b.input(1):
        length = b.reshape(b.input(1), 1)
    else:
        length = b.size(x.name, axis)
        if inverse and onesided:
            length = b.op("Mul", b.op("Sub", length, b.constant([1])), b.constant([2]))
    parts = transform(b, _parts(b, moved, count), length, x.dtype, inverse, onesided)
    back = [*range(axis), rank - 2, *range(axis, rank - 2), rank - 1]
    b.set_output(b.op("Transpose", _pair(b, parts), perm=tuple(back)))


@body("STFT")
def stft(b: Body) -> None:
    """Transform windowed frames of the signal, ``frame_step`` apart."""
    x, step, window, size = b.tensor(b.input(0)), b.reshape(b.input(1), 1), b.input(2), b.input(3)
    count = x.shape[-1].constant if len(x.shape) == 3 else 1
    if count is None:
        raise b.refuse(f"a last axis of {x.shape[-1]}")
    length = b.reshape(size, 1) if size else b.size(window, 0)
    room = b.op("Sub", b.size(x.name, 1), length)
    frames = b.op("Add", b.op("Div", room, step), b.constant([1]))
    zero, one = b.constant(0), b.constant(1)
    first = b.op("Range", zero, b.op("Squeeze", frames, b.constant([0])), one)
    inside = b.op("Range", zero, b.op("Squeeze", length, b.constant([0])), one)
    places = b.op("Add", b.op("Unsqueeze", b.op("Mul", first, step), b.constant([1])), inside)
    signal = x.name if len(x.shape) == 3 else b.op("Unsqueeze", x.name, b.constant([-1]))
    parts = []
    for part in _parts(b, signal, count):
        taken = b.op("Gather", part, places, axis=1) if part else ""
        parts.append(b.op("Mul", taken, window) if part and window else taken)
    onesided = bool(b.attribute("onesided", 1))
    b.set_output(_pair(b, transform(b, (parts[0], parts[1]), length, x.dtype, False, onesided)))
