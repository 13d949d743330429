"""BERT and GPT-2 of full size as ONNX graphs with the weights of ``twins``, in the form that exporters write."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.gpu.twins import CONFIGS, Config, parameters

TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}


class _Graph:
    """Nodes and constants of a graph under construction."""

    def __init__(self, c: Config, dtype: str) -> None:
        self.config, self.dtype = c, np.dtype(dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = dict(parameters(c, dtype))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return its output's name."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def number(self, value: Any, dtype: Any = None) -> str:
        """Add a constant and return its name."""
        array = np.asarray(value, dtype or self.dtype)
        name = f"c_{array.dtype}_{str(array.tolist()).replace(' ', '')}"
        self.constants[name] = array
        return name

    def whole(self, value: Any) -> str:
        """Add a constant of integers."""
        return self.number(value, np.int64)

    def layer(self, x: str, name: str) -> str:
        """Add a dense layer."""
        return self.op("Add", self.op("MatMul", x, f"{name}.w"), f"{name}.b")

    def norm(self, x: str, name: str) -> str:
        """Add a layer norm."""
        return self.op("LayerNormalization", x, f"{name}.s", f"{name}.t", axis=-1, epsilon=1e-5)

    def gelu(self, x: str) -> str:
        """Add a gelu with erf (BERT), or with tanh (GPT-2)."""
        if not self.config.causal:
            e = self.op("Erf", self.op("Div", x, self.number(2**0.5)))
        else:
            cube = self.op("Mul", self.op("Mul", self.op("Mul", x, x), x), self.number(0.044715))
            e = self.op("Tanh", self.op("Mul", self.op("Add", x, cube), self.number((2 / np.pi) ** 0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", e, self.number(1))), self.number(0.5))

    def heads(self, x: str, *perm: int) -> str:
        """Reshape [B, L, width] to [B, L, heads, size] and transpose it."""
        c = self.config
        return self.op("Transpose", self.op("Reshape", x, self.whole([0, 0, c.heads, c.head])), perm=list(perm))

    def attention(self, x: str, i: int, mask: str) -> str:
        """Add self-attention and its last layer."""
        q, v = (self.heads(self.layer(x, f"{i}.{n}"), 0, 2, 1, 3) for n in "qv")
        k = self.heads(self.layer(x, f"{i}.k"), 0, 2, 3, 1)
        score = self.op("Mul", self.op("MatMul", q, k), self.number(self.config.head**-0.5))
        if self.config.causal:
            low = self.number(np.finfo(self.dtype).min)
            score = self.op("Where", mask, score, low)
        else:
            score = self.op("Add", score, mask)
        y = self.op("Transpose", self.op("MatMul", self.op("Softmax", score, axis=-1), v), perm=[0, 2, 1, 3])
        return self.layer(self.op("Reshape", y, self.whole([0, 0, self.config.width])), f"{i}.o")

    def feed(self, x: str, i: int) -> str:
        """Add both dense layers of a block."""
        return self.layer(self.gelu(self.layer(x, f"{i}.up")), f"{i}.down")

    def mask(self) -> str:
        """Add the mask of keys (added to scores), or the causal mask."""
        if not self.config.causal:
            there = self.op("Cast", self.op("Unsqueeze", "mask", self.whole([1, 2])), to=TYPES[str(self.dtype)])
            return self.op("Mul", self.op("Sub", self.number(1), there), self.number(np.finfo(self.dtype).min))
        length = self.op("Squeeze", self.op("Shape", "ids", start=1, end=2))
        at = self.op("Range", self.whole(0), length, self.whole(1))
        rows, columns = (self.op("Unsqueeze", at, self.whole([axis])) for axis in (1, 0))
        return self.op("LessOrEqual", columns, rows)

    def embedded(self) -> str:
        """Add token and position embeddings."""
        size = self.op("Shape", "ids", start=1, end=2)
        places = self.op("Slice", "positions", self.whole([0]), size, self.whole([0]))
        return self.op("Add", self.op("Gather", "words", "ids", axis=0), places)


def build(name: str, dtype: str) -> onnx.ModelProto:
    """Build a model of ``CONFIGS`` over ids [B, L] (and mask [B, L]); its output is ``y``."""
    c = CONFIGS[name]
    g = _Graph(c, dtype)
    x, mask = g.embedded(), g.mask()
    if not c.causal:
        x = g.norm(x, "first")
    for i in range(c.layers):
        if c.causal:
            x = g.op("Add", x, g.attention(g.norm(x, f"{i}.a"), i, mask))
            x = g.op("Add", x, g.feed(g.norm(x, f"{i}.b"), i))
        else:
            x = g.norm(g.op("Add", x, g.attention(x, i, mask)), f"{i}.a")
            x = g.norm(g.op("Add", x, g.feed(x, i)), f"{i}.b")
    if c.causal:
        x = g.norm(x, "last")
    g.nodes.append(helper.make_node("Identity", [x], ["y"], name="y"))
    names = ["ids"] if c.causal else ["ids", "mask"]
    graph = helper.make_graph(
        g.nodes, name, [helper.make_tensor_value_info(n, TensorProto.INT64, ["B", "L"]) for n in names],
        [helper.make_tensor_value_info("y", TYPES[dtype], ["B", "L", c.width])],
        [numpy_helper.from_array(a, n) for n, a in g.constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
