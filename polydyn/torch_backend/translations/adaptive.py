"""Windows of which every output has one of its own: adaptive pools, interpolation with antialiasing.

torch's rules choose by the sizes of the example, so that other sizes would need other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polydyn.errors import UnsupportedError
from polydyn.torch_backend.translations.common import computed_type, translate


def _inside(size: Any, output: Any, like: torch.Tensor) -> torch.Tensor:
    """Return whether an element (the last axis) is in the window of an output (the axis before)."""
    at, k = (torch.arange(n, device=like.device) for n in (size, output))
    first, behind = k * size // output, ((k + 1) * size + output - 1) // output
    return (at >= first[:, None]) & (at < behind[:, None])


def _fixed(x: torch.Tensor, rank: int) -> bool:
    """Return whether the last axes have sizes that are numbers."""
    return all(isinstance(n, int) for n in x.shape[-rank:])


def _along(x: torch.Tensor, sizes: Sequence[Any], axis: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
    """Apply a function of (tensor, size of the result) along each of the last axes."""
    for k, output in enumerate(sizes):
        x = axis(x.movedim(k - len(sizes), -1), output).movedim(-1, k - len(sizes))
    return x


def _mean(x: torch.Tensor, output: Any) -> torch.Tensor:
    if isinstance(output, int) and output == 1:
        return x.mean(-1, keepdim=True)
    inside = _inside(x.shape[-1], output, x)
    return torch.where(inside, x.unsqueeze(-2), 0).sum(-1) / inside.sum(-1).to(x.dtype)


@translate("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_mean(x: torch.Tensor, output_size: Sequence[Any]) -> Any:
    """Compute means of windows that divide the last axes."""
    if _fixed(x, len(output_size)) and len(output_size) == 2:
        return torch._decomp.decompositions.adaptive_avg_pool2d(x, tuple(output_size))
    return _along(x.to(computed_type(x)), output_size, _mean).to(x.dtype)


def _greatest(x: torch.Tensor, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each window of the last axis, and its first position."""
    inside = _inside(x.shape[-1], output, x)
    spread = torch.where(inside, x.unsqueeze(-2), -torch.inf)
    greatest = spread.amax(-1)
    first = inside & ((spread == greatest.unsqueeze(-1)) | torch.isnan(spread))
    return greatest, torch.argmax(first.to(torch.int32), -1)


@translate("adaptive_max_pool2d")
def adaptive_max(x: torch.Tensor, output_size: Sequence[int]) -> Any:
    """Compute maxima of windows that divide the last two axes, and their positions in the image."""
    made: Any = NotImplemented
    if _fixed(x, 2) or tuple(output_size) == (1, 1):
        made = torch._decomp.decomposition_table[torch.ops.aten.adaptive_max_pool2d.default](x, tuple(output_size))
    if made is not NotImplemented:
        return made
    values, columns = _greatest(x, output_size[1])
    values, rows = _greatest(values.mT, output_size[0])
    places = torch.gather(columns.mT, -1, rows) + rows * x.shape[-1]
    return values.mT, places.mT


@translate("_upsample_bilinear2d_aa")
def antialiased_linear(x: torch.Tensor, *geometry: Any) -> torch.Tensor:
    """Interpolate linearly, over wider windows where the image shrinks."""
    return _antialiased(x, "linear", 0.0, *geometry)


@translate("_upsample_bicubic2d_aa")
def antialiased_cubic(x: torch.Tensor, *geometry: Any) -> torch.Tensor:
    """Interpolate by cubic polynomials, over wider windows where the image shrinks."""
    return _antialiased(x, "cubic", -0.5, *geometry)


def _antialiased(
    x: torch.Tensor, mode: str, cubic: float, output_size: Sequence[Any], align_corners: bool,
    scales_h: float | None = None, scales_w: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Resize as eager torch does: the weights inside the image add up to 1, and the caller's scales count. torch's
    exporter drops both.
    """
    if align_corners or not x.dtype.is_floating_point:
        raise UnsupportedError("antialiasing of integers, or with align_corners", rule="interpolate",
                               remedy="leave align_corners out, and use floats")  # fmt: skip
    shape = (*x.shape[:2], *output_size)
    scaled = scales_h is not None and scales_w is not None
    numbers, dtype = ((1.0, 1.0, scales_h, scales_w), torch.float32) if scaled else (shape, torch.int64)
    target = torch.stack([torch.full((), n, dtype=dtype, device=x.device) for n in numbers])
    given = (None, target) if scaled else (None, None, target)
    wide = x.to(computed_type(x))
    made = torch.onnx.ops.symbolic(
        "Resize", (wide, *given), {"mode": mode, "cubic_coeff_a": cubic, "antialias": 1, "exclude_outside": 1},
        dtype=wide.dtype, shape=shape,
    )  # fmt: skip
    return made.to(x.dtype)
