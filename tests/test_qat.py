"""What quantisation-aware training multiplies, its gradients, and a layer of it on many devices."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from qat_numbers import as_packed, same_bits

from k3_jax.checkpoint.tree import placed
from k3_jax.config import as_quantized
from k3_jax.layers.moe import Moe
from k3_jax.quant.mxfp4 import TRAINED_RULE, pack, pack_rounded, rounded
from k3_jax.quant.training import as_mxfp4, as_mxfp8, with_whole_groups
from k3_jax.state import Rows
from k3_jax.tree import named_leaves, with_leaves
from pallas_kernels.situ import situ_glu
from sharding import act_spec, make_mesh, weight_spec

MOE = dict(n_experts=8, n_active=2, latent_width=64, expert_width=64)


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(quick_compiler):
    """Equal bits stay equal."""


# Numbers


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_weights_in_training_are_those_that_are_packed(seed):
    """Bit for bit, with the sign of each zero: random numbers, ties, numbers on the grid, groups of
    zeros, and scales of every size at which no subnormal number takes part."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((3, 96, 8)).astype(np.float32)
    w[1] = rng.integers(-64, 65, (96, 8)) / np.float32(8)
    w[2, :32] *= rng.integers(0, 2, (32, 8))
    w[2, 32:64, 0] = 0
    w = np.ldexp(w, np.repeat(rng.integers(-110, 110, (3, 3, 8)), 32, axis=1)).astype(np.float32)
    same_bits(jax.jit(rounded)(w), as_packed(w))
    codes, scales = jax.jit(pack_rounded)(w)
    for got, want in zip((codes, scales), pack(np.swapaxes(w, 1, 2), TRAINED_RULE), strict=True):
        np.testing.assert_array_equal(got, want)


def test_masters_in_bfloat16_are_rounded_as_the_float32_that_they_are():
    w = jax.random.normal(jax.random.key(0), (2, 64, 8), jnp.bfloat16)
    got = as_mxfp4(w)
    assert got.dtype == jnp.bfloat16
    same_bits(got, as_packed(w))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_stays_so(bad):
    """A step with it has to be seen as bad."""
    w = np.ones((1, 64, 2), np.float32)
    w[0, 40, 1] = bad
    got = np.isfinite(jax.jit(rounded)(w))
    assert not got[0, 40, 1] and got[0, :, 0].all() and got[0, :32].all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_have_four_significant_bits_and_a_power_of_two_for_32(dtype):
    """E4M3 by ml_dtypes, the OCP rule by numpy's exact frexp."""
    x = np.random.default_rng(1).standard_normal((5, 96)) * np.exp2(np.arange(96) // 32 * 9 - 9)
    x = np.asarray(x, dtype)
    groups = x.astype(np.float64).reshape(5, 3, 32)
    unit = np.exp2(np.frexp(np.abs(groups).max(-1, keepdims=True))[1] - 1 - 8)
    units = np.clip(groups / unit, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    want = (units.astype(np.float64) * unit).reshape(5, 96)
    got = jax.jit(as_mxfp8)(x)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)


# Gradients


def test_gradients_are_those_of_the_function_that_does_not_round_at_the_rounded_point():
    x, w = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(2))

    def f(x, w):
        return jnp.sum(jnp.sin(x @ w))

    got = jax.grad(lambda x, w: f(as_mxfp8(x), as_mxfp4(w)), (0, 1))(x, w)
    want = jax.grad(f, (0, 1))(as_mxfp8(x), as_mxfp4(w))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(want[0], jax.grad(f)(x, w))


def make_moe(**changes):
    c = tiny.config(moe=dataclasses.replace(tiny.CONFIG.moe, **(MOE | changes)))
    return Moe(as_quantized(c), rngs=tiny.rngs())


def forced_choice():
    """Skewed, an expert without a token, [8, 16, 2]."""
    t, a = np.arange(8 * 16).reshape(8, 16, 1), np.arange(2)
    return np.minimum((t * t) % 11, 6) * (1 - a) + 7 * a


