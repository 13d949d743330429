"""Wrong inputs of users: a short error with a remedy, the documented exit code, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from polydyn.cli import main
from polydyn.cli.group import COMMANDS
from tests.support.tiny import model, node

REJECTION, USAGE = 1, 2

# Arguments, separated by blanks, then the exit code and the error text. {x} is a file that the fixture makes.
WRONG = {
    "no such model": ("compile {no} -o {out}", REJECTION, "cannot read"),
    "a folder as a model": ("compile {folder} -o {out}", REJECTION, "has neither config.json nor an ONNX file"),
    "no protobuf": ("compile {text} -o {out}", REJECTION, "not an ONNX protobuf"),
    "an empty file": ("compile {empty} -o {out}", REJECTION, "the model has no graph"),
    "an operator that is not there": ("compile {strange} -o {out}", REJECTION, "Frobnicate"),
    "no folder for the output": ("compile {relu} -o {folder}/none/out", REJECTION, "cannot write"),
    "no such target": ("compile {relu} -o {out} --target cpu:z80", REJECTION, "z80"),
    "no such pass": ("compile {relu} -o {out} --without everything", USAGE, "everything"),
    "no such strategy": ("compile {relu} -o {out} --strategy luck", USAGE, "luck"),
    "a dim without sizes": ("compile {relu} -o {out} --dim N", USAGE, "no sizes"),
    "a range that is empty": ("compile {relu} -o {out} --dim N=9:3", USAGE, "9"),
    "a dim that the model has not": ("compile {relu} -o {out} --dim Q=1:4", REJECTION, "Q"),
    "no threads": ("compile {relu} -o {out} --threads 0", USAGE, "0"),
    "records that are not there": ("compile {relu} -o {out} --records {no}", REJECTION, "does not exist"),
    "records that are none": ("compile {relu} -o {out} --records {text}", REJECTION, "not a record file"),
    "a saved program cut off": ("run {cut} --shape N=3", REJECTION, "cut.polydyn"),
    "a shape that is none": ("run {relu} --shape N:3", USAGE, "is not of the form"),
    "a size below 0": ("run {relu} --shape N=-1", REJECTION, "is not a size"),
    "a size that is missing": ("run {relu} --output-dir {out}", REJECTION, "no size is given for N"),
    "an input that is not there": ("run {relu} --input x={no}", REJECTION, "cannot read"),
    "an input of another shape": ("run {relu} --input x={array} --output-dir {out}", REJECTION, "x"),
    "an input of another name": ("run {relu} --shape N=2 --input z={array} --output-dir {out}", REJECTION, "z"),
    "an input without a name": ("run {relu} --shape N=2 --input {array}", REJECTION, "does not name a file"),
    "a rival that is none": ("bench {relu} --shape N=2 --against abacus", REJECTION, "abacus"),
    "torch without its module": ("bench {relu} --shape N=2 --against torch", REJECTION, "torch cannot read ONNX"),
    "a plot of no kind": ("bench {relu} --shape N=2 --plot {out}.bmp", USAGE, "does not end in .svg or .html"),
    "no peak": ("explain {relu} --shape N=2 --html {out} --peak 0 --bandwidth 5", USAGE, "a realistic machine limit"),
    "half of the limits": ("explain {relu} --shape N=2 --html {out} --peak 5", USAGE, "belong together"),
    "a page in no folder": ("explain {relu} --shape N=2 --html {folder}/none/out", REJECTION, "cannot write"),
    "a trace in no folder": ("trace {relu} --shape N=2 -o {folder}/none/out", REJECTION, "cannot write"),
    "a full folder": ("dump {relu} -o {folder}", REJECTION, "is not empty"),
    "a dump of nothing": ("dump {strange} -o {out}", REJECTION, "Frobnicate"),
    "tuning into nothing": ("tune {relu}", USAGE, "--records names no file"),
    "a log of nothing": ("tune {relu} --records {out} --from-log {text}", REJECTION, "is not a log of shapes"),
    "what does not fail": ("minimise {relu} --failure compile -o {out}", REJECTION, "does not fail in this way"),
    "a failure without its command": ("minimise {relu} --failure command -o {out}", USAGE, "belong together"),
    "a command that is none": ("minimise {relu} --failure command --command {no} -o {out}", REJECTION, "be started"),
    "jobs that are not there": ("batch {no}", USAGE, "does not exist"),
    "jobs with an unknown key": ("batch {jobs}", REJECTION, "colour"),
    "a batch that never ran": ("batch status {jobs}", REJECTION, "was never run"),
    "records to nowhere": ("records export {text} {out}", REJECTION, "not a record file"),
    "pruning of nothing": ("records prune {text} {out}", REJECTION, "no records are selected"),
    "no such command": ("conpile {relu}", USAGE, "No such command"),
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {n: tmp_path / f"{n}.onnx" for n in ("relu", "strange", "text", "empty")}
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), made["relu"])
    onnx.save(model([node("Frobnicate", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), made["strange"])
    made["text"].write_text("version https://git-lfs.github.com/spec/v1\n" * 5)
    made["empty"].write_bytes(b"")
    made |= {"no": tmp_path / "no.onnx", "out": tmp_path / "out", "folder": tmp_path / "folder"}
    made |= {"cut": tmp_path / "cut.polydyn", "array": tmp_path / "array.npy", "jobs": tmp_path / "jobs.json"}
    made["folder"].mkdir()
    (made["folder"] / "full.txt").write_text("here before")
    made["cut"].write_bytes(b"PK\x03\x04" + bytes(200))
    np.save(made["array"], np.ones((2, 5), np.float32))
    made["jobs"].write_text(json.dumps({"jobs": [{"model": "relu.onnx", "colour": "red"}]}))
    return made


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_a_remedy(case: str, files: dict[str, Path], tmp_path: Path) -> None:
    arguments, code, says = WRONG[case]
    before = {p: p.read_bytes() if p.is_file() else b"" for p in tmp_path.rglob("*")}
    done = CliRunner().invoke(main, [a.format(**files) for a in arguments.split()])
    assert done.exit_code == code, done.output
    assert says in done.output and "Traceback" not in done.output
    if code == REJECTION:
        first, *rest = done.output.strip().splitlines()
        assert first.startswith("error (") and len(rest) < 12
        helps = any(line.strip().startswith(("remedy: ", "rule: ")) for line in rest)
        assert helps or "in this call" in first, done.output
    else:
        assert "Error: " in done.output and "Usage: " in done.output
    after = {p: p.read_bytes() if p.is_file() else b"" for p in tmp_path.rglob("*")}
    assert after == before, "something was left behind"


def test_every_command_has_json_but_completion() -> None:
    lacking = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for sub in getattr(command, "commands", {"": command}).values():
            if not any("--json" in p.opts for p in sub.params):
                lacking.append(f"{name} {sub.name}")
    assert lacking == ["completion completion"]
