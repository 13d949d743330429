"""Chooses the cases that `make test` leaves out, by their measured times, and writes tests/rare_cases.txt.

    python -m pytest -n 2 -m "" --junitxml=times.xml && python -m tests.support.rare times.xml

Of a test with several cases the fastest are kept: as many as run in ``BUDGET_SECONDS``, at least one, and all that take
less than ``SHORT_SECONDS``. `make test-long` runs the others. A test with one case stays, unless it is marked slow.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

BUDGET_SECONDS, SHORT_SECONDS = 6.0, 2.0
TABLE = Path(__file__).parents[1] / "rare_cases.txt"


def rare_cases() -> dict[str, frozenset[str]]:
    """Return name of a test file -> the cases of the table."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in TABLE.read_text().splitlines():
        found[line.partition("::")[0]].add(line)
    return {file: frozenset(cases) for file, cases in found.items()}


def choose(seconds: Mapping[str, float]) -> list[str]:
    """Return the cases to leave out, of all cases with their times."""
    of_test: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case, time in seconds.items():
        of_test[case.partition("[")[0]].append((time, case))
    return sorted(case for cases in of_test.values() for case in _rest(sorted(cases)))


def _rest(cases: list[tuple[float, str]]) -> Iterable[str]:
    kept = 0.0
    for k, (time, case) in enumerate(cases):
        if k and time > SHORT_SECONDS and kept + time > BUDGET_SECONDS:
            yield case
        else:
            kept += time


def measured(report: Path) -> dict[str, float]:
    """Return the seconds of each case in a report of pytest (JUnit's form)."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(child.tag == "skipped" for child in case):
            file = case.attrib["classname"].replace(".", "/") + ".py"
            found[f"{file}::{case.attrib['name']}"] = float(case.attrib["time"])
    return found


if __name__ == "__main__":
    TABLE.write_text("".join(f"{case}\n" for case in choose(measured(Path(sys.argv[1])))))
