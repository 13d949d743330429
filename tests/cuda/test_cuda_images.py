"""Convolutions on sm_90a: TMA loads pixels in im2col mode, wgmma multiplies them; on the strict emulation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.images import Im2colOperand, im2col_operand, mistake
from polydyn.codegen.cuda.wgmma import BLOCKS, WgmmaTile, wgmma_versions
from polydyn.codegen.cuda.wgmma_operands import with_one_reduction
from polydyn.codegen.ir import Compare, Pointer
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cuda import CudaBuilder
from polydyn.schedules.decision import ONLY
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import FromIndex, Load, Op, at_least_zero, conjuncts
from polydyn.schedules.index import Index
from tests.support.cuda_groups import Arrays, first_fit, params_of, plan_of, run, with_bugs

node = helper.make_node
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)
LAYERS: tuple[tuple[int, tuple[int, int], dict[str, list[int]], WgmmaTile], ...] = (
    (128, (3, 3), {"pads": [1, 0, 1, 2], "strides": [2, 2]}, WgmmaTile(128, 5, in_turn=True, cluster="i")),
    (72, (3, 2), {"pads": [2, 0, 2, 3], "dilations": [2, 3]}, WgmmaTile(128, 4)),
    (40, (1, 5), {"pads": [0, 1, 0, 2], "strides": [1, 3]}, WgmmaTile(64, 8, in_turn=True)),
)
"""Results, kernel, attributes and tile of consecutive convolutions, of 64, 128 and 72 channels."""


def network(layers: Any, channels: int = 64) -> tuple[FusionPlan, Arrays]:
    """Plan consecutive convolutions of a channels-last input, and return their weights."""
    nodes, weights = [node("Transpose", ["x"], ["c0"], perm=[0, 3, 1, 2])], {}
    inputs = {"x": ("N", "H", "W", channels)}
    for n, (results, kernel, attributes, *_) in enumerate(layers):
        weights[f"w{n}"] = (RNG.standard_normal((results, channels, *kernel)) / 16).astype(np.float16)
        nodes.append(node("Conv", [f"c{n}", f"w{n}"], [f"c{n + 1}"], **attributes))
        channels = results
    nodes.append(node("GlobalAveragePool", [f"c{len(layers)}"], ["y"]))
    return plan_of(nodes, inputs, ["y"], weights, "float16"), weights


def convolution(x: Array, w: Array, pads: Any = (0, 0, 0, 0), strides: Any = (1, 1), dilations: Any = (1, 1)) -> Array:
    """Compute in float64."""
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    window = tuple(d * (k - 1) + 1 for k, d in zip(w.shape[2:], dilations, strict=True))
    every = np.lib.stride_tricks.sliding_window_view(x, window, (2, 3))
    every = every[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    return np.einsum("bchwij,ocij->bohw", every, w.astype(np.float64), optimize=True)


def product(plan: FusionPlan, number: int) -> tuple[PlacedGroup, ProductGroup]:
    """Return a layer of a network, without kernels."""
    builder = CudaBuilder(plan, "sm_90a")
    group = plan.groups[number]
    form = builder._product(group)
    assert form
    of = ProductGroup(f"layer_{number}", form.lowered.group, form.roles)
    return PlacedGroup(group, form.lowered, of.name, (), ONLY), with_one_reduction(of)


@pytest.fixture(scope="module")
def compiled_layers() -> tuple[FusionPlan, Arrays, tuple[PlacedGroup, ...]]:
    """Return all layers; versions of their tiles, and versions of the second one with planted bugs, compiled together.
    """
    plan, weights = network(LAYERS)
    layers, kernels = [], []
    for n, (*_, tile) in enumerate(LAYERS):
        p, of = product(plan, n)
        layers.append(p)
        kernels.append(wgmma_versions(of, tiles=(tile,))[0])
    kernels += with_bugs(kernels[1], BUGS)
    pool = CudaBuilder(plan).build_group(plan.groups[len(LAYERS)])
    return plan, weights, (*(replace(p, kernels=tuple(kernels)) for p in layers), pool)


def right(compiled_layers: Any, x: Array, second: int = 1, reverse: bool = False) -> bool:
    """Return whether all layers are right, on an SM or a cluster; ``second``: the number of the second kernel."""
    plan, weights, layers = compiled_layers
    numbers = dict(zip(map(id, layers), (0, second, 2), strict=False))

    def chosen(p: PlacedGroup, env: dict[str, int]) -> Kernel:
        k = p.kernels[numbers[id(p)]] if id(p) in numbers else first_fit(p, env)
        return replace(k, launch={BLOCKS: Index.of(k.device.cluster)}) if BLOCKS in k.launch else k

    want = np.moveaxis(x, 3, 1)
    for n, (_, _, attributes, _) in enumerate(LAYERS):
        want = convolution(want.astype(np.float16), weights[f"w{n}"], **attributes)
    want = want.mean((2, 3), keepdims=True)
    got, _ = run(plan, {"x": x}, chosen, layers, reverse)
    return bool(np.abs(got["y"] - want).max() <= 2e-3 * np.abs(want).max())


def image(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize(("shape", "reverse"), [((5, 19, 24, 64), False), ((80, 1, 9, 64), True)])
def test_windows_of_every_kind(shape: tuple[int, ...], reverse: bool, compiled_layers: Any) -> None:
    """Strides, dilations, paddings of each side; tiles that end inside an image row, hold many images, or no row at
    all.
    """
    assert right(compiled_layers, image(*shape), reverse=reverse)


BUGS = {
    "a line too low": ("((128*b_i)/((n2 + 1)/2)) + (-2)", "((128*b_i)/((n2 + 1)/2)) + (-1)"),
    "the tap's line not dilated": ("(2*(b_k/2) + (-6)", "((b_k/2) + (-3)"),
    "the next tap": ("((-6)*(b_k/12) + 3*(b_k/6))", "(3 - (3*(b_k/6) + (-6)*(b_k/12)))"),
    "always the first channels": ("(64*b_k + (-128)*(b_k/2))", "0"),
    "always the first image": ("(((128*b_i)/(((n1 + 1)/2)*((n2 + 1)/2))))", "0"),
    "each tile from a line's first pixel on": ("((-1)*((n2 + 1)/2)*((128*b_i)/((n2 + 1)/2)) + 128*b_i)", "0"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, compiled_layers: Any) -> None:
    with contextlib.suppress(DeviceError):
        assert not right(compiled_layers, image(5, 19, 24, 64), len(LAYERS) + list(BUGS).index(bug))


def operand(layer: tuple[Any, ...], channels: int = 64) -> tuple[ProductGroup, Im2colOperand | Declined]:
    """Return the product of a layer, and its rows behind a tensor map."""
    plan, _ = network([layer], channels)
    _, of = product(plan, 0)
    return of, im2col_operand(of.group, of.values[0], of.roles, 64)


def test_what_is_copied_is_what_is_read() -> None:
    """The map of a layer by hand; the check rejects each wrong number."""
    of, found = operand((64, (3, 2), {"pads": [2, 1, 2, 3], "dilations": [2, 3], "strides": [1, 2]}))
    assert isinstance(found, Im2colOperand)
    w, h = found.sides
    assert [(s.step, s.apart, str(s.first)) for s in (w, h)] == [(2, 3, "-1"), (1, 2, "-2")]
    assert (str(found.channel.extent), str(found.offset), str(w.pitch), found.batch) == ("64", "0", "64", "")

    whole = w.pixel.extent * h.pixel.extent * found.images
    assert Compare("<=", of.M, whole) in found.conditions, "rows that are no whole images would be others' pixels"

    def changed(**numbers: Any) -> Im2colOperand:
        return replace(found, sides=(replace(w, **numbers), h))

    longer = replace(w.pixel, extent=w.pixel.extent + 1)
    wrong = [
        changed(step=1), changed(apart=1), changed(first=w.first + 1), changed(size=w.size - 1),
        changed(pitch=w.pitch * 2), changed(tap=h.tap), changed(pixel=longer), replace(found, sides=(h, w)),
        replace(found, offset=found.offset + 8), replace(found, between=found.between + 8),
        replace(found, images=found.images + 1), replace(found, channel=w.tap),
        replace(found, channels=found.channels - 1),
    ]  # fmt: skip
    assert not mistake(found, of.group, of.values[0], of.roles)
    for x in wrong:
        assert mistake(x, of.group, of.values[0], of.roles), x


WINDOWS = (
    ((3, 3), (0, 0, 0, 0), (1, 2), (1, 1), (7, 6)),  # taps of an image row are contiguous, and windows overlap there
    ((1, 1), (1, 1, 4, 3), (1, 4), (1, 1), (5, 9)), ((4, 2), (3, 0, 0, 1), (4, 3), (3, 2), (13, 8)),
    ((2, 3), (1, 4, 0, 3), (3, 1), (2, 3), (4, 5)), ((1, 4), (0, 2, 1, 0), (2, 3), (3, 1), (1, 12)),
)  # fmt: skip
"""Kernel, paddings, strides, dilations, and sides of the image."""


@pytest.mark.parametrize(("kernel", "pads", "strides", "dilations", "sides"), WINDOWS)
def test_the_walk_is_what_rows_read(kernel: Any, pads: Any, strides: Any, dilations: Any, sides: Any) -> None:
    """A column of each tile, by TMA's rules, against the group's own address and guards at each row."""
    layer = (8, kernel, {"pads": pads, "strides": strides, "dilations": dilations})
    plan, _ = network([layer])
    p, of = product(plan, 0)
    v, roles = of.values[0], of.roles
    found = im2col_operand(of.group, v, roles, 64)
    assert isinstance(found, Im2colOperand)
    env = params_of(p, {"N": 3, "H": sides[0], "W": sides[1]})
    extents = {x: e.evaluate(env) for x, e in of.acc.iters}
    load = v.args[1] if isinstance(v, Op) else v
    assert isinstance(load, Load) and all(c.holds(env) for c in found.conditions)
    address = of.group.arrays[load.buffer].address(load.index)
    guards = [at_least_zero(c) for c in conjuncts(v.args[0])] if isinstance(v, Op) else []
    for batch in [{x: n} for x in roles.batch for n in range(extents[x])] or [{}]:
        for first, step in itertools.product(range(0, of.M.evaluate(env), 16), range(0, of.K.evaluate(env), 64)):
            start = {x: Index.of(n) for x, n in batch.items()}
            for row, at in zip(range(first, of.M.evaluate(env)), walk(found, first, step, start, env), strict=False):
                here = {**env, **batch, roles.row: row, roles.block: step}
                inside = all(g is not None and g.evaluate(here) >= 0 for g in guards)
                assert at == (address.evaluate(here) if inside else None), (row, step)


def walk(
    operand: Im2colOperand, row: int, step: int, batch: dict[str, Index], env: dict[str, int]
) -> Iterator[int | None]:
    """Yield addresses of the first channel of 16 pixels, None outside of the image."""
    box_map = operand.tensor_map("map", Index.of(0), Index.of(0), (64, 16))
    box = box_map.pixels
    assert box
    dims, strides, lower, upper = (
        [i.evaluate(env) for i in x] for x in (box_map.dims, (Index.of(1), *box_map.strides), box.lower, box.upper)
    )
    place = Pointer(operand.dtype, "tile", Index.of(0))
    call = operand.load("map", place, Index.of(row), Index.of(step), batch, FromIndex("int32", Index.of(0)))
    numbers = [x.index.evaluate(env) for x in call.args[2:-1] if isinstance(x, FromIndex)]
    at, tap = numbers[: len(dims)], (0, *numbers[len(dims) :], 0)
    for _ in range(16):
        x = [a + t for a, t in zip(at, tap, strict=True)]
        inside = all(0 <= a < n for a, n in zip(x, dims, strict=True))
        yield box_map.offset.evaluate(env) + int(np.dot(x, strides)) if inside else None
        for n, pace in enumerate(box.steps, 1):
            assert lower[n - 1] <= at[n] < dims[n] + upper[n - 1] and (at[n] - lower[n - 1]) % pace == 0
            at[n] += pace
            if at[n] < dims[n] + upper[n - 1]:
                break
            at[n] = lower[n - 1]
        else:
            at[-1] += 1


@pytest.mark.parametrize(
    ("layer", "channels"),
    [
        ((64, (3, 3), {"pads": [1] * 4}), 24),  # a tile of steps has several taps
        ((64, (3, 3), {"pads": [1] * 4, "strides": [9, 9]}), 64),
        ((64, (3, 3), {"pads": [1, 129, 1, 1]}), 64),
        ((64, (3, 3), {"pads": [1] * 4, "dilations": [1, 128]}), 64),
    ],
)
def test_what_no_map_holds(layer: tuple[Any, ...], channels: int) -> None:
    """Channels, strides, corners and offsets beyond TMA's range; such layers have their other versions."""
    _, found = operand(layer, channels)
    assert isinstance(found, Declined)
