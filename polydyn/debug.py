"""What a compilation says about itself: the debug ladder, dumped files, verification after every pass.

Three environment variables, read when a compilation begins; none of them changes a result (docs/debugging.md):

- ``POLYDYN_DEBUG=1..5`` prints to stderr: 1 stages with their times, 2 groups, 3 schedules and trees, 4 the loop IR
  after each pass, 5 the text of kernels and of the host program. A level includes those below it.
- ``POLYDYN_DUMP_DIR=FOLDER`` writes all of that, whatever the level, as numbered files: one folder for each
  compilation, inside it one for each kernel.
- ``POLYDYN_VERIFY=1`` checks the loop IR after every pass (``verifying``); without it once, before it is printed. 2
  also interprets host plans, 3 the loops of their kernels too.

``stages`` opens a compilation; ``show`` adds to the one that this thread has open, and does nothing where there is
none. Texts are given as functions, so that nothing is formatted unless somebody reads it.
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
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

from polydyn.schedules.errors import PolydynError
from polydyn.schedules.names import given_back

T = TypeVar("T")
LONGEST_NAME = 80
"""Characters of a dumped file's name."""


class DebugError(PolydynError):
    """An environment variable of the debug ladder has no meaning, or its folder cannot be written."""


class Level(IntEnum):
    """The rungs of the ladder, by the number that ``POLYDYN_DEBUG`` gives."""

    STAGES = 1
    GROUPS = 2
    SCHEDULES = 3
    LOOPS = 4
    TEXTS = 5


class Stage(Protocol):
    """What ``stages`` yields: ``stage(name, value, text)`` returns the value unchanged.

    Its time is the time since the stage before it. ``text``: what is written of the value; None: nothing but the time.
    """

    def __call__(self, name: str, value: T, text: Callable[[T], str] | None = None) -> T:
        """The value."""


@dataclass
class _Recorder:
    """One compilation that somebody watches.

    ``folder``: where its files go; None: nowhere. ``numbers``: files of each part; ``texts``: the last of each.
    """

    level: int
    folder: Path | None
    started: float = field(default_factory=time.perf_counter)
    numbers: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.started

    def stage(self, name: str, value: T, text: Callable[[T], str] | None = None) -> T:
        """A stage is done. The time that its text takes counts for nobody."""
        took = time.perf_counter() - self.last
        if text is not None:
            self.dump("", name, given_back(text(value)), "txt")
        self.say(Level.STAGES, f"  {took:8.3f} s  {name}")
        self.last = time.perf_counter()
        return value

    def show(self, level: Level, part: str, name: str, text: Callable[[], str], suffix: str, what: str) -> None:
        """A text below the stages; one that is that of the part's last one is only mentioned."""
        if self.level < level and self.folder is None:
            return
        shown, title = given_back(text()), f"-- {part}: {name}" + f", {what}" * bool(what)
        if self.texts.get(part) == shown:
            self.say(level, f"{title}: changes nothing")
            return
        self.texts[part] = shown
        self.dump(part, name, f"// {what}\n{shown}" if what else shown, suffix)
        self.say(level, f"{title}\n{shown.rstrip()}")

    def say(self, level: int, line: str) -> None:
        """A line for somebody who asked for this level."""
        if self.level >= level:
            with self.lock:
                sys.stderr.write(line + "\n")

    def dump(self, part: str, name: str, text: str, suffix: str) -> None:
        """The next file of a part. DebugError: it cannot be written."""
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
"""The compilation that this thread has open, when somebody watches it."""


@contextmanager
def stages(name: str) -> Iterator[Stage]:
    """A compilation of ``name``; yields the function that its stages are shown with.

    ``with stages("bert") as stage: graph = stage("import", import_model(path), show_graph)``. DebugError: an
    environment variable has no meaning, or the folder of dumps cannot be written. Inside another compilation of this
    thread it is a part of that one.
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


def show(level: Level, part: str, name: str, text: Callable[[], str], suffix: str = "txt", what: str = "") -> None:
    """Shows a text of one ``part`` (a kernel, by name) of the compilation that this thread has open, if any.

    ``text`` is called only when it is printed or dumped. ``suffix``: of the dumped file. ``what``: a line about it.
    Where the text is that of the part's last one, as after a pass that found nothing to do, there is no file.
    """
    recorder = _WATCHED.get()
    if recorder is not None:
        recorder.show(level, part, name, text, suffix, what)


class Verify(IntEnum):
    """What is verified besides what always is, by the number that ``POLYDYN_VERIFY`` gives; each includes those below.

    ``PASSES``: the plan and the loop IR after every pass. ``PLANS``: host plans are interpreted at small sizes
    (``polydyn/testing/plan``), and kernels are executed there after every pass (``polydyn/testing/loops``).
    ``KERNELS``: so are the addresses that the loops of a whole plan access.
    """

    PASSES = 1
    PLANS = 2
    KERNELS = 3


def verifying(what: Verify = Verify.PASSES) -> bool:
    """Whether that is verified. DebugError: ``POLYDYN_VERIFY`` is none of these numbers."""
    return _number("POLYDYN_VERIFY", max(Verify)) >= what


def _unwatched(name: str, value: T, text: Callable[[T], str] | None = None) -> T:
    return value


def _number(variable: str, most: int) -> int:
    """The value of a variable, 0 when it is not set."""
    text = os.environ.get(variable) or "0"
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise DebugError(f"{variable}={text} has no meaning", rule=f"0 to {most}", remedy=f"unset {variable}")
    return int(text)


def _new_folder(root: Path, name: str) -> Path:
    """A folder that no other compilation has, in this process or another one."""
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
