"""EPContext models: a session from compiled programs, without Python, a compiler, or a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.cli import main
from polydyn.errors import UnsupportedError
from polydyn.ort.context_model import context_model
from polydyn.ort.extracting import extract_for_ort
from polydyn.ort.library import FILE_NAME
from tests.support.ort_sessions import NAME, divided, found, layer, plain, rows, session
from tests.support.paths import ROOT


def write_context(m: onnx.ModelProto, path: Path, embed: bool) -> None:
    """Write a context model by ONNX Runtime's own entries."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", str(path))
    options.add_session_config_entry("ep.context_embed_mode", str(int(embed)))
    polydyn.ort.InferenceSession(m.SerializeToString(), options)


@pytest.mark.parametrize("embed", [False, True])
def test_a_context_model_needs_nothing_else(embed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    for name, m in (("whole", layer()), ("parts", divided())):
        write_context(m, tmp_path / "made" / f"{name}.onnx", embed)
    shutil.move(tmp_path / "made", tmp_path / "moved")
    programs = {p.name for p in (tmp_path / "moved").glob("*.ep")}
    files = {"whole_polydyn_0.ep", "parts_polydyn_0.ep", "parts_polydyn_1.ep"}
    assert programs == (set() if embed else files)
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("POLYDYN_ORT_PYTHON", "/none/python")
    for name, m in (("whole", layer()), ("parts", divided())):
        s = session(str(tmp_path / "moved" / f"{name}.onnx"), strict=True)
        for count in (1, 7):
            np.testing.assert_allclose(s.run(None, rows(count))[0], plain(m).run(None, rows(count))[0], rtol=1e-5)
    assert not (tmp_path / "none").exists()


def test_a_program_that_is_absent_or_wrong_is_named(tmp_path: Path) -> None:
    write_context(layer(), tmp_path / "m.onnx", embed=False)
    path = tmp_path / "m_polydyn_0.ep"
    data = path.read_bytes()
    for content, text in (
        (None, "cannot read .*m_polydyn_0.ep: No such file"), (b"x" * 5000, "is not a program of the provider"),
        (data[:8192], "is cut off"), (data.replace(b"\nabi 7\n", b"\nabi 6\n"), "for version 6 of the C interface"),
        (data.replace(b"\nfeatures ", b"\nfeatures none_such,", 1), "features that are missing here: none_such"),
        (data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "is damaged"),
    ):  # fmt: skip
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(Exception, match=text):
            session(str(tmp_path / "m.onnx"))
    path.write_bytes(data)
    outside = onnx.load(tmp_path / "m.onnx")
    next(a for a in outside.graph.node[0].attribute if a.name == "ep_cache_context").s = b"../m_polydyn_0.ep"
    (tmp_path / "in").mkdir()
    onnx.save(outside, tmp_path / "in" / "m.onnx")
    with pytest.raises(Exception, match="a file in the folder of the model"):
        session(str(tmp_path / "in" / "m.onnx"))


def test_a_rejected_call_of_a_context_model_is_an_error(tmp_path: Path) -> None:
    polydyn.compile(layer(), dims={"B": (1, 8)}).save(tmp_path / "m.polydyn")
    done = CliRunner().invoke(main, ["extract", str(tmp_path / "m.polydyn"), "-o", str(tmp_path), "--onnxruntime"])
    assert done.exit_code == 0, done.output
    s = session(str(tmp_path / "m.onnx"))
    np.testing.assert_allclose(s.run(None, rows(8))[0], plain(layer()).run(None, rows(8))[0], rtol=1e-5)
    with pytest.raises(Exception, match="B is at most 8"):
        s.run(None, rows(9))


def test_a_host_in_c_runs_an_extracted_program(tmp_path: Path) -> None:
    """No Python: ONNX Runtime's library, the provider's, and a model, in an empty environment."""
    program = polydyn.compile(layer())
    paths = extract_for_ort(program._artifact, "layer", tmp_path / "out")
    assert [p.name for p in paths] == ["layer.onnx", "layer.ep", FILE_NAME]
    onnx.checker.check_model(str(paths[0]))
    (runtime,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    include = f"-I{ROOT / 'polydyn' / 'ort' / 'c'}"
    strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", include]
    command = ["gcc", *strict, str(ROOT / "tests" / "c" / "run_ort.c"), "-o", "host", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(
        [tmp_path / "host", runtime, paths[2], paths[0]], capture_output=True, text=True, env={}, cwd="/"
    )  # fmt: skip
    expected = []
    for count in (1, 4):
        y = program(x=np.arange(3 * count, dtype="float32").reshape(count, 3))["y"]
        expected.append(f"{count}: " + " ".join(f"{v:g}" for v in y.ravel().tolist()))
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


def test_programs_that_need_python_are_rejected() -> None:
    one = polydyn.compile(found())._artifact
    assert context_model(one, "m", "m.ep").graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.INT64
    for more, text in (({"host": {"inputs": {}}}, "a program with strings"), ({"cuda": {}}, "for a device"),
                       ({"order": [{"kind": "onnxruntime"}]}, "nodes that ONNX Runtime computes")):  # fmt: skip
        changed = type(one)({**one.manifest, **more}, one.sources, one.library, one.weights)
        with pytest.raises(UnsupportedError, match=text):
            context_model(changed, "m", "m.ep")


def test_onnx_runtime_alone_names_the_provider(tmp_path: Path) -> None:
    write_context(layer(), tmp_path / "m.onnx", embed=True)
    with pytest.raises(Exception, match=f"{NAME}|EPContext"):
        plain(onnx.load(tmp_path / "m.onnx"))
    assert os.listdir(tmp_path) == ["m.onnx"]
