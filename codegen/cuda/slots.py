"""Issue slots of the arithmetic of CUDA kernels, for estimates of their time."""

from __future__ import annotations

from collections.abc import Iterable

from polydyn.codegen.printers.cuda_values import HALF
from polydyn.schedules.expr import FLOATS, Const, Op, Value, walk

FUNCTIONS = {
    "div": (8, 35), "sqrt": (8, 18), "exp": (8, 9), "log": (12, 25), "erf": (16, 22), "tanh": (16, 16),
    "sigmoid": (16, 34), "sin": (85, 85), "cos": (85, 85), "tan": (85, 85), "pow": (86, 86), "asinh": (41, 41),
}  # fmt: skip
"""Operation -> issue slots of a warp per element: in kernels whose results have 16 bits, and in others.

Counted in the machine code of sm_90a (``python -m benchmarks.gpu.slots``, which explains how). Other operations have
one slot."""
UNCOUNTED_FUNCTIONS = (
    "asin", "acos", "atan", "sinh", "cosh", "acosh", "atanh", "fmod", "expm1", "log1p", "erfc", "atan2",
)  # fmt: skip
"""Operations that are not counted. They get the slots of an inverse hyperbolic sine."""


ALL_FUNCTIONS = {*FUNCTIONS, *UNCOUNTED_FUNCTIONS}


def of_operation(name: str, fast: bool) -> int:
    """Return the slots of one operation; ``fast``: results are finally rounded to 16 bits."""
    return FUNCTIONS["asinh" if name in UNCOUNTED_FUNCTIONS else name][0 if fast else 1] if name in ALL_FUNCTIONS else 1


def of_value(v: Value, fast: bool) -> int:
    """Return the slots of all operations of a value, each counted once.

    A division by a constant becomes a multiplication if allowed. A product that is added is one instruction with the
    sum. The compiler converts constants.
    """
    every = [x for x in {*walk(v)} if isinstance(x, Op)]
    added = {next(filter(_is_product, x.args), None) for x in every if x.name in ("add", "sub")}
    return sum(
        1 if x.name == "div" and fast and isinstance(x.args[1], Const) else of_operation(x.name, fast)
        for x in every
        if x not in added and not (x.name == "cast" and isinstance(x.args[0], Const))
    )


def _is_product(v: Value) -> bool:
    return isinstance(v, Op) and v.name == "mul" and v.dtype in FLOATS


def is_fast(results: Iterable[str]) -> bool:
    """Whether all float results have 16 bits, from the dtypes of a kernel's outputs."""
    floats = {*results} & {*FLOATS}
    return bool(floats) and floats <= {*HALF}
