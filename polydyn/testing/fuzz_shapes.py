"""Run random models of shape arithmetic (``polydyn/testing/random_models.py``) against ONNX Runtime, at sizes 0 to 128.

usage: python -m polydyn.testing.fuzz_shapes [SEEDS] [--first N] [--jobs 1] [--feeds 6]

Every shape, every computed size and every element must equal ONNX Runtime's, or a guard must reject the call. Four
other outcomes are allowed and counted. ``model refused``: polydyn rejects the model by name. ``strict``: a guard
rejects a call that ONNX Runtime runs; this is allowed if a note of the import equates two dims, and for empty parts of
a Concat, whose other dims ONNX Runtime does not compare. ``0 in a Reshape``: a computed size 0 is a size for polydyn,
and copies the input's dim for ONNX Runtime. ``lenient``: ONNX Runtime does not reshape an empty tensor to -1, nor split
an axis into more parts than elements. Exit code 1: a seed disagrees.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from polydyn.errors import PolydynError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph
from polydyn.graph.reference import evaluate
from polydyn.testing.campaign import Campaign, Finding, Kinds, Result, parser_of, seeds_of
from polydyn.testing.random_models import random_feeds, random_model

ort.set_default_logger_severity(4)


@dataclass
class Outcome:
    """The result of one seed: calls by kind, and errors."""

    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Open ONNX Runtime without optimisations, so that it computes the model as written."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def check(model: onnx.ModelProto, seed: int, feeds: int) -> Outcome:
    """Check one model at several sizes."""
    out = Outcome()
    graph: Graph | None = None
    try:
        graph = import_model(model)
    except (ShapeError, UnsupportedError) as e:
        out.calls["model refused"] += 1
        out.said.append(f"{type(e).__name__}: {e}")
    except PolydynError as e:
        out.wrong.append(f"{type(e).__name__}: {e}")
        return out
    try:
        runtime = session(model)
    except Exception:  # dims that can never fit
        out.calls["no model" if graph is None else "lenient"] += 1
        return out
    names = [o.name for o in model.graph.output]
    for k in range(feeds):
        given = random_feeds(model, 1000 * seed + k)
        try:
            expected = dict(zip(names, runtime.run(names, given), strict=True))
        except Exception as e:  # ONNX Runtime has several kinds
            expected, why = None, str(e).splitlines()[0]
        if graph is None:
            if expected is not None and "can never" in out.said[0] and not _follows(out.said[0], given | expected):
                out.wrong.append(f"refused as impossible, but ONNX Runtime runs {_shapes(given)}: {out.said[0]}")
            continue
        refused = _broken_guard(graph, given)
        if refused:
            out.calls["both refuse" if expected is None else "strict"] += 1
            allowed = expected is None or _may_be_strict(graph, refused, given | expected)
            (out.said if allowed else out.wrong).append(f"refused at {_shapes(given)}: {refused}")
            continue
        try:
            outputs = evaluate(graph, given)
        except (PolydynError, ValueError, IndexError) as e:
            out.calls["both refuse"] += 1
            if expected is not None:
                out.wrong.append(f"{type(e).__name__} at {_shapes(given)}: {e}")
            continue
        if _zero_in_a_reshape(model, outputs):
            out.calls["0 in a Reshape"] += 1
            continue
        if expected is None:
            out.calls["lenient"] += 1
            # -1 among the sizes of an empty tensor
            nothing = "Reshape" in why and any(a.size == 0 for a in outputs.values())
            harmless = nothing or "Invalid num_outputs" in why  # parts without elements
            (out.said if harmless else out.wrong).append(f"lenient at {_shapes(given)}: {why}")
            continue
        out.calls["same"] += 1
        message = _difference(outputs, expected, elements="Resize" not in {n.op_type for n in model.graph.node})
        if message:
            out.wrong.append(f"at {_shapes(given)}: {message}")
    return out


def _broken_guard(graph: Graph, feeds: dict[str, np.ndarray[Any, Any]]) -> str:
    """Return the message of the first guard that these inputs violate."""
    sizes = {s.symbol: feeds[s.input].shape[s.axis] for s in graph.sources}
    for g in graph.guards:
        a, b = g.left.evaluate(sizes), g.right.evaluate(sizes)
        if not {"==": a == b, "<=": a <= b, "%==": a % b == 0 if b else a == 0}[g.relation]:
            return f"{g.message} ({g.left} {g.relation} {g.right})"
    return ""


def _may_be_strict(graph: Graph, message: str, arrays: dict[str, Any]) -> bool:
    """Return whether a guard may reject a call that ONNX Runtime runs: a note says so, or something is empty."""
    noted = any(message.startswith(n.split(": ")[0]) for n in graph.notes)
    empty = any(a.size == 0 for a in arrays.values())
    return noted or (empty and ("in a Concat" in message or "reshaped" in message))


def _follows(message: str, arrays: dict[str, Any]) -> bool:
    """Return whether two dims were equated before, or a part of a Concat is empty, which ONNX Runtime ignores."""
    reasons = [line for line in message.split("\n") if "because" in line]
    guessed = any("broadcasts axis" in line or "is expanded" in line for line in reasons)
    return guessed or ("in a Concat" in message and any(a.size == 0 for a in arrays.values()))


def _zero_in_a_reshape(model: onnx.ModelProto, values: dict[str, Any]) -> bool:
    """Return whether the shape of a Reshape has a computed 0: a size here, a dim to copy for ONNX Runtime."""
    shapes = [values.get(n.input[1]) for n in model.graph.node if n.op_type == "Reshape"]
    return any((s == 0).any() for s in shapes if s is not None)


def _shapes(feeds: dict[str, np.ndarray[Any, Any]]) -> str:
    return ", ".join(f"{n}{list(a.shape)}" for n, a in feeds.items())


def _difference(outputs: dict[str, Any], expected: dict[str, Any], elements: bool) -> str:
    """Return the difference. ``elements`` False: floats are not compared (ONNX Runtime scales positions in float32)."""
    for name, w in expected.items():
        g = outputs[name]
        if g.shape != w.shape:
            return f"{name} has shape {g.shape}, ONNX Runtime says {w.shape}"
        if (elements or w.dtype == np.int64) and not np.array_equal(g, w):
            return f"{name} differs: {g.reshape(-1)[:8]} for {w.reshape(-1)[:8]}"
    return ""


def run_seed(seed: int, seen_kinds: Kinds = frozenset(), feeds: int = 6) -> Result:
    """Check the model of a seed."""
    done = check(random_model(seed), seed, feeds)
    finding = Finding("wrong", "shapes", done.wrong[0]) if done.wrong else None
    return Result(seed, f"seed {seed}", done.calls, finding, done.said[0] if done.said else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__, 500)
    parser.add_argument("--feeds", type=int, default=6)
    args = parser.parse_args(argv)
    return Campaign(partial(run_seed, feeds=args.feeds), seeds_of(args), args.jobs).run()


if __name__ == "__main__":
    sys.exit(main())
