"""How contestants are compared: in turns, each in its own process, each turn only when everybody is quiet.

A B A B ... so that drift of the machine meets all alike; medians; first an A/A run, the same program twice, whose
spread is what the machine adds by itself: a ratio inside it is neither a win nor a loss. A thread pool that spins
after its call would slow the next contestant, so a turn starts only when the CPU time of every process stands still.
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
BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Contestant:
    """A program in its own process (``benchmarks/worker.py``), reached over a pipe. RuntimeError when it fails."""

    def __init__(self, kind: str, path: str | Path | None, threads: int) -> None:
        """``kind``: one of ``benchmarks.rivals.KINDS``. ``path``: the first model, None to load one later."""
        self.kind = kind
        command = [sys.executable, "-m", "benchmarks.worker", kind, str(threads)]
        env = {**os.environ, **dict.fromkeys(BLAS_THREADS, str(threads))}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds_to_load = 0.0
        self.version = ""
        if path is not None:
            try:
                self.load(path)
            except RuntimeError:
                self.close()
                raise

    def load(self, path: str | Path) -> None:
        """Loads or compiles a model in place of the one before; after a refusal another may be loaded."""
        answer = self._ask(do="load", path=str(Path(path).resolve()))
        self.seconds_to_load = answer["ready"]
        self.version = answer["version"]

    def run(self, shape: Mapping[str, int], repeat: int = 1) -> list[float]:
        """Seconds of each of ``repeat`` calls at the shape."""
        seconds: list[float] = self._ask(do="run", shape=dict(shape), repeat=repeat)["seconds"]
        return seconds

    def sample(self, shape: Mapping[str, int]) -> list[float]:
        """Some elements of the first output, the same ones from every contestant."""
        values: list[float] = self._ask(do="sample", shape=dict(shape))["values"]
        return values

    def cpu_seconds(self) -> float:
        """CPU time of all threads of the process, read from outside, so that asking costs it nothing."""
        return time.clock_gettime((~self._process.pid << 3) | 2)  # Linux: the CPU clock of another process

    def close(self) -> None:
        """Ends the process."""
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
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
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
    """Returns when no contestant has used CPU time for QUIET_SECONDS; RuntimeError after ``limit`` seconds."""
    deadline = time.perf_counter() + limit
    before = [c.cpu_seconds() for c in contestants]
    while time.perf_counter() < deadline:
        time.sleep(QUIET_SECONDS)
        after = [c.cpu_seconds() for c in contestants]
        if all(b - a < 0.02 * QUIET_SECONDS for a, b in zip(before, after, strict=True)):
            return
        before = after
    raise RuntimeError(f"not quiet after {limit} s: {', '.join(c.kind for c in contestants)}")


def take_turns(
    players: Sequence[Contestant], shape: Mapping[str, int], rounds: int, everybody: Sequence[Contestant] = ()
) -> list[Series]:
    """One Series per player. Each warms up once; short calls are repeated until a turn lasts TURN_SECONDS.

    ``everybody``: processes that must be quiet before a turn (default: the players).
    """
    everybody = everybody or players
    repeats = []
    for p in players:
        p.run(shape)
        once = statistics.median(p.run(shape, 3))
        repeats.append(max(1, min(1000, round(TURN_SECONDS / once))))
    turns: list[list[float]] = [[] for _ in players]
    for _ in range(rounds):
        for p, repeat, mine in zip(players, repeats, turns, strict=True):
            wait_until_quiet(everybody)
            mine.append(statistics.median(p.run(shape, repeat)))
    return [Series(tuple(t)) for t in turns]


def spread(player: Contestant, shape: Mapping[str, int], rounds: int, everybody: Sequence[Contestant] = ()) -> float:
    """What an A/A run differs by, as a fraction: of the two medians, or of a typical pair of turns if that is more."""
    a, b = take_turns([player, player], shape, rounds, everybody or [player])
    pairs = statistics.median(abs(x / y - 1) for x, y in zip(a.turns, b.turns, strict=True))
    return max(abs(a.median / b.median - 1), pairs)


def verdict(ratio: float, noise: float) -> str:
    """``ratio`` = rival's time over ours: faster, slower, or same when inside the spread."""
    if abs(ratio - 1) <= noise:
        return "same"
    return "faster" if ratio > 1 else "slower"
