"""Health figures against NumPy on what the layers were given, and on several devices."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
import train_config
from runs import train_here

from k3_jax.checkpoint.tree import placed
from k3_jax.config import TrainConfig, from_dict
from k3_jax.goodput import Clock
from k3_jax.health import QUANTILES, Health
from k3_jax.metrics import Metrics
from k3_jax.model import abstract, layer_places
from k3_jax.train_step import loss_sums
from k3_jax.tree import named_leaves
from sharding import make_mesh

pytestmark = pytest.mark.usefixtures("quick_compiler")

# Three AttnRes blocks of a KDA and an MLA layer, alike, under one scan.
SIZES = dict(n_layers=6, mla_layers=(1, 3, 5), block_layers=2, n_dense=0, situ_beta=0.2)
MODEL = tiny.config(**SIZES)
CONFIG = dataclasses.replace(
    from_dict(TrainConfig, train_config.get_config()), model=MODEL, z_loss=1e-3
)


def batch():
    """Two micro-batches of four rows; of the second nothing is told."""
    tokens = np.asarray(tiny.tokens((2, 4, 64)))
    segments = np.ones_like(tokens)
    segments[0, 1, 20:], segments[0, 2, 9:], segments[0, 3, 50:] = 2, 0, 0
    return {"tokens": tokens, "segments": segments}


@pytest.fixture(scope="module")
def looked_at():
    """Of one device: the figures; what each layer had, as arrays by layer; weights; gradients."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        model = tiny.model(**SIZES)
        told = Health(CONFIG)(model, batch())
        rows = {k: v[0] for k, v in batch().items()}

        def look(layer, at):
            names = ("before_BTD", "attn_in_BTD", "between_BTD", "ffn_in_BTD", "after_BTD")
            return {name: getattr(at, name) for name in names}

        @jax.jit
        def run(model):
            def loss(model):
                sums, out = loss_sums(model, CONFIG, rows, look=look)
                return (sums.nats + 1e-3 * sums.z) / sums.count, out

            grads, out = jax.grad(loss, has_aux=True)(model)
            return model.embed(rows["tokens"]), out.seen, out.routing.experts_BTA, grads

        embedded, seen, experts, grads = jax.device_get(run(model))
        return told, embedded, seen, experts, by_layer(model), by_layer(grads), model


def by_layer(model):
    """{name within the layer: array} of each layer."""
    leaves = {k: np.asarray(v, np.float64) for k, v in named_leaves(model).items()}
    return [
        {
            k.removeprefix(f"{folder}/"): v[place]
            for k, v in leaves.items()
            if k.startswith(f"{folder}/")
        }
        for folder, place in layer_places(MODEL)
    ]


REAL = batch()["segments"][0] != 0


def rms_norm(x, weight):
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + MODEL.norm_eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mixed(rows, norm, query):
    """Weights of the rows [J, B, T] and their mixture. Report Eq. 8-10."""
    scores = np.stack([rms_norm(row, norm * query).sum(-1) for row in rows])
    weights = np.exp(scores) / np.exp(scores).sum(0)
    return weights, np.einsum("jbt,jbtd->btd", weights, np.stack(rows))


@pytest.mark.parametrize("which", ["attn", "ffn"])
def test_weights_of_sources_are_those_of_the_mixture_that_the_layer_read(looked_at, which):
    """Norms of the mixture by these weights are what attention and the FFN were given."""
    told, embedded, seen, _, layers, _, _ = looked_at
    found = told["health/attn_res" + "_ffn" * (which == "ffn")]
    bank = []
    for i, w in enumerate(layers):
        if i % MODEL.block_layers == 0:
            bank.append(seen["after_BTD"][i - 1] if i else embedded)
        has_sum = which == "ffn" or i % MODEL.block_layers
        running = [seen["between_BTD" if which == "ffn" else "before_BTD"][i]]
        rows = [x.astype(np.float64) for x in bank + running * bool(has_sum)]
        weights, mixture = mixed(rows, w[f"{which}_res/norm_D"], w[f"{which}_res/query_D"])
        given = seen[f"{which}_in_BTD"][i]
        np.testing.assert_allclose(rms_norm(mixture, w[f"{which}_norm_D"]), given, atol=1e-4)
        want = np.full(4, np.nan)
        want[: len(bank) + 1] = 0
        want[: len(rows)] = weights[:, REAL].mean(1)
        np.testing.assert_allclose(found[i], want, atol=1e-5)
    assert np.ptp([row[0] for row in found]) > 0.01


