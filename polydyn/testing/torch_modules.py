"""Random modules for ``torch.compile``: chains of layers, functions of torch's table, views, writes, graph breaks.

A module is a list of steps. Each step takes tensors that earlier ones made and appends its own, so a module that eager
torch runs once is found by trial. The calls of a module have several sizes; between calls the same tensor objects may
change their shape, their data or nothing, and parameters change through ``.data``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from polydyn.testing.torch_aten import functions
from polydyn.testing.torch_check import Case, Session
from polydyn.testing.torch_values import FLOATS_OF_8_BITS, laid_out, random_tensor

SIZES = (2, 3, 4, 5, 7)
EDGES = (0, 1)
MAX_ELEMENTS = 20000
"""Maximum number of elements of an intermediate tensor."""
F = torch.nn.functional


@dataclass(frozen=True)
class Written:
    """A step: its text for a reader, its input tensors, and its function."""

    text: str
    operands: tuple[int, ...]
    run: Callable[..., Any]
    breaks: bool = False


class RandomModule(torch.nn.Module):  # type: ignore[misc]
    """Steps in a chain; ``results``: the tensors that are outputs."""

    def __init__(self, steps: Sequence[Written], results: Sequence[int], layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.steps, self.results = tuple(steps), tuple(results)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the results of the chain."""
        values = list(inputs)
        for step in self.steps:
            if step.breaks:
                torch._dynamo.graph_break()
            made = step.run(self, *(values[k] for k in step.operands))
            values.extend(made if isinstance(made, (list, tuple)) else (made,))
        return tuple(values[k] for k in self.results)


# -- steps -------------------------------------------------------------------------------------------------------------


class Writer:
    """Chooses the steps of a module, which eager torch runs at once: steps that it rejects are not used."""

    def __init__(self, r: random.Random, inputs: Sequence[torch.Tensor]) -> None:
        self.random, self.inputs = r, len(inputs)
        self.values: list[torch.Tensor] = [x.clone() for x in inputs]
        self.steps: list[Written] = []
        self.layers: list[torch.nn.Module] = []

    def add(self, text: str, operands: Sequence[int], run: Callable[..., Any], breaks: bool = False) -> bool:
        """Append a step if eager torch runs it and its results are of moderate size."""
        owner = torch.nn.Module()
        owner.layers = torch.nn.ModuleList(self.layers)
        try:
            with torch.no_grad():
                made = run(owner, *(self.values[k] for k in operands))
        except Exception:
            return False
        results = list(made) if isinstance(made, (list, tuple)) else [made]
        dense = all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in results)
        if not results or not dense or any(t.is_complex() or t.numel() > MAX_ELEMENTS for t in results):
            return False
        self.steps.append(Written(text, tuple(operands), run, breaks))
        self.values += results
        return True

    def pick(self) -> int:
        """Return a tensor, a late one more often."""
        n = len(self.values)
        return self.random.randrange(n) if self.random.random() < 0.3 else self.random.randrange(max(0, n - 4), n)

    def layer(self, layer: torch.nn.Module) -> int:
        """Add a new layer and return its number."""
        self.layers.append(layer.eval())
        return len(self.layers) - 1


Motif = Callable[[Writer], object]


@cache
def _table(kind: str) -> tuple[Any, ...]:
    """Return functions of torch's table by the kind of their arguments."""
    return tuple(f for f in functions() if kind in type(f).__name__ and f.op is not None)


def _function(w: Writer, kind: str) -> Any:
    """Return a function of the table, a special one less often: few are exported, and one rejects a whole module."""
    first, second = w.random.choice(_table(kind)), w.random.choice(_table(kind))
    return second if first.name.startswith("special.") else first


def _unary(w: Writer) -> None:
    f = _function(w, "UnaryUfunc")
    w.add(f.name, [w.pick()], lambda m, x: f.op(x))


def _binary(w: Writer) -> None:
    f = _function(w, "BinaryUfunc")
    scalar = w.random.choice([2, 0.5, -1.25, 3, -3])
    a, b = w.pick(), w.pick()
    if w.random.random() < 0.3:
        w.add(f"{f.name} {scalar}", [a], lambda m, x: f.op(x, scalar))
    else:
        w.add(f.name, [a, b], lambda m, x, y: f.op(x, y))


def _reduction(w: Writer) -> None:
    f = _function(w, "ReductionOp")
    k = w.pick()
    dim, keep = w.random.choice([0, -1, 1, None]), w.random.random() < 0.5
    if dim is None:
        w.add(f.name, [k], lambda m, x: f.op(x))
    else:
        w.add(f"{f.name} dim={dim}", [k], lambda m, x: f.op(x, dim=dim, keepdim=keep))


