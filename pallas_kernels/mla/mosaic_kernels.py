"""Causal attention with segments on a TPU: the bodies of the forward and the backward kernel.

Both go through pairs of a block of queries and a block of keys, which `mosaic.pairs` lists, for a
few heads at a time. A pair is cut along the queries into tiles, and the first products of one tile
are written before the exponentials of the tile before: the compiler keeps the order of products, so
only thus have the matrix and the vector units work at the same time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

F32 = jnp.float32
LANES = 128
LOG2E = float(np.log2(np.e))
# Of a hidden pair, and of a query that sees nothing the log-sum: exp2(LEAST - x) is 0, never NaN.
LEAST = float(jnp.finfo(F32).min)
# What a step of the list of pairs is. In an OPEN pair each query sees each key; in a DIAGONAL one
# both blocks are at the same positions. FIRST and LAST of its block of queries (backward: of keys);
# BEGIN and END of the list, which a kernel sees by itself.
OPEN, DIAGONAL, MASKED, FIRST, LAST, BEGIN, END = (1 << n for n in range(7))
KINDS = 5  # bits of the kinds that a list says
BITS = 13  # of a block's number


def unpacked(code):
    """A step's block of queries, block of keys and what it is."""
    return code >> (BITS + KINDS), (code >> KINDS) & (2**BITS - 1), code & (2**KINDS - 1)


def packed(i, j, kind):
    return (i << (BITS + KINDS)) | (j << KINDS) | kind


