"""Top-k on a TPU: k passes over a block of rows in VMEM, each finding and striking the largest.

Rows stand on lanes, so that a pass compares whole registers: the largest of each of 8 classes of
columns first, then of the 8. The block is transposed on its way in, as is the result on its way
out. Passes over rows as they come, columns on lanes, would need two sums over lanes a pass.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import vary, varying

I32 = jnp.int32
LANES, SUBLANES = 128, 8
ROWS = 256  # of scores a step
STRUCK = -(2**31)  # less than the key of any score
LARGEST = 2**31 - 1  # the key of NaN


def top_k_mosaic(scores_NE, bias_E, k, *, rows=None, interpret=False):
    """`top_k`. rows a step: 128 or 256; None asks the chip."""
    N, E = scores_NE.shape
    if N == 0:
        return jnp.zeros((0, k), I32)
    if rows is None:
        rows = rows_per_step(N, E, k, pltpu.get_tpu_info().vmem_capacity_bytes)
    wide = -(-E // LANES) * LANES
    if wide > E:
        # They come last and are -inf: after every real one.
        scores_NE = jnp.pad(scores_NE, ((0, 0), (0, wide - E)), constant_values=-jnp.inf)
        bias_E = jnp.pad(bias_E, (0, wide - E))
    axes = varying(scores_NE) | varying(bias_E)
    scores_NE, bias_1E = vary(scores_NE, axes), vary(bias_E[None], axes)
    return pl.pallas_call(
        functools.partial(_kernel, k=k),
        name="top_k",
        grid=(pl.cdiv(N, rows),),
        in_specs=[
            pl.BlockSpec((rows, wide), lambda i: (i, 0)),
            pl.BlockSpec((1, wide), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, k), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (N, k), I32, manual_axis_type=jax.typeof(scores_NE).manual_axis_type
        ),
        scratch_shapes=[pltpu.VMEM((n, rows), I32) for n in (wide, -(-k // LANES) * LANES)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes(rows, E, k) * 2
        ),
        interpret=interpret,
    )(scores_NE, bias_1E)


def vmem_bytes(rows, E, k):
    """Scores, bias and indices, which come and go and are held twice, and two transposed."""
    wide, most = (-(-n // LANES) * LANES for n in (E, k))
    return 3 * rows * (wide + most) * 4 + 2 * SUBLANES * wide * 4


def rows_per_step(N, E, k, vmem):
    """256 rows, or 128 for few of them or where more would take over a quarter of VMEM."""
    rows = ROWS if N > LANES and vmem_bytes(ROWS, E, k) <= vmem // 4 else LANES
    need = vmem_bytes(rows, E, k)
    if need > vmem // 4:
        raise ValueError(
            f"top_k: {rows} rows of E={E} and k={k} need {need} bytes of VMEM, more than a quarter "
            f"of {vmem}; impl='reference' takes any size"
        )
    return rows


def _keys(scores):
    """int32 in the order of float32: 0 and -0 are one, NaN of either sign is the largest."""
    bits = pltpu.bitcast(jnp.where(scores == 0, 0.0, scores), I32)
    keys = jnp.where(bits < 0, bits ^ LARGEST, bits)
    return jnp.where(scores == scores, keys, LARGEST)


def _largest(x):
    """[8, n] -> the largest of each column, in all 8 rows."""
    for shift in (4, 2, 1):
        x = jnp.maximum(x, pltpu.roll(x, shift, 0))
    return x


def _kernel(scores, bias, chosen, keys_En, chosen_kn, *, k):
    n, E = scores.shape
    for row in range(0, n, LANES):
        for e in range(0, E, LANES):
            tile = _keys(scores[row : row + LANES, e : e + LANES] + bias[:, e : e + LANES])
            keys_En[e : e + LANES, row : row + LANES] = tile.T
    within = jax.lax.broadcasted_iota(I32, (SUBLANES, n), 0)

    def take(a, before):
        """The largest that is left; `before` is struck in passing."""
        best, at = jnp.full((SUBLANES, n), STRUCK, I32), jnp.zeros((SUBLANES, n), I32)
        strike = before - within
        for e in range(0, E, SUBLANES):
            keys = jnp.where(strike == e, STRUCK, keys_En[e : e + SUBLANES, :])
            keys_En[e : e + SUBLANES, :] = keys
            # Not >=: the first of equal ones stays.
            is_better = keys > best
            best, at = jnp.where(is_better, keys, best), jnp.where(is_better, e, at)
        first = jnp.where(best == _largest(best), at + within, E)
        first = -_largest(-first)
        chosen_kn[pl.ds(a, 1), :] = first[:1]
        return first

    jax.lax.fori_loop(0, k, take, jnp.full((SUBLANES, n), -1, I32))
    for row in range(0, n, LANES):
        for a in range(0, k, LANES):
            tile = chosen_kn[a : a + LANES, row : row + LANES].T
            chosen[row : row + LANES, a : min(a + LANES, k)] = tile[:, : min(LANES, k - a)]


__all__ = ["rows_per_step", "top_k_mosaic", "vmem_bytes"]
