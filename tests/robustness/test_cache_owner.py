"""The cache folder: what it holds is run, so it is used only if no other user may write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import polydyn
from polydyn.build.cache import cache_dir
from polydyn.errors import BuildError
from polydyn.program_store import store_program, stored_program
from polydyn.runtime.artifact import write_artifact
from tests.support.tiny import model, node


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_new_cache_folders_are_for_their_user_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        folder = cache_dir("lib")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (cache, folder)] == [0o700, 0o700]


@pytest.mark.parametrize("kind", ["", "programs"])
def test_a_cache_that_every_user_may_write_to_is_not_used(cache: Path, kind: str) -> None:
    m = model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"])
    program = polydyn.compile(m)
    store_program(program, "key")
    assert stored_program("key") is not None
    (cache / kind).chmod(0o777)
    assert stored_program("key") is None
    with pytest.raises(BuildError, match=r"(?s)every user may write to the cache folder.*chmod o-w"):
        cache_dir("programs")
    write_artifact(program._artifact, cache.parent / "p")
    polydyn.load(cache.parent / "p")  # its library is loaded from memory


def test_a_cache_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir("lib")
    (cache.parent / "link").symlink_to(cache)
    monkeypatch.setenv("POLYDYN_CACHE", str(cache.parent / "link"))
    cache_dir("lib")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if cache.stat().st_uid == 0:
        os.chown(cache, 4321, -1)
    with pytest.raises(BuildError, match=r"user \d+ owns the cache folder"):
        cache_dir("lib")
