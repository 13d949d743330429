"""Lines over a size: times, ratios, any number that was measured or modelled at several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polydyn.explore.pictures.axes import Axes, Axis
from polydyn.explore.pictures.colours import hues, si
from polydyn.explore.pictures.sheet import Picture, Sheet


def lines(
    series: Mapping[str, Mapping[float, float]], x: str = "M", y: str = "seconds", title: str = "",
    percent: bool = False, names: Sequence[str] = (),
) -> Picture:  # fmt: skip
    """Draw one line per series of ``x`` -> ``y``. An axis is logarithmic if all values are positive and the largest is
    at least ten times the smallest. With ``percent``, ``y`` is linear from 0. ``names``: ``x`` is a position in this
    list of categories.
    """
    points = {n: sorted(v.items()) for n, v in series.items() if v}
    s = Sheet(title or f"{y} over {x}", f"{len(points)} lines")
    if not points:
        s.text(12, s.top + 16, "nothing to draw", 13)
        return s.picture()
    xs, ys = ([p[k] for v in points.values() for p in v] for k in (0, 1))
    across = Axis(-0.5, len(names) - 0.5, names=tuple(names)) if names else _axis(xs)
    axes = Axes(s, (60, s.top + 20, 560, 260), across, Axis(0, max(*ys, 1.0) * 1.04) if percent else _axis(ys),
                x, y, percent)  # fmt: skip
    colour = hues(points)
    top = s.top + 30.0
    for n, (name, line) in enumerate(points.items()):
        d = " ".join(f"{'L' if k else 'M'}{axes.px(a):.1f},{axes.py(b):.1f}" for k, (a, b) in enumerate(line))
        s.path(d, colour[name], 2, cls="")
        for a, b in line:
            where = names[int(a)] if names else f"{x}={a:g}"
            s.dot(axes.px(a), axes.py(b), 3, colour[name], f"{name} at {where}: {f'{b:.1%}' if percent else si(b)}")
        s.rect(640, top + 20 * n - 10, 11, 11, colour[name], r=2)
        s.text(658, top + 20 * n, name, 12, "m", most=230)
    return s.picture()


def _axis(values: list[float]) -> Axis:
    lo, hi = min(values), max(values)
    if lo > 0 and hi >= 10 * lo:
        return Axis(lo / 1.1, hi * 1.1, True)
    return Axis(min(0.0, lo), hi * 1.05 if hi > 0 else 1.0)
