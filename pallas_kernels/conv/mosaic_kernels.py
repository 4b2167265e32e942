"""The short convolution on a TPU: the two kernels, near the rate of their memory traffic.

A bfloat16 register holds 16 tokens of 128 channels, two tokens to a word. A shift and a mask widen
it to one register of the even tokens, E, and one of the odd ones, O; tokens 2i and 2i + 1 need

    y_2i   = a3 E_i + a2 O_i-1 + a1 E_i-1 + a0 O_i-2
    y_2i+1 = a3 O_i + a2 E_i   + a1 O_i-1 + a0 E_i-1

so that three shifted registers serve two results. E and O go to a float32 scratch of 128 lanes,
whose rows follow each other in memory: a load may begin at any row, and nothing is rotated.

Time is the last grid axis, walked in order, and the scratch keeps what the next block needs of the
one before; the backward kernel walks it in reverse. Chunks of 256 tokens where a document begins or
a pad stands mask what they see lag by lag; other chunks do without.

Vector arithmetic binds: 23 operations for two results forward (8 products, 6 sums, 4 for SiLU, the
rest to widen, narrow and tanh's own), 63 backward. Modelled, over the time of the memory traffic
alone, without masks: v6e 1.0 forward and 1.4 backward, v5p 1.1 and 1.5, tpu7x 1.4 and 2.5; with
masks forward 1.6, 2.1 and 2.8.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.conv.reference import TAPS

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
LANES = 128
ROWS = 8  # of a register
CHUNK = 256  # tokens: two for each lane of a row of masks
WORDS = CHUNK // 2
HIGH = -65536  # the upper half of a word: the odd token
HALO = 16  # tokens, the smallest block
# A load waits for the stores before it. So loads are written out for so many registers of words
# together, and results are stored that many registers later.
BATCH = 2
# Rows of masks, for the even and then for the odd tokens: are they real; do they see what stands
# 1, 2, 3 before; does what stands 1, 2, 3 behind see them. The last two are idle.
REAL, BEFORE, BEHIND, MASKS = 0, 2, 8, 16
LOOK_BACK = BEHIND


class Plan(NamedTuple):
    """A block: so many chunks of 256 tokens and groups of 128 channels."""

    chunks: int
    groups: int


def scratch(plan, backward):
    widened = pltpu.VMEM((plan.groups, 2, ROWS + WORDS, LANES), F32)
    words = pltpu.VMEM((WORDS, LANES), I32)
    masks = pltpu.VMEM((MASKS, WORDS, LANES), I32)
    return [masks, words, words, widened, *([words, widened] if backward else [])]


def at(w):
    """Rows of register w."""
    return slice(ROWS * w, ROWS * (w + 1))


def lanes(g):
    return slice(g * LANES, (g + 1) * LANES)


def batches(plan):
    """The registers of a chunk as (group, register), batch by batch."""
    items = [(g, w) for g in range(plan.groups) for w in range(WORDS // ROWS)]
    return [items[i : i + BATCH] for i in range(0, len(items), BATCH)]


def as_float(bits):
    return jax.lax.bitcast_convert_type(bits, F32)


def as_bits(x):
    return jax.lax.bitcast_convert_type(x, I32)


def spread(mask_ref, c, n, masks_ref):
    """The first n rows of a chunk's masks as words of no or all bits, one token's in all lanes."""
    for first in range(0, n, ROWS):
        columns = jnp.swapaxes(mask_ref[0, c, first : first + ROWS], 0, 1)
        for i in range(ROWS):
            bits = jnp.where(columns[:, i : i + 1] > 0, -1, 0)
            masks_ref[first + i] = jnp.broadcast_to(bits, (WORDS, LANES))


def per_chunk(plain_ref, index, run):
    """`run(masked)`, masked or not as the chunk needs."""
    plain = plain_ref[pl.program_id(0), index] == 1
    pl.when(plain)(functools.partial(run, False))
    pl.when(~plain)(functools.partial(run, True))


class Chunk(NamedTuple):
    """Chunk c of a block, and how to read and write it. `zero` is 0, unknown to the compiler."""

    c: int
    masked: bool
    masks_ref: object
    zero: jax.Array

    def keep(self, row, w, x):
        """x, float32 or bits, and in a masked chunk zero where that row of masks says so."""
        if not self.masked:
            return x
        bits = self.masks_ref[row, at(w)]
        return x & bits if x.dtype == I32 else as_float(as_bits(x) & bits)

    def rows(self, w, n=16, part=0):
        start = self.c * CHUNK + 16 * w + n * part
        return slice(start, start + n)

    def widened(self, ref, words_ref, items):
        """[(even, odd)] of each register, bits of float32."""
        # By way of memory: where blocks are tiled by 8 tokens, this becomes one load of 16.
        for g, w in items:
            words_ref[at(w)] = pltpu.bitcast(ref[0, self.rows(w), lanes(g)], I32)
        words = [words_ref[at(w)] for _, w in items]
        return [(x << 16, x & HIGH) for x in words]

    def shifted(self, ref, p, g, row):
        """8 rows of a scratch from any on. The unknown index keeps this one load."""
        return ref[g, p, pl.ds(self.zero + row, ROWS)]

    def put(self, ref, words_ref, items):
        """Registers of words out of their scratch, in halves, which spares splitting them."""
        for g, w in items:
            for part in range(2):
                start = ROWS * w + 4 * part
                half = pltpu.bitcast(words_ref[start : start + 4], BF16)
                ref[0, self.rows(w, 8, part), lanes(g)] = half


def pack(even, odd):
    """Words of both, rounded to bfloat16: one instruction."""
    return pltpu.bitcast(pltpu.pack_elementwise([even, odd], packed_dtype=BF16), I32)


def pack_interpreted(even, odd):
    """The same for the interpreter, which lacks the instruction."""
    low, high = (as_bits(x.astype(BF16).astype(F32)) for x in (even, odd))
    return jax.lax.shift_right_logical(low, I32(16)) | high


def load_taps(taps_ref, g):
    return [jnp.broadcast_to(taps_ref[i : i + 1, lanes(g)], (ROWS, LANES)) for i in range(TAPS)]


def weighted(taps, xs):
    """taps[3] xs[0] + taps[2] xs[1] + ..."""
    parts = [x * a for x, a in zip(xs, reversed(taps), strict=True)]
    return functools.reduce(jnp.add, parts)


def seen_before(chunk, pair, shifted, w):
    """For the even and the odd tokens: what stands 0, 1, 2 and 3 before them."""
    (e, o), (e1, o1, o2) = pair, shifted
    lags = ((e, o1, e1, o2), (o, e, o1, e1))
    return [
        [xs[0], *(chunk.keep(BEFORE + 3 * p + j, w, x) for j, x in enumerate(xs[1:]))]
        for p, xs in enumerate(lags)
    ]


def leave(ref, first, items, pairs):
    """Even and odd tokens into their scratch, the chunk's from register `first` on."""
    for (g, w), pair in zip(items, pairs, strict=True):
        for p in (0, 1):
            ref[g, p, at(w + first)] = pair[p]