def _view(w: Writer) -> None:
    r, k = w.random, w.pick()
    n = max(w.values[k].dim(), 1)
    a, b, low, step = r.randrange(n), r.randrange(n), r.choice([0, 1, -1, -2]), r.choice([1, 1, 2])
    views: dict[str, Callable[..., Any]] = {
        f"transpose {a} {b}": lambda m, x: x.transpose(a, b),
        f"slice {a} {low} {step}": lambda m, x: x[(slice(None),) * a + (slice(low, None, step),)],
        f"select {a} {low}": lambda m, x: x.select(a, low),
        f"unsqueeze {a}": lambda m, x: x.unsqueeze(a),
        f"squeeze {a}": lambda m, x: x.squeeze(a),
        "flatten": lambda m, x: x.flatten(),
        "reshape": lambda m, x: x.reshape(x.shape[0], -1),
        f"expand {a}": lambda m, x: x.unsqueeze(a).expand(*x.shape[:a], 3, *x.shape[a:]),
        f"chunk {a}": lambda m, x: x.chunk(2, a),
        f"split {a}": lambda m, x: x.split([1, x.shape[a] - 1], a),
        f"unbind {a}": lambda m, x: x.unbind(a)[:3],
        "diagonal": lambda m, x: x.diagonal(),
        f"unfold {a}": lambda m, x: x.unfold(a, 2, 1),
        f"flip {a}": lambda m, x: x.flip(a),
        f"roll {a}": lambda m, x: x.roll(1, a),
        f"movedim {a} {b}": lambda m, x: x.movedim(a, b),
        "contiguous": lambda m, x: x.contiguous(),
    }
    text = r.choice(list(views))
    w.add(text, [k], views[text])


def _write(w: Writer) -> None:
    """Add an update in place, of a tensor or of a view of one."""
    r = w.random
    a, b, v = w.pick(), w.pick(), r.choice([2, 0.5, -1])
    writes: dict[str, tuple[list[int], Callable[..., Any]]] = {
        "add_": ([a, b], lambda m, x, y: x.add_(y)),
        f"mul_ {v}": ([a], lambda m, x: x.mul_(v)),
        "zero_ row": ([a], lambda m, x: (x[0:1].zero_(), x)[1]),
        f"fill_ column {v}": ([a], lambda m, x: (x[..., -1].fill_(v), x)[1]),
        "copy_": ([a, b], lambda m, x, y: x.copy_(y)),
        "relu_": ([a], lambda m, x: x.relu_()),
        "assign": ([a, b], lambda m, x, y: x.__setitem__(slice(1, None), y[1:]) or x),
        "masked_fill_": ([a], lambda m, x: x.masked_fill_(x > 0, v)),
        "clamp_": ([a], lambda m, x: x.clamp_(-1, 1)),
    }
    text = r.choice(list(writes))
    w.add(text, *writes[text])


def _cast(w: Writer) -> None:
    floats = [torch.float32, torch.float16, torch.bfloat16, torch.float64, *FLOATS_OF_8_BITS]
    dtype = w.random.choice([*floats, torch.int64, torch.int32, torch.bool])
    w.add(f"to {dtype}", [w.pick()], lambda m, x: x.to(dtype))


def _join(w: Writer) -> None:
    r = w.random
    k = w.pick()
    same = [j for j, t in enumerate(w.values) if t.shape == w.values[k].shape and t.dtype == w.values[k].dtype]
    chosen = [k, *r.choices(same, k=r.choice([1, 2]))]
    axis = r.randrange(max(w.values[k].dim(), 1))
    if r.random() < 0.3:
        w.add(f"stack {axis}", chosen, lambda m, *x: torch.stack(x, axis))
    else:
        w.add(f"cat {axis}", chosen, lambda m, *x: torch.cat(x, axis))


