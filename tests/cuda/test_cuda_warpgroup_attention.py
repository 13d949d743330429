"""Attention by wgmma, with K and V by TMA, on the strict emulation against numpy."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.warpgroup_attention import AttentionTile, broken_rule, warpgroup_attention
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cuda import CudaBuilder
from tests.cuda.test_cuda_attention import BOUND, attention, case, causal, causal_case, guarded
from tests.support.cuda_groups import ARCH, SHARED_BYTES, Arrays, first_fit, placed, plan_of, run, with_bugs
from tests.support.marks import slow

node = helper.make_node


def hopper(plan: FusionPlan, tile: AttentionTile | None = None) -> PlacedGroup:
    """Return the versions for sm_90a of a plan's only kernel."""
    (group,) = plan.groups
    made = CudaBuilder(plan, ARCH).attention_kernel(group)
    assert isinstance(made, tuple)
    return PlacedGroup(group, made[0], "", tuple(warpgroup_attention(made[2], tile)))


def right(plan: FusionPlan, p: PlacedGroup, feeds: Arrays, want: np.ndarray[Any, Any], k: Kernel | None = None) -> int:
    """Check that both orders of warps give the reference, and the same bits; return the number of products."""
    both = []
    for reverse in (False, True):
        got, (count,) = run(plan, feeds, lambda p, env: k or first_fit(p, env, ARCH), (p,), reverse)
        y = got["y"].astype(np.float64)
        assert (np.isnan(y) == np.isnan(want)).all()
        assert np.abs(np.nan_to_num(y) - np.nan_to_num(want)).max(initial=0) <= BOUND[str(feeds["q"].dtype)]
        assert count.shared_conflicts == 0 and count.wgmma > 0
        both.append(got["y"].view(np.uint16))
    assert (both[0] == both[1]).all()
    return count.wgmma


def test_other_tiles_of_a_search() -> None:
    """Fewer keys, more slots; tiles without room are rejected by name."""
    plan = attention()
    p = hopper(plan, AttentionTile(64, 3))
    assert p.kernels[0].version == "attention_wgmma_128x64x64_3_wide_pairs"
    feeds, want = case(plan, 65, 321, "row", 1)
    right(plan, p, feeds, want)
    for tile, size, rule in (
        (AttentionTile(96), (64, 64), "64 or 128 keys"), (AttentionTile(128, 1), (64, 64), "two slots"),
        (AttentionTile(128), (256, 256), "registers"), (AttentionTile(64), (64, 128), "through the rings"),
        (AttentionTile(128, 4), (128, 128), "shared memory"),
    ):  # fmt: skip
        assert rule in str(broken_rule(tile, *size))


def test_every_length_and_mask() -> None:
    """A tile, tails of rows and keys, more tiles than the rings have slots."""
    plan = attention()
    p = hopper(plan)
    assert p.kernels[0].version == "attention_wgmma_128x128x64_wide_pairs"
    for length, keys, mask in (
        (1, 1, "none"), (65, 63, "row"), (130, 128, "causal"), (3, 641, "late"), (7, 385, "none"),
    ):  # fmt: skip
        feeds, want = case(plan, length, keys, mask, 2 if length < 8 else 1)
        right(plan, p, feeds, want)


HEADS = (slow("bfloat16", 128, 128, 1), ("float16", 24, 32, 2), slow("float16", 96, 104, 1), ("float16", 256, 248, 1))


@pytest.mark.parametrize(("dtype", "depth", "width", "groups"), HEADS)
def test_heads_and_groups(dtype: str, depth: int, width: int, groups: int) -> None:
    """Heads are padded to panels; some of them share a key head."""
    plan = attention(dtype, depth, width, heads=4 if groups > 1 else 2, groups=groups)
    feeds, want = case(plan, 67, 300)
    right(plan, hopper(plan), feeds, want)


def test_weights_that_are_nan_may_be_0() -> None:
    plan = attention(instead=0.0)
    p = hopper(plan)
    for of in ((130, 197, "row", 1), (3, 65, "row", 1)):
        right(plan, p, *guarded(plan, *of))


