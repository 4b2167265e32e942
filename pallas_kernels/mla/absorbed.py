"""Absorbed decode attention: a few queries a row against the latent cache as it lies.

Scores and sum both multiply with the same slots, so one pass over the cache does: `attend` is a TPU
kernel with a running softmax, `attend_plain` the same in jnp, where XLA reads the cache twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import dot32, vary, varying

F32 = jnp.float32
LANES = 128
MOST_TOKENS = 8
MOST_SLOTS = 1024  # a step
HIDDEN = -1e30  # a score that counts for nothing and, unlike -inf, never makes NaN


def attend_plain(q_BTHM, latent_BMS, q_index_BT, *, scale, C, first=0, with_lse=False):
    """o_t = sum over slots s <= q_index_t of softmax(scale q_t.latent_s) latent_s[:C], in q's type.

    first: the row of the cache that is the queries' first; it may hold more of them.
    with_lse: o in float32 and log sum_s exp(scale q_t.latent_s) [B,T,H], from which o over several
    caches follows; of a query that sees no slot they are 0 and HIDDEN.

    The cache is multiplied as it is and the scores of dead slots are dropped; in the sum, where
    NaN times a weight of 0 would count, XLA zeroes dead slots on their way into the product.
    """
    latent_BMS = jax.lax.dynamic_slice_in_dim(latent_BMS, first, len(q_BTHM))
    slots_S = jnp.arange(latent_BMS.shape[2])
    scores_BHTS = scale * dot32("BTHM,BMS->BHTS", q_BTHM, latent_BMS)
    visible_B1TS = (slots_S <= q_index_BT[..., None])[:, None]
    scores_BHTS = jnp.where(visible_B1TS, scores_BHTS, HIDDEN)
    p_BHTS = jax.nn.softmax(scores_BHTS, axis=-1)
    live_B1S = (slots_S <= q_index_BT.max(axis=1, keepdims=True))[:, None]
    values_BMS = jnp.where(live_B1S, latent_BMS, 0)
    # All M channels, of which some are dropped: a slice of the cache would be a copy of it.
    o_BTHM = dot32("BHTS,BMS->BTHM", p_BHTS.astype(latent_BMS.dtype), values_BMS)
    is_real_BT11 = (q_index_BT >= 0)[..., None, None]
    o_BTHC = jnp.where(is_real_BT11, o_BTHM[..., :C], 0)
    if not with_lse:
        return o_BTHC.astype(q_BTHM.dtype)
    lse_BTH = jnp.swapaxes(jax.nn.logsumexp(scores_BHTS, axis=-1), 1, 2)
    return o_BTHC, jnp.where(is_real_BT11[..., 0], lse_BTH, HIDDEN)


def fits(q_BTHM, latent_BMS, C):
    """Why the kernel cannot take these, or ''."""
    T = q_BTHM.shape[1]
    if T > MOST_TOKENS:
        return f"T={T} is more than {MOST_TOKENS}"
    if C % LANES:
        return f"C={C} is no multiple of {LANES}"
    if q_BTHM.dtype != latent_BMS.dtype:
        return f"q is {q_BTHM.dtype} and the latent {latent_BMS.dtype}"
    return ""


def vmem_bytes(slots, rows, M, C, itemsize):
    """VMEM of a step; what comes and goes is held twice. rows: queries times heads."""
    rows = -(-rows // 16) * 16
    moved = (M * slots + rows * (-(-M // LANES) * LANES + C)) * itemsize + rows * LANES * 4
    sums = rows * (C + 2 * LANES) * 4
    return 2 * moved + sums + rows * slots * (3 * 4 + itemsize) + C * slots * itemsize


def slots_per_step(S, rows, M, C, itemsize, vmem):
    """The most slots, by powers of two from 128 to 1024, whose step fits half of VMEM.

    A row reads whole steps: larger ones cost short rows more than they save long ones.
    """
    slots = MOST_SLOTS
    while slots > LANES and (slots >= 2 * S or vmem_bytes(slots, rows, M, C, itemsize) > vmem // 2):
        slots //= 2
    need = vmem_bytes(slots, rows, M, C, itemsize)
    if need > vmem // 2:
        raise ValueError(
            f"absorbed_attention: {rows} queries and {slots} slots of M={M} need {need} bytes of "
            f"VMEM, more than half of {vmem}; impl='plain' takes any size"
        )
    return slots


def attend(
    q_BTHM, latent_BMS, q_index_BT, *,
    scale, C, first=0, with_lse=False, slots=None, interpret=False,
):  # fmt: skip
    """`attend_plain` on a TPU. Slots after a row's last live one are not read, by whole steps, and
    no row of another layer.

    slots a step; None asks the chip. Float32 is multiplied in full precision. Has no gradient.
    """
    (_, T, H, M), S = q_BTHM.shape, latent_BMS.shape[2]
    if reason := fits(q_BTHM, latent_BMS, C):
        raise ValueError(f"absorbed_attention: impl='pallas' cannot: {reason}")
    if slots is None:
        vmem = pltpu.get_tpu_info().vmem_capacity_bytes
        slots = slots_per_step(S, T * H, M, C, latent_BMS.dtype.itemsize, vmem)
    last_BT = jnp.minimum(q_index_BT, S - 1).astype(jnp.int32)
    args = (q_BTHM, latent_BMS, last_BT, jnp.full(1, first, jnp.int32))
    axes = frozenset().union(*map(varying, args))
    return _attend((scale, C, with_lse, slots, interpret), *(vary(x, axes) for x in args))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q_BTHM, latent_BMS, q_index_BT, first_1):
    scale, C, with_lse, slots, interpret = static
    (B, T, H, M), S = q_BTHM.shape, latent_BMS.shape[2]
    R, dtype = T * H, q_BTHM.dtype
    row = functools.partial(pl.BlockSpec, index_map=lambda b, *_: (b, 0, 0))
    need = vmem_bytes(slots, R, M, C, 4 if with_lse else dtype.itemsize)
    out = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q_BTHM).manual_axis_type
    )
    o_BRC, *lse_BR1 = pl.pallas_call(
        functools.partial(_kernel, scale=scale, with_lse=with_lse),
        name="absorbed_attention",
        out_shape=(
            [out((B, R, C), F32), out((B, R, 1), F32)] if with_lse else [out((B, R, C), dtype)]
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, pl.cdiv(S, slots)),
            in_specs=[
                row((1, R, 1)),
                row((1, R, M)),
                # Past the last live step the block stays, so that nothing is fetched.
                pl.BlockSpec(
                    (1, M, slots),
                    lambda b, j, last, first: (
                        first[0] + b,
                        0,
                        jnp.minimum(j, _step(last[b], slots)),
                    ),
                ),
            ],
            out_specs=[row((1, R, C)), row((1, R, 1))][: 1 + with_lse],
            scratch_shapes=[pltpu.VMEM((R, n), F32) for n in (1, 1, C)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=need * 3 // 2
        ),
        # All slots live, of these rows.
        cost_estimate=pl.CostEstimate(
            flops=2 * B * R * S * (M + C),
            transcendentals=B * R * S,
            bytes_accessed=(B * S * M + B * R * (M + C)) * dtype.itemsize,
        ),
        interpret=interpret,
    )(
        q_index_BT.max(axis=1),
        first_1,
        jnp.repeat(q_index_BT, H, axis=1)[..., None],
        q_BTHM.reshape(B, R, M),
        latent_BMS,
    )
    o_BTHC = o_BRC.reshape(B, T, H, C)
    return (o_BTHC, lse_BR1[0].reshape(B, T, H)) if with_lse else o_BTHC


def _no_gradient(*_):
    raise ValueError("absorbed_attention: impl='pallas' has no gradient; impl='plain' has one")


_attend.defvjp(_no_gradient, _no_gradient)


def _step(last, slots):
    """The step that holds a row's last live slot; 0 for a row of pads."""
    return jnp.maximum(last, 0) // slots


