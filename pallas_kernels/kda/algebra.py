"""The algebra of one KDA chunk: decayed products, their inverse, and the gradients of both.

Letters: X chunk, c place in the chunk, R tile of `TILE` tokens in the chunk, t place in the tile,
p = 0 for rows of q and 1 for rows of k. Rows of q and k lie side by side, tile by tile, so that one
product serves both.

Products inside a tile take their exponents around the tile's middle: |x| <= 40 because g >= -5,
so that neither factor overflows and small entries of q and k are not flushed to zero (around the
middle of 32 tokens, |x| <= 80, they are). Products between blocks split the decay where the blocks
meet, and both factors are at most 1. Blocks double from a tile to the chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import dot32

TILE = 16
BASE = 4


class Decay(NamedTuple):
    """Exponentials of the log decay G, summed (inclusively) from the start of each tile.

    `start[l]` and `end[l]` hold e^G and e^(total - G) with G and total taken over blocks of 2^l
    tiles; the last entry is for the whole chunk, whose total decay is `keep`.
    """

    row_XBHRtk: jax.Array  # e^(G - middle)
    col_XBHRtk: jax.Array  # e^(middle - G)
    start: list[jax.Array]
    end: list[jax.Array]
    keep_XBHk: jax.Array


def product(eq, a, b, like):
    """einsum with operands in the dtype of `like`; sums in float32 (float64 for float64)."""
    a, b = a.astype(like.dtype), b.astype(like.dtype)
    if like.dtype == jnp.float64:
        return jnp.einsum(eq, a, b, precision=jax.lax.Precision.HIGHEST)
    return dot32(eq, a, b)


def rounded(x, like):
    """x as `product` sees it."""
    return x.astype(like.dtype).astype(x.dtype)


def tiles(x_XBHck):
    return x_XBHck.reshape(*x_XBHck.shape[:3], -1, TILE, x_XBHck.shape[-1])


def flat(x):
    """Everything between the heads and the last axis becomes one axis."""
    return x.reshape(*x.shape[:3], -1, x.shape[-1])


def running_sum(x, reverse=False):
    """Inclusive sum along the last axis but one, as a product with a triangle of ones."""
    n = x.shape[-2]
    ones = jnp.tril(jnp.ones((n, n), x.dtype))
    ones = jnp.broadcast_to(ones.T if reverse else ones, (*x.shape[:-2], n, n))
    return product("...ij,...jk->...ik", ones, x, x)


def decay(g_XBHck):
    sum_XBHRtk = running_sum(tiles(g_XBHck))
    middle = sum_XBHRtk[..., TILE // 2 - 1, None, :]
    total = sum_XBHRtk[..., -1, None, :]
    start, end = [jnp.exp(sum_XBHRtk)], [jnp.exp(total - sum_XBHRtk)]
    lead = tail = jnp.ones_like(total)
    whole = jnp.exp(total)
    while whole.shape[3] > 1:
        even, odd = whole[..., 0::2, :, :], whole[..., 1::2, :, :]
        lead = jnp.concatenate([lead[..., 0::2, :, :], lead[..., 1::2, :, :] * even], -2)
        tail = jnp.concatenate([tail[..., 0::2, :, :] * odd, tail[..., 1::2, :, :]], -2)
        whole = even * odd
        start.append(start[0] * flat(lead)[..., None, :])
        end.append(end[0] * flat(tail)[..., None, :])
    row, col = jnp.exp(sum_XBHRtk - middle), jnp.exp(middle - sum_XBHRtk)
    return Decay(row, col, start, end, whole[..., 0, 0, :])


def _later(x, level):
    """Second block of every two blocks of 2^level tiles: [..., R, *, k] -> [..., n, rows, k]."""
    return _halves(x, level)[..., 1, :, :]


def _sooner(x, level):
    return _halves(x, level)[..., 0, :, :]


def _halves(x, level):
    pairs = x.shape[3] // (2 << level)
    return x.reshape(*x.shape[:3], pairs, 2, -1, x.shape[-1])


def pairs(qk_XBHRptk, b_XBHRtk, d):
    """Decayed products of rows i with keys j: sum_k row_i b_j e^(G_i - G_j), as [X,B,H,R,p,t,c].

    Right wherever j <= i; the rest is for the caller's mask to drop.
    """
    like = qk_XBHRptk
    rows = qk_XBHRptk * d.row_XBHRtk[..., None, :, :]
    out = product("...ptk,...jk->...ptj", rows, b_XBHRtk * d.col_XBHRtk, like)
    out = out.reshape(*out.shape[:4], -1, TILE)
    for level in range(len(d.start) - 1):
        rows = _later(qk_XBHRptk * d.start[level][..., None, :, :], level)
        cols = _sooner(b_XBHRtk * d.end[level], level)
        low = product("...ik,...jk->...ij", rows, cols, like)
        out = _corner(out[..., 0::2, :, :], low, out[..., 1::2, :, :])
    return out.reshape(*qk_XBHRptk.shape[:-1], -1)


def _corner(first, low, second):
    """[[first, 0], [low, second]] of blocks."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([top, jnp.concatenate([low, second], -1)], -2)


