"""Soak one process in everything that servers do to it: ``make soak``.

usage: python -m benchmarks.soak [--minutes 15] [--seed 0] [--only STEP ...] [--out FILE.json] [--picture FILE.svg]

Steps are drawn at random: calls of other shapes by programs of one to three threads, sessions and programs that are
made and dropped, forks, signals during calls, interrupted compilations, a full disk, a read-only cache, a cache of
eight processes, clocks that jump, and limited memory. Every answer must have the bits of the first one. After each
step memory, file descriptors, threads and the latency of one call are recorded. The first quarter is warm-up. A
measure is flat unless the lower end of the 95 % interval of its slope is above its limit (``LIMITS``); the slope is
that of a line through the means of 16 batches. Exit code 1: other bits, an error, or a measure that is not flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import polydyn
from benchmarks.kills import model_of
from polydyn.build.eviction import evict
from polydyn.errors import PolydynError
from polydyn.explore.pictures.sheet import Picture, Sheet

MEASURES = {"memory": "MB", "files": "", "threads": "", "latency": "us"}
LIMITS = {"memory": 4.0, "files": 1.0, "threads": 1.0, "latency": 20.0}
"""Measure -> allowed growth in 1000 steps, in its unit: resident memory, open file descriptors, threads of the process,
processor time of one small call."""
BATCHES = 16
T_95 = 2.145
"""97.5 % point of Student's distribution with ``BATCHES - 2`` degrees of freedom."""
MAX_STEPS = 100_000
SHARED = 8
"""Number of processes that share a cache."""
PROGRAMS = 3
SIZES = (0, 1, 2, 3, 7, 31, 64, 130, 511, 2000)
NOBODY = 65534


class Interrupted(BaseException):
    """Raised by the handler of a signal."""


class WrongError(Exception):
    """A step gave other bits, or did not end as it must."""


@dataclass
class Soak:
    """The process that is soaked: its programs and the answers that it must give."""

    folder: Path
    random: random.Random
    programs: dict[tuple[int, int], Any] = field(default_factory=dict)
    answers: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def prepare(self) -> None:
        """Compile the models, and keep a program for each number of threads."""
        import onnx

        os.environ["POLYDYN_CACHE"] = str(self.folder / "cache")
        for k in range(PROGRAMS):
            onnx.save(model_of(k), str(self.path(k)))
            polydyn.compile(self.path(k), threads=1).save(self.saved(k))
            for threads in (1, 2, 3):
                self.programs[k, threads] = polydyn.load(self.saved(k), threads=threads)
            for size in SIZES:
                self.answers[k, size] = self._bits(self.programs[k, 1], size)

    def path(self, k: int) -> Path:
        """Return the file of a model."""
        return self.folder / f"{k}.onnx"

    def saved(self, k: int) -> Path:
        """Return the file of a saved program."""
        return self.folder / f"{k}.polydyn"

    def _bits(self, program: Any, size: int) -> bytes:
        return bytes(np.asarray(program.run({"x": _input(size)})["y"]).tobytes())

    def check(self, program: Any, k: int, sizes: Sequence[int] = SIZES) -> None:
        """Call a program at some sizes. WrongError: other bits."""
        for size in sizes:
            if self._bits(program, size) != self.answers[k, size]:
                raise WrongError(f"model {k} with B={size} has other bits")

    def drawn(self) -> tuple[int, int]:
        """Return a model and a number of threads."""
        return self.random.randrange(PROGRAMS), self.random.choice((1, 2, 3))

    def some_sizes(self) -> list[int]:
        """Return some sizes in random order."""
        return self.random.sample(SIZES, 4)


