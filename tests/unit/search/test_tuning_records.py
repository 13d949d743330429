"""Records: nothing is lost, torn, mixed up or destroyed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from polydyn.errors import ArtifactError
from polydyn.search.backbone import GroupKey, Tile
from polydyn.search.hardware import Hardware
from polydyn.search.records import Record, Records
from polydyn.testing.machines import A100, T4
from tests.support.paths import ROOT

KEY = GroupKey("C[i,j] += A[i,k]*B[k,j]", "float32", "cuda:sm_80", ("row", "row"), ("4 | k",), "nvcc 13", ("-O3",), "1")


def record(i: int, key: GroupKey = KEY, hw: Hardware = A100, **more: Any) -> Record:
    tile = Tile((("b.i", 16 * (i + 1)),), (("b.j", 2),))
    return Record(key, hw, tile, "wave", (("seconds", 1e-6 * (i + 1)),), **more)


def test_rows_come_back_as_they_were_put_and_once(tmp_path: Path) -> None:
    mine = [record(i) for i in range(5)] + [record(0, shape=(("i", 7),), note="x"), record(0, hw=T4)]
    with Records.open(tmp_path / "r.db") as r:
        assert r.put(mine) == 7
        assert r.put(mine) == 0
        assert set(r.rows()) == set(mine)
        assert r.rows(hardware=T4) == (record(0, hw=T4),)
        assert r.rows(kind="failed") == ()
        other = GroupKey(KEY.structure, "float16", KEY.target)
        assert r.rows(group=other) == ()


def test_content_decides_the_digest_not_the_order(tmp_path: Path) -> None:
    with Records.open(tmp_path / "a.db") as a, Records.open(tmp_path / "b.db") as b:
        a.put([record(1), record(2)])
        b.put([record(2)])
        assert a.digest() != b.digest()
        assert b.merge(tmp_path / "a.db") == 1
        assert a.digest() == b.digest()
        assert a.rows() == b.rows()


def test_export_is_complete_and_never_overwrites(tmp_path: Path) -> None:
    with Records.open(tmp_path / "a.db") as a:
        a.put([record(1), record(2)])
        a.export(tmp_path / "b.db")
        with Records.open(tmp_path / "b.db", readonly=True) as b:
            assert b.digest() == a.digest()
        with pytest.raises(ArtifactError, match="already exists"):
            a.export(tmp_path / "b.db")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.db", "b.db"]


def test_a_pinned_file_cannot_be_written_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        Records.open(tmp_path / "no.db", readonly=True)
    Records.open(tmp_path / "a.db").close()
    with Records.open(tmp_path / "a.db", readonly=True) as a, pytest.raises(ArtifactError, match="pinned"):
        a.put([record(1)])


def test_foreign_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    text, empty, theirs = tmp_path / "notes.txt", tmp_path / "empty", tmp_path / "theirs.db"
    text.write_bytes(b"dear diary\n" * 50)
    empty.touch()
    db = sqlite3.connect(theirs)
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    for path in (text, empty, theirs):
        before = path.read_bytes()
        for readonly in (False, True):
            with pytest.raises(ArtifactError, match="record file"):
                Records.open(path, readonly=readonly)
        assert path.read_bytes() == before


def test_another_format_is_refused_by_number(tmp_path: Path) -> None:
    Records.open(tmp_path / "a.db").close()
    raw = bytearray((tmp_path / "a.db").read_bytes())
    raw[63] = 9
    (tmp_path / "a.db").write_bytes(raw)
    with pytest.raises(ArtifactError, match="format 9, not 1"):
        Records.open(tmp_path / "a.db")


@pytest.mark.parametrize("damage", ["bit", "cut", "pages"])
def test_damage_is_noticed_and_not_repaired_away(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.db"
    with Records.open(path) as a:
        a.put([record(i, note="n" * 200) for i in range(200)])
    raw = bytearray(path.read_bytes())
    if damage == "bit":  # inside a text: SQLite itself cannot see this one
        raw[raw.rindex(b"nnnn") + 1] ^= 1
    elif damage == "cut":
        raw = raw[: len(raw) // 2]
    else:
        raw[8192:16384] = os.urandom(8192)
    path.write_bytes(raw)
    with pytest.raises(ArtifactError, match=r"damaged|cannot be used"), Records.open(path) as a:
        a.rows()
    assert path.read_bytes() == bytes(raw)
    with Records.open(tmp_path / "b.db") as b:
        with pytest.raises(ArtifactError):
            b.merge(path)
        assert b.rows() == ()


WRITER = """
import sys
from polydyn.search.records import Records
sys.path.insert(0, {tests!r})
from tests.unit.search.test_tuning_records import record
lane, count = int(sys.argv[2]), int(sys.argv[3])
with Records.open(sys.argv[1]) as r:
    for i in range(count):
        r.put([record(lane * 100000 + 2 * i), record(lane * 100000 + 2 * i + 1, note="pair")])
        print(i, flush=True)
"""


def start(path: Path, lane: int, count: int) -> subprocess.Popen[str]:
    code = WRITER.format(tests=str(ROOT))
    command = [sys.executable, "-c", code, str(path), str(lane), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_several_writers_share_a_file(tmp_path: Path) -> None:
    writers = [start(tmp_path / "r.db", lane, 20) for lane in range(3)]  # also a race to make the file
    for w in writers:
        w.communicate()
    assert [w.returncode for w in writers] == [0, 0, 0]
    with Records.open(tmp_path / "r.db") as r:
        assert len(r.rows()) == 120


def test_a_writer_killed_at_any_moment_loses_nothing_and_tears_nothing(tmp_path: Path) -> None:
    path, rng = tmp_path / "r.db", random.Random(7)
    Records.open(path).close()
    told = 0
    for lane in range(6):
        w = start(path, lane, 1_000_000)
        assert w.stdout is not None
        seen = [int(w.stdout.readline())]
        time.sleep(rng.random() * 0.15)
        w.send_signal(signal.SIGKILL)
        seen += [int(x) for x in w.stdout.read().split()]
        w.wait()
        w.stdout.close()
        told += 2 * len(seen)
        with Records.open(path) as r:
            rows = r.rows()
        ours = [x for x in rows if x.tile["b.i"] > 16 * lane * 100000]
        assert len(ours) % 2 == 0  # a transaction is there whole or not at all
        assert len(ours) >= 2 * len(seen)
        assert len(rows) >= told


TORN = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 2")  # the transaction spills into the file before it is committed
db.execute("BEGIN IMMEDIATE")
for i in range(500):
    db.execute("INSERT INTO record VALUES (?, 'h', 'g', 'wave', ?)", (str(i), "x" * 500))
os._exit(9)
"""


def test_a_half_written_transaction_is_undone_by_the_next_writer_only(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    with Records.open(path) as r:
        r.put([record(1), record(2)])
    assert subprocess.run([sys.executable, "-c", TORN, str(path)], check=False).returncode == 9
    assert (tmp_path / "r.db-journal").exists()
    torn = path.read_bytes()
    with pytest.raises(ArtifactError, match="writer was interrupted"):
        Records.open(path, readonly=True)
    assert path.read_bytes() == torn
    with Records.open(path) as r:
        assert set(r.rows()) == {record(1), record(2)}
    with Records.open(path, readonly=True) as r:
        assert len(r.rows()) == 2
