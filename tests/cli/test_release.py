"""What is released installs in clean environments and passes docs/quickstart.md there: ``make release-test``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.packages import build_wheel, copy_sources
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def interpreter(version: str) -> str:
    """The command of an interpreter of this version; skips where there is none."""
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for command in (f"python{version}", *map(str, homes)):
        found = shutil.which(command)
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    pytest.skip(f"Python {version} is not installed")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(to)!r})"
    source = copy_sources(to / "source")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source, capture_output=True)
    (made,) = to.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_sources(to / "source"), to)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_passes_the_quickstart(version: str, wheel: Path, tmp_path: Path) -> None:
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
    text = (ROOT / "docs" / "quickstart.md").read_text()
    (tmp_path / "quick.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    environment = {"PATH": os.environ["PATH"], "POLYDYN_CACHE": str(tmp_path / "cache")}  # neither PYTHONPATH nor home
    for command in ([python, "-W", "error", "quick.py"], [python.with_name("polydyn"), "doctor"]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f", Python {version}" in done.stdout


def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    (tmp_path / "made").mkdir()
    names = []
    for path in (wheel, build_wheel(folder, tmp_path / "made")):
        with zipfile.ZipFile(path) as archive:
            names.append({n: archive.getinfo(n).CRC for n in archive.namelist() if not n.endswith("RECORD")})
    assert names[0] == names[1]


def test_the_wheel_is_plain_python_with_sources(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    assert any(n.endswith("licenses/LICENSE") for n in held) and "polydyn/py.typed" in held
    assert not [n for n in held if n.endswith((".so", ".pyc"))] and not [n for n in held if n.startswith("tests")]
