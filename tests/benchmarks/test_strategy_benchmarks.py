"""The basis of the table of strategies: the oracle's protocol, merged results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.oracle import ANCHORS, REPEATED_TILES, TURNS, Oracle, anchors_of, neighbours
from benchmarks.strategies import WORKLOADS, empty_cache, store
from polydyn.build.cache import FileCache
from polydyn.search.backbone import Tile


def tile(n: int) -> Tile:
    return Tile((("w.i", n),))


class FakeBench:
    """Tile n takes |n - length| + 1; in round ``lucky`` tile 0 takes no time."""

    def __init__(self, lucky: int) -> None:
        self.lucky, self.turns = lucky, 0
        self.launched: dict[int, int] = {}

    def run(self, launches: Sequence[tuple[Tile, dict[str, int]]]) -> list[float]:
        out = []
        for t, s in launches:
            n = t["w.i"]
            self.launched[s["i"]] = self.launched.get(s["i"], 0) + 1
            self.turns += n == 0
            out.append(0.5 if n == 0 and self.turns == self.lucky else abs(n - s["i"]) + 1.0)
        return out


def test_anchors_are_spaced_by_ratio_and_hold_both_ends() -> None:
    assert anchors_of(1) == [0] and anchors_of(8) == list(range(8))
    anchors = anchors_of(128)
    assert anchors[:4] == [0, 1, 2, 3] and anchors[-1] == 127 and len(anchors) <= ANCHORS
    assert neighbours(anchors, 2) == [2] and neighbours([0, 5, 9], 7) == [5, 9]


def test_the_oracle_finds_the_best_of_every_length_and_is_not_won_by_luck() -> None:
    shapes = [{"i": n} for n in range(1, 41)]
    pool = [tile(n) for n in range(42)]
    for lucky in range(1, 2 * TURNS):
        bench = FakeBench(lucky)
        timed = Oracle(bench, shapes)  # type: ignore[arg-type]
        seconds = timed.measure(pool, [(tile(0),)] * len(shapes))
        assert sum(s != 1.0 for s in seconds) <= 1, "a lucky turn wins one half, and is scored on the other"
        assert max(bench.launched.values()) <= len(pool) + (REPEATED_TILES + 1) * TURNS
        assert all(len(timed.seconds[tile(0), n]) == 1 + TURNS for n in range(1, len(shapes)))


def test_a_workload_replaces_its_own_results_only(tmp_path: Path) -> None:
    a, b = WORKLOADS[0].name, WORKLOADS[3].name
    for name, threads, mean in ((b, 1, 0.1), (a, 1, 0.2), (a, 2, 0.3), (b, 1, 0.4)):
        store({"workload": name, "threads": threads, "mean": mean}, tmp_path)
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert [(r["workload"], r["threads"], r["mean"]) for r in results] == [(a, 1, 0.2), (b, 1, 0.4), (a, 2, 0.3)]


def test_an_empty_cache_leaves_what_it_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path))
    FileCache("objects").put("a" * 8, b"old")
    with empty_cache():
        assert FileCache("objects").get("a" * 8) is None
        FileCache("objects").put("b" * 8, b"new")
    assert FileCache("objects").get("a" * 8) == b"old" and FileCache("objects").get("b" * 8) == b"new"
