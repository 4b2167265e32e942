"""Continues token sequences, many rows at a time: prefill, decode, and who sits in which row.

Works in ids alone. A row is one request's place in the cache. Whatever a row computes depends on
its own request: the bucket of the cache by its own length, its prompt in pieces counted from its
own start, its random numbers by its own index. Nothing of a cache is ever reused: a row is cleared
for each request, also where two prompts begin alike (T12).
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from k3_jax.model import K3, fresh_cache
from k3_jax.serving.sampling import Draw, Drawn, Settings, draw_tokens
from k3_jax.state import SLOTS, K3Cache
from sharding import act_spec, on_shards


@dataclasses.dataclass(frozen=True)
class Request:
    """Token ids to be continued. `index` picks the random numbers; `id` is the caller's own."""

    index: int
    tokens: tuple[int, ...]
    settings: Settings
    id: object = None


@dataclasses.dataclass
class Finished:
    """What became of a request. `reason` is "stop", "length" or "error", which `error` explains.

    `tokens` ends with the stop id, if one ended it. `logprobs` are those of the plain model: they
    know nothing of temperature and exclusions.
    """

    request: Request
    tokens: list[int]
    logprobs: list[float]
    reason: str
    error: str | None = None


@dataclasses.dataclass
class _Row:
    """A request in its place: how much of its prompt the cache holds, and what was drawn."""

    request: Request
    n_fed: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    @property
    def is_prompt(self) -> bool:
        return self.n_fed < len(self.request.tokens)

    def next_tokens(self, width: int):
        if not self.is_prompt:
            return self.tokens[-1:]
        piece = self.request.tokens[self.n_fed : self.n_fed + width]
        self.n_fed += len(piece)
        return piece


