"""Tests in this folder need no compiler, so that all of them take less than a minute."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that need a compiler are marked ``compiler``, and omitted by ``make unit``; all others have none."""
    if "compiler" not in request.keywords:
        monkeypatch.setenv("CC", "no-compiler-in-unit-tests")
