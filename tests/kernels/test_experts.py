"""Grouped matmul: the block and ragged paths against a loop over experts."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.experts import batched, blocks, grouped_matmul

SIZES = {
    "even": [16, 16, 16, 16],
    "skewed": [1, 50, 0, 13],
    "first and last are empty": [0, 31, 33, 0],
    "all on one expert": [0, 0, 64, 0],
    "rows left over": [7, 0, 20, 3],
    "no rows at all": [0, 0, 0, 0],
}
# float32 sums of 24 terms of size one in another order, and of up to 64 in the weight gradient.
TIGHT = dict(rtol=1e-5, atol=1e-5)


def operands(sizes, N=64, L=24, F=20, dtype=jnp.float32, seed=0):
    draw = np.random.default_rng(seed).normal
    x = jnp.asarray(draw(size=(N, L)), dtype)
    w = jnp.asarray(draw(size=(len(sizes), L, F)), dtype)
    return x, w, jnp.asarray(sizes, jnp.int32), jnp.asarray(draw(size=(N, F)), jnp.float32)


@cache
def compiled(impl, dtype=None, block=None):
    """Output, dx and dw of sum(y * weights). `block` keeps programs of other block sizes apart."""
    del block

    def loss(x, w, sizes, weights):
        y = grouped_matmul(x, w, sizes, impl=impl, preferred_element_type=dtype)
        return (y.astype(jnp.float32) * weights).sum(), y

    def everything(*args):
        (dx, dw), y = jax.grad(loss, (0, 1), has_aux=True)(*args)
        return y, dx, dw

    return jax.jit(everything)


@pytest.mark.parametrize("impl", ["blocks", "batched"])
@pytest.mark.parametrize("block", [8, 128])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_blocks_equal_the_loop_over_experts(sizes, block, impl, monkeypatch):
    """Blocks smaller than most groups, and larger than all rows together."""
    monkeypatch.setattr(
        {"blocks": blocks, "batched": batched}[impl], "block_rows", lambda N, E: block
    )
    args = operands(sizes)
    got = compiled(impl, block=block)(*args)
    want = compiled("reference")(*args)
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        np.testing.assert_allclose(a, b, err_msg=name, **TIGHT)
    assert not got[0][sum(sizes) :].any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_ragged_dot_equals_the_loop_over_experts(sizes):
    """The library's path, as lowered for this machine."""
    args = operands(sizes)
    got, want = compiled("ragged")(*args), compiled("reference")(*args)
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        np.testing.assert_allclose(a, b, err_msg=name, **TIGHT)


