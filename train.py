"""Train a Kimi K3.

    python train.py --config configs/k3_tiny.py --workdir runs/tiny [--config.key=value ...]

A run that was interrupted goes on from its newest whole checkpoint when the same command is given
again. SIGTERM saves first and exits with 0. With --compile_only --topology=v5p:4x4x4 a step is
compiled for that slice, which need not be here: does it fit, what does it move, how long at best.
"""

import dataclasses
import functools
import signal
import sys
from contextlib import closing

import jax
from absl import app, flags
from ml_collections import config_flags

from k3_jax import compile_only
from k3_jax.checkpoint.start import starting_weights
from k3_jax.checkpoint.store import CheckpointError, Store
from k3_jax.checks import check_stages
from k3_jax.config import TrainConfig, current, from_dict, is_quantized, planned, to_dict
from k3_jax.data import StagedLoader, heldout_batches
from k3_jax.evaluate import HeldOut
from k3_jax.goodput import Clock
from k3_jax.health import Health
from k3_jax.logs import quiet_libraries
from k3_jax.lora.adapters import whole
from k3_jax.lora.frozen import open_base
from k3_jax.metrics import Metrics
from k3_jax.optim import make_optimizer, schedule
from k3_jax.profile import Profiler
from k3_jax.tokenizer import load_tokenizer
from k3_jax.train_step import init_state, jit_options, train_step
from k3_jax.tree import flatten, named_leaves, nest, with_leaves
from sharding import make_mesh
from sharding.hosts import join, micro_batches, row_share

CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and metrics go.")
PROCESSES = flags.DEFINE_string(
    "processes", None, "auto on the hosts of a pod, or HOST:PORT,n,i for the i-th of n processes"
)
COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "compile a step for --topology, no more")
TOPOLOGY = flags.DEFINE_string("topology", None, "a TPU slice that need not be here: v5p:4x4x4")
flags.mark_flags_as_required(["config", "workdir"])


def main(_):
    if COMPILE_ONLY.value != bool(TOPOLOGY.value):
        raise app.UsageError("--compile_only and --topology go together")
    try:
        config = from_dict(TrainConfig, CONFIG.value)
        if COMPILE_ONLY.value:
            found = compile_only.train_reports(config, TOPOLOGY.value)
            return compile_only.tell(f"{WORKDIR.value}/compile_only.json", found)
        if PROCESSES.value:
            join(PROCESSES.value)
        run(config, WORKDIR.value)
    except (ValueError, OSError, CheckpointError) as e:
        sys.exit(f"train.py: {e}")


def run(config: TrainConfig, workdir: str):
    clock = Clock()
    # Mesh and data
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    jax.set_mesh(mesh)
    stages, now = planned(config), current(config)
    loader, held_out = open_data(config, stages, mesh)
    base = open_base(config)

    # State and step
    n_steps = stages[-1].last
    tx = make_optimizer(config.optim, n_steps, stages)
    store = Store(f"{workdir}/checkpoints", keep=config.keep)
    base.check(store)
    state, start = restore_or_init(config, tx, store, loader)
    frozen = base.load()
    learning_rate = schedule(config.optim, n_steps, stages)
    bound = functools.partial(train_step, tx=tx, learning_rate=learning_rate)
    step_fn = jax.jit(bound, static_argnames=("config", "quantized"), **jit_options(mesh))

    # Loop
    metrics, stop = Metrics(workdir, config, start, clock), StopSignal()
    profiled, health = Profiler(workdir, config, metrics.say), Health(config)
    metrics.begin(sum(x.size for x in jax.tree.leaves(state.model)), mesh.size)
    with closing(clock), closing(loader), closing(metrics), closing(profiled), store:
        for stage, step in ((s, i) for s in now for i in s.steps_after(start)):
            with clock("data"):
                rows = loader.rows(stage)
            batch = {k: micro_batches(v, stage.config.accumulate, mesh) for k, v in rows.items()}
            quantized = is_quantized(config.qat_from_step, step)
            how = dict(config=stage.config, quantized=quantized)
            state, values = profiled(step, step_fn, state, batch, frozen, **how)
            clock.device_has(values)
            metrics.later(step, values)
            is_stopping = stop.is_set  # read once: a later signal stops the step after this one
            is_last = step == stage.last
            is_saved = is_last or is_stopping or is_due(config.save_every, step)
            is_scored = held_out and (is_last or is_due(config.eval_every, step))
            is_examined = is_due(config.health_every, step)
            if is_saved or is_scored or is_examined:
                metrics.now()
            if is_saved:
                with clock("checkpoint"):
                    meta = {"config": to_dict(config), **base.meta}
                    store.save(step, nest(named_leaves(state)), loader.state(), meta)
            if is_scored:
                with clock("evaluation"):
                    model = whole(state.model, frozen, config.lora)
                    metrics.held_out(step, held_out(model, quantized))
            if is_examined:
                with clock("evaluation"):
                    metrics.write(step, health(state.model, batch, frozen, quantized))
            if is_stopping:
                metrics.say(f"stopped by a signal: step {step} is saved")
                break
        metrics.now()


def open_data(config, stages, mesh):
    """The rows of all stages; and the held-out loss, None where none is asked for."""
    here = row_share(mesh)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_stages(config, mesh, tokenizer.vocab_size, here[1])
    loader = StagedLoader(stages, tokenizer, *here)
    if not config.eval_every:
        return loader, None
    batches = heldout_batches(config.data, tokenizer, *here, config.eval_batches)
    return loader, HeldOut(config, batches, tokenizer, mesh)


def restore_or_init(config, tx, store, loader):
    """The state of the newest whole checkpoint, loader included, or a fresh one, which may have the
    weights of another run; and its step."""
    make = functools.partial(init_state, config, tx)
    abstract = jax.eval_shape(make)
    shapes = nest(named_leaves(abstract))
    is_new = not store.steps()
    read = starting_weights(config.start_from, abstract.model) if is_new else None
    store.prepare(shapes)
    restored = store.restore(shapes)
    step, begin = restored.step if restored else 0, current(config)[0].first - 1
    if step < begin:
        raise ValueError(f"stage={config.stage!r} goes on from step {begin}, not from {step}")
    if restored is None and read:
        # The random weights go before the others come.
        return dataclasses.replace(dataclasses.replace(make(), model=None), model=read()), 0
    if restored is None:
        return make(), 0
    loader.restore(restored.step, restored.data_state)
    return with_leaves(abstract, flatten(restored.state)), restored.step


def is_due(every: int, step: int) -> bool:
    """Whether a step is one of every so many; 0 is never."""
    return every > 0 and step % every == 0


class StopSignal:
    """Set by SIGTERM."""

    def __init__(self):
        self.is_set = False
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, *_):
        self.is_set = True


def parse_flags(argv):
    """absl's parser; a --config.key that the file lacks ends in words, not in a traceback."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError) as e:
        given = [a for a in argv[1:] if a.startswith("--config.")]
        words = str(e).strip("\"'").replace("\\n", " ").replace("\\'", "")
        sys.exit(f"train.py: {' '.join(given)}: no such key in the config file: {words}")


if __name__ == "__main__":
    quiet_libraries()
    app.run(main, flags_parser=parse_flags)
