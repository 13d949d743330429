"""Which C compiler is used, why, and with which flags; compilers are scripts around the one that is here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from polydyn.build import compilers
from polydyn.build.compiler import build_library
from polydyn.build.compilers import (
    TARGETS,
    alternatives,
    compile_flags,
    find_compiler,
    link_flags,
    required_features,
    understood,
)
from polydyn.build.features import architecture
from polydyn.cli.doctor import findings
from polydyn.errors import BuildError

UNITS = {"f.c": "int f(void) { return 1; }\n", "host.c": "int g(void) { return 2; }\n"}
on_x86 = pytest.mark.skipif(architecture() != "x86_64", reason="flags of x86-64")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "gcc")
    return tmp_path


def script(path: Path, text: str) -> str:
    """Write a program of the shell; it finds the programs that this one finds."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\nPATH='{os.environ['PATH']}'\n{text}\n")
    path.chmod(0o755)
    return str(path)


def zig(path: Path) -> str:
    """Write a compiler that answers as zig does: `zig version`, `zig cc`, and its own names of processors."""
    return script(
        path,
        'if [ "$1" = version ]; then echo 0.17.1; exit; fi\n'
        'shift; case "$*" in *--version) echo clang version 22.1.8; exit;; *x86-64-v*|*=armv8-a*) exit 1;; esac\n'
        "n=$#; while [ $n -gt 0 ]; do a=$1; shift; n=$((n-1))\n"
        "case $a in -mcpu=*) a=;; -march=x86_64_v3) a=-mavx2;; esac\n"
        '[ "$a" ] && set -- "$@" "$a"; done\nexec gcc "$@"',
    )


def test_zig_of_the_wheel_is_used_where_no_other_compiler_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    command = (zig(cache / "wheel" / "zig"), "cc")
    monkeypatch.setattr(compilers, "wheel_command", lambda: command)
    assert find_compiler().command == ("gcc",) and "the first on the path of gcc, clang" in find_compiler().why
    monkeypatch.setenv("PATH", str(cache))
    found = find_compiler()
    assert (found.command, found.kind) == (command, "zig")
    assert found.version == "zig 0.17.1 (clang version 22.1.8)" and "package ziglang; none of gcc" in found.why
    (line,) = (f for f in findings() if f.what == "compiler")
    assert line.ok and "zig 0.17.1 (clang version 22.1.8), of the Python package ziglang; none of gcc" in line.text
    (cache / "bin").mkdir()
    (cache / "bin" / "zig").symlink_to(command[0])
    monkeypatch.setenv("PATH", str(cache / "bin"))
    assert "the first on the path of gcc, clang, cc, zig cc" in find_compiler().why


def test_the_wheel_is_found_without_importing_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compilers.wheel_command() or compilers.wheel_command()[1] == "cc"
    (cache / compilers.WHEEL).mkdir()
    (cache / compilers.WHEEL / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(cache))
    assert compilers.wheel_command() == (), "a package without an executable"
    zig(cache / compilers.WHEEL / "zig")
    assert compilers.wheel_command() == (str(cache / compilers.WHEEL / "zig"), "cc")
    monkeypatch.setattr(compilers, "WHEEL", "no_such_package")
    assert compilers.wheel_command() == ()


def test_cc_may_be_several_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"env {zig(cache / 'zig')} cc")
    found = find_compiler()
    assert found.command == ("env", str(cache / "zig"), "cc") and found.kind == "zig" and found.why == "CC names it"
    assert "-fno-sanitize=undefined" in compile_flags(found, "cpu:baseline", "host.c"), "-Og of zig has a sanitizer"
    assert "-O2" in link_flags(found)


