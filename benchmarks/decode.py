"""Next tokens of full batches on the device at hand: python -m benchmarks.decode [flags].

Random weights, every row's cache filled up to half: what is timed is `k3_jax.serving.engine.step`,
the program that serve.py runs, a hundred times over one cache; the best of three.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from k3_jax.config import ModelConfig, as_served, from_dict
from k3_jax.model import abstract
from k3_jax.serving import engine
from k3_jax.tree import named_leaves, with_leaves
from sharding import make_mesh

CONFIG = config_flags.DEFINE_config_file("config", "configs/k3_mini.py", "of the model")
ROWS = flags.DEFINE_list("rows", ["1", "16", "64", "256"], "rows at a time")
SLOTS = flags.DEFINE_integer("slots", 4096, "tokens that a row has room for")
STEPS = flags.DEFINE_integer("steps", 100, "tokens a measurement")


def main(_):
    model = as_served(from_dict(ModelConfig, CONFIG.value.model, "config.model"), "bfloat16")
    jax.set_mesh(make_mesh(devices=jax.devices()[:1]))
    k3 = random_weights(model)
    print(
        f"{sum(x.size for x in jax.tree.leaves(k3)):,} parameters on {jax.devices()[0].device_kind}"
    )
    print(f"{'rows':>5} {'ms a token':>11} {'tokens/s':>10}")
    for n_rows in map(int, ROWS.value):
        seconds = measure(k3, n_rows)
        print(f"{n_rows:5} {1e3 * seconds:11.3f} {n_rows / seconds:10.0f}", flush=True)


def random_weights(config: ModelConfig):
    """Normal numbers of std `init_std`, and ones for norms."""
    target, rng = abstract(config), np.random.default_rng(0)
    pool = rng.standard_normal(1 << 20, np.float32) * config.init_std
    leaves = {}
    for name, x in named_leaves(target).items():
        value = np.ones(x.shape) if "norm" in name else np.resize(pool, x.shape)
        leaves[name] = jnp.asarray(value, x.dtype)
    return with_leaves(target, leaves)


def measure(k3, n_rows: int) -> float:
    """Seconds a token of all rows."""
    draw = engine.fresh_draw(n_rows)
    tokens_B1, n_B = np.ones((n_rows, 1), np.int32), np.ones(n_rows, np.int32)
    best = float("inf")
    for _ in range(3):
        cache = engine.empty_cache(k3.config, n_rows, SLOTS.value)
        cache.length_B = cache.length_B + SLOTS.value // 2
        cache, drawn = engine.step(k3, cache, tokens_B1, n_B, draw)
        jax.block_until_ready(drawn)
        start = time.perf_counter()
        for _ in range(STEPS.value):
            cache, drawn = engine.step(k3, cache, tokens_B1, n_B, draw)
        jax.block_until_ready((cache, drawn))
        best = min(best, (time.perf_counter() - start) / STEPS.value)
    return best


if __name__ == "__main__":
    app.run(main)
