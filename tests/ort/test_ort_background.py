"""``compile="background"``: an inner session computes until a process has compiled the graph.

Every test has a folder of programs of its own, because other processes that test share the cache.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import polydyn.ort
from tests.support.ort_sessions import compiling_process, divided, layer, messages, plain, rows, session

LOGGED = 1
"""Level of the log that has the messages about programs."""
SECONDS = 120
"""Maximum seconds until a program takes over; a test that waits as long has failed."""


def other_layer(operator: str) -> onnx.ModelProto:
    """Return a model whose program is not stored yet."""
    m = layer()
    m.graph.node[1].op_type = operator
    return m


def wait_for(text: str, capfd: pytest.CaptureFixture[str], call: Any = lambda: None) -> list[str]:
    """Call until the log has a text; return the messages of polydyn."""
    end, log = time.monotonic() + SECONDS, ""
    while text not in log:
        assert time.monotonic() < end, log
        call()
        time.sleep(0.02)
        log += capfd.readouterr().err
    return messages(log)


def test_calls_are_computed_before_and_after_the_program_takes_over(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    m = other_layer("Sigmoid")
    s, reference = session(m, LOGGED, compile="background", threads=2, cache_dir=tmp_path), plain(m)
    expected = {n: reference.run(None, rows(n))[0] for n in range(1, 9)}

    def call(k: int = 0) -> None:
        np.testing.assert_allclose(s.run(None, rows(1 + k % 8))[0], expected[1 + k % 8], rtol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        said = wait_for("program answers", capfd, lambda: list(pool.map(call, range(8))))
        list(pool.map(call, range(40)))
    assert said[-1].startswith("the compiled program answers, after ")
    assert int(said[-1].split()[-2]) >= 8


def test_a_divided_graph_is_computed_by_polydyn_in_the_end(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The nodes were claimed before they were checked: the inner session is replaced by one with polydyn."""
    m = divided()
    m.graph.node[5].op_type = "Sqrt"
    s, reference = session(m, LOGGED, compile="background", cache_dir=tmp_path), plain(m)
    said = wait_for("computes 2 sets of nodes", capfd, lambda: s.run(None, rows(3)))
    assert said[-1] == "1 nodes stay on ONNX Runtime's kernels; polydyn computes 2 sets of nodes"
    for count in (1, 5):
        np.testing.assert_allclose(s.run(None, rows(count))[0], reference.run(None, rows(count))[0], rtol=1e-5)


def test_a_compiler_that_fails_is_named_and_calls_go_on(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    m = other_layer("Softsign")
    with compiling_process("raise SystemExit('no words')"):
        s = session(m, LOGGED, compile="background", cache_dir=tmp_path)
        said = wait_for("ended without an answer", capfd, lambda: s.run(None, rows(3)))
    assert "no words" in said[-1]
    np.testing.assert_allclose(s.run(None, rows(3))[0], plain(m).run(None, rows(3))[0], rtol=1e-5)


def test_a_session_that_is_closed_stops_the_compiler(tmp_path: Path) -> None:
    """The process is busy when the session ends; it notices the end of the session and stops its work."""
    waiting = (
        "import polydyn.ort.worker as w, time, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def busy(*_):\n"
        "    (folder / 'begun').touch()\n"
        "    try:\n"
        "        time.sleep(100)\n"
        "    finally:\n"
        "        (folder / 'stopped').touch()\n"
        "w.check = busy\n"
        "main()"
    )
    with compiling_process(waiting):
        s = session(other_layer("Softplus"), compile="background", cache_dir=tmp_path)
        end = time.monotonic() + SECONDS
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        s.run(None, rows(3))
        del s
    assert (tmp_path / "stopped").exists()


def test_what_cannot_be_compiled_is_not_tried_again(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An error that would be raised again is stored; the graph then stays with ONNX Runtime without a process."""
    m = other_layer("Elu")
    code = (
        "import polydyn.program_cache as c\nfrom polydyn.errors import UnsupportedError\n"
        "def fail(*_, **__):\n    raise UnsupportedError('no words')\n"
        "c.cached_program = fail\nmain()"
    )
    with compiling_process(code):
        s = session(m, LOGGED, cache_dir=tmp_path)
    before = capfd.readouterr().err
    again = session(m, LOGGED, cache_dir=tmp_path)
    for log in (before, capfd.readouterr().err):
        assert "1 outputs are computed by ONNX Runtime's kernels" in log and "no words" in log
    for made in (s, again):
        np.testing.assert_allclose(made.run(None, rows(3))[0], plain(m).run(None, rows(3))[0], rtol=1e-5)
    (failed,) = tmp_path.glob("*.failed")
    with pytest.raises(Exception, match="no words"):
        session(m, strict=True, cache_dir=tmp_path)
    failed.unlink()
    assert polydyn.ort.get_ep_name() in session(m, strict=True, cache_dir=tmp_path).get_providers()


@pytest.mark.parametrize(
    "damaged", ["polydyn-sets 1 6 2 1\n0 0 0 -1 1 ", "polydyn-sets 1 6 2 1\n0 0 0 -1 1 2\n", "polydyn"]
)
def test_damaged_sets_of_the_cache_are_made_again(
    damaged: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    m = divided()
    session(m, cache_dir=tmp_path)
    (path,) = (p for p in tmp_path.glob("*.sets") if "-sets 1 6 2 1\n" in p.read_text())
    path.write_text(damaged)
    s = session(m, LOGGED, compile="background", cache_dir=tmp_path)
    wait_for("computes 2 sets of nodes", capfd, lambda: s.run(None, rows(3)))
    np.testing.assert_allclose(s.run(None, rows(3))[0], plain(m).run(None, rows(3))[0], rtol=1e-5)
    assert path.read_text().startswith("polydyn-sets 1 6 2 1\n0 0 0 -1 1 1\n")
