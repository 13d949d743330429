"""The artifact: a program as a plain zip file, and as a value in memory.

Members: ``weights.bin`` (first and uncompressed; its data begins at byte 4096 of the file, so that it can be mapped
without a copy), ``manifest.json``, ``lib.so``, ``sources/*``, and for device programs ``images/*``. The archive comment
is the manifest's hash, and the manifest has the hashes of all other members. All are checked when an artifact is
opened. Equal programs give equal bytes. The hashes detect damage, but they are not signatures: loading an artifact runs
its native code.

Standard library and numpy only.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from polydyn.arguments import checked_path
from polydyn.build.cache import replacing
from polydyn.build.features import architecture, machine_features
from polydyn.errors import ArtifactError, MissingFileError, PolydynError, UnwritableError
from polydyn.runtime.mapped import MappedFile
from polydyn.runtime.plain_expressions import fold, unfold
from polydyn.runtime.seal import SEAL, hash_of_parts, seal_weights

FORMAT = 7
"""Version of the file's layout and manifest."""

ABI = 7
"""``PD_ABI_VERSION`` of polydyn.h."""

WEIGHTS, MANIFEST, LIBRARY, SOURCES, IMAGES = "weights.bin", "manifest.json", "lib.so", "sources/", "images/"
WEIGHTS_OFFSET = 4096
"""Offset of the weights in the file: a page, so that any reader can map them."""

ALIGN = 64
"""Alignment of every constant in bytes."""

MAX_COPIED_BYTES = 1 << 24
"""Weights up to this size are copied into memory. Larger ones stay mapped, and every call checks with the system
whether the file was changed, which takes 1 to 8 us.
"""

MAX_UNPACKED_BYTES = 1 << 30
"""Maximum bytes of all members other than the weights after decompression."""

