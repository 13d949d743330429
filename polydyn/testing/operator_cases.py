"""Single operators in any version, with any attributes and types that ONNX's schemas allow, as far as they run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from polydyn.testing.drafts import MAX_OPSET, Draft, Rejected

Schema: TypeAlias = Any
TRIES = 12
LEFT_OUT = {
    "Loop", "If", "Scan", "Constant", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike",
    "Multinomial", "Bernoulli", "ImageDecoder", "StringConcat", "StringSplit", "StringNormalizer", "RegexFullMatch",
    "TfIdfVectorizer", "SequenceMap", "Optional", "OptionalGetElement", "OptionalHasElement", "Dropout", "LSTM", "GRU",
    "RNN", "SequenceEmpty", "SequenceInsert", "SequenceConstruct", "SequenceAt", "SequenceErase", "SequenceLength",
    "SplitToSequence", "ConcatFromSequence", "BitCast", "Adagrad", "Adam", "Momentum", "Gradient",
}  # fmt: skip
"""Bodies, random numbers, sequences and strings: other motifs, or other tests."""
UNSAFE_OPERATORS = {"DFT", "STFT", "RoiAlign", "MaxRoiPool", "ReverseSequence", "NonMaxSuppression", "MaxUnpool"}
"""Operators whose operands ONNX Runtime does not check: it crashes on wrong ones."""
LEFT_OUT |= UNSAFE_OPERATORS
TYPES = (
    "float32",
    "float64",
    "float16",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
    "int16",
    "uint16",
    "uint32",
    "uint64",
)
STRINGS: Mapping[str, tuple[str, ...]] = {
    "auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"), "direction": ("LEFT", "RIGHT"),
    "coordinate_transformation_mode": (
        "half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric",
        "tf_half_pixel_for_nn", "output_half_pixel",
    ),
    "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"), "approximate": ("none", "tanh"),
    "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
    "padding_mode": ("zeros", "border", "reflection"), "reduction": ("none", "add", "mul", "max", "min", "mean", "sum"),
    "equation": ("ij,jk->ik", "ij->ji", "i,i->", "bij,bjk->bik",
                                                                    "ij,kj->ik", "...ij->...ji", "ii->i", "ij->"),
}  # fmt: skip
MODES = {
    "Resize": ("nearest", "linear", "cubic"), "Upsample": ("nearest", "linear"),
    "Pad": ("constant", "reflect", "edge", "wrap"),
    "DepthToSpace": ("DCR", "CRD"), "GridSample": ("linear", "nearest", "cubic", "bilinear", "bicubic"),
    "RoiAlign": ("avg", "max"),
}  # fmt: skip
SWITCHES = {"keepdims", "transA", "transB", "ceil_mode", "count_include_pad", "reverse", "exclusive", "largest",
            "sorted", "select_last_index", "align_corners", "antialias", "exclude_outside", "fmod", "upper", "saturate",
            "noop_with_empty_axes", "allowzero", "interleaved", "is_causal", "inverse", "onesided"}  # fmt: skip


@lru_cache(maxsize=64)
def schemas(opset: int) -> tuple[Schema, ...]:
    """Return the operators of an opset."""
    every = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    found = []
    for name in sorted(every - LEFT_OUT):
        try:
            s = onnx.defs.get_schema(name, opset)
        except onnx.defs.SchemaError:
            continue
        if not s.deprecated:
            found.append(s)
    return tuple(found)


class Operator:
    """One random node of a schema, and its operands. ``plain``: share of optional parts to omit, 0 to 1."""

    def __init__(self, b: Draft, schema: Schema, plain: float = 0.0) -> None:
        self.b, self.schema, self.op, self.plain = b, schema, schema.name, plain
        self.bound: dict[str, str] = {}
        """Maps a type parameter to its type."""

    def add(self) -> None:
        """Add the node. Rejected: it does not run."""
        first = self.operand(self.schema.inputs[0]) if self.schema.inputs else ""
        operands = [first] if first else []
        for k, formal in enumerate(self.schema.inputs[1:], 1):
            kind = formal.option
            left_out = self.b.random.random() < 0.4 + 0.5 * self.plain
            if kind == onnx.defs.OpSchema.FormalParameterOption.Optional and left_out:
                operands.append("")
                continue
            operands.append(self.operand(formal, first))
            if kind == onnx.defs.OpSchema.FormalParameterOption.Variadic or k > 9:
                break
        if len(self.schema.inputs) == 1 and first and self._variadic():
            operands += [self.operand(self.schema.inputs[0], first) for _ in range(self.b.random.choice([0, 1, 1, 2]))]
        attributes = {}
        for name, a in sorted(self.schema.attributes.items()):
            if a.required or self.b.random.random() < 0.6 - 0.4 * self.plain:
                value = self.attribute(name, a, first)
                if value is not None:
                    attributes[name] = value
                elif a.required:
                    raise Rejected(f"no value for {name}")
        least = max(1, self.schema.min_output)
        most = min(self.schema.max_output, len(self.schema.outputs) + 1, 3) or least
        outputs = least if self.b.random.random() < 0.5 + self.plain / 2 else self.b.random.randint(least, most)
        if self.op == "Split":
            outputs = self.b.random.choice([1, 2, 3])
        while operands and not operands[-1]:
            operands.pop()
        self.b.add_all(self.op, operands, max(outputs, least), **attributes)

    def _variadic(self) -> bool:
        option = self.schema.inputs[0].option
        return bool(option == onnx.defs.OpSchema.FormalParameterOption.Variadic)

    # -- operands ----------------------------------------------------------------------------------------------------

    def type_of(self, formal: Any) -> str:
        """Return a type for an operand: the type of its parameter, chosen once."""
        text = str(formal.type_str)
        if text in self.bound:
            return self.bound[text]
        allowed = {t.removeprefix("tensor(").removesuffix(")") for t in formal.types}
        allowed = {{"float": "float32", "double": "float64"}.get(t, t) for t in allowed} & set(TYPES)
        if not allowed:
            raise Rejected("no type that numpy has")
        liked = [t for t in ("float32", "int64", "uint8") if t in allowed]
        found: str = self.b.random.choice(liked if liked and self.b.random.random() < 0.6 else sorted(allowed))
        self.bound[text] = found
        return found

    def operand(self, formal: Any, first: str = "") -> str:
        """Return a tensor for an input of the operator."""
        special = OPERANDS.get((self.op, formal.name)) or OPERANDS.get(("", formal.name))
        dtype = self.type_of(formal)
        b = self.b
        if special is not None and first:
            return special(self, first, dtype)
        if self.op in MADE:
            return b.const(np.asarray(b.random.choice(MADE[self.op]), dtype))
        if not first or b.random.random() < 0.25:
            try:
                if not first and b.random.random() < 0.5:
                    return b.pick(lambda t: self.op not in FIRST or b.rank(t) in map(len, FIRST[self.op]), dtype)
                return b.pick(lambda t: not first or b.rank(t) == b.rank(first), dtype)
            except Rejected:
                pass
        dims: list[int | str] = list(
            b.random.choice([["B", "L"], ["B", 3], [2, "L"], ["B", 4, "L"], ["B", 4, "H", "W"], ["N"], []])
        )
        if not first:
            dims = list(b.random.choice(FIRST[self.op])) if self.op in FIRST else dims
        if first:
            dims = self.like(first)
            form = b.random.random()
            if form < 0.3 * (1 - self.plain):
                return b.const(_numbers(b, [b.fixed(first, a) or 1 for a in range(b.rank(first))], dtype))
            if form < 0.6 * (1 - self.plain) and dims:
                return self.narrower(first, dtype, dims)
        return b.input(dims, dtype)

    def like(self, t: str) -> list[int | str]:
        """Return the dims of a tensor, with a new name for a size that no input has."""
        b, out = self.b, list[int | str]()
        for a, sizes in enumerate(b.shape(t)):
            named = [n for n in b.samples[0] if tuple(s[n] for s in b.samples) == sizes]
            fixed = b.fixed(t, a)
            out.append(fixed if fixed is not None else named[0] if named else 1)
        return out

    def narrower(self, first: str, dtype: str, dims: list[int | str]) -> str:
        """Return an operand of fewer axes, or with axes of one element, that broadcasts; in old opsets along ``axis``.
        """
        b = self.b
        if b.random.random() < 0.5:
            low = b.random.randrange(len(dims))
            dims = dims[low : b.random.randint(low, len(dims))]
        else:
            dims = [1 if b.random.random() < 0.5 else d for d in dims]
        return b.input(dims, dtype)

    # -- attributes --------------------------------------------------------------------------------------------------

    def attribute(self, name: str, a: Any, first: str) -> Any:
        """Return a value for an attribute, or None to omit it."""
        b, kind = self.b, str(a.type).rsplit(".", 1)[-1]
        rank = b.rank(first) if first else 2
        if kind == "INT":
            return self._int(name, rank)
        if kind == "FLOAT":
            return (
                b.random.choice([0.5, 1.0, 0.01, 2.0, -0.75, 0.25])
                if name != "epsilon"
                else b.random.choice([1e-5, 0.1])
            )
        if kind == "STRING":
            found = MODES.get(self.op) if name == "mode" else STRINGS.get(name)
            return b.random.choice(found) if found else None
        if kind == "INTS":
            return self._ints(name, rank)
        if kind == "FLOATS" and name == "scales":
            return [b.random.choice([1.0, 2.0]) for _ in range(rank)]
        if kind == "TENSOR":
            return numpy_helper.from_array(np.array([2.5], np.float32)) if self.op == "ConstantOfShape" else None
        return None

    def _int(self, name: str, rank: int) -> int | None:
        b = self.b
        if name in ("axis", "batch_axis", "stash_type") or name.endswith("_axis"):
            return 1 if name == "stash_type" else b.random.randrange(-rank if b.opset > 10 else 0, rank) if rank else 0
        if name in SWITCHES or name.endswith("_mode"):
            return b.random.randrange(2)
        if name in ("to", "dtype", "output_dtype"):
            return int(helper.np_dtype_to_tensor_dtype(np.dtype(b.random.choice(TYPES))))
        fixed: Mapping[str, tuple[int, ...]] = {
            "broadcast": (1,), "blocksize": (1, 2), "group": (1, 2), "num_groups": (1, 2), "k": (1, 2), "size": (1, 3),
            "p": (1, 2), "num_outputs": (1, 2, 3), "batch_dims": (0, 1), "spatial": (0, 1), "num_heads": (1, 2),
            "q_num_heads": (1, 2), "kv_num_heads": (1, 2), "start": (0, 1, -1), "end": (2, -1), "block_size": (0, 2),
            "storage_order": (0,), "detect_negative": (0, 1), "detect_positive": (0, 1), "is_test": (1,),
        }  # fmt: skip
        return b.random.choice(fixed[name]) if name in fixed else None

    def _ints(self, name: str, rank: int) -> list[int] | None:
        b, spatial = self.b, max(0, rank - 2)
        axes = b.random.sample(range(rank), b.random.randint(min(1, rank), rank)) if rank else []
        if name in ("axes", "scan_axes"):
            return [a - rank if b.opset > 10 and b.random.random() < 0.3 else a for a in axes]
        if name == "perm":
            return b.random.sample(range(rank), rank)
        if name in ("pads", "paddings"):
            return [b.random.choice([0, 0, 1, 2, -1]) for _ in range(2 * (rank if self.op == "Pad" else spatial))]
        if name in ("kernel_shape", "strides", "dilations"):
            return [b.random.choice([1, 2, 3] if name != "dilations" else [1, 1, 2]) for _ in range(spatial)]
        if name in ("starts", "ends"):
            return [b.random.choice([0, 1, -1] if name == "starts" else [2, -1, 100])] * 1
        if name == "consumed_inputs":
            return [0] * self.schema.min_input
        if name == "output_padding":
            return [b.random.randrange(2) for _ in range(spatial)]
        return None


def _numbers(b: Draft, shape: list[int], dtype: str) -> Any:
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return np.asarray(b.numbers.random(shape) < 0.5)
    if kind.kind in "iu":
        return np.asarray(b.numbers.integers(0 if kind.kind == "u" else -3, 5, shape), kind)
    return np.asarray(np.round(b.numbers.standard_normal(shape) * 8) / 8, kind)


def _axes(o: Operator, first: str, dtype: str) -> str:
    rank = o.b.rank(first)
    chosen = o.b.random.sample(range(rank), o.b.random.randint(min(1, rank), rank))
    return o.b.const(np.array([a - rank if o.b.random.random() < 0.3 else a for a in chosen], np.int64))


def _index(o: Operator, first: str, dtype: str) -> str:
    least = min([min(s) for s in o.b.shape(first)] or [1])
    dims: list[int | str] = o.like(first) if "Elements" in o.op else [o.b.random.choice([1, 2, 3])]
    if o.op in ("ScatterND", "GatherND"):
        dims = [2, 1]
    return o.b.input(dims, dtype if dtype in ("int64", "int32") else "int64", max(1, least))


def _scales(o: Operator, first: str, dtype: str) -> str:
    rank = o.b.rank(first)
    values = [o.b.random.choice([1.0, 2.0, 0.5, 1.5, 0.6, 0.75, 3.0]) for _ in range(rank)]
    if o.b.random.random() < 0.6 + 0.4 * o.plain:
        kept = max(0, rank - o.b.random.choice([1, 2]))
        values[:kept] = [1.0] * kept
    if o.op == "Resize" and o.b.opset > 10 and o.b.random.random() < 0.4:
        return ""
    return o.b.const(np.array(values, np.float32))


def _sizes(o: Operator, first: str, dtype: str) -> str:
    kept = [o.b.fixed(first, a) if o.b.random.random() < 0.4 else None for a in range(o.b.rank(first))]
    return o.b.ints(*(o.b.random.choice([1, 2, 5, 6, 12]) if s is None else s for s in kept))


def _weights(o: Operator, first: str, dtype: str) -> str:
    b, rank = o.b, o.b.rank(first)
    if rank < 2:
        raise Rejected("no channels")
    c = b.fixed(first, 1) or 1
    shape = [
        b.random.choice([1, 2, 4]),
        b.random.choice([c, c, 1]),
        *[b.random.choice([1, 2, 3]) for _ in range(rank - 2)],
    ]
    if o.op == "ConvTranspose":
        shape[:2] = [c, b.random.choice([1, 2])]
    return b.const(_numbers(b, shape, dtype))


def _vector(o: Operator, first: str, dtype: str) -> str:
    """Return one number for each channel."""
    c = (o.b.fixed(first, 1) if o.b.rank(first) > 1 else None) or 1
    a = _numbers(o.b, [c if o.b.random.random() < 0.9 else 1], dtype)
    return o.b.const(np.asarray(np.abs(a) + 0.5, dtype) if a.dtype.kind == "f" else a)


def _scalar(o: Operator, first: str, dtype: str) -> str:
    a = _numbers(o.b, [], dtype)
    if "scale" in o.op.lower() or np.dtype(dtype).kind == "f":
        a = np.asarray(abs(a) + 0.25, dtype)
    return o.b.const(a)


def _small(*values: int) -> Callable[[Operator, str, str], str]:
    return lambda o, first, dtype: o.b.const(
        np.array(o.b.random.choice(values), dtype if dtype in ("int32", "int64") else "int64")
    )


def _vector_of(count: int) -> Callable[[Operator, str, str], str]:
    return lambda o, first, dtype: o.b.const(_numbers(o.b, [count], dtype))


def _classes(o: Operator, first: str, dtype: str) -> str:
    """Return a class for each element without the axis of classes."""
    dims = o.like(first)
    if len(dims) < 2 or not isinstance(dims[1], int):
        raise Rejected("no classes")
    return o.b.input([dims[0], *dims[2:]], dtype, dims[1])


def _repeats(o: Operator, first: str, dtype: str) -> str:
    return o.b.ints(*[o.b.random.choice([0, 1, 1, 2, 3]) for _ in range(o.b.rank(first))])


def _pads(o: Operator, first: str, dtype: str) -> str:
    return o.b.ints(*[o.b.random.choice([0, 0, 1, 2, -1]) for _ in range(2 * o.b.rank(first))])


def _shape(o: Operator, first: str, dtype: str) -> str:
    b, rank = o.b, o.b.rank(first)
    forms = [[-1], [0] * max(0, rank - 1) + [-1], [-1] + [1] * b.random.randrange(3), [0] * rank]
    return b.ints(*(b.random.choice(forms) if o.op == "Reshape" else [b.random.choice([1, 2, 3]) for _ in range(rank)]))


def _bounds(o: Operator, first: str, dtype: str) -> str:
    return o.b.ints(o.b.random.choice([0, 1, 2, -1, -2, 5, 100, -100]))


def _none(o: Operator, first: str, dtype: str) -> str:
    return ""


def _product(o: Operator, first: str, dtype: str) -> str:
    """Return a factor for the rows or the columns of a matrix."""
    axes = [a for a in range(o.b.rank(first)) if o.b.fixed(first, a)]
    if not axes:
        raise Rejected("no fixed axis")
    k = o.b.fixed(first, axes[-1]) or 1
    shape = [k, o.b.random.choice([k, 1, 2, 5])]
    return o.b.const(_numbers(o.b, shape if o.b.random.random() < 0.8 else shape[::-1], dtype))


def _grid(o: Operator, first: str, dtype: str) -> str:
    """Return coordinates in an image; ONNX Runtime crashes on other shapes."""
    if o.b.rank(first) != 4:
        raise Rejected("no image")
    return o.b.input([o.like(first)[0], 3, 2, 2], dtype)


def _fixed(*values: int) -> Callable[[Operator, str, str], str]:
    return lambda o, first, dtype: o.b.ints(*values)


def _one_axis(o: Operator, first: str, dtype: str) -> str:
    return o.b.ints(o.b.random.randrange(max(1, o.b.rank(first))))


def _roi(o: Operator, first: str, dtype: str) -> str:
    return "" if o.b.opset > 12 else o.b.const(np.zeros(0, np.float32))


OPERANDS: Mapping[tuple[str, str], Callable[[Operator, str, str], str]] = {
    ("", "axes"): _axes, ("", "indices"): _index, ("", "scales"): _scales, ("", "sizes"): _sizes, ("", "W"): _weights,
    ("", "w"): _weights, ("", "repeats"): _repeats, ("", "pads"): _pads, ("", "shape"): _shape, ("", "K"): _fixed(1),
    ("", "starts"): _bounds, ("", "ends"): _bounds, ("", "steps"): _small(1, 2, -1), ("", "axis"): _small(0, 1, -1),
    ("", "k"): _small(0, 1, -1, 3), ("", "depth"): _small(3, 4), ("", "block_shape"): _fixed(2, 2), ("", "roi"): _roi,
    ("Conv", "B"): _none, ("ConvTranspose", "B"): _none, ("Slice", "axes"): _one_axis, ("GridSample", "grid"): _grid,
    ("BatchNormalization", "B"): _vector, ("InstanceNormalization", "B"): _vector, ("Gemm", "B"): _product,
    ("Gemm", "C"): _vector_of(1), ("MatMul", "B"): _product, ("MatMulInteger", "B"): _product,
    ("QLinearMatMul", "b"): _product, ("OneHot", "values"): _vector_of(2), ("", "target"): _classes,
    ("AffineGrid", "size"): _fixed(2, 3, 4, 5),
    **{("", n): _vector for n in ("scale", "mean", "var", "bias", "input_mean", "input_var", "slope")},
    **{("", n): _scalar for n in ("min", "max", "constant_value")},
    **{("", f"{x}_{n}"): _scalar for x in "xywab" for n in ("scale", "zero_point")},
}  # fmt: skip
IMAGES = (["B", 4, "H", "W"], ["B", 4, "H", 5], [1, 3, "H", "W"], [2, 1, 6, "W"], ["B", 2, "L"], [1, 2, "L", 3, 4])
MATRICES = (["B", 3], [3, 3], [4, "B"], [3, "L"])
FIRST: dict[str, Any] = {
    **dict.fromkeys(
        ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool",
         "GlobalLpPool", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "LRN", "Resize",
         "Upsample", "DepthToSpace", "SpaceToDepth", "GridSample", "ConvInteger", "QLinearConv", "DeformConv"), IMAGES),
    **dict.fromkeys(("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"), (*MATRICES, ["B", "L", 3])),
    "Det": ([3, 3], ["B", 2, 2], ["L", "L"]), "Attention": (["B", 2, "L", 4],), "EyeLike": MATRICES,
    "RotaryEmbedding": (["B", 2, "L", 4],), "AffineGrid": ([2, 2, 3],),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), (["B", 4], ["B", 3, "L"])),
}  # fmt: skip
"""Dims of the first operand; one of them is chosen."""
MADE: Mapping[str, Any] = {
    "ConstantOfShape": ([2, 3], [0, 4], [5]),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow"), (5, 8)),
}  # fmt: skip
"""First operands that are constants."""


@lru_cache(maxsize=1)
def versions() -> tuple[Schema, ...]:
    """Return every version of every operator."""
    return tuple(
        s for s in onnx.defs.get_all_schemas_with_history()
        if s.domain == "" and s.name not in LEFT_OUT and s.since_version <= MAX_OPSET and not s.deprecated
    )  # fmt: skip


def weight(schema: Schema) -> int:
    """Return the relative frequency of an operator: more attributes have more possible errors."""
    return 3 + min(len(schema.attributes), 5)


def subject(numbers: random.Random) -> tuple[Schema, int]:
    """Return a version of an operator, and an opset that has this version."""
    every = versions()
    schema = numbers.choices(every, list(map(weight, every)))[0]
    later = [s.since_version for s in onnx.defs.get_all_schemas_with_history()
             if s.domain == "" and s.name == schema.name and s.since_version > schema.since_version]  # fmt: skip
    newest = min([MAX_OPSET, *(v - 1 for v in later)])
    opset = schema.since_version if numbers.random() < 0.5 else numbers.randint(schema.since_version, newest)
    return schema, int(opset)


def operator(b: Draft) -> None:
    """Add one random operator of the model's opset, more often one that is new in it."""
    every = schemas(b.opset)
    new = [s for s in every if s.since_version == b.opset]
    if new and b.random.random() < 0.5:
        every = tuple(new)
    operator_of(b, b.random.choices(every, list(map(weight, every)))[0])


def operator_of(b: Draft, schema: Schema) -> None:
    """Add one random node of a version of an operator."""
    for k in range(TRIES):
        try:
            return Operator(b, schema, k / TRIES).add()
        except Rejected:
            pass
    raise Rejected(f"no {schema.name} that runs")
