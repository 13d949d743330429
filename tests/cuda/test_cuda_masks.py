"""Tiles of keys that masks hide on CUDA: added masks, stored triangles, finite numbers, paddings, on the emulation."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.backends.cuda import Cuda
from polydyn.fusion.bands import fold_band_constants
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.errors import DeviceError
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import FromIndex, Load, Value, cast, const, op
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import at_least
from polydyn.schedules.laws.masks import Axis, Logits, Visits, check_open, open_logit, visits
from tests.support.cuda_groups import Arrays, dims_of, first_fit, launch, params_of, placed, plan_of, with_bugs
from tests.support.graphs import Sheet
from tests.support.marks import slow
from tests.support.stored import path_of

node = helper.make_node
Array = np.ndarray[Any, Any]
DEPTH, TILE, STORED_SIZE = 32, 64, 260
MIN_FLOAT16 = float(np.finfo(np.float16).min)


@dataclass(frozen=True)
class Form:
    """The mask of a model: ``low`` for keys after the query, ``added`` to the score or in its place.

    ``stored``: the triangle, or the added mask, is a slice of a constant. ``padding``: keys of a batch may be masked
    too. ``way``: the kernel's treatment of tiles above the diagonal.
    """

    way: str
    low: float = -np.inf
    added: bool = False
    stored: bool = False
    padding: bool = False


FORMS = {
    "added": Form("never", added=True),
    "stored triangle": Form("last", MIN_FLOAT16, stored=True),
    "stored mask": Form("never", added=True, stored=True),
    "padding": Form("never", added=True, padding=True),
    "padding, finite": Form("last", MIN_FLOAT16, added=True, padding=True),
    "finite, added, within reach": Form("all", -2000.0, added=True),
}


def model(f: Form, dtype: str = "float16") -> FusionPlan:
    """Plan softmax(mask(q k' / 8)) v over L queries after P earlier ones, and P + L keys."""
    kind = np.dtype(dtype)
    nodes = [
        *(node("Concat", [f"past_{x}", f"new_{x}"], [x], axis=2) for x in "kv"),
        node("Shape", ["q"], ["l1"], start=2, end=3), node("Shape", ["k"], ["t1"], start=2, end=3),
        node("Sub", ["t1", "l1"], ["p1"]),
    ]  # fmt: skip
    constants: dict[str, Array] = {"scale": np.array(0.125, kind), "low": np.array(f.low, kind)}
    keep = np.tril(np.ones((1, 1, STORED_SIZE, STORED_SIZE), bool))
    if f.stored:
        whole = np.where(keep, 0, f.low).astype(kind) if f.added else keep
        constants |= {"whole": whole, "zero1": np.array([0]), "axes": np.array([2, 3])}
        nodes += [node("Concat", ["p1", "zero1"], ["starts"], axis=0), node("Concat", ["t1", "t1"], ["ends"], axis=0),
                  node("Slice", ["whole", "starts", "ends", "axes"], ["m" if f.added else "keep"])]  # fmt: skip
    else:
        constants |= {"zero": np.array(0), "one": np.array(1), "first": np.array([0]), "second": np.array([1])}
        nodes += [
            node("Squeeze", ["l1"], ["l"]), node("Squeeze", ["t1"], ["t"]), node("Range", ["zero", "l", "one"], ["r0"]),
            node("Range", ["zero", "t", "one"], ["c0"]), node("Unsqueeze", ["r0", "second"], ["r"]),
            node("Unsqueeze", ["c0", "first"], ["c"]), node("Add", ["r", "p1"], ["last"]),
            node("LessOrEqual", ["c", "last"], ["causal" if f.padding else "keep"]),
        ]  # fmt: skip
    shapes: dict[str, tuple[Any, ...]] = {"q": ("B", 2, "L", DEPTH)}
    shapes |= {f"{when}_{x}": ("B", 2, n, DEPTH) for x in "kv" for when, n in (("past", "P"), ("new", "L"))}
    types = dict.fromkeys(shapes, dtype)
    if f.padding:
        shapes["real"], types["real"] = ("B", "T"), "int64"
        constants["around"] = np.array([1, 2])
        nodes += [node("Cast", ["real"], ["real2"], to=9), node("Unsqueeze", ["real2", "around"], ["real4"]),
                  node("And", ["causal", "real4"], ["keep"])]  # fmt: skip
    nodes += [node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]), node("MatMul", ["q", "kt"], ["s"]),
              node("Mul", ["s", "scale"], ["x"])]  # fmt: skip
    if f.added and not f.stored:
        constants["none"] = np.array(0, kind)
        nodes.append(node("Where", ["keep", "none", "low"], ["m"]))
    nodes += [node("Add", ["x", "m"], ["u"]) if f.added else node("Where", ["keep", "x", "low"], ["u"]),
              node("Softmax", ["u"], ["w"], axis=-1), node("MatMul", ["w", "v"], ["y"])]  # fmt: skip
    used = {x for n in nodes for x in n.input}
    return plan_of(nodes, shapes, ["y"], {n: a for n, a in constants.items() if n in used}, types)


