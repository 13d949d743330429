"""docs/onnxruntime.md: its code runs, and its options are the provider's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from polydyn.ort.settings import NAMES
from tests.support.ort_sessions import NAME, layer
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "onnxruntime.md").read_text()


def test_the_pages_code_runs(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(layer().SerializeToString())
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport numpy; x = numpy.ones((2, 3), numpy.float32)\n"
    code += "\n".join([*blocks, "print(outputs[0].shape, session.get_providers()[0])"])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith(f"(2, 4) {NAME}\n"), done.stderr


def test_the_page_has_every_option() -> None:
    table = PAGE.partition("## Options")[2].partition("## What")[0]
    named = set(re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))
    assert named == {*NAMES} - {"dims"} | {"dim.NAME"}
    source = (ROOT / "polydyn" / "ort" / "c" / "settings.c").read_text()
    assert all(f'"{n}"' in source for n in named - {"dim.NAME"}) and '"dim."' in source