def load_before(chunk, x_ref, items):
    """E_i-1, O_i-1 and O_i-2 of each register."""
    reads = ((0, 1), (1, 1), (1, 2))
    return [[chunk.shifted(x_ref, p, g, ROWS * (w + 1) - n) for p, n in reads] for g, w in items]


def load_behind(chunk, d_ref, items):
    """E_i, O_i, E_i+1, O_i+1 and E_i+2 of each register."""
    reads = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2))
    return [[chunk.shifted(d_ref, p, g, ROWS * w + n) for p, n in reads] for g, w in items]


def forward(
    plain_ref, mask_ref, u_ref, taps_ref, history_ref, y_ref, masks_ref, in_ref, out_ref, x_ref,
    *, plan, pack,
):  # fmt: skip
    """x_ref: [group, even or odd, 8 words before the chunk and its own, 128]."""
    t = pl.program_id(2)
    zero = jnp.minimum(t, 0)

    @pl.when(t == 0)
    def _():
        for g in range(plan.groups):
            x_ref[g, :, :ROWS] = history_ref[0, :, :, lanes(g)]

    def enter(chunk, items):
        return [
            [as_float(chunk.keep(REAL + p, w, x)) for p, x in enumerate(pair)]
            for (_, w), pair in zip(items, chunk.widened(u_ref, in_ref, items), strict=True)
        ]

    def run(c, masked):
        chunk = Chunk(c, masked, masks_ref, zero)
        if masked:
            spread(mask_ref, c, LOOK_BACK, masks_ref)
        work, done, taps = batches(plan), [], None
        pairs = enter(chunk, work[0])
        leave(x_ref, 1, work[0], pairs)
        for items, following in zip(work, [*work[1:], []], strict=True):
            nexts = enter(chunk, following)
            shifted = load_before(chunk, x_ref, items)
            leave(x_ref, 1, following, nexts)
            chunk.put(y_ref, out_ref, done)
            for (g, w), pair, more in zip(items, pairs, shifted, strict=True):
                if w == 0:
                    taps = load_taps(taps_ref, g)
                halves = [weighted(taps, xs) for xs in seen_before(chunk, pair, more, w)]
                out_ref[at(w)] = pack(*(h + h * jnp.tanh(h) for h in halves))
            done, pairs = items, nexts
        chunk.put(y_ref, out_ref, done)

    for c in range(plan.chunks):
        per_chunk(plain_ref, t * plan.chunks + c, functools.partial(run, c))
        for g in range(plan.groups):
            x_ref[g, :, :ROWS] = x_ref[g, :, WORDS:]


