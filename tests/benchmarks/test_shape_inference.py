"""The shape of every tensor of the models, compared with ONNX Runtime's values; and how the tools are counted."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from benchmarks import shape_inference as counted
from polydyn.graph.importer import load_model
from polydyn.graph.propagate import propagate
from polydyn.testing.inputs import feeds
from tests.support.stored import load, path_of
from tests.support.tiny import model, node

SHAPES = {
    "bert_tiny": ({"B": 3, "L": 7}, {"B": 1, "L": 1}),
    "albert_tiny": ({"B": 2, "L": 5},),
    "gpt2_past_tiny": ({"B": 2, "L": 3, "P": 4, "T": 7}, {"B": 1, "L": 1, "P": 0, "T": 1}),
    "llama_tiny": ({"B": 2, "L": 3, "P": 4, "T": 7}, {"B": 1, "L": 1, "P": 0, "T": 1}),
    "t5_tiny": ({"B": 2, "L": 40}, {"B": 1, "L": 1}),
    "vit_hw_tiny": ({"N": 2, "H": 48, "W": 32},),
    "resnet_tiny": ({"N": 3, "H": 33, "W": 50}, {"N": 1, "H": 32, "W": 47}),
    "shufflenet_tiny": ({"N": 3},),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_tensor_has_the_shape_that_it_has_in_onnxruntime(name: str) -> None:
    proto = load(name)
    typed = propagate(load_model(path_of(name)))
    names = [o for n in proto.graph.node if n.op_type != "Constant" for o in n.output if o]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=t) for t in names)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for sizes in SHAPES[name]:
        got = dict(zip(names, session.run(names, feeds(load(name), sizes)), strict=True))
        for t in names:
            assert np.shape(got[t]) == tuple(d.evaluate(sizes) for d in typed.tensor(t).shape), t
            known = typed.value(t)
            if known is not None:
                assert got[t].ravel().tolist() == [d.evaluate(sizes) for d in known.flat], t


@pytest.mark.parametrize("name", SHAPES)
def test_no_symbol_is_invented(name: str) -> None:
    proto = counted.without_shapes(load(name))
    names = counted.tensors(proto)
    found = counted.count(counted.of_polydyn(proto), names, counted.symbols(proto))
    assert found == {"complete": len(names), "partial": 0, "none": 0, "invented": 0}


def test_the_tools_are_counted_over_the_same_tensors() -> None:
    nodes = [node("Concat", "x x", "c", axis=0), node("Constant", "", "k", value_float=1.0), node("Add", "c k", "y")]
    m = counted.without_shapes(model(nodes, {"x": ("float32", [None])}, ["y"]))
    names, known = counted.tensors(m), counted.symbols(m)
    assert (names, known) == (["x", "c", "y"], {"x_0"})
    assert counted.count(counted.of_polydyn(m), names, known) == {"complete": 3, "partial": 0, "none": 0, "invented": 0}
    assert counted.count(counted.of_onnx(m), names, known) == {"complete": 1, "partial": 2, "none": 0, "invented": 1}
    assert counted.count({}, names, known)["none"] == 3


def test_expressions_over_known_symbols_are_complete_whoever_prints_them() -> None:
    dims = ["floor(H/2 - 1/2) + 1", "Max(0, 3*B)", "Reshape_3_o0__d1*B", "unk__0", "", 7]
    read = counted._read(helper.make_model(helper.make_graph([], "g", [helper.make_tensor_value_info(
        "x", onnx.TensorProto.FLOAT, dims)], [])), {"B", "H"})["x"]  # fmt: skip
    assert read == [{"H"}, {"B"}, {"B", "Reshape_3_o0__d1"}, {"unk__0"}, None, set()]
