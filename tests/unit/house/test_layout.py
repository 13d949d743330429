"""The rules of the house that no type checker sees: import order, links, file lengths, forbidden words."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.packages import build_wheel, copy_sources
from tests.support.paths import ROOT

# Each room may import itself and the rooms before it; docs/adr/0002-one-primitive.md.
ORDER = [
    "timing", "clock", "schedules", "debug", "capability", "logs", "codegen", "errors", "onnx_runtime", "shapes",
    "graph", "fusion", "lowering", "build", "arguments", "gpu", "runtime", "program", "search", "backends", "compiler",
    "measure",
]  # fmt: skip
STAGES = ["group", "laws", "solution", "tree", "proof"]
"""The folders of ``schedules/``: each may import itself and the folders before it."""
TOP = {
    "compiler", "checked", "cli", "extend", "generation", "explore", "backend",
    "program_cache", "program_key", "program_store", "quantization", "quick_child", "quick_start", "origins",
    "session", "ort", "jobs", "torch_backend", "testing", "verification", "__init__", "__main__",
}  # fmt: skip
AFTER_IMPORT = [
    "schedules", "codegen", "polydyn/fusion", "polydyn/lowering", "polydyn/build", "polydyn/program", "polydyn/runtime",
]  # fmt: skip
# Words that are ONNX operators and also words of schedules, C or numpy.
HOMONYMS = {"If", "Loop", "Scan", "Not", "And", "Or", "Xor", "Mod", "Range", "Concat", "Identity", "Constant"}


def sources(*folders: str) -> list[Path]:
    """Return Python files, each once: linked folders are visited only at their target."""
    found = []
    for folder in folders or ("polydyn", "schedules", "codegen", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if not any((ROOT / parent).is_symlink() for parent in list(inside.parents)[:-1]):
                found.append(path)
    return found


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return absolute names of the modules that a file imports, anywhere in the file."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in _statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "polydyn" else [module]


def _statements(body: list[Any]) -> Iterator[ast.AST]:
    """Yield all statements, also those inside of others; expressions are not visited."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, field, []))


def room(path: Path) -> str:
    """Return the room of a file: its folder inside polydyn, or its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "polydyn" else parts[0]


def allowed(path: Path, module: str) -> bool:
    """Return whether a file may import a polydyn module by the order of rooms."""
    own, parts = room(path), module.split(".")
    other = parts[1] if len(parts) > 1 else "__init__"
    if own in TOP or own == other:
        return True
    if other.startswith("__"):
        return True
    if own == "codegen":
        return other in ("codegen", "schedules", "timing", "clock", "debug", "capability")
    return other in ORDER and own in ORDER and ORDER.index(other) < ORDER.index(own)


def polydyn_imports(path: Path) -> list[str]:
    return [m for m in imports(path) if m == "polydyn" or m.startswith("polydyn.")]


@pytest.mark.parametrize("folder", ["schedules", "codegen", "polydyn"])
def test_imports_go_one_way(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(folder)
        for module in polydyn_imports(path)
        if not allowed(path, module)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_stages_of_schedules_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for own, stage in enumerate(STAGES)
        for path in sources(f"schedules/{stage}")
        for module in polydyn_imports(path)
        if module.split(".")[2:3] and module.split(".")[2] in STAGES[own + 1 :]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    """Code that tests and benchmarks share is in ``polydyn/testing``."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("polydyn", "schedules", "codegen", "tests")
        for module in imports(path)
        if module.split(".")[0] == "benchmarks" and not path.is_relative_to(ROOT / "tests" / "benchmarks")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_order_is_not_empty_talk() -> None:
    assert not allowed(ROOT / "schedules/index.py", "polydyn.codegen.ir")
    assert not allowed(ROOT / "schedules/index.py", "polydyn.errors")
    assert not allowed(ROOT / "codegen/ir.py", "polydyn.graph.ir")
    assert not allowed(ROOT / "polydyn/fusion/plan.py", "polydyn.lowering.groups")
    assert allowed(ROOT / "polydyn/lowering/groups.py", "polydyn.fusion.plan")


