"""Write docs/licences.md: the licences of the packages that polydyn installs, from their own metadata.

    python docs/licences.py

Packages that are not installed keep the row that the page has of them.
"""

from __future__ import annotations

import configparser
import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences

polydyn is Apache-2.0 (`LICENSE`). The packages that it installs have these licences, as their own
metadata state them (written by `python docs/licences.py`). Indirect dependencies are not listed; `pip-licenses` does.

| package | needed for | licence |
|---|---|---|
"""


def dependencies() -> dict[str, list[str]]:
    """Map each package to the extras that install it; the empty name stands for polydyn itself."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    groups = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    extras: dict[str, list[str]] = {}
    for extra, lines in groups.items():
        for line in lines.split("\n"):
            if name := re.match(r"[\w.-]+", line.strip()):
                extras.setdefault(name[0], []).append(extra)
    return extras


def licence(package: str) -> str | None:
    """Return the licence that the metadata of an installed package state, or None if it is not installed."""
    try:
        fields = metadata(package)
    except PackageNotFoundError:
        return None
    if text := fields.get("License-Expression"):
        return text
    classes = [c.split(" :: ")[-1] for c in fields.get_all("Classifier") or () if c.startswith("License :: ")]
    names = [c for c in classes if c != "OSI Approved"]
    return ", ".join(names) or (fields.get("License") or "not said").splitlines()[0]


def rows(page: str) -> dict[str, str]:
    """Return the row of every package, from its metadata or else from the present page."""
    before = {m[1]: m[2] for m in re.finditer(r"^\| ([\w.-]+) \| [^|]* \| ([^|]*) \|$", page, re.MULTILINE)}
    found = {}
    for package, extras in sorted(dependencies().items()):
        name = licence(package) or before.get(package, "not installed here")
        uses = "polydyn itself" if "" in extras else ", ".join(f"`[{e}]`" for e in sorted(extras))
        found[package] = f"| {package} | {uses} | {name} |"
    return found


def main() -> None:
    """Write the page."""
    PAGE.write_text(HEAD + "\n".join(rows(PAGE.read_text() if PAGE.exists() else "").values()) + "\n")


if __name__ == "__main__":
    main()
