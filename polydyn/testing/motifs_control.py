"""Structures of random models (``motifs``): computed sizes, branches, bodies, recurrences, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from polydyn.testing.drafts import Draft, Rejected
from polydyn.testing.motifs import END, unary

NODE = helper.make_node
KINDS = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "float16": TensorProto.FLOAT16}


def body(
    name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[tuple[str, int]], outputs: Sequence[tuple[str, int]]
) -> onnx.GraphProto:
    """Build a body; inputs and outputs are (name, type) of unknown rank."""

    def info(x: Sequence[tuple[str, int]]) -> list[onnx.ValueInfoProto]:
        single = (TensorProto.BOOL, TensorProto.INT64)
        return [helper.make_tensor_value_info(n, t, [] if t in single else None) for n, t in x]

    return helper.make_graph(list(nodes), name, info(inputs), info(outputs))


def _size(b: Draft, t: str = "", axis: int = -1) -> str:
    """Return a scalar: the size of an axis."""
    t = t or b.pick(lambda s: b.rank(s) > 0, None)
    axis = b.axis(t) if axis < 0 else axis
    return b.add("Gather", [b.add("Shape", [t]), b.const(np.int64(axis))])


def _vector(b: Draft, scalars: list[str]) -> str:
    parts = [b.add("Reshape", [s, b.ints(1)]) for s in scalars]
    return b.add("Concat", parts, axis=0) if len(parts) > 1 else parts[0]


# -- sizes -------------------------------------------------------------------------------------------------------------


def computed(b: Draft) -> str:
    """Return a scalar computed from sizes, with minima and maxima among others."""
    x = _size(b)
    for _ in range(b.random.choice([1, 1, 2])):
        kind = b.random.choice(["Min", "Max", "Add", "Sub", "Mul", "Div", "Mod"])
        if kind in ("Min", "Max") and b.opset < 12:
            raise Rejected("no extremes of integers")
        other = (
            _size(b) if b.random.random() < 0.4 and kind != "Mod" else b.const(np.int64(b.random.choice([1, 2, 3, 4])))
        )
        x = b.add(kind, [x, other] if b.random.random() < 0.8 or kind in ("Div", "Mod") else [other, x])
    return x


def sized_slice(b: Draft) -> None:
    """Add a slice up to a computed size, or from there, and a reader of it."""
    t = b.pick(lambda s: b.rank(s) > 0 and b.opset > 9)
    axis = b.axis(t)
    at = b.add("Reshape", [computed(b), b.ints(1)])
    bounds = [b.ints(0), at] if b.random.random() < 0.6 else [at, b.ints(END)]
    y = b.add("Slice", [t, *bounds, b.ints(axis)])
    if b.random.random() < 0.5:
        unary(b, y)
    elif b.rank(y) == 3 and b.fixed(y, 1):
        b.add("Conv", [y, b.weight(2, b.fixed(y, 1) or 1, 2)], pads=[1, 1])


def sized_made(b: Draft) -> None:
    """Add Range, Expand, ConstantOfShape, Tile of computed sizes."""
    kind = b.random.choice(["Range", "Expand", "ConstantOfShape", "Tile", "Pad"])
    if kind == "Range" and b.opset > 10:
        r = b.add("Range", [b.const(np.int64(0)), computed(b), b.const(np.int64(b.random.choice([1, 1, 2])))])
        b.add("Cast", [r], to=KINDS[b.kind])
    elif kind == "Tile":
        t = b.pick(lambda s: b.rank(s) == 1)
        b.add("Tile", [t, b.ints(b.random.choice([0, 1, 2, 3]))])
    elif kind == "Pad" and b.opset > 10:
        t = b.pick(lambda s: b.rank(s) == 1)
        b.add(
            "Pad",
            [t, _vector(b, [b.const(np.int64(1)), computed(b)])],
            mode=b.random.choice(["constant", "edge", "reflect"]),
        )
    elif kind == "Expand":
        t = b.pick(lambda s: b.rank(s) > 0)
        b.add("Expand", [t, _vector(b, [computed(b), *[b.const(np.int64(1))] * b.rank(t)])])
    else:
        s = _vector(b, [computed(b), b.const(np.int64(2))])
        y = b.add("ConstantOfShape", [s])
        b.add("Add", [b.add("Cast", [y], to=KINDS[b.kind]), b.const(1.5)])


def sized_reshape(b: Draft) -> None:
    """Reshape to sizes that the model computes: merged or split by a division."""
    t = b.pick(lambda s: b.rank(s) > 1)
    n = b.rank(t)
    sizes = [_size(b, t, a) for a in range(n)]
    a = b.random.randrange(n - 1)
    if b.random.random() < 0.6:
        merged = b.add("Mul", sizes[a : a + 2])
        b.add("Reshape", [t, _vector(b, [*sizes[:a], merged, *sizes[a + 2 :]])])
    else:
        two = b.const(np.int64(2))
        parts = [b.add("Div", [sizes[-1], two]), two]
        b.add("Reshape", [t, _vector(b, [*sizes[:-1], *(parts if b.random.random() < 0.5 else parts[::-1])])])


def flat_index(b: Draft) -> None:
    """Flatten a map and read it again at b * T + t."""
    t = b.pick(lambda s: b.rank(s) == 2 and b.opset > 10)
    zero, one = b.const(np.int64(0)), b.const(np.int64(1))
    rows, columns = _size(b, t, 0), _size(b, t, 1)
    i = b.add("Reshape", [b.add("Range", [zero, rows, one]), b.ints(-1, 1)])
    index = b.add("Add", [b.add("Mul", [i, columns]), b.add("Range", [zero, columns, one])])
    b.add("Gather", [b.add("Reshape", [t, b.ints(-1)]), index])


# -- branches and bodies -----------------------------------------------------------------------------------------------


def branch(b: Draft) -> None:
    """Add an If, on data or on a size."""
    t = b.pick()
    kind = KINDS[b.kind]
    if b.random.random() < 0.5:
        cond = b.input([], "bool")
    else:
        op = b.random.choice(["Less", "Greater", "Equal"])
        if b.opset < 9:
            raise Rejected("no comparison of integers")
        other = b.const(np.int64(b.random.choice([1, 2, 4]))) if b.random.random() < 0.7 else _size(b)
        cond = b.add(op, [_size(b), other])
    bodies: dict[str, Any] = {}
    for role, ops in (("then_branch", ["Relu", "Neg", "cut"]), ("else_branch", ["Tanh", "Abs", "Identity"])):
        out, op = b.name("b"), b.random.choice(ops)
        if op == "cut" and b.opset > 12 and b.rank(t) > 0:
            made = NODE("Slice", [t, b.ints(0), b.ints(1), b.ints(0)], [out])
        else:
            made = NODE("Neg" if op == "cut" else op, [t], [out])
        bodies[role] = body(out, [made], [], [(out, kind)])
    unary(b, b.add("If", [cond], **bodies)) if b.random.random() < 0.6 else b.add("If", [cond], **bodies)


def squeeze_branch(b: Draft) -> None:
    """Add If(an axis has one element) Squeeze else Identity, as torch's older exporter writes it."""
    t = b.pick(lambda s: b.rank(s) > 1 and b.opset > 12)
    axis, kind = b.axis(t), KINDS[b.kind]
    cond = b.add("Equal", [_size(b, t, axis), b.const(np.int64(1))])
    x, y = b.name("b"), b.name("b")
    b.add("If", [cond], then_branch=body(x, [NODE("Squeeze", [t, b.ints(axis)], [x])], [], [(x, kind)]),
          else_branch=body(y, [NODE("Identity", [t], [y])], [], [(y, kind)]))  # fmt: skip


