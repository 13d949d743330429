"""The outputs of a captured graph: their memory in torch, and their reconstruction from a program's results.

A program computes each piece of memory once, densely. If eager torch returns a view of it, of another output or of an
argument, the result is the same view here. Sizes, strides and offset are formulas of the symbols, evaluated for each
call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.printers import PythonPrinter

from polydyn.errors import UnsupportedError
from polydyn.torch_backend.places import at_node
from polydyn.torch_backend.tensors import check_tensor

Symbols = Mapping[str, tuple[int, int | None]]
"""Maps a symbol to the (argument, axis) that has this size. The axis is None if the argument is the number itself."""


@dataclass(frozen=True)
class Formula:
    """Integers as formulas of symbols, evaluated from a call's arguments."""

    text: str
    symbols: tuple[tuple[int, int | None], ...]

    @classmethod
    def of(cls, values: Sequence[Any], symbols: Symbols, subject: str) -> Formula:
        """Return the formula of sizes. Raises UnsupportedError if no argument holds one of its symbols."""
        expressions = [v.node.expr if isinstance(v, torch.SymInt) else v for v in values]
        names = sorted({str(s) for e in expressions for s in getattr(e, "free_symbols", ())})
        for n in names:
            if n not in symbols:
                raise UnsupportedError(
                    f"{subject} has the size {n}, which is not a size of an argument", rule="outputs of a graph",
                    remedy="return tensors whose sizes follow from the sizes of the inputs",
                )  # fmt: skip
        printer = PythonPrinter()
        numbers = "".join(f"{printer.doprint(e) if hasattr(e, 'free_symbols') else e}, " for e in expressions)
        return cls(f"lambda {', '.join(names)}: ({numbers})", tuple(symbols[n] for n in names))

    @cached_property
    def _function(self) -> Callable[..., tuple[int, ...]]:
        function: Callable[..., tuple[int, ...]] = eval(self.text, {"math": math, "torch": torch})
        return function

    def __call__(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """Return the numbers for these arguments."""
        return self._function(*(arguments[k] if a is None else arguments[k].shape[a] for k, a in self.symbols))


@dataclass(frozen=True)
class Root:
    """A tensor that the program computes: the node, and its axes from the largest stride to the smallest.

    ``layout``: size and stride of memory with gaps, to which the result is copied; None if it is dense.
    """

    node: str
    dtype: Any
    order: tuple[int, ...]
    layout: Formula | None = None

    @property
    def permuted(self) -> bool:
        """Whether the axes in memory have another order than in the tensor."""
        return self.order != tuple(range(len(self.order)))

    def tensor(self, result: torch.Tensor, arguments: Sequence[Any]) -> torch.Tensor:
        """Return the tensor with torch's strides, from a result whose axes are in memory order."""
        if self.permuted:
            result = result.permute(tuple(self.order.index(k) for k in range(len(self.order))))
        if self.layout is None:
            return result
        numbers = self.layout(arguments)
        rank = len(numbers) // 2
        return torch.empty_strided(numbers[:rank], numbers[rank:], dtype=result.dtype, device=result.device).copy_(
            result
        )


@dataclass(frozen=True)
class Output:
    """One output.

    ``kind``: ``none``, ``argument``, ``root``, ``view`` (of a root), ``alias`` (a view of an argument), ``size``.
    ``source``: the root or argument. ``formula``: size, stride and offset of a view, or the size.
    """

    kind: str
    source: int = 0
    formula: Formula | None = None

    def value(self, arguments: Sequence[Any], roots: Sequence[torch.Tensor]) -> Any:
        """Return the value for torch's caller."""
        if self.kind == "none":
            return None
        if self.kind == "argument":
            return arguments[self.source]
        if self.kind == "root":
            return roots[self.source]
        assert self.formula is not None
        numbers = self.formula(arguments)
        if self.kind == "size":
            return numbers[0]
        whole = arguments[self.source].detach() if self.kind == "alias" else roots[self.source]
        *layout, offset = numbers
        rank = len(layout) // 2
        return whole.as_strided(layout[:rank], layout[rank:], whole.storage_offset() + offset)


@dataclass(frozen=True)
class Outputs:
    """All outputs of a graph."""

    roots: tuple[Root, ...]
    outputs: tuple[Output, ...]

    @classmethod
    def of(cls, gm: fx.GraphModule, places: Sequence[fx.Node], symbols: Symbols) -> Outputs:
        """Read the outputs of a graph whose nodes hold the values of their tracing. Raises UnsupportedError."""
        return _Reader(gm, places, symbols).read()

    def values(self, results: Sequence[torch.Tensor], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values for torch's caller. ``results``: the dense tensors of the roots, axes in memory order."""
        roots = [root.tensor(r, arguments) for root, r in zip(self.roots, results, strict=True)]
        return tuple(o.value(arguments, roots) for o in self.outputs)


class _Reader:
    """The state of ``Outputs.of`` while it reads."""

    def __init__(self, gm: fx.GraphModule, places: Sequence[fx.Node], symbols: Symbols) -> None:
        self.places, self.symbols = list(places), symbols
        (self.end,) = (n for n in gm.graph.nodes if n.op == "output")
        self.first: dict[int, fx.Node] = {}
        for n in gm.graph.nodes:
            if isinstance(v := value_of(n), torch.Tensor) and v.layout == torch.strided:
                self.first.setdefault(storage_of(v), n)
        self.roots: dict[str, Root] = {}

    def read(self) -> Outputs:
        outputs = tuple(map(self.placed, self.end.args[0]))
        if not self.roots:
            called = next((n for n in reversed(self.end.graph.nodes) if n.op.startswith("call_")), None)
            raise at_node(UnsupportedError("the graph computes no tensor", rule="outputs of a graph"), called)
        return Outputs(tuple(self.roots.values()), outputs)

    def placed(self, x: Any) -> Output:
        try:
            return self.output(x)
        except UnsupportedError as e:
            raise at_node(e, x) from None

    def output(self, x: Any) -> Output:
        if x is None:
            return Output("none")
        value = value_of(x)
        if isinstance(x, fx.Node) and x in self.places:
            return Output("argument", self.places.index(x))
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return Output("size", 0, Formula.of((value,), self.symbols, f"the output {x}"))
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"the output {x} is not a tensor", rule="outputs", remedy="return tensors")
        check_tensor(value, f"the output {x}")
        if value.is_neg() or value.is_conj():
            raise UnsupportedError(f"the output {x} is a lazy negation", rule="outputs", remedy="call resolve_neg()")
        base = self.first[storage_of(value)]
        if base in self.places:
            return Output("alias", self.places.index(base), self.view(x, value, base))
        alone = all(o is x or not self.shares(o, value) for o in self.end.args[0])
        if (alone and order_of(value) is not None) or base is x or not covers(value_of(base)):
            return Output("root", self.root(x, alone))
        return Output("view", self.root(base, False), self.view(x, value, base))

    def shares(self, other: Any, value: torch.Tensor) -> bool:
        found = value_of(other)
        return isinstance(found, torch.Tensor) and storage_of(found) == storage_of(value)

    def view(self, x: fx.Node, value: torch.Tensor, base: fx.Node) -> Formula:
        whole = value_of(base)
        if whole.dtype != value.dtype:
            raise UnsupportedError(
                f"the output {x} is a view of {base} as {value.dtype}", rule="outputs", remedy="clone it"
            )
        numbers = (*value.shape, *value.stride(), value.storage_offset() - whole.storage_offset())
        return Formula.of(numbers, self.symbols, f"the output {x}")

    def root(self, node: fx.Node, alone: bool) -> int:
        """Return the position of a root. ``alone``: no other output shares its memory, so that it may have gaps."""
        if node.name not in self.roots:
            value = value_of(node)
            order, layout = order_of(value), None
            if not alone and not covers(value):
                raise UnsupportedError(
                    f"outputs are views of {node}, whose memory has gaps", rule="outputs", remedy="clone them"
                )
            if order is None:
                if any(s == 0 for s in value.stride()):
                    raise UnsupportedError(f"elements of the output {node} share memory", rule="outputs")
                layout = Formula.of((*value.shape, *value.stride()), self.symbols, f"the output {node}")
            self.roots[node.name] = Root(node.name, value.dtype, order or tuple(range(value.dim())), layout)
        return list(self.roots).index(node.name)


def value_of(x: Any) -> Any:
    """Return the value that torch's tracing recorded for a node: a fake tensor or a size."""
    return x.meta.get("example_value") if isinstance(x, fx.Node) else x


def storage_of(t: torch.Tensor) -> int:
    """Return a number that is equal for tensors exactly if they share memory."""
    return int(t.untyped_storage()._cdata)


def covers(t: torch.Tensor) -> bool:
    """Check whether a tensor provably covers all of its memory, without gaps."""
    whole = t.untyped_storage().nbytes() == t.numel() * t.element_size()
    return order_of(t) is not None and statically_known_true(t.storage_offset() == 0) and statically_known_true(whole)


def order_of(t: torch.Tensor) -> tuple[int, ...] | None:
    """Return the axes from the largest stride to the smallest, or None unless memory provably has no gaps."""
    hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in t.stride()]
    if any(h is None for h in hints):
        return None
    plain = tuple(range(t.dim()))
    for order in (plain, tuple(sorted(plain, key=lambda k: -hints[k]))):
        expected: Any = 1
        for axis in reversed(order):
            if not statically_known_true(t.shape[axis] == 1) and not statically_known_true(t.stride(axis) == expected):
                break
            expected = expected * t.shape[axis]
        else:
            return order
    return None
