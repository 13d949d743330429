"""The kernels of a program as images that a driver loads: build them for architectures, choose them for a device.

An image has several kernels for one architecture: a cubin, or the PTX of the base architecture, which any newer device
can assemble. Names are ``<architecture>/<unit>.<kind>``; a unit has ``BATCH`` kernels, in the program's order. Kernels
without an image are compiled from source on their first launch; this is always so for the CPU libcuda.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeAlias

from polydyn.build.features import available_cores
from polydyn.capability import capability, runs_on
from polydyn.errors import BuildError
from polydyn.gpu.compiler import compile_cuda, compiler_version, device_headers
from polydyn.gpu.emulator import compile_emulated
from polydyn.gpu.errors import WrongArchitectureError
from polydyn.gpu.targets import BASE, EMULATED, named, special_arch
from polydyn.runtime.cuda.driver import Driver

__all__ = ["ImageSource", "Images", "build_images", "is_emulated"]

EMULATION = "polydyn CPU emulation"
"""Prefix of the device name of the CPU libcuda."""


Kernel: TypeAlias = "tuple[str, str]"
"""A kernel's name, and the architecture that its instructions need (sm_80: any)."""

BATCH = 10
"""Kernels per unit: headers are parsed once per unit, and units compile in parallel."""


@dataclass(frozen=True)
class Images:
    """The images of a program's kernels from a CUDA compiler.

    ``resources``: kernel -> architecture -> registers (per thread), spills, stack and static shared memory (bytes).
    ``compiler``: its version, empty if none was found; then there are no images, and ``note`` gives the reason.
    """

    files: Mapping[str, bytes]
    resources: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    compiler: str = ""
    note: str = ""


def build_images(kernels: Sequence[Kernel], sources: Mapping[str, str], archs: Iterable[str]) -> Images:
    """Compile kernels (``sources[name + ".cu"]``) for architectures, and for ``BASE`` as PTX.

    Kernels with newer instructions are compiled only for architectures that support them.

    BuildError: the compiler rejects a text. UnsupportedError: an unknown architecture.
    """
    requested = tuple(archs)
    if requested == (EMULATED,):
        return Images({}, note="kernels are sources, compiled for the emulation when they are launched")
    try:
        version = compiler_version()
    except BuildError:
        note = f"no CUDA compiler was found: kernels for {', '.join(requested)} are sources, compiled where they run"
        return Images({}, note=note)
    units = _units(kernels, sources)
    texts = [joined([sources[f"{kernels[k][0]}.cu"] for k in u.kernels]) for u in units]
    jobs = [(i, a, "cubin") for a in requested for i, u in enumerate(units) if runs_on(u.arch, capability(a))]
    jobs += [(i, BASE, "ptx") for i, u in enumerate(units) if u.arch == BASE]
    with ThreadPoolExecutor(available_cores()) as pool:
        done = list(pool.map(lambda j: compile_cuda(texts[j[0]], j[1], kind=j[2]), jobs))
    files: dict[str, bytes] = {}
    resources: dict[str, dict[str, dict[str, int]]] = {}
    for (unit, arch, kind), compiled in zip(jobs, done, strict=True):
        files[_name("ptx" if kind == "ptx" else arch, unit, kind)] = compiled.image
        for kernel, use in compiled.kernels.items():
            resources.setdefault(kernel, {})[arch] = asdict(use)
    return Images(files, resources, version)


class _Unit(NamedTuple):
    """Kernels, by number, that are compiled together: all for any architecture, or all for one."""

    arch: str
    kernels: list[int]


def _units(kernels: Sequence[Kernel], sources: Mapping[str, str]) -> list[_Unit]:
    """Group kernels of one architecture with equal heads into units."""
    groups: dict[tuple[str, str], list[int]] = {}
    for k, (name, arch) in enumerate(kernels):
        groups.setdefault((arch, _split(sources[f"{name}.cu"])[0]), []).append(k)
    return [_Unit(arch, ks[i : i + BATCH]) for (arch, _), ks in groups.items() for i in range(0, len(ks), BATCH)]


