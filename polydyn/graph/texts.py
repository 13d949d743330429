"""Models with strings and maps, as numeric graphs: the host encodes strings before a call and decodes results after it.

Each string in the model has a number, its position in a list of words; the empty string has 0. Other strings of a call
get the numbers after the last word, so equal strings have equal numbers. Operators that move or compare strings then
move or compare int64, and encoders of ai.onnx.ml have integer keys and values. A final ZipMap becomes an Identity, and
the host builds its maps. ``runtime/texts.py`` is the host's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polydyn.errors import ModelError, UnsupportedError
from polydyn.graph.bodies import OPSET
from polydyn.graph.importer import ImportedGraph, ModelInput
from polydyn.graph.operators.registry import OnnxNode
from polydyn.schedules.expr import Array

ML = "ai.onnx.ml::"
TEXT, CODE = "string", "int64"
MOVED_INPUTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((
        "Compress", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape",
        "ReverseSequence", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
        f"{ML}ArrayFeatureExtractor",
    ), (0,)),
    "OneHot": (2,), "Pad": (0, 2), "Where": (1, 2),
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND"), (0, 2)),
}  # fmt: skip
"""Maps operators that move elements to the inputs whose elements they move. Concat moves those of all inputs."""
READ_INPUTS = {"Equal": {0, 1}, "Shape": {0}, "Size": {0}}
"""Operators that read strings but do not return them, with the inputs that may be strings."""
BODIES = {"If": (-1, 0), "Loop": (0, 1), "Scan": (0, 0)}
"""Maps operators with bodies to the node input that is a body's first input (-1: none), and to the body output that is
the node's first output.
"""
LABELS = {
    f"{ML}LinearClassifier": "classlabels_ints", f"{ML}SVMClassifier": "classlabels_ints",
    f"{ML}TreeEnsembleClassifier": "classlabels_int64s",
}  # fmt: skip
"""Maps classifiers to their attribute of numeric labels."""


def without_texts(graph: ImportedGraph, built: Callable[[OnnxNode], bool], partly: bool) -> ImportedGraph:
    """Replace strings and maps in a graph by numbers. Its ``host`` describes the conversions by the host.

    ``built``: whether a node is supported; if not, it is rejected later. ``partly``: some nodes may stay unchanged, so
    a graph without string inputs is returned unchanged if a node cannot take numbers. Raises UnsupportedError that
    names the node for an unsupported operator on strings.
    """
    typed = [x.name for x in graph.inputs if x.dtype == TEXT]
    if not _has_texts(graph):
        return graph
    texts = _Texts(graph, built, partly)
    optional = {  # first, so that words have the same numbers if some of these are inputs
        n: (dims, texts.array(a) if a.dtype == object else a) for n, (dims, a) in graph.optional.items()
    }
    try:
        rewritten, string_outputs = texts.graph(graph, set())
    except UnsupportedError:
        if partly and not typed:
            return graph
        raise
    pairs = zip(graph.outputs, string_outputs, strict=True)
    kinds = {graph.copies.get(o, o): {"texts": 1} for o, is_string in pairs if is_string}
    outputs = kinds | {o: {"maps": keys} for o, keys in texts.maps.items()}
    rewritten = replace(rewritten, optional=optional)
    typed += [n for n, (_, a) in graph.optional.items() if a.dtype == object]
    host = {"words": list(texts.words), "inputs": typed, "outputs": outputs} if typed or outputs else {}
    return replace(rewritten, host=host)


def _has_texts(graph: ImportedGraph) -> bool:
    """Check whether a graph or one inside it has string inputs or constants, or an operator with strings or maps."""
    if any(x.dtype == TEXT for x in graph.inputs) or any(a.dtype == object for a in graph.constants.values()):
        return True
    values = [v for n in graph.nodes for v in n.attributes.values() if n.op.startswith(ML)]
    inside = [v for n in graph.nodes for v in n.attributes.values() if isinstance(v, ImportedGraph)]
    return any(n.op == f"{ML}ZipMap" for n in graph.nodes) or any(map(_is_text, values)) or any(map(_has_texts, inside))


def _is_text(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype == object)
    return isinstance(value, tuple) and bool(value) and all(isinstance(x, str) for x in value)


def text_of(x: Any) -> str:
    """Return a string of a model. Raises ModelError if it is not UTF-8."""
    try:
        return x.decode() if isinstance(x, bytes) else str(x)
    except UnicodeDecodeError as e:
        raise ModelError(f"the text {x!r} is not UTF-8", remedy="export the model again") from e


class _Texts:
    """Numbers of strings, and the rewriting of one model's graphs."""

    def __init__(self, graph: ImportedGraph, built: Callable[[OnnxNode], bool], partly: bool) -> None:
        self.words: dict[str, int] = {"": 0}
        self.maps: dict[str, list[Any]] = {}
        self.built, self.partly = built, partly
        self.outputs = {o: graph.copies.get(o, o) for o in graph.outputs}
        self.used_names = {o for n in graph.nodes for o in n.outputs} | graph.constants.keys()

    def codes(self, texts: Iterable[Any]) -> list[int]:
        """Return the numbers of strings, new ones for new strings."""
        return [self.words.setdefault(text_of(t), len(self.words)) for t in texts]

    def array(self, a: Array) -> Array:
        """Convert an array of strings to numbers."""
        return np.array(self.codes(a.reshape(-1)), np.int64).reshape(a.shape)

    def graph(
        self, graph: ImportedGraph, outer: set[str], formals: frozenset[str] = frozenset()
    ) -> tuple[ImportedGraph, list[bool]]:  # fmt: skip
        """Return the rewritten graph, and for each output whether it holds strings. ``outer``: string tensors of outer
        graphs.
        """
        texts = set(outer) | formals
        texts |= {x for x, a in graph.constants.items() if a.dtype == object}
        texts |= {x.name for x in graph.inputs if x.dtype == TEXT}
        constants = {x: self.array(a) if a.dtype == object else a for x, a in graph.constants.items()}
        nodes: list[OnnxNode] = []
        for n in graph.nodes:
            nodes += self.node(n, texts, constants)
        inputs = tuple(replace(x, dtype=CODE) if x.name in texts else x for x in graph.inputs)
        declared = {x: _coded(i) if x in texts else i for x, i in graph.declared.items()}
        rewritten = replace(graph, nodes=tuple(nodes), inputs=inputs, constants=constants, declared=declared)
        return rewritten, [o in texts for o in graph.outputs]

    def node(self, n: OnnxNode, texts: set[str], constants: dict[str, Array]) -> list[OnnxNode]:
        """Return the nodes that replace a node. Its string results are added to ``texts``."""
        read = {k for k, x in enumerate(n.inputs) if x in texts}
        if n.op in BODIES:
            return [self.with_bodies(n, texts)]
        if n.op in CODED:
            replacement, gives = CODED[n.op](self, n, bool(read), constants)
            texts |= {o for o in n.outputs[:1] if gives}
            return replacement
        if not read:
            return [n]
        moved = tuple(range(len(n.inputs))) if n.op == "Concat" else MOVED_INPUTS.get(n.op, ())
        movable = {k for k in moved if k < len(n.inputs) and n.inputs[k]}
        if read == movable:
            texts |= {o for o in n.outputs if o}
            return [n]
        if read <= READ_INPUTS.get(n.op, set()):
            return [n]
        if self.built(n) or self.partly:
            raise UnsupportedError(
                f"{n.op} of texts is not supported", node=n.name, tensor=n.inputs[min(read)],
                remedy="encode the texts before the model",
            )  # fmt: skip
        return [n]

    def cast(self, n: OnnxNode, text: bool, constants: Mapping[str, Array]) -> tuple[list[OnnxNode], bool]:
        """Turn a cast of strings to strings into an Identity."""
        if n.attribute("to") != STRING_CODE and not text:
            return [n], False
        if n.attribute("to") != STRING_CODE or not text:
            way = "of texts to numbers" if text else "of numbers to texts (STRING)"
            raise UnsupportedError(f"Cast {way} is not supported", node=n.name, remedy="convert them around the model")
        return [replace(n, op="Identity", attributes={})], True

    def with_bodies(self, n: OnnxNode, texts: set[str]) -> OnnxNode:
        """Rewrite the bodies of a node."""
        first, offset = BODIES[n.op]
        attributes, results = dict(n.attributes), list[list[bool]]()
        for key, body in n.attributes.items():
            if not isinstance(body, ImportedGraph):
                continue
            pairs = zip(body.inputs, n.inputs[first:] if first >= 0 else (), strict=False)
            formals = frozenset(x.name for x, given in pairs if given in texts)
            attributes[key], found = self.graph(body, texts, formals)
            results.append(found[offset:])
        if any(r != results[0] for r in results):
            raise UnsupportedError(f"{n.op} with texts in one branch only is not supported", node=n.name)
        texts |= {o for o, text in zip(n.outputs, results[0] if results else (), strict=False) if text and o}
        return replace(n, attributes=attributes)

    def fresh_name(self, name: str) -> str:
        """Return a name that no tensor has."""
        while name in self.used_names:
            name += "'"
        self.used_names.add(name)
        return name

    # -- operators of ai.onnx.ml -------------------------------------------------------------------------------------

    def label_encoder(self, n: OnnxNode, text: bool, constants: Mapping[str, Array]) -> tuple[list[OnnxNode], bool]:
        """Convert string keys and values to integers. The classes of the first version become keys and values."""
        a, opset = dict(n.attributes), n.opset
        classes = a.pop("classes_strings", None)
        if classes is not None or opset < 2:
            return self.encoded(n, a | _both_ways(classes or (), range(len(classes or ())), text), max(opset, 2), text)
        return self.encoded(n, a, opset, text)

    def encoded(self, n: OnnxNode, a: dict[str, Any], opset: int, text: bool) -> tuple[list[OnnxNode], bool]:
        """Return a LabelEncoder of integers, and whether its results are strings."""
        is_string = {}
        for part in ("keys", "values"):
            plain, tensor = a.pop(f"{part}_strings", None), a.get(f"{part}_tensor")
            if tensor is not None and _is_text(tensor):
                plain = a.pop(f"{part}_tensor").reshape(-1)
            is_string[part] = plain is not None and len(plain) > 0
            if is_string[part]:
                a[f"{part}_int64s"] = tuple(self.codes(plain))
        if is_string["keys"] != text:
            raise ModelError(f"{n.op} {n.name}: keys and input differ in type", node=n.name, rule=f"{n.op} of ONNX")
        default, tensor = a.pop("default_string", "_Unused"), a.get("default_tensor")
        if tensor is not None and _is_text(tensor):
            default = a.pop("default_tensor").reshape(-1)[0]
        if is_string["values"]:
            (a["default_int64"],) = self.codes([default])
        op = f"{ML}LabelEncoder"
        return [replace(n, op=op, attributes=a, opset=opset)], is_string["values"]

    def category_mapper(self, n: OnnxNode, text: bool, constants: Mapping[str, Array]) -> tuple[list[OnnxNode], bool]:
        """Return a LabelEncoder in the direction that the input's type requires."""
        a = dict(n.attributes)
        strings, numbers = a.pop("cats_strings", ()), a.pop("cats_int64s", ())
        if len(strings) != len(numbers):
            raise ModelError(f"{n.name}: cats_strings and cats_int64s differ in number", node=n.name, rule=n.op)
        return self.encoded(n, a | _both_ways(strings, numbers, text), 2, text)

    def one_hot_encoder(self, n: OnnxNode, text: bool, constants: Mapping[str, Array]) -> tuple[list[OnnxNode], bool]:
        """Convert string categories to integers."""
        strings = n.attribute("cats_strings", ())
        if bool(strings) != text:
            raise ModelError(f"{n.op} {n.name}: categories and input differ in type", node=n.name, rule=n.op)
        a = {k: v for k, v in n.attributes.items() if k != "cats_strings"}
        return [replace(n, attributes=a | ({"cats_int64s": tuple(self.codes(strings))} if text else {}))], False

    def classifier(self, n: OnnxNode, text: bool, constants: dict[str, Array]) -> tuple[list[OnnxNode], bool]:
        """Return a classifier whose labels are class numbers, and a Gather of the labels."""
        labels = n.attribute("classlabels_strings", ())
        if not labels:
            return [n], False
        if len(labels) < 2:
            raise UnsupportedError(f"{n.op} with a text for a single class is not supported", node=n.name)
        a = {k: v for k, v in n.attributes.items() if k != "classlabels_strings"}
        a[LABELS[n.op]] = tuple(range(len(labels)))
        label = n.outputs[0]
        if not label:
            return [replace(n, attributes=a)], False
        number, table = self.fresh_name(f"number of {label}"), self.fresh_name(f"classes of {label}")
        constants[table] = np.array(self.codes(labels), np.int64)
        gather = OnnxNode(f"{n.name} labels", "Gather", (table, number), (label,), {"axis": 0}, OPSET)
        return [replace(n, attributes=a, outputs=(number, *n.outputs[1:])), gather], True

    def zip_map(self, n: OnnxNode, text: bool, constants: Mapping[str, Array]) -> tuple[list[OnnxNode], bool]:
        """Return an Identity. Maps are built after a call, so they must be an output of the model."""
        keys = n.attribute("classlabels_strings", ()) or n.attribute("classlabels_int64s", ())
        (output,) = n.outputs
        if output not in self.outputs:
            raise UnsupportedError(
                f"{n.op} {n.name} gives maps that are not an output of the model", node=n.name, tensor=output,
                remedy="export the model with zipmap=False",
            )  # fmt: skip
        self.maps[self.outputs[output]] = [text_of(k) if isinstance(k, (str, bytes)) else int(k) for k in keys]
        return [OnnxNode(n.name, "Identity", n.inputs, n.outputs, {}, OPSET)], False


CODED: Mapping[str, Callable[..., tuple[list[OnnxNode], bool]]] = {
    f"{ML}CategoryMapper": _Texts.category_mapper, f"{ML}LabelEncoder": _Texts.label_encoder,
    f"{ML}OneHotEncoder": _Texts.one_hot_encoder, f"{ML}ZipMap": _Texts.zip_map,
    "Cast": _Texts.cast, **dict.fromkeys(LABELS, _Texts.classifier),
}  # fmt: skip
STRING_CODE = 8
"""``TensorProto.STRING``."""


def _both_ways(strings: Sequence[str], numbers: Sequence[int], text: bool) -> dict[str, Any]:
    """Return keys and values of an encoder for its direction. Of equal keys the last one counts, so it is moved to the
    front.
    """
    pair = tuple(strings)[::-1], tuple(numbers)[::-1]
    names = ("keys_strings", "values_int64s") if text else ("values_strings", "keys_int64s")
    return dict(zip(names, pair, strict=True))


def _coded(x: ModelInput) -> ModelInput:
    return replace(x, dtype=CODE)
