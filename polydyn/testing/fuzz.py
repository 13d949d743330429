"""Run random graphs through the whole compiler, against the reference evaluator.

usage: python -m polydyn.testing.fuzz [SEEDS] [--first N] [--batch 10] [--target cpu] [--no-shrink]

Graphs are compiled a batch at a time in one program. Every graph runs at several sizes with one and with two threads
(small launches are shared out too), whose results must have the same bits. A failure is printed with its seed and the
smallest graph that still fails. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polydyn.compiler import plan_graph
from polydyn.graph.ir import Compute, Graph, Node, Tensor
from polydyn.graph.reference import evaluate
from polydyn.graph.verify import verify_graph
from polydyn.program.assemble import build_artifact
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Program
from polydyn.schedules.expr import Array, show
from polydyn.schedules.index import Index
from polydyn.testing.random_graphs import random_feeds, random_graph, union

TOLERANCE = 1e-4
"""Tolerated error over the largest magnitude of the output; larger if the reference itself is that sensitive."""
SHARED_OUT = Index.of(10**9)

Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class Failure:
    """One wrong result or error: the seed of the graph, the seed of its feeds, and the message."""

    seed: int
    feeds: int
    message: str


def compile_graph(graph: Graph, target: str = "cpu") -> tuple[Program, Program]:
    """Compile the program for one thread and for two, which shares out even the smallest launch."""
    host = plan_graph(graph, target=target)
    host = replace(host, launches=tuple(replace(launch, work=SHARED_OUT) for launch in host.launches))
    artifact, _ = build_artifact(host, target)
    return open_program(artifact, threads=1), open_program(artifact, threads=2)


def difference(graph: Graph, feeds: Feeds, outputs: Feeds, want: Feeds) -> str:
    """Return the error in the outputs, or an empty string."""
    for name, expected in want.items():
        array = np.asarray(outputs[name])
        if array.shape != expected.shape or array.dtype != expected.dtype:
            return f"{name} is {array.dtype}{array.shape}, expected {expected.dtype}{expected.shape}"
        if not np.issubdtype(expected.dtype, np.floating):
            if not np.array_equal(array, expected):
                return f"{name} differs at {np.argwhere(array != expected)[:3].tolist()}"
            continue
        error, scale = _error(array, expected)
        if error > TOLERANCE * scale and error > 100 * _sensitivity(graph, feeds, name, expected):
            return f"{name} is off by {error:.3g}, largest value {scale:.3g}"
    return ""


def _error(array: Array, expected: Array) -> tuple[float, float]:
    """Return (largest difference, largest magnitude) of finite elements; infinite if others differ in kind."""
    finite = np.isfinite(expected)
    same = array[~finite].astype(np.float64)
    if not np.array_equal(same, expected[~finite].astype(np.float64), equal_nan=True):
        return float("inf"), 1.0
    wide, right = array[finite].astype(np.float64), expected[finite].astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(wide - right).max(initial=0.0)
    return (float("inf") if np.isnan(error) else float(error)), float(np.abs(right).max(initial=1.0))


def _sensitivity(graph: Graph, feeds: Feeds, name: str, expected: Array) -> float:
    """Return the change of the reference if inputs move by one part in ten million."""
    numbers = np.random.default_rng(0)

    def moved(a: Array) -> Array:
        if a.dtype != np.float32:
            return a
        return np.asarray(a * (1 + 1e-7 * numbers.choice([-1, 1], a.shape)), np.float32)

    other = replace(graph, constants={n: moved(a) for n, a in graph.constants.items()})
    return _error(evaluate(other, {n: moved(np.asarray(a)) for n, a in feeds.items()})[name], expected)[0]


def check(graphs: Sequence[Graph], feeds_of: Callable[[Graph, int], Feeds], count: int, target: str) -> list[Failure]:
    """Compile the graphs as one program and compare each at ``count`` sets of feeds. Graph names carry seeds."""
    one, two = compile_graph(union(graphs), target)
    failures: list[Failure] = []
    for k in range(count):
        feeds = {g.name: feeds_of(g, k) for g in graphs}
        everything = {n: a for f in feeds.values() for n, a in f.items()}
        first, again = one.run(everything), two.run(everything)
        for g in graphs:
            want = evaluate(g, feeds[g.name])
            message = difference(g, feeds[g.name], first, want)
            for o in g.outputs:
                if not message and first[o].tobytes() != again[o].tobytes():
                    message = f"{o} has other bits with two threads"
            if message:
                failures.append(Failure(int(g.name.removeprefix("seed")), k, message))
    return failures


def attempt(graph: Graph, feeds_of: Callable[[Graph, int], Feeds], feeds: int, target: str) -> str:
    """Return the failure of one graph with one set of feeds, or an empty string; an exception counts as a failure."""
    try:
        verify_graph(graph)
        evaluate(graph, feeds_of(graph, feeds))
    except Exception:
        return ""  # not a graph
    try:
        failed = check([graph], lambda g, _: feeds_of(g, feeds), 1, target)
        return failed[0].message if failed else ""
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def run_seeds(seeds: Sequence[int], target: str = "cpu", feeds: int = 4) -> list[Failure]:
    """Run one batch. If it does not compile, each graph is tried alone."""
    graphs = [random_graph(s, f"s{s}_") for s in seeds]
    try:
        return check(graphs, random_feeds, feeds, target)
    except Exception:
        out = []
        for g, s in zip(graphs, seeds, strict=True):
            try:
                out += check([g], random_feeds, feeds, target)
            except Exception as e:
                out.append(Failure(s, 0, f"{type(e).__name__}: {e}"))
        return out


# -- shrinking -------------------------------------------------------------------------------------------------------


def shrink(graph: Graph, fails: Callable[[Graph], bool], rounds: int = 60) -> Graph:
    """Return a smaller graph that still fails: fewer outputs, nodes cut off by turning their results into inputs."""
    again = True
    while again and rounds > 0:
        again = False
        for candidate in _smaller(graph):
            rounds -= 1
            if len(candidate.nodes) + len(candidate.outputs) and fails(candidate):
                graph, again = candidate, True
                break
            if rounds <= 0:
                break
    return graph


def _smaller(graph: Graph) -> list[Graph]:
    out = [only(graph, (o,)) for o in graph.outputs] if len(graph.outputs) > 1 else []
    for n in graph.nodes:
        if n.output not in graph.outputs or len(graph.outputs) > 1:
            nodes = tuple(m for m in graph.nodes if m != n)
            outputs = tuple(o for o in graph.outputs if o != n.output)
            if outputs:
                out.append(only(replace(graph, nodes=nodes, inputs=(*graph.inputs, n.output)), outputs))
        out += [only(graph, (p,)) for p in n.inputs if p not in graph.inputs and p not in graph.constants]
    sizes = [len(g.nodes) for g in out]
    return [out[i] for i in sorted(range(len(out)), key=lambda i: sizes[i])]


def only(graph: Graph, outputs: tuple[str, ...]) -> Graph:
    """Return the part of the graph that the outputs need."""
    live, nodes = set(outputs), list[Node]()
    for n in reversed(graph.nodes):
        if n.output in live:
            nodes.insert(0, n)
            live |= set(n.inputs)
    sourcing = {s.input for s in graph.sources}
    inputs = tuple(x for x in graph.inputs if x in live or x in sourcing)
    constants = {c: a for c, a in graph.constants.items() if c in live}
    return replace(graph, inputs=inputs, outputs=outputs, nodes=tuple(nodes), constants=constants)


def text(graph: Graph) -> str:
    """Format the graph for people."""

    def typed(t: Tensor) -> str:
        return f"{t.name}: {t.dtype}[{', '.join(map(str, t.shape))}]"

    lines = [f"input    {typed(graph.tensors[x])}" for x in graph.inputs]
    lines += [f"constant {typed(graph.tensors[x])}" for x in graph.constants]
    for n in graph.nodes:
        what = f"{n.reduce or ''}{list(n.reduction) if n.reduce else ''} {show(n.body)}" if isinstance(
            n, Compute
        ) else f"concat {', '.join(n.parts)} along {n.axis}"  # fmt: skip
        lines.append(f"{typed(graph.tensors[n.output])} = {what.strip()}")
    return "\n".join([*lines, f"outputs  {', '.join(graph.outputs)}"])


def report(failure: Failure, target: str, shrinks: bool = True) -> str:
    """Format the failure with its graph, shrunk on request."""
    graph = random_graph(failure.seed, f"s{failure.seed}_")
    if shrinks:
        graph = shrink(graph, lambda g: bool(attempt(g, random_feeds, failure.feeds, target)))
    message = attempt(graph, random_feeds, failure.feeds, target) or failure.message
    return f"seed {failure.seed}, feeds {failure.feeds}: {message}\n{text(graph)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args(argv)
    failures: list[Failure] = []
    seeds = range(args.first, args.first + args.seeds)
    for start in seeds[:: args.batch]:
        batch = [s for s in seeds if start <= s < start + args.batch]
        for seed, f in {f.seed: f for f in reversed(run_seeds(batch, args.target))}.items():
            failures.append(f)
            print(f"--- seed {seed}\n{report(f, args.target, not args.no_shrink)}", flush=True)
        print(f"{batch[-1] + 1 - args.first} graphs, {len(failures)} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
