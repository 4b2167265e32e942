"""One program on many meshes: the same loss and the same gradients as on one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3_jax.axes import einsum, read
from k3_jax.checkpoint.tree import placed
from k3_jax.checks import check_split
from k3_jax.layers import moe
from k3_jax.layers.moe import Moe, row_bound
from k3_jax.loss import cross_entropy, next_tokens
from k3_jax.model import K3, abstract
from k3_jax.state import Rows
from k3_jax.tree import named_leaves
from sharding import ROUTED, act_spec, make_mesh, weight_spec
from sharding.hosts import row_share

pytestmark = pytest.mark.usefixtures("quick_compiler")
MESHES = {
    "rows, stored weights and experts": dict(data=2, fsdp=2, expert=2),
    "heads and experts": dict(expert=2, tensor=2),
    "time, rows and experts": dict(expert=2, seq=4),
}


def on_mesh(**sizes):
    """The mesh of the first devices."""
    return jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())]))


def documents():
    """8 packed rows: documents that end early, and pads."""
    tokens_BT = np.asarray(tiny.tokens((8, 32)))
    segments_BT = np.ones_like(tokens_BT)
    segments_BT[1, 20:], segments_BT[3, 9:], segments_BT[6, :5] = 2, 0, 3
    segments_BT[4, 8:], segments_BT[5, 15:17], segments_BT[5, 17:] = 2, 2, 3  # at a shard's edge
    return tokens_BT, segments_BT


def test_the_gradient_of_a_projection_is_scattered_and_never_whole():
    """It stays parts, as many as there are devices of rows, until it is where the weight rests."""
    with on_mesh(data=2, fsdp=2, expert=2):
        x = jax.reshard(jnp.ones((8, 4, 16)), act_spec("BT."))
        w = nnx.Param(jax.reshard(jnp.ones((16, 8)), P("fsdp", "expert")))
        y, pull = jax.vjp(lambda w: einsum("BTD,DF->BTF", x, w), w)
        program = str(jax.make_jaxpr(pull)(y))
        (dw,) = pull(y)
    assert "{U:(data,fsdp,expert)}" in program
    assert jax.typeof(dw.get_value()).sharding.spec == P("fsdp", "expert")
    np.testing.assert_array_equal(dw.get_value(), np.full((16, 8), 8 * 4 * 16))


@pytest.mark.parametrize("packed", [False, True])
def test_an_abstract_model_is_what_making_one_gives(packed):
    with on_mesh(fsdp=2, expert=2, tensor=2):
        # Blocks of 32 inputs, a whole number of them on each device.
        sizes = dict(packed=packed, latent_width=64, expert_width=64)
        moe = dataclasses.replace(tiny.CONFIG.moe, **sizes)
        c = tiny.config(moe=moe, dtype="bfloat16")
        made, told = jax.eval_shape(lambda: K3(c, rngs=tiny.rngs())), abstract(c)
    assert named_leaves(told) == named_leaves(made)
    assert jax.tree.structure(told) == jax.tree.structure(made)
    assert any(leaf.sharding.spec != P() for leaf in jax.tree.leaves(told))


@jax.jit
def loss_and_grads(model, tokens_BT, segments_BT):
    def loss(model):
        hidden_BTD = model(model.embed(tokens_BT), segments_BT).hidden_BTD
        targets = next_tokens(tokens_BT, segments_BT)
        sums = cross_entropy(hidden_BTD, read(model.head_DV), *targets, chunk=64)
        return sums.nats / sums.count

    return jax.value_and_grad(loss)(model)


@functools.cache
def weights(make):
    """The leaves of make() as numpy arrays, built once: each new shape compiles a program."""
    with on_mesh(data=1):
        return jax.device_get(jax.tree.leaves(make()))


def rest(make):
    """make() with those leaves, where they rest on the mesh."""
    abstract, structure = jax.tree.flatten(jax.eval_shape(make))
    shardings = [placed(x).sharding for x in abstract]
    return structure.unflatten(jax.device_put(weights(make), shardings))


@pytest.fixture(scope="module")
def one():
    with on_mesh(data=1):
        return jax.device_get(loss_and_grads(rest(tiny.model), *documents()))


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_a_mesh_gives_the_loss_and_gradients_of_one_device(sizes, one):
    """Each gradient rests where its weight does."""
    with on_mesh(**sizes):
        model = rest(tiny.model)
        loss, grads = loss_and_grads(model, *documents())
    assert abs(loss - one[0]) < 1e-5
    wanted, leaves = named_leaves(one[1]), named_leaves(model)
    for name, g in named_leaves(grads).items():
        # Sums over rows in another order.
        error = np.linalg.norm(np.asarray(g) - wanted[name])
        assert error <= 1e-4 * np.linalg.norm(wanted[name]) + 1e-7, name
        assert g.sharding == leaves[name].sharding, name


CHOICES = {
    "an expert with no token": lambda t, a: (t * 3 + a) % 7,
    "all on one device": lambda t, a: (t + a) % 2,
    "skewed": lambda t, a: np.minimum((t * t) % 11, 6) * (1 - a) + 7 * a,
}


@functools.cache
def make_moe(**changes):
    c = tiny.config(moe=dataclasses.replace(tiny.CONFIG.moe, **changes))
    return lambda: Moe(c, rngs=tiny.rngs())


def moe_case(choice, **changes):
    """A MoE layer's output, gradients of tokens and weights, and drops, for forced experts."""
    layer, width = rest(make_moe(**changes)), tiny.CONFIG.width
    t, a = np.arange(8 * 16).reshape(8, 16, 1), np.arange(2)
    forced_BTA = np.broadcast_to(choice(t, a), (8, 16, 2)).astype(np.int32)
    segments_BT = np.ones((8, 16), np.int32)
    segments_BT[2, 9:] = 0
    x_BTD = jax.random.normal(jax.random.key(3), (8, 16, width))

    def loss(layer, x_BTD):
        x, forced = (jax.reshard(x, act_spec("BT.")) for x in (x_BTD, jnp.asarray(forced_BTA)))
        rows = Rows(jax.reshard(jnp.asarray(segments_BT), act_spec("BT")))
        y_BTD, routing = layer(x, rows, forced)
        return jnp.sum(y_BTD * jnp.cos(jnp.arange(width))), (y_BTD, jnp.sum(routing.n_dropped_P))

    grads, (y, n_dropped) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(layer, x_BTD)
    return jax.device_get((y, grads[1], named_leaves(grads[0]), n_dropped))


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_experts_on_their_own_devices_equal_one_device(choice):
    """T20, T21: skewed routing, an expert without a token, every token on one device."""
    with on_mesh(data=1):
        want = moe_case(choice)
    balanced = dict(exchange="balanced", capacity=1.0)
    for sizes, how in [
        (dict(expert=4), {}),
        (dict(expert=4), balanced),
        (dict(fsdp=2, expert=2, tensor=2), balanced),
    ]:
        with on_mesh(**sizes):
            got = moe_case(choice, **how)
        assert got[3] == want[3] == 0
        for a, b in zip(jax.tree.leaves(got[:3]), jax.tree.leaves(want[:3]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rounds_bring_every_row_whatever_the_buffer(monkeypatch):
    """All tokens on one of four devices, which takes a quarter of them a round, and skewed."""
    monkeypatch.setattr(moe, "FEW_ROWS", 1)
    how = dict(exchange="rounds", capacity=1.0)
    t, a = np.arange(8 * 16).reshape(8, 16, 1), np.arange(2)
    x_BTD = jax.random.normal(jax.random.key(3), (8, 16, tiny.CONFIG.width))
    for choice in CHOICES.values():
        forced_BTA = jnp.asarray(np.broadcast_to(choice(t, a), (8, 16, 2)), jnp.int32)
        found = []
        for sizes in (dict(data=1), dict(expert=4), dict(data=2, expert=2)):
            with on_mesh(**sizes):
                ones = jax.reshard(jnp.ones((8, 16), jnp.int32), act_spec("BT"))
                run = jax.jit(lambda layer, x, forced, ones=ones: layer(x, Rows(ones), forced))
                args = (jax.reshard(v, act_spec("BT.")) for v in (x_BTD, forced_BTA))
                y_BTD, routing = run(rest(make_moe(**how)), *args)
                assert int(jnp.sum(routing.n_dropped_P)) == 0
                found.append(jax.device_get(y_BTD))
        for y in found[1:]:
            np.testing.assert_allclose(y, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capacity", [0.5, 1, 2, 4])
def test_a_bounded_buffer_drops_and_counts(capacity):
    """T21. Each of four devices sends 2 copies of its 32 tokens (7 of the 128 are pads) to the two
    experts of one of them, and that one takes `capacity` times the copies of one device."""
    with on_mesh(expert=4):
        y, dx, _, n_dropped = moe_case(CHOICES["all on one device"], capacity=capacity)
        whole = moe_case(CHOICES["all on one device"])
    assert n_dropped == max(2 * (128 - 7) - capacity * 64, 0)
    is_whole = np.isclose(y, whole[0], rtol=1e-4, atol=1e-5).all(-1)
    assert is_whole.sum() >= 128 - n_dropped and np.isfinite(dx).all()
    assert is_whole.all() == (n_dropped == 0)


def test_the_bound_without_capacity_holds_whatever_is_chosen():
    """The released model on 64 devices: 14 experts each, so at most 14 of a token's 16 copies."""
    c = dataclasses.replace(tiny.CONFIG.moe, n_experts=896, n_active=16)
    assert row_bound(16 * 100, 64, c) == 64 * 100 * 14
    assert row_bound(16 * 100, 8, c) == 8 * 100 * 16
    assert row_bound(16 * 100, 64, dataclasses.replace(c, capacity=1.5)) == 2400


def test_weights_rest_on_every_axis_that_divides_them():
    with on_mesh(fsdp=2, expert=2, tensor=2):
        assert weight_spec("DHk", (32, 4, 16)) == jax.P(("fsdp", "expert"), "tensor", None)
        assert weight_spec("DF", (2, 8)) == jax.P("fsdp", ("tensor", "expert"))
        assert weight_spec("ELF", (8, 16, 24)) == jax.P(("expert", "tensor"), "fsdp", None)
        assert weight_spec("D", (32,)) == weight_spec("H", (32,))[:0] + jax.P(None)
        assert act_spec("BTE", ROUTED) == jax.P(
            ("fsdp", "expert", "tensor"), None, ("expert", "tensor")
        )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(data=3), "3 devices, but 8"),
        (dict(data=-1, fsdp=-1), "at most one"),
        (dict(data=0), "positive"),
        (dict(fsdp=8, slices=2), "mesh.data=1 does not divide over mesh.slices=2"),
    ],
)
def test_a_mesh_that_cannot_be_says_why(sizes, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(**sizes, devices=jax.devices())


def test_a_model_that_the_mesh_does_not_divide_is_refused_by_name():
    mesh = make_mesh(expert=2, tensor=4, devices=jax.devices())
    with pytest.raises(ValueError, match="mesh.tensor=4 does not divide {'kda.n_heads': 2"):
        check_split(tiny.CONFIG, mesh, 256)


def test_one_process_brings_all_rows():
    assert row_share(make_mesh(data=2, seq=4, devices=jax.devices())) == (0, 1)
