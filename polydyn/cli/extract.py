"""``polydyn extract``: the files of an artifact for C and C++ programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from polydyn.build.cache import replacing, writable, write_atomically
from polydyn.cli.group import main
from polydyn.cli.machine import as_json
from polydyn.cli.output import answer
from polydyn.ort.extracting import extract_for_ort
from polydyn.runtime.artifact import read_artifact
from polydyn.runtime.c import PUBLIC

CMAKE = """# find_package(polydyn CONFIG): the interface of compiled programs (docs/c.md).
if(NOT TARGET polydyn::polydyn)
  add_library(polydyn::polydyn INTERFACE IMPORTED)
  get_filename_component(_polydyn_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  set_target_properties(polydyn::polydyn PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${_polydyn_root}/include"
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()
"""


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), required=True, help="The folder to fill.")
@click.option("--onnxruntime", "for_ort", is_flag=True, help="Write a model and a provider library of ONNX Runtime.")
@as_json
def extract(artifact: Path, folder: Path, for_ort: bool, as_json: bool) -> None:
    """Write the files of ARTIFACT that C and C++ programs need: its library, headers, a CMake package, and a copy of
    it.

    The library is FOLDER/lib/lib<name>.so. It maps the weights from the copy of ARTIFACT. With --onnxruntime:
    FOLDER/<name>.onnx for a session of ONNX Runtime, the program FOLDER/<name>.ep, and the library of the execution
    provider, which needs neither Python nor a compiler.
    """
    read = read_artifact(artifact, check_machine=False)
    if for_ort:
        written = [str(p) for p in extract_for_ort(read, artifact.stem, folder)]
        answer(as_json, {"output": str(folder), "files": written}, *written)
        return
    name = artifact.stem
    files = {f"include/{h}": read.sources[h].encode() for h in PUBLIC if h in read.sources}
    files["include/polydyn.hpp"] = (Path(__file__).parent.parent / "runtime" / "c" / "polydyn.hpp").read_bytes()
    files["lib/cmake/polydyn/polydyn-config.cmake"] = CMAKE.encode()
    files[f"lib/lib{name}.so"] = read.library
    target = folder / artifact.name
    with writable(folder):
        for inside, data in files.items():
            path = folder / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        if not (target.exists() and target.samefile(artifact)):
            with replacing(target) as copy, artifact.open("rb") as original:
                shutil.copyfileobj(original, copy)
    written = [str(folder / inside) for inside in (*files, artifact.name)]
    answer(as_json, {"output": str(folder), "files": written}, *written)
