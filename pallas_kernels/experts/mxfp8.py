"""MXFP8 activations: groups of 32 E4M3 values along a row with one power-of-two scale (E8M0).

A scale byte e means 2^(e - 127). Widening is exact in bfloat16: E4M3 has 4 significant bits, and
the scales written here keep every product within bfloat16's normal range.

The kernel widens rows to bfloat16 in VMEM rather than give E4M3 to the matrix unit. Both formats'
scales change every 32 inputs, along the sum, so that a product over more inputs cannot be scaled
afterwards. Modelled on a tpu7x, cycles for 128 rows x 512 outputs x 3584 inputs: 1204 in bfloat16,
721 in E4M3 without scales, and 8572 in E4M3 as 112 products of 32 inputs that are scaled and added.

Widening halves the bytes of rows and costs arithmetic: a v6e has no instruction for E4M3. Where
products bound (512 rows an expert, gate and up in one call) it adds 17 % on a v6e, 8 % on a v5p and
some 11 % on a tpu7x. What it buys is the rounding that K3 was trained with, and rows of half the
size to send between devices.
"""

import jax
import jax.numpy as jnp

BLOCK = 32  # inputs that share a scale
E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of E4M3
LARGEST_EXPONENT = 8  # of E4M3: 448 = 1.75 2^8
SMALLEST_SCALE = 10  # E4M3's smallest value, 2^-9, times 2^(10 - 127) is bfloat16's normal 2^-126


def to_mxfp8(x_NL):
    """bfloat16 or float32 [N,L] -> values E4M3 [N,L] and scales uint8 [N,L/32].

    A scale's exponent is floor(log2 of the largest magnitude of its group) - 8 (the OCP rule), and
    at least -117, also for a group of zeros. Values are rounded to the nearest, ties to even; those
    above 448 units (a largest of 1.75 2^n to 2^(n + 1) has some) saturate. Infinities and NaN
    become NaN and leave their neighbours alone. Raises ValueError for other dtypes and shapes.
    """
    if x_NL.ndim != 2 or x_NL.shape[1] % BLOCK or x_NL.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"to_mxfp8: x must be bfloat16 or float32 [N,L] with L a multiple of {BLOCK}; "
            f"got {x_NL.dtype} {x_NL.shape}"
        )
    N, L = x_NL.shape
    x = x_NL.astype(jnp.float32).reshape(N, L // BLOCK, BLOCK)
    is_finite = jnp.isfinite(x)
    largest_NJ = jnp.max(jnp.where(is_finite, jnp.abs(x), 0.0), axis=-1)
    # A float32's exponent field is the floor of its logarithm, plus 127.
    exponents_NJ = jax.lax.bitcast_convert_type(largest_NJ, jnp.int32) >> 23
    scales_NJ = jnp.maximum(exponents_NJ - LARGEST_EXPONENT, SMALLEST_SCALE)
    units = x * _power(254 - scales_NJ)[..., None]
    # E4M3 has no infinity: what is larger would become NaN.
    values = jnp.where(is_finite, jnp.clip(units, -LARGEST, LARGEST), jnp.nan).astype(E4M3)
    return values.reshape(N, L), scales_NJ.astype(jnp.uint8)


def from_mxfp8(values_NL, scales_NJ):
    """The bfloat16 values [N,L] that `to_mxfp8`'s arrays stand for."""
    powers_NL = jnp.repeat(_power(scales_NJ.astype(jnp.int32)), BLOCK, axis=1)
    return (values_NL.astype(jnp.float32) * powers_NL).astype(jnp.bfloat16)


def _power(bytes):
    """2^(e - 127) in float32, for e of 1..254."""
    return jax.lax.bitcast_convert_type(bytes << 23, jnp.float32)
