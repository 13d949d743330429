"""Operators of custom domains: the examples of docs/extending.md, and rejections."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import polydyn
from polydyn import extend
from polydyn.errors import ModelError, UnsupportedError
from polydyn.extend import fingerprint
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from polydyn.program_key import Arguments, program_key
from tests.support.paths import ROOT
from tests.support.tiny import node

RNG = np.random.default_rng(2)
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)


@pytest.fixture(scope="module", autouse=True)
def examples() -> None:
    names: dict[str, object] = {}
    for text in EXAMPLES:
        exec(compile(text, "docs/extending.md", "exec"), names)


def custom(op: str, inputs: str, **attributes: float) -> onnx.ModelProto:
    """Build ``y = Relu(op(x + x, ...))``: neighbours on both sides."""
    names = inputs.split()
    made = helper.make_node(op, ["d", *names[1:]], ["o"], name="mine", domain="my.domain", **attributes)
    dims: dict[str, list[str]] = {"x": ["B", "L"], "limit": ["L"]}
    graph = helper.make_graph(
        [node("Add", "x x", "d"), made, node("Relu", "o", "y")], "m",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, dims[n]) for n in names],
        [onnx.ValueInfoProto(name="y")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("my.domain", 1)])


RESULTS = {
    "ScaledTanh": lambda x: np.tanh(x) * 1.5, "PairSum": lambda x: x[:, 0::2][:, : x.shape[1] // 2] + x[:, 1::2],
    "SoftClip": lambda x, limit: limit * x / (limit + abs(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_the_examples_of_the_guide(name: str, tmp_path: Path) -> None:
    model = custom(name, "x limit" if name == "SoftClip" else "x", **({"scale": 1.5} if name == "ScaledTanh" else {}))
    program = polydyn.compile(model)
    assert len(program.launches) == 1, "it fuses with its neighbours"
    program.save(tmp_path / "m.polydyn")
    saved = polydyn.load(tmp_path / "m.polydyn")
    for b, n in ((0, 3), (1, 0), (1, 1), (3, 33), (2, 8)):
        feeds = {"x": RNG.standard_normal((b, n), np.float32), "limit": RNG.random(n, np.float32) + 1}
        feeds = {k: v for k, v in feeds.items() if k in program.inputs}
        want = np.maximum(RESULTS[name](feeds["x"] * 2, *list(feeds.values())[1:]), 0)
        for got in (program.run(feeds)["y"], saved.run(feeds)["y"], evaluate(import_model(model), feeds)["y"]):
            np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_a_c_function_is_refused_on_cuda_and_named() -> None:
    with pytest.raises(UnsupportedError, match="the C function soft_clip runs on CPUs only"):
        polydyn.compile(custom("SoftClip", "x limit"), target="cuda:sm_80")


def test_others_become_cuda_kernels() -> None:
    for name, more in (("PairSum", {}), ("ScaledTanh", {"scale": 2.0})):
        assert polydyn.compile(custom(name, "x", **more), target="cuda:sm_80").launches


def test_an_operator_that_nobody_registered_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"my\.domain::Nothing"):
        polydyn.compile(custom("Nothing", "x"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("Relu", "not of the form domain::Name"), ("ai.onnx::Relu", "not of the form"),
     ("com.microsoft::Gelu", "is defined already"), ("ai.onnx.ml::Scaler", "is defined already")],
)  # fmt: skip
def test_names_that_are_taken(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        extend.operator(name, infer=extend.same_as_input)


def test_c_functions_that_are_not_there() -> None:
    with pytest.raises(ModelError, match="does not define 'g'"):
        extend.c_operator("my.domain::G", "g", "static inline float f(float x) { return x; }", np.abs)
    with pytest.raises(ModelError, match="C functions of float16"):
        extend.c_operator("my.domain::G", "f", "static inline float f(float x) { return x; }", np.abs, dtype="float16")


def test_programs_of_other_registrations_are_others_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = custom("PairSum", "x")
    assert fingerprint() is None  # the page also has operators by Python rules
    with pytest.raises(UnsupportedError, match="Python rules"):
        program_key(model, Arguments())
    for name in list(extend._REGISTERED):  # the table stays, from which conftest removes what this module adds
        monkeypatch.delitem(extend._REGISTERED, name)
    before, key = fingerprint(), program_key(model, Arguments())
    extend.c_operator("my.domain::Later", "later", "static inline float later(float x) { return -x; }", np.negative)
    assert fingerprint() != before
    assert program_key(model, Arguments()) != key
