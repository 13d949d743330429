"""The interpreter of host plans: no fault in any stored model, and the faults that other verifiers once missed."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest

import polydyn.lowering.aliases as aliases
import polydyn.program.parallel_launches as waves
from polydyn.compiler import Options, plan_program
from polydyn.debug import DebugError
from polydyn.errors import PolydynError
from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.place import PlacedGroup
from polydyn.program.plan import Launch
from polydyn.schedules.expr import Load
from polydyn.schedules.index import product
from polydyn.testing.plan import check_model, check_planned, plans_of
from polydyn.testing.plan.check import main
from tests.support.marks import slow
from tests.support.stored import MODELS, path_of
from tests.support.tiny import model, node

QUICK = ("gpt2_past_tiny", "resnet_tiny", "t5_tiny")
SIZES = (2, 3, 1)
"""Sizes of every dim of a call."""


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in MODELS])
def test_no_fault_in_a_stored_model(name: str) -> None:
    for planned in plans_of(path_of(name)):
        for size in SIZES:
            assert check_planned(planned, {}, default=size) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_loops_of_a_stored_model_touch_what_statements_touch(name: str) -> None:
    for planned in plans_of(path_of(name)):
        assert check_planned(planned, {}, loops=True) == []


# -- a tensor that was taken for a concatenation ---------------------------------------------------------------------


def _sizes_alone(plan: FusionPlan, p: PlacedGroup) -> tuple[str, str] | None:
    """The former criterion for sharing memory: an intermediate and an output with as many elements, if a copy of some
    part has equal addresses.
    """
    group, buffers, graph = p.lowered.group, p.lowered.buffers, plan.graph
    s, *more = group.statements
    if more or s.reduce is not None or not isinstance(s.value, Load) or s.value.buffer == s.array:
        return None
    to, source = group.arrays[s.array], group.arrays[s.value.buffer]
    output, tensor = buffers[s.array], buffers[s.value.buffer]
    fixed = {*graph.inputs, *graph.outputs, *graph.constants, *plan.windows, *plan.strides}
    fixed |= {w.target for w in plan.windows.values()}
    if output not in graph.outputs or output in fixed - set(graph.outputs) or tensor in fixed:
        return None
    whole = product(graph.tensors[tensor].shape) == product(graph.tensors[output].shape)
    return (tensor, output) if whole and to.address(s.index) == source.address(s.value.index) else None


def plan_as_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore aliases, dependences and their verifier to the state in which no verifier detected these faults."""
    monkeypatch.setattr(aliases, "_same_memory", _sizes_alone)
    monkeypatch.setattr(waves, "_reads", _reads_but_writes)
    monkeypatch.setattr(waves, "verify_waves", lambda plan: None)
    monkeypatch.setattr("polydyn.program.verify.verify_waves", lambda plan: None)


def _reads_but_writes(launch: Launch) -> list[str]:
    """The former rule for the buffers of a launch: a write of a buffer hides a read of it."""
    return [b for b in dict.fromkeys(launch.buffers) if b not in (launch.writes or ())]


def channels_turned() -> onnx.ModelProto:
    """Build RGB to BGR: the middle channel is already at its offset."""
    return model(
        [node("Mul", "x k", "s"), node("Split", "s", "r g b", axis=1, num_outputs=3),
         node("Concat", "b g r", "y", axis=1)],
        {"x": ("float32", [1, 3, "H", "W"])}, ["y"], {"k": np.float32(2)},
    )  # fmt: skip


def part_computed_in_place() -> onnx.ModelProto:
    """Build a model whose last part is already at its offset, and whose first part is computed from the data there."""
    return model(
        [node("Sigmoid", "x", "s"), node("Split", "s", "a b", axis=0, num_outputs=2), node("Neg", "a", "c"),
         node("Concat", "c b", "y", axis=0)],
        {"x": ("float32", [2, "L"])}, ["y"],
    )  # fmt: skip


