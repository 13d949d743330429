"""One call of a program at a shape: the time of each launch, waiting threads, the distance of kernels to the roof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import atan, degrees
from typing import Any

from polydyn.errors import InputError
from polydyn.explore.pictures.axes import Axes, Axis
from polydyn.explore.pictures.colours import DARK, hues, si
from polydyn.explore.pictures.sheet import Picture, Sheet
from polydyn.runtime.explain import ExplainedLaunch, Explanation
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.program import Program
from polydyn.runtime.spans import Span
from polydyn.search.hardware import Hardware

Pairs = list[tuple[ExplainedLaunch, LaunchTime]]
LEFT, WIDTH = 60.0, 826.0
"""Left edge and width of the lanes of a timeline."""


ABOVE = 1.1
"""A rate above this multiple of a limit is not noise."""


def call(program: Program, feeds: Mapping[str, Any], hardware: Hardware | None = None) -> Picture:
    """Run a call a few times and draw its ``timeline``, with the ``roofline`` below if ``hardware`` is given
    (``polydyn.measure.calibrate.machine`` measures it).

    UnsupportedError: ``Program.trace`` does not support the program.
    """
    spans = program.trace(feeds)
    shapes = {i["name"]: getattr(feeds[i["name"]], "shape", ()) for i in program.manifest["inputs"]}
    dims = {s["symbol"]: int(shapes[s["input"]][s["axis"]]) for s in program.manifest["symbols"]}
    report = program.explain(**dims)
    first = timeline(report, spans)
    if hardware is None:
        return first
    return Picture(first.title, first.svg, (("roofline", roofline(report, program.profile(feeds), hardware)),))


def _running(report: Explanation, times: Sequence[LaunchTime]) -> Pairs:
    if [x.label for x in report.launches] != [t.label for t in times]:
        raise _mismatch("profile")
    return [(e, t) for e, t in zip(report.launches, times, strict=True) if e.tasks > 0]


def _mismatch(source: str) -> InputError:
    return InputError(f"the {source} is of another program", rule="pictures of a call",
                      remedy=f"give program.explain(...) and program.{source}(...) of one program")  # fmt: skip


def _by_time(pairs: Pairs) -> list[str]:
    """Return the kernels by total time, longest first."""
    cost: dict[str, int] = defaultdict(int)
    for e, t in pairs:
        cost[e.kernel] += t.nanoseconds
    return sorted(cost, key=lambda n: -cost[n])


def _letters(names: Sequence[str]) -> dict[str, str]:
    return {n: chr(65 + i) if i < 26 else "" for i, n in enumerate(names)}


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Merge consecutive spans of the same launch on a thread."""
    last: dict[int, Span] = {}
    out: list[Span] = []
    for s in sorted(spans, key=lambda s: (s.thread, s.begin)):
        previous = last.get(s.thread)
        if previous is not None and previous.launch == s.launch:
            out[-1] = replace(previous, tasks=previous.tasks + s.tasks, end=s.end)
        else:
            out.append(s)
        last[s.thread] = out[-1]
    return out


