"""The programs of a model in a cell (``cells``): compiled, opened as the cell says, and called.

A call is a function of inputs that returns outputs. ``programs_of`` returns the call with one thread, and further calls
whose outputs must have its bits: with the cell's threads, into given arrays, and bound. Programs for arm64 are called
by qemu, each call in a process of its own.
"""

from __future__ import annotations

import os
import random
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx

import polydyn
from polydyn.backends import target_of
from polydyn.backends.cpu import Cpu
from polydyn.compiler import compile_artifact
from polydyn.errors import Declined, InputError, PolydynError, UnsupportedError
from polydyn.explore import groups
from polydyn.graph.expand import import_model
from polydyn.measure.cpu import other_groups, placed_builder, products
from polydyn.runtime.artifact import Artifact, write_artifact
from polydyn.runtime.opening import load, open_program
from polydyn.runtime.program import Program
from polydyn.schedules.decision import Decision, Leaf, Split
from polydyn.schedules.handmade.document import Written
from polydyn.schedules.index import Index
from polydyn.search.backbone import Problem, Tile
from polydyn.search.hardware import Hardware
from polydyn.search.hardware import cpu as machine_of
from polydyn.search.outcomes import Search, outcome, search_record
from polydyn.search.records import Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.strategies import STRATEGIES, tune
from polydyn.search.tasks.cpu import DEFAULT, RowsTask
from polydyn.search.tasks.sized import SizedTask
from polydyn.testing import from_c
from polydyn.testing.authorities import Arrays
from polydyn.testing.cells import Cell, c_compiler, qemu
from polydyn.testing.fuzz_schedules import random_schedule
from polydyn.testing.simulated import Simulated

Call = Callable[[Arrays], Mapping[str, Any]]
STRATEGY = "polydyn"
GARBAGE = b"\x5a"
"""A byte of arrays into which a program writes."""
TRIALS = 12
"""Tiles that a search on a simulated machine tries."""
MAX_TILES = 64
"""Tiles of a group other than a product among which a random one is drawn."""
ROW_SHARE = 0.5
"""Share of the groups with several rows in the table of their kernels that get a tile of another row."""
STEPS = (2, 6)
"""Smallest and largest number of steps of a schedule that is written by hand."""


@dataclass(frozen=True)
class Programs:
    """``one``: a call with one thread; ``others``: calls with the cell's threads (``ways``). ``manifest``: of the
    program. ``notes``: how often the cell did something, or why it could not."""

    one: Call
    others: Sequence[Call]
    manifest: Mapping[str, Any]
    notes: Counter[str]


def ways(program: Program) -> tuple[Call, ...]:
    """Return the ways to call a program: plainly, into arrays of the caller, and as a bound call."""

    def into(feeds: Arrays) -> Mapping[str, Any]:
        shapes = {n: np.asarray(a) for n, a in program.run(feeds).items()}
        out = {n: np.frombuffer(bytearray(GARBAGE * a.nbytes), a.dtype).reshape(a.shape) for n, a in shapes.items()}
        return program.run(feeds, out=out)

    return program.run, into, lambda feeds: program.bind(feeds)()


def programs_of(model: onnx.ModelProto, cell: Cell, seed: int, folder: Path) -> Programs:
    """Compile a model in a cell and open its programs; to be called inside ``cell.environment``.

    PolydynError: as from ``polydyn.compile``. ``folder``: for files.
    """
    notes: Counter[str] = Counter()
    arguments: dict[str, Any] = {"target": cell.target, "options": cell.options(seed)}
    if cell.tiles in ("random", "search") and not cell.on_device:
        arguments["records"] = recorded(model, cell, seed, folder / "records.db", notes)
    if cell.opened == "cached":
        return _cached(model, cell, arguments, folder, notes)
    artifact = _artifact(model, cell, seed, arguments, notes)
    if cell.opened == "saved":
        write_artifact(artifact, folder / "program.polydyn")
    if cell.by_emulator:
        return _emulated(artifact, cell, folder, notes)
    opened = partial(load, folder / "program.polydyn") if cell.opened == "saved" else partial(open_program, artifact)
    return Programs(opened(threads=1).run, ways(opened(threads=int(cell.threads))), artifact.manifest, notes)


def _artifact(
    model: onnx.ModelProto, cell: Cell, seed: int, arguments: Mapping[str, Any], notes: Counter[str]
) -> Artifact:
    """Compile a model, in some cells with a schedule that is written by hand."""
    if cell.tiles == "written" and (schedule := written(model, cell, seed)) is not None:
        with suppress(InputError, UnsupportedError):  # the schedule does not fit: other passes, another processor
            made = compile_artifact(model, schedules=[schedule], **arguments)[0]
            notes["schedules that were written"] += 1
            return made
        notes["schedules that do not fit"] += 1
    return compile_artifact(model, **arguments)[0]


