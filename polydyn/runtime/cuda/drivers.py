"""Select the driver that opens a device: pycuda's if it is installed, else the ctypes driver."""

from __future__ import annotations

from polydyn.gpu.errors import DeviceError
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.driver_pycuda import PycudaDriver, pycuda_installed


def preferred() -> str:
    """Return the default driver: "pycuda" if it is installed, else "ctypes"."""
    return "pycuda" if pycuda_installed() else "ctypes"


def open_driver(prefer: str | None = None, device: int = 0, library: str = "libcuda.so.1") -> Driver:
    """Open a device.

    ``prefer``: "pycuda", "ctypes", or None for ``preferred``. ``library`` names the driver library (tests pass the CPU
    one). Raises DriverMissingError if there is no driver or no such device.
    """
    if prefer not in (None, "pycuda", "ctypes"):
        raise DeviceError(f"unknown driver {prefer!r}", remedy='"pycuda" or "ctypes"')
    kind = PycudaDriver if (prefer or preferred()) == "pycuda" else Driver
    return kind(device, library)
