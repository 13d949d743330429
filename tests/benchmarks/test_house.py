"""Limits on the counts of ``benchmarks.house``."""

from __future__ import annotations

from benchmarks.house import circles, graph
from tests.support.paths import ROOT


def test_no_modules_import_each_other() -> None:
    assert circles(graph(ROOT)) == []
