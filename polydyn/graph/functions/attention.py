"""Several attention operators as products, a bias and a softmax, which fusion matches as one attention.

Inside, heads are an axis: queries [B, heads, L, size], keys and values [B, kv_heads, S, size]. Masks are biases of 0
and minus infinity. A row whose keys are all masked is 0 where ONNX specifies it; this is decided after the second
product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polydyn.errors import ModelError
from polydyn.graph.bodies import Body, body
from polydyn.graph.dtypes import onnx_dtype
from polydyn.graph.ir import Dim
from polydyn.graph.subscripts import data_sizes
from polydyn.schedules.index import product

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Scores:
    """Parameters of the scores: ``scale`` before the cap, ``bias`` (or ``""``) after it; ``dtype`` of the softmax."""

    scale: float
    bias: str = ""
    softcap: float = 0.0
    dtype: str = ""
    empty_rows: bool = False


@dataclass(frozen=True)
class Attended:
    """The result [B, heads, L, size] and the intermediate steps: products, capped, biased, weights."""

    result: str
    steps: tuple[str, str, str, str]


def attend(
    b: Body, q: str, k: str, v: str, groups: int, scores: Scores, like: str, alike: bool = True
) -> Attended:  # fmt: skip
    """Add ``softmax(cap(scale * q k') + bias) v``. Each head of k and v serves ``groups`` heads of q, in order.

    ``alike``: v has the dtype of q.
    """
    k, v = (_repeated(b, x, groups) for x in (k, v))
    products = b.op("MatMul", q, b.op("Transpose", k, perm=(0, 1, 3, 2)))
    if scores.scale != 1:
        products = b.op("Mul", products, b.like(scores.scale, like))
    capped = products
    if scores.softcap:
        cap = b.like(scores.softcap, like)
        capped = b.op("Mul", b.op("Tanh", b.op("Div", products, cap)), cap)
    biased = b.op("Add", capped, scores.bias) if scores.bias else capped
    exact = scores.dtype and scores.dtype != b.tensor(like).dtype
    weights = b.op("Softmax", b.cast(biased, scores.dtype) if exact else biased, axis=-1)
    weights = b.op("CastLike", weights, like) if exact else weights
    result = b.op("MatMul", weights, v if alike else b.op("CastLike", v, like))
    if scores.bias and scores.empty_rows:
        empty = b.op("Equal", b.reduce("ReduceMax", scores.bias, -1), b.like(-np.inf, like))
        zero = b.like(0, like)
        result, weights = (b.op("Where", empty, zero, x) for x in (result, weights))
    return Attended(result, (products, capped, biased, weights))


def _repeated(b: Body, x: str, groups: int) -> str:
    """Repeat [B, n, S, size] to [B, n * groups, S, size]."""
    if groups == 1:
        return x
    wide = b.op("Expand", b.op("Unsqueeze", x, b.constant([2])), b.constant([1, 1, groups, 1, 1]))
    heads = b.op("Mul", b.size(x, 1), b.constant([groups]))
    return b.op("Reshape", wide, b.shape(b.size(x, 0), heads, b.size(x, 2), b.size(x, 3)))


def split_heads(b: Body, x: str, heads: int) -> str:
    """Split [B, L, heads * size] to [B, heads, L, size]."""
    return b.op("Transpose", b.reshape(x, 0, 0, heads, -1), perm=(0, 2, 1, 3))


def join_heads(b: Body, x: str) -> str:
    """Join [B, heads, L, size] to [B, L, heads * size]."""
    return b.reshape(b.op("Transpose", x, perm=(0, 2, 1, 3)), 0, 0, -1)


def added(b: Body, *biases: str) -> str:
    """Add the biases that are present."""
    present = [x for x in biases if x]
    total = present[0] if present else ""
    for x in present[1:]:
        total = b.op("Add", total, x)
    return total


def bias_where(b: Body, allowed: str, like: str, low: float = -np.inf) -> str:
    """Return 0 where a position is allowed, else ``low``."""
    return b.op("Where", allowed, b.like(0, like), b.like(low, like))


def positions(b: Body, count: str) -> str:
    """Return the vector 0, 1, ... with ``count`` elements (``count`` is a vector of one element)."""
    return b.op("Range", b.constant(0), b.op("Squeeze", count, b.constant([0])), b.constant(1))


def band(b: Body, rows: str, columns: str, offset: str, left: int, right: int) -> str:
    """Return [..., L, S]: whether key j is at most ``left`` before and ``right`` after query ``i + offset``.

    The sizes and the offset are vectors. A side of -1 is unlimited; at least one side must be limited.
    """
    row, column = b.op("Unsqueeze", positions(b, rows), b.constant([1])), positions(b, columns)
    row = b.op("Add", row, offset) if offset else row
    near = b.op("LessOrEqual", column, b.op("Add", row, b.constant(right)) if right > 0 else row) if right >= 0 else ""
    if left < 0:
        return near
    late = b.op("GreaterOrEqual", column, b.op("Sub", row, b.constant(left)))
    return b.op("And", near, late) if near else late


def heads_of(b: Body, attribute: int, shape: tuple[Dim, ...]) -> int:
    """Return the number of heads: the attribute for tensors of three axes, else the size of axis 1."""
    count = attribute if len(shape) == 3 else shape[1].constant
    if not count:
        raise b.refuse("a number of heads that is not constant")
    return int(count)


@body("Attention")
def attention(b: Body) -> None:
    """Expand ONNX's Attention: [B, L, heads * size] or heads as an axis; caches; masks of booleans or numbers."""
    q, k, v = (b.tensor(b.input(i)) for i in range(3))
    n = heads_of(b, b.attribute("q_num_heads", 0), q.shape)
    m = heads_of(b, b.attribute("kv_num_heads", 0), k.shape)
    if n % m:
        raise ModelError(f"{n} heads of queries for {m} of keys", node=b.node.name)
    flat = len(q.shape) == 3
    b.ignore("q_num_heads", "kv_num_heads")
    names = [split_heads(b, x.name, h) if flat else x.name for x, h in ((q, n), (k, m), (v, m))]
    size = q.shape[-1] // n if flat else q.shape[-1]
    new = k.shape[1] if flat else k.shape[2]
    past_key, past_value, lengths = b.input(4), b.input(5), b.input(6)
    if past_key:
        names[1:] = [b.op("Concat", x, y, axis=2) for x, y in ((past_key, names[1]), (past_value, names[2]))]
    total = new + (b.tensor(past_key).shape[2] if past_key else 0)
    scale = b.attribute("scale") or _inverse_root(b, size)
    mask = _mask(b, b.input(3), total, q.name, b.size(names[1], 2))
    rows, columns = b.size(names[0], 2), b.size(names[1], 2)
    allowed, left, right = "", b.attribute("left_window_size", -1), b.attribute("right_window_size", -1)
    right = 0 if b.attribute("is_causal", 0) else right
    if left >= 0 or right >= 0:
        offset = b.size(past_key, 2) if past_key else ""
        if lengths and not past_key:
            offset = b.op("Unsqueeze", b.op("Sub", lengths, rows), b.constant([1, 2, 3]))
        allowed = bias_where(b, band(b, rows, columns, offset, left, right), q.name)
    padding = ""
    if lengths:
        inside = b.op("Less", positions(b, columns), b.op("Unsqueeze", lengths, b.constant([1, 2, 3])))
        padding = bias_where(b, inside, q.name)
    softmax = b.attribute("softmax_precision")
    dtype, mode = onnx_dtype(softmax) if softmax else "", b.attribute("qk_matmul_output_mode", 0)
    bias = added(b, mask, allowed, padding)
    empty_rows = bool(mask or lengths or left >= 0)
    scores = Scores(scale, bias, b.attribute("softcap", 0.0), dtype, empty_rows)
    done = attend(b, names[0], names[1], names[2], n // m, scores, q.name, q.dtype == v.dtype)
    b.set_output(join_heads(b, done.result) if flat else done.result)
    b.set_output(names[1], 1)
    b.set_output(names[2], 2)
    b.set_output(done.steps[mode], 3)


def _inverse_root(b: Body, size: Dim) -> float:
    n = size.constant
    if n is None:
        raise b.refuse(f"a head size of {size} without a scale", "give the attribute scale")
    return float(1 / np.sqrt(max(n, 1)))


def _mask(b: Body, name: str, total: Dim, like: str, columns: str) -> str:
    """Return the mask as a bias. Keys past its end are masked."""
    if not name:
        return ""
    mask = b.tensor(name)
    if mask.dtype == "bool":
        bias = bias_where(b, name, like)
    else:
        bias = name if mask.dtype == b.tensor(like).dtype else b.op("CastLike", name, like)
    if b.ctx.equal(mask.shape[-1], total):
        return bias
    missing = b.op("Sub", columns, b.op("Shape", name, start=-1))
    return b.op("Pad", bias, b.shape(0, missing), b.like(-np.inf, like), b.constant([-1]))


# -- com.microsoft ---------------------------------------------------------------------------------------------------


@body(f"{MICROSOFT}::RotaryEmbedding")
def rotary_embedding(b: Body) -> None:
    """Expand to ONNX's operator, with the position before the caches. A single position is that of the first token."""
    x, place = b.tensor(b.input(0)), b.tensor(b.input(1))
    if b.attribute("is_packed_batching", 0) or b.attribute("scale", 1.0) != 1:
        raise b.refuse("is_packed_batching or a scale")
    where, length = place.name, x.shape[1] if len(x.shape) == 3 else x.shape[2]
    b.ignore("max_position")
    rotary, cache = b.attribute("rotary_embedding_dim", 0), b.tensor(b.input(2)).shape[-1]
    heads = b.attribute("num_heads", 0)
    if len(x.shape) == 3 and not heads:
        size = (cache * 2).constant
        if not size or rotary or (x.shape[2] // size).constant is None:
            raise b.refuse("an input of three axes without num_heads")
        heads = int((x.shape[2] // size).constant or 0)
    if len(place.shape) == 1:
        count = b.size(x.name, 1 if len(x.shape) == 3 else 2)
        steps = b.op("Add", positions(b, count), where)
        where = b.op("Expand", b.op("Unsqueeze", steps, b.constant([0])), b.shape(b.size(x.name, 0), count))
    else:
        b.ctx.unify(place.shape[1], length, f"{place.name} has a position for each token of {x.name}")
    b.set_output(rotated(b, x.name, where, b.input(2), b.input(3), heads, rotary, b.attribute("interleaved", 0)))


def rotated(b: Body, x: str, where: str, cos: str, sin: str, heads: int, rotary: int = 0, interleaved: int = 0) -> str:
    """Add ONNX's RotaryEmbedding at positions [B, L]."""
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": rotary}
    if heads:
        attributes["num_heads"] = heads
    return b.op("RotaryEmbedding", x, cos, sin, where, opset=23, **attributes)


@body(f"{MICROSOFT}::GroupQueryAttention")
def group_query_attention(b: Body) -> None:
    """Expand attention with caches of different lengths per sample: new keys are appended, and masks end there.

    ``seqlens_k``: tokens of each sample minus one. ``total_sequence_length``: the maximum over all samples, a size.
    """
    if b.input(10):
        raise b.refuse("attention_bias")
    for name, off in (("qk_output", (0,)), ("kv_cache_bit_width", (0,))):
        if b.attribute(name, off[0]) not in off:
            raise b.refuse(f"{name}={b.attribute(name)}")
    for name in ("k_quant_type", "v_quant_type"):
        if b.attribute(name, "NONE") != "NONE":
            raise b.refuse(f"{name}={b.attribute(name)}")
    interleaved = b.attribute("rotary_interleaved", 0)
    n, m = b.attribute("num_heads"), b.attribute("kv_num_heads")
    x, past, total = b.tensor(b.input(0)), b.input(3), b.ctx.value(b.input(6))
    (longest,) = data_sizes(b.node, b.ctx, b.input(6), "total") if total is None else total.reshape(-1)[:1]
    names: list[str] = [b.input(0), b.input(1), b.input(2)]
    width = x.shape[2].constant
    if not width:
        raise b.refuse(f"a width of {x.shape[2]}")
    size = width // n
    if not names[1]:
        size = width // (n + 2 * m)
        parts = b.constant([n * size, m * size, m * size])
        names = list(b.ops("Split", 3, x.name, parts, axis=2))
    length = b.size(x.name, 1)
    first = b.ctx.equal(x.shape[1], longest)
    before = _tokens_before(b, length, first)
    if b.attribute("do_rotary", 0):
        where = b.input(9)
        if not where:
            where = b.op("Add", b.op("Unsqueeze", before, b.constant([1])), positions(b, length))
        caches = b.input(7), b.input(8)
        for i, heads in ((0, n), (1, m)):
            names[i] = rotated(b, names[i], where, *caches, heads, interleaved=interleaved)
    q, k, v = (split_heads(b, y, h) for y, h in zip(names, (n, m, m), strict=True))
    if past:
        held, most = b.size(past, 2), b.reshape(b.cast(b.input(6), "int64"), 1)
        room = b.op("Sub", b.op("Max", held, most), held)
        pads = b.shape(0, 0, 0, 0, 0, 0, room, 0)
        k, v = (
            b.op("TensorScatter", b.op("Pad", cache, pads), y, before, axis=2, opset=24)
            for cache, y in ((past, k), (b.input(4), v))
        )
    else:
        b.ctx.unify(x.shape[1], longest, "without caches all tokens are new")
    columns = b.size(k, 2)
    window = b.attribute("local_window_size", -1)
    allowed = band(b, length, columns, _as_column(b, before), max(window, 0) - 1, 0)
    scale = b.attribute("scale") or float(1 / np.sqrt(size))
    scores = Scores(scale, bias_where(b, allowed, x.name), b.attribute("softcap", 0.0))
    done = attend(b, q, k, v, n // m, scores, x.name)
    result = done.result
    if b.attribute("smooth_softmax", 0) > 0 or b.input(11):
        result = b.op("Mul", result, _share(b, done.steps[2], b.input(11)))
    b.ctx.unify(x.shape[0], product(b.tensor(b.input(5)).shape), f"{b.input(5)} has a number for each sample")
    b.set_output(join_heads(b, result))
    b.set_output(k, 1)
    b.set_output(v, 2)


def _share(b: Body, scores: str, sink: str) -> str:
    """Return [B, heads, L, 1]: the fraction of the weights of keys next to one more score, which is 0 or per head."""
    total = b.reduce("ReduceLogSumExp", scores, -1)
    return b.op("Sigmoid", b.op("Sub", total, b.reshape(sink, 1, -1, 1, 1)) if sink else total)


def _as_column(b: Body, x: str) -> str:
    """Reshape [B] to [B, 1, 1, 1]."""
    return b.op("Unsqueeze", x, b.constant([1, 2, 3]))


def _tokens_before(b: Body, length: str, first: bool | None) -> str:
    """Return [B]: tokens in each sample's cache; 0 while the whole sequence is new."""
    zeros = b.op("Expand", b.constant([0]), b.size(b.input(5), 0))
    if first:
        return zeros
    lengths = b.reshape(b.cast(b.input(5), "int64"), -1)
    before = b.op("Sub", b.op("Add", lengths, b.constant([1])), length)
    if first is False:
        return before
    whole = b.op("Equal", length, b.reshape(b.cast(b.input(6), "int64"), 1))
    return b.op("Where", whole, zeros, before)


@body(f"{MICROSOFT}::MultiHeadAttention")
def multi_head_attention(b: Body) -> None:
    """Expand attention over projected queries, keys and values [B, L, heads * size], or packed ones, with bias and
    caches.
    """
    n = b.attribute("num_heads")
    q, bias = b.tensor(b.input(0)), b.input(3)
    for i, what in ((8, "past_sequence_length"), (9, "cache_indirection")):
        if b.input(i):
            raise b.refuse(what)
    names = [b.input(0), b.input(1), b.input(2)]
    if len(q.shape) == 5:  # [B, L, heads, 3, size]
        parts = [b.op("Gather", q.name, b.constant(i), axis=3) for i in range(3)]
        heads = [b.op("Transpose", x, perm=(0, 2, 1, 3)) for x in parts]
    elif names[1] and len(b.tensor(names[1]).shape) == 5:  # [B, S, heads, 2, size]
        packed = [b.op("Gather", names[1], b.constant(i), axis=3) for i in range(2)]
        heads = [split_heads(b, q.name, n), *(b.op("Transpose", x, perm=(0, 2, 1, 3)) for x in packed)]
    elif not names[1] or not names[2]:
        raise b.refuse("a query without key and value")
    else:
        if bias:
            width = q.shape[2].constant
            if not width:
                raise b.refuse(f"a width of {q.shape[2]}")
            sizes = b.constant([width, width, (b.tensor(bias).shape[0] - 2 * width).constant])
            biases = b.ops("Split", 3, bias, sizes, axis=0)
            given = [len(b.tensor(x).shape) == 3 for x in names]
            names = [b.op("Add", x, y) if g else x for x, y, g in zip(names, biases, given, strict=True)]
        heads = [
            split_heads(b, x, n) if len(b.tensor(y).shape) == 3 else x
            for x, y in zip(names, b.node.inputs, strict=False)
        ]
    if len(q.shape) == 5 and bias:
        raise b.refuse("a bias of packed queries")
    _set_attention_outputs(b, heads, past=(b.input(6), b.input(7)), mask=b.input(4), bias=b.input(5))


@body(f"{MICROSOFT}::Attention")
def projected_attention(b: Body) -> None:
    """Expand projection, attention and caches [2, B, heads, S, size]. The result is [B, L, H]."""
    joined = b.op("MatMul", b.input(0), b.input(1))
    joined = b.op("Add", joined, b.input(2)) if b.input(2) else joined
    _set_projected_outputs(b, joined, b.input(4), b.input(3), b.input(5), b.input(0))


@body(f"{MICROSOFT}::QAttention")
def quantized_attention(b: Body) -> None:
    """Expand an attention whose projection multiplies integers. All that follows is of floats."""
    names = [b.input(i) for i in (0, 1, 3, 4, 6, 7, 2)]
    joined = b.op(f"{MICROSOFT}::MatMulIntegerToFloat", *names)
    _set_projected_outputs(b, joined, b.input(8), b.input(5), "", b.input(2))


def _set_projected_outputs(b: Body, joined: str, past: str, mask: str, bias: str, like: str) -> None:
    """Split projected queries, keys and values, and attend. ``past``: both caches in one tensor, or ``""``."""
    n, width = b.attribute("num_heads"), b.tensor(b.input(1)).shape[1].constant
    if b.attribute("do_rotary", 0) or b.attribute("past_present_share_buffer", 0):
        raise b.refuse("do_rotary or past_present_share_buffer")
    widths = b.attribute("qkv_hidden_sizes") or ((width // 3,) * 3 if width else None)
    if widths is None:
        raise b.refuse("a width that is not constant")
    heads = [split_heads(b, x, n) for x in b.ops("Split", 3, joined, b.constant(widths), axis=2)]
    caches = ("", "")
    if past:
        caches = (b.op("Gather", past, b.constant(0), axis=0), b.op("Gather", past, b.constant(1), axis=0))
    _set_attention_outputs(b, heads, caches, mask, bias, packed=True, size=widths[0] // n, like=like)


def _set_attention_outputs(
    b: Body, heads: list[str], past: tuple[str, str], mask: str, bias: str, packed: bool = False, size: int = 0,
    like: str = "",
) -> None:  # fmt: skip
    """Add the common part: past caches, masks, attention, results.

    ``packed``: both caches are one output. ``like``: a tensor of the floats' type, by default the first input.
    """
    q, k, v = heads
    if past[0]:
        k, v = b.op("Concat", past[0], k, axis=2), b.op("Concat", past[1], v, axis=2)
    like, n = like or b.input(0), b.attribute("num_heads")
    if not size:
        shape = b.tensor(like).shape
        width = shape[-1].constant if len(shape) == 5 else (shape[-1] // n).constant
        size = int(width or 0)
    if not size and not b.attribute("scale"):
        raise b.refuse("a head size that is not constant")
    rows, columns = b.size(q, 2), b.size(k, 2)
    biases = [bias]
    low = b.attribute("mask_filter_value", -10000.0)
    if b.attribute("unidirectional", 0):
        offset = b.size(past[0], 2) if past[0] else ""
        biases.append(bias_where(b, band(b, rows, columns, offset, -1, 0), like))
    if mask:
        biases.append(_key_mask(b, mask, columns, like, low))
    scores = Scores(b.attribute("scale") or float(1 / np.sqrt(max(size, 1))), added(b, *biases))
    done = attend(b, q, k, v, 1, scores, like)
    b.set_output(join_heads(b, done.result))
    if packed:
        pair = [b.op("Unsqueeze", x, b.constant([0])) for x in (k, v)]
        b.set_output(b.op("Concat", *pair, axis=0), 1)
        return
    b.set_output(k, 1)
    b.set_output(v, 2)
    b.set_output(done.steps[0], 3)


def _key_mask(b: Body, mask: str, columns: str, like: str, low: float) -> str:
    """Return a bias from lengths [B], or from a mask of keys [B, S], of pairs [B, L, S], or with heads [B, 1, L, S]."""
    t = b.tensor(mask)
    rank = len(t.shape)
    if rank == 1:
        if b.ctx.equal(t.shape[0], b.tensor(b.input(0)).shape[0]) is not True:
            raise b.refuse(f"a mask {mask} of {t.shape[0]} numbers", "give a number for each sample, or a mask")
        inside = b.op("Less", b.cast(positions(b, columns), t.dtype), _as_column(b, mask))
        return bias_where(b, inside, like, low)
    allowed = b.op("Cast", mask, to=9)
    axes = {2: [1, 2], 3: [1]}.get(rank)
    return bias_where(b, b.op("Unsqueeze", allowed, b.constant(axes)) if axes else allowed, like, low)
