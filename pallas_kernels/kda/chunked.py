"""Kimi Delta Attention in chunks, in plain jnp: what runs where there is no kernel.

Tokens go through in slabs of a few chunks. Inside a slab all that does not need the state is done
for every chunk at once, and only three products per chunk wait for the state before it. The slab
bounds memory at any length; the backward pass keeps the state at each slab's start and nothing
else, and computes the slab again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import algebra
from pallas_kernels.kda.algebra import flat, product, tiles

CHUNK = 64
SLAB = 8  # chunks


class Slab(NamedTuple):
    """The inputs of one slab; docs_XBc are document counters, before_XB those of the state."""

    q_XBHck: jax.Array
    k_XBHck: jax.Array
    v_XBHcv: jax.Array
    g_XBHck: jax.Array
    beta_XBHc: jax.Array
    docs_XBc: jax.Array
    before_XB: jax.Array


class Front(NamedTuple):
    """What a slab's chunks know before they see a state. b = beta k is the key that is written.

    This follows sec. 2.1.1, Eq. 3-4, of the K3 report with beta moved to the written key, so that
    the inverse is of I + L, L_ij = sum_k k_i b_j e^(G_i - G_j), and W and U need not exist.
    Products with the inverse stay in float32: alike keys make its rows nearly cancel.

    With S the state before the chunk:  error = inverse (v - read_k S);  o = read_q S + A error;
    the state after it is  keep S + write^T error.
    """

    decay: algebra.Decay
    qk_XBHRptk: jax.Array
    b_XBHRtk: jax.Array
    reach_XBHRtk: jax.Array  # decay since the state before, 0 where a document began since
    left_XBHRtk: jax.Array  # decay until the state after, 0 where a document begins until then
    mask: jax.Array
    attend_XBHcc: jax.Array
    inverse_XBHcc: jax.Array
    read_XBHik: jax.Array
    write_XBHck: jax.Array
    keep_XBHk: jax.Array


def front(x):
    d = algebra.decay(x.g_XBHck)
    qk = jnp.stack([tiles(x.q_XBHck), tiles(x.k_XBHck)], 4)
    b = tiles(x.beta_XBHc[..., None] * x.k_XBHck)
    last_XB = x.docs_XBc[..., -1]
    reads = tiles((x.docs_XBc == x.before_XB[..., None])[:, :, None, :, None])
    writes = tiles((x.docs_XBc == last_XB[..., None])[:, :, None, :, None])
    keeps = (x.before_XB == last_XB)[:, :, None, None]
    reach, left = jnp.where(reads, d.start[-1], 0), jnp.where(writes, d.end[-1], 0)
    mask = pair_mask(x.docs_XBc)
    pairs = jnp.where(mask, algebra.pairs(qk, b, d), 0)
    attend, low = flat(pairs[..., 0, :, :]), flat(pairs[..., 1, :, :])
    return Front(
        d, qk, b, reach, left, mask, attend, algebra.inverse(low),
        flat(qk * reach[..., None, :, :]), flat(b * left), jnp.where(keeps, d.keep_XBHk, 0),
    )  # fmt: skip


def pair_mask(docs_XBc):
    """[X,B,1,R,p,t,c]: same document, and j <= i for a row of q, j < i for a row of k."""
    c = docs_XBc.shape[-1]
    i_c1, j_c = jnp.arange(c)[:, None], jnp.arange(c)
    same = docs_XBc[..., :, None] == docs_XBc[..., None, :]
    both = (same & (j_c <= i_c1), same & (j_c < i_c1))
    return jnp.stack([tiles(m[:, :, None]) for m in both], 4)


def walk(f, x, state_BHkv):
    """Through the chunks in order: what q reads, the errors, the states before, the last state."""
    like = x.q_XBHck

    def chunk(state_BHkv, x):
        read_BHik, inverse_BHcc, v_BHcv, write_BHck, keep_BHk = x
        seen = product("...ik,...kv->...iv", read_BHik, state_BHkv, like)
        seen_q, seen_k = apart(seen)
        error_BHcv = product("...ij,...jv->...iv", inverse_BHcc, v_BHcv - seen_k, inverse_BHcc)
        after = state_BHkv * keep_BHk[..., None]
        after = after + product("...ck,...cv->...kv", write_BHck, error_BHcv, like)
        return after, (seen_q, error_BHcv, state_BHkv)

    xs = (f.read_XBHik, f.inverse_XBHcc, x.v_XBHcv, f.write_XBHck, f.keep_XBHk)
    state_BHkv, (seen_q, error, before) = jax.lax.scan(chunk, state_BHkv, xs)
    return seen_q, error, before, state_BHkv


def apart(x):
    """[..., R*p*t, v] -> the rows of q and those of k, each [..., c, v]."""
    x = x.reshape(*x.shape[:-2], -1, 2, algebra.TILE, x.shape[-1])
    return (y.reshape(*y.shape[:-3], -1, y.shape[-1]) for y in (x[..., 0, :, :], x[..., 1, :, :]))


def beside(x, y):
    """The inverse of `apart`."""
    x, y = (z.reshape(*z.shape[:-2], -1, algebra.TILE, z.shape[-1]) for z in (x, y))
    both = jnp.stack([x, y], -3)
    return both.reshape(*both.shape[:-4], -1, both.shape[-1])


def slab_forward(x, state_BHkv):
    like, f = x.q_XBHck, front(x)
    seen_q, error, _, state_BHkv = walk(f, x, state_BHkv)
    o = seen_q + product("...ij,...jv->...iv", f.attend_XBHcc, error, like)
    return o.astype(x.v_XBHcv.dtype), state_BHkv


def slab_backward(x, state_BHkv, do_XBHcv, dstate_BHkv):
    """Gradients to q, k, v, g, beta of a slab and to the state before it."""
    like, f = x.q_XBHck, front(x)
    _, error, before, _ = walk(f, x, state_BHkv)
    local = product("...ij,...iv->...jv", f.attend_XBHcc, do_XBHcv, like)

    def chunk(dafter_BHkv, x):
        read_BHik, inverse_BHcc, write_BHck, keep_BHk, local_BHcv, do_BHcv = x
        derror = local_BHcv + product("...ck,...kv->...cv", write_BHck, dafter_BHkv, like)
        dv_BHcv = product("...ij,...iv->...jv", inverse_BHcc, derror, inverse_BHcc)
        dseen = beside(do_BHcv.astype(dv_BHcv.dtype), -dv_BHcv)
        dbefore = dafter_BHkv * keep_BHk[..., None]
        dbefore = dbefore + product("...ik,...iv->...kv", read_BHik, dseen, like)
        return dbefore, (dseen, dv_BHcv, dafter_BHkv)

    xs = (f.read_XBHik, f.inverse_XBHcc, f.write_XBHck, f.keep_XBHk, local, do_XBHcv)
    dstate_BHkv, (dseen, dv, dafter) = jax.lax.scan(chunk, dstate_BHkv, xs, reverse=True)

    dpairs = product("...iv,...jv->...ij", dseen, error, like).reshape(*f.qk_XBHRptk.shape[:-1], -1)
    dread = product("...iv,...kv->...ik", dseen, before, like).reshape(f.qk_XBHRptk.shape)
    dwrite = tiles(product("...cv,...kv->...ck", error, dafter, like))
    dqk, db, dsum = algebra.pairs_grad(
        jnp.where(f.mask, dpairs, 0), f.qk_XBHRptk, f.b_XBHRtk, f.decay
    )

    written = flat(f.b_XBHRtk * f.left_XBHRtk * dwrite)
    dtotal = jnp.sum(written, -2) + f.keep_XBHk * jnp.sum(before * dafter, -1)
    dsum = flat(dsum + jnp.sum(f.qk_XBHRptk * dread, -3) * f.reach_XBHRtk) - written
    dg = algebra.running_sum(dsum, reverse=True) + dtotal[..., None, :]
    db = flat(db + dwrite * f.left_XBHRtk)
    dqk = dqk + dread * f.reach_XBHRtk[..., None, :, :]
    dq, dk = flat(dqk[..., 0, :, :]), flat(dqk[..., 1, :, :]) + db * x.beta_XBHc[..., None]
    dbeta = jnp.sum(db * x.k_XBHck, -1)
    return (*(y.astype(like.dtype) for y in (dq, dk, dv)), dg, dbeta, dstate_BHkv)


def _plan(tokens, docs_BT):
    """The tokens filled up to whole slabs: where each slab starts, and a function start -> Slab.

    Slabs are cut, and put heads first, one at a time: that is faster and needs less memory than to
    lay out all tokens at once.
    """
    t = docs_BT.shape[1]
    chunks = -(-t // CHUNK)
    slabs = -(-chunks // SLAB)
    size = -(-chunks // slabs) * CHUNK
    tokens = [_fill(x, slabs * size) for x in tokens]
    docs_BT = _fill(docs_BT, slabs * size, "edge")
    before_BT = jnp.pad(docs_BT[:, :-1], ((0, 0), (1, 0)))

    def slab(start):
        docs_XBc = _cut(docs_BT[..., None], start, size)[:, :, 0]
        before_XB = _cut(before_BT[..., None], start, size)[:, :, 0, 0]
        return Slab(*(_cut(x, start, size) for x in tokens), docs_XBc, before_XB)

    return slab, jnp.arange(slabs) * size, size


def _fill(x_BTx, t, mode="constant"):
    fill = ((0, 0), (0, t - x_BTx.shape[1])) + ((0, 0),) * (x_BTx.ndim - 2)
    return jnp.pad(x_BTx, fill, mode=mode)


def _cut(x_BTHx, start, size):
    """[B,T,H,...] -> [X,B,H,c,...] for `size` tokens from `start`."""
    x = jax.lax.dynamic_slice_in_dim(x_BTHx, start, size, 1)
    x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 2), (0, 3))


def _join(x_XBHcx):
    """The inverse of `_cut`."""
    x = jnp.moveaxis(x_XBHcx, (0, 3), (1, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _line_up(x_YBnx, t):
    """Slabs one after the other: [slabs,B,n,...] -> [B,t,...]."""
    x = jnp.moveaxis(x_YBnx, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :t]


@jax.custom_vjp
def kda_chunked(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, docs_BT):
    """`kda_reference` in chunks: same arguments, same result, any T.

    Its gradient keeps the arguments and one state per slab.
    """
    return _forward(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, docs_BT)[0]


def _forward(q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, state_BHkv, docs_BT):
    tokens = (q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH)
    slab, starts, _ = _plan(tokens, docs_BT)

    def step(state_BHkv, start):
        o_XBHcv, after_BHkv = slab_forward(slab(start), state_BHkv)
        return after_BHkv, (_join(o_XBHcv), state_BHkv)

    after_BHkv, (o, before_YBHkv) = jax.lax.scan(step, state_BHkv, starts)
    return (_line_up(o, docs_BT.shape[1]), after_BHkv), (*tokens, docs_BT, before_YBHkv)


def _backward(saved, grads):
    *tokens, docs_BT, before_YBHkv = saved
    do_BTHv, dstate_BHkv = grads
    slab, starts, size = _plan(tokens, docs_BT)
    do_BTHv = _fill(do_BTHv, starts.size * size)

    def step(dstate_BHkv, x):
        start, before_BHkv = x
        do_XBHcv = _cut(do_BTHv, start, size)
        *dtokens, dbefore = slab_backward(slab(start), before_BHkv, do_XBHcv, dstate_BHkv)
        return dbefore, [_join(x) for x in dtokens]

    dstate_BHkv, dtokens = jax.lax.scan(step, dstate_BHkv, (starts, before_YBHkv), reverse=True)
    return (*(_line_up(x, docs_BT.shape[1]) for x in dtokens), dstate_BHkv, None)


kda_chunked.defvjp(_forward, _backward)
