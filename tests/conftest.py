"""Fixtures of all tests: a separate cache, golden files, seeded property tests."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import polydyn
from polydyn import extend
from polydyn.build.cache import cache_dir
from polydyn.errors import BuildError
from tests.support.rare import HEAVY_TABLE, TABLE, cases_of

GOLDEN = Path(__file__).parent / "golden"
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers; tables of commands follow it

# Examples are equal on every run; a failure prints the seed or the blob that reproduces it.
settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("deterministic")


_GENERATORS: list[np.random.Generator] = []
_modules_searched = 0


def _is_in_tests(module: object) -> bool:
    """Return whether a module's file is below the folder of tests; a test's module has the name of its file alone."""
    return str(getattr(module, "__dict__", {}).get("__file__")).startswith(f"{Path(__file__).parent}{os.sep}")


def _generators() -> list[np.random.Generator]:
    """Return the generators of all modules below tests/, each called RNG.

    Only after an import are all modules searched: there are thousands, and every test and fixture calls this.
    """
    global _modules_searched
    if len(sys.modules) != _modules_searched:
        found = [vars(module).get("RNG") for module in list(sys.modules.values()) if _is_in_tests(module)]
        _GENERATORS[:] = [rng for rng in found if isinstance(rng, np.random.Generator)]
        _modules_searched = len(sys.modules)
    return _GENERATORS


def seed_numbers(name: str) -> None:
    """Reset the generators of all test modules to a state that depends only on ``name``.

    A test's random numbers then do not depend on the tests that ran before it in its process.
    """
    state = np.random.default_rng(crc32(name.encode())).bit_generator.state
    for rng in _generators():
        rng.bit_generator.state = state


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed_numbers(item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Reset the generators for a fixture of ours; fixtures of pytest and values of parameters draw no numbers."""
    if _is_in_tests(sys.modules.get(fixturedef.func.__module__)):
        seed_numbers(f"{fixturedef.baseid} {fixturedef.argname}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code prints now")


SLOW_FOLDERS = ("models", "cuda", "benchmarks", "cli", "kernels", "program")
"""Folders of slow tests, which begin first, so that no process waits at the end for the last slow test of another."""


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases as slow or heavy by tests/rare_cases.txt and tests/heavy_cases.txt. Sort slow tests first, otherwise
    keep the order of the files.

    pytest.UsageError: a table names a case that a collected file does not have.
    """
    names = defaultdict(set)
    for item in items:
        names[item.nodeid.partition("::")[0]].add(item.nodeid)
    for table, mark in ((TABLE, pytest.mark.slow), (HEAVY_TABLE, pytest.mark.heavy)):
        listed = cases_of(table)
        for item in items:
            if item.nodeid in listed.get(item.nodeid.partition("::")[0], ()):
                item.add_marker(mark)
        missing = sorted(case for file in names for case in listed.get(file, frozenset()) - names[file])
        if missing and not any("::" in argument for argument in config.args):  # then files are collected whole
            raise pytest.UsageError(f"tests/{table.name} names cases that do not exist: {missing}")
    folders = [item.path.relative_to(Path(__file__).parent).parts[0] for item in items]
    order = {f: k for k, f in enumerate(SLOW_FOLDERS)}
    position = {id(item): order.get(f, len(order)) for item, f in zip(items, folders, strict=True)}
    items.sort(key=lambda item: position[id(item)])


@pytest.fixture(scope="module", autouse=True)
def verified_passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check the loop IR after each pass in tests of kernels and models, elsewhere once, as for users."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    with pytest.MonkeyPatch.context() as patch:
        if "POLYDYN_VERIFY" not in os.environ and folder in ("unit", "kernels", "cuda", "models"):
            patch.setenv("POLYDYN_VERIFY", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_afresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let ``polydyn.compile`` compile in every test: a stored program would hide what a test changes in the compiler.
    Tests of the program cache pass ``cache=True``. Tests of the house read the signature, so it stays there.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "house" not in request.path.parts:
            patch.setattr(polydyn, "compile", partial(polydyn.compile, cache=False))
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set up the cache of compiled kernels for all tests and processes of this session; it is deleted with its tmp
    folder.

    Compilations for CUDA and its emulation take minutes and stay in the user's cache between sessions.
    """
    own = tmp_path_factory.getbasetemp()
    path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    path.mkdir(exist_ok=True)
    for kind in ("cuda", "emulated", "libcuda", "objects"):
        with contextlib.suppress(BuildError, FileExistsError):  # no home, or another worker created it
            (path / kind).symlink_to(cache_dir(kind))
    os.environ["POLYDYN_CACHE"] = str(path)


@pytest.fixture(scope="module", autouse=True)
def operators_of_its_own() -> Iterator[None]:
    """Remove the operators that a module registers by ``polydyn.extend`` before the next module runs."""
    before = set(extend._REGISTERED)
    yield
    for name in set(extend._REGISTERED) - before:
        for registry in (extend._REGISTERED, extend.OPERATORS, extend.FUNCTIONS):
            registry.pop(name, None)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``golden(name, text)``: it compares text with tests/golden/NAME, or rewrites it with ``--update-golden``.
    """

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {name}: run pytest --update-golden and read what it wrote"
        assert text == path.read_text()

    return check
