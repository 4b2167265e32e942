"""SiTU-GLU: both forms against float64, its bound, and what it does at the ends of the range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.situ import situ_glu
from pallas_kernels.situ.reference import largest_below

BETAS = (4.0, 25.0)
FORMS = ("fused", "reference")
DTYPES = (jnp.float32, jnp.bfloat16)
ULP = {jnp.float32: 2.0**-23, jnp.bfloat16: 2.0**-7}  # the largest step relative to a value

every_form = pytest.mark.parametrize("impl", FORMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def run(gate, up, dy=None, betas=BETAS, impl="auto"):
    """y, dgate and dup as the form computes them, compiled."""

    def everything(gate, up, dy):
        y, pullback = jax.vjp(lambda g, u: situ_glu(g, u, *betas, impl=impl), gate, up)
        return y, *pullback(dy)

    return jax.jit(everything)(gate, up, jnp.ones_like(gate) if dy is None else dy)


def exact(gate, up, dy, betas=BETAS):
    """y, dgate and dup in float64; derivatives by imaginary steps, which cancel nothing."""
    gate, up, dy = (np.asarray(x, np.float64) for x in (gate, up, dy))

    def situ(g, u):
        beta, linear_beta = betas
        return beta * np.tanh(g / beta) / (1 + np.exp(-g)) * linear_beta * np.tanh(u / linear_beta)

    step = 1e-30j
    return (
        situ(gate, up),
        dy * situ(gate + step, up).imag / 1e-30,
        dy * situ(gate, up + step).imag / 1e-30,
    )


def grid(dtype):
    """gate, up and dy [2, 61, 50]: a coarse mesh over the range with noise; dy is at most 1."""
    draw = np.random.default_rng(0)
    gate, up = np.meshgrid(np.linspace(-30, 30, 122), np.linspace(-150, 150, 50))
    gate, up = (x.T.reshape(2, 61, 50) + draw.normal(size=(2, 61, 50)) for x in (gate, up))
    return [jnp.asarray(x, dtype) for x in (gate, up, draw.uniform(-1, 1, size=(2, 61, 50)))]


@every_form
@pytest.mark.parametrize(
    ("gate", "up", "y"),
    [
        (1, 1, 0.715817828),
        (1, -2, -1.42935113),
        (-3, 50, -2.90389147),
        (10, 10, 37.4846061),
        (100, 100, 99.93293),
        (0, 7, 0),
    ],
)
def test_listed_values_are_met(gate, up, y, impl):
    """k3-facts 3.6: to three roundings in float32, to the nearest or the next in bfloat16."""
    for dtype, tolerance in ((jnp.float32, 4e-7), (jnp.bfloat16, ULP[jnp.bfloat16])):
        got = run(jnp.asarray([gate], dtype), jnp.asarray([up], dtype), impl=impl)[0]
        np.testing.assert_allclose(np.asarray(got, np.float64), [y], rtol=tolerance, atol=0)


@every_form
@pytest.mark.parametrize("betas", [BETAS, (3.0, 33.3), (1.7, 0.5)])
def test_float32_values_and_gradients_equal_float64(betas, impl):
    """To roundings of the largest factor: beta * linear_beta for y, the slopes' sums for them."""
    args = grid(jnp.float32)
    beta, linear_beta = betas
    sizes = (beta * linear_beta, linear_beta * (1 + beta), beta)
    for size, got, want in zip(
        sizes, run(*args, betas=betas, impl=impl), exact(*args, betas), strict=True
    ):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-6, atol=1e-6 * size)


@every_form
@pytest.mark.parametrize("betas", [BETAS, (3.0, 33.3)])
def test_bfloat16_is_the_exact_value_rounded(betas, impl):
    """One step of the format for y, which may be clipped, and half a step for gradients. Besides,
    1e-6 of the largest factor: four roundings of tanh near one, in the form for bfloat16."""
    args = grid(jnp.bfloat16)
    beta, linear_beta = betas
    sizes = (beta * linear_beta, linear_beta * (1 + beta), beta)
    steps = (1, 0.52, 0.52)
    for size, step, got, want in zip(
        sizes, steps, run(*args, betas=betas, impl=impl), exact(*args, betas), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=step * ULP[jnp.bfloat16], atol=1e-6 * size
        )


def test_float32_keeps_its_digits_where_the_gate_is_closed():
    """The short sigmoid of bfloat16 gates would have none left at -20; float32 gates get the
    long one."""
    gate = jnp.linspace(-60, -5, 500)
    up = jnp.full_like(gate, 40.0)
    ones = jnp.ones_like(gate)
    for got, want in zip(run(gate, up), exact(gate, up, ones), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-5, atol=0)


