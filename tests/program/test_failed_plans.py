"""Planning that fails: errors name the pass, the nodes and a remedy; ``fallback`` leaves only those nodes to ONNX
Runtime.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NoReturn

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.errors import FallbackWarning, LegalityError, ModelError, PolydynError
from polydyn.fusion import pipeline
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Compute, Graph
from polydyn.graph.operators.registry import OPERATORS, ExpandContext, InferContext, Inferred, OnnxNode, Operator
from polydyn.lowering.place import Builder, PlacedGroup
from polydyn.schedules.expr import Op, walk
from tests.support.tiny import model, node

F, ORT = "float32", polydyn.Options(fallback="onnxruntime")


def chain() -> onnx.ModelProto:
    """Build a model in which Sinh is the node that fails."""
    names = ["Softmax", "Relu", "Sinh", "Exp", "Softmax"]
    nodes = [node(op, a, b) for op, a, b in zip(names, "xabcd", "abcdy", strict=True)]
    return model(nodes, {"x": (F, ["N", 5])}, ["y"])


def has_sinh(graph: Graph) -> bool:
    """Return whether a primitive computes hyperbolic sines."""
    bodies = [n.body for n in graph.nodes if isinstance(n, Compute)]
    return any(isinstance(v, Op) and v.name == "sinh" for b in bodies for v in walk(b))


def failing_pass(monkeypatch: pytest.MonkeyPatch, error: Exception, rewriting: bool) -> None:
    """Add a pass to the pipeline that raises an error if the graph has a hyperbolic sine."""

    def rewrite(graph: Graph) -> Graph:
        if has_sinh(graph):
            raise error
        return graph

    def regroup(plan: FusionPlan) -> FusionPlan:
        rewrite(plan.graph)
        return plan

    table = "REWRITES" if rewriting else "FUSION"
    name = "fold" if rewriting else "siblings"
    changed = {"graph": rewrite} if rewriting else {"groups": regroup}
    table_passes = getattr(pipeline, table)
    passes = tuple(pipeline.Pass(p.name, p.summary, **changed) if p.name == name else p for p in table_passes)
    monkeypatch.setattr(pipeline, table, passes)


def check(m: onnx.ModelProto, program: polydyn.Program) -> None:
    for n in (0, 1, 4):
        x = np.random.default_rng(n).standard_normal((n, 5)).astype(F)
        expected, *_ = onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x})
        np.testing.assert_allclose(program.run({"x": x})["y"], expected, rtol=1e-5)


@pytest.mark.parametrize("error", [KeyError("a0"), LegalityError("reads of a promotion"), RecursionError("deep")])
@pytest.mark.parametrize("rewriting", [True, False])
def test_a_pass_that_fails_is_named_with_its_nodes(
    monkeypatch: pytest.MonkeyPatch, error: Exception, rewriting: bool
) -> None:
    fresh = type(error)(str(error.args[0]).partition("\n")[0])  # the compiler writes the place into the error
    failing_pass(monkeypatch, fresh, rewriting)
    name = "fold" if rewriting else "siblings"
    with pytest.raises(PolydynError) as e:
        polydyn.compile(chain(), threads=1)
    assert type(e.value) is (LegalityError if isinstance(error, LegalityError) else PolydynError)
    assert (e.value.node, e.value.rule) == ("Sinh_c", f"pass {name}")
    assert f"without={{'{name}'}}" in str(e.value.remedy) and "fallback='onnxruntime'" in str(e.value.remedy)
    with pytest.warns(FallbackWarning) as warned:
        program = polydyn.compile(chain(), threads=1, options=ORT)
    assert program.steps == ["onnxruntime of Sinh_c"]
    assert [str(w.message).split(":")[0] for w in warned] == ["Sinh_c (Sinh) runs in ONNX Runtime"]
    check(chain(), program)


def test_a_kernel_that_fails_leaves_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Builder.place

    def placed(self: Builder, group: FusedGroup) -> tuple[PlacedGroup, ...]:
        if any(n.origin == "Sinh_c" for n in group.nodes):
            raise KeyError("a0")
        return place(self, group)

    monkeypatch.setattr(Builder, "place", placed)
    m = chain()
    m.graph.node.append(node("MatMul", "x w", "z"))
    m.graph.initializer.append(numpy_helper.from_array(np.ones((5, 5), F), "w"))
    m.graph.output.append(helper.make_tensor_value_info("z", 1, ["N", 5]))
    with pytest.raises(PolydynError, match=r"the kernel of \w+ failed: KeyError: 'a0'") as e:
        polydyn.compile(m, threads=1)
    assert "Sinh_c" in e.value.origins and "MatMul_z" not in e.value.origins
    with pytest.warns(FallbackWarning):
        program = polydyn.compile(m, threads=1, options=ORT)
    assert "MatMul_z" not in "".join(program.steps) and len(program.steps) == 1
    check(m, program)


def test_a_failure_inside_a_body_leaves_the_node_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_pass(monkeypatch, KeyError("a0"), rewriting=False)
    body = [node("Identity", "c", "d"), node("Sinh", "v", "u"), node("Softmax", "u", "w")]
    infos = [[("i", 7, []), ("c", 9, []), ("v", 1, ["N", 5])], [("d", 9, []), ("w", 1, ["N", 5])]]
    inputs, outputs = ([helper.make_tensor_value_info(*v) for v in some] for some in infos)
    loop = node("Loop", "k - a", "s", body=helper.make_graph(body, "body", inputs, outputs))
    m = model([node("Softmax", "x", "a"), node("Cast", "f", "k", to=TensorProto.INT64), loop, node("Exp", "s", "y")],
              {"x": (F, ["N", 5]), "f": (F, [])}, ["y"])  # fmt: skip
    m.graph.value_info.append(helper.make_tensor_value_info("s", 1, ["N", 5]))
    with pytest.raises(PolydynError) as e:
        polydyn.compile(m, threads=1)
    assert e.value.node == "Sinh_u" and e.value.origins == ("Loop_s",)
    with pytest.warns(FallbackWarning, match="Loop_s"):
        program = polydyn.compile(m, threads=1, options=ORT)
    assert program.steps == ["onnxruntime of Loop_s"]


def test_a_rule_that_stumbles_is_left_but_not_an_invalid_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(n: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
        raise LookupError("nothing there")

    def expand(n: OnnxNode, ctx: ExpandContext) -> NoReturn:
        raise AssertionError

    monkeypatch.setitem(OPERATORS, "Sinh", Operator("Sinh", infer, expand))
    with pytest.raises(ModelError, match="bug in polydyn"):
        polydyn.compile(chain(), threads=1)
    with pytest.warns(FallbackWarning, match="Sinh_c"):
        check(chain(), polydyn.compile(chain(), threads=1, options=ORT))
    invalid = chain()
    del invalid.graph.node[0].input[:]
    with pytest.raises(ModelError, match="inputs"):
        polydyn.compile(invalid, threads=1, options=ORT)


SCRIPT = """
import warnings, sys, numpy as np, onnx, onnxruntime, polydyn.session
warnings.simplefilter("ignore")
for name in polydyn.session.__all__:
    setattr(onnxruntime, name, getattr(polydyn.session, name))
if len(sys.argv) > 1:
    sys.modules["onnxruntime"] = polydyn.session
import onnxruntime
from tests.program.test_fallback import pooled
options = onnxruntime.SessionOptions()
options.add_session_config_entry("polydyn.fallback", "onnxruntime")
session = onnxruntime.InferenceSession(pooled().SerializeToString(), options)
x, rois = np.ones((1, 3, 9, 9), np.float32), np.zeros((2, 5), np.float32)
print(type(session).__module__, session.run(None, {"x": x, "rois": rois})[0].shape)
"""


@pytest.mark.parametrize("module", [(), ("module",)])
def test_fallback_finds_onnx_runtime_behind_its_replacement(module: tuple[str, ...]) -> None:
    """The classes in ``onnxruntime`` are polydyn's (docs/switching.md), or the whole module is."""
    done: Any = subprocess.run([sys.executable, "-c", SCRIPT, *module], capture_output=True, text=True, timeout=120)
    assert done.stdout.split(" ", 1) == ["polydyn.session.session", "(2, 3, 2, 3)\n"], done.stderr
