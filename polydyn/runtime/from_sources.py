"""Programs from the sources that an artifact stores, for ``polydyn.load(path, trust="sources")`` (ADR 0043).

No machine code of the artifact is used. Texts of the run time and of the headers must be this polydyn's own. The host
program and the kernels must consist of what polydyn prints. This keeps the compiler from reading other files, and the
text from naming a function of the system. It does not make the text harmless: a kernel may compute any address.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from polydyn.build.compiler import TARGETS, build_library
from polydyn.codegen.cpu.target import AVX2, AVX512, NEON, leaf_headers
from polydyn.errors import ArtifactError
from polydyn.runtime.artifact import Artifact, Bytes
from polydyn.runtime.c import sources
from polydyn.runtime.composite import GENERAL, LIBRARY, general_of
from polydyn.runtime.overrides import OVERRIDDEN, overridden_of
from polydyn.runtime.seal import SEAL, digest_of, seal_library

UNIT = re.compile(r"host\.c|kernels_\d{3,}(_\d+)?\.c")
"""Names of the units whose text the artifact determines."""
INCLUDE = re.compile(r'#include (<stdint\.h>|"(?P<header>\w+\.h)")')
PRAGMA = re.compile(r"#pragma GCC unroll \d+|#define PD_W \d+")
TOKEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*"|[A-Za-z_]\w*|\.?\d(?:[\w.]|[eEpP][+-])*|\s+|.', re.DOTALL)
"""Comments, strings, identifiers, numbers, and single other characters."""
CALLS = re.compile(r"(pd|PD|v\w+|h\w+)_\w+|v\w+|INT64_C")
"""Names of functions and macros of the headers."""
WORDS = frozenset(("for", "while", "if", "switch", "return", "sizeof", "__attribute__", "__builtin_convertvector"))
"""Other words that a parenthesis may follow."""
FORBIDDEN = re.compile(
    r"(?!__attribute__$|__builtin_convertvector$)__\w*|_Pragma|_Generic|asm|typedef|extern|typeof|goto"
)
"""Words that polydyn does not print: of the compiler, the linker and the preprocessor."""
ATTRIBUTE = "((noinline))"


def rebuilt(artifact: Artifact, path: str) -> Artifact:
    """Return an artifact with libraries that this machine's compiler built from its sources.

    ``path`` is for messages. ArtifactError: a part that cannot be built again, or a text that polydyn does not print;
    both are named. BuildError: the compiler rejects a text, or there is none.
    """
    target = artifact.manifest["target"]
    if "cuda" in artifact.manifest or target not in TARGETS:
        raise _refused(path, f"it is a program for {target}, which only the CPU's compiler could build here")
    images = {n: data for n, data in artifact.images.items() if not n.endswith(LIBRARY)}
    for prefix, part in _programs(artifact, path):
        units, headers = _checked(part.sources, path, prefix)
        library = build_library(units, headers, target)
        images[prefix + LIBRARY] = seal_library(library.data, digest_of(_weights(part, path)))
    return replace(artifact, library=images.pop(LIBRARY), images=images)


def _weights(part: Artifact, path: str) -> Bytes:
    """Return the weights that the host program has; those of further versions may follow."""
    size = re.search(r"\.weight_bytes = (\d+),", part.sources["host.c"])
    if size is None or not SEAL <= int(size[1]) <= part.weights.size:
        raise _refused(path, "sources/host.c has more weights than the file")
    return part.weights[: int(size[1])]


def _programs(artifact: Artifact, path: str, prefix: str = "") -> Iterator[tuple[str, Artifact]]:
    """Yield the program of an artifact and its further versions, with the prefixes of their names."""
    if "order" in artifact.manifest:
        raise _refused(path, "it has several parts, whose libraries are stored with the weights")
    own = {n: t for n, t in artifact.sources.items() if not n.startswith((GENERAL, OVERRIDDEN))}
    yield prefix, replace(artifact, sources=own)
    if "general" in artifact.manifest:
        yield from _programs(general_of(artifact), path, prefix + GENERAL)
    if "overridden" in artifact.manifest and (second := overridden_of(artifact)) is not None:
        yield from _programs(second, path, prefix + OVERRIDDEN)


def _checked(files: Mapping[str, str], path: str, prefix: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the units and headers of a program after all checks."""
    shipped = [sources("cpu") | leaf_headers(t.width) for t in (AVX512, AVX2, NEON)]
    for name, text in files.items():
        if not UNIT.fullmatch(name) and all(s.get(name) != text for s in shipped):
            raise _refused(path, f"sources/{prefix}{name} is not a file of this polydyn's run time")
    missing = [n for n in (*sources("cpu"), "host.c") if n not in files]
    if missing:
        raise _refused(path, f"sources/{prefix}{missing[0]} is missing")
    headers = {n: t for n, t in files.items() if n.endswith(".h")}
    units = {n: t for n, t in files.items() if n.endswith(".c")}
    tokens = {n: _tokens(t, headers, n, path) for n, t in units.items() if UNIT.fullmatch(n)}
    shared = {f for t in tokens.values() for f, is_static in _defined(t) if not is_static}
    interface = set(re.findall(r"\b(pd_\w+)\s*\(", files["polydyn.h"]))
    for name, unit in tokens.items():
        _check_names(unit, shared | {f for f, _ in _defined(unit)}, interface, f"sources/{prefix}{name}", path)
    return units, headers


