"""The cache on disk: its limit, eviction, several processes, and the command that shows it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.build import cache as cache_module
from polydyn.build.cache import FileCache, cache_root, digest, open_library, stored_file
from polydyn.build.compiler import build_library
from polydyn.build.eviction import BLOCK, BLOCKS, KINDS, cache_limit, clear, entries, evict
from polydyn.cli import main
from polydyn.errors import BuildError
from polydyn.gpu.cache import cached
from tests.support.paths import ROOT
from tests.support.tiny import model, node

HOUR = 3600
ENTRY = 3 * BLOCK
BODY = bytes(ENTRY - 32)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache, which has room for ten entries of ``BODY``."""
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", str(10 * ENTRY))
    return tmp_path / "cache"


def key(k: int) -> str:
    return digest(str(k))


def used(path: Path, hours_ago: float) -> None:
    then = time.time() - hours_ago * HOUR
    os.utime(path, (then, then))


def filled(count: int = 10) -> FileCache:
    """Make a cache with entries 0, 1, ...; entry 0 was used longest ago."""
    cache = FileCache("objects")
    for k in range(count):
        cache.put(key(k), BODY)
        used(cache.path(key(k)), 100 - k)
    return cache


def remaining(cache: FileCache) -> list[int]:
    return [k for k in range(20) if cache.path(key(k)).exists()]


# -- eviction ----------------------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first(root: Path) -> None:
    cache = filled()
    assert remaining(cache) == list(range(10)), "the limit is not exceeded"
    assert cache.get(key(0)) == BODY, "a use, which is recorded"
    cache.put(key(10), BODY)
    assert remaining(cache) == [0, *range(4, 11)], "down to 7/8 of the limit"
    assert (root / BLOCKS).stat().st_size == 8 * 3


def test_files_that_are_opened_are_used_too() -> None:
    paths = [stored_file("lib", f"{key(k)}.so", BODY) for k in range(10)]
    for path in paths:
        used(path, 9 if path == paths[3] else 5)
    assert stored_file("lib", f"{key(3)}.so", BODY) == paths[3]
    filled(1)
    assert paths[3].exists() and sum(p.exists() for p in paths) == 7


def test_what_is_in_use_stays_whatever_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", "0")
    cache = FileCache("objects")
    for k in range(3):
        cache.put(key(k), BODY)
    assert remaining(cache) == [0, 1, 2]
    used(cache.path(key(1)), 0.1)
    cache.put(key(3), BODY)
    assert remaining(cache) == [0, 2, 3]


def test_a_lower_limit_counts_from_the_next_entry_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", str(4 * ENTRY))
    cache.put(key(10), BODY)
    assert remaining(cache) == [8, 9, 10]


