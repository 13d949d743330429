"""Records: measurements with their machine, group and tile, kept in one SQLite file.

Rows are only added, each under the hash of its content. Adding a row twice has no effect, merging is a union, and a
damaged row is detected when it is read. Columns are JSON text. The file uses SQLite's rollback journal, so it is a
single file, may be in a read-only directory, and survives ``kill -9`` at any time. A file of another program, or a
damaged one, is rejected and not changed.
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

from polydyn.errors import ArtifactError, MissingFileError
from polydyn.runtime.tables import Table, counted
from polydyn.search.backbone import GroupKey, Tile, canonical, digest_of
from polydyn.search.hardware import Hardware

_APPLICATION = 0x706F6C79  # "poly"; SQLite stores it at byte 68 of the file
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
    ``throughput`` (seconds at ``shape``, and the number of rounds; without a shape, seconds per operation),
    ``gain`` (over the kernel without tuning, for the tiles in ``note``), ``failed`` (no values; with a ``shape`` it
    failed only there; ``note`` may contain the reason).
    ``source``: ``measured``, or ``model`` if an analytical model ranked tiles without the machine.
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
        """Return the fields other than group and hardware, as plain data."""
        return {
            "compile": self.tile.compile,
            "launch": self.tile.launch,
            "values": self.values,
            "shape": self.shape,
            "source": self.source,
            "note": self.note,
        }

    def row(self) -> dict[str, Any]:
        """Return the columns of a table of records; ``values`` have a column each."""
        tile = " ".join(f"{n}={v}" for n, v in self.tile.compile + self.tile.launch)
        shape = ",".join(f"{n}={v}" for n, v in self.shape)
        return {"group": self.group.digest, "machine": self.hardware.name, "kind": self.kind, "source": self.source,
                "tile": tile, "shape": shape, **dict(self.values), "note": self.note}  # fmt: skip

    def value(self, name: str) -> float:
        """Return one of ``values``. KeyError: it does not exist."""
        return dict(self.values)[name]


_OBJECTS = "SELECT type, name, sql FROM sqlite_master ORDER BY name"


def _foreign_object(db: sqlite3.Connection) -> str:
    """Return a table, view or trigger of a file that ``_SCHEMA`` does not make, or ""."""
    with closing(sqlite3.connect(":memory:")) as own:
        own.executescript(_SCHEMA)
        expected = own.execute(_OBJECTS).fetchall()
    others = [o for o in db.execute(_OBJECTS).fetchall() if o not in expected]
    return f"it has the {others[0][0]} {others[0][1]}" if others else ""


class Records:
    """An open record file. ``Records.open`` creates or opens one; use it as a context manager."""

    def __init__(self, connection: sqlite3.Connection, path: Path, readonly: bool) -> None:
        self._db, self.path, self.readonly = connection, path, readonly

    def __repr__(self) -> str:
        try:
            (count,) = self._db.execute("SELECT COUNT(*) FROM record").fetchone()
            (groups,) = self._db.execute("SELECT COUNT(DISTINCT grp) FROM record").fetchone()
        except sqlite3.Error:  # closed
            return f"<Records {self.path.name}, closed>"
        return f"<Records {self.path.name}: {counted(count, 'record')} of {counted(groups, 'group')}>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def table(self) -> Table[Record]:
        """Return all records as a list that a notebook shows as a table; ``to_pandas()`` returns a DataFrame."""
        return Table(self.rows(), f"records of {self.path.name}", "record")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, readonly: bool = False) -> Records:
        """Open a record file; create it if it does not exist, unless ``readonly`` (a pinned file).

        ArtifactError: the file belongs to another program, is damaged or of another version, or is missing.
        """
        p = Path(path)
        if not p.exists():
            if readonly:
                remedy = "give the path of an existing record file"
                raise MissingFileError(f"record file {p} does not exist", rule="tuning records", remedy=remedy)
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
        if verdict != "ok" or (verdict := _foreign_object(db)):
            db.close()
            raise _refusal(p, f"is damaged ({verdict})", _RESTORE)
        return records

    def put(self, records: Iterable[Record]) -> int:
        """Add records in one transaction (all or none); return the number of new ones. ArtifactError: read-only."""
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
        """Return the records of a group, machine and kind (None: any), in an order that depends only on content.

        ArtifactError: a row's text does not match its hash.
        """
        filters = {
            "grp": group.digest if group else None,
            "hardware": hardware.digest if hardware else None,
            "kind": kind,
        }
        conditions = {k: v for k, v in filters.items() if v is not None}
        where = " AND ".join(f"{k} = ?" for k in conditions) or "1"
        with self._guarded():
            self._db.execute("BEGIN")  # one consistent snapshot of the three tables
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
        """Add all records of another file; return the number of new ones. Nothing is added if it is damaged."""
        with Records.open(other, readonly=True) as source:
            return self.put(source.rows())

    def export(self, path: str | os.PathLike[str], rows: Iterable[Record] | None = None) -> None:
        """Write all records, or ``rows``, to a new file, which appears complete or not at all.

        ArtifactError: the file exists.
        """
        _create(Path(path), self.rows() if rows is None else rows, exclusive=True)

    def digest(self) -> str:
        """Return the hash of the content. It is equal for equal records, independent of the order of writing."""
        return sha256("".join(_rows(r).record[0] for r in self.rows()).encode()).hexdigest()[:32]

    def close(self) -> None:
        """Close the file."""
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


_REPLAY = "a writer was interrupted: open the file once for writing to finish that transaction"
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
    """Converts rows to records and checks every hash."""

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
    """Create a record file next to ``path`` and link it there, so that an incomplete file is never visible."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.executescript(
                f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION}; BEGIN; {_SCHEMA} COMMIT;"
            )
            Records(db, temporary, False).put(records)
        try:
            os.link(temporary, path)
        except FileExistsError as e:
            if exclusive:
                raise _refusal(path, "already exists", "choose another path") from e
    except (OSError, sqlite3.Error) as e:
        raise _refusal(path, f"cannot be created ({e})", "check the folder") from e
    finally:
        temporary.unlink(missing_ok=True)


def _check_header(path: Path) -> None:
    """Reject another program's file before SQLite opens it."""
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


def _refusal(path: Path, problem: str, remedy: str) -> ArtifactError:
    return ArtifactError(f"record file {path.name} {problem}", rule="tuning records", remedy=remedy)
