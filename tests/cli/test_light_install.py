"""The command line with the required packages only: every command that needs no extra by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx

from polydyn.cli.group import COMMANDS
from tests.support.paths import ROOT
from tests.support.tiny import model, node

BLOCKED_PACKAGES = ("sklearn", "scipy", "threadpoolctl", "matplotlib", "sympy", "networkx", "torch", "onnxruntime",
                    "tokenizers")  # fmt: skip
NEEDS_EXTRA = {"batch": "jobs", "bench": "bench", "fuzz": "test", "generate": "generate", "try": "bench"}
"""Maps a command to the extra that it names if its packages are missing."""

SCRIPT = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = sys.argv[1].split(",")
sys.meta_path.insert(0, Blocked())
from click.testing import CliRunner
from polydyn.cli import main
done = []
for line in sys.stdin:
    result = CliRunner().invoke(main, json.loads(line))
    done.append([result.exit_code, result.output[-500:]])
assert not set(BLOCKED) & {m.partition(".")[0] for m in sys.modules}
print(json.dumps(done))
"""


def test_every_command_runs_without_packages_of_extras(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((33, 40)).astype(np.float32)
    made = model([node("MatMul", "x w", "p"), node("Relu", "p", "y")], {"x": ("float32", ["M", 33])}, ["y"], {"w": w})
    names = ("m.onnx", "r.db", "s.db", "m.polydyn", "dump", "c", "t.json", "e.html", "q.onnx", "h.onnx")
    files = {n: str(tmp_path / n) for n in names}
    onnx.save(made, files["m.onnx"])
    shape, source, program, records = ("--shape", "M=7"), files["m.onnx"], files["m.polydyn"], files["r.db"]
    commands: list[list[str]] = [
        ["tune", source, "--records", records, "--trials", "2", "--threads", "1", "--dim", "M=1:64@7"],
        ["tune", source, "--records", records, "--trials", "2", "--threads", "1", "--strategy", "dietcode"],
        ["tune", source, "--records", records, "--trials", "2", "--threads", "1", "--strategy", "bladedisc"],
        ["compile", source, "-o", program, "--records", records, "--threads", "1"],
        ["inspect", program], ["run", program, *shape], ["profile", program, *shape],
        ["explain", program, *shape, "--html", files["e.html"]], ["verify", source, *shape],
        ["compare", program, source, *shape, "--rounds", "2"], ["trace", program, *shape, "-o", files["t.json"]],
        ["dump", source, "-o", files["dump"]], ["extract", program, "-o", files["c"]],
        ["records", "show", records], ["records", "export", records, files["s.db"]],
        ["minimise", source, "--failure", "compile", "-o", str(tmp_path / "small.onnx")],
        ["quantize", source, "-o", files["q.onnx"], "--method", "dynamic", "--compare", "M=3"],
        ["to-half", source, "-o", files["h.onnx"]], ["cache"], ["doctor"], ["completion", "bash"],
    ]  # fmt: skip
    assert {c[0] for c in commands} | set(NEEDS_EXTRA) == set(COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(BLOCKED_PACKAGES)], input="\n".join(map(json.dumps, commands)),
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for command, (code, output) in zip(commands, json.loads(done.stdout), strict=True):
        assert code == (command[0] == "minimise"), (command, output)  # the model has no failure to minimise
