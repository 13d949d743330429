"""Generate tokens with a compiled decoder: ``polydyn.generate`` (docs/decoding.md).

It shows what ``Program.caches`` makes possible, and is not a server: ids in, ids out, one call for each step. Keys and
values stay in arrays with room, which the program extends in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from polydyn.arguments import checked_integer
from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.program import Program, numpy_dtype

Array = npt.NDArray[Any]

MIN_ROOM = 64
"""Smallest number of positions that a cache has room for. It doubles when it is full."""
PADDING_TOLERANCE = 1e-2
"""Largest change of a logit, relative to the largest one, if padding changes nothing but the order of sums."""


@dataclass(frozen=True)
class Cache:
    """An output that is an input with more positions. ``in_place``: both may be views of one array."""

    output: str
    input: str
    dtype: str
    shape: tuple[str, ...]
    axis: int
    in_place: bool

    def empty(self, rows: int, room: int) -> Array:
        """Return an array for ``rows`` texts with room for positions. InputError: another size is not constant."""
        sizes = [str(rows), *self.shape[1:]]
        sizes[self.axis] = str(room)
        if not all(s.isdigit() for s in sizes):
            raise InputError(f"the cache '{self.input}' has the shape [{', '.join(self.shape)}]", tensor=self.input,
                             remedy="sizes besides the batch and the positions must be constants")  # fmt: skip
        return np.zeros(list(map(int, sizes)), numpy_dtype(self.dtype))


@dataclass(frozen=True)
class Decoder:
    """The roles of a program's inputs and outputs; None or empty if it has no such input."""

    program: Program
    tokens: str
    logits: str
    mask: str | None
    positions: str | None
    caches: tuple[Cache, ...]

    @staticmethod
    def of(program: Program) -> Decoder:
        """Recognise the roles: caches by ``Program.caches``, or by the names past and present; the others by names.

        Raises UnsupportedError for an input without a role, or if there are no logits.
        """
        inputs = {i["name"]: i for i in program.arguments("inputs")}
        outputs = {o["name"]: o for o in program.arguments("outputs")}
        caches = [Cache(c["output"], c["input"], c["dtype"], tuple(c["shape"]), c["axis"], True)
                  for c in program.caches]  # fmt: skip
        caches = caches or _named_caches(inputs, outputs)
        rest = {n: i for n, i in inputs.items() if n not in {c.input for c in caches}}
        mask = next((n for n, i in rest.items() if "mask" in n and len(i["shape"]) == 2), None)
        positions = next((n for n, i in rest.items() if "position" in n and len(i["shape"]) <= 2), None)
        free = {n: i for n, i in rest.items() if n not in (mask, positions)}
        tokens = next((n for n, i in free.items() if i["dtype"] in ("int64", "int32") and len(i["shape"]) == 2), None)
        unknown = [n for n in free if n != tokens]
        if tokens is None or unknown:
            named = f"'{unknown[0]}'" if unknown else "no input"
            raise UnsupportedError(
                f"generate does not know what to pass for {named}", tensor=unknown[0] if unknown else None,
                rule="tokens, a mask, positions and caches", remedy="write the loop yourself (docs/decoding.md)",
            )  # fmt: skip
        results = [o for o in outputs.values() if "float" in o["dtype"] and o["name"] not in {c.output for c in caches}]
        logits = [o["name"] for o in results if len(o["shape"]) in (2, 3)]
        if not logits:
            raise UnsupportedError("the program has no output of logits", rule="[batch, positions, tokens]",
                                   remedy="export the model with its language-model head")  # fmt: skip
        name = next((n for n in logits if "logits" in n), logits[0])
        return Decoder(program, tokens, name, mask, positions, tuple(caches))

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of an input."""
        return numpy_dtype(next(i["dtype"] for i in self.program.arguments("inputs") if i["name"] == name))


def _named_caches(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[Cache]:
    """Return pairs named past and present, whose outputs are fed back; none if a name has no partner."""

    def suffix(name: str) -> str:
        return name.replace("past_key_values", "").replace("present", "").replace("past", "").strip("._")

    past = {suffix(n): i for n, i in inputs.items() if n.startswith("past")}
    present = {suffix(n): o for n, o in outputs.items() if n.startswith("present")}
    if past.keys() != present.keys():
        return []
    found = []
    for key, i in past.items():
        growing = [k for k, size in enumerate(i["shape"]) if k and not size.isdigit()]
        if len(growing) != 1:
            return []
        found.append(Cache(present[key]["name"], i["name"], i["dtype"], tuple(i["shape"]), growing[0], in_place=False))
    return found


class State:
    """Texts that a decoder has read: their ids and their caches. ``generate`` continues it and reuses its beginning.

    ``tokens``: the ids of each text. ``length``: positions in the caches, with those that pad shorter texts at their
    beginning (``pads``).
    """

    def __init__(self, program: Program, rows: int = 1) -> None:
        self.decoder = Decoder.of(program)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.pads = np.zeros(rows, np.int64)
        self.length = 0
        self._arrays = {c.output: c.empty(rows, 0) for c in self.decoder.caches}

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on. InputError: there are fewer, or texts are padded beyond it."""
        if not 0 <= length <= self.length or (self.pads > length).any():
            raise InputError(f"a state of {self.length} positions cannot be cut at {length}")
        self.length = length
        self.tokens = [t[: length - int(p)] for t, p in zip(self.tokens, self.pads, strict=True)]

    def copy(self) -> State:
        """Return an independent copy, for another continuation."""
        return self.select(range(len(self.tokens)))

    def select(self, rows: Sequence[int]) -> State:
        """Return a state of some of the texts, in the given order and perhaps several times."""
        other = State.__new__(State)
        other.decoder, other.length = self.decoder, self.length
        other.tokens = [list(self.tokens[r]) for r in rows]
        other.pads = self.pads[list(rows)]
        other._arrays = {n: a[list(rows)] for n, a in self._arrays.items()}
        return other

    def run(self, ids: Array, pads: Array | None = None, every: bool = False) -> Array:
        """Read ``ids`` [texts, positions] and return the logits [texts, tokens] after the last position, as float32.

        ``pads``: for the first ids, the number of positions at the beginning of each text that do not count.
        ``every``: return what the program gives, the logits of all positions [texts, positions, tokens].
        """
        d, before = self.decoder, self.length
        if pads is not None:
            self.pads = pads
        if not d.caches and before:
            raise UnsupportedError("a decoder without caches reads its text at once", rule="State.run")
        after = before + ids.shape[1]
        feeds = {d.tokens: ids.astype(d.dtype(d.tokens))}
        counted = np.arange(after) >= self.pads[:, None]
        if d.mask:
            feeds[d.mask] = counted.astype(d.dtype(d.mask))
        if d.positions:
            places = np.maximum(np.arange(before, after) - self.pads[:, None], 0).astype(d.dtype(d.positions))
            flat = len(next(i["shape"] for i in d.program.arguments("inputs") if i["name"] == d.positions)) == 1
            feeds[d.positions] = places[0] if flat else places
        out = self._grow(after)
        feeds |= {c.input: self._view(c, before) for c in d.caches}
        results = d.program.run(feeds, out)
        self._arrays |= {c.output: results[c.output] for c in d.caches if not c.in_place}
        self.length = after
        for row, text in enumerate(self.tokens):
            text += [int(x) for x in ids[row, max(0, int(self.pads[row]) - before) :]]
        logits = results[d.logits]
        return _as_float32(logits if every or logits.ndim == 2 else logits[:, -1], d)

    def _view(self, c: Cache, length: int) -> Array:
        return self._arrays[c.output][(slice(None),) * c.axis + (slice(length),)]

    def _grow(self, length: int) -> dict[str, Array]:
        """Return views of ``length`` positions for the caches in place. Arrays that are too small double."""
        for c in self.decoder.caches:
            held = self._arrays[c.output]
            if c.in_place and held.shape[c.axis] < length:
                room = max(MIN_ROOM, 2 * held.shape[c.axis], length)
                larger = c.empty(held.shape[0], room)
                larger[(slice(None),) * c.axis + (slice(self.length),)] = self._view(c, self.length)
                self._arrays[c.output] = larger
        return {c.output: self._view(c, length) for c in self.decoder.caches if c.in_place}


