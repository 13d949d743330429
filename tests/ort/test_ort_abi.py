"""The description of ONNX Runtime's interface in ``polydyn/ort/c/abi.h``, and versions that are too old for it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

import polydyn.ort
from polydyn.errors import UnsupportedError
from polydyn.ort.library import OLDEST_ORT
from polydyn.ort.registration import check_version
from tests.support.paths import ROOT

ABI = (ROOT / "polydyn" / "ort" / "c" / "abi.h").read_text()
TABLES = {"ORT_API_FUNCTIONS": "OrtApi", "EP_API_FUNCTIONS": "OrtEpApi", "EDITOR_API_FUNCTIONS": "OrtModelEditorApi"}
STRUCTURES = ("OrtNodeComputeInfo", "OrtEp", "OrtEpFactory")


def positions(table: str) -> list[tuple[int, str]]:
    """Return positions and names of the functions of a table."""
    body = ABI.partition(f"#define {table}(X)")[2]
    body = body[: re.search(r"[^\\]\n", body).start()]  # type: ignore[union-attr]
    return [(int(n), name) for n, name in re.findall(r"X\((\d+), (\w+),", body)]


def members(text: str, structure: str) -> list[str]:
    """Return the members of a structure in C, in order."""
    found = re.search(rf"struct {structure} \{{(.*?)\n\}};", text, re.DOTALL)
    assert found, structure
    names = []
    for declaration in found[1].split(";"):
        for part in re.split(r",(?![^(]*\))", declaration):
            name = re.search(r"\(\s*\*\s*(\w+)\s*\)", part) or re.search(r"(\w+)\s*$", part)
            names += [name[1]] if name else []
    return names


def differences(header: str) -> list[str]:
    """Return the entries of abi.h that differ from ONNX Runtime's header, preprocessed."""
    wrong = []
    for table, structure in TABLES.items():
        there = members(header, structure)
        wrong += [f"{structure}[{n}]" for n, name in positions(table) if n >= len(there) or there[n] != name]
    for structure in STRUCTURES:
        own = members(re.sub(r"/\*.*?\*/", "", ABI, flags=re.DOTALL), structure)
        if own != members(header, structure)[: len(own)]:
            wrong.append(structure)
    return wrong


def test_positions_are_unique_and_rise() -> None:
    for table in TABLES:
        found = [n for n, _ in positions(table)]
        assert found and found == sorted({*found}), table
    assert len(positions("ORT_API_FUNCTIONS")) > 75


HEADER = """
struct OrtApi { {api} };
struct OrtEpApi { int (*CreateEpDevice)(int); void (*B)(int); int (*EpGraphSupportInfo_AddNodesToFuse)(int);
};
struct OrtModelEditorApi { int (*A)(void); int (*B)(void); int (*C)(void); int (*D)(void); int (*E)(void);
 int (*F)(void); int (*CreateNode)(int);
};
"""


def made_up_header() -> str:
    """Return a header in which every name that abi.h uses is at its position."""
    names = dict(positions("ORT_API_FUNCTIONS"))
    api = "".join(f"int (*{names.get(n, f'Other{n}')})(int);" for n in range(max(names) + 1))
    text = HEADER.replace("{api} }", f"{api}\n}}")
    for s in STRUCTURES:
        own = members(re.sub(r"/\*.*?\*/", "", ABI, flags=re.DOTALL), s)
        text += f"struct {s} {{ {' '.join(f'int {m};' for m in own)} int Later;\n}};\n"
    return text


def test_a_header_with_other_positions_is_noticed() -> None:
    header = made_up_header()
    assert differences(header) == []
    assert differences(header.replace("int (*CreateEnv)(int);", "")) != []
    assert differences(header.replace("int GetVendorId;", "int GetVendorId; int New;")) == ["OrtEpFactory"]


def test_positions_are_those_of_a_header() -> None:
    """POLYDYN_ORT_HEADER: the path of onnxruntime_c_api.h, which wheels do not contain."""
    for path in filter(None, [os.environ.get("POLYDYN_ORT_HEADER")]):
        folder = Path(path).parent
        text = subprocess.run(
            ["gcc", "-E", "-P", "-x", "c", f"-I{folder}", path], check=True, capture_output=True, text=True
        ).stdout
        assert differences(text) == []


def test_versions_without_the_interface_are_rejected() -> None:
    for version in ("1.23.0", "1.32.0", "2.0.0", "1.24.0rc1"):
        check_version(version)
    with pytest.raises(UnsupportedError, match=r"ONNX Runtime 1.22.1 has no plugin interface .*\n.*\n.*>=1.23"):
        check_version("1.22.1")
    assert f"#define ORT_API {OLDEST_ORT[1]} " in ABI


def test_the_library_rejects_an_old_runtime_by_name() -> None:
    """The table of version 1 has a function for errors; version 23 is unknown to this runtime."""
    said: list[tuple[int, bytes]] = []
    create_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    api_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    version_type = ctypes.CFUNCTYPE(ctypes.c_void_p)
    text = ctypes.create_string_buffer(b"1.22.0")

    def create(code: int, message: bytes) -> int:
        said.append((code, message))
        return 1

    first = create_type(create)
    table = (ctypes.c_void_p * 4)(ctypes.cast(first, ctypes.c_void_p))
    get_api = api_type(lambda version: ctypes.addressof(table) if version <= 22 else None)
    get_version = version_type(lambda: ctypes.addressof(text))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(get_version, ctypes.c_void_p))
    entry = ctypes.CDLL(polydyn.ort.get_library_path()).CreateEpFactories
    entry.restype = ctypes.c_void_p
    count, factories = ctypes.c_size_t(7), (ctypes.c_void_p * 1)()
    status = entry(b"polydyn", base, None, factories, ctypes.c_size_t(1), ctypes.byref(count))
    assert status == 1 and count.value == 0
    assert said == [(1, b"polydyn: needs ONNX Runtime 1.23 or newer, this is 1.22.0\n  remedy: pip install "
                        b"'onnxruntime>=1.23'")]  # fmt: skip
