"""A decoder with 4-bit weights in the style of the Llama family: grouped queries, rotation, gated layers.

Weights are random from a fixed seed, written as MatMulNBits; the caller sets the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from polydyn.schedules.expr import Array
from polydyn.testing.models import model

MICROSOFT = "com.microsoft"
MAX_POSITIONS = 2048
"""Number of positions in the table of rotations."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder; the defaults have 0.5 billion parameters with 24 layers and a head."""

    layers: int
    width: int = 896
    heads: int = 14
    pairs: int = 2
    inner: int = 4864
    block: int = 32

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.width // self.heads

    @property
    def weights(self) -> int:
        """4-bit weights per layer."""
        return self.width * (2 * self.width + 2 * self.pairs * self.head + 3 * self.inner)


def decoder_of_nibbles(name: str, sizes: Sizes, accuracy: int = 0) -> onnx.ModelProto:
    """Build y [B, L, width] from x of that shape and caches k0, v0, ... [B, pairs, P, head], whose outputs are longer.

    ``accuracy``: ONNX Runtime's level, 4 for sums of bytes. All weights are initializers of the model.
    """
    return _Decoder(sizes, accuracy).model(name)


class _Decoder:
    def __init__(self, sizes: Sizes, accuracy: int) -> None:
        self.sizes, self.accuracy = sizes, accuracy
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def model(self, name: str) -> onnx.ModelProto:
        """Build the whole model."""
        s = self.sizes
        self._lengths()
        at = "x"
        for i in range(s.layers):
            normed = self.norm(at, f"{i}a")
            q, k, v = (
                self.linear(normed, n, s.width, f"{i}{what}")
                for what, n in (("q", s.width), ("k", s.pairs * s.head), ("v", s.pairs * s.head))
            )
            given = [q, k, v, f"k{i}", f"v{i}", "last", "total", "cos", "sin"]
            outputs = [f"attended{i}", f"next_k{i}", f"next_v{i}"]
            self.node("GroupQueryAttention", given, outputs, MICROSOFT,
                      num_heads=s.heads, kv_num_heads=s.pairs, do_rotary=1)  # fmt: skip
            at = self.op("Add", at, self.linear(outputs[0], s.width, s.width, f"{i}o"))
            normed = self.norm(at, f"{i}b")
            gate, up = (self.linear(normed, s.inner, s.width, f"{i}{what}") for what in ("g", "u"))
            gated = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
            at = self.op("Add", at, self.linear(gated, s.width, s.inner, f"{i}d"))
        self.node("Identity", [at], ["y"])
        inputs: dict[str, Any] = {"x": ["B", "L", s.width]}
        caches = [f"{c}{i}" for i in range(s.layers) for c in "kv"]
        made = model(name, self.nodes, inputs | {c: ["B", s.pairs, "P", s.head] for c in caches}, self.constants)
        for c in caches:
            made.graph.output.append(helper.make_tensor_value_info(f"next_{c}", TensorProto.FLOAT, None))
        return made

    def _lengths(self) -> None:
        """Add total tokens of all samples, and of each sample minus one; cosines and sines of rotations."""
        self.constants["one"] = np.array([1])
        new, past = self.op("Shape", "x", start=1, end=2), self.op("Shape", "k0", start=2, end=3)
        whole = self.op("Add", new, past)
        self.node("Cast", [whole], ["total"], to=TensorProto.INT32)
        samples = self.op("Shape", "x", start=0, end=1)
        last = self.op("Expand", self.op("Sub", whole, "one"), samples)
        self.node("Cast", [last], ["last"], to=TensorProto.INT32)
        half = self.sizes.head // 2
        angles = np.arange(MAX_POSITIONS)[:, None] / 10000.0 ** (np.arange(half) / half)
        self.constants |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}

    def node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> None:
        """Add a node."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; return its name."""
        name = f"h{len(self.nodes)}"
        self.node(kind, list(inputs), [name], **attributes)
        return name

    def norm(self, x: str, name: str) -> str:
        """Add a norm by the root of the mean square."""
        self.constants[f"scale_{name}"] = (1 + self.random.standard_normal(self.sizes.width) / 10).astype(np.float32)
        return self.op("SimplifiedLayerNormalization", x, f"scale_{name}", axis=-1, epsilon=1e-6)

    def linear(self, x: str, n: int, k: int, name: str) -> str:
        """Add x @ a 4-bit constant [k, n]; results are half as large as x, so that errors do not grow over the layers.
        """
        blocks, r = k // self.sizes.block, self.random
        self.constants[f"w_{name}"] = r.integers(0, 256, (n, blocks, self.sizes.block // 2)).astype(np.uint8)
        self.constants[f"s_{name}"] = ((r.random((n, blocks)) + 0.5) / 10 / np.sqrt(k)).astype(np.float32)
        out = f"y_{name}"
        self.node("MatMulNBits", [x, f"w_{name}", f"s_{name}"], [out], MICROSOFT, K=k, N=n, bits=4,
                  block_size=self.sizes.block, accuracy_level=self.accuracy)  # fmt: skip
        return out