def timeline(report: Explanation, spans: Sequence[Span], note: str = "") -> Picture:
    """Draw the work of each thread over time: one lane per thread; grey is waiting.

    ``report``: ``Program.explain`` at the shape; ``spans``: ``Program.trace`` at the same shape. InputError: they do
    not match.
    """
    if any(s.launch >= len(report.launches) or report.launches[s.launch].label != s.label for s in spans):
        raise _mismatch("trace")
    dims = ", ".join(f"{k}={v}" for k, v in report.dims.items())
    title = f"{report.name or 'model'}{' at ' + dims if dims else ''}"
    if not spans:
        return Sheet(f"{title}: nothing runs", "no launch has tasks at this shape").picture()
    start = min(s.begin for s in spans)
    total = max(1, max(s.end for s in spans) - start)
    spent: dict[str, int] = defaultdict(int)
    for s in spans:
        spent[s.kernel] += s.end - s.begin
    names = sorted(spent, key=lambda n: -spent[n])
    launches, busy = {s.launch for s in spans}, max(1, sum(spent.values()))
    lanes = max(1, report.threads, *(s.thread + 1 for s in spans))
    flops = sum(report.launches[k].flops for k in launches)
    sheet = Sheet(
        f"{title}: {total / 1e6:.3g} ms on {lanes} thread{'s' * (lanes > 1)}",
        f"{len(launches)} launches in {len(report.waves)} waves, {flops / total:.1f} GFLOP/s; "
        f"threads are busy {busy / total / lanes:.0%} of the time{'; ' + note if note else ''}",
    )
    y = _lanes(sheet, report, _joined(spans), lanes, start, Axis(0, total), names) + 26
    for n, colour in hues(names).items():
        mine = [report.launches[k] for k in sorted(launches) if report.launches[k].kernel == n]
        sheet.rect(LEFT, y - 11, 16, 16, colour, r=3, opacity=0.9)
        sheet.text(LEFT + 8, y + 1.5, _letters(names)[n], 11.5, "b", "middle", DARK)
        sheet.text(
            LEFT + 24, y + 1, f"{spent[n] / busy:6.1%} {len(mine):4d} launch{'es' * (len(mine) > 1)}", 11.5, "m b"
        )
        sheet.text(LEFT + 220, y + 1, n, 11.5, "m s", most=600, keep="both", tip="\n".join(e.label for e in mine))
        y += 20
    return sheet.picture()


def _lanes(
    sheet: Sheet, report: Explanation, spans: Sequence[Span], lanes: int, start: int, axis: Axis, names: Sequence[str]
) -> float:
    """Draw the lanes and the axis below them; return the lower end."""
    y, h, colour, letter = sheet.top + 8.0, 24.0 if lanes < 6 else 15.0, hues(names), _letters(names)
    for lane in range(lanes):
        sheet.text(LEFT - 8, y + lane * (h + 3) + h * 0.7, f"thr {lane}", 11.5, "s m", "end")
        sheet.rect(LEFT, y + lane * (h + 3), WIDTH, h, "currentColor", r=2, opacity=0.07, tip="waiting")
    for s in spans:
        e, length = report.launches[s.launch], max(1, s.end - s.begin)
        x, wide, top = LEFT + axis.at(s.begin - start) * WIDTH, axis.at(length) * WIDTH, y + s.thread * (h + 3)
        tip = (f"{s.label}\n{s.kernel}\nwave {e.wave}, {s.tasks} of {e.tasks} tasks\n{length / 1e3:.1f} µs, "
               f"{e.flops / e.tasks * s.tasks / length:.1f} GFLOP/s")  # fmt: skip
        sheet.rect(x, top, max(wide, 0.4), h, colour[s.kernel], opacity=0.92, tip=tip)
        if wide > 13:
            sheet.text(x + wide / 2, top + h * 0.72, letter[s.kernel], 11.5, "b", "middle", DARK)
    y += lanes * (h + 3) + 14
    for v in axis.ticks():
        sheet.text(LEFT + axis.at(v) * WIDTH, y, f"{v / 1e6:.3g} ms" if v else "0", 11.5, "s", "middle")
    return y


@dataclass(frozen=True)
class _Point:
    """The sum over all launches of a kernel: operations, bytes, nanoseconds."""

    flops: int
    bytes: int
    nanoseconds: int

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.flops / self.nanoseconds * 1e9


