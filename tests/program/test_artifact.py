"""Artifacts: save, load, damage, foreign versions and machines, use from C, imports while loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import polydyn
from polydyn.build.compiler import compile_flags, find_compiler
from polydyn.errors import ArtifactError, InputError
from polydyn.program.assemble import build_artifact, build_program, rebuild
from polydyn.runtime import artifact
from polydyn.runtime.artifact import (
    ABI,
    FORMAT,
    WEIGHTS_OFFSET,
    Artifact,
    pack_constants,
    read_artifact,
    write_artifact,
)
from polydyn.runtime.c import UNITS, sources
from polydyn.runtime.mapped import PART
from polydyn.runtime.program import Program
from polydyn.runtime.seal import SEAL, hash_of_parts
from tests.support.paths import ROOT, TESTS
from tests.support.programs import WEIGHTS, example, expected, feeds
from tests.support.tiny import model, node

HERE = TESTS


@pytest.fixture(scope="module")
def built() -> Artifact:
    return build_artifact(example())[0]


@pytest.fixture
def saved(built: Artifact, tmp_path: Path) -> Path:
    path = tmp_path / "example.polydyn"
    write_artifact(built, path)
    return path


def test_saved_and_loaded_programs_agree(saved: Path) -> None:
    program = polydyn.load(saved, threads=2)
    f = feeds(7, 31)
    for name, value in expected(**f).items():
        np.testing.assert_array_equal(program.run(f)[name], value)
    assert program.compilations == 0 and program.inputs == {"x": "float32[B, L]", "y": "float32[B, L]"}
    assert program.symbols == {"B": "axis 0 of input 'x'", "L": "axis 1 of input 'x'"}
    assert program.outputs["total"] == "float32[B]" and program.kernel_count == 3 and len(program.launches) == 4


def test_equal_programs_give_equal_bytes(saved: Path, tmp_path: Path) -> None:
    build_program(example()).save(tmp_path / "again")
    polydyn.load(saved).save(tmp_path / "copy")
    assert saved.read_bytes() == (tmp_path / "again").read_bytes() == (tmp_path / "copy").read_bytes()


def test_weights_are_mapped_from_the_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "MAX_COPIED_BYTES", 0)
    assert saved.read_bytes()[WEIGHTS_OFFSET : WEIGHTS_OFFSET + 16] == WEIGHTS.tobytes()
    weights = read_artifact(saved).weights
    assert not weights.flags.writeable and weights.ctypes.data % 4096 == 0
    saved.unlink()  # a mapped file stays readable
    assert weights[:16].tobytes() == WEIGHTS.tobytes()


def test_a_program_may_be_saved_over_its_own_file(saved: Path) -> None:
    program = polydyn.load(saved)
    program.save(saved)
    f = feeds(2, 2)
    np.testing.assert_array_equal(program.run(f)["w"], polydyn.load(saved).run(f)["w"])


def test_the_artifact_is_a_plain_zip(saved: Path) -> None:
    with zipfile.ZipFile(saved) as z:
        assert z.testzip() is None
        assert {"weights.bin", "manifest.json", "lib.so", "sources/host.c", "sources/polydyn.h"} <= set(z.namelist())


def test_equal_weights_are_stored_once() -> None:
    a = np.arange(100, dtype=np.float32)
    offsets, weights = pack_constants({"a": a, "b": a.copy(), "c": a[::-1], "e": a[:0]})
    assert offsets["a"] == offsets["b"] != offsets["c"] and weights.size == 2 * 448 + SEAL
    assert all(o % 64 == 0 for o in offsets.values())


def test_inputs_by_keyword_and_in_a_mapping(saved: Path) -> None:
    """``run(None, feeds)`` is ONNX Runtime's form."""
    program, given = polydyn.load(saved), feeds(3, 7)
    for got in (program(given), program(**given)):
        assert [a.tobytes() for a in got.values()] == [a.tobytes() for a in program.run(given).values()]
    for wrong in (lambda: program.run(None, given), lambda: program(3), lambda: program.bind([1])):  # type: ignore
        with pytest.raises(TypeError, match="not a mapping") as e:
            wrong()
        assert isinstance(e.value, InputError)
    x = np.zeros((3, 7), np.float32)
    for call in (program.run, program.bind, program.profile, lambda a: program.run(given, out=a)):
        with pytest.raises(TypeError, match="a ndarray, not a mapping"):
            call(x)


