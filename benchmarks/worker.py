"""One contestant in its own process: loads a model, then serves requests, one JSON object a line, over a pipe.

Requests: ``{"do": "run", "shape": {...}, "repeat": n}`` -> ``{"seconds": [...]}``, the time of each call;
``{"do": "stop"}`` ends. The first line sent is ``{"ready": seconds to load or compile, "version": ...}``, or
``{"error": text}``. Inputs are made here from the shape and a seed, so that nothing large crosses the pipe.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import onnx

from benchmarks.models.inputs import feeds

Run = Callable[[dict[str, Any]], Any]


def load_onnxruntime(path: str, threads: int, spinning: bool) -> tuple[Run, str]:
    """An ONNX Runtime session on the CPU with all optimisations (its default)."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs), str(ort.__version__)


def load_polydyn(path: str, threads: int) -> tuple[Run, str]:
    """A compiled program."""
    import polydyn

    return polydyn.compile(path, threads=threads).run, polydyn.__version__


def load(kind: str, path: str, threads: int) -> tuple[Run, str]:
    """``kind``: polydyn, onnxruntime, or onnxruntime-nospin."""
    if kind == "polydyn":
        return load_polydyn(path, threads)
    return load_onnxruntime(path, threads, spinning=kind == "onnxruntime")


def serve(kind: str, path: str, threads: int) -> None:
    """Loads and answers until told to stop."""
    # Libraries print to stdout when they like; the pipe is a copy that only answers go to.
    answers = sys.stdout
    sys.stdout = sys.stderr

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    model = onnx.load(path)
    start = time.perf_counter()
    try:
        run, version = load(kind, path, threads)
    except Exception as error:  # whatever it is, the caller must hear of it
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(ready=time.perf_counter() - start, version=version)
    inputs: dict[str, Any] = {}
    made_for = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "stop":
            break
        if request["shape"] != made_for:
            made_for, inputs = request["shape"], feeds(model, request["shape"])
        seconds = []
        for _ in range(request["repeat"]):
            begin = time.perf_counter()
            run(inputs)
            seconds.append(time.perf_counter() - begin)
        answer(seconds=seconds)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