def bucket(n: int, smallest: int, growth: int, largest: int) -> int:
    """The first of smallest, smallest * growth, smallest * growth^2, ... that holds n.

    At most `largest` >= n, rounded up to a multiple of `smallest`.
    """
    size = smallest
    while size < n:
        size *= growth
    return min(size, -(-largest // smallest) * smallest)


@partial(jax.jit, static_argnums=(0, 1, 2))
def empty_cache(config, n_rows: int, n_slots: int) -> K3Cache:
    return fresh_cache(config, n_rows, n_slots)


@partial(jax.jit, donate_argnums=0)
def clear_rows(cache: K3Cache, is_new_B) -> K3Cache:
    """The cache with some rows empty, whatever they held: NaN too."""
    is_new_B = jax.reshard(is_new_B, act_spec("B"))

    def clear(axis, x):
        shape = (1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1)
        return jnp.where(is_new_B.reshape(shape), jnp.zeros((), x.dtype), x)

    # Two stacked axes, groups and layers, stand before the rows.
    return K3Cache(jax.tree.map(partial(clear, 2), cache.blocks), clear(0, cache.length_B))


@partial(jax.jit, donate_argnums=1)
def step(model: K3, cache: K3Cache, tokens_BT, n_B, draw: Draw) -> tuple[K3Cache, Drawn]:
    """Feeds row b the first n_b of its tokens and draws what follows; n_b = 0 leaves it alone.

    Prefill and decode are this one function: with T of a piece, and with T of 1.
    """
    n_B, *draw = (jax.reshard(x, act_spec("B")) for x in (n_B, *draw))
    segments_BT = (jnp.arange(tokens_BT.shape[1]) < n_B[:, None]).astype(jnp.int32)
    out = model(model.embed(tokens_BT), segments_BT, cache)
    last = on_shards(lambda x, n: x[jnp.arange(x.shape[0]), n - 1][:, None], "BTD,B -> BTD")
    logits_BV = model.logits(last(out.hidden_BTD, n_B))[:, 0]
    return out.cache, draw_tokens(logits_BV, Draw(*draw))


class Engine:
    """A fixed number of rows over a model. Two programs for each bucket of cache lengths."""

    def __init__(
        self,
        model: K3,
        *,
        n_rows: int = 8,
        piece: int = 256,
        smallest: int = SLOTS,
        max_length: int = 32768,
    ):
        """`piece` tokens of each prompt go in at a time; `smallest` is the first bucket's length.

        `max_length` is that of a prompt and its answer. Raises ValueError where rows do not
        divide over the devices of `jax.set_mesh`.
        """
        n_devices = jax.sharding.get_mesh().size
        if n_rows < 1 or n_rows % n_devices:
            raise ValueError(f"{n_rows} rows do not divide over {n_devices} devices")
        self.model, self.n_rows, self.piece = model, n_rows, piece
        self.smallest, self.max_length = smallest, max_length
        self.cache: K3Cache | None = None

    def refusal(self, request: Request) -> str | None:
        """Why the request cannot be served, if so."""
        n, more, V = len(request.tokens), request.settings.max_tokens, self.model.config.vocab_size
        if n == 0:
            return "empty prompt: there is no token to continue"
        if n + more > self.max_length:
            return f"prompt of {n} tokens + max_tokens={more} exceeds max_length={self.max_length}"
        if bad := [t for t in request.tokens if not 0 <= t < V]:
            return f"token id {bad[0]} is outside the vocabulary of {V}"
        return None

    def run(
        self,
        requests: Iterable[Request],
        watch: Callable[[Request, int], bool] = lambda request, token: False,
    ) -> Iterator[Finished]:
        """Every request's end, as they come to it.

        `watch` sees each token that is not a stop id, and ends its row with "stop" by True.
        """
        groups: dict[int, deque] = {}
        for request in requests:
            if why := self.refusal(request):
                yield Finished(request, [], [], "error", why)
                continue
            length = len(request.tokens) + request.settings.max_tokens
            n_slots = bucket(length, self.smallest, 4, self.max_length)
            groups.setdefault(n_slots, deque()).append(request)
        for n_slots, waiting in sorted(groups.items()):
            yield from self._run_bucket(waiting, n_slots, watch)

    def _run_bucket(self, waiting: deque, n_slots: int, watch) -> Iterator[Finished]:
        self.cache = empty_cache(self.model.config, self.n_rows, n_slots)
        rows: list[_Row | None] = [None] * self.n_rows
        while waiting or any(rows):
            self._admit(rows, waiting)
            for is_prompt, width in ((True, self.piece), (False, 1)):
                turn = {b: r for b, r in enumerate(rows) if r and r.is_prompt == is_prompt}
                if turn:
                    yield from self._advance(rows, turn, width, watch)
        self.cache = None

    def _admit(self, rows: list, waiting: deque) -> None:
        """Seats waiting requests in free rows, which are cleared first."""
        is_new_B = np.zeros(self.n_rows, bool)
        for b, row in enumerate(rows):
            if row is None and waiting:
                rows[b], is_new_B[b] = _Row(waiting.popleft()), True
        if is_new_B.any():
            self.cache = clear_rows(self.cache, is_new_B)

    def _advance(self, rows: list, turn: dict[int, _Row], width: int, watch) -> Iterator[Finished]:
        """One step for the rows whose turn it is; those that end leave their place."""
        tokens_BT, n_B = np.zeros((self.n_rows, width), np.int32), np.zeros(self.n_rows, np.int32)
        draw = self._draw(turn)
        for b, row in turn.items():
            piece = row.next_tokens(width)
            tokens_BT[b, : len(piece)], n_B[b] = piece, len(piece)
        self.cache, drawn = step(self.model, self.cache, tokens_BT, n_B, draw)
        for b, token, logprob, is_finite in zip(
            range(self.n_rows), *jax.device_get(drawn), strict=True
        ):
            if b in turn and (end := _end(turn[b], int(token), float(logprob), is_finite, watch)):
                rows[b] = None
                yield end

    def _draw(self, turn: dict[int, _Row]) -> Draw:
        draw = fresh_draw(self.n_rows)
        for b, row in turn.items():
            s = row.request.settings
            values = (
                s.temperature,
                s.top_k,
                s.top_p,
                s.min_p,
                s.seed,
                row.request.index,
                len(row.tokens),
            )
            for column, value in zip(draw, values, strict=True):
                column[b] = value
        return draw


def fresh_draw(n_rows: int) -> Draw:
    """Rows for which nothing has been asked yet."""
    columns = [np.zeros(n_rows, t) for t in ("f4", "i4", "f4", "f4", "u4", "u4", "u4")]
    draw = Draw(*columns)
    draw.top_p_B[:] = 1
    return draw


def _end(row: _Row, token: int, logprob: float, is_finite: bool, watch) -> Finished | None:
    """Notes what a row has drawn; says how the row ends, if it does."""
    request, settings = row.request, row.request.settings
    if not is_finite:
        return Finished(request, row.tokens, row.logprobs, "error", "non-finite logits")
    if row.is_prompt:
        return None
    row.tokens.append(token)
    row.logprobs.append(logprob)
    if token in settings.stop_ids or watch(request, token):
        return Finished(request, row.tokens, row.logprobs, "stop")
    if len(row.tokens) == settings.max_tokens:
        return Finished(request, row.tokens, row.logprobs, "length")
    return None
