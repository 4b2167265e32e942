"""Rows to the ranks whose experts they want, and back; inside `jax.shard_map` over the ranks' axes.

Every rank holds E / R experts (its home experts, contiguous) and rows sorted by expert. All offsets
follow from counts_RE, the rows that each rank has for each expert, which one small gather brings to
every rank: nothing waits for the host, and every shape is static.

    counts_RE = gather_counts(counts_E, axis)
    there, n_dropped = routes(counts_RE, bound, axis)
    y_mL = exchange(x_nL, there, bound, axis)           # sorted by this rank's experts
    x_nL = exchange(y_mL, there.back(), n, axis)        # as the rows stood before

`sharding.balance.plan` makes other routes from the same counts, which give every rank equal work.
"""

import logging
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding.rules import vary

I32 = jnp.int32
IMPLS = ("auto", "ragged", "dense")


class Routes(NamedTuple):
    """What this rank sends to and gets from every rank r: P slices of rows each, int32 [R, P].

    Slice (r, p) sent is the `sent` rows from row `sent_from` here on; they land at row `sent_to` of
    rank r. Slice (r, p) got is the `got` rows from row `got_from` of rank r on; they land at row
    `got_to` here. No two slices land on one row.
    """

    sent_RP: jax.Array
    sent_from_RP: jax.Array
    sent_to_RP: jax.Array
    got_RP: jax.Array
    got_from_RP: jax.Array
    got_to_RP: jax.Array

    def back(self):
        """The way back: every slice returns to where it stood."""
        sent, sent_from, sent_to, got, got_from, got_to = self
        return Routes(got, got_to, got_from, sent, sent_to, sent_from)


def gather_counts(counts_E, axis):
    """counts_RE: the int32 counts of every rank, on every rank.

    axis: the name or names of the ranks' axes, here and below; none, (), is a single rank.
    """
    return jax.lax.all_gather(counts_E.astype(I32), axis).reshape(-1, *counts_E.shape)


def routes(counts_RE, bound, axis):
    """(Routes, n_dropped): every row goes to its expert's home rank.

    counts_RE as `gather_counts` gives it; here each rank's rows are sorted by expert, rows behind
    the last count (pads) go nowhere. A rank gets at most `bound` rows, sorted by its experts and
    for each by source rank: slice p of Routes is its expert p, and got_RP.sum(0) the sizes of its
    groups. R times the rows of a rank is a bound that drops none. Under a smaller one the largest
    groups lose rows until the rest fits, and in a group the ranks that sent most; from these the
    last rows stay behind. n_dropped: the rows that this rank could not send (int32).
    Raises ValueError where E is no multiple of R.
    """
    return routes_of(jax.lax.axis_index(axis), counts_RE, bound)


def routes_of(rank, counts_RE, bound):
    """`routes` of one rank, where no axis is at hand."""
    n_local = local_experts(counts_RE)
    if bound < 1:
        raise ValueError(f"routes: bound must be at least 1 row; got {bound}")
    R = counts_RE.shape[0]
    wanted_RRP = counts_RE.reshape(R, R, n_local)  # source, home, expert
    from_RRP = before(counts_RE, 1).reshape(R, R, n_local)
    room_RP = share_out(wanted_RRP.sum(0), jnp.full(R, bound, I32))
    kept_RRP = jnp.moveaxis(share_out(jnp.moveaxis(wanted_RRP, 0, -1), room_RP), -1, 0)
    group_RP = kept_RRP.sum(0)
    to_RRP = before(group_RP, 1) + before(kept_RRP, 0)
    sent = (kept_RRP[rank], from_RRP[rank], to_RRP[rank])
    got = (kept_RRP[:, rank], from_RRP[:, rank], to_RRP[:, rank])
    return Routes(*sent, *got), counts_RE[rank].sum() - kept_RRP[rank].sum()


def window(there: Routes, low, length):
    """The routes of those rows alone that `there` lands in [low, low + length), at their distance
    from `low`. Windows side by side bring every row once."""

    def cut(n_RP, from_RP, to_RP):
        begin_RP = jnp.clip(to_RP, low, low + length)
        end_RP = jnp.clip(to_RP + n_RP, low, low + length)
        return end_RP - begin_RP, from_RP + begin_RP - to_RP, begin_RP - low

    sent = cut(there.sent_RP, there.sent_from_RP, there.sent_to_RP)
    return Routes(*sent, *cut(there.got_RP, there.got_from_RP, there.got_to_RP))


def local_experts(counts_RE):
    """E / R. Raises ValueError where that is no whole number."""
    if counts_RE.ndim != 2 or counts_RE.dtype != I32:
        raise ValueError(f"counts must be int32 [R, E]; got {counts_RE.dtype} {counts_RE.shape}")
    R, E = counts_RE.shape
    if E % R or not E:
        raise ValueError(f"{E} experts over {R} ranks: E must be a positive multiple of R")
    return E // R


def before(x, axis):
    """The sum of what comes before each element along `axis`."""
    return jnp.cumsum(x, axis, dtype=x.dtype) - x


