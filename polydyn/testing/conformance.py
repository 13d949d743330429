"""Run ONNX's own node cases and count them in one table: passed, rejected by name, wrong.

Run: ``python -m polydyn.testing.conformance [part of a case's name] [--reference] [--dims all|each] [--around 3]
[--fallback] [--jobs 2]``. Cases are compiled for the CPU through ``polydyn.compile``, or with ``--reference`` imported
and evaluated in numpy. A case that passes axes or sizes as inputs is tried unchanged, then with them as constants; the
table counts both. ``--around``: number of random models around each case, half of them with symbolic dims
(``polydyn/testing/surroundings.py``). ``--fallback``: unsupported nodes are left to ONNX Runtime.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as node_cases

import polydyn
from polydyn.errors import InputError, PolydynError, ShapeError, UnsupportedError
from polydyn.graph import reference
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.testing.surroundings import surrounded

Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Maker = Callable[[onnx.ModelProto], Run]


def cases(part: str = "") -> Iterator[Any]:
    """Yield ONNX's node cases whose name contains ``part``."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = node_cases.collect_testcases(None)
    yield from (c for c in found if part in c.name)


def cases_of(operators: Collection[str]) -> list[Any]:
    """Return ONNX's node cases of these operators.

    Only their modules are imported: computing all cases takes seconds.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for operator in sorted(operators):
            importlib.import_module(f"{node_cases.__name__}.{operator.lower()}")
    return [c for c in node_cases._NodeTestCases if any(n.op_type in operators for n in c.model.graph.node)]


def freeze(case: Any) -> onnx.ModelProto:
    """Return the model with its small integer inputs as initializers: axes, shapes, sizes, constant in every real
    model.

    The first input stays, unless the operator consists of sizes alone.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    if len(case.data_sets) != 1:
        return model
    first = 0 if {n.op_type for n in model.graph.node} & MADE_OF_SIZES else 1
    for info, array in list(zip(model.graph.input, map(as_array, case.data_sets[0][0]), strict=False))[first:]:
        small = array is not None and array.ndim <= 1
        if small and (array.dtype.kind == "i" or info.name in ("scales", "roi", "depth") or first == 0):
            model.graph.input.remove(info)
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), info.name))
    return model


MADE_OF_SIZES = {"Range", "ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"}


def with_symbols(model: onnx.ModelProto, only: int | None = None) -> onnx.ModelProto:
    """Return the model with a name for every dim of its inputs, or for the one at position ``only``."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    dims = [(x, a, d) for x in out.graph.input for a, d in enumerate(x.type.tensor_type.shape.dim)]
    for k, (x, a, d) in enumerate(dims):
        if only in (None, k):
            d.dim_param = f"{re.sub('[^A-Za-z0-9]', '_', x.name)}_axis{a}"
    for y in out.graph.output:
        y.type.tensor_type.ClearField("shape")
    return out


def as_array(x: Any) -> Any:
    """Return the case's data as a numpy array, or None for a sequence, optional or string."""
    if isinstance(x, onnx.TensorProto):
        return onnx.numpy_helper.to_array(x)
    return x if isinstance(x, np.ndarray | np.generic) else None


def by_reference(model: onnx.ModelProto) -> Run:
    """Import a model and return a function that evaluates it in numpy."""
    graph = import_model(model)
    return lambda feeds: reference.evaluate(graph, feeds)


def on_cpu(model: onnx.ModelProto, options: polydyn.Options | None = None) -> Run:
    """Compile a model for the CPU."""
    program = polydyn.compile(model, threads=1, options=options, cache=False)
    dtypes = {o["name"]: numpy_dtype(o["dtype"]) for o in program.manifest["outputs"]}
    return lambda feeds: {n: x.view(dtypes[n]) for n, x in program.run(dict(feeds)).items()}


def run_case(case: Any, make: Maker = by_reference) -> str:
    """Return ``passed``, ``passed with constants``, ``refused: ...`` (by name), ``decided: ...`` or ``failed: ...``."""
    result = run_model(case, case.model, make)
    if not result.startswith("refused"):
        return result
    again = run_model(case, freeze(case), make)
    return "passed with constants" if again == "passed" else again


