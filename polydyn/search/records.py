"""Records: what was measured, on which machine, for which group and tile tuple; kept in one SQLite file.

Rows are only ever added, each under the hash of its own content: putting a row twice changes nothing, merging is
union, and a damaged row is noticed when it is read. Columns are JSON text. The file uses SQLite's rollback journal,
so that it is one file, may lie in a read-only directory, and survives ``kill -9`` at any moment. A file that is not
ours, or is damaged, is refused and left as it is.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

from polydyn.errors import ArtifactError
from polydyn.search.backbone import GroupKey, Tile, canonical, digest_of
from polydyn.search.hardware import Hardware

_APPLICATION = 0x706F6C79  # "poly"; SQLite keeps it at byte 68 of the file
_VERSION = 1
_BUSY_SECONDS = 60.0

_SCHEMA = """
CREATE TABLE hardware (digest TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE grp (digest TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE record (
    digest TEXT PRIMARY KEY,
    hardware TEXT NOT NULL REFERENCES hardware,
    grp TEXT NOT NULL REFERENCES grp,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX record_of ON record (grp, hardware, kind);
"""


@dataclass(frozen=True)
class Record:
    """One measurement (or estimate) of one kernel.

    ``kind`` and its ``values``: ``resources`` (registers per thread, shared bytes, threads, code bytes), ``wave``
    (seconds of one full wave, blocks in it), ``micro`` (seconds of the first tile, seconds of each further one),
    ``throughput`` (seconds at ``shape``), ``gain`` (over the kernel without tuning, of the tiles in ``note``),
    ``failed`` (none; with a ``shape`` at that one only; ``note`` may say why).
    ``source``: ``measured``, or ``model`` where the machine was not there and an analytical model ranked instead.
    """

    group: GroupKey
    hardware: Hardware
    tile: Tile
    kind: str
    values: tuple[tuple[str, float], ...]
    shape: tuple[tuple[str, int], ...] = ()
    source: str = "measured"
    note: str = ""

    def body(self) -> dict[str, Any]:
        """The part that is not group or hardware, as plain data."""
        return {
            "compile": self.tile.compile,
            "launch": self.tile.launch,
            "values": self.values,
            "shape": self.shape,
            "source": self.source,
            "note": self.note,
        }

    def value(self, name: str) -> float:
        """One of ``values``. KeyError: not there."""
        return dict(self.values)[name]


class Records:
    """An open record file. ``Records.open`` makes or opens one; use it as a context manager."""

    def __init__(self, connection: sqlite3.Connection, path: Path, readonly: bool) -> None:
        self._db, self.path, self.readonly = connection, path, readonly

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, readonly: bool = False) -> Records:
        """Opens a record file; makes it when it does not exist, unless ``readonly`` (a pinned file).

        ArtifactError: another program's file, damaged, of another version, or missing when pinned.
        """
        p = Path(path)
        if not p.exists():
            if readonly:
                raise _refusal(p, "does not exist", "give the path of an existing record file")
            _create(p)
        _check_header(p)
        uri = f"{p.absolute().as_uri()}?mode={'ro' if readonly else 'rw'}"
        try:
            db = sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as e:
            raise _refusal(p, f"cannot be opened ({e})", "check its permissions") from e
        records = cls(db, p, readonly)
        try:
            with records._guarded():
                db.execute("PRAGMA synchronous = FULL")
                (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except BaseException:
            db.close()
            raise
        if verdict != "ok":
            db.close()
            raise _refusal(p, f"is damaged ({verdict})", _RESTORE)
        return records

    def put(self, records: Iterable[Record]) -> int:
        """Adds records in one transaction (all or none); returns how many were new. ArtifactError: read-only."""
        return self._insert([_rows(r) for r in records])

    def _insert(self, rows: list[_Rows]) -> int:
        if self.readonly:
            raise _refusal(self.path, "is pinned (read-only)", "open it without readonly to add records")
        with self._guarded():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                before = self._db.total_changes
                self._db.executemany("INSERT OR IGNORE INTO hardware VALUES (?, ?)", {r.hardware for r in rows})
                self._db.executemany("INSERT OR IGNORE INTO grp VALUES (?, ?)", {r.group for r in rows})
                defined = self._db.total_changes - before
                self._db.executemany("INSERT OR IGNORE INTO record VALUES (?, ?, ?, ?, ?)", [r.record for r in rows])
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            return self._db.total_changes - before - defined

    def rows(
        self, *, group: GroupKey | None = None, hardware: Hardware | None = None, kind: str | None = None
    ) -> tuple[Record, ...]:
        """The records of a group, machine and kind (None: any), in an order that depends on content only.

        ArtifactError: a row's text does not fit its hash.
        """
        filters = {
            "grp": group.digest if group else None,
            "hardware": hardware.digest if hardware else None,
            "kind": kind,
        }
        conditions = {k: v for k, v in filters.items() if v is not None}
        where = " AND ".join(f"{k} = ?" for k in conditions) or "1"
        with self._guarded():
            self._db.execute("BEGIN")  # one snapshot for the three tables
            try:
                machines = dict(self._db.execute("SELECT digest, body FROM hardware").fetchall())
                groups = dict(self._db.execute("SELECT digest, body FROM grp").fetchall())
                cursor = self._db.execute(
                    f"SELECT * FROM record WHERE {where} ORDER BY digest", tuple(conditions.values())
                ).fetchall()
            finally:
                self._db.execute("ROLLBACK")
        read = _Reader(self.path, groups, machines)
        return tuple(read.record(row) for row in cursor)

    def merge(self, other: str | os.PathLike[str]) -> int:
        """Adds all records of another file; returns how many were new. Nothing is added when it is damaged."""
        with Records.open(other, readonly=True) as source:
            return self.put(source.rows())

    def export(self, path: str | os.PathLike[str], rows: Iterable[Record] | None = None) -> None:
        """Writes all records, or these, to a new file, which appears complete or not at all.

        ArtifactError: it exists.
        """
        _create(Path(path), self.rows() if rows is None else rows, exclusive=True)

    def digest(self) -> str:
        """Hash of the content: equal for files with equal records, in whatever order they were written."""
        return sha256("".join(_rows(r).record[0] for r in self.rows()).encode()).hexdigest()[:32]

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            hot = self.readonly and self.path.with_name(self.path.name + "-journal").exists()
            raise _refusal(self.path, f"cannot be used ({e})", _REPLAY if hot else _RESTORE) from e


_REPLAY = "a writer was interrupted: open the file once for writing, which finishes that"
_RESTORE = "restore it from a copy or an export; it was not changed"


@dataclass(frozen=True)
class _Rows:
    """A record as rows of the three tables."""

    hardware: tuple[str, str]
    group: tuple[str, str]
    record: tuple[str, str, str, str, str]


def _rows(r: Record) -> _Rows:
    machine, group = canonical(r.hardware.to_json()), canonical(asdict(r.group))
    body = canonical(r.body())
    h, g = digest_of(r.hardware.to_json()), r.group.digest
    return _Rows((h, machine), (g, group), (_record_digest(h, g, r.kind, body), h, g, r.kind, body))


def _record_digest(hardware: str, group: str, kind: str, body: str) -> str:
    return sha256("\n".join((hardware, group, kind, body)).encode()).hexdigest()[:32]


class _Reader:
    """Turns rows back into records, checking every hash."""

    def __init__(self, path: Path, groups: Mapping[str, str], machines: Mapping[str, str]) -> None:
        self.path = path
        self.groups = {d: self._group(d, body) for d, body in groups.items()}
        self.machines = {d: self._machine(d, body) for d, body in machines.items()}

    def record(self, row: tuple[str, str, str, str, str]) -> Record:
        digest, hardware, group, kind, body = row
        if _record_digest(hardware, group, kind, body) != digest or not (
            hardware in self.machines and group in self.groups
        ):
            raise _refusal(self.path, f"has a damaged record {digest}", _RESTORE)
        data = json.loads(body)
        return Record(
            self.groups[group],
            self.machines[hardware],
            Tile(_pairs(data["compile"]), _pairs(data["launch"])),
            kind,
            tuple((n, float(v)) for n, v in data["values"]),
            _pairs(data["shape"]),
            data["source"],
            data["note"],
        )

    def _group(self, digest: str, body: str) -> GroupKey:
        data = self._load(digest, body)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return GroupKey(**fields)

    def _machine(self, digest: str, body: str) -> Hardware:
        return Hardware.from_json(self._load(digest, body))

    def _load(self, digest: str, body: str) -> Any:
        if sha256(body.encode()).hexdigest()[:32] != digest:
            raise _refusal(self.path, f"has a damaged definition {digest}", _RESTORE)
        return json.loads(body)


def _pairs(data: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((n, int(v)) for n, v in data)


def _create(path: Path, records: Iterable[Record] = (), *, exclusive: bool = False) -> None:
    """Makes a record file beside ``path`` and links it there, so that no half-made file is ever seen."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(fresh, isolation_level=None)) as db:
            db.executescript(
                f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION}; BEGIN; {_SCHEMA} COMMIT;"
            )
            Records(db, fresh, False).put(records)
        try:
            os.link(fresh, path)
        except FileExistsError as e:
            if exclusive:
                raise _refusal(path, "exists already", "choose another path") from e
    except (OSError, sqlite3.Error) as e:
        raise _refusal(path, f"cannot be made ({e})", "check the folder") from e
    finally:
        fresh.unlink(missing_ok=True)


def _check_header(path: Path) -> None:
    """Refuses another program's file before SQLite touches it."""
    try:
        with path.open("rb") as f:
            head = f.read(100)
    except OSError as e:
        raise _refusal(path, f"cannot be read ({e})", "check its permissions") from e
    if len(head) < 100 or not head.startswith(b"SQLite format 3\x00"):
        raise _refusal(path, "is not a record file", "choose another path; it was not changed")
    version, application = struct.unpack_from(">I", head, 60)[0], struct.unpack_from(">I", head, 68)[0]
    if application != _APPLICATION:
        raise _refusal(path, "is another program's database", "choose another path; it was not changed")
    if version != _VERSION:
        raise _refusal(path, f"has record format {version}, not {_VERSION}", "use the polydyn that wrote it")


def _refusal(path: Path, what: str, remedy: str) -> ArtifactError:
    return ArtifactError(f"record file {path.name} {what}", rule="tuning records", remedy=remedy)