def _split(text: str) -> tuple[str, str]:
    """Split a kernel's file into the head (includes, templates) and the kernel."""
    head, mark, rest = text.partition("PD_KERNEL")
    return head, mark + rest


def joined(texts: Sequence[str]) -> str:
    """Join kernels with equal heads into one file with one head."""
    return _split(texts[0])[0] + "\n".join(_split(t)[1] for t in texts)


def _name(folder: str, unit: int, kind: str) -> str:
    return f"{folder}/kernels_{unit:03}.{kind}"


def is_emulated(driver: Driver) -> bool:
    """Return whether the driver is the CPU libcuda."""
    return driver.device_name.startswith(EMULATION)


class ImageSource:
    """The images of one program's kernels for one device."""

    def __init__(
        self, driver: Driver, kernels: Sequence[Kernel], images: Mapping[str, bytes], sources: Mapping[str, str]
    ) -> None:
        """WrongArchitectureError: the device is too old, or there is neither an image nor usable source."""
        self.driver, self.kernels, self.images, self.sources = driver, kernels, images, sources
        if not is_emulated(driver) and driver.arch < int(BASE.removeprefix("sm_")):
            raise WrongArchitectureError(
                f"the device is sm_{driver.arch}, kernels need {BASE}", remedy="use a newer device"
            )
        units = list(enumerate(_units(kernels, sources)))
        self._unit = {k: i for i, u in units for k in u.kernels}
        self._kind = next(
            (
                (folder, kind)
                for folder, kind in _order(driver)
                if all(_name(folder, i, kind) in images for i, u in units if _has(folder, u.arch))
            ),
            None,
        )
        if self._kind is None and any(sources.get(h) != t for h, t in device_headers().items()):
            raise WrongArchitectureError(
                f"the program has no kernels for sm_{driver.arch}, and its sources are of another polydyn",
                remedy=f"compile the model again with target='cuda:sm_{driver.arch}'",
            )

    @property
    def special(self) -> int:
        """The compute capability whose special instructions kernels may use: the device's, or 0 for older images."""
        native = self._kind is None or self._kind[0] == named(self.driver.arch)
        return self.driver.arch if native else 0

    def image(self, kernel: int) -> bytes:
        """Return the image with the kernel of this number; kernels of one unit share the object.

        Order of preference: the device's own architecture, an older one of its family, PTX; otherwise the source is
        compiled now (cached). WrongArchitectureError: it cannot be compiled here.
        """
        if self._kind is not None:
            folder, kind = self._kind
            return self.images[_name(folder, self._unit[kernel], kind)]
        name, special = self.kernels[kernel]
        text = self.sources[f"{name}.cu"]
        try:
            if is_emulated(self.driver):
                return compile_emulated(text, arch=special_arch(special) or 80).read_bytes()
            arch = named(self.driver.arch)
            return compile_cuda(text, arch or BASE, kind="cubin" if arch else "ptx").image
        except BuildError as e:
            raise WrongArchitectureError(
                f"the program has no kernels for sm_{self.driver.arch}, and they cannot be compiled here: {e}",
                remedy=f"compile the model with target='cuda:sm_{self.driver.arch}' where a CUDA compiler is",
            ) from e


def _has(folder: str, arch: str) -> bool:
    """Return whether a folder of images has the kernels that need an architecture's instructions."""
    return arch == BASE or (folder != "ptx" and runs_on(arch, capability(folder)))


def _order(driver: Driver) -> list[tuple[str, str]]:
    """Return the folders and kinds of images that the device can load, best first."""
    if is_emulated(driver):
        return []
    family = {86: ["sm_86", "sm_80"], 89: ["sm_89", "sm_86", "sm_80"]}.get(driver.arch, [named(driver.arch)])
    return [*((a, "cubin") for a in family if a), ("ptx", "ptx")]