def moe_case(weights, **changes):
    """Output and gradients of x and weights of a layer with these leaves, on the mesh in force."""
    like = jax.eval_shape(functools.partial(make_moe, **changes))
    leaves = {
        n: jax.device_put(weights[n], placed(x).sharding) for n, x in named_leaves(like).items()
    }
    layer, width = with_leaves(like, leaves), tiny.CONFIG.width

    def loss(layer, x_BTD):
        x = jax.reshard(x_BTD, act_spec("BT."))
        forced = jax.reshard(jnp.asarray(forced_choice(), jnp.int32), act_spec("BT."))
        rows = Rows(jax.reshard(jnp.ones((8, 16), jnp.int32), act_spec("BT")))
        y_BTD, _ = layer(x, rows, forced)
        return jnp.sum(y_BTD * jnp.cos(jnp.arange(width))), y_BTD

    x_BTD = jax.random.normal(jax.random.key(3), (8, 16, width))
    if changes.get("exchange") == "rounds":
        return jax.device_get(jax.jit(loss)(layer, x_BTD)[1]), None, None
    grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(layer, x_BTD)
    return jax.device_get((y, grads[1], named_leaves(grads[0])))


def slow_moe(weights):
    """The same by the definition: every expert for every token, and x + (round(x) - x), the
    bracket a constant."""

    def through(x, round_):
        return x + jax.lax.stop_gradient(round_(x) - x)

    def loss(w, x_BTD):
        x_ND = x_BTD.reshape(-1, tiny.CONFIG.width)
        score_NE = jax.nn.sigmoid(x_ND @ w["router_DE"])
        one_NAE = jax.nn.one_hot(forced_choice().reshape(-1, 2), 8)
        share_NE = jnp.sum(one_NAE, 1) * score_NE
        share_NE /= jnp.sum(share_NE, 1, keepdims=True)
        gate, up, down = (
            through(w[n], rounded) for n in ("gate_ELF", "expert_up_ELF", "expert_down_EFL")
        )
        z = through(x_ND @ w["down_DL"], as_mxfp8)
        mixed = 0
        for e in range(8):
            hidden = through(situ_glu(z @ gate[e], z @ up[e], 4.0, 25.0), as_mxfp8)
            mixed += share_NE[:, e : e + 1] * (hidden @ down[e])
        normed = mixed * jax.lax.rsqrt(jnp.mean(mixed**2, 1, keepdims=True) + 1e-5)
        y = (normed * w["latent_norm_L"]) @ w["up_LD"]
        hidden = situ_glu(x_ND @ w["shared/gate_DF"], x_ND @ w["shared/up_DF"], 4.0, 25.0)
        y = (y + hidden @ w["shared/down_FD"]).reshape(x_BTD.shape)
        return jnp.sum(y * jnp.cos(jnp.arange(tiny.CONFIG.width))), y

    x_BTD = jax.random.normal(jax.random.key(3), (8, 16, tiny.CONFIG.width))
    grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(weights, x_BTD)
    return jax.device_get((y, grads[1], grads[0]))


def test_a_layer_is_its_definition_wherever_its_experts_are():
    """Output and every gradient: one device; experts on four, plain, balanced and in rounds; and
    weights that rest with their groups of inputs cut (64 inputs over four devices)."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        weights = jax.device_get(named_leaves(make_moe()))
        want = slow_moe(weights)
    balanced = dict(exchange="balanced", capacity=1.0)
    for sizes, how in [
        (dict(data=1), {}),
        (dict(expert=4), {}),
        (dict(data=2, expert=2), dict(exchange="rounds", capacity=1.0)),
        (dict(fsdp=4, expert=2), balanced),
    ]:
        n = math.prod(sizes.values())
        with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[:n])):
            y, dx, grads = moe_case(weights, **how)
        np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-5)
        if grads is None:
            continue
        np.testing.assert_allclose(dx, want[1], rtol=1e-4, atol=1e-5)
        for name, g in grads.items():
            np.testing.assert_allclose(g, want[2][name], rtol=1e-4, atol=2e-5, err_msg=name)


def test_no_group_is_cut_where_weights_are_rounded():
    """64 inputs over four devices: outputs are split instead, or, six of them, nothing is."""
    with jax.set_mesh(make_mesh(fsdp=4, expert=2, devices=jax.devices()[:8])):
        for shape, want in [
            ((8, 64, 64), P("expert", None, "fsdp")),
            ((8, 64, 6), P("expert", None, None)),
            ((8, 128, 6), P("expert", "fsdp", None)),
        ]:
            w = jax.reshard(jnp.zeros(shape), weight_spec("ELF", shape))
            assert jax.typeof(w).sharding.spec == P("expert", "fsdp", None)
            assert jax.typeof(with_whole_groups(w)).sharding.spec == want
