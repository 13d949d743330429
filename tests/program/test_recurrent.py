"""LSTM, GRU and RNN compared with ONNX Runtime: directions, layouts, lengths, peepholes, activations, ugly sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper

import polydyn
from polydyn.errors import UnsupportedError
from polydyn.runtime.parts_program import PartsProgram
from tests.support.marks import slow

RNG = np.random.default_rng(5)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
HIDDEN, WIDTH = 5, 3


def f32(*shape: int) -> Any:
    return (RNG.standard_normal(shape) / 2).astype(np.float32)


def recurrent(
    op: str, optional: str = "", hidden: int = HIDDEN, width: int = WIDTH, **attributes: Any
) -> onnx.ModelProto:
    """Build one node; ``optional``: its optional inputs among B (bias), S (lengths), H (initial states), P (peepholes).
    """
    ways = 2 if attributes.get("direction") == "bidirectional" else 1
    g, batched = GATES[op], attributes.get("layout", 0)
    constants = {"w": f32(ways, g * hidden, width), "r": f32(ways, g * hidden, hidden)}
    inputs: dict[str, tuple[int, list[Any]]] = {"x": (T.FLOAT, ["B", "T", width] if batched else ["T", "B", width])}
    names = ["x", "w", "r", "", "", "", "", ""]
    if "B" in optional:
        constants["b"], names[3] = f32(ways, 2 * g * hidden), "b"
    if "S" in optional:
        inputs["s"], names[4] = (T.INT32, ["B"]), "s"
    for k, n in enumerate(["h", "c"] if op == "LSTM" else ["h"]) if "H" in optional else ():
        inputs[n], names[5 + k] = (T.FLOAT, ["B", ways, hidden] if batched else [ways, "B", hidden]), n
    if "P" in optional:
        constants["p"], names[7] = f32(ways, 3 * hidden), "p"
    while not names[-1]:
        names.pop()
    outputs = ["y", "last", "cell"] if op == "LSTM" else ["y", "last"]
    node = helper.make_node(op, names, outputs, name=f"the_{op}", hidden_size=hidden, **attributes)
    graph = helper.make_graph(
        [node], "recurrent", [helper.make_tensor_value_info(n, *t) for n, t in inputs.items()],
        [helper.make_tensor_value_info(o, T.FLOAT, None) for o in outputs],
        [onnx.numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def feeds_of(m: onnx.ModelProto, time: int, batch: int) -> Mapping[str, Any]:
    """Return random inputs; lengths from 1 to ``time``."""
    sizes = {"T": time, "B": batch}
    shapes = {i.name: [d.dim_value or sizes[d.dim_param] for d in i.type.tensor_type.shape.dim] for i in m.graph.input}
    feeds = {n: f32(*s) for n, s in shapes.items()}
    if "s" in feeds:
        feeds["s"] = RNG.integers(1, time + 1, batch).astype(np.int32)
    return feeds


def check(m: onnx.ModelProto, sizes: Any = ((4, 2), (1, 1), (9, 3))) -> PartsProgram:
    program = polydyn.compile(m, threads=2)
    assert isinstance(program, PartsProgram)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # on more threads it quantizes parts of a batch with separate scales
    session = onnxruntime.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for time, batch in sizes:
        feeds = feeds_of(m, time, batch)
        for (name, a), b in zip(program.run(feeds).items(), session.run(None, dict(feeds)), strict=True):
            assert a.shape == b.shape, name
            np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=f"{name} at {time}, {batch}")
    return program


@pytest.mark.parametrize("direction", [slow("forward"), slow("reverse"), "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_directions_with_bias_lengths_and_initial_states(op: str, direction: str) -> None:
    check(recurrent(op, "BSH", direction=direction))


@pytest.mark.parametrize("op", GATES)
def test_without_anything_optional(op: str) -> None:
    check(recurrent(op))


def test_peepholes_and_clip() -> None:
    check(recurrent("LSTM", "BSHP", direction="bidirectional", clip=0.4))


def in_integers(m: onnx.ModelProto, dtype: str, columns: bool) -> onnx.ModelProto:
    """Return a model of ``recurrent`` with W and R as integers: a scale for each direction, or for each column."""
    node, zero = m.graph.node[0], 0 if dtype == "int8" else 128
    node.op_type, node.domain = "DynamicQuantizeLSTM", "com.microsoft"
    node.input.extend([""] * (8 - len(node.input)))
    for t in m.graph.initializer:
        if t.name in ("w", "r"):
            a = onnx.numpy_helper.to_array(t).swapaxes(1, 2)
            scale = np.abs(a).max(axis=1 if columns else (1, 2)) / 60
            q = (a / scale.reshape(len(a), 1, -1)).round() + zero
            t.CopyFrom(onnx.numpy_helper.from_array(q.astype(dtype), t.name))
            zeros = np.full(scale.shape, zero, dtype)
            m.graph.initializer.extend([onnx.numpy_helper.from_array(scale, f"{t.name}s")])
            m.graph.initializer.extend([onnx.numpy_helper.from_array(zeros, f"{t.name}z")])
    node.input.extend(["ws", "wz", "rs", "rz"])
    m.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return m


@pytest.mark.parametrize(
    ("optional", "dtype", "columns", "direction"),
    [("BSHP", "int8", True, "bidirectional"), ("S", "uint8", False, "reverse"), slow("", "int8", False, "forward")],
)
def test_weights_that_are_integers(optional: str, dtype: str, columns: bool, direction: str) -> None:
    """Scales past the end of a sequence equal ONNX Runtime's: exact except for the order of float sums."""
    model = in_integers(recurrent("LSTM", optional, direction=direction), dtype, columns)
    program = check(model, ((5, 3), (1, 1), (9, 4)))
    ways = 1 + (direction == "bidirectional")
    shapes = {"x": (0, 2, WIDTH), "h": (ways, 2, HIDDEN), "c": (ways, 2, HIDDEN)}
    feeds: dict[str, Any] = {n: f32(*shapes[n]) for n in program.inputs if n in shapes}
    if "S" in optional:
        feeds["s"] = np.zeros(2, np.int32)
    results = program.run(feeds)
    assert results["y"].shape == (0, ways, 2, HIDDEN)
    np.testing.assert_array_equal(results["last"], feeds.get("h", np.zeros((ways, 2, HIDDEN))))


