"""A plugin of pytest that measures processor seconds of every case, with all processes that it waited for.

    python -m pytest -n 2 -p tests.support.processor --junitxml=times.xml

The report has them as the property ``processor`` of a case. Fixtures that cases share are not in it: the property
``fixtures`` has the seconds of the slowest one that the case uses. Seconds on the clock depend on what else runs on
the machine; these hardly do.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

PROPERTY, FIXTURES = "processor", "fixtures"
_START = pytest.StashKey[float]()
_SHARED = pytest.StashKey[dict[str, float]]()
"""Of a session: file and name of a shared fixture -> seconds."""


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _key(item: pytest.Item, fixture: str) -> str:
    return f"{item.nodeid.partition('::')[0]}::{fixture}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to measure a case."""
    item.stash[_START] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Measure a shared fixture, and take its time off the case that is the first to use it."""
    before = processor_seconds()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _count(request._pyfuncitem, fixturedef.argname, processor_seconds() - before)


def _count(item: pytest.Item, fixture: str, seconds: float) -> None:
    shared, key = item.session.stash.setdefault(_SHARED, {}), _key(item, fixture)
    shared[key] = max(seconds, shared.get(key, 0.0))
    item.stash[_START] += seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write the seconds of a case into the report of its teardown, which comes last."""
    report = yield
    if call.when == "teardown":
        shared = item.session.stash.get(_SHARED, {})
        slowest = max((shared.get(_key(item, name), 0.0) for name in item.fixturenames), default=0.0)
        spent = processor_seconds() - item.stash[_START]
        report.user_properties += [(PROPERTY, f"{spent:.3f}"), (FIXTURES, f"{slowest:.3f}")]
    return report
