"""Which driver opens a device: pycuda's where it is installed, else the one by ctypes."""

from __future__ import annotations

from polydyn.gpu.errors import DeviceError
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.driver_pycuda import PycudaDriver, pycuda_installed


def preferred() -> str:
    """The driver that is taken when none is asked for: "pycuda" where it is installed, else "ctypes"."""
    return "pycuda" if pycuda_installed() else "ctypes"


def open_driver(prefer: str | None = None, device: int = 0, library: str = "libcuda.so.1") -> Driver:
    """Opens a device.

    ``prefer``: "pycuda", "ctypes", or None for pycuda when it is installed, else ctypes. ``library`` names the driver
    library (tests pass the CPU one). Raises DriverMissingError when there is no driver or no such device.
    """
    if prefer not in (None, "pycuda", "ctypes"):
        raise DeviceError(f"no driver called {prefer!r}", remedy='"pycuda" or "ctypes"')
    kind = PycudaDriver if (prefer or preferred()) == "pycuda" else Driver
    return kind(device, library)
