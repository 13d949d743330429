"""Options of the provider: arguments of Python functions, texts for ONNX Runtime, arguments of the compiler."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from polydyn.arguments import check_threads, checked_flag, checked_integer, checked_mapping, checked_path, checked_text
from polydyn.errors import InputError, ShapeError
from polydyn.shapes.sizes import Dims, Sizes, sizes_by_name

if TYPE_CHECKING:
    from polydyn.program_key import Arguments

MODES = ("wait", "background")
"""Values of ``compile``."""
OWN = ("exclude", "min_nodes")
"""Options that select nodes. All others that reach the compiling process are options of sessions of polydyn."""
TEXTS = ("strategy", "precision", "target")
NAMES = (
    "compile", "threads", "strict", "dims", "exclude", "min_nodes", "cache_dir", "python", "records", "schedules",
    "without", "tf32", "winograd", *TEXTS,
)  # fmt: skip


def provider_options(
    *,
    compile: str = "wait",
    threads: int | None = None,
    strict: bool = False,
    dims: Dims | None = None,
    exclude: Collection[str] = (),
    min_nodes: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    python: str | os.PathLike[str] | None = None,
    records: str | os.PathLike[str] | None = None,
    schedules: str | os.PathLike[str] | None = None,
    without: Collection[str] = (),
    **more: Any,
) -> dict[str, str]:
    """Return the options of the provider as texts: ``providers=[("PolydynExecutionProvider", provider_options(...))]``.

    ``compile``: with "background" the session is there at once; ONNX Runtime's kernels compute calls until a process
    has compiled the model. ``threads``: threads per call, by default all cores. ``strict``: a call that the program
    rejects is an error, and so is a graph that cannot be compiled after it was checked; otherwise ONNX Runtime's
    kernels compute both. ``dims``: facts about dims by name, as for ``polydyn.compile``. ``exclude``: operators, and
    names of nodes, that stay with ONNX Runtime. ``min_nodes``: minimum nodes of a set that is compiled. ``cache_dir``:
    folder of programs. ``python``: the Python that compiles. ``records``, ``schedules``, ``without`` and, in ``more``,
    ``strategy``, ``tf32``, ``precision``, ``winograd`` and ``target``: as for ``polydyn.compile``. InputError: an
    option is wrong.
    """
    if checked_text(compile, "compile") not in MODES:
        raise InputError(f"compile is {compile!r}", rule="compile", remedy=f"pass {' or '.join(map(repr, MODES))}")
    found = {"compile": compile, "strict": str(int(checked_flag(strict, "strict")))}
    if threads is not None:
        found["threads"] = str(check_threads(threads))
    if min_nodes is not None:
        found["min_nodes"] = str(_positive(min_nodes))
    paths = {"cache_dir": cache_dir, "python": python, "records": records, "schedules": schedules}
    found |= {name: str(checked_path(path, name)) for name, path in paths.items() if path is not None}
    lists = {"exclude": exclude, "without": without}
    found |= {name: ",".join([names] if isinstance(names, str) else sorted(names)) for name, names in lists.items()}
    found |= {f"dim.{name}": str(sizes) for name, sizes in _dims(dims).items()}
    for name, value in more.items():
        if name not in (*TEXTS, "tf32", "winograd"):
            remedy = f"use one of {', '.join(NAMES)}"
            raise InputError(f"there is no option {name!r}", rule="options of the provider", remedy=remedy)
        found[name] = checked_text(value, name) if name in TEXTS else str(int(value))
    return {name: value for name, value in found.items() if value}


def _positive(number: int) -> int:
    if checked_integer(number, "min_nodes") < 1:
        raise InputError(f"min_nodes is {number}", rule="min_nodes", remedy="at least 1")
    return number


def _dims(dims: Dims | None) -> Mapping[str, str]:
    """Return the facts about dims as texts that ``Sizes.parse`` reads."""
    if dims is None:
        return {}
    checked_mapping(dims, "dims", "a dict of sizes by name")
    return {name: size_text(sizes) for name, sizes in sizes_by_name(dims).items()}


def size_text(sizes: Sizes) -> str:
    """Return sizes in the form of ``Sizes.parse``."""
    text = f"{sizes.low}:{'' if sizes.high is None else sizes.high}"
    text += f":{sizes.multiple}" if sizes.multiple != 1 else ""
    if sizes.likely:
        weights = [f":{p!r}" for p in sizes.probabilities] or [""] * len(sizes.likely)
        text += "@" + ",".join(f"{n}{w}" for n, w in zip(sizes.likely, weights, strict=True))
    return text


def arguments_of(options: Mapping[str, str]) -> Arguments:
    """Return the compiler's arguments for the options of a session. InputError: an option is wrong."""
    from polydyn.session.options import SessionOptions  # the worker only

    entries = SessionOptions()
    for name, value in options.items():
        if name not in OWN:
            entries.add_session_config_entry(f"polydyn.{name}", value)
    try:
        arguments = entries.arguments("cpu", {})
    except ShapeError as e:
        raise InputError(e.message, rule=e.rule, remedy=e.remedy) from e
    if arguments.target.partition(":")[0] != "cpu":
        raise InputError(
            f"the target is {arguments.target}",
            rule="the provider computes on the CPU",
            remedy="use a target such as cpu",
        )
    return arguments
