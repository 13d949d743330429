"""The provider's compiling processes are forked from one that has imported the compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ort_sessions import compiling_process


@pytest.fixture(scope="session", autouse=True)
def forked_compilers() -> Iterator[None]:
    with compiling_process("main()"):
        yield
