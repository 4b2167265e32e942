"""Grouped matmul: the forms in blocks and the TPU kernels against a loop over experts."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mxfp4_inputs import INTERPRET

from pallas_kernels.experts import batched, blocks, grouped_glu, grouped_matmul, mosaic, mxfp4
from pallas_kernels.situ import situ_glu

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
FORMS = ["blocks", "batched", "pallas"]
# Of [256, 256] float32 weights a visit sees 128 columns, and their gradient's tiles are 128 x 128.
LIMITS = mosaic.Limits(rows=64, vmem=600_000)
GLU_LIMITS = mosaic.Limits(rows=64, vmem=1_000_000)


def operands(sizes, N=64, L=24, F=20, dtype=jnp.float32, seed=0):
    draw = np.random.default_rng(seed).normal
    x = jnp.asarray(draw(size=(N, L)), dtype)
    w = jnp.asarray(draw(size=(len(sizes), L, F)), dtype)
    return x, w, jnp.asarray(sizes, jnp.int32), jnp.asarray(draw(size=(N, F)), jnp.float32)


def multiply(x, w, sizes, impl, dtype=None, interpret=INTERPRET):
    """The door, and the TPU kernels behind it interpreted."""
    if impl == "pallas":
        options = dict(limits=LIMITS, interpret=interpret)
        return mosaic.grouped_matmul(x, w, sizes, dtype or x.dtype, **options)
    return grouped_matmul(x, w, sizes, impl=impl, preferred_element_type=dtype)


@cache
def compiled(impl, dtype=None, block=None):
    """Output, dx and dw of sum(y * weights). `block` keeps programs of other block sizes apart."""
    del block

    def loss(x, w, sizes, weights):
        y = multiply(x, w, sizes, impl, dtype)
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


@pytest.mark.parametrize(
    "sizes", [*SIZES.values(), [7, 0, 48, 20]], ids=[*SIZES, "up to a last row in mid-block"]
)
def test_tpu_kernels_equal_the_loop_over_experts(sizes):
    """75 rows are two blocks and a part; columns are cut in two, and weights in four tiles. VMEM
    and what lies beyond the rows start as NaN, a race raises."""
    args = operands(sizes, N=75, L=256, F=256)
    assert mosaic.choose_rows(75, 4, LIMITS) == 32
    assert mosaic.choose_columns(32, 256, 256, 4, 4, LIMITS) == 128
    assert mosaic.choose_tile(32, 256, 256, 4, LIMITS) == (128, 128)
    got, want = (compiled(impl)(*args) for impl in ("pallas", "reference"))
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        # Sums of 256 terms, which reach 60: 16 roundings (the root of 256) of 60 x 2^-24.
        np.testing.assert_allclose(a, b, err_msg=name, rtol=1e-5, atol=6e-5)
    for result in got[:2]:
        assert not result[sum(sizes) :].any()
    assert not got[2][np.array(sizes) == 0].any()


@cache
def compiled_glu(form):
    """y of SiTU-GLU and all gradients; "kernel" makes both products and y in one."""
    betas, options = (4.0, 25.0), dict(limits=GLU_LIMITS, interpret=INTERPRET)

    def glu(x, gate, up, sizes):
        if form == "kernel":
            return mosaic.grouped_glu(x, gate, up, sizes, *betas, **options)
        if form == "reference":
            return grouped_glu(
                x, gate, up, sizes, beta=betas[0], linear_beta=betas[1], impl="reference"
            )
        products = (mosaic.grouped_matmul(x, w, sizes, x.dtype, **options) for w in (gate, up))
        return situ_glu(*products, *betas)

    def everything(x, gate, up, sizes, dy):
        y, pull = jax.vjp(lambda *w: glu(*w, sizes), x, gate, up)
        return y, *pull(dy.astype(y.dtype))

    return jax.jit(everything)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_activation_in_the_products_kernel_changes_no_bit(sizes, dtype):
    """y and the gradients of x, gate and up, of two column blocks and a part of a block of rows."""
    x, gate, sizes, dy = operands(sizes, N=75, L=256, F=256, dtype=dtype)
    up = operands(sizes, L=256, F=256, dtype=dtype, seed=1)[1]
    args = x, gate / 16, up, sizes, dy
    assert mosaic.choose_columns(32, 256, 256, 4, 4, GLU_LIMITS, matrices=2, outs=3) == 128
    for a, b in zip(compiled_glu("kernel")(*args), compiled_glu("apart")(*args), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_activation_in_the_products_kernel_equals_the_definition():
    x, gate, sizes, dy = operands(SIZES["skewed"], N=75, L=256, F=256)
    args = x, gate / 16, operands(SIZES["skewed"], L=256, F=256, seed=1)[1], sizes, dy
    got, want = (compiled_glu(form)(*args) for form in ("kernel", "reference"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("N, E", [(1, 1), (1, 5), (63, 3), (65, 7), (1000, 16), (30, 40)])
def test_awkward_counts_at_the_shipped_block_size(N, E):
    """Random groups, more experts than rows among them, some rows left over."""
    rng = np.random.default_rng(N)
    sizes = np.bincount(rng.integers(0, E, max(0, N - N // 5)), minlength=E)
    args = operands(sizes, N=N, L=8, F=12)
    got, want = (compiled(impl)(*args) for impl in ("auto", "reference"))
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        np.testing.assert_allclose(a, b, err_msg=name, **TIGHT)


@pytest.mark.parametrize("impl", FORMS)
def test_bfloat16_sums_in_float32_and_rounds_once(impl):
    """Output within half a unit of 8 bits (2^-9) of the float32 sum, gradients too."""
    args = operands(SIZES["skewed"], L=256, dtype=jnp.bfloat16)
    got, want = (compiled(i, jnp.float32)(*args) for i in (impl, "reference"))
    assert got[0].dtype == jnp.float32
    assert got[1].dtype == got[2].dtype == jnp.bfloat16
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
    y = jax.jit(partial(multiply, impl=impl))(*args[:3])
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, got[0].astype(jnp.bfloat16))


@pytest.mark.parametrize("impl", FORMS)
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


@pytest.mark.parametrize("impl", ["blocks", "pallas"])
def test_a_poisoned_expert_touches_its_own_rows_only(impl):
    """T10: NaN in one expert's weight, neighbours in the same block of rows."""
    x, w, sizes_E, weights = operands(SIZES["skewed"])
    (clean, *_), (y, *_) = (
        compiled(impl)(x, w, sizes_E, weights) for w in (w, w.at[1].set(jnp.nan))
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


@pytest.mark.parametrize("impl", FORMS)
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
        def form(x, w):
            w = jax.lax.pcast(w, "data", to="varying")
            # The race detector holds one kernel's state for the whole process.
            return multiply(x, w, s, impl, interpret=pltpu.InterpretParams())

        y, pullback = jax.vjp(form, x, w)
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


CHIPS = {
    name: SimpleNamespace(vmem_capacity_bytes=mib << 20, mxu_column_size=mxu)
    for name, mib, mxu in (("v5p", 64, 128), ("v6e", 128, 256), ("tpu7x", 64, 256))
}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS.keys())
@pytest.mark.parametrize("itemsize", [2, 4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("L, F", [(3584, 3072), (3072, 3584)], ids=["gate", "down"])
def test_blocks_of_the_released_size_fit_the_chips_and_products_bind(L, F, itemsize, chip):
    """Large groups: bfloat16 reads x twice and dw its operands so seldom that a v6e, with 560 flops
    for each byte of HBM, still waits for its products."""
    N, E, limits = 131072, 14, mosaic.limits_of(chip)
    rows = mosaic.choose_rows(N, E, limits)
    assert rows == 2 * chip.mxu_column_size
    columns = mosaic.choose_columns(rows, L, F, itemsize, itemsize, limits)
    inputs, outputs = mosaic.choose_tile(rows, L, F, itemsize, limits)
    # Counted again: two of each block in flight, and at least the float32 product or sum.
    of_times = 2 * itemsize * (rows * L + L * columns + rows * columns) + 4 * rows * columns
    of_outer = 2 * itemsize * (rows * (inputs + outputs) + inputs * outputs) + 4 * inputs * outputs
    assert max(of_times, of_outer) < limits.vmem < chip.vmem_capacity_bytes
    assert F % columns == L % inputs == F % outputs == 0
    if itemsize == 2:
        assert 2 * columns == F
        moved = 2 * (N * L * F // outputs + N * F * L // inputs + E * L * F)
        assert 2 * N * L * F / moved > 560


def test_small_groups_have_smaller_blocks_and_few_rows_one_of_their_own():
    limits = mosaic.limits_of(CHIPS["v6e"])
    chosen = [mosaic.choose_rows(*NE, limits) for NE in ((131072, 112), (131072, 896), (50, 14))]
    assert chosen == [256, 256, 64]


def test_the_few_columns_of_an_adapter_take_whole_tiles_of_vmem():
    """Counted as 16 numbers a row, blocks of the released size overrun it (libtpu 0.0.52, v6e)."""
    for rank in (1, 16, 128):
        assert mosaic.times_bytes(256, 3584, rank, 2, 2) == mosaic.times_bytes(256, 3584, 128, 2, 2)
        assert mosaic.outer_bytes(256, rank, 3072, 2) == mosaic.outer_bytes(256, 128, 3072, 2)


@pytest.mark.parametrize("seed", range(3))
def test_visits_to_experts_without_rows_are_added_where_asked_for(seed):
    """All experts in order, each in consecutive visits; those with rows as without the option."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, 101, 7))
    sizes = np.diff(cuts, prepend=0) * (rng.random(7) < 0.5)
    plan = jax.jit(mxfp4.visits, static_argnums=(1, 2, 3))
    plain, full = (
        np.stack(plan(jnp.asarray(sizes, jnp.int32), 100, 16, option)) for option in (False, True)
    )
    assert plain.shape == full.shape == (4, 13)
    assert list(dict.fromkeys(full[0])) == list(range(7)) and np.all(np.diff(full[0]) >= 0)
    real = [p[:, p[2] < p[3]] for p in (plain, full)]
    np.testing.assert_array_equal(*real)
    assert full[1].max() <= 6


def test_on_a_tpu_training_is_three_kernels_and_no_pass_over_their_results(monkeypatch):
    """Full size, traced only: nothing else makes an array of N rows or of the weights' size."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: CHIPS["v6e"])
    N, E, L, F = 131072, 14, 3584, 3072
    x, w, dy = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((N, L), (E, L, F), (N, F)))

    def step(x, w, sizes, dy):
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
        return y, pullback(dy)

    jaxpr = jax.make_jaxpr(step)(x, w, jax.ShapeDtypeStruct((E,), jnp.int32), dy).jaxpr
    large = [q for q in equations(jaxpr) if max(v.aval.size for v in q.outvars) >= N]
    assert [q.primitive.name for q in large] == ["pallas_call"] * 3
    assert [q.outvars[0].aval.shape for q in large] == [(N, F), (N, L), (E, L, F)]
    assert {q.outvars[0].aval.dtype.name for q in large} == {"bfloat16"}


def test_on_a_tpu_an_activation_is_made_with_its_products(monkeypatch):
    """Full size, traced only: one kernel forward, two for each of x, gate and up backward."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: CHIPS["v6e"])
    N, E, L, F = 131072, 14, 3584, 3072
    x, w, dy = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((N, L), (E, L, F), (N, F)))

    def step(x, gate, up, sizes, dy):
        glu = partial(grouped_glu, beta=4.0, linear_beta=25.0)
        y, pull = jax.vjp(lambda *w: glu(*w, sizes), x, gate, up)
        return y, pull(dy)

    jaxpr = jax.make_jaxpr(step)(x, w, w, jax.ShapeDtypeStruct((E,), jnp.int32), dy).jaxpr
    kernels = [q for q in equations(jaxpr) if q.primitive.name == "pallas_call"]
    assert [len(q.outvars) for q in kernels] == [3, 1, 1, 1, 1]


def equations(jaxpr):
    """Those of a program and of what it calls, but for the insides of kernels."""
    for q in jaxpr.eqns:
        inner = q.params.get("jaxpr") or q.params.get("call_jaxpr")
        if inner is None or q.primitive.name == "pallas_call":
            yield q
        else:
            yield from equations(getattr(inner, "jaxpr", inner))


def test_what_the_tpu_kernels_cannot_take_is_refused_with_numbers():
    x, w, sizes, _ = operands(SIZES["even"], dtype=jnp.float16)
    with pytest.raises(ValueError, match="bfloat16 or float32; got float16"):
        multiply(x, w, sizes, "pallas")
    x, w, sizes, _ = operands(SIZES["even"])
    small = mosaic.Limits(rows=32, vmem=10_000)
    with pytest.raises(ValueError, match=r"16 rows of 24 and 20 columns need \d+ bytes of VMEM"):
        mosaic.grouped_matmul(x, w, sizes, jnp.float32, limits=small)
    with pytest.raises(ValueError, match=r"\(24, 20\) weights needs \d+ bytes of VMEM; 10000"):
        mosaic.choose_tile(16, 24, 20, 4, small)


def test_misfit_arguments_are_refused_with_their_numbers():
    """Each message carries the shapes or dtypes it complains about."""
    x, w, sizes, _ = operands(SIZES["even"])
    with pytest.raises(ValueError, match="impl='dense' is not one of"):
        grouped_matmul(x, w, sizes, impl="dense")
    with pytest.raises(ValueError, match="grouped_glu: beta must be positive and finite; got 0"):
        grouped_glu(x, w, w, sizes, beta=0, linear_beta=25.0)
    with pytest.raises(ValueError, match=r"must agree; got x \(64, 23\)"):
        grouped_matmul(x[:, 1:], w, sizes)
    with pytest.raises(ValueError, match="sizes must be int32; got float32"):
        grouped_matmul(x, w, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="share one dtype; got bfloat16 and float32"):
        grouped_matmul(x.astype(jnp.bfloat16), w, sizes)
