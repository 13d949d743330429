"""LSTM, GRU and RNN: one GEMM multiplies the input of all steps; the recurrence is a Scan with a compiled body.

Each direction is a Scan; the reverse one runs through its slices from the end. Past the end of a sequence the state
does not change and the output is 0, which for the reverse direction is equivalent to starting at the end.

DynamicQuantizeLSTM multiplies integers. The input of all steps is quantized at once. The state of the whole batch is
quantized in each step, by the extremes that ONNX Runtime's kernel uses on one thread (on several threads it uses those
of parts of a batch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polydyn.errors import ShapeError
from polydyn.graph.bodies import OPSET, Body, body
from polydyn.graph.functions.attention import MICROSOFT
from polydyn.graph.functions.quantized import dynamic_product
from polydyn.graph.importer import ImportedGraph, ModelInput
from polydyn.graph.ir import Dim
from polydyn.graph.operators.registry import OnnxNode
from polydyn.schedules.expr import Array

ALPHA_BETA = {
    "Affine": (1.0, 0.0), "LeakyRelu": (0.01, 0.0), "ThresholdedRelu": (1.0, 0.0), "ScaledTanh": (1.0, 1.0),
    "HardSigmoid": (0.2, 0.5), "Elu": (1.0, 0.0),
}  # fmt: skip
"""Activations with parameters, and their defaults."""


@dataclass
class Step:
    """The body of a Scan, written one node after another."""

    prefix: str
    dtype: str
    nodes: list[OnnxNode] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)

    def op(self, name: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its first output."""
        return self.ops(name, 1, *inputs, **attributes)[0]

    def ops(self, name: str, count: int, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """Add a node with several outputs and return their names."""
        place = f"{name}_{len(self.nodes)}"
        outputs = tuple(f"{self.prefix}{place}.{k}" for k in range(count))
        self.nodes.append(OnnxNode(place, name, inputs, outputs, attributes, OPSET))
        return outputs

    def number(self, value: float) -> str:
        """Add a constant of the node's dtype."""
        name = f"{self.prefix}constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value, self.dtype)
        return name

    def activation(self, kind: tuple[str, float, float], x: str) -> str:
        """Add an activation function on every element."""
        name, alpha, beta = kind
        if name == "Affine":
            return self.op("Add", self.op("Mul", x, self.number(alpha)), self.number(beta))
        if name == "ScaledTanh":
            return self.op("Mul", self.op("Tanh", self.op("Mul", x, self.number(beta))), self.number(alpha))
        if name == "HardSigmoid":
            return self.op(name, x, alpha=alpha, beta=beta)
        return self.op(name, x, alpha=alpha) if name in ALPHA_BETA else self.op(name, x)


@dataclass(frozen=True)
class Weight:
    """A factor [columns of x, gates * hidden]. If it has a scale, it holds integers, and x is quantized by its
    extremes.
    """

    name: str
    scale: str = ""
    zero: str = ""

    def times(self, w: Body | Step, x: str) -> str:
        """Return the product of x and this factor."""
        return dynamic_product(w, x, self.name, self.scale, self.zero) if self.scale else w.op("MatMul", x, self.name)


@dataclass(frozen=True)
class Cell:
    """One direction of a recurrence: outer tensors of its Scan, by name.

    ``recurrent``: R. ``bias``: the bias of R, [gates * hidden], if it is not in the input's product. ``peepholes``:
    three of [hidden]. ``functions``: the activations of this direction.
    """

    hidden: int
    recurrent: Weight
    bias: str
    peepholes: tuple[str, ...]
    functions: tuple[tuple[str, float, float], ...]
    clip: float | None
    flag: bool
    """LSTM: input_forget; GRU: linear_before_reset."""

    def clipped(self, s: Step, x: str) -> str:
        """Clip the input of an activation."""
        return x if self.clip is None else s.op("Clip", x, s.number(-self.clip), s.number(self.clip))

    def parts(self, s: Step, x: str, count: int) -> tuple[str, ...]:
        """Split the columns of the gates."""
        return s.ops("Split", count, x, axis=1, num_outputs=count) if count > 1 else (x,)


SCALES = {1: 8, 2: 10}
"""Maps inputs of weights to the inputs of their scales if they hold integers. Zero points follow the scales."""
States = list[str]
Write = Callable[[Step, Cell, str, States], States]


def _rnn(s: Step, c: Cell, x: str, states: States) -> States:
    """Compute ``f(x + h R + b)``. ``x``: the input's product, including its bias."""
    total = s.op("Add", x, c.recurrent.times(s, states[0]))
    return [s.activation(c.functions[0], c.clipped(s, total))]


def _lstm(s: Step, c: Cell, x: str, states: States) -> States:
    """Compute gates i, o, f, c. Peepholes read the old cell; that of o reads the new one."""
    h, cell = states
    i, o, f, g = c.parts(s, s.op("Add", x, c.recurrent.times(s, h)), 4)
    if c.peepholes:
        i = s.op("Add", i, s.op("Mul", c.peepholes[0], cell))
        f = s.op("Add", f, s.op("Mul", c.peepholes[2], cell))
    i = s.activation(c.functions[0], c.clipped(s, i))
    f = s.op("Sub", s.number(1), i) if c.flag else s.activation(c.functions[0], c.clipped(s, f))
    g = s.activation(c.functions[1], c.clipped(s, g))
    new = s.op("Add", s.op("Mul", f, cell), s.op("Mul", i, g))
    if c.peepholes:
        o = s.op("Add", o, s.op("Mul", c.peepholes[1], new))
    o = s.activation(c.functions[0], c.clipped(s, o))
    return [s.op("Mul", o, s.activation(c.functions[2], new)), new]


def _gru(s: Step, c: Cell, x: str, states: States) -> States:
    """Compute gates z, r, h. The bias of R is added here, because r may multiply it."""
    (h,) = states
    xz, xr, xh = c.parts(s, x, 3)
    if c.flag:
        product = c.recurrent.times(s, h)
        z, r, n = c.parts(s, s.op("Add", product, c.bias) if c.bias else product, 3)
    else:
        rz, rr, rh = s.ops("Split", 3, c.recurrent.name, axis=1, num_outputs=3)
        z, r = s.op("MatMul", h, rz), s.op("MatMul", h, rr)
        n = ""
        if c.bias:
            bz, br, bh = s.ops("Split", 3, c.bias, axis=0, num_outputs=3)
            z, r = s.op("Add", z, bz), s.op("Add", r, br)
    z = s.activation(c.functions[0], c.clipped(s, s.op("Add", xz, z)))
    r = s.activation(c.functions[0], c.clipped(s, s.op("Add", xr, r)))
    if c.flag:
        n = s.op("Mul", r, n)
    else:
        n = s.op("MatMul", s.op("Mul", r, h), rh)
        n = s.op("Add", n, bh) if c.bias else n
    n = s.activation(c.functions[1], c.clipped(s, s.op("Add", xh, n)))
    return [s.op("Add", s.op("Mul", s.op("Sub", s.number(1), z), n), s.op("Mul", z, h))]


@body("LSTM")
def lstm(b: Body) -> None:
    """Expand a recurrence with two states and four gates."""
    _recurrence(b, _lstm, 4, ("Sigmoid", "Tanh", "Tanh"), (5, 6), "input_forget")


@body(f"{MICROSOFT}::DynamicQuantizeLSTM")
def dynamic_quantize_lstm(b: Body) -> None:
    """Expand an LSTM with integer W [directions, input, 4 * hidden] and R.

    Scales and zero points are per direction, or per column of it.
    """
    _recurrence(b, _lstm, 4, ("Sigmoid", "Tanh", "Tanh"), (5, 6), "input_forget")


@body("GRU")
def gru(b: Body) -> None:
    """Expand a recurrence with one state and three gates."""
    _recurrence(b, _gru, 3, ("Sigmoid", "Tanh"), (5,), "linear_before_reset")


@body("RNN")
def rnn(b: Body) -> None:
    """Expand a recurrence with one state and one function."""
    _recurrence(b, _rnn, 1, ("Tanh",), (5,), "")


def _recurrence(
    b: Body, write: Write, gates: int, functions: tuple[str, ...], initial: tuple[int, ...], flag: str
) -> None:
    """Expand a recurrence. ``functions``: defaults for one direction; ``initial``: positions of the initial states."""
    direction = b.attribute("direction", "forward")
    ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction)
    integers = bool(b.input(SCALES[1]))
    hidden = b.attribute("hidden_size") or b.tensor(b.input(2)).shape[1 if integers else 2].constant
    if ways is None or hidden is None:
        raise b.refuse(f"direction {direction}" if ways is None else "a hidden size that is not constant")
    b.ignore("output_sequence")
    _agree(b, initial)
    batched, clip = bool(b.attribute("layout", 0)), b.attribute("clip")
    chosen = _functions(b, functions, len(ways))
    x = b.op("Transpose", b.input(0), perm=(1, 0, 2)) if batched else b.input(0)
    in_body = gates == 3  # the step adds the bias of R
    results: list[list[str]] = []
    for d, back in enumerate(ways):
        bias, inner = _bias(b, d, in_body)
        product = _weight(b, 1, d).times(b, _evaluated(b, x) if integers else x)
        product = b.op("Add", product, bias) if bias else product
        cell = Cell(
            hidden, _weight(b, 2, d), inner, _peepholes(b, _direction(b, 7, d)), chosen[d],
            None if clip is None else float(clip), bool(b.attribute(flag, 0)) if flag else False,
        )  # fmt: skip
        states = [_initial(b, k, d, batched, x, hidden) for k in initial]
        results.append(_scan(b, write, cell, product, states, back, x))
    _set_outputs(b, results, batched)


