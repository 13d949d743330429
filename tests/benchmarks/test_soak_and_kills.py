"""The soak and the kills, short; and faults that they must find."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import kills, soak
from polydyn.build.cache import FileCache, stored_file


@pytest.fixture(autouse=True)
def _one_model_and_this_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts set the variable of the cache, which is the tests' own again after each test."""
    monkeypatch.setenv("POLYDYN_CACHE", os.environ.get("POLYDYN_CACHE", ""))
    monkeypatch.setattr(soak, "PROGRAMS", 1)
    monkeypatch.setattr(kills, "VARIANTS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


STEPS = ("call", "call from threads", "session", "fork", "interrupt calls", "full disk", "limit memory")


def test_a_short_soak_has_equal_bits(folder: Path) -> None:
    samples, wrong = soak.soak(soak.Soak(folder, random.Random(0)), 60, STEPS, most=12)
    assert not wrong and len(samples) == 12
    assert {s["files"] for s in samples[3:]} == {samples[-1]["files"]}, "file descriptors are left open"


def test_other_bits_in_the_soak_are_found(folder: Path) -> None:
    s = soak.Soak(folder, random.Random(0))
    s.prepare()
    s.answers = {key: a + b"." for key, a in s.answers.items()}
    with pytest.raises(soak.WrongError, match="has other bits"):
        soak.call(s)
    with pytest.raises(soak.WrongError, match=r"1 children fail: .*has other bits"):
        soak.in_child(lambda: s.check(s.programs[0, 1], 0))


def test_a_slope_has_an_interval() -> None:
    noise = np.random.default_rng(0).standard_normal(4000)
    flat, rising = soak.slope_of(100 + noise), soak.slope_of(100 + 0.01 * np.arange(4000) + noise)
    assert flat.low < 0 < flat.high
    assert rising.low < 10 < rising.high and rising.low > soak.LIMITS["memory"]
    assert soak.slope_of([1.0] * 20).high == float("inf"), "few samples prove nothing"


def test_lost_memory_is_not_flat(folder: Path) -> None:
    """Half a megabyte is lost in each step."""
    samples, _ = soak.soak(soak.Soak(folder, random.Random(0)), 60, ["interrupt calls"], most=45, leak=500_000)
    slope = soak.slope_of([s["memory"] for s in samples])
    assert slope.low > soak.LIMITS["memory"], slope
    svg = soak.draw(samples, dict.fromkeys(soak.MEASURES, slope)).svg
    assert svg.startswith("<svg") and all(name in svg for name in soak.MEASURES)
    json.dumps(samples)


def test_killed_writers_leave_nothing_half_written(tmp_path: Path) -> None:
    found, counts = kills.campaign(kills.Room(tmp_path, random.Random(0)), 6, ["save", "write", "evict"])
    assert not found and sum(counts[n] for n in ("save", "write", "evict")) > 1


def test_half_written_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    key = "0" * 64
    FileCache("objects").put(key, b"whole")
    library = stored_file("lib", f"{kills.hashlib.sha256(b'lib').hexdigest()}.so", b"lib")
    assert list(kills.cache_faults(tmp_path / "cache")) == []
    FileCache("objects").path(key).write_bytes(b"who")
    library.write_bytes(b"li")
    assert sorted(kills.cache_faults(tmp_path / "cache")) == [
        f"lib/{library.name} is not whole", f"objects/{key} is not whole"
    ]  # fmt: skip
    room = kills.Room(tmp_path, random.Random(0), expected=[b""] * kills.VARIANTS)
    (tmp_path / "out0.polydyn").write_bytes(b"half")
    assert any(f.startswith("out0.polydyn: ") for f in kills.faults(room))


def test_lost_records_are_found(tmp_path: Path) -> None:
    from polydyn.search.records import Records

    Records.open(tmp_path / "records.db").close()
    room = kills.Room(tmp_path, random.Random(0), expected=[b""] * kills.VARIANTS, rows=3)
    assert "records.db has 0 rows and had 3" in list(kills.faults(room))
