"""``torch.compile(model, backend="polydyn", dynamic=True)``: graphs captured by torch run as polydyn programs.

torch breaks a model into graphs and guards them. Each graph is exported to ONNX in memory when it is first called,
compiled once for all sizes, and cached by content. Tensors are passed without copies: on the CPU as numpy views, on a
device through DLPack. Parameters stay torch's: they are inputs of the program, so changes to them take effect. A graph
that polydyn rejects runs in torch, with the reason in the log ``polydyn.torch``; ``options={"strict": True}`` raises
the reason instead.

``capture`` reads a graph, ``outputs`` its outputs and their memory, ``exporting`` builds the ONNX model with polydyn's
``translations`` of torch's operators, ``running`` calls the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.torch_backend.capture import Capture
from polydyn.torch_backend.exporting import export
from polydyn.torch_backend.running import CompiledGraph, eager
from polydyn.torch_backend.settings import Settings, log

__all__ = ["Capture", "CompiledGraph", "Settings", "backend", "export", "log"]


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Return the function that runs a graph. torch calls this for every graph that it has captured."""
    settings = Settings.of(options)
    try:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
            raise UnsupportedError(
                "gradients are not built", rule="inference", remedy="call the model under torch.inference_mode()"
            )
        capture = Capture.of(gm)
    except PolydynError as e:
        return eager(gm.forward, e, settings)
    return CompiledGraph(capture, settings.for_graph(capture.names()), gm.forward)
