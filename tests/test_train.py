"""Training goes on after every kind of stop as if it had not stopped, and refuses bad settings."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_config
from checkpoint_states import assert_same_bits
from runs import changed, few_words, train_here

import train
from k3_jax.checkpoint.store import Store
from k3_jax.config import TrainConfig
from k3_jax.optim import decays, make_optimizer
from k3_jax.train_step import init_state, train_step
from k3_jax.tree import named_leaves, nest, with_leaves
from sharding import make_mesh

ROOT = Path(__file__).parent.parent
STEPS = 12

# train.py as the shell starts it, but on the first device alone, and a signal reaches it right
# after it has told of a step.
DRIVER = """
import os, pathlib, sys, time
number, at, whole = int(sys.argv.pop(1)), int(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
import jax
from absl import app
import train
from sharding import make_mesh
train.make_mesh = lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1])
tell = train.Metrics.step
def tell_then_stop(self, step, values):
    tell(self, step, values)
    if step == at:
        while not whole.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)
train.Metrics.step = tell_then_stop
app.run(train.main)
"""


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(quick_compiler):
    """Here and in the programs started; equal bits stay equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The glob of forty short texts of a few words."""
    return few_words(tmp_path_factory.mktemp("documents"))


def configured(documents, **overrides) -> TrainConfig:
    """tests/train_config.py with overrides: {"model__width": 3} sets config.model.width."""
    values = train_config.get_config().to_dict()
    values["data"]["sources"]["text"]["glob"] = documents
    return changed(values, overrides)


def run_program(*args):
    """A Python program that sees the devices that this process sees."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def run_until(number, step, saved, documents, workdir):
    """Start training and have the signal sent after `step` was told and `saved` is on disk."""
    return run_program(
        *("-c", DRIVER, str(int(number)), str(step)),
        str(workdir / "checkpoints" / str(saved) / "manifest.json"),
        f"--config={ROOT}/tests/train_config.py",
        f"--workdir={workdir}",
        f"--config.data.sources.text.glob={documents}",
    )


def lines(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir) -> list[tuple[int, float]]:
    """(step, loss) as written, which is exact: JSON keeps every bit of a float."""
    return [(x["step"], x["loss"]) for x in lines(workdir) if "loss" in x]


def held_out(workdir) -> list[dict]:
    return [x for x in lines(workdir) if "heldout_loss" in x]


def saved(workdir, step, config):
    """The arrays and the loader's rows of a checkpoint."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        tx = make_optimizer(config.optim, config.steps)
        shapes = nest(named_leaves(jax.eval_shape(functools.partial(init_state, config, tx))))
        with Store(workdir / "checkpoints") as store:
            restored = store.restore(shapes, step=step)
    return {"state": restored.state, "rows": jax.tree.map(np.asarray, restored.data_state)}


def assert_same_run(workdir, straight, config):
    """Every step told once with the same bits, and the same last checkpoint."""
    assert [step for step, _ in losses(workdir)] == list(range(1, STEPS + 1))
    assert losses(workdir) == losses(straight)
    assert held_out(workdir) == held_out(straight)
    got, want = (saved(path, STEPS, config) for path in (workdir, straight))
    assert_same_bits(got, want)


def run_on(documents, workdir):
    """Start training, or go on with it, and let nothing stop it.

    Runs whose bits are compared are all made this way: a process that has compiled other things
    before may run other code for the same program.
    """
    done = run_until(signal.SIGKILL, STEPS + 1, 0, documents, workdir)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def straight(documents, tmp_path_factory):
    """The folder of a run that nothing stopped."""
    workdir = tmp_path_factory.mktemp("straight")
    run_on(documents, workdir)
    return workdir


def test_a_run_tells_what_it_is_documented_to_tell(straight):
    """Keys of metrics.jsonl; a loss that falls; TensorBoard's file."""
    told = [x for x in lines(straight) if "loss" in x]
    keys = "step loss z grad_norm learning_rate tokens skipped bad_in_row spikes tokens_per_second "
    keys += "tflops_per_device dropped largest_logit load_mean load_max load_min bias_range "
    of_layers = {f"{k}_layers" for k in keys.split()[-3:]}
    for x in told:
        assert x.keys() == {*keys.split(), *of_layers, *train.Clock().seconds()}
        assert x["load_max_layers"] == [x["load_max"]] and x["bias_range"] > 0 == x["dropped"]
        assert x["tokens_per_second"] > 0 and 0 < x["tokens"] <= 4 * 63
    # Before the first update every one of 320 ids is about as likely: ln 320 = 5.77.
    assert abs(told[0]["loss"] - np.log(320)) < 0.1 and told[-1]["loss"] < told[0]["loss"] - 0.5
    assert [x["step"] for x in held_out(straight)] == [6, 12]
    assert held_out(straight)[0].keys() == {"step", "heldout_loss", "heldout_bits_per_byte"}
    assert b"heldout_loss" in next(straight.glob("events.out.tfevents.*")).read_bytes()
    assert (straight / "run.json").exists()


