"""The last run of a batch as JUnit XML, which continuous integration shows: a test case for each step."""

from __future__ import annotations

import re
import time
from pathlib import Path
from xml.etree import ElementTree

from polydyn.build.cache import write_atomically
from polydyn.jobs.ledger import DONE, Attempt, Ledger, latest

NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that XML 1.0 does not allow."""


def write_junit(ledger: Ledger, name: str, path: Path) -> None:
    """Write the last run of a ledger. Steps that were done before are skipped cases. OSError: it cannot be written."""
    runs = ledger.runs()
    number, began, ended, _, _ = runs[-1] if runs else (0, 0.0, 0.0, "", "")
    final = latest(ledger.attempts(number))
    steps = ledger.steps(number)
    failed = [a for a in final.values() if a.outcome != DONE]
    suite = ElementTree.Element(
        "testsuite", name=name, tests=str(len(steps)), failures=str(len(failed)), errors="0",
        skipped=str(len(steps) - len(final)), time=f"{(ended or began) - began:.3f}",
        timestamp=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began)),
    )  # fmt: skip
    for s in steps:
        a = final.get(s.job)
        case = ElementTree.SubElement(suite, "testcase", classname=f"{s.kind}.{s.target}", name=s.job)
        case.set("time", f"{_seconds(a):.3f}")
        _outcome(case, a)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    write_atomically(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _outcome(case: ElementTree.Element, a: Attempt | None) -> None:
    """Add the outcome of a step and its output to a test case."""
    if a is None:
        ElementTree.SubElement(case, "skipped", message="done before")
        return
    if a.outcome != DONE:
        message = _text(a.error.partition("\n")[0])
        ElementTree.SubElement(case, "failure", type=a.outcome, message=message).text = _text(a.error)
    if a.log:
        ElementTree.SubElement(case, "system-out").text = _text(a.log)


def _seconds(a: Attempt | None) -> float:
    return 0.0 if a is None or a.ended is None else a.ended - a.began


def _text(text: str) -> str:
    return NOT_XML.sub("?", text)
