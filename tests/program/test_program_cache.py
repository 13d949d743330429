"""The program cache of ``polydyn.compile``: stored programs answer like new ones, and others are compiled again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn import compiler, program_key
from polydyn.build.cache import FileCache, cache_dir
from polydyn.cli import main
from polydyn.errors import DebugError, FallbackWarning, ModelError, PolydynError, ShapeError
from polydyn.program_cache import compile as compile_cached
from polydyn.runtime.program import Program
from tests.support.tiny import model, node

F = "float32"
X = np.arange(12, dtype=F).reshape(4, 3)


@pytest.fixture(autouse=True)
def unobserved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test an empty cache of programs, next to the objects of the others."""
    for name in ("POLYDYN_VERIFY", "POLYDYN_DEBUG", "POLYDYN_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    objects, own = cache_dir("objects"), tmp_path / "cache"
    own.mkdir()
    (own / "objects").symlink_to(objects)
    monkeypatch.setenv("POLYDYN_CACHE", str(own))


def total() -> onnx.ModelProto:
    """Build a sum, with an assumption about sizes and so a second version."""
    nodes = [node("Add", "x b", "q"), node("Mul", "q v", "p"), node("ReduceSum", "p", "y")]
    return model(nodes, {"x": (F, ["N", 3]), "b": (F, ["M", 3])}, ["y"], {"v": np.array([1, 2, 4], F)})


def pooled() -> onnx.ModelProto:
    """Build MaxRoiPool, which ONNX Runtime runs, between two compiled parts."""
    nodes = [node("Mul", "x x", "q"), node("MaxRoiPool", "q rois", "p", pooled_shape=[2, 3]), node("Exp", "p", "y")]
    return model(nodes, {"x": (F, ["N", 3, "H", "W"]), "rois": (F, ["R", 5])}, ["y"])


def free() -> onnx.ModelProto:
    """Build a product with an initializer that calls may override."""
    m = model([node("Mul", "x w", "y")], {"x": (F, ["N", 3])}, ["y"], {"w": np.array([1, 2, 3], F)})
    m.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [3]))
    return m


