"""Static exports made dynamic by ``symbols=``: other sizes follow, or the contradicting constant is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.cli import main
from polydyn.errors import ShapeError, UnsupportedError
from tests.support.tiny import model, node

RNG = np.random.default_rng(5)
HEADS, DEPTH = 3, 4
WIDTH = HEADS * DEPTH
W = {n: RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) for n in "qkv"}


def shape(*sizes: int) -> np.ndarray:
    return np.array(sizes, np.int64)


def attention(b: int | str, length: int | str, sizes: tuple[int, ...]) -> onnx.ModelProto:
    """Build an attention whose heads are split and joined by Reshape to constant targets; ``sizes``: batch and length.
    """
    nodes = []
    for x, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            node("MatMul", f"x w{x}", f"{x}p"), node("Reshape", f"{x}p split", f"{x}s"),
            node("Transpose", f"{x}s", x, perm=perm),
        ]  # fmt: skip
    nodes += [
        node("MatMul", "q k", "s"), node("Softmax", "s", "p", axis=-1), node("MatMul", "p v", "c"),
        node("Transpose", "c", "t", perm=[0, 2, 1, 3]), node("Reshape", "t join", "o"),
    ]  # fmt: skip
    batch, long = sizes
    constants = {f"w{x}": a for x, a in W.items()}
    constants |= {"split": shape(batch, long, HEADS, DEPTH), "join": shape(batch, long, WIDTH)}
    return model(nodes, {"x": ("float32", [b, length, WIDTH])}, ["o"], constants)


def test_constant_targets_of_reshapes_follow() -> None:
    static = attention(1, 7, (1, 7))
    program = polydyn.compile(static, symbols={"x": ("B", "L", None)})
    dynamic = polydyn.compile(attention("B", "L", (0, -1)))
    for b, n in ((1, 7), (2, 9), (0, 3), (3, 1), (1, 0)):
        x = RNG.standard_normal((b, n, WIDTH)).astype(np.float32)
        np.testing.assert_allclose(program.run({"x": x})["o"], dynamic.run({"x": x})["o"], 2e-5, 1e-5)
    x = RNG.standard_normal((1, 7, WIDTH)).astype(np.float32)
    np.testing.assert_allclose(program.run({"x": x})["o"], polydyn.compile(static).run({"x": x})["o"], 2e-5, 1e-5)


def test_heads_joined_with_the_batch() -> None:
    nodes = [node("Reshape", "x a", "y"), node("Relu", "y", "z"), node("Reshape", "z b", "o")]
    constants = {"a": shape(2 * 3, 5, 4), "b": shape(2, 3, 5, 4)}
    m = model(nodes, {"x": ("float32", [2, 3, 5, 4])}, ["o"], constants)
    program = polydyn.compile(m, symbols={"x": ("B", None, "L", None)})
    for b, n in ((2, 5), (1, 8), (4, 0)):
        x = RNG.standard_normal((b, 3, n, 4)).astype(np.float32)
        np.testing.assert_array_equal(program.run({"x": x})["o"], np.maximum(x, 0))


def test_a_constant_that_contradicts_is_named() -> None:
    table = {"positions": np.zeros((1, 7, 4), np.float32)}
    m = model([node("Add", "x positions", "y")], {"x": ("float32", [1, 7, 4])}, ["y"], table)
    with pytest.raises(ShapeError, match=r"L cannot be a symbol: .*the constant positions \[1, 7, 4\] fixes it") as e:
        polydyn.compile(m, symbols={"x": ("B", "L", None)})
    assert "remedy: leave L out of symbols" in str(e.value)
    program = polydyn.compile(m, symbols={"x": ("B", None, None)})
    assert program.run({"x": np.ones((3, 7, 4), np.float32)})["y"].sum() == 84


def test_an_input_that_contradicts_is_named_before_tables() -> None:
    """A mask keeps its size, a table does not."""
    table = {"zero": np.zeros((1, 7), np.float32)}
    nodes = [node("Add", "mask zero", "m"), node("Add", "x m", "y")]
    m = model(nodes, {"x": ("float32", [1, 7]), "mask": ("float32", [1, 7])}, ["y"], table)
    with pytest.raises(ShapeError, match=r"L cannot be a symbol: .*the input mask \[1, 7\] fixes it") as e:
        polydyn.compile(m, symbols={"x": (None, "L")})
    assert "or name the axis of the input too" in str(e.value)
    with pytest.raises(ShapeError, match=r"the constant zero \[1, 7\] fixes it"):
        polydyn.compile(m, symbols={"x": (None, "L"), "mask": (None, "L")})


def test_a_product_that_a_constant_fixes_is_named() -> None:
    table = {"w": np.ones((12, 2), np.float32), "flat": shape(1, 12)}
    m = model([node("Reshape", "x flat", "f"), node("MatMul", "f w", "y")], {"x": ("float32", [1, 3, 4])}, ["y"], table)
    with pytest.raises(ShapeError, match=r"C cannot be a symbol|can never be equal"):
        polydyn.compile(m, symbols={"x": ("B", "C", None)})


@pytest.mark.parametrize(
    ("symbols", "message"),
    [({"z": ("B",)}, "the input z, which the model does not have"), ({"x": ("B",)}, "1 symbols for the 3 axes of x")],
)
def test_symbols_that_do_not_fit_are_refused(symbols: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        polydyn.compile(attention(1, 7, (1, 7)), symbols=symbols)


def test_symbols_give_axes_to_an_input_without_a_shape() -> None:
    m = model([node("Relu", "x", "y")], {"x": ("float32", [])}, ["y"])
    m.graph.input[0].type.tensor_type.ClearField("shape")
    m.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(UnsupportedError, match=r'(?s)rank of input x is unknown.*symbols={"x": \("A", "B"\)}'):
        polydyn.compile(m)
    program = polydyn.compile(m, symbols={"x": ("N", None)})
    assert program.inputs["x"].startswith("float32[N, ")
    x = np.array([[-1, 2], [3, -4]], np.float32)
    assert (program.run({"x": x})["y"] == np.maximum(x, 0)).all()


def test_the_command_line(tmp_path: Path) -> None:
    onnx.save(attention(1, 7, (1, 7)), tmp_path / "m.onnx")
    out = str(tmp_path / "m.polydyn")
    command = ["compile", str(tmp_path / "m.onnx"), "-o", out, "--symbol", "x=B,L,_", "--dim", "L=1:64"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert polydyn.load(out).inputs == {"x": f"float32[B, L, {WIDTH}]"}
    assert CliRunner().invoke(main, [*command[:-4], "--symbol", "x"]).exit_code == 2
