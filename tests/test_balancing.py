"""Quantile Balancing equals its definition, counts each token once, and does balance."""

import dataclasses
import functools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import train_config
from checkpoint_states import assert_same_bits

from benchmarks import balancing as skewed
from k3_jax.balancing import bias_of_counts, bias_of_required, histogram
from k3_jax.config import TrainConfig, from_dict
from k3_jax.evaluate import loss_sums
from k3_jax.model import layer_places, router_biases, with_router_biases
from k3_jax.optim import make_optimizer
from k3_jax.train_step import init_state, objective, train_step
from k3_jax.tree import named_leaves, with_leaves
from sharding import make_mesh
from sharding.hosts import global_rows

F32 = np.float32


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(quick_compiler):
    """The models are compiled for one or two steps."""


def required_biases(scores_NE, bias_E, k):
    """alpha - s, alpha the (k+1)-th largest of s + b; and how often each expert is chosen."""
    biased_NE = scores_NE + bias_E
    order_NE = np.argsort(-biased_NE, axis=1, kind="stable")
    alpha_N1 = np.take_along_axis(biased_NE, order_NE[:, k : k + 1], axis=1)
    return alpha_N1 - scores_NE, np.bincount(order_NE[:, :k].ravel(), minlength=len(bias_E))


def histogram_rule(required_NE, bias_E, k, n_bins):
    """k3-facts 4.1, expert by expert and token by token."""
    n_experts, found = required_NE.shape[1], []
    low, span = bias_E.min() - F32(1), bias_E.max() - bias_E.min() + F32(2)
    for e in range(n_experts):
        values = [r for r in required_NE[:, e] if r < np.inf]
        counts = [0] * n_bins
        for r in values:
            counts[min(max(int(np.floor((r - low) * (F32(n_bins) / span))), 0), n_bins - 1)] += 1
        q, before, t = Fraction(len(values) * k, n_experts), 0, 0
        while before + counts[t] < -(-q // 1):
            before, t = before + counts[t], t + 1
        part = min(max((q - before) / counts[t], 0), 1)
        found.append(float(low) + float(t + part) * float(span) / n_bins)
    return np.array(found) - np.mean(found)


def exact_rule(required_NE, k):
    """Minus the (q+1)-th largest margin, centred."""
    found = []
    for column in required_NE.T:
        margins = sorted((-r for r in column if r < np.inf), reverse=True)
        found.append(-margins[len(margins) * k // required_NE.shape[1]])
    return np.array(found) - np.mean(found)


WORKED = np.array(
    """
    .669 .763 .384 .280   .325 .595 .282 .230   .741 .441 .405 .583   .857 .873 .591 .174
    .645 .594 .570 .529   .672 .393 .607 .483   .950 .580 .368 .159   .623 .640 .830 .400
    """.split(),
    float,
).reshape(8, 4)


def test_the_worked_example_of_the_facts():
    """k3-facts 4.1: loads (4,3,1,0), then (1,3,2,2), then balanced and stable by the exact rule,
    which lets a token tie and so is followed in float64; the histogram's biases, given there
    before centring."""
    bias, loads, biases = np.zeros(4), [], []
    for _ in range(4):
        required, chosen = required_biases(WORKED, bias, 1)
        got = bias_of_required(jnp.asarray(required, F32), jnp.asarray(bias, F32), 1)
        bias = exact_rule(required, 1)
        np.testing.assert_allclose(got, bias, atol=1e-6)
        loads.append(chosen.tolist())
        biases.append(bias)
    assert loads == [[4, 3, 1, 0], [1, 3, 2, 2], [2] * 4, [2] * 4]
    np.testing.assert_allclose(biases[0], [-0.0745, -0.0255, 0.0145, 0.0855], atol=1e-9)
    required, _ = required_biases(WORKED.astype(F32), np.zeros(4, F32), 1)
    got = bias_of_counts(histogram(required, jnp.zeros(4), 1000), jnp.zeros(4), 1)
    want = np.array([-0.156, -0.092, 0.002, 0.066])
    np.testing.assert_allclose(got, want - want.mean(), atol=1e-6)


@pytest.mark.parametrize("n_bins", [1, 7, 1000])
@pytest.mark.parametrize(("n", "n_experts", "k"), [(1, 5, 2), (50, 9, 4), (96, 12, 2)])
def test_both_rules_equal_their_oracles(n, n_experts, k, n_bins):
    """q whole or not, tokens that do not count, few and many bins, a bias that is not zero. The
    rules agree within a bin and the gap between neighbouring order statistics."""
    rng = np.random.default_rng(n)
    scores, bias = rng.random((n, n_experts), F32), rng.normal(size=n_experts).astype(F32)
    required, _ = required_biases(scores, bias, k)
    required[1::3] = np.inf
    counts = histogram(jnp.asarray(required), jnp.asarray(bias), n_bins)
    assert (np.asarray(counts).sum(1) == n - len(required[1::3])).all()
    got = bias_of_counts(counts, jnp.asarray(bias), k)
    np.testing.assert_allclose(got, histogram_rule(required, bias, k, n_bins), atol=2e-6)
    exact = bias_of_required(jnp.asarray(required), jnp.asarray(bias), k)
    np.testing.assert_allclose(exact, exact_rule(required, k), atol=1e-6)


def test_a_large_step_stays_within_int32():
    """2 billion tokens, so that m k is beyond int32; the share is where integers without a bound
    say that it is, in the first of two bins."""
    m, E, k = 2_000_000_000, 896, 16
    first = [m * k // E * (100 + e) // 100 + 1 for e in range(E)]
    counts = np.array([[n, m - n] for n in first], np.int32)
    want = np.array([float(Fraction(m * k, E) / n) for n in first])
    got = bias_of_counts(jnp.asarray(counts), jnp.zeros(E), k)
    np.testing.assert_allclose(got, want - want.mean(), atol=1e-6)


@pytest.mark.parametrize("balance", ["quantile", "exact"])
def test_one_layer_equals_the_oracle(one_device, balance):
    """896 experts, top-16, 60 tokens in 3 micro-batches: loads, and the bias from a sloped one."""
    c, bias = skewed.config(balance), np.linspace(-0.3, 0.3, 896, dtype=F32)
    scores = np.asarray(skewed.scores(skewed.ROUTERS["narrow"], 60, 0, 0))[0]
    required, loads = required_biases(scores, bias, 16)
    given = jnp.asarray(scores).reshape(3, 1, 20, 896)
    got, chosen = skewed.balance_step(c, jnp.asarray(bias)[None], given)
    assert np.array_equal(chosen, loads)
    exact = balance == "exact"
    want = exact_rule(required, 16) if exact else histogram_rule(required, bias, 16, 1000)
    np.testing.assert_allclose(got[0], want, atol=2e-6)


def test_a_step_without_tokens_keeps_the_bias():
    bias = jnp.array([0.25, -1.0, 3.0])
    nothing = jnp.full((6, 3), jnp.inf)
    assert np.array_equal(bias_of_counts(histogram(nothing, bias, 10), bias, 1), bias)
    assert np.array_equal(bias_of_required(nothing, bias, 1), bias)


@pytest.mark.parametrize(("name", "n_tokens"), [("sparse", 8192), ("narrow", 4096)])
def test_a_skewed_router_is_balanced_within_six_steps(one_device, name, n_tokens):
    """896 experts, top-16, fresh tokens: from 20 times the mean to what chance leaves."""
    found = skewed.loads(skewed.ROUTERS[name], n_tokens, 11, skewed.config())
    assert found[0] > 19 and max(found[6:]) < skewed.bound(n_tokens), found


@pytest.mark.parametrize("balance", ["quantile", "exact"])
def test_devices_and_micro_batches_give_the_same_bits(balance):
    """896 experts, five steps: 8 devices, 4 micro-batches, and both, against neither."""

    def run(accumulate, **sizes):
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        with jax.set_mesh(make_mesh(**sizes, devices=devices)):
            c, bias = skewed.config(balance), jnp.zeros((1, 896))
            for step in range(5):
                scores = skewed.scores(skewed.ROUTERS["sparse"], 256, 0, step)
                bias, _ = skewed.balance_step(c, bias, scores.reshape(accumulate, 8, -1, 896))
            return np.asarray(bias)

    want = run(1, data=1)
    assert np.ptp(want) > 0.5
    for accumulate, sizes in [(4, dict(data=1)), (1, EIGHT), (4, EIGHT)]:
        assert_same_bits(run(accumulate, **sizes), want)


EIGHT = dict(data=2, fsdp=2, expert=2)


def small(accumulate=1, **moe) -> TrainConfig:
    """tests/train_config.py with keys of its MoE layer changed."""
    values = train_config.get_config().to_dict() | {"accumulate": accumulate}
    values["model"]["moe"] |= moe
    return from_dict(TrainConfig, values)


def test_settings_that_cannot_work_are_refused():
    """An unknown rule, and a cutoff where every expert is chosen."""
    with pytest.raises(ValueError, match="'quantil' is not one of quantile, exact, none"):
        small(balance="quantil")
    with pytest.raises(ValueError, match="n_active=8 of moe.n_experts=8; set moe.balance='none'"):
        small(n_active=8)
    assert small(n_active=8, balance="none").model.moe.n_active == 8


def batch_of(rows: dict, accumulate: int) -> dict:
    """Rows over the mesh in micro-batches."""
    cut = {k: np.asarray(v).reshape(accumulate, -1, v.shape[-1]) for k, v in rows.items()}
    return {k: global_rows(v, jax.sharding.get_mesh(), row_axis=1) for k, v in cut.items()}


def rows_of(n: int = 8) -> dict:
    """Rows of 64 tokens, the second half of every third one pads."""
    tokens = np.random.default_rng(0).integers(0, 256, (n, 64), dtype=np.int32)
    segments = np.ones((n, 64), np.int32)
    segments[::3, 32:] = 0
    return {"tokens": tokens, "segments": segments}


@functools.cache
def program(config, tx):
    bound = functools.partial(
        train_step, config=config, tx=tx, learning_rate=optax.constant_schedule(0.1)
    )
    return jax.jit(bound)


SGD = optax.sgd(0.1)


def one_step(rows, config, n_devices=1, **sizes):
    """The router biases after a step from the same start, and what the step tells."""
    with jax.set_mesh(make_mesh(**sizes, devices=jax.devices()[:n_devices])):
        state = init_state(config, SGD)
        state, values = program(config, SGD)(state, batch_of(rows, config.accumulate))
        return np.asarray(router_biases(state.model)), jax.device_get(values)


@pytest.fixture(scope="module")
def plain():
    return one_step(rows_of(), small())


@pytest.mark.parametrize(
    ("accumulate", "sizes"),
    [(4, {}), (1, EIGHT), (1, dict(data=2, seq=2, tensor=2))],
    ids=str,
)
def test_a_training_step_gives_the_same_bits_on_any_mesh(plain, accumulate, sizes):
    """Micro-batches run inside one step: there is no state between them to save."""
    n_devices = int(np.prod(list(sizes.values())))
    got, values = one_step(rows_of(), small(accumulate=accumulate), n_devices, **sizes)
    assert np.ptp(got) > 1e-3 and abs(got.mean()) < 1e-7
    assert_same_bits(got, plain[0])
    for name in ("load_mean", "load_max", "load_min", "load_max_layers", "dropped"):
        assert np.array_equal(values[name], plain[1][name]), name
    assert values["load_mean"] == (8 * 64 - 3 * 32) * 2 / 8 and values["dropped"] == 0


def test_pads_do_not_count(plain):
    """T22: as many rows of pads again, all alike and so with constant logits: the same bits."""
    rows = rows_of()
    padded = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in rows.items()}
    got, values = one_step(padded, small(accumulate=2))
    assert_same_bits(got, plain[0])
    assert values["load_max"] == plain[1]["load_max"]
    # They would have counted: as tokens of a document they move the bias.
    padded["segments"] = np.where(padded["segments"] == 0, 2, padded["segments"])
    assert not np.array_equal(one_step(padded, small(accumulate=2))[0], got)


def test_masked_tokens_do_not_count(plain):
    """A token that is not to be learned counts as little as a pad; with all of them masked nothing
    is left to count and the bias stays."""
    rows = rows_of()
    mask = np.ones((8, 64), np.int32)
    same, _ = one_step(rows | {"mask": mask}, small())
    assert_same_bits(same, plain[0])
    mask[:, ::2] = 0
    got, values = one_step(rows | {"mask": mask}, small())
    assert values["load_mean"] == plain[1]["load_mean"] / 2
    assert not np.array_equal(got, plain[0])
    none, _ = one_step(rows | {"mask": np.zeros_like(mask)}, small())
    assert not none.any()


def test_one_value_switches_it_off_and_weight_decay_never_moves_the_bias(one_device):
    """From a bias that is not zero. Off, its bits stay, under AdamW with a large decay too; on, it
    is replaced. This step's tokens are routed by the old bias, on or off."""
    rows, c = batch_of(rows_of(), 1), small()
    tx = make_optimizer(dataclasses.replace(c.optim, weight_decay=10.0), c.steps)
    bias_ZE = jnp.linspace(-0.5, 0.5, 8)[None]

    def step(config, tx):
        state = init_state(config, tx)
        state = dataclasses.replace(state, model=with_router_biases(state.model, bias_ZE))
        state, values = program(config, tx)(state, rows)
        return router_biases(state.model), values

    off, values = step(small(balance="none"), tx)
    assert_same_bits(off, bias_ZE)
    assert values["load_max"] > 1 and values["bias_range"] == 1
    on, told = step(c, SGD)
    assert not np.array_equal(on, bias_ZE) and told["load_max"] == values["load_max"]


def test_every_layer_gets_the_bias_of_its_own_tokens(one_device):
    """Five MoE layers in scanned groups: where `layer_places`, as conversion does, says layer i
    is, there is the bias that the oracle makes of what layer i's router said."""
    moe = dataclasses.replace(tiny.CONFIG.moe, balance="exact")
    c = dataclasses.replace(small(), model=tiny.config(moe=moe))
    model, tokens_BT = tiny.model(moe=moe), tiny.tokens((2, 64), seed=2)
    segments_BT = jnp.ones((2, 64), jnp.int32).at[1, 40:].set(0)
    forward = jax.jit(lambda m: m(m.embed(tokens_BT), segments_BT, counted_BT=segments_BT != 0))
    required_ZBTE = np.asarray(forward(model).routing.required_BTE)
    assert required_ZBTE.shape == (5, 2, 64, 8)
    state = init_state(c, SGD)
    state = dataclasses.replace(state, model=with_leaves(state.model, named_leaves(model)))
    rows = {"tokens": tokens_BT[None], "segments": segments_BT[None]}
    after, values = program(c, SGD)(state, rows)
    assert values["load_max_layers"].shape == (5,)
    leaves, found = named_leaves(after.model), router_biases(after.model)
    for layer, (folder, place) in enumerate(layer_places(tiny.CONFIG)):
        if layer >= tiny.CONFIG.n_dense:
            want = exact_rule(required_ZBTE[layer - 1].reshape(-1, 8), 2)
            got = leaves[f"{folder}/ffn/router_bias_E"][place]
            np.testing.assert_allclose(got, want, atol=2e-5, err_msg=folder)
            assert np.array_equal(found[layer - 1], got)


def equations(jaxpr, name):
    """All equations of a primitive, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from equations(getattr(value, "jaxpr", value), name)


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


@pytest.mark.parametrize("remat", ["none", "layer", "group", "dots"])
def test_tokens_are_counted_once_and_only_in_training(one_device, remat):
    """The backward pass recomputes the router, not the histogram; evaluation has neither that nor
    a wider top-k."""
    c = dataclasses.replace(small(), model=tiny.config(remat=remat))
    rows = {"tokens": tiny.tokens((2, 64)), "segments": jnp.ones((2, 64), jnp.int32)}
    model = jax.eval_shape(tiny.model)

    def counted(fn):
        jaxpr = jax.make_jaxpr(fn)(model).jaxpr
        found = [e.outvars[0].aval.shape for e in equations(jaxpr, "scatter-add")]
        widest = max(e.outvars[0].aval.shape[-1] for e in equations(jaxpr, "top_k"))
        return found.count((8, 1000)), widest

    forward = counted(lambda m: objective(m, rows, c))
    assert forward[0] > 0 and forward[1] == 3
    assert counted(jax.grad(lambda m: objective(m, rows, c), has_aux=True)) == forward
    assert counted(lambda m: loss_sums(m, c, rows)[0]) == (0, 2)


def test_a_step_adds_counts_over_devices_once_and_tells_what_was_dropped():
    """Two micro-batches, 4 devices, room for half of the copies, pads included: of the compiled
    step's exchanges one has integers of the histogram's shape, and no other more than the loads."""
    c = small(accumulate=2, capacity=0.5)
    with jax.set_mesh(make_mesh(data=2, expert=2, devices=jax.devices()[:4])):
        state, rows = init_state(c, SGD), batch_of(rows_of(), 2)
        compiled = program(c, SGD).lower(state, rows).compile()
        _, values = compiled(state, rows)
    lines = compiled.as_text().splitlines()
    reduces = [x.split(" all-reduce(")[0] for x in lines if " all-reduce(" in x]
    shapes = [found for x in reduces for found in re.findall(r"s32\[([\d,]*)\]", x)]
    assert shapes.count("1,8,1000") == 1
    assert set(shapes) <= {"1,8,1000", "1,8", ""}, shapes
    real, kept = (8 * 64 - 3 * 32) * 2, 8 * 64
    assert 1 - kept / real <= values["dropped"] < 0.5