def run_model(case: Any, model: onnx.ModelProto, make: Maker = by_reference) -> str:
    """Run a model in place of its case's own, like ``run_case``; it must compute the same as the case."""
    try:
        run, names = make(model), {x.name for x in model.graph.input}
        for inputs, outputs in case.data_sets:
            feeds = dict(zip((x.name for x in case.model.graph.input), map(as_array, inputs), strict=False))
            got = run({n: x for n, x in feeds.items() if n in names})
            for (name, array), want in zip(got.items(), map(as_array, outputs), strict=True):
                if array.dtype != want.dtype or array.shape != want.shape:
                    return f"failed: {name} is {array.dtype}{array.shape}, expected {want.dtype}{want.shape}"
                if not is_random(case):
                    compare(array, want, case)
    except (UnsupportedError, InputError) as e:
        return "refused: " + str(e).replace("\n", ";")
    except PolydynError as e:
        symbolic = any(d.dim_param for x in model.graph.input for d in _dims(x))
        if isinstance(e, ShapeError) and (symbolic or "data decide" in str(e)):
            return "refused: " + str(e).replace("\n", ";")
        return f"failed: {type(e).__name__}: " + str(e).replace("\n", ";")
    except AssertionError as e:
        why = decided(case)
        return f"decided: {why}" if why else "failed: values differ " + " ".join(str(e).split())[:160]
    except Exception as e:  # a script that reports on everything
        return f"failed: {type(e).__name__}: {e}"[:240]
    return "passed"


def decided(case: Any) -> str:
    """Return why other numbers than the case's are right, or an empty string if they are wrong."""
    if re.fullmatch("test_resize_downsample_scales_(linear|cubic)_align_corners", case.name):
        return "torch and ONNX Runtime divide by the size of the result (docs/operators.md)"
    return ""


def is_random(case: Any) -> bool:
    """Return whether the case's numbers come from a random generator: only types and shapes are comparable."""
    names = {n.op_type for n in case.model.graph.node}
    return bool(names & {"Bernoulli", "RandomUniformLike"}) or "training_dropout" in case.name


def _dims(x: onnx.ValueInfoProto) -> Any:
    return x.type.tensor_type.shape.dim


def compare(array: Any, want: Any, case: Any) -> None:
    """Compare with the tolerance of the case. AssertionError: the numbers differ.

    16-bit floats may be two units of their last place off, as in ONNX's own runner: a case's numbers were rounded after
    each step of one implementation. Other floats may be off by one unit in the last place of the maximum: a value that
    is 0 in exact arithmetic is the rounding error of a sum in the case.
    """
    units = {"bfloat16": 2.0**-6, "float16": 2.0**-9}.get(want.dtype.name, 0.0)
    bits, complex_ = want.dtype.name.startswith("float8"), want.dtype.kind == "c"
    kind: Any = np.uint8 if bits else np.complex128 if complex_ else np.float64
    a, b = (x.view(kind) if bits else x.astype(kind) for x in (np.asarray(array), np.asarray(want)))
    last = {"float32": 2.0**-23, "float64": 2.0**-52}.get(want.dtype.name, 0.0)
    greatest = np.abs(b[np.isfinite(b)]).max(initial=0.0) if last else 0.0
    np.testing.assert_allclose(a, b, max(case.rtol, units), max(case.atol, last * greatest))


def reason(result: str) -> str:
    """Return a rejection without the names that differ from case to case."""
    text = result.removeprefix("refused: ").split(";")[0]
    text = re.sub(r"operator\(s\) of this model are not supported: (\w+).*", r"operators unknown: \1", text)
    return re.sub(r"\b[a-zA-Z_]*\d[\w.']*", "#", text)[:110]


@dataclass
class Worker:
    """A process that runs cases by number; ``busy``: the number that it runs."""

    process: Any
    pipe: Connection
    busy: int | None = None


def _serve(pipe: Connection, run: Callable[[int], str]) -> None:
    while True:
        number = pipe.recv()
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            pipe.send(run(number))


