"""Grouped matmul of routed experts: rows sorted by expert, one weight matrix per group."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.common import automatic
from pallas_kernels.experts import frozen, mosaic, mxfp4, mxfp4_reference, reference
from pallas_kernels.experts.frozen import FORMS
from pallas_kernels.experts.mxfp4 import activation, from_released
from pallas_kernels.experts.mxfp8 import from_mxfp8, to_mxfp8
from pallas_kernels.situ import situ_glu

IMPLS = ("auto", "pallas", *FORMS, "reference")
ACTIVATIONS = ("bfloat16", "mxfp8")

__all__ = [
    "activation",
    "from_mxfp8",
    "from_released",
    "grouped_glu",
    "grouped_glu_mxfp4",
    "grouped_matmul",
    "grouped_matmul_mxfp4",
    "to_mxfp8",
]


def grouped_matmul(x_NL, w_ELF, sizes_E, *, impl="auto", preferred_element_type=None):
    """y_n = x_n w_e for the rows n of group e; sums in float32, float32 inputs in full precision.

    Rows are sorted by expert: group e is the sizes_E[e] (int32) rows after group e - 1. Groups
    may be empty; rows after the last group give 0 and pass no gradient. sizes_E must sum to at
    most N, which is not checked. A NaN stays in its own row forward and in its own row and expert
    backward. Differentiable in x and w, whose gradients keep their dtypes.
    impl: "pallas" is the TPU kernels of `mosaic`, "blocks" a loop over blocks of rows, "batched"
    one product over all blocks, "reference" the definition. "auto" is "pallas" on TPU, "batched" on
    GPU and "blocks" on CPU: of `jax.lax.ragged_dot` XLA makes a product of every row with every
    expert on all three, but for some TPUs (figures in these modules).
    The output has x's dtype unless preferred_element_type says otherwise.
    Raises ValueError for shapes, dtypes or an impl that do not fit.
    """
    _check(x_NL, w_ELF, sizes_E)
    impl = _plain_impl(impl)
    dtype = x_NL.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    if impl == "reference":
        return reference.grouped_matmul(x_NL, w_ELF, sizes_E, dtype)
    if impl in FORMS:
        return _grouped(FORMS[impl], x_NL, w_ELF, sizes_E).astype(dtype)
    return mosaic.grouped_matmul(x_NL, w_ELF, sizes_E, dtype)


def grouped_glu(x_NL, gate_ELF, up_ELF, sizes_E, *, beta, linear_beta, impl="auto"):
    """`situ_glu` of x's `grouped_matmul` with gate and with up, products in x's dtype.

    impl as there; "pallas" makes all of it in one kernel forward (`mosaic.grouped_glu`).
    """
    for w_ELF in (gate_ELF, up_ELF):
        _check(x_NL, w_ELF, sizes_E)
    impl, betas = _plain_impl(impl), _betas("grouped_glu", beta, linear_beta)
    if impl == "pallas":
        return mosaic.grouped_glu(x_NL, gate_ELF, up_ELF, sizes_E, *betas)
    products = (grouped_matmul(x_NL, w_ELF, sizes_E, impl=impl) for w_ELF in (gate_ELF, up_ELF))
    return situ_glu(*products, *betas)


def _betas(door, beta, linear_beta):
    for name, value in (("beta", beta), ("linear_beta", linear_beta)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{door}: {name} must be positive and finite; got {value}")
    return float(beta), float(linear_beta)


def _plain_impl(impl):
    """One of IMPLS that is not "auto"."""
    if impl not in IMPLS:
        raise ValueError(f"grouped_matmul: impl={impl!r} is not one of {IMPLS}")
    return automatic("grouped matmul", "blocks", gpu="batched") if impl == "auto" else impl


def grouped_matmul_mxfp4(
    x_NL, packed_ELF, scales_ELF, sizes_E, *,
    first=0, activations="bfloat16", impl="auto", out_dtype=None,
):  # fmt: skip
    """y_n = x_n w_e with packed weights, as `from_released` lays them out; no widened copy is kept.

    first: group e is expert first + e (int32, traced) of weights that may hold those of all layers.
    activations: "bfloat16" or, with x the pair (values, scales) that `to_mxfp8` returns, "mxfp8".
    impl: "pallas" is the TPU kernel of `mxfp4` (there: shapes, exactness, VMEM), "blocks" and
    "batched" are those of `grouped_matmul` and widen the expert of each block of rows (`frozen`),
    "reference", the definition, multiplies every row with every expert. "auto" is the kernel on
    TPU, "batched" on GPU and "blocks" on CPU, which take bfloat16 rows; mxfp8 rows get the
    definition there.
    out_dtype: bfloat16 if None, or float32.
    Differentiable in bfloat16 x (`frozen`); the weights have no gradient, and mxfp8 has none.
    """
    impl = _packed_impl("grouped_matmul_mxfp4", x_NL, activations, impl)
    args = (x_NL, packed_ELF, scales_ELF, sizes_E)
    out_dtype = jnp.dtype(jnp.bfloat16 if out_dtype is None else out_dtype)
    mxfp4.check("grouped_matmul_mxfp4", *args, out_dtype)
    if activations == "bfloat16":
        return frozen.matmul((impl, out_dtype), *args, first)
    if impl == "pallas":
        return mxfp4.grouped_matmul_mxfp4(*args, first=first, out_dtype=out_dtype)
    return mxfp4_reference.grouped_matmul_mxfp4(*args, out_dtype, first)


def grouped_glu_mxfp4(
    x_NL, gate, up, sizes_E, *, beta, linear_beta, first=0, activations="bfloat16", impl="auto"
):
    """y_n = situ_glu(x_n gate_e, x_n up_e) in bfloat16: both products and the activation in one.

    gate and up are (packed, scales) of one shape. The activation is that of `situ_glu` on float32
    sums, which separate calls round in between: |y| < beta * linear_beta here too.
    All else is as in `grouped_matmul_mxfp4`.
    """
    impl = _packed_impl("grouped_glu_mxfp4", x_NL, activations, impl)
    beta, linear_beta = _betas("grouped_glu_mxfp4", beta, linear_beta)
    mxfp4.check_glu(x_NL, gate, up, sizes_E)
    if activations == "bfloat16":
        return frozen.glu((impl, beta, linear_beta), x_NL, gate, up, sizes_E, first)
    if impl == "pallas":
        betas = dict(beta=beta, linear_beta=linear_beta)
        return mxfp4.grouped_glu_mxfp4(x_NL, gate, up, sizes_E, first=first, **betas)
    return mxfp4_reference.grouped_glu_mxfp4(x_NL, gate, up, sizes_E, beta, linear_beta, first)


def _packed_impl(door, x, activations, impl):
    """One of IMPLS that is not "auto"."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"{door}: activations={activations!r} is not one of {ACTIVATIONS}")
    if isinstance(x, tuple) != (activations == "mxfp8"):
        given = "a pair" if isinstance(x, tuple) else "an array"
        raise ValueError(
            f"{door}: activations={activations!r} with {given} for x; bfloat16 is an array, mxfp8 "
            "the pair (values, scales) of to_mxfp8"
        )
    if impl not in IMPLS:
        raise ValueError(f"{door}: impl={impl!r} is not one of {IMPLS}")
    if activations == "mxfp8":
        if impl in FORMS:
            raise ValueError(f"{door}: impl={impl!r} takes bfloat16 rows, not {activations}")
        return automatic("packed experts, mxfp8 rows", "reference") if impl == "auto" else impl
    return automatic("packed experts", "blocks", gpu="batched") if impl == "auto" else impl


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(form, x_NL, w_ELF, sizes_E):
    """y_n = x_n w_e in float32, by one of FORMS."""
    return form.times(x_NL, w_ELF, sizes_E, "NL,LF->NF")