def _layer(w: Writer) -> None:
    """Add a layer with the width of the last axis or of the channels."""
    r, k = w.random, w.pick()
    x = w.values[k]
    if not x.dim():
        return
    last, channels = x.shape[-1], x.shape[1] if x.dim() > 1 else 0
    nn = torch.nn
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "Linear": lambda: nn.Linear(last, r.choice([2, 4, last])),
        "LayerNorm": lambda: nn.LayerNorm(last),
        "RMSNorm": lambda: nn.RMSNorm(last),
        "Conv1d": lambda: nn.Conv1d(channels, 4, 2, padding=1),
        "Conv2d": lambda: nn.Conv2d(channels, 4, 2, padding=1, stride=r.choice([1, 2])),
        "BatchNorm1d": lambda: nn.BatchNorm1d(channels),
        "BatchNorm2d": lambda: nn.BatchNorm2d(channels),
        "GroupNorm": lambda: nn.GroupNorm(1, channels),
        "MultiheadAttention": lambda: nn.MultiheadAttention(last, 1, batch_first=True),
        "GRU": lambda: nn.GRU(last, 3, batch_first=True),
        "PReLU": lambda: nn.PReLU(),
        "Upsample": lambda: nn.Upsample(scale_factor=2, mode=r.choice(["nearest", "linear"])),
        "MaxPool1d": lambda: nn.MaxPool1d(2, 1),
        "AdaptiveAvgPool1d": lambda: nn.AdaptiveAvgPool1d(r.choice([1, 2, 3])),
        "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d((2, r.choice([1, 2, 3]))),
        "AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d((2, r.choice([1, 2, 3]))),
    }
    name = r.choice(list(makers))
    try:
        number = w.layer(makers[name]().to(x.dtype if x.dtype.is_floating_point else torch.float32))
    except Exception:
        return
    if name == "MultiheadAttention":
        done = w.add(name, [k], lambda m, x: m.layers[number](x, x, x, need_weights=False)[0])
    elif name == "GRU":
        done = w.add(name, [k], lambda m, x: m.layers[number](x)[0])
    else:
        done = w.add(name, [k], lambda m, x: m.layers[number](x))
    if not done:
        del w.layers[number:]


def _attention(w: Writer) -> None:
    """Add attention of a tensor with itself; the mask depends on values, so any of its rows may hide every key."""
    r, k = w.random, w.pick()
    form, limit = r.choice(["none", "causal", "bool", "float"]), r.choice([0.0, 0.5, 1.0])

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x if x.dim() > 2 else x[None]
        if form in ("none", "causal"):
            return F.scaled_dot_product_attention(x, x, x, is_causal=form == "causal")
        mask = (x @ x.transpose(-2, -1)) > limit
        given = mask if form == "bool" else torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(x, x, x, given)

    w.add(f"attention {form} {limit}", [k], run)


def _product(w: Writer) -> None:
    w.add("matmul", [w.pick(), w.pick()], lambda m, x, y: x @ y.transpose(-2, -1))


def _misc(w: Writer) -> None:
    r = w.random
    a, b, dim = w.pick(), w.pick(), r.choice([0, -1])
    kind, own, wide = r.choice(["sum", "mean", "amax"]), r.random() < 0.5, r.choice([0.6, 1.7])
    some: dict[str, tuple[list[int], Callable[..., Any]]] = {
        f"softmax {dim}": ([a], lambda m, x: x.softmax(dim)),
        f"cumsum {dim}": ([a], lambda m, x: x.cumsum(dim)),
        f"sort {dim}": ([a], lambda m, x: x.sort(dim)[0]),
        f"gather {dim}": ([a], lambda m, x: x.gather(dim, (x > 0).long() * 0)),
        "where": ([a, b], lambda m, x, y: torch.where(x > y, x, y)),
        "index": ([a], lambda m, x: x[torch.arange(x.shape[0] - 1, -1, -1)]),
        "pad": ([a], lambda m, x: F.pad(x, (1, 2), value=0.5)),
        "scale by a size": ([a], lambda m, x: x / x.shape[-1]),
        f"scatter_reduce {kind} {dim}": (
            [a, b],
            lambda m, x, y: x.scatter_reduce(
                dim,
                torch.arange(y.shape[dim]).remainder(2).expand(y.movedim(dim, -1).shape).movedim(-1, dim),
                y,
                kind,
                include_self=own,
            ),
        ),
        f"antialiased {wide}": ([a], lambda m, x: F.interpolate(x, scale_factor=wide, mode="bilinear", antialias=True)),
        "new axis times": ([a, b], lambda m, x, y: x[..., None] * y[..., None, :]),
        "constant": ([a], lambda m, x: x + torch.arange(x.shape[-1])),
    }
    text = r.choice(list(some))
    w.add(text, *some[text])


MOTIFS: tuple[tuple[Motif, int], ...] = (
    (_unary, 3), (_binary, 4), (_reduction, 2), (_view, 5), (_write, 2), (_cast, 1), (_join, 1), (_layer, 3),
    (_attention, 1), (_product, 1), (_misc, 2),
)  # fmt: skip
"""Motifs with their weights."""


