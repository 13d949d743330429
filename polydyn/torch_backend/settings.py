"""The options of ``torch.compile(..., backend="polydyn", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polydyn.backends.options import Options
from polydyn.errors import InputError
from polydyn.program_key import Arguments

CHOICES = ("without", "strategy", "tf32", "precision", "winograd")
"""Options that are fields of ``polydyn.Options``."""
NAMES = {"strict", "freeze", "threads", "target", "dims", "records", *CHOICES}


@dataclass(frozen=True)
class Settings:
    """The ``options`` of ``torch.compile``.

    ``strict``: raise rejections. ``freeze``: parameters are constants of the program, packed for its kernels; a call
    after one of them has changed runs in torch. The others are arguments of ``polydyn.compile``.
    """

    arguments: Arguments
    threads: int | None = None
    strict: bool = False
    freeze: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Settings:
        """Build settings from a mapping. Raises InputError for an unknown option."""
        said = dict(options or {})
        unknown = sorted(said.keys() - NAMES)
        if unknown:
            raise InputError(f"the backend has no option '{unknown[0]}'", remedy=f"{', '.join(sorted(NAMES))}")
        choices = {k: said[k] for k in CHOICES if k in said}
        arguments = Arguments(said.get("target", ""), said.get("dims", {}), Options(**choices), said.get("records"))
        return cls(arguments, said.get("threads"), said.get("strict", False), said.get("freeze", False))
