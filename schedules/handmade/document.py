"""Schedules that people write, as data: files of them, and the folder of the ones that polydyn ships.

Nothing here needs isl, so that a stored program opens quickly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias, Union

from polydyn.schedules.errors import ScheduleError

FORMAT, VERSION = "polydyn schedules", 1
LIBRARY = Path(__file__).parent.parent / "library"
"""The folder of schedules that polydyn ships."""
DIGITS = 24
"""Hexadecimal digits of the digest of a group."""


@dataclass(frozen=True)
class Written:
    """A schedule for all groups of one structure.

    ``group``: the digest of the group (``lowering.handmade``). ``label``: its kind and output in the model that it was
    written for. ``steps``: name, positional and named arguments of each step, in the names of the group. ``shape``: a
    cheap property of the group, so that most other groups are not compared. ``measured``: what it gained, and where;
    ``features``: the processor features that a shipped schedule needs, those of the processors that it was measured on.
    """

    group: str
    label: str
    steps: tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
    shape: str = ""
    measured: str = ""
    features: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Any, source: str) -> Written:
        """Return the schedule of ``to_json``. ScheduleError: it is none."""
        match data:
            case {"group": str(group), "label": str(label), "shape": str(shape), "steps": list(steps)}:
                if len(group) == DIGITS and all(_is_step(x) for x in steps):
                    listed = tuple((n, _value(a), tuple((k, _value(v)) for k, v in m.items())) for n, a, m in steps)
                    features = tuple(map(str, data.get("features", ())))
                    return cls(group, label, listed, shape, str(data.get("measured", "")), features)
        raise _malformed(source, "a schedule has group, label, shape and steps")

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        steps = [[n, list(a), dict(m)] for n, a, m in self.steps]
        shipped = {"measured": self.measured, "features": list(self.features)} if self.measured else {}
        return {"group": self.group, "label": self.label, "shape": self.shape, "steps": steps, **shipped}


class HasWritten(Protocol):
    """An object with a schedule, such as ``polydyn.explore.Schedule``."""

    @property
    def written(self) -> Written:
        """The schedule as data."""


Source: TypeAlias = Union[str, "os.PathLike[str]", Written, HasWritten]


def _is_step(x: Any) -> bool:
    match x:
        case [str(), list(arguments), dict(named)]:
            return all(_is_plain(v) for v in (*arguments, *named.values())) and all(isinstance(k, str) for k in named)
    return False


def _is_plain(x: Any) -> bool:
    return isinstance(x, (str, int)) or (isinstance(x, list) and all(isinstance(y, (str, int)) for y in x))


def _value(x: Any) -> Any:
    return tuple(map(_value, x)) if isinstance(x, list) else x


def read_schedules(sources: Source | Iterable[Source]) -> tuple[Written, ...]:
    """Return the schedules of files and objects.

    ScheduleError: a file cannot be read or is not a file of schedules; two schedules are for one group.
    """
    one = isinstance(sources, (str, os.PathLike, Written)) or hasattr(sources, "written")
    if not one and not isinstance(sources, Iterable):
        raise _not_a_schedule(sources)
    listed: list[Any] = [sources] if one else list(sources)  # type: ignore[arg-type]
    out: dict[str, Written] = {}
    for source in listed:
        for x in _read(source):
            if out.get(x.group, x).steps != x.steps:
                raise ScheduleError(
                    f"two schedules are for one group: {out[x.group].label} and {x.label}",
                    rule="schedules", remedy="give one of them",
                )  # fmt: skip
            out[x.group] = x
    return tuple(out.values())


def _read(source: Source) -> Sequence[Written]:
    if isinstance(source, Written):
        return [source]
    if isinstance(source, (str, os.PathLike)):
        return read_file(Path(source))
    if isinstance(written := getattr(source, "written", None), Written):
        return [written]
    raise _not_a_schedule(source)


def _not_a_schedule(source: object) -> ScheduleError:
    remedy = "pass files of Schedule.save, or schedules of polydyn.explore"
    return ScheduleError(f"{type(source).__name__} is not a schedule", rule="schedules", remedy=remedy)


def read_file(path: Path) -> tuple[Written, ...]:
    """Return the schedules of a file. ScheduleError: it cannot be read, or is not a file of schedules."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ScheduleError(f"cannot read {path}: {e.strerror}", rule="schedules") from e
    except ValueError as e:
        raise _malformed(path.name, str(e)) from e
    match data:
        case {"format": str(name), "version": int(version), "schedules": list(schedules)} if name == FORMAT:
            if version != VERSION:
                raise _malformed(path.name, f"its version is {version}, this polydyn reads {VERSION}")
            return tuple(Written.from_json(x, path.name) for x in schedules)
    raise _malformed(path.name, f"its format is not {FORMAT!r}")


def file_text(schedules: Sequence[Written]) -> str:
    """Return the text of a file of schedules, with a line for each step."""
    rows = []
    for x in schedules:
        data = x.to_json()
        steps = ",\n".join(f"    {json.dumps(step)}" for step in data.pop("steps"))
        fields = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
        rows.append(f'  {{{fields}, "steps": [\n{steps}\n  ]}}')
    listed = ",\n".join(rows)
    return f'{{"format": {json.dumps(FORMAT)}, "version": {VERSION}, "schedules": [\n{listed}\n]}}\n'


def _malformed(source: str, reason: str) -> ScheduleError:
    remedy = "write it with Schedule.save or polydyn.explore.save_schedules"
    return ScheduleError(f"{source} is not a file of schedules: {reason}", rule="schedules", remedy=remedy)


@cache
def library() -> tuple[Written, ...]:
    """Return the schedules that polydyn ships."""
    return tuple(x for path in sorted(LIBRARY.glob("*.json")) for x in read_file(path))
