"""Errors of the GPU side."""

from __future__ import annotations

from polydyn.errors import PolydynError

__all__ = ["DeviceError", "DeviceLostError", "DeviceMemoryError", "DriverMissingError", "WrongArchitectureError"]


class DeviceError(PolydynError, RuntimeError):
    """A driver call or a kernel failed. ``code`` is the CUresult, or 0 if no driver was involved."""

    def __init__(self, message: str, *, code: int = 0, node: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message, node=node, remedy=remedy)
        self.code = code


class DriverMissingError(DeviceError):
    """This machine has no CUDA driver or no device."""


class DeviceMemoryError(DeviceError):
    """The device does not have enough free memory."""


class WrongArchitectureError(DeviceError):
    """A binary was compiled for another GPU generation."""


class DeviceLostError(DeviceError):
    """A kernel broke the context. A new one was created; all pointers, modules and streams of the old one are lost."""
