"""Convolutions: padding inside the promotion statement, pixels as rows, channels-last between kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

from polydyn.backends.cuda import Cuda
from polydyn.checked import CheckedProgram
from polydyn.codegen.cpu.target import AVX2, AVX512
from polydyn.codegen.ir import FlatLoad, For, Let, Store
from polydyn.codegen.passes.hoist import divide_before, hoist_divisions
from polydyn.codegen.passes.tiles import flatten_loops
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.compiler import plan_program
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.graph.operators.common import in_range
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.place_cpu import KernelBuilder
from polydyn.lowering.place_cuda import CudaBuilder
from polydyn.lowering.prologue import prove_prologue
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.schedules.errors import Declined, LegalityError
from polydyn.schedules.expr import Array, FromIndex, const, load, op
from polydyn.schedules.group.addresses import check_addresses
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.group.promotion import check_loads
from polydyn.schedules.index import Index, minimum
from polydyn.schedules.solution.schedule import schedule_contract
from polydyn.testing.halves import in_type
from tests.support.marks import slow
from tests.support.tiny import model, node

RNG = np.random.default_rng(5)
V = Index.of
F = "float32"


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def conv(weight: Sequence[int], tail: Sequence[str] = ("Relu",), **attributes: Any) -> onnx.ModelProto:
    """Build a Conv with a bias, then one-input nodes."""
    o, c, *kernel = weight
    names = ["c", *(f"t{k}" for k in range(len(tail) - 1)), "y"]
    nodes = [node("Conv", "x w b", names[0] if tail else "y", **attributes)]
    nodes += [node(t, names[k], names[k + 1]) for k, t in enumerate(tail)]
    dims = ["N", c * attributes.get("group", 1), *"HWD"[: len(kernel)]]
    return model(nodes, {"x": (F, dims)}, ["y"], {"w": floats(*weight), "b": floats(o)})


def agrees(m: onnx.ModelProto, *feeds: dict[str, Array], checked: bool = False) -> HostPlan:
    """Compare kernels with the reference evaluator, on request in the checked build."""
    plan, graph = plan_program(m), import_model(m)
    program = CheckedProgram(plan) if checked else build_program(plan, threads=1)
    for f in feeds:
        want = reference.evaluate(graph, f)
        got = program.run(f)
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, 1e-4, 1e-4)
    return plan


def fused(m: onnx.ModelProto) -> FusionPlan:
    return fusion_plan(rewrite_graph(import_model(m)))


def lowered(plan: FusionPlan, group: int = 0) -> ContractGroup:
    form = lower_contract(plan, plan.groups[group], 16, promotion=True, shared=AVX512.core.shared)
    assert isinstance(form, ContractGroup)
    return form


# -- the worked example: {Pad, Conv3x3, Add + Relu} ------------------------------------------------------------------


def test_the_worked_example_is_one_kernel_with_the_padding_in_its_promotion() -> None:
    """TSCompiler 5.2-5.3, with any number of input channels."""
    nodes = [node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("Add", "c b", "a"), node("Relu", "a", "y")]
    inputs = {"x": (F, ["N", "I", "H", "W"]), "w": (F, [19, "I", 3, 3])}
    m = model(nodes, inputs, ["y"], {"b": floats(19, 1, 1)})

    def feeds(n: int, i: int, h: int, w: int) -> dict[str, Array]:
        return {"x": floats(n, i, h, w), "w": floats(19, i, 3, 3)}

    host = agrees(m, feeds(2, 7, 5, 19), feeds(1, 1, 1, 1), feeds(1, 33, 4, 3), feeds(0, 2, 3, 3), checked=True)
    assert len(host.launches) == 1 and {b.role for b in host.buffers.values()} == {"input", "constant", "output"}
    (group,) = fused(m).groups
    assert [r for r in group.reasons if "joins the promotion of" in r and r.endswith("(prologue)")]
    form = lowered(fused(m))
    assert form.fill
    g = form.lowered.group
    roles, choice = schedule_contract(g, form.roles, analyse(g, positive=False).under(context(g)))
    extents = dict(g.statement("ACC").iters)
    assert choice.solved.exprs("DONE0")[-2:] == (extents[roles.block] - 1, extents[roles.inner[0]] - 1)
    assert form.lowered.params[str(extents[roles.block])] == V("I") * 3 and extents[roles.inner[0]] == 3
    assert dict(roles.sunk) == {"INIT": "first", "DONE0": "last"}


CASES: list[tuple[Sequence[int], dict[str, Any], Sequence[tuple[int, ...]]]] = [
    ((5, 3, 3, 3), {"pads": [1, 1, 1, 1]}, [(2, 5, 7), (1, 1, 1), (1, 33, 17), (0, 4, 4)]),
    ((33, 4, 3, 3), {"pads": [1, 0, 2, 1], "strides": [2, 3], "dilations": [2, 1]}, [(2, 9, 7), (1, 17, 5)]),
    ((4, 3, 3), {"pads": [1, 2], "strides": [2], "dilations": [2]}, [(2, 7), (1, 5), (3, 40)]),
    ((3, 2, 2, 2, 2), {"pads": [0, 0, 1, 1, 0, 0]}, [(1, 3, 4, 2), (2, 2, 2, 1)]),
    ((18, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}, [(2, 5, 6), (1, 1, 1)]),
    ((6, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1]}, [(2, 5, 7), (1, 1, 1)]),
    ((6, 1, 3, 3), {"group": 6, "strides": [2, 2]}, [(2, 5, 7)]),
    ((24, 5, 1, 1), {"group": 3}, [(2, 3, 5)]),
    ((5, 3, 1, 1), {"strides": [2, 2]}, [(2, 5, 7), (1, 1, 1)]),
    ((1, 1, 1, 1), {}, [(1, 1, 1)]),
    ((5, 7, 5, 5), {"auto_pad": "SAME_LOWER", "strides": [2, 1]}, [(1, 6, 5), (2, 1, 1)]),
    ((4, 800, 2, 2), {"pads": [1, 1, 1, 1]}, [(1, 2, 3)]),
]


@pytest.mark.parametrize(("weight", "attributes", "sizes"), CASES, ids=range(len(CASES)))
def test_convolutions_of_any_form(
    weight: Sequence[int], attributes: dict[str, Any], sizes: Sequence[tuple[int, ...]]
) -> None:
    """One kernel each for any padding; it writes the model's layout."""
    channels = weight[1] * attributes.get("group", 1)
    feeds = [{"x": floats(n, channels, *spatial)} for n, *spatial in sizes]
    assert len(agrees(conv(weight, **attributes), *feeds, checked=True).launches) == 1


