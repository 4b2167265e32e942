"""A piece of a prompt against the cache, whose latents are expanded to keys and values."""

import jax
import jax.numpy as jnp

from pallas_kernels.mla import blocks, mosaic, sequence


def attend_blocks(q_BTHq, latent_BSM, k_CHk, v_CHv, q_index_BT, *, scale):
    """`pallas_kernels.mla.cached_attention` in jnp; pads and dead slots hold zeros."""
    k_BSHq, v_BSHv = sequence.expand(latent_BSM, k_CHk, v_CHv)
    one_segment = jnp.zeros_like(q_index_BT), jnp.zeros(k_BSHq.shape[:2], q_index_BT.dtype)
    return blocks.attend(
        q_BTHq, k_BSHq, v_BSHv, q_index_BT, *one_segment, scale=scale, out_dtype=q_BTHq.dtype
    )[0]


def attend_rows(q_BTHq, latent_BSM, k_CHk, v_CHv, q_index_BT, *, scale, **options):
    """The same through the TPU kernel, a row at a time: of 32 rows of 128K tokens the keys and
    values of three heads are 8 GB. A long cache costs a short row nothing but the expansion."""

    def row(args):
        q, latent, index = (x[None] for x in args)
        ids = (index >= 0).astype(jnp.int32), jnp.ones(latent.shape[:2], jnp.int32)
        first = jnp.maximum(index[:, 0], 0)
        keys = sequence.expand(latent, k_CHk, v_CHv)
        return mosaic.attend(q, *keys, *ids, first, scale=scale, **options)[0][0]

    return jax.lax.map(row, (q_BTHq, latent_BSM, q_index_BT))
