"""The short convolution on a TPU: the calls of the two kernels and the custom gradient."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.conv import mosaic_kernels as kernels
from pallas_kernels.conv.mosaic_kernels import (
    BF16,
    CHUNK,
    F32,
    LANES,
    MASKS,
    ROWS,
    TAPS,
    WORDS,
    Plan,
)
from pallas_kernels.conv.reference import convolve, first_segment

VMEM_LIMIT = 60 << 20


def obstacle(shape, dtype, n_taps) -> str:
    """Why the kernel cannot take such inputs; empty if it can."""
    if len(shape) == 3 and not shape[2] % LANES and dtype == jnp.bfloat16 and 2 <= n_taps <= TAPS:
        return ""
    return (
        f"the kernel wants bfloat16 [B, T, X] with X a multiple of {LANES} and 2 to {TAPS} taps, "
        f"got {dtype} {shape} and {n_taps} taps"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def conv_mosaic(static, u_BTX, taps_WX, history_BWX, segments_BT):
    """`short_conv`'s y. static: a Plan, or None to ask the chip that is compiled for, and
    `interpret`. Raises ValueError for what the kernel cannot take.
    """
    if why := obstacle(u_BTX.shape, u_BTX.dtype, len(taps_WX)):
        raise ValueError(f"short_conv: impl='pallas' cannot run: {why}")
    plan, interpret = static
    mask, plain, _ = masks(segments_BT)
    kept = u_BTX, half_taps(taps_WX), by_parity(history_BWX.astype(u_BTX.dtype))
    return forward(plain, mask, *kept, plan=plan, interpret=interpret)


def _fwd(static, *args):
    return conv_mosaic(static, *args), args


def _bwd(static, kept, dy_BTX):
    plan, interpret = static
    u_BTX, taps_WX, history_BWX, segments_BT = kept
    mask, _, plain = masks(segments_BT)
    taps, history = half_taps(taps_WX), by_parity(history_BWX.astype(u_BTX.dtype))
    du_BTX, sums = backward(
        plain, mask, u_BTX, dy_BTX, taps, history, plan=plan, interpret=interpret
    )
    W, X = taps_WX.shape
    # The kernel leaves out a factor 1/2 of SiLU's derivative, which half taps make good in du.
    dtaps_WX = jnp.sum(sums.reshape(-1, TAPS, ROWS, X), (0, 2))[TAPS - W :] / 2
    # The first W - 1 tokens alone see the history.
    n = W - 1
    first_B1, few_Bn = first_segment(segments_BT), segments_BT[:, :n]
    u_BnX, dy_BnX = (x[:, :n].astype(F32) for x in (u_BTX, dy_BTX))
    dy_BnX = jnp.where((few_Bn != 0)[..., None], dy_BnX, 0)
    seen_BnX = history_BWX.astype(u_BTX.dtype).astype(F32)
    _, pull = jax.vjp(lambda h: convolve(u_BnX, taps_WX, h, few_Bn, first_B1), seen_BnX)
    (dhistory_BnX,) = pull(dy_BnX)
    dtaps_WX, dhistory_BnX = dtaps_WX.astype(taps_WX.dtype), dhistory_BnX.astype(history_BWX.dtype)
    return du_BTX, dtaps_WX, dhistory_BnX, None


conv_mosaic.defvjp(_fwd, _bwd)


def half_taps(taps_WX):
    """Half of each, as silu(2 h) = h + h tanh(h); missing ones, the oldest, are zero."""
    return jnp.pad(taps_WX.astype(F32) / 2, ((TAPS - len(taps_WX), 0), (0, 0)))


def by_parity(history_BWX):
    """The 8 words before the first: [B, even or odd, 8, X] float32, the latest last."""
    B, n, X = history_BWX.shape
    padded = jnp.pad(history_BWX.astype(F32), ((0, 0), (2 * ROWS - n, 0), (0, 0)))
    return jnp.swapaxes(padded.reshape(B, ROWS, 2, X), 1, 2)


def masks(segments_BT):
    """What the kernels are told of documents and pads.

    Masks of 0 and 1, [B, chunks, 16, 128] with rows as listed in `mosaic_kernels`; whether a chunk
    needs none of those for the forward kernel, [B, chunks] of 0 and 1; whether it needs none.
    """
    (B, T), n = segments_BT.shape, TAPS - 1
    # Each chunk with n tokens before and after it, so that whole registers are compared.
    ids = jnp.pad(segments_BT, ((0, 0), (0, -T % CHUNK))).reshape(B, -1, CHUNK)
    history = jnp.broadcast_to(first_segment(segments_BT)[:, None], (B, 1, n))
    left = jnp.concatenate([history, ids[:, :-1, -n:]], 1)
    right = jnp.pad(ids[:, 1:, :n], ((0, 0), (0, 1), (0, 0)))
    line = jnp.concatenate([left, ids, right], 2)
    token = jnp.arange(ids[0].size).reshape(-1, CHUNK)
    real, lags = ids != 0, range(1, TAPS)
    before = [(line[:, :, n - j : n - j + CHUNK] == ids) & real for j in lags]
    # What stands j behind sees a token if that is what it has j before. Behind the row: nothing.
    behind = [(line[:, :, n + j : n + j + CHUNK] == ids) & real | (token + j >= T) for j in lags]
    seen = jnp.stack([real, *before, *(x & (token < T) for x in behind)], 2)
    plain = [jnp.all(x, (2, 3)).astype(jnp.int32) for x in (seen[:, :, :TAPS], seen)]
    # Even and odd tokens by products with ones and zeros: strided lanes are slow.
    place, word = jnp.arange(CHUNK)[:, None], jnp.arange(WORDS)
    picks = [(place == 2 * word + parity).astype(BF16) for parity in (0, 1)]
    even, odd = (jnp.einsum("BcmT,Tw->Bcmw", seen.astype(BF16), pick) for pick in picks)
    parts = slice(0, 1), slice(1, TAPS), slice(TAPS, 2 * TAPS - 1)
    rows = [x[:, :, part] for part in parts for x in (even, odd)]
    rows.append(jnp.zeros((B, ids.shape[1], MASKS - 2 * seen.shape[2], WORDS), BF16))
    return jnp.concatenate(rows, 2).astype(F32), *plain


def specs(plan, n_t, reverse):
    """Block specs by name, for time running forwards or backwards."""
    rows, width = plan.chunks * CHUNK, plan.groups * LANES

    def spec(block, index):
        at = (lambda t: n_t - 1 - t) if reverse else (lambda t: t)
        return pl.BlockSpec(block, lambda b, x, t, *_: index(b, x, at(t)))

    return {
        "mask": spec((1, plan.chunks, MASKS, LANES), lambda b, x, t: (b, t, 0, 0)),
        "u": spec((1, rows, width), lambda b, x, t: (b, t, x)),
        "halo": spec(
            (1, kernels.HALO, width),
            lambda b, x, t: (b, jnp.maximum(t * (rows // kernels.HALO) - 1, 0), x),
        ),
        "taps": spec((TAPS, width), lambda b, x, t: (0, x)),
        "sums": spec((1, TAPS * ROWS, width), lambda b, x, t: (b, 0, x)),
        "history": spec((1, 2, ROWS, width), lambda b, x, t: (b, 0, 0, x)),
    }


# A kernel's trace takes seconds: under jit the layers of a model share one.
@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def forward(plain, mask, u_BTX, taps, history, *, plan=None, interpret=False):
    named = [("mask", mask), ("u", u_BTX), ("taps", taps), ("history", history)]
    out = [("u", u_BTX.shape, u_BTX.dtype)]
    return _call(kernels.forward, "conv_forward", plain, named, out, plan, False, interpret)[0]


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def backward(plain, mask, u_BTX, dy_BTX, taps, history, *, plan=None, interpret=False):
    """du, and for each tap and row of a register a sum of the taps' gradient [B, 4 * 8, X]."""
    B, _, X = u_BTX.shape
    named = [("mask", mask), ("u", u_BTX), ("halo", u_BTX), ("u", dy_BTX)]
    named += [("taps", taps), ("history", history)]
    out = [("u", u_BTX.shape, u_BTX.dtype), ("sums", (B, TAPS * ROWS, X), F32)]
    return _call(kernels.backward, "conv_backward", plain, named, out, plan, True, interpret)


