"""The times of a compilation's parts, which ``polydyn.clock`` measures. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

IMPORT = "import of the model"
"""The first section of every compilation."""


@dataclass(frozen=True)
class Section:
    """A part of a compilation: elapsed seconds, processor seconds of this process, number of times it ran."""

    name: str
    seconds: float
    processor: float
    count: int


@dataclass(frozen=True)
class Unit:
    """A translation unit that the C compiler compiled: its processor seconds, and the lines of C of its kernels."""

    name: str
    processor: float
    lines: Mapping[str, int]


@dataclass(frozen=True)
class Timing:
    """The times of a compilation's parts; ``str()`` is a table. Sections and units are sorted, slowest first.

    Units compile in parallel with the sections, which see only the time spent waiting for them.
    """

    sections: tuple[Section, ...]
    units: tuple[Unit, ...]

    @property
    def seconds(self) -> float:
        """Elapsed seconds of the whole compilation."""
        return sum(s.seconds for s in self.sections)

    @property
    def is_compilation(self) -> bool:
        """Whether the model was compiled; a stored program is only opened."""
        return any(s.name == IMPORT for s in self.sections)

    @property
    def processor(self) -> float:
        """Processor seconds of this process and of its compilers."""
        return sum(s.processor for s in self.sections) + sum(u.processor for u in self.units)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"seconds": self.seconds, "processor": self.processor, **asdict(self)}

    def __repr__(self) -> str:
        return f"<Timing: {self.seconds:.2f} s in {len(self.sections)} sections, {len(self.units)} translation units>"

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    def __str__(self) -> str:
        rows = [f"{'section':<36}{'seconds':>9}{'processor':>11}{'times':>8}"]
        rows += [f"{s.name:<36}{s.seconds:9.3f}{s.processor:11.3f}{s.count:8}" for s in self.sections]
        if self.units:
            rows += ["", f"{'translation unit':<36}{'':9}{'processor':>11}{'lines':>8}  kernels"]
        for u in self.units:
            kernels = ", ".join(f"{name} {lines}" for name, lines in u.lines.items())
            rows.append(f"{u.name:<36}{'':9}{u.processor:11.3f}{sum(u.lines.values()) or '':8}  {kernels}".rstrip())
        rows += ["", f"{'all':<36}{self.seconds:9.3f}{self.processor:11.3f}"]
        return "\n".join(rows)
