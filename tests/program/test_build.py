"""Building: compiler discovery, the cache, rejections."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from polydyn import compiler
from polydyn.build.cache import FileCache, digest, write_atomically
from polydyn.build.compiler import Building, build_library, compile_flags, find_compiler, included, required_features
from polydyn.build.features import available_cores, data_cache, machine_features
from polydyn.codegen.cpu.target import leaf_headers
from polydyn.errors import BuildError
from polydyn.graph.expand import import_parts
from polydyn.graph.ir import Graph
from polydyn.program.package_objects import OBJECTS
from polydyn.runtime.c import sources
from tests.support.paths import ROOT
from tests.support.tiny import model, node

UNITS = {f"u{i}.c": f'#include "k.h"\nint f{i}(void) {{ return K + {i}; }}\n' for i in range(3)}
HEADERS = {"k.h": "#define K 1\n"}
W = np.eye(8, dtype=np.float32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path))
    return tmp_path


def test_only_changed_units_are_compiled() -> None:
    first = build_library(UNITS, HEADERS)
    assert first.compiled == 3
    again = build_library(UNITS, HEADERS)
    assert again.compiled == 0 and again.data == first.data
    assert build_library(UNITS | {"u1.c": "int f1(void) { return 7; }\n"}, HEADERS).compiled == 1
    assert build_library(UNITS, {"k.h": "#define K 2\n"}).compiled == 3
    assert build_library(UNITS, HEADERS, "cpu:baseline").compiled == 3


def test_a_header_that_a_unit_does_not_include_does_not_matter() -> None:
    chain = {"a.h": '#  include "b.h"\n', "b.h": "#define B 1\n", "other.h": "#define OTHER 1\n"}
    unit = {"u.c": '#include "a.h"\nint f(void) { return B; }\n'}
    assert build_library(unit, chain).compiled == 1
    assert build_library(unit, chain | {"other.h": "#define OTHER 2\n"}).compiled == 0
    assert build_library(unit, chain | {"b.h": "#define B 2\n"}).compiled == 1
    assert included('  # include "a.h"\n// #include "other.h"\n', chain).keys() == {"a.h", "b.h"}


@pytest.mark.parametrize("damaged", [False, True])
def test_objects_of_the_package_are_not_compiled_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """The folder is filled by an interpreter without other packages, as in the environment of a build."""
    folder = cache / "compiled"
    command = [sys.executable, "-S", "-m", "polydyn.program.package_objects", folder]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if damaged:
        for entry in (folder / "objects").iterdir():
            entry.write_bytes(entry.read_bytes()[:-40] + bytes(40))
    monkeypatch.setattr("polydyn.build.cache.OF_PACKAGE", folder)
    texts = sources("cpu") | leaf_headers(8)
    units = {n: t for n, t in texts.items() if n.endswith(".c")}
    with Building({n: t for n, t in texts.items() if n not in units}) as building:
        building.compile(units)
        building.compile(units)
        assert building.compiled == (len(units) if damaged else 0)


def test_a_package_is_installed_without_a_compiler(cache: Path) -> None:
    command = [sys.executable, "-m", "polydyn.program.package_objects", cache / "compiled"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CC": "/nowhere/cc"}, capture_output=True, text=True)
    assert done.returncode == 0 and "compiled at first starts: no C compiler" in done.stderr
    off = subprocess.run(command, cwd=ROOT, env={**os.environ, OBJECTS: "0"}, capture_output=True, text=True)
    assert off.returncode == 0 and not off.stderr and not (cache / "compiled").exists()


def test_units_that_are_asked_for_early_are_compiled_once(cache: Path) -> None:
    """A unit whose text changes is abandoned, and so is an unused one: neither could be compiled."""
    with Building(HEADERS) as building:
        building.request({"u0.c": UNITS["u0.c"], "u1.c": "int f( {", "gone.c": "int f( {"})
        early = building.library(UNITS)
    assert early.compiled == 3 and build_library(UNITS, HEADERS).data == early.data
    with pytest.raises(BuildError, match=r"failed to compile bad\.c"), Building(HEADERS) as building:
        building.request({"bad.c": "int f( {"})
        while True:
            building.request({})


def test_damaged_cache_entries_are_compiled_again(cache: Path) -> None:
    first = build_library(UNITS, HEADERS)
    for entry in (cache / "objects").iterdir():
        entry.write_bytes(entry.read_bytes()[:-40] + bytes(40))
    assert build_library(UNITS, HEADERS).compiled == 3
    assert build_library(UNITS, HEADERS).data == first.data


def test_refused_code_shows_the_compilers_words(cache: Path) -> None:
    with pytest.raises(BuildError, match=r"failed to compile bad\.c(.|\n)*error"):
        build_library(UNITS | {"bad.c": "int f( {"}, HEADERS)
    with pytest.raises(BuildError, match="could not link"):
        build_library({"a.c": "int f(void) { return 1; }", "b.c": "int f(void) { return 2; }"}, {})
    assert not [p for p in (cache / "objects").iterdir() if p.name.startswith(".")]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match=r"tried no-such-compiler\n(.|\n)*set CC"):
        find_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("polydyn.build.compilers.wheel_command", tuple)
    with pytest.raises(BuildError, match=r"tried gcc, clang, cc, zig\n(.|\n)*pip install polydyn\[compiler\]"):
        find_compiler()


def test_cc_chooses_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -DX=1")
    assert find_compiler().command == ("gcc", "-DX=1")


@pytest.mark.skipif("avx2" not in machine_features(), reason="needs AVX2")
def test_one_sum_and_several_sums_use_the_same_instruction(tmp_path: Path) -> None:
    """gcc's tuning for Zen would multiply and add in a loop with one sum, so that bits depend on the text around it."""
    sums = "typedef float v __attribute__((vector_size(32)));\nv f(const v *a, const v *b, long n) {\n"
    sums += "v s = {0}; for (long i = 0; i < n; ++i) s += a[i] * b[i]; return s; }\n"
    (tmp_path / "s.c").write_text(sums)
    compiler = find_compiler()
    command = [*compiler.command, *compile_flags(compiler, "cpu:avx2"), "-mtune=znver3", "-S", "-o", "-", "s.c"]
    text = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "vfmadd" in text and "vmulps" not in text


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(BuildError, match="choose one of"):
        build_library(UNITS, HEADERS, "gpu")


