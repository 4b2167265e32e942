"""Products with packed experts that pass a gradient to their rows, and none to the weights.

The forward pass is the TPU kernel, the definition, or a form of the grouped matmul of bfloat16
weights, which widens, exactly, the expert of each block of rows where it is multiplied. Backward,
dx_n = dy_n w_e^T is such a form too; the TPU kernel for it wants its weights in memory: those of
the experts at hand, one layer's, are widened for it matrix by matrix, and are gone afterwards. A
kernel that multiplies by packed weights transposed would spare that write and read: of 14 experts
of the released size 308 MB each, 0.08 ms on a tpu7x by its public bandwidth, where the product with
131,072 rows takes 2.5 ms.

Measured on two busy CPU cores, forward, 32 experts of 256 x 512, ms: 2,048 rows, definition 91,
blocks 11, batched 32; 16 rows, 5.0, 4.1 and 5.5.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.common import automatic
from pallas_kernels.experts import batched, blocks, mosaic, mxfp4, mxfp4_reference
from pallas_kernels.experts.mxfp4 import BLOCK, E5M2_SHIFT, LARGEST_SCALE

FORMS = {"blocks": blocks, "batched": batched}


@dataclasses.dataclass
class Widened:
    """bfloat16 weights [E,L,F] of packed ones from expert `first` on; what is indexed is made."""

    packed: jax.Array
    scales: jax.Array
    first: jax.Array | int
    n_experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, L, F)."""
        _, half, F = self.packed.shape
        return self.n_experts, 2 * half, F

    def __getitem__(self, expert) -> jax.Array:
        """[L,F], or [n,L,F] for n experts."""
        pair = (x[self.first + jnp.atleast_1d(expert)] for x in (self.packed, self.scales))
        return widen(*pair).reshape(*jnp.shape(expert), *self.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(options, x_NL, packed_ELF, scales_ELF, sizes_E, first):
    """`grouped_matmul_mxfp4` of bfloat16 rows; options: the impl and the dtype."""
    impl, out_dtype = options
    if impl in FORMS:
        w_ELF = Widened(packed_ELF, scales_ELF, first, len(sizes_E))
        return FORMS[impl].times(x_NL, w_ELF, sizes_E, "NL,LF->NF").astype(out_dtype)
    args = x_NL, packed_ELF, scales_ELF, sizes_E
    if impl == "pallas":
        return mxfp4.grouped_matmul_mxfp4(*args, first=first, out_dtype=out_dtype)
    return mxfp4_reference.grouped_matmul_mxfp4(*args, out_dtype, first)


def _matmul_fwd(options, x_NL, *weights):
    return matmul(options, x_NL, *weights), weights


def _matmul_bwd(options, weights, dy_NF):
    return times_transposed(dy_NF.astype(jnp.bfloat16), *weights), None, None, None, None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def glu(options, x_NL, gate, up, sizes_E, first):
    """`grouped_glu_mxfp4` of bfloat16 rows; options: the impl and both betas."""
    impl, beta, linear_beta = options
    if impl in FORMS:
        f32 = impl, jnp.dtype(jnp.float32)
        sums = (matmul(f32, x_NL, *matrix, sizes_E, first) for matrix in (gate, up))
        return mxfp4.activation(*sums, beta=beta, linear_beta=linear_beta).astype(x_NL.dtype)
    if impl == "pallas":
        betas = dict(beta=beta, linear_beta=linear_beta)
        return mxfp4.grouped_glu_mxfp4(x_NL, gate, up, sizes_E, first=first, **betas)
    return mxfp4_reference.grouped_glu_mxfp4(x_NL, gate, up, sizes_E, beta, linear_beta, first)


def _glu_fwd(options, x_NL, *weights):
    return glu(options, x_NL, *weights), (x_NL, weights)


def _glu_bwd(options, saved, dy_NF):
    """Gate and up are made again, rounded to bfloat16 as the products of plain weights are."""
    (impl, beta, linear_beta), (x_NL, (gate, up, sizes_E, first)) = options, saved
    sums = (matmul((impl, jnp.dtype(x_NL.dtype)), x_NL, *w, sizes_E, first) for w in (gate, up))
    activation = partial(mxfp4.activation, beta=beta, linear_beta=linear_beta)
    _, back = jax.vjp(activation, *(s.astype(jnp.float32) for s in sums))
    parts = (
        times_transposed(d_NF.astype(x_NL.dtype), *w, sizes_E, first)
        for d_NF, w in zip(back(dy_NF.astype(jnp.float32)), (gate, up), strict=True)
    )
    return sum(parts), None, None, None, None


matmul.defvjp(_matmul_fwd, _matmul_bwd)
glu.defvjp(_glu_fwd, _glu_bwd)


def times_transposed(dy_NF, packed_ELF, scales_ELF, sizes_E, first):
    """dx_n = dy_n w_e^T in dy's dtype for the rows n of group e, which is expert first + e."""
    w_ELF = Widened(packed_ELF, scales_ELF, first, len(sizes_E))
    impl = automatic("grouped matmul", "blocks", gpu="batched")
    if impl == "pallas":
        return mosaic.times_transposed(dy_NF, w_ELF[jnp.arange(len(sizes_E))], sizes_E)
    return FORMS[impl].times(dy_NF, w_ELF, sizes_E, "NF,LF->NL").astype(dy_NF.dtype)


def widen(packed_ELF, scales_ELF):
    """bfloat16 [E,L,F] of what `from_released` returns, by the kernel's arithmetic and its limits:
    exact for scale bytes 2..240, larger ones act as 240."""
    E, half, F = packed_ELF.shape
    first = packed_ELF & 0x8E
    second = packed_ELF >> 3 & 0x0E | packed_ELF << 7 & 0x80
    codes_EjbF = jnp.stack([first, second], axis=1).reshape(E, 2 * half // BLOCK, BLOCK, F)
    e5m2 = jax.lax.bitcast_convert_type(codes_EjbF, jnp.float8_e5m2)
    exponents = jnp.minimum(scales_ELF, LARGEST_SCALE).astype(jnp.uint16) + E5M2_SHIFT
    powers = jax.lax.bitcast_convert_type(exponents << 7, jnp.bfloat16)
    return (e5m2.astype(jnp.bfloat16) * powers[:, :, None]).reshape(E, 2 * half, F)