def share_out(wanted, room):
    """min(wanted, level), the level as high as the sum over the last axis fits `room`; integers.

    The k - i largest are cut to one level where the i smallest leave (room - their sum) for them:
    the sum under a level is the least over i of such bounds, so the level is the largest over i.
    """
    k = wanted.shape[-1]
    left = room[..., None] - before(jnp.sort(wanted, -1), -1)
    level = jnp.max(left // (k - jnp.arange(k, dtype=wanted.dtype)), -1, keepdims=True)
    fits = wanted.sum(-1, keepdims=True) <= room[..., None]
    return jnp.where(fits, wanted, jnp.minimum(wanted, level))


def exchange(x_nL, there: Routes, n_rows, axis, *, impl="auto"):
    """y_mL, m = n_rows: the rows that `there` brings to this rank; rows that none reaches are 0.

    Differentiable in x: the gradient goes back the same way, and rows that were not sent get 0.
    `there` must send no row twice. x may have any trailing shape and dtype.
    impl: "ragged" is `jax.lax.ragged_all_to_all`, which moves only the rows sent; "dense" gathers
    the rows of all ranks and picks. "auto" is "dense" on CPU, where XLA has no ragged exchange
    (T20), and "ragged" elsewhere; it logs what it chose once.
    Raises ValueError for another impl.
    """
    axis, impl = as_tuple(axis), chosen(impl)
    x_nL = vary_with(x_nL, axis, there)
    return _exchange(x_nL, there, x_nL.shape[0], n_rows, axis, impl)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _exchange(x_nL, there, n_from, n_rows, axis, impl):
    return move(x_nL, there, n_rows, axis, impl)


def _exchange_fwd(x_nL, there, n_from, n_rows, axis, impl):
    return move(x_nL, there, n_rows, axis, impl), there


def _exchange_bwd(n_from, n_rows, axis, impl, there, dy_mL):
    # Ours, where `ragged_all_to_all` has a rule: that one fetches by two more collectives the
    # offsets that Routes already holds.
    return move(dy_mL, there.back(), n_from, axis, impl), None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


def move(x_nL, there, n_rows, axis, impl):
    """`exchange` without a gradient; a row may be sent to many ranks."""
    # A single rank has no axis that a collective could name.
    transport = _ragged if impl == "ragged" and axis else _dense
    return transport(x_nL, there, n_rows, axis)


def _ragged(x_nL, there, n_rows, axis):
    y_mL = jnp.zeros((n_rows, *x_nL.shape[1:]), x_nL.dtype)
    y_mL = vary_with(y_mL, (), x_nL)
    # An empty slice may stand anywhere: row 0 is inside every array.
    starts = [
        jnp.where(there.sent_RP > 0, start_RP, 0).reshape(-1)
        for start_RP in (there.sent_from_RP, there.sent_to_RP)
    ]
    sent, got = there.sent_RP.reshape(-1), there.got_RP.reshape(-1)
    return jax.lax.ragged_all_to_all(
        x_nL, y_mL, starts[0], sent, starts[1], got, axis_name=axis
    )  # fmt: skip


def _dense(x_nL, there, n_rows, axis):
    n = x_nL.shape[0]
    all_rows = jax.lax.all_gather(x_nL, axis, tiled=True)
    R, P = there.got_RP.shape
    rank_X = jnp.repeat(jnp.arange(R, dtype=I32), P)
    size_X, start_X = there.got_RP.reshape(-1), there.got_to_RP.reshape(-1)
    # Slices in the order in which they land; empty ones behind all rows.
    order_X = jnp.argsort(jnp.where(size_X > 0, start_X, n_rows))
    landing_X = jnp.where(size_X > 0, start_X, n_rows)[order_X]
    row_m = jnp.arange(n_rows, dtype=I32)
    slice_m = order_X[jnp.searchsorted(landing_X, row_m, side="right") - 1]
    inside_m = row_m - start_X[slice_m]
    from_m = rank_X[slice_m] * n + there.got_from_RP.reshape(-1)[slice_m] + inside_m
    came_m = (inside_m >= 0) & (inside_m < size_X[slice_m])
    y_mL = all_rows[jnp.where(came_m, from_m, 0)]
    return jnp.where(came_m.reshape(-1, *(1,) * (x_nL.ndim - 1)), y_mL, jnp.zeros((), x_nL.dtype))


def vary_with(x, axis, others):
    """x marked as varying over `axis` and every axis that an array in `others` varies over."""
    over = set(axis).union(
        *(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(others))
    )
    return vary(x, over)


def as_tuple(axis):
    """The names of one or more mesh axes as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def chosen(impl):
    """ "ragged" or "dense"."""
    if impl not in IMPLS:
        raise ValueError(f"exchange: impl={impl!r} is not one of {IMPLS}")
    # The mesh may be of described devices, which are not here.
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device else jax.default_backend()
    return _auto(platform) if impl == "auto" else impl


@cache
def _auto(platform):
    impl = "dense" if platform == "cpu" else "ragged"
    logging.getLogger(__name__).info("exchange of experts' rows on %s: %s", platform, impl)
    return impl
