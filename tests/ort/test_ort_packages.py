"""The distribution with the conventional names, the report of ``polydyn doctor``, and a library in a clean process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
from click.testing import CliRunner

import polydyn
import polydyn.ort
from polydyn.cli import main
from polydyn.ort import report
from tests.support.ort_sessions import NAME, layer, session
from tests.support.paths import ROOT

FOLDER = ROOT / "packaging" / "onnxruntime-ep-polydyn"


def test_the_distribution_has_the_conventional_names(tmp_path: Path) -> None:
    """Its library, registered by ONNX Runtime's own function, compiles with the Python of the process."""
    text = (FOLDER / "pyproject.toml").read_text()
    assert f'version = "{polydyn.__version__}"' in text and f"polydyn>={polydyn.__version__}" in text
    (tmp_path / "m.onnx").write_bytes(layer().SerializeToString())
    readme = re.search(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    assert readme
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(FOLDER)!r}]\n" + readme[1].replace("model.onnx", "m.onnx")
    code += "print(session.get_providers()[0], ep.get_ep_names())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{NAME} ['{NAME}']\n", done.stderr


def test_every_session_of_a_process_may_use_the_provider(tmp_path: Path) -> None:
    """Code of others stays unchanged: it opens sessions for the CPU, with one object of options for two of them."""
    (tmp_path / "m.onnx").write_bytes(layer().SerializeToString())
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import polydyn.ort; polydyn.ort.install(strict=True)
import onnxruntime as ort
options = ort.SessionOptions()
one = ort.InferenceSession("m.onnx", sess_options=options, providers=["CPUExecutionProvider"])
two = ort.InferenceSession("m.onnx", options, ["CPUExecutionProvider"])
three = ort.InferenceSession("m.onnx", providers=["Unknown"])
print([s.get_providers()[0] for s in (one, two, three)], isinstance(one, ort.InferenceSession))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith(f"['{NAME}', '{NAME}', 'CPUExecutionProvider'] True\n"), done.stderr


def test_doctor_says_what_sessions_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session(layer(), exclude="Tanh", min_nodes=1, cache_dir=tmp_path / "ort")
    monkeypatch.setattr(report, "cache_root", lambda: tmp_path)
    said = CliRunner().invoke(main, ["doctor"], terminal_width=1000).output.replace("\n", "")
    assert f"provider: onnxruntime {onnxruntime.__version__}, " in said
    assert "computes 2 of 3 nodes in 2 sets" in said and "Tanh_b (Tanh): the option exclude names it" in said
    monkeypatch.setattr(report, "version", lambda _: "1.20.0")
    text, ok, absent = report.state_or_error()
    assert ok and absent and "ONNX Runtime 1.20.0 has no plugin interface" in text


def test_the_module_is_there_without_an_import() -> None:
    code = "import polydyn, sys; polydyn.ort.get_ep_name(); print({'onnx', 'onnxruntime'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
