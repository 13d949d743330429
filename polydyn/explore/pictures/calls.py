"""One call of a program at a shape: where its time goes, which threads wait, how far each kernel is from the roof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import atan, degrees
from typing import Any

from polydyn.errors import InputError
from polydyn.explore.pictures.axes import Axes, Axis
from polydyn.explore.pictures.colours import DARK, hues, si
from polydyn.explore.pictures.sheet import Picture, Sheet
from polydyn.runtime.explain import ExplainedLaunch, Explanation
from polydyn.runtime.program import LaunchTime, Program
from polydyn.search.hardware import Hardware

Pairs = list[tuple[ExplainedLaunch, LaunchTime]]


def call(program: Program, feeds: Mapping[str, Any], hardware: Hardware | None = None) -> Picture:
    """Runs a call a few times and draws ``timeline`` of it, and ``roofline`` below where the machine's limits are
    given (``polydyn.measure.calibrate.machine`` measures them).
    """
    times = program.profile(feeds)
    shapes = {i["name"]: getattr(feeds[i["name"]], "shape", ()) for i in program.manifest["inputs"]}
    dims = {s["symbol"]: int(shapes[s["input"]][s["axis"]]) for s in program.manifest["symbols"]}
    told = program.explain(**dims)
    first = timeline(told, times)
    if hardware is None:
        return first
    return Picture(first.title, first.svg, (("roofline", roofline(told, times, hardware)),))


def _running(told: Explanation, times: Sequence[LaunchTime]) -> Pairs:
    if [x.label for x in told.launches] != [t.label for t in times]:
        raise InputError("the times are of another program", rule="pictures of a call",
                         remedy="give program.explain(...) and program.profile(...) of one program")  # fmt: skip
    return [(e, t) for e, t in zip(told.launches, times, strict=True) if e.tasks > 0]


def _by_time(pairs: Pairs) -> list[str]:
    """Kernels, the longest in sum first."""
    cost: dict[str, int] = defaultdict(int)
    for e, t in pairs:
        cost[e.kernel] += t.nanoseconds
    return sorted(cost, key=lambda n: -cost[n])


def _letters(names: Sequence[str]) -> dict[str, str]:
    return {n: chr(65 + i) if i < 26 else "" for i, n in enumerate(names)}


def timeline(told: Explanation, times: Sequence[LaunchTime], note: str = "") -> Picture:
    """The launches of a call one behind the other, a lane for each thread; grey is waiting.

    ``told``: ``Program.explain`` at the shape; ``times``: ``Program.profile`` there. Launches were timed one by one, so
    those of a wave are drawn one behind the other too; a thread's share of a launch is its share of the tasks.
    InputError: the two do not belong together.
    """
    pairs = _running(told, times)
    dims = ", ".join(f"{k}={v}" for k, v in told.dims.items())
    title = f"{told.name or 'model'}{' at ' + dims if dims else ''}"
    total = sum(t.nanoseconds for _, t in pairs)
    if not total:
        s = Sheet(f"{title}: nothing runs", "no launch has tasks at this shape")
        return s.picture()
    lanes = max(1, told.threads)
    busy = sum(t.nanoseconds * e.tasks / (e.threads * -(-e.tasks // max(1, e.threads))) * e.threads for e, t in pairs)
    s = Sheet(
        f"{title}: {total / 1e6:.3g} ms on {lanes} thread{'s' * (lanes > 1)}",
        f"{len(pairs)} launches in {len(told.waves)} waves, {sum(e.flops for e, _ in pairs) / total:.1f} GFLOP/s; "
        f"threads are busy {busy / total / lanes:.0%} of the time{'; ' + note if note else ''}",
    )
    names = _by_time(pairs)
    colour, letter = hues(names), _letters(names)
    x, y, w, h = 60.0, s.top + 8.0, 826.0, 24.0 if lanes < 6 else 15.0
    axis = Axis(0, total)
    for lane in range(lanes):
        s.text(x - 8, y + lane * (h + 3) + h * 0.7, f"thr {lane}", 11.5, "s m", "end")
        s.rect(x, y + lane * (h + 3), w, h, "currentColor", r=2, opacity=0.07, tip="waiting")
    clock = 0
    for e, t in pairs:
        shares = [len(range(n, e.tasks, e.threads)) for n in range(min(e.threads, lanes))]
        for lane, tasks in enumerate(shares):
            wide = axis.at(t.nanoseconds) * w * tasks / max(shares)
            px, ly = x + axis.at(clock) * w, y + lane * (h + 3)
            tip = (f"{e.label}\n{e.kernel}\nwave {e.wave}, {e.tasks} tasks on {e.threads} threads\n"
                   f"{t.nanoseconds / 1e3:.1f} µs, {e.flops / max(1, t.nanoseconds):.1f} GFLOP/s")  # fmt: skip
            s.rect(px, ly, max(wide - 0.7, 0.5), h, colour[e.kernel], opacity=0.92, tip=tip)
            if lane == 0 and wide > 13:
                s.text(px + wide / 2, ly + h * 0.72, letter[e.kernel], 11.5, "b", "middle", DARK)
        clock += t.nanoseconds
    y += lanes * (h + 3) + 14
    for v in axis.ticks():
        s.text(x + axis.at(v) * w, y, f"{v / 1e6:.3g} ms" if v else "0", 11.5, "s", "middle")
    y += 26
    for n in names:
        mine = [(e, t) for e, t in pairs if e.kernel == n]
        spent = sum(t.nanoseconds for _, t in mine)
        s.rect(x, y - 11, 16, 16, colour[n], r=3, opacity=0.9)
        s.text(x + 8, y + 1.5, letter[n], 11.5, "b", "middle", DARK)
        s.text(x + 24, y + 1, f"{spent / total:6.1%} {len(mine):4d} launch{'es' * (len(mine) > 1)}", 11.5, "m b")
        s.text(x + 220, y + 1, n, 11.5, "m s", most=600, keep="both", tip="\n".join(e.label for e, _ in mine))
        y += 20
    return s.picture()


@dataclass(frozen=True)
class _Point:
    """All launches of a kernel: operations, bytes, nanoseconds."""

    flops: int
    bytes: int
    nanoseconds: int

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.flops / self.nanoseconds * 1e9


def roofline(told: Explanation, times: Sequence[LaunchTime], hardware: Hardware) -> Picture:
    """Operations a second of each kernel over its operations a byte, below what the machine can do.

    Bytes are those of the distinct buffers, so a kernel whose data were in a cache may lie above the memory's line.
    """
    pairs = _running(told, times)
    points: dict[str, _Point] = {}
    for n in _by_time(pairs):
        mine = [(e, t) for e, t in pairs if e.kernel == n]
        p = _Point(sum(e.flops for e, _ in mine), sum(e.bytes for e, _ in mine), sum(t.nanoseconds for _, t in mine))
        if p.flops and p.bytes and p.nanoseconds:
            points[n] = p
    peak = max((i.rate for i in hardware.instructions), default=0.0) * max(1, told.threads)
    memory, cache = hardware.memory_bandwidth, hardware.local_bandwidth * max(1, told.threads)
    s = Sheet(f"roofline of {told.name or 'model'}", f"limits of {hardware.name} on {told.threads} threads; "
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
        roof = min(peak, p.intensity * memory)
        share = p.rate / roof
        how = "in cache" if share > 1.1 else f"{share:.0%} of the roof"
        s.text(585, y, f"{_letters(list(points))[n]}  {how}", 12, "b")
        s.text(585, y + 15, n, 11.5, "m s", most=300, keep="both")
        y += 34
    return s.picture()


def _points(s: Sheet, axes: Axes, points: Mapping[str, _Point], total: int) -> None:
    """The kernels, with their letters where no other letter or point is."""
    colour, letter = hues(points), _letters(list(points))
    at = {n: (axes.px(p.intensity), axes.py(p.rate), max(4.0, 22 * (p.nanoseconds / total) ** 0.5))
          for n, p in points.items()}  # fmt: skip
    for n, (x, y, r) in at.items():
        p = points[n]
        tip = f"{n}\n{p.intensity:.3g} FLOP/byte, {p.rate / 1e9:.1f} GFLOP/s"
        s.dot(x, y, r, colour[n], tip, 0.55, colour[n])
    taken = [(x, y) for x, y, _ in at.values()]
    ways = ((1, 0), (-1, 0), (0.7, 0.7), (-0.7, 0.7), (0, 1), (0.7, -0.7), (-0.7, -0.7), (0, -1))
    for n, (x, y, r) in at.items():
        spots = [(x + (r + q) * a, y + (r + q) * b) for q in (9, 18, 28, 40) for a, b in ways]
        lx, ly = next((c for c in spots if all(abs(c[0] - a) + abs(c[1] - b) > 17 for a, b in taken)), spots[0])
        taken.append((lx, ly))
        s.path(f"M{x:.1f},{y:.1f}L{lx:.1f},{ly:.1f}", line=0.8, opacity=0.5)
        s.dot(lx, ly, 7.5, cls="bg")
        s.text(lx, ly + 4.2, letter[n], 12, "b", "middle", colour[n])
