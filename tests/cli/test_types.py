"""A user's file under type checkers: every public name has a type, and a wrong argument or name is an error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polydyn
from tests.support.paths import ROOT

NAMES = [*polydyn.__all__, *polydyn._MODULES]
CALLS = [
    'polydyn.load("x").run({})', 'polydyn.load("x").explain(B=1)', 'polydyn.load("x").profile({})',
    'polydyn.load("x").trace({})', 'polydyn.load("x").bind({})', 'polydyn.load("x").inputs',
    'polydyn.compile("m").save("x")', 'polydyn.tune("m", "r")', 'polydyn.InferenceSession("m").run(None, {})',
    'explore.groups("m")', 'explore.groups("m")[0].schedule()', 'explore.groups("m")[0].compiled()',
    "polydyn.Options().without", "polydyn.Sizes(1, 8).multiple",
]  # fmt: skip
WRONG = 'polydyn.compile("m", thread=3)\npolydyn.compil\n'
HEAD = "import polydyn\nfrom polydyn import explore\nfrom typing_extensions import reveal_type\n"
CHECKERS = ["mypy", *(["pyright"] if shutil.which("pyright") else [])]
"""pyright is no package of the extra [test]; where it is installed it checks too."""


@pytest.mark.parametrize("checker", CHECKERS)
def test_public_names_have_types(checker: str, tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text(HEAD + "".join(f"reveal_type({x})\n" for x in [*(f"polydyn.{n}" for n in NAMES), *CALLS]) + WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file", os.devnull] if checker == "mypy" else ["pyright"]
    options = [] if checker == "mypy" else ["--pythonpath", sys.executable]
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *options, str(user)], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    lines = [x for x in done.stdout.splitlines() if x.strip().startswith((str(user), user.name))]
    types = [re.split(r'Revealed type is |Type of ".*" is ', x)[1].strip('"') for x in lines if "type is" in x.lower()
             or "Type of" in x]  # fmt: skip
    assert len(types) == len(NAMES) + len(CALLS), done.stdout + done.stderr
    untyped = [x for x, t in zip([*NAMES, *CALLS], types, strict=True) if t in ("Any", "Unknown") or "Unknown" in t]
    assert untyped == []
    errors = [x for x in lines if re.search(r"\berror: |- error", x)]
    assert len(errors) == 2 and "thread" in errors[0] and "compil" in errors[1], errors