def test_a_killed_run_goes_on_with_the_same_bits(documents, straight, tmp_path):
    """T27: SIGKILL after step 7 was told and step 4 saved; started again, it equals a straight run:
    losses, held-out losses, last checkpoint and the loader's rows, bit for bit."""
    killed = run_until(signal.SIGKILL, 7, 4, documents, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert losses(tmp_path) == losses(straight)[:7]
    assert not (tmp_path / "checkpoints" / "8" / "manifest.json").exists()
    run_on(documents, tmp_path)
    assert_same_run(tmp_path, straight, configured(documents))


def test_a_terminated_run_saves_exits_with_0_and_goes_on(documents, straight, tmp_path):
    """T27 with SIGTERM, which comes while step 6 or 7 is computed: step 7 is saved."""
    stopped = run_until(signal.SIGTERM, 6, 4, documents, tmp_path)
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    assert "step 7 is saved" in stopped.stdout
    assert Store(tmp_path / "checkpoints").steps() == [4, 7]
    assert losses(tmp_path) == losses(straight)[:7]
    run_on(documents, tmp_path)
    assert_same_run(tmp_path, straight, configured(documents))


def test_a_signal_during_the_held_out_loss_saves_too(documents, tmp_path, monkeypatch, capsys):
    """SIGTERM comes after step 6 decided not to save: the step said to be saved is on disk."""

    class Interrupted(train.HeldOut):
        def __call__(self, *args):
            signal.raise_signal(signal.SIGTERM)
            return super().__call__(*args)

    monkeypatch.setattr(train, "HeldOut", Interrupted)
    train_here(configured(documents), tmp_path)
    last = losses(tmp_path)[-1][0]
    assert 6 <= last <= 7 and f"step {last} is saved" in capsys.readouterr().out
    assert Store(tmp_path / "checkpoints").steps()[-1] == last


def test_a_broken_newest_step_gives_way_to_the_one_before(documents, straight, tmp_path):
    """T28: step 12's arrays are cut; the run goes on from 8, says so, and makes 12 again."""
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    arrays = (workdir / "checkpoints" / "12" / "state").rglob("d/*")
    os.truncate(max(arrays, key=lambda file: file.stat().st_size), 100)
    done = run_on(documents, workdir)
    assert any("/12" in text and "100 bytes" in text for text in done.stderr.splitlines())
    assert "going on from step 8" in done.stdout
    assert_same_run(workdir, straight, configured(documents))


def test_four_devices_train_like_one(documents, straight, tmp_path):
    """Mesh data=2, fsdp=2: float32 sums in another order, so the first three losses agree to 1e-4
    before Adam's division by small gradients spreads the differences."""
    config = configured(documents, mesh__data=2, mesh__fsdp=2, eval_every=0, save_every=0)
    train_here(config, tmp_path, n_devices=4)
    got, want = losses(tmp_path), losses(straight)
    assert len(got) == STEPS
    np.testing.assert_allclose(got[:3], want[:3], rtol=0, atol=1e-4)


def poisoned(state, factor):
    """The state with its output head multiplied by `factor`."""
    leaves = named_leaves(state)
    return with_leaves(state, leaves | {"model/head_DV": leaves["model/head_DV"] * factor})


def test_a_run_of_bad_steps_stops_with_a_message(documents, tmp_path, monkeypatch):
    """Weights that are NaN make every step bad; after max_bad_steps=3 of them the run ends."""
    monkeypatch.setattr(train, "init_state", lambda *args: poisoned(init_state(*args), jnp.nan))
    with pytest.raises(ValueError, match="not finite.* in 3 steps in a row up to step 3"):
        train_here(configured(documents, eval_every=0), tmp_path)
    counts = [(x["step"], x["skipped"], x["bad_in_row"]) for x in lines(tmp_path)]
    assert counts == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


# Stochastic gradient descent, because its update is linear in the gradient (Adam's first one is
# nearly its sign), with a momentum, because a skipped step must keep the optimizer's state too.
SGD = optax.sgd(0.1, momentum=0.9)


@functools.cache
def step_program(accumulate):
    config = configured("", accumulate=accumulate, loss_chunk=48)
    bound = functools.partial(
        train_step, config=config, tx=SGD, learning_rate=optax.constant_schedule(0.1)
    )
    return jax.jit(bound)


@pytest.fixture
def fresh(one_device):
    return init_state(configured(""), SGD)


def uneven_rows():
    """63, 9, 60 and no targets in four rows: one document, pads, four documents, pads alone."""
    tokens = np.random.default_rng(0).integers(0, 256, (4, 64), dtype=np.int32)
    segments = np.zeros((4, 64), np.int32)
    segments[0], segments[1, :10], segments[2] = 1, 1, np.repeat([1, 2, 3, 4], [7, 20, 1, 36])
    return {"tokens": tokens, "segments": segments}


def in_micro_batches(rows, accumulate):
    return {k: v.reshape(accumulate, -1, v.shape[-1]) for k, v in rows.items()}


@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_give_the_step_of_the_whole_batch(fresh, accumulate):
    """The mean is over targets, not over micro-batches: halves have 72 and 60 of 132 targets, and
    the last quarter has none. Float32 sums in another order: 1e-5."""
    rows = uneven_rows()
    whole, want = step_program(1)(fresh, in_micro_batches(rows, 1))
    state, got = step_program(accumulate)(fresh, in_micro_batches(rows, accumulate))
    assert int(got["tokens"]) == int(want["tokens"]) == 63 + 9 + 60
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=1e-5)
    before = named_leaves(fresh.model)
    for (name, x), y in zip(
        named_leaves(state.model).items(), jax.tree.leaves(whole.model), strict=True
    ):
        update, wanted = (np.asarray(after - before[name]) for after in (x, y))
        np.testing.assert_allclose(update, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_only_its_counters(fresh, bad):
    """An infinite weight spoils the loss. Logits near 1e25 leave it finite, but the square of the
    gradient's norm overflows. The good step after it clears `bad_in_row` and keeps `skipped`."""
    rows = in_micro_batches(uneven_rows(), 1)
    good, _ = step_program(1)(fresh, rows)
    broken = poisoned(good, jnp.inf if bad == "loss" else 1e25)
    after, values = step_program(1)(broken, rows)
    assert bool(jnp.isfinite(values["loss"])) == (bad == "gradient")
    assert not jnp.isfinite(values["grad_norm"])
    assert_same_bits((after.model, after.opt), (broken.model, broken.opt))
    again, _ = step_program(1)(after, rows)
    assert [int(x) for x in (again.step, again.skipped, again.bad_in_row)] == [3, 2, 2]
    mended = with_leaves(again, named_leaves(again) | named_leaves({"model": good.model}))
    final, _ = step_program(1)(mended, rows)
    assert [int(x) for x in (final.step, final.skipped, final.bad_in_row)] == [4, 2, 0]
    assert not jnp.array_equal(named_leaves(final)["model/head_DV"], good.model.head_DV[...])


FOUR = dict(mesh__data=2, mesh__fsdp=2)
REFUSALS = {
    "a misspelled key": (dict(model__widht=3), ["config.model.widht", '"width"']),
    "a text for a number": (dict(steps="9"), ["config.steps='9'", "str", "int"]),
    "short rows": (dict(data__seq_len=32), ["seq_len=32", "64"]),
    "uneven accumulation": (dict(accumulate=3), ["batch=4", "accumulate=3"]),
    "no steps": (dict(steps=0), ["steps=0", "at least 1"]),
    "a long warm-up": (dict(optim__warmup_ratio=1.1), ["warmup_ratio=1.1", "0 to 1"]),
    "an unknown schedule": (dict(optim__schedule="cosin"), ["'cosin'", "wsd", '"cosine"']),
    "an MLA layer too many": (dict(model__mla_layers=(1, 4)), ["(1, 4)", "0..1"]),
    "more active experts": (dict(model__moe__n_active=9), ["n_active=9", "n_experts=8"]),
    "a steep gate": (dict(model__kda__gate_lower_bound=-6.0), ["-6.0", "[-5, 0)"]),
    "an unknown optimizer": (dict(optim__name="moun"), ["'moun'", "muon_per_head", '"muon"']),
    "a momentum of 1": (dict(optim__momentum=1.0), ["optim.momentum=1.0", "[0, 1)"]),
    "an unknown remat": (dict(model__remat="grop"), ["'grop'", "layer, group", '"group"']),
    "an unknown dtype": (dict(model__dtype="float16"), ["'float16'", "bfloat16, float32"]),
    "a small vocabulary": (dict(model__vocab_size=256), ["261", "vocab_size=256", "'bytes'"]),
    "no file": (dict(data__sources__text__glob="/nowhere/*.txt"), ["'text'", "/nowhere/*.txt"]),
    "no source": (dict(data__sources={}), ["data.sources", "at least one"]),
    "an unknown format": (dict(data__sources__text__format="txt"), ["'txt'", "text"]),
    "a mesh of three": (dict(mesh__data=3), ["'data': 3", "3 devices", "1 are here"]),
    "uneven rows": (FOUR | dict(data__batch=2), ["data.batch=2", "4 devices"]),
    "uneven experts": (
        dict(mesh__data=2, mesh__expert=2, model__moe__n_experts=7),
        ["mesh.expert * mesh.tensor=2", "'moe.n_experts': 7"],
    ),
    "nothing held out": (dict(data__holdout=0.0), ["'text'", "holdout=0.0"]),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_run_that_cannot_work_is_refused_before_it_starts(documents, tmp_path, what):
    """The message names the key, the value and what is allowed; nothing is written."""
    overrides, words = REFUSALS[what]
    with pytest.raises((ValueError, OSError)) as refused:
        n_devices = 4 if overrides.get("mesh__data") == 2 else 1
        train_here(configured(documents, **overrides), tmp_path, n_devices)
    assert [word for word in words if word not in str(refused.value)] == []
    assert not any(tmp_path.iterdir())


COMMAND_LINES = {
    "a misspelled key": (["tests/train_config.py", "--config.model.widht=3"], "model.widht"),
    "a missing file": (["configs/k4.py"], "configs/k4.py"),
}


@pytest.mark.parametrize("what", COMMAND_LINES)
def test_the_command_line_refuses_in_words(tmp_path, what):
    """No traceback, a status that is not 0, and the wrong name in the last lines."""
    (config, *rest), word = COMMAND_LINES[what]
    ended = run_program("train.py", f"--config={config}", f"--workdir={tmp_path}", *rest)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr and word in ended.stderr
    assert not any(tmp_path.iterdir())


def test_weight_decay_is_for_matrices(one_device):
    """Every kind of parameter of the model is on one of the two lists."""
    config = configured("")
    state = jax.eval_shape(functools.partial(init_state, config, SGD))
    kinds = {name.rsplit("/", 1)[-1] for name in named_leaves(state.model)}
    matrices = """
        embed_VD head_DV q_DHk k_DHk v_DHv beta_DH decay_a_DR decay_b_RHk gate_DHv out_HvD q_a_DQ
        q_b_QHq kv_a_DM k_b_CHk v_b_CHv gate_DF up_DF down_FD router_DE down_DL up_LD gate_ELF
        expert_up_ELF expert_down_EFL
    """
    others = """
        a_log_H decay_bias_Hk q_conv_WHk k_conv_WHk v_conv_WHv query_D router_bias_E norm_D
        attn_norm_D ffn_norm_D out_norm_D out_norm_v q_norm_Q kv_norm_C latent_norm_L
    """
    assert {name for name in kinds if decays(name)} == set(matrices.split())
    assert {name for name in kinds if not decays(name)} == set(others.split())
