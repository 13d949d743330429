"""Compares contestants by alternating measurements, each in its own process, and only while all of them are idle.

The order A B A B ... exposes all contestants to the same drift of the machine. Medians are compared. The first run is
an A/A run of the same program twice: its spread is the noise of the machine, and a ratio inside it is neither a win nor
a loss. A thread pool that spins after its call would slow the next contestant, so a measurement starts only when no
process uses CPU time. A contestant that compiles at the first call of a shape (PyTorch's Inductor) does so in a call
that is not timed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
QUIET_SECONDS = 0.01
TURN_SECONDS = 0.05
FEWEST_ROUNDS = 3
BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Contestant:
    """A program in its own process (the module ``worker``), reached over a pipe. RuntimeError if it fails."""

    worker = "benchmarks.worker"

    def __init__(self, kind: str, path: str | Path | None, threads: int) -> None:
        """Start the process.

        ``kind``: one of ``benchmarks.rivals.KINDS``. ``path``: the first model, or None for none yet.
        """
        self.kind, self._threads = kind, threads
        self._process = self._start()
        self.seconds_to_load = 0.0
        self.version = ""
        if path is not None:
            try:
                self.load(path)
            except RuntimeError:
                self.close()
                raise

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", self.worker, self.kind, str(self._threads)]
        env = {**os.environ, **dict.fromkeys(BLAS_THREADS, str(self._threads))}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load(self, path: str | Path, **about: Any) -> dict[str, Any]:
        """Load or compile a model in place of the previous one; after a rejection or its end, another may be loaded.

        ``about``: further fields of the request. Returns the answer.
        """
        if self._process.poll() is not None:
            self._process.communicate()  # closes its pipes
            self._process = self._start()
        answer = self._ask(do="load", path=str(Path(path).resolve()), **about)
        self.seconds_to_load = answer["ready"]
        self.version = answer["version"]
        return answer

    def run(self, shape: Mapping[str, int], repeat: int = 1) -> list[float]:
        """Return the seconds of each of ``repeat`` calls at the shape."""
        seconds: list[float] = self._ask(do="run", shape=dict(shape), repeat=repeat)["seconds"]
        return seconds

    def sample(self, shape: Mapping[str, int]) -> list[float]:
        """Return some elements of the first output, at the same positions for every contestant."""
        values: list[float] = self._ask(do="sample", shape=dict(shape))["values"]
        return values

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of the process, read from outside so that it costs the process nothing."""
        return time.clock_gettime((~self._process.pid << 3) | 2)  # Linux: the CPU clock of another process

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.write('{"do": "stop"}\n')
        self._process.communicate()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"the process ended ({self._process.wait()})"}
        if "error" in answer:
            raise RuntimeError(f"{self.kind}: {answer['error']}")
        return answer


@dataclass(frozen=True)
class Series:
    """Seconds per call, one median per turn."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over turns, in seconds."""
        return statistics.median(self.turns)


def wait_until_quiet(contestants: Sequence[Contestant], limit: float = 5.0) -> None:
    """Return when no contestant has used CPU time for QUIET_SECONDS; RuntimeError after ``limit`` seconds."""
    deadline = time.perf_counter() + limit
    before = [c.cpu_seconds() for c in contestants]
    busy = [c.kind for c in contestants]
    while time.perf_counter() < deadline:
        time.sleep(QUIET_SECONDS)
        after = [c.cpu_seconds() for c in contestants]
        used = [b - a for a, b in zip(before, after, strict=True)]
        busy = [c.kind for c, u in zip(contestants, used, strict=True) if u >= 0.02 * QUIET_SECONDS]
        if not busy:
            return
        before = after
    raise RuntimeError(f"not quiet after {limit} s: {', '.join(busy)}")


def warm_up(player: Contestant, shape: Mapping[str, int]) -> float:
    """Return the seconds of a call at the shape, after one untimed call. RuntimeError: the shape is not supported."""
    player.run(shape)
    (once,) = player.run(shape)
    return statistics.median(player.run(shape, 3)) if once < TURN_SECONDS else once


def rounds_for(seconds: float, seconds_a_call: Sequence[float], max_rounds: int) -> int:
    """Return the number of rounds that take about ``seconds``, from FEWEST_ROUNDS to ``max_rounds``."""
    one = sum(max(TURN_SECONDS, s) + 2 * QUIET_SECONDS for s in seconds_a_call)
    return max(min(FEWEST_ROUNDS, max_rounds), min(max_rounds, int(seconds / one)))


def take_turns(
    players: Sequence[Contestant],
    seconds_a_call: Sequence[float],
    shape: Mapping[str, int],
    rounds: int,
    everybody: Sequence[Contestant] = (),
) -> list[Series]:
    """Return one Series per player, all of them warm; calls are repeated until a turn lasts about TURN_SECONDS.

    ``seconds_a_call``: seconds per call of each player, from ``warm_up``. ``everybody``: processes that must be idle
    before a turn (default: the players).
    """
    repeats = [max(1, min(1000, round(TURN_SECONDS / s))) for s in seconds_a_call]
    turns: list[list[float]] = [[] for _ in players]
    for _ in range(rounds):
        for p, repeat, mine in zip(players, repeats, turns, strict=True):
            wait_until_quiet(everybody or players)
            mine.append(statistics.median(p.run(shape, repeat)))
    return [Series(tuple(t)) for t in turns]


def spread(a: Series, b: Series) -> float:
    """Return the spread of an A/A run, as a fraction: of the two medians, or of a typical pair of turns if it is
    larger.
    """
    pairs = statistics.median(abs(x / y - 1) for x, y in zip(a.turns, b.turns, strict=True))
    return max(abs(a.median / b.median - 1), pairs)


def verdict(ratio: float, noise: float) -> str:
    """Classify ``ratio`` (a baseline's time over ours): faster, slower, or same if it is inside the spread."""
    if abs(ratio - 1) <= noise:
        return "same"
    return "faster" if ratio > 1 else "slower"
