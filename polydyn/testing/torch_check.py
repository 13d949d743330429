"""Run one function or module through ``torch.compile`` with polydyn, call after call, and compare with eager torch."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.onnx._internal.exporter import _registration

import polydyn.torch_backend as under_test
from polydyn.errors import InputError, PolydynError, ShapeError, UnsupportedError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_parts
from polydyn.graph.reference import evaluate
from polydyn.testing.cells import quick_build
from polydyn.testing.torch_reference import Reference, Watch, leaves

REFUSALS = (UnsupportedError, ShapeError, InputError)
Session = tuple[Any, Iterator[tuple[Any, ...]]]


@dataclass(frozen=True)
class Case:
    """A compiled function and its calls.

    ``build``: returns a new function (or module) and the arguments of its calls, which may share tensors that change
    between calls; two builds are equal. ``text``: text for a reader. ``specialize``: whether numbers are constants of
    the graph, not arguments. ``options``: options of the backend.
    """

    name: str
    build: Callable[[], Session]
    text: str = ""
    specialize: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Verdict:
    """The result of a case. ``kind``: ``right``, ``refused``, ``different``, ``error``, or a reason to count only."""

    kind: str
    message: str = ""
    call: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Evaluated:
    """The imported graph, evaluated by the reference, in place of a program. It has a program's inputs and outputs."""

    kernel_count = 0

    def __init__(self, model: Any) -> None:
        self.graph = import_parts(model)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name."""
        inputs = {}
        for name, a in feeds.items():
            dtype = numpy_dtype(self.graph.tensors[name].dtype)
            inputs[name] = np.array(a).view(dtype) if a.dtype != dtype else a
        return {name: _carried(a) for name, a in evaluate(self.graph, inputs).items()}


def _carried(a: Any) -> Any:
    """Return a separate copy of an array; types that numpy lacks as their bits."""
    made = np.array(a, order="C")
    return made.view(f"uint{8 * made.itemsize}") if made.dtype.kind == "V" or made.dtype.num > 255 else made


_registry: dict[Any, Any] = {}


@contextlib.contextmanager
def quick(compile_kernels: bool, specialize: bool = False) -> Iterator[None]:
    """Build the registry of torch's exporter once, not for every graph; kernels are not optimised, or not built."""
    made = _registration.ONNXRegistry.from_torchlib

    def registry(*args: Any, **more: Any) -> Any:
        key = (args, tuple(more.items()))
        if key not in _registry:
            _registry[key] = made(*args, **more)
        return _registry[key]

    running = sys.modules.get("polydyn.torch_backend.running", under_test)
    program = running.cached_program

    def evaluated(model: Any, *args: Any, **more: Any) -> Any:
        found = Evaluated(model)
        return program(model, *args, **more) if found.graph.steps else found

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_registration.ONNXRegistry, "from_torchlib", staticmethod(registry)))
        stack.enter_context(quick_build())
        if not compile_kernels:
            stack.enter_context(mock.patch.object(running, "cached_program", evaluated))
        stack.enter_context(torch._dynamo.config.patch(specialize_int=specialize))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.no_grad())
        warnings.simplefilter("ignore")
        yield


def check(case: Case, compile_kernels: bool = True) -> Verdict:
    """Run all calls of a case; stop at the first failure."""
    with quick(compile_kernels, case.specialize):
        return _Check(case).run()


