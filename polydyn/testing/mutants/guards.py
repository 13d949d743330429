"""Mutants of guards, which ONNX's reference evaluator kills: it accepts a call exactly if all guards hold.

A guard that is too weak accepts sizes at which an operator of the model is undefined. A guard that is too strong
rejects sizes at which the model has a result. The evaluator knows nothing of polydyn's shapes, guards and plans.

The compiler assumes that unknown dims are equal, where ONNX also broadcasts a dim of 1. So sizes of 0 or 1 count only
if guards and evaluator agree on them before a change. Three changes have no effect and are not made: the sides of an
equality are exchanged; a symbol is replaced by one that other guards say is equal; twice a size is a multiple of an odd
number exactly if the size is.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from polydyn.graph.ir import Guard
from polydyn.schedules.index import Index
from polydyn.testing.mutants.score import Score
from polydyn.testing.plan.arithmetic import guard_holds
from polydyn.testing.plan.planned import plans_of

MODELS: Mapping[str, tuple[str, str]] = {
    "sum": ("float[A, 4] x, float[B, 4] y", "o = Add (x, y)"),
    "sums": ("float[A, B] x, float[C, D] y, float[A, E] z", "t = Add (x, y) o = Mul (t, z)"),
    "product": ("float[A, B] x, float[C, D] y", "o = MatMul (x, y)"),
    "concat": ("float[A, B] x, float[C, D] y, float[E, 3] z", "c = Concat <axis = 0> (x, y) o = MatMul (c, z)"),
    "pyramid": ("float[1, 1, H, W] x", "a = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x) "
                "b = Resize (a, , scales) o = Add (b, x)"),
    "rows": ("float[A, B] x, float[C, 4] y", "r = Reshape (x, fours) o = Concat <axis = 1> (r, y)"),
    "blocks": ("float[A, B] x", "o = Reshape (x, threes)"),
    "halves": ("float[A, 2] x", "p, q = Split <axis = 0, num_outputs = 2> (x) o = Concat <axis = 1> (p, q)"),
    "window": ("float[1, 1, H, W] x", "o = Conv <kernel_shape = [3, 5]> (x, w)"),
    "strides": ("float[1, 1, H, W] x", "o = Conv <kernel_shape = [3, 5], strides = [2, 3]> (x, w)"),
    "choice": ("float[A, B] x, bool[C, B] c, float[A, D] y", "o = Where (c, x, y)"),
    "sixth": ("float[A, 3] x", "o = Gather <axis = 0> (x, five)"),
    "depth": ("float[1, C, H, 4] x", "o = DepthToSpace <blocksize = 2> (x)"),
    "space": ("float[1, 1, H, W] x", "o = SpaceToDepth <blocksize = 3> (x)"),
    "tail": ("float[A, 2] x, float[B, 2] y", "s = Slice (x, one, end, zero) o = Concat <axis = 1> (s, y)"),
    "images": ("float[N, 3, H, W] x, float[M, 3] y", "a = GlobalAveragePool (x) s = Reshape (a, pairs) o = Add (s, y)"),
}  # fmt: skip
"""Inputs and nodes of models whose calls need conditions."""
CONSTANTS: Mapping[str, np.ndarray] = {
    "scales": np.array([1, 1, 2, 2], np.float32), "fours": np.array([-1, 4]), "threes": np.array([3, -1, 4]),
    "w": np.ones((1, 1, 3, 5), np.float32), "five": np.array([5]), "one": np.array([1]), "end": np.array([1 << 30]),
    "zero": np.array([0]), "pairs": np.array([-1, 3]),
}  # fmt: skip
CALLS = 800
"""Number of assignments of sizes at which guards are compared with the evaluator."""
Sizes = Mapping[str, int]


def model_of(name: str) -> onnx.ModelProto:
    """Return a model of ``MODELS``."""
    inputs, nodes = MODELS[name]
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => (float[] o) {{ {nodes} }}'
    made = onnx.parser.parse_model(text)
    used = {x for n in made.graph.node for x in n.input}
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in CONSTANTS.items() if n in used)
    made.graph.output[0].type.ClearField("tensor_type")
    return made


class Calls:
    """Sizes of calls of a model, and whether ONNX's reference evaluator accepts them."""

    def __init__(self, name: str, seed: int) -> None:
        self.model = model_of(name)
        (planned,) = plans_of(self.model, target="cpu:avx2")
        self.guards: Sequence[Guard] = planned.plan.guards
        self.symbols = {(s.input, s.axis): s.symbol for s in planned.plan.sources}
        numbers, symbols = random.Random(f"{name} {seed}"), sorted(self.symbols.values())
        drawn = [sizes_of(symbols, numbers) for _ in range(CALLS)]
        accepted = [(s, self.accepts(s)) for s in {tuple(d.items()): d for d in drawn}.values()]
        self.wrong = [s for s, yes in accepted if hold(self.guards, s) != yes and min(s.values()) > 1]
        self.known = [(s, yes) for s, yes in accepted if hold(self.guards, s) == yes]

    def accepts(self, sizes: Sizes) -> bool:
        """Return whether the evaluator computes a result of the model."""
        feeds = {}
        for i in self.model.graph.input:
            t = i.type.tensor_type
            shape = [
                d.dim_value if d.HasField("dim_value") else sizes[self.symbols[i.name, k]]
                for k, d in enumerate(t.shape.dim)
            ]
            feeds[i.name] = np.zeros(shape, bool if t.elem_type == TensorProto.BOOL else np.float32)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (result,) = ReferenceEvaluator(self.model).run(None, feeds)
        except Exception:  # the evaluator has no error type of its own
            return False
        return 0 in sizes.values() or min(np.shape(result)) > 0  # windows of small images have no results

    def kills(self, guards: Sequence[Guard]) -> bool:
        """Return whether other guards accept a call that the evaluator rejects, or reject one that it accepts."""
        return any(hold(guards, s) != yes for s, yes in self.known)