def test_figures_of_the_layers_are_those_of_the_definition(looked_at):
    told, _, seen, experts, layers, grads, _ = looked_at
    assert told["health/kda_layers"] == [0, 2, 4]
    for place, i in enumerate(told["health/kda_layers"]):
        w, x = layers[i], seen["attn_in_BTD"][i][REAL].astype(np.float64)
        logit = np.einsum("nd,dr,rhk->nhk", x, w["attn/decay_a_DR"], w["attn/decay_b_RHk"])
        logit = np.exp(w["attn/a_log_H"])[:, None] * (logit + w["attn/decay_bias_Hk"])
        keep = np.exp(MODEL.kda.gate_lower_bound * sigmoid(logit))
        want = np.quantile(keep, QUANTILES, method="inverted_cdf")
        np.testing.assert_allclose(told["health/kda_decay"][place], want, rtol=1e-4)
        beta = sigmoid(x @ w["attn/beta_DH"]).mean()
        np.testing.assert_allclose(told["health/kda_beta"][place], beta, rtol=1e-5)
    for i, (w, grad) in enumerate(zip(layers, grads, strict=True)):
        after = seen["after_BTD"][i][REAL].astype(np.float64)
        want = np.sqrt(np.mean(after**2))
        np.testing.assert_allclose(told["health/activation_rms"][i], want, rtol=1e-5)
        flat = np.concatenate([x.ravel() for x in grad.values()])
        want = np.sqrt(np.mean(flat**2))
        np.testing.assert_allclose(told["health/gradient_rms"][i], want, rtol=1e-4)
        x = seen["ffn_in_BTD"][i][REAL].astype(np.float64)
        want = saturated(w, x, experts[i][REAL])
        assert 0.05 < want < 0.95
        # A gate that is nearly at the bound may be on either side in float32.
        np.testing.assert_allclose(told["health/situ_saturation"][i], want, atol=1e-3)


def saturated(w, x, chosen):
    routed = [
        latent @ w["ffn/gate_ELF"][e]
        for latent, own in zip(x @ w["ffn/down_DL"], chosen, strict=True)
        for e in own
    ]
    gates = [*routed, x @ w["ffn/shared/gate_DF"]]
    return np.mean(np.concatenate([abs(g).ravel() for g in gates]) > 2 * MODEL.situ_beta)


def test_loads_are_of_real_tokens(looked_at):
    told, experts = looked_at[0], looked_at[3]
    want = [np.bincount(chosen[REAL].ravel(), minlength=8) for chosen in experts]
    want = np.array(want) / (REAL.sum() * MODEL.moe.n_active / 8)
    np.testing.assert_allclose(told["health/expert_load"], want, rtol=1e-6)
    assert np.shape(want) == (6, 8)


@pytest.mark.slow
def test_several_devices_tell_what_one_tells(looked_at):
    """Rows, experts and heads on devices of their own."""
    want_told, model = looked_at[0], jax.device_get(looked_at[-1])
    with jax.set_mesh(make_mesh(expert=2, tensor=2, devices=jax.devices()[:4])):
        shardings = jax.tree.map(lambda x: placed(x).sharding, abstract(MODEL))
        told = Health(CONFIG)(jax.device_put(model, shardings), batch())
    assert told.keys() == want_told.keys()
    for name, want in want_told.items():
        np.testing.assert_allclose(told[name], want, rtol=2e-3, atol=1e-3, err_msg=name)


def test_lists_keep_their_gaps_in_the_file(tmp_path):
    """JSON has no NaN: null, at any depth; every line is JSON for a strict reader."""
    metrics = Metrics(tmp_path, CONFIG, 0, Clock())
    metrics.write(3, {"health/attn_res": [[0.5, float("nan")], [1.0, 2.0]], "loss": float("inf")})
    metrics.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    told = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert told == {"step": 3, "health/attn_res": [[0.5, None], [1.0, 2.0]], "loss": None}


@pytest.mark.slow
def test_a_run_writes_health_and_a_trace(tmp_path):
    """Of steps 2 and 4 in lines of their own; the layers are one with KDA and one with MLA."""
    (tmp_path / "text.txt").write_text("red green blue " * 400)
    values = train_config.get_config()
    values.data.sources.text.glob, values.data.holdout = str(tmp_path / "text.txt"), 0.0
    values.update(steps=4, eval_every=0, health_every=2, profile_at=3, profile_steps=1)
    train_here(from_dict(TrainConfig, values), tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    told = [x for x in lines if "health/attn_res" in x]
    assert [x["step"] for x in told] == [2, 4] and len(lines) == 6
    for x in told:
        shapes = {k.removeprefix("health/"): np.shape(v) for k, v in x.items() if k != "step"}
        assert shapes == dict(
            attn_res=(2, 3), attn_res_ffn=(2, 3), kda_decay=(1, 5), kda_beta=(1,), kda_layers=(1,),
            activation_rms=(2,), gradient_rms=(2,), situ_saturation=(2,), expert_load=(1, 8),
        )  # fmt: skip
        assert x["health/attn_res"][0] == [1.0, 0.0, None] and x["health/kda_layers"] == [0]
    assert list(tmp_path.glob("run/profile/step_3/plugins/profile/*/*.xplane.pb"))
