"""One contestant of ``benchmarks.language`` in its own process: the requests of ``benchmarks.worker``.

A shape is {"batch", "behind", "tokens"}: read that many ids of each text, behind that many positions. Calls of one
token follow each other until the room is used; then, and before every prompt, the texts are cut again, which is not
timed. ``{"do": "memory"}`` -> peak and current bytes of the process, and those that belong to no file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.language_engines import ROOM, Array, Engine, OnnxRuntimeGenai, OpenVinoGenai, load
from benchmarks.worker import SAMPLES, serve

IDS = 100
"""Ids are drawn below this: every vocabulary has them."""


def ids_of(batch: int, behind: int, tokens: int) -> Array:
    """Return the ids of equal positions for every contestant, from 1 on."""
    text = np.random.default_rng(behind).integers(1, IDS, (1, tokens))
    return np.repeat(text, batch, 0)


def _settle(engine: Engine, tokens: int) -> None:
    """Let onnxruntime-genai choose the id that its next call reads."""
    if tokens == 1 and isinstance(engine, OnnxRuntimeGenai):
        engine.settle()


class Texts:
    """The current model and its texts."""

    def __init__(self, kind: str, threads: int) -> None:
        self.kind, self.threads = kind, threads
        self.engine: Engine | OpenVinoGenai
        self.shape: Mapping[str, int] = {}
        self.length = 0

    def load(self, path: str, weights: str) -> dict[str, Any]:
        """Open a model in place of the previous one. ``first``: seconds of its first token of one text."""
        self.__dict__.pop("engine", None)
        self.shape = {}
        begin = time.perf_counter()
        self.engine = load(self.kind, path, self.threads, weights)
        opened = time.perf_counter()
        if isinstance(self.engine, OpenVinoGenai):
            self.engine.generated(ids_of(1, 0, 1), 1)
        else:
            self.engine.start(1, ROOM)
            self.engine.read(ids_of(1, 0, 1))
        first = time.perf_counter() - opened
        return {"ready": opened - begin, "first": first, "version": self.engine.version}

    def run(self, shape: Mapping[str, int], repeat: int) -> dict[str, Any]:
        """Time ``repeat`` calls at a shape."""
        engine, (batch, behind, tokens) = self.engine, (shape[k] for k in ("batch", "behind", "tokens"))
        if isinstance(engine, OpenVinoGenai):
            ids = ids_of(batch, 0, max(1, behind) if tokens == 1 else tokens)
            return {"seconds": (engine.token_seconds if tokens == 1 else engine.prompt_seconds)(ids, repeat)}
        if shape != self.shape:
            engine.start(batch, behind + max(tokens, ROOM) + 1)
            if behind:
                engine.read(ids_of(batch, 0, behind))
                _settle(engine, tokens)
            self.shape, self.length = dict(shape), behind
        seconds = []
        for _ in range(repeat):
            if self.length - behind + tokens > max(tokens, ROOM - 1):
                self._cut(engine, behind, tokens)
            ids = ids_of(batch, self.length, tokens)
            begin = time.perf_counter()
            engine.read(ids)
            seconds.append(time.perf_counter() - begin)
            self.length += tokens
        self._cut(engine, behind, tokens)  # the next turn begins where this one did
        return {"seconds": seconds}

    def _cut(self, engine: Engine, behind: int, tokens: int) -> None:
        engine.cut(behind)
        self.length = behind
        if behind:
            _settle(engine, tokens)

    def sample(self, shape: Mapping[str, int]) -> dict[str, Any]:
        """Return up to SAMPLES logits of the last position of the first text; none if they are not seen."""
        self.shape = {}
        if isinstance(self.engine, OpenVinoGenai):
            return {"values": []}
        self.engine.start(shape["batch"], shape["tokens"] + 1)
        self.engine.read(ids_of(shape["batch"], 0, shape["tokens"]))
        flat = self.engine.logits()[0].reshape(-1)
        at = np.linspace(0, flat.size - 1, min(flat.size, SAMPLES)).astype(int)
        return {"values": flat[at].astype(float).tolist()}

    def memory(self) -> dict[str, Any]:
        """Return bytes of this process (Linux)."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        names = {"peak": "VmHWM", "resident": "VmRSS", "anonymous": "RssAnon"}
        return {name: int(lines[field].split()[0]) * 1024 for name, field in names.items()}


if __name__ == "__main__":
    texts = Texts(sys.argv[1], int(sys.argv[2]))
    serve({"load": texts.load, "run": texts.run, "sample": texts.sample, "memory": texts.memory})
