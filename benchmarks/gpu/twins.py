"""Whole models in torch: the weights of the packed programs, with torch's own attention and layers.

Sizes and weights need only numpy, so that both sides have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.weights import weight

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """A transformer: ``causal`` (GPT-2: norms come first, one product gives q, k and v) or not (BERT)."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    causal: bool

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.width // self.heads


CONFIGS = {
    "bert_base": Config(12, 768, 12, 30522, 512, False), "gpt2": Config(12, 768, 12, 50257, 1024, True),
}  # fmt: skip


def parameters(c: Config, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return every weight by name; matrices are [k, n]."""
    w, n = c.width, 4 * c.width
    shapes: dict[str, tuple[int, ...]] = {"words": (c.vocabulary, w), "positions": (c.positions, w)}
    found = {name: weight(name, shape, 0.5, dtype) for name, shape in shapes.items()}
    norms = ["first" if not c.causal else "last"]
    for i in range(c.layers):
        for name, k, m in (("q", w, w), ("k", w, w), ("v", w, w), ("o", w, w), ("up", w, n), ("down", n, w)):
            found[f"{i}.{name}.w"] = weight(f"{i}.{name}.w", (k, m), k**-0.5, dtype)
            found[f"{i}.{name}.b"] = weight(f"{i}.{name}.b", (m,), 0.1, dtype)
        norms += [f"{i}.a", f"{i}.b"]
    for name in norms:
        found[f"{name}.s"] = (1 + weight(f"{name}.s", (w,), 0.1, "float32")).astype(dtype)
        found[f"{name}.t"] = weight(f"{name}.t", (w,), 0.1, dtype)
    return found


def inputs(c: Config, batch: int, length: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return token ids, and for BERT the mask of valid tokens (a quarter is padding)."""
    rng = np.random.default_rng(batch * 1009 + length)
    given = {"ids": rng.integers(0, c.vocabulary, (batch, length))}
    if not c.causal:
        there = np.maximum(1, length - rng.integers(0, length // 4 + 1, batch))
        given["mask"] = (np.arange(length) < there[:, None]).astype(np.int64)
    return given


def function(torch: Any, c: Config, w: Arrays) -> Callable[..., Any]:
    """Build the model over (ids[, mask]) in torch; ``w``: its tensors."""
    f = torch.nn.functional
    transposed = {n[:-2]: t.T.contiguous() for n, t in w.items() if n.endswith(".w")}  # torch's layout
    joined = {i: torch.cat([transposed[f"{i}.{x}"] for x in "qkv"]) for i in range(c.layers)}
    bias = {i: torch.cat([w[f"{i}.{x}.b"] for x in "qkv"]) for i in range(c.layers)}

    def norm(x: Any, name: str) -> Any:
        return f.layer_norm(x, x.shape[-1:], w[f"{name}.s"], w[f"{name}.t"], 1e-5)

    def layer(x: Any, name: str) -> Any:
        return f.linear(x, transposed[name], w[f"{name}.b"])

    def attention(x: Any, i: int, mask: Any) -> Any:
        parts = f.linear(x, joined[i], bias[i]).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (c.heads, c.head)).transpose(1, 2) for t in parts)
        y = f.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=c.causal)
        return layer(y.transpose(1, 2).flatten(2), f"{i}.o")

    def feed(x: Any, i: int) -> Any:
        return layer(f.gelu(layer(x, f"{i}.up"), approximate="tanh" if c.causal else "none"), f"{i}.down")

    def run(ids: Any, mask: Any = None) -> Any:
        x = w["words"][ids] + w["positions"][: ids.shape[1]]
        if c.causal:
            for i in range(c.layers):
                x = x + attention(norm(x, f"{i}.a"), i, None)
                x = x + feed(norm(x, f"{i}.b"), i)
            return norm(x, "last")
        hidden = mask[:, None, None, :].bool()
        x = norm(x, "first")
        for i in range(c.layers):
            x = norm(x + attention(x, i, hidden), f"{i}.a")
            x = norm(x + feed(x, i), f"{i}.b")
        return x

    return run
