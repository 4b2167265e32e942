"""AttnRes MIX: the TPU kernels, interpreted, against the definition in float64 and in jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.attn_res import mix
from pallas_kernels.attn_res.mosaic import mix_mosaic, rows_per_step, vmem_bytes

EPS = 1e-5
# Copies every block as a TPU would, fills memory with NaN and reports races.
CAREFUL = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
QUICK = {"xla_backend_optimization_level": 0}
# float32 sums of 384 terms against float64, relative to the norm of the result.
F32 = 2e-6
# Each element of y and of a row's gradient is rounded to bfloat16 once.
BF16 = 2.0**-8


def example(J, B, T, D=384, dtype=jnp.float32, seed=0):
    """Rows of very different sizes, a probe that tells them apart, and a cotangent."""
    draw = np.random.default_rng(seed).standard_normal
    rows = tuple(jnp.asarray(draw((B, T, D)) * 3.0**j, dtype) for j in range(J))
    probe = jnp.asarray(draw(D) * 0.1, jnp.float32)
    return rows, probe, jnp.asarray(draw((B, T, D)), dtype)


def defined(rows, probe, dy):
    """In float64: y, gradients of the rows and of the probe (formulas of `_backward_kernel`)."""
    x, p, g = (np.asarray(a, np.float64) for a in (jnp.stack(rows), probe, dy))
    scale = 1 / np.sqrt((x * x).mean(-1) + EPS)
    score = x @ p * scale
    w = np.exp(score - score.max(0))
    w /= w.sum(0)
    dw = (x * g).sum(-1)
    ds = w * (dw - (w * dw).sum(0))
    dx = w[..., None] * g + (ds * scale)[..., None] * p
    dx -= (ds * score * scale**2 / x.shape[-1])[..., None] * x
    return (w[..., None] * x).sum(0), *dx, ((ds * scale)[..., None] * x).sum((0, 1, 2))


def with_gradients(fn):
    def run(rows, probe, dy):
        y, pull = jax.vjp(fn, rows, probe)
        drows, dprobe = pull(dy)
        return y, *drows, dprobe

    return jax.jit(run, compiler_options=QUICK)


def interpreted(block, interpret=CAREFUL):
    def fn(rows, probe):
        all_there = jnp.ones(len(rows), jnp.int32)
        how = dict(eps=EPS, blocks=(block, block), interpret=interpret)
        return mix_mosaic(rows, probe, all_there, **how)

    return with_gradients(fn)


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_what_is_not_there_takes_no_part(impl):
    """Forward and backward; its own gradient is exactly zero."""
    rows, probe, dy = example(4, 1, 40, seed=6)
    there = jnp.array([1, 0, 1, 0], jnp.int32)

    def fn(rows, probe):
        if impl == "pallas":
            return mix_mosaic(rows, probe, there, eps=EPS, blocks=(16, 16), interpret=CAREFUL)
        return mix(rows, probe, there, eps=EPS, impl=impl)

    y, *drows, dprobe = with_gradients(fn)(rows, probe, dy)
    want = defined((rows[0], rows[2]), probe, dy)
    assert_close((y, drows[0], drows[2], dprobe), want, F32)
    assert not np.any(drows[1]) and not np.any(drows[3])


def gap(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all()
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def assert_close(got, want, tol, probe_tol=F32):
    for name, a, b in zip(range(len(got)), got, want, strict=True):
        bound = probe_tol if name == len(got) - 1 else tol
        assert gap(a, b) <= bound, f"result {name} is off by {gap(a, b):.1e}"


@pytest.mark.parametrize(
    "J, B, T, block, interpret",
    [(2, 2, 17, 32, CAREFUL), (3, 1, 7, 16, True), (17, 1, 48, 16, True), (4, 3, 32, 32, True)],
)
def test_values_and_every_gradient_equal_float64(J, B, T, block, interpret):
    """A ragged last block, one larger than the tokens, whole blocks; NaN fills what is no token."""
    args = example(J, B, T)
    assert_close(interpreted(block, interpret)(*args), defined(*args), F32)


def test_bfloat16_rows_are_rounded_at_the_end_alone():
    """The probe's gradient, a float32 sum over tokens, is not rounded at all."""
    args = example(3, 1, 40, dtype=jnp.bfloat16, seed=1)
    got = interpreted(16)(*args)
    assert [x.dtype for x in got] == [jnp.bfloat16] * 4 + [jnp.float32]
    assert_close(got, defined(*args), BF16)


