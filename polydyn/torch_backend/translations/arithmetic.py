"""Division, remainders, powers, signs, comparisons of two numbers."""

from __future__ import annotations

from typing import Any

import torch

from polydyn.torch_backend.translations.common import FLOAT, elementwise, number, onnx, translate


def _fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return onnx("Mod", a, b, fmod=1)


def _signs_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.logical_xor(a < 0, b < 0)


@translate("fmod.Tensor", "fmod.Scalar")
@elementwise()
def fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the remainder with the dividend's sign."""
    return _fmod(a, b)


@translate("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
@elementwise()
def remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the remainder with the divisor's sign."""
    rest = _fmod(a, b)
    return torch.where((rest != 0) & _signs_differ(rest, b), rest + b, rest)


def _truncated(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 0, torch.ceil(x), torch.floor(x))


@translate("trunc", "fix")
def trunc(x: torch.Tensor) -> torch.Tensor:
    """Truncate towards zero and keep the sign of zero."""
    return _truncated(x) if x.dtype.is_floating_point else x.clone()


@translate("frac")
@elementwise()
def frac(x: torch.Tensor) -> torch.Tensor:
    """Compute the fractional part, with the sign of the number; 0 for both zeros."""
    return x - _truncated(x)


@elementwise()
def _divide_trunc(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _truncated(a / b) if a.dtype.is_floating_point else onnx("Div", a, b)


@elementwise()
def _divide_floor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.dtype.is_floating_point:
        quotient = onnx("Div", a, b)
        rest = a - quotient * b
        return torch.where((rest != 0) & _signs_differ(rest, b), quotient - 1, quotient)
    rest = _fmod(a, b)
    whole = (a - rest) / b
    whole = torch.where((rest != 0) & _signs_differ(rest, b), whole - 1, whole)
    floor = torch.floor(whole)
    rounded = torch.where(whole - floor > 0.5, floor + 1, floor)
    exact = a / b
    return torch.where(b == 0, exact, torch.where(whole == 0, exact * 0, rounded))


@elementwise(FLOAT)
def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b


@translate("div.Tensor_mode", "div.Scalar_mode", "divide.Tensor_mode", "divide.Scalar_mode")
def div(a: torch.Tensor, b: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    """Divide, rounding towards zero (``trunc``), down (``floor``) or not at all."""
    chosen = {None: _divide, "trunc": _divide_trunc, "floor": _divide_floor}[rounding_mode]
    result: torch.Tensor = chosen(a, b)
    return result


@translate("floor_divide", "floor_divide.Scalar")
def floor_divide(a: torch.Tensor, b: Any) -> torch.Tensor:
    """Divide and round down."""
    result: torch.Tensor = _divide_floor(a, b)
    return result


@translate("sign", "sgn")
def sign(x: torch.Tensor) -> torch.Tensor:
    """Compute -1, 0 or 1; 0 for NaN."""
    if x.dtype == torch.bool:
        return x.clone()
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    below = zero - one if x.dtype.is_signed else zero
    return torch.where(x > 0, one, torch.where(x < 0, below, zero))


@translate("signbit")
def signbit(x: torch.Tensor) -> torch.Tensor:
    """Compute whether the sign bit is set, also for NaN and zero."""
    if not x.dtype.is_floating_point:
        return x < 0 if x.dtype.is_signed else torch.zeros_like(x, dtype=torch.bool)
    return onnx("polydyn::SignBit", x, dtype=torch.bool)


@translate("copysign.Tensor", "copysign.Scalar")
@elementwise(FLOAT)
def copysign(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the first number with the sign of the second."""
    magnitude = torch.abs(a)
    return torch.where(onnx("polydyn::SignBit", b, dtype=torch.bool), -magnitude, magnitude)


@translate("heaviside")
@elementwise()
def heaviside(x: torch.Tensor, at_zero: torch.Tensor) -> torch.Tensor:
    """Compute 0 below zero and for NaN, 1 above, ``at_zero`` at zero."""
    return torch.where(x == 0, at_zero, (x > 0).to(x.dtype))


@translate("fmax")
@elementwise()
def fmax(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the maximum; NaN only if both operands are NaN."""
    larger = torch.maximum(a, b)
    return torch.where(a != a, b, torch.where(b != b, a, larger)) if a.dtype.is_floating_point else larger


@translate("fmin")
@elementwise()
def fmin(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the minimum; NaN only if both operands are NaN."""
    smaller = torch.minimum(a, b)
    return torch.where(a != a, b, torch.where(b != b, a, smaller)) if a.dtype.is_floating_point else smaller


@translate("hypot")
@elementwise()
def hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the root of the sum of squares without intermediate overflow."""
    x, y = torch.abs(a), torch.abs(b)
    high, low = torch.maximum(x, y), torch.minimum(x, y)
    ratio = torch.where(high == 0, 0, low / high)
    infinite = number(float("inf"), high)
    return torch.where((x == infinite) | (y == infinite), infinite, high * torch.sqrt(1 + ratio * ratio))


@translate("atan2", "arctan2")
@elementwise(FLOAT)
def atan2(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute the angle of (x, y)."""
    return onnx("polydyn::Atan2", y, x)


@translate("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self", "special_xlogy", "special_xlogy.other_scalar",
           "special_xlogy.self_scalar")  # fmt: skip
@elementwise(FLOAT)
def xlogy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute ``x log(y)``; 0 if x is 0 and y is not NaN."""
    return torch.where(y != y, y, torch.where(x == 0, 0, x * torch.log(y)))


@translate("special_xlog1py", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar")
@elementwise(FLOAT)
def xlog1py(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute ``x log(1 + y)``; 0 if x is 0 and y is not NaN."""
    return torch.where(y != y, y, torch.where(x == 0, 0, x * onnx("polydyn::Log1p", y)))
