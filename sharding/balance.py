"""Balanced expert parallelism: every rank computes equally many rows, whatever the router does.

The report's MoonEP (section 5.2 and appendix E). Each rank has E / R spare slots for copies of
experts whose home is elsewhere. From counts_RE, which every rank has, every rank makes the same
plan in the graph: which rank copies which experts, and who computes which rows.

    counts_RE = gather_counts(counts_E, axis)
    p = plan(counts_RE, axis)
    y_mL = exchange(x_nL, p.there, n, axis)               # m = n suffices: the fair share
    spare_eLF = prefetch(w_eLF, p.copies, axis)
    # group k of y is p.sizes_P[k] rows of expert k of [w_eLF, spare_eLF]
    x_nL = exchange(y_mL, p.there.back(), n, axis)

**Filling.** The rows for a rank's home experts are its load, the fair share c is the mean load,
rounded up. While a rank o has more than c rows, o fills one rank u that has less: u gets exactly
what it lacks. That may leave o with less than c; o then waits to be filled like any other.

*It ends, and no rank is over c.* The lacking ranks stand in a line, the rich ones (load > c) in
another. The first rich rank fills lacking ranks in turn until it has c or less; if less, the next
rich rank first fills it, then goes on along the line. A fill takes less than c from a rank that
has more than c, so there is always enough, and it finishes one rank: at most R fills. As c is at
least the mean, what the rich have over c never exceeds what the others lack; so when the line of
rich ranks ends, every one of them is at c. Without pads both are equal, and every rank has c.

*One source per rank.* A rank is filled once, by one rank. All its remote rows are for the E / R
home experts of that rank, so E / R spare slots suffice: spare slot k is for that rank's expert k.

*In prefix sums.* Let D_i be what the first i ranks lack together and X_j what the first j have over
c. When rank i is next in line, the ranks before it took D_(i-1); the rich rank at work is then the
first j with X_j > D_(i-1). Rich rank j stops with c - (D_i - X_j) rows, i being the first with
D_i >= X_j, and the next rich rank restores those D_i - X_j. No loop, no sort: two cumulative sums
over R, then clips. A plan costs two cumulative sums over R E counts and some 30 operations on
2 E slices; at E = 896, R = 64 these are 57,344 and 1,792 integers, modelled 0.12 ms on a v5p.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding.exchange import (
    I32,
    Routes,
    as_tuple,
    before,
    chosen,
    local_experts,
    move,
    vary_with,
)

# What compiled programs call the exchange of weights and of their gradients.
LENT = "lent_experts"


class Fills(NamedTuple):
    """Who fills whom, for every rank: rank d gets `amount` rows of those of rank `source`.

    They are rows [start, start + amount) of the source's, sorted by expert and then by the rank
    that they come from; a rank's first `keep` rows stay with it. No amount: source is d itself.
    """

    source_R: jax.Array
    amount_R: jax.Array
    start_R: jax.Array
    keep_R: jax.Array


class Copies(NamedTuple):
    """Which experts' weights go where: their home experts [low, low + length) to these ranks.

    there: one slice per rank, whose rows are experts. home: the way of the gradients back, which
    lands them in one line, as several ranks may copy one expert. line_X is the home expert of each
    place in that line, E / R where nothing lands.
    """

    there: Routes
    home: Routes
    line_X: jax.Array


class Plan(NamedTuple):
    """How one rank takes part.

    there: the way of its rows; slice p is slot p, of which the first E / R are its home experts and
    the rest its spare slots. sizes_P: the rows that it computes in each of them (int32).
    spare_RS: the expert in each spare slot of each rank, -1 where it computes no row.
    """

    there: Routes
    sizes_P: jax.Array
    copies: Copies
    spare_RS: jax.Array


class Traffic(NamedTuple):
    """What every rank computes, and what crosses between ranks; in rows and in experts (int32)."""

    computed_R: jax.Array
    rows_out_R: jax.Array
    rows_in_R: jax.Array
    experts_out_R: jax.Array
    experts_in_R: jax.Array


def plan(counts_RE, axis, capacity=None):
    """The Plan of this rank, from the counts of all; rows are sorted by expert, pads behind.

    capacity: the most rows that a rank shall compute, the fair share if None. More of it than
    that moves fewer experts; less is raised to it. If no rank has more than n rows, no share is
    above n. Raises ValueError where E is no multiple of R.
    """
    return plan_of(jax.lax.axis_index(axis), counts_RE, capacity)


def plan_of(rank, counts_RE, capacity=None):
    """`plan` of one rank, where no axis is at hand."""
    n_local = local_experts(counts_RE)
    R = counts_RE.shape[0]
    split = (R, R, n_local)  # source, home, expert
    counts_RRP, from_RRP = counts_RE.reshape(split), before(counts_RE, 1).reshape(split)
    earlier_RRP = before(counts_RE, 0).reshape(split)
    total_RP = counts_RRP.sum(0)
    first_RP = before(total_RP, 1)
    f = fill(total_RP.sum(1), capacity)

    def slots(x_RP):
        """What the slots of each rank hold, from what the experts of each rank hold."""
        return jnp.concatenate([x_RP, x_RP[f.source_R]], -1)

    def own_slots(x_RRP):
        return jnp.concatenate([x_RRP[:, rank], x_RRP[:, f.source_R[rank]]], -1)

    def per_slot(home_R, spare_R):
        return jnp.repeat(jnp.stack([home_R, spare_R], -1), n_local, -1)

    # Places count along the rows of a home rank; a slot takes those in [low, high).
    low_RP = per_slot(jnp.zeros(R, I32), f.start_R)
    high_RP = per_slot(f.keep_R, f.start_R + f.amount_R)
    first_RP, last_RP = slots(first_RP), slots(first_RP + total_RP)
    skipped_RP = jnp.clip(first_RP, low_RP, high_RP)
    size_RP = jnp.clip(last_RP, low_RP, high_RP) - skipped_RP
    to_RP = before(size_RP, 1) - skipped_RP

    def cut(count, row, earlier, slot):
        """Rows, first row at the source, first row at the computing rank, of slices."""
        low, high, first, to = slot
        begin = first + earlier
        place = jnp.clip(begin, low, high)
        return jnp.clip(begin + count, low, high) - place, row + place - begin, to + place

    slot_RP = (low_RP, high_RP, first_RP, to_RP)
    sides = (counts_RRP, from_RRP, earlier_RRP)
    sent = cut(*(slots(x[rank]) for x in sides), slot_RP)
    got = cut(*(own_slots(x) for x in sides), [x[rank] for x in slot_RP])
    used_RS = size_RP[:, n_local:] > 0
    expert_RS = f.source_R[:, None] * n_local + jnp.arange(n_local, dtype=I32)
    return Plan(
        Routes(*sent, *got),
        size_RP[rank],
        _copies(rank, f.source_R, used_RS),
        jnp.where(used_RS, expert_RS, -1),
    )


def fill(load_R, capacity=None):
    """The Fills that bring every load to at most the fair share, or `capacity` if that is more."""
    R = load_R.shape[0]
    fair = -(-load_R.sum() // R)
    fair = fair if capacity is None else jnp.maximum(fair, capacity)
    over_R = jnp.cumsum(jnp.maximum(load_R - fair, 0))
    # What lies beyond all that the rich can give is not filled.
    under_R = jnp.minimum(jnp.cumsum(jnp.maximum(fair - load_R, 0)), over_R[-1])
    find = partial(jnp.searchsorted, method="compare_all")
    begin_R = jnp.concatenate([jnp.zeros(1, I32), under_R[:-1]])
    restored_R = under_R[find(under_R, over_R)] - over_R
    is_rich_R = load_R > fair
    amount_R = jnp.where(is_rich_R, restored_R, under_R - begin_R)
    rank_R = jnp.arange(R, dtype=I32)
    source_R = find(over_R, jnp.where(is_rich_R, over_R, begin_R), side="right").astype(I32)
    source_R = jnp.where(amount_R > 0, source_R, rank_R)
    keep_R = load_R - jnp.where(source_R == rank_R[:, None], amount_R, 0).sum(1)
    start_R = keep_R[source_R] + before_of_source(source_R, amount_R)
    return Fills(source_R, amount_R, start_R, keep_R)


def before_of_source(source_R, x_R):
    """For every rank the sum of x over the ranks before it that the same source fills."""
    rank_R = jnp.arange(len(source_R), dtype=I32)
    is_earlier_RR = (source_R == source_R[:, None]) & (rank_R < rank_R[:, None])
    return jnp.where(is_earlier_RR, x_R, 0).sum(1)


def line_length(R, n_local):
    """The most copies that a rank's experts have together.

    Its fills, at most R - 1, take rows that follow each other and are sorted by expert. So two
    neighbours share at most one expert: n_local - 1 steps between experts and one more per fill.
    """
    return max(n_local + R - 2, 1)


def _copies(rank, source_R, used_RS):
    """The experts from the first to the last that each rank uses, in one slice."""
    R, n_local = used_RS.shape
    rank_R = jnp.arange(R, dtype=I32)
    low_R = jnp.argmax(used_RS, 1).astype(I32)
    high_R = n_local - jnp.argmax(used_RS[:, ::-1], 1).astype(I32)
    length_R = jnp.where(used_RS.any(1), high_R - low_R, 0)
    line_R = before_of_source(source_R, length_R)
    sent_R = jnp.where(source_R == rank, length_R, 0)
    got_R = jnp.where(rank_R == source_R[rank], length_R[rank], 0)
    here_R = jnp.broadcast_to(low_R[rank], R)
    there = Routes(*(x[:, None] for x in (sent_R, low_R, low_R, got_R, here_R, here_R)))
    in_line_R = jnp.broadcast_to(line_R[rank], R)
    home = there.back()._replace(sent_to_RP=in_line_R[:, None], got_to_RP=line_R[:, None])
    inside_XR = jnp.arange(line_length(R, n_local), dtype=I32)[:, None] - line_R
    lies_XR = (inside_XR >= 0) & (inside_XR < sent_R)
    line_X = jnp.where(lies_XR, low_R + inside_XR, 0).sum(1)
    return Copies(there, home, jnp.where(lies_XR.any(1), line_X, n_local))


def prefetch(w_eLF, copies: Copies, axis, *, impl="auto"):
    """spare_eLF: the weights of the experts in this rank's spare slots, 0 in the others.

    w_eLF are those of the home experts; any array whose first axis is the experts, packed ones
    too. What moves is each copied expert, once to each rank that copies it. The gradient comes back
    the same way and is summed in float32. For that a rank holds at most E / R + R - 2 gradients of
    experts, of which it fetches a part of axis 1 at a time where they are more than its own.
    impl as for `exchange`.
    """
    axis, impl = as_tuple(axis), chosen(impl)
    return _prefetch(vary_with(w_eLF, axis, copies), copies, axis, impl)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@jax.named_scope(LENT)
def _prefetch(w_eLF, copies, axis, impl):
    return move(w_eLF, copies.there, w_eLF.shape[0], axis, impl)


def _prefetch_fwd(w_eLF, copies, axis, impl):
    return _prefetch(w_eLF, copies, axis, impl), copies


@jax.named_scope(LENT)
def _prefetch_bwd(axis, impl, copies, dspare_eLF):
    n_local, L = dspare_eLF.shape[:2]
    length = copies.line_X.shape[0]
    n_parts = next(p for p in range(1, L + 1) if L % p == 0 and (p * n_local >= length or p == L))

    def part(i):
        d_eLF = jax.lax.dynamic_slice_in_dim(dspare_eLF, i * (L // n_parts), L // n_parts, 1)
        line_XLF = move(d_eLF, copies.home, length, axis, impl).astype(jnp.float32)
        sum_eLF = jax.ops.segment_sum(line_XLF, copies.line_X, n_local)
        return sum_eLF.astype(dspare_eLF.dtype)

    if n_parts == 1:
        return part(0), None
    dw_peLF = jax.lax.map(part, jnp.arange(n_parts))
    return jnp.moveaxis(dw_peLF, 0, 1).reshape(dspare_eLF.shape), None


_prefetch.defvjp(_prefetch_fwd, _prefetch_bwd)


def traffic(counts_RE, capacity=None):
    """(plain, balanced) Traffic: what `routes` that drop nothing and what `plan` would move."""
    counts_RE = jnp.asarray(counts_RE)
    R, n_local = counts_RE.shape[0], local_experts(counts_RE)
    rank_R = jnp.arange(R, dtype=I32)
    plans = jax.vmap(lambda rank: plan_of(rank, counts_RE, capacity))(rank_R)

    def summed(rows_RR, copies_RR):
        """From what each rank (first) has for each."""
        over_RR, computed_R = jnp.where(rank_R == rank_R[:, None], 0, rows_RR), rows_RR.sum(0)
        return Traffic(
            computed_R, over_RR.sum(1), over_RR.sum(0), copies_RR.sum(1), copies_RR.sum(0)
        )

    plain = summed(counts_RE.reshape(R, R, n_local).sum(-1), jnp.zeros((R, R), I32))
    return plain, summed(plans.there.sent_RP.sum(-1), plans.copies.there.sent_RP.sum(-1))