@pytest.mark.parametrize("case", [1, 4, 5, 7])
def test_convolutions_in_the_middle_of_a_model_are_channels_last(case: int) -> None:
    weight, attributes, sizes = CASES[case]
    feeds = [{"x": floats(n, weight[1] * attributes.get("group", 1), *spatial)} for n, *spatial in sizes]
    plan = agrees(conv(weight, ("Relu", "GlobalAveragePool"), **attributes), *feeds)
    assert any(b.name.endswith("@last") for b in plan.buffers.values())


@pytest.mark.parametrize(
    ("channels", "of_group", "strides"), [slow(20, 4, [1, 1]), slow(40, 8, [2, 1]), (34, 2, [1, 2])]
)
def test_narrow_groups_lie_together_in_vectors(channels: int, of_group: int, strides: list[int]) -> None:
    """Loads are spread over the groups of a vector, the last vector is cut in a group; planes stay products."""
    weight, groups = (channels, of_group, 3, 3), channels // of_group
    m = conv(weight, ("Relu", "GlobalAveragePool"), group=groups, pads=[1, 2, 0, 1], strides=strides)
    nodes = [node("Conv", "i u", "x"), *m.graph.node]
    shape = {"i": (F, ["N", 3, "H", "W"])}
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer}
    whole = model(nodes, shape, ["y"], constants | {"u": floats(channels, 3, 1, 1)})
    feeds = [{"i": floats(*s)} for s in ((2, 3, 5, 19), (1, 3, 2, 1), (1, 3, 9, 2), (0, 3, 4, 4))]
    plan = agrees(whole, *feeds, checked=True)
    assert any(f"vspread{of_group}_f32" in k.text for k in plan.kernels)
    assert not any("vspread" in k.text for k in plan_program(conv(weight, group=groups)).kernels)


