"""Notebook integration: ``%load_ext polydyn.explore`` draws plans and trees; sliders need ipywidgets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from polydyn.explore.pictures import fusion, tree
from polydyn.explore.pictures.sheet import Picture
from polydyn.fusion.plan import FusionPlan
from polydyn.program.plan import HostPlan
from polydyn.schedules.tree.scheduled import Scheduled

DRAWINGS: Mapping[type, Callable[[Any], Picture]] = {Scheduled: tree, FusionPlan: fusion, HostPlan: fusion}
"""Maps a type to the function that draws its objects."""


def load_ipython_extension(shell: Any) -> None:
    """Show objects of the types in ``DRAWINGS`` as pictures. IPython calls it for ``%load_ext polydyn.explore``."""
    formatter = shell.display_formatter.formatters["text/html"]
    for kind, draw in DRAWINGS.items():
        formatter.for_type(kind, lambda x, draw=draw: draw(x)._repr_html_())


def activate_in_notebook() -> None:
    """Load the extension if this process is a notebook or IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is not None:
        load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Undo ``load_ipython_extension``. IPython calls it for ``%unload_ext polydyn.explore``."""
    formatter = shell.display_formatter.formatters["text/html"]
    for kind in DRAWINGS:
        formatter.pop(kind, None)


def sliders(draw: Callable[..., Picture], **values: Sequence[int]) -> Any:
    """Return one slider per argument of ``draw``, in a notebook with ipywidgets (extra ``[explore]``); otherwise the
    picture at the middle value of each.

        sliders(lambda M: pictures.domain(t, {"n0": M}), M=range(0, 20))
    """
    widgets = _widgets()
    if widgets is None:
        return draw(**{n: list(v)[len(v) // 2] for n, v in values.items()})
    controls = {n: widgets.SelectionSlider(options=list(v), value=list(v)[len(v) // 2]) for n, v in values.items()}
    return widgets.interactive(lambda **chosen: widgets.HTML(draw(**chosen)._repr_html_()), **controls)


def _widgets() -> Any:
    """Return ipywidgets if it is installed and a shell can show widgets (others print control codes), else None."""
    try:
        return import_module("ipywidgets") if import_module("IPython").get_ipython() else None
    except ImportError:
        return None
