"""polydyn inside ONNX Runtime: starts, first answers and calls, compared with ONNX Runtime's own and with polydyn's.

usage: python -m benchmarks.provider MODEL.onnx ... [--exclude OPERATOR] [--divided] [--calls 60] [--threads 1 2]

For each model, in processor seconds of this process: ``start``: opening a session, by ONNX Runtime alone, with the
provider and stored programs, and from an EPContext model (medians of 9). ``background``: opening a session of which
nothing is stored, and its first answer, and the same for ONNX Runtime alone (once). Then, for each number of threads
and each stored shape of the model: medians of calls in random order by ONNX Runtime, the provider and polydyn's own
``Program.run``, and their ratios. ``--exclude``: the nodes of these operators stay with ONNX Runtime, so that the graph
is divided; polydyn's own program then computes more than the sets. ``--divided``: also products with an operator
between them that polydyn does not have, compared with polydyn's own ``Options(fallback="onnxruntime")``. Results must
be within 1e-4 of ONNX Runtime's. Processor time is compared because it depends less on other load than wall time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import polydyn
import polydyn.ort
from polydyn.errors import FallbackWarning
from polydyn.onnx_runtime import ort_classes
from polydyn.testing.inputs import feeds, shapes

CLOSE, STARTS = 1e-4, 9


def settings(**entries: str) -> Any:
    """Return options of a session that logs errors only."""
    options = ort_classes()[1]()
    options.log_severity_level = 3
    for key, value in entries.items():
        options.add_session_config_entry("ep." + key, value)
    return options


def spent(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor milliseconds of this process in a call, and its result."""
    begin = time.process_time()
    result = function()
    return 1e3 * (time.process_time() - begin), result


def plain(path: str, threads: int) -> Any:
    """Open a session of ONNX Runtime alone."""
    options = settings()
    options.intra_op_num_threads = threads
    return ort_classes()[0](path, options, providers=["CPUExecutionProvider"])


def starts(path: str, exclude: Sequence[str], folder: Path) -> None:
    """Print the times of starts and of first answers."""
    context = str(folder / "context.onnx")
    polydyn.ort.InferenceSession(path, settings(context_enable="1", context_file_path=context), exclude=exclude)
    kinds = {
        "ONNX Runtime": lambda: plain(path, 1),
        "stored programs": lambda: polydyn.ort.InferenceSession(path, settings(), threads=1, exclude=exclude),
        "EPContext": lambda: polydyn.ort.InferenceSession(context, settings(), threads=1),
    }
    times = {k: statistics.median(spent(f)[0] for _ in range(STARTS)) for k, f in kinds.items()}
    base = times["ONNX Runtime"]
    print("  start:", ", ".join(f"{k} {t:.1f} ms ({t / base:.2f})" for k, t in times.items()))
    model = onnx.load(path)
    arrays = feeds(model, shapes(Path(path).stem)[0])
    first = {}
    for kind, make in (
        ("ONNX Runtime", lambda: plain(path, 1)),
        ("background", lambda: polydyn.ort.InferenceSession(
            path, settings(), threads=1, compile="background", cache_dir=folder / "cache", exclude=exclude)),
    ):  # fmt: skip
        begin = time.perf_counter()
        ms, session = spent(make)
        answer, _ = spent(lambda s=session: s.run(None, arrays))  # type: ignore[misc]
        first[kind] = (
            f"{kind} {ms + answer:.1f} ms of processor time, {1e3 * (time.perf_counter() - begin):.0f} of wall"
        )
        del session
    print("  first answer:", "; ".join(first.values()), flush=True)


def divided(path: str) -> None:
    """Write a model of four products, two before and two after an operator that polydyn does not have."""
    rng = np.random.default_rng(0)
    sizes = {"a": (64, 512), "b": (512, 64), "c": (3, 512), "d": (512, 512)}
    weights = {n: rng.standard_normal(s).astype(np.float32) / np.sqrt(s[0], dtype=np.float32) for n, s in sizes.items()}
    node = onnx.helper.make_node
    nodes = [
        node("MatMul", ["x", "a"], ["p"]), node("Relu", ["p"], ["q"]), node("MatMul", ["q", "b"], ["s"]),
        node("Cast", ["s"], ["i"], to=onnx.TensorProto.INT32),
        node("TfIdfVectorizer", ["i"], ["v"], max_gram_length=1, max_skip_count=0, min_gram_length=1, mode="TF",
             ngram_counts=[0], ngram_indexes=[0, 1, 2], pool_int64s=[0, 1, 2]),
        node("MatMul", ["v", "c"], ["t"]), node("Tanh", ["t"], ["u"]), node("MatMul", ["u", "d"], ["y"]),
    ]  # fmt: skip
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["B", 64])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["B", 512])
    constants = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = onnx.helper.make_graph(nodes, "divided", [x], [y], constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)


def calls(
    path: str, exclude: Sequence[str], threads: int, count: int, sizes: Sequence[Mapping[str, int]] = (),
    fallback: str | None = None,
) -> bool:  # fmt: skip
    """Print medians of calls at every stored shape; return whether the results are right."""
    model, good = onnx.load(path), True
    own = polydyn.compile(path, threads=threads, options=polydyn.Options(fallback=fallback))
    options = settings()
    options.intra_op_num_threads = threads
    provider = polydyn.ort.InferenceSession(path, options, threads=threads, exclude=exclude)
    base = plain(path, threads)
    for shape in sizes or shapes(Path(path).stem):
        arrays = feeds(model, shape)
        players = {
            "ort": lambda a=arrays: base.run(None, a), "provider": lambda a=arrays: provider.run(None, a),
            "polydyn": lambda a=arrays: list(own.run(a).values()),
        }  # fmt: skip
        results = {k: f() for k, f in players.items()}
        worst = max(
            (float(np.abs(a.astype(float) - b.astype(float)).max(initial=0)) / max(1.0, float(np.abs(b).max(initial=0)))
             for a, b in zip(results["provider"], results["ort"], strict=True)), default=0.0,
        )  # fmt: skip
        good &= worst <= CLOSE
        times: dict[str, list[float]] = {k: [] for k in players}
        for _ in range(count):
            for k in random.sample(list(players), len(players)):
                times[k].append(spent(players[k])[0])
        m = {k: statistics.median(v) for k, v in times.items()}
        ratios = f"ort/provider {m['ort'] / m['provider']:.2f}, provider/polydyn {m['provider'] / m['polydyn']:.2f}"
        bits = all(a.tobytes() == b.tobytes() for a, b in zip(results["provider"], results["polydyn"], strict=True))
        print(f"  {threads} threads, {dict(shape)}: {', '.join(f'{k} {t:.3f} ms' for k, t in m.items())}; {ratios}; "
              f"difference {worst:.1e}{', equal bits as polydyn' if bits else ''}", flush=True)  # fmt: skip
    return good


def main() -> int:
    """Run the command line; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--divided", action="store_true")
    parser.add_argument("--exclude", nargs="*", default=[])
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    good = True
    for path in args.models:
        print(f"{os.path.basename(path)}{' without ' + ', '.join(args.exclude) if args.exclude else ''}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            starts(path, args.exclude, Path(folder))
        for threads in args.threads:
            good &= calls(path, args.exclude, threads, args.calls)
    if args.divided:
        warnings.simplefilter("ignore", FallbackWarning)
        print("products with an operator between them that polydyn does not have")
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "divided.onnx"))
            divided(path)
            for threads in args.threads:
                good &= calls(path, [], threads, args.calls, [{"B": n} for n in (1, 7, 64, 256)], "onnxruntime")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