def test_the_definition_in_jnp_equals_float64_too():
    args = example(4, 2, 5, D=40, seed=2)
    got = with_gradients(lambda rows, probe: mix(rows, probe, eps=EPS, impl="reference"))(*args)
    assert_close(got, defined(*args), F32)


def test_a_scores_rounding_does_not_grow_with_the_probe():
    """Scores near 300, where bfloat16 would be off by one: weights hold to float32's own error."""
    rows, probe, dy = example(3, 1, 16, seed=3)
    probe = probe * 100
    want = defined(rows, probe, dy)
    assert gap(interpreted(16)(rows, probe, dy)[0], want[0]) <= 2e-4


def test_a_poisoned_token_leaves_the_others_bit_for_bit_equal():
    """T10: NaN in one candidate's row of one token."""
    rows, probe, dy = example(2, 1, 20, seed=4)
    run = interpreted(16)
    clean = run(rows, probe, dy)
    got = run((rows[0].at[0, 3, 5].set(jnp.nan), rows[1]), probe, dy)
    others = np.arange(20) != 3
    for a, b in zip(got[:-1], clean[:-1], strict=True):
        assert np.isnan(np.asarray(a[0, 3])).all()
        np.testing.assert_array_equal(a[0, others], b[0, others])


def test_one_candidate_is_its_own_mixture():
    rows, probe, dy = example(1, 1, 4)
    run = with_gradients(lambda rows, probe: mix(rows, probe, eps=EPS))
    y, drow, dprobe = run(rows, probe, dy)
    np.testing.assert_array_equal(y, rows[0])
    np.testing.assert_array_equal(drow, dy)
    assert not dprobe.any()


def test_it_runs_on_shards_with_their_types_checked():
    """Rows over two devices, the probe whole on both; its gradient is summed over them."""
    args = example(2, 2, 16, D=128, seed=5)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )

    def local(rows, probe):
        all_there = jnp.ones(len(rows), jnp.int32)
        return mix_mosaic(rows, probe, all_there, eps=EPS, blocks=(16, 16), interpret=CAREFUL)

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=True
    )
    assert_close(with_gradients(sharded)(*args), defined(*args), F32)


@pytest.mark.parametrize("vmem", [128 << 20, 64 << 20])
@pytest.mark.parametrize("J", [2, 4, 10, 17])
@pytest.mark.parametrize("backward", [False, True])
def test_steps_of_the_released_width_fit(vmem, J, backward):
    """v6e has 128 MiB, tpu7x and v5p 64: three quarters, and more rows would not fit."""
    rows = rows_per_step(8192, J, 7168, 2, backward, vmem)
    assert vmem_bytes(rows, J, 7168, 2, backward) <= vmem * 3 // 4
    assert rows == 256 or vmem_bytes(2 * rows, J, 7168, 2, backward) > vmem * 3 // 4


def test_few_tokens_take_a_step_that_fits_them():
    assert rows_per_step(5, 4, 7168, 2, False, 64 << 20) == 16
    assert rows_per_step(40, 4, 7168, 2, False, 64 << 20) == 64


def test_what_does_not_fit_is_refused_with_its_numbers():
    rows, probe, _ = example(2, 1, 4, D=40)
    with pytest.raises(ValueError, match="multiples of 128 .* got D=40"):
        mix(rows, probe, eps=EPS, impl="pallas")
    with pytest.raises(ValueError, match="impl='fast' is not one of"):
        mix(rows, probe, eps=EPS, impl="fast")
    with pytest.raises(ValueError, match=r"number 1 is float32 \(1, 3, 40\)"):
        mix((rows[0], rows[1][:, :3]), probe, eps=EPS)
    with pytest.raises(ValueError, match=r"probe must be float32 \(40,\); got float32 \(39,\)"):
        mix(rows, probe[:-1], eps=EPS)
    with pytest.raises(ValueError, match=r"is_there_J must be int32 \(2,\); got int32 \(3,\)"):
        mix(rows, probe, jnp.ones(3, jnp.int32), eps=EPS)
    with pytest.raises(ValueError, match="at least one"):
        mix((), probe, eps=EPS)
    with pytest.raises(ValueError, match="16 tokens of 64 candidates of D=7168 need"):
        rows_per_step(8192, 64, 7168, 4, True, 64 << 20)