def _agree(b: Body, initial: tuple[int, ...]) -> None:
    """Unify the batch of X with that of the sequence lengths and initial states, so that these facts hold outside
    too.
    """
    along = 0 if b.attribute("layout", 0) else 1
    batch: Dim | None = None
    for position, rank, axis in ((0, 3, along), (4, 1, 0), *((k, 3, along) for k in initial)):
        if not (name := b.input(position)):
            continue
        shape = b.tensor(name).shape
        if len(shape) != rank:
            raise ShapeError(f"{name} has {len(shape)} axes, not {rank}", tensor=name, rule=f"{b.node.op} of ONNX")
        why = f"axis {axis} of {name} is the batch of {b.input(0)}"
        batch = shape[axis] if batch is None else b.ctx.unify(shape[axis], batch, why)


def _functions(b: Body, default: tuple[str, ...], count: int) -> list[tuple[tuple[str, float, float], ...]]:
    """Return the activations of each direction with their parameters."""
    names = [n.capitalize() if n.islower() else n for n in b.attribute("activations") or default * count]
    alphas, betas = list(b.attribute("activation_alpha") or ()), list(b.attribute("activation_beta") or ())
    activations = []
    for n in names:
        alpha, beta = ALPHA_BETA.get(n, (0.0, 0.0))
        takes = n in ALPHA_BETA
        alpha = alphas.pop(0) if takes and alphas else alpha
        beta = betas.pop(0) if n in ("Affine", "ScaledTanh", "HardSigmoid") and betas else beta
        if not takes and n not in ("Sigmoid", "Tanh", "Relu", "Softsign", "Softplus"):
            raise b.refuse(f"the activation {n}")
        activations.append((n, float(alpha), float(beta)))
    each = len(default)
    return [tuple(activations[d * each : (d + 1) * each]) for d in range(count)]