def _input(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(size).standard_normal((size, 3), np.float32)


def in_child(what: Callable[[], None], count: int = 1) -> None:
    """Run a function in forked children at once. WrongError: one of them fails; the text of its error."""
    children = []
    for _ in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            code = 1
            try:
                what()
                code = 0
            except BaseException as e:
                os.write(writing, ("".join(traceback.format_exception_only(e)))[:1000].encode())
            finally:
                os._exit(code)
        os.close(writing)
        children.append((pid, reading))
    said = []
    for pid, reading in children:
        with os.fdopen(reading, "rb") as pipe:
            text = pipe.read().decode()
        status = os.waitpid(pid, 0)[1]
        said += [text or f"status {status}"] if status else []
    if said:
        raise WrongError(f"{len(said)} children fail: {said[0]}")


# -- steps -------------------------------------------------------------------------------------------------------------


def call(s: Soak) -> None:
    """Call kept programs at random shapes, with random numbers of threads."""
    for _ in range(10):
        k, threads = s.drawn()
        s.check(s.programs[k, threads], k, s.some_sizes())


def call_from_threads(s: Soak) -> None:
    """Call one program from three threads at once."""
    k, _ = s.drawn()
    wrong: list[str] = []

    def caller() -> None:
        try:
            s.check(s.programs[k, 2], k)
        except Exception as e:
            wrong.append(str(e))

    callers = [threading.Thread(target=caller) for _ in range(3)]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    if wrong:
        raise WrongError(wrong[0])


def session(s: Soak) -> None:
    """Make and drop a session and a program."""
    k, threads = s.drawn()
    made = polydyn.InferenceSession(str(s.path(k)))
    size = s.random.choice(SIZES)
    (y,) = made.run(None, {"x": _input(size)})
    if np.asarray(y).tobytes() != s.answers[k, size]:
        raise WrongError(f"a session of model {k} has other bits")
    s.check(polydyn.load(s.saved(k), threads=threads), k, s.some_sizes())


def fork(s: Soak) -> None:
    """Call inherited programs in a forked child, and again here."""
    k, threads = s.drawn()
    s.check(s.programs[k, threads], k, s.some_sizes())
    in_child(lambda: s.check(s.programs[k, threads], k))
    s.check(s.programs[k, threads], k, s.some_sizes())


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Interrupted in this block after some seconds."""

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Interrupted:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt_calls(s: Soak) -> None:
    """Interrupt calls by a signal, and call again."""
    k, threads = s.drawn()
    with alarm(s.random.uniform(0.0005, 0.02)):
        while True:
            s.check(s.programs[k, threads], k)
    s.check(s.programs[k, threads], k, s.some_sizes())


def compiling(s: Soak, name: str, what: Callable[[], None]) -> None:
    """Run a function that compiles, in a child with the cache ``name``.

    islpy loses 64 bytes in each operation that returns a set or map, some 60 kB in a compilation of these models. The
    soaked process compiles only in children, so that its own growth shows.
    """

    def child() -> None:
        os.environ["POLYDYN_CACHE"] = str(s.folder / name)
        what()

    in_child(child)


def interrupt_compile(s: Soak) -> None:
    """Interrupt a compilation by a signal; afterwards the program is compiled, with what the cache has by then."""
    (k, threads), seconds = s.drawn(), s.random.uniform(0.01, 1.5)
    sizes = s.some_sizes()

    def child() -> None:
        for folder in ("programs", "objects"):
            shutil.rmtree(s.folder / "interrupted" / folder, ignore_errors=True)
        with alarm(seconds):
            polydyn.compile(s.path(k), threads=threads)
        s.check(polydyn.compile(s.path(k), threads=threads), k, sizes)

    compiling(s, "interrupted", child)


def full_disk(s: Soak) -> None:
    """Save and compile while no file can grow, then again."""
    k, threads = s.drawn()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        try:
            s.programs[k, threads].save(s.folder / "full.polydyn")
            raise WrongError("a program was saved on a full disk")
        except PolydynError:
            pass
        s.check(s.programs[k, threads], k, s.some_sizes())
        s.check(polydyn.compile(s.path(k), threads=threads), k, s.some_sizes())  # it is in the cache
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if (s.folder / "full.polydyn").exists() or list(s.folder.glob(".full*")):
        raise WrongError("a full disk leaves a file")


def read_only_cache(s: Soak) -> None:
    """Load and compile as a user who may read the cache and not write it."""
    k, threads = s.drawn()
    s.check(polydyn.compile(s.path(k), threads=threads), k, s.some_sizes())
    folders = [s.folder, s.folder / "cache", *(p for p in (s.folder / "cache").iterdir() if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)

    def child() -> None:
        if os.geteuid() == 0:
            for path in folders:
                for file in path.glob("*"):
                    if file.is_file():
                        file.chmod(0o444)
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        s.check(polydyn.load(s.saved(k), threads=threads), k)
        s.check(polydyn.compile(s.path(k), threads=threads), k)

    try:
        in_child(child)
    finally:
        for folder in folders:
            folder.chmod(0o755)


def share_cache(s: Soak) -> None:
    """Compile in eight processes at once, which share an empty cache with a limit."""
    k, threads = s.drawn()
    cache = s.folder / "shared"

    def child() -> None:
        os.environ["POLYDYN_CACHE"] = str(cache)
        os.environ["POLYDYN_CACHE_LIMIT"] = "200K"
        s.check(polydyn.compile(s.path(k), threads=threads), k)

    try:
        in_child(child, SHARED)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def jump_clocks(s: Soak) -> None:
    """Compile, load and evict while the clock of the day jumps forwards and backwards."""
    k, threads = s.drawn()
    now, now_ns, sizes = time.time, time.time_ns, s.some_sizes()
    jumps = (-3e9, -86400.0, 0.0, 3600.0, 4e8)

    def child() -> None:
        with mock.patch.object(time, "time", lambda: now() + s.random.choice(jumps)), \
                mock.patch.object(time, "time_ns", lambda: now_ns() + int(s.random.choice(jumps) * 1e9)):  # fmt: skip
            s.check(polydyn.compile(s.path(k), threads=threads), k, sizes)
            evict(s.folder / "clocks", 100_000)
            s.check(polydyn.load(s.saved(k), threads=threads), k, sizes)

    compiling(s, "clocks", child)


def limit_memory(s: Soak) -> None:
    """Make calls that need more memory than a child may have; smaller calls then work."""
    k, threads = s.drawn()

    def child() -> None:
        program = s.programs[k, threads]
        s.check(program, k)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (48 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            program.run({"x": np.zeros((4 << 20, 3), np.float32)})
            raise WrongError("a call has more memory than the limit")
        except (PolydynError, MemoryError):
            pass
        s.check(program, k)

    in_child(child)


STEPS: Mapping[str, Callable[[Soak], None]] = {
    "call": call, "call from threads": call_from_threads, "session": session, "fork": fork,
    "interrupt calls": interrupt_calls, "interrupt compile": interrupt_compile, "full disk": full_disk,
    "read-only cache": read_only_cache, "share cache": share_cache, "jump clocks": jump_clocks,
    "limit memory": limit_memory,
}  # fmt: skip
SHARES = {"call": 30, "call from threads": 15, "session": 20, "fork": 10, "interrupt calls": 15, "interrupt compile": 1,
          "full disk": 5, "read-only cache": 2, "share cache": 0.2, "jump clocks": 2, "limit memory": 4}  # fmt: skip


# -- measures ----------------------------------------------------------------------------------------------------------


def measure(s: Soak) -> dict[str, float]:
    """Return the measures of this process."""
    program, x = s.programs[0, 1], {"x": _input(64)}
    times = []
    for _ in range(9):
        start = time.process_time_ns()
        program.run(x)
        times.append(time.process_time_ns() - start)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * resource.getpagesize() / 1e6,
        "files": len(os.listdir("/proc/self/fd")) - 1.0,
        "threads": float(len(os.listdir("/proc/self/task"))),
        "latency": sorted(times)[len(times) // 2] / 1e3,
    }


@dataclass(frozen=True)
class Slope:
    """Growth of a measure in 1000 steps, with a 95 % interval."""

    growth: float
    low: float
    high: float


def slope_of(values: Sequence[float]) -> Slope:
    """Return the slope of values, one after each step: a line through the means of batches, after the warm-up."""
    rest = np.asarray(values[len(values) // 4 :], float)
    if len(rest) < 2 * BATCHES:
        return Slope(0.0, float("-inf"), float("inf"))
    parts = np.array_split(np.arange(len(rest)), BATCHES)
    x, y = (np.array([v[p].mean() for p in parts]) for v in (np.arange(len(rest), dtype=float), rest))
    spread = float(((x - x.mean()) ** 2).sum())
    rise = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    residual = y - y.mean() - rise * (x - x.mean())
    error = T_95 * float(np.sqrt((residual**2).sum() / (BATCHES - 2) / spread))
    return Slope(1000 * rise, 1000 * (rise - error), 1000 * (rise + error))


def soak(
    s: Soak, seconds: float, names: Sequence[str], most: int = 10**9, leak: int = 0
) -> tuple[list[dict[str, Any]], list[str]]:
    """Take steps for some seconds, at most ``most``. Return the samples, and what went wrong.

    ``leak``: bytes to lose in each step, which a test of the measures plants.
    """
    rows = np.zeros((MAX_STEPS, 2 + len(MEASURES)), np.float32)
    rows.fill(0)  # so that the memory of the samples does not grow
    wrong, kept, count = list[str](), list[bytes](), 0
    s.prepare()
    end = time.monotonic() + seconds
    while time.monotonic() < end and count < min(most, MAX_STEPS):
        kept += [bytes(leak) + b"x"] if leak else []
        name = s.random.choices(list(names), [SHARES[n] for n in names])[0]
        start = time.monotonic()
        try:
            STEPS[name](s)
        except Exception as e:  # every error here is a finding
            wrong.append(f"step {count} ({name}): {type(e).__name__}: {e}")
            print(wrong[-1], flush=True)
        rows[count] = [names.index(name), time.monotonic() - start, *measure(s).values()]
        count += 1
    heads = ("seconds", *MEASURES)
    return [{"step": names[int(r[0])], **dict(zip(heads, map(float, r[1:]), strict=True))} for r in rows[:count]], wrong


def draw(samples: Sequence[Mapping[str, Any]], slopes: Mapping[str, Slope]) -> Picture:
    """Return a picture with a panel for each measure."""
    sheet = Sheet("One process in the soak", f"{len(samples)} steps; the shaded quarter is warm-up")
    left, width, height = 70, 800, 90
    for number, (name, unit) in enumerate(MEASURES.items()):
        values, top = [float(s[name]) for s in samples], sheet.top + 20 + number * (height + 50)
        least, most = min(values), max(values)
        room = (most - least) or 1.0
        slope = slopes[name]
        said = f"{name} {unit}: {slope.growth:+.2f} in 1000 steps, [{slope.low:+.2f}, {slope.high:+.2f}]"
        sheet.text(left, top - 8, said, 12, "b")
        sheet.rect(left, top, width / 4, height, "#888", opacity=0.12)
        for value, y in ((most, top), (least, top + height)):
            sheet.path(f"M{left},{y}H{left + width}", cls="g")
            sheet.text(left - 6, y + 4, f"{value:.4g}", 11, "s", "end")
        bins = np.array_split(np.arange(len(values)), min(400, len(values)))
        x = [left + width * b.mean() / len(values) for b in bins]
        y = [top + height * (1 - (max(values[i] for i in b) - least) / room) for b in bins]
        sheet.path("M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)), "#2f6fb0", 1.2)
    return sheet.picture()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--out", type=Path, help="a file for the samples, as JSON")
    parser.add_argument("--picture", type=Path, help="a file for the picture, .svg or .html")
    args = parser.parse_args(argv)
    before = os.environ.get("POLYDYN_CACHE")
    with tempfile.TemporaryDirectory(prefix="polydyn-soak-") as folder:
        Path(folder).chmod(0o755)
        try:
            samples, wrong = soak(Soak(Path(folder), random.Random(args.seed)), 60 * args.minutes, args.only)
        finally:
            os.environ.pop("POLYDYN_CACHE")
            if before is not None:
                os.environ["POLYDYN_CACHE"] = before
    slopes = {name: slope_of([x[name] for x in samples]) for name in MEASURES}
    print(f"{len(samples)} steps, seed {args.seed}: {dict(Counter(x['step'] for x in samples))}")
    uneven = []
    for name, slope in slopes.items():
        flat = slope.low <= LIMITS[name]
        uneven += [] if flat else [name]
        print(f"{name}: {samples[-1][name]:.1f} {MEASURES[name]}, {slope.growth:+.2f} [{slope.low:+.2f}, "
              f"{slope.high:+.2f}] in 1000 steps, {'flat' if flat else 'NOT FLAT'}")  # fmt: skip
    print(*wrong[:50], f"{len(wrong)} faults; {'failed' if wrong or uneven else 'passed'}", sep="\n")
    if args.out:
        args.out.write_text(json.dumps({"seed": args.seed, "faults": wrong, "samples": samples}) + "\n")
    if args.picture:
        draw(samples, slopes).save(args.picture)
    return 1 if wrong or uneven else 0


if __name__ == "__main__":
    sys.exit(main())