def loop(b: Draft) -> None:
    """Add a Loop with a state, rows of the states, a captured tensor; the count is a constant, an input or a size."""
    t = b.pick(lambda s: b.rank(s) > 0)
    u = b.pick(lambda s: b.shape(s) == b.shape(t), recent=0)
    kind = KINDS[b.kind]
    i, c, x, y, row, more = (b.name("l") for _ in range(6))
    nodes = [NODE("Add", [x, u], [y]), NODE("Tanh", [y], [row]), NODE("Identity", [c], [more])]
    inner = body("body", nodes, [(i, TensorProto.INT64), (c, TensorProto.BOOL), (x, kind)],
                 [(more, TensorProto.BOOL), (y, kind), (row, kind)])  # fmt: skip
    count = b.random.choice(["const", "size", "input"])
    n = b.const(np.int64(3)) if count == "const" else _size(b) if count == "size" else b.input([], "int64", 4, 1)
    b.add_all("Loop", [n, b.const(np.bool_(True)), t], 2, body=inner)


def scan(b: Draft) -> None:
    """Add a Scan along an axis, forwards or backwards."""
    t = b.pick(lambda s: b.rank(s) > 1 and b.opset > 8)
    axis, kind = b.axis(t), KINDS[b.kind]
    if len(set(b.shape(t)[axis])) == 1 and (b.fixed(t, axis) or 0) > 8:
        raise Rejected("long")
    start = (
        b.add("ReduceSum", [t, b.ints(axis)], keepdims=0)
        if b.opset > 12
        else b.add("ReduceSum", [t], axes=[axis], keepdims=0)
    )
    s, x, y, z = (b.name("l") for _ in range(4))
    nodes = [NODE("Add", [s, x], [y]), NODE(b.random.choice(["Tanh", "Neg", "Relu"]), [y], [z])]
    inner = body("body", nodes, [(s, kind), (x, kind)], [(y, kind), (z, kind)])
    more: dict[str, Any] = {"scan_input_axes": [axis], "scan_input_directions": [b.random.randrange(2)]}
    more |= {"scan_output_axes": [b.random.choice([0, axis])], "scan_output_directions": [b.random.randrange(2)]}
    b.add_all("Scan", [start, t], 2, body=inner, num_scan_inputs=1, **more)


