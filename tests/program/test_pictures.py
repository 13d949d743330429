"""Pictures of a compilation: they are well-formed, contain the required texts, and draw sizes 0 and 1 like others."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import polydyn
from polydyn import explore
from polydyn.codegen.cpu.target import AVX2
from polydyn.errors import InputError
from polydyn.explore import (
    Scheduled,
    accumulate,
    assign,
    clip,
    interchange,
    pictures,
    prove,
    pull_out,
    sliders,
    tile,
)
from polydyn.explore.pictures.colours import algebra, ink, scale, si
from polydyn.explore.pictures.domain import dependences
from polydyn.explore.pictures.fusion import prefix, repetition
from polydyn.explore.pictures.page import limits
from polydyn.explore.pictures.sheet import Picture, Sheet, cut
from polydyn.fusion.pipeline import fusion_plan
from polydyn.graph.expand import import_model
from polydyn.measure import Progress
from polydyn.runtime.explain import explain
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.spans import Span
from polydyn.schedules.index import Index
from polydyn.schedules.interpret import instances
from polydyn.schedules.tree import Band, Sequence, Tree
from polydyn.schedules.tree.names import b, p
from polydyn.search.backbone import GroupKey, Tile
from polydyn.search.hardware import cpu
from polydyn.search.records import Record, Records
from tests.support.stored import planned
from tests.support.tiny import model, node

W = np.random.default_rng(0).standard_normal((8, 28)).astype(np.float32)


def product() -> explore.Group:
    """Build ``y[M, 28] = relu(x[M, 8] @ w)``."""
    nodes = [node("MatMul", "x w", "p"), node("Relu", "p", "y")]
    (group,) = explore.groups(model(nodes, {"x": ("float32", ["M", 8])}, ["y"], {"w": W}))
    return group


def tiled(t: Scheduled) -> Scheduled:
    """Tile by blocks of 4 x 8, the reduction in blocks of 4 around the points; sums in a buffer per block."""
    for axis, size in (("i", 4), ("j", 8), ("k", 4)):
        t = tile(t, axis, (b, f"B_{axis}"), (p, size))
    t = interchange(t, b("i"), b("j"), b("k"), p("k"), p("i"), p("j"))
    t = accumulate(pull_out(t, b("k"), p("k")), b("j"))
    for axis in ("i", "j"):
        t = clip(t, axis, *t.map.views)
    return assign(clip(t, "k", "ACC"), "task", b("i"), b("j"))


def swapped(tree: Tree) -> Tree:
    """Return the tree with the first two parts of its first sequence exchanged."""
    if isinstance(tree, Band):
        return Band(tree.members, swapped(tree.child))
    assert isinstance(tree, Sequence)
    first, second, *rest = tree.children
    return Sequence((second, first, *rest))


def texts(x: Picture) -> str:
    """Return all text of a picture, hover included, after checks that it is well-formed and plausible."""
    root = ElementTree.fromstring(re.sub(r"<style>.*?</style>", "", x.svg, flags=re.DOTALL))
    ElementTree.fromstring(x.svg)
    assert root.tag.endswith("svg") and root.get("aria-label") == x.title
    assert not re.search(r"\b(nan|inf)\b", re.sub(r">[^<]*<", "><", x.svg)), "a coordinate is no number"
    ids = re.findall(r'id="(\w+)"', x.svg)
    assert len(ids) == len(set(ids)) and set(re.findall(r"url\(#(\w+)\)", x.svg)) <= set(ids)
    for value in re.findall(r'(?:x|y|width|height)="(-?[\d.]+)"', x.svg):
        assert abs(float(value)) < 1e5
    ElementTree.fromstring(f"<div>{x._repr_html_()}</div>")
    folded = "\n".join(f"{h}\n{w if isinstance(w, str) else texts(w)}" for h, w in x.folded)
    return "\n".join(root.itertext()) + "\n" + folded


# -- the sheet ---------------------------------------------------------------------------------------------------------


def test_text_is_escaped_and_cut_and_kept_on_hover() -> None:
    s = Sheet("a < b & c", "sub")
    s.text(0, 50, "<script>alert(1)</script>\x00\ud800", most=60)
    shown = texts(s.picture())
    assert "<script>alert(1)</script>" in shown and "…" in shown and "\x00" not in shown
    assert "<script" not in s.picture()._repr_html_()
    assert [cut("abcdefgh", 4, k) for k in ("start", "end", "both")] == ["abc…", "…fgh", "ab…h"]
    assert [len(cut("abcdefgh", n, k)) for n in (1, 2) for k in ("start", "end", "both")] == [1, 1, 1, 2, 2, 2]


def test_folded_parts_are_closed_and_escaped() -> None:
    x = replace(Sheet("outer").picture(), folded=(("a <b>", "x & y"), ("inner", Sheet("inside").picture())))
    page = x._repr_html_()
    assert "<details><summary>a &lt;b&gt;</summary><pre>x &amp; y</pre></details>" in page and "open" not in page
    assert "inside" in texts(x)


def test_pictures_are_saved_or_refused(tmp_path: Path) -> None:
    x = replace(Sheet("t").picture(), folded=(("more", "text"),))
    x.save(tmp_path / "a.svg")
    x.save(tmp_path / "a.html")
    assert (tmp_path / "a.svg").read_text() == x.svg + "\n" and "more" in (tmp_path / "a.html").read_text()
    with pytest.raises(InputError, match=r"a\.png is not a picture file"):
        x.save(tmp_path / "a.png")
    with pytest.raises(InputError, match="cannot write"):
        x.save(tmp_path / "missing" / "a.svg")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.html", "a.svg"]


def test_numbers_for_people() -> None:
    h, bl = Index.of("H"), Index.of("B") * Index.of("L")
    assert algebra((h + 1) // 2) == "⌈H/2⌉" and algebra(((h + 1) // 2 + 1) // 2) == "⌈H/4⌉"
    assert "⌈" not in algebra((h + 1) // 3)
    assert algebra(bl * 147456) == "147k·B·L"
    assert [si(x) for x in (0, 1, 1500, 2.5e-6, 3e12)] == ["0", "1", "1.5k", "2.5µ", "3T"]
    assert scale(-1) == scale(0) != scale(1) == scale(2) and ink(scale(0)) != ink(scale(1))


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_shows_every_kernel_once_and_repeated_layers_as_one() -> None:
    plan = planned("bert_tiny")
    x = pictures.fusion(plan, {"B": 2, "L": 7})
    shown = texts(x)
    assert "17 kernels" in x.title and "× 2" in shown and "9 different" in shown
    assert "joins, reduces again" in shown and "100%" not in shown
    assert len(x.folded) == 10, "seven of seventeen are the second layer's"
    assert any("apart from" in str(text) for _, text in x.folded)
    with pytest.raises(InputError, match="no size is given for L"):
        pictures.fusion(plan, {"B": 2})
    for sizes in ({"B": 0, "L": 0}, {"B": 1, "L": 1}):
        texts(pictures.fusion(plan, sizes))


def test_a_fusion_plan_shows_primitives_and_why_kernels_are_apart() -> None:
    nodes = [node("Softmax", "x", "a"), node("MatMul", "a w", "p"), node("Softmax", "p", "y")]
    made = model(nodes, {"x": ("float32", ["N", 4])}, ["y"], {"w": np.ones((4, 4), np.float32)})
    plan = fusion_plan(import_model(made))
    x = pictures.fusion(plan)
    edges = re.findall(r"<title>([^<]*\napart: [^<]*)</title>", x.svg)
    assert len(edges) == 2 and "a backbone begins its group" in edges[0] and "element-wise readers" in edges[1]
    assert "sum over 4" in texts(x)


def test_repetition_and_common_names() -> None:
    assert vars(repetition("abab")) == {"first": 0, "period": 2, "count": 2}
    assert vars(repetition("xabcabcabcy")) == {"first": 1, "period": 3, "count": 3}
    assert repetition("abc").count == 1 and repetition("").shown(0) == []
    assert repetition("xababy").shown(6) == [0, 1, 2, 5]
    assert prefix(["a/b/c", "a/b/d"]) == "a/b/" and prefix(["a/b"]) == prefix([]) == ""


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_a_matrix_shows_unknowns_with_their_solution_and_a_group_is_shown_by_it() -> None:
    group = product()
    shown = texts(pictures.matrix(group.polyhedral, group.choice()))
    assert "?INIT.j0" in shown and "= 0" in shown and "= 7" in shown and "ACC" in shown
    assert group._repr_html_() == pictures.matrix(group.polyhedral, group.choice())._repr_html_()
    (rows,) = explore.groups(model([node("Softmax", "x", "y")], {"x": ("float32", ["R", "C"])}, ["y"]))
    assert "contraction declined" in texts(pictures.matrix(rows.polyhedral, rows.choice()))
    assert "phase" in texts(pictures.matrix(rows.polyhedral, rows.choice()))


def test_trees_loops_and_changes() -> None:
    group = product()
    before, after = group.start(), tiled(group.start())
    assert "i, j, k" in texts(pictures.tree(before))
    assert "parallel: b_i, b_j" in texts(pictures.tree(after))
    assert pictures.change(before, after).svg.count('stroke="#d9622b"') == 5
    assert pictures.change(after, after).svg.count('stroke="#d9622b"') == 0
    shown = texts(pictures.loops(after))
    assert "for b_k in [0, B_k)" in shown and "ACC(b_i, b_j, b_k, p_k, p_i, p_j)" in shown


def test_lines_of_code_are_their_statements() -> None:
    """Each line of C that stores has the colour of its statement, and no other line has one."""
    t = tiled(product().start())
    x = pictures.code(t, AVX2)
    colour = dict(zip(("INIT", "ACC", "DONE0"), ("#8b919c", "#e09b2d", "#3d8fe0"), strict=True))
    assert set(re.findall(r'height="16.0" fill="(#\w+)"', x.svg)) == set(colour.values())
    drawn = re.findall(r'height="16.0" fill="(#\w+)".*?<text[^>]*>(?:<title>([^<]*)</title>)?([^<]*)<', x.svg)
    for fill, whole, line in drawn:
        text = whole or line
        if fill == colour["DONE0"]:
            assert "(a2, " in text
        elif fill == colour["ACC"]:
            assert "(acc, " in text and "a0" in text
        else:
            assert "(acc, " in text and "0.0f" in text
    assert len(drawn) == 6


def test_a_given_text_is_recognised_by_its_calls() -> None:
    t = tiled(product().start())
    x = pictures.listing(t, "int a;\nacc[0] = 0.0f;\npd_mma_m16n8k8_tf32(acc, a, b);\npd_stg_wide<4>(a2, o);\n")
    assert [len(re.findall(f'height="16.0" fill="{c}"', x.svg)) for c in ("#8b919c", "#e09b2d", "#3d8fe0")] == [2, 2, 2]
    texts(pictures.listing(t, ""))


# -- instances ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 3, 14])
def test_every_instance_is_drawn_once(rows: int) -> None:
    t = tiled(product().start())
    prove(t)
    x = pictures.domain(t, {"n0": rows})
    shown = texts(x)
    assert "VIOLATED" not in shown and f"{rows * 28 * 8} instances" in shown
    if rows:
        first = re.findall(r"<title>\(i0=\d+, i1=\d+, j0=0\) is number", x.svg)
        assert len(first) == rows * 28 + (28 if rows else 0), "the plane j0 = 0, and its column in the other panel"
        assert len(re.findall(r"<title>task \(", x.svg)) == -(-rows // 4) * 4


def test_instances_are_those_of_the_tree_in_its_order() -> None:
    t = tiled(product().start())
    run = [x for x in instances(t, {"n0": 5}) if x.statement == "ACC"]
    assert len({tuple(x.iterators.values()) for x in run}) == len(run) == 5 * 28 * 8
    keys = [tuple(x.at[c] for c in ("b_i", "b_j", "b_k", "p_k", "p_i", "p_j")) for x in run]
    assert keys == sorted(keys)
    for x in run:
        assert x.iterators["i0"] == 4 * x.at["b_i"] + x.at["p_i"] and x.digits["i"] == (x.at["b_i"], x.at["p_i"])  # type: ignore[index]


def test_an_illegal_order_is_red_and_listed() -> None:
    t = tiled(product().start())
    x = pictures.domain(replace(t, tree=swapped(t.tree)), {"n0": 2})
    assert "VIOLATED" in texts(x) and "flow of l0: INIT(0, 0) must run before ACC(0, 0, 0)" in texts(x)


def test_dependences_of_a_small_product() -> None:
    found = dependences(product().polyhedral, {"n0": 2})
    count = {(d.kind, d.source[0], d.sink[0]): 0 for d in found}
    for d in found:
        count[d.kind, d.source[0], d.sink[0]] += 1
    cells = 2 * 28
    assert count == {
        ("flow", "INIT", "ACC"): cells * 8, ("sum", "ACC", "ACC"): cells * 7, ("flow", "ACC", "DONE0"): cells * 8,
        ("flow", "INIT", "DONE0"): cells,
    }  # fmt: skip


def test_rows_have_a_domain_and_a_footprint() -> None:
    (group,) = explore.groups(model([node("Softmax", "x", "y")], {"x": ("float32", ["R", "C"])}, ["y"]))
    for rows, columns in ((0, 3), (1, 1), (3, 0), (4, 9)):
        sizes = dict(zip(group.polyhedral.params, (rows, columns), strict=True))
        assert "VIOLATED" not in texts(pictures.domain(group.start(), sizes))
        texts(pictures.footprint(group.start(), sizes))


def test_a_footprint_counts_what_a_task_touches() -> None:
    t = tiled(product().start())
    shown = texts(pictures.footprint(t, {"n0": 14}))
    assert "a0: 32 of 112 elements, 128 bytes, 8 times each" in shown
    assert "a1: 64 of 224 elements, 256 bytes, 4 times each" in shown and "a2: 32 of 392 elements" in shown
    assert "a2: 4 of 392" not in shown
    assert "a0: 16 of 112" in texts(pictures.footprint(t, {"n0": 14}, {"b_i": 3, "b_j": 3})), "the tail has two rows"
    with pytest.raises(InputError, match="nothing runs at"):
        pictures.footprint(t, {"n0": 14}, {"b_i": 9})


@pytest.mark.parametrize(("sizes", "says"), [({"n0": 65}, "at most 64 are drawn"), ({}, "no size is given for n0")])
def test_large_instances_are_refused(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        pictures.domain(tiled(product().start()), sizes)


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> polydyn.Program:
    nodes = [node("MatMul", "x w", "p"), node("Softmax", "p", "y")]
    return polydyn.compile(model(nodes, {"x": ("float32", ["M", 8])}, ["y"], {"w": W}), threads=2)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_a_call_is_a_timeline_and_a_roofline(program: polydyn.Program, rows: int) -> None:
    x = pictures.call(program, {"x": np.ones((rows, 8), np.float32)}, cpu(2))
    shown = texts(x)
    if rows:
        assert all(k in shown for k in program.explain(M=rows).kernels) and "peak" in shown and "thr 1" in shown
    else:
        assert "nothing runs" in shown


def test_lanes_are_what_threads_did(program: polydyn.Program) -> None:
    """Consecutive pieces of a launch are merged; the remaining time is waiting."""
    told = program.explain(M=40)
    x = told.launches[0]
    spans = [Span(0, x.label, x.kernel, *rest) for rest in ((0, 0, 4, 50, 90), (0, 4, 4, 90, 150), (1, 8, 2, 100, 150))]
    drawn = texts(pictures.timeline(told, spans))
    assert "threads are busy 75% of the time" in drawn and f"8 of {x.tasks} tasks" in drawn and "thr 1" in drawn
    assert f"2 of {x.tasks} tasks" in drawn and f"4 of {x.tasks} tasks" not in drawn
    with pytest.raises(InputError, match="the trace is of another program"):
        pictures.timeline(told, [replace(spans[0], label="another")])
    assert "nothing runs" in texts(pictures.timeline(told, []))


def test_times_of_another_program_have_no_roofline(program: polydyn.Program) -> None:
    told = program.explain(M=40)
    times = [LaunchTime(x.label, x.kernel, 0, x.flops, x.bytes, 3, 2) for x in told.launches]
    assert "nothing" in texts(pictures.roofline(told, times, cpu(2)))
    with pytest.raises(InputError, match="the profile is of another program"):
        pictures.roofline(told, [*times, times[0]], cpu(2))


def test_a_peak_that_is_too_low_is_said(program: polydyn.Program) -> None:
    told = program.explain(M=40)
    times = [LaunchTime(x.label, x.kernel, 1000, x.flops, x.bytes, 3, 2) for x in told.launches]
    assert "of the peak, which is too low" in texts(pictures.roofline(told, times, limits(1e3, 1e12, 2)))


def test_shapes_are_categories() -> None:
    x = pictures.lines({"polydyn": {0.0: 5e-4, 1.0: 1e-3}}, "", "s", names=["B=1,L=8", "B=2,L=16"])
    shown = texts(x)
    assert "B=1,L=8" in shown and "B=2,L=16" in shown and "200ms" not in shown and "µs" in shown


# -- searches ----------------------------------------------------------------------------------------------------------


def recorded(path: Path, decision: str = "", saturating: bool = True) -> pictures.Searched:
    """Write a record file with a search of three tiles, two of them selected."""
    key, machine = GroupKey("g", "float32", "cpu"), cpu(1)
    tiles = [Tile((("w.i", n), ("w.j", 16)), (("b.i", 8 * n),)) for n in (2, 4, 6)]
    costs = zip(tiles, (3e-11, 1e-11, 2e-11), strict=True)
    rows = [Record(key, machine, t, "throughput", (("cost", c),)) for t, c in costs if saturating]
    rows += [Record(key, machine, t, "throughput", (("seconds", 1e-6 * m * (k + 1)),), (("i", m), ("j", 8)))
             for k, t in enumerate(tiles[:2]) for m in (1, 64)]  # fmt: skip
    rows.append(Record(key, machine, Tile((("w.i", 99),)), "failed", ()))
    kept = json.dumps([[t.compile, t.launch] for t in (tiles[1], tiles[0])])
    note = f'{{"strategy": "polydyn", "tiles": {kept}{decision}}}'
    rows.append(Record(key, machine, Tile(()), "search", (("explored", 3.0),), note=note))
    with Records.open(path) as opened:
        opened.put(rows)
        (found,) = pictures.searches(opened)
    return found


SPLIT = ', "decision": {"index": "i", "threshold": 8, "low": {"kernel": 0}, "high": {"kernel": 1}}'


def test_a_search_shows_its_trials_and_what_it_kept(tmp_path: Path) -> None:
    x = recorded(tmp_path / "r.db", SPLIT)
    shown = texts(pictures.trials(x))
    assert "3 trials of polydyn" in shown and "1 failed" in shown and "kept (2)" in shown
    assert "4×16 in 32, 100 GFLOP/s" in shown
    assert x._repr_html_() == pictures.trials(x)._repr_html_()
    assert "no trial" in texts(pictures.trials(replace(x, trials=())))


def test_trials_without_a_saturating_instance_are_times_at_one_shape(tmp_path: Path) -> None:
    x = recorded(tmp_path / "r.db", saturating=False)
    assert x.trial_shape == (("i", 64), ("j", 8)) and len(x.trials) == 2
    assert "4×16 in 32, 128µs" in texts(pictures.trials(x))


def test_times_of_tiles_frame_what_the_dispatcher_takes(tmp_path: Path) -> None:
    x = recorded(tmp_path / "r.db", SPLIT)
    shown = texts(pictures.tiles(x))
    assert "2.00" in shown and "best" in shown
    frames = pictures.tiles(x).svg.count('stroke="#e0524d"')
    assert frames == 2 and x.chosen({"i": 8, "j": 8}) == x.kept[0] and x.chosen({"i": 9, "j": 8}) == x.kept[1]
    undecided = recorded(tmp_path / "rivals.db")
    assert pictures.tiles(undecided).svg.count('stroke="#e0524d"') == 0
    assert "no time" in texts(pictures.tiles(replace(x, times={})))


def test_a_curve_of_the_best_so_far() -> None:
    steps = [Progress(1, 2, n, 8, best, 0.1) for n, best in ((2, 5e9), (4, 8e9), (8, 10e9))]
    shown = texts(pictures.curve([*steps, Progress(2, 2, 8, 8, 1e9, 0.2)]))
    assert "95% after 8" in shown and "2 groups" in shown
    assert "no trial" in texts(pictures.curve([]))
    assert "no trial" in texts(pictures.curve([Progress(1, 1, 0, 8, 0.0, 0)]))


def test_numbers_over_shapes() -> None:
    x = pictures.shapes({(1, 1): 1e-6, (64, 1): 1e-3, (1, 64): 0.0})
    assert "M=64, N=1: 1ms" in texts(x) and x.svg.count("M=") == 3
    assert "no shape" in texts(pictures.shapes({})) and texts(pictures.shapes({(0, 0): 0.0}))


def test_regions_of_the_dispatcher(program: polydyn.Program) -> None:
    """The picture's kernel at a size is the kernel that ``explain`` names there, also at 0."""
    manifest = copy.deepcopy(dict(program.manifest))
    (launch,) = (x for x in manifest["launches"] if x["label"].startswith("contract"))
    launch["candidates"] = [{**launch["candidates"][0], "name": f"kernel {k}"} for k in range(3)]
    launch["reasons"] = ["kernel 1: tile of 4 rows"]
    launch["decision"] = len(manifest["decisions"])
    costs = [{"kernel": 1, "cost": ["*", 3, "M"]}, {"kernel": 2, "cost": ["+", 100, "M"]}]
    manifest["decisions"].append({"index": "M", "threshold": 7, "low": {"kernel": 0}, "high": {"least": costs}})
    made: Any = SimpleNamespace(manifest=manifest, threads=2)
    sizes = (0, 1, 7, 8, 64, 300)
    x = pictures.regions(made, "contract", ("M", sizes))
    texts(x)
    for m in sizes:
        told = next(e for e in explain(manifest, {"M": m}, 2).launches if e.label == launch["label"])
        (shown,) = re.findall(rf"<title>M={m}: ([^<,]*)", x.svg)
        taken = [line.partition(",")[0].removeprefix("taken: ") for line in told.selection if "taken: " in line]
        assert [shown] == (["nothing: no elements"] if m == 0 else taken)
    assert "kernel 1: tile of 4 rows" in texts(x) and "M=64: kernel 2, estimated 164ps" in texts(x)
    with pytest.raises(InputError, match="0 launches are called 'nowhere'"):
        pictures.regions(program, "nowhere", ("M", sizes))
    with pytest.raises(InputError, match="no dim Q"):
        pictures.regions(program, "contract", ("Q", sizes), M=4)


