"""Runs cases in their own processes: a case that hangs, crashes or breaks the device does not affect later ones.

A process prints a line of JSON per event and takes ``--first`` (the case to begin with), ``--seconds`` and ``--count``:
``work`` is the child's side, ``results`` the parent's. After a kernel has broken its context nothing in that process
can be trusted, so the remaining cases go to a new one. A kernel's error appears at a later call; so the case is run
once more, alone, with launches that wait for their kernels, and the error then names the launch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from polydyn.gpu.errors import DeviceLostError

Event = dict[str, Any]
Job = tuple[str, Callable[[], "Event | None"]]
"""A case: its name, and a function that returns its result, or None to leave it out."""

PATIENCE = 45.0
"""Seconds without output after which the running case counts as hanging."""
FIRST = 150.0
"""``PATIENCE`` for the first case of a process, which may import torch from a cold disk."""
MAX_RERUNS = 3
"""Number of cases of a stage that are run once more to name a launch."""
BLOCKING = "CUDA_LAUNCH_BLOCKING"
"""The driver's setting for launches that wait for their kernels."""
SLACK = 20.0
"""Seconds beyond its time limit that a process may take to start and to end."""


# ---- the process ---------------------------------------------------------------------------------------------------
def say(event: Event) -> None:
    """Send one event to the parent."""
    print(json.dumps(event), flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``results`` passes to every process."""
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=10**9, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)


@contextlib.contextmanager
def patiently(seconds: float) -> Iterator[None]:
    """Report activity during work that may be silent for ``seconds`` without hanging, such as another compiler's work.
    """
    over, end = threading.Event(), time.monotonic() + seconds

    def speak() -> None:
        while not over.wait(PATIENCE / 4) and time.monotonic() < end:
            say({"waiting": True})

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def work(
    jobs: Iterable[Job], first: int, seconds: float, count: int = 10**9, skip: Sequence[str] = (),
    patience: float | None = None,
) -> None:  # fmt: skip
    """Run ``count`` cases from ``first`` on, as long as there is time; stop early if the context is lost.

    ``skip``: first words of the names of cases that are left out. ``patience``: seconds after which a case hangs, if
    the parent would wait longer.
    """
    end, cut = time.monotonic() + seconds, 0
    for i, (name, job) in enumerate(jobs):
        if i < first:
            continue
        if name.partition(" ")[0] in skip:
            cut += 1
            continue
        if i >= first + count:
            break
        if time.monotonic() > end:
            cut += 1
            continue
        say({"begin": i, "name": name, "patience": patience})
        try:
            result = job()
        except DeviceLostError as e:
            say({"end": i, "ok": False, "message": f"DeviceLostError: {e}", "lost": True})
            return
        except Exception as e:  # a table with a hole beats no table
            result = {"ok": False, "message": f"{type(e).__name__}: {e}"}
        say({"end": i} | ({"left out": True} if result is None else result))
    say({"done": True, "cut": cut})


# ---- its parent ----------------------------------------------------------------------------------------------------
def lines(command: Sequence[str], end: float, patience: float = PATIENCE, blocking: bool = False) -> Iterator[Event]:
    """Yield the events that a process prints; the last event is {"ended": status} or {"stopped": reason}.

    The process and its children are stopped at ``end`` (of ``time.monotonic``) or after ``patience`` seconds without
    output; until its first case has ended, the limit is FIRST or ``patience``, whichever is longer. Lines that are not
    events go to the terminal. ``blocking``: launches wait for their kernels.
    """
    environment = os.environ | ({BLOCKING: "1"} if blocking else {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True, env=environment
    )
    printed: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                printed.put(line)
        printed.put(None)

    threading.Thread(target=read, daemon=True).start()
    wait = max(patience, FIRST if patience >= PATIENCE else 0)
    try:
        while True:
            left = end - time.monotonic()
            try:
                line = printed.get(timeout=max(0.1, min(left, wait)))
            except queue.Empty:
                yield {"stopped": f"silent for {wait:.0f} s" if left > wait else "out of time"}
                return
            if line is None:
                yield _ending(process, max(0.1, min(left, patience)))
                return
            event = _event(line)
            if event is None:
                print(line, end="", flush=True)
            else:
                wait = patience if "end" in event else event.get("patience") or wait
                yield event
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it until its kernel has ended
            process.wait(timeout=10)


def _ending(process: subprocess.Popen[str], patience: float) -> Event:
    try:
        return {"ended": process.wait(patience)}
    except subprocess.TimeoutExpired:
        return {"stopped": "it does not end"}


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def results(command: Sequence[str], seconds: float, patience: float = PATIENCE) -> Iterator[Event]:
    """Yield results of the cases of a command, each with its ``name``, in order; and {"about": ...}, {"failed":
    reason}.

    A process that ends before its cases do is replaced by one that begins after the case it ended in; other shapes of a
    program that hangs are left out. No case begins after ``seconds``, and all processes have ended ``SLACK`` later.
    """
    end, first, again = time.monotonic() + seconds + SLACK, 0, MAX_RERUNS
    hanging: list[str] = []
    while True:
        name, begun, reached, why = "", -1, first, ""
        left = end - time.monotonic() - SLACK
        if left <= 0 and first:
            yield {"failed": f"out of time before case {first + 1}"}
            return
        asked = [*command, "--first", str(first), "--seconds", f"{max(left, 0):.1f}"]
        asked += ["--skip", *hanging] if hanging else []
        for event in lines(asked, end, patience):
            if "begin" in event:
                name, begun = event["name"], event["begin"]
            elif "end" in event:
                first, begun = event.pop("end") + 1, -1
                if event.pop("lost", False) and again > 0:
                    again -= 1
                    event |= named(command, first - 1, end, patience)
                if "left out" not in event:
                    yield {"name": name, **event}
            elif "waiting" in event:
                continue
            elif "done" in event:
                yield {"about": {"cut": event["cut"]}}
                return
            elif "stopped" in event or "ended" in event:
                why = event.get("stopped") or f"the process ended with {event['ended']}"
            else:
                yield event
        if begun >= 0:
            first = begun + 1
            found: Event = {"name": name, "ok": False, "message": f"hangs, or ends its process: {why}"}
            if why.startswith("the process ended") and again > 0:
                again -= 1
                found |= named(command, begun, end, patience)
            else:
                hanging.append(name.partition(" ")[0])
            yield found
        elif first == reached:
            yield {"failed": f"{why}, before its first case: see above"}
            return


def named(command: Sequence[str], case: int, end: float, patience: float) -> Event:
    """Return the result of a case, run alone with launches that wait for their kernels (``blocking``)."""
    said = ""
    for event in lines([*command, "--first", str(case), "--seconds", "30", "--count", "1"], end, patience, True):
        if "end" in event:
            said = str(event.get("message", "nothing: it is right this time"))
        elif "stopped" in event or "ended" in event:
            said = said or str(event.get("stopped") or f"the process ended with {event['ended']}")
    return {"blocking": said}
