"""Muon against a loop over every matrix and head; its rules; what the mesh computes and moves."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs import k3
from k3_jax.config import OptimConfig, TrainConfig, from_dict
from k3_jax.hlo import collectives
from k3_jax.model import abstract
from k3_jax.optim import make_optimizer
from k3_jax.optim.coverage import coverage
from k3_jax.optim.muon import ADAMW, COEFFICIENTS, PER_HEAD, WHOLE, orthogonalize, rule
from k3_jax.tree import named_leaves, with_leaves
from sharding import make_mesh
from sharding.matrices import Stack, on_whole

EXACT = OptimConfig(name="muon_per_head", ns_dtype="float32", warmup_ratio=0.0)


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(quick_compiler):
    yield


def gradients():
    """A random tree placed as the model's weights, parameters of four sizes from 1e-3 to 1."""
    rng, shapes = np.random.default_rng(0), abstract(tiny.config())
    mesh, found = jax.sharding.get_mesh(), {}
    for i, (name, x) in enumerate(named_leaves(shapes).items()):
        noise = rng.standard_normal(x.shape, np.float32) * np.float32(10.0 ** (-i % 4))
        found[name] = jax.device_put(noise, NamedSharding(mesh, x.sharding.spec))
    return with_leaves(shapes, found)


def muon_only(tree, c):
    """The tree with nothing where AdamW rules, as optax.partition hands it on."""
    leaves = named_leaves(tree)
    for name in leaves:
        if rule(name, c.name).optimizer != "muon":
            leaves[name] = optax.MaskedNode()
    return with_leaves(tree, leaves)


def orthogonal(matrix):
    """Newton-Schulz as it is written down, in float64."""
    x, (a, b, c) = matrix / (np.linalg.norm(matrix) + 1e-8), COEFFICIENTS
    for _ in range(5):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


def one_by_one(name, x, c):
    """What Muon makes of a parameter: a Python loop over its matrices, which are cut by hand."""
    x, own = np.asarray(x, np.float64), name.rsplit("/", 1)[-1]
    letters = own.rsplit("_", 1)[-1]
    per_head = c.name == "muon_per_head" and own in (
        *("q_DHk", "k_DHk", "v_DHv", "q_b_QHq", "k_b_CHk", "v_b_CHv"),
    )
    out = np.empty_like(x)
    for lead in np.ndindex(x.shape[: x.ndim - len(letters)]):
        w, made = x[lead], out[lead]
        if per_head:
            cuts = [(slice(None), h) for h in range(w.shape[1])]
        elif letters[0] == "E":
            cuts = [(e,) for e in range(len(w))]
        else:
            cuts = [()]
        for cut in cuts:
            part = w[cut]
            matrix = part
            if part.ndim == 3:
                n_rows = part.shape[0] * part.shape[1] if letters == "HvD" else part.shape[0]
                matrix = part.reshape(n_rows, -1)
            made[cut] = (c.update_rms * math.sqrt(max(matrix.shape)) * orthogonal(matrix)).reshape(
                part.shape
            )
    return out


def run(tree, c):
    tree = muon_only(tree, c)
    return named_leaves(jax.jit(lambda x: orthogonalize(c).update(x, None)[0])(tree))


@pytest.mark.parametrize("kind", ["muon_per_head", "muon"])
def test_every_matrix_is_updated_as_if_it_were_alone(one_device, kind):
    """In float32, 1e-4 of an update whose root mean square is about 0.2."""
    c = dataclasses.replace(EXACT, name=kind)
    grads = gradients()
    got, given = run(grads, c), named_leaves(grads)
    assert len({name.rsplit("/", 1)[-1] for name in got}) == len(WHOLE)
    for name, x in got.items():
        np.testing.assert_allclose(x, one_by_one(name, given[name], c), atol=1e-4, err_msg=name)
        # A singular value becomes 0.7 to 1.2; small matrices have few, and beta_DH is flat.
        assert 0.1 < np.sqrt(np.mean(np.square(x))) < 0.25, name


def test_bfloat16_is_a_rounding_of_float32(one_device):
    """Five steps of bfloat16 products: within a tenth of the update's size."""
    grads = gradients()
    exact, got = run(grads, EXACT), run(grads, dataclasses.replace(EXACT, ns_dtype="bfloat16"))
    for name, x in got.items():
        difference = np.linalg.norm(x - exact[name]) / np.linalg.norm(exact[name])
        assert 0 < difference < 0.1, (name, difference)


