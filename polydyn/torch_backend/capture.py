"""A graph captured by torch: its arguments, its outputs, and the module that is exported."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from polydyn.errors import UnsupportedError
from polydyn.torch_backend.outputs import Outputs
from polydyn.torch_backend.tensors import check_tensor

DYNAMO = re.compile(r"^[Ll]_(.*)_$")
"""The form of dynamo's names for arguments."""


@dataclass(frozen=True)
class Capture:
    """A graph as torch captured it.

    It records which arguments are tensors, and which are sizes or numbers. ``symbols``: for each tensor, a map from
    axis to the name of its symbol. ``sizes`` maps an argument that is a size to the (tensor, axis) that has it.
    ``numbers``: arguments that are one number in a tensor. ``outputs``: the outputs and their memory.
    """

    module: fx.GraphModule
    tensors: tuple[int, ...]
    symbols: tuple[Mapping[int, str], ...]
    sizes: Mapping[int, tuple[int, int]]
    numbers: tuple[int, ...]
    outputs: Outputs

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Capture:
        """Read a graph. Raises UnsupportedError for an argument that is neither a dense tensor nor a size of one."""
        copied = copy.deepcopy(gm)
        places = [n for n in copied.graph.nodes if n.op == "placeholder"]
        values = [n.meta.get("example_value") for n in places]
        numbers = [k for k, n in enumerate(places) if n.users and all(u.target == "item" for u in n.users)]
        tensors = [k for k, v in enumerate(values) if isinstance(v, torch.Tensor) and k not in numbers]
        for k in tensors:
            check_tensor(values[k], f"the argument {places[k].target}")
        symbols = tuple(_symbols(values[k]) for k in tensors)
        where = {s: (k, axis) for k, found in zip(tensors, symbols, strict=True) for axis, s in found.items()}
        sizes = {}
        passed: dict[str, tuple[int, int | None]] = {}
        for k, v in enumerate(values):
            if k in tensors or k in numbers:
                continue
            name = str(v.node.expr) if isinstance(v, torch.SymInt) else ""
            passed[name] = (k, None)
            if not places[k].users:
                continue
            if name not in where:
                raise UnsupportedError(
                    f"the argument {places[k].target} is not a size of a tensor", rule="arguments of a graph",
                    remedy="pass it as a tensor, or mark it static",
                )  # fmt: skip
            sizes[k] = where[name]
        outputs = Outputs.of(copied, places, {**passed, **where})
        for n in copied.graph.nodes:  # values of another tracing; user lines stay
            n.meta = {k: v for k, v in n.meta.items() if k == "stack_trace"}
        return cls(copied, tuple(tensors), symbols, sizes, tuple(numbers), outputs)

    def names(self) -> dict[str, Mapping[int, str]]:
        """Map each tensor argument to its symbols, by its name in the user's code: dynamo calls ``ids`` ``L_ids_``."""
        places = [n.target for n in self.module.graph.nodes if n.op == "placeholder"]
        names = [DYNAMO.sub(r"\1", str(places[k])) for k in self.tensors]
        return {n: s for n, s in zip(names, self.symbols, strict=True) if s}

    def exportable(self, constants: Mapping[int, Any]) -> fx.GraphModule:
        """Return a module with only tensor arguments. Sizes are read from them; ``constants``: numbers and frozen
        tensors.

        Its outputs are the roots of the outputs, with axes in memory order.
        """
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
        end = next(n for n in graph.nodes if n.op == "output")
        named = {n.name: n for n in graph.nodes}
        with graph.inserting_before(end):
            end.args = (
                tuple(
                    graph.call_method("permute", (named[r.node], r.order)) if r.permuted else named[r.node]
                    for r in self.outputs.roots
                ),
            )
        for k, n in enumerate(places):
            if k not in inputs:
                graph.erase_node(n)
        for k in inputs:
            places[k].target = f"x{k}"
            places[k]._rename(f"x{k}")
        graph.lint()
        return fx.GraphModule(module, graph)  # a new one: torch's copy lacks its arguments before it runs


def _symbols(value: torch.Tensor) -> dict[int, str]:
    """Map each axis whose size is a symbol to this symbol."""
    found = {}
    for axis, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt):
            found[axis] = str(size.node.expr)
    return found


def _replace(node: fx.Node, value: Any) -> None:
    """Replace the uses of a node by a number."""
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda a: value if a is node else a)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda a: value if a is node else a)
