"""Caches: what a row of tokens leaves behind for the tokens that follow it."""

import dataclasses

import jax
import jax.numpy as jnp

from k3_jax.config import ModelConfig
from sharding import act_spec

SLOTS = 256  # the engine's caches have a multiple of it


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KdaCache:
    """The delta-rule state (float32) and the last W-1 projected inputs of each convolution."""

    state_BHkv: jax.Array
    q_BWHk: jax.Array
    k_BWHk: jax.Array
    v_BWHv: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MlaCache:
    """[normed latent C | shared key r] of each of S token slots.

    Slots come last: a TPU pads the last axis to 128s, which 576 channels are not, and its kernel
    reads them so.
    """

    latent_BMS: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """What the layers need to know of the rows they are given.

    `segments_BT`: 0 for pads, else the token's document. `slots_BT`: where in the cache the token
    goes, -1 for pads; None without a cache. `counted_BT`: whether the token counts for balancing
    the experts; None where nothing is. `keep_largest`: MLA layers tell their largest logits.
    """

    segments_BT: jax.Array
    slots_BT: jax.Array | None = None
    counted_BT: jax.Array | None = None
    keep_largest: bool = dataclasses.field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class K3Cache:
    """Every layer's cache, in the model's own structure, and how many tokens each row holds.

    blocks[block][part][run] is the cache of stacked layers: every array has two leading axes, over
    the part's groups and over the run's layers, before the rows.
    """

    blocks: tuple
    length_B: jax.Array


def zeros(shape: tuple[int, ...], dtype, letters: str) -> jax.Array:
    """Zeros placed as an activation with these letters."""
    return jax.reshard(jnp.zeros(shape, dtype), act_spec(letters))


def fresh_kda(c: ModelConfig, n_rows: int, lead: tuple[int, ...] = ()) -> KdaCache:
    """The cache of `n_rows` rows before their first token, under the leading axes `lead`."""
    H, k, W = c.kda.n_heads, c.kda.head_dim, c.kda.conv_width - 1
    g = "G" * len(lead)
    taps = [zeros((*lead, n_rows, W, H, k), c.dtype, g + "BWHk") for _ in range(3)]
    return KdaCache(zeros((*lead, n_rows, H, k, k), jnp.float32, g + "BHkv"), *taps)


def fresh_mla(c: ModelConfig, n_rows: int, n_slots: int, lead: tuple[int, ...] = ()) -> MlaCache:
    """The empty cache of `n_rows` rows with `n_slots` tokens each, under leading axes `lead`."""
    width = c.mla.kv_latent + c.mla.shared_key_dim
    return MlaCache(zeros((*lead, n_rows, width, n_slots), c.dtype, "G" * len(lead) + "BMS"))
