"""Operators that torch's modules call in place of their parts when they are in inference mode (fast paths)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from polydyn.torch_backend.translations.common import translate

QUERIES, KEYS = 0, 1
"""Mask types: a mask of (queries, keys), and one of (batch, keys). Other masks have (batch, heads, queries, keys)."""


@translate("_transformer_encoder_layer_fwd")
def encoder_layer(
    src: torch.Tensor, width: int, heads: int, qkv_weight: Any, qkv_bias: Any, projection: Any, projection_bias: Any,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any,
    norm_bias_2: Any, weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any, mask: Any = None, mask_type: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``nn.TransformerEncoderLayer``: attention and two linear layers, each with a sum and a LayerNorm."""

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (width,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (width,), norm_weight_2, norm_bias_2, eps)

    def attend(x: torch.Tensor) -> torch.Tensor:
        mixed = _attention(functional.linear(x, qkv_weight, qkv_bias), heads, mask, mask_type)
        return functional.linear(mixed, projection, projection_bias)

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, weight_1, bias_1)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, weight_2, bias_2)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


def _attention(qkv: torch.Tensor, heads: int, mask: Any, mask_type: Any) -> torch.Tensor:
    """Return self-attention of ``qkv`` (batch, rows, 3 * width). Every nonzero of a mask hides a key, as in eager
    torch; a row without a key is NaN."""
    batch, rows, three = qkv.shape
    size = three // 3 // heads
    query, key, value = qkv.view(batch, rows, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (query * (1 / math.sqrt(size))) @ key.transpose(-1, -2)
    if mask is not None:
        if mask_type == KEYS:
            mask = mask.view(batch, 1, 1, rows)
        elif mask_type == QUERIES:
            mask = mask.view(1, 1, rows, rows)
        scores = scores.masked_fill(mask.to(torch.bool), -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, rows, heads * size)