# -- modules -----------------------------------------------------------------------------------------------------------


def _draw(r: random.Random) -> tuple[list[tuple[str, ...]], list[Any]]:
    """Draw axes and types of the inputs."""
    shapes = [tuple(r.choices(["B", "T", "4", "3"], k=r.choice([1, 2, 2, 3, 3, 4])))]
    while len(shapes) < r.choice([1, 2, 2, 3]):
        shapes.append(shapes[0] if r.random() < 0.6 else shapes[0][-r.choice([1, 2]) :])
    floats = [torch.float32] * 6 + [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool]
    first = r.choice([*floats, r.choice(FLOATS_OF_8_BITS)] if FLOATS_OF_8_BITS else floats)
    return shapes, [first if r.random() < 0.8 else r.choice(floats) for _ in shapes]


def _inputs(shapes: Sequence[Sequence[str]], dtypes: Sequence[Any], sizes: dict[str, int], seed: str) -> list[Any]:
    r = random.Random(seed)
    special = 0.2 if r.random() < 0.3 else 0.0
    made = []
    for axes, dtype in zip(shapes, dtypes, strict=True):
        shape = [sizes.get(a) if a in sizes else int(a) for a in axes]
        small = dtype in FLOATS_OF_8_BITS
        x = random_tensor(shape, torch.float32 if small else dtype, r, special)  # type: ignore[arg-type]
        made.append(laid_out(x, r).to(dtype) if r.random() < 0.3 else x.to(dtype))
    return made


def module_case(seed: int) -> Case | None:
    """Return the case of a seed, or None if eager torch runs no step of it."""
    r = random.Random(f"module {seed}")
    shapes, dtypes = _draw(r)
    names = ("B", "T")
    sizes = [{n: r.choice(SIZES) for n in names} for _ in range(r.choice([2, 2, 3]))]
    if r.random() < 0.3:
        sizes[-1][r.choice(names)] = r.choice(EDGES)
    kinds = [r.choice(["new", "new", "data", "resize", "same", "parameters"]) for _ in sizes]
    torch.manual_seed(seed)
    w = Writer(r, _inputs(shapes, dtypes, sizes[0], f"inputs {seed} 0"))
    motifs, weights = zip(*MOTIFS, strict=True)
    length, tries = r.choice([1, 2, 3, 4, 6, 8]), 0
    while len(w.steps) < length and tries < 60:
        tries += 1
        r.choices(motifs, weights)[0](w)
    if not w.steps:
        return None
    if len(w.steps) > 2 and r.random() < 0.15:
        k = r.randrange(1, len(w.steps))
        w.steps[k] = Written(w.steps[k].text, w.steps[k].operands, w.steps[k].run, True)
    results = [len(w.values) - 1, *(w.pick() for _ in range(r.choice([0, 1, 2, 3])))]
    r.shuffle(results)
    layers = copy.deepcopy(w.layers)
    freeze = bool(w.layers) and r.random() < 0.3

    def build() -> Session:
        module = RandomModule(w.steps, results, copy.deepcopy(layers)).eval()
        return module, _calls(module, shapes, dtypes, sizes, kinds, seed)

    text = f"{[f'{d}{list(s)}' for s, d in zip(shapes, dtypes, strict=True)]} {sizes} {kinds}: " + "; ".join(
        f"{s.text} {list(s.operands)}{' after a break' if s.breaks else ''}" for s in w.steps
    )
    options = {"freeze": True} if freeze else {}
    name = f"module {seed}"
    return Case(name, build, f"{text} -> {results}{' frozen' if freeze else ''}", seed % 8 != 0, options)


def _calls(
    module: Any, shapes: Any, dtypes: Any, sizes: Sequence[dict[str, int]], kinds: Sequence[str], seed: int
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of the calls: new tensors, or the first ones changed."""
    kept: list[torch.Tensor] = []
    for k, (at, kind) in enumerate(zip(sizes, kinds, strict=True)):
        fresh = _inputs(shapes, dtypes, at, f"inputs {seed} {k}")
        if not kept or kind == "new":
            kept = fresh
        elif kind == "data":
            for old, new in zip(kept, fresh, strict=True):
                old.data = new
        elif kind == "resize":
            for old, new in zip(kept, fresh, strict=True):
                if old.is_contiguous() and not old.is_neg() and old.numel() >= new.numel():
                    old.resize_(new.shape)
        elif kind == "parameters":
            for p in module.parameters():
                p.data.mul_(0.5)
        yield tuple(kept)