@every_form
@every_dtype
def test_values_stay_below_the_bound_and_gradients_finite_at_the_ends(dtype, impl):
    """Issue 3, section 3: |y| < 100 for any finite input, finite gradients at 1e4 and 3e38.

    In bfloat16 the nearest value of 99.75 and more is 100, in float32 that of y(1e4, 1e4)."""
    ends = [-3e38, -1e4, -100.0, 0.0, 1e-38, 100.0, 1e4, 3e38]
    gate, up = (jnp.asarray(x, dtype) for x in np.meshgrid(ends, ends))
    y, dgate, dup = (np.asarray(x, np.float64) for x in run(gate, up, impl=impl))
    assert np.abs(y).max() == largest_below(100.0, dtype) < 100
    assert np.isfinite(dgate).all() and np.isfinite(dup).all()
    saturated = np.abs(np.asarray(up, np.float64)) >= 1e4
    assert (dup[saturated] == 0).all()


@pytest.mark.parametrize("bound", [100.0, 99.9, 0.85, 2.0**-126, 3e38])
@every_dtype
def test_the_largest_number_below_a_bound_has_none_between(bound, dtype):
    """The bound may lie on the format's grid, or off it on either side of the nearest number."""
    below = largest_below(bound, dtype)
    after = np.nextafter(np.asarray(below, dtype), np.asarray(np.inf, dtype))
    assert below == float(np.asarray(below, dtype)) < bound <= float(after)


@every_form
def test_the_clip_at_the_bound_passes_gradients(impl):
    """y(100, 100) is 99.93, clipped to 99.5 in bfloat16, and has a slope in up of 5.4e-3."""
    args = [jnp.full((1,), 100, jnp.bfloat16)] * 2
    y, _, dup = run(*args, impl=impl)
    assert float(y[0]) == 99.5
    np.testing.assert_allclose(float(dup[0]), 4 * (1 - np.tanh(4) ** 2), rtol=ULP[jnp.bfloat16])


@every_form
@every_dtype
def test_a_nan_stays_in_its_element(dtype, impl):
    gate, up, dy = (jnp.ones((3, 5), dtype).at[row, row + 1].set(jnp.nan) for row in range(3))
    y, dgate, dup = (np.isnan(np.asarray(x, np.float32)) for x in run(gate, up, dy, impl=impl))
    from_inputs = np.zeros((3, 5), bool)
    from_inputs[0, 1] = from_inputs[1, 2] = True
    np.testing.assert_array_equal(y, from_inputs)
    from_inputs[2, 3] = True
    np.testing.assert_array_equal(dgate, from_inputs)
    np.testing.assert_array_equal(dup, from_inputs)


@every_form
def test_only_the_inputs_are_saved(impl):
    """k3-facts 3.7: the width is 33792, and one saved float32 more would double the memory."""
    gate, up = (jnp.ones((4, 6), jnp.bfloat16) for _ in range(2))
    pullback = jax.vjp(lambda g, u: situ_glu(g, u, *BETAS, impl=impl), gate, up)[1]
    saved = [x for x in jax.tree.leaves(pullback) if x.shape]
    assert [(x.shape, x.dtype) for x in saved] == [((4, 6), jnp.bfloat16)] * 2


@every_form
def test_it_runs_on_shards_with_checked_variance(impl):
    """The model calls it inside shard_map for routed experts and on sharded arrays elsewhere."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    args = grid(jnp.float32)
    want = run(*args, impl=impl)
    with jax.set_mesh(mesh):
        here = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in args]
        direct = run(*here, impl=impl)
        mapped = jax.jit(
            jax.shard_map(lambda *x: run(*x, impl=impl), in_specs=P("x"), out_specs=P("x"))
        )(*here)
    for got in (direct, mapped):
        for a, b in zip(got, want, strict=True):
            assert a.sharding.spec == P("x", None, None) or a.sharding.spec == P("x")
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_auto_is_the_fused_form():
    """In bfloat16 the two forms differ, so that equality tells which one ran."""
    args = grid(jnp.bfloat16)
    auto, fused, reference = (run(*args, impl=impl) for impl in ("auto", *FORMS))
    for a, b in zip(auto, fused, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert (np.asarray(auto[0], np.float32) != np.asarray(reference[0], np.float32)).any()


@pytest.mark.parametrize(
    ("gate", "up", "betas", "impl", "words"),
    [
        (jnp.ones((2, 3)), jnp.ones((2, 4)), BETAS, "auto", r"\(2, 3\).*\(2, 4\)"),
        (jnp.ones(3), jnp.ones(3, jnp.bfloat16), BETAS, "auto", "float32.*bfloat16"),
        (jnp.ones(3, jnp.float16), jnp.ones(3, jnp.float16), BETAS, "auto", "got float16"),
        (jnp.ones(3), jnp.ones(3), (0.0, 25.0), "auto", "beta must be positive.*got 0.0"),
        (jnp.ones(3), jnp.ones(3), (4.0, jnp.inf), "auto", "linear_beta must be .*got inf"),
        (jnp.ones(3), jnp.ones(3), BETAS, "pallas", "'pallas' is not one of"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(gate, up, betas, impl, words):
    with pytest.raises(ValueError, match=words):
        situ_glu(gate, up, *betas, impl=impl)