def _grouped_fwd(form, x_NL, w_ELF, sizes_E):
    return _grouped(form, x_NL, w_ELF, sizes_E), (x_NL, w_ELF, sizes_E)


def _grouped_bwd(form, saved, dy_NF):
    x_NL, w_ELF, sizes_E = saved
    dy_NF = dy_NF.astype(x_NL.dtype)
    dx_NL = form.times(dy_NF, w_ELF, sizes_E, "NF,LF->NL").astype(x_NL.dtype)
    return dx_NL, form.outer(x_NL, dy_NF, sizes_E).astype(w_ELF.dtype), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _check(x_NL, w_ELF, sizes_E):
    shapes = f"x {x_NL.shape}, w {w_ELF.shape}, sizes {sizes_E.shape}"
    if (x_NL.ndim, w_ELF.ndim, sizes_E.ndim) != (2, 3, 1):
        raise ValueError(f"grouped_matmul: shapes must be [N,L], [E,L,F], [E]; got {shapes}")
    if x_NL.shape[1] != w_ELF.shape[1] or w_ELF.shape[0] != sizes_E.shape[0]:
        raise ValueError(f"grouped_matmul: L of x and w, E of w and sizes must agree; got {shapes}")
    if sizes_E.dtype != jnp.int32:
        raise ValueError(f"grouped_matmul: sizes must be int32; got {sizes_E.dtype}")
    if x_NL.dtype != w_ELF.dtype:
        raise ValueError(
            f"grouped_matmul: x and w must share one dtype; got {x_NL.dtype} and {w_ELF.dtype}"
        )
