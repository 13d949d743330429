"""Small groups that several test modules share."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from polydyn.schedules.expr import FromIndex, Value, const, load, op
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.isl_util import equals
from polydyn.schedules.model import Array, Group, Statement, row_major, verify_group

F = "float32"


def array(name: str, role: str, *shape: IndexLike) -> Array:
    dims = tuple(map(Index.of, shape))
    return Array(name, F, dims, role, row_major(dims))


def statement(
    name: str, iters: dict[str, IndexLike], target: str, index: str, value: Value, reduce: str | None = None
) -> Statement:
    subscripts = tuple(Index.of(x) for x in index.split())
    return Statement(name, tuple((n, Index.of(e)) for n, e in iters.items()), target, subscripts, value, reduce)


def ld(buffer: str, *index: IndexLike) -> Value:
    return load(buffer, index, F)


def group(name: str, params: str, arrays: list[Array], statements: list[Statement]) -> Group:
    g = Group(name, tuple(params.split()), {a.name: a for a in arrays}, tuple(statements))
    verify_group(g)
    return g


def matmul() -> Group:
    """Build {MatMul, Bias + Relu}."""
    ij: dict[str, IndexLike] = {"i": "M", "j": "N"}
    return group(
        "matmul",
        "M N K",
        [array("A", "input", "M", "K"), array("B", "constant", "K", "N"), array("C", "constant", "N"),
         array("D", "local", "M", "N"), array("E", "output", "M", "N")],
        [
            statement("S2", ij, "D", "i j", const(0, F)),
            statement("S3", {**ij, "k": "K"}, "D", "i j", op("mul", ld("A", "i", "k"), ld("B", "k", "j")), "sum"),
            statement("S4", ij, "E", "i j", op("max", op("add", ld("D", "i", "j"), ld("C", "j")), const(0, F))),
        ],
    )  # fmt: skip


def pad_conv() -> Group:
    """Build {Pad, Conv3x3, Bias + Relu}: TSCompiler Figure 7, with symbolic channels."""
    h, w = Index.of("h"), Index.of("w")
    out: dict[str, IndexLike] = {"n": "N", "h": "H", "w": "W", "o": "O"}
    low = [op("ge", FromIndex("int64", x), const(1, "int64")) for x in (h, w)]
    high = [op("le", FromIndex("int64", x), FromIndex("int64", Index.of(e))) for x, e in ((h, "H"), (w, "W"))]
    inside = op("and", op("and", *low), op("and", *high))
    return group(
        "pad_conv",
        "N H W I O H2 W2",
        [array("X", "input", "N", "H", "W", "I"), array("Ap", "local", "N", "H2", "W2", "I"),
         array("B", "constant", "O", 3, 3, "I"), array("C", "constant", "O"),
         array("D", "local", "N", "H", "W", "O"), array("E", "output", "N", "H", "W", "O")],
        [
            statement("S1", {"n": "N", "h": "H2", "w": "W2", "c": "I"}, "Ap", "n h w c",
                      op("where", inside, ld("X", "n", h - 1, w - 1, "c"), const(0, F))),
            statement("S2", out, "D", "n h w o", const(0, F)),
            statement("S3", {**out, "c": "I", "r": 3, "s": 3}, "D", "n h w o",
                      op("mul", ld("Ap", "n", h + "r", w + "s", "c"), ld("B", "o", "r", "s", "c")), "sum"),
            statement("S4", out, "E", "n h w o",
                      op("max", op("add", ld("D", "n", "h", "w", "o"), ld("C", "o")), const(0, F))),
        ],
    )  # fmt: skip


PAD_CONV_FACTS = (equals("H2", Index.of("H") + 2), equals("W2", Index.of("W") + 2))


def softmax() -> Group:
    """Build row maximum, row sum, quotient."""
    r: dict[str, IndexLike] = {"r": "R"}
    rl: dict[str, IndexLike] = {"r": "R", "l": "L"}
    shifted = op("exp", op("sub", ld("x", "r", "l"), ld("m", "r")))
    return group(
        "softmax",
        "R L",
        [array("x", "input", "R", "L"), array("m", "local", "R"), array("d", "local", "R"),
         array("y", "output", "R", "L")],
        [
            statement("M0", r, "m", "r", const(float("-inf"), F)),
            statement("M1", rl, "m", "r", ld("x", "r", "l"), "max"),
            statement("D0", r, "d", "r", const(0, F)),
            statement("D1", rl, "d", "r", shifted, "sum"),
            statement("Y", rl, "y", "r l", op("div", shifted, ld("d", "r"))),
        ],
    )  # fmt: skip


def depthwise(last: bool = False) -> Group:
    """Build a depthwise 3x3 convolution with a bias, without padding; ``last``: channels-last."""
    point: dict[str, IndexLike] = {"c": "C", "h": "H", "w": "W"}
    taps = point | {"j": 3, "k": 3}
    x: list[IndexLike] = ["H2", "W2", "C"] if last else ["C", "H2", "W2"]
    y: list[IndexLike] = ["H", "W", "C"] if last else ["C", "H", "W"]
    pixel, at = [Index.of("h") + "j", Index.of("w") + "k"], "h w c" if last else "c h w"
    read = ld("x", *pixel, "c") if last else ld("x", "c", *pixel)
    return group(
        "depthwise",
        "C H W H2 W2",
        [array("x", "input", *x), array("v", "constant", 3, 3, "C"), array("b", "constant", "C"),
         array("s", "local", "C", "H", "W"), array("y", "output", *y)],
        [
            statement("S0", point, "s", "c h w", const(0, F)),
            statement("S1", taps, "s", "c h w", op("mul", read, ld("v", "j", "k", "c")), "sum"),
            statement("Y", point, "y", at, op("add", ld("s", "c", "h", "w"), ld("b", "c"))),
        ],
    )  # fmt: skip


def turned_depthwise() -> Group:
    """Build a depthwise 3x3 convolution with a padding of one, whose image and sums are copied."""
    image: dict[str, IndexLike] = {"c": "C", "y": "H", "x": "W"}
    point: dict[str, IndexLike] = {"c": "C", "h": "H", "w": "W"}
    at = [Index.of("h") + "j" - 1, Index.of("w") + "k" - 1]
    inside = [
        op(how, FromIndex("int64", i), FromIndex("int64", Index.of(end)))
        for i, e in zip(at, "HW", strict=True) for how, end in (("ge", 0), ("lt", e))
    ]  # fmt: skip
    read = op("where", reduce(lambda a, b: op("and", a, b), inside), ld("t", "c", *at), const(0, F))
    return group(
        "turned",
        "C H W",
        [array("x", "input", "C", "H", "W"), array("v", "constant", 3, 3, "C"), array("b", "constant", "C"),
         *(array(n, "local", "C", "H", "W") for n in "tsk"), array("y", "output", "C", "H", "W")],
        [
            statement("TURN", image, "t", "c y x", ld("x", "c", "y", "x")),
            replace(statement("S0", point, "s", "c h w", const(0, F)), role="init"),
            statement("S1", point | {"j": 3, "k": 3}, "s", "c h w", op("mul", read, ld("v", "j", "k", "c")), "sum"),
            statement("KEEP", point, "k", "c h w", ld("s", "c", "h", "w")),
            statement("Y", point, "y", "c h w", op("add", ld("k", "c", "h", "w"), ld("b", "c"))),
        ],
    )  # fmt: skip


def layer_norm() -> Group:
    """Build mean, variance, normalisation."""
    r: dict[str, IndexLike] = {"r": "R"}
    rl: dict[str, IndexLike] = {"r": "R", "l": "L"}
    centred = op("sub", ld("x", "r", "l"), ld("m", "r"))
    return group(
        "layer_norm",
        "R L",
        [array("x", "input", "R", "L"), array("m", "local", "R"), array("v", "local", "R"),
         array("y", "output", "R", "L")],
        [
            statement("M0", r, "m", "r", const(0, F)),
            statement("M1", rl, "m", "r", ld("x", "r", "l"), "sum"),
            statement("V0", r, "v", "r", const(0, F)),
            statement("V1", rl, "v", "r", op("mul", centred, centred), "sum"),
            statement("Y", rl, "y", "r l", op("div", centred, op("sqrt", ld("v", "r")))),
        ],
    )  # fmt: skip