def test_few_rows_and_sums_in_blocks_of_the_reduction() -> None:
    """Steps that no windows share are copied as rows, in blocks of the reduction; the output carries partial sums.

    The columns exceed half of any assumed second-level cache.
    """
    m = conv((180, 1600, 1, 1), strides=[2, 2])
    form = lowered(fused(m))
    assert form.fill and form.footprint is None
    plan = agrees(m, {"x": floats(1, 1600, 5, 4)}, {"x": floats(2, 1600, 1, 1)}, checked=True)
    notes = "\n".join(n for k in plan.kernels for n in k.notes)
    assert re.search(r"reduction block \d+, rows copied", notes), notes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_strips_of_halves_are_not_asked_for_ahead(dtype: str) -> None:
    """Only elements of four bytes have a prefetch instruction."""
    for m in (conv((64, 64, 3)), conv((48, 64, 3, 3), pads=[1, 1, 1, 1])):
        plan_program(in_type(m, dtype), target="cpu:avx2")


def test_pixels_that_leave_vectors_too_empty_are_rows() -> None:
    """49 columns would need a fourth vector for one of them; as rows they are exact, and weights are columns.

    At 64, vectors are full. Sizes known at compile time decide then.
    """
    m = conv((64, 66, 1, 1))
    sizes = ((1, 7, 7), (2, 1, 17), (1, 8, 8), (1, 2, 2), (0, 7, 7))
    program, graph = build_program(plan_program(m), threads=2), import_model(m)
    for n, h, w in sizes:
        x = floats(n, 66, h, w)
        np.testing.assert_allclose(program.run({"x": x})["y"], reference.evaluate(graph, {"x": x})["y"], 1e-4, 1e-4)
    chosen = [program.explain(N=n, H=h, W=w).launches[0].kernel.split("_")[0] for n, h, w in sizes[:4]]
    assert chosen == ["turned", "turned", "contract", "dot"]
    for side, turned in ((7, True), (8, False)):
        for dim in m.graph.input[0].type.tensor_type.shape.dim[2:]:
            dim.dim_value = side
        form = lowered(fused(m))
        assert form.transposed is None and bool(form.packed) == turned


@pytest.mark.parametrize(("pads", "copied"), [([0, 0, 0, 0], False), ([1, 0, 2, 1], True)])
def test_patches_are_read_in_place_and_padded_ones_have_a_footprint(pads: list[int], copied: bool) -> None:
    """Rows are pixels of an image row, results are stored in whole vectors; a padding separates taps from channels."""
    m = conv((21, 3, 4, 5), strides=[4, 5], pads=pads)
    form = lowered(fused(m))
    assert form.fill == copied == (form.footprint is not None)
    feeds = ({"x": floats(*s)} for s in ((2, 3, 9, 83), (1, 3, 4, 5), (0, 3, 8, 8), (3, 3, 11, 14)))
    plan = agrees(m, *feeds, checked=True)
    assert not any("vstores_f32" in k.text for k in plan.kernels)


