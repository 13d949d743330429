"""Released packages install in clean environments and pass docs/quickstart.md there: ``make release-test``."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.support.packages import build_wheel, copy_sources
from tests.support.paths import DATA, ROOT

pytestmark = pytest.mark.slow
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def interpreter(version: str) -> str:
    """Return the command of an interpreter of this version; skip if there is none."""
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


def stage(image: str, folder: Path) -> dict[str, str]:
    """Make an environment for an image: its Python, and gcc unless the image is slim. Return the settings to use it."""
    version, _, slim = image.removeprefix("python:").partition("-")
    subprocess.run([interpreter(version), "-m", "venv", folder], check=True)
    tools = folder / "tools"
    tools.mkdir()
    for tool in ("sh", "rm", *(() if slim else ("gcc", "as", "ld"))):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    return {"PATH": f"{folder / 'bin'}:{tools}"}


def follow(dockerfile: str, root: Path, files: dict[str, Path]) -> tuple[dict[str, str], list[str]]:
    """Execute a Dockerfile without a container. Return the settings of the last stage, and its command.

    /src, /model, /app and /tmp are folders of ``root``; ``files`` are in its build folder in addition to polydyn.
    """
    settings: dict[str, str] = {}
    command: list[str] = []
    for word, said in (line.split(maxsplit=1) for line in dockerfile.splitlines() if line):
        here = re.sub(r"(?<![\w.])/(src|model|app|tmp)\b", rf"{root}/\1", said)
        if word == "FROM":
            shutil.rmtree(root / "src", ignore_errors=True)  # another image
            settings = stage(said.split()[0], root / f"stage{len(list(root.glob('stage*')))}")
        elif word == "RUN":
            done = subprocess.run(here, shell=True, env=settings, capture_output=True, text=True)
            assert done.returncode == 0, f"{said}\n{done.stdout}{done.stderr}"
        elif word == "COPY":
            *options, source, target = here.split()
            if options:  # from another stage, which has the same folders here
                assert Path(source).exists(), said
            elif source == "polydyn":
                copy_sources(Path(target))
            else:
                Path(target).mkdir(exist_ok=True)
                shutil.copy(files[source], Path(target, source))
        elif word == "ENV":
            settings |= dict(pair.split("=", 1) for pair in here.split())
        elif word == "CMD":
            command = json.loads(said)
        else:
            assert word in ("WORKDIR", "USER"), f"{word} is not tried here"
    return settings, command


def test_the_steps_of_the_container_serve(tmp_path: Path) -> None:
    """docs/serving.md: the programs of its image have neither gcc nor onnx, and answer."""
    page = (ROOT / "docs" / "serving.md").read_text()
    (dockerfile,) = re.findall(r"```dockerfile\n(.*?)```", page, re.DOTALL)
    (server,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "server.py").write_text(server)
    files = {"server.py": tmp_path / "server.py", "bert.onnx": DATA / "bert_tiny.onnx"}
    settings, command = follow(dockerfile, tmp_path, files)
    program = str(shutil.which(command[0], path=settings["PATH"]))
    assert not shutil.which("gcc", path=settings["PATH"])
    assert subprocess.run([Path(program).with_name("python"), "-c", "import onnx"], capture_output=True).returncode
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    at = {"0.0.0.0": "127.0.0.1", "8000": port}
    serving = subprocess.Popen([program, *(at.get(x, x) for x in command[1:])], cwd=tmp_path / "app", env=settings)
    try:
        ask = Request(f"http://127.0.0.1:{port}/embed", b"[5, 6, 7]", {"Content-Type": "application/json"})
        answer = None
        for _ in range(300):
            assert serving.poll() is None, "the server has ended"
            with suppress(URLError):
                answer = json.load(urlopen(ask, timeout=10))
                break
            time.sleep(0.1)
        assert answer is not None and len(answer["vector"]) == 32 and answer["texts"] == 1
    finally:
        serving.terminate()
        serving.wait()