def test_nothing_is_counted_before_the_limit_is_reached(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, looked = filled(1), []
    monkeypatch.setattr("polydyn.build.eviction.evict", lambda *a: looked.append(a))
    for k in range(1, 10):
        cache.put(key(k), BODY)
        assert cache.get(key(k)) == BODY
    assert not looked
    cache.put(key(10), BODY)
    (root / BLOCKS).unlink()  # a cache without a count
    cache.put(key(11), BODY)
    assert len(looked) == 2


def test_only_the_caches_own_files_are_removed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(3)
    machines = FileCache("machines")
    machines.put(key(0), BODY)
    outside = tmp_path / "outside"
    outside.write_bytes(BODY)
    foreign = [root / "notes", root / "mine" / key(5), *(cache.folder / n for n in ("README", f"{key(1)[:40]}.so"))]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(BODY)
    (root / "lib").mkdir()
    (root / "lib" / key(0)).mkdir()
    (root / "lib" / key(1)).symlink_to(outside)
    foreign += [machines.path(key(0)), root / "lib" / key(0), root / "lib" / key(1), outside]
    for path in foreign:
        used(path, 1000)
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", "0")
    cache.put(key(3), BODY)
    assert remaining(cache) == [3]
    clear(root)
    assert remaining(cache) == [] and all(p.exists() for p in foreign) and machines.get(key(0)) == BODY


def test_what_a_process_that_was_killed_had_begun_goes_too(root: Path) -> None:
    cache = filled(1)
    begun = [cache.folder / f".{key(k)}{ending}" for k, ending in enumerate((".abcd_123", ".so.abcd_123"))]
    for path in begun:
        path.write_bytes(BODY)
    assert len(clear(root)) == 1 and all(p.exists() for p in begun), "they may be being written"
    for path in begun:
        used(path, 2)
    (root / BLOCKS).touch()
    evict(root, 0)
    assert not any(p.exists() for p in begun)


def test_another_process_may_evict_and_use_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(4)
    found = {k: list(entries(root, k)) for k in KINDS}
    assert len(found["objects"]) == 4
    cache.path(key(0)).unlink()
    assert cache.get(key(1)) == BODY
    monkeypatch.setattr("polydyn.build.eviction.entries", lambda root, kind: found[kind])
    evict(root, 0)
    assert remaining(cache) == [1], "what was used since it was found stays"


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 4 * 10**9), ("0", 0), ("123", 123), ("500M", 5 * 10**8), ("1.5 GB", 15 * 10**8), ("2t", 2 * 10**12)],
)
def test_limits(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", text)
    assert cache_limit() == size


@pytest.mark.parametrize("text", ["much", "-1", "4X", "GB", "1e9"])
def test_limits_that_are_none_are_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", text)
    with pytest.raises(BuildError, match=r"(?s)POLYDYN_CACHE_LIMIT is.*500M"):
        FileCache("objects").put(key(0), BODY)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POLYDYN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "polydyn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "polydyn"


# -- what is gone is made again ----------------------------------------------------------------------------------------


def seven() -> bytes:
    return build_library({"a.c": '__attribute__((visibility("default"))) int f(void) { return 7; }'}, {}).data


def test_a_loaded_library_stays_and_one_that_is_gone_is_written_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = seven()
    loaded = open_library(data)
    clear(root)
    assert loaded.f() == 7 and not any((root / "lib").iterdir())

    def just_cleared(path: str) -> ctypes.CDLL:
        opened.append(path)
        if len(opened) == 1:
            clear(root)
        return real(path)

    opened: list[str] = []
    real = ctypes.CDLL
    monkeypatch.setattr(cache_module.ctypes, "CDLL", just_cleared)
    assert open_library(data + b"another").f() == 7 and len(opened) == 2
    with pytest.raises(OSError, match=r"invalid ELF header|file too short"):
        open_library(b"no library, and that is not for want of a file")


def test_a_library_opens_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a read-only root: it is loaded from memory, and only once."""
    data = seven() + b"in memory"
    monkeypatch.setenv("POLYDYN_CACHE", "/proc/nowhere")
    first = open_library(data)
    assert first.f() == 7 and open_library(data) is first and open_library(data + b"other").f() == 7


def test_damaged_and_evicted_kernels_are_compiled_again(root: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> bytes:
        assert list(folder.iterdir()) == []
        made.append(folder)
        return b"kernel"

    assert [cached("cuda", key(0), make) for _ in range(2)] == [b"kernel"] * 2 and len(made) == 1
    path = FileCache("cuda").path(key(0))
    path.write_bytes(path.read_bytes()[:-1])
    assert cached("cuda", key(0), make) == b"kernel" and len(made) == 2
    clear(root)
    assert cached("cuda", key(0), make) == b"kernel" and len(made) == 3 and not made[0].exists()


def test_processes_that_evict_each_others_files(root: Path) -> None:
    """Entries count as unused at once: each process constantly evicts entries that another one is about to open."""
    data = seven()
    (root.parent / "data").write_bytes(data)
    code = """
import sys, ctypes
from pathlib import Path
from polydyn.build import cache, eviction
eviction.IN_USE_SECONDS = 0.0
data = Path(sys.argv[1]).read_bytes()
entries = cache.FileCache("objects")
for k in range(150):
    name = cache.digest(str(k % 5))
    body = entries.get(name)
    assert body in (None, name.encode() * 200)
    if body is None:
        entries.put(name, name.encode() * 200)
    if k % 10 == 0:
        assert cache.open_library(data + bytes(1 + k % 3)).f() == 7
"""
    where = ROOT
    env = {**os.environ, "POLYDYN_CACHE_LIMIT": "30K"}
    run = [subprocess.Popen([sys.executable, "-c", code, root.parent / "data"], cwd=where, env=env) for _ in range(3)]
    assert [p.wait() for p in run] == [0, 0, 0]
    assert sum(e.bytes for kind in KINDS for e in entries(root, kind)) <= 30_000 + 30_000


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_shows_and_clears(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POLYDYN_CACHE_LIMIT")
    empty = CliRunner().invoke(main, ["cache"])
    assert empty.exit_code == 0 and f"{root}: 0 entries, 0.0 MB, at most 4000 MB" in empty.output and not root.exists()
    path = str(tmp_path / "relu.onnx")
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"]), path)
    program = polydyn.compile(path, threads=1)
    assert program.compilations > 0 and polydyn.compile(path, threads=1).compilations == 0
    used(next((root / "lib").iterdir()), 36)
    shown = CliRunner().invoke(main, ["cache"]).output
    assert "libraries of programs" in shown and " 1.5\n" in shown and "emulated" in shown
    count = sum(len(list((root / kind).glob("*"))) for kind in ("compilers", "objects", "lib"))
    assert f": {count} entries" in shown
    cleared = CliRunner().invoke(main, ["cache", "--clear"]).output
    assert f"removed {count} entries" in cleared and not any((root / "objects").iterdir())
    assert (program.run({"x": np.array([-1, 2], np.float32)})["y"] == [0, 2]).all()
    assert polydyn.compile(path, threads=1).compilations > 0
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", "much")
    assert CliRunner().invoke(main, ["cache"]).exit_code == 1
    assert "--  cache: POLYDYN_CACHE_LIMIT is 'much'" in CliRunner().invoke(main, ["doctor"]).output