def run_all(count: int, run: Callable[[int], str], jobs: int, limit: float) -> list[str]:
    """Return the results of ``run`` for 0 to ``count``, in worker processes; one that dies or takes too long is
    replaced.
    """
    fork = multiprocessing.get_context("fork")

    def start() -> Worker:
        here, there = fork.Pipe()
        process = fork.Process(target=_serve, args=(there, run), daemon=True)
        process.start()
        there.close()
        return Worker(process, here)

    results, waiting, workers = [""] * count, list(range(count))[::-1], [start() for _ in range(min(jobs, count))]
    while waiting or any(w.busy is not None for w in workers):
        for w in workers:
            if w.busy is None and waiting:
                w.busy = waiting.pop()
                w.pipe.send(w.busy)
        ready = wait([w.pipe for w in workers if w.busy is not None], limit)
        for k, w in enumerate(workers):
            case = w.busy
            if case is None or (ready and w.pipe not in ready):
                continue
            try:
                if not ready:
                    raise TimeoutError
                results[case], w.busy = w.pipe.recv(), None
            except (EOFError, ConnectionError, TimeoutError) as e:
                w.process.kill()
                how = f"longer than {limit:.0f} s" if isinstance(e, TimeoutError) else "the process died"
                results[case] = f"failed: {how}"
                workers[k] = start()
    for w in workers:
        w.process.kill()
    return results


def _all_dims(case: Any, make: Maker, which: str) -> str:
    """Run the case with symbolic dims, all at once or one after another; return the worst result."""
    model = freeze(case)
    count = sum(len(_dims(x)) for x in model.graph.input)
    models = [with_symbols(model)] if which == "all" else [with_symbols(model, k) for k in range(count)]
    return _worst([run_model(case, m, make) for m in models])


def _run_surrounded(case: Any, make: Maker, count: int) -> str:
    """Run random models around a case, every second one with symbolic dims; return the worst result."""
    model, results = freeze(case), list[str]()
    outputs = zip(model.graph.output, map(as_array, case.data_sets[0][1]), strict=False)
    ranks = {y.name: (y.type.tensor_type.elem_type, a.ndim) for y, a in outputs if a is not None}
    for k in range(count):
        made = surrounded(with_symbols(model) if k % 2 else model, zlib.crc32(case.name.encode()) + k, ranks)
        if made is not None:
            results.append(run_model(case, made, make))
            if results[-1].startswith("failed"):
                results[-1] += f" (around {k})"
    return _worst(results)


def _worst(results: Sequence[str]) -> str:
    worst_first = ("failed", "refused", "decided", "passed")
    return min(results, key=lambda r: worst_first.index(r.split(":")[0]), default="passed")


def main() -> None:
    """Print every failure, the reasons of rejections with their number of cases, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--reference", action="store_true", help="evaluate in numpy, compile nothing")
    parser.add_argument("--dims", choices=("all", "each"), help="make dims symbolic")
    parser.add_argument("--around", type=int, help="random models around each case")
    parser.add_argument("--fallback", action="store_true", help="leave unsupported nodes to ONNX Runtime")
    parser.add_argument("--every", type=int, default=1, help="run every N-th case")
    parser.add_argument("--first", type=int, default=0, help="offset of the first of these cases")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds per case")
    parser.add_argument("--json", type=Path, help="write every case's result there")
    options = parser.parse_args()
    found = list(cases(options.part))[options.first :: options.every]
    compiled = partial(on_cpu, options=polydyn.Options(fallback="onnxruntime")) if options.fallback else on_cpu
    make: Maker = by_reference if options.reference else compiled

    def run(number: int) -> str:
        case = found[number]
        if options.around:
            return _run_surrounded(case, make, options.around)
        return _all_dims(case, make, options.dims) if options.dims else run_case(case, make)

    results = run_all(len(found), run, options.jobs, options.limit)
    refused: dict[str, Counter[str]] = {}
    for case, result in zip(found, results, strict=True):
        if result.startswith("failed"):
            print(f"{case.name}: {result}")
        if result.startswith("refused"):
            operators = ", ".join(sorted({n.op_type for n in case.model.graph.node}))
            refused.setdefault(reason(result), Counter())[operators] += 1
    for why, of in sorted(refused.items(), key=lambda x: -x[1].total()):
        names = ", ".join(f"{o} ({n})" for o, n in of.most_common(6))
        print(f"refused {of.total():4d}  {why}: {names}")
    if options.json:
        named = {c.name: r for c, r in zip(found, results, strict=True)}
        options.json.write_text(json.dumps(named, indent=1) + "\n")
    print(dict(Counter(r.split(":")[0] for r in results)))


if __name__ == "__main__":
    main()
