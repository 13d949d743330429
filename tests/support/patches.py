"""Patches inside a document: the unified diffs of its ``diff`` blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@$")


@dataclass(frozen=True)
class Change:
    """One hunk: ``before`` becomes ``after`` in the file ``path``; ``line`` is where it was, 0 for a new file."""

    path: str
    line: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Edit the file below ``root``. ValueError if its lines are not there."""
        file = root / self.path
        if not self.line:
            if file.exists():
                raise ValueError(f"{self.path} exists already")
            file.write_text("\n".join(self.after) + "\n")
            return
        lines = file.read_text().splitlines()
        places = [i for i in range(len(lines)) if tuple(lines[i : i + len(self.before)]) == self.before]
        if not places:
            raise ValueError(f"{self.path} has no lines {list(self.before)}")
        place = min(places, key=lambda i: abs(i - self.line))
        lines[place : place + len(self.before)] = self.after
        file.write_text("\n".join(lines) + "\n")


def changes(page: str) -> list[Change]:
    """Return the hunks of a Markdown page in order. ValueError if the lines of a hunk are not as many as it says."""
    found = []
    for block in re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        path, rest = "", block.splitlines()
        while rest:
            head = rest.pop(0)
            if head.startswith("+++ b/"):
                path = head.removeprefix("+++ b/")
            elif match := HUNK.match(head):
                line, old, new = int(match[1]), int(match[2] or 1), int(match[3] or 1)
                size = next((i for i, x in enumerate(rest) if x.startswith(("@@ ", "--- "))), len(rest))
                hunk, rest = rest[:size], rest[size:]
                before = tuple(x[1:] for x in hunk if not x.startswith("+"))
                after = tuple(x[1:] for x in hunk if not x.startswith("-"))
                if (len(before), len(after)) != (old, new):
                    raise ValueError(f"{path}: {head} has {len(before)} and {len(after)} lines")
                found.append(Change(path, line, before, after))
    return found
