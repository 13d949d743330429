"""Errors of the GPU side."""

from __future__ import annotations

from polydyn.errors import PolydynError

__all__ = ["DeviceError", "DeviceLostError", "DeviceMemoryError", "DriverMissingError", "WrongArchitectureError"]


class DeviceError(PolydynError):
    """A driver call or a kernel failed; ``code`` is the CUresult (0 when no driver was involved)."""

    def __init__(self, message: str, *, code: int = 0, node: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message, node=node, remedy=remedy)
        self.code = code


class DriverMissingError(DeviceError):
    """No CUDA driver, or no device, on this machine."""


class DeviceMemoryError(DeviceError):
    """The device has no memory of the size asked for."""


class WrongArchitectureError(DeviceError):
    """A binary was made for another GPU generation."""


class DeviceLostError(DeviceError):
    """A kernel broke the context; a new one was made, and every pointer, module and stream of the old one is gone."""
