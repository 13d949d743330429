"""YAML and JSON with line numbers: every value has its line, so that errors can name it."""

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
    """A value of a file: a scalar, a list, or a mapping. ``line``: line of the value or of its key, from 1."""

    file: str
    line: int
    value: Plain

    def plain(self) -> Any:
        """Return the value without line numbers."""
        if isinstance(self.value, dict):
            return {k: v.plain() for k, v in self.value.items()}
        return [v.plain() for v in self.value] if isinstance(self.value, list) else self.value

    def refusal(self, problem: str, remedy: str) -> InputError:
        """Return the error for this value."""
        return InputError(f"{self.file}:{self.line}: {problem}", rule="job files", remedy=remedy)


def read_text(path: Path) -> Entry:
    """Read a YAML or JSON file. InputError: it cannot be read or has wrong syntax. UnsupportedError: no PyYAML."""
    yaml = _yaml()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise InputError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}", remedy="check the path") from e
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON allows tabs as blanks, YAML does not
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as e:
        line = e.problem_mark.line + 1 if getattr(e, "problem_mark", None) else 1
        problem = getattr(e, "problem", None) or str(e)
        raise InputError(
            f"{path.name}:{line}: neither YAML nor JSON: {problem}", rule="job files", remedy="correct that line"
        ) from e
    if node is None:
        raise InputError(f"{path.name} is empty", rule="job files", remedy="write jobs: and a list below it")
    if _count(node, {}) > MAX_ENTRIES:
        raise InputError(
            f"{path.name} has more than {MAX_ENTRIES} values with those of its aliases", rule="job files",
            remedy="write fewer jobs in one file, and no alias inside its own anchor",
        )  # fmt: skip
    return _entry(path.name, node, node.start_mark.line + 1)


MAX_ENTRIES = 1_000_000
"""Maximum values of a file. Lists of aliases of lists of aliases double them in every line."""


def _count(node: Any, counts: dict[int, int]) -> int:
    """Return the number of values below a node, with each alias replaced. A node inside itself has too many."""
    if id(node) not in counts:
        counts[id(node)] = MAX_ENTRIES + 1  # until it is known
        below = [value for _, value in node.value] if node.id == "mapping" else node.value
        counts[id(node)] = 1 + sum(_count(x, counts) for x in below) if node.id != "scalar" else 1
    return counts[id(node)]


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
            key_line = key.start_mark.line + 1
            name = key.value if key.id == "scalar" else ""
            if not name or name in out:
                problem = f"the key {name!r} occurs twice" if name else "a key is not a text"
                raise Entry(file, key_line, name).refusal(problem, "write each key once, as text")
            out[name] = _entry(file, value, key_line)
        return Entry(file, line, out)
    if node.id == "sequence":
        return Entry(file, line, [_entry(file, x, x.start_mark.line + 1) for x in node.value])
    return Entry(file, line, node.value if node.style else scalar(node.value))


_SCALARS: Mapping[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}


def scalar(text: str) -> Plain:
    """Convert a plain scalar by the core schema of YAML 1.2 (``no`` is a text)."""
    if text.lower() in _SCALARS:
        value: Plain = _SCALARS[text.lower()]
        return value
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", text):
        return float(text)
    return text