def pairs_grad(dpairs_XBHRptc, qk_XBHRptk, b_XBHRtk, d):
    """From the masked gradient of `pairs` to those of qk, b and G.

    A product over e^(G_i - G_j) gives G the row times the row's gradient at i, and takes from it
    the column times its gradient at j. Both use the factors as rounded for the product, so that
    pairs which do not enclose a token cancel in that token's reverse sum, in bfloat16 too.
    """
    like = qk_XBHRptk
    dout = flat(dpairs_XBHRptc)[..., None, :, :]
    dqk = db = dsum = 0
    for level in reversed(range(len(d.start) - 1)):
        rows_n, cols_n = dout.shape[-2] // 2, dout.shape[-1] // 2
        low = dout[..., rows_n:, :cols_n]
        dout = jnp.stack([dout[..., :rows_n, :cols_n], dout[..., rows_n:, cols_n:]], -3)
        dout = dout.reshape(*dout.shape[:3], -1, rows_n, cols_n)
        start, end = d.start[level][..., None, :, :], d.end[level]
        rows = _later(rounded(qk_XBHRptk * start, like), level)
        cols = _sooner(rounded(b_XBHRtk * end, like), level)
        drows = product("...ij,...jk->...ik", low, cols, like)
        dcols = product("...ij,...ik->...jk", low, rows, like)
        up = jnp.stack([jnp.zeros_like(drows), drows], -3).reshape(qk_XBHRptk.shape)
        down = jnp.stack([dcols, jnp.zeros_like(dcols)], -3).reshape(b_XBHRtk.shape)
        dqk, db = dqk + up * start, db + down * end
        dsum = dsum + jnp.sum(rounded(qk_XBHRptk * start, like) * up, -3)
        dsum = dsum - rounded(b_XBHRtk * end, like) * down
    row = d.row_XBHRtk[..., None, :, :]
    rows, cols = rounded(qk_XBHRptk * row, like), rounded(b_XBHRtk * d.col_XBHRtk, like)
    dout = dout.reshape(*qk_XBHRptk.shape[:-1], TILE)
    drows = product("...ptj,...jk->...ptk", dout, cols, like)
    dcols = product("...ptj,...ptk->...jk", dout, rows, like)
    dsum = dsum + jnp.sum(rows * drows, -3) - cols * dcols
    return dqk + drows * row, db + dcols * d.col_XBHRtk, dsum


def inverse(low_XBHcc):
    """(I + L)^-1 of strictly lower L: substitution in blocks of `BASE`, then block doubling."""
    lead, n = low_XBHcc.shape[:-2], low_XBHcc.shape[-1]
    tile = _diagonal(low_XBHcc, TILE, 0)
    inv = _small_inverse(tile)
    size = TILE
    while size < n:
        first, second = inv[..., 0::2, :, :], inv[..., 1::2, :, :]
        low = product("...ij,...jk->...ik", second, _diagonal(low_XBHcc, size, 1), inv)
        low = product("...ij,...jk->...ik", low, first, inv)
        inv = _corner(first, -low, second)
        size *= 2
    return inv.reshape(*lead, n, n)


def _diagonal(low, size, below):
    """Blocks on the diagonal, or (below = 1) the block left of every second one of them."""
    step, down = size * (1 + below), size * below
    starts = range(0, low.shape[-1], step)
    return jnp.stack([low[..., i + down : i + down + size, i : i + size] for i in starts], -3)


def _small_inverse(low):
    """The same for blocks too small for matrix units: the blocks lie on the fastest axis."""
    n = low.shape[-1]
    low_ijN = jnp.moveaxis(low.reshape(-1, n, n), 0, -1)
    inv_bijN = _substitute(_blocks(low_ijN, BASE, 0))
    size = BASE
    while size < n:
        first, second = inv_bijN[0::2], inv_bijN[1::2]
        left = _blocks(low_ijN, size, 1)
        corner = -_times(_times(second, left), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], 2)
        inv_bijN = jnp.concatenate([top, jnp.concatenate([corner, second], 2)], 1)
        size *= 2
    return jnp.moveaxis(inv_bijN[0], -1, 0).reshape(low.shape)


def _blocks(low_ijN, size, below):
    """Blocks on the diagonal, or (below = 1) the block left of every second one of them."""
    starts = range(0, low_ijN.shape[0], size * (1 + below))
    down = size * below
    return jnp.stack([low_ijN[i + down : i + down + size, i : i + size] for i in starts])


def _times(a_bijN, b_bjkN):
    return sum(a_bijN[:, :, j, None] * b_bjkN[:, None, j] for j in range(a_bijN.shape[2]))


def _substitute(low_bijN):
    """Row by row: x_i = e_i - sum_(j<i) L_ij x_j."""
    eye = jnp.eye(low_bijN.shape[1], dtype=low_bijN.dtype)[..., None]
    rows = []
    for i in range(low_bijN.shape[1]):
        row = jnp.broadcast_to(eye[i], low_bijN[:, 0].shape)
        rows.append(row - sum(low_bijN[:, i, j, None] * x for j, x in enumerate(rows)))
    return jnp.stack(rows, 1)
