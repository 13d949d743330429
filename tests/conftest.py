"""Shared by all tests: a cache of their own, golden files, seeded property tests."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from polydyn import extend
from polydyn.build.cache import cache_dir
from polydyn.errors import BuildError

GOLDEN = Path(__file__).parent / "golden"

# The same examples on every run; a failure prints the seed or the blob that reproduces it.
settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("deterministic")


def seed_numbers(name: str) -> None:
    """Sets the generators of all test modules, each called RNG, back to a state that belongs to ``name``.

    What a test draws then depends on nothing that ran before it in its process.
    """
    state = np.random.default_rng(crc32(name.encode())).bit_generator.state
    for n, module in list(sys.modules.items()):
        if n.startswith("tests.") and isinstance(rng := vars(module).get("RNG"), np.random.Generator):
            rng.bit_generator.state = state


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed_numbers(item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    seed_numbers(f"{fixturedef.baseid} {fixturedef.argname}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code prints now")


LONG = ("models", "cuda", "benchmarks", "cli", "kernels", "program")
"""Folders whose tests take long, begun first: at the end no process waits for the last long one of another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first; else the order of the files."""
    folders = [item.path.relative_to(Path(__file__).parent).parts[0] for item in items]
    place = {id(item): LONG.index(f) if f in LONG else len(LONG) for item, f in zip(items, folders, strict=True)}
    items.sort(key=lambda item: place[id(item)])


@pytest.fixture(scope="module", autouse=True)
def verified_passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """The loop IR is checked after each pass where kernels or models are the subject, elsewhere once, as for users."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    with pytest.MonkeyPatch.context() as patch:
        if "POLYDYN_VERIFY" not in os.environ and folder in ("unit", "kernels", "cuda", "models"):
            patch.setenv("POLYDYN_VERIFY", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The cache of compiled kernels of this session, for all its tests and processes; it goes with its tmp folder.

    What CUDA and its emulation compile, minutes of it, is kept from one session to the next in the user's cache.
    """
    own = tmp_path_factory.getbasetemp()
    path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    path.mkdir(exist_ok=True)
    for kind in ("cuda", "emulated", "libcuda", "objects"):
        with contextlib.suppress(BuildError, FileExistsError):  # no home; another worker was here
            (path / kind).symlink_to(cache_dir(kind))
    os.environ["POLYDYN_CACHE"] = str(path)


@pytest.fixture(scope="module", autouse=True)
def operators_of_its_own() -> Iterator[None]:
    """What a module registers by ``polydyn.extend`` is not there for the next module."""
    before = set(extend._REGISTERED)
    yield
    for name in set(extend._REGISTERED) - before:
        for registry in (extend._REGISTERED, extend.OPERATORS, extend.FUNCTIONS):
            registry.pop(name, None)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares text with tests/golden/NAME; ``--update-golden`` rewrites the file."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {name}: run pytest --update-golden and read what it wrote"
        assert text == path.read_text()

    return check
