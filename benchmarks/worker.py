"""One contestant in its own process: loads models, then serves requests, one JSON object a line, over a pipe.

Requests and answers; an answer is ``{"error": text}`` if the request fails:
``{"do": "load", "path": ...}`` -> ``{"ready": seconds to load or compile, "version": ...}``, the model from now on;
``{"do": "run", "shape": {...}, "repeat": n}`` -> ``{"seconds": [...]}``, the time of each call;
``{"do": "sample", "shape": {...}}`` -> ``{"values": [...]}``, some elements of the first output, to compare;
``{"do": "stop"}`` ends. Inputs are made here from the shape and a seed, so that nothing large crosses the pipe.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from benchmarks.rivals import Call, Player, first_output, load
from polydyn.testing.inputs import feeds

SAMPLES = 61


class Served:
    """The current model and the call for the current shape."""

    def __init__(self, kind: str, threads: int) -> None:
        self.kind, self.threads = kind, threads
        self._model: onnx.ModelProto
        self._player: Player
        self._shape: Mapping[str, int] | None = None
        self._call: Call

    def load(self, path: str) -> dict[str, Any]:
        """Load or compile a model; the previous one is dropped first, so that memory holds only one."""
        self.__dict__.pop("_player", None)
        self.__dict__.pop("_call", None)
        self._shape = None
        self._model = onnx.load(path)
        start = time.perf_counter()
        self._player = load(self.kind, path, self.threads)
        return {"ready": time.perf_counter() - start, "version": self._player.version}

    def run(self, shape: Mapping[str, int], repeat: int) -> dict[str, Any]:
        """Time ``repeat`` calls."""
        call, seconds = self._prepared(shape), []
        for _ in range(repeat):
            if self._player.before:
                self._player.before()
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def sample(self, shape: Mapping[str, int]) -> dict[str, Any]:
        """Return up to SAMPLES elements of the first output, evenly spread over it."""
        flat = first_output(self._prepared(shape)()).reshape(-1)
        at = np.linspace(0, flat.size - 1, min(flat.size, SAMPLES)).astype(int) if flat.size else []
        return {"values": flat[at].astype(float).tolist()}

    def _prepared(self, shape: Mapping[str, int]) -> Call:
        if shape != self._shape:
            self.__dict__.pop("_call", None)
            self._call = self._player.prepare(feeds(self._model, shape))
            self._shape = shape
        return self._call


def serve(actions: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer requests until a stop request. ``actions``: by the name of a request; they take its fields."""
    # Libraries may print to stdout, so the pipe is a copy that receives only answers.
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        if do == "stop":
            break
        try:
            answer = actions[do](**request)
        except Exception as error:  # of any class: the caller must receive it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    served = Served(sys.argv[1], int(sys.argv[2]))
    serve({"load": served.load, "run": served.run, "sample": served.sample})
