"""What a conversion did to each weight, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx


@dataclass(frozen=True)
class Layer:
    """A weight of the model. ``bits``: 4, 8, 16, or those of the float that it stays. ``error``: the norm of what
    rounding changed over the norm of the weights (weighed by calibration data if there are any). ``reason``: why it
    stays a float, or has more bits than asked for; empty otherwise.
    """

    name: str
    weight: str
    shape: tuple[int, ...]
    bits: int
    error: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """``layers`` in the order of the model; ``bytes_before`` and ``bytes_after`` count all initializers.

    ``outputs``: for each floating-point output, the norm of its change over its norm, if the models were compared.
    """

    layers: tuple[Layer, ...]
    bytes_before: int
    bytes_after: int
    outputs: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return asdict(self) | {"outputs": dict(self.outputs)}

    def __str__(self) -> str:
        rows = [("layer", "shape", "bits", "error", "why")]
        rows += [(x.name, "x".join(map(str, x.shape)), str(x.bits), f"{x.error:.4f}" if x.error else "", x.reason)
                 for x in self.layers]  # fmt: skip
        return "\n".join([*table(rows), *self.summary()])

    def summary(self) -> list[str]:
        """Return the lines about the whole model."""
        lines = [f"initializers: {self.bytes_before / 1e6:.1f} MB before, {self.bytes_after / 1e6:.1f} MB after"]
        lines += [f"output {name}: relative error {e:.2e}" for name, e in self.outputs.items()]
        return [*lines, *self.notes]


@dataclass(frozen=True)
class Converted:
    """A converted model: the path it was written to, or the model itself, and the report."""

    model: Path | onnx.ModelProto
    report: Report


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    rows = list(rows)
    widths = [max(len(r[k]) for r in rows) for k in range(len(rows[0]))]
    return ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in rows]
