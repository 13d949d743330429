"""Benches, which measure kernels, and their record wrappers, which make a stopped run resumable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from polydyn.errors import BuildError
from polydyn.search.backbone import GroupKey, Shape, Tile
from polydyn.search.cost import MacroKernel
from polydyn.search.hardware import Hardware
from polydyn.search.records import Record, Records
from polydyn.search.select import Instance
from polydyn.search.spaces.space import Usage


class Bench(Protocol):
    """Measures kernels of one group. ``replay.Simulated`` is one; the real benches build and run kernels.

    ``source``: ``measured``, or ``model`` if the machine is absent and an analytical model estimates times.
    """

    @property
    def source(self) -> str:
        """The source that records of this bench state."""

    def per_operation(self, tiles: Sequence[Tile]) -> Sequence[float]:
        """Return seconds per operation on a saturating instance; ``inf`` if building or running failed."""

    def kernel(self, tile: Tile) -> MacroKernel:
        """Return the resources, wave times and single-block times of a tile that ran."""

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> Sequence[float]:
        """Return the seconds of a full launch of each tile at a shape, the minimum of ``turns`` rounds."""


CostFunction = Callable[[Sequence[Tile]], Sequence[float]]
"""Measures a batch: returns one cost per tile, lower is better, ``inf`` for a failure."""


class RecordedObjective:
    """A cost function that looks up costs in a record file first and records its measurements, batch by batch.

    Only records of the same ``source`` count: an estimate never replaces a measurement. Their kind is ``throughput``
    with value ``cost``. Failures are recorded too, so that a tile that does not build is tried only once.
    ``measured`` counts real measurements.
    """

    def __init__(
        self, cost: CostFunction, records: Records, key: GroupKey, hardware: Hardware, source: str = "measured"
    ) -> None:
        self._cost, self._records, self._key, self._hardware = cost, records, key, hardware
        self._source, self.measured = source, 0
        self._costs: dict[Tile, float] = {}
        for r in _matching(records, key, hardware, source):
            if r.kind == "failed" and not r.shape:
                self._costs.setdefault(r.tile, math.inf)
            elif r.kind == "throughput" and not r.shape:
                self._costs[r.tile] = min(r.value("cost"), self._costs.get(r.tile, math.inf))

    def __call__(self, tiles: Sequence[Tile]) -> list[float]:
        """Return the costs of a batch."""
        new = [t for t in dict.fromkeys(tiles) if t not in self._costs]
        costs = self._cost(new) if new else []
        self.measured += len(new)
        if new and not self._records.readonly:
            self._records.put(self._record(t, c) for t, c in zip(new, costs, strict=True))
        self._costs.update(zip(new, costs, strict=True))
        return [self._costs[t] for t in tiles]

    def _record(self, tile: Tile, cost: float) -> Record:
        if math.isinf(cost):
            return Record(self._key, self._hardware, tile, "failed", (), source=self._source)
        return Record(self._key, self._hardware, tile, "throughput", (("cost", cost),), source=self._source)


def _matching(records: Records, key: GroupKey, hardware: Hardware, source: str) -> Iterator[Record]:
    return (r for r in records.rows(group=key, hardware=hardware) if r.source == source)


_TIMES = ("fixed", "step", "alone_fixed", "alone_step", "one_row", "three_rows", "one_vector", "least")
_RESOURCES = ("local", "registers", "threads")
_ANY_ROUNDS = 0
"""The number of rounds of a record that does not state it, and of a failure. Such a record serves every request."""


class RecordedBench:
    """A bench that looks up records first and records its measurements (unless the records are read-only).

    A launch is recorded with its number of rounds. Another number of rounds is another measurement, so that finalists
    are measured again at sizes at which they were explored.
    """

    def __init__(self, bench: Bench, records: Records, key: GroupKey, hardware: Hardware) -> None:
        self._bench, self._records, self._key, self._hardware = bench, records, key, hardware
        self._cost = RecordedObjective(bench.per_operation, records, key, hardware, bench.source)
        self._waves: dict[Tile, Record] = {}
        self._used: dict[Tile, Record] = {}
        self._failed: set[Tile] = set()
        self._launches: dict[tuple[Tile, Instance, int], float] = {}
        for r in _matching(records, key, hardware, bench.source):
            if r.kind == "wave" and {n for n, _ in r.values} >= {*_TIMES}:  # older records are measured again
                self._waves[r.tile] = r
            elif r.kind == "resources":
                self._used[r.tile] = r
            elif r.kind == "throughput" and r.shape:
                launch = r.tile, r.shape, int(dict(r.values).get("rounds", _ANY_ROUNDS))
                self._launches[launch] = min(self._launches.get(launch, math.inf), r.value("seconds"))
            elif r.kind == "failed" and r.shape:
                self._launches.setdefault((r.tile, r.shape, _ANY_ROUNDS), math.inf)
            elif r.kind == "failed":
                self._failed.add(r.tile)

    @property
    def source(self) -> str:
        """The source of the wrapped bench."""
        return self._bench.source

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """Implement ``Bench.per_operation``."""
        return self._cost(tiles)

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel`` with one ``wave`` and one ``resources`` record, or one ``failed`` record."""
        if tile not in self._waves or tile not in self._used:
            k = self._measured(tile)
            self._waves[tile] = self._record(tile, "wave", {n: getattr(k, n) for n in _TIMES})
            self._used[tile] = self._record(tile, "resources", {n: getattr(k.used, n) for n in _RESOURCES})
            self._add([self._waves[tile], self._used[tile]])
        wave, used = self._waves[tile], self._used[tile]
        resources = Usage(*(int(used.value(n)) for n in _RESOURCES))
        return MacroKernel(tile, resources, *(wave.value(n) for n in _TIMES))

    def _measured(self, tile: Tile) -> MacroKernel:
        """Return the kernel of the wrapped bench. BuildError: it fails, or failed before."""
        if tile in self._failed:
            raise BuildError(f"according to the records, tile {tile} did not run")
        try:
            return self._bench.kernel(tile)
        except BuildError as e:
            self._failed.add(tile)
            self._add([replace(self._record(tile, "failed", {}), note=str(e))])
            raise

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """Implement ``Bench.seconds`` with one ``throughput`` or ``failed`` record per tile, shape and ``turns``."""
        instance = tuple(sorted(shape.items()))
        new = [t for t in dict.fromkeys(tiles) if self._launch(t, instance, turns) not in self._launches]
        if new:
            spent = dict(zip(new, self._bench.seconds(new, shape, turns), strict=True))
            rounds = {t: turns if math.isfinite(x) else _ANY_ROUNDS for t, x in spent.items()}
            self._launches |= {(t, instance, rounds[t]): x for t, x in spent.items()}
            self._add([replace(self._launched(t, x, turns), shape=instance) for t, x in spent.items()])
        return [self._launches[self._launch(t, instance, turns)] for t in tiles]

    def _launch(self, tile: Tile, instance: Instance, turns: int) -> tuple[Tile, Instance, int]:
        """Return the key of a recorded launch that serves a request, or the key of a new one."""
        exact, unstated = (tile, instance, turns), (tile, instance, _ANY_ROUNDS)
        return unstated if exact not in self._launches and unstated in self._launches else exact

    def _launched(self, tile: Tile, spent: float, turns: int) -> Record:
        ran = math.isfinite(spent)
        values = {"seconds": spent, "rounds": float(turns)} if ran else {}
        return self._record(tile, "throughput" if ran else "failed", values)

    def _record(self, tile: Tile, kind: str, values: dict[str, float]) -> Record:
        numbers = tuple((n, float(v)) for n, v in values.items())
        return Record(self._key, self._hardware, tile, kind, numbers, source=self.source)

    def _add(self, records: list[Record]) -> None:
        if not self._records.readonly:
            self._records.put(records)
