"""Sizes, rows and the float64 product that the tests of packed experts share."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

E, L, F, N = 4, 512, 256, 50
# Rows of each of the E experts, out of N.
SIZES = {
    "unaligned, one empty, rows left over": [7, 0, 20, 3],
    "one expert has everything": [0, 0, 50, 0],
    "aligned, then a partial block": [16, 16, 16, 2],
    "first and last are empty": [0, 1, 32, 0],
    "no rows at all": [0, 0, 0, 0],
}
# What the choice of blocks asks a `TpuInfo` for.
CHIPS = {
    name: SimpleNamespace(
        generation=generation, vmem_capacity_bytes=mib << 20, mxu_column_size=mxu, num_cores=cores
    )
    for name, generation, mib, mxu, cores in (
        ("v5p", 5, 64, 128, 2),
        ("v6e", 6, 128, 256, 1),
        ("tpu7x", 7, 64, 256, 1),
    )
}
INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


def rows(n, seed=0, L=L):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, L)), jnp.bfloat16)


def product(x, w, sizes):
    """The product in float64."""
    y, start = np.zeros((x.shape[0], w.shape[2])), 0
    for e, size in enumerate(sizes):
        mine = slice(start, start + size)
        y[mine] = np.asarray(x, np.float64)[mine] @ w[e]
        start += size
    return y