def answers(program: Program, dims: dict[str, int], feeds: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return everything that a program reports about itself, and its saved bytes."""
    program.save(path)
    manifest = {n: x for n, x in program.manifest.items() if n not in ("weights", "sha256", "format", "abi")}
    out: dict[str, Any] = {
        n: getattr(program, n)
        for n in ("inputs", "outputs", "symbols", "guards", "launches", "steps", "appendable", "kernel_count",
                  "weight_bytes", "threads")
    }  # fmt: skip
    return out | {
        "manifest": json.dumps(manifest, sort_keys=True), "sources": dict(program.sources),
        "explain": program.explain(**dims).details(), "bodies": {n: b.launches for n, b in program.bodies.items()},
        "optional": program.arguments("optional"), "saved": path.read_bytes(),
        "results": {n: a.tobytes() for n, a in program.run(feeds).items()},
        "profile": [(t.label, t.kernel, t.flops, t.bytes) for t in program.profile(feeds, repeats=1)],
        "general": program.general is not None and program.general.launches,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("build", "options", "dims", "feeds"),
    [
        (total, polydyn.Options(), {"N": 4, "M": 4}, {"x": X, "b": np.ones((4, 3), F)}),
        (free, polydyn.Options(), {"N": 4}, {"x": X}),
        (pooled, polydyn.Options(fallback="onnxruntime"), {"N": 1, "H": 5, "W": 6, "R": 1},
         {"x": np.ones((1, 3, 5, 6), F), "rois": np.array([[0, 1, 1, 3, 3]], F)}),
    ],
)  # fmt: skip
def test_a_stored_program_answers_every_question_like_a_new_one(
    build: Callable[[], onnx.ModelProto], options: polydyn.Options, dims: dict[str, int], feeds: dict[str, Any],
    tmp_path: Path, recwarn: pytest.WarningsRecorder,
) -> None:  # fmt: skip
    new, stored = (compile_cached(build(), threads=1, options=options) for _ in range(2))
    warned = [str(w.message) for w in recwarn if w.category is FallbackWarning]
    assert warned[: len(warned) // 2] == warned[len(warned) // 2 :] and bool(warned) == (build is pooled)
    assert stored.compilations == stored.counters["compilations"] == 0
    expected, got = (answers(p, dims, feeds, tmp_path / "p") for p in (new, stored))
    assert got.keys() == expected.keys()
    for question, answer in expected.items():
        assert got[question] == answer, question


def test_the_time_of_a_compilation_is_divided_among_its_parts() -> None:
    begin = time.perf_counter()
    program = polydyn.compile(total())
    passed, timing = time.perf_counter() - begin, program.timing
    assert timing is not None and 0.9 * passed < timing.seconds <= passed
    sections = {s.name: s for s in timing.sections}
    for name in ("import of the model", "proofs", "solving", "loops by isl", "passes over the loop IR", "printing",
                 "pass tidy", "host plan", "opening"):  # fmt: skip
        assert sections[name].count >= 1 and sections[name].seconds > 0, name
    assert json.loads(json.dumps(timing.to_json()))["seconds"] == timing.seconds
    kernels = {k["name"] for k in program.manifest["kernels"]}
    for u in timing.units:  # none, if a run before compiled them; both versions have a unit of that name
        assert u.processor > 0 and (not u.lines or kernels & set(u.lines)) and all(n > 0 for n in u.lines.values())
    assert timing.is_compilation
    stored = [compile_cached(free()).timing for _ in range(2)][1]
    assert stored is not None and not stored.is_compilation and {s.name for s in stored.sections} == {
        "the rest", "key of the program", "opening a stored program",
    }  # fmt: skip


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile every model to one program, and return the list of compiled models."""
    program, models = polydyn.compile(free()), []

    def counted(m: Any, **_: Any) -> Program:
        models.append(m)
        return program

    monkeypatch.setattr(compiler, "compile", counted)
    return models


def test_only_equal_models_and_arguments_share_a_program(compiled: list[Any], tmp_path: Path) -> None:
    path, data = tmp_path / "m.onnx", free().SerializeToString(deterministic=True)
    path.write_bytes(data)
    for m in (path, str(path), data, free()):
        assert compile_cached(m, threads=2).threads == 2
        assert len(compiled) == 1
    others: list[dict[str, Any]] = [
        {"dims": {"N": (1, 8)}}, {"dims": {"N": polydyn.Sizes(1, 8, likely=(4,))}}, {"target": "cpu:avx2"},
        {"options": polydyn.Options(without={"stitch"})}, {"symbols": {"x": ("N", None)}},
    ]  # fmt: skip
    for k, other in enumerate(others):
        for _ in range(2):
            compile_cached(path, **other)
        assert len(compiled) == k + 2, other
    compile_cached(path, dims={"N": polydyn.Sizes(1, 8)}, options=polydyn.Options())
    assert len(compiled) == len(others) + 1
    path.write_bytes(data + b"\x9a\x06\x00")  # an unknown field
    compile_cached(path)
    assert len(compiled) == len(others) + 2


def test_without_the_cache_and_when_watched_a_model_is_compiled(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_cached(free())
    compile_cached(free(), cache=False)
    assert len(compiled) == 2
    for k, (name, value) in enumerate(
        {"POLYDYN_VERIFY": "1", "POLYDYN_DEBUG": "1", "POLYDYN_DUMP_DIR": str(tmp_path)}.items()
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            compile_cached(free())
        assert len(compiled) == 3 + k, name
    monkeypatch.setenv("POLYDYN_VERIFY", "x")
    with pytest.raises(DebugError, match="unset POLYDYN_VERIFY"):
        compile_cached(free())


def test_sources_that_changed_since_the_import_are_not_trusted(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polydyn, "IMPORTED_NS", 0)
    for k in range(2):
        compile_cached(free())
        assert len(compiled) == k + 1
    assert not list(cache_dir("programs").iterdir())


def test_a_damaged_program_is_compiled_again(compiled: list[Any]) -> None:
    compile_cached(free())
    (file,) = cache_dir("programs").iterdir()
    data = file.read_bytes()
    for damage in (b"", data[:1000], data[:-2000] + bytes(2000)):
        before = len(compiled)
        file.write_bytes(damage)
        compile_cached(free())
        assert len(compiled) == before + 1 and file.read_bytes() == data


def test_a_cache_that_cannot_be_written_is_no_error(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    programs = cache_dir("programs")
    programs.rmdir()
    programs.write_text("")
    for k in range(2):
        compile_cached(free())
        assert len(compiled) == k + 1
    programs.unlink()
    monkeypatch.setenv("POLYDYN_CACHE_LIMIT", "10")  # the constants fill more than half of it
    compile_cached(free())
    assert not any(programs.iterdir())


def test_a_model_that_changes_while_it_is_compiled_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, program = tmp_path / "m.onnx", polydyn.compile(free())
    path.write_bytes(free().SerializeToString())

    def slow_compile(_: Any, **__: Any) -> Program:
        path.write_bytes(total().SerializeToString())
        return program

    monkeypatch.setattr(compiler, "compile", slow_compile)
    assert compile_cached(path) is program
    assert not cache_dir("programs").exists() or not list(cache_dir("programs").iterdir())


@pytest.mark.parametrize(
    ("wrong", "arguments", "error"),
    [
        (5, {}, PolydynError), ("missing.onnx", {}, ModelError), (b"no model", {}, ModelError),
        (None, {"dims": {"N": (3, 2)}}, ShapeError), (None, {"dims": {"N": 3}}, ShapeError),
        (None, {"symbols": {"z": ("N",)}}, PolydynError), (None, {"records": "missing.db"}, PolydynError),
        (None, {"target": "cpu:none"}, PolydynError), (None, {"threads": 0}, PolydynError),
    ],
)  # fmt: skip
def test_errors_are_those_of_the_compiler(wrong: Any, arguments: dict[str, Any], error: type[Exception]) -> None:
    m = free() if wrong is None else wrong
    with pytest.raises(error) as fresh:
        polydyn.compile(m, **arguments)
    with pytest.raises(error) as cached:
        compile_cached(m, **arguments)
    assert str(cached.value) == str(fresh.value)


def test_a_stored_program_opens_without_the_compiler(tmp_path: Path) -> None:
    """A time would depend on the machine; what is imported does not."""
    path = tmp_path / "m.onnx"
    path.write_bytes(free().SerializeToString())
    compile_cached(str(path))
    text = f"""
import sys, polydyn
program = polydyn.compile({str(path)!r})
session = polydyn.InferenceSession({str(path)!r})
assert program.compilations == session.program.compilations == 0
modules = [m for m in sys.modules if m.partition(".")[0] in ("onnx", "islpy", "sqlite3", "tempfile", "statistics")]
passes = [m for m in sys.modules if m.startswith(("polydyn.compiler", "polydyn.fusion", "polydyn.graph."))]
print(modules, passes)
"""
    for _ in range(2):  # the first process may store the hash of polydyn's own files
        run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert run.stdout == "[] ['polydyn.graph.data_files']\n", run.stderr  # which finds the files that the key covers


def test_the_command_line_takes_stored_programs(compiled: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(free(), str(path))
    for k, arguments in enumerate((["--json"], ["--no-cache", "--timing"])):
        done = CliRunner().invoke(main, ["compile", str(path), "-o", str(tmp_path / "p"), *arguments])
        assert done.exit_code == 0 and len(compiled) == k + 1
        assert done.output.startswith("section ") == (k == 1)
    assert CliRunner().invoke(main, ["explain", str(path), "--shape", "N=4"]).exit_code == 0
    assert CliRunner().invoke(main, ["run", str(path), "--shape", "N=4"]).exit_code == 0
    assert len(compiled) == 2


@pytest.mark.slow
def test_processes_compile_and_open_one_model_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(total(), str(path))
    text = f"import polydyn; print(polydyn.compile({str(path)!r}).kernel_count)"
    processes = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({p.communicate()[0] for p in processes}) == 1 and not any(p.returncode for p in processes)
    assert len(list(cache_dir("programs").iterdir())) == 1


def test_a_changed_source_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its size and time of modification are as before, and the cache keeps the hash of the old state."""
    monkeypatch.setattr(program_key, "SETTLED_NS", -1)
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(program_key, "Path", lambda _: tmp_path / "__init__.py")
    source = tmp_path / "a.py"
    found = []
    for text in ("a = 1", "a = 2", "a = 2"):
        source.write_text(text)
        os.utime(source, ns=(10**18, 10**18))
        time.sleep(0.02)  # the resolution of times of files
        program_key._sources.cache_clear()
        found.append(program_key._sources()[0])
    program_key._sources.cache_clear()
    assert found[0] != found[1] == found[2]
    assert len([*(tmp_path / "cache" / "sources").iterdir()]) == 3


def test_the_hash_of_sources_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_key, "SETTLED_NS", -1)
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(program_key, "Path", lambda _: tmp_path / "__init__.py")
    (tmp_path / "a.py").write_text("a = 1")
    program_key._sources.cache_clear()
    right = program_key._sources()[0]
    (file,) = (tmp_path / "cache" / "sources").iterdir()
    FileCache("sources").put(file.name, b"f" * 64)
    program_key._sources.cache_clear()
    assert program_key._sources()[0] == "f" * 64
    file.write_bytes(b"?" * 96)  # damaged
    program_key._sources.cache_clear()
    assert program_key._sources()[0] == right
    program_key._sources.cache_clear()
