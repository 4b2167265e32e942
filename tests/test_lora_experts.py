"""Adapters of routed experts go where the experts go, and a TPU takes them."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding

from k3_jax.axes import ShapesOnly
from k3_jax.checkpoint.tree import placed
from k3_jax.compile_only import described_devices
from k3_jax.config import LoraConfig
from k3_jax.layers.moe import Moe
from k3_jax.lora import adapters
from k3_jax.state import Rows
from k3_jax.tree import flatten, named_leaves, nest, with_leaves
from pallas_kernels.experts import frozen
from sharding import act_spec, make_mesh, weight_spec

MATRICES = ("gate_ELF", "expert_up_ELF", "expert_down_EFL")
LORA = LoraConfig(rank=4, alpha=12.0)


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(quick_compiler):
    """Long programs of a few rows."""


def random(abstract: dict) -> dict:
    """The same numbers on every mesh, those of packed experts' scales about 1/16."""
    made = {}
    for name, leaf in abstract.items():
        rng = np.random.default_rng([*name.encode()])
        if leaf.dtype == jnp.uint8:
            value = rng.integers(*((121, 124) if "scales" in name else (0, 256)), leaf.shape)
        else:
            value = rng.normal(size=leaf.shape) * 0.2
        made[name] = jax.device_put(value.astype(leaf.dtype), placed(leaf).sharding)
    return made


def pairs(c, rank: int) -> dict:
    """Shapes of a layer's adapters, where they rest."""
    m, found = c.moe, {}
    sizes = dict(E=m.n_experts, L=m.latent_width, F=m.expert_width, K=rank)
    for name in (n for matrix in MATRICES for n in adapters.pair(matrix)):
        own = adapters.letters(name)
        shape = tuple(sizes[a] for a in own)
        rest = NamedSharding(jax.sharding.get_mesh(), weight_spec(own, shape))
        found[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rest)
    return found


def merged(trained, layer):
    """W + s A B by einsum."""
    leaves, flat = named_leaves(layer), flatten(trained)
    for name in MATRICES:
        a, b = (flat[n] for n in adapters.pair(name))
        more = jnp.einsum("eik,eko->eio", a, b, precision="highest")
        leaves[name] = leaves[name] + LORA.alpha / LORA.rank * more
    return with_leaves(layer, leaves)


def beside(trained, layer):
    return adapters.whole(trained, layer, LORA)


def weights(c) -> dict:
    """A layer's. Every token chooses two of experts 0, 1 and 2."""
    found = random(named_leaves(Moe(c, rngs=ShapesOnly())))
    bias_E = 10.0 * (np.arange(c.moe.n_experts) < 3)
    found["router_bias_E"] = jax.device_put(np.float32(bias_E), found["router_bias_E"].sharding)
    return found


def widened(leaves: dict) -> dict:
    """Packed experts as bfloat16, on one device."""
    for name in MATRICES:
        leaves[name] = frozen.widen(*(leaves.pop(f"{name}/{x}") for x in ("packed", "scales")))
    return leaves


def gradients(c, join, leaves: dict) -> dict:
    """y, and the gradients of the adapters and of x."""
    layer = with_leaves(Moe(c, rngs=ShapesOnly()), leaves)
    x_BTD = np.random.default_rng(1).normal(size=(8, 16, c.width)).astype(c.dtype)
    segments_BT = np.ones((8, 16), np.int32)
    segments_BT[2, 9:] = 0

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def found(trained, x_BTD, layer):
        rows = Rows(jax.reshard(jnp.asarray(segments_BT), act_spec("BT")))
        y_BTD, _ = join(trained, layer)(jax.reshard(x_BTD, act_spec("BT.")), rows)
        return jnp.sum(y_BTD.astype(jnp.float32) * jnp.cos(jnp.arange(c.width))), y_BTD

    trained = nest(random(pairs(c, LORA.rank)))
    (of_trained, of_x), y = jax.device_get(found(trained, x_BTD, layer))
    return flatten(of_trained) | {"x": of_x, "y": y}


def configured(dtype="float32", **changes):
    sizes = dict(latent_width=64, expert_width=64, balance="none")
    moe = dataclasses.replace(tiny.CONFIG.moe, **sizes, **changes)
    return tiny.config(moe=moe, dtype=dtype, param_dtype=dtype)


def on(n: int, **sizes):
    return jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[:n]))


@functools.cache
def of_merged_weights():
    with on(1):
        return gradients(configured(), merged, weights(configured()))


BALANCED = dict(exchange="balanced", capacity=1.0)


@pytest.mark.parametrize(
    "n, sizes, how",
    [
        (1, {}, {}),
        (4, dict(data=2, expert=2), {}),
        (4, dict(data=2, expert=2), BALANCED),
        (4, dict(fsdp=2, tensor=2), BALANCED),
    ],
    ids=["one device", "plain", "balanced", "balanced, stored over fsdp"],
)
def test_gradients_are_those_of_the_merged_weights_wherever_experts_are(n, sizes, how):
    """float32; one device has all the rows unless the others borrow its experts."""
    want = of_merged_weights()
    with on(n, **sizes):
        got = gradients(configured(**how), beside, weights(configured()))
    assert got.keys() == want.keys() and len(got) == 8
    for name, x in got.items():
        scale = np.abs(want[name]).max()
        assert scale > 1e-3, name
        np.testing.assert_allclose(x, want[name], rtol=0, atol=2e-5 * scale, err_msg=name)


def test_packed_experts_with_adapters_are_the_widened_ones_with_them():
    """bfloat16, lent and at home: what is left is rounding at other places."""
    packed, plain = (configured("bfloat16", packed=x) for x in (True, False))
    lent = dataclasses.replace(packed, moe=dataclasses.replace(packed.moe, **BALANCED))
    with on(4, data=2, expert=2):
        got = gradients(lent, beside, weights(packed))
    with on(1):
        want = gradients(plain, beside, widened(weights(packed)))
    for name, x in got.items():
        x, y = (np.float64(v) for v in (x, want[name]))
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y), name


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
@pytest.mark.slow
def test_a_tpu_takes_a_layer_of_the_released_size_and_its_gradients():
    """Packed, 14 experts on a device, rank 16."""
    sizes = dict(n_experts=14, n_active=14, latent_width=3584, expert_width=3072, packed=True)
    moe = dataclasses.replace(tiny.CONFIG.moe, balance="none", **sizes)
    c = tiny.config(moe=moe, width=7168, dtype="bfloat16", param_dtype="bfloat16")
    mesh = make_mesh(devices=described_devices("v6e:1x1"))
    with jax.set_mesh(mesh):
        layer = jax.tree.map(placed, Moe(c, rngs=ShapesOnly()))
        x_BTD = jax.ShapeDtypeStruct(
            (1, 256, c.width), jnp.bfloat16, sharding=NamedSharding(mesh, act_spec("BTD"))
        )

        def loss(trained, x_BTD, layer):
            rows = Rows(jax.reshard(jnp.ones((1, 256), jnp.int32), act_spec("BT")))
            return jnp.sum(beside(trained, layer)(x_BTD, rows)[0].astype(jnp.float32))

        found = jax.jit(jax.grad(loss, (0, 1))).lower(nest(pairs(c, 16)), x_BTD, layer)
        text = found.compile().as_text()
    # Forward A and B beside three matrices; backward both turned round, and dA and dB.
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
    n = {name: sum(f"/{name}/" in x for x in calls) for name in ("grouped_matmul", "grouped_outer")}
    assert n == {"grouped_matmul": 3 * (2 + 2 + 1), "grouped_outer": 3 * 2}