@pytest.mark.parametrize("tail", [("Relu",), ("Relu", "GlobalAveragePool")])
def test_footprints_of_strips_that_are_lower_than_their_halo(tail: tuple[str, ...]) -> None:
    """Paddings larger than the image, with omitted taps; several footprint buffers and threads; both layouts."""
    m = conv((9, 100, 3, 3), tail, pads=[7, 16, 5, 18], dilations=[6, 16])
    plan, graph = plan_program(m), import_model(m)
    assert "footprint copied" in "\n".join(n for k in plan.kernels for n in k.notes)
    assert any(len(set(re.findall(r"(?:p_k|j\d)_lo = ", k.text))) == 2 for k in plan.kernels)
    assert any("pd_prefetch_far_f32" in k.text for k in plan.kernels), "tiles ask for the next strip of every plane"
    programs = [CheckedProgram(plan), build_program(plan, threads=3)]
    for n, h, w in ((1, 5, 3), (2, 40, 37), (1, 1, 70), (0, 4, 4)):
        feeds = {"x": floats(n, 100, h, w)}
        want = reference.evaluate(graph, feeds)
        for p in programs:
            np.testing.assert_allclose(p.run(feeds)["y"], want["y"], 1e-4, 1e-4)


def test_few_uneven_images_are_tasks_of_some_columns() -> None:
    """Three images are six tasks for two threads; two images, or many, are tasks of all columns."""
    (launch,) = plan_program(conv((100, 3, 3, 3), pads=[1, 1, 1, 1])).launches
    tasks = launch.candidates[0].tasks
    found = {(n, t): tasks.evaluate({"N": n, "H": 5, "W": 6, "nth": t}) for n, t in ((3, 1), (3, 2), (2, 2), (17, 2))}
    assert found == {(3, 1): 3, (3, 2): 6, (2, 2): 2, (17, 2): 17}


def test_strips_beside_columns_that_no_cache_holds_are_larger() -> None:
    """The columns exceed the cache anyway, and a larger footprint copies less of it twice."""
    wide = "cpu:avx512"
    plans = [plan_program(conv((n, 120, 5, 5), pads=[2, 2, 2, 2]), target=wide) for n in (16, 48)]
    tasks = [p.launches[0].candidates[0].tasks.evaluate({"N": 1, "H": 16, "W": 100, "nth": 1}) for p in plans]
    assert tasks == [4, 1]


def test_planes_are_stored_in_whole_vectors() -> None:
    """Sums of a run of register tiles are transposed; a sum over channels after it keeps its columns together.

    Stores are prefetched: for long sums beyond the near cache, for short ones beyond the last. For integers the results
    are prefetched, which read a channels-last residual in place.
    """
    texts = ["".join(k.text for k in plan_program(conv((21, 3, 3, 3), t)).kernels) for t in (("Relu",), ("Softmax",))]
    assert "pd_transpose_f32" in texts[0] and not any("vstores_f32" in t for t in texts)
    long = plan_program(conv((21, 15, 3, 3), pads=[1, 1, 1, 1])).kernels[0].text
    assert all("pd_prefetch_write_f32" in t for t in (long, texts[0]))
    assert "PD_CACHE_BYTES" in texts[0] and "PD_CACHE_BYTES" not in long
    assert "pd_prefetch_f32(a" in long, "the copy asks for the next plane"
    nodes = [node("ConvInteger", "x w", "i"), node("ConvInteger", "x v", "j"), node("Cast", "j", "b", to=2)]
    nodes += [node("Cast", n, f"{n}f", to=1) for n in "ib"]
    m = model([*nodes, node("Add", "if bf", "y")], {"x": ("uint8", ["N", 6, "H", "W"])}, ["y"],
              {n: RNG.integers(-9, 9, (21, 6, 1, 1)).astype(np.int8) for n in "wv"})  # fmt: skip
    plan = agrees(m, {"x": RNG.integers(0, 255, (2, 6, 11, 5)).astype(np.uint8)})
    text = "".join(k.text for k in plan.kernels)
    assert len(plan.launches) == 2 and "pd_transpose_rows_f32" in text and "vstores_f32" not in text