@pytest.mark.parametrize("build", [channels_turned, part_computed_in_place])
def test_a_tensor_that_is_taken_for_a_concatenation_is_seen(
    build: object, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    assert callable(build)
    assert check_model(build()) == []
    plan_as_once(monkeypatch)
    kinds = {f.fault.kind for f in check_model(build())}
    assert "overwritten" in kinds
    assert kinds & {"output", "conflict", "in-place"}


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    path = f"{tmp_path}/model.onnx"
    onnx.save(channels_turned(), path)
    assert main([path, "H=2", "W=5", "--loops"]) == 0
    assert "0 faults" in capsys.readouterr().out


def test_a_compilation_that_verifies_names_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """``POLYDYN_VERIFY=2``, and 3 for the loops of kernels."""
    for level in ("2", "3"):
        monkeypatch.setenv("POLYDYN_VERIFY", level)
        plan_program(channels_turned())
    plan_as_once(monkeypatch)
    with pytest.raises(PolydynError, match=r"nest r\n  tensor: y|launch 'nest r', tensor 'y': overwrites"):
        plan_program(channels_turned())  # whichever check comes first


def test_verifying_needs_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel has no ``polydyn.testing``."""
    for name in [n for n in sys.modules if n.startswith("polydyn.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polydyn.testing", None)
    monkeypatch.setenv("POLYDYN_VERIFY", "2")
    with pytest.raises(DebugError, match="use a checkout of polydyn's sources"):
        plan_program(channels_turned())


def tiles() -> onnx.ModelProto:
    """Build bytes with a weight: a matrix unit multiplies them."""
    weight = np.arange(64 * 48).reshape(64, 48) % 200 - 100
    return model(
        [node("DynamicQuantizeLinear", "x", "q s z"), node("MatMulInteger", "q w z", "m"), node("Cast", "m", "f", to=1),
         node("Mul", "f s", "y")],
        {"x": ("float32", ["B", 64])}, ["y"], {"w": weight.astype(np.int8)},
    )  # fmt: skip


def sorts() -> onnx.ModelProto:
    return model([node("TopK", "x k", "v i", axis=1)], {"x": ("float32", ["B", "N"])}, ["v", "i"], {"k": np.array([3])})


def rounded() -> onnx.ModelProto:
    return model([node("MatMul", "x w", "y")], {"x": ("float32", ["B", 64])}, ["y"],
                 {"w": np.linspace(-1, 1, 64 * 48, dtype=np.float32).reshape(64, 48)})  # fmt: skip


@pytest.mark.parametrize(
    ("model", "target", "options", "leaf"),
    [(tiles, "cpu:amx-emulated", None, "pd_amx_load"), (sorts, "cpu", None, "pd_first_f32"),
     (rounded, "cpu:amx-emulated", Options(precision="bf16"), "pd_amx_store")],
    ids=["tiles", "sorts", "rounded"],
)  # fmt: skip
def test_leaves_are_traced(model: object, target: str, options: Options | None, leaf: str) -> None:
    assert callable(model)
    (planned,) = plans_of(model(), target=target, options=options)
    assert any(leaf in k.text for k in planned.plan.kernels)
    for size in (5, 40):
        assert check_planned(planned, {}, default=size, loops=True) == []


def test_candidates_of_different_groups_run_as_their_own() -> None:
    """A convolution of few channels is a product, or a window whose vectors run along rows of pixels."""
    weight = np.linspace(-1, 1, 3 * 3 * 9, dtype=np.float32).reshape(3, 3, 3, 3)
    image = {"x": ("float32", ["B", 3, "H", "W"])}
    made = model([node("Conv", "x w", "y", pads=[1, 1, 1, 1])], image, ["y"], {"w": weight})
    (planned,) = plans_of(made)
    own = planned.kernels.placed[0].lowered.group
    assert any(g.arrays.keys() != own.arrays.keys() for g in planned.groups.values())
    for size in (3, 40):
        assert check_planned(planned, {"B": 2}, default=size, loops=size == 3) == []


def test_plans_of_devices_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tables have kernels by name, and a concatenation of equal parts has a buffer twice in one launch."""
    monkeypatch.setenv("POLYDYN_VERIFY", "2")
    nodes = [node("Concat", "x x", "y", axis=1), node("Softmax", "y", "z")]
    made = model(nodes, {"x": ("float32", ["B", 8])}, ["y", "z"])
    assert plan_program(made, target="cuda:sm_80").launches
    monkeypatch.setattr("polydyn.testing.plan.tables._kernel_name", lambda row: row[0])
    with pytest.raises(PolydynError, match="it is called as 0"):
        plan_program(made, target="cuda:sm_80")
