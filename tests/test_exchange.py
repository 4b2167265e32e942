"""Rows reach the ranks of their experts and come back, on both transports (T20)."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import documented_ragged_all_to_all, mesh_of, on_ranks

from sharding import exchange as door
from sharding.exchange import exchange, gather_counts, routes, routes_of, share_out

WIDTH = 3


@pytest.fixture(params=["dense", "ragged"])
def impl(request, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", documented_ragged_all_to_all)
    return request.param


def distinct_rows(R, n):
    """x [R, n, WIDTH] without a 0 and without two equal values."""
    return 1.0 + np.arange(R * n * WIDTH, dtype=np.float32).reshape(R, n, WIDTH)


def kept_rows(counts_RE, bound):
    """Which rows fit, one at a time: the largest group gives first, in it who sent most."""
    R, E = counts_RE.shape
    kept_RE = counts_RE.copy()
    for rank in range(R):
        home = slice(rank * E // R, (rank + 1) * E // R)
        room_e = counts_RE[:, home].sum(0)
        level = room_e.max()
        while np.minimum(room_e, level).sum() > bound:
            level -= 1
        for e, most in zip(range(home.start, home.stop), np.minimum(room_e, level), strict=True):
            level = counts_RE[:, e].max()
            while np.minimum(counts_RE[:, e], level).sum() > most:
                level -= 1
            kept_RE[:, e] = np.minimum(counts_RE[:, e], level)
    return kept_RE


def arrivals(counts_RE, kept_RE, x_RnL, bound):
    """y [R, bound, WIDTH] and whether each row was sent, by expert, source and place."""
    R, E = counts_RE.shape
    y_RmL, sent_Rn = np.zeros((R, bound, WIDTH), np.float32), np.zeros(x_RnL.shape[:2], bool)
    for rank in range(R):
        came = 0
        for e in range(rank * E // R, (rank + 1) * E // R):
            for s in range(R):
                start = counts_RE[s, :e].sum()
                for i in range(start, start + kept_RE[s, e]):
                    y_RmL[rank, came] = x_RnL[s, i]
                    sent_Rn[s, i] = True
                    came += 1
    return y_RmL, sent_Rn


def there_and_back(mesh, axis, bound, impl):
    """(x, counts) -> y, n_dropped, group sizes, y back home; arrays lead with the ranks."""

    def local(x_1nL, counts_1E):
        counts_RE = gather_counts(counts_1E[0], axis)
        there, n_dropped = routes(counts_RE, bound, axis)
        y_mL = exchange(x_1nL[0], there, bound, axis, impl=impl)
        home_nL = exchange(y_mL, there.back(), x_1nL.shape[1], axis, impl=impl)
        return y_mL[None], n_dropped[None], there.got_RP.sum(0)[None], home_nL[None]

    return on_ranks(local, mesh, axis)


CASES = {
    "balanced": [[2, 2, 2, 2, 2, 2, 2, 2]] * 4,
    "skewed, one expert without rows": [
        [5, 0, 1, 2, 0, 0, 3, 1], [0, 0, 9, 0, 1, 0, 2, 0],
        [4, 0, 4, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 12, 0, 0],
    ],
    "all on one expert": [[0, 0, 0, 0, 0, 12, 0, 0]] * 4,
    "one rank of pads": [[1, 2, 3, 0, 0, 1, 2, 3], [0] * 8, [0, 0, 0, 0, 0, 0, 0, 12], [1] * 8],
    "nothing at all": [[0] * 8] * 4,
}  # fmt: skip


@pytest.mark.parametrize("bound", [64, 9])
def test_rows_arrive_sorted_by_expert_and_return_to_where_they_stood(impl, bound):
    """T20: one contract, two transports. A bound of all rows drops none, a small one counts them.

    Rows are copied, so equality is exact.
    """
    mesh, n = mesh_of(expert=4), 16
    run = there_and_back(mesh, "expert", bound, impl)
    for name, counts in CASES.items():
        counts_RE = np.array(counts, np.int32)
        x_RnL = distinct_rows(4, n)
        kept_RE = kept_rows(counts_RE, bound)
        want_y, sent_Rn = arrivals(counts_RE, kept_RE, x_RnL, bound)
        y, n_dropped, sizes, home = run(x_RnL, counts_RE)
        np.testing.assert_array_equal(y, want_y, name)
        np.testing.assert_array_equal(n_dropped, (counts_RE - kept_RE).sum(1), name)
        np.testing.assert_array_equal(sizes, kept_RE.sum(0).reshape(4, 2), name)
        np.testing.assert_array_equal(home, np.where(sent_Rn[..., None], x_RnL, 0), name)
        assert bound < 64 or n_dropped.sum() == 0


def test_the_gradient_takes_the_way_back_and_dropped_rows_get_none(impl):
    """d/dx of sum(y * weight): the weight of the place where a row landed, 0 for those dropped."""
    mesh, n, bound = mesh_of(expert=4), 16, 9
    counts_RE = np.array(CASES["skewed, one expert without rows"], np.int32)
    x_RnL = distinct_rows(4, n)
    weight_RmL = np.random.default_rng(0).normal(size=(4, bound, WIDTH)).astype(np.float32)
    run = there_and_back(mesh, "expert", bound, impl)
    with jax.set_mesh(mesh):
        dx = jax.jit(jax.grad(lambda x: jnp.sum(run(x, counts_RE)[0] * weight_RmL)))(x_RnL)
    y, sent_Rn = arrivals(counts_RE, kept_rows(counts_RE, bound), x_RnL, bound)
    weight_of = dict(zip(y[..., 0].ravel(), weight_RmL.reshape(-1, WIDTH), strict=True))
    want = [[weight_of[v] if ok else 0 * weight_RmL[0, 0] for v, ok in zip(row, sent, strict=True)]
            for row, sent in zip(x_RnL[..., 0], sent_Rn, strict=True)]  # fmt: skip
    assert 0 < sent_Rn.sum() < counts_RE.sum()
    np.testing.assert_array_equal(dx, want)


def test_two_axes_are_one_line_of_ranks_beside_a_third(impl):
    """Rank = position over (expert, tensor); each data row exchanges for itself."""
    mesh, n, bound, axes = mesh_of(data=2, expert=2, tensor=2), 16, 64, ("expert", "tensor")
    counts_RE = np.array(CASES["skewed, one expert without rows"], np.int32)
    x_RnL = distinct_rows(4, n)
    both = np.stack([counts_RE, counts_RE[::-1]]), np.stack([x_RnL, -x_RnL])

    def local(x_11nL, counts_11E):
        there, _ = routes(gather_counts(counts_11E[0, 0], axes), bound, axes)
        return exchange(x_11nL[0, 0], there, bound, axes, impl=impl)[None, None]

    y = on_ranks(local, mesh, "data", axes)(both[1], both[0])
    for counts, x, got in zip(*both, y, strict=True):
        np.testing.assert_array_equal(got, arrivals(counts, counts, x, bound)[0])


def test_rows_of_any_trailing_shape_and_dtype_and_a_single_rank(impl):
    """Packed experts travel as bytes; one rank keeps its rows, with an axis or without."""
    x = np.arange(1 * 6 * 2 * 3, dtype=np.uint8).reshape(1, 6, 2, 3)
    for axes in (("expert",), ()):
        run = there_and_back(mesh_of(expert=1), axes, 6, impl)
        y, n_dropped, _, home = run(x, np.array([[2, 0, 3]], np.int32))
        np.testing.assert_array_equal(y[0], np.concatenate([x[0, :5], 0 * x[0, 5:]]))
        np.testing.assert_array_equal(home, y)
        assert n_dropped[0] == 0 and y.dtype == x.dtype


def test_a_share_is_cut_at_the_highest_level_that_fits():
    """Against trying every level, for all rooms up to the sum."""
    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 9, (6, 5)).astype(np.int32)
    wanted[0] = 0
    for room in range(0, 40):
        got = share_out(jnp.asarray(wanted), jnp.full(6, room, jnp.int32))
        for row, shared in zip(wanted, np.asarray(got), strict=True):
            fitting = [v for v in range(9) if np.minimum(row, v).sum() <= room]
            np.testing.assert_array_equal(shared, np.minimum(row, max(fitting)))


def test_the_transport_is_chosen_once_and_logged(caplog):
    """T20: which exchange runs is visible in the log; another name is refused."""
    door._auto.cache_clear()
    with caplog.at_level(logging.INFO):
        assert [door.chosen("auto"), door.chosen("auto")] == ["dense", "dense"]
        assert door._auto("tpu") == door._auto("gpu") == "ragged"
    assert len(caplog.records) == 3 and "on cpu: dense" in caplog.text
    with pytest.raises(ValueError, match="'fast' is not one of"):
        door.chosen("fast")


@pytest.mark.parametrize(
    ("counts", "bound", "said"),
    [
        (np.zeros((4, 6), np.int32), 4, "6 experts over 4 ranks"),
        (np.zeros((2, 6), np.int64), 4, "int64"),
        (np.zeros(6, np.int32), 4, r"\(6,\)"),
        (np.zeros((2, 6), np.int32), 0, "at least 1 row; got 0"),
    ],
)
def test_counts_and_bounds_that_do_not_fit_are_refused(counts, bound, said):
    with pytest.raises(ValueError, match=said):
        routes_of(0, counts, bound)
