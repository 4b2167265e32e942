"""A run of quantisation-aware training: what is trained is what is exported and served, and before
its step nothing changes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_config
from qat_numbers import as_packed, same_bits
from runs import few_words, train_here

import train
from k3_jax.checkpoint import convert, hf, to_hf
from k3_jax.checkpoint.load import open_checkpoint
from k3_jax.checkpoint.plan import Options
from k3_jax.checkpoint.safetensors import read_index
from k3_jax.checkpoint.store import Store
from k3_jax.config import LoraConfig, TrainConfig, from_dict
from k3_jax.lora.frozen import open_base
from k3_jax.model import abstract
from k3_jax.quant.mxfp4 import TRAINED_RULE, pack, rounded, unpack
from k3_jax.train_step import init_state, train_step, with_quantized_experts
from k3_jax.tree import flatten, named_leaves, nest, with_leaves
from pallas_kernels.experts.mxfp4_reference import widen

EXPERTS = tuple(leaf for leaf, _ in hf.EXPERT.values())
MOE = dict(n_experts=8, n_active=2, latent_width=64, expert_width=64)
STEPS, FROM = 12, 5


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(quick_compiler):
    """Equal bits stay equal."""


def configured(documents, **overrides) -> TrainConfig:
    """tests/train_config.py with experts of a width that can be packed, and changes at the top."""
    values = train_config.get_config().to_dict()
    values["data"]["sources"]["text"]["glob"] = documents
    values["model"]["moe"] |= MOE
    # What compiles sooner and has no part in this.
    values["model"]["mla_layers"] = (0, 1)
    values["optim"] |= dict(name="adamw", qk_clip=0.0)
    return from_dict(TrainConfig, values | overrides)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return few_words(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def run(documents, tmp_path_factory):
    """A run of 12 steps, the last 8 of them with experts as they will be served."""
    workdir = tmp_path_factory.mktemp("run")
    train_here(configured(documents, qat_from_step=FROM, eval_every=4), workdir)
    return workdir


def told(workdir, key):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x[key] for x in lines if key in x}


def masters(workdir):
    """The model as training left it."""
    like = abstract(configured("").model)
    with Store(workdir / "checkpoints") as store:
        found = store.restore({"model": nest(named_leaves(like))}, step=STEPS, only=("model",))
    return with_leaves(like, flatten(found.state["model"]))


def program(config, **quantized):
    tx, shape = optax.sgd(0.1), jax.ShapeDtypeStruct((1, 4, 64), jnp.int32)
    state = jax.eval_shape(functools.partial(init_state, config, tx))
    step = functools.partial(
        train_step, config=config, tx=tx, learning_rate=optax.constant_schedule(0.1)
    )
    lowered = jax.jit(step, static_argnames="quantized").lower(
        state, {"tokens": shape, "segments": shape}, **quantized
    )
    return lowered.as_text()


def test_before_the_step_the_program_is_the_one_without(documents, one_device):
    """Text for text, and so bit for bit."""
    without = program(configured(documents))
    assert program(configured(documents, qat_from_step=FROM), quantized=False) == without
    assert "f8E4M3FN" not in without


def test_training_goes_on_from_the_step_with_experts_as_served(run, documents, one_device):
    """The loss falls before and after it, and the held-out loss follows. Masters stay float32, and
    are not on the grid: that would be no training."""
    losses, held_out = told(run, "loss"), told(run, "heldout_loss")
    assert losses[FROM - 1] < losses[1] - 0.2 and losses[STEPS] < losses[FROM] - 0.2
    model, config = masters(run), configured(documents)
    for name, w in named_leaves(model).items():
        assert w.dtype == jnp.float32
        if name.endswith(EXPERTS):
            assert np.mean(np.asarray(w) == as_packed(w)) < 0.1
    tokenizer = train.load_tokenizer("bytes")
    batches = train.heldout_batches(config.data, tokenizer, 0, 1, config.eval_batches)
    again = train.HeldOut(config, batches, tokenizer, jax.sharding.get_mesh())
    values = [again(model, q)["heldout_loss"] for q in (False, True)]
    assert held_out[STEPS] == pytest.approx(values[1], abs=1e-6) and values[0] != values[1]


# Export


@jax.jit
def logits(model, tokens_BT):
    out = model(model.embed(tokens_BT), jnp.ones_like(tokens_BT))
    return model.logits(out.hidden_BTD)


TOKENS = np.frombuffer(b"red green blue tall small red green small blue and more", "u1")[None]


def answers(model):
    return np.asarray(logits(model, TOKENS.astype(np.int32)))


def served(path, dtype, is_packed, activations=None):
    return open_checkpoint(str(path), dtype, is_packed, activations).load()


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The run in the released format, and that converted back."""
    there, back = (tmp_path_factory.mktemp("export") / n for n in ("released", "back"))
    assert convert.main(["orbax-to-hf", str(run), str(there)]) == 0
    assert convert.main(["hf-to-orbax", str(there), str(back)]) == 0
    return there, back


