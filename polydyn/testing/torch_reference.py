"""Results of eager torch in float64, and their sensitivity to rounding: the bounds of comparisons.

``Run`` executes a call with every floating-point tensor in float64. A run with ``nudge`` moves inputs and results of
operators by a tiny relative amount, so the movement of an output, divided by the amount, is the number of roundings
that an element of the output holds: a bound of error that follows from the call, not from a list of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

NUDGE = 1e-10
"""Small against float32's precision, large against float64's."""
JUMP = 1e-5
"""A relative movement that exceeds ``NUDGE`` by this factor is a jump, which exact inputs decide, not rounding."""
RUNS = 3
DECISIVE_RUNS = 8
ROUNDINGS = 16
"""Number of additional roundings that a result may hold compared with eager torch's order of operations."""
FINITE = 40.0
"""Maximum difference in ulps between vectorised functions of eager torch and of C libraries, if neither is exact."""


def eps_of(dtype: Any) -> float:
    """Return the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps)


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Records the coarsest floating-point type of a run, and conversions to integers that C does not define."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.undefined = 0.0, False
        self.smallest_normal = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in _pytree.tree_leaves((args, result)):
            if isinstance(t, torch.Tensor) and t.dtype.is_floating_point:
                self.eps = max(self.eps, eps_of(t.dtype))
                self.smallest_normal = max(self.smallest_normal, float(torch.finfo(t.dtype).tiny))
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        into = (kwargs or {}).get("dtype")
        if source is not None and into is not None and source.dtype.is_floating_point:
            self.undefined |= not into.is_floating_point and into != torch.bool and _outside(source, into)
        if func is torch.ops.aten.copy_.default and args[1].dtype.is_floating_point:
            into = args[0].dtype
            self.undefined |= not (into.is_floating_point or into.is_complex or into == torch.bool) and _outside(
                args[1], into
            )
        return result


def _outside(x: torch.Tensor, into: Any) -> bool:
    limits = torch.iinfo(into)
    x = x.double()
    return bool(((x != x) | (x < limits.min) | (x >= float(limits.max))).any())


class Run(TorchDispatchMode):  # type: ignore[misc]
    """Runs every operator in float64. ``nudge``: the relative amount by which its results move, if they are rounded.

    ``inexact``: only results that the type of eager torch cannot hold move.
    """

    def __init__(self, nudge: float = 0.0, seed: int = 0, inexact: bool = False) -> None:
        super().__init__()
        self.nudge, self.inexact = nudge, inexact
        self.random = torch.Generator().manual_seed(seed)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        """Return the moved tensor."""
        sign = torch.randint(0, 2, x.shape, generator=self.random) * 2 - 1
        by = 1 + self.nudge * sign
        if self.inexact:
            by = torch.where(x.float().double() == x, 1.0, by)
        return torch.where(torch.isfinite(x), x * by, x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _pytree.tree_map(_wide, (args, dict(kwargs or {})))
        result = func(*args, **kwargs)
        views = any(r.alias_info is not None for r in func._schema.returns)
        if self.nudge and not views:
            result = _pytree.tree_map(
                lambda t: self.moved(t) if isinstance(t, torch.Tensor) and t.dtype == torch.float64 else t, result
            )
        return result


def _wide(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype.is_floating_point and x.dtype != torch.float64 else x
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return torch.float64
    return x


def run_wide(function: Callable[..., Any], arguments: Any, run: Run, move_inputs: bool = False) -> list[Any] | None:
    """Return the leaves of the result in float64, or None if torch has no float64 run of it."""
    standard = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        inputs = _pytree.tree_map(lambda x: _wide(x) if isinstance(x, torch.Tensor) else x, arguments)
        if move_inputs:
            inputs = _pytree.tree_map(
                lambda x: run.moved(x) if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x, inputs
            )
        with run:
            return list(_pytree.tree_leaves(function(*inputs)))
    except Exception:  # an operator without float64, or one that checks types
        return None
    finally:
        torch.set_default_dtype(standard)


@dataclass(frozen=True)
class Bounds:
    """A leaf of the result in float64, and the error that roundings explain, element by element."""

    exact: torch.Tensor
    rounding: torch.Tensor


class Reference:
    """The float64 run of a call.

    ``function`` and ``arguments`` return fresh copies of the called function and its inputs.
    """

    def __init__(self, function: Callable[[], Any], arguments: Callable[[], Any], eps: float) -> None:
        self.function, self.arguments, self.eps = function, arguments, eps
        self.exact = run_wide(function(), arguments(), Run())

    def bounds(self, leaf: int) -> Bounds | None:
        """Return the bounds of a floating-point leaf, or None if there is no run in float64."""
        if self.exact is None or leaf >= len(self.exact) or not isinstance(self.exact[leaf], torch.Tensor):
            return None
        exact = self.exact[leaf].double()
        moved = torch.zeros_like(exact)
        for k in range(RUNS):
            other = self._other(leaf, Run(NUDGE, k), exact, True)
            if other is not None:
                step = (other - exact).abs()
                jump = step > JUMP * NUDGE / 1e-10 * (exact.abs() + 1e-300)
                moved = torch.maximum(moved, torch.where(jump | ~torch.isfinite(step), 0.0, step))
        scale = torch.where(torch.isfinite(exact), exact.abs(), 0.0)
        return Bounds(exact, self.eps * (FINITE / 4 * scale + ROUNDINGS * moved / NUDGE))

    def decides(self, leaf: int, size: torch.Tensor) -> torch.Tensor:
        """Return a mask of elements that move by half of ``size`` or more if inexact intermediate results round
        otherwise.
        """
        found = torch.zeros(size.shape, dtype=torch.bool)
        if self.exact is None or leaf >= len(self.exact) or not isinstance(self.exact[leaf], torch.Tensor):
            return found
        exact = self.exact[leaf].double()
        for k in range(DECISIVE_RUNS):
            other = self._other(leaf, Run(4 * self.eps, 100 + k, True), exact, False)
            if other is not None:
                step = (other - exact).abs()
                found |= (step >= size / 2) & (step > 0)
                found |= torch.isfinite(other) != torch.isfinite(exact)
        return found

    def _other(self, leaf: int, run: Run, exact: torch.Tensor, inputs: bool) -> torch.Tensor | None:
        other = run_wide(self.function(), self.arguments(), run, inputs)
        if other is None or not isinstance(other[leaf], torch.Tensor) or other[leaf].shape != exact.shape:
            return None
        return other[leaf].double()


def leaves(x: Any) -> Sequence[Any]:
    """Return the leaves of a result."""
    found: list[Any] = list(_pytree.tree_leaves(x))
    return found
