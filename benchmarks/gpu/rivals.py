"""Computations of torch that correspond to packed cases, and their constants; selected by the case's ``rival``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu import weights

Rival = tuple[Callable[..., Any], list[Any]]
"""A function for torch that takes a case's inputs, in order, and then the constants, which come with it."""


def rival(torch: Any, case: Mapping[str, Any]) -> Rival:
    """Return torch's best form of the computation. KeyError: there is none of this name."""
    name, f = case["rival"], torch.nn.functional
    if name.startswith("layer_"):
        return _layer(torch, name.removeprefix("layer_"), *_sizes(case))
    if name.startswith("attention_"):
        return _attention(f, name.removeprefix("attention_")), []
    if name.startswith("conv_"):
        return _convolution(torch, case, int(name.removeprefix("conv_")))
    if name == "bytes":
        w = torch.from_numpy(weights.whole(*_sizes(case))).cuda()
        return lambda x, w: torch._int_mm(x, w.t()), [w.t().contiguous()]  # column-major, as required by its kernels
    if name == "float8":
        return _float8(torch, *_sizes(case))
    plain: dict[str, Callable[..., Any]] = {
        "matmul": lambda a, b: a @ b,
        "matmul_nt": lambda a, b: a @ b.T,
        "softmax": lambda x: torch.softmax(x, -1),
        "layernorm": lambda x, s, b: f.layer_norm(x, x.shape[-1:], s, b),
        "column_sum": lambda x: x.sum(0),
        "add": lambda x, z: x + z,
        "gelu": f.gelu,
    }
    return plain[name], []


def _sizes(case: Mapping[str, Any]) -> tuple[int, int]:
    """Return K and N, the last numbers of a case's name."""
    k, n = case["name"].partition("~")[0].rsplit("_", 1)[1].split("x")
    return int(k), int(n)


def _layer(torch: Any, after: str, k: int, n: int) -> Rival:
    f = torch.nn.functional
    given = {name: torch.from_numpy(a).cuda() for name, a in weights.dense(k, n).items()}
    w, c = given["w"].T.contiguous(), given["c"]
    if after == "plain":
        return f.linear, [w]
    functions: dict[str, Callable[..., Any]] = {
        "bias": f.linear,
        "relu": lambda x, w, c: f.relu(f.linear(x, w, c)),
        "gelu": lambda x, w, c: f.gelu(f.linear(x, w, c)),
        "residual": lambda x, r, w, c: f.linear(x, w, c) + r,
    }
    return functions[after], [w, c]


def _float8(torch: Any, k: int, n: int) -> Rival:
    """Return the computation of a framework: quantize to float8, then one product with both scales."""
    kind, scale = torch.float8_e4m3fn, weights.FLOAT8_SCALE
    w = (torch.from_numpy(weights.scaled("w", k, n)).cuda() / scale).to(kind).T.contiguous().T  # column-major
    one = torch.full((), scale).cuda()
    product = torch._scaled_mm

    def layer(x: Any, w: Any) -> Any:
        return product((x / scale).clamp(-448, 448).to(kind), w, scale_a=one, scale_b=one, out_dtype=torch.float16)

    return layer, [w]


def _attention(f: Any, mask: str) -> Callable[..., Any]:
    if mask == "keys":
        return lambda q, k, v, m: f.scaled_dot_product_attention(q, k, v, attn_mask=m)
    return lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")


def _convolution(torch: Any, case: Mapping[str, Any], stride: int) -> Rival:
    channels, filters, window, _ = case["name"].partition("~")[0].split("_")[1:]
    size = int(window.split("x")[0])
    w = torch.from_numpy(weights.convolution(int(channels), int(filters), size)).cuda()
    torch.backends.cudnn.benchmark = True
    return lambda x, w: torch.nn.functional.conv2d(x, w, stride=stride, padding=size // 2), [w]