def backward(
    plain_ref, mask_ref, u_ref, halo_ref, dy_ref, taps_ref, history_ref, du_ref, sums_ref,
    masks_ref, in_ref, out_ref, x_ref, dy_words_ref, d_ref,
    *, plan, pack,
):  # fmt: skip
    """With h half the sum before SiLU and D = dy (1 + tanh h) (1 + h (1 - tanh h)), twice its dy:

        du_t = sum_j a3-j D_t+j        sums of taps 3-j: D_t u_t-j

    for the even and the odd tokens as in the other direction. x_ref as there; d_ref: D of [group,
    even or odd, the chunk's words and 8 of the chunk behind it, 128].
    """
    t, n_t = pl.program_id(2), pl.num_programs(2)
    zero = jnp.minimum(t, 0)

    @pl.when(t == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        for g in range(plan.groups):
            d_ref[g, :, WORDS:] = jnp.zeros((2, ROWS, LANES), F32)

    def halo(c):
        """The words before the chunk. What may not be seen of them is masked where it is read."""
        for g in range(plan.groups):
            rows = slice(c * CHUNK - HALO, c * CHUNK)
            before = u_ref[0, rows, lanes(g)] if c else halo_ref[0, :, lanes(g)]
            word = pltpu.bitcast(before, I32)
            x_ref[g, 0, :ROWS], x_ref[g, 1, :ROWS] = as_float(word << 16), as_float(word & HIGH)

    def enter(chunk, items):
        us = chunk.widened(u_ref, in_ref, items)
        dys = chunk.widened(dy_ref, dy_words_ref, items)
        return [
            [[as_float(chunk.keep(REAL + p, w, x)) for p, x in enumerate(pair)] for pair in both]
            for (_, w), *both in zip(items, us, dys, strict=True)
        ]

    def slopes(halves, dys):
        tanhs = [jnp.tanh(h) for h in halves]
        return [
            dy * ((1 + th) * (1 + h * (1 - th)))
            for h, th, dy in zip(halves, tanhs, dys, strict=True)
        ]

    def make_du(chunk, items, behind):
        for (g, w), (e, o, e1, o1, e2) in zip(items, behind, strict=True):
            lags = ((e, o, e1, o1), (o, e1, o1, e2))
            kept = [
                [xs[0], *(chunk.keep(BEHIND + 3 * p + j, w, x) for j, x in enumerate(xs[1:]))]
                for p, xs in enumerate(lags)
            ]
            taps = load_taps(taps_ref, g)
            out_ref[at(w)] = pack(*(weighted(taps, xs) for xs in kept))

    def run(c, masked):
        chunk = Chunk(c, masked, masks_ref, zero)
        if masked:
            spread(mask_ref, c, MASKS, masks_ref)
        work, done, taps, sums = batches(plan), [], None, None
        now = enter(chunk, work[0])
        leave(x_ref, 1, work[0], [u for u, _ in now])
        # du of a batch is made when D of the next is stored, and itself stored one batch later.
        late = [[], [], *work]
        for items, due, following in zip(
            [*work, [], []], late, [*work[1:], [], [], []], strict=True
        ):
            nexts = enter(chunk, following)
            shifted = load_before(chunk, x_ref, items)
            behind = load_behind(chunk, d_ref, due)
            leave(x_ref, 1, following, [u for u, _ in nexts])
            chunk.put(du_ref, out_ref, done)
            make_du(chunk, due, behind)
            ds = []
            for (g, w), (u, dy), more in zip(items, now, shifted, strict=True):
                if w == 0:
                    taps, sums = load_taps(taps_ref, g), [0.0] * TAPS
                seen = seen_before(chunk, u, more, w)
                d = slopes([weighted(taps, xs) for xs in seen], dy)
                ds.append(d)
                for j in range(TAPS):
                    sums[TAPS - 1 - j] += d[0] * seen[0][j] + d[1] * seen[1][j]
                if w == WORDS // ROWS - 1:
                    for i in range(TAPS):
                        sums_ref[0, at(i), lanes(g)] += sums[i]
            leave(d_ref, 0, items, ds)
            done, now = due, nexts
        chunk.put(du_ref, out_ref, done)

    for c in reversed(range(plan.chunks)):
        halo(c)
        if c == 0:

            @pl.when(t == n_t - 1)
            def _():
                for g in range(plan.groups):
                    x_ref[g, :, :ROWS] = history_ref[0, :, :, lanes(g)]

        index = (n_t - 1 - t) * plan.chunks + c
        per_chunk(plain_ref, index, functools.partial(run, c))
        for g in range(plan.groups):
            d_ref[g, :, WORDS:] = d_ref[g, :, :ROWS]