SPREAD: list[tuple[Sequence[int], dict[str, Any], int]] = [
    ((20, 6, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}, 2),
    ((20, 3, 3, 3), {"strides": [2, 3], "pads": [1, 1, 1, 1], "output_padding": [1, 0]}, 3),
    ((3, 18, 3, 3), {"dilations": [2, 1], "pads": [1, 2, 0, 1]}, 1),
]


@pytest.mark.parametrize(("weight", "attributes", "launches"), SPREAD, ids=range(len(SPREAD)))
def test_transposed_convolutions_are_products_of_phases(
    weight: Sequence[int], attributes: dict[str, Any], launches: int
) -> None:
    """A product for phases of as many taps, its footprint copied, and the interleaving; else only the product."""
    nodes = [node("ConvTranspose", "x w b", "c", **attributes), node("Relu", "c", "y")]
    constants = {"w": floats(*weight), "b": floats(weight[1])}
    m = model(nodes, {"x": (F, ["N", weight[0], "H", "W"])}, ["y"], constants)
    shapes = ((2, 5, 18), (1, 2, 2), (0, 3, 3), (1, 33, 3))
    plan = agrees(m, *({"x": floats(n, weight[0], *size)} for n, *size in shapes), checked=True)
    assert len(plan.launches) == launches
    assert "footprint copied" in "\n".join(n for k in plan.kernels for n in k.notes)


# -- prologues -------------------------------------------------------------------------------------------------------


def groups(nodes: list[onnx.NodeProto], outputs: Sequence[str] = ("y",), **constants: Array) -> FusionPlan:
    return fused(model(nodes, {"x": (F, ["N", 8, "H", "W"])}, list(outputs), constants))


def test_scales_and_rectifiers_join_the_promotion_when_nobody_else_reads_them() -> None:
    nodes = [node("Mul", "x s", "m"), node("Relu", "m", "r"), node("Conv", "r w", "y", pads=[1, 1, 1, 1])]
    s, w = floats(8, 1, 1), floats(4, 8, 3, 3)
    plan = groups(nodes, s=s, w=w)
    assert len(plan.groups) == 1 and plan.groups[0].prologue is not None
    assert [m.output for m in plan.groups[0].prologue.maps][:2] == ["m", "r"]
    assert {n.output for n in plan.graph.nodes} == {"y"}
    agrees(model(nodes, {"x": (F, ["N", 8, "H", "W"])}, ["y"], {"s": s, "w": w}), {"x": floats(2, 8, 5, 3)})
    seen = groups(nodes, ("y", "r"), s=s, w=w)
    assert len(seen.groups) == 2, "the model's output r must exist"
    twice = [*nodes, node("Conv", "r v", "z")]
    assert len(groups(twice, ("y", "z"), s=s, w=w, v=floats(3, 8, 1, 1)).groups) == 3, "two readers"


def test_a_costly_map_joins_a_product_but_no_window() -> None:
    def plan(kernel: int) -> FusionPlan:
        return groups([node("Sigmoid", "x", "s"), node("Conv", "s w", "y")], w=floats(4, 8, kernel, kernel))

    assert len(plan(1).groups) == 1
    assert [g.kind for g in plan(3).groups] == ["nest", "contract"], "it would be computed for each of nine taps"


def test_on_a_gpu_maps_of_rows_along_the_reduction_join_few_columns() -> None:
    """On a GPU, copies of whole rows compute nothing if many columns need them; pixels across the reduction are copied
    one by one.
    """
    maps = [node("Relu", "x", "r"), node("Mul", "r s", "m")]
    few, many = (model([*maps, node("MatMul", "m w", "y")], {"x": (F, ["M", 8])}, ["y"],
                       {"s": floats(8), "w": floats(8, n)}) for n in (512, 513))  # fmt: skip
    pixels = model([*maps, node("Conv", "m w", "y")], {"x": (F, ["N", 8, "H", "W"])}, ["y"],
                   {"s": floats(8, 1, 1), "w": floats(4, 8, 1, 1)})  # fmt: skip
    count = {cuda: [len(fusion_plan(rewrite_graph(import_model(x)), Cuda.unused if cuda else (), cuda).groups)
                    for x in (few, many, pixels)] for cuda in (False, True)}  # fmt: skip
    assert count == {False: [1, 1, 1], True: [1, 2, 1]}


