"""Images: linear interpolation, patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polydyn.errors import UnsupportedError
from polydyn.torch_backend.translations.common import computed_type, translate


def _positions(size: Any, output: Any, align_corners: bool, scale: float | None, like: torch.Tensor) -> torch.Tensor:
    """Return the source positions of the output's elements along an axis, at least 0."""
    at = torch.arange(output, device=like.device).to(like.dtype)
    if align_corners:
        return at * ((size - 1) / torch.sym_max(output - 1, 1))
    step = 1.0 / scale if scale is not None and scale > 0 else size / output
    return torch.clamp((at + 0.5) * step - 0.5, min=0)


def _between(x: torch.Tensor, axis: int, at: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of two neighbours. An infinite neighbour stays infinite, unlike in a sum with a
    difference.
    """
    first = at.to(torch.int64)
    second = torch.clamp(first + 1, max=x.shape[axis] - 1)
    part = torch.clamp(at - first.to(at.dtype), 0, 1).reshape([-1 if k == axis else 1 for k in range(x.dim())])
    low, high = ((*(slice(None),) * axis, index) for index in (first, second))
    return x[low] * (1 - part) + x[high] * part


@translate("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def interpolate(
    x: torch.Tensor, output_size: Sequence[Any] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> torch.Tensor:
    """Interpolate linearly along the axes after the second: 16-bit floats in float32, integers rounded."""
    rank = x.dim() - 2
    scales: Sequence[float | None] = [None] * rank if scale_factors is None else scale_factors
    sizes = output_size or [torch.sym_int(x.shape[k + 2] * s) for k, s in enumerate(scale_factors or ())]
    wide = x.to(computed_type(x)) if x.dtype.is_floating_point else x.to(torch.float32)
    for k in reversed(range(rank)):
        wide = _between(wide, k + 2, _positions(x.shape[k + 2], sizes[k], align_corners, scales[k], wide))
    return (wide if x.dtype.is_floating_point else torch.round(wide)).to(x.dtype)


@translate("avg_pool2d")
def avg_pool2d(
    x: torch.Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    """Compute means of windows, or sums divided by the user's divisor, which torch's exporter drops."""
    if divisor_override is None:
        return NotImplemented
    high, wide = kernel_size[0], kernel_size[-1]
    if ceil_mode:
        raise UnsupportedError("avg_pool2d with a divisor and ceil_mode", rule="windows", remedy="pad the image")
    padded = torch.nn.functional.pad(x, (padding[-1], padding[-1], padding[0], padding[0]))
    return torch.nn.functional.avg_pool2d(padded, kernel_size, stride or None) * (high * wide / divisor_override)


def _taps(size: Any, kernel: int, dilation: int, padding: int, stride: int, like: torch.Tensor) -> torch.Tensor:
    """Return the positions under each element of the kernel, for each position of the kernel along an axis."""
    places = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    inside = torch.arange(kernel, device=like.device) * dilation
    return inside[:, None] + torch.arange(places, device=like.device) * stride


@translate("im2col")
def im2col(
    x: torch.Tensor, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Compute the patches of an image as columns. All sizes are explicit, because one of the others may be 0."""
    if x.dim() == 3:
        return im2col(x.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    geometry = list(zip(x.shape[2:], kernel_size, dilation, padding, stride, strict=True))
    rows, columns = (_taps(*axis, x) for axis in geometry)
    padded = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    taken = padded[:, :, rows][..., columns].permute(0, 1, 2, 4, 3, 5)
    batch, channels = x.shape[:2]
    shape = (batch, channels * kernel_size[0] * kernel_size[1], rows.shape[1] * columns.shape[1])
    return taken.reshape(shape)