def _direction(b: Body, position: int, d: int) -> str:
    """Return one direction of an input."""
    name = b.input(position)
    known = b.ctx.constant(name) if name else None
    if known is not None:
        return b.constant(known[d], str(known.dtype))
    return b.op("Gather", name, b.constant(d), axis=0) if name else ""


def _weight(b: Body, position: int, d: int) -> Weight:
    """Return W or R of one direction."""
    name, scale = _direction(b, position, d), _direction(b, SCALES[position], d)
    return Weight(name, scale, _direction(b, SCALES[position] + 1, d)) if scale else Weight(_turned(b, name))


def _evaluated(b: Body, x: str) -> str:
    """Zero the input [time, batch, columns] after the longest sequence, so that those elements change no scale."""
    if not (lengths := b.input(4)):
        return x
    times = b.cast(b.op("Range", b.constant(0), _steps(b, x), b.constant(1)), b.tensor(lengths).dtype)
    inside = b.op("Less", times, b.reduce("ReduceMax", lengths, 0))
    return b.op("Where", b.reshape(inside, -1, 1, 1), x, b.like(0, b.input(0)))


def _steps(b: Body, x: str) -> str:
    """Return the number of steps."""
    return b.op("Squeeze", b.size(x, 0), b.constant([0]))


def _turned(b: Body, name: str) -> str:
    """Transpose a matrix. A constant stays one, because a Scan's step does not pack values computed outside."""
    known = b.constants.get(name)
    return b.op("Transpose", name, perm=(1, 0)) if known is None else b.constant(known.T, str(known.dtype))