def test_other_activations() -> None:
    names = ["HardSigmoid", "ScaledTanh", "Softsign"]
    check(recurrent("LSTM", "B", activations=names, activation_alpha=[0.3, 0.9], activation_beta=[0.4, 0.8]))
    check(recurrent("RNN", "B", activations=["LeakyRelu"], activation_alpha=[0.1]))


@pytest.mark.parametrize("before", [0, 1])
def test_the_reset_gate_before_or_after_the_product(before: int) -> None:
    check(recurrent("GRU", "BH", linear_before_reset=before))


def test_batch_first_gives_what_time_first_gives() -> None:
    """ONNX Runtime has no layout 1."""
    first = recurrent("LSTM", "BH")
    batched = onnx.ModelProto()
    batched.CopyFrom(first)
    batched.graph.node[0].attribute.append(helper.make_attribute("layout", 1))
    for i in batched.graph.input:
        dims = i.type.tensor_type.shape.dim
        a, b = dims[0], dims[1]
        kept = onnx.TensorShapeProto.Dimension()
        kept.CopyFrom(a), a.CopyFrom(b), b.CopyFrom(kept)
    feeds = feeds_of(first, 6, 3)
    expected = polydyn.compile(first).run(feeds)
    got = polydyn.compile(batched).run({n: np.ascontiguousarray(x.swapaxes(0, 1)) for n, x in feeds.items()})
    np.testing.assert_allclose(got["y"], expected["y"].transpose(2, 0, 1, 3), 1e-5, 1e-6)
    np.testing.assert_allclose(got["cell"], expected["cell"].swapaxes(0, 1), 1e-5, 1e-6)


def test_a_step_is_few_launches_and_the_input_one_product() -> None:
    program = check(recurrent("LSTM", "B", hidden=64, width=32), [(20, 1)])
    (step,) = program.bodies.values()
    assert len(step.launches) <= 3, step.launches
    assert sum("contract" in x for x in program.launches) == 1, "the product of all steps"


class Counted:
    """A library that counts its runs."""

    def __init__(self, library: Any) -> None:
        self.library, self.calls = library, 0

    def pd_sequence_run(self, sequence: Any) -> int:
        self.calls += 1
        return int(self.library.pd_sequence_run(sequence))


def test_a_call_is_one_call_of_c_and_one_more_for_each_result_of_a_new_shape() -> None:
    program = check(recurrent("LSTM", "B", direction="bidirectional"), [(4, 2)])
    (frame,) = program._frames
    counted = frame._library = Counted(frame._library)  # type: ignore[assignment]
    for time, batch, calls in ((4, 2, 1), (5, 2, 4), (5, 2, 1)):
        counted.calls = 0
        program.run({"x": f32(time, batch, WIDTH)})
        assert counted.calls == calls, "no Python between parts, steps and iterations"


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="the activation Nonsense"):
        polydyn.compile(recurrent("RNN", activations=["Nonsense"]))
