"""``torch.compile(model, backend="polydyn", dynamic=True)``: what torch captures runs as programs of polydyn.

torch breaks a model into graphs and guards them. Each graph is exported to ONNX in memory when it is first called,
compiled once for all sizes, and kept in the cache by content. Tensors pass without copies: on the CPU as numpy views,
on a device through DLPack. Parameters stay torch's: they are inputs of the program, so what changes them is seen. What
polydyn refuses runs as torch has it, with the reason in the log ``polydyn.torch``; ``options={"strict": True}`` raises
it instead.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.onnx  # its exporter is loaded when it is first used
from torch import fx

from polydyn.compiler import Options
from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.program_cache import Arguments, cached_program
from polydyn.runtime.program import Program

log = logging.getLogger("polydyn.torch")

OPSET = 18
KNOWN = {
    "strict",
    "freeze",
    "threads",
    "target",
    "dims",
    "records",
    "without",
    "strategy",
    "tf32",
    "precision",
    "winograd",
}


@dataclass(frozen=True)
class Settings:
    """The ``options`` of ``torch.compile``.

    ``strict``: what is refused is raised. ``freeze``: parameters are constants of the program, packed for its kernels;
    one that is changed in place afterwards is refused. The others are arguments of ``polydyn.compile``.
    """

    arguments: Arguments
    threads: int | None = None
    strict: bool = False
    freeze: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Settings:
        """From a mapping. InputError: an option that there is not."""
        said = dict(options or {})
        unknown = sorted(said.keys() - KNOWN)
        if unknown:
            raise InputError(f"the backend has no option '{unknown[0]}'", remedy=f"{', '.join(sorted(KNOWN))}")
        choices = {k: said[k] for k in ("without", "strategy", "tf32", "precision", "winograd") if k in said}
        arguments = Arguments(said.get("target", ""), said.get("dims", {}), Options(**choices), said.get("records"))
        return cls(arguments, said.get("threads"), said.get("strict", False), said.get("freeze", False))


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """What torch calls for every graph that it captured; gives the function that runs it."""
    settings = Settings.of(options)
    try:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
            raise UnsupportedError(
                "gradients are not built", rule="inference", remedy="call the model under torch.inference_mode()"
            )
        return CompiledGraph(Capture.of(gm), settings, gm.forward)
    except PolydynError as e:
        return _eager(gm.forward, e, settings)


def _eager(forward: Callable[..., Any], reason: PolydynError, settings: Settings) -> Callable[..., Any]:
    """torch's own way through a graph, with the reason in the log. Raises the reason when the user wants that."""
    if settings.strict:
        raise reason
    log.warning("a graph runs as torch has it: %s", reason)
    return forward


# -- what was captured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capture:
    """A graph as torch captured it: which arguments are tensors, which are sizes or numbers, what comes out.

    ``symbols``: for each tensor axis -> name of its symbol. ``sizes``: argument that is a size -> (tensor, axis) that
    has it. ``numbers``: arguments that are one number in a tensor. ``outputs``: position of each output among the
    program's, or the argument that is passed through.
    """

    module: fx.GraphModule
    tensors: tuple[int, ...]
    symbols: tuple[Mapping[int, str], ...]
    sizes: Mapping[int, tuple[int, int]]
    numbers: tuple[int, ...]
    outputs: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Capture:
        """Reads a graph. UnsupportedError: something in it is neither a tensor nor a size of one."""
        copied = copy.deepcopy(gm)
        places = [n for n in copied.graph.nodes if n.op == "placeholder"]
        values = [n.meta.get("example_value") for n in places]
        numbers = [k for k, n in enumerate(places) if n.users and all(u.target == "item" for u in n.users)]
        tensors = [k for k, v in enumerate(values) if isinstance(v, torch.Tensor) and k not in numbers]
        symbols = tuple(_symbols(values[k]) for k in tensors)
        where = {s: (k, axis) for k, found in zip(tensors, symbols, strict=True) for axis, s in found.items()}
        sizes = {}
        for k, v in enumerate(values):
            if k in tensors or k in numbers or not places[k].users:
                continue
            name = str(v.node.expr) if isinstance(v, torch.SymInt) else ""
            if name not in where:
                raise UnsupportedError(
                    f"the argument {places[k].target} is no size of a tensor", rule="arguments of a graph",
                    remedy="pass it as a tensor, or mark it static",
                )  # fmt: skip
            sizes[k] = where[name]
        outputs = _outputs(copied, places, tensors)
        for n in copied.graph.nodes:
            n.meta.clear()  # values of another tracing
        return cls(copied, tuple(tensors), symbols, sizes, tuple(numbers), outputs)

    def exportable(self, constants: Mapping[int, Any]) -> fx.GraphModule:
        """A module of the tensors alone: sizes are read from them; ``constants``: numbers and frozen tensors."""
        module = copy.deepcopy(self.module)
        graph = module.graph
        places = [n for n in graph.nodes if n.op == "placeholder"]
        behind = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(behind):
            for k, (tensor, axis) in self.sizes.items():
                size = graph.call_function(torch.ops.aten.sym_size.int, (places[tensor], axis))
                places[k].replace_all_uses_with(size)
            for k in (x for x in self.tensors if x in constants):
                module.register_buffer(f"constant_{k}", constants[k])
                places[k].replace_all_uses_with(graph.get_attr(f"constant_{k}"))
        for k in self.numbers:
            for item in list(places[k].users):
                _replace(item, constants[k])
                graph.erase_node(item)
        inputs = [k for k in self.tensors if k not in constants]
        for k, n in enumerate(places):
            if k not in inputs:
                graph.erase_node(n)
        for k in inputs:
            places[k].target = f"x{k}"
            places[k]._rename(f"x{k}")
        end = next(n for n in graph.nodes if n.op == "output")
        results = [end.args[0][k] for k, (kind, _) in enumerate(self.outputs) if kind == "result"]
        end.args = (tuple(results),)
        graph.lint()
        return fx.GraphModule(module, graph)  # a new one: torch's copy does not know its arguments before it runs


