"""AdamW, Muon on whole matrices and Per-Head Muon: the loss after the same tokens, several seeds.

    python -m benchmarks.optimizers --config configs/k3_tiny.py --tokens 65536 \
        --out benchmarks/results/optimizers_k3_tiny.json [--config.data.batch=4 ...]

trains the configuration from the start with each optimizer and seed (of the weights and of the
order of the data; optimizers share both) and keeps every run in --out, beside which it writes a
table (.md) and, where matplotlib is installed, a plot (.png). Runs that are there already are not
made again, so the command may be stopped and repeated. All optimizers have the learning rate of the
configuration, as their updates have the same root mean square, unless --learning_rates says else.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from k3_jax.checks import check_run
from k3_jax.config import TrainConfig, from_dict, to_dict
from k3_jax.data.loader import Loader, heldout_batches
from k3_jax.evaluate import HeldOut
from k3_jax.optim import make_optimizer, schedule
from k3_jax.tokenizer import load_tokenizer
from k3_jax.train_step import init_state, train_step
from sharding import make_mesh
from sharding.hosts import micro_batches

NAMES = ("adamw", "muon", "muon_per_head")


def planned(config: TrainConfig, tokens: int) -> TrainConfig:
    """The configuration for this many tokens, without stages; at most a tenth of the steps warm
    up."""
    steps = tokens // (config.data.batch * config.data.seq_len)
    if steps < 10:
        raise ValueError(
            f"--tokens={tokens} are {steps} steps of data.batch={config.data.batch} rows of "
            f"data.seq_len={config.data.seq_len}; at least 10 are needed"
        )
    optim = dataclasses.replace(config.optim, warmup_ratio=min(config.optim.warmup_ratio, 0.1))
    return dataclasses.replace(config, steps=steps, optim=optim, stages=(), stage="")


def open_results(path: Path, config: TrainConfig) -> dict:
    """What is in the file, or a fresh start. Raises ValueError where it is of another setting."""
    made_with = to_dict(config)
    for key in ("name", "learning_rate"):
        del made_with["optim"][key]
    if not path.exists():
        return {"config": made_with, "device": jax.devices()[0].device_kind, "runs": []}
    results = json.loads(path.read_text())
    if results["config"] != made_with:
        raise ValueError(f"--out={path} holds runs of another configuration; name another file")
    return results


class Runs:
    """Trains with one optimizer; seeds share the compiled step."""

    def __init__(self, config: TrainConfig, mesh, tokenizer, held_out):
        self.config, self.mesh, self.tokenizer, self.held_out = config, mesh, tokenizer, held_out
        self.tx = make_optimizer(config.optim, config.steps)
        rate = schedule(config.optim, config.steps)
        step = functools.partial(train_step, config=config, tx=self.tx, learning_rate=rate)
        self.step = jax.jit(step, donate_argnums=0)

    def __call__(self, seed: int) -> dict:
        """One run from the start."""
        config = self.config
        state = init_state(dataclasses.replace(config, seed=seed), self.tx)
        loader = Loader(dataclasses.replace(config.data, seed=seed), self.tokenizer)
        told = []
        try:
            for i in range(config.steps):
                batch = next(loader).items()
                batch = {k: micro_batches(v, config.accumulate, self.mesh) for k, v in batch}
                state, values = self.step(state, batch)
                told.append({k: values[k] for k in ("loss", "tokens", "skipped")})
                if i == 0:
                    jax.block_until_ready(values)
                    start = time.monotonic()
            told = [{k: v.item() for k, v in values.items()} for values in jax.device_get(told)]
            seconds = time.monotonic() - start
        finally:
            loader.close()
        return {
            "optimizer": config.optim.name,
            "seed": seed,
            "learning_rate": config.optim.learning_rate,
            "losses": [x["loss"] for x in told],
            "skipped": told[-1]["skipped"],
            "targets_per_second": round(sum(x["tokens"] for x in told[1:]) / seconds, 1),
            **self.held_out(state.model),
        }


def summary(results: dict) -> list[str]:
    """The results as a table in markdown: means over seeds and, in brackets, each seed's figure."""
    config, runs = results["config"], results["runs"]
    steps = len(runs[0]["losses"])
    tokens = steps * config["data"]["batch"] * config["data"]["seq_len"]
    last = max(steps // 10, 1)
    out = [
        f"{tokens:,} tokens in {steps} steps on {results['device']}; nats per token, means over "
        f"seeds, each seed in brackets; training: mean of the last {last} steps.",
        "",
        "| optimizer | learning rate | held-out loss | training loss | targets/s |",
        "|---|---|---|---|---|",
    ]
    for (name, rate), same in grouped(runs):
        training = [statistics.fmean(r["losses"][-last:]) for r in same]
        speed = statistics.median(r["targets_per_second"] for r in same)
        out.append(
            f"| {name} | {rate:g} | {_told([r['heldout_loss'] for r in same])} | "
            f"{_told(training)} | {speed:,.0f} |"
        )
    return out


def grouped(runs: list[dict]) -> list:
    """((optimizer, learning rate), its runs), in the order of NAMES."""
    kinds = {(r["optimizer"], r["learning_rate"]): [] for r in runs}
    for r in runs:
        kinds[r["optimizer"], r["learning_rate"]].append(r)
    return sorted(kinds.items(), key=lambda kind: (NAMES.index(kind[0][0]), kind[0][1]))


def _told(values) -> str:
    return f"{statistics.fmean(values):.4f} ({', '.join(f'{x:.4f}' for x in values)})"


def plot(results: dict, path: Path) -> None:
    """Training loss over tokens: the mean over seeds, smoothed, and the band of the seeds. Nothing
    where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    data = results["config"]["data"]
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for (name, rate), same in grouped(results["runs"]):
        losses = [r["losses"] for r in same]
        width = max(len(losses[0]) // 20, 1)
        smooth = np.array([np.convolve(x, np.ones(width) / width, "valid") for x in losses])
        at = (np.arange(smooth.shape[1]) + width) * data["batch"] * data["seq_len"]
        ax.plot(at, smooth.mean(0), label=f"{name}, learning rate {rate:g}, {len(same)} seeds")
        ax.fill_between(at, smooth.min(0), smooth.max(0), alpha=0.2)
    ax.set(xlabel="tokens", ylabel="training loss, nats per token")
    ax.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def write(path: Path, results: dict) -> None:
    """The JSON, whole or not at all, and what is made of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(results) + "\n")
    os.replace(temporary, path)
    path.with_suffix(".md").write_text("\n".join(summary(results)) + "\n")
    plot(results, path.with_suffix(".png"))