def test_the_export_has_the_bytes_of_the_weights_that_were_trained(run, exported, one_device):
    leaves, found = named_leaves(masters(run)), read_index(exported[0])
    n = 0
    for name, (entry, *_) in hf.name_table(configured("").model).items():
        if ".experts." not in name:
            continue
        w = np.ascontiguousarray(np.asarray(leaves[entry.leaf])[entry.index].T)
        key = name.removeprefix(hf.PREFIX)
        for end, want in zip(("_packed", "_scale"), pack(w, TRAINED_RULE), strict=True):
            np.testing.assert_array_equal(found[key + end].read(), want)
            n += 1
    assert n == 8 * 3 * 2
    told = json.loads((exported[0] / "config.json").read_text())
    assert told["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def test_what_is_served_in_float32_answers_as_it_was_trained(run, one_device):
    """Bit for bit: the same program, but that weights come off the grid and are not put on it. With
    its activations or its weights as they were it is another model."""
    model = masters(run)
    want = answers(with_quantized_experts(model))
    np.testing.assert_array_equal(answers(served(run, "float32", False)), want)
    assert not np.array_equal(answers(served(run, "float32", False, "plain")), want)
    assert np.linalg.norm(answers(model) - want) > 1e-3 * np.linalg.norm(want)


def test_what_is_served_packed_answers_as_it_was_trained(run, exported, one_device):
    """From the run itself, and bit for bit the same from its export converted back. Weights are the
    trained ones to the bit. Products are bfloat16 and rounded at other places (6e-4 measured, where
    bfloat16 itself is 2e-3 from float32)."""
    trained = with_quantized_experts(masters(run))
    found = []
    for path, activations in ((run, None), (exported[1], "mxfp8")):
        model = served(path, "bfloat16", True, activations)
        found.append(answers(model))
        leaves = named_leaves(model)
        for name, w in named_leaves(trained).items():
            if name.endswith(EXPERTS):
                parts = (np.asarray(leaves[f"{name}/{part}"]) for part in ("packed", "scales"))
                flat = (x.reshape(-1, *x.shape[-2:]) for x in parts)
                wide = np.stack([widen(*pair) for pair in zip(*flat, strict=True)])
                same_bits(wide.reshape(w.shape), rounded(w[...]))
    np.testing.assert_array_equal(*found)
    narrow = dataclasses.replace(trained.config, dtype="bfloat16")
    want = answers(with_leaves(abstract(narrow), named_leaves(trained)))
    assert np.linalg.norm(found[0] - want) < 2e-3 * np.linalg.norm(want)
    assert open_checkpoint(str(exported[1]), "bfloat16").config.moe.activations == "plain"


def test_what_was_trained_is_not_exported_otherwise(run, exported, tmp_path):
    with pytest.raises(ValueError, match="--rule floor.*trained to be packed by ceil"):
        to_hf.convert(run, tmp_path / "out", Options(quantize="floor"))
    assert not (tmp_path / "out").exists()
    to_hf.convert(run, tmp_path / "wide", Options(dequantize=True), say=lambda text: None)
    packed, wide = read_index(exported[0]), read_index(tmp_path / "wide")
    for name in (n for n in wide if ".experts." in n):
        codes, scales = packed[name + "_packed"].read(), packed[name + "_scale"].read()
        same_bits(wide[name].read(), unpack(codes, scales))


def test_adapters_are_not_trained_on_masters_that_nobody_serves(run):
    config = configured("")
    moe = dataclasses.replace(config.model.moe, balance="none")
    model, lora = dataclasses.replace(config.model, moe=moe), LoraConfig(base=str(run))
    with pytest.raises(ValueError, match="convert it to the released format and back"):
        open_base(dataclasses.replace(config, model=model, lora=lora))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(qat_from_step=-1), "qat_from_step=-1 must be a step, or 0"),
        (dict(moe__expert_width=48, qat_from_step=3), "expert_width=48 are not both multiples"),
        (dict(moe__activations="mxfp8"), "sets both from qat_from_step on"),
        (dict(moe__activations="fp8"), "moe.activations='fp8' is not one of plain, mxfp8"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    values = train_config.get_config().to_dict()
    values["model"]["moe"] |= MOE
    for name, value in changes.items():
        section = values["model"]["moe"] if "__" in name else values
        section[name.removeprefix("moe__")] = value
    with pytest.raises(ValueError, match=words):
        from_dict(TrainConfig, values)
