"""A plugin of pytest that measures processor seconds of every case, with all processes that it waited for.

    python -m pytest -n 2 -p tests.support.processor --junitxml=times.xml

The report has them as the property ``processor`` of a case. A fixture that cases share counts for the first one.
Seconds on the clock depend on what else runs on the machine; these hardly do.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

PROPERTY = "processor"
_START = pytest.StashKey[float]()


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to measure a case."""
    item.stash[_START] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write the seconds of a case into the report of its teardown, which comes last."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROPERTY, f"{processor_seconds() - item.stash[_START]:.3f}"))
    return report
