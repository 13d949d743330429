"""Attention as one CUDA kernel with online softmax, on the strict emulation against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.kernel import Kernel
from polydyn.errors import ScheduleError
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.attention import AttentionGroup, lower_attention
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cuda import CudaBuilder
from polydyn.schedules.expr import Const, FromIndex, Load, Op, Value, const, op
from polydyn.schedules.index import Index
from polydyn.schedules.laws.masks import Axis, Logits, check_conditions, tile_conditions
from polydyn.schedules.laws.online_softmax import softmax
from tests.support.cuda_groups import (
    MULTIPROCESSORS,
    first_fit,
    params_of,
    placed,
    plan_of,
    run,
    version,
    with_bugs,
)
from tests.support.cuda_groups import SHARED_BYTES as SMEM
from tests.support.marks import slow

node = helper.make_node
Array = np.ndarray[Any, Any]


def attention(
    dtype: str = "float16", depth: int = 64, width: int = 64, heads: int = 2, groups: int = 1, transposed: bool = False,
    keys: str | int = "T", instead: float | None = None,
) -> FusionPlan:  # fmt: skip
    """Plan softmax(q k' / 8 + mask) v with ``heads`` heads; ``groups`` heads share a key head; keys perhaps as (depth,
    T).

    ``instead`` replaces weights that are NaN.
    """
    kv = heads // groups
    nodes = []
    for x in ("k", "v"):
        if groups > 1:  # (B, kv, T, d) -> (B, kv, groups, T, d) -> (B, heads, T, d)
            d = depth if x == "k" else width
            shape = [0, kv, 1, -1, d], [1, 1, groups, 1, 1], [0, heads, -1, d]
            names = [f"{x}{n}" for n in ("one", "many", "all")]
            nodes += [node("Constant", [], [n], value_ints=s) for n, s in zip(names, shape, strict=True)]
            nodes += [node("Reshape", [x, names[0]], [f"{x}5"]), node("Expand", [f"{x}5", names[1]], [f"{x}e"]),
                      node("Reshape", [f"{x}e", names[2]], [f"{x}h"])]  # fmt: skip
        else:
            nodes.append(node("Identity", [x], [f"{x}h"]))
    if not transposed:
        nodes.append(node("Transpose", ["kh"], ["kt"], perm=[0, 1, 3, 2]))
    nodes += [
        node("MatMul", ["q", "kh" if transposed else "kt"], ["s"]), node("Mul", ["s", "c"], ["t"]),
        node("Add", ["t", "m"], ["u"]), node("Softmax", ["u"], ["p"], axis=-1),
        *([] if instead is None else [node("IsNaN", ["p"], ["n"]), node("Where", ["n", "o", "p"], ["w"])]),
        node("MatMul", ["p" if instead is None else "w", "vh"], ["y"]),
    ]  # fmt: skip
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    shapes = {
        "q": ("B", heads, "L", depth), "k": ("B", kv, depth, keys) if transposed else ("B", kv, keys, depth),
        "v": ("B", kv, keys, width), "m": ("B", 1, "L", keys),
    }  # fmt: skip
    constants = {"c": np.array(0.125, kind)} | ({} if instead is None else {"o": np.array(instead, kind)})
    return plan_of(nodes, shapes, ["y"], constants, dtype)


def case(
    plan: FusionPlan, length: int, keys: int, mask: str = "none", batch: int = 1
) -> tuple[dict[str, Array], Array]:
    """Return inputs and the expected output.

    Masks: ``none``, -inf above a diagonal, in row 0, before the last two keys; in row 0 the lowest number of bfloat16.
    """
    rng = np.random.default_rng(length * 1009 + keys)
    dims = {"B": batch, "L": length, "T": keys}
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    feeds = {}
    for n in ("q", "k", "v", "m"):
        t = plan.graph.tensors[n]
        feeds[n] = rng.standard_normal([i.evaluate(dims) for i in t.shape]).astype(kind[t.dtype])
    rows, columns = np.indices((length, keys))
    if mask == "causal":
        feeds["m"][..., columns > rows + 3] = -np.inf
    if mask == "row":
        feeds["m"][..., rows == 0] = -np.inf
    if mask == "lowest":
        feeds["m"][..., rows == 0] = ml_dtypes.finfo("bfloat16").min
    if mask == "late":
        feeds["m"][..., columns < keys - 2] = -np.inf
    q, k, v, m = (feeds[n].astype(np.float64) for n in ("q", "k", "v", "m"))
    heads = q.shape[1]
    k = k if k.shape[-1] == q.shape[-1] and k.shape[-2] == keys else k.swapaxes(-1, -2)
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    with np.errstate(invalid="ignore"):
        s = q @ k.swapaxes(-1, -2) * 0.125 + m
        e = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
        return feeds, (e / e.sum(-1, keepdims=True)) @ v


BOUND = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "tf32": 2e-3}


TILES, SPLIT = ("tiles",), ("split over keys",)
"""Rows of the table of attentions: most tests need the kernels of one."""


def right(
    plan: FusionPlan, kernels: tuple[PlacedGroup, ...], *sizes: Any, tolerance: float = 4e-3, choose: Any = first_fit
) -> None:
    """Check that both orders of warps give the reference, and the same bits."""
    feeds, want = case(plan, *sizes)
    right_on(plan, kernels, feeds, want, tolerance, choose, sizes)


def right_on(
    plan: FusionPlan, kernels: tuple[PlacedGroup, ...], feeds: dict[str, Array], want: Array, tolerance: float = 4e-3,
    choose: Any = first_fit, subject: Any = None,
) -> None:  # fmt: skip
    """Check these inputs in the same way."""
    results = []
    for reverse in (False, True):
        got, counts = run(plan, feeds, choose, kernels, reverse)
        y = got["y"].astype(np.float64)
        assert (np.isnan(y) == np.isnan(want)).all(), subject
        assert np.abs(np.nan_to_num(y) - np.nan_to_num(want)).max(initial=0) <= tolerance, subject
        assert all(c.ldmatrix_conflicts == c.shared_conflicts == 0 for c in counts), subject
        results.append(got["y"].view(np.uint16 if got["y"].itemsize == 2 else np.uint32))
    assert (results[0] == results[1]).all()


def test_every_length_and_mask() -> None:
    plan = attention()
    kernels = placed(plan)
    (p,) = kernels
    wide, large = (f"attention_{n}x64x64_16_16_16_wide" for n in (64, 128))
    short = [f"{wide}_pairs", wide, f"{large}_pairs", large, f"split_{wide}"]
    assert [k.version for k in p.kernels] == [*short, *(f"{v} int64" for v in short[:4])]
    for length, keys, mask in (
        (1, 1, "none"), (7, 31, "causal"), (63, 65, "none"), (64, 64, "causal"), (65, 63, "row"), (3, 200, "late"),
        (130, 197, "causal"), (5, 129, "row"),
    ):  # fmt: skip
        right(plan, kernels, length, keys, mask, 2 if length < 8 else 1)


def guarded(plan: FusionPlan, *of: Any) -> tuple[dict[str, Array], Array]:
    """Return a case of ``attention(instead=0)`` in which a row has a score that is NaN: such rows are 0."""
    feeds, want = case(plan, *of)
    feeds["q"][0, 0, 2 % of[0], 1] = np.nan
    want[0, 0, 2 % of[0]] = np.nan
    return feeds, np.nan_to_num(want)


@pytest.mark.parametrize("dtype", ["float16", slow("float32")])
def test_weights_that_are_nan_may_be_0(dtype: str) -> None:
    """Frameworks guard rows that are masked everywhere in this way; in tiles, in split-KV, and for few keys."""
    plan = attention(dtype, instead=0.0)
    kernels = placed(plan, rows=TILES + SPLIT)
    for length, keys, mask, choose in ((7, 31, "row", first_fit), (65, 300, "row", first_fit), (3, 300, "row", split)):
        right_on(plan, kernels, *guarded(plan, length, keys, mask), BOUND[dtype], choose)


def test_no_other_number_may_stand_for_nan() -> None:
    plan = attention(instead=1.0)
    form = lower_attention(plan, plan.groups[0])
    assert isinstance(form, AttentionGroup)
    with pytest.raises(ScheduleError, match=r"the weights are not exp\(logit - maximum\) / sum"):
        softmax(form.parts.rows, form.parts.row_prefix, "j")


FLOATS = [
    slow("float32", 64, 64, False),
    ("float32", 15, 40, False),
    slow("tf32", 32, 128, False),
    ("tf32", 64, 9, True),
]


@pytest.mark.parametrize(("dtype", "depth", "width", "transposed"), FLOATS)
def test_float32_is_one_kernel(dtype: str, depth: int, width: int, transposed: bool) -> None:
    """On CUDA cores, or on tensor cores on request; both exchange weights between the products in registers."""
    plan = attention("float32", depth, width, transposed=transposed)
    kernels = placed(plan, tf32=dtype == "tf32", rows=TILES)
    (p,) = kernels
    assert p.kernels[0].version.startswith("attention_tf32" if dtype == "tf32" else "attention_lanes")
    for length, keys, mask in ((1, 1, "none"), (65, 31, "causal"), (7, 68, "late"), (3, 97, "row")):
        right(plan, kernels, length, keys, mask, tolerance=BOUND[dtype])


def causal(dtype: str, low: float = -np.inf, added: bool = False, keys: str | int = "T") -> FusionPlan:
    """Plan softmax(where(key <= query + T - L, q k' / 8, low)) v; the model's own sizes define the mask."""
    kind = {"float16": np.float16, "float32": np.float32}[dtype]
    nodes = [
        node("Shape", ["q"], ["l1"], start=2, end=3), node("Shape", ["k"], ["t1"], start=2, end=3),
        node("Squeeze", ["l1"], ["l"]), node("Squeeze", ["t1"], ["t"]), node("Range", ["zero", "l", "one"], ["r0"]),
        node("Range", ["zero", "t", "one"], ["c0"]), node("Unsqueeze", ["r0", "second"], ["r"]),
        node("Unsqueeze", ["c0", "first"], ["c"]), node("Sub", ["t", "l"], ["past"]),
        node("Add", ["r", "past"], ["last"]), node("LessOrEqual", ["c", "last"], ["keep"]),
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]), node("MatMul", ["q", "kt"], ["s"]),
        node("Mul", ["s", "scale"], ["x"]),
        *([node("Where", ["keep", "none", "low"], ["m"]), node("Add", ["x", "m"], ["u"])] if added else
          [node("Where", ["keep", "x", "low"], ["u"])]),
        node("Softmax", ["u"], ["w"], axis=-1), node("MatMul", ["w", "v"], ["y"]),
    ]  # fmt: skip
    constants: dict[str, Array] = {"zero": np.array(0), "one": np.array(1)}
    constants |= {"first": np.array([0]), "second": np.array([1])}
    constants |= {"scale": np.array(0.125, kind), "low": np.array(low, kind), "none": np.array(0, kind)}
    used = {x for n in nodes for x in n.input}
    shapes = {"q": ("B", 2, "L", 64), "k": ("B", 2, keys, 64), "v": ("B", 2, keys, 64)}
    return plan_of(nodes, shapes, ["y"], {n: a for n, a in constants.items() if n in used}, dtype)


def causal_case(dtype: str, length: int, keys: int) -> tuple[dict[str, Array], Array]:
    """Return inputs of ``causal`` and the expected output."""
    rng = np.random.default_rng(length + keys)
    shape = {"q": length, "k": keys, "v": keys}
    feeds = {n: rng.standard_normal((1, 2, x, 64)).astype(dtype) for n, x in shape.items()}
    q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
    rows, columns = np.indices((length, keys))
    with np.errstate(invalid="ignore"):
        s = np.where(columns <= rows + keys - length, q @ k.swapaxes(-1, -2) / 8, -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        return feeds, (e / e.sum(-1, keepdims=True)) @ v


def test_keys_that_are_one_tile_have_no_loop() -> None:
    plan = causal("float16", keys=17)
    feeds, want = causal_case("float16", 19, 17)
    got, _ = run(plan, feeds, kernels=placed(plan, rows=TILES))
    assert np.abs(np.nan_to_num(got["y"].astype(np.float64)) - np.nan_to_num(want)).max() <= BOUND["float16"]


@pytest.mark.parametrize("dtype", ["float16", slow("float32")])
def test_tiles_above_the_diagonal_are_not_computed(dtype: str) -> None:
    plan = causal(dtype)
    kernels = placed(plan, rows=TILES)
    tile = 64 if dtype == "float16" else 32
    for length, keys in ((1, 1), (65, 63), (130, 130), (64, 200), (200, 7), (3, 197)):
        feeds, want = causal_case(dtype, length, keys)
        got, (count,) = run(plan, feeds, kernels=kernels)
        y = got["y"].astype(np.float64)
        assert (np.isnan(y) == np.isnan(want)).all(), "rows without a key are NaN, as in the model"
        assert np.abs(np.nan_to_num(y) - np.nan_to_num(want)).max() <= BOUND[dtype]
        last = [min(b * 64 + 63, length - 1) + keys - length for b in range(-(-length // 64))]
        tiles = sum(min(max(k // tile + 1, 0), -(-keys // tile)) for k in last)
        if dtype == "float16":
            assert count.mma == 2 * tiles * 4 * 64, (length, keys)


@pytest.mark.slow
def test_finite_masks_hide_tiles_until_a_row_needs_them() -> None:
    """With float32 scores an added mask of -10000 bounds nothing; an added lowest number does."""
    lowest = float(np.finfo(np.float32).min)
    ways = {(-np.inf, False): "never", (-np.inf, True): "never", (-1e4, False): "last", (-1e4, True): "all",
            (lowest, False): "last", (lowest, True): "last"}  # fmt: skip
    for (low, added), way in ways.items():
        (p,) = placed(causal("float32", low, added), rows=TILES)
        text = p.kernels[0].text
        loop = next(x for x in text.splitlines() if "for (int32_t b_l" in x)
        assert ("never" if "b_i" in loop else "last" if "turn < 2" in text else "all") == way, (low, added)


def test_masks_that_isl_decides() -> None:
    row, key, score = (FromIndex("int64", Index.of(x)) for x in ("i", "j", "n"))
    lowest, x = Const("float32", -np.inf), Load("float32", "scores", (Index.of("i"), Index.of("j")))

    def hull(condition: Value, then: Value = lowest, other: Value = x) -> set[str]:
        masked = op("where", condition, then, other)
        rows, keys = Axis("i", Index.of("m"), 64, "b_i"), Axis("j", Index.of("n"), 32, "b_l")
        logits = Logits(masked, (), rows, keys, ("m", "n"))
        found = tile_conditions(logits, logits.hidden())
        check_conditions(logits, found, logits.hidden())
        return {str(c) for c in found}

    above, far = op("gt", key, row), op("gt", op("sub", row, key), const(100, "int64"))
    assert hull(above) == {"(2*b_i - b_l + 1) >= 0", "(-32*b_l + m - 1) >= 0"}
    assert hull(op("le", key, row), x, lowest) == hull(above)
    band = hull(op("or", above, far)) - hull(above)
    assert "(-2*b_i + b_l + 4) >= 0" in band, "a band: tiles before it are not visited either"
    assert hull(above, x, x) == set() and hull(above, Const("float32", -1e30)) == set()
    assert hull(op("gt", op("mul", key, score), row)) == set(), "a product of symbols: isl cannot say"
    loaded = op("gt", Load("int64", "table", (Index.of("j"),)), row)
    assert hull(loaded) == set(), "a mask in memory"
    assert hull(loaded, lowest, lowest) != set(), "whatever the mask is, nothing is left"
    assert hull(op("and", above, loaded)) == set() and hull(op("or", above, loaded)) == hull(above)
    assert hull(op("not", op("and", op("not", above), loaded))) == hull(above)


def test_rows_without_keys_are_zero() -> None:
    plan = attention()
    feeds, _ = case(plan, 5, 0)
    got, _ = run(plan, feeds)
    assert (got["y"] == 0).all() and got["y"].shape == (1, 2, 5, 64)


def test_a_row_masked_by_the_lowest_number_weighs_its_keys_alike() -> None:
    """In units of log 2 the lowest number of bfloat16 is not a float: such rows were NaN."""
    plan = attention("bfloat16", 32, 32, 1)
    right(plan, placed(plan, rows=TILES), 3, 72, "lowest", tolerance=BOUND["bfloat16"])


@pytest.mark.parametrize(
    ("depth", "width", "heads", "groups", "transposed", "dtype"),
    [(64, 64, 4, 2, False, "float16"), slow(40, 16, 1, 1, False, "float16"), slow(128, 128, 1, 1, False, "bfloat16"),
     slow(32, 64, 2, 1, True, "float16"), (15, 9, 1, 1, False, "float16"), (200, 256, 1, 1, False, "float16")],
)  # fmt: skip
def test_head_sizes_groups_and_layouts(
    depth: int, width: int, heads: int, groups: int, transposed: bool, dtype: str
) -> None:
    plan = attention(dtype, depth, width, heads, groups, transposed)
    kernels = placed(plan, rows=TILES)
    assert len(kernels) == 1
    for length, keys in ((3, 72), (65, 67)):
        right(plan, kernels, length, keys, "causal", tolerance=3e-2 if dtype == "bfloat16" else 4e-3)


BUGS = {
    "sums not scaled to the new maximum": ("total[row_half] * scale[row_half]", "total[row_half] * 1.0f"),
    "values not scaled to the new maximum": ("] * scale[row_half]);\n", "]);\n"),
    "lanes of a row disagree": ("peak = pd_max(peak, pd_shfl_xor(peak, ((int32_t)2LL)));", ""),
    "-inf minus -inf": ("(peak == pd_bits_to_f32(0xff800000u)) ? 0.0f", "false ? 0.0f"),
    "keys beyond the last": ("} else {\n              acc1[(column_of", "} else {\n              acc2[(column_of"),
    "next keys over those in use": ("pd_cp_async_wait<0>();\n    pd_syncthreads();", "pd_cp_async_wait<0>();"),
    "weights in the wrong order": ("pd_pack_f16x2(acc1[(8*f_k2 + 2)]", "pd_pack_f16x2(acc1[(8*f_k2 + 4)]"),
}  # fmt: skip


FLOAT_BUGS = {
    "weights of another key": ("float32", "[0] = pd_shfl_idx(acc1[(4*(f_k2/2))]", "[0] = pd_shfl_idx(acc1[1]", None),
    "weights not rounded": ("tf32", "[0] = pd_f32_to_tf32(acc1", "[0] = pd_f32_to_bits(acc1", "not rounded to tf32"),
    "rows exchanged": ("tf32", "[1] = pd_f32_to_tf32(acc1[(4*f_k2 + 2)", "[1] = pd_f32_to_tf32(acc1[(1)", None),
}  # fmt: skip


@pytest.mark.parametrize("bug", FLOAT_BUGS)
def test_planted_bugs_in_float32_are_caught(bug: str) -> None:
    dtype, old, new, message = FLOAT_BUGS[bug]
    plan = attention("float32")
    (p,) = placed(plan, tf32=dtype == "tf32", rows=TILES)
    wrong = replace(p, kernels=with_bugs(p.kernels[0], {bug: (old, new)}))
    with pytest.raises((AssertionError, DeviceError), match=message):
        right(plan, (wrong,), 17, 66, "none", tolerance=BOUND[dtype], choose=lambda p, env: p.kernels[0])


def split(p: PlacedGroup, env: dict[str, int]) -> Kernel:
    """Return the split-KV version."""
    return version(p, "split_attention")


SPLIT_CASES = [
    ("float16", 64, 64),
    slow("float16", 40, 24),
    ("bfloat16", 200, 256),
    ("float32", 16, 40),
    slow("tf32", 64, 64),
]


@pytest.mark.parametrize(("dtype", "depth", "width"), SPLIT_CASES)
def test_blocks_have_shares_of_the_keys(dtype: str, depth: int, width: int) -> None:
    """Uneven splits, some completely hidden by a mask; a row that is masked in one split, or in all."""
    plan = attention("float32" if dtype == "tf32" else dtype, depth, width)
    kernels = placed(plan, tf32=dtype == "tf32", rows=SPLIT)
    for of in ((1, 256, "none", 2), (3, 1001, "row", 1), (5, 513, "causal", 1), (65, 300, "late", 1)):
        right(plan, kernels, *of, tolerance=BOUND[dtype], choose=split)


def test_rows_of_shares_that_a_large_negative_number_masks() -> None:
    plan = attention("bfloat16", 32, 32, 1)
    right(plan, placed(plan, rows=SPLIT), 3, 400, "lowest", tolerance=BOUND["bfloat16"], choose=split)


@pytest.mark.parametrize(("low", "added"), [(-np.inf, False), slow(-10000.0, False), (-65504.0, True)])
def test_shares_of_the_tiles_that_a_mask_leaves(low: float, added: bool) -> None:
    """Tiles of -inf are never visited, so blocks split the others; tiles of a large negative number belong to splits.
    """
    plan = causal("float16", low, added)
    kernels = placed(plan, rows=SPLIT)
    for length, keys in ((1, 700), (7, 513), (130, 300), (64, 256)):
        feeds, want = causal_case("float16", length, keys)
        for reverse in (False, True):
            got, _ = run(plan, feeds, split, kernels, reverse)
            assert np.abs(got["y"].astype(np.float64) - want).max() <= BOUND["float16"], (length, keys)


def test_few_blocks_of_many_keys_have_shares() -> None:
    """The estimates choose it for one query and 4096 keys, not for eight texts of 512."""
    plan = attention()
    (p,) = placed(plan, rows=SPLIT)
    k = split(p, {})
    env = params_of(p, {"B": 1, "L": 1, "T": 4096})
    assert k.values(env, MULTIPROCESSORS)["shares"] == 32, "of two tiles each"
    assert not k.fits(params_of(p, {"B": 1, "L": 1, "T": 192}), SMEM, MULTIPROCESSORS), "three tiles"
    assert not k.fits(params_of(p, {"B": 128, "L": 1, "T": 4096}), SMEM, MULTIPROCESSORS), "blocks enough"
    for others in (attention(keys=192), attention("float16", 15, 9)):
        kernels = placed(others, rows=TILES + SPLIT)[0].kernels
        assert not any(x.version.startswith("split") for x in kernels), "three tiles, narrow copies"


SHARE_BUGS = {
    "a tile belongs to no share": (0, "int32_t last = ", "int32_t last = -1 + "),
    "a tile belongs to two": (0, "int32_t first = ", "int32_t first = -(b_s > 0) + "),
    "the sum of one lane": (0, "whole = (whole + pd_shfl_xor(whole, ((int32_t)1LL)));", ""),
    "rows that do not exist": (0, "(lane/4)) < n1) {", "(lane/4)) < 64) {"),
    "shares count alike": (1, "pd_exp_fast(", "1.0f + 0.0f * ("),
}  # fmt: skip
"""Bugs in the split-KV kernel, or in the kernel that joins the splits."""


@pytest.fixture(scope="module")
def broken() -> tuple[FusionPlan, PlacedGroup]:
    plan = attention()
    (p,) = placed(plan, rows=TILES)
    return plan, replace(p, kernels=with_bugs(p.kernels[0], BUGS))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, broken: tuple[FusionPlan, PlacedGroup]) -> None:
    plan, p = broken
    caught = 0
    for mask in ("late", "none"):
        try:
            right(plan, (p,), 17, 132, mask, choose=lambda p, env: p.kernels[list(BUGS).index(bug)])
        except (AssertionError, DeviceError):
            caught += 1
    assert caught


@pytest.fixture(scope="module")
def broken_shares() -> tuple[FusionPlan, PlacedGroup, dict[str, Kernel]]:
    """Compile the split-KV kernels together."""
    plan = attention()
    (p,) = placed(plan, rows=SPLIT)
    k = split(p, {})
    first, second = ({n: b[1:] for n, b in SHARE_BUGS.items() if b[0] == x} for x in range(2))
    wrong = dict(zip(first, with_bugs(k, first), strict=True))
    ends = dict(zip(second, with_bugs(k.after[0], second), strict=True))
    p = replace(p, kernels=tuple(wrong.values()))
    return plan, p, wrong | {n: replace(k, after=(x,)) for n, x in ends.items()}


@pytest.mark.parametrize("bug", SHARE_BUGS)
def test_planted_bugs_in_shares_are_caught(
    bug: str, broken_shares: tuple[FusionPlan, PlacedGroup, dict[str, Kernel]]
) -> None:
    plan, p, kernels = broken_shares
    with pytest.raises((AssertionError, DeviceError)):
        right(plan, (p,), 17, 1001, "none", choose=lambda p, env: kernels[bug])


def test_what_is_no_softmax_stays_in_parts() -> None:
    plan = attention("float16", 264)
    builder = CudaBuilder(plan)
    assert len([p for g in plan.groups for p in builder.place(g)]) == 3
    assert "an attention of float16 with heads of 264" in builder.notes[0]
    form = lower_attention(attention(), attention().groups[0])
    assert isinstance(form, AttentionGroup)
    rows = form.parts.rows
    softmax(rows, form.parts.row_prefix, "j")
    last = next(s for s in rows.statements if s.array == "weights")
    squared = replace(last, value=op("mul", last.value, last.value))
    other = replace(rows, statements=tuple(squared if s is last else s for s in rows.statements))
    with pytest.raises(ScheduleError, match="the weights are not exp"):
        softmax(other, form.parts.row_prefix, "j")
    half = next(s for s in rows.statements if isinstance(s.value, Op) and s.value.name == "exp")
    twice = replace(half, value=op("exp", op("add", half.value.args[0], half.value.args[0])))  # type: ignore[attr-defined]
    other = replace(rows, statements=tuple(twice if s is half else s for s in rows.statements))
    with pytest.raises(ScheduleError, match="the sum of the rows is not the sum"):
        softmax(other, form.parts.row_prefix, "j")


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize(("dtype", "depth"), [slow("float16", 64), ("float16", 256), slow("float32", 32), ("tf32", 64)])
def test_attention_compiles_without_spills(dtype: str, depth: int) -> None:
    plan = attention("float16" if dtype == "float16" else "float32", depth, depth)
    (p,) = placed(plan, tf32=dtype == "tf32", rows=TILES)
    for arch in ("sm_80", "sm_90a") if dtype == "float16" else ("sm_90a",):
        use = compile_cuda(p.kernels[0].text, arch).kernels[p.kernels[0].name]
        assert use.spill_stores == use.spill_loads == 0
