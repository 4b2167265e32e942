"""Kimi Delta Attention: the door that every caller uses, whatever computes it."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import automatic
from pallas_kernels.kda.chunked import kda_chunked
from pallas_kernels.kda.decode import MOST_TOKENS, kda_decode
from pallas_kernels.kda.gate import l2_norm, log_decay
from pallas_kernels.kda.mosaic import LANES, Raw, kda_mosaic
from pallas_kernels.kda.reference import kda_reference
from pallas_kernels.kda.sequence import gated_kda_sharded

PLAIN = {"chunked": kda_chunked, "reference": kda_reference}
IMPLS = (*PLAIN, "pallas")
# The chunk forms split decays so that the exponents of 16 or 32 tokens stay in float32's range.
LOWEST_BOUND = -5.0

__all__ = ["decodes_in_place", "gated_kda", "gated_kda_sharded", "kda", "kda_decode"]


def kda(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, segments_BT, *, impl="auto"):
    """For each t: S = diag(e^g) S;  S += beta k (v - S^T k)^T;  o = S^T q.  K3 report, sec. 2.1.1.

    q and k come L2-normalised, q also scaled. g is the natural-log decay and must lie in [-5, 0]
    (the chunk form's exponents rely on it); beta lies in (0, 1). q, k, v share one dtype (bfloat16
    or float32); g, beta and state are float32 (float64 throughout serves as an oracle).
    segments are int32: 0 marks a pad, any other value names a document. The incoming state goes on
    into the row's first document, each later one starts from zero. Pads may stand anywhere: they
    leave the state alone, give o = 0, and their inputs are never read and get zero gradients.

    impl: "reference" (token by token), "chunked" (chunks in jnp, custom gradient), "pallas" (chunks
    in TPU kernels; operands of products are rounded to bfloat16 whatever they come as, K and V are
    multiples of 128), or "auto": the recurrence for one token; else "pallas" on a TPU, "chunked"
    elsewhere and, told in the log, on a TPU for other K and V.
    Returns o_BTHv in v's dtype and the state after each row's last real token.
    Raises ValueError for an unknown impl and for shapes or dtypes that do not fit together.
    """
    _check(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, segments_BT)
    impl = _choose(impl, q_BTHk, v_BTHv)
    real_BT, docs_BT = segments_BT != 0, _documents(segments_BT)
    tokens = (q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH)
    if impl == "pallas":
        return kda_mosaic(*tokens, (), state_BHkv, docs_BT, real_BT)
    tokens = (_keep_real(x, real_BT) for x in tokens)
    o_BTHv, state_BHkv = PLAIN[impl](*tokens, state_BHkv, docs_BT)
    return _keep_real(o_BTHv, real_BT), state_BHkv


def gated_kda(
    q_BTHk, k_BTHk, v_BTHv, logit_BTHk, beta_BTH, a_log_H, bias_Hk, state_BHkv, segments_BT,
    *, lower_bound, impl="auto",
):  # fmt: skip
    """`kda` of l2_norm(q) / sqrt(K), l2_norm(k), v, log_decay(logit) and sigmoid(beta). Eq. 5.

    log_decay = lower_bound sigmoid(e^a_log (logit + bias)). q, k, v, logit and beta are projections
    of any float dtype, q, k, v of one; a_log, bias and state are float32. impl as in `kda`;
    "pallas" does all of it in its kernels.
    """
    if not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(
            f"gated_kda: lower_bound={lower_bound} must lie in [{LOWEST_BOUND}, 0): exponents of "
            "lower ones leave float32"
        )
    scale, impl = q_BTHk.shape[-1] ** -0.5, _choose(impl, q_BTHk, v_BTHv)
    beta_BTH = beta_BTH.astype(state_BHkv.dtype)
    if impl == "pallas":
        g_BTHk = logit_BTHk.astype(jnp.float32)
        _check(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, segments_BT)
        gates = (jnp.exp(a_log_H), bias_Hk)
        tokens = (q_BTHk, k_BTHk, v_BTHv, logit_BTHk, beta_BTH)
        raw = Raw(lower_bound, scale)
        docs_BT = _documents(segments_BT)
        return kda_mosaic(*tokens, gates, state_BHkv, docs_BT, segments_BT != 0, raw=raw)
    # The recurrence, which single tokens go through, keeps q and k in float32 (k3-facts 3.8).
    dtype = state_BHkv.dtype if impl == "reference" else q_BTHk.dtype
    g_BTHk = log_decay(logit_BTHk, a_log_H, bias_Hk, lower_bound)
    o_BTHv, state_BHkv = kda(
        (l2_norm(q_BTHk) * scale).astype(dtype), l2_norm(k_BTHk).astype(dtype),
        v_BTHv.astype(dtype), g_BTHk, jax.nn.sigmoid(beta_BTH), state_BHkv, segments_BT, impl=impl,
    )  # fmt: skip
    return o_BTHv.astype(v_BTHv.dtype), state_BHkv


def decodes_in_place(n_tokens: int, K: int, V: int) -> bool:
    """Whether so many tokens a row, behind a cache, are for `kda_decode`: up to 8 on a TPU, where K
    and V are multiples of 128 (else the log says so)."""
    if n_tokens > MOST_TOKENS:
        return False
    return automatic("KDA decode", "in parts", obstacle=_obstacle(K, V)) == "pallas"


def _obstacle(K, V):
    return f"K={K}, V={V} are no multiples of {LANES}" if K % LANES or V % LANES else ""


def _choose(impl, q_BTHk, v_BTHv):
    if impl == "auto":
        (_, T, _, K), V = q_BTHk.shape, v_BTHv.shape[-1]
        return "reference" if T == 1 else automatic("KDA", "chunked", obstacle=_obstacle(K, V))
    if impl not in IMPLS:
        raise ValueError(f"kda: impl={impl!r} is unknown; allowed are 'auto', {sorted(IMPLS)}")
    return impl


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
    seen_BT = _last_real(segments_BT)
    before_BT = jnp.pad(seen_BT[:, :-1], ((0, 0), (1, 0)))
    begins_BT = (before_BT != 0) & (seen_BT != before_BT)
    return jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)


def _last_real(segments_BT):
    """The segment of the last real token up to each one, 0 where there is none.

    A running maximum of positions, each with a part of its token's segment in the bits below: a TPU
    takes a tenth of the time of a scan that chooses between segments.
    """
    T = segments_BT.shape[1]
    bits = 31 - (T - 1).bit_length()
    low, position_T = (1 << bits) - 1, jnp.arange(T, dtype=jnp.int32) << bits
    parts_nBT = jnp.stack([segments_BT >> at & low for at in range(0, 32, bits)])
    last_nBT = jax.lax.cummax(jnp.where(segments_BT != 0, position_T | parts_nBT, 0), axis=2)
    return sum(
        (last_BT & low) << at for last_BT, at in zip(last_nBT, range(0, 32, bits), strict=True)
    )


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
