"""A program as one line, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from polydyn.runtime.explain import declared
from polydyn.runtime.tables import counted, html_table, html_text


class Shown(Protocol):
    """What is shown of a program."""

    threads: int

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of the artifact."""

    @property
    def inputs(self) -> Mapping[str, str]:
        """The types of the inputs by name."""

    @property
    def outputs(self) -> Mapping[str, str]:
        """The types of the outputs by name."""

    @property
    def symbols(self) -> Mapping[str, str]:
        """The place of each symbol."""

    @property
    def guards(self) -> list[str]:
        """The guards as sentences."""

    @property
    def launches(self) -> list[str]:
        """The labels of the launches."""

    @property
    def kernel_count(self) -> int:
        """The number of kernels."""

    @property
    def weight_bytes(self) -> int:
        """The size of the constants in bytes."""


def program_line(program: Shown) -> str:
    """Return a program in one line: name, launches, kernels, target, dims with their sizes."""
    m = program.manifest
    sizes = {n: z.range_text() for n, z in declared(m).items()}
    dims = [f"{s}={sizes[s]}" if s in sizes else s for s in program.symbols if s in sizes or not s[-1].isdigit()]
    dims = dims or list(program.symbols)
    launches, kernels = counted(len(program.launches), "launch"), counted(program.kernel_count, "kernel")
    what = f"{launches} of {kernels}, {m['target']}, {counted(program.threads, 'thread')}"
    return f"<Program {m['name'] or 'model'}: {', '.join([what, *dims])}>"


def program_html(program: Shown) -> str:
    """Return a program as HTML: its inputs and outputs as a table, guards and launches by a click."""
    rows = [(kind, n, t) for kind, x in (("input", program.inputs), ("output", program.outputs)) for n, t in x.items()]
    lists = {"guards, checked on every call": program.guards, "launches": program.launches,
             "notes": list(program.manifest["notes"])}  # fmt: skip
    texts = [html_text(f"{name} ({len(lines)})", "\n".join(lines)) for name, lines in lists.items() if lines]
    weights = f"{program.weight_bytes / 1e6:.1f} MB of weights"
    return html_table(f"{program_line(program)[1:-1]}, {weights}", ("", "name", "type"), rows) + "".join(texts)