def _as_float32(a: Array, d: Decoder) -> Array:
    dtype = next(o["dtype"] for o in d.program.arguments("outputs") if o["name"] == d.logits)
    return (a.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else a.astype(np.float32)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. ``temperature`` 0: the likeliest one, the first among equals."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits: Array, rng: np.random.Generator) -> int:
        """Return the id drawn by logits [tokens]."""
        if self.temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self.temperature
        order = np.argsort(-scaled, kind="stable")
        order = order[: self.top_k] if self.top_k else order
        weights = np.exp(scaled[order] - scaled[order[0]])
        weights /= weights.sum()
        if self.top_p < 1:  # the likeliest tokens until their sum reaches top_p
            count = int((weights.cumsum() < self.top_p).sum()) + 1
            order, weights = order[:count], weights[:count] / weights[:count].sum()
        drawn = int(np.searchsorted(weights.cumsum(), rng.random(), side="right"))
        return int(order[min(drawn, len(order) - 1)])


def generate(
    program: Program,
    prompt: Sequence[int] | Sequence[Sequence[int]],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Iterable[int | Sequence[int]] = (),
    chunk: int = 512,
    state: State | None = None,
) -> Iterator[Any]:
    """Yield the ids that continue a prompt, one at a time.

    ``prompt``: ids of a text, or ids of several texts of any lengths; then every step yields a list with an id for each
    text, None for one that has ended. ``temperature``: 0 takes the likeliest token. ``top_k``: number of tokens to draw
    from (0: all); ``top_p``: draw from the likeliest tokens whose probabilities sum to this. ``seed``: equal seeds give
    equal ids; text k of several uses ``seed + k``. ``stop``: ids, or sequences of ids, that end a text; they are
    yielded. ``chunk``: maximum positions of a prompt in one call. ``state``: a ``polydyn.generation.State`` of one
    text: the beginning that it shares with the prompt is not read again, and it holds the text afterwards. Models
    without caches compute the whole text in every step. Raises InputError for a wrong argument, UnsupportedError if the
    program is not a decoder.
    """
    given: list[Any] = list(prompt)
    several = bool(given) and not isinstance(given[0], (int, np.integer))
    texts = [[checked_integer(x, "an id of the prompt") for x in t] for t in (given if several else [given])]
    if not all(texts):
        raise InputError("a prompt is empty", remedy="pass at least one id, such as that of the beginning of a text")
    for name, value, low in (("max_tokens", max_tokens, 0), ("top_k", top_k, 0), ("chunk", chunk, 1)):
        if checked_integer(value, name) < low:
            raise InputError(f"{name} is {value}", rule=f"at least {low}")
    if not temperature >= 0 or not 0 < top_p <= 1:
        raise InputError(f"temperature is {temperature}, top_p is {top_p}", rule="temperature >= 0, 0 < top_p <= 1")
    if state is not None and (several or len(state.tokens) != 1 or state.decoder.program is not program):
        raise InputError("a state belongs to one text and one program", remedy="leave it out")
    ends = [[x] if isinstance(x, (int, np.integer)) else list(x) for x in stop]
    if not all(ends):
        raise InputError("a stop sequence is empty", remedy="leave it out")
    loop = _Loop(program, texts, Sampling(temperature, top_k, top_p), seed, ends, chunk, max_tokens)
    return loop.several() if several else loop.single(state or State(program))


class _Loop:
    def __init__(
        self, program: Program, texts: list[list[int]], sampling: Sampling, seed: int, stop: list[list[int]],
        chunk: int, max_tokens: int,
    ) -> None:  # fmt: skip
        self.program, self.texts, self.sampling, self.stop = program, texts, sampling, stop
        self.chunk, self.max_tokens = chunk, max_tokens
        self.rngs = [np.random.default_rng(seed + k) for k in range(len(texts))]
        self.written: list[list[int]] = [[] for _ in texts]
        self.decoder = Decoder.of(program)

    def single(self, state: State) -> Iterator[int]:
        """Yield the ids of one text."""
        text = self.texts[0]
        if self.decoder.caches:
            shared = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(state.tokens[0], text, strict=False)))
            state.truncate(min(shared, len(text) - 1))
        for ids in self._steps([0], state):
            yield ids[0]

    def several(self) -> Iterator[list[int | None]]:
        """Yield a list of ids of all texts in every step."""
        every = range(len(self.texts))
        groups = [list(every)] if self._can_pad() else [[k] for k in every]
        running = [(g, self._steps(g, State(self.program, len(g)))) for g in groups]
        for _ in range(self.max_tokens):
            row: list[int | None] = [None] * len(self.texts)
            for _, steps in running:
                for k, token in next(steps, {}).items():
                    row[k] = token
            if not any(x is not None for x in row):
                return
            yield row

    def _can_pad(self) -> bool:
        """Whether texts may form one batch: their lengths are equal, or padding at the beginning changes nothing."""
        return len({len(t) for t in self.texts}) == 1 or padding_is_invisible(self.program)

    def _steps(self, rows: list[int], state: State) -> Iterator[dict[int, int]]:
        """Yield the next id of each of the texts that have not ended."""
        if not self.max_tokens:
            return
        longest = max(len(self.texts[r]) for r in rows)
        ids = np.array([[0] * (longest - len(self.texts[r])) + self.texts[r] for r in rows], np.int64)
        pads = np.array([longest - len(self.texts[r]) for r in rows])
        logits = self._read(state, ids, pads)
        active = list(range(len(rows)))
        for count in range(1, self.max_tokens + 1):
            drawn = {k: self.sampling.draw(logits[k], self.rngs[rows[active[k]]]) for k in range(len(active))}
            for k, token in drawn.items():
                self.written[rows[active[k]]].append(token)
            yield {rows[active[k]]: token for k, token in drawn.items()}
            left = [k for k in drawn if not self._ended(rows[active[k]])]
            if not left or count == self.max_tokens:
                return
            if len(left) < len(active):
                state, active = state.select(left), [active[k] for k in left]
            ids = np.array([[drawn[k]] for k in left], np.int64)
            if self.decoder.caches:
                logits = state.run(ids)
            else:
                logits = self._recompute([[*self.texts[rows[r]], *self.written[rows[r]]] for r in active])

    def _read(self, state: State, ids: Array, pads: Array) -> Array:
        """Read the rest of the prompts in chunks, and return the last logits."""
        if not self.decoder.caches:
            return State(self.program, len(ids)).run(ids, pads)
        if state.length == 0:
            state.pads = pads
        logits = np.empty(0)
        for begin in range(state.length, ids.shape[1], self.chunk):
            logits = state.run(ids[:, begin : begin + self.chunk])
        return logits

    def _recompute(self, texts: list[list[int]]) -> Array:
        longest = max(map(len, texts))
        ids = np.array([[0] * (longest - len(t)) + t for t in texts], np.int64)
        return State(self.program, len(texts)).run(ids, np.array([longest - len(t) for t in texts]))

    def _ended(self, k: int) -> bool:
        written = self.written[k]
        return any(written[-len(s) :] == s for s in self.stop)


_PADDING: WeakKeyDictionary[Program, bool] = WeakKeyDictionary()


def padding_is_invisible(program: Program) -> bool:
    """Whether positions at the beginning of a text that the mask hides change no logits. It is tried once.

    They change them in models that have no mask, or that count positions from the beginning of the array and not by
    their distance. Texts of such models run one by one.
    """
    if program not in _PADDING:
        ids = np.array([[1, 2, 0, 1, 2]])
        alone = State(program).run(ids)
        decoder = Decoder.of(program)
        padded = np.concatenate([np.zeros((1, 3), np.int64), ids], axis=1)
        flat = decoder.positions is not None and _rank(program, decoder.positions) == 1
        hidden = State(program).run(padded, np.array([3])) if decoder.mask and not flat else np.full(1, np.nan)
        change = np.abs(hidden - alone).max()
        _PADDING[program] = bool(change <= PADDING_TOLERANCE * np.abs(alone).max())
    return _PADDING[program]


def _rank(program: Program, name: str) -> int:
    return len(next(i["shape"] for i in program.arguments("inputs") if i["name"] == name))
