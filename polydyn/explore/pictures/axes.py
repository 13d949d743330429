"""Logarithmic or linear axes in a box of a sheet, with ticks at round numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

from polydyn.explore.pictures.colours import si
from polydyn.explore.pictures.sheet import Sheet

SECONDS = "s"
"""A label that is a unit: it follows every number, as in 500µs."""


@dataclass(frozen=True)
class Axis:
    """One direction: values from ``lo`` to ``hi`` (both positive when ``log``). ``names``: of the values 0, 1, ..."""

    lo: float
    hi: float
    log: bool = False
    names: tuple[str, ...] = ()

    def at(self, v: float) -> float:
        """Return the position of a value: 0 at ``lo``, 1 at ``hi``, and the nearer end for values outside."""
        if self.log:
            v = min(max(v, self.lo), self.hi)
            return (log10(v) - log10(self.lo)) / (log10(self.hi / self.lo) or 1.0)
        return min(1.0, max(0.0, (v - self.lo) / ((self.hi - self.lo) or 1.0)))

    def ticks(self) -> list[float]:
        """Return about six round numbers, or the places of all names."""
        if self.names:
            return [float(k) for k in range(len(self.names))]
        if self.log:
            few = log10(self.hi / self.lo) <= 2.6
            powers = range(floor(log10(self.lo)), ceil(log10(self.hi)) + 1)
            every = [m * 10.0**e for e in powers for m in ((1, 2, 5) if few else (1,))]
            return [v for v in every if self.lo * 0.999 <= v <= self.hi * 1.001]
        span = self.hi - self.lo
        if span <= 0:
            return [self.lo]
        step = 10.0 ** floor(log10(span / 4))
        step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= 6)
        return [k * step for k in range(ceil(self.lo / step), floor(self.hi / step + 1e-9) + 1)]


class Axes:
    """Two axes in a box of a sheet; ``px`` and ``py`` convert values to positions."""

    def __init__(
        self, s: Sheet, box: tuple[float, float, float, float], x: Axis, y: Axis, xlabel: str = "", ylabel: str = "",
        percent: bool = False,
    ) -> None:  # fmt: skip
        self.box, self.x, self.y = box, x, y
        left, top, w, h = box
        last = -99.0
        for v in x.ticks():
            px = self.px(v)
            s.path(f"M{px:.1f},{top}V{top + h}", cls="g")
            if x.names:
                s.text(px, top + h + 16, x.names[int(v)], 11.5, "s", "middle", most=w / len(x.names))
            elif px - last > 44:
                s.text(px, top + h + 16, si(v), 11.5, "s", "middle")
                last = px
        last = 1e9
        for v in y.ticks():
            py = self.py(v)
            s.path(f"M{left},{py:.1f}H{left + w}", cls="g")
            if last - py > 17:
                text = f"{v:.0%}" if percent else f"{si(v)}{SECONDS if ylabel == SECONDS and v else ''}"
                s.text(left - 7, py + 4, text, 11.5, "s", "end")
                last = py
        s.text(left + w / 2, top + h + 34, xlabel, 12, "s", "middle")
        s.text(left, top - 9, ylabel, 12, "s")

    def px(self, v: float) -> float:
        """Return the horizontal position of a value."""
        return self.box[0] + self.box[2] * self.x.at(v)

    def py(self, v: float) -> float:
        """Return the vertical position of a value."""
        return self.box[1] + self.box[3] * (1 - self.y.at(v))