def _kernel(last_B, _, index_R1, q_RM, latent_Ms, o_RC, *rest, scale, with_lse):
    *lse_R1, top_R1, whole_R1, sum_RC = rest
    b, j = pl.program_id(0), pl.program_id(1)
    C, slots = o_RC.shape[2], latent_Ms.shape[2]
    precision = jax.lax.Precision.HIGHEST if q_RM.dtype == F32 else None

    def dot(x, y, axis):
        return jax.lax.dot_general(
            x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=F32
        )

    @pl.when(j == 0)
    def _():
        top_R1[...] = jnp.full(top_R1.shape, HIDDEN, F32)
        whole_R1[...] = jnp.zeros(whole_R1.shape, F32)
        sum_RC[...] = jnp.zeros(sum_RC.shape, F32)

    def add(values_Cs):
        scores_Rs = scale * dot(q_RM[0], latent_Ms[0], 0)
        slot_Rs = j * slots + jax.lax.broadcasted_iota(jnp.int32, scores_Rs.shape, 1)
        scores_Rs = jnp.where(slot_Rs <= index_R1[0], scores_Rs, HIDDEN)
        before = top_R1[...]
        top = jnp.maximum(before, jnp.max(scores_Rs, axis=1, keepdims=True))
        p_Rs, shrink = jnp.exp(scores_Rs - top), jnp.exp(before - top)
        top_R1[...] = top
        whole_R1[...] = shrink * whole_R1[...] + jnp.sum(p_Rs, axis=1, keepdims=True)
        sum_RC[...] = shrink * sum_RC[...] + dot(p_Rs.astype(values_Cs.dtype), values_Cs, 1)

    at = _step(last_B[b], slots)

    @pl.when(j < at)
    def _():
        add(latent_Ms[0, :C])

    @pl.when(j == at)
    def _():
        # What dead slots hold times a weight of 0 could still be NaN.
        slot_Cs = j * slots + jax.lax.broadcasted_iota(jnp.int32, (C, slots), 1)
        values_Cs = latent_Ms[0, :C]
        add(jnp.where(slot_Cs <= last_B[b], values_Cs, jnp.zeros_like(values_Cs)))

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        is_real_R1 = index_R1[0] >= 0
        o_RC[0] = jnp.where(is_real_R1, sum_RC[...] / whole_R1[...], 0).astype(o_RC.dtype)
        if with_lse:
            lse = top_R1[...] + jnp.log(whole_R1[...])
            lse_R1[0][0] = jnp.where(is_real_R1, lse, HIDDEN)


__all__ = ["attend", "attend_plain", "fits", "slots_per_step", "vmem_bytes"]