def test_features_of_this_machine() -> None:
    compiler = find_compiler()
    assert set(required_features(compiler, "cpu")) <= machine_features()
    assert set(required_features(compiler, "cpu:baseline")) < set(required_features(compiler, "cpu:avx2"))
    assert machine_features("/nowhere") == frozenset()


def test_the_system_says_what_caches_a_core_has(tmp_path: Path) -> None:
    assert data_cache(2, str(tmp_path)) is None
    rows = ("1 Instruction 32K 8", "1 Data 48K 12", "2 Unified 512K 16", "3 Unified much 16")
    for number, row in enumerate(rows):
        (tmp_path / f"index{number}").mkdir()
        for name, text in zip(("level", "type", "size", "ways_of_associativity"), row.split(), strict=True):
            (tmp_path / f"index{number}" / name).write_text(f"{text}\n")
    assert [data_cache(n, str(tmp_path)) for n in (1, 2, 3)] == [(48 << 10, 12), (512 << 10, 16), None]


def test_cores_respect_the_quota_of_a_container(tmp_path: Path) -> None:
    """The quota of its own group or of a group around it, in version 2 (one tree) and 1 (a tree for each controller).
    """
    groups, everything = tmp_path / "groups", len(os.sched_getaffinity(0))
    cases = {"max 100000": everything, "150000 100000": min(2, everything), "1000 100000": 1, "odd": everything}

    def cores() -> int:
        return available_cores(str(groups), str(tmp_path))

    assert cores() == everything, "nothing is known of groups"
    for line, folder in {"0::/a/b": "", "4:cpu,cpuacct:/a/b": "cpu", "7:memory:/\n4:cpuacct,cpu:/": "cpu"}.items():
        groups.write_text(line)
        for group in ("", "a", "a/b") if "a/b" in line else ("",):
            at = tmp_path / folder / group
            at.mkdir(parents=True, exist_ok=True)
            for text, allowed in cases.items():
                if folder:
                    for name, value in zip(("quota", "period"), text.replace("max", "-1").split(), strict=False):
                        (at / f"cpu.cfs_{name}_us").write_text(value)
                else:
                    (at / "cpu.max").write_text(text)
                assert cores() == allowed, (line, group, text)
            for file in at.glob("cpu.*"):
                file.unlink()
    groups.write_text("4:memory:/\n")
    (tmp_path / "cpu.max").write_text("1000 100000")
    assert cores() == everything, "another controller's quota"


def test_an_unwritable_cache_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("POLYDYN_CACHE", str(cache / "file" / "below"))
    with pytest.raises(BuildError, match="set POLYDYN_CACHE"):
        build_library(UNITS, HEADERS)


def test_digest_separates_its_parts() -> None:
    assert digest("ab", "c") != digest("a", "bc") and digest("a") == digest(b"a")


def test_atomic_writes_leave_no_temporary(cache: Path) -> None:
    write_atomically(cache / "x", b"1", b"2")
    with pytest.raises(TypeError):
        write_atomically(cache / "y", b"1", None)  # type: ignore[arg-type]
    assert [p.name for p in cache.iterdir()] == ["x"] and (cache / "x").read_bytes() == b"12"


def test_several_processes_share_the_cache(cache: Path) -> None:
    code = "from polydyn.build.compiler import build_library as b\nb({'a.c': 'int f(void) {return 1;}'}, {})"
    run = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    assert [p.wait() for p in run] == [0, 0, 0]
    assert len(list((cache / "objects").iterdir())) == 2 and FileCache("objects").get("absent") is None


def test_a_model_is_let_go_before_its_program_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has packed constants; the graph's constants would make peak memory a third higher."""
    graphs: list[weakref.ref[Graph]] = []

    def read(*args: object, **options: object) -> Graph:
        graph = import_parts(model([node("MatMul", "x w", "y")], {"x": ("float32", ["M", 8])}, ["y"], {"w": W}))
        graphs.append(weakref.ref(graph))
        return graph

    def build(*_: object) -> NoReturn:
        assert [g() for g in graphs] == [None]
        raise BuildError("far enough")

    monkeypatch.setattr(compiler, "import_parts", read)
    monkeypatch.setattr(compiler, "build_artifact", build)
    gc.disable()  # a cycle around the graph would keep it until a collection
    try:
        with pytest.raises(BuildError, match="far enough"):
            compiler.compile_artifact("a product")
    finally:
        gc.enable()
