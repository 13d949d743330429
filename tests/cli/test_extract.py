"""``polydyn extract`` and docs/c.md: the page's programs, compiled and run without Python."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.build.cache import library_file
from polydyn.cli import main
from polydyn.runtime.artifact import WEIGHTS_OFFSET, read_artifact
from polydyn.runtime.seal import TEXT
from tests.support.paths import ROOT
from tests.support.stored import path_of
from tests.support.tiny import model, node

PAGE = (ROOT / "docs" / "c.md").read_text()


def block(language: str) -> str:
    """Return the page's first block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the page's commands in a separate folder."""
    made = tmp_path_factory.mktemp("embedded")
    polydyn.compile(path_of("bert_tiny")).save(made / "bert_tiny.polydyn")
    done = CliRunner().invoke(main, ["extract", str(made / "bert_tiny.polydyn"), "-o", str(made / "bert")])
    assert done.exit_code == 0, done.output
    said = [line.removeprefix(f"{made}/") for line in done.output.replace("\n/", "\0/").replace("\n", "").split("\0")]
    assert said == re.findall(r"^bert/.*$", block("console"), re.MULTILINE)
    return made


def first_value(folder: Path, length: int) -> float:
    program = polydyn.load(folder / "bert_tiny.polydyn")
    ones = np.ones((4, length), np.int64)
    return float(program.run({"input_ids": ones, "attention_mask": ones})["last_hidden_state"].ravel()[0])


def test_the_pages_cpp_program_runs(folder: Path) -> None:
    (folder / "embed.cpp").write_text(block("cpp"))
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Ibert/include"]
    subprocess.run(["g++", *flags, "embed.cpp", "-o", "embed", "-ldl"], cwd=folder, check=True)
    lines = subprocess.run(["./embed"], cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines()
    expected = [f"last_hidden_state [B, L, 32] {first_value(folder, n):g}" for n in (1, 61, 128)]
    assert lines == [*expected, "the program has 2 inputs, the call 0"]


def test_the_pages_c_program_runs(folder: Path) -> None:
    (folder / "ids.c").write_text(block("c"))
    link = ["-Lbert/lib", "-lbert_tiny", "-Wl,-rpath,bert/lib"]
    strict = ["-std=gnu11", "-Wall", "-Wextra", "-Wno-comma", "-Ibert/include"]
    subprocess.run(["gcc", *strict, "ids.c", "-o", "ids", *link], cwd=folder, check=True)
    said = subprocess.run(["./ids"], cwd=folder, check=True, capture_output=True, text=True).stdout
    assert said == "1 x 3 x 32\n"


FOUND = """
#include <cstdio>
#include "polydyn.hpp"
int main() {
    polydyn::Program program("out/lib/libfound.so", "out/found.polydyn");
    polydyn::Context context(program);
    for (float least : {1.0f, 9.0f, 0.0f}) {
        const float x[] = {1, 2, least};
        std::printf("%ld ", (long)context.shapes({{x, {1, 3}}})[0][1]);
        auto out = context.run({{x, {1, 3}}});
        std::printf("%ld:", (long)out[0].shape()[1]);
        for (int64_t k = 0; k < out[0].size(); k++) std::printf(" %ld", (long)out[0].as<int64_t>()[k]);
        std::puts("");
    }
}
"""


def test_a_size_that_data_decide_is_known_behind_a_run(tmp_path: Path) -> None:
    found = model([node("NonZero", "x", "i")], {"x": ("float32", ["H", "W"])}, ["i"])
    polydyn.compile(found).save(tmp_path / "found.polydyn")
    done = CliRunner().invoke(main, ["extract", str(tmp_path / "found.polydyn"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    (tmp_path / "found.cpp").write_text(FOUND)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Iout/include"]
    subprocess.run(["g++", *flags, "found.cpp", "-o", "found", "-ldl"], cwd=tmp_path, check=True)
    lines = subprocess.run(["./found"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines == ["-1 3: 0 0 0 0 1 2", "-1 3: 0 0 0 0 1 2", "-1 2: 0 0 0 1"]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_cmake_finds_the_package(folder: Path) -> None:
    (folder / "embed.cpp").write_text(block("cpp"))
    (folder / "CMakeLists.txt").write_text(block("cmake"))
    for command in (["cmake", "-S", ".", "-B", "built"], ["cmake", "--build", "built"]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    assert subprocess.run(["built/embed"], cwd=folder, check=True, capture_output=True).stdout


MISUSES = """
#include <cstdio>
#include "polydyn.hpp"
template <class F> void said(F call) {
    try { call(); std::puts("nothing"); } catch (const polydyn::Error &e) { std::puts(e.what()); }
}
int main() {
    said([] { polydyn::Program("missing.so", "bert/bert_tiny.polydyn"); });
    said([] { polydyn::Program("bert/lib/libbert_tiny.so", "missing.polydyn"); });
    polydyn::Program program("bert/lib/libbert_tiny.so", "bert/bert_tiny.polydyn");
    said([&] { polydyn::Context(program, 0); });
    polydyn::Context context(program);
    program.verify_weights();
    std::vector<int64_t> ids(6, 1);
    std::vector<float> floats(6, 1);
    said([&] { context.run({{ids.data(), {2, 3}}, {ids.data(), {3, 2}}}); });
    said([&] { context.run({{ids.data(), {2, 3}}, {floats.data(), {2, 3}}}); });
    said([&] { context.run({{ids.data(), {2, 3}, {24}}, {ids.data(), {2, 3}}}); });
    auto out = context.run({{ids.data(), {0, 3}}, {ids.data(), {0, 3}}});
    std::printf("%ld\\n", (long)out[0].size());
    said([&] { (void)out[0].as<int64_t>(); });
    polydyn::Context other(program, 2);
    auto again = other.run({{ids.data(), {3, 2}, {8, 24}}, {ids.data(), {3, 2}}});
    std::printf("%ld\\n", (long)again[0].size());
}
"""


def test_misuse_is_an_exception_with_the_reason(folder: Path) -> None:
    (folder / "misuse.cpp").write_text(MISUSES)
    flags = ["-std=c++17", "-g", "-fsanitize=undefined", "-Ibert/include"]
    subprocess.run(["g++", *flags, "misuse.cpp", "-o", "misuse", "-ldl"], cwd=folder, check=True)
    lines = subprocess.run(["./misuse"], cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines()
    text = "\n".join(lines)
    parts = [
        "missing.so: ", "missing.polydyn", "threads", "both called B", "'attention_mask' is float32",
        "a stride for every axis", "\n0\n", "the tensor has element type 2, not 7", f"\n{3 * 2 * 32}",
    ]  # fmt: skip
    at = [text.find(p) for p in parts]
    assert at == sorted(at) and at[0] >= 0, text


def test_foreign_and_damaged_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    """A library opens the weights it was compiled for only, and finds a changed byte on request, parts included."""
    artifact, other = folder / "bert_tiny.polydyn", tmp_path / "other.polydyn"
    polydyn.compile(model([node("NonZero", "x", "i")], {"x": ("float32", ["N"])}, ["i"])).save(other)
    assert opened(artifact, artifact) == opened(other, other) == "whole"
    assert "does not contain the weights of this library" in opened(artifact, other)
    assert "no weights of a program of several parts" in opened(other, artifact)
    for path in (artifact, other):
        bad, offset = tmp_path / f"bad {path.name}", WEIGHTS_OFFSET + 64 + 40
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        bad.write_bytes(data)
        assert "they do not match their digest" in opened(path, bad)
    size = 64 + read_artifact(artifact).weights.size
    data[WEIGHTS_OFFSET : WEIGHTS_OFFSET + size] = artifact.read_bytes()[WEIGHTS_OFFSET : WEIGHTS_OFFSET + size]
    seal = data.find(TEXT, WEIGHTS_OFFSET)
    data[seal + len(TEXT)] ^= 1
    bad.write_bytes(data)
    assert "contains the weights of another program than this library" in opened(artifact, bad)


def opened(library: Path, weights: Path) -> str:
    """Open an artifact's library with an artifact's weights, and verify them. Return the error, or "whole"."""
    lib, program = ctypes.CDLL(str(library_file(read_artifact(library).library))), ctypes.c_void_p()
    lib.pd_error.restype = ctypes.c_char_p
    lib.pd_weight_bytes.restype = ctypes.c_int64
    size = ctypes.c_int64(lib.pd_weight_bytes(None))
    code = lib.pd_open(str(weights).encode(), None, ctypes.c_int64(WEIGHTS_OFFSET), size, ctypes.byref(program))
    code = code or lib.pd_verify_weights(program)
    said = lib.pd_error().decode() if code else "whole"
    if program:
        lib.pd_close(program)
    return str(said)


def test_neither_a_file_nor_memory_is_an_error(folder: Path) -> None:
    lib, program = ctypes.CDLL(str(folder / "bert/lib/libbert_tiny.so")), ctypes.c_void_p()
    lib.pd_error.restype, lib.pd_weight_bytes.restype = ctypes.c_char_p, ctypes.c_int64
    size = ctypes.c_int64(lib.pd_weight_bytes(None))
    assert lib.pd_open(None, None, ctypes.c_int64(0), size, ctypes.byref(program)) and not program
    assert "neither a file nor memory" in lib.pd_error().decode()


def test_a_file_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.polydyn").write_bytes(b"nothing")
    done = CliRunner().invoke(main, ["extract", str(tmp_path / "x.polydyn"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 1 and "not a polydyn artifact" in done.output and not (tmp_path / "out").exists()