# -- notebooks ---------------------------------------------------------------------------------------------------------


class Formatter(dict[type, Callable[[Any], str]]):
    def for_type(self, kind: type, draw: Callable[[Any], str]) -> None:
        self[kind] = draw


def test_the_extension_shows_trees_and_plans_and_goes_again() -> None:
    formatter = Formatter()
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    explore.load_ipython_extension(shell)
    t = product().start()
    assert formatter[Scheduled](t) == pictures.tree(t)._repr_html_()
    assert "17 kernels" in formatter[type(planned("bert_tiny"))](planned("bert_tiny"))
    explore.unload_ipython_extension(shell)
    assert not formatter


def test_sliders_need_ipywidgets_in_a_notebook_and_elsewhere_are_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    t = product().start()

    def draw(rows: int) -> Picture:
        return pictures.domain(t, {"n0": rows})

    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert sliders(draw, rows=range(5)) == draw(2)
    made = SimpleNamespace(
        SelectionSlider=lambda options, value: (options, value), HTML=str,
        interactive=lambda f, **w: (f(**{n: v[1] for n, v in w.items()}), w),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ipywidgets", made)
    shell: list[object] = []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert sliders(draw, rows=range(5)) == draw(2), "nobody shows them"
    shell.append("a notebook")
    page, widgets = sliders(draw, rows=range(5))
    assert page == draw(2)._repr_html_() and widgets["rows"][0] == [0, 1, 2, 3, 4]