class _Check:
    """The calls of a case, made alternately by eager torch and by the compiled function."""

    def __init__(self, case: Case) -> None:
        self.case, self.counts = case, Counter[str]()

    def run(self) -> Verdict:
        torch._dynamo.reset()
        eager, eager_calls = self.case.build()
        raw, compiled_calls = self.case.build()
        compiled = torch.compile(
            raw, backend=under_test.backend, dynamic=True, options={"strict": True, **self.case.options}
        )
        kind, message = "eager refuses", ""
        for k, (own, other) in enumerate(zip(eager_calls, compiled_calls, strict=True)):
            before = _Snapshot(eager, own)
            watch = Watch()
            try:
                with watch:
                    want = copied(eager, own)
            except Exception as e:
                self.counts["calls that eager refuses"] += 1
                message = message or f"{type(e).__name__}: {e}"
                break
            try:
                got = compiled(*other)
            except Exception as e:
                found = self._failure(e, k)
                if found.kind != "refused" or not isinstance(_polydyn(e), InputError):
                    return found
                kind, message = "refused", found.message
                continue
            kind = "right" if kind == "eager refuses" else kind
            problem = self._problem(before, watch, (want, own), (got, other))
            if problem and not self._torch_differs(k, problem):
                return Verdict("different", problem, k, self.counts)
        return Verdict(kind, message, 0, self.counts)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _failure(self, error: Exception, call: int) -> Verdict:
        reason = _polydyn(error)
        text = f"{type(error).__name__}: {error}"
        if isinstance(reason, REFUSALS):
            place = "" if " at " in (reason.node or "") else ", no place"
            self.counts[f"refusals{place}"] += 1
            return Verdict("refused", f"{type(reason).__name__}: {reason}", call, self.counts)
        if reason is None and self._torch_fails(call):
            return Verdict("torch fails", text, call, self.counts)
        return Verdict("error", f"{type(reason).__name__}: {reason}" if reason else text, call, self.counts)

    def _torch_fails(self, call: int) -> bool:
        """Return whether torch's capture alone raises too."""
        return isinstance(self._captured(call), Exception)

    def _torch_differs(self, call: int, problem: str) -> bool:
        """Return whether torch's capture alone has the same difference."""
        found = self._captured(call)
        if isinstance(found, Exception):
            return True
        before, watch, want, got = found
        same = self._problem(before, watch, want, got)
        if same:
            self.counts["torch's capture differs"] += 1
        return bool(same)

    def _captured(self, call: int) -> Any:
        torch._dynamo.reset()
        eager, eager_calls = self.case.build()
        raw, calls = self.case.build()
        alone = torch.compile(raw, backend="eager", dynamic=True)
        try:
            for _, own, other in zip(range(call + 1), eager_calls, calls, strict=False):
                before, watch = _Snapshot(eager, own), Watch()
                with watch:
                    want = copied(eager, own)
                got = alone(*other)
        except Exception as e:
            return e
        return before, watch, (want, own), (got, other)

    # -- differences ---------------------------------------------------------------------------------------------------

    def _problem(self, before: _Snapshot, watch: Watch, want: tuple[Any, Any], got: tuple[Any, Any]) -> str:
        """Return the difference in results, in inputs after the call, or in the memory that they share, or an empty
        string.
        """
        wanted, found = (leaves(want[0]), leaves(want[1])), (leaves(got[0]), leaves(got[1]))
        if len(wanted[0]) != len(found[0]):
            return f"{len(found[0])} outputs, expected {len(wanted[0])}"
        for subject, part in (("output", 0), ("input", 1)):
            for k, (w, g) in enumerate(zip(wanted[part], found[part], strict=True)):
                problem = _form(w, g)
                if problem:
                    return f"{subject} {k}: {problem}"
        if (a := _sharing(wanted)) != (b := _sharing(found)):
            return f"memory is shared by {sorted(b)}, expected {sorted(a)} (tensors, distance of their first elements)"
        if watch.undefined:
            self.counts["calls with conversions that C does not define"] += 1
            return ""
        values = _Values(before, watch.eps, self.counts)
        for subject, part in (("output", 0), ("input", 1)):
            for k, (w, g) in enumerate(zip(wanted[part], found[part], strict=True)):
                problem = values.problem(w, g, k if part == 0 else None)
                if problem:
                    return f"{subject} {k}: {problem}"
        self.counts["calls right"] += 1
        return ""