def _cached(
    model: onnx.ModelProto, cell: Cell, arguments: Mapping[str, Any], folder: Path, notes: Counter[str]
) -> Programs:
    """Return the programs that the program cache stores, in a cache of their own."""
    with mock.patch.dict(os.environ, {"POLYDYN_CACHE": str(folder / "cache")}):
        polydyn.compile(model, threads=1, **arguments)
        one = polydyn.compile(model, threads=1, **arguments)
        notes["programs from the cache"] += one.timing is None or not one.compilations
        other = polydyn.compile(model, threads=int(cell.threads), **arguments)
    return Programs(one.run, ways(other), one.manifest, notes)


def _emulated(artifact: Artifact, cell: Cell, folder: Path, notes: Counter[str]) -> Programs:
    """Return the calls of a saved program by an emulator of its processor."""
    runner = from_c.build(shlex.split(c_compiler(cell.compiler or "zig", cell.target)), folder)

    def call(threads: int, feeds: Arrays) -> Mapping[str, Any]:
        try:
            return from_c.run([*qemu(), str(runner)], folder / "program.polydyn", [feeds], threads)[0]
        except from_c.RefusedError as e:
            raise InputError(str(e).strip()) from e

    return Programs(partial(call, 1), (partial(call, int(cell.threads)),), artifact.manifest, notes)


# -- tiles -------------------------------------------------------------------------------------------------------------


def recorded(model: onnx.ModelProto, cell: Cell, seed: int, path: Path, notes: Counter[str]) -> Path | None:
    """Write records with tiles for every group of a model that can be tuned. None: there are none.

    ``random``: tiles and the decision between two of them are random. ``search``: a search on a simulated machine.
    """
    machine = machine_of(2, lanes=16)
    numbers = random.Random(f"{seed} tiles")
    try:
        backend = target_of(cell.target, cell.options(seed))
        assert isinstance(backend, Cpu)
        backend.calibrate(machine)
        builder, processor = placed_builder(import_model(model), cell.target, cell.options(seed), machine)
        every = {**products(builder, processor, cell.target), **other_groups(builder, cell.target)}
    except PolydynError:  # steps of the host between parts: a search tunes no part
        notes["models without tasks"] += 1
        return None
    placed = [p for p in every.values() if not isinstance(p, Declined)]
    with Records.open(path) as records:
        for p in placed:
            with suppress(PolydynError):  # an empty space
                task: RowsTask[Any] = p.task
                search = _random_search if cell.tiles == "random" else _simulated_search
                records.put([search_record(search(task, machine, numbers, seed), task)])
                notes["groups with tiles from records"] += 1
    return path if placed else None


def _tiles(task: RowsTask[Any], machine: Hardware) -> Sequence[Tile]:
    if isinstance(task, SizedTask):
        return task.tiles(MAX_TILES)
    return (DEFAULT, *task.row_tiles, *loop_model(task.backbone, machine).tiles)


def _random_search(task: RowsTask[Any], machine: Hardware, numbers: random.Random, seed: int) -> Search:
    every = _tiles(task, machine)
    tiles = tuple(numbers.choice(every) for _ in range(2))
    if (others := [t for t in every if t.row]) and numbers.random() < ROW_SHARE:
        tiles = (numbers.choice(others), tiles[1])
    dynamic = [x.name for x in task.backbone.loops if x.extent is None]
    decision: Decision = Leaf(numbers.randrange(2))
    if dynamic:
        decision = Split(Index.of(numbers.choice(dynamic)), numbers.choice([0, 1, 3, 8, 16]), Leaf(0), Leaf(1))
    return Search(STRATEGY, tiles, 2, machine, decision, rows=task.rows.names)


def _simulated_search(task: RowsTask[Any], machine: Hardware, numbers: random.Random, seed: int) -> Search:
    if isinstance(task, SizedTask):
        return _random_search(task, machine, numbers, seed)
    problem = Problem(task.key, task.backbone, (), ())
    strategy = STRATEGIES[numbers.choice(sorted(STRATEGIES))]
    found = tune(strategy, problem, machine, Simulated(task.backbone, machine, seed=seed), trials=TRIALS, seed=seed)
    made = outcome(found, machine)
    return Search(STRATEGY, made.tiles, made.explored, machine, made.decision)


def written(model: onnx.ModelProto, cell: Cell, seed: int) -> Written | None:
    """Return a random schedule for a group of a model; None if it has no group that takes one."""
    numbers = random.Random(f"{seed} schedule")
    try:
        group = numbers.choice(groups(model, None, cell.options(seed), cell.target))
        return random_schedule(group, numbers, numbers.randint(*STEPS)).written
    except (PolydynError, IndexError):
        return None