def test_refuses_every_truncation(saved: Path) -> None:
    data = saved.read_bytes()
    for size in [0, 1, 30, WEIGHTS_OFFSET - 1, WEIGHTS_OFFSET + 20, len(data) // 2, len(data) - 1]:
        saved.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match="damaged"):
            polydyn.load(saved)


def test_refuses_flipped_bytes(saved: Path) -> None:
    data = saved.read_bytes()
    r = np.random.default_rng(1)
    begin = WEIGHTS_OFFSET + 64
    for at in [begin, len(data) - 1, *r.integers(begin, len(data), 150)]:
        bad = bytearray(data)
        bad[at] ^= 1 << int(r.integers(8))
        saved.write_bytes(bad)
        try:
            loaded = read_artifact(saved)
        except ArtifactError:
            continue
        saved.write_bytes(data)  # the flip hit data without meaning, such as a time stamp
        good = read_artifact(saved)
        assert loaded.manifest == good.manifest and loaded.library == good.library and loaded.sources == good.sources


def test_flipped_weights_are_found(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[WEIGHTS_OFFSET + 3] ^= 1
    saved.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"weights\.bin does not match its hash"):
        polydyn.load(saved)


def test_the_hash_of_the_weights_sees_every_part_and_their_order() -> None:
    data = np.zeros(2 * PART + 5, np.uint8)
    data[3] = 1
    seen = {hash_of_parts(data)}
    for at in (PART - 1, PART, data.size - 1):
        other = data.copy()
        other[at] ^= 1
        seen.add(hash_of_parts(other))
    seen |= {hash_of_parts(np.roll(data, PART)), hash_of_parts(data[:0])}
    assert len(seen) == 6