def _call(kernel, name, plain, named, out, plan, reverse, interpret):
    u_BTX = named[1][1]
    B, T, X = u_BTX.shape
    if plan is None:
        plan = plan_for(T, X, reverse, pltpu.get_tpu_info())
    n_t = pl.cdiv(T, plan.chunks * CHUNK)
    # Blocks may end behind the row: those tokens are no real ones.
    mask, plain = (
        jnp.pad(x, ((0, 0), (0, n_t * plan.chunks - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        for x in (named[0][1], plain)
    )
    spec = specs(plan, n_t, reverse)
    pack = kernels.pack_interpreted if interpret else kernels.pack
    # Under shard_map, what comes out varies over the axes over which u does.
    axes = jax.typeof(u_BTX).manual_axis_type
    return pl.pallas_call(
        functools.partial(kernel, plan=plan, pack=pack),
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, X // (plan.groups * LANES), n_t),
            in_specs=[spec[key] for key, _ in named],
            out_specs=[spec[key] for key, _, _ in out],
            scratch_shapes=kernels.scratch(plan, reverse),
        ),
        out_shape=[jax.ShapeDtypeStruct(s, d, manual_axis_type=axes) for _, s, d in out],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
    )(plain, mask, *(x for _, x in named[1:]))


def vmem_bytes(plan, backward):
    """What a kernel takes: its blocks, each twice (one is computed on while the next arrives), and
    its scratch."""
    width = plan.groups * LANES
    block, mask = plan.chunks * CHUNK * width * 2, plan.chunks * MASKS * LANES * 4
    taps, history, sums = ROWS * width * 4, 2 * ROWS * width * 4, TAPS * ROWS * width * 4
    widened = 2 * plan.groups * (ROWS + WORDS) * LANES * 4
    masks, words = MASKS * WORDS * LANES * 4, 2 * WORDS * LANES * 4
    if backward:
        twice = 3 * block + kernels.HALO * width * 2 + mask + taps + history + sums
        return 2 * twice + 2 * widened + masks + 2 * words
    return 2 * (2 * block + mask + taps + history) + widened + masks + words


def plan_for(T, X, backward, chip):
    """The blocks on a chip (`pltpu.get_tpu_info()`): up to 12 groups of channels, which share a
    chunk's masks, and up to two chunks (four are no faster on v6e and tpu7x)."""
    divisors = [n for n in range(min(12, X // LANES), 0, -1) if X // LANES % n == 0]
    # Cores share the blocks of channels, so their number goes into that of the blocks if it can.
    shared = [n for n in divisors if X // LANES // n % chip.num_cores == 0]
    budget = min(chip.vmem_capacity_bytes, VMEM_LIMIT) * 2 // 3
    chunks = 2 if T > CHUNK else 1
    for groups in shared or divisors:
        plan = Plan(chunks, groups)
        if vmem_bytes(plan, backward) <= budget:
            return plan
    raise ValueError(
        f"short_conv: the smallest block needs {vmem_bytes(plan, backward)} bytes of VMEM; "
        f"{budget} of {chip.vmem_capacity_bytes} may be used; impl='reference' takes any size"
    )