def compare(config: TrainConfig, out: Path, names, seeds, rates: dict[str, float]) -> dict:
    """Make the runs that `out` lacks and say how they ended."""
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    jax.set_mesh(mesh)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_run(config, mesh, tokenizer.vocab_size, 1)
    results, held_out = open_results(out, config), None
    for name in names:
        rate = rates.get(name, config.optim.learning_rate)
        optim = dataclasses.replace(config.optim, name=name, learning_rate=rate)
        train = None
        for seed in seeds:
            key = (name, seed, rate)
            if key in {(r["optimizer"], r["seed"], r["learning_rate"]) for r in results["runs"]}:
                continue
            if held_out is None:
                batches = heldout_batches(config.data, tokenizer, 0, 1, config.eval_batches)
                held_out = HeldOut(config, batches, tokenizer, mesh)
            if train is None:
                train = Runs(dataclasses.replace(config, optim=optim), mesh, tokenizer, held_out)
            start = time.monotonic()
            run = train(seed)
            results["runs"].append(run)
            write(out, results)
            print(
                f"{name} seed {seed}: held-out {run['heldout_loss']:.4f}, last training loss "
                f"{run['losses'][-1]:.4f}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    write(out, results)
    return results


def main(_):
    try:
        config = planned(from_dict(TrainConfig, CONFIG.value), TOKENS.value)
        rates = {k: float(v) for k, v in (x.split("=") for x in RATES.value)}
        seeds = [int(x) for x in SEEDS.value]
        results = compare(config, Path(OUT.value), OPTIMIZERS.value, seeds, rates)
    except (ValueError, OSError) as e:
        sys.exit(f"benchmarks.optimizers: {e}")
    print("\n".join(summary(results)))
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed; the same command makes one where it is")


if __name__ == "__main__":
    # Here, and not for who imports: train.py has flags of these names.
    CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
    TOKENS = flags.DEFINE_integer("tokens", None, "of each run, rounded down to whole steps")
    SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "of weights and data")
    OPTIMIZERS = flags.DEFINE_list("optimizers", list(NAMES), "values of optim.name")
    RATES = flags.DEFINE_list("learning_rates", [], "of single optimizers: adamw=1e-3,muon=2e-3")
    OUT = flags.DEFINE_string("out", None, "the JSON file of results")
    flags.mark_flags_as_required(["config", "tokens", "out"])
    logging.set_verbosity(logging.WARNING)
    app.run(main)
