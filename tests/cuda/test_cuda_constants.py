"""Constant bytes on CUDA: stored K-major, so that no kernel gathers or transposes bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from polydyn.codegen.kernel import Kernel
from polydyn.fusion.k_major_weights import make_weights_k_major
from polydyn.fusion.pipeline import fusion_plan
from polydyn.fusion.plan import FusionPlan
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.expr import Load, Op, Value, cast, op
from tests.support.cuda_groups import dims_of, launch, params_of, placed, plan_of
from tests.support.graphs import Sheet
from tests.support.quantized import quantized_model

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(23)


def byte(dtype: str, *shape: int) -> Array:
    """Return any values, including both ends of the range."""
    ends = np.iinfo(dtype)
    out = RNG.integers(ends.min, ends.max, shape, dtype, endpoint=True)
    out.reshape(-1)[: min(2, out.size)] = [ends.min, ends.max][: out.size]
    return out


def products(*weights: Array, zero: int | None = None) -> FusionPlan:
    """Plan a MatMulInteger of a separate input with each constant: (M, K) x (K, N)."""
    nodes, shapes, constants = [], {}, {}
    for n, w in enumerate(weights):
        shapes[f"a{n}"] = ("M", w.shape[0])
        constants[f"w{n}"] = w
        zeros = [] if zero is None else ["", f"z{n}"]
        constants |= {} if zero is None else {f"z{n}": np.array(zero, w.dtype)}
        nodes.append(helper.make_node("MatMulInteger", [f"a{n}", f"w{n}", *zeros], [f"y{n}"]))
    return plan_of(nodes, shapes, [f"y{n}" for n in range(len(weights))], constants, "uint8")


def column(plan: FusionPlan, n: int = 0) -> tuple[Load, Array]:
    """Return the constant operand of a product, and its array."""
    (node,) = (x for x in plan.graph.nodes if x.output == f"y{n}")
    assert isinstance(node, Compute) and isinstance(node.body, Op)
    v = node.body.args[1]
    assert isinstance(v, Op) and v.name == "cast" and isinstance(v.args[0], Load)
    return v.args[0], plan.graph.constants[v.args[0].buffer]


def tiled(p: PlacedGroup, env: dict[str, int]) -> Kernel:
    """Return the smallest tile's version if there are tiles, else the first that fits."""
    fits = [k for k in p.kernels if k.fits(env)]
    return next((k for k in fits if k.version.startswith("imma_64")), fits[0])


SIZES = ((5, 7), (63, 65), (333, 64))
"""(K, N): primes, around the tile, more steps than a ring holds."""


