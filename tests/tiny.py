"""The smallest model that has every path: opening group, scanned groups, tail, two blocks."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3_jax.model import K3, abstract
from k3_jax.tree import named_leaves

CONFIG = ModelConfig(
    vocab_size=64,
    width=32,
    n_layers=6,
    mla_layers=(1, 3, 4, 5),
    n_dense=1,
    dense_width=48,
    block_layers=5,
    kda=KdaConfig(n_heads=2, head_dim=16),
    mla=MlaConfig(
        n_heads=2, query_latent=24, kv_latent=16, key_dim=16, shared_key_dim=8, value_dim=16
    ),
    moe=MoeConfig(n_experts=8, n_active=2, latent_width=16, expert_width=24),
    init_std=0.2,
    dtype="float32",
    remat="none",
)


def config(**changes) -> ModelConfig:
    return dataclasses.replace(CONFIG, **changes)


def model(seed: int = 0, **changes) -> K3:
    """Random weights; AttnRes queries and router biases too, which start at zero."""
    made = K3(config(**changes), rngs=nnx.Rngs(params=jax.random.key(seed)))

    def stir(path, leaf):
        name = jax.tree_util.keystr(path)
        if "query_D" not in name and "router_bias" not in name:
            return leaf
        noise = jax.random.normal(jax.random.key(len(name)), leaf.shape, jnp.float32)
        return leaf + jax.reshard(0.1 * noise, jax.typeof(leaf).sharding).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(stir, made)


def tokens(shape, seed: int = 1):
    return jax.random.randint(jax.random.key(seed), shape, 0, CONFIG.vocab_size)


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(params=jax.random.key(seed))


def leaf_names() -> list[str]:
    return list(named_leaves(abstract(CONFIG)))
