"""Sizes, arrays and documents that the tests of MLA's attention share."""

import jax.numpy as jnp
import numpy as np

Q, VALUE, SCALE = 24, 16, 24**-0.5
# float32 sums of some hundred terms of size one, added in another order.
TIGHT = dict(rtol=1e-5, atol=1e-5)


def heads(seed, B, T, H=2, S=None, dtype=jnp.float32):
    """q [B,T,H,Q], k and v of S positions (T if None)."""
    draw = np.random.default_rng(seed).normal
    sizes = (T, Q), (S or T, Q), (S or T, VALUE)
    return [jnp.asarray(draw(size=(B, n, H, width)), dtype) for n, width in sizes]


def packed(T, *rows):
    """Segment ids [B,T] of documents laid end to end, given as lengths by row, pads after them."""
    ids = [np.repeat(np.arange(1, len(lengths) + 1), lengths) for lengths in rows]
    return jnp.asarray([np.pad(x, (0, T - len(x))) for x in ids], jnp.int32)
