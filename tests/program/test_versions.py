"""Files of other versions (docs/versions.md): each is read with its old meaning, or the rejection names a remedy.

``tests/data/versions`` has a program of every format and ABI, and a record file and a ledger of every version. After
one of these was raised on purpose, ``--update-golden`` adds the file of the new version; stored files stay.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import polydyn
from polydyn.build.cache import cache_dir
from polydyn.build.features import architecture
from polydyn.compiler import compile_artifact
from polydyn.errors import ArtifactError
from polydyn.jobs.ledger import VERSION, Ledger
from polydyn.program.assemble import build_artifact
from polydyn.program_store import stored_program
from polydyn.runtime.artifact import ABI, FORMAT, write_artifact
from polydyn.search.backbone import GroupKey, Tile
from polydyn.search.records import _VERSION, Record, Records
from polydyn.testing.machines import A100
from tests.support.paths import DATA, ROOT, TESTS
from tests.support.programs import example, expected, feeds
from tests.support.tiny import model, node

STORED_FILES = DATA / "versions"
ANSWER = {"outcome": "done", "facts": {"bytes": 7}, "error": "", "worker": "w"}
KEY = GroupKey("C[i,j] += A[i,k]*B[k,j]", "float32", "cuda:sm_80", ("row", "row"), ("4 | k",), "nvcc 13", ("-O3",), "1")
ROW = Record(KEY, A100, Tile((("b.i", 16),), (("split", 2),)), "wave", (("seconds", 1e-6),), (("i", 7),))
LEDGER = STORED_FILES / f"ledger{VERSION}.sqlite"
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
        if not LEDGER.exists():
            with closing(Ledger.open(LEDGER)) as ledger:
                ledger.end(ledger.begin(ledger.begin_run("2 processes"), "compile a", "key", 1), ANSWER)


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


def test_a_stored_ledger_is_read_and_grows_or_says_what_to_do(tmp_path: Path) -> None:
    for path in files(LEDGER):
        copy = tmp_path / path.name
        shutil.copyfile(path, copy)
        try:
            with closing(Ledger.open(copy)) as ledger:
                (attempt,) = ledger.attempts()
                assert (attempt.job, attempt.outcome, attempt.facts) == ("compile a", "done", {"bytes": 7})
                ledger.begin(ledger.begin_run("1 process"), "compile b", "key", 1)
        except ArtifactError as e:
            assert path != LEDGER and e.remedy


def test_a_ledger_of_a_later_version_is_rejected_and_not_changed(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "l")) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = (tmp_path / "l").read_bytes()
    with pytest.raises(ArtifactError, match=f"of version {VERSION + 1}.*\\n.*\\n.*delete"):
        Ledger.open(tmp_path / "l")
    assert (tmp_path / "l").read_bytes() == before


def test_a_cached_program_of_another_format_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys contain polydyn's sources, so that this happens only if a file is put there on purpose."""
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path))
    folder = cache_dir("programs")
    for path in files(PROGRAM):
        shutil.copyfile(path, folder / f"{path.stem}.polydyn")
        program = stored_program(path.stem)
        assert program is None or path == PROGRAM
        (folder / f"{path.stem}.polydyn").write_bytes(path.read_bytes()[:-50])
        assert stored_program(path.stem) is None


def test_libraries_export_the_listed_symbols(request: pytest.FixtureRequest) -> None:
    """``tests/golden/symbols.txt``: the C interface of a program, and of a program of several parts."""
    parts = model([node("NonZero", "x", "i"), node("Abs", "i", "y")], {"x": ("float32", ["N"])}, ["y"])
    libraries = {"program": build_artifact(example(), "cpu:baseline")[0].library,
                 "program of parts": compile_artifact(parts)[0].library}  # fmt: skip
    text = "".join(f"== {kind}\n" + "".join(f"{s}\n" for s in exported(data)) for kind, data in libraries.items())
    golden = TESTS / "golden" / "symbols.txt"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()
    declared = set(re.findall(r"\b(pd_\w+)\(", (ROOT / "polydyn/runtime/c/polydyn.h").read_text()))
    assert {s for s in exported(libraries["program"]) if not s.startswith("pd_")} == set()
    assert declared - set(exported(libraries["program"])) == set(), "declared in polydyn.h, and exported"


def exported(library: bytes) -> list[str]:
    """Return the defined symbols of an ELF library's dynamic symbol table, sorted."""
    table, width = struct.unpack_from("<Q", library, 0x28)[0], struct.unpack_from("<H", library, 0x3A)[0]
    count = struct.unpack_from("<H", library, 0x3C)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, table + k * width) for k in range(count)]
    symbols = next(s for s in sections if s[1] == 11)  # SHT_DYNSYM
    names = sections[symbols[6]][4]
    found = []
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, _, _, section = struct.unpack_from("<IBBH", library, at)
        if section and name:
            found.append(library[names + name : library.index(b"\0", names + name)].decode())
    return sorted(found)