def test_one_head_does_not_move_the_others(one_device):
    """T23: head 1 of 2 scaled by 1000 through the whole optimizer, momentum included. q, k, v of
    KDA and q_b, k_b, v_b of MLA are among the parameters; their other head keeps every bit."""
    model = gradients()
    c = dataclasses.replace(EXACT, clip_norm=1e9)
    grads = named_leaves(gradients())
    heads = [name for name in grads if name.rsplit("/", 1)[-1] in PER_HEAD]
    assert {name.rsplit("/", 1)[-1] for name in heads} == set(
        "q_DHk k_DHk v_DHv q_b_QHq k_b_CHk v_b_CHv".split()
    )
    louder = grads | {name: grads[name].at[..., 1, :].multiply(1000) for name in heads}

    def both(c):
        tx = make_optimizer(c, 10)
        update = jax.jit(lambda g: tx.update(g, tx.init(model), model)[0])
        return (named_leaves(update(with_leaves(model, g))) for g in (grads, louder))

    one, other = both(c)
    for name in heads:
        np.testing.assert_array_equal(one[name][..., 0, :], other[name][..., 0, :], err_msg=name)
        assert not jnp.array_equal(one[name], other[name])
    one, other = both(dataclasses.replace(c, name="muon"))
    for name in heads:
        assert not jnp.array_equal(one[name][..., 0, :], other[name][..., 0, :]), name


MESHES = {
    "experts": dict(fsdp=4, expert=2),
    "copies": dict(data=2, fsdp=2, expert=2),
    "heads": dict(data=2, fsdp=2, tensor=2),
    "time": dict(expert=2, seq=2, tensor=2),
}


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_eight_devices_update_like_one(sizes):
    """Numbers of matrices that eight does not divide (1, 2, 5, ...) are among them. In float32."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        want = jax.device_get(run(gradients(), EXACT))
    with jax.set_mesh(make_mesh(**sizes)):
        grads = gradients()
        got, placed = run(grads, EXACT), named_leaves(grads)
        for name, x in got.items():
            np.testing.assert_allclose(x, want[name], atol=1e-4, err_msg=name)
            assert x.sharding == placed[name].sharding, name


def compiled(sizes, n_devices):
    """The program of Muon alone on this mesh."""
    with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[:n_devices])):
        tree = muon_only(abstract(tiny.config()), EXACT)
        return jax.jit(lambda x: orthogonalize(EXACT).update(x, None)[0]).lower(tree).compile()


def test_no_stack_is_gathered():
    """Weights split over fsdp and expert travel by all-to-all alone. Copies along data are gathered
    into what rests on a device, a quarter of an expert stack, and no further."""
    split = collectives(compiled(MESHES["experts"], 8).as_text())
    assert {op.opcode for op in split} == {"all-to-all"}
    copied = collectives(compiled(MESHES["copies"], 8).as_text())
    assert {op.opcode for op in copied} == {"all-to-all", "all-gather"}
    # data is the outermost of the mesh's axes: device 4 has a copy of what device 0 has.
    assert {op.group for op in copied if op.opcode == "all-gather"} == {(0, 4)}


def test_no_matrix_is_computed_twice():
    """FLOPs of eight devices together over those of one: what filling up with zeros adds, where
    computing on every replica would give 8 (2 along data alone)."""
    alone = compiled({}, 1).cost_analysis()["flops"]
    for sizes in MESHES.values():
        assert 1 <= 8 * compiled(sizes, 8).cost_analysis()["flops"] / alone < 1.3


def test_every_parameter_of_the_released_model_has_one_rule():
    """WHOLE and ADAMW share no name and know no name that the model lacks; the numbers of matrices
    follow from the configuration alone: 69 KDA layers, 24 MLA, 92 MoE, 96 heads, 896 experts."""
    c = from_dict(TrainConfig, k3.get_config())
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        leaves = named_leaves(abstract(c.model))
    own = {name.rsplit("/", 1)[-1] for name in leaves}
    assert not WHOLE.keys() & ADAMW and WHOLE.keys() | ADAMW == own and PER_HEAD.keys() < own
    rows = {row.name: row for row in coverage(leaves, c.optim)}
    # The release counts 32 pads in every A_log besides.
    assert sum(row.parameters for row in rows.values()) == 2_779_484_478_208 - 69 * 32
    counts = {name: row.matrices for name, row in rows.items() if row.rule.optimizer == "muon"}
    kda, moe = 69, 92
    assert counts == {
        **dict.fromkeys(("q_DHk", "k_DHk", "v_DHv"), kda * 96),
        **dict.fromkeys(("decay_a_DR", "decay_b_RHk", "beta_DH"), kda),
        **dict.fromkeys(("gate_DHv", "out_HvD"), 93),
        **dict.fromkeys(("q_b_QHq", "k_b_CHk", "v_b_CHv"), 24 * 96),
        **dict.fromkeys(("q_a_DQ", "kv_a_DM"), 24),
        **dict.fromkeys(("gate_DF", "up_DF", "down_FD"), 1 + moe),
        **dict.fromkeys(("down_DL", "up_LD"), moe),
        **dict.fromkeys(("gate_ELF", "expert_up_ELF", "expert_down_EFL"), moe * 896),
    }
    assert rows["q_b_QHq"].sizes == ("1536 x 192",) and rows["k_b_CHk"].sizes == ("512 x 128",)
    assert set(rows["gate_DF"].sizes) == {"7168 x 33792", "7168 x 6144"}


def test_a_parameter_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="'a/new_DD'.*neither has 'new_DD'"):
        rule("a/new_DD", "muon")


def test_the_state_of_adamw_is_what_it_was_before_muon(one_device):
    """Checkpoints of older runs hold these names; Muon's momentum is one number a parameter."""
    model = gradients()
    n = len(named_leaves(model))
    adamw = make_optimizer(dataclasses.replace(EXACT, name="adamw"), 10)
    names = named_leaves(jax.eval_shape(adamw.init, model))
    assert {name.split("/", 3)[-1] for name in names if name.startswith("1/0/mu")} >= {"embed_VD"}
    tops = collections.Counter("/".join(name.split("/")[:3]) for name in names)
    assert tops == {"1/0/count": 1, "1/0/mu": n, "1/0/nu": n, "1/2/count": 1}
    muon = make_optimizer(dataclasses.replace(EXACT, momentum_dtype="bfloat16"), 10)
    moments = [x for x in named_leaves(jax.eval_shape(muon.init, model)).items() if x[1].ndim]
    for name, x in moments:
        of_muon = name.rsplit("/", 1)[-1] in WHOLE
        assert ("inner_states/muon" in name) == of_muon and (x.dtype == jnp.bfloat16) == of_muon
    assert len(moments) == 2 * n - sum(
        name.rsplit("/", 1)[-1] in WHOLE for name in named_leaves(model)
    )


