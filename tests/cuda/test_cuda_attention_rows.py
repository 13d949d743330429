"""Attention by warps of 32 rows, which share all loads of keys and values, on the strict emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu import hardware
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from polydyn.program.estimates import launch_time
from polydyn.schedules.index import Index
from tests.cuda.test_cuda_attention import BOUND, attention, causal, causal_case, node, right
from tests.support.cuda_groups import MULTIPROCESSORS, params_of, placed, plan_of, run, with_bugs
from tests.support.cuda_groups import SHARED_BYTES as SMEM
from tests.support.marks import slow

V = Index.of
VERSION_PREFIX = "attention_128x"
LARGE = ("several fragments per warp",)


def large(p: PlacedGroup, env: dict[str, int] | None = None) -> Kernel:
    """Return the version with 32-bit indices, even if some sizes do not allow its launch."""
    made = [k for k in p.kernels if k.version.startswith(VERSION_PREFIX) and not k.version.endswith(LONG_SUFFIX)]
    return next(k for k in made if env is None or k.fits(env, SMEM, MULTIPROCESSORS))


def long(p: PlacedGroup, env: object = None) -> Kernel:
    """Return the version with 64-bit indices."""
    return next(k for k in p.kernels if k.version.startswith(VERSION_PREFIX) and k.version.endswith(LONG_SUFFIX))


def test_every_length_and_mask() -> None:
    plan = attention()
    kernels = placed(plan, rows=LARGE)
    assert large(kernels[0]).version == "attention_128x64x64_16_16_16_wide_pairs"
    for length, keys, mask in (
        (1, 1, "none"), (7, 31, "causal"), (63, 65, "none"), (65, 127, "row"), (127, 7, "none"), (128, 64, "causal"),
        (129, 63, "row"), (130, 197, "causal"), (197, 130, "late"), (5, 129, "none"),
    ):  # fmt: skip
        right(plan, kernels, length, keys, mask, 2 if length < 8 else 1, choose=large)
    right(plan, kernels, 130, 66, "causal", choose=long)


@pytest.mark.parametrize(
    ("depth", "width", "heads", "groups", "transposed", "dtype"),
    [(64, 64, 4, 2, False, "float16"), slow(40, 16, 1, 1, False, "bfloat16"), slow(64, 64, 1, 1, False, "bfloat16"),
     (128, 128, 1, 1, False, "float16"), slow(64, 128, 1, 1, False, "bfloat16"), (32, 64, 2, 1, True, "float16")],
)  # fmt: skip
def test_head_sizes_groups_and_layouts(
    depth: int, width: int, heads: int, groups: int, transposed: bool, dtype: str
) -> None:
    """Keys that are contiguous along themselves use 16-byte copies if their number allows it."""
    plan = attention(dtype, depth, width, heads, groups, transposed)
    kernels = placed(plan, rows=LARGE)
    for length, keys in ((3, 72), (130, 136)):
        right(plan, kernels, length, keys, "causal", tolerance=BOUND[dtype], choose=large)


def test_tiles_above_the_diagonal_are_not_computed() -> None:
    plan = causal("float16")
    kernels = placed(plan, rows=LARGE)
    for length, keys in ((1, 1), (65, 63), (130, 130), (64, 200), (200, 7), (3, 197)):
        feeds, want = causal_case("float16", length, keys)
        got, (count,) = run(plan, feeds, large, kernels)
        y = got["y"].astype(np.float64)
        assert (np.isnan(y) == np.isnan(want)).all()
        assert np.abs(np.nan_to_num(y) - np.nan_to_num(want)).max() <= BOUND["float16"]
        last = [min(b * 128 + 127, length - 1) + keys - length for b in range(-(-length // 128))]
        tiles = sum(min(max(k // 64 + 1, 0), -(-keys // 64)) for k in last)
        assert count.mma == 2 * tiles * 4 * 128, (length, keys)


def test_keys_that_are_one_tile_have_no_loop() -> None:
    plan = causal("float16", keys=17)
    feeds, want = causal_case("float16", 197, 17)
    got, _ = run(plan, feeds, large, placed(plan, rows=LARGE))
    assert np.abs(np.nan_to_num(got["y"].astype(np.float64)) - np.nan_to_num(want)).max() <= BOUND["float16"]


MAX_SUM = 111
"""Maximum sum of row and key of an unmasked score: rows from 112 on see no key."""


def suffix() -> FusionPlan:
    """Plan softmax(where(query + key <= MAX_SUM, q k' / 8, lowest)) v: the last rows of a block may see no key."""
    nodes = [
        node("Shape", ["q"], ["l1"], start=2, end=3), node("Shape", ["k"], ["t1"], start=2, end=3),
        node("Squeeze", ["l1"], ["l"]), node("Squeeze", ["t1"], ["t"]), node("Range", ["zero", "l", "one"], ["r0"]),
        node("Range", ["zero", "t", "one"], ["c0"]), node("Unsqueeze", ["r0", "second"], ["r"]),
        node("Unsqueeze", ["c0", "first"], ["c"]), node("Add", ["r", "c"], ["both"]),
        node("LessOrEqual", ["both", "last"], ["keep"]), node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["s"]), node("Mul", ["s", "scale"], ["x"]),
        node("Where", ["keep", "x", "low"], ["u"]), node("Softmax", ["u"], ["w"], axis=-1),
        node("MatMul", ["w", "v"], ["y"]),
    ]  # fmt: skip
    constants: dict[str, Any] = {"zero": np.array(0), "one": np.array(1), "first": np.array([0])}
    constants |= {"second": np.array([1]), "last": np.array(MAX_SUM), "scale": np.array(0.125, np.float16)}
    constants |= {"low": np.array(np.finfo(np.float16).min)}
    return plan_of(nodes, {"q": ("B", 2, "L", 64), "k": ("B", 2, "T", 64), "v": ("B", 2, "T", 64)}, ["y"], constants,
                   "float16")  # fmt: skip


@pytest.mark.slow
def test_a_row_of_any_fragment_makes_the_block_visit_the_other_tiles() -> None:
    plan = suffix()
    (p,) = placed(plan, rows=LARGE)
    text = large(p).text
    asked = text[text.index("float seen") : text.index("seen = pd_min")]
    bug = with_bugs(large(p), {"only the first fragment votes": (asked, asked.replace("fragment < 2", "fragment < 1"))})
    for length, keys in ((100, 200), (112, 130), (128, 200), (197, 140)):
        feeds, _ = causal_case("float16", length, keys)
        q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
        rows, columns = np.indices((length, keys))
        s = np.where(rows + columns <= MAX_SUM, q @ k.swapaxes(-1, -2) / 8, -1e5)
        e = np.exp(s - s.max(-1, keepdims=True))
        want = (e / e.sum(-1, keepdims=True)) @ v
        got, (count,) = run(plan, feeds, large, (p,))
        assert np.abs(got["y"].astype(np.float64) - want).max() <= BOUND["float16"], (length, keys)
        tiles = [-(-keys // 64) if last > MAX_SUM else min(-(-keys // 64), -(-(MAX_SUM + 1 - b * 128) // 64))
                 for b, last in ((b, min(b * 128 + 127, length - 1)) for b in range(-(-length // 128)))]  # fmt: skip
        assert count.mma == 2 * sum(tiles) * 4 * 128, (length, keys)
        got, _ = run(plan, feeds, lambda p, env: bug[0], (replace(p, kernels=bug),))
        wrong = np.abs(got["y"].astype(np.float64) - want).max() > BOUND["float16"]
        assert wrong == (length > MAX_SUM + 1), "only rows of a second fragment see nothing"


BUGS = {
    "values scaled as the other's": ("] * scale[(2*row_fragment + row_half)]);\n", "] * scale[row_half]);\n"),
    "weights of the other fragment": ("pd_pack_f16x2(acc1[(32*f_i + 8*f_k2 + 2)]", "pd_pack_f16x2(acc1[(8*f_k2 + 2)]"),
    "queries of the other fragment": ("smem + 0 + ((2048*f_i + 4096*warp)", "smem + 0 + ((4096*warp)"),
    "sums of the other fragment": ("float whole = total[(2*row_fragment + row_half)]", "float whole = total[row_half]"),
    "rows of a warp of 16": ("(2048*f_i + 4096*warp)", "(2048*f_i + 2048*warp)"),
    "staged before they are stored": ("      pd_syncwarp();\n    }\n  }\n", "    }\n  }\n"),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken() -> tuple[FusionPlan, PlacedGroup]:
    plan = attention()
    (p,) = placed(plan, rows=LARGE)
    return plan, replace(p, kernels=with_bugs(large(p), BUGS))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, broken: tuple[FusionPlan, PlacedGroup]) -> None:
    plan, p = broken
    with pytest.raises((AssertionError, DeviceError)):
        right(plan, (p,), 67, 132, "none", choose=lambda p, env: p.kernels[list(BUGS).index(bug)])


def test_estimates_choose_it_where_there_are_enough_queries() -> None:
    """Blocks of 128 queries are half as many and take longer: if they do not fill the device, smaller blocks are
    chosen.

    Below a diagonal they visit one more tile; with slow tensor cores and cheap loads, that is too much.
    """

    def time(k: Kernel, p: PlacedGroup, batch: int, length: int, device: hardware.Hardware) -> int:
        env = params_of(p, {"B": batch, "L": length, "T": length}) | {"nth": device.multiprocessors}
        assert k.device.work is not None
        return launch_time(k.device.work, k.device.threads, k.tasks, k.scratch, V(0), device).evaluate(env)

    a100, rtx4090 = map(hardware.load, ("a100", "rtx4090"))
    cases = {
        False: [(a100, 48, 512, 128), (a100, 1, 64, 64), (a100, 1, 512, 64), (rtx4090, 48, 512, 128)],
        True: [(a100, 48, 512, 128), (a100, 4, 4096, 128), (a100, 1, 64, 64), (rtx4090, 48, 512, 64)],
    }
    for masked, of in cases.items():
        (p,) = placed(causal("float16") if masked else attention(), rows=("tiles", *LARGE))
        two = {128: large(p), 64: next(k for k in p.kernels if k.version.startswith("attention_64x64"))}
        for device, batch, length, better in of:
            best = min(two, key=lambda n: time(two[n], p, batch, length, device))
            assert best == better, (masked, device.arch, batch, length)


def test_where_it_is_not_built() -> None:
    """Heads of 128 if warpgroups support them, and narrow copies."""
    for depth, arch in ((128, "sm_90a"), (9, "sm_80")):
        (p,) = placed(attention("float16", depth, 64, 1), arch, rows=("tiles", *LARGE))
        assert not any(k.version.startswith(VERSION_PREFIX) for k in p.kernels)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize(
    ("form", "arch"),
    [("read", "sm_80"), ("deep", "sm_80"), ("causal", "sm_89"), ("causal", "sm_90a"), slow("deep", "sm_89"),
     slow("read", "sm_90a"), slow("read", "sm_89"), slow("causal", "sm_80"), slow("voted", "sm_80"),
     slow("voted", "sm_90a")],
)  # fmt: skip
def test_it_compiles_without_spills(form: str, arch: str) -> None:
    plan = {"read": attention, "causal": lambda: causal("float16"), "voted": suffix,
            "deep": lambda: attention("float16", 128, 128, 1)}[form]()  # fmt: skip
    (p,) = placed(plan, rows=LARGE)
    for k in (large(p), long(p)):
        use = compile_cuda(k.text, arch).kernels[k.name]
        assert use.spill_stores == use.spill_loads == 0 and use.registers <= 255
