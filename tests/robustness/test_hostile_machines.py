"""Machines that are full, read-only, shared or interrupted: named errors, nothing half-written, no crash."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.errors import ArtifactError, BuildError, PolydynError
from polydyn.runtime.artifact import WEIGHTS_OFFSET
from tests.support.marks import slow
from tests.support.paths import ROOT
from tests.support.tiny import model, node

NOBODY = 65534


def small(bias: float = 1.0) -> onnx.ModelProto:
    """Build ``y = relu(x @ w) + bias``; another bias is another program with the same kernels."""
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    nodes = [node("MatMul", "x w", "t"), node("Relu", "t", "r"), node("Add", "r b", "y")]
    return model(nodes, {"x": ("float32", ["B", 3])}, ["y"], {"w": w, "b": np.full(4, bias, np.float32)})


def works(program: Any) -> bool:
    got = program.run({"x": np.ones((2, 3), np.float32)})["y"]
    return bool((got == np.array([12, 15, 18, 21]) + 1).all())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache, and a separate folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache"


def half_written(cache: Path) -> list[str]:
    """Return files that no finished step leaves: temporary files of the cache and everything in the temporary folder.
    """
    left = [p for p in cache.rglob("*") if p.is_file() and p.name.startswith(".")]
    return sorted(map(str, [*left, *(cache.parent / "tmp").iterdir()]))


def in_child(work: Callable[[], str]) -> str:
    """Return the result of ``work``, or its error, from a forked process with separate limits."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = work()
        except BaseException as e:
            answer = f"{type(e).__name__}: {e}"
        os.write(write, answer.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        answer = f.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}: {answer}"
    return answer


