"""Kimi Delta Attention: the door that every caller uses, whatever computes it."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.chunked import kda_chunked
from pallas_kernels.kda.reference import kda_reference

IMPLS = {"chunked": kda_chunked, "reference": kda_reference}


def kda(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, segments_BT, *, impl="auto"):
    """For each t: S = diag(e^g) S;  S += beta k (v - S^T k)^T;  o = S^T q.  K3 report, sec. 2.1.1.

    q and k come L2-normalised, q also scaled. g is the natural-log decay and must lie in [-5, 0]
    (the chunk form's exponents rely on it); beta lies in (0, 1). q, k, v share one dtype (bfloat16
    or float32); g, beta and state are float32 (float64 throughout serves as an oracle).
    segments are int32: 0 marks a pad, any other value names a document. The incoming state goes on
    into the row's first document, each later one starts from zero. Pads may stand anywhere: they
    leave the state alone, give o = 0, and their inputs are never read and get zero gradients.

    impl: "reference" (token by token), "chunked" (chunks, custom gradient), or "auto": the
    recurrence for one token, chunks otherwise.
    Returns o_BTHv in v's dtype and the state after each row's last real token.
    Raises ValueError for an unknown impl and for shapes or dtypes that do not fit together.
    """
    _check(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, segments_BT)
    if impl == "auto":
        impl = "reference" if q_BTHk.shape[1] == 1 else "chunked"
    if impl not in IMPLS:
        raise ValueError(f"kda: impl={impl!r} is unknown; allowed are 'auto', {sorted(IMPLS)}")
    real_BT = segments_BT != 0
    tokens = (q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH)
    tokens = (_keep_real(x, real_BT) for x in tokens)
    o_BTHv, state_BHkv = IMPLS[impl](*tokens, state_BHkv, _documents(segments_BT))
    return _keep_real(o_BTHv, real_BT), state_BHkv


@jax.custom_vjp
def _keep_real(x_BTx, real_BT):
    """x, and its gradient, with exact zeros at pads whatever stood there.

    The gradient is spelled out because that of jnp.where would keep arrays of x's full size.
    """
    return jnp.where(real_BT.reshape(real_BT.shape + (1,) * (x_BTx.ndim - 2)), x_BTx, 0)


_keep_real.defvjp(
    lambda x_BTx, real_BT: (_keep_real(x_BTx, real_BT), real_BT),
    lambda real_BT, dx_BTx: (_keep_real(dx_BTx, real_BT), None),
)


def _documents(segments_BT):
    """Number of documents begun before each token, the row's first one not counted.

    A pad belongs to the document before it, so that no pad begins or ends one.
    """
    seen_BT = jax.lax.associative_scan(lambda a, b: jnp.where(b == 0, a, b), segments_BT, axis=1)
    before_BT = jnp.pad(seen_BT[:, :-1], ((0, 0), (1, 0)))
    begins_BT = (before_BT != 0) & (seen_BT != before_BT)
    return jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)


def _check(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, segments_BT):
    if q_BTHk.ndim != 4 or v_BTHv.ndim != 4 or 0 in q_BTHk.shape:
        raise ValueError(
            f"kda: q must be [B, T, H, K] and v [B, T, H, V] with no empty axis, "
            f"got q {q_BTHk.shape} and v {v_BTHv.shape}"
        )
    (b, t, h, k), v = q_BTHk.shape, v_BTHv.shape[-1]
    shapes = {
        "k": (k_BTHk, (b, t, h, k)),
        "v": (v_BTHv, (b, t, h, v)),
        "g": (g_BTHk, (b, t, h, k)),
        "beta": (beta_BTH, (b, t, h)),
        "state": (state_BHkv, (b, h, k, v)),
        "segments": (segments_BT, (b, t)),
    }
    for name, (x, want) in shapes.items():
        if x.shape != want:
            raise ValueError(
                f"kda: {name} has shape {x.shape}, but q {q_BTHk.shape} and v {v_BTHv.shape} "
                f"want {want}"
            )
    if not (q_BTHk.dtype == k_BTHk.dtype == v_BTHv.dtype):
        raise ValueError(
            f"kda: q, k, v must share a dtype, got {q_BTHk.dtype}, {k_BTHk.dtype}, {v_BTHv.dtype}"
        )
    exact = jnp.float64 if q_BTHk.dtype == jnp.float64 else jnp.float32
    for name, x in {"g": g_BTHk, "beta": beta_BTH, "state": state_BHkv}.items():
        if x.dtype != exact:
            raise ValueError(
                f"kda: {name} is {x.dtype}; with q {q_BTHk.dtype} it must be {exact.__name__}"
            )
    if segments_BT.dtype != jnp.int32:
        raise ValueError(f"kda: segments is {segments_BT.dtype}; it must be int32")