def recurrence(b: Draft) -> None:
    """Add LSTM, GRU or RNN: directions, layouts, optional operands, lengths."""
    op, gates = b.random.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    n, hidden = b.random.choice([1, 3, 4]), b.random.choice([1, 2, 3, 4])
    layout = b.random.randrange(2) if b.opset > 13 and b.random.random() < 0.3 else 0
    batch = b.one_of(["B"], ["B"], [1], [2])[0]
    x = b.input([batch, "L", n] if layout else ["L", batch, n])
    way = b.random.choice(["forward", "reverse", "bidirectional"])
    ways = 2 if way == "bidirectional" else 1
    operands = [x, b.weight(ways, gates * hidden, n), b.weight(ways, gates * hidden, hidden)]
    more: dict[str, Any] = {"hidden_size": hidden, "direction": way}
    chosen = [b.random.random() < 0.5 for _ in range(4)]
    optional = [
        b.weight(ways, 2 * gates * hidden) if chosen[0] else "",
        b.input([batch], "int32", "L", 1) if chosen[1] and b.random.random() < 0.5 else "",
        b.input([batch, ways, hidden] if layout else [ways, batch, hidden]) if chosen[2] else "",
    ]
    if op == "LSTM":
        optional.append(b.input([batch, ways, hidden] if layout else [ways, batch, hidden]) if chosen[3] else "")
        more |= {"input_forget": 1} if b.random.random() < 0.2 else {}
    more |= {"linear_before_reset": 1} if op == "GRU" and chosen[3] else {}
    more |= {"layout": layout} if layout else {}
    more |= {"clip": 0.5} if b.random.random() < 0.1 else {}
    y = b.add_all(op, [*operands, *optional], 3 if op == "LSTM" else 2, **more)[0]
    if b.random.random() < 0.4 and not layout:
        b.add("Squeeze", [y, b.ints(1)]) if b.opset > 12 else b.add("Squeeze", [y], axes=[1])


# -- bytes and other types ---------------------------------------------------------------------------------------------


def quantized(b: Draft) -> None:
    """Quantize a float tensor to bytes and back, perhaps with a product between."""
    t = b.pick(lambda s: b.rank(s) > 0 and b.opset > 9)
    byte = b.random.choice(["uint8", "int8"])
    scale, zero = b.const(0.0625), b.const(np.array(b.random.choice([0, 3, 128 if byte == "uint8" else -4])), byte)
    q = b.add("QuantizeLinear", [t, scale, zero])
    kind = b.random.choice(["back", "integer", "qlinear", "dequantized", "view"])
    k = b.fixed(t, b.rank(t) - 1)
    if kind == "view":
        q = b.add("Transpose", [q], perm=b.random.sample(range(b.rank(q)), b.rank(q)))
    elif kind != "back" and k:
        w = b.const(b.numbers.integers(-7, 8, (k, 5)), "int8")
        if kind == "integer":
            y = b.add("MatMulInteger", [q, w, zero])
            b.add("Mul", [b.add("Cast", [y], to=KINDS[b.kind]), b.const(0.01)])
        elif kind == "qlinear":
            z = b.const(np.array(2), byte)
            q = b.add(
                "QLinearMatMul", [q, scale, zero, w, b.const(0.02), b.const(np.array(0), "int8"), b.const(0.1), z]
            )
            b.add("DequantizeLinear", [q, b.const(0.1), z])
        else:
            wide = b.add("DequantizeLinear", [w, b.const(0.02)])
            b.add("MatMul", [b.add("DequantizeLinear", [q, scale, zero]), wide])
        return
    b.add("DequantizeLinear", [q, scale, zero])


def dynamic_bytes(b: Draft) -> None:
    """Add DynamicQuantizeLinear and a product of integers, as onnxruntime's quantizer writes it."""
    t = b.pick(lambda s: b.rank(s) > 1 and bool(b.fixed(s, b.rank(s) - 1)) and b.opset > 10)
    k = b.fixed(t, b.rank(t) - 1) or 1
    q, scale, zero = b.add_all("DynamicQuantizeLinear", [t], 3)
    y = b.add("MatMulInteger", [q, b.const(b.numbers.integers(-7, 8, (k, 6)), "int8"), zero])
    b.add("Mul", [b.add("Cast", [y], to=KINDS[b.kind]), b.add("Mul", [scale, b.const(0.02)])])


def rounded(b: Draft) -> None:
    """Cast to a narrow type, or to integers, and back."""
    t = b.pick()
    narrow = [TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT8, TensorProto.BOOL, TensorProto.INT64]
    narrow += [TensorProto.BFLOAT16] * 2 if b.opset > 12 else []
    narrow += [TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2] if b.opset > 18 else []
    a, c = b.name("t"), b.name("t")
    nodes = [NODE("Cast", [t], [a], to=b.random.choice(narrow)), NODE("Cast", [a], [c], to=KINDS[b.kind])]
    b.extend(nodes, [c])
