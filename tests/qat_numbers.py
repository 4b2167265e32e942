"""Experts' weights as numpy packs them, for the tests of quantisation-aware training."""

import numpy as np

from k3_jax.quant.mxfp4 import TRAINED_RULE, pack, unpack


def as_packed(w):
    """What `pack` keeps of [..., n, F], groups along n, by numpy."""
    turned = np.ascontiguousarray(np.swapaxes(np.asarray(w, np.float32), -1, -2))
    return np.swapaxes(unpack(*pack(turned, TRAINED_RULE)), -1, -2)


def same_bits(a, b):
    a, b = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (a, b))
    np.testing.assert_array_equal(a, b)
