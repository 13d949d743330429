"""Chooses the cases that `make test` leaves out, by their processor seconds, and writes tests/rare_cases.txt.

Likewise tests/heavy_cases.txt: cases under tests/unit that `make unit` leaves out and `make test` runs.

    python -m pytest -n 2 -m "" -p tests.support.processor --junitxml=times.xml
    python -m tests.support.rare times.xml

Of a test with several cases those are kept that together take ``BUDGET_SECONDS``: first the case with the most values
of parameters that no kept case has, of equal ones the fastest. At least one is kept, and all that take less than
``SHORT_SECONDS``. Then no case is kept that takes longer than ``LONGEST_SECONDS``, less in folders of
``FOLDER_SECONDS``, except ``ESSENTIAL`` and the fastest case of a file; no case of a shared fixture that takes longer
than ``FIXTURE_SECONDS``. What begins with ``KEPT`` stays. `make test-long` runs the others. `make
test-cuda` runs every test of CUDA, which a change of its kernels or of the emulator needs.

The limits are seconds of a Zen 1 core at 2.0 GHz. Cases of the table that no report names stay in it, so that a report
of `make test` alone takes further cases out; a report with ``-m ""`` decides about all of them again.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.support.processor import FIXTURES, PROPERTY

BUDGET_SECONDS, SHORT_SECONDS, LONGEST_SECONDS = 2.0, 0.7, 5.0
FOLDER_SECONDS = {"tests/cuda": 3.5, "tests/benchmarks": 3.5, "tests/cli": 3.5}
"""Maximum seconds of a case in a folder. No kernel of CUDA has run on a GPU yet, and their texts rarely change."""
ESSENTIAL = frozenset(
    {
        "tests/benchmarks/test_house.py::test_no_modules_import_each_other",
        "tests/benchmarks/test_soak_and_kills.py::test_killed_writers_leave_nothing_half_written",
        "tests/cli/test_jobs.py::test_a_batch_goes_on_after_a_failure_and_resumes",
        "tests/cuda/test_cuda_program.py::test_models_run_at_every_shape_compiled_once[bert_tiny at one shape]",
        "tests/models/test_code_blocks.py::test_the_first_page",
        "tests/unit/onnx/test_operators_spatial.py::test_a_share_of_the_onnx_node_tests",
        "tests/unit/plans/test_planted_mistakes.py::test_mistakes_are_seen",
    }
)
"""Slow cases without a faster one of the same kind."""
KEPT = (
    "tests/kernels/test_bugs.py", "tests/models/test_fuzzed_models.py::test_a_kept_model", "tests/unit/house/",
    "tests/cuda/test_gpu_primitives.py::test_primitive_equals_numpy",
    "tests/cuda/test_cuda_indices.py::test_a_wrong_index", "tests/cuda/test_cuda_masks.py::test_rows_without_a_key",
    "tests/models/test_code_blocks.py", "tests/program/test_quantize.py::test_every_kind",
)  # fmt: skip
"""Beginnings of names that stay: each case pins a bug or runs a page, or many cases share one compilation."""
FIXTURE_SECONDS = 8.0
"""Maximum seconds of a fixture that cases under tests/cuda share."""
UNIT_SECONDS = 0.4
"""Maximum seconds of a case in `make unit`, and of a fixture that it shares."""
TESTS = Path(__file__).parents[1]
TABLE, HEAVY_TABLE = TESTS / "rare_cases.txt", TESTS / "heavy_cases.txt"
"""Cases that `make test` leaves out, and cases under tests/unit that only `make unit` leaves out."""


def cases_of(table: Path) -> dict[str, frozenset[str]]:
    """Return name of a test file -> its cases in a table."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in table.read_text().splitlines():
        found[line.partition("::")[0]].add(line)
    return {file: frozenset(cases) for file, cases in found.items()}


def choose(seconds: Mapping[str, float], fixtures: Mapping[str, float]) -> list[str]:
    """Return the cases to leave out, of all cases with their times and those of the fixtures that they share."""
    of_test: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case, time in seconds.items():
        of_test[case.partition("[")[0]].append((time, case))
    rest = {case for cases in of_test.values() for case in _rest(sorted(cases))}
    long = _long({case: time for case, time in seconds.items() if case not in rest}, fixtures)
    return sorted(case for case in rest | long if not case.startswith(KEPT))


def _long(seconds: Mapping[str, float], fixtures: Mapping[str, float]) -> set[str]:
    """Return the cases that take too long, alone or by a fixture, except the fastest of each file."""
    fastest: dict[str, str] = {}
    for case in sorted(seconds, key=lambda x: (max(seconds[x], fixtures.get(x, 0.0)), x)):
        fastest.setdefault(case.partition("::")[0], case)

    def limit(case: str) -> float:
        return next((s for folder, s in FOLDER_SECONDS.items() if case.startswith(folder)), LONGEST_SECONDS)

    kept = ESSENTIAL | set(fastest.values())
    shared = {case for case, time in fixtures.items() if time > FIXTURE_SECONDS and case.startswith("tests/cuda/")}
    return {c for c, time in seconds.items() if (time > limit(c) or c in shared) and c not in kept}


def _rest(cases: list[tuple[float, str]]) -> Iterable[str]:
    """Return the cases of one test that do not fit, of its cases with their times, fastest first."""
    kept, values, left = 0.0, set[tuple[int, str]](), list(cases)
    while left:
        time, case = max(left, key=lambda x: len(_values(x[1], cases) - values))  # the fastest of equal ones
        left.remove((time, case))
        if values and time > SHORT_SECONDS and kept + time > BUDGET_SECONDS:
            yield case
        else:
            kept += time
            values |= _values(case, cases)


def _values(case: str, cases: list[tuple[float, str]]) -> set[tuple[int, str]]:
    """Return the (position, value) of a case's parameters; its whole name if the names of the cases differ in form."""
    parts = _parts(case)
    alike = all(len(_parts(c)) == len(parts) for _, c in cases)
    return set(enumerate(parts)) if alike else {(0, case)}


def _parts(case: str) -> list[str]:
    return case.partition("[")[2].removesuffix("]").split("-")


def measured(report: Path, name: str = PROPERTY) -> dict[str, float]:
    """Return the processor seconds of each case in a report of pytest (JUnit's form), or of its slowest fixture.

    ValueError: the report has none, because the plugin of tests.support.processor was not loaded.
    """
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(child.tag == "skipped" for child in case):
            seconds = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
            if name not in seconds:
                raise ValueError(f"{report} has no processor seconds: run pytest with -p tests.support.processor")
            file = case.attrib["classname"].replace(".", "/") + ".py"
            found[f"{file}::{case.attrib['name']}"] = float(seconds[name])
    return found


def main(reports: Sequence[str]) -> None:
    """Write the table from reports; a case in several of them has the time of the last."""
    seconds, fixtures = (
        {case: time for report in reports for case, time in measured(Path(report), name).items()}
        for name in (PROPERTY, FIXTURES)
    )
    heavy = {c for c, s in seconds.items() if c.startswith("tests/unit/") and max(s, fixtures[c]) > UNIT_SECONDS}
    for table, chosen in ((TABLE, set(choose(seconds, fixtures))), (HEAVY_TABLE, heavy)):
        before = set(table.read_text().splitlines())
        table.write_text("".join(f"{case}\n" for case in sorted(chosen | before - set(seconds))))


if __name__ == "__main__":
    main(sys.argv[1:])
