"""The public names and signatures of polydyn equal tests/golden/public.txt.

A difference is a change of the interface: read it, write it into CHANGELOG.md, then ``--update-golden``.
"""

from __future__ import annotations

import configparser
import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any

import polydyn
from polydyn.build.cache import OF_PACKAGE
from tests.support.paths import ROOT

MODULES = ("polydyn", "polydyn.session", "polydyn.ort", "polydyn.extend", "polydyn.explore", "polydyn.explore.pictures")


def public(module: str) -> dict[str, Any]:
    """Return public names and their objects."""
    found = import_module(module)
    return {n: getattr(found, n) for n in sorted(getattr(found, "__all__", None) or found._LAZY)}


def lines(module: str) -> Iterator[str]:
    """Yield the public names of a module, one per line, members of classes indented; each class is listed once."""
    yield f"== {module}"
    earlier = {id(x): m for m in MODULES[: MODULES.index(module)] for x in public(m).values() if inspect.isclass(x)}
    for name, x in public(module).items():
        if id(x) in earlier:
            yield f"class {name}: {earlier[id(x)]}.{name}"
        elif inspect.isclass(x):
            bases = ", ".join(b.__name__ for b in x.__bases__ if b is not object)
            yield f"class {name}({bases})" if bases else f"class {name}"
            yield from (f"    {line}" for line in members(x))
        else:
            yield f"{name}{signature(x)}" if inspect.isfunction(x) else f"{name}: {type(x).__name__}"


def members(x: type) -> Iterator[str]:
    """Yield the constructor, methods and properties that a class adds to its bases; an enumeration's values."""
    if issubclass(x, Enum):
        yield from (f"{m.name} = {m.value}" for m in x)
        return
    if "__init__" in vars(x) and not issubclass(x, BaseException) and not getattr(x, "_is_protocol", False):
        yield f"__init__{signature(x.__init__)}"  # type: ignore[misc]
    fields = {f.name for f in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else set()
    for name, member in sorted(vars(x).items()):
        if name.startswith("_") or name in fields:
            continue
        if isinstance(member, (staticmethod, classmethod)):
            yield f"{type(member).__name__} {name}{signature(member.__func__)}"
        elif isinstance(member, property):
            yield f"property {name}: {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(member):
            yield f"{name}{signature(member)}"


def signature(f: Any) -> str:
    """Return parameters with their types as they are written."""
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.signature(f)).replace("'", ""))


def test_the_public_interface_is_the_stored_one(golden: Callable[[str, str], None]) -> None:
    golden("public.txt", "\n".join(line for m in MODULES for line in lines(m)))


def test_names_that_are_imported_late_are_visible() -> None:
    """They are in ``dir``, for completion, and in ``__all__``; type checkers see each of them."""
    source = (ROOT / "polydyn" / "__init__.py").read_text().partition("if TYPE_CHECKING:")[2].partition("\n\n")[0]
    assert polydyn.__all__ == sorted(polydyn._LAZY) and {*polydyn.__all__} <= {*dir(polydyn)}
    assert {line.rpartition(" as ")[2] for line in source.splitlines() if line} == {*polydyn.__all__, *polydyn._MODULES}
    for module in MODULES:
        assert {*public(module)} <= {*dir(import_module(module))}, module


def test_every_public_parameter_has_a_type() -> None:
    bare = []
    for module in MODULES:
        for name, x in public(module).items():
            if inspect.isfunction(x) and x.__module__.startswith("polydyn"):
                said = {n: p.annotation for n, p in inspect.signature(x).parameters.items()}
                said["return"] = inspect.signature(x).return_annotation
                bare += [f"{module}.{name}: {n}" for n, a in said.items() if a is inspect.Parameter.empty]
    assert not bare


def test_systems_without_futexes_are_refused_with_a_sentence() -> None:
    for system in ("darwin", "win32"):
        code = f"import sys; sys.platform = {system!r}; import polydyn"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: polydyn runs on Linux") and system in last and "container" in last


def test_every_kind_of_file_is_in_the_wheel() -> None:
    """``polydyn extract`` needs the C++ header of an installed polydyn too."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packed = {p.strip().rpartition("*")[2] for p in config["options.package_data"]["*"].split(",")}
    packed |= {".py", ".md"}  # pages are for readers of the repository
    folders = [ROOT / "polydyn", ROOT / "schedules", ROOT / "codegen"]
    files = [f for folder in folders for f in folder.rglob("*") if f.is_file()]
    files = [f for f in files if not {"__pycache__", OF_PACKAGE.name} & {*f.parts}]
    assert {f.name if f.name in packed else f.suffix for f in files} <= packed


def test_the_metadata_of_the_package_is_complete_and_invents_nothing() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    data = config["metadata"]
    assert data["author"] == "polydyn developers" and data["version"] == polydyn.__version__
    assert not {"url", "project_urls", "download_url", "author_email"} & {*data}, "there are none yet"
    classifiers = data["classifiers"].split("\n")[1:]
    assert classifiers == sorted(classifiers) and "Typing :: Typed" in classifiers
    assert (ROOT / "polydyn" / "py.typed").exists() and len(data["keywords"].split("\n")) > 4
    tested = re.search(r"VERSIONS = \((.*)\)", (ROOT / "tests/cli/test_release.py").read_text())
    assert tested is not None
    named = [c.rpartition(" ")[2] for c in classifiers if re.fullmatch(r".*Python :: 3\.\d+", c)]
    assert named == re.findall(r"[\d.]+", tested[1]) and config["options"]["python_requires"] == f">={named[0]}"
