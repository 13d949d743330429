"""Checks of the arguments of public functions: an argument of a wrong type is an error that names it.

Standard library only, because ``polydyn.load`` imports this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any, NoReturn

from polydyn.build.features import available_cores
from polydyn.errors import InputError, PolydynError, WrongTypeError

CODE, SOURCES = "code", "sources"
TRUST = (CODE, SOURCES)
"""Values of ``trust``: what runs of a saved program. Its machine code, or what the compiler of this machine builds from
its C text."""


def wrong_type(role: str, value: Any, wanted: str) -> NoReturn:
    """Raise WrongTypeError: ``value``, the argument ``role``, is not what the interface takes."""
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    given = f"the text {value!r}" if isinstance(value, str) else f"{article} {kind}"
    if value is None or isinstance(value, (int, float)):
        given = repr(value)
    raise WrongTypeError(f"{role} is {given}", remedy=f"pass {wanted}")


def checked_path(path: Any, role: str = "the path", error: type[PolydynError] = InputError) -> Path:
    """Return a path. WrongTypeError: it is not one. ``error``, if it has a NUL character."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        wrong_type(role, path, "a str or a pathlib.Path")
    if "\0" in text:
        raise error(f"{role} has a NUL character: {text!r}", remedy="remove it")
    return Path(text)


def checked_text(text: Any, role: str) -> str:
    """Return a text. WrongTypeError: it is not one."""
    if not isinstance(text, str):
        wrong_type(role, text, "a str")
    return str(text)


def checked_integer(number: Any, role: str) -> int:
    """Return an integer, which numpy's types and bool may hold. WrongTypeError: it is not one."""
    try:
        return index(number)
    except TypeError:
        wrong_type(role, number, "an integer")


def checked_flag(flag: Any, role: str) -> bool:
    """Return True or False; 0 and 1 are flags too. WrongTypeError: it is another value."""
    if type(flag).__name__ not in ("bool", "bool_") and not (isinstance(flag, int) and flag in (0, 1)):
        wrong_type(role, flag, "True or False")
    return bool(flag)


def checked_mapping(values: Any, role: str, wanted: str) -> Mapping[Any, Any]:
    """Return a mapping. WrongTypeError: it is not one."""
    if not isinstance(values, Mapping):
        wrong_type(role, values, wanted)
    return values


def checked_report(report: Any) -> Any:
    """Return a function for progress, or None. WrongTypeError: it cannot be called."""
    if report is not None and not callable(report):
        wrong_type("report", report, "a function of the progress")
    return report


def check_repeats(repeats: Any) -> None:
    """Check the number of calls for a median. InputError: it is no integer, or below 1."""
    if checked_integer(repeats, "repeats") < 1:
        raise InputError(f"repeats is {repeats}", rule="at least 1", remedy="leave it out for 5 calls")


def check_threads(threads: int | None) -> int:
    """Return the number of threads per call; None means all cores of this process. InputError: an invalid number."""
    if threads is None:
        return min(available_cores(), MAX_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise InputError(f"threads is {threads!r}", rule=f"1 to {MAX_THREADS}", remedy="leave it out for all cores")
    return threads


def checked_feeds(feeds: Mapping[str, Any], role: str = "the inputs are") -> Mapping[str, Any]:
    """Return the inputs of a call, or its ``out``. WrongTypeError: they are not a mapping."""
    if type(feeds) is dict or isinstance(feeds, Mapping):
        return feeds
    raise WrongTypeError(
        f"{role} {'None' if feeds is None else f'a {type(feeds).__name__}'}, not a mapping of arrays by name",
        remedy="write run({'x': array}); run(None, feeds) is a method of polydyn.InferenceSession",
    )


def checked_out(out: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the arrays for outputs, none for None. WrongTypeError: they are not a mapping."""
    return {} if out is None else checked_feeds(out, "out is")


MAX_THREADS = 256
"""``PD_MAX_THREADS`` of polydyn.h."""