def inputs_and_output(f: Form, length: int, past: int, padded: int = 0) -> tuple[Arrays, Array]:
    """Return inputs and the output in float64; in the second of two texts the first ``padded`` keys are padding."""
    rng = np.random.default_rng(length * 1009 + past)
    keys = length + past
    sizes = {"q": length, "k": keys, "v": keys}
    batch = 2 if f.padding else 1
    feeds = {n: rng.standard_normal((batch, 2, x, DEPTH)).astype(np.float16) for n, x in sizes.items()}
    rows, columns = np.indices((length, keys))
    keep = np.broadcast_to(columns <= rows + past, (batch, 1, length, keys)).copy()
    if f.padding:
        feeds["real"] = np.ones((batch, keys), np.int64)
        feeds["real"][-1, :padded] = 0
        keep &= feeds["real"].astype(bool)[:, None, None]
    for x in "kv":
        feeds |= {f"past_{x}": feeds[x][:, :, :past], f"new_{x}": feeds[x][:, :, past:]}
    q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
    s = q @ k.swapaxes(-1, -2) / 8
    low = float(np.float16(f.low))
    with np.errstate(invalid="ignore", over="ignore"):
        u = np.where(keep, s, (s + low).astype(np.float16).astype(np.float64) if f.added else low)
        e = np.exp(u - u.max(-1, keepdims=True))
        return feeds, (e / e.sum(-1, keepdims=True)) @ v


