"""Saved programs whose archive is made to do harm: each is rejected by name, before its library is opened."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polydyn
from polydyn.errors import ArtifactError
from polydyn.program.assemble import build_artifact
from polydyn.runtime import artifact
from polydyn.runtime.artifact import MANIFEST, WEIGHTS, read_artifact, write_artifact
from polydyn.testing.damage_artifacts import damaged, opened, sanitized_loader
from tests.support.programs import example

Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "p"
    write_artifact(build_artifact(example(), "cpu:baseline")[0], path)
    return path


def packed(saved: Path, to: Path, edit: Callable[[Members, dict[str, Any]], None]) -> Path:
    """Write the archive again after an edit of its members and manifest, with matching hashes."""
    with zipfile.ZipFile(saved) as z:
        first = z.getinfo(WEIGHTS)
        members = [(n, z.read(n)) for n in z.namelist() if n not in (WEIGHTS, MANIFEST)]
        manifest, weights = json.loads(z.read(MANIFEST)), z.read(WEIGHTS)
    edit(members, manifest)
    for name, data in members:
        manifest["sha256"].setdefault(name, hashlib.sha256(data).hexdigest())
    text = json.dumps(manifest).encode()
    with zipfile.ZipFile(to, "w") as z, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zipfile, about names that are there twice
        with z.open(first, "w", force_zip64=True) as f:
            f.write(weights)
        for name, data in [(MANIFEST, text), *members]:
            z.writestr(name, data, zipfile.ZIP_DEFLATED)
        z.comment = hashlib.sha256(text).hexdigest().encode()
    return to


def test_an_archive_that_is_packed_again_is_read(saved: Path, tmp_path: Path) -> None:
    """The edits below are what is rejected, not the packing."""
    polydyn.load(packed(saved, tmp_path / "p", lambda members, manifest: None))


EDITS: dict[str, Callable[[Members, dict[str, Any]], None]] = {
    "is there twice": lambda members, _: members.append(members[0]),
    r"member sources/\.\./\.\./x\.c has a path": lambda members, _: members.append(("sources/../../x.c", b"int x;")),
    "member /tmp/x has a path": lambda members, _: members.append(("/tmp/x", b"")),
    "member a//b has a path": lambda members, _: members.append(("a//b", b"")),
    "lib.so does not match its hash": lambda _, manifest: manifest["sha256"].update({"lib.so": "0" * 64}),
    "lost": lambda _, manifest: manifest["sha256"].update(lost="0" * 64),
    "where the manifest says": lambda _, manifest: manifest["weights"].update(bytes=2**50),
    "the weights are not": lambda _, manifest: manifest["weights"].update(offset=0),
    "members unpack to": lambda members, _: members.append(("sources/zeros", bytes(artifact.MAX_UNPACKED_BYTES))),
}


@pytest.mark.parametrize("message", EDITS)
def test_hostile_members_are_rejected(
    saved: Path, tmp_path: Path, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(ArtifactError, match=message):
        polydyn.load(packed(saved, tmp_path / "p", EDITS[message]))


def test_a_member_without_a_hash_is_rejected(saved: Path, tmp_path: Path) -> None:
    data = io.BytesIO(saved.read_bytes())
    with zipfile.ZipFile(data, "a") as z:
        z.writestr("more", b"more")
    (tmp_path / "p").write_bytes(data.getvalue())
    with pytest.raises(ArtifactError, match="member more has no hash"):
        polydyn.load(tmp_path / "p")


def test_members_that_overlap_are_rejected(saved: Path, tmp_path: Path) -> None:
    """Every entry of the directory points at the same data: a small file would unpack to many times its size."""
    data = bytearray(saved.read_bytes())
    start = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", start + 4)
    third = data.index(b"PK\1\2", second + 4)
    data[third + 42 : third + 46] = data[second + 42 : second + 46]
    assert struct.unpack("<I", data[third + 42 : third + 46])[0] > 0
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(ArtifactError, match="overlaps another one"):
        polydyn.load(tmp_path / "p")


def test_damaged_programs_are_rejected_or_equal(saved: Path) -> None:
    """``make damage-artifacts`` has thousands."""
    assert [damaged(saved.read_bytes(), number) for number in range(100)] == [""] * 100


@pytest.mark.compiler
def test_the_c_loader_reads_no_byte_outside_a_damaged_file(saved: Path, tmp_path: Path) -> None:
    loader = sanitized_loader(read_artifact(saved), tmp_path)
    assert [opened(loader, saved.read_bytes(), number) for number in range(20)] == [""] * 20
