"""Random choices: Bernoulli, which ONNX's own function inverts, and Multinomial."""

from __future__ import annotations

from polydyn.graph.bodies import Body, body
from polydyn.graph.dtypes import onnx_dtype

INT32 = 6
"""ONNX's code of int32."""


@body("Bernoulli")
def bernoulli(b: Body) -> None:
    """Compute ``u < x`` for a random number u in [0, 1)."""
    x = b.input(0)
    dtype, seed = b.attribute("dtype"), b.attribute("seed")
    u = b.op("RandomUniformLike", x, **({} if seed is None else {"seed": seed}))
    b.set_output(b.cast(b.op("Less", u, x), onnx_dtype(dtype) if dtype else b.tensor(x).dtype))


@body("Multinomial")
def multinomial(b: Body) -> None:
    """Compute ``argmax(weight - log(-log(u)))`` over the classes for each sample of each row. Weights are
    logarithms.
    """
    x, count = b.input(0), int(b.attribute("sample_size", 1))
    rows, classes = b.size(x, 0), b.size(x, 1)
    weights = b.op("Expand", b.op("Unsqueeze", x, b.constant([1])), b.shape(rows, count, classes))
    seed = b.attribute("seed")
    noise = {} if seed is None else {"seed": seed}
    u = b.op("RandomUniformLike", weights, low=2.0**-24, high=1.0, **noise)
    gumbel = b.op("Neg", b.op("Log", b.op("Neg", b.op("Log", u))))
    drawn = b.op("ArgMax", b.op("Add", weights, gumbel), axis=2, keepdims=0)
    b.set_output(b.cast(drawn, onnx_dtype(b.attribute("dtype", INT32))))
