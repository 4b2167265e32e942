"""Router top-k: the TPU kernel, interpreted, picks exactly what `jax.lax.top_k` picks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.top_k import top_k
from pallas_kernels.top_k.mosaic import rows_per_step, top_k_mosaic, vmem_bytes

# Copies every block as a TPU would, fills memory with NaN and reports races.
CAREFUL = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
QUICK = {"xla_backend_optimization_level": 0}


def chosen(scores, k, bias=None, interpret=True):
    scores = jnp.asarray(scores, jnp.float32)
    bias = jnp.zeros(scores.shape[1]) if bias is None else jnp.asarray(bias, jnp.float32)
    run = jax.jit(
        lambda s, b: top_k_mosaic(s, b, k, rows=128, interpret=interpret), compiler_options=QUICK
    )
    got = run(scores, bias)
    assert got.dtype == jnp.int32
    return np.asarray(got)


def wanted(scores, k, bias=0.0):
    return np.asarray(jax.lax.top_k(jnp.asarray(scores, jnp.float32) + bias, k)[1])


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "N, E, k, interpret",
    [(130, 128, 4, CAREFUL), (3, 896, 16, True), (128, 130, 7, True), (5, 8, 8, True)],
)
def test_it_chooses_what_top_k_chooses(N, E, k, interpret):
    """A ragged last block, K3's 896 experts, widths that are no whole tiles, and all of a row."""
    scores, bias = draw((N, E)), draw(E, 1)
    np.testing.assert_array_equal(chosen(scores, k, bias, interpret), wanted(scores, k, bias))


def test_equal_scores_come_in_the_order_of_their_indices():
    """Few different values, whole rows of one value, and 0 beside -0."""
    scores = np.random.default_rng(2).integers(0, 3, (64, 256)).astype(np.float32)
    scores[0] = 1
    scores[1] = np.where(np.arange(256) % 2, 0.0, -0.0)
    scores[2, 200] = 9
    np.testing.assert_array_equal(chosen(scores, 20), wanted(scores, 20))
    np.testing.assert_array_equal(chosen(scores, 20)[1], np.arange(20))


def test_infinite_scores_are_scores_like_others():
    """Rows with fewer finite scores than k go on with -inf by index; padding is never chosen."""
    scores = np.full((4, 130), -np.inf, np.float32)
    scores[1, 129], scores[2, [5, 77]], scores[3, 64] = 1, [np.inf, -3], np.finfo(np.float32).min
    np.testing.assert_array_equal(chosen(scores, 6), wanted(scores, 6))
    np.testing.assert_array_equal(chosen(scores, 130), wanted(scores, 130))


def test_nan_counts_as_the_largest_and_leaves_other_rows_alone():
    """As with `jax.lax.top_k`; a NaN with its sign bit set counts likewise."""
    scores = draw((6, 128), 3)
    clean = chosen(scores, 5)
    scores[2, [9, 100]] = np.nan
    scores[3, 7], scores[4, :] = np.inf, np.nan
    np.testing.assert_array_equal(chosen(scores, 5), wanted(scores, 5))
    np.testing.assert_array_equal(chosen(scores, 5)[[0, 1, 5]], clean[[0, 1, 5]])
    scores[2, 9] = np.copysign(np.nan, -1)
    np.testing.assert_array_equal(chosen(scores, 5)[2, :2], [9, 100])


def test_it_runs_on_shards_with_their_types_checked():
    """Rows over two devices, the bias whole on both."""
    scores, bias = draw((20, 128), 4), draw(128, 5)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    sharded = jax.shard_map(
        lambda s, b: top_k_mosaic(s, b, 3, rows=128, interpret=CAREFUL),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=True,
    )
    got = jax.jit(sharded, compiler_options=QUICK)(scores, bias)
    np.testing.assert_array_equal(got, wanted(scores, 3, bias))


def test_steps_fit():
    """K3's router, and one so wide that only 128 rows go into a quarter of VMEM."""
    assert rows_per_step(8192, 896, 16, 64 << 20) == 256
    assert rows_per_step(100, 896, 16, 64 << 20) == 128
    assert rows_per_step(8192, 9000, 16, 64 << 20) == 128
    assert vmem_bytes(128, 9000, 16) <= 16 << 20 < vmem_bytes(256, 9000, 16)


def test_what_does_not_fit_is_refused_with_its_numbers():
    scores = jnp.zeros((4, 8))
    with pytest.raises(ValueError, match=r"must be float32 \[N, E\]; got bfloat16 \(4, 8\)"):
        top_k(scores.astype(jnp.bfloat16), 2)
    with pytest.raises(ValueError, match="k=9 must be 1 to E=8"):
        top_k(scores, 9)
    with pytest.raises(ValueError, match="impl='sort' is not one of"):
        top_k(scores, 2, impl="sort")
    with pytest.raises(ValueError, match=r"bias must be float32 \(8,\); got float32 \(7,\)"):
        top_k(scores, 2, bias_E=jnp.zeros(7))
    with pytest.raises(ValueError, match="128 rows of E=20000 and k=16 need"):
        rows_per_step(8192, 20_000, 16, 64 << 20)
