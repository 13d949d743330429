"""Times by graphs of launches, on the CPU libcuda: numbers of launches, and the state after a failure."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.gpu import cpu_libcuda
from polydyn.gpu.emulator import compile_emulated
from polydyn.gpu.errors import DeviceError
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.drivers import open_driver
from polydyn.runtime.cuda.timing import Times, replayed, sets_beyond

ADD_ONE = """
#include "pd_device.cuh"
PD_KERNEL(add_one, 32, 1)(float *x) { pd_stg(x + pd_tid(), pd_ldg(x + pd_tid()) + 1.f); }
PD_EXPORT(add_one, 32);
"""
MB = 1 << 20


@pytest.fixture(scope="module")
def driver() -> Driver:
    return open_driver("ctypes", library=str(cpu_libcuda.build()))


def test_sets_take_turns_in_a_graph_of_many_launches(driver: Driver) -> None:
    function = driver.get_function(driver.load_module(compile_emulated(ADD_ONE).read_bytes()), "add_one")
    sets = [driver.alloc(128) for _ in range(2)]
    for p in sets:
        driver.h2d(p, np.zeros(32, np.float32))
    works = [lambda stream, p=p: driver.launch(function, (1, 1, 1), 32, 0, [p], stream) for p in sets]
    times = replayed(driver, works, launches=3, rounds=1)
    found = np.zeros(32, np.float32)
    for p, count in zip(sets, (2, 1), strict=True):
        driver.d2h(found, p)
        assert (found == count).all()
    assert len(times.rounds) == 1 and times.median > 0
    assert len(replayed(driver, works, launches=3, rounds=2, warm=0).rounds) == 2
    for p in sets:
        driver.free(p)


def test_a_failed_capture_leaves_the_stream_and_the_driver_as_they_were(driver: Driver) -> None:
    def waits(stream: int) -> None:
        driver.synchronize(stream)  # is not to be captured

    with pytest.raises(DeviceError, match="cuStreamSynchronize"):
        replayed(driver, [waits], rounds=1)
    assert replayed(driver, [lambda stream: None], rounds=1).least >= 0


def test_l2_forgets_a_set_before_its_turn() -> None:
    l2 = 50 * MB
    for nbytes in (MB, 10 * MB, 60 * MB, 1000 * MB):
        assert (sets_beyond(nbytes, l2) - 1) * nbytes >= min(2 * l2, nbytes)
    assert sets_beyond(1000 * MB, l2) == 2 and sets_beyond(0, l2) == sets_beyond(1, l2) == 256


def test_what_is_said_of_times() -> None:
    t = Times((3.0, 1.0, 2.0))
    assert (t.median, t.least, t.spread) == (2.0, 1.0, 1.0)


def test_the_driver_says_how_many_blocks_fit(driver: Driver) -> None:
    function = driver.get_function(driver.load_module(compile_emulated(ADD_ONE).read_bytes()), "add_one")
    assert driver.occupancy(function, 32, 0) == 32 and driver.occupancy(function, 64, 0) == 0  # it was made for 32
    driver.set_smem(function, 100 << 10)
    assert driver.occupancy(function, 32, 100 << 10) == 2