def tiles(f: Form, length: int, past: int, padded: int = 0) -> int:
    """Return the number of key tiles that all blocks of both heads visit."""
    total = 0
    every = -(-(length + past) // TILE)
    for batch in range(2 if f.padding else 1):
        for first in range(0, length, TILE):
            last = min(first + TILE, length) - 1 + past
            empty = f.padding and batch == 1 and first + past < padded  # a row without keys
            whole = f.way == "all" or (f.way == "last" and empty)
            total += every if whole else last // TILE + 1
    return 2 * total


@functools.cache
def kernel(form: str) -> tuple[FusionPlan, PlacedGroup]:
    """Return the attention; there are also caches that grow, but no kernel that makes a mask."""
    plan = model(FORMS[form])
    *caches, p = placed(plan)
    made = {t.split("/")[0] for x in caches for t in x.fused.outputs} - {"real2"}  # of the padding, bools
    assert p.fused.kind == "attention" and made == {"k", "v"}
    return plan, p


SHAPES = [(1, 0), (7, 24), (63, 2), (64, 64), (65, 63), (130, 67)]
"""Numbers of queries and earlier ones: 1, primes, around the tiles."""
RUN = ("added", "stored triangle", "padding, finite")


BUGS = {
    "masked keys never visited": (" >= (-6", " >= (-9"),
    "the diagonal without its mask": (" + n3 + (-63)) >= 0", " + n3) >= 0"),
}


@functools.cache
def all_kernels() -> tuple[Any, ...]:
    """Compile the kernels of all tested forms at once."""
    chosen = {}
    for form in RUN:
        for length, past in ((64, 64), (65, 64)):
            p = kernel(form)[1]
            chosen[form, past + length] = first_fit(p, params_of(p, {"B": 2, "L": length, "P": past}))
    return *with_bugs(chosen["padding, finite", 128], BUGS), *{k.name: k for k in chosen.values()}.values()


def check(form: str, length: int, past: int, padded: int = 0, bug: str = "") -> None:
    """Check that the output is the model's, and that exactly the required tiles were computed."""
    f, (plan, p) = FORMS[form], kernel(form)
    feeds, want = inputs_and_output(f, length, past, padded)
    env = params_of(p, dims_of(plan, feeds))
    k = first_fit(replace(p, kernels=tuple(k for k in all_kernels() if k in p.kernels)), env)
    k = all_kernels()[list(BUGS).index(bug)] if bug else k
    for reverse in (False, True):
        feeds["real2"] = feeds.get("real", np.ones(1)).astype(bool)
        memory = {**plan.graph.constants, **feeds, "y": np.full(want.shape, 77, np.float16)}
        (count,) = launch(k, all_kernels(), env, lambda a, at=memory: at[p.lowered.buffers[a]], reverse)  # type: ignore[misc]
        y = memory["y"].astype(np.float64)
        assert (np.isnan(y) == np.isnan(want)).all()
        assert np.abs(np.nan_to_num(y) - np.nan_to_num(want)).max() <= 4e-3
        assert count.mma == tiles(f, length, past, padded) * 4 * 2 * (TILE // 8 * DEPTH // 16), (length, past, padded)
        assert count.ldmatrix_conflicts == count.shared_conflicts == 0


@pytest.mark.parametrize("form", [slow(f) if f in ("stored triangle", "padding") else f for f in FORMS])
def test_what_becomes_of_tiles_above_the_diagonal(form: str) -> None:
    _, p = kernel(form)
    loop = next(x for x in p.kernels[0].text.splitlines() if "for (int32_t b_l" in x)
    turns = "turn < 2" in p.kernels[0].text
    assert ("never" if "b_i" in loop else "last" if turns else "all") == FORMS[form].way
    read = set(p.lowered.buffers.values()) - {"q", "k", "v", "y", "real2"}
    assert not read, "no mask is read from memory"


@pytest.mark.parametrize("form", RUN)
def test_every_length_and_past(form: str) -> None:
    for length, past in SHAPES:
        check(form, length, past)


def test_rows_without_a_key_weigh_masked_ones() -> None:
    """Left padding: the first queries see no key, and a finite mask gives every key of the row the same weight."""
    for length, past, padded in ((130, 0, 5), (130, 0, 70), (65, 63, 64)):
        check("padding, finite", length, past, padded)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    caught = 0
    for length, past, padded in ((130, 0, 70), (65, 63, 0)):
        try:
            check("padding, finite", length, past, padded, bug)
        except (AssertionError, DeviceError):
            caught += 1
    assert caught


def test_gpt2_as_it_is_exported_reads_no_mask() -> None:
    """Causal, and a padding of another length: (B, T) integers become booleans once, no array is queries x keys."""
    graph = rewrite_graph(import_model(path_of("gpt2_past_tiny")), Cuda.unused)
    plan = fusion_plan(graph, Cuda.unused, cuda=True)
    attentions = [g for g in plan.groups if g.kind == "attention"]
    sizes = {x: plan.graph.tensors[x].shape for g in attentions for n in g.nodes if n.is_map for x in n.inputs}
    own = {n.output for g in attentions for n in g.nodes}
    assert len(attentions) == 2 and [tuple(map(str, s)) for x, s in sizes.items() if x not in own] == [("B", "T")]
    plain = fusion_plan(graph, (*Cuda.unused, "masks"), cuda=True)
    assert len(plain.groups) > len(plan.groups)


# -- bounds of logits ------------------------------------------------------------------------------------------------

ROW, KEY = (FromIndex("int64", Index.of(x)) for x in ("i", "j"))
SCORE = Load("float32", "scores", (Index.of("i"), Index.of("j")))
ABOVE = op("gt", KEY, ROW)


def visits_of(logit: Value) -> Visits:
    rows, keys = Axis("i", Index.of("m"), 64, "b_i"), Axis("j", Index.of("n"), 32, "b_l")
    return visits(Logits(logit, (), rows, keys, ("m", "n")))


def number(x: float) -> Value:
    return const(x, "float32")


def test_bounds_of_logits() -> None:
    """Bounds of an added mask, with any other addend; a logit that may be NaN or infinite has no bound."""
    lowest, unread = float(np.finfo(np.float32).min), Load("float32", "bias", (Index.of("j"),))
    never, zero, one = number(-np.inf), number(0), number(1)
    mask = op("where", ABOVE, never, zero)
    scaled = op("mul", SCORE, number(0.125))
    for x in (scaled, op("add", scaled, unread), op("neg", SCORE), op("max", SCORE, unread)):
        hidden = visits_of(op("add", x, mask))
        assert (hidden.live != ()) == (x.name != "neg"), x
    assert visits_of(op("max", op("add", SCORE, mask), number(lowest))).least is not None, "a clamped mask is finite"
    assert visits_of(op("add", op("mul", SCORE, unread), mask)) == Visits(), "a product of what is read may overflow"
    assert visits_of(op("mul", op("sub", one, unread), never)) == Visits(), "0 times -inf"
    kept = op("mul", op("sub", one, cast(op("not", ABOVE), "float32")), number(lowest))
    assert visits_of(op("add", scaled, kept)).end == visits_of(op("where", ABOVE, number(-1e30), SCORE)).end is not None
    assert visits_of(op("add", scaled, op("where", ABOVE, number(-1e9), zero))) == Visits()


def test_tiles_in_which_a_mask_hides_nothing() -> None:
    """Tiles of 64 rows and 32 keys: conditions decide; masks that are read are tested."""
    rows, keys = Axis("i", Index.of("m"), 64, "b_i"), Axis("j", Index.of("n"), 32, "b_l")
    never, zero, one, low = number(-np.inf), number(0), number(1), number(-1e9)
    padded = op("eq", Load("int64", "padding", (Index.of("j"),)), const(0, "int64"))
    hidden = op("or", ABOVE, padded)
    below_all = (at_least(Index.of("b_i") * 2, Index.of("b_l") + 1),)
    scaled = op("mul", SCORE, number(0.125))
    for value, left in (
        (op("where", ABOVE, never, scaled), scaled),
        (op("where", op("not", ABOVE), scaled, low), scaled),
        (op("add", scaled, op("where", ABOVE, never, zero)), scaled),
        (op("add", op("mul", op("sub", one, cast(op("not", ABOVE), "float32")), low), scaled), scaled),
        (op("where", hidden, low, scaled), op("where", padded, low, scaled)),
        (op("where", op("not", hidden), scaled, low), op("where", op("not", padded), scaled, low)),
    ):
        logits = Logits(value, (), rows, keys, ("m", "n"))
        assert open_logit(logits) == (left, below_all), value
        with pytest.raises(LegalityError, match="a tile with a hidden key is called open"):
            check_open(logits, (at_least(Index.of("b_i") * 2, Index.of("b_l")),), logits.shown(ABOVE, False))
    for value in (scaled, op("where", ABOVE, scaled, zero), op("where", padded, low, scaled)):
        assert open_logit(Logits(value, (), rows, keys, ("m", "n"))) == (value, ())


def test_bounds_are_those_of_rounded_numbers() -> None:
    """A little beyond the lowest number is the lowest number, not -inf; a clamped NaN is one; subscripts overflow."""
    for dtype, lowest, little in (("float16", MIN_FLOAT16, -10.0), ("float32", float(np.finfo(np.float32).min), -5e30)):
        assert np.dtype(dtype).type(lowest) + np.dtype(dtype).type(little) == lowest
        low, extra = const(lowest, dtype), const(little, dtype)
        score = Load(dtype, "scores", SCORE.index)
        found = visits_of(op("where", ABOVE, op("add", low, extra), score))
        assert found.live == () and found.least is not None, "such a row weighs its keys"
        assert visits_of(op("where", ABOVE, op("add", low, low), score)).live != ()
        assert found.least > lowest * (1 - 2.0**-9 if dtype == "float16" else 1)
    infinite = op("add", op("mul", SCORE, number(8)), Load("float32", "bias", (Index.of("j"),)))  # inf - inf
    assert visits_of(op("where", ABOVE, op("min", infinite, number(-2000)), SCORE)) == Visits()
    far = cast(FromIndex("int64", 1000 * Index.of("j")), "float16")
    low = op("where", ABOVE, const(MIN_FLOAT16, "float16"), const(0.0, "float16"))
    assert visits_of(op("add", low, far)) == Visits()


def test_masks_that_leave_one_tile_or_no_tile_of_a_head() -> None:
    """The ring needs a loop in every block: all tiles are visited then."""
    constants = {"zero": np.array(0), "one": np.array(1), "few": np.array(7), "low": np.array(-np.inf, np.float16)}
    constants["planes"] = np.array([1, 2])
    shapes = dict.fromkeys("qkv", ("B", "H", "L", DEPTH))
    for axis, relation in ((2, "Less"), (1, "Greater")):
        nodes = [
            node("Shape", ["k"], ["n1"], start=axis, end=axis + 1), node("Squeeze", ["n1"], ["n"]),
            node("Range", ["zero", "n", "one"], ["c"]), node("Unsqueeze", ["c", "planes"], ["h"]),
            node(relation, ["h" if axis == 1 else "c", "few" if relation == "Less" else "zero"], ["keep"]),
            node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]), node("MatMul", ["q", "kt"], ["s"]),
            node("Where", ["keep", "s", "low"], ["u"]), node("Softmax", ["u"], ["w"], axis=-1),
            node("MatMul", ["w", "v"], ["y"]),
        ]  # fmt: skip
        used = {x for n in nodes for x in n.input}
        plan = plan_of(nodes, shapes, ["y"], {n: a for n, a in constants.items() if n in used}, "float16")
        (p,) = placed(plan)
        (loop,) = (x for x in p.kernels[0].text.splitlines() if "for (int32_t b_l" in x)
        assert "b_l < ((n0 + 63)/64)" in loop, loop


