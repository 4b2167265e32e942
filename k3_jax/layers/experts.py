"""The matrices of routed experts: at rest, on their way to the devices of rows, and multiplied."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import Adapted, is_held, weight, zeros
from k3_jax.quant.training import as_mxfp4, with_whole_groups
from pallas_kernels.experts import (
    activation,
    grouped_glu,
    grouped_glu_mxfp4,
    grouped_matmul,
    grouped_matmul_mxfp4,
)
from pallas_kernels.situ import situ_glu
from sharding.balance import prefetch

F32 = jnp.float32
# Of a Matrix's arrays in a signature for `on_shards`, by how many axes they have. A and B stand for
# the last two letters as W does: only E says where they are.
LETTERS = {0: "", 3: "*ELF", 4: "*ZELF"}


class Packed(nnx.Module):
    """MXFP4 weights of experts in the order of their kernel (`pallas_kernels.experts`).

    Zeros: they are loaded, not trained from a start.
    """

    def __init__(self, rngs: nnx.Rngs, letters: str, dims: dict):
        _, inputs, _ = letters
        for name, per in (("packed", 2), ("scales", 32)):
            sizes = dims | {inputs: dims[inputs] // per}
            setattr(self, name, weight(rngs, letters, sizes, jnp.uint8, zeros))

    def stacks(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[Z, E, L, F] of codes and scales, and which of the Z layers these experts are of.

        One layer, where they have to be gathered first.
        """
        codes, scales = jax.tree.leaves(self, is_leaf=is_held)
        if is_held(codes) and not any(jax.typeof(codes.stack).sharding.spec[2:]):
            return codes.stack, scales.stack, codes.index
        return *((x.taken() if is_held(x) else x)[None] for x in (codes, scales)), jnp.int32(0)


class Matrix(NamedTuple):
    """One matrix of each expert, for products: x_n W_e + (x_n A_e) B_e.

    `weight`: [W_ELF], or of packed ones [codes_ZELF, scales_ZELF, layer]. `pair`: [A_ELK, B_EKF], B
    with the adapter's scale in it; empty where there is no adapter.
    """

    weight: list[jax.Array]
    pair: list[jax.Array]

    @classmethod
    def of(cls, w: nnx.Param | Packed | Adapted, dtype, is_rounded: bool) -> "Matrix":
        """As products in `dtype` take it; is_rounded: `MoeConfig.rounded`."""
        w, pair = w.get_value() if isinstance(w, nnx.Param) else w, []
        if isinstance(w, Adapted):
            w, pair = w.weight, [w.a.astype(dtype), (w.scale * w.b).astype(dtype)]
        if isinstance(w, Packed):
            return cls([*w.stacks()], pair)
        # From float32, and before parts are gathered: the cast after it is exact.
        w = as_mxfp4(with_whole_groups(w)) if is_rounded else w
        return cls([w.astype(dtype)], pair)

    @property
    def is_packed(self) -> bool:
        return len(self.weight) > 1

    def with_lent(self, copies, axes) -> "Matrix":
        """The home experts' and, behind them, those of the lent ones."""
        weight = self.weight
        if self.is_packed:
            *stacks, layer = weight
            weight = [x_ZELF[layer] for x_ZELF in stacks]
        weight, pair = (
            [jnp.concatenate([x, prefetch(x, copies, axes)]) for x in arrays]
            for arrays in (weight, self.pair)
        )
        if self.is_packed:
            weight = [*(x_ELF[None] for x_ELF in weight), jnp.int32(0)]
        return Matrix(weight, pair)

    def times(self, x_nL, sizes_E, dtype=None):
        """Rows sorted by expert, each through its own; in their dtype, or another that is asked."""
        dtype = dtype or x_nL.dtype
        if self.is_packed:
            packed, where = self.flat(len(sizes_E))
            y_nF = grouped_matmul_mxfp4(x_nL, *packed, sizes_E, **where, out_dtype=dtype)
        else:
            y_nF = grouped_matmul(x_nL, *self.weight, sizes_E, preferred_element_type=dtype)
        if not self.pair:
            return y_nF
        a_ELK, b_EKF = self.pair
        narrow_nK = grouped_matmul(x_nL, a_ELK, sizes_E)
        return y_nF + grouped_matmul(narrow_nK, b_EKF, sizes_E, preferred_element_type=dtype)

    def flat(self, n: int) -> tuple[list[jax.Array], dict]:
        """Codes and scales of all layers' experts, and where the n at hand are among them."""
        *stacks, layer = self.weight
        return [x_ZELF.reshape(-1, *x_ZELF.shape[2:]) for x_ZELF in stacks], {"first": layer * n}


def glu(x_nL, gate: Matrix, up: Matrix, sizes_E, **betas):
    """SiTU-GLU of both products.

    Packed ones are not rounded before it, with adapters or without: new adapters, which give 0,
    change no bit. On a TPU one kernel makes all of it where no adapter adds to its sums.
    """
    if not gate.is_packed:
        if gate.pair or up.pair:
            return situ_glu(*(m.times(x_nL, sizes_E) for m in (gate, up)), **betas)
        return grouped_glu(x_nL, *gate.weight, *up.weight, sizes_E, **betas)
    if gate.pair or up.pair:
        sums = (m.times(x_nL, sizes_E, F32) for m in (gate, up))
        return activation(*sums, **betas).astype(x_nL.dtype)
    (gate, where), (up, _) = (m.flat(len(sizes_E)) for m in (gate, up))
    return grouped_glu_mxfp4(x_nL, gate, up, sizes_E, **betas, **where)
