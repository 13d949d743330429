"""The model as a list of its kernels in launch order: fused primitives, reasons against fusion, and work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polydyn.errors import InputError
from polydyn.explore.pictures.colours import GREY, KIND, ORANGE, RED, algebra
from polydyn.explore.pictures.sheet import MONO, SANS, Picture, Sheet
from polydyn.explore.plans import APART, Step, steps
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.ir import Tensor
from polydyn.program.plan import Buffer, HostPlan
from polydyn.schedules.index import Index

LEFT, WIDE, TALL, GAP = 44, 690, 48, 17
CHIP_DRAWINGS = (("starts a", "starts"), ("stitch", "stitch"), ("", "joins"))
"""Maps part of a reason to the drawing of its chip."""


@dataclass(frozen=True)
class _Repeat:
    """The longest repetition in a sequence: ``count`` times ``period`` steps from ``first``; 1 means no repetition."""

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.count if self.count > 1 else 0

    def shown(self, n: int) -> list[int]:
        """Return the steps that are drawn."""
        return [k for k in range(n) if not (self.count > 1 and self.first + self.period <= k < self.end)]

    def row(self, k: int) -> int:
        """Return the drawn step that represents step ``k``."""
        return self.first + (k - self.first) % self.period if self.first <= k < self.end else k


def repetition(keys: Sequence[object]) -> _Repeat:
    """Return the repetition that saves the most rows."""
    best = _Repeat(0, max(1, len(keys)), 1)
    for p in range(1, len(keys) // 2 + 1):
        i = 0
        while i + 2 * p <= len(keys):
            n = 1
            while keys[i + n * p : i + (n + 1) * p] == keys[i : i + p]:
                n += 1
            saved, most = p * (n - 1), best.period * (best.count - 1)
            if n > 1 and (saved > most or (saved == most and p < best.period)):
                best = _Repeat(i, p, n)
            i += 1
    return best


def fusion(plan: FusionPlan | HostPlan, sizes: Mapping[str, int] | None = None, name: str = "") -> Picture:
    """Draw a plan's kernels in order; repeated layers are drawn once. Below, each kernel can be unfolded: its
    primitives, why each joined, and why it is separate from the kernels that it reads.

    With ``sizes`` of the dims, bars show the kernels' operations. Chips are reasons (on hover), ``≠`` gives the reasons
    against fusion, arrows are buffers. InputError: a size is missing. UnsupportedError: as for ``kernel_graph``.
    """
    every = steps(plan)
    s = _Fusion(plan, every, sizes, name)
    return s.draw()


class _Fusion:
    def __init__(self, plan: FusionPlan | HostPlan, every: list[Step], sizes: Mapping[str, int] | None, name: str):
        self.steps, self.sizes = every, sizes
        whole = plan if isinstance(plan, HostPlan) else plan.graph
        self.tensors: Mapping[str, Tensor | Buffer] = plan.buffers if isinstance(plan, HostPlan) else plan.graph.tensors
        self.inputs, self.outputs = whole.inputs, whole.outputs
        self.repeat = repetition([x.alike for x in every])
        self.work: dict[int, int] = defaultdict(int)
        for k, x in enumerate(every):
            self.work[self.repeat.row(k)] += self._at(x.flops)
        self.common = prefix([_plain(x.label) for x in every])
        r = self.repeat
        stem = [self._name(k) for k in range(r.first, r.first + r.period)] if r.count > 1 else []
        self.stem = prefix([*stem, *stem[:1]])
        kinds = len({x.alike for x in every})
        title = f"{name or (plan.name if isinstance(plan, HostPlan) else '') or 'model'}: {len(every)} kernels"
        weights = ", ".join(f"{k}={v}" for k, v in (sizes or {}).items())
        note = f", {kinds} different" + (f"; bars: share of the work at {weights}" if weights else "")
        self.s = Sheet(title, f"{', '.join(f'{n} {self._shape(n)}' for n in self.inputs)}{note}")
        self.y: dict[int, float] = {}

    def _at(self, x: Index) -> int:
        try:
            return x.evaluate(self.sizes) if self.sizes else 0
        except KeyError as e:
            raise InputError(f"no size is given for {e.args[0]}", dim=e.args[0], remedy="give it, or no sizes") from e

    def _shape(self, tensor: str) -> str:
        return f"[{', '.join(algebra(d) for d in self.tensors[tensor].shape)}]"

    def _name(self, k: int) -> str:
        return re.sub(r"\b(layers?|h|blocks?)([./_])\d+", r"\1\2*", _plain(self.steps[k].label)[len(self.common) :])

    def draw(self) -> Picture:
        s, r = self.s, self.repeat
        shown = r.shown(len(self.steps))
        y = self._legend(s.top + 8) + 24
        for k in shown:
            y += 22 if r.count > 1 and k == r.first else 16 if r.count > 1 and k == r.end else 0
            self.y[k] = y
            y += TALL + GAP
        if r.count > 1:
            a, b = self.y[r.first] - 20, self.y[r.first + r.period - 1] + TALL + 10
            s.rect(10, a, 886, b - a, "currentColor", "currentColor", r=10, opacity=0.035, dash="4 4")
            s.text(LEFT, a + 15, f"{self.stem.rstrip('/')}   × {r.count}".strip(), 13, "b m")
            s.text(LEFT + WIDE, a + 15, f"kernels {r.first}-{r.end - 1}", 12, "s", "end")
        self._arrows(shown)
        for k in shown:
            self._row(k)
        s.text(LEFT, y + 11, "→ " + ", ".join(f"{n} {self._shape(n)}" for n in self.outputs), 12, "m b", most=WIDE)
        return s.picture(tuple(self._folded(k) for k in shown))

    def _legend(self, y: float) -> float:
        s, kinds = self.s, {x.kind for x in self.steps}
        s.legend(12, y, [(KIND[k], k) for k in KIND if k in kinds])
        x: float = 300
        for how, word in (("starts", "begins the group"), ("joins", "joins it"), ("stitch", "joins, reduces again")):
            _chip(s, x, y - 9, how, GREY, word)
            s.text(x + 16, y, word, 12, "s")
            x += 16 + len(word) * 12 * SANS + 14
        s.text(x, y, "≠", 13, "b", fill=RED)
        s.text(x + 13, y, "kept apart", 12, "s")
        return y

    def _row(self, k: int) -> None:
        s, x, y = self.s, self.steps[k], self.y[k]
        colour, right = KIND.get(x.kind, GREY), LEFT + WIDE - 10
        s.rect(LEFT, y, WIDE, TALL, cls="bg", r=6)
        s.rect(LEFT, y, WIDE, TALL, colour, colour, r=6, opacity=0.13, tip="\n".join((x.label, *x.primitives)))
        total = sum(self.work.values())
        if total:
            part = self.work[k] / total
            s.rect(LEFT + 6, y + TALL - 5, (WIDE - 7) * part, 4, colour, tip=f"{part:.1%} of all operations")
        s.rect(LEFT, y, 6, TALL, colour, r=3)
        s.text(LEFT - 8, y + 19, str(k), 11.5, "s m", "end")
        shape = ", ".join(self._shape(b) for b in x.writes)
        most = 300 if len(shape) * 12 * MONO > 300 else len(shape) * 12 * MONO + 4
        s.text(right, y + 19, shape, 12, "m b", "end", tip=" ".join(x.writes), most=most)
        label = self._name(k)[len(self.stem) :] if self.repeat.first <= k < self.repeat.end else self._name(k)
        s.text(LEFT + 16, y + 18, label, 12.5, "m b", most=WIDE - 50 - most, keep="end", tip=x.label)
        joined = [r for r in x.reasons if APART not in r]
        for i, r in enumerate(joined[:24]):
            drawing = next(c for words, c in CHIP_DRAWINGS if words in r) if ":" in r else "starts"
            _chip(s, LEFT + 16 + i * 14, y + 26, drawing, colour, r)
        if x.apart:
            sign = f"≠{len(x.apart)}" if len(x.apart) > 1 else "≠"
            s.text(LEFT + 22 + min(len(joined), 24) * 14, y + 36.5, sign, 13, "b", fill=RED, tip="\n".join(x.apart))
        share = f"  {self.work[k] / total:4.0%}" if total and self.work[k] > total / 200 else "      " if total else ""
        tip = f"{x.flops} operations, {x.bytes} bytes"
        s.text(right, y + 37, f"{algebra(x.flops)} flop{share}", 11.5, "m s", "end", most=320, tip=tip)

    def _arrows(self, shown: Sequence[int]) -> None:
        """Draw a short arrow between neighbours, and a lane at the right for all others."""
        s, lanes = self.s, list[list[tuple[float, float]]]()
        index = {k: n for n, k in enumerate(shown)}
        links = sorted(self._links(shown).items(), key=lambda e: abs(self.y[e[0][1]] - self.y[e[0][0]]))
        drawn = []
        for (p, k, back), names in links:
            tip = "\n".join(self._reason(n, self.steps[k]) for n in dict.fromkeys(names))
            if not back and index[k] and shown[index[k] - 1] == p:
                s.path(f"M{LEFT + 60},{self.y[p] + TALL}V{self.y[k] - 1}", line=1.8, arrow=True, tip=tip, opacity=0.75)
                continue
            lo, hi = sorted((self.y[p], self.y[k]))
            free = (n for n, taken in enumerate(lanes) if all(hi <= a or b <= lo for a, b in taken))
            n = next(free, len(lanes))
            if n == len(lanes):
                lanes.append([])
            lanes[n].append((lo, hi))
            drawn.append((p, k, back, n, tip))
        wide = min(16.0, 120 / max(1, len(lanes)))
        for p, k, back, n, tip in drawn:
            a = self.y[p] + TALL * (0.75 if back else 0.58)
            b, x = self.y[k] + TALL * (0.22 if back else 0.4), LEFT + WIDE + 22 + n * wide
            u = 6 if b > a else -6
            d = f"M{LEFT + WIDE},{a:.1f}H{x - 6:.1f}q6,0 6,{u}V{b - u:.1f}q0,{u} -6,{u}H{LEFT + WIDE + 2}"
            s.path(d, ORANGE if back else "", 1.6, "5 3" if back else "", 0.8, arrow=True, tip=tip)
        if any(back for _, _, back, _, _ in drawn):
            s.text(LEFT + WIDE + 142, max(self.y.values()) + TALL + 28, "dashed: to the next layer", 12, "s", "end")

    def _links(self, shown: Sequence[int]) -> dict[tuple[int, int, bool], list[str]]:
        """Return the buffers of each edge: (from, to, whether it leads to the next copy) -> buffers."""
        writer = {b: k for k, x in enumerate(self.steps) for b in x.writes}
        r, links = self.repeat, defaultdict[tuple[int, int, bool], list[str]](list)
        for k, x in enumerate(self.steps):
            for b in x.reads:
                p = writer.get(b)
                if p is None:
                    continue
                second = r.count > 1 and r.first + r.period <= k < r.first + 2 * r.period
                carried = second and r.first <= p < r.first + r.period
                if k in self.y or carried:
                    links[r.row(p), r.row(k), carried].append(b)
        return links

    def _reason(self, tensor: str, reader: Step) -> str:
        """Describe a buffer, and why its reader is a separate kernel."""
        t = self.tensors[tensor]
        reasons = [a.partition(APART)[2][len(tensor) :].lstrip(": ") for a in reader.apart
                   if a.partition(APART)[2].startswith(f"{tensor}:")]  # fmt: skip
        text = f"{tensor} {self._shape(tensor)} {t.dtype}"
        return text + "".join(f"\napart: {r}" for r in dict.fromkeys(reasons))

    def _folded(self, k: int) -> tuple[str, str]:
        x = self.steps[k]
        lines = [*x.primitives, *(["", "why"] if x.primitives else ()), *(r for r in x.reasons if APART not in r)]
        return f"{k}: {x.label}", "\n".join([*lines, *(["", "apart"] if x.apart else ()), *x.apart])


def _chip(s: Sheet, x: float, y: float, drawing: str, colour: str, tip: str) -> None:
    if drawing == "stitch":
        s.rect(x + 1.2, y + 1.2, 8.6, 8.6, "transparent", colour, r=2, line=2.4, tip=tip)
    else:
        s.rect(x, y, 11, 11, colour, r=2.5, opacity=1 if drawing == "starts" else 0.5, tip=tip)


def _plain(label: str) -> str:
    return label.split(" ", 1)[-1].replace("_output_0", "")


def prefix(names: Sequence[str]) -> str:
    """Return the common beginning of names, up to a slash; empty for one name."""
    if len(names) < 2:
        return ""
    a, b = min(names), max(names)
    n = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))
    return a[: a.rfind("/", 0, n) + 1]
