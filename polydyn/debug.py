"""Debug output of a compilation: the debug ladder, dumped files, verification after every pass.

Three environment variables are read when a compilation begins. None of them changes a result (docs/debugging.md):

- ``POLYDYN_DEBUG=1..5`` prints to stderr: 1 stages with their times, 2 groups, 3 schedules and trees, 4 the loop IR
  after each pass, 5 the text of kernels and of the host program. A level includes those below it.
- ``POLYDYN_DUMP_DIR=FOLDER`` writes all of this, whatever the level, as numbered files: one folder per compilation,
  with one folder per kernel in it.
- ``POLYDYN_VERIFY=1`` checks the loop IR after every pass (``verifying``); without it, once before it is printed. 2
  also interprets host plans, 3 the loops of their kernels too.

``stages`` opens a compilation. ``show`` adds to the open compilation of this thread, and does nothing if there is none.
Texts are passed as functions, so that nothing is formatted unless it is read.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

from polydyn.schedules.errors import PolydynError
from polydyn.schedules.names import given_back

T = TypeVar("T")
LONGEST_NAME = 80
"""Maximum characters of a dumped file's name."""


class DebugError(PolydynError, ValueError):
    """An environment variable of the debug ladder is invalid, or its folder cannot be written."""


class Level(IntEnum):
    """The levels of the debug ladder, with the numbers of ``POLYDYN_DEBUG``."""

    STAGES = 1
    GROUPS = 2
    SCHEDULES = 3
    LOOPS = 4
    TEXTS = 5


class Stage(Protocol):
    """The function that ``stages`` yields: ``stage(name, value, text)`` returns the value unchanged.

    Its time is the time since the previous stage. ``text``: formats the value for output; with None only the time is
    shown.
    """

    def __call__(self, name: str, value: T, text: Callable[[T], str] | None = None) -> T:
        """Return the value."""


class _Recorder:
    """One compilation whose output is recorded.

    ``folder``: folder of its files, or None. ``numbers``: number of files per part. ``texts``: last text of each
    part.
    """

    def __init__(self, level: int, folder: Path | None) -> None:
        self.level, self.folder = level, folder
        self.started = self.last = time.perf_counter()
        self.numbers: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self.lock = Lock()

    def stage(self, name: str, value: T, text: Callable[[T], str] | None = None) -> T:
        """Record the end of a stage. The time for its text does not count."""
        took = time.perf_counter() - self.last
        if text is not None:
            self.dump("", name, given_back(text(value)), "txt")
        self.say(Level.STAGES, f"  {took:8.3f} s  {name}")
        self.last = time.perf_counter()
        return value

    def show(self, level: Level, part: str, name: str, text: Callable[[], str], suffix: str, summary: str) -> None:
        """Record a text below the stages. A text equal to the last one of its part is only mentioned."""
        if self.level < level and self.folder is None:
            return
        shown, title = given_back(text()), f"-- {part}: {name}" + f", {summary}" * bool(summary)
        if self.texts.get(part) == shown:
            self.say(level, f"{title}: changes nothing")
            return
        self.texts[part] = shown
        self.dump(part, name, f"// {summary}\n{shown}" if summary else shown, suffix)
        self.say(level, f"{title}\n{shown.rstrip()}")

    def say(self, level: int, line: str) -> None:
        """Print a line at this level."""
        if self.level >= level:
            with self.lock:
                sys.stderr.write(line + "\n")

    def dump(self, part: str, name: str, text: str, suffix: str) -> None:
        """Write the next file of a part. Raises DebugError if that fails."""
        if self.folder is None:
            return
        folder = self.folder / _file_name(part) if part else self.folder
        with self.lock:
            number = self.numbers[part]
            self.numbers[part] += 1
        try:
            folder.mkdir(exist_ok=True)
            (folder / f"{number:02}_{_file_name(name)}.{suffix}").write_text(text)
        except OSError as e:
            raise _unwritable(e) from e


_WATCHED: ContextVar[_Recorder | None] = ContextVar("polydyn_debug", default=None)
"""The open compilation of this thread, if its output is recorded."""


