"""The k largest of each row: which experts a router chooses."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import automatic
from pallas_kernels.top_k.mosaic import top_k_mosaic
from pallas_kernels.top_k.reference import top_k_reference

IMPLS = ("auto", "pallas", "reference")

__all__ = ["top_k"]


def top_k(scores_NE: jax.Array, k: int, *, bias_E=None, impl="auto") -> jax.Array:
    """Indices [N, k], int32, of the k largest of each row of scores + bias, the largest first.

    Equal scores (0 and -0 are equal) come in the order of their indices, and NaN counts as larger
    than everything: the indices of `jax.lax.top_k`. scores and bias are float32, 1 <= k <= E.
    Not differentiable. impl: "reference" is `jax.lax.top_k`, which XLA sorts whole rows for on a
    TPU; "pallas" a TPU kernel that takes the largest k times; "auto" is "pallas" on a TPU, else
    "reference". Raises ValueError for shapes, dtypes, k or an impl that do not fit.
    """
    if scores_NE.ndim != 2 or scores_NE.dtype != jnp.float32:
        raise ValueError(
            f"top_k: scores must be float32 [N, E]; got {scores_NE.dtype} {scores_NE.shape}"
        )
    if not 1 <= k <= scores_NE.shape[1]:
        raise ValueError(f"top_k: k={k} must be 1 to E={scores_NE.shape[1]}")
    if impl not in IMPLS:
        raise ValueError(f"top_k: impl={impl!r} is not one of {IMPLS}")
    if bias_E is None:
        bias_E = jnp.zeros_like(scores_NE, shape=scores_NE.shape[1:])
    if bias_E.shape != scores_NE.shape[1:] or bias_E.dtype != jnp.float32:
        raise ValueError(
            f"top_k: the bias must be float32 {scores_NE.shape[1:]}; got {bias_E.dtype} "
            f"{bias_E.shape}"
        )
    impl = automatic("router top-k", "reference") if impl == "auto" else impl
    scores_NE, bias_E = jax.lax.stop_gradient((scores_NE, bias_E))
    return (top_k_mosaic if impl == "pallas" else top_k_reference)(scores_NE, bias_E, k)
