"""Next-token cross entropy that never holds every token's logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import dot32
from sharding import act_spec, on_shards
from sharding.rules import ROWS

F32 = jnp.float32


class LossSums(NamedTuple):
    """Sums over real targets: nats of cross entropy, of z-loss, and how many targets."""

    nats: jax.Array
    z: jax.Array
    count: jax.Array


def next_tokens(tokens_BT, segments_BT, mask_BT=None):
    """Each position's target and whether it counts: the next token of the same document.

    `mask_BT` (1 where a token is to be learned) counts where the target, not the input, is masked.
    """

    def local(tokens, segments, mask):
        targets, following, learned = (jnp.roll(x, -1, axis=1) for x in (tokens, segments, mask))
        counts = (segments == following) & (segments != 0) & (learned != 0)
        return targets, counts.at[:, -1].set(False)

    mask_BT = jnp.ones_like(segments_BT) if mask_BT is None else mask_BT
    rows = (jax.reshard(x, act_spec("BT")) for x in (tokens_BT, segments_BT, mask_BT))
    return on_shards(local, "BT,BT,BT -> BT,BT")(*rows)


def token_logprobs(hidden_BTD, head_DV, targets_BT):
    """log p(target) of each position and the logits' log-sum-exp, float32 [B, T]."""
    logits_BTV = dot32("BTD,DV->BTV", hidden_BTD, head_DV.astype(hidden_BTD.dtype))
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    hit_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return hit_BT - lse_BT, lse_BT


def cross_entropy(hidden_BTD, head_DV, targets_BT, counts_BT, *, chunk: int) -> LossSums:
    """Sums of -log p(target) and lse^2 over the positions that count.

    `chunk` tokens at a time have logits, which the backward pass makes again. The head is cast
    within the chunk, so that its gradient adds up in the dtype it is stored in.
    """

    def local(hidden, head, targets, counts):
        n = targets.size
        size = min(chunk, n)
        spare = -n % size

        def cut(x, *tail):
            padded = jnp.pad(x.reshape(n, *tail), ((0, spare),) + ((0, 0),) * len(tail))
            return padded.reshape(-1, 1, size, *tail)

        @jax.checkpoint
        def step(sums, xs):
            hidden_BTD, targets_BT, counts_BT = xs
            logp_BT, lse_BT = token_logprobs(hidden_BTD, head, targets_BT)
            nats = jnp.sum(jnp.where(counts_BT, -logp_BT, 0))
            z = jnp.sum(jnp.where(counts_BT, lse_BT**2, 0))
            return (sums[0] + nats, sums[1] + z), None

        zero = jax.lax.pcast(jnp.zeros((), F32), ROWS, to="varying")
        rows = cut(hidden, hidden.shape[-1]), cut(targets), cut(counts)
        (nats, z), _ = jax.lax.scan(step, (zero, zero), rows)
        return tuple(jax.lax.psum(x, ROWS) for x in (nats, z, jnp.sum(counts)))

    sums = on_shards(local, "BTD,DV,BT,BT -> ,,")(hidden_BTD, head_DV, targets_BT, counts_BT)
    return LossSums(*sums)
