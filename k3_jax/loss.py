"""Next-token cross entropy that never holds every token's logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3_jax.axes import own_ids
from pallas_kernels.common import dot32
from pallas_kernels.halo import from_next
from sharding import TOKENS, act_spec, on_shards, present

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

    def after(x_BT):
        """What follows each token; 0 at a row's end, where segment 0 is of no document."""
        if present(("seq",)):
            return jnp.concatenate([x_BT[:, 1:], from_next(x_BT, "seq")], axis=1)
        return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)))

    def local(tokens, segments, mask):
        targets, following, learned = (after(x) for x in (tokens, segments, mask))
        return targets, (segments == following) & (segments != 0) & (learned != 0)

    mask_BT = jnp.ones_like(segments_BT) if mask_BT is None else mask_BT
    rows = (jax.reshard(x, act_spec("BT")) for x in (tokens_BT, segments_BT, mask_BT))
    return on_shards(local, "BT,BT,BT -> BT,BT")(*rows)


def token_logprobs(hidden_BTD, head_DV, targets_BT):
    """log p(target) of each position and the logits' log-sum-exp, float32 [B, T].

    Inside `on_shards`, where each device of `tensor` has a part of the vocabulary.
    """
    logits_BTV = dot32("BTD,DV->BTV", hidden_BTD, head_DV.astype(hidden_BTD.dtype))
    lse_BT, axes = jax.nn.logsumexp(logits_BTV, axis=-1), present(("tensor",))
    if axes:
        targets_BT, is_own_BT = own_ids(targets_BT, logits_BTV.shape[-1])
    hit_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    if axes:
        hit_BT = jax.lax.psum(jnp.where(is_own_BT, hit_BT, 0), axes)
        largest_BT = jax.lax.pmax(jax.lax.stop_gradient(lse_BT), axes)
        lse_BT = largest_BT + jnp.log(jax.lax.psum(jnp.exp(lse_BT - largest_BT), axes))
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

        axes = present(TOKENS)
        zero = jax.lax.pcast(jnp.zeros((), F32), axes, to="varying")
        rows = cut(hidden, hidden.shape[-1]), cut(targets), cut(counts)
        (nats, z), _ = jax.lax.scan(step, (zero, zero), rows)
        return tuple(jax.lax.psum(x, axes) for x in (nats, z, jnp.sum(counts)))

    sums = on_shards(local, "BTD,DV,BT,BT -> ,,")(hidden_BTD, head_DV, targets_BT, counts_BT)
    return LossSums(*sums)
