"""Times one case in a process of its own: calls alternate, one thread, processor time, medians."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import onnx

from benchmarks.single.case import Case
from polydyn.testing.accuracy import error

LEAST, MOST = 2e-4, 2e-2
"""Seconds of a call of ONNX Runtime; the first symbol of a case is scaled until a call takes as long."""
MOST_ELEMENTS = 40_000_000
"""Elements of all inputs, at most, after scaling."""
TOLERANCES = {"float16": 1e-2, "bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-9}
"""Largest difference from ONNX Runtime, relative to the largest value, by the type of the result; integers: exact."""
ROUNDED = ("Quantize", "QLinear", "QDQ", "QGemm", "Resize")
"""Cases where a number may be rounded to a neighbour: their integers may differ by one (docs/operators.md)."""
STEP = 0.0501
"""The step of the cases between quantization and its inverse (QDQ): their floats may differ by it."""
LIMIT = 300
"""Seconds of a case, at most. A timer of processor time would make the clock of the process as coarse as the ticks."""


def runtime(model: onnx.ModelProto) -> Any:
    """Open ONNX Runtime on one thread."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound_runtime(session: Any, feeds: Mapping[str, Any], outputs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a call of ONNX Runtime that reads and writes memory allocated before."""
    import onnxruntime as ort

    binding = session.io_binding()
    values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in (dict(feeds) | dict(outputs)).items()}
    for n in feeds:
        binding.bind_ortvalue_input(n, values[n])
    for n in outputs:
        binding.bind_ortvalue_output(n, values[n])
    return lambda: (session.run_with_iobinding(binding), values)[0]


def seconds(call: Callable[[], Any], repeat: int = 1) -> float:
    """Return the processor seconds of a call."""
    begin = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - begin) / repeat


def scaled(case: Case, sizes: Mapping[str, int], session: Any, seed: int) -> dict[str, int]:
    """Return the sizes, the first symbol doubled or halved until a call of ONNX Runtime takes LEAST to MOST seconds."""
    if not sizes:
        return {}
    sizes, first = dict(sizes), next(iter(sizes))
    for _ in range(12):
        feeds = case.feeds(sizes, seed)
        session.run(None, feeds)
        once = min(seconds(lambda f=feeds: session.run(None, f)) for _ in range(2))  # type: ignore[misc]
        elements = sum(a.size for a in feeds.values())
        if once < LEAST and elements * 2 <= MOST_ELEMENTS:
            sizes[first] *= 2
        elif once > MOST and sizes[first] > 1:
            sizes[first] //= 2
        else:
            break
    return sizes


def differs(case: Case, outputs: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return "" or what differs: an output and by how much."""
    near = any(word in case.name for word in ROUNDED)
    for n, e in expected.items():
        got, e = np.asarray(outputs[n]), np.asarray(e)
        if got.shape != e.shape or got.dtype != e.dtype:
            return f"{n}: {got.dtype}{got.shape} for {e.dtype}{e.shape}"
        if near and e.dtype.kind in "iu":
            worst = int(np.abs(got.astype(np.int64) - e.astype(np.int64)).max(initial=0))
            if worst > 1:
                return f"{n}: off by {worst}"
            continue
        found = np.isfinite(e.astype(np.float64))
        if not np.array_equal(found, np.isfinite(got.astype(np.float64))):
            return f"{n}: NaN or infinity in other places"
        if "QDQ" in case.name and np.abs(got - e).max(initial=0) <= STEP:
            continue
        worst_float = error({n: np.where(found, got, 0)}, {n: np.where(found, e, 0)})
        if worst_float > TOLERANCES.get(str(e.dtype), 0.0):
            return f"{n}: {worst_float:.1e} of the largest value"
    return ""


def rows(case: Case, budget: float, seed: int) -> list[dict[str, Any]]:
    """Return a row for each of the sizes of a case. ``budget``: processor seconds of a row, about.

    A row has ``refused`` in place of times if one of both does not run the case.
    """
    import polydyn

    model = case.model()
    try:
        session = runtime(model)
    except Exception as e:  # whatever ONNX Runtime raises for a type or operator that it lacks
        return [{"refused": "onnxruntime", "why": str(e).strip().splitlines()[-1][:200]}]
    begin = time.perf_counter()
    program = polydyn.compile(model, threads=1)
    compiled = time.perf_counter() - begin
    found = []
    for stated in case.sizes:
        try:
            sizes = scaled(case, stated, session, seed)
            feeds = case.feeds(sizes, seed)
            expected = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
        except Exception as e:
            found.append({"sizes": dict(stated), "refused": "onnxruntime", "why": str(e).strip()[:200]})
            continue
        outputs = {n: np.asarray(a) for n, a in program(feeds).items()}
        wrong = differs(case, outputs, expected) if case.exact else ""
        ours, theirs = alternating(program.bind(feeds), bound_runtime(session, feeds, expected), budget)
        found.append({"sizes": sizes, "polydyn": ours, "onnxruntime": theirs, "ratio": ours / theirs, "wrong": wrong,
                      "compile_seconds": compiled})  # fmt: skip
    return found


def alternating(ours: Callable[[], Any], theirs: Callable[[], Any], budget: float) -> tuple[float, float]:
    """Return the medians of calls that alternate, 3 to 31 of each, for about ``budget`` processor seconds."""
    warm = seconds(ours) + seconds(theirs)
    warm = min(warm, seconds(ours) + seconds(theirs))
    count = max(3, min(31, int(budget / warm)))
    turns = [(seconds(ours), seconds(theirs)) for _ in range(count)]
    return statistics.median(t[0] for t in turns), statistics.median(t[1] for t in turns)


def _child(case: Case, budget: float, seed: int, to: Connection) -> None:
    try:
        to.send(rows(case, budget, seed))
    except Exception as e:
        to.send([{"refused": "polydyn", "why": f"{type(e).__name__}: {e}"[:400]}])


def prepare() -> None:
    """Import all that compiling needs, by compiling a small model: forked processes then have it."""
    import polydyn
    from polydyn.testing import models

    runtime(models.unary("Relu", ["N"]))
    polydyn.compile(models.unary("Tanh", ["N"]), threads=1)


def measured(case: Case, budget: float, seed: int) -> list[dict[str, Any]]:
    """Return ``rows`` from a forked process: a crash or a run without end costs one case."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(case, budget, seed, there))
    process.start()
    there.close()
    found: list[dict[str, Any]] = [{"refused": "crash", "why": f"the process ended, or took {LIMIT} s"}]
    with contextlib.suppress(EOFError):
        if here.poll(LIMIT):
            found = here.recv()
    process.kill()
    process.join()
    return found