def _symbols(value: torch.Tensor) -> dict[int, str]:
    """Axis -> symbol, for axes whose size is one."""
    found = {}
    for axis, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt):
            found[axis] = str(size.node.expr)
    return found


def _outputs(gm: fx.GraphModule, places: list[fx.Node], tensors: list[int]) -> tuple[tuple[str, int], ...]:
    """("result", position), ("argument", position) or ("none", 0).

    UnsupportedError: an output is no tensor, or has no memory of its own.
    """
    (end,) = (n for n in gm.graph.nodes if n.op == "output")
    storages = {id_of(places[k].meta["example_value"]) for k in tensors}
    out: list[tuple[str, int]] = []
    count = 0
    for x in end.args[0]:
        if x is None:
            out.append(("none", 0))
        elif isinstance(x, fx.Node) and x in places:
            out.append(("argument", places.index(x)))
        else:
            value = x.meta.get("example_value") if isinstance(x, fx.Node) else x
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(f"the output {x} is no tensor", rule="outputs", remedy="return tensors")
            if id_of(value) in storages:
                raise UnsupportedError(f"the output {x} is a view of an input", rule="outputs", remedy="clone it")
            out.append(("result", count))
            count += 1
    if not count:
        raise UnsupportedError("the graph computes no tensor", rule="outputs of a graph")
    return tuple(out)


def id_of(t: torch.Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(t.untyped_storage()._cdata)


def _replace(node: fx.Node, value: Any) -> None:
    """Writes a number where a node is used."""
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda a: value if a is node else a)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda a: value if a is node else a)


# -- exporting ---------------------------------------------------------------------------------------------------------


def export(module: fx.GraphModule, tensors: Sequence[torch.Tensor], symbols: Sequence[Mapping[int, str]]) -> Any:
    """The ONNX model of a graph. UnsupportedError: torch cannot export it, or it writes into its inputs."""
    dims = {s: torch.export.Dim(s) for found in symbols for s in found.values() if s.isidentifier()}
    named = tuple({axis: dims.get(s, torch.export.Dim.AUTO) for axis, s in found.items()} for found in symbols)
    loose = tuple(dict.fromkeys(found, torch.export.Dim.AUTO) for found in symbols)
    exporter = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it names every package that is not installed
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                program = torch.export.export(module, tuple(tensors), dynamic_shapes=named, strict=False)
            except torch._dynamo.exc.UserError:  # a relation between sizes that names do not say
                program = torch.export.export(module, tuple(tensors), dynamic_shapes=loose, strict=False)
            program = program.run_decompositions({})  # writes into inputs become outputs of their own
            signature = program.graph_signature
            if signature.user_inputs_to_mutate or signature.buffers_to_mutate:
                raise UnsupportedError("the graph writes into its inputs", rule="pure graphs", remedy="return them")
            made = torch.onnx.export(program, (), dynamo=True, verbose=False, opset_version=OPSET)
        return made.model_proto
    except PolydynError:
        raise
    except Exception as e:  # the exporter's errors have no common root
        first = str(e).strip().partition("\n")[0]
        raise UnsupportedError(
            f"torch cannot export the graph: {first}", rule="torch.export", remedy="see the log of torch"
        ) from e
    finally:
        exporter.setLevel(level)