def _bias(b: Body, d: int, separate: bool) -> tuple[str, str]:
    """Return the biases of the input's product and of the step. Both are in the first one unless ``separate``."""
    whole = _direction(b, 3, d)
    if not whole:
        return "", ""
    w, r = b.ops("Split", 2, whole, axis=0, num_outputs=2)
    return (w, r) if separate else (b.op("Add", w, r), "")


def _peepholes(b: Body, p: str) -> tuple[str, ...]:
    return b.ops("Split", 3, p, axis=0, num_outputs=3) if p else ()


def _initial(b: Body, position: int, d: int, batched: bool, x: str, hidden: int) -> str:
    """Return [batch, hidden]: an input, or zeros."""
    name = b.input(position)
    if name:
        return b.op("Gather", name, b.constant(d), axis=1 if batched else 0)
    zero = np.zeros(1, b.tensor(b.input(0)).dtype)
    return b.op("ConstantOfShape", b.shape(b.size(x, 1), hidden), value=zero)


def _scan(b: Body, write: Write, cell: Cell, product: str, states: list[str], back: bool, x: str) -> list[str]:
    """Return [time, batch, hidden] of one direction, and its last states."""
    dtype, lengths = b.tensor(b.input(0)).dtype, b.input(4)
    s = Step(f"{product}.", dtype)
    formals = [f"{s.prefix}state{k}" for k in range(len(states))]
    scanned, before = [product], formals
    is_reversed = bool(lengths and back and cell.recurrent.scale)  # all sequences at one step are quantized together
    if lengths:
        kind = b.tensor(lengths).dtype
        scanned.append(b.cast(b.op("Range", b.constant(0), _steps(b, x), b.constant(1)), kind))
        s.constants[f"{s.prefix}last"] = np.array([-1], np.int64)
        ends = s.op("Unsqueeze", lengths, f"{s.prefix}last")
    if lengths and cell.recurrent.scale:  # in ONNX Runtime a state is zero from the second step after its end
        at_most = s.op("LessOrEqual", f"{s.prefix}t", ends)
        before = [s.op("Where", at_most, formals[0], s.number(0)), *formals[1:]]
    new = write(s, cell, f"{s.prefix}x", before)
    out = new[0]
    if lengths:
        inside = s.op("Less", f"{s.prefix}t", ends)
        out = s.op("Where", inside, new[0], s.number(0))
        new = [s.op("Where", inside, a, old) for a, old in zip(new, formals, strict=True)]
    if is_reversed:
        scanned[0], back = _reversed(b, product), False
    names = [*formals, f"{s.prefix}x", *([f"{s.prefix}t"] if lengths else [])]
    inputs = tuple(ModelInput(n, dtype, None) for n in names)
    graph = ImportedGraph("step", inputs, (*new, out), tuple(s.nodes), s.constants)
    ways = (int(back),) * len(scanned)
    results = b.ops(
        "Scan", len(states) + 1, *states, *scanned, body=graph, num_scan_inputs=len(scanned),
        scan_input_directions=ways, scan_output_directions=(int(back),),
    )  # fmt: skip
    return [_reversed(b, results[-1]) if is_reversed else results[-1], *results[:-1]]


def _reversed(b: Body, x: str) -> str:
    """Reverse the steps of each sequence in [time, batch, columns]."""
    return b.op("ReverseSequence", x, b.cast(b.input(4), "int64"), time_axis=0, batch_axis=1)


def _set_outputs(b: Body, results: list[list[str]], batched: bool) -> None:
    """Join all directions: [time, directions, batch, hidden] and states [directions, batch, hidden]."""
    for k in range(len(results[0])):
        if not b.output(k):
            continue
        axis = 1 if k == 0 or batched else 0
        ways = [b.op("Unsqueeze", r[k], b.constant([axis])) for r in results]
        whole = ways[0] if len(ways) == 1 else b.op("Concat", *ways, axis=axis)
        if k == 0 and batched:
            whole = b.op("Transpose", whole, perm=(2, 0, 1, 3))
        b.set_output(whole, k)
