"""What people see: one line as text, HTML in notebooks, DataFrames."""

from __future__ import annotations

import html.parser
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polydyn
from polydyn.errors import MissingPackageError
from polydyn.explore import display, groups
from polydyn.runtime.tables import Table, counted
from polydyn.search.records import Records
from tests.support.tiny import model, node

X = {"x": np.ones((3, 4), np.float32)}


def product() -> Any:
    nodes = [node("MatMul", "x w", "y"), node("Relu", "y", "<z>")]
    return model(nodes, {"x": ("float32", ["N", 4])}, ["<z>"], {"w": np.ones((4, 3), "f4")})


@pytest.fixture(scope="module")
def program() -> polydyn.Program:
    return polydyn.compile(product(), threads=1, dims={"N": (1, 8)})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "r.db"
    polydyn.tune(product(), path, trials=1, threads=1)
    return path


def balanced(text: str) -> set[str]:
    """Return the tags of HTML, all of which are closed."""
    tags, open_ = set(), []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            tags.add(tag)
            open_.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_.pop() == tag

    Parser().feed(text)
    assert not open_
    return tags


VIEWS: dict[str, tuple[Callable[[polydyn.Program], Any], str]] = {
    "program": (lambda p: p, "<Program m: 1 launch of 1 kernel, cpu, 1 thread, N=1..8>"),
    "explanation": (lambda p: p.explain(N=3), "<Explanation of m at N=3, 1 thread: 1 launch of 1 kernel in 1 wave, "),
    "profile": (lambda p: p.profile(X), "<profile, 0."),
    "trace": (lambda p: p.trace(X), "<trace, 1 thread, 0."),
    "groups": (lambda p: groups(product()), "<groups of m: 1 group>"),
    "group": (lambda p: groups(product())[0], "contract <z>"),
    "schedule": (lambda p: groups(product())[0].schedule().tile(i=4), "<Schedule of contract <z>: 1 step>"),
    "kernel": (lambda p: groups(product())[0].compiled(), "<Compiled kernel of group: "),
    "session": (lambda p: polydyn.InferenceSession(product().SerializeToString()), "<InferenceSession of <Program m: "),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_one_line_and_html(name: str, program: polydyn.Program) -> None:
    make, begin = VIEWS[name]
    x = make(program)
    assert repr(x).startswith(begin) and "\n" not in repr(x) and len(repr(x)) < 150
    tags = balanced(x._repr_html_())
    assert tags & {"table", "svg", "details"} and "z" not in tags, "names are escaped"


def test_trees_and_choices_are_one_line() -> None:
    (group,) = groups(product())
    assert repr(group.start()) == "<Scheduled group: 3 statements, loops i, j, k>"
    assert repr(group.choice()) == "<Choice matmul-like: a band of 2, 0 declined>"


def test_the_detail_of_text_stays(program: polydyn.Program) -> None:
    assert "FLOP/byte" in str(program.explain(N=3)) and "N: compiled for 1..8" in str(program.explain(N=3))
    (group,) = groups(product())
    assert str(group.schedule().tile(i=4)).splitlines()[1:] == ["s = s.tile(i=4)"]


def test_tables_are_lists(program: polydyn.Program) -> None:
    times = program.profile(X)
    assert isinstance(times, list) and times == list(times) and times[0].label and Table() == [] == list(Table())
    assert [counted(n, u) for n, u in ((1, "pass"), (2, "pass"), (0, "row"))] == ["1 pass", "2 passes", "0 rows"]
    many = Table([times[0]] * 300, "t", "launch")
    assert "the first 200 are shown" in many._repr_html_() and many._repr_html_().count("<tr>") == 201


def test_records_are_a_table(file: Path) -> None:
    with Records.open(file, readonly=True) as records:
        rows = records.table()
        assert repr(records) == f"<Records r.db: {len(rows)} records of 1 group>"
        balanced(records._repr_html_())
    assert repr(records) == "<Records r.db, closed>"
    kinds = {r["kind"] for r in rows.rows()}
    assert "search" in kinds and {"machine", "group", "tile", "note"} <= {*rows.rows()[0]}


def test_data_frames_have_a_column_per_field(
    program: polydyn.Program, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not pandas is installed here."""
    made: list[Any] = []
    monkeypatch.setitem(__import__("sys").modules, "pandas", SimpleNamespace(DataFrame=lambda rows: made.append(rows)))
    program.profile(X).to_pandas()
    program.explain(N=3).to_pandas()
    with Records.open(file, readonly=True) as records:
        records.table().to_pandas()
    assert [*made[0][0]][:3] == ["label", "kernel", "nanoseconds"] and "flops" in made[1][0] and "tile" in made[2][0]
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingPackageError, match=r"(?s)pandas.*remedy: pip install pandas"):
        program.profile(X).to_pandas()


def test_pictures_are_registered_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees have no method for it, because their room draws nothing."""
    formats: dict[type, Any] = {}
    html_format = SimpleNamespace(for_type=lambda kind, draw: formats.update({kind: draw}))
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": html_format}))
    monkeypatch.setitem(__import__("sys").modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    display.activate_in_notebook()
    assert {*formats} == {*display.DRAWINGS}
    (group,) = groups(product())
    assert "<svg" in formats[type(group.start())](group.start())


def test_parts_of_results_are_one_line_too() -> None:
    program = polydyn.compile(product(), threads=1, cache=False)
    (launch,) = program.explain(N=3).launches
    assert repr(launch).startswith("<contract <z>: contract_") and repr(launch).endswith(" on 1 thread>")
    assert repr(program.timing).startswith("<Timing: ") and "\n" not in repr(program.timing)
    assert program.timing is not None and balanced(program.timing._repr_html_()) == {"pre"}
    assert repr(program.bind(X)) == "<BoundCall: outputs <z>>"
