"""Balanced expert parallelism gives every rank equal work and changes no number (T20, T21)."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import documented_ragged_all_to_all, mesh_of, on_ranks

from sharding.balance import line_length, plan, plan_of, prefetch, traffic
from sharding.exchange import exchange, gather_counts, routes

# Ranks and experts.
SIZES = [(1, 4), (2, 2), (4, 8), (5, 15), (64, 64), (64, 896)]


@functools.cache
def planner(R):
    """The plans of all ranks, stacked."""

    def plans(counts_RE, capacity):
        return jax.vmap(lambda rank: plan_of(rank, counts_RE, capacity))(jnp.arange(R))

    return jax.jit(plans)


def skews(R, E, seed=0):
    """(name, counts_RE): each rank has S rows, or fewer where there are pads."""
    rng = np.random.default_rng(seed)
    S, n_local = 3 * E + 7, E // R

    def drawn(share_E, rows=S):
        return rng.multinomial(rows, share_E / share_E.sum(), size=R).astype(np.int32)

    one_expert, one_rank = np.eye(E)[E // 2], np.repeat(np.eye(R)[R - 1], n_local)
    yield "equal", np.full((R, E), 3, np.int32)
    yield "drawn alike", drawn(np.ones(E))
    yield "all on one expert", drawn(one_expert)
    yield "all on one rank", drawn(one_rank)
    yield "all but one rank", drawn(1.0 - one_rank if R > 1 else one_rank)
    yield "geometric", drawn(0.5 ** np.minimum(np.arange(E), 60.0))
    yield "geometric, shuffled", drawn(rng.permutation(0.9 ** np.arange(E)))
    yield "every second expert", drawn(np.arange(E) % 2 + 1e-9)
    yield "one rank of pads", drawn(np.ones(E)) * (np.arange(R) > 0)[:, None].astype(np.int32)
    yield "nothing", np.zeros((R, E), np.int32)
    for concentration in (0.01, 0.1, 1.0):
        pads = [
            drawn(rng.dirichlet(np.full(E, concentration)), rng.integers(S))[s] for s in range(R)
        ]
        yield f"dirichlet {concentration}, pads", np.stack(pads)


def filled(counts_RE, capacity=None):
    """sent[source, rank, slot] of the definition: pairs in lists, moved by the rule, one at a time.

    Also, for each rank, which rank filled it.
    """
    R, E = counts_RE.shape
    n_local = E // R
    rows = [
        [(e % n_local, s) for e in range(d * n_local, (d + 1) * n_local) for s in range(R)
         for _ in range(counts_RE[s, e])] for d in range(R)
    ]  # fmt: skip
    load = [len(r) for r in rows]
    fair = max(-(-sum(load) // R), capacity or 0)
    lacking = [d for d in range(R) if load[d] < fair]
    left = sum(max(x - fair, 0) for x in load)  # what the rich can give in all
    fills, behind = {}, None

    def give(source, rank, amount):
        fills[rank] = (source, amount)
        load[source] -= amount
        load[rank] += amount

    for rich in [d for d in range(R) if load[d] > fair]:
        if behind is not None and load[behind] < fair:
            give(rich, behind, fair - load[behind])
        while load[rich] > fair:
            amount = min(fair - load[lacking[0]], left)
            left -= amount
            give(rich, lacking.pop(0), amount)
        behind = rich
    sent_RRP = np.zeros((R, R, 2 * n_local), int)
    for rank in sorted(fills, reverse=True):  # the last rows go to the last rank
        source, amount = fills[rank]
        for slot, s in rows[source][len(rows[source]) - amount :]:
            sent_RRP[s, rank, n_local + slot] += 1
        del rows[source][len(rows[source]) - amount :]
    for rank in range(R):
        for slot, s in rows[rank]:
            sent_RRP[s, rank, slot] += 1
    return sent_RRP, {rank: source for rank, (source, amount) in fills.items() if amount}


@pytest.mark.parametrize(("R", "E"), SIZES[:4])
@pytest.mark.parametrize("capacity", [None, 60])
def test_the_plan_is_that_of_the_rule_followed_pair_by_pair(R, E, capacity):
    """Prefix sums against lists; a capacity above the fair share too. Integers: exact."""
    for name, counts_RE in skews(R, E):
        p = planner(R)(counts_RE, 0 if capacity is None else capacity)
        sent_RRP, filled_by = filled(counts_RE, capacity)
        np.testing.assert_array_equal(p.there.sent_RP, sent_RRP, name)
        sources = {d: p.spare_RS[0, d].max() // (E // R) for d in range(R)}
        assert {d: s for d, s in sources.items() if s >= 0} == filled_by, name


@pytest.mark.parametrize(("R", "E"), SIZES)
def test_every_plan_is_exactly_balanced_and_its_slices_tile_the_rows(R, E):
    """Report, appendix E: no rank above the fair share, remote work from one rank, E / R spares.

    Every pair is computed once: a rank's slices leave from rows that tile its own, land on rows
    that tile the receiver's, at the expert they belong to, and both sides know the same slices.
    """
    n_local, rank_R = E // R, np.arange(R)
    for name, counts_RE in skews(R, E, seed=1):
        p = jax.tree.map(np.asarray, planner(R)(counts_RE, 0))
        there, total = p.there, counts_RE.sum()
        computed_R, fair = p.sizes_P.sum(1), -(-total // R)
        assert computed_R.max() <= fair and computed_R.sum() == total, name
        if total % R == 0:
            assert (computed_R == fair).all(), name
        for sent, got in ((there.sent_RP, there.got_RP), (there.sent_from_RP, there.got_from_RP),
                          (there.sent_to_RP, there.got_to_RP)):  # fmt: skip
            both = (there.sent_RP > 0, np.swapaxes(there.got_RP, 0, 1) > 0)
            np.testing.assert_array_equal(sent * both[0], np.swapaxes(got, 0, 1) * both[1], name)
        np.testing.assert_array_equal(there.got_RP.sum(1), p.sizes_P, name)

        spare_RS = p.spare_RS[0]
        homes_RS = np.where(spare_RS < 0, -1, spare_RS // n_local)
        source_R = homes_RS.max(1)
        assert ((homes_RS == -1) | (homes_RS == source_R[:, None])).all(), name
        assert (source_R != rank_R).all() and spare_RS.shape == (R, n_local)
        assert (counts_RE.sum(0).reshape(R, n_local).sum(1)[source_R[source_R >= 0]] > fair).all()
        home_RS = np.arange(E).reshape(R, n_local)
        expert_RP = np.concatenate([home_RS, spare_RS], 1)
        assert (p.sizes_P[expert_RP < 0] == 0).all(), name

        by_expert_RE = np.zeros((R, E), int)
        for s in range(R):
            np.add.at(by_expert_RE[s], expert_RP, np.where(expert_RP < 0, 0, there.sent_RP[s]))
        np.testing.assert_array_equal(by_expert_RE, counts_RE, name)
        for s in {0, R // 2, R - 1}:
            tiles(there.sent_from_RP[s], there.sent_RP[s], counts_RE[s].sum())
            tiles(there.got_to_RP[s], there.got_RP[s], computed_R[s])
            first_E = np.cumsum(counts_RE[s]) - counts_RE[s]
            inside = there.sent_from_RP[s] - first_E[expert_RP]
            is_used = there.sent_RP[s] > 0
            assert (inside[is_used] >= 0).all(), name
            assert ((inside + there.sent_RP[s])[is_used] <= counts_RE[s][expert_RP][is_used]).all()
        copies_fit(p, spare_RS, n_local, name)


def tiles(start, size, total):
    """Slices that are not empty follow each other from 0 to total."""
    order = np.argsort(start[size > 0])
    start, size = start[size > 0][order], size[size > 0][order]
    np.testing.assert_array_equal(start, np.cumsum(size) - size)
    assert size.sum() == total


def copies_fit(p, spare_RS, n_local, name):
    """Weights go where spare slots want them; their gradients have room for all copies."""
    R = len(spare_RS)
    there, home = p.copies.there, p.copies.home
    for rank in range(R):
        has = np.flatnonzero(there.got_RP[rank, :, 0])
        wanted = np.flatnonzero(spare_RS[rank] >= 0)
        assert len(has) == (len(wanted) > 0), name
        for source in has:
            low, n = there.got_to_RP[rank, source, 0], there.got_RP[rank, source, 0]
            assert source == spare_RS[rank].max() // n_local
            assert (low, low + n - 1) == (wanted[0], wanted[-1])
            assert there.got_from_RP[rank, source, 0] == low and n <= n_local
            assert home.sent_to_RP[rank, source, 0] == home.got_to_RP[source, rank, 0]
            place = home.got_to_RP[source, rank, 0] + np.arange(n)
            np.testing.assert_array_equal(p.copies.line_X[source][place], low + np.arange(n))
        landed = (p.copies.line_X[rank] < n_local).sum()
        assert landed == home.got_RP[rank].sum() <= line_length(R, n_local), name


def test_the_line_of_gradients_can_be_full():
    """Its length is needed: ranks that all split experts of one; one less would lose a copy."""
    R, n_local = 4, 2
    counts_RE = np.zeros((R, R * n_local), np.int32)
    counts_RE[:, :2] = [[4, 6]] * R
    p = planner(R)(counts_RE, 0)
    assert int((p.copies.line_X[0] < n_local).sum()) == line_length(R, n_local) == 4


def oracle(x_NL, chosen_NA, mix_NA, w_ELF):
    """y = sum_a mix_a tanh(x w_a) on one device; pads choose expert E and give 0."""
    E = len(w_ELF)
    h_NAF = jnp.einsum("NL,NALF->NAF", x_NL, w_ELF[jnp.minimum(chosen_NA, E - 1)])
    mix_NA = jnp.where(chosen_NA < E, mix_NA, 0.0)
    return jnp.einsum("NAF,NA->NF", jnp.tanh(h_NAF), mix_NA, preferred_element_type=jnp.float32)


def shares(axes, E, form, impl):
    """One rank's part of the same, rows sorted by expert, exchanged, computed, returned, mixed."""

    def local(x_NL, chosen_NA, mix_NA, w_eLF):
        (N, A), n = chosen_NA.shape, chosen_NA.size
        order_n = jnp.argsort(chosen_NA.reshape(-1))
        counts_RE = gather_counts(jnp.bincount(chosen_NA.reshape(-1), length=E + 1)[:E], axes)
        if form == "plain":
            bound = n * len(counts_RE)
            there, n_dropped = routes(counts_RE, bound, axes)
            sizes_P = there.got_RP.sum(0)
        else:
            bound, n_dropped = n, jnp.zeros((), jnp.int32)
            p = plan(counts_RE, axes)
            there, sizes_P = p.there, p.sizes_P
            w_eLF = jnp.concatenate([w_eLF, prefetch(w_eLF, p.copies, axes, impl=impl)])
        y_mL = exchange(x_NL[order_n // A], there, bound, axes, impl=impl)
        row_m1 = jnp.arange(bound)[:, None]
        end_P = jnp.cumsum(sizes_P)
        is_in_mP = (row_m1 < end_P) & (row_m1 >= end_P - sizes_P)
        h_mF = jnp.tanh(jnp.einsum("mP,mL,PLF->mF", is_in_mP.astype(x_NL.dtype), y_mL, w_eLF))
        h_nF = exchange(h_mF, there.back(), n, axes, impl=impl)
        h_NAF = h_nF[jnp.argsort(order_n)].reshape(N, A, -1)
        return jnp.einsum("NAF,NA->NF", h_NAF, mix_NA), n_dropped[None]

    return local


def choices(E, N, A):
    """(name, chosen_NA)"""
    rng = np.random.default_rng(2)
    skewed = np.minimum(rng.geometric(0.3, (N, A)) - 1, E - 1)
    yield "skewed, the last expert has none", np.minimum(skewed, E - 2)
    yield "all on one expert", np.full((N, A), 1)
    padded = rng.integers(0, E, (N, A))
    padded[N // 8 : N // 2] = E
    padded[-3:] = E
    yield "pads", padded


def one_device_and_ranks_agree(mesh, rows, axes, form, impl, E):
    """Forward and the gradients of rows, mixture weights and expert weights.

    Tolerance: float32 sums of at most N A terms of size 1 in two orders.
    """
    N, A, L, F = 6 * mesh.size, 2, 6, 5
    rng = np.random.default_rng(3)
    x_NL, mix_NA, dy_NF, w_ELF = (
        rng.normal(size=s).astype(np.float32) for s in ((N, L), (N, A), (N, F), (E, L, F))
    )
    local = shares(axes, E, form, impl)
    specs = jax.P(rows), jax.P(rows), jax.P(rows), jax.P(axes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(rows))
    place = [jax.NamedSharding(mesh, s) for s in specs]

    @jax.jit
    def parted(x_NL, chosen_NA, mix_NA, w_ELF, dy_NF):
        def y(x_NL, mix_NA, w_ELF):
            args = (x_NL, chosen_NA, mix_NA, w_ELF)
            return mapped(*(jax.reshard(a, p) for a, p in zip(args, place, strict=True)))

        y_NF, pull, n_dropped = jax.vjp(y, x_NL, mix_NA, w_ELF, has_aux=True)
        return (y_NF, *pull(jax.reshard(dy_NF, place[0]))), n_dropped

    @jax.jit
    def whole(x_NL, chosen_NA, mix_NA, w_ELF, dy_NF):
        y_NF, pull = jax.vjp(lambda x, m, w: oracle(x, chosen_NA, m, w), x_NL, mix_NA, w_ELF)
        return y_NF, *pull(dy_NF)

    for name, chosen_NA in choices(E, N, A):
        args = x_NL, chosen_NA, mix_NA, w_ELF, dy_NF
        with jax.set_mesh(mesh):
            got, n_dropped = parted(*args)
        assert n_dropped.sum() == 0
        for what, a, b in zip(("y", "dx", "dmix", "dw"), got, whole(*args), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=f"{name}: {what}")
        if name == "pads":
            assert not np.asarray(got[1])[-3:].any() and not np.asarray(got[2])[-3:].any()


@pytest.mark.parametrize("form", ["plain", "balanced"])
@pytest.mark.parametrize("R", [2, 4, 8])
def test_experts_on_ranks_equal_one_device_forward_and_gradients(R, form):
    """T20, T21: skew, an expert without tokens, all tokens on one expert, pads."""
    one_device_and_ranks_agree(mesh_of(expert=R), "expert", ("expert",), form, "dense", 16)


@pytest.mark.parametrize("form", ["plain", "balanced"])
def test_rows_split_over_one_more_axis_and_one_expert_a_rank(form, monkeypatch):
    """Weights are whole over `data`: their gradients are summed there. The ragged transport."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", documented_ragged_all_to_all)
    mesh, axes = mesh_of(data=2, expert=2, tensor=2), ("expert", "tensor")
    one_device_and_ranks_agree(mesh, ("data", *axes), axes, form, "ragged", 4)


@pytest.mark.parametrize("L", [1, 6, 7])
def test_gradients_of_many_copies_are_summed_in_parts(L):
    """Three of four ranks copy rank 0's experts: more gradients than its own room holds."""
    R, n_local = 4, 2
    counts_RE = np.zeros((R, R * n_local), np.int32)
    counts_RE[:, :2] = [[4, 6]] * R
    w_ELF = np.random.default_rng(0).normal(size=(R * n_local, L, 3)).astype(np.float32)

    def local(w_eLF, counts_1E):
        p = plan(gather_counts(counts_1E[0], "expert"), "expert")
        return prefetch(w_eLF, p.copies, "expert")

    mesh = mesh_of(expert=R)
    run = on_ranks(local, mesh, "expert")
    spare_RS = np.asarray(planner(R)(counts_RE, 0).spare_RS[0]).reshape(-1)
    want = np.where((spare_RS >= 0)[:, None, None], w_ELF[spare_RS], 0)
    np.testing.assert_array_equal(run(w_ELF, counts_RE), want)
    d_ELF = np.random.default_rng(1).normal(size=w_ELF.shape).astype(np.float32)
    with jax.set_mesh(mesh):
        dw_ELF = jax.jit(jax.grad(lambda w: jnp.sum(run(w, counts_RE) * d_ELF)))(w_ELF)
    want = np.zeros_like(w_ELF)
    np.add.at(want, spare_RS[spare_RS >= 0], d_ELF[spare_RS >= 0])
    assert (spare_RS == 0).sum() + (spare_RS == 1).sum() == 4
    np.testing.assert_allclose(dw_ELF, want, rtol=1e-6, atol=1e-6)


def test_traffic_counts_what_the_plans_move():
    """All rows for one expert: one rank computes them, or each with a copy of the expert."""
    R, E, S = 4, 8, 10
    counts_RE = np.zeros((R, E), np.int32)
    counts_RE[:, 0] = S
    plain, balanced = jax.jit(traffic)(counts_RE)
    assert plain.computed_R.tolist() == [40, 0, 0, 0] and plain.rows_in_R.tolist() == [30, 0, 0, 0]
    assert plain.experts_out_R.sum() == 0 and plain.rows_out_R.tolist() == [0, 10, 10, 10]
    assert balanced.computed_R.tolist() == [10] * 4
    assert balanced.experts_out_R.tolist() == [3, 0, 0, 0]
    assert balanced.experts_in_R.tolist() == [0, 1, 1, 1]
    # Rank 0 keeps the first ten rows, which are its own; the next ranks' rows likewise stay.
    assert balanced.rows_in_R.tolist() == [0] * 4


def test_a_capacity_above_the_fair_share_copies_fewer_experts():
    """Loads spread by 5 % around their mean: within 10 % of it few ranks give rows away."""
    R, E, S = 64, 896, 9000
    rng = np.random.default_rng(0)
    counts_RE = rng.multinomial(S, rng.dirichlet(np.full(E, 30.0)), size=R).astype(np.int32)
    moved = jax.jit(traffic)
    _, exact = moved(counts_RE, S)
    _, slack = moved(counts_RE, int(1.1 * S))
    assert exact.computed_R.min() == exact.computed_R.max() == S
    assert S < slack.computed_R.max() <= int(1.1 * S)
    assert 0 < slack.experts_in_R.sum() < exact.experts_in_R.sum() / 4


def test_experts_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(ValueError, match="6 experts over 4 ranks"):
        plan_of(0, np.zeros((4, 6), np.int32))


def test_sixty_four_ranks_equal_one_device():
    """T21 on 64 fake devices, which another process has."""
    here = os.path.dirname(__file__)
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=64",
        "PYTHONPATH": os.path.dirname(here),
    }
    command = [sys.executable, __file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["plain", "balanced"]


if __name__ == "__main__":
    for form in ("plain", "balanced"):
        one_device_and_ranks_agree(mesh_of(expert=64), "expert", ("expert",), form, "dense", 128)
        print(form)
