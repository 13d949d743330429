"""Simulate bodies of steps in a frame: one run of a branch, or the iterations of a loop with its carried tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from polydyn.graph.ir import HostStep
from polydyn.testing.plan.frame_words import BodyWords, StageWords

if TYPE_CHECKING:
    from polydyn.testing.plan.frames import Frame

Place: TypeAlias = "tuple[Any, ...]"
Value: TypeAlias = "tuple[Any, ...]"
TURNS = 4
"""Simulated iterations of a loop: the first one, one with carried tensors, and two with unchanged shapes."""


class Run:
    """One run of a body. ``formals``: (place, value) of each formal; ``pointers``: places of outputs, which persist
    between runs; ``turn``: identity of the run.
    """

    def __init__(
        self, frame: Frame, step: HostStep, stage: StageWords, role: str, body: BodyWords,
        formals: Sequence[tuple[Place, Value]], pointers: dict[int, Place], turn: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.frame, self.memory, self.body = frame, frame.memory, body
        self.model, self.graph = frame.framed.models[body.model], dict(step.bodies)[role]
        self.pointers, self.turn, settings = pointers, turn, dict(step.settings)
        self.settings: Mapping[str, Any] = settings.get(role, settings)
        self.truth: dict[str, Value] = dict(zip(self.settings["formals"], (v for _, v in formals), strict=True))
        self.truth |= {n: frame.value(step.inputs[k]) for n, k in self.settings["captured"]}
        self.sources = dict(zip(body.formals, (p for p, _ in formals), strict=True))
        self.sources |= {i: frame.at[stage.inputs[k]] for i, k in body.captured if stage.inputs[k] in frame.at}

    def point(self, r: int, place: Place) -> None:
        """Set the place of a result if the body writes it directly."""
        if self.body.direct[r]:
            self.send(r, place)

    def send(self, r: int, place: Place) -> None:
        """Set the place of a result."""
        if self.body.results[r] < 0 or self.model.several:
            self.frame.add(self.settings["results"][r], "the body does not write it to its place")
        else:
            self.pointers[self.body.results[r]] = place

    def run(self, copied: Collection[int], to: Sequence[Place]) -> None:
        """Run the body, then copy the results in ``copied`` to their places ``to``."""
        if self.model.graph is not self.graph:
            self.frame.add("", "another body runs")
            return
        self._read()
        self._several() if self.model.several else self._write()
        for r in sorted(copied):
            lies = self.place_of(r)
            self.memory[to[r]] = self.memory.get(lies, ("nothing",)) if lies else ("nothing",)

    def _read(self) -> None:
        brought = {n for n, _ in self.settings["sizes"]}
        for name in self.graph.inputs:
            place = self.sources.get(self.model.inputs.index(name)) if name in self.model.inputs else None
            if name in brought:
                continue
            lies = self.memory.get(place) if place else None
            if lies != self.truth.get(name):
                self.frame.add(name, f"run {self.turn[-1]} of the body reads {lies}, not {self.truth.get(name)}")

    def _write(self) -> None:
        taken: set[Place] = set()
        for o, name in enumerate(self.model.outputs):
            place = self.pointers.get(o)
            if place is None or place in taken:
                self.frame.add(name, "another output is written there" if place else "it is written nowhere")
                continue
            taken.add(place)
            read = {self.model.inputs[i] for i, p in self.sources.items() if p == place}
            if any((name, i) not in self.model.grows for i in read):
                self.frame.add(name, f"it is written over {', '.join(sorted(read))}, which the body reads")
            self.memory[place] = self.made(name)

    def _several(self) -> None:
        """Write outputs of a body of several parts to its own rooms."""
        for k, name in enumerate(self.model.outputs):
            if name not in self.graph.inputs:
                self.memory["inner", self.body.model, k] = self.made(name)

    def made(self, name: str) -> Value:
        """Return the value of a tensor that this run computes."""
        return ("out", name, *self.turn, self.frame.call)

    def place_of(self, r: int) -> Place | None:
        """Return the place of a result after the run."""
        o = self.body.results[r]
        if o < 0:
            return self.sources.get(-1 - o)
        if not self.model.several:
            return self.pointers.get(o)
        inside = self.model.outputs[o] in self.graph.inputs
        return self.sources.get(o) if inside else ("inner", self.body.model, o)

    def result(self, r: int) -> Value:
        """Return the expected value of a result."""
        name = self.settings["results"][r]
        return self.truth[name] if name in self.graph.inputs else self.made(name)

    def check(self, r: int, place: Place | None, what: str) -> None:
        """Add a fault unless ``place`` holds the result."""
        lies = self.memory.get(place) if place else None
        if lies != self.result(r):
            self.frame.add(self.settings["results"][r], f"{what} {self.turn[-1]}: there lies {lies}")


def run_branch(
    frame: Frame, step: HostStep, stage: StageWords, role: str, body: BodyWords, to: Sequence[Place]
) -> None:
    """Run a branch and check all its results."""
    run = Run(frame, step, stage, role, body, (), {}, (role,))
    for r, place in enumerate(to):
        run.point(r, place)
    run.run([r for r in range(len(to)) if not body.direct[r]], to)
    for r, place in enumerate(to):
        run.check(r, place, "branch")


class Turns:
    """Iterations of a loop. ``grows``: carried tensors change shape each time; ``known``: the trip count is known."""

    def __init__(self, frame: Frame, step: HostStep, stage: StageWords, grows: bool, known: bool) -> None:
        assert stage.loop is not None
        self.frame, self.step, self.stage, self.loop = frame, step, stage, stage.loop
        self.memory, self.grows, self.known = frame.memory, grows, known
        self.settings = dict(step.settings)
        self.first, self.count = int(self.settings["loop"]), int(self.settings["carried"])
        body, several = self.loop.body, frame.framed.models[self.loop.body.model].several
        self.asks = bool(self.first) and body.results[0] != (body.formals[1] if several else -1 - body.formals[1])
        self.now = [frame.at.get(k, ("nowhere",)) for k in stage.inputs[2 : 2 + self.count]]
        self.is_now = [frame.value(n) for n in step.inputs[2 : 2 + self.count]]
        self.at = [-1] * self.count
        self.pointers: dict[int, Place] = {}

    def run(self) -> None:
        """Run the iterations and check their results."""
        if not self._as_said():
            return
        runs, steady = list[Run](), False
        for k in range(TURNS):
            runs.append(self._steady(k) if steady else self._turn(k))
            steady = self.loop.plain and not self.grows
            run = runs[-1]
            for j in range(self.count):
                run.check(self.first + j, self.now[j], "carried out of turn")
                self.is_now[j] = run.result(self.first + j)
            if self.asks:
                place = ("answer",) if self.loop.body.direct[0] else run.place_of(0)
                run.check(0, place, "condition behind turn")
        for r in range(len(self.loop.rows)):
            for k, run in enumerate(runs):
                run.check(self.first + self.count + r, self._row(r, k), "row of turn")

    def _as_said(self) -> bool:
        """Return whether the encoded form of the loop matches the graph."""
        s, rows = self.settings, self.loop.rows
        said = [
            (self.loop.counts, bool(self.first), "a number of turns"),
            (len(self.loop.carried), self.count, "tensors that are carried"),
            (self.loop.slices, tuple((a, bool(b)) for a, b in s["slices"]), "slices"),
            (rows, tuple((a, bool(b)) for a, b, _ in s["scans"]), "rows"),
            (self.asks, bool(self.first) and s["results"][0] != s["formals"][1], "a condition"),
        ]
        for got, expected, what in said:
            if got != expected:
                self.frame.add("", f"{what}: {got}, not {expected}")
        return all(got == expected for got, expected, _ in said)

    def _formals(self, k: int) -> list[tuple[Place, Value]]:
        """Return (place, expected value) of each formal."""
        out: list[tuple[Place, Value]] = []
        for name in ("number", "condition")[: 2 * self.first]:
            self.memory[name,] = (name, k, self.frame.call)
            out.append(((name,), (name, k, self.frame.call)))
        out += zip(self.now, self.is_now, strict=True)
        behind = slice(2 + self.count, 2 + self.count + len(self.loop.slices))
        for s, (tensor, name) in enumerate(zip(self.stage.inputs[behind], self.step.inputs[behind], strict=True)):
            whole = self.memory.get(self.frame.at.get(tensor, ("nowhere",)))
            self.memory["slice", s] = ("slice", whole, k)
            out.append((("slice", s), ("slice", self.frame.value(name), k)))
        return out

    def _run(self, k: int) -> Run:
        turn = (self.step.origin, self.grows, self.known, k)
        return Run(self.frame, self.step, self.stage, "body", self.loop.body, self._formals(k), self.pointers, turn)

    def _row(self, r: int, k: int) -> Place:
        """Return the place of a row. It is in the output if the trip count is known and rows follow the first axis."""
        axis, back = self.loop.rows[r]
        if not self.known or self.asks or axis:
            return ("rows", r, k)
        return ("row of", self.frame.at[self.stage.made[self.count + r]], TURNS - 1 - k if back else k)

    def _turn(self, k: int) -> Run:
        """Run an iteration whose shapes may have changed."""
        to: list[Place] = [("answer",)] * self.first
        for j, (in_place, row, stays) in enumerate(self.loop.carried):
            if stays or row >= 0:
                to.append(self.now[j] if row < 0 else self._row(row, k))
            elif not (in_place and self.grows):
                to.append(("carried", j, self.at[j] == 0))
            else:
                if self.at[j] < 0:
                    self.memory["carried", j, False] = self.memory.get(self.now[j], ("nothing",))
                    self.at[j] = 0
                self.now[j] = ("carried", j, self.at[j] != 0)
                to.append(self.now[j])
        to += [self._row(r, k) for r in range(len(self.loop.rows))]
        run, own = self._run(k), range(self.first, self.first + self.count)
        for r in (*range(own.stop, len(to)), *own, *range(self.first if self.asks else 0)):
            run.point(r, to[r])
        kept = {self.first + j for j, (_, row, stays) in enumerate(self.loop.carried) if stays or row >= 0}
        run.run([r for r in range(self.first, len(to)) if not self.loop.body.direct[r] and r not in kept], to)
        for j, (_, row, stays) in enumerate(self.loop.carried):
            if stays:
                continue
            if row < 0 and to[self.first + j] != self.now[j]:
                self.at[j] = int(self.at[j] == 0)
            self.now[j] = to[self.first + j]
        return run

    def _steady(self, k: int) -> Run:
        """Run an iteration with the shapes of the previous one. Nothing is copied."""
        run = self._run(k)
        for r in range(len(self.loop.rows)):
            run.send(self.first + self.count + r, self._row(r, k))
        for j, (_, row, stays) in enumerate(self.loop.carried):
            if stays:
                continue
            if row < 0:
                self.at[j] = int(self.at[j] == 0)
                run.send(self.first + j, ("carried", j, self.at[j] != 0))
            self.now[j] = run.place_of(self.first + j) or ("nowhere",)
        run.run((), ())
        return run
