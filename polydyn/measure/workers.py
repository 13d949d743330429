"""Measurements in worker processes with hard time limits: a kernel that hangs or crashes ends only its worker.

A worker runs one function, named ``module:function``, on JSON arguments and answers in JSON. At the time limit its
process group is killed, including compilers that it started. The next task gets a new worker.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from polydyn.errors import BuildError, InputError

_START_SECONDS = 120.0
"""Time limit in seconds for a worker to import its function."""


@dataclass(frozen=True)
class Answer:
    """A worker's answer: ``value``, or the reason of a failure (empty on success)."""

    value: Any = None
    failure: str = ""


class _Worker:
    """One worker process. ``task`` is the index of its current task, or None if it is idle."""

    def __init__(self, function: str, timeout: float) -> None:
        command = [sys.executable, "-c", f"from {__name__} import serve; serve()", function, str(timeout)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self.task: int | None = None
        self.ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        self.buffer = b""

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, task: int, arguments: Mapping[str, Any], timeout: float) -> None:
        assert self.process.stdin is not None
        self.task, self.deadline = task, time.monotonic() + timeout
        with suppress(BrokenPipeError):  # it died while idle; reading its output reports that
            self.process.stdin.write(json.dumps(dict(arguments)).encode() + b"\n")

    def kill(self) -> str:
        """End the process group. Return how the process ended: its signal or exit status."""
        self._peek(0.05)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.output.close()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def _peek(self, seconds: float) -> None:
        """Wait for the end without reaping the process, so that its group id stays reserved until ``kill``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
            time.sleep(0.002)


class Workers:
    """A pool of worker processes for one function. Use it as a context manager.

    Use ``count`` 1 if the answers are times, because concurrent kernels disturb each other.

    InputError: ``function`` is not ``module:function``. BuildError: a worker cannot import it.
    """

    def __init__(self, function: str, *, count: int = 1, timeout: float = 10.0) -> None:
        if function.count(":") != 1:
            raise InputError(f"{function!r} does not name a function", rule="workers take module:function")
        self.function, self.timeout = function, timeout
        self._select = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        for _ in range(count):
            self._start()

    def map(self, arguments: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Return the answers to all arguments, in order. Each worker runs one task at a time."""
        answers: dict[int, Answer] = {}
        waiting = deque(range(len(arguments)))
        while len(answers) < len(arguments):
            for w in self._workers:
                if w.ready and w.task is None and waiting:
                    task = waiting.popleft()
                    w.send(task, arguments[task], self.timeout)
            for w, line in self._wait():
                if w.task is not None:
                    answers[w.task] = line
                    w.task = None
        return [answers[i] for i in range(len(arguments))]

    def _wait(self) -> list[tuple[_Worker, Answer]]:
        """Wait for the next line, death or deadline, and handle it."""
        busy = [w for w in self._workers if w.task is not None or not w.ready]
        left = min(w.deadline for w in busy) - time.monotonic()
        out: list[tuple[_Worker, Answer]] = []
        for key, _ in self._select.select(max(left, 0.0)):
            w: _Worker = key.data
            chunk = os.read(w.output.fileno(), 1 << 16)
            if not chunk:
                out.append((w, Answer(failure=self._replace(w))))
                continue
            *lines, w.buffer = (w.buffer + chunk).split(b"\n")
            out += [(w, a) for a in (self._read(w, line) for line in lines) if a is not None]
        for w in busy:
            late = w in self._workers and time.monotonic() > w.deadline
            if late and not any(done is w for done, _ in out):
                self._replace(w)
                out.append((w, Answer(failure=f"no answer within {self.timeout:g} s")))
        return out

    def _read(self, w: _Worker, line: bytes) -> Answer | None:
        data = json.loads(line)
        if "ready" in data:
            w.ready, w.deadline = True, math.inf
            return None
        return Answer(data.get("value"), data.get("failure", ""))

    def _replace(self, w: _Worker) -> str:
        """End a worker and start another. Return how it ended. BuildError: it never started."""
        self._select.unregister(w.output)
        self._workers.remove(w)
        ended = w.kill()
        if not w.ready:
            raise BuildError(
                f"a measuring worker cannot run {self.function} ({ended})",
                rule="module:function in a fresh process",
                remedy=f"run: python -c 'from {self.function.replace(':', ' import ')}'",
            )
        self._start()
        return ended

    def _start(self) -> None:
        w = _Worker(self.function, self.timeout)
        self._workers.append(w)
        self._select.register(w.output, selectors.EVENT_READ, w)

    def close(self) -> None:
        """Ends all workers."""
        for w in self._workers:
            self._select.unregister(w.output)
            w.kill()
        self._workers = []
        self._select.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self.close()


def serve() -> None:
    """Run the loop of a worker process, whose arguments are the function and the time limit. Standard output is
    reserved for answers; output of the function goes to standard error.
    """
    function, timeout = sys.argv[1], float(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        # if the parent is gone, the alarm ends the worker; otherwise the parent's limit is earlier
        signal.alarm(math.ceil(2 * timeout) + 1)
        try:
            answer = {"value": call(**json.loads(line))}
            text = json.dumps(answer, allow_nan=False)
        except Exception as e:
            text = json.dumps({"failure": f"{type(e).__name__}: {e}"})
        signal.alarm(0)
        print(text, file=answers)
