"""Chooses the cases that `make test` leaves out, by their measured times, and writes tests/rare_cases.txt.

    python -m pytest -n 2 -m "" --junitxml=times.xml && python -m tests.support.rare times.xml

Of a test with several cases the fastest are kept: as many as run in ``BUDGET_SECONDS``, at least one, and all that take
less than ``SHORT_SECONDS``. Then no case is kept that takes longer than ``LONGEST_SECONDS``, less in folders of
``FOLDER_SECONDS``, except ``ESSENTIAL`` and the fastest case of a file. `make test-long` runs the others. `make
test-cuda` runs every test of CUDA, which a change of its kernels or of the emulator needs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

BUDGET_SECONDS, SHORT_SECONDS, LONGEST_SECONDS = 6.0, 2.0, 10.0
FOLDER_SECONDS = {"tests/cuda": 3.0, "tests/benchmarks": 6.0, "tests/cli": 6.0}
"""Maximum seconds of a case in a folder. No kernel of CUDA has run on a GPU yet, and their texts rarely change."""
ESSENTIAL = frozenset({
    "tests/benchmarks/test_house.py::test_no_modules_import_each_other",
    "tests/cli/test_jobs.py::test_a_batch_goes_on_after_a_failure_and_resumes",
    "tests/cuda/test_cuda_program.py::test_models_run_at_every_shape_compiled_once[bert_tiny]",
    "tests/models/test_code_blocks.py::test_the_first_page",
    "tests/unit/onnx/test_operators_spatial.py::test_a_share_of_the_onnx_node_tests",
    "tests/unit/plans/test_planted_mistakes.py::test_mistakes_are_seen",
})
"""Slow cases without a faster one of the same kind."""
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
    rest = {case for cases in of_test.values() for case in _rest(sorted(cases))}
    return sorted(rest | _long({case: time for case, time in seconds.items() if case not in rest}))


def _long(seconds: Mapping[str, float]) -> set[str]:
    """Return the cases that take too long, except the fastest of each file."""
    fastest: dict[str, str] = {}
    for case in sorted(seconds, key=lambda x: (seconds[x], x)):
        fastest.setdefault(case.partition("::")[0], case)

    def limit(case: str) -> float:
        return next((s for folder, s in FOLDER_SECONDS.items() if case.startswith(folder)), LONGEST_SECONDS)

    kept = ESSENTIAL | set(fastest.values())
    return {case for case, time in seconds.items() if time > limit(case) and case not in kept}


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