def test_the_prologue_is_proven_and_mistakes_are_refused_with_an_instance() -> None:
    plan = fused(conv((5, 3, 3, 3), pads=[1, 1, 1, 1]))
    (group,) = plan.groups
    assert prove_prologue(plan, group) == () and group.prologue is not None
    guarded = group.nodes[0].body.args[0]  # type: ignore[attr-defined]
    bare = replace(group.nodes[0], body=op("mul", guarded.args[1], group.nodes[0].body.args[1]))  # type: ignore[attr-defined]
    wrong = replace(group, nodes=(bare, *group.nodes[1:]))
    for prove in (partial(prove_prologue, plan), CudaBuilder(plan).build_group):
        with pytest.raises(LegalityError, match=r"reads x\[.*outside its shape(.|\n)*for example"):
            prove(wrong)
    (pad,) = group.prologue.maps
    t = plan.graph.tensors[pad.output]
    short = replace(t, shape=(*t.shape[:-1], t.shape[-1] - 1))
    graph = replace(plan.graph, tensors={**plan.graph.tensors, pad.output: short})
    with pytest.raises(LegalityError, match=rf"reads {pad.output}\[.*along axis 3, which has .*W"):
        prove_prologue(replace(plan, graph=graph), group)


def test_loads_under_conditions() -> None:
    def check(body: Any, shape: Index) -> tuple[str, ...]:
        return check_loads("S", [("i", V("N"))], body, {"x": (shape,)})

    shifted = load("x", (V("i") - 1,), F)
    guarded = op("where", in_range(V("i") - 1, V("N")), shifted, const(0, F))
    assert check(guarded, V("N")) == ()
    with pytest.raises(LegalityError, match=r"outside its shape along axis 0(.|\n)*for example"):
        check(guarded, V("N") - 2)
    swapped = op("where", in_range(V("i") - 1, V("N")), const(0, F), shifted)
    with pytest.raises(LegalityError, match="for example"):
        check(swapped, V("N"))
    assert check(load("x", (V("i") * V("M"),), F), V("N") * V("M")) == ("x",), "not affine: said, not guessed"


