"""Attention Residuals' MIX: rows of the stream's earlier sums, weighted by a learned probe."""

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res.mosaic import LANES, MOST, mix_mosaic
from pallas_kernels.attn_res.reference import mix_reference, mix_weights
from pallas_kernels.common import automatic

IMPLS = ("auto", "pallas", "reference")
DTYPES = (jnp.bfloat16, jnp.float32)

__all__ = ["mix", "mix_weights"]


def mix(
    candidates: tuple[jax.Array, ...],
    probe_D: jax.Array,
    is_there_J: jax.Array | None = None,
    *,
    eps: float,
    impl="auto",
):
    """sum_j w_j row_j, w = softmax_j(row_j . probe / sqrt(mean(row_j^2) + eps)). Report Eq. 8-10.

    is_there_J: int32, 1 for the candidates that take part, at least one, and 0 for others, which
    have to be finite; None: all do. A loop over blocks has room for rows still to come.

    candidates are J >= 1 arrays [B, T, D], all bfloat16 or all float32; probe_D is float32. Norms,
    scores, softmax and sum are float32, the result has the candidates' dtype. For its gradients it
    keeps the candidates and the probe; "pallas" also a score and a scale of each row. A NaN stays
    in its own token (and in the probe's gradient).
    impl: "reference" is jnp; "pallas" TPU kernels, which read each row once in either direction
    and want D in multiples of 128 and at most 64 candidates; "auto" is "pallas" on a TPU, and
    "reference" elsewhere and, told in the log, for what they cannot take.

    Modelled for 4 candidates of 8192 bfloat16 tokens, D = 7168, over the HBM floor, forward and
    forward with gradients: v6e and v5p 1.01 and 1.01; tpu7x, whose vector unit binds, 1.48 and
    1.40 ("reference", forward: v6e 1.8, v5p 1.9, tpu7x 3.9).
    Raises ValueError for shapes, dtypes or an impl that do not fit.
    """
    _check(candidates, probe_D, is_there_J, impl)
    if len(candidates) == 1:
        return candidates[0]
    if is_there_J is None:
        is_there_J = jnp.ones(len(candidates), jnp.int32)
    if impl == "auto":
        D, J = len(probe_D), len(candidates)
        fits = D % LANES == 0 and J <= MOST
        obstacle = "" if fits else f"D={D} is no multiple of {LANES} or J={J} more than {MOST}"
        impl = automatic("AttnRes mix", "reference", obstacle=obstacle)
    if impl == "pallas":
        return mix_mosaic(candidates, probe_D, is_there_J, eps=eps)
    return mix_reference(candidates, probe_D, eps, is_there_J)


def _check(candidates, probe_D, is_there_J, impl):
    if impl not in IMPLS:
        raise ValueError(f"mix: impl={impl!r} is not one of {IMPLS}")
    if not candidates:
        raise ValueError("mix: there are no candidates; it wants at least one")
    first, J = candidates[0], len(candidates)
    for j, row in enumerate(candidates):
        if row.ndim != 3 or row.shape != first.shape or row.dtype != first.dtype:
            raise ValueError(
                f"mix: candidates must share one shape [B, T, D] and dtype; number {j} is "
                f"{row.dtype} {row.shape}, the first {first.dtype} {first.shape}"
            )
    if first.dtype not in DTYPES:
        raise ValueError(f"mix: candidates must be bfloat16 or float32; got {first.dtype}")
    if is_there_J is not None and (is_there_J.shape, is_there_J.dtype) != ((J,), jnp.int32):
        raise ValueError(
            f"mix: is_there_J must be int32 ({J},); got {is_there_J.dtype} {is_there_J.shape}"
        )
    if probe_D.shape != first.shape[2:] or probe_D.dtype != jnp.float32:
        raise ValueError(
            f"mix: the probe must be float32 {first.shape[2:]}; got {probe_D.dtype} {probe_D.shape}"
        )