def hold(guards: Sequence[Guard], sizes: Sizes) -> bool:
    """Return whether all guards hold."""
    return all(guard_holds(g, sizes) for g in guards)


def sizes_of(symbols: Sequence[str], numbers: random.Random) -> dict[str, int]:
    """Return sizes that are often equal, or multiples of each other, or one apart."""
    base, odd = numbers.randrange(14), numbers.random() < 0.5
    more = [base + 1, base - 1, 2 * base, base // 2, 4, 12, base * 3, numbers.randrange(14), 0]
    if numbers.random() < 0.5:
        return {s: max(0, numbers.choice((base, more[-2]))) for s in symbols}
    sizes = dict.fromkeys(symbols, base)
    for s in numbers.sample(symbols, numbers.randrange(1 if odd else 0, len(symbols) + 1)):
        sizes[s] = max(0, numbers.choice(more))
    return sizes


def changes(guards: Sequence[Guard], symbols: Sequence[str]) -> Iterator[tuple[str, Sequence[Guard]]]:
    """Yield (description, guards) with one guard left out or changed."""
    for k, g in enumerate(guards):
        others = (*guards[:k], *guards[k + 1 :])
        text = f"{g.left} {g.relation} {g.right}"
        yield f"{text} is left out", others
        for relation in {"==": ("<=", "%=="), "<=": ("==",), "%==": ("==", "<=")}[g.relation]:
            yield f"{text} has the relation {relation}", (*others, replace(g, relation=relation))
        if g.relation != "==":
            yield f"{text} with sides exchanged", (*others, replace(g, left=g.right, right=g.left))
        for side, e in (("left", g.left), ("right", g.right)):
            for what, new in _expressions(g, side, e, symbols, others):
                changed = replace(g, left=new) if side == "left" else replace(g, right=new)
                yield f"{text}: {what} in the {side} side", (*others, changed)


def _expressions(
    g: Guard, side: str, e: Index, symbols: Sequence[str], others: Sequence[Guard]
) -> Iterator[tuple[str, Index]]:
    """Yield (description, expression) in place of one side of a guard."""
    yield "1 more", e + 1
    yield "1 less", e - 1
    odd = g.relation == "%==" and side == "left" and (g.right.constant or 0) % 2 == 1
    if not odd:
        yield "twice the size", e * 2
    for a in sorted(e.symbols()):
        for b in symbols:
            if a != b and b not in _equal(a, others):
                yield f"{b} instead of {a}", e.subs({a: Index.of(b)})


def _equal(symbol: str, guards: Sequence[Guard]) -> set[str]:
    """Return the symbols that guards say are equal to a symbol."""
    found = {symbol}
    for _ in guards:
        for g in guards:
            sides = {str(g.left), str(g.right)}
            found |= sides if g.relation == "==" and sides & found else set()
    return found


def score(each: int, seed: int) -> Score:
    """Return the score of at most ``each`` mutants of the guards of every model."""
    total = Score("guards")
    for name in MODELS:
        calls = Calls(name, seed)
        if calls.wrong:
            raise SystemExit(f"guards of {name} and ONNX's evaluator disagree at {calls.wrong[0]}")
        every = list(changes(calls.guards, sorted(calls.symbols.values())))
        for what, guards in random.Random(seed).sample(every, min(each, len(every))):
            total.add(f"{name}: {what}", lambda g=guards, c=calls: c.kills(g))  # type: ignore[misc]
    return total