def dot(x, y, over):
    """x.y over the axes `over`, of each one, with float32 sums; float32 is not rounded."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == F32 else None
    return jax.lax.dot_general(
        x, y, (((over[0],), (over[1],)), ((), ())),
        precision=precision, preferred_element_type=F32,
    )  # fmt: skip


def when(kind, what):
    """A decorator of what is done in such steps alone."""
    return pl.when((kind & what) != 0)


def by_kind(kind, heads, plan, begin, end):
    """begin(head, queries, keys, masked) of each tile of a pair, and end(head, queries, keys, what
    begin made) a tile behind."""

    def run(pair):
        begun = None
        for h in range(heads):
            for start in range(0, plan.rows, plan.tile):
                t = slice(start, start + plan.tile)
                s = slice(0, t.stop if pair == DIAGONAL else plan.keys)
                made = begin(h, t, s, pair != OPEN)
                if begun:
                    end(*begun)
                begun = h, t, s, made
        end(*begun)

    for pair in (OPEN, DIAGONAL, MASKED):
        when(kind, pair)(functools.partial(run, pair))


def column(x_1N):
    """[1,N] -> [N,1]"""
    return jnp.broadcast_to(x_1N, (LANES, x_1N.shape[1])).T[:, :1]


def visible(x, at, segments_1T, segments_1S, axis):
    """x where the query may see the key, else LEAST; queries lie along `axis`, keys the other way.

    at: the positions of the first query and of the first key.
    """
    shapes, lay = ((x.shape[0], 1), (1, x.shape[1])), (column, lambda ids: ids)
    query, key = (
        start + jax.lax.broadcasted_iota(jnp.int32, shapes[a], a)
        for start, a in zip(at, (axis, 1 - axis), strict=True)
    )
    same = lay[axis](segments_1T) == lay[1 - axis](segments_1S)
    return jnp.where(same & (key <= query), x, LEAST)


def as_wide(x_N, width):
    """[N,LANES], of the same number along the lanes -> [N,width]"""
    return jnp.tile(x_N, (1, -(-width // LANES)))[:, :width]


def forward(
    pairs_ref, first_ref, q_ref, k_ref, v_ref, segments_ref, key_segments_ref,
    o_ref, lse_ref, top_ref, most_ref, total_ref, sum_ref, *, plan,
):  # fmt: skip
    """o, and of each query log2 sum exp and the largest of its logits.

    The running maximum lies in all lanes of most_ref; total_ref keeps the sum of exponentials in
    parts, one for each lane, so that they are added up across lanes once for a block of queries.
    """
    b, n = pl.program_id(0), pl.program_id(2)
    i, j, kind = unpacked(pairs_ref[b, n])
    to_log2 = plan.scale * LOG2E
    v_width = v_ref.shape[2]

    @when(kind, FIRST)
    def _():
        most_ref[...] = jnp.full(most_ref.shape, LEAST, F32)
        total_ref[...] = jnp.zeros(total_ref.shape, F32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, F32)

    def scores(h, t, s, masked):
        x = dot(q_ref[h, t], k_ref[h, s], (1, 1))
        if masked:
            at = first_ref[b] + i * plan.rows + t.start, j * plan.keys
            x = visible(x, at, segments_ref[:, t], key_segments_ref[:, s], 0)
        return x

    def add(h, t, s, x):
        before = most_ref[h, t]
        most = jnp.maximum(before, jnp.max(x, axis=1, keepdims=True))
        most_ref[h, t] = most
        shrink = jnp.exp2((before - most) * to_log2)
        p = jnp.exp2((x - as_wide(most, x.shape[1])) * to_log2)
        parts = sum(p[:, n : n + LANES] for n in range(0, p.shape[1], LANES))
        total_ref[h, t] = total_ref[h, t] * shrink + parts
        o = dot(p.astype(v_ref.dtype), v_ref[h, s], (1, 0))
        sum_ref[h, t] = sum_ref[h, t] * as_wide(shrink, v_width) + o

    by_kind(kind, q_ref.shape[0], plan, scores, add)

    @when(kind, LAST)
    def _():
        for h in range(q_ref.shape[0]):
            total = jnp.sum(total_ref[h], axis=1, keepdims=True)
            o_ref[h] = (sum_ref[h] / total).astype(o_ref.dtype)
            lane = jax.lax.broadcasted_iota(jnp.int32, most_ref.shape[1:], 1)
            turned = jnp.where(lane == 0, most_ref[h], total).T
            most, total = turned[0:1], turned[1:2]
            # For a query that sees nothing exp2(logit - lse) must be 0, and is with this.
            lse_ref[h] = jnp.where(most == LEAST, -LEAST, most * to_log2 + jnp.log2(total))
            top_ref[h] = jnp.where(most == LEAST, LEAST, most * plan.scale)


def backward(
    pairs_ref, first_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, inner_ref, segments_ref,
    key_segments_ref, dq_ref, dk_ref, dv_ref, dq_qT_ref, k_qs_ref, dk_sum_ref, dv_sum_ref, *, plan,
):  # fmt: skip
    """Gradients of q, k and v; the list goes block of keys by block of keys.

    inner is sum_v do o of each query. Scores lie with keys on rows, so that what belongs to a
    query lies along lanes, and p and ds are the left operands of dv = p^T do and dk = ds^T q. The
    third product, dq, is made transposed, dq^T = k^T ds^T, and stays in VMEM for all queries until
    the last step.
    """
    b, n, steps = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
    i, j, kind = unpacked(pairs_ref[b, n])
    kind = kind + jnp.where(n == 0, BEGIN, 0) + jnp.where(n == steps - 1, END, 0)
    to_log2 = plan.scale * LOG2E

    @when(kind, BEGIN)
    def _():
        dq_qT_ref[...] = jnp.zeros(dq_qT_ref.shape, F32)

    @when(kind, FIRST)
    def _():
        for h in range(k_ref.shape[0]):
            k_qs_ref[h] = k_ref[h].T
        dk_sum_ref[...] = jnp.zeros(dk_sum_ref.shape, F32)
        dv_sum_ref[...] = jnp.zeros(dv_sum_ref.shape, F32)

    def products(h, t, s, masked):
        x_st = dot(k_ref[h, s], q_ref[h, t], (1, 1))
        if masked:
            at = first_ref[b] + i * plan.rows + t.start, j * plan.keys
            x_st = visible(x_st, at, segments_ref[:, t], key_segments_ref[:, s], 1)
        return x_st, dot(v_ref[h, s], do_ref[h, t], (1, 1))

    def add(h, t, s, made):
        x_st, dp_st = made
        p_st = jnp.exp2(x_st * to_log2 - lse_ref[h, :, t])
        ds_st = p_st * (dp_st - inner_ref[h, :, t])
        p_st, ds_st = p_st.astype(do_ref.dtype), ds_st.astype(q_ref.dtype)
        dv_sum_ref[h, s] += dot(p_st, do_ref[h, t], (1, 0))
        dk_sum_ref[h, s] += dot(ds_st, q_ref[h, t], (1, 0))
        at = pl.multiple_of(i * plan.rows, plan.rows) + t.start
        dq_qT_ref[h, :, pl.ds(at, t.stop - t.start)] += dot(k_qs_ref[h, :, s], ds_st, (1, 0))

    by_kind(kind, q_ref.shape[0], plan, products, add)

    @when(kind, LAST)
    def _():
        dk_ref[...] = (dk_sum_ref[...] * plan.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)

    @when(kind, END)
    def _():
        for h in range(dq_ref.shape[0]):
            for t in range(0, dq_ref.shape[1], plan.rows):
                at = slice(t, t + plan.rows)
                dq_ref[h, at] = (dq_qT_ref[h, :, at].T * plan.scale).astype(dq_ref.dtype)
