"""``polydyn.from_torch``: the ONNX model, and the program, of a module of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.program_cache import compile as compile_model
from polydyn.shapes.sizes import Dims, Sizes, both, sizes_by_name

if TYPE_CHECKING:
    import onnx

    from polydyn.runtime.program import Program

Axes = Mapping[str, Sequence[Any]]
"""Name of an input -> a name for each of its axes, None for an axis of one size; for a sequence of tensors, these of
each."""

TORCHS_NAME = re.compile(r"[su]\d+$")
"""A size that torch named."""


def from_torch(
    module: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, symbols: Axes | None = None,
    **arguments: Any,
) -> Program:  # fmt: skip
    """Compile a module of torch, or a ``torch.export.ExportedProgram``, for the sizes that its calls will have.

    ``args``, ``kwargs``: tensors of an example call, of any sizes from 2 on; an exported program needs none.
    ``symbols``: names for the axes of inputs, as in ``{"x": ("batch", None)}``; None is an axis of one size. Without
    it every axis that the module allows is dynamic and is named after its input, as in ``x_0``. An exported program
    keeps its own dims. ``arguments``: those of ``polydyn.compile``, as in ``dims={"batch": (1, 64)}``. The module is
    exported as it is: call ``eval()`` first. Its weights are copied. Inputs have the names of ``forward``'s
    parameters.

    InputError: this is no module, or the example does not fit. UnsupportedError: torch cannot export it, or its axes
    have not the names' sizes; other errors as of ``polydyn.compile``.
    """
    model, allowed = torch_model(module, args, kwargs, symbols=symbols)
    return compile_model(model, **within(arguments, allowed))


def torch_model(
    module: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, symbols: Axes | None = None,
    inputs: Sequence[str] = (), outputs: Sequence[str] = (), axes: Axes | None = None,
) -> tuple[onnx.ModelProto, dict[str, Sizes]]:  # fmt: skip
    """Return the ONNX model of a module, and the sizes for which it is right, by the names of its dims.

    ``inputs``, ``outputs``: names instead of torch's; ``axes``: names of the axes of these inputs. Errors:
    ``from_torch``.
    """
    try:
        import torch
        import torch.onnx
    except ImportError as e:
        raise UnsupportedError(f"torch is not installed: {e}", rule="from_torch",
                               remedy="pip install polydyn[torch]") from e  # fmt: skip
    from polydyn.torch_backend.exporting import OPSET, exported_model

    if isinstance(module, torch.export.ExportedProgram):
        if args or kwargs or symbols:
            raise InputError("an exported program has its own inputs and dims", rule="from_torch",
                             remedy="leave out args, kwargs and symbols, or give the module")  # fmt: skip
        traced = module
    else:
        if not isinstance(module, torch.nn.Module):
            raise InputError(f"a {type(module).__name__} is not a module", rule="from_torch",
                             remedy="give a torch.nn.Module or a torch.export.ExportedProgram")  # fmt: skip
        traced = _exported(torch, module, tuple(args), dict(kwargs or {}), symbols)
    with _without_fast_path(torch):
        model, allowed = exported_model(traced, OPSET)
    _rename(model, inputs, outputs)
    names = _name_dims(model, axes or symbols or {})
    return model, {names.get(name, name): sizes for name, sizes in allowed.items()}


def within(arguments: Mapping[str, Any], allowed: Mapping[str, Sizes]) -> dict[str, Any]:
    """Return arguments of ``polydyn.compile`` whose ``dims`` are sizes for which an exported module is right, too."""
    dims: Dims | None = arguments.get("dims")
    chosen = sizes_by_name(dims)
    chosen |= {name: both(chosen.get(name, Sizes()), sizes) for name, sizes in allowed.items()}
    return {**arguments, "dims": chosen}


def _exported(torch: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Axes | None) -> Any:
    """Return the exported program of a module for an example call."""
    import inspect

    from polydyn.torch_backend.exporting import exporting

    if not args and not kwargs:
        raise InputError("there is no example call", rule="from_torch", remedy="give tensors: from_torch(module, (x,))")
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as e:
        raise InputError(f"the example does not fit forward({', '.join(signature.parameters)}): {e}", rule="from_torch",
                         remedy="give the arguments of forward") from e  # fmt: skip
    if unknown := sorted(set(symbols or {}) - set(bound)):
        raise InputError(f"symbols name {unknown[0]!r}, which is no argument of the example", rule="from_torch",
                         remedy=f"use {', '.join(bound)}")  # fmt: skip
    for name, axes in (symbols or {}).items():
        rank = getattr(bound[name], "ndim", len(axes))
        if len(axes) != rank:
            raise InputError(f"{name} has {rank} axes, not {len(axes)}", tensor=name, rule="symbols",
                             remedy="give a name or None for each axis")  # fmt: skip
    spec = {n: _dynamic(torch, v, (symbols or {}).get(n, () if symbols else None)) for n, v in bound.items()}
    with exporting(), torch.no_grad(), _without_fast_path(torch):
        return torch.export.export(module, args, kwargs, dynamic_shapes=spec, strict=False)


def _dynamic(torch: Any, value: Any, axes: Any) -> Any:
    """Return the dynamic axes of an argument, for ``torch.export``: those that have a name, or all. torch says later
    which sizes are equal, or fixed."""
    if isinstance(value, (tuple, list)):
        every = axes or [axes] * len(value)
        return type(value)(_dynamic(torch, v, a) for v, a in zip(value, every, strict=True))
    if not isinstance(value, torch.Tensor):
        return None
    chosen = range(value.ndim) if axes is None else [k for k, name in enumerate(axes) if name is not None]
    return dict.fromkeys(chosen, torch.export.Dim.AUTO)


@contextmanager
def _without_fast_path(torch: Any) -> Iterator[None]:
    """Turn off torch's fused layer of attention, which cannot be exported."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def _rename(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs other names. PolydynError: their number differs."""
    for values, names in ((model.graph.input, inputs), (model.graph.output, outputs)):
        if not names:
            continue
        if len(values) != len(names):
            raise PolydynError(f"the exported model has {len(values)} values, not {', '.join(names)}",
                               rule="from_torch", remedy="report it: this is a bug in polydyn")  # fmt: skip
        new = {v.name: n for v, n in zip(values, names, strict=True) if v.name != n}
        for value in values:
            value.name = new.get(value.name, value.name)
        for node in model.graph.node:
            node.input[:] = [new.get(x, x) for x in node.input]
            node.output[:] = [new.get(x, x) for x in node.output]


def _name_dims(model: onnx.ModelProto, axes: Axes) -> dict[str, str]:
    """Name each size that torch named: as the axes are named, else after the first input that has it. Return torch's
    names with the new ones.
    """
    names: dict[str, str] = {}
    graph = model.graph
    for value in graph.input:
        given = axes.get(value.name, ())
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param.isdecimal():
                dim.dim_value = int(dim.dim_param)
            name = given[axis] if axis < len(given) else None
            if name is not None and dim.HasField("dim_value"):
                raise UnsupportedError(f"axis {axis} of {value.name} is {dim.dim_value} in the exported model",
                                       tensor=value.name, dim=name, rule="torch.export fixed it",
                                       remedy=f"give None for {name!r}, or an example of another size")  # fmt: skip
            if TORCHS_NAME.match(dim.dim_param):
                old = names.setdefault(dim.dim_param, name or f"{value.name}_{axis}")
                if name not in (None, old):
                    raise UnsupportedError(f"axis {axis} of {value.name} always equals {old}", tensor=value.name,
                                           dim=name, rule="torch.export", remedy=f"name it {old}")  # fmt: skip
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = "".join(names.get(w, w) for w in re.split(r"(\w+)", dim.dim_param))
    return names