def test_tiles_above_the_diagonal_are_not_computed() -> None:
    """The rows of the last block see all tiles; rows without a key see one tile, to become NaN as in the model."""
    plan = causal("float16")
    p = hopper(plan)
    for length, keys in ((300, 300), (200, 7), (3, 260)):
        feeds, want = causal_case("float16", length, keys)
        last = [min(b * 128 + 127, length - 1) + keys - length for b in range(-(-length // 128))]
        tiles = sum(min(max(n // 128 + 1, 1), -(-keys // 128)) for n in last)
        assert right(plan, p, feeds, want) == 2 * tiles * 2 * (4 + 8), (length, keys)


def test_finite_masks_hide_tiles_until_a_row_needs_them() -> None:
    """Half of the tiles, if every row has an unmasked key; all tiles, if a padding leaves a row none."""
    plan = causal("float16", -6e4)
    p = hopper(plan)
    for length, keys in ((300, 300), (200, 7), (3, 260)):
        feeds, _ = causal_case("float16", length, keys)
        s = feeds["q"].astype(np.float64) @ feeds["k"].astype(np.float64).swapaxes(-1, -2) / 8
        rows, columns = np.indices((length, keys))
        s = np.where(columns <= rows + keys - length, s, -6e4)
        e = np.exp(s - s.max(-1, keepdims=True))
        want = (e / e.sum(-1, keepdims=True)) @ feeds["v"].astype(np.float64)
        whole = -(-keys // 128)
        last = [min(b * 128 + 127, length - 1) + keys - length for b in range(-(-length // 128))]
        first = [b * 128 + keys - length for b in range(len(last))]
        tiles = sum(whole if start < 0 else min(end // 128 + 1, whole) for start, end in zip(first, last, strict=True))
        assert right(plan, p, feeds, want) == 2 * tiles * 2 * (4 + 8), (length, keys)


def test_heads_inside_rows() -> None:
    """[B, L, H, D] needs no transposition: a tensor map has its strides."""
    names = [("q", "qh", (0, 2, 1, 3)), ("k", "kt", (0, 2, 3, 1)), ("v", "vh", (0, 2, 1, 3))]
    nodes = [node("Transpose", [a], [b], perm=p) for a, b, p in names]
    nodes += [node("MatMul", ["qh", "kt"], ["s"]), node("Softmax", ["s"], ["w"], axis=-1),
              node("MatMul", ["w", "vh"], ["o"]), node("Transpose", ["o"], ["y"], perm=(0, 2, 1, 3))]  # fmt: skip
    shapes = {n: ("B", "L" if n == "q" else "T", 3, 64) for n in "qkv"}
    plan = plan_of(nodes, shapes, ["y"], dtype="float16")
    rng = np.random.default_rng(0)
    feeds = {
        n: (rng.standard_normal((2, x, 3, 64)) / 3).astype(np.float16)
        for n, x in zip("qkv", (70, 150, 150), strict=True)
    }
    q, k, v = (feeds[n].astype(np.float64).swapaxes(1, 2) for n in "qkv")
    e = np.exp(q @ k.swapaxes(-1, -2))
    right(plan, hopper(plan), feeds, ((e / e.sum(-1, keepdims=True)) @ v).swapaxes(1, 2))


def test_what_wgmma_and_tma_do_not_reach_has_other_kernels() -> None:
    one_tile = attention(keys=17)
    for plan in (
        attention(transposed=True), attention("float32"), attention(depth=9), attention("float16", 64, 192), one_tile
    ):  # fmt: skip
        assert hopper(plan).kernels == ()
    assert hopper(attention(keys=200)).kernels
    (p,) = placed(attention(), ARCH)
    dims = {"n0": 128, "n1": 128, "n2": 1}
    wgmma, *others = (k for k in p.kernels if not k.version.endswith(LONG_SUFFIX))
    assert wgmma.version.startswith("attention_wgmma") and wgmma.fits(dims, SHARED_BYTES, 132, ARCH)
    empty = {**dims, "n0": 0}
    assert not wgmma.fits(empty, SHARED_BYTES, 132, ARCH)
    assert any(k.fits(empty, SHARED_BYTES, 132, ARCH) for k in others)


QUERIES, KEYS, FREE_KEYS, VALUES, FREE_VALUES = (f"pd_mbar_wait((uint64_t *)(smem + {81920 + 16 * n}" for n in range(5))
"""Waits for loaded data, and for free slots."""


def unwaited(wait: str, before: str = "") -> tuple[str, str]:
    return before + wait, before + wait.replace("pd_mbar_wait", "(void)")


LOOP = "++b_l) {\n      "
BUGS = {
    "scores not waited for": ("pd_wgmma_wait<1>();", "pd_wgmma_wait<2>();"),
    "values not waited for": ("pd_wgmma_wait<0>();\n      pd_wgmma_keep<32>(acc2", "pd_wgmma_keep<32>(acc2"),
    "packed while weights are multiplied": ("pd_wgmma_wait<0>();\n      pd_wgmma_keep<32>(acc2",
        "a_frag2[0] = pd_pack_f16x2(acc1[0], acc1[1]);\n      pd_wgmma_wait<0>();\n      pd_wgmma_keep<32>(acc2"),
    "no fence before the group": ("pd_wgmma_fence();", ""),
    "queries before they have come": unwaited(QUERIES),
    "keys before they have come": unwaited(KEYS, LOOP),
    "values before they have come": unwaited(VALUES, "pd_wgmma_commit();\n      "),
    "keys over keys in use": unwaited(FREE_KEYS),
    "values over values in use": unwaited(FREE_VALUES),
    "values of another slot": ("(8192*b_l + (-16384)*((b_l + 1)/2) + 8192)", "(8192*b_l + (-16384)*(b_l/2))"),
    "the other warpgroup's queries": ("4096*(tid/128) + (-4096)", "0*(tid/128)"),
    "scores added to old ones": ("((int32_t)f_k1));", "((int32_t)1));"),
    "steps of half their bytes": ("(32*f_k1", "(16*f_k1"),
    "steps of values": ("(2048*f_k2)", "(1024*f_k2)"),
    "expects too few bytes": ("((int32_t)16384));\n", "((int32_t)8192));\n"),
    "values not scaled to the new maximum": ("] * scale[row_half]);\n", "]);\n"),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken() -> tuple[FusionPlan, PlacedGroup]:
    plan = attention()
    p = hopper(plan)
    return plan, replace(p, kernels=with_bugs(p.kernels[0], BUGS))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, broken: tuple[FusionPlan, PlacedGroup]) -> None:
    plan, p = broken
    feeds, want = case(plan, 128, 642)
    with contextlib.suppress(DeviceError, AssertionError):
        right(plan, p, feeds, want, p.kernels[list(BUGS).index(bug)])
        pytest.fail(bug)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("plan", [attention("bfloat16", 256, 256), causal("float16", -6e4)], ids=["256", "turns"])
def test_compiles_without_spills_and_stays_asynchronous(plan: FusionPlan) -> None:
    k = hopper(plan).kernels[0]
    made = compile_cuda(k.text, "sm_90a")
    use = made.kernels[k.name]
    assert use.spill_stores == use.spill_loads == 0 and "C75" not in made.log, "serialized wgmma"
