"""Windows in registers: matching groups, shared loads, guards."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from polydyn.codegen.cpu.windows import Axes, window_axes
from polydyn.codegen.ir import Apply, Between, Body, Def, FlatLoad, For, If, Ramp, Reg, Set, Store, walk, walk_value
from polydyn.codegen.passes.taps import Window, specialise_guards
from polydyn.codegen.passes.transpose import dense_along
from polydyn.codegen.passes.unzip import share_strided_loads
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import Const, FromIndex, Op, Value, cast, const, neutral, op
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.schedules.model import Group
from tests.support.polyhedral_groups import depthwise

V = Index.of
F = "float32"
BAND = ("c", "h", "w")


def changed(g: Group, value: Value, reduce: str = "sum") -> Group:
    s = tuple(replace(x, value=value, reduce=reduce) if x.reduce else x for x in g.statements)
    return replace(g, statements=s)


# -- which groups ----------------------------------------------------------------------------------------------------


def test_the_lane_follows_the_strides() -> None:
    planes, last = (window_axes(depthwise(last), BAND, 16) for last in (False, True))
    assert isinstance(planes, Axes) and planes.band[-1] == "w" and planes.across == "h"
    assert planes.unrolled == ("j", "k")
    assert isinstance(last, Axes) and last.band[-1] == "c" and last.across == "w" and last.unrolled == ("k",)


def test_few_channels_are_no_lane() -> None:
    def narrow(e: Index) -> Index:
        return e.subs({"C": 3})

    g = depthwise(last=True)
    statements = tuple(replace(s, iters=tuple((x, narrow(e)) for x, e in s.iters)) for s in g.statements)
    axes = window_axes(replace(g, statements=statements), BAND, 16)
    assert isinstance(axes, Axes) and axes.band[-1] == "w"


def test_what_is_no_window_of_this_form() -> None:
    g = depthwise()
    core = g.backbone
    inside = op("ge", FromIndex("int64", V("h") + "j" - 1), const(0, "int64"))
    assert isinstance(core.value, Op)
    x, v = core.value.args
    zero, lowest = const(0, F), neutral("max", F)
    padded = op("mul", op("where", inside, x, zero), v)
    maximum = op("where", inside, x, lowest)
    assert isinstance(window_axes(changed(g, padded), BAND, 16), Axes)
    assert isinstance(window_axes(changed(g, maximum, "max"), BAND, 16), Axes)
    data = op("gt", x, zero)
    refused = [
        changed(g, op("mul", op("where", inside, x, const(1, F)), v)),  # a tap outside adds something
        changed(g, op("where", inside, x, zero), "max"),
        changed(g, op("add", op("where", inside, x, zero), v)),
        changed(g, op("mul", op("where", data, x, zero), v)),  # data-dependent condition
        changed(g, op("mul", op("where", op("or", inside, inside), x, zero), v)),
    ]
    wide = tuple((n, V("H") if n == "j" else e) for n, e in core.iters)
    refused.append(replace(g, statements=tuple(replace(s, iters=wide) if s is core else s for s in g.statements)))
    refused.append(replace(g, arrays={n: replace(a, dtype="int32") for n, a in g.arrays.items()}))
    refused.append(replace(g, statements=tuple(replace(s, reduce=None) for s in g.statements)))
    assert all(isinstance(window_axes(x, BAND, 16), Declined) for x in refused)


# -- the pass --------------------------------------------------------------------------------------------------------


def tile(guards: bool = False, live: bool = False, outputs: int = 3) -> tuple[Body, Window]:
    """Build ``for u: s[u] = 0; for j < 3, u: s[u] += x[i + u + j] * w[j]; for u: y[u] = s[u]``."""
    at = V("i") + "u" + "j"
    x: Value = FlatLoad(F, "x", at)
    if guards:
        inside = op("and", op("ge", FromIndex("int64", at - 1), const(0, "int64")),
                    op("lt", FromIndex("int64", at - 1), FromIndex("int64", V("n"))))  # fmt: skip
        x = op("where", inside, x, const(0, F))
    add = Store("s", V("u"), op("mul", x, FlatLoad(F, "w", V("j"))), "sum")
    last = V("E_u")

    def loop(n: Store) -> For:
        return For("u", V(0), last, (n,))

    body = (
        loop(Store("s", V("u"), const(0, F))),
        For("j", V(0), V(3), (loop(add),)),
        loop(Store("y", V("u"), FlatLoad(F, "s", V("u")))),
    )
    return body, Window("u", outputs, last if live else None, ("j",), {"s": F}, frozenset({"x"}))


def sums(body: Body) -> dict[str, list[str]]:
    """Map each register to the weights of the taps that are added to it, in order."""
    held = {n.reg: n.value for n in walk(body) if isinstance(n, Def)}
    out: dict[str, list[str]] = {}
    for n in walk(body):
        if isinstance(n, Set) and n.reduce:
            assert isinstance(n.value, Op)
            weight = n.value.args[1]
            weight = held[weight.name] if isinstance(weight, Reg) else weight
            assert isinstance(weight, FlatLoad) and weight.buffer == "w"
            out.setdefault(n.reg, []).append(str(weight.address))
    return out


def loaded(body: Body) -> list[str]:
    values = [n.value for n in walk(body) if not isinstance(n, (If, For))]  # type: ignore[union-attr]
    return [str(v.address) for x in values for v in walk_value(x) if isinstance(v, FlatLoad) and v.buffer == "x"]


def test_every_input_is_loaded_once_and_sums_keep_their_order() -> None:
    made = specialise_guards(*tile())
    assert sorted(loaded(made)) == sorted(str(V("i") + k) for k in range(5))
    assert list(sums(made).values()) == [["0", "1", "2"]] * 3 and not [n for n in walk(made) if isinstance(n, If)]


def test_taps_that_several_sums_add_alike_are_added_up_once() -> None:
    """Three sums over windows of 3 x 3 elements have three rows in common with others."""
    x: Value = FlatLoad(F, "x", (V("u") + "j") * 10 + "k")
    taps = For("j", V(0), V(3), (For("k", V(0), V(3), (For("u", V(0), V(3), (Store("s", V("u"), x, "sum"),)),)),))
    first = For("u", V(0), V(3), (Store("s", V("u"), const(0, F)),))
    made = specialise_guards((first, taps), Window("u", 3, None, ("j", "k"), {"s": F}, frozenset({"x"})))
    held: dict[str, list[int | None]] = {}
    for n in (x for x in made if isinstance(x, (Def, Set))):
        read = [v.address.constant for v in walk_value(n.value) if isinstance(v, FlatLoad)]
        added = held[n.value.name] if isinstance(n.value, Reg) else read
        held[n.reg] = added if isinstance(n, Def) or not n.reduce else held[n.reg] + added
    windows = [[10 * (u + j) + k for j in range(3) for k in range(3)] for u in range(3)]
    assert [v for n, v in held.items() if n.startswith("s_")] == windows
    assert len(loaded(made)) == 15 and sum(isinstance(n, Set) and n.reduce == "sum" for n in made) == 2 * 3 + 6 + 7


def test_inside_a_tile_counts_of_taps_are_numbers() -> None:
    body, window = tile(guards=True)
    count = minimum(V("n") - V("i") + 1, 3) - maximum(1 - V("i"), 0)
    ramp = op("min", Ramp("int64", V("n") - V("i") + 1, V(-1), 3), const(3, "int64"))
    more = [Store("c", V(0), FromIndex(F, count)), Store("c", V(1), cast(ramp, F), lanes=3)]
    (choice,) = specialise_guards((*body, *more), window)
    assert isinstance(choice, If)
    inside, edge = ([n.value for n in walk(b) if isinstance(n, (Store, Def))] for b in (choice.then, choice.orelse))
    assert FromIndex(F, V(3)) in inside and Op(F, "cast", (const(3, "int64"),)) in inside
    assert FromIndex(F, count) in edge and cast(ramp, F) in edge


def test_a_tile_inside_has_no_guards_and_its_twin_asks_once_for_each_input() -> None:
    (choice,) = specialise_guards(*tile(guards=True, live=True))
    assert isinstance(choice, If)
    env = {"i": 5, "n": 9, "E_u": 3}
    whole = {(i, n, e): all(c.holds(env | {"i": i, "n": n, "E_u": e}) for c in choice.cond)
             for i, n, e in product(range(6), range(10), range(1, 4))}  # fmt: skip
    for (i, n, e), inside in whole.items():
        assert inside == (e == 3 and i - 1 >= 0 and i + 4 - 1 < n)
    assert not [n for n in walk(choice.then) if isinstance(n, If)]
    asked = [n for n in walk(choice.orelse) if isinstance(n, If) and any(isinstance(x, Set) for x in n.then)]
    assert len(asked) == 5 and len(loaded(choice.orelse)) == 5
    weights = [v for n in walk(choice.orelse) if isinstance(n, (Def, Set)) for v in walk_value(n.value)
               if isinstance(v, FlatLoad) and v.buffer == "w"]  # fmt: skip
    assert len(weights) == 3, "what several of them multiply with is read once, before the first"


def test_taps_that_read_the_same_under_different_guards_ask_one_by_one() -> None:
    """Element i + u + j counts for output u if 2*u + i >= 3: three guards, and guards of two outputs never join."""
    body, window = tile(guards=True)
    (first, taps, last) = body
    assert isinstance(taps, For) and isinstance(taps.body[0], For)
    (add,) = taps.body[0].body
    assert isinstance(add, Store) and isinstance(add.value, Op)
    odd = op("ge", FromIndex("int64", V("u") * 2 + "i"), const(3, "int64"))
    value = op("mul", op("where", odd, FlatLoad(F, "x", V("i") + "u" + "j"), const(0, F)), add.value.args[1])
    other = replace(taps, body=(replace(taps.body[0], body=(replace(add, value=value),)),))
    (choice,) = specialise_guards((first, other, last), window)
    assert isinstance(choice, If)
    asked = [n for n in walk(choice.orelse) if isinstance(n, If) and any(isinstance(x, Set) for x in n.then)]
    assert len({tuple(map(str, n.cond)) for n in asked}) == 3
    assert all(len({x.reg for x in n.then if isinstance(x, Set)}) == 1 for n in asked)
    assert sorted(v for of in sums(choice.orelse).values() for v in of) == sorted("012" * 3)


def test_a_guard_that_is_no_conjunction_is_refused() -> None:
    body, window = tile(guards=True)
    (first, taps, last) = body
    assert isinstance(taps, For) and isinstance(taps.body[0], For)
    (add,) = taps.body[0].body
    assert isinstance(add, Store) and isinstance(add.value, Op)
    unknown = op("mul", op("where", op("eq", FromIndex("int64", V("u")), const(1, "int64")), FlatLoad(F, "x", V("u")),
                           const(0, F)), add.value.args[1])  # fmt: skip
    with pytest.raises(CodegenError, match="not a conjunction of comparisons"):
        loop = replace(taps.body[0], body=(replace(add, value=unknown),))
        specialise_guards((first, replace(taps, body=(loop,)), last), window)


# -- lanes -----------------------------------------------------------------------------------------------------------


def test_lanes_of_a_strided_guard() -> None:
    """0 <= 2*i - 1 < n as a range of lanes."""
    at = V("i") * 2 - 1
    inside = op("and", op("ge", FromIndex("int64", at), const(0, "int64")),
                op("lt", FromIndex("int64", at), FromIndex("int64", V("n"))))  # fmt: skip
    value = op("where", inside, FlatLoad(F, "x", at), const(0, F))
    main, *_ = vectorise_loop(For("i", V(0), V("m"), (Store("y", V("i"), value),)), 8)  # type: ignore[misc]
    (guard,) = {v.guard for n in walk((main,)) if isinstance(n, Store) for v in walk_value(n.value)
                if isinstance(v, FlatLoad)}  # fmt: skip
    assert isinstance(guard, Between)
    for i, n in product(range(3), range(40)):
        ends = [x.evaluate({"i": i, "n": n, "m": 99}) for x in (guard.low, guard.high)]
        assert [ends[0] <= k < ends[1] for k in range(8)] == [0 <= 2 * (8 * i + k) - 1 < n for k in range(8)]


def test_counts_of_taps_have_lanes() -> None:
    """min(n - i, 3) - max(1 - i, 0) is not a ramp: extremes of ramps, in 64 bits."""
    count = minimum(V("n") - "i", 3) - maximum(V(1) - "i", 0)
    loop = For("i", V(0), V("m"), (Store("y", V("i"), FromIndex(F, count)),))
    made = vectorise_loop(loop, 8)
    assert not isinstance(made, Declined)
    values = [v for n in walk(made) if isinstance(n, Store) for v in walk_value(n.value)]
    assert {v.dtype for v in values if isinstance(v, (Ramp, Const))} == {"int64"}
    quotient = For("i", V(0), V("m"), (Store("y", V("i"), FromIndex(F, V("i") // 3)),))
    assert isinstance(vectorise_loop(quotient, 8), Declined)


def test_a_guarded_load_is_no_transpose() -> None:
    load = FlatLoad(F, "x", V("u"), 8, V(64))
    assert dense_along(load, "u", 8) and not dense_along(replace(load, guard=Between("bool", V(0), V(4), 8)), "u", 8)


# -- every other element ---------------------------------------------------------------------------------------------


def touched(v: Value, at: int) -> list[int | None]:
    """Return the elements in the lanes of the result of ``share_strided_loads``; None in lanes that touch nothing."""
    if isinstance(v, FlatLoad):
        guards = v.guard.args if isinstance(v.guard, Op) else (v.guard,) if v.guard else ()
        ranges = [(g.low.evaluate({}), g.high.evaluate({})) for g in guards if isinstance(g, Between)]
        live = v.lanes if v.mask is None else int(v.mask)
        inside = [n < live and (not guards or any(a <= n < b for a, b in ranges)) for n in range(v.lanes)]
        return [int(v.address.evaluate({"i": at})) + n if x else None for n, x in enumerate(inside)]
    assert isinstance(v, Apply)
    first, second = (touched(x, at) for x in v.args)
    return [*first, *second][v.function == "vodds_f32" :: 2]


@pytest.mark.parametrize("guarded, mask", [(False, None), (False, 3), (True, None)])
def test_every_other_element_comes_out_of_whole_vectors_that_neighbours_share(guarded: bool, mask: int | None) -> None:
    lanes = {0: (1, 4), 1: (0, 4), 2: (0, 3)} if guarded else dict.fromkeys(range(3), (0, 4 if mask is None else mask))
    made = {
        c: FlatLoad(F, "x", V("i") + c, 4, V(2), None if mask is None else V(mask),
                    Between("bool", V(a), V(b), 4) if guarded else None)
        for c, (a, b) in lanes.items()
    }  # fmt: skip
    halves = share_strided_loads(made.values())
    read = {n for v in halves.values() for x in v.args for n in touched(x, 0) if n is not None}  # type: ignore[attr-defined]
    expected = {c: [c + 2 * n if a <= n < b else None for n in range(4)] for c, (a, b) in lanes.items()}
    needed = {n for x in expected.values() for n in x if n is not None}
    assert {min(needed), max(needed)} <= read <= set(range(min(needed), max(needed) + 1))
    for c, v in made.items():
        got = touched(halves[v], 0)
        assert all(a == b for a, b in zip(got, expected[c], strict=True) if b is not None)
    assert halves[made[0]].args == halves[made[1]].args  # type: ignore[attr-defined]
