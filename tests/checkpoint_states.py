"""States with awkward bits, saved and compared bit by bit: what the checkpoint tests share."""

import jax
import jax.numpy as jnp
import numpy as np

from k3_jax.checkpoint.store import Store

META = {"model": {"width": 64, "heads": [4, 4]}, "jax": jax.__version__}
ROWS = {"row 0": {"next": 17}, "row 1": {"next": 18, "shuffle": [3, 1, 2]}}


def bits(shape, dtype, seed=0):
    """Every bit pattern may occur: NaNs with payloads, infinities, denormals, minus zero."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = bytearray(np.random.default_rng(seed).bytes(n_bytes))
    if dtype == jnp.float32 and n_bytes >= 12:
        raw[:12] = np.array([0x7FC12345, 0x80000000, 0xFF800001], "<u4").tobytes()
    if dtype == jnp.bfloat16 and n_bytes >= 6:
        raw[:6] = np.array([0x7FA1, 0x8000, 0xFFC3], "<u2").tobytes()
    return jnp.asarray(np.frombuffer(bytes(raw), dtype).reshape(shape))


def make_state(seed=0):
    return {
        "model": {
            "embed_VD": bits((64, 16), jnp.bfloat16, seed),
            "kda": {"0": {"q_DHk": bits((16, 4, 8), jnp.float32, seed + 1)}, "empty": {}},
            "experts_EFL": bits((8, 8, 16), jnp.uint8, seed + 2),
            "ids_V": bits((64,), jnp.int32, seed + 3),
        },
        "opt": {
            "count": jnp.int32(seed),
            "scale": jnp.float32(-0.0),
            "key": jax.random.key_data(jax.random.key(seed)),
        },
    }


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape, path
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes(), path


def save_steps(directory, *steps, keep=10):
    with Store(directory, keep=keep) as store:
        for step in steps:
            store.save(step, make_state(step), {"row 0": step}, META)
