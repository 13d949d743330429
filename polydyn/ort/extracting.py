"""The files with which ONNX Runtime runs a compiled program, in any language, without Python."""

from __future__ import annotations

from pathlib import Path

from polydyn.build.cache import writable, write_atomically
from polydyn.ort.context_model import context_model
from polydyn.ort.library import FILE_NAME, library_for
from polydyn.ort.program_file import SUFFIX, write_program_file
from polydyn.runtime.artifact import Artifact


def extract_for_ort(artifact: Artifact, name: str, folder: Path) -> list[Path]:
    """Write the model, the program and the library of the provider into a folder; return their paths.

    UnsupportedError: see ``context_model``. BuildError: the library cannot be built. InputError: the folder cannot be
    written.
    """
    model = context_model(artifact, name, f"{name}{SUFFIX}")
    library = library_for(artifact.manifest["target"])
    paths = [folder / f"{name}.onnx", folder / f"{name}{SUFFIX}", folder / FILE_NAME]
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_program_file(artifact, paths[1])
        write_atomically(paths[2], library.data)
        write_atomically(paths[0], model.SerializeToString(deterministic=True))
    return paths