def test_weights_are_laid_out_along_the_reduction() -> None:
    plan = products(*(byte("int8", *s) for s in SIZES))
    for n, (k, columns) in enumerate(SIZES):
        x, array = column(plan, n)
        assert array.shape == (columns, -(-k // 16) * 16) and array.dtype == np.int8
        assert (array[:, k:] == 0).all() and [str(i) for i in x.index] == ["d1", "r0"]


def test_kernels_take_no_bytes_apart_and_copy_16_at_a_time() -> None:
    """For any K and N, the weights' half of every version is the same."""
    for k, n in ((65, 63), (24, 40)):
        (p,) = placed(products(byte("int8", k, n)))
        versions = [v for v in p.kernels if v.version.startswith(("imma", "split_imma"))]
        assert versions
        for v in versions:
            rows, columns = v.version.split("imma_")[1].split(" ")[0].split("_")[2:4]
            assert columns == "16" and rows == {65: "1", 24: "8"}[k], v.version
            assert "pd_byte_columns" not in v.text and "_trans(" not in v.text
            assert v.text.count("pd_ldmatrix_x4(") >= 2 and "pd_cp_async<16>" in v.text
    (p,) = placed(products(byte("int8", 64, 32)))
    few = [v for v in p.kernels if v.version.startswith("gemv")]
    assert few and all("k16" in v.version and "pd_dp4a_u8s8(" in v.text for v in few), "four products at once"


def exact(plan: FusionPlan, rows: tuple[int, ...]) -> None:
    """Compare every product at every number of rows with numpy exactly, with all kernels compiled together."""
    kernels = placed(plan)
    runs = []
    for m in rows:
        feeds = {n: byte("uint8", m, int(plan.graph.tensors[n].shape[1])) for n in plan.graph.inputs}
        runs.append((feeds, reference.evaluate(plan.graph, feeds)))
    chosen = [[tiled(p, params_of(p, dims_of(plan, feeds))) for p in kernels] for feeds, _ in runs]
    alike = list({k.name: k for some in chosen for k in some}.values())
    for (feeds, want), some in zip(runs, chosen, strict=True):
        memory = {**plan.graph.constants, **feeds, **{n: np.full(y.shape, 77, y.dtype) for n, y in want.items()}}
        for p, k in zip(kernels, some, strict=True):
            env = params_of(p, dims_of(plan, feeds))
            names = p.lowered.buffers
            (count,) = launch(k, alike, env, lambda a, of=names, at=memory: at[of[a]])  # type: ignore[misc]
            assert count.ldmatrix_conflicts == count.shared_conflicts == 0
            assert bool(count.mma) == k.version.startswith("imma")
        for n, y in want.items():
            np.testing.assert_array_equal(memory[n], y)


def test_products_are_exact() -> None:
    weights = [byte("int8", *s) for s in (*SIZES, (1, 1))]
    plan = products(*weights)
    exact(plan, (1, 7, 65))
    a = {f"a{n}": byte("uint8", 3, w.shape[0]) for n, w in enumerate(weights)}
    for n, y in enumerate(reference.evaluate(plan.graph, a).values()):
        np.testing.assert_array_equal(y, a[f"a{n}"].astype(np.int32) @ weights[n].astype(np.int32))


def test_a_zero_point_that_leaves_bytes_is_subtracted() -> None:
    """uint8 weights around 128 become int8; differences that need nine bits stay unchanged."""
    weights = byte("uint8", 33, 20)
    plan = products(weights, zero=128)
    _, array = column(plan)
    np.testing.assert_array_equal(array[:, :33].T, weights.astype(np.int32) - 128)
    assert all("imma" in v.version for v in placed(plan)[0].kernels)
    wide = products(weights, zero=100)
    (node,) = wide.graph.nodes
    assert isinstance(node, Compute) and "w0" in node.inputs
    assert all(v.version.startswith(("fma", "split_fma")) for v in placed(wide)[0].kernels)


def test_what_is_laid_out_stays() -> None:
    """[N, K] with whole vectors is unchanged; with a remainder it is padded; without elements nothing happens."""
    for k, name in ((32, "w"), (33, "w@steps"), (1, "w"), (0, "w")):
        s = Sheet("uint8", a=("M", k))
        s.constant("w", byte("int8", 20, k))
        pair = (cast(s.at(n, i, "r0"), "int32") for n, i in (("a", "d0"), ("w", "d1")))
        s.let("y", ("M", 20), op("mul", *pair), (k,), "sum")
        (node,) = make_weights_k_major(s.graph("y")).nodes
        assert node.inputs == ("a", name)


def test_convolutions_sum_over_one_axis() -> None:
    """Weights [O, C, kh, kw] are one axis of steps, in the order of the sum."""
    w = byte("int8", 8, 3, 3, 3)
    node = helper.make_node("ConvInteger", ["x", "w"], ["y"])
    plan = plan_of([node], {"x": ("B", 3, "H", "W")}, ["y"], {"w": w}, "uint8")
    (made,) = (a for n, a in plan.graph.constants.items() if "@steps" in n)
    np.testing.assert_array_equal(made[:, :27], w.reshape(8, 27))
    assert made.shape == (8, 32)


def test_only_cuda_kernels_read_them() -> None:
    model = quantized_model(
        [helper.make_node("MatMulInteger", ["a", "w"], ["y"])], {"a": ("uint8", ["M", 8])}, ["y"], w=byte("int8", 8, 5)
    )
    graph = import_model(model)
    for off, cuda, found in ((("widen",), True, True), (("widen",), False, False), (("widen", "steps"), True, False)):
        assert ("w@steps" in fusion_plan(graph, off, cuda).graph.constants) == found


def test_a_constant_that_is_summed_in_two_ways_is_laid_out_twice() -> None:
    """Axes in the same order, but one of them is summed in one product only."""
    s = Sheet("int8", a=("B", 16, 5), b=("B", 5, 16))
    s.constant("w", byte("int8", 3, 5, 16))

    def value(name: str, *index: str) -> Value:
        return cast(s.at(name, *index), "int32")

    s.let("y", (3, "B", 16, 16), op("mul", value("a", "d1", "d2", "r0"), value("w", "d0", "r0", "d3")), (5,), "sum")
    s.let("z", (3, "B"), op("mul", value("b", "d1", "r1", "r0"), value("w", "d0", "r1", "r0")), (16, 5), "sum")
    graph = s.graph("y", "z")
    feeds = {"a": byte("int8", 2, 16, 5), "b": byte("int8", 2, 5, 16)}
    got, want = reference.evaluate(make_weights_k_major(graph), feeds), reference.evaluate(graph, feeds)
    assert all(np.array_equal(got[t], want[t]) for t in graph.outputs)
