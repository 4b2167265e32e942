"""The definition of the grouped matmul with packed weights, in plain jnp.

One expert is widened at a time, and multiplied with every row.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.experts.mxfp4 import BLOCK, activation
from pallas_kernels.experts.mxfp8 import from_mxfp8

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def widen(packed_LF, scales_LF):
    """One expert's weights [L,F], float32, from uint8 [L/2,F] and [L/32,F] of `from_released`."""
    first = packed_LF >> 4 & 8 | packed_LF >> 1 & 7
    second = packed_LF << 3 & 8 | packed_LF >> 4 & 7
    codes_LF = jnp.concatenate([first, second])
    table = jnp.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], jnp.float32)
    # ldexp keeps what a product with 2^(e - 127) would flush.
    exponents_LF = jnp.repeat(scales_LF.astype(jnp.int32) - 127, BLOCK, axis=0)
    return jnp.ldexp(table[codes_LF], exponents_LF)


def grouped_matmul_mxfp4(x, packed_ELF, scales_ELF, sizes_E, out_dtype, first=0):
    """y_n = x_n w_e for the rows n of group e, float32 sums; rows after the last group give 0."""
    x_NL = from_mxfp8(*x) if isinstance(x, tuple) else x
    ends_E = jnp.cumsum(sizes_E)
    rows_N1 = jnp.arange(x_NL.shape[0])[:, None]

    def times(e):
        mine_N1 = (rows_N1 >= ends_E[e] - sizes_E[e]) & (rows_N1 < ends_E[e])
        w_LF = widen(packed_ELF[first + e], scales_ELF[first + e])
        y = jnp.matmul(x_NL.astype(jnp.float32), w_LF, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(mine_N1, y, 0.0)

    y_NF = jax.lax.fori_loop(1, sizes_E.shape[0], lambda e, y_NF: y_NF + times(e), times(0))
    return y_NF.astype(out_dtype)


def grouped_glu_mxfp4(x, gate, up, sizes_E, beta, linear_beta, first=0):
    """y_n = situ_glu(x_n gate_e, x_n up_e) of float32 products."""
    products = (
        grouped_matmul_mxfp4(x, *matrix, sizes_E, jnp.float32, first) for matrix in (gate, up)
    )
    return activation(*products, beta=beta, linear_beta=linear_beta).astype(jnp.bfloat16)
