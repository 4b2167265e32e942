"""Kimi Delta Attention on a shard of the time axis.

All of a shard is linear in the state before it: o = o_zero + reach S, and the state behind it is
M S + S_zero. `gated_kda` itself gives the four at once, from values [v | 0] and a state [0 | I]:
its outputs are [o_zero | reach], and the state it ends in is the pair [S_zero | M]. Pairs are
gathered and composed, which gives every shard the state before it.

Twice the values cost less than a second run, for keys, gates and inverses are shared: 14 to 35 %
more than an ordinary forward run, 14 to 24 % of forward and backward together. Modelled at T = 8192
and 12 heads (`python -m benchmarks.kernels --sections kda`, "with transitions"), forward and
backward, in us: v6e 829 (ordinary 729), tpu7x 742 (624), v5p 635 (512). The pair first, without a
gradient, and then an ordinary run from the state that it gives would be 980, 843 and 689.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import halo
from pallas_kernels.common import vary, varying
from pallas_kernels.kda.algebra import product

EXACT = jax.lax.Precision.HIGHEST


def gated_kda_sharded(
    q_BTHk, k_BTHk, v_BTHv, logit_BTHk, beta_BTH, a_log_H, bias_Hk, state_BHkv, segments_BT,
    *, lower_bound, axis, impl="auto",
):  # fmt: skip
    """`gated_kda` of whole rows whose T is split over the mesh axis `axis`; inside shard_map.

    state is the one before the row, the same on all shards; the one after the row's last real
    token is returned with a type that does not vary over `axis`. The gradient of the state comes
    from the first shard, those of a_log and bias are each shard's own part: what makes an operand
    vary over `axis` adds them up. Documents and pads may begin and end anywhere.

    A shard gathers K (K + V) float32 numbers from each other one for each row and head. o is a sum
    of two parts that came in v's dtype, one rounding of each more than `gated_kda` has.
    """
    # The door imports this module.
    from pallas_kernels.kda import gated_kda

    args = (q_BTHk, k_BTHk, v_BTHv, logit_BTHk, beta_BTH, a_log_H, bias_Hk, state_BHkv, segments_BT)
    axes = frozenset({axis}).union(*map(varying, args))
    *tokens, gate, bias, state, segments = (vary(x, axes) for x in args)
    q, k, v, logit, beta = tokens
    V, dtype = v.shape[-1], state.dtype
    no_value, nothing = jnp.zeros_like(q, v.dtype), jnp.zeros_like(state)
    one = jnp.broadcast_to(jnp.eye(q.shape[-1], dtype=dtype), (*state.shape[:3], q.shape[-1]))
    both, pair = gated_kda(
        q, k, jnp.concatenate([v, no_value], -1), logit, beta, gate, bias,
        jnp.concatenate([nothing, vary(one, axes)], -1), segments,
        lower_bound=lower_bound, impl=impl,
    )  # fmt: skip
    o, reach = both[..., :V], both[..., V:]
    keep = follows_B(segments, axis)[:, None, None, None]
    pair = jnp.concatenate([pair[..., :V], jnp.where(keep, pair[..., V:], 0)], -1)
    before, after = _states(axis, pair, state)
    seen = product("BTHk,BHkv->BTHv", reach, jnp.where(keep, before, 0), reach)
    # At pads both are zeros; so are then the gradients, whatever comes back for pads.
    seen = jnp.where((segments != 0)[..., None, None], seen, 0)
    o = (o.astype(seen.dtype) + seen).astype(v.dtype)
    return o, halo.of_shard(after, jax.lax.axis_size(axis) - 1, axis)


def follows_B(segments_BT, axis):
    """Whether what the state before this shard holds reaches its first real token: nothing real
    stands before, or the last that does is of the same document. True if the shard has none."""
    real_BT, last = segments_BT != 0, segments_BT.shape[1] - 1
    ends = (jnp.argmax(real_BT, 1), last - jnp.argmax(real_BT[:, ::-1], 1))
    first_B, last_B = (jnp.take_along_axis(segments_BT, at[:, None], 1)[:, 0] for at in ends)
    last_nB = jax.lax.all_gather(last_B, axis)
    seen_nB = jax.lax.associative_scan(lambda a, b: jnp.where(b == 0, a, b), last_nB)
    index = jax.lax.axis_index(axis)
    before_B = jnp.where(index == 0, 0, seen_nB[index - 1])
    return (before_B == 0) | (first_B == 0) | (before_B == first_B)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states(axis, pair_BHkw, state_BHkv):
    """The states before and after this shard, from its pair and the state before the row.

    The gradient goes back in the same way, by pairs [gradient | M^T], instead of through every
    composition that a shard has made.
    """
    return _states_fwd(axis, pair_BHkw, state_BHkv)[0]


def _states_fwd(axis, pair_BHkw, state_BHkv):
    V, index = state_BHkv.shape[-1], jax.lax.axis_index(axis)
    # The first shard's pair becomes that of a row which starts from the given state.
    start_BHkv = jnp.where(index == 0, state_BHkv, 0)
    own_BHkw = pair_BHkw.at[..., :V].add(_times(pair_BHkw[..., V:], start_BHkv))
    states_nBHkv = running_pairs(jax.lax.all_gather(own_BHkw, axis), V)[..., :V]
    before_BHkv = jnp.where(index == 0, state_BHkv, states_nBHkv[index - 1])
    return (before_BHkv, states_nBHkv[index]), (pair_BHkw[..., V:], before_BHkv)


def _states_bwd(axis, kept, grads):
    (move_BHkk, before_BHkv), (dbefore_BHkv, dafter_BHkv) = kept, grads
    V, index, n = before_BHkv.shape[-1], jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    back_BHkk = jnp.swapaxes(move_BHkk, -1, -2)
    own_BHkv = dbefore_BHkv + _times(back_BHkk, dafter_BHkv)
    pairs_nBHkw = jax.lax.all_gather(jnp.concatenate([own_BHkv, back_BHkk], -1), axis)
    dstates_nBHkv = running_pairs(pairs_nBHkw, V, reverse=True)[..., :V]
    behind_BHkv = dstates_nBHkv[jnp.minimum(index + 1, n - 1)]
    dafter_BHkv = dafter_BHkv + jnp.where(index == n - 1, 0, behind_BHkv)
    dmove_BHkk = _times(dafter_BHkv, jnp.swapaxes(before_BHkv, -1, -2))
    dpair_BHkw = jnp.concatenate([dafter_BHkv, dmove_BHkk], -1)
    return dpair_BHkw, jnp.where(index == 0, dstates_nBHkv[0], 0)


_states.defvjp(_states_fwd, _states_bwd)


def running_pairs(pairs_nBHkw, V, reverse=False):
    """Pairs [S | M], each S [k, V] and M [k, k], composed along the first axis.

    (S1, M1) and then (S2, M2) are (M2 S1 + S2, M2 M1); `reverse` runs from the last to the first.
    M enlarges no state: errors of float32 fade with the state that they are made in.
    """

    def compose(first, then):
        return _times(then[..., V:], first).at[..., :V].add(then[..., :V])

    return jax.lax.associative_scan(compose, pairs_nBHkw, reverse=reverse)


def _times(m, s):
    return jnp.einsum("...ij,...jv->...iv", m, s, precision=EXACT)
