"""YAML and JSON with line numbers: every value knows the line it stands on, so that errors can name it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from polydyn.errors import InputError, UnsupportedError

Plain: TypeAlias = "bool | int | float | str | list[Entry] | dict[str, Entry] | None"


@dataclass(frozen=True)
class Entry:
    """A value of a file: a scalar, a list, or a mapping. ``line``, from 1: of the value, or of its key."""

    file: str
    line: int
    value: Plain

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {k: v.plain() for k, v in self.value.items()}
        return [v.plain() for v in self.value] if isinstance(self.value, list) else self.value

    def refusal(self, what: str, remedy: str) -> InputError:
        """The error for this value."""
        return InputError(f"{self.file}:{self.line}: {what}", rule="job files", remedy=remedy)


def read_text(path: Path) -> Entry:
    """The content of a YAML or JSON file. InputError: it cannot be read, or is neither; UnsupportedError: no PyYAML."""
    yaml = _yaml()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise InputError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}", remedy="check the path") from e
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # blanks to JSON, forbidden in YAML
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as e:
        line = e.problem_mark.line + 1 if getattr(e, "problem_mark", None) else 1
        what = getattr(e, "problem", None) or str(e)
        raise InputError(
            f"{path.name}:{line}: neither YAML nor JSON: {what}", rule="job files", remedy="correct that line"
        ) from e
    if node is None:
        raise InputError(f"{path.name} is empty", rule="job files", remedy="write jobs: and a list below it")
    return _entry(path.name, node, node.start_mark.line + 1)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise UnsupportedError(
            "job files need PyYAML", rule="the extra [jobs]", remedy="pip install 'polydyn[jobs]'"
        ) from None
    return yaml


def _entry(file: str, node: Any, line: int) -> Entry:
    if node.id == "mapping":
        out: dict[str, Entry] = {}
        for key, value in node.value:
            at = key.start_mark.line + 1
            name = key.value if key.id == "scalar" else ""
            if not name or name in out:
                what = f"the key {name!r} is there twice" if name else "a key is no text"
                raise Entry(file, at, name).refusal(what, "write each key once, as text")
            out[name] = _entry(file, value, at)
        return Entry(file, line, out)
    if node.id == "sequence":
        return Entry(file, line, [_entry(file, x, x.start_mark.line + 1) for x in node.value])
    return Entry(file, line, node.value if node.style else scalar(node.value))


_SCALARS: Mapping[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}


def scalar(text: str) -> Plain:
    """A plain scalar by the core schema of YAML 1.2 (``no`` is a text)."""
    if text.lower() in _SCALARS:
        found: Plain = _SCALARS[text.lower()]
        return found
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", text):
        return float(text)
    return text
