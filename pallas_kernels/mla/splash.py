"""Causal attention with segments on TPU, through the splash attention kernels that JAX ships.

They take 192-wide keys with 128-wide values as they are. Their weak points are mended here: they
know no scale, want whole tiles of queries, and do not declare how their outputs vary over a mesh.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import PartitionSpec as P

from pallas_kernels.common import vary, varying

LANES = 128
TILE = 512  # queries and keys per tile; a 512 x 512 float32 score tile is 1 MiB of VMEM


def attend_causal(q_BTHq, k_BTHq, v_BTHv, segments_BT, *, scale, interpret=False):
    """o_t = sum over s <= t of the same segment of softmax(scale q_t.k_s) v_s, in q's type.

    Pads (segment 0) must hold finite values; their rows come back finite and meaningless.
    The scaled query is rounded to q's type, one rounding more than the other paths have.
    """
    T = q_BTHq.shape[1]
    tile = min(TILE, -(-T // LANES) * LANES)
    q_BTHq = (q_BTHq.astype(jnp.float32) * scale).astype(q_BTHq.dtype)
    args = [lengthen(x, -T % tile) for x in (q_BTHq, k_BTHq, v_BTHv, segments_BT)]
    axes = frozenset().union(*map(varying, args))
    return _attend(*(vary(x, axes) for x in args), tile, interpret)[:, :T]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q_BTHq, k_BTHq, v_BTHv, segments_BT, tile, interpret):
    # Not the forward half of the rule below: that one also writes the softmax's log-sums.
    def run(q, k, v, segments):
        heads = map(swap_head_and_time, (q, k, v))
        return swap_head_and_time(_splash(*heads, segments, tile, interpret))

    return unchecked(run, q_BTHq, k_BTHq, v_BTHv, segments_BT)


def _attend_fwd(q_BTHq, k_BTHq, v_BTHv, segments_BT, tile, interpret):
    def run(q, k, v, segments):
        heads = map(swap_head_and_time, (q, k, v))
        o_BHTv, pullback = jax.vjp(lambda *qkv: _splash(*qkv, segments, tile, interpret), *heads)
        return swap_head_and_time(o_BHTv), pullback

    return unchecked(run, q_BTHq, k_BTHq, v_BTHv, segments_BT)


def _attend_bwd(tile, interpret, pullback, do_BTHv):
    def run(do, pullback):
        return tuple(map(swap_head_and_time, pullback(swap_head_and_time(do))))

    return *unchecked(run, do_BTHv, pullback), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _splash(q_BHTq, k_BHTq, v_BHTv, segments_BT, tile, interpret):
    H, T = q_BHTq.shape[1:3]
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * H),
        block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": tile for name in names}),
        interpret=interpret,
    )

    def row(q, k, v, segments):
        return kernel(q, k, v, segment_ids=splash_attention_kernel.SegmentIds(segments, segments))

    return jax.vmap(row)(q_BHTq, k_BHTq, v_BHTv, segments_BT)


def unchecked(fn, x, *rest):
    """fn(x, *rest) with the check of varying axes off; all results vary as x does.

    The shipped kernels leave `manual_axis_type` of their outputs empty, which `check_vma=True`
    refuses. They use no collective, so every output varies exactly as the inputs. Inside, results
    of operations carry no such type, while untouched arguments still carry theirs: `fn` must
    compute with an argument before it compares types (a pullback does).
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return fn(x, *rest)
    outs = jax.shard_map(fn, in_specs=P(), out_specs=P(), check_vma=False)(x, *rest)
    return jax.tree.map(partial(vary, axes=varying(x)), outs)


def lengthen(x_BT, pad):
    return jnp.pad(x_BT, ((0, 0), (0, pad)) + ((0, 0),) * (x_BT.ndim - 2))


def swap_head_and_time(x):
    return jnp.swapaxes(x, 1, 2)
