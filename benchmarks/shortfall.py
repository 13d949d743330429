"""Explains a model's time above the machine's limit: kernels, their time, their own limit, and the reason.

usage: python -m benchmarks.shortfall MODEL.onnx B=2,L=509 ... [--threads 1 2] [--repeats N] [--top N]

Every launch is timed inside whole runs (``Program.profile``: medians; launches of one wave one after the other) and
compared with its own limit: its operations at the FMA peak, or its bytes at the bandwidth of the level that holds them,
whichever is longer. Weights are in memory if all of them together exceed the last cache; activations are in a cache if
the activations of the launch fit there. Time above the limit is attributed, in this order, to causes computed from
sizes and from rates measured here:

``exp, erf, ...``  elements x the time of this library's own function for one, from the cache, beyond a max(x, 0)
``tails``          lanes that the last axis leaves empty in its last vector, of the time that arithmetic takes
``uneven``         the busiest thread's tasks beyond an equal share of them
``writes``         memory reads the lines that are about to be overwritten: written bytes that go to memory, once more
``no overlap``     the shorter of arithmetic and bytes, if both matter: nothing hides it behind the longer
``rest``           unexplained: other instructions, latency, the launch itself

A row is a kernel with all its launches, sorted by the milliseconds above the limit. Causes are upper estimates, each
cut at the remaining time; ``rest`` remains unexplained. Results go to benchmarks/results/shortfall.json (for models
that cpu_all does not list, to benchmarks/out/results); a new measurement of a model at a shape on a number of threads
replaces the earlier one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

import polydyn
from benchmarks import record
from benchmarks.arguments import parse_shape
from benchmarks.cpu_all import STANDARD
from benchmarks.limits import Limits, measure
from benchmarks.rows import Row, name_shape
from polydyn.backends import Options
from polydyn.backends.cpu import Cpu
from polydyn.backends.launches import host_plan
from polydyn.fusion.plan import FusedGroup
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph, iterators
from polydyn.program.assemble import build_program
from polydyn.program.plan import Buffer, HostPlan, Launch, size_bytes
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.program import Program
from polydyn.schedules.expr import Op, walk
from polydyn.schedules.index import product
from polydyn.testing import models
from polydyn.testing.inputs import Shape, feeds

FUNCTIONS = {"exp": "Exp", "erf": "Erf", "tanh": "Tanh", "log": "Log", "sigmoid": "Sigmoid"}
"""Scalar operations that take many instructions, and the ONNX operators that consist of nothing else."""
ELEMENTS = 4096
"""Number of elements for timing them: input and output fit into a first-level cache."""
CAUSES = (*FUNCTIONS, "tails", "uneven", "writes", "no overlap")


@dataclass(frozen=True)
class Work:
    """The work of one launch at a shape.

    ``weights``: bytes of constants that it can touch, ``moved``: bytes of everything else, ``written``: the written
    part of ``moved``. ``calls`` maps a function to the number of elements it is computed for. ``filled``: share of the
    vector lanes along the last axis that hold elements.
    """

    flops: float
    weights: float
    moved: float
    written: float
    calls: Mapping[str, int]
    filled: float
    tasks: int


@dataclass(frozen=True)
class Machine:
    """``limits`` with caches; ``last_cache``: bytes; ``functions``: seconds for one element on one thread."""

    limits: Limits
    last_cache: int
    functions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """One launch compared with its limit, in seconds. ``bound``: the quantity that sets the limit."""

    kernel: str
    label: str
    seconds: float
    limit: float
    bound: str
    causes: Mapping[str, float]


# -- the work of a launch ----------------------------------------------------------------------------------------------


def work_of(
    graph: Graph, group: FusedGroup, launch: Launch, buffers: Mapping[str, Buffer], env: Mapping[str, int], lanes: int
) -> Work:
    """Return the work of a launch, from its fused group and the host plan, at the sizes of ``env`` (symbols, strides
    and nth).
    """
    points = {n.output: product(e for _, e in iterators(graph, n)).evaluate(env) for n in group.nodes}
    most = max(points.values(), default=0)

    def touched(name: str) -> int:  # a Gather touches at most as many table elements as it has points
        return min(size_bytes(buffers[name]).evaluate(env), 8 * most)

    constant = [b for b in set(launch.buffers) if buffers[b].role == "constant"]
    other = [b for b in set(launch.buffers) if buffers[b].role != "constant"]
    calls: dict[str, int] = {}
    for n in group.nodes:
        for v in walk(n.body):
            if isinstance(v, Op) and v.name in FUNCTIONS:
                calls[v.name] = calls.get(v.name, 0) + points[n.output]
    return Work(
        launch.flops.evaluate(env),
        sum(map(touched, constant)),
        sum(map(touched, other)),
        sum(map(touched, launch.writes)),
        calls,
        filled(last_extent(graph, group, env), lanes),
        launch.candidates[0].tasks.evaluate(env),
    )


def last_extent(graph: Graph, group: FusedGroup, env: Mapping[str, int]) -> int:
    """Return the size of the axis that becomes vectors: the last axis longer than one of a product's result, or of the
    longest loops of a nest.
    """
    loops = {n.output: [e.evaluate(env) for _, e in iterators(graph, n)] for n in group.nodes}
    extents = [e.evaluate(env) for e in graph.tensors[group.nodes[0].output].shape]
    sizes = extents if group.kind != "nest" else max(loops.values(), key=prod)
    return next((s for s in reversed(sizes) if s > 1), 1)


def filled(extent: int, lanes: int) -> float:
    """Return the share of lanes in use if ``extent`` elements take whole vectors."""
    return extent / (-(-extent // lanes) * lanes) if extent else 1.0


# -- comparison with the machine
# ----------------------------------------------------------------------------------------


def hold(seconds: float, label: str, kernel: str, work: Work, machine: Machine, streams: bool) -> Held:
    """Compare a launch with its limit. ``streams``: the weights are read from memory on every run."""
    limits = machine.limits
    compute = work.flops / limits.flops
    cached = max((rate for _, rate in limits.cached), default=limits.bandwidth)
    at_home = max((size for size, _ in limits.cached), default=0)
    far = (work.weights if streams else 0) + (work.moved if work.moved > at_home else 0)
    near = limits.seconds_again(0, work.moved + (0 if streams else work.weights)) if not far else 0.0
    memory = max(far / limits.bandwidth, (work.weights + work.moved) / cached if far else near)
    limit = max(compute, memory)
    bound = "arithmetic" if compute >= memory else "memory" if far else "cache"
    shares = {n: machine.functions.get(n, 0.0) * count / limits.threads for n, count in work.calls.items()}
    equal = work.tasks / limits.threads
    uneven = -(-work.tasks // limits.threads) / equal - 1 if work.tasks and limits.threads > 1 else 0.0
    shares |= {
        "tails": (1 / work.filled - 1) * (compute + sum(shares.values())) if work.filled else 0.0,
        "uneven": uneven * limit,
        "writes": work.written / limits.bandwidth if work.moved > at_home else 0.0,
        "no overlap": min(compute, memory),
    }
    return Held(kernel, label, seconds, limit, bound, explained(max(0.0, seconds - limit), shares))


def explained(above: float, shares: Mapping[str, float]) -> dict[str, float]:
    """Attribute ``above`` to the shares in the order of CAUSES, each cut at the remainder; the last is the ``rest``."""
    parts: dict[str, float] = {}
    for name in CAUSES:
        part = min(above, shares.get(name, 0.0))
        if part > 0:
            parts[name] = part
            above -= part
    return parts | {"rest": above}


def merged(launches: Sequence[Held]) -> list[Row]:
    """Return one row per kernel, sorted by time above the limit."""
    kernels: dict[str, list[Held]] = {}
    for h in launches:
        kernels.setdefault(h.kernel, []).append(h)
    rows = []
    for kernel, of_kernel in kernels.items():
        seconds, limit = sum(h.seconds for h in of_kernel), sum(h.limit for h in of_kernel)
        causes: dict[str, float] = {}
        for h in of_kernel:
            for name, s in h.causes.items():
                causes[name] = causes.get(name, 0.0) + s
        above = sum(max(0.0, h.seconds - h.limit) for h in of_kernel)
        bound = statistics.mode(h.bound for h in of_kernel)
        rows.append({
            "kernel": kernel, "label": of_kernel[0].label, "launches": len(of_kernel), "seconds": seconds,
            "limit": limit, "above": above, "bound": bound, "causes": causes,
            "reason": reason(above, seconds, causes, bound),
        })  # fmt: skip
    return sorted(rows, key=lambda r: -float(r["above"]))


AT_LIMIT = 0.05
"""A kernel counts as being at its limit if this share of its time is above it, or less."""


def reason(above: float, seconds: float, causes: Mapping[str, float], bound: str) -> str:
    """Return the largest causes that explain half of the time above the limit; ``rest`` is named with ``bound``."""
    if above <= AT_LIMIT * seconds:
        return "at its limit"
    named, left = [], 0.5 * above
    for name, s in sorted(causes.items(), key=lambda c: -c[1]):
        if left > 0:
            reached = (seconds - above) / (seconds - above + causes["rest"])
            named.append(f"{bound} at {reached:.0%} of its rate" if name == "rest" else name)
            left -= s
    return ", ".join(named)


# -- measuring ---------------------------------------------------------------------------------------------------------


def seconds_of_functions(names: set[str]) -> dict[str, float]:
    """Return seconds per element of each function on one thread, minus the time of a map that computes nothing."""

    def each(operator: str) -> float:
        program = polydyn.compile(models.unary(operator, ["R", "L"]), threads=1)
        call = program.bind({"x": np.random.default_rng(0).random((1, ELEMENTS), np.float32) + 0.5})
        best = float("inf")
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(10):
                call()
            best = min(best, time.perf_counter() - start)
        return best / 10 / ELEMENTS

    nothing = each("Relu") if names else 0.0
    return {name: max(0.0, each(FUNCTIONS[name]) - nothing) for name in sorted(names)}


def last_cache() -> int:
    """Return the bytes of the last cache that Linux lists for processor 0, or 8 MiB if it lists none."""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (index / "type").read_text().strip() != "Instruction":
            sizes.append(int((index / "size").read_text().strip().rstrip("K")) * 1024)
    return max(sizes) or 8 << 20


class Profiled:
    """A model compiled once: its program, its host plan, and the fused group behind every launch."""

    def __init__(self, path: str, threads: int) -> None:
        backend = Cpu("cpu", Options())
        rewritten = backend.rewrite(import_model(path))
        kernels = backend.place(backend.builder(backend.fuse(rewritten)))
        self.graph, self.lanes = kernels.plan.graph, backend.processor.width
        self.groups = {f"{p.fused.kind} {p.fused.outputs[0]}": p.fused for p in kernels.placed}
        self.plan: HostPlan = host_plan(rewritten, kernels, backend)
        self.program: Program = build_program(self.plan, threads=threads)

    @property
    def functions(self) -> set[str]:
        """The functions in the model that take many instructions."""
        nodes = [n for g in self.groups.values() for n in g.nodes]
        return {v.name for n in nodes for v in walk(n.body) if isinstance(v, Op) and v.name in FUNCTIONS}

    def works(self, shape: Shape) -> dict[str, Work]:
        """Return the work of every launch, by label."""
        env = {**self.symbols(shape), "nth": self.program.threads}
        launches = [x for x in self.plan.launches if x.label in self.groups]
        buffers, lanes = self.plan.buffers, self.lanes
        return {x.label: work_of(self.graph, self.groups[x.label], x, buffers, env, lanes) for x in launches}

    def launches(self, model: onnx.ModelProto, shape: Shape, machine: Machine, repeats: int) -> list[Held]:
        """Return every launch that runs at a shape, compared with its limit."""
        times: list[LaunchTime] = self.program.profile(feeds(model, shape), repeats)
        streams = self.program.weight_bytes > machine.last_cache
        works = self.works(shape)
        ran = [t for t in times if t.tasks > 0 and t.label in works]
        return [hold(t.nanoseconds / 1e9, t.label, t.kernel, works[t.label], machine, streams) for t in ran]

    def seconds(self, model: onnx.ModelProto, shape: Shape, repeats: int) -> float:
        """Return the median of whole runs, in which launches of a wave overlap and no clock is read between them."""
        call, times = self.program.bind(feeds(model, shape)), []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def symbols(self, shape: Shape) -> dict[str, int]:
        """Return the sizes of all symbols; 1 for strides that the caller may choose, which are not used here."""
        free = {s for b in self.plan.buffers.values() for s in b.strides}
        return {**dict.fromkeys(free, 1), **shape}


def show(rows: Sequence[Row], title: str, top: int) -> None:
    """Print a table."""
    table = Table(title=title)
    for heading in ("kernel", "first launch", "launches", "ms", "limit ms", "of limit", "above ms", "reason (ms)"):
        table.add_column(heading, justify="left" if heading in ("kernel", "first launch", "reason (ms)") else "right")
    for r in rows[:top]:
        parts = ", ".join(f"{n} {s * 1e3:.2f}" for n, s in r["causes"].items() if s >= 0.05 * r["above"] and s > 0)
        label = r["label"] if len(r["label"]) <= 44 else "…" + r["label"][-43:]
        table.add_row(
            r["kernel"].rpartition("_")[0] + " " + r["kernel"][-4:], label, str(r["launches"]),
            f"{r['seconds'] * 1e3:.2f}", f"{r['limit'] * 1e3:.2f}", f"{r['limit'] / max(r['seconds'], 1e-9):.0%}",
            f"{r['above'] * 1e3:.2f}", f"{r['reason']} ({parts})" if parts else r["reason"],
        )  # fmt: skip
    Console(width=190).print(table)
    seconds, limit = (sum(r[key] for r in rows) for key in ("seconds", "limit"))
    causes = {n: sum(r["causes"].get(n, 0.0) for r in rows) for n in (*CAUSES, "rest")}
    listed = ", ".join(f"{n} {s * 1e3:.2f}" for n, s in causes.items() if s >= 5e-6)
    share = limit / max(seconds, 1e-9)
    print(f"all: {seconds * 1e3:.2f} ms, limit {limit * 1e3:.2f} ({share:.0%}); above it, ms: {listed}\n")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("shapes", nargs="+", type=parse_shape, metavar="B=1,L=8")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=12, help="rows to print; the file has all")
    args = parser.parse_args()
    for threads in args.threads:
        run(args.model, args.shapes, threads, args.repeats, args.top)


def run(path: str, shapes: Sequence[Shape], threads: int, repeats: int, top: int) -> None:
    """Print the tables of one model on one number of threads."""
    name, model, profiled = Path(path).stem, onnx.load(path), Profiled(path, threads)
    limits = measure(threads, caches=True)
    machine = Machine(limits, last_cache(), seconds_of_functions(profiled.functions))
    costs = ", ".join(f"{n} {s * 1e9:.2f}" for n, s in machine.functions.items())
    print(f"peak {limits.flops / 1e9:.0f} GFLOP/s, memory {limits.bandwidth / 1e9:.1f} GB/s; ns an element: {costs}")
    results = record.Results("shortfall", record.RESULTS if name in STANDARD else record.SCRATCH)
    for shape in shapes:
        rows = merged(profiled.launches(model, shape, machine, repeats))
        total = profiled.seconds(model, shape, repeats)
        title = f"{name} {name_shape(shape)}"
        show(rows, f"{title}, {threads} threads: a whole run {total * 1e3:.2f} ms", top)
        results.add(title, threads, rows, seconds=total, limits=vars(limits), functions=machine.functions)


if __name__ == "__main__":
    main()