def roofline(report: Explanation, times: Sequence[LaunchTime], hardware: Hardware) -> Picture:
    """Draw operations per second of each kernel over operations per byte, below the machine's limits.

    Bytes count each distinct buffer once, so a kernel with cached data may be above the memory line.
    """
    pairs = _running(report, times)
    points: dict[str, _Point] = {}
    for n in _by_time(pairs):
        mine = [(e, t) for e, t in pairs if e.kernel == n]
        p = _Point(sum(e.flops for e, _ in mine), sum(e.bytes for e, _ in mine), sum(t.nanoseconds for _, t in mine))
        if p.flops and p.bytes and p.nanoseconds:
            points[n] = p
    peak = max((i.rate for i in hardware.instructions), default=0.0) * max(1, report.threads)
    memory, cache = hardware.memory_bandwidth, hardware.local_bandwidth * max(1, report.threads)
    s = Sheet(f"roofline of {report.name or 'model'}", f"limits of {hardware.name} on {report.threads} threads; "
              "area of a point: its share of the time")  # fmt: skip
    if not points or not peak or not memory or not cache:
        s.text(12, s.top + 16, "nothing computes and moves bytes at this shape", 13)
        return s.picture()
    x = Axis(max(0.01, min(p.intensity for p in points.values()) / 2), max(p.intensity for p in points.values()) * 3,
             log=True)  # fmt: skip
    rates = [p.rate for p in points.values()]
    axes = Axes(s, (60, s.top + 20, 500, 300), x, Axis(min(*rates, memory * x.lo) / 2, max(peak, *rates) * 2, True),
                "FLOP per byte of the distinct buffers", "FLOP/s")  # fmt: skip
    for bandwidth, name, opacity in ((memory, "memory", 1.0), (cache, "cache", 0.55)):
        a, b = max(x.lo, axes.y.lo / bandwidth), min(x.hi, peak / bandwidth)
        if a >= b:
            continue
        (x1, y1), (x2, y2) = ((axes.px(v), axes.py(v * bandwidth)) for v in (a, b))
        s.path(f"M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}", line=2, opacity=opacity)
        m = a * (b / a) ** 0.12
        turn = -abs(degrees(atan((y2 - y1) / ((x2 - x1) or 1))))
        s.text(axes.px(m) - 4, axes.py(m * bandwidth) - 7, f"{name} {si(bandwidth)}B/s", 11.5, "s", turn=turn)
    ridge = min(max(x.lo, peak / cache), x.hi)
    s.path(f"M{axes.px(ridge):.1f},{axes.py(peak):.1f}H{axes.px(x.hi):.1f}", line=2)
    s.text(axes.px(ridge) + 4, axes.py(peak) - 7, f"peak {si(peak)}FLOP/s", 11.5, "s")
    _points(s, axes, points, sum(t.nanoseconds for _, t in pairs))
    y: float = s.top + 30
    for n, p in points.items():
        text = _share_of_roof(p, peak, memory)
        s.text(585, y, f"{_letters(list(points))[n]}  {text}", 12, "b")
        s.text(585, y + 15, n, 11.5, "m s", most=300, keep="both")
        y += 34
    return s.picture()


def _share_of_roof(p: _Point, peak: float, memory: float) -> str:
    """Describe how near a kernel is to the roof. A rate above the roof has a reason."""
    share = p.rate / min(peak, p.intensity * memory)
    if p.rate > ABOVE * peak:
        return f"{p.rate / peak:.0%} of the peak, which is too low"
    return "in cache" if share > ABOVE else f"{share:.0%} of the roof"


def _points(s: Sheet, axes: Axes, points: Mapping[str, _Point], total: int) -> None:
    """Draw the kernels as points, each with a letter that overlaps no other letter or point."""
    colour, letter = hues(points), _letters(list(points))
    circles = {n: (axes.px(p.intensity), axes.py(p.rate), max(4.0, 22 * (p.nanoseconds / total) ** 0.5))
          for n, p in points.items()}  # fmt: skip
    for n, (x, y, r) in circles.items():
        p = points[n]
        tip = f"{n}\n{p.intensity:.3g} FLOP/byte, {p.rate / 1e9:.1f} GFLOP/s"
        s.dot(x, y, r, colour[n], tip, 0.55, colour[n])
    taken = [(x, y) for x, y, _ in circles.values()]
    ways = ((1, 0), (-1, 0), (0.7, 0.7), (-0.7, 0.7), (0, 1), (0.7, -0.7), (-0.7, -0.7), (0, -1))
    for n, (x, y, r) in circles.items():
        spots = [(x + (r + q) * a, y + (r + q) * b) for q in (9, 18, 28, 40) for a, b in ways]
        lx, ly = next((c for c in spots if all(abs(c[0] - a) + abs(c[1] - b) > 17 for a, b in taken)), spots[0])
        taken.append((lx, ly))
        s.path(f"M{x:.1f},{y:.1f}L{lx:.1f},{ly:.1f}", line=0.8, opacity=0.5)
        s.dot(lx, ly, 7.5, cls="bg")
        s.text(lx, ly + 4.2, letter[n], 12, "b", "middle", colour[n])
