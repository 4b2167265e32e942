"""Tiny models that the serving tests share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from k3_jax.checkpoint.store import Store
from k3_jax.checkpoint.tree import placed
from k3_jax.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig, to_dict
from k3_jax.model import abstract
from k3_jax.serving.engine import Request
from k3_jax.serving.sampling import Settings
from k3_jax.tree import named_leaves, nest, with_leaves

# One opening group and two that are stacked: caches of one group and of two.
CONFIG = ModelConfig(
    vocab_size=300,
    width=64,
    n_layers=6,
    mla_layers=(1, 3, 5),
    n_dense=2,
    dense_width=96,
    block_layers=6,
    kda=KdaConfig(n_heads=2, head_dim=32),
    mla=MlaConfig(
        n_heads=2, query_latent=32, kv_latent=32, key_dim=32, shared_key_dim=16, value_dim=32
    ),
    moe=MoeConfig(n_experts=8, n_active=2, latent_width=32, expert_width=32),
    init_std=0.15,
    dtype="float32",
    remat="none",
)
# For what is not about the layers: compiling takes most of this file's time.
SMALL = dataclasses.replace(CONFIG, n_dense=1, n_layers=2, mla_layers=(1,), block_layers=2)
GREEDY = Settings(max_tokens=32, temperature=0.0)


def build(config):
    """A model of random weights, made by numpy: compiling the initializers takes longer."""
    model = abstract(config)
    rng, leaves = np.random.default_rng(0), {}
    for name, leaf in named_leaves(model).items():
        value = 0.15 * rng.normal(size=leaf.shape) + ("norm" in name)
        leaves[name] = jax.device_put(value.astype(leaf.dtype), placed(leaf).sharding)
    return with_leaves(model, leaves)


def prompt(n, seed=0):
    return tuple(map(int, np.random.default_rng([n, seed]).integers(0, 256, n)))


def requests(lengths, settings=GREEDY):
    return [Request(i, prompt(n), settings) for i, n in enumerate(lengths)]


def save_run(folder, model):
    meta = {"config": {"model": to_dict(model.config), "data": {"tokenizer": "bytes"}}}
    state = {"model": nest(named_leaves(model)), "opt": {"x": jnp.ones(3)}}
    with Store(folder / "checkpoints") as store:
        store.save(5, state, {}, meta)
