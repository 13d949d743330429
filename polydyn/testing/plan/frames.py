"""Check the run time between the parts of a program: the inputs of each stage must be in memory when it begins.

Memory is a set of places (rooms, memory of the caller, slots of loops). Each holds one tensor of one call. The checker
runs the words that C reads. The expected tensors are taken from the graph as it was cut into parts and steps. The code
that chose rooms, last uses and forms of loops is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from polydyn.graph.cut import Part
from polydyn.graph.ir import HostStep
from polydyn.testing.plan.faults import Fault, Faults
from polydyn.testing.plan.frame_words import PART, PYTHON, StageWords
from polydyn.testing.plan.framed import Framed
from polydyn.testing.plan.turns import Turns, run_branch

CALLS = 2
"""Number of calls of one frame. The second call must not read results of the first."""
Place = tuple[Any, ...]
"""Storage location of a tensor."""
Value = tuple[Any, ...]
"""A tensor and the call or iteration that computed it."""


def check_frame(framed: Framed) -> list[Fault]:
    """Return the faults of a frame over successive calls, with results in the caller's memory and in rooms."""
    found: dict[Fault, None] = {}
    for in_rooms in (False, True):
        memory: dict[Place, Value] = {}
        for call in range(CALLS):
            found |= dict.fromkeys(Frame(framed, memory, call, in_rooms).run())
    return list(found)


class Frame:
    """One call. ``memory`` maps places to tensors; ``in_rooms``: results are stored in rooms (a C call can)."""

    def __init__(self, framed: Framed, memory: dict[Place, Value], call: int, in_rooms: bool) -> None:
        self.framed, self.words, self.memory = framed, framed.words, memory
        self.call, self.in_rooms, self.faults = call, in_rooms, Faults()
        self.at: dict[int, Place] = {}
        for k, constant in enumerate(self.words.constants):
            if constant or k < self.words.inputs:
                self.at[k] = ("given", k)
                memory["given", k] = self.value(self.framed.names[k])
        self.sizes = set(self.words.given)

    def value(self, name: str) -> Value:
        """Return the value of a tensor in this call."""
        return (name, self.call)

    def run(self) -> list[Fault]:
        """Run all stages in order and return the faults."""
        framed = self.framed
        if len(framed.order) != len(self.words.stages):
            self.add(framed.name, f"{len(self.words.stages)} stages of {len(framed.order)}")
            return list(self.faults)
        for expected, stage in zip(framed.order, self.words.stages, strict=True):
            self.faults.launch = _label(expected)
            self._stage(expected, stage)
        self.faults.launch = "end"
        for name, k in zip(framed.outputs, self.words.outputs, strict=True):
            self.reads(k, name)
        return list(self.faults)

    def add(self, tensor: str, text: str) -> None:
        """Add a fault."""
        self.faults.add("frame", tensor, text)

    def _stage(self, expected: Part | HostStep, stage: StageWords) -> None:
        """Run one stage: read inputs, allocate outputs, run, store outputs. Inputs stay live until the stage ends."""
        inputs, outputs = _tensors_of(expected)
        if len(stage.inputs) != len(inputs):
            self.add("", f"it gets {len(stage.inputs)} tensors of {len(inputs)}")
            return
        if missing := stage.reads - self.sizes:
            self.add("", f"it needs {len(missing)} sizes that are not set yet")
        for k, name in zip(stage.inputs, inputs, strict=True):
            if name:
                self.reads(k, name)
        before = {self.at[k]: k for k in stage.inputs if k in self.at}
        made = stage.made if stage.kind != PYTHON else tuple(map(self.framed.names.index, filter(None, outputs)))
        self._place(made, before, stage.kind)
        if isinstance(expected, Part):
            self._runs_part(expected, stage)
        else:
            self._runs_step(expected, stage)
        names = [n for n in outputs if n] if stage.kind == PYTHON else outputs
        for k, name in zip(made, names, strict=False):
            self.memory[self.at[k]] = self.value(name or self.framed.names[k])
        self.sizes |= {*stage.says}

    def reads(self, k: int, name: str) -> None:
        """Add a fault unless the place of tensor ``k`` holds ``name`` of this call."""
        if k < 0 or k not in self.at:
            self.add(name, "it is read before it is made")
            return
        lies = self.memory.get(self.at[k])
        if lies != self.value(name):
            what = "nothing" if lies is None else f"'{lies[0]}'" if lies[-1] == self.call else f"an older '{lies[0]}'"
            self.add(name, f"where it is read lies {what}")

    def _place(self, outputs: tuple[int, ...], before: Mapping[Place, int], kind: int) -> None:
        """Choose places for the outputs of a stage. They must not overlap its inputs or each other."""
        taken: dict[Place, int] = {}
        for k in outputs:
            name, room = self.framed.names[k], self.words.rooms[k]
            if kind == PYTHON:
                place: Place = ("python", k)
            elif self.words.results[k] and not self.in_rooms:
                place = ("caller", k)
            else:
                place = ("room", room)
                if room < 0:
                    self.add(name, "it has no room")
            for there in (before, taken):
                if place in there:
                    self.add(name, f"it lies where '{self.framed.names[there[place]]}' does, which is still there")
            taken[place] = k
            self.at[k] = place

    def _runs_part(self, part: Part, stage: StageWords) -> None:
        """Check that the stage runs the expected part."""
        model = self.framed.models[stage.model]
        if stage.kind != PART or model.graph is not part.graph or len(stage.made) != len(model.outputs):
            self.add("", "another part runs")

    def _runs_step(self, step: HostStep, stage: StageWords) -> None:
        """Run the bodies of a step. The step's own work is not simulated."""
        if stage.loop is not None:
            for grows, known in product((False, True), repeat=2):
                Turns(self, step, stage, grows, known).run()
        for role, body in zip(("then_branch", "else_branch"), stage.branches, strict=False):
            run_branch(self, step, stage, role, body, [self.at[k] for k in stage.made])


def _tensors_of(x: Part | HostStep) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the inputs and outputs of a part or a step."""
    if isinstance(x, Part):
        return tuple(n for n in x.graph.inputs if n not in x.sizes), x.graph.outputs
    return x.inputs, x.outputs


def _label(x: Part | HostStep) -> str:
    return f"part {x.graph.name}" if isinstance(x, Part) else f"{x.kind} of {x.origin}"