@on_x86
def test_a_compiler_gets_the_flags_that_it_understands(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc = find_compiler()
    monkeypatch.setenv(
        "CC", script(cache / "old", 'case "$*" in *-march=x86-64*|*prefer-vector*) exit 1;; esac; gcc "$@"')
    )
    old = find_compiler()
    for target, last in (
        ("cpu:avx2", "-mmovbe"),
        ("cpu:avx512", "-mavx512vl"),
        ("cpu:amx-emulated", "-DPD_AMX_EMULATED"),
    ):
        assert understood(old, target).flags[-1] == last
        lacks = set(required_features(gcc, target)) - set(required_features(old, target))
        assert lacks <= {"pni", "ssse3", "sse4_1", "sse4_2", "popcnt"} - set(required_features(old, target))
    monkeypatch.setenv("CC", f"{zig(cache / 'zig')} cc")
    assert understood(find_compiler(), "cpu:avx2").flags[-1] == "-march=x86_64_v3"
    assert understood(find_compiler(), "cpu:baseline").flags[-1] == "-mcpu=baseline"


def test_a_compiler_for_another_architecture_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = next(t for t, a in compilers.ARCHITECTURES.items() if a != architecture())
    with pytest.raises(BuildError, match=rf"does not make code for {compilers.architecture_of(other)}|failed"):
        required_features(find_compiler(), other)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(compilers, "wheel_command", lambda: (zig(cache / "z" / "zig"), "cc"))
    monkeypatch.setenv("PATH", str(cache))
    arch = compilers.architecture_of(other)
    assert find_compiler(other).command[1:] == ("cc", "-target", f"{arch}-linux-gnu"), "zig cross-compiles"
    monkeypatch.setenv("CC", f"{cache / 'z' / 'zig'} cc -target {arch}-linux-musl")
    assert find_compiler(other).command[2:] == ("-target", f"{arch}-linux-musl")


def test_a_compiler_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = cache / "log"
    monkeypatch.setenv("CC", script(cache / "cc", f'case "$*" in *-dM*) echo >> {log};; esac; exec gcc "$@"'))

    def asked() -> int:
        understood.cache_clear()  # as another process
        understood(find_compiler(), "cpu:baseline")
        return log.read_text().count("\n")

    assert [asked(), asked()] == [1, 1]
    os.utime(cache / "cc", (1, 1))
    assert asked() == 2, "another compiler of the same name and version"


def test_keys_contain_the_identity_of_the_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_library(UNITS, {}).compiled == 2 and build_library(UNITS, {}).compiled == 0
    monkeypatch.setenv("CC", script(cache / "cc", 'exec gcc "$@"'))
    assert build_library(UNITS, {}).compiled == 2
    os.utime(cache / "cc", (1, 1))
    assert build_library(UNITS, {}).compiled == 2, "an update keeps name and version"


def test_every_target_has_flags() -> None:
    assert all(list(alternatives(t)) for t in TARGETS)
    with pytest.raises(BuildError, match="choose one of"):
        list(alternatives("cpu:avx9"))


def test_the_version_of_gccs_own_executable_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy prints the same text. A script is asked each time, and so is a file that changed."""
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    command = (str(tmp_path / "gcc"),)
    said: list[str] = []

    def counted(words: Sequence[str]) -> str:
        said.append(words[0])
        return f"gcc {len(said)}"

    monkeypatch.setattr(compilers, "_first_line", counted)
    Path(command[0]).write_bytes(compilers.ELF + b"1")
    Path(command[0]).chmod(0o700)
    assert [compilers._version(command) for _ in range(3)] == ["gcc 1"] * 3
    Path(command[0]).write_bytes(compilers.ELF + b"22")
    assert [compilers._version(command) for _ in range(2)] == ["gcc 2"] * 2
    for name, text in (("gcc", b"#!/bin/sh\n"), ("ccache", compilers.ELF)):
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o700)
        before = len(said)
        assert [compilers._version((str(tmp_path / name),)) for _ in range(2)] == [
            f"gcc {before + 1}", f"gcc {before + 2}"
        ]  # fmt: skip
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "gcc" / "cache"))  # not a folder
    assert compilers._version(command) == f"gcc {len(said)}"
