"""Build the ONNX model of a captured graph."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.onnx  # its exporter is loaded when it is first used
from torch import fx
from torch.fx.traceback import preserve_node_meta

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.graph.dtypes import onnx_dtype
from polydyn.shapes.sizes import Sizes, both
from polydyn.torch_backend.conditions import Condition, allowed_sizes
from polydyn.torch_backend.places import at_node, user_line
from polydyn.torch_backend.translations import table

OPSET = 18
MAX_REASON = 400
"""Maximum characters of torch's reason in an error."""
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Terminal colours in torch's messages."""


class _Traced(torch.nn.Module):  # type: ignore[misc]
    """Runs a graph node by node, so that traces keep each node's line of user code."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.captured = graph

    def forward(self, *tensors: torch.Tensor) -> Any:
        return fx.Interpreter(self.captured).run(*tensors)


def export(
    module: fx.GraphModule, tensors: Sequence[torch.Tensor], symbols: Sequence[Mapping[int, str]]
) -> tuple[Any, Condition]:
    """Export the ONNX model of a graph, with the condition on sizes under which it is right. Raises UnsupportedError
    if torch cannot export it, or it writes into its inputs.
    """
    traced = None
    try:
        with _quiet(), torch.no_grad(), preserve_node_meta():
            traced = _trace(_Traced(module), tensors, symbols)
            traced = traced.run_decompositions(table())  # writes into inputs become separate outputs
            signature = traced.graph_signature
            written = {**signature.user_inputs_to_mutate, **signature.buffers_to_mutate}
            if written:
                refusal = UnsupportedError("the graph writes into its inputs", rule="pure graphs", remedy="return them")
                raise at_node(refusal, next((n for n in traced.graph.nodes if n.name in written), None))
            made = torch.onnx.export(traced, (), dynamo=True, verbose=False, opset_version=OPSET, optimize=False)
            _fold(made.model)
        return _checked(made.model_proto, traced), Condition.of(traced)
    except PolydynError:
        raise
    except Exception as e:  # the exporter's errors have no common base class
        raise _refusal(e) from e


def exported_model(traced: Any, opset: int) -> tuple[Any, dict[str, Sizes]]:
    """Return the ONNX model of an exported program, and its allowed sizes by torch's names. UnsupportedError: torch
    cannot export it."""
    with exporting(), torch.no_grad():
        decomposed = traced.run_decompositions(table())
        made = torch.onnx.export(decomposed, (), dynamo=True, verbose=False, opset_version=opset, optimize=False)
        assert made is not None
        _fold(made.model)
        sizes, same = allowed_sizes(decomposed)
        allowed: dict[str, Sizes] = {}
        for name, own in sizes.items():
            name = same.get(name, name)
            allowed[name] = both(allowed.get(name, Sizes()), own)
        return _with_names(made.model_proto, same), allowed


def _with_names(model: Any, same: Mapping[str, str]) -> Any:
    """Name dims of one size alike: the compiled program asks that they are equal."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info) if same else ():
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda word: same.get(word[0], word[0]), dim.dim_param)
    return model


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Convert errors of torch's exporter to UnsupportedError; suppress what it prints."""
    try:
        with _quiet():
            yield
    except PolydynError:
        raise
    except Exception as e:  # the exporter's errors have no common base class
        raise _refusal(e) from e


def _trace(module: torch.nn.Module, tensors: Sequence[torch.Tensor], symbols: Sequence[Mapping[int, str]]) -> Any:
    dims = {s: torch.export.Dim(s) for found in symbols for s in found.values() if s.isidentifier()}
    named = tuple({axis: dims.get(s, torch.export.Dim.AUTO) for axis, s in found.items()} for found in symbols)
    loose = tuple(dict.fromkeys(found, torch.export.Dim.AUTO) for found in symbols)
    try:
        return torch.export.export(module, tuple(tensors), dynamic_shapes=(named,), strict=False)
    except torch._dynamo.exc.UserError:  # a relation between sizes that names do not express
        return torch.export.export(module, tuple(tensors), dynamic_shapes=(loose,), strict=False)


def _fold(model: Any) -> None:
    """Inline functions and fold constants.

    The exporter's own optimizer also matches constants within a tolerance, so it would remove an added 1e-8.
    """
    from onnxscript import optimizer  # the exporter itself loads it late: torch.compile alone does not need it

    optimizer.inline(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    optimizer.remove_unused_nodes(model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output, warnings and logs of torch's exporter."""
    exporter = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it lists every missing package
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)


def _checked(model: Any, traced: Any) -> Any:
    """Return the model. Raises UnsupportedError if the type of an output differs from torch's."""
    (end,) = (n for n in traced.graph.nodes if n.op == "output")
    found = [n.meta["val"] for n in end.args[0]]
    for value, output in zip(found, model.graph.output, strict=True):
        given = getattr(torch, onnx_dtype(output.type.tensor_type.elem_type))
        if given != value.dtype:
            raise UnsupportedError(
                f"torch exports the output {output.name} as {given}, not as {value.dtype}", rule="torch.export",
                remedy="convert it",
            )  # fmt: skip
    return model


def _refusal(error: Exception) -> UnsupportedError:
    """Return the error for a failed export: the operator, the user's line, and torch's reason."""
    reasons = [e for e in _causes(error) if str(e).strip()]
    reason = _sentence(str(reasons[-1]))
    node = next((n for e in reversed(reasons) if (n := _failed(e)) is not None), None)
    operator = str(node.target) if node is not None else ""
    return UnsupportedError(
        f"torch cannot export {operator or 'the graph'}: {reason}",
        node=" at ".join(x for x in (operator, user_line(node.stack_trace)) if x) if node is not None else None,
        rule="torch.export", remedy="write it with other operators, or let torch run it",
    )  # fmt: skip


def _sentence(text: str) -> str:
    """Return a message of torch as one line, without colours and without its list of next steps."""
    plain = ESCAPES.sub("", text).partition("This is step")[0].partition("Next steps:")[0]
    return textwrap.shorten(plain, MAX_REASON, placeholder=" ...").rstrip(" .:;")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, the first cause last."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def _failed(error: BaseException) -> fx.Node | None:
    """Return the innermost node whose translation raised an error."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in ("node", "n"):
            value = frame.f_locals.get(name)
            if isinstance(value, fx.Node) and value.op.startswith("call_"):
                found = value
    return found
