"""Packed experts pass gradients to their rows: against those of widened weights in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxfp4_inputs import INTERPRET, SIZES, E, F, L, N, rows

from pallas_kernels import experts
from pallas_kernels.experts import frozen, mosaic, mxfp4, reference
from pallas_kernels.experts.mxfp4 import from_released
from pallas_kernels.experts.mxfp4_reference import widen

BETAS = dict(beta=4.0, linear_beta=25.0)


def weights(seed, n=E, L=L, F=F, scales=(112, 118)):
    """Packed weights of `n` experts with every code, and their float32 values."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, F, L // 2), dtype=np.uint8)
    pair = from_released(packed, rng.integers(*scales, (n, F, L // 32), dtype=np.uint8))
    return pair, jax.vmap(widen)(*pair)


def relative(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def test_widened_weights_are_the_definitions_and_exact():
    """Every scale byte for which the kernel is exact; the largest ones act as 240."""
    pair, want = weights(3, F=512, scales=(2, 241))
    np.testing.assert_array_equal(np.float32(frozen.widen(*pair)), want)
    packed, scales = pair
    clipped = frozen.widen(packed, jnp.full_like(scales, 255))
    np.testing.assert_array_equal(clipped, frozen.widen(packed, jnp.full_like(scales, 240)))


@pytest.mark.parametrize("form", frozen.FORMS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_forms_are_those_of_widened_weights_to_the_bit(form, sizes):
    """And the definition's up to the order of its sums; experts 1..E of E + 1, the index traced."""
    sizes = jnp.asarray(sizes, jnp.int32)
    stack, w_ELF = weights(6, E + 1)
    run = partial(experts.grouped_matmul_mxfp4, out_dtype=jnp.float32)
    got = jax.jit(partial(run, impl=form))(rows(N), *stack, sizes, first=jnp.int32(1))
    plain = partial(experts.grouped_matmul, impl=form, preferred_element_type=jnp.float32)
    want = jax.jit(plain)(rows(N), w_ELF[1:].astype(jnp.bfloat16), sizes)
    np.testing.assert_array_equal(got, want)
    definition = run(rows(N), *stack, sizes, first=1, impl="reference")
    np.testing.assert_allclose(got, definition, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_gradient_of_rows_is_that_of_widened_weights(sizes):
    """Experts 1..E of a stack of E + 1, the index traced; rows after the last group get 0. The
    difference is rounding to bfloat16, 2^-9 of each number and less of the whole."""
    sizes = jnp.asarray(sizes, jnp.int32)
    stack, w_ELF = weights(0, E + 1)
    dy_NF = rows(N, seed=1, L=F)

    @jax.jit
    def got(x, first):
        run = partial(experts.grouped_matmul_mxfp4, first=first)
        return jax.vjp(lambda x: run(x, *stack, sizes), x)[1](dy_NF)[0]

    want = jax.vjp(lambda x: reference.grouped_matmul(x, w_ELF[1:], sizes), np.float32(rows(N)))
    dx_NL = got(rows(N), jnp.int32(1))
    assert dx_NL.dtype == jnp.bfloat16
    assert relative(dx_NL, want[1](np.float32(dy_NF))[0]) < 3e-3
    assert not np.any(dx_NL[int(sizes.sum()) :])


def test_the_gradient_through_the_activation_is_that_of_widened_weights():
    """Gate and up are rounded to bfloat16 before the activation's derivative: a few 2^-9."""
    sizes = jnp.asarray(SIZES["unaligned, one empty, rows left over"], jnp.int32)
    (gate, gate_ELF), (up, up_ELF) = weights(0), weights(1)
    dy_NF = rows(N, seed=2, L=F)

    def plain(x):
        products = (reference.grouped_matmul(x, w, sizes) for w in (gate_ELF, up_ELF))
        return mxfp4.activation(*products, **BETAS)

    @jax.jit
    def got(x):
        run = partial(experts.grouped_glu_mxfp4, gate=gate, up=up, sizes_E=sizes, **BETAS)
        return jax.vjp(run, x)[1](dy_NF)[0]

    (want,) = jax.vjp(plain, np.float32(rows(N)))[1](np.float32(dy_NF))
    assert relative(got(rows(N)), want) < 1e-2
    wrong = np.asarray(want)[:, ::-1]
    assert relative(got(rows(N)), wrong) > 0.5


def test_on_a_tpu_the_product_with_the_transposed_is_the_grouped_kernel():
    """Interpreted, on the widened weights of packed ones."""
    sizes = jnp.asarray(SIZES["unaligned, one empty, rows left over"], jnp.int32)
    pair, _ = weights(5)
    dy_NF, w_ELF = rows(N, seed=4, L=F), frozen.widen(*pair)
    limits = mosaic.Limits(rows=32, vmem=64 << 20)
    got = mosaic.times_transposed(dy_NF, w_ELF, sizes, limits=limits, interpret=INTERPRET)
    want = frozen.times_transposed(dy_NF, *pair, sizes, 0)
    assert relative(got, want) < 3e-3