@contextmanager
def stages(name: str) -> Iterator[Stage]:
    """Open a compilation of ``name``. Yields the function that shows its stages.

    ``with stages("bert") as stage: graph = stage("import", import_model(path), show_graph)``. Inside another
    compilation of this thread it is a part of that one. Raises DebugError if an environment variable is invalid, or the
    dump folder cannot be written.
    """
    outer = _WATCHED.get()
    if outer is not None:
        yield outer.stage
        return
    level, root = _number("POLYDYN_DEBUG", max(Level)), os.environ.get("POLYDYN_DUMP_DIR")
    if not level and not root:
        yield _unwatched
        return
    recorder = _Recorder(level, _new_folder(Path(root), name) if root else None)
    recorder.say(Level.STAGES, f"polydyn {name}" + f", files in {recorder.folder}" * (recorder.folder is not None))
    token = _WATCHED.set(recorder)
    try:
        yield recorder.stage
    except BaseException as e:
        recorder.say(Level.STAGES, f"  {time.perf_counter() - recorder.last:8.3f} s  {type(e).__name__}")
        raise
    finally:
        _WATCHED.reset(token)
        recorder.say(Level.STAGES, f"  {time.perf_counter() - recorder.started:8.3f} s  in all")


def show(level: Level, part: str, name: str, text: Callable[[], str], suffix: str = "txt", summary: str = "") -> None:
    """Show a text of one ``part`` (a kernel, by name) of the open compilation of this thread, if any.

    ``text`` is called only if it is printed or dumped. ``suffix``: suffix of the dumped file. ``summary``: a line about
    the text. If the text equals the last one of the part, as after a pass without effect, no file is written.
    """
    recorder = _WATCHED.get()
    if recorder is not None:
        recorder.show(level, part, name, text, suffix, summary)


class Verify(IntEnum):
    """Levels of verification beyond the default, with the numbers of ``POLYDYN_VERIFY``; each includes the lower ones.

    ``PASSES``: the plan and the loop IR after every pass. ``PLANS``: host plans are interpreted at small sizes
    (``polydyn/testing/plan``), and kernels are executed there after every pass (``polydyn/testing/loops``).
    ``KERNELS``: the addresses that the loops of a whole plan access are checked too.
    """

    PASSES = 1
    PLANS = 2
    KERNELS = 3


def verifying(level: Verify = Verify.PASSES) -> bool:
    """Return whether a level is verified. Raises DebugError for an invalid ``POLYDYN_VERIFY``."""
    return _number("POLYDYN_VERIFY", max(Verify)) >= level


@contextmanager
def needing_sources(task: str = "POLYDYN_VERIFY=2", instead: str = ", or POLYDYN_VERIFY=1") -> Iterator[None]:
    """Turn the lack of ``polydyn.testing``, which wheels do not have, into a DebugError.

    ``task``: what runs it. ``instead``: the end of the remedy.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("polydyn.testing"):
            raise
        raise DebugError(
            f"{task} runs polydyn's test tools, which are not installed", rule="polydyn.testing",
            remedy=f"use a checkout of polydyn's sources (pip install -e .){instead}",
        ) from None  # fmt: skip


def is_observed() -> bool:
    """Return whether the environment requests output or checks of compilations, so that a stored program does not do.
    Raises DebugError for an invalid variable.
    """
    return bool(_number("POLYDYN_DEBUG", max(Level)) or os.environ.get("POLYDYN_DUMP_DIR")) or verifying()


def _unwatched(name: str, value: T, text: Callable[[T], str] | None = None) -> T:
    return value


def _number(variable: str, most: int) -> int:
    """Return the value of a variable, or 0 if it is not set."""
    text = os.environ.get(variable) or "0"
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise DebugError(f"{variable}={text} has no meaning", rule=f"0 to {most}", remedy=f"unset {variable}")
    return int(text)


def _new_folder(root: Path, name: str) -> Path:
    """Create a folder that no other compilation has, in this process or another one."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for n in count(sum(1 for _ in root.iterdir())):
            path = root / f"{n:03}_{_file_name(name)}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as e:
        raise _unwritable(e) from e
    raise AssertionError("count does not end")


def _unwritable(e: OSError) -> DebugError:
    return DebugError(f"POLYDYN_DUMP_DIR cannot be written: {e}", remedy="name a folder that can be written")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", name)[:LONGEST_NAME] or "_"
