"""Chunked KDA on a TPU: the backward kernel."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda import mosaic_chunk as chunk
from pallas_kernels.kda.mosaic_chunk import BF16, CHUNK, F32, TILES
from pallas_kernels.kda.mosaic_forward import (
    LOWEST,
    before_the_state,
    clear_pads,
    lanes,
    values,
    walk,
)


def kernel(mask_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, *rest, plan, raw):
    """One grid step, walking back: `plan.chunks` chunks of `plan.heads` heads.

    dstate_ref carries the gradient of the state; the state before each chunk comes from the forward
    kernel, and all else of the forward pass is made again.
    """
    gates, rest = (rest[:2], rest[2:]) if raw else ((), rest)
    saved_ref, do_ref, dlast_ref, dq_ref, dk_ref, dv_ref, dg_ref, dbeta_ref, *rest = rest
    dgates, (dstate_ref, scratch) = (rest[:2], rest[2:]) if raw else ((), rest)
    refs = (q_ref, k_ref, v_ref, g_ref, *gates)

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate_ref[...] = dlast_ref[...]
        for ref in dgates:
            ref[...] = jnp.zeros_like(ref)

    clear_pads(mask_ref, (*refs[:4], do_ref), (0, 0, 0, LOWEST if raw else 0, 0))

    def group(c, heads, slot, beta, m, done):
        rows = slice(c * CHUNK, (c + 1) * CHUNK)
        totals, tokens, fronts, attends, inverses = yield from before_the_state(
            refs, rows, heads, beta, m, scratch.at[slot], plan, raw
        )
        states = [saved_ref[0, c, h] for h in heads]
        seen = [chunk.dot(f.read[CHUNK:], s) for f, s in zip(fronts, states, strict=True)]
        dos = [do_ref[0, rows, lanes(do_ref, h, plan.heads)].astype(BF16) for h in heads]
        local = [chunk.t_dot(p, do) for p, do in zip(attends, dos, strict=True)]
        yield
        rs = [x - values(v_ref, rows, h, plan.heads) for h, x in zip(heads, seen, strict=True)]
        us = [chunk.dot(t, r).astype(BF16) for t, r in zip(inverses, rs, strict=True)]
        yield
        while c + 1 < plan.chunks and (c + 1, heads[0]) not in done:
            yield
        dafters = [dstate_ref[0, h] for h in heads]
        dus = [x + chunk.dot(f.write, s) for x, f, s in zip(local, fronts, dafters, strict=True)]
        yield
        drs = [chunk.t_dot(t, du) for t, du in zip(inverses, dus, strict=True)]
        yield
        seens = [jnp.concatenate([do, dr.astype(BF16)], 0) for do, dr in zip(dos, drs, strict=True)]
        before = [
            s * chunk.column(f.keep) + chunk.t_dot(f.read, e)
            for s, f, e in zip(dafters, fronts, seens, strict=True)
        ]
        # The states' own part in the whole decays' gradients: here, where both are at hand still.
        kept = [
            f.keep * chunk.row(jnp.sum(s.astype(F32) * d, 1, keepdims=True))
            for f, s, d in zip(fronts, states, dafters, strict=True)
        ]
        for h, s, dr in zip(heads, before, drs, strict=True):
            dstate_ref[0, h] = s
            dv_ref[0, rows, lanes(dv_ref, h, plan.heads)] = (-dr).astype(dv_ref.dtype)
        yield
        backs = []
        for f, s, e, u, dafter in zip(fronts, states, seens, us, dafters, strict=True):
            backs.append(products(f, m, s, e, u, dafter))
            yield
        grads, dsums, dlasts = [], [], []
        for i, (f, back) in enumerate(zip(fronts, backs, strict=True)):
            tiles, dsum, dlast = chunk.front_grad(f, back, tokens[i], totals[i], m)
            grads.append(token_grads(tiles, raw))
            dsums.append(dsum)
            dlasts.append(dlast + kept[i])
        for h, (dq, dk, dbeta) in zip(heads, grads, strict=True):
            dq_ref[0, rows, lanes(dq_ref, h, plan.heads)] = dq.astype(dq_ref.dtype)
            dk_ref[0, rows, lanes(dk_ref, h, plan.heads)] = dk.astype(dk_ref.dtype)
            dbeta_ref[0, 0, rows, h : h + 1] = dbeta
        yield
        dgs = [chunk.running_sums(x, reverse=True) + y for x, y in zip(dsums, dlasts, strict=True)]
        out = [
            decay_grads(dg, refs[3:], rows, h, plan, raw, m)
            for h, dg in zip(heads, dgs, strict=True)
        ]
        for h, (dg, *sums_) in zip(heads, out, strict=True):
            at = lanes(dg_ref, h, plan.heads)
            dg_ref[0, rows, at] = dg.astype(dg_ref.dtype)
            for ref, x in zip(dgates, sums_, strict=True):
                ref[0, :, at] += x

    walk(group, reversed(range(plan.chunks)), mask_ref, beta_ref, plan, raw)


def products(f, m, state, seen, u, dafter):
    """Gradients of a front; `seen` [2C, V] are those of what q and k read, u as in chunk.Front."""
    dpairs = chunk.dot_t(seen, u)
    dattend = chunk.unfolded(chunk.kept(dpairs[:CHUNK], m.seen))
    dlow = chunk.unfolded(chunk.kept(dpairs[CHUNK:], m.sooner))
    dlhs, dcols = [], []
    for t, lhs, cols in zip(TILES, f.lhs, f.cols, strict=True):
        both = jnp.concatenate([dattend[t, : t.stop], dlow[t, : t.stop]], 0)
        dlhs.append(chunk.dot(both, cols))
        dcols.append(chunk.t_dot(both, lhs))
    return chunk.Back(dlhs, dcols, chunk.dot_t(seen, state), chunk.dot_t(u, dafter))


def token_grads(tiles, raw):
    """dq, dk [C, K] and dbeta [C, 1] from a head's tiles."""
    out = []
    for x, dq, dk, db in tiles:
        dbeta = -jnp.sum(db * x.k, 1, keepdims=True)
        dk = dk + x.minus_beta * db
        if raw:
            dbeta = dbeta * -x.minus_beta * (1 + x.minus_beta)
            # Of y = c x / sqrt(sum x^2 + eps): c (dy - y (y . dy) / c^2) / sqrt(sum x^2 + eps).
            along_q = jnp.sum(x.q * dq, 1, keepdims=True) * raw.scale**-2
            along_k = jnp.sum(x.k * dk, 1, keepdims=True)
            dq = x.norm_q * (dq - x.q * along_q)
            dk = x.norm_k * (dk - x.k * along_k)
        out.append((dq, dk, dbeta))
    return [jnp.concatenate(x, 0) for x in zip(*out, strict=True)]


def decay_grads(dg, refs, rows, h, plan, raw, m):
    """From the gradient of the natural-log decay [C, K] to that of what came in; with `raw`, also
    those of rate and bias, [1, K]."""
    if not raw:
        return (dg * m.real,)
    g_ref, rate_ref, bias_ref = refs
    at = lanes(g_ref, h, plan.heads)
    g = values(g_ref, rows, h, plan.heads)
    tanh = jnp.tanh(g * rate_ref[:, at] + bias_ref[:, at])
    dlogit, half = dg * (1 - tanh * tanh), raw.lower_bound / 2
    sums = (half * jnp.sum(x, 0, keepdims=True) for x in (dlogit * g, dlogit))
    return dlogit * (half * rate_ref[:, at]), *sums
