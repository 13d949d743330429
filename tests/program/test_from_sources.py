"""``polydyn.load(path, trust="sources")``: no machine code of the file runs, and only what polydyn prints is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import polydyn
from polydyn.cli import main
from polydyn.errors import ArtifactError, InputError
from polydyn.runtime.artifact import Artifact, read_artifact, write_artifact
from polydyn.runtime.from_sources import _checked
from tests.support.tiny import model, node

X = np.linspace(-2, 2, 15, dtype=np.float32).reshape(5, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "p.polydyn"
    nodes = [node("MatMul", "x w", "t"), node("Softmax", "t", "s", axis=-1), node("Add", "s z", "y")]
    inputs = {"x": ("float32", ["B", 3]), "z": ("float32", [4])}
    constants = {"w": np.ones((3, 4), np.float32), "z": np.arange(4, dtype=np.float32)}
    m = model(nodes, inputs, ["y"], constants)
    polydyn.compile(m, threads=1).save(path)
    return path


def edited(saved: Path, to: Path, sources: Mapping[str, str] = {}, **fields: object) -> Path:
    """Write the artifact with other sources, sealed by matching hashes."""
    a = read_artifact(saved)
    write_artifact(replace(a, sources={**a.sources, **sources}, **fields), to)  # type: ignore[arg-type]
    return to


def test_machine_code_of_the_file_is_not_used(saved: Path, tmp_path: Path) -> None:
    """The libraries of the program and of its second version, for other initializers, are replaced by other bytes."""
    images = dict(read_artifact(saved).images)
    assert images["overridden/lib.so"][:4] == b"\x7fELF"
    images["overridden/lib.so"] = b"not a library"
    path = edited(saved, tmp_path / "p", library=b"not a library", images=images)
    with pytest.raises((OSError, polydyn.PolydynError)):
        polydyn.load(path)
    program, original = polydyn.load(path, trust="sources", threads=1), polydyn.load(saved, threads=1)
    for feeds in ({"x": X}, {"x": X, "z": np.full(4, 7, np.float32)}):
        np.testing.assert_array_equal(program.run(feeds)["y"], original.run(feeds)["y"])


KERNEL = "void extra(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch) "
HOSTILE = {
    "the function system": 'int system(const char *);\n' + KERNEL + '{ system("true"); }',
    "the function dlopen": KERNEL + '{ dlopen("a", 1); }',
    "the function pd_open": KERNEL + '{ pd_open("a", 0, 0, 0, 0); }',
    "the function vfork": KERNEL + "{ vfork(); }",
    "the function getpid": "int getpid(void);\n" + KERNEL + "{ int (*f)(void) = getpid; f(); }",
    "the function exit": KERNEL + "{ void exit(int x) { } }\nvoid exit(int); void more(int x) { exit(0); }",
    "the function abort": "pd_kernel abort;",
    "the word asm": KERNEL + '{ asm("syscall"); }',
    "the word __asm__": 'void f(void) { __asm__ volatile("nop"); }',
    "an attribute": "__attribute__((constructor)) static void f(void) {}",
    "the word extern": "extern int environ;",
    "the word typedef": "typedef int F(const char *); F system;",
    r"the directive '#include \"/etc/passwd\"'": '#include "/etc/passwd"\n',
    "the directive '#include <stdlib.h>'": "#include <stdlib.h>\n",
    "the directive '#define": "#define if(x) system\n",
    "the directive '# define": "/* a */ # define X\n",
    "the directive '#pragma weak": "#pragma weak f = system\n",
    "characters": "int a;\\\n#include <stdlib.h>\n",
}  # fmt: skip


@pytest.mark.parametrize("reason", HOSTILE)
def test_text_that_polydyn_does_not_print_is_refused_before_it_is_compiled(saved: Path, reason: str) -> None:
    own = {n: t for n, t in read_artifact(saved).sources.items() if "/" not in n}
    _checked(own, "p", "")
    with pytest.raises(ArtifactError, match=f"(?i){reason}"):
        _checked({**own, "kernels_900.c": HOSTILE[reason] + "\n"}, "p", "")


@pytest.mark.parametrize("name", ["pool.c", "internal.h", "pd_math.h", "overridden/pool.c"])
def test_another_run_time_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    text = read_artifact(saved).sources[name]
    path = edited(saved, tmp_path / "p", {name: text + "\n"})
    with pytest.raises(ArtifactError, match=f"sources/{name} is not a file of this polydyn's run time"):
        polydyn.load(path, trust="sources")
    path = edited(saved, tmp_path / "p", {"more.c": "int more;"})
    with pytest.raises(ArtifactError, match=r"sources/more\.c is not a file"):
        polydyn.load(path, trust="sources")


def test_programs_of_parts_and_of_devices_are_refused_by_name(saved: Path, tmp_path: Path) -> None:
    m = model([node("NonZero", "x", "i"), node("Abs", "i", "y")], {"x": ("float32", ["N"])}, ["y"])
    polydyn.compile(m, threads=1).save(tmp_path / "parts")
    with pytest.raises(ArtifactError, match="several parts"):
        polydyn.load(tmp_path / "parts", trust="sources")
    a = read_artifact(saved)
    other = Artifact({**a.manifest, "target": "cuda"}, a.sources, a.library, a.weights, a.images)
    write_artifact(other, tmp_path / "device")
    with pytest.raises(ArtifactError, match="a program for cuda"):
        polydyn.load(tmp_path / "device", trust="sources")
    with pytest.raises(InputError, match="trust is 'all'"):
        polydyn.load(saved, trust="all")


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def session(path: Path, trust: str) -> polydyn.InferenceSession:
    options = polydyn.SessionOptions()
    options.add_session_config_entry("polydyn.trust", trust)
    return polydyn.InferenceSession(path, options, ["CPUExecutionProvider"])


def test_commands_and_sessions_do_not_use_it_either(saved: Path, tmp_path: Path) -> None:
    path = edited(saved, tmp_path / "p.polydyn", library=b"not a library")
    sizes = ("--shape", "B=2")
    commands: dict[str, tuple[object, ...]] = {
        "run": sizes, "inspect": (), "explain": sizes, "profile": sizes, "trace": (*sizes, "-o", tmp_path / "t.json"),
        "compare": (saved, *sizes),
    }  # fmt: skip
    for name, rest in commands.items():
        assert call(name, path, *rest).exit_code == 1, name
        done = call(name, path, *rest, "--trust", "sources")
        assert done.exit_code == 0, done.output
    with pytest.raises((OSError, polydyn.PolydynError)):
        session(path, "code")
    (y,) = session(path, "sources").run(None, {"x": X})
    np.testing.assert_array_equal(y, polydyn.load(saved).run({"x": X})["y"])
    with pytest.raises(InputError, match="trust is 'all'"):
        session(path, "all")


def test_a_model_is_compiled_here_whatever_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model([node("Abs", "x", "y")], {"x": ("float32", ["N"])}, ["y"]).SerializeToString())
    assert call("run", path, "--shape", "N=2", "--trust", "sources").exit_code == 0
    assert session(path, "sources").run(None, {"x": -X[0]})[0].shape == (3,)
    assert call("compile", path, "--trust", "sources").exit_code == 2


def test_dump_runs_no_code_of_the_file(saved: Path, tmp_path: Path) -> None:
    """It writes the texts of all versions of the program, and programs for other machines too."""
    manifest = {**read_artifact(saved).manifest, "architecture": "another"}
    path = edited(saved, tmp_path / "p.polydyn", library=b"not a library", manifest=manifest)
    done = call("dump", path, "-o", tmp_path / "texts", "--json")
    assert done.exit_code == 0, done.output
    assert {"host.c", "overridden/host.c", "manifest.json"} <= {*json.loads(done.output)["files"]}
    assert json.loads((tmp_path / "texts" / "manifest.json").read_text())["architecture"] == "another"
    assert call("dump", path, "-o", tmp_path / "more", "--dim", "B=1:4").exit_code == 1
    assert not (tmp_path / "more").exists()
