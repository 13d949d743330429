"""Functions of one number, and activations, accurate to the dtype's precision over the whole range."""

from __future__ import annotations

import math
from typing import Any

import torch

from polydyn.torch_backend.translations.common import FLOAT, elementwise, number, onnx, translate


def expm1_of(x: torch.Tensor) -> torch.Tensor:
    """Return ``exp(x) - 1`` without loss of digits near zero."""
    return onnx("polydyn::Expm1", x)


def log1p_of(x: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 + x)`` without loss of digits near zero."""
    return onnx("polydyn::Log1p", x)


@translate("expm1", "special_expm1")
@elementwise(FLOAT)
def expm1(x: torch.Tensor) -> torch.Tensor:
    """Compute ``exp(x) - 1``."""
    return expm1_of(x)


@translate("log1p", "special_log1p")
@elementwise(FLOAT)
def log1p(x: torch.Tensor) -> torch.Tensor:
    """Compute ``log(1 + x)``."""
    return log1p_of(x)


@translate("erfc", "special_erfc")
@elementwise(FLOAT)
def erfc(x: torch.Tensor) -> torch.Tensor:
    """Compute the complement of the error function."""
    return onnx("polydyn::Erfc", x)


@translate("special_erfcx")
@elementwise(FLOAT)
def erfcx(x: torch.Tensor) -> torch.Tensor:
    """Compute ``exp(x^2) erfc(x)``: in float64 below 25, by the asymptotic series above."""
    wide = x.to(torch.float64)
    below = torch.clamp(wide, max=25.0)
    # x^2 as the square of its leading bits, which is exact, plus the rest
    first = below.to(torch.float32).to(torch.float64)
    near = torch.exp(first * first) * (1 + onnx("polydyn::Expm1", (below - first) * (below + first)))
    near = near * onnx("polydyn::Erfc", below)
    t = 1 / (wide * wide)
    far = (1 - t / 2 * (1 - 1.5 * t * (1 - 2.5 * t * (1 - 3.5 * t)))) / (wide * math.sqrt(math.pi))
    return torch.where(wide > 25, far, near).to(x.dtype)


@translate("elu")
@elementwise()
def elu(x: torch.Tensor, *, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> torch.Tensor:
    """Compute ``scale * x`` for positive x, else ``scale * alpha (exp(input_scale x) - 1)``."""
    return torch.where(x > 0, x * scale, expm1_of(x * input_scale) * (alpha * scale))


def _elu(x: torch.Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> torch.Tensor:
    result: torch.Tensor = elu(x, alpha=alpha, scale=scale, input_scale=input_scale)
    return result


translate("elu")(_elu)


@translate("celu")
def celu(x: torch.Tensor, alpha: Any = 1.0) -> torch.Tensor:
    """Compute the elu that is smooth at zero for every alpha."""
    return _elu(x, alpha, 1, 1.0 / alpha)


@translate("selu")
def selu(x: torch.Tensor) -> torch.Tensor:
    """Compute the elu with the scales of self-normalizing networks."""
    return _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x, min=0) + log1p_of(torch.exp(-torch.abs(x)))


@translate("softplus")
def softplus(x: torch.Tensor, beta: Any = 1, threshold: Any = 20) -> torch.Tensor:
    """Compute ``log(1 + exp(beta x)) / beta``, or x if ``beta x`` is above the threshold."""

    @elementwise()
    def computed(x: torch.Tensor) -> torch.Tensor:
        scaled = x * beta
        return torch.where(scaled > threshold, x, log1p_of(torch.exp(scaled)) / beta)

    result: torch.Tensor = computed(x)
    return result


@translate("mish")
@elementwise()
def mish(x: torch.Tensor) -> torch.Tensor:
    """Compute ``x tanh(log(1 + exp(x)))``."""
    return x * torch.tanh(_softplus(x))


@elementwise()
def _log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x, max=0) - log1p_of(torch.exp(-torch.abs(x)))


@translate("log_sigmoid")
def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute ``-log(1 + exp(-x))``."""
    result: torch.Tensor = _log_sigmoid(x)
    return result


@translate("log_sigmoid_forward")
def log_sigmoid_forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``log_sigmoid``. Return an empty buffer as well."""
    return _log_sigmoid(x), x.new_zeros((0,))


@translate("logaddexp")
@elementwise(FLOAT)
def logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute ``log(exp(a) + exp(b))``."""
    sum_ = torch.maximum(a, b) + log1p_of(torch.exp(-torch.abs(a - b)))
    return torch.where((a == b) & (torch.abs(a) == number(math.inf, a)), a, sum_)


@translate("logaddexp2")
@elementwise(FLOAT)
def logaddexp2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute ``log2(2^a + 2^b)``."""
    tail = log1p_of(torch.exp(torch.abs(a - b) * -math.log(2))) * (1 / math.log(2))
    return torch.where((a == b) & (torch.abs(a) == number(math.inf, a)), a, torch.maximum(a, b) + tail)


@translate("relu")
def relu(x: torch.Tensor) -> Any:
    """Compute x, or 0 below zero, and keep the sign of zero. Integers are exported unchanged."""
    return torch.where(x < 0, number(0, x), x) if x.dtype.is_floating_point else NotImplemented


@translate("clamp")
def clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    """Clamp x between two numbers and keep the signs of zeros. Integers are exported unchanged."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    made = x.clone() if low is None else torch.where(x < low, number(low, x), x)
    return made if high is None else torch.where(made > high, number(high, x), made)
