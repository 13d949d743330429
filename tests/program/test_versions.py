"""Files of other versions (docs/versions.md): each is read with its old meaning, or the rejection names a remedy.

``tests/data/versions`` has a program of every format and ABI, and a record file of every version. After one of these
was raised on purpose, ``--update-golden`` adds the file of the new version; stored files stay.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import polydyn
from polydyn.build.features import architecture
from polydyn.errors import ArtifactError
from polydyn.program.assemble import build_artifact
from polydyn.runtime.artifact import ABI, FORMAT, write_artifact
from polydyn.search.backbone import GroupKey, Tile
from polydyn.search.records import _VERSION, Record, Records
from polydyn.testing.machines import A100
from tests.support.paths import DATA
from tests.support.programs import example, expected, feeds

STORED_FILES = DATA / "versions"
KEY = GroupKey("C[i,j] += A[i,k]*B[k,j]", "float32", "cuda:sm_80", ("row", "row"), ("4 | k",), "nvcc 13", ("-O3",), "1")
ROW = Record(KEY, A100, Tile((("b.i", 16),), (("split", 2),)), "wave", (("seconds", 1e-6),), (("i", 7),))
PROGRAM = STORED_FILES / f"program{FORMAT}.{ABI}.polydyn"
RECORDS = STORED_FILES / f"records{_VERSION}.db"


def files(newest: Path) -> list[Path]:
    """Return the stored files of the newest one's kind."""
    assert newest.exists(), f"{newest.name} is not stored: pytest {Path(__file__).name} --update-golden"
    return sorted(STORED_FILES.glob(f"*{newest.suffix}"))


@pytest.fixture(scope="module", autouse=True)
def stored(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        if not PROGRAM.exists():
            write_artifact(build_artifact(example(), "cpu:baseline")[0], PROGRAM)
        if not RECORDS.exists():
            with Records.open(RECORDS) as r:
                r.put([ROW])


def test_a_stored_program_runs_or_says_what_to_do() -> None:
    for path in files(PROGRAM):
        try:
            program = polydyn.load(path)
        except ArtifactError as e:
            if path == PROGRAM and architecture() == "x86_64":
                raise
            assert e.remedy and "compile the model" in e.remedy
            continue
        given = feeds(3, 7)
        for name, value in expected(**given).items():
            np.testing.assert_array_equal(program.run(given)[name], value)


def test_a_stored_record_file_is_read_and_grows_or_says_what_to_do(tmp_path: Path) -> None:
    for path in files(RECORDS):
        copy = tmp_path / path.name
        shutil.copyfile(path, copy)
        try:
            with Records.open(copy) as records:
                assert records.rows() == (ROW,), "what was measured means what it did"
                assert records.put([ROW]) == 0
        except ArtifactError as e:
            assert path != RECORDS and e.remedy