def test_code_says_polydyn_schedules_and_polydyn_codegen() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        for module in imports(path)
        if module.split(".")[0] in ("schedules", "codegen")
    ]
    assert not wrong, "\n".join(wrong)


def test_schedules_know_nothing_of_onnx() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("schedules", "codegen", "polydyn/fusion", "polydyn/lowering", "polydyn/program")
        for module in imports(path)
        if module.split(".")[0] in ("onnx", "onnxruntime", "torch")
    ]
    assert not wrong, "\n".join(wrong)


def test_code_generation_is_known_from_lowering_on() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("polydyn/shapes", "polydyn/graph", "polydyn/fusion")
        for module in polydyn_imports(path)
        if module.startswith("polydyn.codegen")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_operator_names_after_import() -> None:
    names = {s.name for s in onnx.defs.get_all_schemas()} - HOMONYMS
    quoted = re.compile(f"[\"'](?:{'|'.join(sorted(names))})[\"']")
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} says {node.value!r}"
        for path in sources(*AFTER_IMPORT)
        if quoted.search(path.read_text())  # walking all trees takes long
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not wrong, "\n".join(wrong)


def test_no_pickle() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = [str(path.relative_to(ROOT)) for path in sources() if unsafe & {m.split(".")[0] for m in imports(path)}]
    assert not wrong


def test_links_are_intact() -> None:
    for name in ("schedules", "codegen"):
        link = ROOT / "polydyn" / name
        assert link.is_symlink() and str(link.readlink()) == f"../{name}"


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in sources("polydyn", "schedules", "codegen")}
    missing = sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists())
    assert not missing, f"a wheel leaves out folders without __init__.py: {missing}"


def test_no_file_over_500_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_no_machine_paths() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home|farm|Users)/")
    texts = [*sources(), *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", ROOT / "setup.cfg"]
    folders = ("polydyn", "schedules", "codegen", "tests", "benchmarks")
    texts += [p for f in folders for p in (ROOT / f).rglob("*.*") if p.suffix in {".c", ".h", ".cuh", ".json"}]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_wheel_holds_both_linked_packages(tmp_path: Path) -> None:
    copy = copy_sources(tmp_path / "source")
    with zipfile.ZipFile(build_wheel(copy, tmp_path)) as archive:
        held = set(archive.namelist())

    kinds = {".py", ".c", ".h", ".cuh", ".json", ".csv"}
    inside = copy / "polydyn"
    files = [path for folder in (inside, inside / "schedules", inside / "codegen") for path in folder.glob("**/*")]
    every = {str(path.relative_to(copy)) for path in files if path.suffix in kinds}
    tools = {path for path in every if path.startswith("polydyn/testing/")}
    wanted = every - tools
    assert tools and not tools & held, "the tools of tests are for checkouts"
    assert {"polydyn/schedules/index.py", "polydyn/codegen/__init__.py"} <= wanted
    assert wanted <= held, sorted(wanted - held)


def test_tests_patch_names_that_exist() -> None:
    """A renamed function is seen here within a second, not when a long suite reaches the test that replaces it."""
    defined = re.compile(r"^ *(?:async )?(?:def|class) (\w+)|^(\w+)(?:: .+|, .+)? = |^    (\w+): |self\.(\w+) = ", re.M)
    imported = re.compile(r"^ *(?:from [\w.]+ )?import (.*(?:\n    [\w, ]+,?$)*)", re.M)
    known: set[str] = set()
    for path in sources():
        text = path.read_text()
        known.update(name for names in defined.findall(text) for name in names)
        known.update(re.findall(r"\w+", " ".join(imported.findall(text))))
        known.update(re.findall(r"(?:\bsys\.|\.(?=\w+\())(\w+)", text))
    patched = re.compile(r"setattr\((?:[^(),]|\([^()]*\))+, *\"(\w+)\"")
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources("tests")
        for name in patched.findall(path.read_text())
        if name not in known
    ]
    assert not wrong, wrong
