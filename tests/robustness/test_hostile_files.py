"""Job files and record files that are made to do harm."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from polydyn.errors import ArtifactError, InputError
from polydyn.jobs.spec import read_jobs
from polydyn.jobs.text import read_text
from polydyn.search.records import Records

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, "jobs: &a [*a]\n", "jobs: &a {x: *a}\n"])
def test_aliases_that_multiply_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(InputError, match="more than 1000000 values"):
        read_text(tmp_path / "jobs.yaml")


def test_tags_of_python_objects_make_texts(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("jobs: !!python/object/apply:os.mkdir [made]\n")
    assert read_text(path).plain() == {"jobs": ["made"]}
    with pytest.raises(InputError):
        read_jobs(path)
    assert [p.name for p in tmp_path.iterdir()] == ["jobs.yaml"]


def test_a_record_file_whose_rows_are_not_its_own_is_refused(tmp_path: Path) -> None:
    """A table in place of which a view computes endless rows."""
    path = tmp_path / "records.db"
    Records.open(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "DROP TABLE record; CREATE VIEW record AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"
            " SELECT n AS digest, n AS hardware, n AS grp, n AS kind, n AS body FROM r"
        )
    with pytest.raises(ArtifactError, match="it has the view record"):
        Records.open(path, readonly=True)