Bytes = npt.NDArray[np.uint8]
ZIP = b"PK\x03\x04"
"""The first bytes of a saved program."""
_DATE = (1980, 1, 1, 0, 0, 0)
_PADDING_ID = 0xD935  # the extra-field id that zipalign uses for the same purpose
_ZIP64_EXTRA = 20
_BROKEN = (
    zipfile.BadZipFile, KeyError, ValueError, TypeError, NotImplementedError, RuntimeError, EOFError, struct.error,
    zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Artifact:
    """A compiled program.

    ``manifest``: JSON data (versions, target, features, symbols, guards, inputs, outputs, launches). ``sources``: file
    name -> C (and CUDA) text of everything in the library. ``library``: the shared library. ``weights``: uint8, 64-byte
    aligned. ``images``: kernels for devices, ``<architecture>/<unit>.<kind>`` -> data that a driver loads.
    """

    manifest: Mapping[str, Any]
    sources: Mapping[str, str]
    library: bytes
    weights: Bytes
    images: Mapping[str, bytes] = field(default_factory=dict)
    file: MappedFile | None = None
    """The file in which the weights are mapped; None if they are in memory."""


SAMPLE = 4096
"""Bytes at either end that two arrays must share before they are compared in full."""


def pack_constants(constants: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, int], Bytes]:
    """Lay out arrays one after the other, with equal contents once. Return offsets by name, and the sealed bytes."""
    offsets: dict[str, int] = {}
    similar: dict[tuple[int, bytes, bytes], list[tuple[int, Bytes]]] = {}
    arrays: list[tuple[int, Bytes]] = []
    end = 0
    for name, array in constants.items():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        seen = similar.setdefault((data.size, data[:SAMPLE].tobytes(), data[-SAMPLE:].tobytes()), [])
        same = next((offset for offset, other in seen if np.array_equal(data, other)), None)
        if same is None:
            same = end
            seen.append((end, data))
            arrays.append((end, data))
            end += -(-data.size // ALIGN) * ALIGN
        offsets[name] = same
    weights = aligned_bytes(end + SEAL)
    for offset, data in arrays:
        weights[offset : offset + data.size] = data
    seal_weights(weights)
    return offsets, weights


def aligned_bytes(size: int) -> Bytes:
    """Return zeroed memory that is aligned to 64 bytes."""
    memory = np.zeros(size + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + size]


# -- writing ---------------------------------------------------------------------------------------------------------


def write_artifact(artifact: Artifact, path: str | os.PathLike[str]) -> None:
    """Write the zip next to ``path`` and rename it. ArtifactError: the folder is missing or full."""
    target = checked_path(path)
    try:
        with replacing(target) as f:
            _write(artifact, f)
    except OSError as e:
        raise UnwritableError.of(target, e) from e


def _write(artifact: Artifact, f: IO[bytes]) -> None:
    members = {LIBRARY: artifact.library}
    members |= {SOURCES + name: text.encode() for name, text in sorted(artifact.sources.items())}
    members |= {IMAGES + name: image for name, image in sorted(artifact.images.items())}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    hashes[WEIGHTS] = hash_of_parts(artifact.weights)
    weights = {"offset": WEIGHTS_OFFSET, "bytes": int(artifact.weights.size)}
    manifest = dict(artifact.manifest) | {"weights": weights, "sha256": hashes}
    expressions, manifest = fold(manifest)
    manifest["expressions"] = expressions
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False).encode()
    with zipfile.ZipFile(f, "w") as z:
        first = zipfile.ZipInfo(WEIGHTS, _DATE)
        padding = WEIGHTS_OFFSET - 30 - len(WEIGHTS) - _ZIP64_EXTRA
        first.extra = struct.pack("<HH", _PADDING_ID, padding - 4) + bytes(padding - 4)
        first.file_size = int(artifact.weights.size)
        with z.open(first, "w", force_zip64=True) as member:
            for start in range(0, int(artifact.weights.size), 1 << 24):
                member.write(artifact.weights[start : start + (1 << 24)].data)
        for name, data in {MANIFEST: text, **members}.items():
            info = zipfile.ZipInfo(name, _DATE)
            info.external_attr = 0o644 << 16
            z.writestr(info, data, zipfile.ZIP_DEFLATED, 6)
        z.comment = hashlib.sha256(text).hexdigest().encode()


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a saved program, by its first bytes; False if it cannot be read."""
    try:
        with open(path, "rb") as f:
            return f.read(len(ZIP)) == ZIP
    except (OSError, ValueError):  # ValueError: the path contains a NUL
        return False


# -- reading ---------------------------------------------------------------------------------------------------------


def read_artifact(path: str | os.PathLike[str], *, check_machine: bool = True) -> Artifact:
    """Read and check an artifact; weights of more than ``MAX_COPIED_BYTES`` stay mapped from the file.

    It checks the manifest's hash, format and ABI versions, and the hash of every member; with ``check_machine`` also
    that this processor has the features the code uses. ArtifactError: the problem and the remedy.
    """
    try:
        with zipfile.ZipFile(path) as z:
            _check_members(z)
            manifest = _read_manifest(z, path)
            hashes = manifest["sha256"]
            _check_names(z, hashes)
            data = {n: z.read(n) for n in hashes if n != WEIGHTS}
            weights = _map_weights(z, path, manifest["weights"])
            mapped = weights.size > MAX_COPIED_BYTES
            file = MappedFile(path, WEIGHTS_OFFSET, weights.size, hashes.get(WEIGHTS, "")) if mapped else None
    except OSError as e:
        kind = MissingFileError if isinstance(e, FileNotFoundError) else ArtifactError
        raise kind(f"cannot read {path}: {e.strerror or e}", remedy="check the path") from e
    except PolydynError:
        raise
    except _BROKEN as e:
        raise _damaged(path, str(e)) from e
    for name, content in data.items():
        if hashlib.sha256(content).hexdigest() != hashes[name]:
            raise _damaged(path, f"member {name} does not match its hash")
    if not mapped:
        weights, source = aligned_bytes(weights.size), weights
        weights[:] = source
        weights.flags.writeable = False
    if hash_of_parts(weights) != hashes.get(WEIGHTS):
        raise _damaged(path, f"member {WEIGHTS} does not match its hash")
    if check_machine:
        _check_machine(path, manifest)
    if LIBRARY not in data:
        raise _damaged(path, f"member {LIBRARY} is missing")
    sources = {n[len(SOURCES) :]: c.decode() for n, c in data.items() if n.startswith(SOURCES)}
    images = {n[len(IMAGES) :]: c for n, c in data.items() if n.startswith(IMAGES)}
    return Artifact(manifest, sources, data[LIBRARY], weights, images, file)


def _damaged(path: str | os.PathLike[str], problem: str) -> ArtifactError:
    remedy = "copy it again, or compile the model again"
    if not is_artifact(path):
        remedy = "if it is a model, compile it first: polydyn compile MODEL -o FILE"
    return ArtifactError(f"{path} is damaged or not a polydyn artifact: {problem}", remedy=remedy)


def _check_members(z: zipfile.ZipFile) -> None:
    """Raise BadZipFile for members that overlap, or that would fill the memory."""
    end, whole = 0, 0
    for info in sorted(z.infolist(), key=lambda i: i.header_offset):
        if info.header_offset < end:
            raise zipfile.BadZipFile(f"member {info.filename} overlaps another one")
        end = info.header_offset + info.compress_size
        whole += info.file_size if info.filename != WEIGHTS else 0
    if whole > MAX_UNPACKED_BYTES:
        raise zipfile.BadZipFile(f"its members unpack to {whole} bytes, at most {MAX_UNPACKED_BYTES} are read")


def _check_names(z: zipfile.ZipFile, hashes: Mapping[str, str]) -> None:
    """Raise BadZipFile unless every member is there once, has a hash, and has the name of a file below a folder."""
    names = z.namelist()
    for name in names:
        if names.count(name) > 1:
            raise zipfile.BadZipFile(f"member {name} is there twice")
        if name != MANIFEST and name not in hashes:
            raise zipfile.BadZipFile(f"member {name} has no hash")
        if "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise zipfile.BadZipFile(f"member {name} has a path instead of a name")


def _read_manifest(z: zipfile.ZipFile, path: str | os.PathLike[str]) -> dict[str, Any]:
    text = z.read(MANIFEST)
    if hashlib.sha256(text).hexdigest().encode() != z.comment:
        raise _damaged(path, "the manifest does not match its hash")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT or manifest["abi"] != ABI:
        maker = f"polydyn {manifest['polydyn']}"
        raise ArtifactError(
            f"{path} was made by {maker} with format {manifest['format']} and ABI {manifest['abi']}; "
            f"this polydyn reads format {FORMAT} and ABI {ABI}",
            remedy=f"install {maker}, or compile the model again",
        )
    unfolded: dict[str, Any] = unfold(manifest.pop("expressions"), manifest)
    return unfolded


def _map_weights(z: zipfile.ZipFile, path: str | os.PathLike[str], where: Mapping[str, int]) -> Bytes:
    info = z.getinfo(WEIGHTS)
    offset, size = where["offset"], where["bytes"]
    stored = info.compress_type == zipfile.ZIP_STORED and info.header_offset == 0 and info.file_size == size
    if not stored or offset != WEIGHTS_OFFSET:
        raise zipfile.BadZipFile("the weights are not where the manifest says; was the file packed again?")
    if not size:
        return aligned_bytes(0)
    with open(path, "rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    _, name_size, extra_size = struct.unpack("<26sHH", mapped[:30])
    if 30 + name_size + extra_size != offset or offset + size > len(mapped):
        raise zipfile.BadZipFile("the weights are not where the manifest says; was the file packed again?")
    return np.frombuffer(mapped, np.uint8, size, offset)


def _check_machine(path: str | os.PathLike[str], manifest: Mapping[str, Any]) -> None:
    call = f"polydyn.program.assemble.rebuild({str(path)!r}, to)"
    remedy = f"compile the model for this machine, or rebuild the artifact from its sources: {call}"
    if manifest["architecture"] != architecture():
        raise ArtifactError(f"{path} was made for {manifest['architecture']}, this is {architecture()}", remedy=remedy)
    here = machine_features()
    missing = [f for f in manifest["features"] if f not in here]
    if here and missing:
        raise ArtifactError(
            f"{path} uses processor features that are missing here: {', '.join(missing)}", remedy=remedy
        )


def described(arguments: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Map the name of each argument in a manifest to its dtype and symbolic shape."""
    return {a["name"]: f"{a['dtype']}[{', '.join(a['shape'])}]" for a in arguments}
