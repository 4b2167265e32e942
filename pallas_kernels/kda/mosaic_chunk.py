"""The algebra of one KDA chunk of one head, as the TPU kernels write it out.

Everything is a [rows, lanes] matrix: C = 128 tokens of a chunk on rows, K or V channels on lanes.
Products take bfloat16 operands and sum in float32, on a TPU and in the interpreter alike. Log
decays are in units of log 2 and G is their running sum from the chunk's start.

A chunk is cut into four tiles of R = 32 tokens. Inside a tile decays are split around its middle
token: both factors stay within 2^(+-116) because a token's log decay is at least -5 (-7.22 in
log 2), so one product serves a tile's queries and keys; against earlier tiles both are at most 1.

The generators yield wherever the work of other heads may be written between: a TPU issues matrix
products in program order, and the next one of a head waits some 240 cycles for the one before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

CHUNK, TILE, BASE = 128, 32, 16
LOG2E = 1.4426950408889634
BF16, F32 = jnp.bfloat16, jnp.float32
TILES = [slice(i, i + TILE) for i in range(0, CHUNK, TILE)]


def dot(a, b):
    """a b"""
    return _product(a, b, 1, 0)


def dot_t(a, b):
    """a b^T"""
    return _product(a, b, 1, 1)


def t_dot(a, b):
    """a^T b"""
    return _product(a, b, 0, 0)


def _product(a, b, axis_a, axis_b):
    dims = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a.astype(BF16), b.astype(BF16), dims, preferred_element_type=F32)


def rounded(strips):
    """Float32 strips of rows, one below the other, in bfloat16.

    In this order: strips that are rounded before they are joined come in half-filled registers,
    and a v5p fills one from two of them in five operations instead of one.
    """
    return jnp.concatenate(strips, 0).astype(BF16)


def folded(x, fold):
    """x [n, K] float32 as it waits for a product: with `fold` 2 rounded to bfloat16, two rows in
    one of int32 [n / 2, K]; with 1 as it is.

    To select among folded rows takes half the operations. A v5p makes them in five where others
    take one, and selects for nothing what goes into a product.
    """
    return x if fold == 1 else pltpu.bitcast(x.astype(BF16), jnp.int32)


def unfolded(x):
    """For a product, in bfloat16."""
    return x.astype(BF16) if x.dtype == F32 else pltpu.bitcast(x, BF16)


def kept(x, mask):
    """x [n, K] float32, folded as `mask` is, and 0 where that has none. From `foldable`."""
    return jnp.where(mask > 0, x, 0) if mask.dtype == F32 else folded(x, 2) & mask


def foldable(mask, fold):
    """For `kept`: 1 where mask [n, K] is True, or folded and all ones."""
    ones = folded(mask.astype(F32), fold)
    return ones if fold == 1 else (ones >> 7 & 0x00010001) * 0xFFFF


def iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def running_sums(x, reverse=False):
    """Inclusive sums over the rows of x [C, K]: within registers of eight rows by doubling, then
    from one to the next. Never through VMEM, where it would hold up the loads of other heads."""
    row = iota((8, x.shape[1]), 0)
    starts = range(0, x.shape[0], 8)
    runs = [x[i : i + 8] for i in (reversed(starts) if reverse else starts)]
    for s in (1, 2, 4):
        near = row < 8 - s if reverse else row >= s
        shift = 8 - s if reverse else s
        runs = [r + jnp.where(near, pltpu.roll(r, shift, 0), 0.0) for r in runs]
    end, out = 0 if reverse else 7, [runs[0]]
    before = runs[0][end : end + 1]
    for run in runs[1:]:
        out.append(run + before)
        before = before + run[end : end + 1]
    return jnp.concatenate(out[::-1] if reverse else out, 0)


class Masks(NamedTuple):
    """What a chunk's documents allow; the same for all heads.

    `seen` and `sooner` [C, C], for `kept` (folded): whether token j is at or before i in the same
    document, and whether before it. `near` [16, C] is 1 where `seen` is, of the diagonal blocks.
    `reach` and `left` [C, 1] are 1 where no document begins between the chunk's start and the
    token, and between the token and the chunk's end; `keep` [1, 1] where none begins in the chunk;
    `real` [C, 1] where the token is no pad.
    """

    seen: jax.Array
    sooner: jax.Array
    near: jax.Array
    reach: jax.Array
    left: jax.Array
    keep: jax.Array
    real: jax.Array


def masks(row_8C, fold):
    """From the rows of `mosaic.mask_rows`: document numbers, reach, left, keep, real."""
    columns = jnp.swapaxes(row_8C, 0, 1)
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    same = columns[:, :1] == row_8C[:1]
    seen = same & (j <= i)
    near = slab([seen[t].astype(F32) for t in TILES])
    reach, left, real = (columns[:, n : n + 1] for n in (1, 2, 4))
    seen, sooner = foldable(seen, fold), foldable(same & (j < i), fold)
    return Masks(seen, sooner, near, reach, left, row_8C[3:4, :1], real)


class Tile(NamedTuple):
    """q, k [R, K] (normalised, q scaled) and -beta [R, 1] of one tile in float32, and what norms
    multiplied them by (None where they come normalised)."""

    q: jax.Array
    k: jax.Array
    minus_beta: jax.Array
    norm_q: jax.Array | None = None
    norm_k: jax.Array | None = None


class Front(NamedTuple):
    """What a head's chunk knows before it sees a state.

    b = -beta k is minus the key that is written and u = T (read_k S - v) minus what is written for
    it, T = (I - N)^-1 with N_ij = k_i . b_j decayed: with these signs nothing is ever negated.

    lhs[t] [2R, K] are tile t's rows of q and of k, decayed from the tile's middle; cols[t]
    [(t+1)R, K] the rows of b up to tile t, decayed to it. read [2C, K] meets the state before the
    chunk, write [C, K] makes the state after it, keep [1, K] is the decay of the whole chunk.
    """

    lhs: list
    cols: list
    read: jax.Array
    write: jax.Array
    keep: jax.Array


class Decay(NamedTuple):
    """Exponentials of one tile's decay, [R, K]: to its middle and from it, to the middles of the
    later tiles, and from the chunk's start to the middle and from there to the chunk's end, zero
    where a document begins on that way."""

    row: jax.Array
    col: jax.Array
    across: list
    start: jax.Array
    end: jax.Array


def decays(total, m: Masks):
    """For each tile its slice and a function that makes its Decay; and the whole chunk's, [1, K].

    `total` [C, K] are summed log2 decays.
    """
    middles = [total[t.start + TILE // 2 - 1 : t.start + TILE // 2] for t in TILES]
    last = total[CHUNK - 1 :]

    def decay(n):
        sums = total[TILES[n]]
        return Decay(
            jnp.exp2(sums - middles[n]),
            jnp.exp2(middles[n] - sums),
            [jnp.exp2(x - sums) for x in middles[n + 1 :]],
            jnp.exp2(middles[n]) * m.reach[TILES[n]],
            jnp.exp2(last - middles[n]) * m.left[TILES[n]],
        )

    return decay, jnp.exp2(last) * m.keep


def front(tokens, total, m: Masks):
    """`tokens(t)` gives the Tile of slice t; total [C, K] are summed log2 decays. Written tile
    by tile, which keeps few values alive at a time."""
    decay, keep = decays(total, m)
    lhs, cols, read_q, read_k, write = [], [[] for _ in TILES], [], [], []
    for n, t in enumerate(TILES):
        x, d = tokens(t), decay(n)
        b = x.k * x.minus_beta
        rows_q, rows_k, own = x.q * d.row, x.k * d.row, b * d.col
        lhs.append(rounded([rows_q, rows_k]))
        cols[n].append(own)
        for later, across in enumerate(d.across, n + 1):
            cols[later].append(b * across)
        read_q.append(rows_q * d.start)
        read_k.append(rows_k * d.start)
        write.append(own * d.end)
    cols = [rounded(x) for x in cols]
    return Front(lhs, cols, rounded(read_q + read_k), rounded(write), keep)


def pairs(f: Front, m: Masks):
    """P and N [C, C]: decayed products of queries and of keys with earlier b. P in bfloat16, N
    folded, and N's 16x16 diagonal blocks in float32, as `slab`.

    N has its diagonal too, which the inverse never reads: one mask serves both.
    """
    rows_q, rows_k = [], []
    for lhs, cols in zip(f.lhs, f.cols, strict=True):
        a = dot_t(lhs, cols)
        if cols.shape[0] < CHUNK:
            a = jnp.concatenate([a, jnp.zeros((2 * TILE, CHUNK - cols.shape[0]), F32)], 1)
        rows_q.append(a[:TILE])
        rows_k.append(a[TILE:])
    attend, low = (kept(jnp.concatenate(rows, 0), m.seen) for rows in (rows_q, rows_k))
    return unfolded(attend), low, jnp.where(m.near > 0, slab(rows_k), 0)


def slab(tiles):
    """The 16x16 diagonal blocks of a matrix [C, C] side by side, [16, C], from its tiles' rows."""
    block, out = iota((BASE, CHUNK), 1) // BASE, tiles[0][:BASE]
    for b in range(1, CHUNK // BASE):
        tile, start = divmod(b * BASE, TILE)
        out = jnp.where(block == b, tiles[tile][start : start + BASE], out)
    return out


def _diagonals(low, way):
    """[16, 128] <-> its diagonals: row m of the result holds, at lane j, row (j mod 16) + m.

    A barrel shift of rows by the lane's place in its block of 16. What wraps around is zero for a
    lower block, and for the inverse, whose diagonals end where the block does.
    """
    lane = iota(low.shape, 1)
    for s in (1, 2, 4, 8):
        low = jnp.where(lane & s != 0, pltpu.roll(low, s if way > 0 else BASE - s, 0), low)
    return low


def base_inverse(nears, scratch):
    """(I - N)^-1 of the 16x16 diagonal blocks, exactly in float32, [16, 128] per head.

    Forward substitution along diagonals on the vector unit: with n_m[j] = N[j + m, j] and
    x_e[j] = X[j + e, j], x_e = sum_(d < e) n_(e-d)[j + d] x_d. Lanes hold the 8 blocks' columns;
    the heads of `nears` share rows, through `scratch` (a ref [2, heads, 16, 128]).
    """
    n = len(nears)
    for h, near in enumerate(nears):
        scratch[0, h] = _diagonals(near, -1)
    yield
    low_m = [scratch[0, :, m] for m in range(BASE)]
    x = [jnp.ones((n, CHUNK), F32)]
    for e in range(1, BASE):
        acc = low_m[e]
        for d in range(1, e):
            acc = acc + pltpu.roll(low_m[e - d], CHUNK - d, 1) * x[d]
        x.append(acc)
    for e in range(BASE):
        scratch[1, :, e] = x[e]
    yield
    return [_diagonals(scratch[1, h], 1) for h in range(n)]


def inverse(lows, bases):
    """(I - N)^-1, bfloat16 [C, C] per head, from N (folded) and its 16x16 diagonal blocks'
    inverses, by block doubling.

    [[T11, 0], [T22 N21 T11, T22]]; only the rows of every second block are streamed, and T22 comes
    through its product with the identity beside N21 T11. Products also fill blocks further left,
    which the selection drops. Between products all is folded.
    """
    i, j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    height, zero = lows[0].shape[0], jnp.zeros_like(lows[0])
    fold = CHUNK // height
    eye, block = folded((i == j).astype(F32), fold), iota((BASE // fold, CHUNK), 1) // BASE
    invs = []
    for base in bases:
        base = folded(base, fold)
        strips = [jnp.where(block == b, base, 0) for b in range(CHUNK // BASE)]
        invs.append(jnp.concatenate(strips, 0))
    i, j, size = i[:height], j[:height], BASE // fold
    while size < height:
        starts = range(size, height, 2 * size)

        def later(x, starts=starts, size=size):
            return jnp.concatenate([x[s : s + size] for s in starts], 0)

        def spread(x, other, starts=starts, size=size):
            strips = []
            for n, s in enumerate(starts):
                strips += [other[s - size : s], x[n * size : (n + 1) * size]]
            return jnp.concatenate(strips, 0)

        left = later(j) // (fold * size) == later(i) // size - 1
        corner = [dot(unfolded(later(low)), unfolded(x)) for low, x in zip(lows, invs, strict=True)]
        yield
        corner = [spread(jnp.where(left, folded(c, fold), later(eye)), zero) for c in corner]
        rows = [dot(unfolded(later(x)), unfolded(c)) for x, c in zip(invs, corner, strict=True)]
        yield
        invs = [spread(folded(r, fold), x) for r, x in zip(rows, invs, strict=True)]
        size *= 2
    return [unfolded(x) for x in invs]


def column(x):
    """[1, n] -> [n, 1]."""
    return jnp.swapaxes(jnp.broadcast_to(x, (8, x.shape[1])), 0, 1)[:, :1]


def row(column):
    """[n, 1] -> [1, n]."""
    return jnp.swapaxes(jnp.broadcast_to(column, (column.shape[0], 128)), 0, 1)[:1]


class Back(NamedTuple):
    """Gradients of a Front's fields."""

    lhs: list
    cols: list
    read: jax.Array
    write: jax.Array


def front_grad(f: Front, b: Back, tokens, total, m: Masks):
    """For each tile its Tile and the gradients of q, k and b, [R, K]; then the gradients
    of the summed log decays [C, K] and, for the last of them, another [1, K].

    A product over e^(G_i - G_j) gives G the row times the row's gradient at i, and takes the column
    times its gradient at j; both with the factors as rounded for the product, so that pairs which
    do not enclose a token cancel in that token's reverse sum.
    """
    decay, _ = decays(total, m)
    last, out, dsums = 0, [], []
    for n, t in enumerate(TILES):
        d, x = decay(n), tokens(t)
        dlhs_q, dlhs_k = b.lhs[n][:TILE], b.lhs[n][TILE:]
        at_k = slice(CHUNK + t.start, CHUNK + t.stop)
        dread_q, dread_k, dwrite = b.read[t], b.read[at_k], b.write[t]
        dlhs_q, dlhs_k = dlhs_q + d.start * dread_q, dlhs_k + d.start * dread_k
        lhs_q, lhs_k = f.lhs[n][:TILE].astype(F32), f.lhs[n][TILE:].astype(F32)
        own, dwrite = f.cols[n][t].astype(F32), d.end * dwrite
        down = b.cols[n][t] + dwrite
        db, dsum = d.col * down, lhs_q * dlhs_q + lhs_k * dlhs_k - own * down
        for later, across in enumerate(d.across, n + 1):
            db = db + across * b.cols[later][t]
            dsum = dsum - f.cols[later][t].astype(F32) * b.cols[later][t]
        dsums.append(dsum)
        last = last + jnp.sum(own * dwrite, 0, keepdims=True)
        out.append((x, d.row * dlhs_q, d.row * dlhs_k, db))
    return out, jnp.concatenate(dsums, 0), last