def test_both_branches_of_a_choice_have_its_condition() -> None:
    i, n, zero = V("i"), V("N"), const(0, F)

    def check(condition: Any, then: Any, orelse: Any, facts: Any = ()) -> tuple[str, ...]:
        return check_loads("S", [("i", n)], op("where", condition, then, orelse), {"x": (n,)}, facts)

    def at(index: Any) -> Any:
        return load("x", (index,), F)

    def less(a: Any, b: int) -> Any:
        return op("lt", FromIndex("int64", a), const(b, "int64"))

    first, last = less(i, 3), op("eq", FromIndex("int64", i), FromIndex("int64", n - 1))
    assert check(first, zero, at(i - 3)) == ()
    assert check(op("not", first), at(i - 3), zero) == ()
    assert check(op("or", first, last), zero, op("sub", at(i - 3), at(i + 1))) == ()
    assert check(op("and", first, last), zero, at(i)) == ()
    assert check(first, zero, op("where", less(i, 5), at(i - 3), at(i - 5))) == ()
    assert check(op("ne", FromIndex("int64", i), FromIndex("int64", n - 1)), at(i + 1), at(i - n + 1)) == ()
    assert check(less(i * V("M"), 3), zero, at(i - 3)) == ("x",), "not affine: said, not guessed"
    assert check(first, zero, at(i - minimum(3, n))) == ()
    half = [(n, "%==", Index.of(2))]
    assert check(less(i + 1 - n, 0), at(i + 1), at(i - (n // 2 * 2 - 1)), half) == ()
    for condition, orelse in ((first, at(i - 4)), (op("and", first, last), at(i - 3)), (op("not", first), at(i - 3)),
                              (less(i, 2), at(i - 3)), (op("gt", zero, zero), at(i - 3))):  # fmt: skip
        with pytest.raises(LegalityError, match="for example"):
            check(condition, zero, orelse)
    with pytest.raises(LegalityError, match="for example"):
        check(less(i + 1 - n, 0), at(i + 1), at(i - (n // 2 * 2 - 1)))


# -- channels-last ---------------------------------------------------------------------------------------------------


def test_the_order_spreads_to_what_reads_channels_and_stops_at_outputs() -> None:
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]), node("Relu", "a", "r"), node("Conv", "r v", "p"),
        node("Add", "p r", "s"), node("MaxPool", "s", "q", kernel_shape=[2, 2], strides=[2, 2]),
        node("Concat", "q q", "k", axis=1), node("AveragePool", "k", "y", kernel_shape=[2, 2]),
        node("Sigmoid", "k", "h"), node("ReduceMean", "h i", "z", keepdims=0),
    ]  # fmt: skip
    m = model(nodes, {"x": (F, ["N", 3, "H", "W"])}, ["y", "z"],
              {"w": floats(8, 3, 3, 3), "v": floats(8, 8, 1, 1), "i": np.array([2, 3])})  # fmt: skip
    plan = fused(m)
    names = {n.output for n in plan.graph.nodes}
    assert {"a@last", "r@last", "p@last", "s@last", "q@last", "h@last", "y", "z"} <= names
    assert plan.graph.tensors["r@last"].shape == (V("N"), V("H"), V("W"), V(8))
    assert plan.windows and {w.target for w in plan.windows.values()} == {"k@last"}
    assert {w.axis for w in plan.windows.values()} == {3}
    agrees(m, {"x": floats(2, 3, 5, 7)}, {"x": floats(1, 3, 4, 4)})


def test_a_tensor_that_stays_joins_ones_that_moved() -> None:
    """Convolutions that write windows share a kernel: the offset of a window is a parameter, checked at every site."""
    image = (F, ["N", 3, "H", "W"])
    nodes = [node("Conv", "x w", "c"), node("Conv", "z v", "d"), node("Concat", "c x d", "k", axis=1)]
    m = model([*nodes, node("Relu", "k", "y")], {"x": image, "z": image}, ["y"],
              {"w": floats(5, 3, 1, 1), "v": floats(5, 3, 1, 1)})  # fmt: skip
    agrees(m, {"x": floats(2, 3, 3, 5), "z": floats(2, 3, 3, 5)})
    builder = KernelBuilder(fused(m), AVX2)
    first, second = (builder.place(g)[0] for g in builder.plan.groups if g.kind == "contract")
    assert first.kernels == second.kernels
    group, params = first.lowered.group, first.lowered.params
    with pytest.raises(LegalityError, match="share addresses: dim"):
        check_addresses(group, {p: V(4) if e == V(13) else e for p, e in params.items()})
    nodes = [node("Conv", "x w", "c"), node("Concat", "c x", "y", axis=1)]
    agrees(model(nodes, {"x": image}, ["y"], {"w": floats(5, 3, 1, 1)}), {"x": floats(2, 3, 3, 5)})


def test_shuffled_channels_are_padded_in_order_and_read_by_vectors() -> None:
    """ShuffleNet's unit: groups of channels, shuffled, then a depthwise convolution with a padding."""
    nodes = [
        node("Conv", "x w", "c", group=3), node("Reshape", "c split", "e"),
        node("Transpose", "e", "f", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "f whole", "g"), node("Conv", "g v", "h", group=36, pads=[1, 1, 1, 1], strides=[2, 2]),
        node("GlobalAveragePool", "h", "y"),
    ]  # fmt: skip
    constants = {"w": floats(36, 4, 1, 1), "v": floats(36, 1, 3, 3)}
    constants |= {"split": np.array([0, 3, 12, 5, 7]), "whole": np.array([0, 36, 5, 7])}
    plan = agrees(model(nodes, {"x": (F, ["N", 12, 5, 7])}, ["y"], constants), {"x": floats(2, 12, 5, 7)})
    assert len(plan.launches) == 4 and not [n for k in plan.kernels for n in k.notes if "scalar" in n]


@pytest.mark.parametrize("beta", [0.75, 0.6])
def test_windows_over_channels_stay_channels_last(beta: float) -> None:
    nodes = [node("Conv", "x w", "c"), node("LRN", "c", "l", size=5, alpha=0.5, beta=beta), node("Conv", "l v", "y")]
    m = model(nodes, {"x": (F, ["N", 3, "H", "W"])}, ["y"], {"w": floats(21, 3, 1, 1), "v": floats(4, 21, 1, 1)})
    plan = agrees(m, {"x": floats(2, 3, 4, 5)}, {"x": floats(1, 3, 1, 1)})
    assert "l@last" in plan.buffers and not [n for k in plan.kernels for n in k.notes if "scalar" in n]


# -- passes ----------------------------------------------------------------------------------------------------------


def test_a_guarded_load_is_a_load_of_some_lanes() -> None:
    i = V("i")
    inside = op("and", in_range(V("q"), 7), in_range(i - 3, V("n")))
    value = op("where", inside, FlatLoad(F, "x", i - 3), const(0, F))
    main, *_ = vectorise_loop(For("i", V(0), V("m"), (Store("y", i, value),)), 8)
    assert isinstance(main, For) and isinstance(main.body[0], Store)
    got = main.body[0].value
    assert isinstance(got, FlatLoad) and got.lanes == 8 and got.guard is not None and "Between" in repr(got.guard)
    strided = op("where", inside, FlatLoad(F, "x", i * 2), const(0, F))
    main, *_ = vectorise_loop(For("i", V(0), V("m"), (Store("y", i, strided),)), 8)
    assert isinstance(main, For) and "stride=2" in repr(main.body[0])
    far = op("where", inside, FlatLoad(F, "x", i * "pitch"), const(0, F))
    refused = vectorise_loop(For("i", V(0), V("m"), (Store("y", i, far),)), 8)
    assert isinstance(refused, Declined) and "that stride" in str(refused)


def test_loops_that_walk_memory_alike_become_one() -> None:
    def nest(stride: int) -> tuple[For]:
        address = V("a") * stride + V("b")
        return (For("a", V(0), V("m"), (For("b", V(0), V(7), (Store("y", V(0), FlatLoad(F, "x", address), "sum"),)),)),)

    (one,) = flatten_loops(nest(7), "a")
    assert isinstance(one, For) and one.hi == V("m") * 7 and isinstance(one.body[0], Store)
    assert flatten_loops(nest(8), "a") == nest(8)


def test_divisions_leave_loops_that_do_not_change_them() -> None:
    a, b = V("a"), V("b")
    address = (a + V("s")) // V("w") * 5 + (a + V("s")) // V("w") // 2 + b // 3
    nest = (For("a", V(0), V("m"), (For("b", V(0), V("n"), (Store("y", address, const(0, F)),)),)),)
    text = repr(hoist_divisions(nest, "q"))
    assert text.count("(a + s) // w") == 1 and text.count("// 2") == 1 and text.count("b // 3") == 1
    assert text.index("(a + s) // w") < text.index("var='b'") < text.index("b // 3")


def test_divisions_by_sizes_are_done_before_a_loop() -> None:
    address = V("t") // V("w") + V("t") // 4 + V("u") // V("w")
    (name,) = divide_before((For("u", V(0), V(7), (Store("y", address, const(0, F)),)),), "q")
    assert isinstance(name, Let) and (name.var, name.value) == ("q0", V("t") // V("w"))
    assert repr(name.body).count("q0") == 1 and "t // 4" in repr(name.body) and "u // w" in repr(name.body)
