"""Steps of optimizers (``ai.onnx.preview.training``): new values and new statistics for every tensor."""

from __future__ import annotations

from polydyn.graph.bodies import Body, body

TRAINING = "ai.onnx.preview.training"


def _groups(b: Body, kinds: int) -> list[list[str]]:
    """Group the inputs after rate and count by tensor: its value, its gradient and ``kinds - 2`` statistics."""
    names = b.node.inputs[2:]
    n = len(names) // kinds
    return [[names[k * n + i] for k in range(kinds)] for i in range(n)]


def _set_outputs(b: Body, results: list[list[str]]) -> None:
    """Output all new values first, then all first statistics, and so on."""
    for k in range(len(results[0])):
        for i, r in enumerate(results):
            b.set_output(r[k], k * len(results) + i)


def _regularized(b: Body, x: str, gradient: str) -> str:
    norm = b.attribute("norm_coefficient", 0.0)
    return b.op("Add", b.op("Mul", b.like(norm, x), x), gradient)


@body(f"{TRAINING}::Adagrad")
def adagrad(b: Body) -> None:
    """Compute ``x - r / (1 + t * decay) * g / (sqrt(h + g*g) + epsilon)``."""
    rate, count = b.input(0), b.input(1)
    results = []
    for x, gradient, squares in _groups(b, 3):
        times = b.op("CastLike", count, x)
        decayed = b.op("Add", b.like(1, x), b.op("Mul", times, b.like(b.attribute("decay_factor", 0.0), x)))
        step = b.op("Div", b.op("CastLike", rate, x), decayed)
        g = _regularized(b, x, gradient)
        total = b.op("Add", squares, b.op("Mul", g, g))
        scale = b.op("Add", b.op("Sqrt", total), b.like(b.attribute("epsilon", 0.0), x))
        results.append([b.op("Sub", x, b.op("Div", b.op("Mul", step, g), scale)), total])
    _set_outputs(b, results)


@body(f"{TRAINING}::Adam")
def adam(b: Body) -> None:
    """Update two moving averages. From the second step on, the rate is corrected for their start at zero."""
    rate, count = b.input(0), b.input(1)
    alpha, beta = b.attribute("alpha", 0.9), b.attribute("beta", 0.999)
    results = []
    for x, gradient, first, second in _groups(b, 4):
        g = _regularized(b, x, gradient)
        v = b.op("Add", b.op("Mul", b.like(alpha, x), first), b.op("Mul", b.like(1 - alpha, x), g))
        squared = b.op("Mul", g, g)
        h = b.op("Add", b.op("Mul", b.like(beta, x), second), b.op("Mul", b.like(1 - beta, x), squared))
        scale = b.op("Add", b.op("Sqrt", h), b.like(b.attribute("epsilon", 0.0), x))
        times, one = b.op("CastLike", count, x), b.like(1, x)
        missing = [b.op("Sub", one, b.op("Pow", b.like(base, x), times)) for base in (alpha, beta)]
        started = b.op("Greater", count, b.constant(0))
        corrected = b.op("Div", b.op("Sqrt", missing[1]), b.op("Where", started, missing[0], one))
        factor = b.op("Where", started, corrected, one)
        step = b.op("Mul", b.op("CastLike", rate, x), factor)
        new = b.op("Sub", x, b.op("Div", b.op("Mul", step, v), scale))
        after = b.like(1 - b.attribute("norm_coefficient_post", 0.0), x)
        results.append([b.op("Mul", after, new), v, h])
    _set_outputs(b, results)


@body(f"{TRAINING}::Momentum")
def momentum(b: Body) -> None:
    """Compute ``v' = alpha v + beta g``, and ``x - r v'`` (standard) or ``x - r (g + alpha v')`` (nesterov)."""
    rate, count = b.input(0), b.input(1)
    alpha, mode = b.attribute("alpha"), b.attribute("mode")
    results = []
    for x, gradient, velocity in _groups(b, 3):
        g = _regularized(b, x, gradient)
        started = b.op("Greater", count, b.constant(0))
        weight = b.op("Where", started, b.like(b.attribute("beta"), x), b.like(1, x))
        v = b.op("Add", b.op("Mul", b.like(alpha, x), velocity), b.op("Mul", weight, g))
        moved = v if mode == "standard" else b.op("Add", g, b.op("Mul", b.like(alpha, x), v))
        results.append([b.op("Sub", x, b.op("Mul", b.op("CastLike", rate, x), moved)), v])
    _set_outputs(b, results)