def test_refuses_what_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file"):
        polydyn.load(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with zipfile.ZipFile(tmp_path / "zip", "w") as z:
        z.writestr("a", "b")
    for name in ("text", "zip"):
        with pytest.raises(ArtifactError, match="not a polydyn artifact"):
            polydyn.load(tmp_path / name)


def test_refuses_foreign_versions_and_machines(built: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "a"
    foreign = {
        "this polydyn reads format": {"format": 99},
        f"with format {FORMAT - 1} and ABI": {"format": FORMAT - 1},
        f"ABI {ABI + 1}": {"abi": ABI + 1},
        "made for riscv": {"architecture": "riscv"},
        "missing here: warp_drive": {"features": ["warp_drive"]},
    }
    for message, fields in foreign.items():
        write_artifact(Artifact(dict(built.manifest) | fields, built.sources, built.library, built.weights), path)
        with pytest.raises(ArtifactError, match=message) as e:
            polydyn.load(path)
        assert e.value.remedy


def test_a_foreign_artifact_is_rebuilt_from_its_sources(built: Artifact, tmp_path: Path) -> None:
    foreign = dict(built.manifest) | {"features": ["warp_drive"]}
    write_artifact(Artifact(foreign, built.sources, b"not for this machine", built.weights), tmp_path / "a")
    rebuild(tmp_path / "a", tmp_path / "b")
    f = feeds(3, 4)
    np.testing.assert_array_equal(polydyn.load(tmp_path / "b").run(f)["total"], expected(**f)["total"])


def test_refuses_to_save_where_it_cannot(built: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot write"):
        write_artifact(built, tmp_path / "no" / "folder")


def test_a_failed_save_leaves_nothing(built: Artifact, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact.os, "replace", full)
    with pytest.raises(ArtifactError, match="No space left"):
        write_artifact(built, saved)
    assert saved.read_bytes() == before and [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_loading_imports_numpy_only(saved: Path) -> None:
    code = (
        "import sys, numpy as np, polydyn\n"
        f"p = polydyn.load({str(saved)!r}, threads=1)\n"
        "p.run({n: np.ones((2, 3), np.float32) for n in 'xy'})\n"
        "bad = {'islpy', 'sympy', 'onnx', 'networkx', 'scipy'} & set(sys.modules)\n"
        "above = ('polydyn.graph', 'polydyn.codegen', 'polydyn.build.compiler')\n"
        "bad |= {m for m in sys.modules if m.startswith(above)}\n"
        "assert not bad, bad\n"
    )
    environment = dict(os.environ, PATH="")  # nor is a compiler needed
    subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, env=environment, check=True)


def test_c_programs_run_an_artifact(saved: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(saved) as z:
        (tmp_path / "lib.so").write_bytes(z.read("lib.so"))
        (tmp_path / "polydyn.h").write_bytes(z.read("sources/polydyn.h"))
    program = tmp_path / "run_artifact"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}"]
    command = [*find_compiler().command, *flags, str(HERE / "c" / "run_artifact.c"), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    done = subprocess.run([program, tmp_path / "lib.so", saved, "3", "5"], capture_output=True, text=True, check=True)
    i, j = np.mgrid[:3, :5].astype(np.float32)
    total = " ".join(f"{t:g}" for t in expected(i + j, i * j)["total"])
    assert done.stdout == f"total[B] scaled[B, L] w[4] {total} 4\n"
    saved.write_bytes(saved.read_bytes()[:4100])
    done = subprocess.run([program, tmp_path / "lib.so", saved, "3", "5"], capture_output=True, text=True)
    assert done.returncode == 2 and "truncated" in done.stderr


@pytest.mark.parametrize("place", ["cpu", "parts"])
def test_the_runtime_compiles_without_warnings(place: str, tmp_path: Path) -> None:
    for name, text in sources(place).items():
        (tmp_path / name).write_text(text)
    for unit in UNITS[place]:
        command = [*find_compiler().command, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c", unit]
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "h.c").write_text('#include "polydyn.h"\n')
    strict = [*find_compiler().command, "-std=c99", "-pedantic", "-Werror", "-c", "h.c"]
    subprocess.run(strict, cwd=tmp_path, check=True)


def test_every_c_file_of_the_runtime_belongs_to_a_unit() -> None:
    files = {f for units in UNITS.values() for parts in units.values() for f in parts}
    assert files == {p.name for p in (ROOT / "polydyn" / "runtime" / "c").glob("*.c")}


@pytest.mark.skipif(not find_compiler().version.startswith("gcc"), reason="asks gcc which loops it vectorizes")
def test_the_loops_of_host_steps_are_vectorized(tmp_path: Path) -> None:
    """Without vectors suppression takes 4 to 8 times as long, with equal results."""
    for name, text in sources("parts").items():
        (tmp_path / name).write_text(text)
    compiler = find_compiler()
    flags = compile_flags(compiler, "cpu:baseline", "host_steps.c")
    command = [*compiler.command, *flags, "-fopt-info-vec", "-c", "host_steps.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "loop vectorized" in done.stderr


def test_the_library_exports_the_abi_only(built: Artifact, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(built.library)
    listed = subprocess.check_output(["nm", "-D", "--defined-only", tmp_path / "lib.so"], text=True)
    names = {line.split()[-1] for line in listed.splitlines()}
    assert all(n.startswith("pd_") for n in names) and "pd_run" in names and "pd_pool_run" not in names


def test_a_damaged_cached_library_is_replaced(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "lib").mkdir(parents=True)
    name = json.loads(zipfile.ZipFile(saved).read("manifest.json"))["sha256"]["lib.so"]
    (tmp_path / "cache" / "lib" / f"{name}.so").write_bytes(b"garbage")
    program: Program = polydyn.load(saved)
    with pytest.raises(InputError):
        program.run({})


def test_a_saved_program_remembers_its_threads(tmp_path: Path) -> None:
    """An opened program uses the number of threads it was compiled with, unless ``load`` names another; else all cores.
    """
    made = model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"])
    for threads in (3, None):
        polydyn.compile(made, threads=threads).save(tmp_path / "a.polydyn")
        assert polydyn.load(tmp_path / "a.polydyn").threads == (threads or polydyn.compile(made).threads)
        assert polydyn.load(tmp_path / "a.polydyn", threads=5).threads == 5
    polydyn.load(tmp_path / "a.polydyn", threads=5).save(tmp_path / "b.polydyn")
    assert polydyn.load(tmp_path / "b.polydyn").threads == 5
    polydyn.load(tmp_path / "b.polydyn").save(tmp_path / "c.polydyn", with_threads=False)
    assert (tmp_path / "c.polydyn").read_bytes() == (tmp_path / "a.polydyn").read_bytes()
