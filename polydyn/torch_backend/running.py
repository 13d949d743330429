"""A captured graph as a function: compiled at its first call, then bound to each call's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.program_cache import cached_program
from polydyn.runtime.program import Program
from polydyn.shapes.sizes import Dims
from polydyn.torch_backend.capture import Capture
from polydyn.torch_backend.exporting import export
from polydyn.torch_backend.frozen import Frozen
from polydyn.torch_backend.places import placed
from polydyn.torch_backend.settings import Settings, log
from polydyn.torch_backend.tensors import array_of, plain, tensor_of


def eager(forward: Callable[..., Any], reason: PolydynError, settings: Settings) -> Callable[..., Any]:
    """Return torch's own forward function, with the reason in the log. In strict mode, raise the reason."""
    if settings.strict:
        raise reason
    log.warning("a graph runs as torch has it: %s", reason)
    return forward


MAX_PROGRAMS = 8
"""Maximum number of programs of a graph, as of torch's own recompilations."""


class CompiledGraph:
    """A captured graph as a function of its arguments, compiled at its first call, when torch no longer traces.

    Where torch's rules choose by sizes, other sizes get a program of their own.
    """

    def __init__(self, capture: Capture, settings: Settings, forward: Callable[..., Any]) -> None:
        self._capture, self._settings, self._forward = capture, settings, forward
        self._calls: dict[tuple[Any, ...], list[_Call]] = {}
        self._eager: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Return the graph's outputs."""
        if self._eager is not None:
            return self._eager(*arguments)
        numbers = tuple(arguments[k].item() for k in self._capture.numbers)
        key = tuple((type(n), repr(n)) for n in numbers)  # 1, 1.0, True, 0.0 and -0.0 are different programs
        calls = self._calls.setdefault(key, [])
        call = next((c for c in calls if c.covers(arguments)), None)
        if call is None and len(calls) == MAX_PROGRAMS:
            reason = UnsupportedError(
                f"a graph with {MAX_PROGRAMS} programs needs one more for these sizes", rule="sizes decide",
                remedy="call it with fewer sizes, or write it with operators that do not depend on them",
            )  # fmt: skip
            return eager(self._forward, reason, self._settings)(*arguments)
        if call is None:
            try:
                call = _Call(self._capture, self._settings, arguments, numbers)
            except PolydynError as e:
                self._eager = eager(self._forward, e, self._settings)
                return self._eager(*arguments)
            calls.append(call)
        try:
            return call(arguments)
        except InputError as e:  # only this call: a size that the program does not cover
            return eager(self._forward, e, self._settings)(*arguments)

    @property
    def eager(self) -> bool:
        """Whether the graph runs in torch because it was rejected."""
        return self._eager is not None

    @property
    def programs(self) -> list[Program]:
        """The compiled programs."""
        return [c.program for calls in self._calls.values() for c in calls]


class _Call:
    """A program of a graph, for the numbers among its arguments and for sizes that meet torch's condition."""

    def __init__(
        self, capture: Capture, settings: Settings, arguments: Sequence[Any], numbers: tuple[Any, ...]
    ) -> None:
        parameters = {k: v for k, v in enumerate(arguments) if isinstance(v, torch.nn.Parameter)}
        frozen = {k: plain(v) for k, v in parameters.items() if settings.freeze}
        constants = dict(zip(capture.numbers, numbers, strict=True)) | frozen
        self._inputs = [k for k in capture.tensors if k not in constants]
        tensors = [plain(arguments[k]) for k in self._inputs]
        kinds = {arguments[k].device.type for k in capture.tensors}
        if not kinds <= {"cpu"} and kinds != {"cuda"}:
            raise UnsupportedError(f"tensors on {', '.join(sorted(kinds))}", rule="devices", remedy="all on one device")
        self._on_device = kinds == {"cuda"}
        self._frozen = Frozen({k: parameters[k] for k in frozen})
        symbols = [s for k, s in zip(capture.tensors, capture.symbols, strict=True) if k in self._inputs]
        model, self._condition = export(capture.exportable(constants), tensors, symbols)
        said = replace(settings.arguments, dims=_named_dims(settings.arguments.dims, symbols, model))
        target = said.target or (_cuda_target(tensors) if self._on_device else "cpu")
        try:
            self.program = cached_program(
                model, replace(said, target=target), threads=settings.threads, start=settings.start
            )
        except PolydynError as e:
            raise placed(e, model) from e
        self._names = [i.name for i in model.graph.input]
        self._results = [(o.name, r.dtype) for o, r in zip(model.graph.output, capture.outputs.roots, strict=True)]
        self._outputs = capture.outputs
        if settings.start == "full":  # else this would wait for the compilation
            log.info("a graph of %d kernels, target %s", self.program.kernel_count, target)

    def covers(self, arguments: Sequence[Any]) -> bool:
        """Return whether the program is right for the sizes of these arguments."""
        return self._condition.holds([arguments[k].shape for k in self._inputs])

    def __call__(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        self._frozen.check(arguments)
        array = plain if self._on_device else array_of
        feeds = {name: array(arguments[k]) for name, k in zip(self._names, self._inputs, strict=True)}
        results = self.program.run(feeds)
        return self._outputs.values([tensor_of(results[n], d) for n, d in self._results], arguments)


def _named_dims(dims: Dims, symbols: Sequence[Mapping[int, str]], model: Any) -> Dims:
    """Return sizes by the exported model's names. ``dims``: by torch's symbols, ``symbols``: of each input, by axis."""
    names: dict[str, str] = {}
    for axes, x in zip(symbols, model.graph.input, strict=True):
        names |= {s: x.type.tensor_type.shape.dim[axis].dim_param for axis, s in axes.items()}
    return {names[s]: sizes for s, sizes in dims.items() if names.get(s)}


def _cuda_target(tensors: Sequence[torch.Tensor]) -> str:
    from polydyn.session.session import cuda_target

    index = next(t.device.index or 0 for t in tensors if t.device.type == "cuda")
    target = cuda_target(index)
    if not target:
        raise UnsupportedError(f"no kernels for cuda:{index}", rule="architectures", remedy="run on the CPU")
    return target