def copied(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a call by eager torch."""
    return function(*arguments)


def _polydyn(error: BaseException) -> PolydynError | None:
    """Return the error of polydyn behind one of torch."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PolydynError):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__
    return None


class _Snapshot:
    """The called function and its arguments, as they were before the call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._function = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
        self._arguments = torch.utils._pytree.tree_map(_clone, arguments)

    def function(self) -> Any:
        """Return a fresh copy of the called function."""
        return copy.deepcopy(self._function) if isinstance(self._function, torch.nn.Module) else self._function

    def arguments(self) -> tuple[Any, ...]:
        """Return fresh copies of the arguments."""
        found: tuple[Any, ...] = torch.utils._pytree.tree_map(_clone, self._arguments)
        return found

    def spaced(self) -> tuple[Any, ...]:
        """Return the arguments with gaps between elements in memory: eager torch has no vectors there."""
        found: tuple[Any, ...] = torch.utils._pytree.tree_map(_spaced, self._arguments)
        return found


def _clone(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _spaced(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.dim() or x.dtype.is_complex:
        return x
    return x.unsqueeze(-1).expand(*x.shape, 2).contiguous()[..., 0]


def _form(w: Any, g: Any) -> str:
    """Return the difference in type, shape and strides."""
    if not isinstance(w, torch.Tensor):
        return "" if type(w) is type(g) and (w == g or w != w) else f"{g!r}, expected {w!r}"
    if not isinstance(g, torch.Tensor):
        return f"{type(g).__name__}, expected a tensor"
    if (w.dtype, w.shape) != (g.dtype, g.shape):
        return f"{g.dtype}{list(g.shape)}, expected {w.dtype}{list(w.shape)}"
    if w.layout != torch.strided:
        return "" if w.layout == g.layout else f"{g.layout}, expected {w.layout}"
    wide = [k for k, n in enumerate(w.shape) if n > 1] if w.numel() else []
    if [w.stride(k) for k in wide] != [g.stride(k) for k in wide]:
        return f"strides {list(g.stride())}, expected {list(w.stride())} of shape {list(w.shape)}"
    return ""


def _sharing(parts: Sequence[Sequence[Any]]) -> set[tuple[int, int, int]]:
    """Return pairs of tensors in one memory, with the distance of their first elements in bytes; one output at least.
    """
    tensors = [t for p in parts for t in p]
    dense = [k for k, t in enumerate(tensors) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    full = [k for k in dense if tensors[k].numel()]
    return {
        (a, b, tensors[b].data_ptr() - tensors[a].data_ptr())
        for a in full for b in full
        if a < b and a < len(parts[0])
        and tensors[a].untyped_storage().data_ptr() == tensors[b].untyped_storage().data_ptr()
    }  # fmt: skip


class _Values:
    """Compares values with eager torch, or with torch in float64, within the bounds of rounding."""

    def __init__(self, before: _Snapshot, eps: float, counts: Counter[str]) -> None:
        self.before, self.eps, self.counts = before, eps, counts
        self._reference: Reference | None = None
        self._again: list[Sequence[Any]] | None = None

    def problem(self, w: Any, g: Any, leaf: int | None) -> str:
        """Return the error in a leaf of the result, or (None) in an input after the call."""
        if not isinstance(w, torch.Tensor) or w.layout != torch.strided or not w.numel():
            return ""
        if w.dtype.is_complex:
            w, g = torch.view_as_real(w.resolve_conj()), torch.view_as_real(g.resolve_conj())
        a, b = g.detach().double() if g.dtype.is_floating_point else g, w.detach()
        b = b.double() if w.dtype.is_floating_point else b
        same = (a == b) | ((a != a) & (b != b))
        if w.dtype.is_floating_point:
            same &= (a != 0) | (torch.signbit(a) == torch.signbit(b))
        if same.all():
            return ""
        wrong = ~same & ~self._explained(a, b, w.dtype, leaf)
        return "" if not wrong.any() else _first(wrong, g, w)

    def _explained(self, a: Any, b: Any, dtype: Any, leaf: int | None) -> Any:
        """Return a mask of allowed differences: eager torch disagrees with itself, or rounding explains them."""
        unsure = self._unsure(leaf, a, b)
        if leaf is None:
            eps = max(self.eps, torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0
            return unsure | torch.isclose(a.double(), b.double(), rtol=64 * eps, atol=0.0, equal_nan=True)
        if self._reference is None:
            self._reference = Reference(self.before.function, self.before.arguments, max(self.eps, 2.0**-52))
        size = (a.double() - b.double()).abs().nan_to_num(0.0, 0.0)
        if not dtype.is_floating_point:
            return unsure | self._reference.decides(leaf, size)
        limits, bounds = torch.finfo(dtype), self._reference.bounds(leaf)
        if bounds is None or bounds.exact.shape != a.shape:
            scale = torch.where(torch.isfinite(b), b.abs(), 0.0)
            close = (a - b).abs() <= 16 * self.eps * torch.maximum(scale, scale.max()) + limits.tiny * limits.eps
            return unsure | close | ((a != a) & (b != b)) | ((a == b) & (a != 0))
        exact = torch.where(bounds.exact.abs() > limits.max, bounds.exact.sign() * torch.inf, bounds.exact)
        room = bounds.rounding + 2 * limits.eps * limits.tiny
        close = ((a - b).abs() <= room + 2 * (b - exact).abs().nan_to_num(0.0, 0.0)) | ((a - exact).abs() <= room)
        close |= (a == exact) | (a == b) | ((a != a) & ((b != b) | (exact != exact)))
        near = torch.isinf(a) & (exact.abs() * (1 + 64 * self.eps) >= limits.max) & (a.sign() == exact.sign())
        zeros = (a == 0) & (b == 0) & (exact == 0) & (torch.signbit(b) == torch.signbit(bounds.exact))
        if not (wrong := ~(close | near)).any() and not zeros.any():
            return close | near
        return unsure | ((close | near) & ~zeros) | (wrong & self._reference.decides(leaf, size))

    def _unsure(self, leaf: int | None, a: Any, b: Any) -> Any:
        """Return a mask of elements with several answers by eager torch: without vectors, and in a second run."""
        if self._again is None:
            self._again = []
            for arguments in (self.before.arguments(), self.before.spaced()):
                with contextlib.suppress(Exception), _filled():
                    result = self.before.function()(*arguments)
                    self._again.append(leaves(result))
        found = torch.zeros(b.shape, dtype=torch.bool)
        for results in self._again:
            other = results[leaf] if leaf is not None else None
            if isinstance(other, torch.Tensor) and other.shape == b.shape and not other.is_complex():
                c = other.double() if other.dtype.is_floating_point else other
                found |= ~((c == b) | ((c != c) & (b != b))) & ~_close(c, b)
        if found.any():
            self.counts["outputs in which eager disagrees with itself"] += 1
        return found


def _close(a: Any, b: Any) -> Any:
    return torch.isclose(a.double(), b.double(), rtol=1e-3, atol=0.0, equal_nan=True)


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """Fill unwritten memory with NaN or the largest integer, so that reads of it are detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _first(wrong: Any, g: Any, w: Any) -> str:
    """Return the first wrong element and the number of wrong elements."""
    at = tuple(int(v) for v in wrong.nonzero()[0]) if wrong.dim() else ()
    g, w = (x if not x.dtype.is_complex else torch.view_as_real(x) for x in (g, w))
    return f"{g[at].item()!r} at {list(at)}, expected {w[at].item()!r} ({w.dtype}); {int(wrong.sum())} of {w.numel()}"