def _tokens(text: str, headers: Collection[str], name: str, path: str) -> list[str]:
    """Return the tokens of a unit without spaces, comments and directives. Directives are checked."""
    if not text.isascii() or "\\\n" in text or "\r" in text or re.search(r"\?\?|%:|<:|<%", text):
        raise _refused(path, f"sources/{name} has characters that polydyn does not print")
    tokens, line = list[str](), ""
    for token in TOKEN.findall(text):
        line = "" if "\n" in token and token.isspace() else line + token
        if line.lstrip().startswith("#"):
            continue
        if not token.isspace() and not token.startswith(("/*", "//")):
            tokens.append(token)
    for directive in re.findall(r"^\s*#.*", re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL), re.MULTILINE):
        include = INCLUDE.fullmatch(directive.strip())
        own = include and (include["header"] is None or include["header"] in headers)
        if not own and not PRAGMA.fullmatch(directive.strip()):
            raise _refused(path, f"sources/{name} has the directive {directive.strip()[:60]!r}")
    return tokens


def _defined(tokens: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the functions that a unit defines outside of other functions, and whether they are static."""
    depth, first, static = 0, "", False
    for k, token in enumerate(tokens):
        before = tokens[k - 1] if k else ""
        if depth == 0 and token == "(" and not first and before != "__attribute__" and before.isidentifier():
            first = before
        if token in "({[" and depth == 0 and token == "{" and first:
            yield first, static
        depth += (token in "({[") - (token in ")}]")
        static |= depth == 0 and token == "static"
        if depth == 0 and token in ";}":
            first, static = "", False


def _check_names(
    tokens: list[str], functions: Collection[str], interface: Collection[str], name: str, path: str
) -> None:
    """Raise ArtifactError unless every name that is called, or declared as a kernel, is one that polydyn prints."""
    for k, token in enumerate(tokens):
        if FORBIDDEN.fullmatch(token):
            raise _refused(path, f"{name} has the word {token}")
        if token == "__attribute__" and "".join(tokens[k + 1 : k + 6]) != ATTRIBUTE:
            raise _refused(path, f"{name} has an attribute other than noinline")
        called = token.isidentifier() and tokens[k + 1 : k + 2] == ["("]
        kernel = token.isidentifier() and k > 0 and tokens[k - 1] == "pd_kernel"
        if not (called or kernel) or token in functions or (called and token in WORDS):
            continue
        known = called and CALLS.fullmatch(token) and token not in interface
        if not known or hasattr(ctypes.CDLL(None), token):
            raise _refused(path, f"{name} names the function {token}, which neither it nor polydyn defines")


def _refused(path: str, reason: str) -> ArtifactError:
    message = f"{path} cannot be built from its sources: {reason}"
    return ArtifactError(message, rule='trust="sources"', remedy="compile the model on this machine")  # fmt: skip