# -- no space, no rights -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("limit", [0, slow(100), 3000, slow(9000), 30_000])
def test_a_full_disk_is_named_and_what_was_written_before_it_is_of_use(cache: Path, limit: int, tmp_path: Path) -> None:
    def full() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        polydyn.compile(small(), threads=1)
        return "compiled"

    answer = in_child(full)
    assert answer.startswith("BuildError: ") and "remedy" in answer
    assert not half_written(cache)
    program = polydyn.compile(small(), threads=1)
    assert works(program)

    def save() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        program.save(tmp_path / "saved")
        return "saved"

    answer = in_child(save)
    assert answer.startswith("UnwritableError: cannot write") and "File too large" in answer
    assert not list(tmp_path.glob("*saved*"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not write")
def test_a_cache_that_is_read_only_serves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        os.chmod(shared, 0o755)
        monkeypatch.setenv("POLYDYN_CACHE", f"{shared}/cache")
        polydyn.compile(small(), threads=1, cache=True).save(f"{shared}/p")
        assert works(polydyn.load(f"{shared}/p"))  # also imports modules that the other user may not read
        for path in (Path(shared), *Path(shared).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)

        def somebody(work: Callable[[], Any]) -> str:
            def inside() -> str:
                os.seteuid(NOBODY)
                return str(works(work()))

            return in_child(inside)

        for cache in (False, True):
            assert somebody(lambda cache=cache: polydyn.compile(small(), threads=1, cache=cache)) == "True"
        assert somebody(lambda: polydyn.load(f"{shared}/p", threads=1)) == "True"
        other = model([node("Relu", "x", "y")], {"x": ("float32", ["B", 3])}, ["y"])
        refused = somebody(lambda: polydyn.compile(other, threads=1))
        assert refused.startswith("BuildError") and "set POLYDYN_CACHE" in refused
        saved = somebody(lambda: polydyn.load(f"{shared}/p", threads=1).save(f"{shared}/q"))
        assert saved.startswith("UnwritableError: cannot write")
        monkeypatch.setenv("POLYDYN_CACHE", f"{shared}/other")
        assert somebody(lambda: polydyn.load(f"{shared}/p", threads=1)) == "True"  # its library needs no cache


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("POLYDYN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(BuildError, match=r"(?s)home directory.*set POLYDYN_CACHE"):
        polydyn.compile(small(), threads=1)


def test_no_folder_for_temporary_files_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(cache / "missing"))
    with pytest.raises(BuildError, match=r"(?s)temporary folder.*set TMPDIR"):
        polydyn.compile(small(), threads=1)


def test_paths_through_links_and_of_any_letters_work(cache: Path, tmp_path: Path) -> None:
    real = tmp_path / "größe 张量"
    real.mkdir()
    cache.symlink_to(real)
    (tmp_path / "link").symlink_to(real)
    onnx.save(small(), str(real / "mödel.onnx"))
    program = polydyn.compile(tmp_path / "link" / "mödel.onnx", threads=1)
    program.save(tmp_path / "link" / "prögram")
    assert works(program) and works(polydyn.load(real / "prögram")) and (real / "objects").is_dir()


# -- compilers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["-c", "-shared"])
def test_a_compiler_that_says_it_is_done_but_wrote_nothing_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\ncase " $* " in *" {kind} "*) exit 0;; esac\nexec gcc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(BuildError, match=r"failed to compile|could not link"):
        polydyn.compile(small(), threads=1)
    assert not half_written(cache)


def alive(marker: str) -> list[str]:
    """Return processes that have a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_an_interrupted_compilation_leaves_no_file_and_no_process(cache: Path, tmp_path: Path) -> None:
    marker = f"naps-{os.getpid()}"
    script = tmp_path / "cc"
    script.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" -c "*) echo > "{tmp_path}/started"; sh -c "sleep 60; : {marker}";; esac\n'
        'exec gcc "$@"\n'
    )
    script.chmod(0o755)
    onnx.save(small(), str(tmp_path / "m.onnx"))
    # tests in the background ignore interrupts, and their children would inherit this
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listen}; import polydyn; polydyn.compile({str(tmp_path / 'm.onnx')!r}, threads=1)"
    environment = {**os.environ, "CC": str(script)}
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    try:
        for _ in range(600):
            if (tmp_path / "started").exists() or run.poll() is not None:
                break
            time.sleep(0.05)
        time.sleep(0.1)
        assert alive(marker)
        run.send_signal(signal.SIGINT)
        _, words = run.communicate(timeout=30)
    finally:
        run.kill()
        run.wait()
        run.stderr.close()
    assert "KeyboardInterrupt" in words and run.returncode != 0
    assert not half_written(cache)
    for _ in range(100):
        if not alive(marker):
            break
        time.sleep(0.02)
    assert not alive(marker), "what the compiler had started still runs"
    assert works(polydyn.compile(small(), threads=1))


def test_processes_that_compile_one_model_at_once_do_not_meet(cache: Path, tmp_path: Path) -> None:
    """Both write the same entries; both programs work, and so does one compiled from the resulting cache."""
    onnx.save(small(), str(tmp_path / "m.onnx"))
    code = (
        "import sys, numpy as np, polydyn\n"
        f"p = polydyn.compile({str(tmp_path / 'm.onnx')!r}, threads=1)\n"
        "p.save(sys.argv[1])\n"
        "assert (p.run({'x': np.ones((2, 3), np.float32)})['y'] == [13, 16, 19, 22]).all()\n"
    )
    run = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / f"p{k}")], cwd=ROOT) for k in range(2)
    ]  # fmt: skip
    assert [p.wait(timeout=120) for p in run] == [0, 0]
    assert (tmp_path / "p0").read_bytes() == (tmp_path / "p1").read_bytes()
    assert not half_written(cache)
    again = polydyn.compile(small(), threads=1)
    assert again.compilations == 0 and works(again)


# -- artifacts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "p"
    polydyn.compile(small(), threads=1).save(path)
    return path


def flips(data: bytes) -> Iterator[int]:
    """Yield positions in the first header, the weights, the members, and twice as many in the table of contents."""
    r = np.random.default_rng(0)
    table = data.rindex(b"PK\5\6") if b"PK\5\6" in data else len(data)
    start = int.from_bytes(data[table + 16 : table + 20], "little")
    for low, high, count in ((0, 40, 20), (WEIGHTS_OFFSET, WEIGHTS_OFFSET + 100, 10), (WEIGHTS_OFFSET, start, 60)):
        yield from map(int, r.integers(low, high, count))
    yield from map(int, r.integers(start, len(data), 180))


def test_artifacts_with_flipped_bits_are_refused_or_work_as_before(saved: Path, tmp_path: Path) -> None:
    data, r, path = saved.read_bytes(), np.random.default_rng(1), tmp_path / "p"
    refused = 0
    for at in flips(data):
        bad = bytearray(data)
        bad[at] ^= 1 << int(r.integers(8))
        path.write_bytes(bad)
        try:
            program = polydyn.load(path, threads=1)
        except ArtifactError as e:
            assert e.remedy
            refused += 1
            continue
        assert works(program), f"byte {at}"
    assert refused > 60  # most of the table is the padding that aligns the weights to a page


def test_artifacts_with_bytes_cut_out_or_put_in_are_refused(saved: Path, tmp_path: Path) -> None:
    data, r, path = saved.read_bytes(), np.random.default_rng(2), tmp_path / "p"
    for _ in range(40):
        a, n = (int(i) for i in r.integers(1, (len(data), 300)))
        for bad in (data[:a] + data[a + n :], data[:a] + r.bytes(n) + data[a:], data[a:]):
            path.write_bytes(bad)
            with pytest.raises(ArtifactError):
                polydyn.load(path, threads=1)


def test_what_is_no_file_of_an_artifact_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "loop", "a\0b", "", "x" * 5000, "/dev/null"):
        with pytest.raises(ArtifactError):
            polydyn.load(path)
    with pytest.raises(PolydynError):
        polydyn.load(saved).save(tmp_path)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(tmp_path / "packed", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.comment = old.comment
    with pytest.raises(ArtifactError, match="packed again"):
        polydyn.load(tmp_path / "packed")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_use_what_was_loaded_before(saved: Path) -> None:
    program = polydyn.load(saved, threads=2)
    call = program.bind({"x": np.ones((2, 3), np.float32)})
    assert works(program)

    def child() -> str:
        mine = polydyn.load(saved, threads=2)
        return str(works(program) and works(mine) and bool((call()["y"] == [13, 16, 19, 22]).all()))

    assert [in_child(child) for _ in range(3)] == ["True"] * 3
    assert works(program)
