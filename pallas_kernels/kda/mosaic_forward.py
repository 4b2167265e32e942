"""Chunked KDA on a TPU: the forward kernel."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda import mosaic_chunk as chunk
from pallas_kernels.kda.gate import NORM_EPS
from pallas_kernels.kda.mosaic_chunk import BF16, CHUNK, F32, LOG2E

# A pad's projected decay: after the sigmoid it is exactly no decay. Finite in bfloat16.
LOWEST = -3e38


class Raw(NamedTuple):
    """That q, k, decay and beta come as projected, and what makes them. Report, Eq. 5."""

    lower_bound: float
    scale: float


class Plan(NamedTuple):
    """How a kernel walks: `heads` and `chunks` per grid step, written in groups of `group` heads,
    the next group begun `lag` rounds after the one before. `roots` says when the norms of q and k
    are made: "early", a phase before they are used; "shared", early and in one register; "late".
    `fold` is that of `chunk.folded`.
    """

    heads: int
    chunks: int
    group: int
    lag: int
    roots: str = "early"
    fold: int = 2


def lanes(ref, h, heads):
    """The lanes of head h."""
    width = ref.shape[-1] // heads
    return slice(h * width, (h + 1) * width)


def values(ref, rows, h, heads):
    """Those rows of head h, in float32."""
    return ref[0, rows, lanes(ref, h, heads)].astype(F32)


def minus_betas(ref, rows, raw):
    """[C, heads]"""
    beta = ref[0, 0, rows]
    return -0.5 - 0.5 * jnp.tanh(0.5 * beta) if raw else -beta


def decays(refs, rows, h, heads, raw):
    """Log2 decays of a head's chunk from the refs of g, rate and bias."""
    g_ref, *gates = refs
    g = values(g_ref, rows, h, heads)
    if not raw:
        return g * LOG2E
    rate, bias = (ref[:, lanes(ref, h, heads)] for ref in gates)
    # sigmoid(x) = (1 + tanh(x / 2)) / 2; the caller halves rate and bias.
    half = raw.lower_bound * LOG2E / 2
    return half + half * jnp.tanh(g * rate + bias)


def inverse_norms(*xs):
    """1 / |row| of each x [n, K], [n, 1]."""
    return [jax.lax.rsqrt(jnp.sum(x * x, 1, keepdims=True) + NORM_EPS) for x in xs]


