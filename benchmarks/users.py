"""Follow the paths of six users, each from an empty environment: ``python -m benchmarks.users [NAME ...]``.

Builds the wheel of this repository. Each user gets an environment with that wheel, its extras and what the user has
already, an empty home and an empty cache, follows the pages of docs/, and checks what it got. Seconds with and without
the installation are printed; pip takes packages from its usual source. ``--python`` names another interpreter. The
exit code is 1 if a path fails. The sixth user, the contributor, is ``python -m benchmarks.newcomer``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.newcomer import KERNEL

ROOT = Path(__file__).parent.parent
TOOLS = ("sh", "env", "rm", "cat")
"""Commands of a machine without a compiler."""
SERVICE = """
import numpy as np, onnxruntime, polydyn.session as ort

theirs, ours = (m.InferenceSession("bert_tiny.onnx", providers=["CPUExecutionProvider"]) for m in (onnxruntime, ort))
for batch, length in ((1, 1), (2, 61), (4, 7)):
    ids = np.random.default_rng(length).integers(0, 100, (batch, length))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    a, b = theirs.run(None, feeds), ours.run(None, feeds)
    assert all(np.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True)), (batch, length)
"""
TORCH = """
import torch

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
compiled = torch.compile(layer, backend="polydyn", dynamic=True, options={"strict": True})
with torch.no_grad():
    for shape in ((2, 7, 32), (3, 61, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), layer(x), atol=1e-4, rtol=1e-4)
"""
JOBS = """
jobs:
  - model: "*_tiny.onnx"
    output: out/{name}-{target}.polydyn
    matrix:
      target: [cpu:avx2, cpu:neon]
"""


def blocks(page: str, kind: str) -> list[str]:
    """Return the blocks of code of a page of docs/."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


@dataclass(frozen=True)
class User:
    """A path: extras of polydyn, further packages, files to begin with, shell commands in order.

    ``compiler``: whether the machine has one. ``models``: stored models in the user's folder.
    """

    commands: tuple[str, ...]
    extras: str = ""
    packages: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    models: tuple[str, ...] = ("bert_tiny",)
    compiler: bool = True


def users() -> dict[str, User]:
    """Return the users by name."""
    quick = (("quick.py", "\n".join(blocks("quickstart.md", "python"))),)
    return {
        "no-compiler": User(("python quick.py", "polydyn doctor"), "compiler", files=quick, compiler=False),
        "service": User(
            ("python service.py", "polydyn try bert_tiny.onnx --rounds 4 || test $? = 4"),
            packages=("onnxruntime",),
            files=(("service.py", SERVICE),),
        ),
        "notebook": User(
            ("python kernel.py",), "explore", ("nbclient", "ipykernel"), (("kernel.py", KERNEL),), ("bert_tiny",)
        ),
        "jobs": User(
            (
                "polydyn batch jobs.yaml --dry-run",
                "polydyn batch jobs.yaml -j 2 --junit jobs.xml",
                "test $(ls out/*.polydyn | wc -l) = 6",
            ),
            "jobs,compiler",
            files=(("jobs.yaml", JOBS),),
            models=("bert_tiny", "gpt2_tiny", "resnet_tiny"),
        ),
        "torch": User(("python layer.py",), "torch", files=(("layer.py", TORCH),)),
        "c": User(
            (
                "polydyn compile bert_tiny.onnx -o bert_tiny.polydyn",
                "polydyn extract bert_tiny.polydyn -o bert",
                "g++ -std=c++17 -Ibert/include embed.cpp -o embed -ldl",
                "./embed",
            ),
            files=(("embed.cpp", blocks("c.md", "cpp")[0]),),
        ),
    }


def follow(user: User, wheel: Path, python: str, folder: Path) -> tuple[float, float]:
    """Install and follow a path in an empty folder; return the seconds of both. RuntimeError: a command failed."""
    start = time.monotonic()
    _run([python, "-m", "venv", str(folder / "env")], folder, dict(os.environ))
    bin_ = folder / "env" / "bin"
    path = f"{bin_}:{os.environ['PATH']}"
    if not user.compiler:
        (folder / "tools").mkdir()
        for tool in TOOLS:
            (folder / "tools" / tool).symlink_to(str(shutil.which(tool)))
        path = f"{bin_}:{folder / 'tools'}"
    home = folder / "home"
    home.mkdir()
    pip = {n: v for n, v in os.environ.items() if n.startswith("PIP_") or n.endswith(("_proxy", "_PROXY"))}
    settings = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "IPYTHONDIR": str(home / "ipython")}
    target = f"polydyn[{user.extras}] @ {wheel.as_uri()}" if user.extras else str(wheel)
    install = [str(bin_ / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, target, *user.packages], folder, settings | pip | {"PATH": os.environ["PATH"]})
    installed = time.monotonic()
    work = folder / "work"
    work.mkdir()
    shutil.copytree(ROOT / "notebooks", work / "notebooks")
    (work / "tests" / "data").mkdir(parents=True)
    for model in user.models:
        for place in (work, work / "tests" / "data"):  # where the notebooks look for it
            shutil.copy(ROOT / "tests" / "data" / f"{model}.onnx", place)
    for name, text in user.files:
        (work / name).write_text(text)
    for command in user.commands:
        _run(["sh", "-c", command], work, settings)
    return installed - start, time.monotonic() - installed


def _run(command: list[str], folder: Path, settings: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this repository's files."""
    for name in ("polydyn", "schedules", "codegen"):
        shutil.copytree(ROOT / name, folder / "src" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "src" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "./src"]
    _run(command, folder, dict(os.environ))
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> int:
    """Print a line for each user; return 1 if a path failed."""
    paths = users()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(paths))
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(paths):
        parser.error(f"no user {', '.join(sorted(unknown))}; there are {', '.join(paths)}")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        wheel = build_wheel(Path(name))
        for user in arguments.names or paths:
            folder = Path(name) / user
            folder.mkdir()
            try:
                installing, following = follow(paths[user], wheel, arguments.python, folder)
                print(f"{user}: passed; installed in {installing:.0f} s, followed in {following:.0f} s", flush=True)
            except RuntimeError as e:
                failed = True
                print(f"{user}: FAILED: {e}", flush=True)
            shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