def test_the_number_that_a_row_must_have_seen() -> None:
    """exp of the difference is 0, also between distant floats."""
    for low in (-1e4, -65504.0, -1e9, -1e30, float(np.finfo(np.float32).min)):
        found = visits_of(op("where", ABOVE, number(low), SCORE))
        assert found.least is not None and found.least < 0
        assert np.exp(np.float32(low) - np.float32(found.least)) == 0
    assert visits_of(op("where", ABOVE, number(-900), SCORE)) == Visits()


# -- constants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32"])
def test_bands_become_comparisons(dtype: str) -> None:
    """Triangles from any diagonal, and bands of any two or three numbers."""
    r, c = np.indices((9, 7))
    cases = [c <= r, c > r + 2, c < r - 3, (c <= r) & (c > r - 3), (c > r) | (c < r - 4)]
    arrays = {f"b{k}": (np.where(x, 3, 1).astype(dtype) if dtype != "bool" else x) for k, x in enumerate(cases)}
    arrays["b5"] = (c - r).clip(-1, 1).astype(dtype) if dtype == "float32" else arrays["b0"]
    s = Sheet(x=(9, 7))
    for n, a in arrays.items():
        s.constant(n, a)
        read = s.at(n, "d0", "d1")
        s.let(f"y{n}", (9, 7), op("add", s.at("x", "d0", "d1"), cast(read, "float32")))
    graph = s.graph(*(f"y{n}" for n in arrays))
    after = fold_band_constants(graph)
    assert not any(set(n.inputs) & arrays.keys() for n in after.nodes)
    x = {"x": np.arange(63, dtype=np.float32).reshape(9, 7)}
    want, got = reference.evaluate(graph, x), reference.evaluate(after, x)
    assert all((want[n] == got[n]).all() for n in want)


def test_what_is_no_band_stays() -> None:
    r, c = np.indices((8, 8))
    s = Sheet(x=(8, 8))
    arrays = [np.arange(64.0).reshape(8, 8), np.ones((8, 8)), (c - r) % 3 == 0, (c <= r)[:3],
              np.tri(16)[::2, ::2] * 1.5, np.stack([c <= r, c > r])]  # fmt: skip
    arrays[4][5, 6] = -0.0  # another zero
    for k, a in enumerate(arrays):
        s.constant(f"c{k}", a.astype(np.float32))
        at = ("d0", "d1") if a.ndim == 2 else (0, "d0", "d1")
        shape = a.shape[-2:]
        s.let(f"y{k}", shape, op("exp", s.at(f"c{k}", *at)))
    graph = s.graph(*(f"y{k}" for k in range(len(arrays))))
    assert fold_band_constants(graph).nodes == graph.nodes
