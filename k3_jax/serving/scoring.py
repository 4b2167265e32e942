"""The log-probability of each token of given sequences, by the path that training takes."""

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np

from k3_jax.axes import read
from k3_jax.loss import token_logprobs
from k3_jax.model import K3
from k3_jax.serving.engine import Request, bucket
from sharding import act_spec, on_shards

CHUNK = 64  # positions of each row whose logits exist at a time


@dataclasses.dataclass
class Scored:
    """`logprobs[t]` is that of token t after those before it; the first has none.

    `rows_TV`, if asked for: row t holds log p(v) of every token v that might follow token t.
    """

    request: Request
    logprobs: list[float | None]
    rows_TV: np.ndarray | None = None
    error: str | None = None


@jax.jit
def hidden_rows(model: K3, tokens_BT, n_B):
    """The model's final rows, each row's first n_b tokens being one document."""
    segments_BT = (jnp.arange(tokens_BT.shape[1]) < n_B[:, None]).astype(jnp.int32)
    return model(model.embed(tokens_BT), segments_BT).hidden_BTD


@partial(jax.jit, static_argnames="with_rows")
def chunk_logprobs(model: K3, hidden_BTD, targets_BT, start, *, with_rows: bool):
    """CHUNK positions' log p(target), and log p of every token, from position `start`."""
    hidden_BTD = jax.lax.dynamic_slice_in_dim(hidden_BTD, start, CHUNK, axis=1)
    targets_BT = jax.reshard(targets_BT, act_spec("BT"))
    score = on_shards(token_logprobs, "BTD,DV,BT -> BT,BT")
    logprobs_BT, lse_BT = score(hidden_BTD, read(model.head_DV), targets_BT)
    return logprobs_BT, model.logits(hidden_BTD) - lse_BT[..., None] if with_rows else None


def score(
    model: K3,
    requests: Iterable[Request],
    *,
    n_rows: int = 8,
    max_length: int = 32768,
    with_rows: bool = False,
) -> Iterator[Scored]:
    """Every request's tokens scored, in groups of `n_rows` of one bucket; one program a bucket."""
    groups: dict[int, list[Request]] = {}
    for request in requests:
        n = len(request.tokens)
        if n == 0 or n > max_length:
            why = (
                f"{n} tokens exceed max_length={max_length}"
                if n
                else "empty text: no token to score"
            )
            yield Scored(request, [], error=why)
            continue
        groups.setdefault(bucket(n, 256, 2, max_length), []).append(request)
    for n_tokens, group in sorted(groups.items()):
        for rows in batched(group, n_rows):
            yield from _score_rows(model, rows, n_rows, n_tokens, with_rows)


def _score_rows(model, rows, n_rows, n_tokens, with_rows) -> Iterator[Scored]:
    tokens_BT, n_B = np.zeros((n_rows, n_tokens), np.int32), np.zeros(n_rows, np.int32)
    for b, request in enumerate(rows):
        n_B[b] = len(request.tokens)
        tokens_BT[b, : n_B[b]] = request.tokens
    hidden_BTD = hidden_rows(model, tokens_BT, n_B)
    targets_BT = np.roll(tokens_BT, -1, axis=1)
    starts = range(0, max(n_B), CHUNK)
    found = [
        jax.device_get(
            chunk_logprobs(
                model, hidden_BTD, targets_BT[:, t : t + CHUNK], np.int32(t), with_rows=with_rows
            )
        )
        for t in starts
    ]
    logprobs_BT = np.concatenate([logprobs for logprobs, _ in found], axis=1)
    for b, request in enumerate(rows):
        values = logprobs_BT[b, : n_B[b] - 1]
        if not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values))) + 1
            yield Scored(request, [], error=f"non-finite log-probability of token {at}")
            continue
        rows_TV = np.concatenate([x[b] for _, x in found])[: n_B[b]] if with_rows else None
        yield Scored(request, [None, *map(float, values)], rows_TV)