# -- running -----------------------------------------------------------------------------------------------------------


class CompiledGraph:
    """A captured graph as a function of its arguments, compiled at its first call, when torch no longer traces."""

    def __init__(self, capture: Capture, settings: Settings, forward: Callable[..., Any]) -> None:
        self._capture, self._settings, self._forward = capture, settings, forward
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._eager: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The graph's outputs."""
        if self._eager is not None:
            return self._eager(*arguments)
        numbers = tuple(arguments[k].item() for k in self._capture.numbers)
        call = self._calls.get(numbers)
        if call is None:
            try:
                call = self._calls[numbers] = _Call(self._capture, self._settings, arguments, numbers)
            except PolydynError as e:
                self._eager = _eager(self._forward, e, self._settings)
                return self._eager(*arguments)
        try:
            return call(arguments)
        except InputError as e:  # of this call only: a size that the program was not compiled for
            return _eager(self._forward, e, self._settings)(*arguments)

    @property
    def eager(self) -> bool:
        """Whether it runs as torch has it, because it was refused."""
        return self._eager is not None

    @property
    def programs(self) -> list[Program]:
        """What was compiled."""
        return [c.program for c in self._calls.values()]


class _Call:
    """A program of a graph, for the numbers that were among its arguments."""

    def __init__(
        self, capture: Capture, settings: Settings, arguments: Sequence[Any], numbers: tuple[Any, ...]
    ) -> None:
        parameters = {k: v for k, v in enumerate(arguments) if isinstance(v, torch.nn.Parameter)}
        frozen = {k: v.detach() for k, v in parameters.items() if settings.freeze}
        self._frozen = [(k, v.data_ptr(), v._version) for k, v in frozen.items()]
        constants = dict(zip(capture.numbers, numbers, strict=True)) | frozen
        self._inputs = [k for k in capture.tensors if k not in constants]
        tensors = [arguments[k].detach() for k in self._inputs]
        kinds = {arguments[k].device.type for k in capture.tensors}
        if not kinds <= {"cpu"} and kinds != {"cuda"}:
            raise UnsupportedError(f"tensors on {', '.join(sorted(kinds))}", rule="devices", remedy="all on one device")
        self._on_device = kinds == {"cuda"}
        symbols = [s for k, s in zip(capture.tensors, capture.symbols, strict=True) if k in self._inputs]
        model = export(capture.exportable(constants), tensors, symbols)
        said = settings.arguments
        target = said.target or (_cuda_target(tensors) if self._on_device else "cpu")
        self.program = cached_program(model, replace(said, target=target), threads=settings.threads)
        self._names = [i.name for i in model.graph.input]
        self._results = [o.name for o in model.graph.output]
        self._outputs = capture.outputs
        self._views: list[tuple[Any, int, Any]] = [(None, 0, None)] * len(self._inputs)
        log.info("a graph of %d kernels, target %s", self.program.kernel_count, target)

    def __call__(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        for k, pointer, version in self._frozen:
            if arguments[k].data_ptr() != pointer or arguments[k]._version != version:
                raise InputError("a frozen parameter was changed", rule="freeze", remedy="compile the model again")
        feeds = {}
        for position, (name, k) in enumerate(zip(self._names, self._inputs, strict=True)):
            tensor = arguments[k]
            if self._on_device:
                feeds[name] = tensor.detach()
                continue
            known, pointer, view = self._views[position]
            if known is not tensor or pointer != tensor.data_ptr():
                view = tensor.detach().numpy()
                self._views[position] = (tensor, tensor.data_ptr(), view)
            feeds[name] = view
        results = self.program.run(feeds)
        made = [results[n] for n in self._results]
        return tuple(
            arguments[k] if kind == "argument" else None if kind == "none" else _tensor(made[k])
            for kind, k in self._outputs
        )


def _tensor(result: Any) -> torch.Tensor:
    """The tensor of an output, in the same memory."""
    if isinstance(result, np.ndarray):
        return torch.from_numpy(result)
    return torch.from_dlpack(result)


def _cuda_target(tensors: Sequence[torch.Tensor]) -> str:
    from polydyn.session.session import cuda_target

    index = next(t.device.index or 0 for t in tensors if t.device.type == "cuda")
    target = cuda_target(index)
    if not target:
        raise UnsupportedError(f"no kernels for cuda:{index}", rule="architectures", remedy="run on the CPU")
    return target
