"""How time and memory grow with a model's size, and where models become too large: processor seconds, GiB, outcome.

usage: python -m benchmarks.model_sizes [FAMILY[=SIZE,SIZE]] ... [--seconds 900] [--memory 12]

Each model is compiled in a new process with an empty cache and one thread, run once, and compared with numpy. ``plan``:
processor seconds of the process without C compilers; ``gcc``: those of the compilers; ``GiB``: the largest resident set
of the process. A model that is rejected shows its error. A process that needs more than ``--seconds`` of processor time
or ``--memory`` GiB of address space is ended, and the row says so. Results go to benchmarks/results/model_sizes.json,
where rows of other sizes stay.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks import record

Arrays = dict[str, np.ndarray[Any, Any]]
Case = tuple[onnx.ModelProto, Arrays, Arrays]
"""A model, its inputs and the expected outputs; no expected outputs: only the run is checked."""
FLOAT, INT8, INT64 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT64


def model_of(nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, tuple[int, Sequence[int | str]]],
             outputs: Sequence[str], constants: Mapping[str, np.ndarray[Any, Any]]) -> onnx.ModelProto:  # fmt: skip
    """Return a model of opset 17. ``inputs``: name -> ONNX type and shape; types and shapes of outputs are open."""
    graph = helper.make_graph(
        nodes, "sizes", [helper.make_tensor_value_info(n, t, list(s)) for n, (t, s) in inputs.items()],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def chain(count: int) -> Case:
    """``count`` elementwise nodes, one after the other: one kernel after fusion."""
    nodes = [helper.make_node("Add", [f"t{k}", "one"], [f"t{k + 1}"]) if k % 2
             else helper.make_node("Abs", [f"t{k}"], [f"t{k + 1}"]) for k in range(count)]  # fmt: skip
    x = np.array([-2, 3, 0.5], np.float32)
    made = model_of(nodes, {"t0": (FLOAT, ["N"])}, [f"t{count}"], {"one": np.float32(1)})
    return made, {"t0": x}, {f"t{count}": np.abs(x) + np.float32(count // 2)}


def layers(count: int) -> Case:
    """``count`` nodes in blocks of MatMul, Add, Relu, Softmax and a residual Add: launches that stay separate."""
    r = np.random.default_rng(0)
    w = (r.standard_normal((8, 8)) / 3).astype(np.float32)
    b = r.standard_normal(8).astype(np.float32)
    x = value = r.standard_normal((5, 8)).astype(np.float32)
    nodes, name = [], "x"
    for k in range(count // 5):
        steps = [("MatMul", [name, "w"]), ("Add", [f"a{k}", "b"]), ("Relu", [f"b{k}"]), ("Softmax", [f"c{k}"]),
                 ("Add", [f"d{k}", name])]  # fmt: skip
        nodes += [helper.make_node(op, read, [f"{'abcde'[i]}{k}"]) for i, (op, read) in enumerate(steps)]
        hidden = np.maximum(value @ w + b, 0)
        hidden = np.exp(hidden - hidden.max(-1, keepdims=True))
        value, name = value + hidden / hidden.sum(-1, keepdims=True), f"e{k}"
    return model_of(nodes, {"x": (FLOAT, ["M", 8])}, [name], {"w": w, "b": b}), {"x": x}, {name: value}


def symbols(count: int) -> Case:
    """``count`` inputs, each with a dim of its own, concatenated."""
    nodes = [helper.make_node("Concat", [f"x{k}" for k in range(count)], ["y"], axis=0)]
    feeds = {f"x{k}": np.full(k % 3, k, np.float32) for k in range(count)}
    inputs = {n: (FLOAT, [f"D{k}"]) for k, n in enumerate(feeds)}
    return model_of(nodes, inputs, ["y"], {}), dict(feeds), {"y": np.concatenate(list(feeds.values()))}


def outputs(count: int) -> Case:
    """``count`` inputs with a dim of their own, and as many outputs of an elementwise node."""
    nodes = [helper.make_node("Relu", [f"x{k}"], [f"y{k}"]) for k in range(count)]
    feeds = {f"x{k}": np.full(k % 3, k - 1, np.float32) for k in range(count)}
    inputs = {n: (FLOAT, [f"D{k}"]) for k, n in enumerate(feeds)}
    expected = {f"y{k}": np.maximum(x, 0) for k, x in enumerate(feeds.values())}
    return model_of(nodes, inputs, list(expected), {}), dict(feeds), expected


def nested(count: int) -> Case:
    """A size computed by ``count`` nested divisions and products, and data of that size."""
    nodes, name, size = [helper.make_node("Shape", ["x"], ["s0"])], "s0", 40
    for k in range(count):
        op, constant = (("Add", "one"), ("Mul", "three"), ("Div", "two"))[k % 3]
        nodes.append(helper.make_node(op, [name, constant], [f"s{k + 1}"]))
        name = f"s{k + 1}"
        size = (size + 1, size * 3, size // 2)[k % 3]
        if k % 3 == 2:
            nodes.append(helper.make_node("Div", [name, "two"], [f"h{k}"]))
            name, size = f"h{k}", size // 2
    nodes.append(helper.make_node("Expand", ["v", name], ["y"]))
    constants = {"one": np.array([1]), "two": np.array([2]), "three": np.array([3]), "v": np.array([1], np.float32)}
    made = model_of(nodes, {"x": (FLOAT, ["N"])}, ["y"], constants)
    return made, {"x": np.zeros(40, np.float32)}, {"y": np.ones(size, np.float32)}


def rank(count: int) -> Case:
    """A tensor of ``count`` axes."""
    shape = [*[1] * (count - 1), 3]
    made = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": (FLOAT, [*[1] * (count - 1), "N"])}, ["y"], {})
    if count > 64:  # numpy has 64 axes
        return made, {}, {}
    x = np.array([-1, 0, 2], np.float32).reshape(shape)
    return made, {"x": x}, {"y": np.maximum(x, 0)}


def doubling(count: int) -> Case:
    """``count`` nodes ``y = x + x``: inlining without sharing would take two to the power of ``count`` operations."""
    nodes = [helper.make_node("Add", [f"t{k}", f"t{k}"], [f"t{k + 1}"]) for k in range(count)]
    x = np.array([0, 1], np.float32) * np.float32(2.0**-100)
    made = model_of(nodes, {"t0": (FLOAT, ["N"])}, [f"t{count}"], {})
    with np.errstate(over="ignore"):
        return made, {"t0": x}, {f"t{count}": np.ldexp(x, count)}


def weights(mebibytes: int) -> Case:
    """A decoder's feed-forward layers (1024 x 4096 and back) with ``mebibytes`` MiB of weights; stored as data."""
    r = np.random.default_rng(0)
    nodes, constants, name = [], {}, "x"
    for k in range(max(1, mebibytes // 32)):
        constants[f"u{k}"] = r.standard_normal((1024, 4096), np.float32) / 32
        constants[f"d{k}"] = r.standard_normal((4096, 1024), np.float32) / 64
        steps = [("MatMul", name, f"u{k}", f"h{k}"), ("Relu", f"h{k}", f"r{k}"), ("MatMul", f"r{k}", f"d{k}", f"o{k}"),
                 ("Add", f"o{k}", name, f"y{k}")]  # fmt: skip
        nodes += [helper.make_node(op, read, [made]) for op, *read, made in steps]
        name = f"y{k}"
    return model_of(nodes, {"x": (FLOAT, ["M", 1024])}, [name], constants), {"x": np.ones((2, 1024), np.float32)}, {}


def elements(millions: int) -> Case:
    """An int8 tensor of ``millions`` million elements, negated, and one element of it from the end."""
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Gather", ["n", "last"], ["y"], axis=0)]
    x = np.zeros(millions * 1_000_000, np.int8)
    x[-1], x[-2] = 3, 5
    made = model_of(nodes, {"x": (INT8, ["N"])}, ["n", "y"], {"last": np.array([-1, -2])})
    return made, {"x": x}, {"y": np.array([-3, -5], np.int8)}


FAMILIES: dict[str, tuple[Callable[[int], Case], Sequence[int]]] = {
    "chain": (chain, (100, 1000, 10_000)),
    "layers": (layers, (100, 1000, 10_000)),
    "symbols": (symbols, (20, 200, 2000)),
    "outputs": (outputs, (20, 200, 2000)),
    "nested": (nested, (5, 50, 500)),
    "rank": (rank, (8, 16, 17, 65)),
    "doubling": (doubling, (20, 200, 2000)),
    "weights": (weights, (64, 256, 1024)),
    "elements": (elements, (200, 2200)),
}
"""Name -> a function from the size to a case, and the sizes that are measured by default."""


def child(family: str, size: int, path: str) -> None:
    """Compile and run one case in this process, and print a row as JSON."""
    import polydyn
    from polydyn.errors import PolydynError

    made, feeds, expected = FAMILIES[family][0](size)
    if family == "weights":
        onnx.save(made, path, save_as_external_data=True, location="weights.bin")
        model: Any = path
    else:
        model = made.SerializeToString()
    del made
    before = resource.getrusage(resource.RUSAGE_SELF)
    outcome = "right"
    try:
        program = polydyn.compile(model, threads=1)
        after = resource.getrusage(resource.RUSAGE_SELF)
        got = program.run(feeds)
        wrong = [n for n, a in expected.items() if not np.allclose(got[n], a, 1e-4, 1e-4)]
        outcome = f"wrong: {wrong[0]}" if wrong else "right"
    except PolydynError as e:
        after, outcome = resource.getrusage(resource.RUSAGE_SELF), f"{type(e).__name__}: {e.message}"
    gcc = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"plan": plan, "gcc": gcc.ru_utime + gcc.ru_stime, "GiB": after.ru_maxrss / 2**20, "outcome": outcome}
    print(json.dumps(row))


def measured(family: str, size: int, seconds: int, memory: int) -> dict[str, Any]:
    """Run a case in a limited process. The row's ``outcome`` says how a process ended that printed no row."""
    with tempfile.TemporaryDirectory() as folder:

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            resource.setrlimit(resource.RLIMIT_AS, (memory << 30, memory << 30))

        command = [sys.executable, "-m", "benchmarks.model_sizes", "--child", f"{family}={size}", f"{folder}/m.onnx"]
        done = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=limit, env={**os.environ, "POLYDYN_CACHE": folder}
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"outcome": f"ended with {done.returncode}: {last}"}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Measure the families and print a table; store them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY[=SIZE,SIZE]", default=list(FAMILIES))
    parser.add_argument("--seconds", type=int, default=900)
    parser.add_argument("--memory", type=int, default=12)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        family, size = args.families[0].split("=")
        return child(family, int(size), args.families[1])
    print("| family | size | plan s | gcc s | GiB | outcome |\n|---|---|---|---|---|---|")
    rows = []
    for text in args.families:
        family, _, sizes = text.partition("=")
        for size in map(int, sizes.split(",")) if sizes else FAMILIES[family][1]:
            row = {"family": family, "size": size} | measured(family, size, args.seconds, args.memory)
            rows.append(row)
            numbers = " | ".join(f"{row[c]:.2f}" if c in row else "" for c in ("plan", "gcc", "GiB"))
            print(f"| {family} | {size} | {numbers} | {row['outcome'].splitlines()[0]} |", flush=True)
    path = record.RESULTS / "model_sizes.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = {(r["family"], r["size"]): r for r in (*old, *rows)}
    record.save("model_sizes", rows=sorted(merged.values(), key=lambda r: (r["family"], r["size"])))
    return None


if __name__ == "__main__":
    main()