def shared_norms(*xs):
    """The same for x [C, K], as a function from (number of x, slice of rows) to its norms.

    A square root is some eight operations on a whole register, of which a column of sums fills one
    lane: here lane i of one register holds eight rows' sums. Moving them there takes the other
    unit's time instead, and so does taking them out, which is left to when they are used.
    """
    lane, shared, per_x = chunk.iota((8, 128), 1), jnp.ones((8, 128), F32), CHUNK // 8
    for n, x in enumerate(xs):
        sums = jnp.sum(x * x, 1, keepdims=True)
        for i in range(per_x):
            shared = jnp.where(lane == n * per_x + i, sums[8 * i : 8 * i + 8], shared)
    roots = jax.lax.rsqrt(shared + NORM_EPS)

    def norm(n, t):
        at = range(n * per_x + t.start // 8, n * per_x + t.stop // 8)
        return jnp.concatenate([roots[:, i : i + 1] for i in at], 0)

    return norm


def early_norms(refs, rows, heads, plan, raw):
    """For each head a function as `shared_norms` returns; None where none are made yet."""
    if not raw or plan.roots == "late":
        return [None for _ in heads]
    xs = [[values(ref, rows, h, plan.heads) for ref in refs] for h in heads]
    if plan.roots == "shared":
        return [shared_norms(*x) for x in xs]
    made = [inverse_norms(*x) for x in xs]
    return [lambda n, t, norms=norms: norms[n][t] for norms in made]


def load(refs, rows, h, heads, minus_beta, norms, raw):
    """A function from a slice of the chunk's rows to its Tile, from the refs of q and k."""

    @functools.cache
    def tile(t):
        at = slice(rows.start + t.start, rows.start + t.stop)
        q, k = (values(ref, at, h, heads) for ref in refs)
        if not raw:
            return chunk.Tile(q, k, minus_beta[t, h : h + 1])
        norm_q, norm_k = inverse_norms(q, k) if norms is None else (norms(0, t), norms(1, t))
        norm_q = norm_q * raw.scale
        return chunk.Tile(q * norm_q, k * norm_k, minus_beta[t, h : h + 1], norm_q, norm_k)

    return tile


def has_pads(mask_ref):
    """Whether a block has pads: one number, as a reduction over tokens takes 130 cycles a step."""
    whole = [mask_ref[0, c, 5:6, 0:1] for c in range(mask_ref.shape[1])]
    return functools.reduce(jnp.minimum, whole)[0, 0] < 1


def clear_pads(mask_ref, refs, fills):
    """Rows of pads become `fill`, in the blocks that have any: they may hold anything, NaN too."""

    @pl.when(has_pads(mask_ref))
    def _():
        for c in range(mask_ref.shape[1]):
            rows = slice(c * CHUNK, (c + 1) * CHUNK)
            real = jnp.swapaxes(mask_ref[0, c], 0, 1)[:, 4:5] > 0
            for ref, fill in zip(refs, fills, strict=True):
                ref[0, rows] = jnp.where(real, ref[0, rows], jnp.asarray(fill, ref.dtype))


def stagger(work, lag):
    """Run generators (key, make) side by side, each begun `lag` rounds after the one before it.

    `make(done)` gets the set of the keys of those that have ended.
    """
    work, live, done, turn = list(work), [], set(), 0
    while work or live:
        if work and turn % lag == 0:
            key, make = work.pop(0)
            live.append((key, make(done)))
        # The newest first: they load, the oldest store, and a load waits for all stores before it.
        for key, generator in reversed(list(live)):
            try:
                next(generator)
            except StopIteration:
                done.add(key)
                live.remove((key, generator))
        turn += 1


def walk(group, chunks, mask_ref, beta_ref, plan, raw):
    """Write out `group(c, heads, slot, beta, masks, done)` for each chunk, in this order, and each
    group of heads; `slot` numbers them and `done` holds the (c, first head) that have ended."""
    work = []
    for c in chunks:
        rows = slice(c * CHUNK, (c + 1) * CHUNK)
        m, beta = chunk.masks(mask_ref[0, c], plan.fold), minus_betas(beta_ref, rows, raw)
        for i, first in enumerate(range(0, plan.heads, plan.group)):
            heads = range(first, first + plan.group)
            slot = c * (plan.heads // plan.group) + i

            def make(done, c=c, heads=heads, slot=slot, beta=beta, m=m):
                return group(c, heads, slot, beta, m, done)

            work.append(((c, first), make))
    stagger(work, plan.lag)


def before_the_state(refs, rows, heads, beta, m, scratch, plan, raw):
    """The part of a group that needs no state, and that both kernels begin with.

    `refs` of q, k, v, g, rate and bias. Returns a list over heads of each: summed log2 decays, the
    functions that give tiles, fronts, P and (I - N)^-1.
    """
    norms = early_norms(refs[:2], rows, heads, plan, raw)
    totals = [chunk.running_sums(decays(refs[3:], rows, h, plan.heads, raw)) for h in heads]
    yield
    tokens = [
        load(refs[:2], rows, h, plan.heads, beta, n, raw) for h, n in zip(heads, norms, strict=True)
    ]
    fronts = []
    for x, total in zip(tokens, totals, strict=True):
        fronts.append(chunk.front(x, total, m))
        yield
    both = [chunk.pairs(f, m) for f in fronts]
    attends, lows, nears = (list(x) for x in zip(*both, strict=True))
    yield
    bases = yield from chunk.base_inverse(nears, scratch)
    inverses = yield from chunk.inverse(lows, bases)
    return totals, tokens, fronts, attends, inverses


def kernel(mask_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, *rest, plan, raw, saves):
    """One grid step: `plan.chunks` chunks of `plan.heads` heads; time is the last grid axis."""
    gates, rest = (rest[:2], rest[2:]) if raw else ((), rest)
    start_ref, o_ref, state_ref, *saved_ref, scratch = rest
    refs = (q_ref, k_ref, v_ref, g_ref, *gates)

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = start_ref[...]

    clear_pads(mask_ref, refs[:4], (0, 0, 0, LOWEST if raw else 0))

    def group(c, heads, slot, beta, m, done):
        rows = slice(c * CHUNK, (c + 1) * CHUNK)
        _, _, fronts, attends, inverses = yield from before_the_state(
            refs, rows, heads, beta, m, scratch.at[slot], plan, raw
        )
        while c and (c - 1, heads[0]) not in done:
            yield
        states = [state_ref[0, h] for h in heads]
        if saves:
            for h, s in zip(heads, states, strict=True):
                saved_ref[0][0, c, h] = s.astype(BF16)
        seen = [chunk.dot(f.read, s) for f, s in zip(fronts, states, strict=True)]
        yield
        rs = [
            x[CHUNK:] - values(v_ref, rows, h, plan.heads) for h, x in zip(heads, seen, strict=True)
        ]
        us = [chunk.dot(t, r).astype(BF16) for t, r in zip(inverses, rs, strict=True)]
        yield
        os = [x[:CHUNK] + chunk.dot(p, u) for x, p, u in zip(seen, attends, us, strict=True)]
        after = [
            s * chunk.column(f.keep) + chunk.t_dot(f.write, u)
            for s, f, u in zip(states, fronts, us, strict=True)
        ]
        for h, o, s in zip(heads, os, after, strict=True):
            o_ref[0, rows, lanes(o_ref, h, plan.heads)] = o.astype(o_ref.dtype)
            state_ref[0, h] = s

    walk(group, range(plan.chunks), mask_ref, beta_ref, plan, raw)