@pytest.mark.parametrize("N, E", [(1, 1), (1, 5), (63, 3), (65, 7), (1000, 16), (30, 40)])
def test_awkward_counts_at_the_shipped_block_size(N, E):
    """Random groups, more experts than rows among them, some rows left over."""
    rng = np.random.default_rng(N)
    sizes = np.bincount(rng.integers(0, E, max(0, N - N // 5)), minlength=E)
    args = operands(sizes, N=N, L=8, F=12)
    got, want = (compiled(impl)(*args) for impl in ("auto", "reference"))
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        np.testing.assert_allclose(a, b, err_msg=name, **TIGHT)


@pytest.mark.parametrize("impl", ["blocks", "batched", "ragged"])
def test_bfloat16_sums_in_float32_and_rounds_once(impl):
    """Output within half a unit of 8 bits (2^-9) of the float32 sum, gradients too."""
    args = operands(SIZES["skewed"], L=256, dtype=jnp.bfloat16)
    got, want = (compiled(i, jnp.float32)(*args) for i in (impl, "reference"))
    assert got[0].dtype == jnp.float32
    assert got[1].dtype == got[2].dtype == jnp.bfloat16
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
    y, *_ = compiled(impl)(*args)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, got[0].astype(jnp.bfloat16))


@pytest.mark.parametrize("impl", ["blocks", "batched", "ragged"])
def test_a_poisoned_row_stays_alone(impl):
    """T10: NaN in one row of x, and in the rows after the last group."""
    sizes = SIZES["rows left over"]
    x, w, sizes_E, weights = operands(sizes)
    clean = compiled(impl)(x, w, sizes_E, weights)
    dirty = x.at[9].set(jnp.nan).at[30:].set(jnp.nan)
    y, dx, dw = compiled(impl)(dirty, w, sizes_E, weights)
    others = np.arange(64) != 9
    assert jnp.isnan(y[9]).all()
    np.testing.assert_array_equal(y[others], clean[0][others])
    np.testing.assert_array_equal(dx, clean[1])
    assert jnp.isnan(dw[2]).all()  # row 9 belongs to expert 2
    np.testing.assert_array_equal(dw[np.array([0, 1, 3])], clean[2][np.array([0, 1, 3])])


def test_a_poisoned_expert_touches_its_own_rows_only():
    """T10: NaN in one expert's weight, neighbours in the same block of rows."""
    x, w, sizes_E, weights = operands(SIZES["skewed"])
    (clean, *_), (y, *_) = (
        compiled("blocks")(x, w, sizes_E, weights) for w in (w, w.at[1].set(jnp.nan))
    )
    assert jnp.isnan(y[1:51]).all()
    others = np.r_[0, 51:64]
    np.testing.assert_array_equal(y[others], clean[others])


def test_blocks_take_no_memory_that_grows_with_experts():
    """N=2048, E=32: the masked dense form holds E copies of x, the blocks less than two."""
    N, E, L, F = 2048, 32, 256, 64
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((N, L), (E, L, F))]
    sizes = jax.ShapeDtypeStruct((E,), jnp.int32)
    plan = jax.jit(lambda *a: grouped_matmul(*a, impl="blocks")).lower(*shapes, sizes).compile()
    assert plan.memory_analysis().temp_size_in_bytes < 2 * N * L * 4


@pytest.mark.parametrize("impl", ["blocks", "batched", "ragged"])
def test_shards_equal_one_device_and_replicated_weights_sum_their_gradients(impl):
    """check_vma=True over 4 devices: rows and sizes are sharded, weights are everywhere."""
    parts = [[3, 9, 0, 4], [0, 0, 16, 0], [5, 5, 5, 0], [0, 0, 0, 0]]
    runs = [operands(p, N=16, seed=i) for i, p in enumerate(parts)]
    w = runs[0][1]
    want = [compiled("reference")(x, w, s, c) for x, _, s, c in runs]
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )

    def local(x, w, s, c):
        y, pullback = jax.vjp(
            lambda x, w: grouped_matmul(x, jax.lax.pcast(w, "data", to="varying"), s, impl=impl),
            x,
            w,
        )
        return y, *pullback(c)

    with jax.set_mesh(mesh):
        rows, everywhere = P("data"), P()
        x, s, c = (
            jax.device_put(jnp.concatenate([r[i] for r in runs]), NamedSharding(mesh, rows))
            for i in (0, 2, 3)
        )
        shards = jax.shard_map(
            local,
            in_specs=(rows, everywhere, rows, rows),
            out_specs=(rows, rows, everywhere),
            check_vma=True,
        )
        y, dx, dw = jax.jit(shards)(x, jax.device_put(w, NamedSharding(mesh, everywhere)), s, c)
    np.testing.assert_allclose(y, jnp.concatenate([r[0] for r in want]), **TIGHT)
    np.testing.assert_allclose(dx, jnp.concatenate([r[1] for r in want]), **TIGHT)
    np.testing.assert_allclose(dw, sum(r[2] for r in want), **TIGHT)


def test_misfit_arguments_are_refused_with_their_numbers():
    """Each message carries the shapes or dtypes it complains about."""
    x, w, sizes, _ = operands(SIZES["even"])
    with pytest.raises(ValueError, match="impl='dense' is not one of"):
        grouped_matmul(x, w, sizes, impl="dense")
    with pytest.raises(ValueError, match=r"must agree; got x \(64, 23\)"):
        grouped_matmul(x[:, 1:], w, sizes)
    with pytest.raises(ValueError, match="sizes must be int32; got float32"):
        grouped_matmul(x, w, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="share one dtype; got bfloat16 and float32"):
        grouped_matmul(x.astype(jnp.bfloat16), w, sizes)
