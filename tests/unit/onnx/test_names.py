"""Names of dims are the user's: none collides with a compiler's name, and texts for people have them unchanged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polydyn
from polydyn.backends import target_of
from polydyn.errors import InputError, ShapeError
from polydyn.graph.expand import import_model
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.names import MARK, given_back, given_back_everywhere, internal_name
from polydyn.session import InferenceSession
from tests.support.marks import slow
from tests.support.stored import MODELS, load
from tests.support.tiny import model, node

NAMES = (
    *"ABNSXZ", *"dijklmnpqrtuv_", *(f"{x}{n}" for x in "adijklnr" for n in (0, 1, 12)), "0", "1a", "-", "a b", "é", "$",
    "nth", "share", "shares", "tile", "tiles", "key", "unit", "round", "part", "point", "row", "row_stride", "batch_i",
    "o_i", "r_lo", "r_hi", "c_lo", "c_hi", "c_j", "j_vec", "k_vec", "e_row", "pixel.i2", "line_lo", "left_out", "begin",
    "end", "buf", "sym", "scratch", "tid", "bid", "warp", "lane", "x@0", "input_ids@0", "@vector", "%shared", "%arch",
    "int", "for", "while", "double", "restrict", "static", "INT_MAX", "NULL", "PD_W", "lambda", "class", "True",
    "min", "max", "floor", "Mod", "E", "I", "pi", "oo", "nan", "size of B", "batch_size", "p2o.DynamicDimension.0",
    "input_ids_0", "x_0", "x_1", "B", "L",
)  # fmt: skip
"""Iterators, sizes of tiles, parameters of kernels, C and Python keywords, macros, functions of sympy and isl, symbols
of the host program, names that the importer itself gives.
"""


def renamed(proto: onnx.ModelProto, names: Iterator[str]) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the model with other names for the dims of its inputs, and the new name of each."""
    out, table = onnx.ModelProto(), dict[str, str]()
    out.CopyFrom(proto)
    for d in (d for x in out.graph.input for d in x.type.tensor_type.shape.dim if d.dim_param):
        if d.dim_param not in table:
            table[d.dim_param] = next(names)
        d.dim_param = table[d.dim_param]
    return out, table


def keys(proto: onnx.ModelProto, placed: dict[str, PlacedGroup]) -> list[str]:
    """Return the contents of all groups of the model, as hashes; only kernels that ``placed`` lacks are made."""
    target = target_of("cpu:avx2", None)
    plan = target.fuse(target.rewrite(import_model(proto)))
    builder = target.builder(plan)
    builder.placed = placed
    return [p.key for p in chain.from_iterable(map(builder.place, plan.groups))]


@pytest.mark.parametrize(
    ("name", "sets"),
    [("bert_tiny", 2), ("gpt2_past_tiny", 3), *(pytest.param(n, 100, marks=pytest.mark.slow) for n in MODELS)],
)
def test_kernels_do_not_depend_on_the_names_of_dims(name: str, sets: int) -> None:
    proto = load(name)
    placed: dict[str, PlacedGroup] = {}
    first = keys(proto, placed)
    known = set(placed)
    for seed in range(sets):
        other, table = renamed(proto, iter(random.Random(seed).sample(NAMES, 20)))
        assert keys(other, placed) == first and set(placed) == known, table


@given(st.text())
def test_a_name_of_the_user_is_given_back(name: str) -> None:
    inside = internal_name(name)
    assert given_back(inside) == name.replace(MARK, "") and internal_name(inside) == inside
    assert inside[0] == MARK or (inside[0].isupper() and inside.isidentifier() and inside.isascii())


def test_parts_of_plain_data_that_are_one_stay_one() -> None:
    part = ["+", internal_name("d0"), 1]
    data = given_back_everywhere({"a": part, internal_name("d1"): [part, 2.5, None]})
    assert data == {"a": ["+", "d0", 1], "d1": [["+", "d0", 1], 2.5, None]} and data["a"] is data["d1"][0]


def adversarial(a: str, b: str, c: str) -> onnx.ModelProto:
    """Build a product, a transposition, an attention, and a data-dependent size."""
    nodes = [
        node("MatMul", "x y", "s"), node("Softmax", "s", "p", axis=-1), node("MatMul", "p v", "o"),
        node("Transpose", "s", "t", perm=[1, 0]), node("NonZero", "x", "z"),
    ]  # fmt: skip
    inputs = {"x": ("float32", [a, b]), "y": ("float32", [b, c]), "v": ("float32", [c, None])}
    return model(nodes, inputs, ["s", "t", "o", "z"])


NEEDS_COMPILER = pytest.mark.compiler


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "names", [("i0", "j0", "d0"), slow(("l", "d", "k0")), slow(("nth", "v", "x@0")), slow(("0", "lambda", "min"))]
)
def test_sizes_that_are_called_as_iterators(names: tuple[str, str, str]) -> None:
    a, b, c = names
    program = polydyn.compile(adversarial(*names), dims={b: (0, 9)}, threads=1)
    r = np.random.default_rng(0)
    x, y, v = (r.standard_normal(s).astype(np.float32) for s in ((5, 7), (7, 9), (9, 6)))
    got = program.run({"x": x, "y": y, "v": v})
    np.testing.assert_allclose(got["s"], x @ y, 1e-5, 1e-5)
    np.testing.assert_array_equal(got["t"], got["s"].T)
    e = np.exp(x @ y - (x @ y).max(-1, keepdims=True))
    np.testing.assert_allclose(got["o"], e / e.sum(-1, keepdims=True) @ v, 1e-5, 1e-5)
    np.testing.assert_array_equal(got["z"], np.stack(np.nonzero(x)))
    assert {a, b, c, "v_1"} <= set(program.symbols)
    assert MARK not in json.dumps(program.manifest, ensure_ascii=False)
    sizes: Mapping[str, int] = {a: 5, b: 7, "y_0": 7, c: 9, "v_0": 9, "v_1": 6}
    late = {s: 3 for s in program.symbols if s not in sizes}
    assert MARK not in str(program.explain(**sizes, **late))
    with pytest.raises(InputError) as error:
        program.run({"x": np.zeros((1, 10), np.float32), "y": np.zeros((10, 2), np.float32), "v": v[:2]})
    assert f"{b} <= 9" in str(error.value) and MARK not in str(error.value)


def test_errors_have_the_names_as_the_user_wrote_them() -> None:
    with pytest.raises(ShapeError, match=r"the dynamic dims of this model are: i0, d, y_0, r0, v_0, v_1") as error:
        import_model(adversarial("i0", "d", "r0"), {"k": (1, 2)})
    assert MARK not in str(error.value)
    made = model([node("Add", "x y", "z")], {"x": ("float32", ["d0", 3]), "y": ("float32", ["d0", 4])}, ["z"])
    with pytest.raises(ShapeError) as error:
        import_model(made)
    assert MARK not in str(error.value)


@NEEDS_COMPILER
def test_a_session_shows_the_names_of_dims() -> None:
    made = model([node("Relu", "x", "y")], {"x": ("float32", ["d0", "seq len"])}, ["y"])
    session = InferenceSession(made.SerializeToString())
    assert [x.shape for x in (*session.get_inputs(), *session.get_outputs())] == [["d0", "seq len"]] * 2
