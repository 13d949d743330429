"""The ledger of a batch: every attempt at every step, in one SQLite file with one writer and any number of readers."""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polydyn
from polydyn.errors import ArtifactError, InputError, UnwritableError

DONE, RUNNING, GONE = "done", "running", "gone"
"""Outcomes in addition to those of ``polydyn.jobs.work``. ``gone``: it was done, but its output no longer exists."""

VERSION = 1
"""Version of the tables, the ``user_version`` of the file."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    id INTEGER PRIMARY KEY, began REAL NOT NULL, ended REAL, version TEXT NOT NULL, workers TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS attempt (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run, job TEXT NOT NULL, key TEXT NOT NULL,
    number INTEGER NOT NULL, began REAL NOT NULL, ended REAL, outcome TEXT NOT NULL, error TEXT NOT NULL,
    worker TEXT NOT NULL, facts TEXT NOT NULL, log TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS step (
    job TEXT PRIMARY KEY, kind TEXT NOT NULL, model TEXT NOT NULL, target TEXT NOT NULL, run INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS once ON attempt (job, key) WHERE outcome = 'done';
CREATE INDEX IF NOT EXISTS of_job ON attempt (job);
"""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step. Times are seconds since 1970; ``ended`` is None if it is running or was interrupted."""

    id: int
    run: int
    job: str
    key: str
    number: int
    began: float
    ended: float | None
    outcome: str
    error: str
    worker: str
    facts: Mapping[str, Any]
    log: str


@dataclass(frozen=True)
class StepRow:
    """A step of the job file: its name, compile or tune, model and target; ``run``: the last run that had it."""

    job: str
    kind: str
    model: str
    target: str
    run: int


class Ledger:
    """The open ledger of a job file; use ``Ledger.open``."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self.path = db, path

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Open or create a ledger. ArtifactError: it is another kind of file, or not writable."""
        try:
            db = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):  # 0: a new file, or one of the first version, which had no number
                raise ArtifactError(
                    f"the ledger {path} is of version {version}, this polydyn reads version {VERSION}",
                    rule="one version of ledgers", remedy="use the polydyn that wrote it, or delete the batch's folder",
                )  # fmt: skip
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as e:
            raise ArtifactError(
                f"the ledger {path} cannot be used ({e})", rule="one ledger per job file", remedy="free space, move it"
            ) from e
        return cls(db, path)

    def begin_run(self, workers: str) -> int:
        """Record a new run of the batch. Attempts still marked as running were interrupted."""
        self._db.execute("UPDATE attempt SET outcome = 'interrupted' WHERE outcome = ?", (RUNNING,))
        row = self._db.execute(
            "INSERT INTO run (began, version, workers) VALUES (?, ?, ?)", (time.time(), polydyn.__version__, workers)
        )
        return int(row.lastrowid or 0)

    def end_run(self, run: int) -> None:
        """Record that the run ended normally."""
        self._db.execute("UPDATE run SET ended = ? WHERE id = ?", (time.time(), run))

    def begin(self, run: int, job: str, key: str, number: int) -> int:
        """Record the start of an attempt; return its id."""
        row = self._db.execute(
            "INSERT INTO attempt (run, job, key, number, began, outcome, error, worker, facts, log)"
            " VALUES (?, ?, ?, ?, ?, ?, '', '', '{}', '')",
            (run, job, key, number, time.time(), RUNNING),
        )
        return int(row.lastrowid or 0)

    def end(self, attempt: int, answer: Mapping[str, Any]) -> None:
        """Record the end of an attempt with a worker's answer."""
        facts = json.dumps(answer.get("facts", {}), sort_keys=True)
        self._db.execute(
            "UPDATE attempt SET ended = ?, outcome = ?, error = ?, worker = ?, facts = ?, log = ? WHERE id = ?",
            (time.time(), answer["outcome"], answer["error"], answer.get("worker", ""), facts, answer.get("log", ""),
             attempt),
        )  # fmt: skip

    def is_done(self, job: str, key: str) -> bool:
        """Return whether this step was done with this key."""
        row = self._db.execute("SELECT 1 FROM attempt WHERE job = ? AND key = ? AND outcome = 'done'", (job, key))
        return row.fetchone() is not None

    def forget(self, job: str, key: str) -> None:
        """Record that the output of a done step no longer exists."""
        done = (GONE, job, key)
        self._db.execute("UPDATE attempt SET outcome = ? WHERE job = ? AND key = ? AND outcome = 'done'", done)

    def attempts(self, run: int | None = None) -> list[Attempt]:
        """Return all attempts, or those of one run, in order."""
        where, values = ("WHERE run = ?", (run,)) if run is not None else ("", ())
        return list(self._read(self._db.execute(f"SELECT * FROM attempt {where} ORDER BY id", values)))

    def take_part(self, run: int, job: str, kind: str, model: str, target: str) -> None:
        """Record that a step is part of a run."""
        self._db.execute("INSERT OR REPLACE INTO step VALUES (?, ?, ?, ?, ?)", (job, kind, model, target, run))

    def steps(self, run: int | None = None) -> list[StepRow]:
        """Return all steps, or those of one run, by name."""
        where, values = ("WHERE run = ?", (run,)) if run is not None else ("", ())
        return [StepRow(*r) for r in self._db.execute(f"SELECT * FROM step {where} ORDER BY job", values)]

    def runs(self) -> list[tuple[int, float, float | None, str, str]]:
        """Return number, start, end, version and workers of every run."""
        return list(self._db.execute("SELECT id, began, ended, version, workers FROM run ORDER BY id"))

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @staticmethod
    def _read(rows: Iterable[tuple[Any, ...]]) -> Iterator[Attempt]:
        for row in rows:
            fields = dict(zip(Attempt.__dataclass_fields__, row, strict=True))
            yield Attempt(**fields | {"facts": json.loads(fields["facts"])})


def failures_first(final: Mapping[str, Attempt]) -> list[tuple[str, Attempt]]:
    """Return the steps with their last attempts: those that are not done first, then by name."""
    return sorted(final.items(), key=lambda x: (x[1].outcome == DONE, x[0]))


def matrix(steps: Iterable[StepRow], final: Mapping[str, Attempt]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return targets, and for each model the outcome at each target: the worst of its steps, "" where there is none.

    A step that has no attempt is ``waiting``.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for s in steps:
        outcome = final[s.job].outcome if s.job in final else "waiting"
        found.setdefault((s.model, s.target), set()).add(outcome)
    targets, models = (sorted({k[i] for k in found}) for i in (1, 0))
    worst = {k: sorted(v - {DONE})[0] if v - {DONE} else DONE for k, v in found.items()}
    return targets, [(m, [worst.get((m, t), "") for t in targets]) for m in models]


def latest(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    """Return a mapping from each job to its last attempt."""
    return {a.job: a for a in attempts}


def folder_of(jobs: Path) -> Path:
    """Return the folder of a job file's ledger, report and unfinished work."""
    return jobs.with_name(f"{jobs.name}.batch")


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a batch against other clients. InputError: another client is running it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as e:
        raise UnwritableError.of(folder, e) from e
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"another batch is at work on {folder.name}", rule="one client at a time", remedy="wait for it"
            ) from None
        yield
