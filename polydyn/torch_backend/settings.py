"""The options of ``torch.compile(..., backend="polydyn", options={...})``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polydyn.arguments import check_threads
from polydyn.backends.options import Options
from polydyn.errors import InputError
from polydyn.program_cache import check_start
from polydyn.program_key import Arguments

log = logging.getLogger("polydyn.torch")

CHOICES = ("without", "strategy", "tf32", "precision", "winograd")
"""Options that are fields of ``polydyn.Options``."""
AXIS = re.compile(r".+\[\d+\]")
"""A name in ``dims``: an argument and its axis."""
NAMES = {"strict", "freeze", "threads", "start", "target", "dims", "records", *CHOICES}


@dataclass(frozen=True)
class Settings:
    """The ``options`` of ``torch.compile``.

    ``strict``: raise rejections. ``freeze``: parameters are constants of the program, packed for its kernels; a call
    after one of them has changed runs in torch. ``start``: with "quick" ONNX Runtime answers calls while a process
    compiles the graph. The others are arguments of ``polydyn.compile``.
    """

    arguments: Arguments
    threads: int | None = None
    strict: bool = False
    freeze: bool = False
    start: str = "full"

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Settings:
        """Build settings from a mapping. Raises InputError, ShapeError or UnsupportedError for an unknown option or a
        wrong value, and ArtifactError for records that cannot be read."""
        said = dict(options or {})
        unknown = sorted(said.keys() - NAMES)
        if unknown:
            remedy = f"use one of {', '.join(sorted(NAMES))}"
            raise InputError(f"the backend has no option '{unknown[0]}'", remedy=remedy)
        choices = {k: said[k] for k in CHOICES if k in said}
        arguments = Arguments(said.get("target", ""), said.get("dims", {}), Options(**choices), said.get("records"))
        for name in ("strict", "freeze"):
            if not isinstance(said.get(name, False), bool):
                raise InputError(f"{name} is {said[name]!r}", rule="options", remedy="pass True or False")
        check_threads(said.get("threads"))
        arguments.check()
        strict, freeze, start = said.get("strict", False), said.get("freeze", False), said.get("start", "full")
        return cls(arguments, said.get("threads"), strict, freeze, check_start(start))

    def for_graph(self, symbols: Mapping[str, Mapping[int, str]]) -> Settings:
        """Return the settings of one graph, with sizes by torch's symbols.

        ``symbols``: the symbols of its arguments, by name and axis. In ``dims``, ``ids[1]`` is axis 1 of the argument
        ``ids``; a graph without this argument ignores it, with a line in the log. Raises InputError for another name.
        """
        names = {f"{a}[{axis}]": s for a, axes in symbols.items() for axis, s in axes.items()}
        dims: dict[str, Any] = {}
        for name, sizes in self.arguments.dims.items():
            if name in names or name in names.values():
                dims[names.get(name, name)] = sizes
            elif AXIS.fullmatch(name):
                log.warning("dims: no dynamic size %s in a graph with %s", name, ", ".join(names) or "none")
            else:
                raise InputError(
                    f"dims names {name}, which the graph does not have", dim=name, rule="ARGUMENT[AXIS]",
                    remedy=f"its dynamic sizes are {', '.join(names) or 'none'}",
                )  # fmt: skip
        return replace(self, arguments=replace(self.arguments, dims=dims))