@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize(
    "sizes, spec",
    [
        (dict(fsdp=2, expert=2, tensor=2), (None, "expert", "fsdp", "tensor")),
        (dict(data=2, fsdp=2, seq=2), (None, None, "fsdp", "seq")),
        (dict(fsdp=4, tensor=2), (None, None, None, ("tensor", "fsdp"))),
    ],
)
def test_matrices_are_whole_where_they_are_computed(sizes, spec, n):
    """Rows over one mesh axis, columns over two, and copies; a counting axis over a third; a second
    stack with its axes in another order. What is done needs the whole matrix."""

    def fn(x):
        return x - jnp.sum(x * jnp.arange(1.0, 33).reshape(4, 8), axis=(1, 2), keepdims=True)

    with jax.set_mesh(make_mesh(**sizes)):
        mesh = jax.sharding.get_mesh()
        a, b = (np.random.default_rng(i).standard_normal((n, 2, 4, 8)) for i in range(2))
        placed = jax.device_put(a, NamedSharding(mesh, P(*spec)))
        there = (3, 1, 0, 2)
        moved = jax.device_put(
            b.transpose(there), NamedSharding(mesh, P(*(spec[i] for i in there)))
        )
        stacks = [Stack(placed, (2, 3)), Stack(moved, (3, 0))]
        assert stacks[0].kind == stacks[1].kind
        got = jax.jit(lambda a, b: on_whole(fn, [Stack(a, (2, 3)), Stack(b, (3, 0))]))(
            placed, moved
        )
    assert [x.sharding for x in got] == [placed.sharding, moved.sharding]
    for x, y, back in ((a, got[0], (0, 1, 2, 3)), (b, got[1], (2, 1, 3, 0))):
        want = np.stack([np.asarray(fn(m)) for m in x.astype(np.float32)])
        np.testing.assert_allclose(np.asarray(y).transpose(back), want, rtol=1e-4, atol=1e-4)
