"""The frozen checkpoint below adapters, and whether a run's adapters belong to it."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import NamedTuple

from etils import epath

from k3_jax.checkpoint import manifest
from k3_jax.checkpoint.load import open_checkpoint
from k3_jax.checkpoint.store import CheckpointError, Store
from k3_jax.checkpoint.trained import quantized_rule
from k3_jax.checkpoint.views import find_step
from k3_jax.config import ModelConfig, TrainConfig, as_served, to_dict
from k3_jax.model import K3, abstract
from k3_jax.tree import flatten, named_leaves, with_leaves

KEY = "lora"  # of a checkpoint's meta that holds adapters


class Base(NamedTuple):
    """`meta`: what checkpoints of the run say beside the rest; `load` gives the frozen model on the
    mesh of `jax.set_mesh`. {} and None in a run that trains all weights."""

    meta: dict
    load: Callable[[], K3 | None]

    def check(self, store: Store) -> None:
        """Raises CheckpointError unless the store is empty or its newest step is of such a run."""
        if not store.steps():
            return
        own, saved = self.meta.get(KEY), store.read_meta().get(KEY)
        if (own is None) != (saved is None):
            held = "adapters" if saved else "all weights of a model"
            raise CheckpointError(
                f"{store.directory} holds {held}, and this run trains "
                f"{'all weights' if saved else 'adapters'}: give another workdir"
            )
        if own and own["fingerprint"] != saved["fingerprint"]:
            raise CheckpointError(
                f"the adapters in {store.directory} belong to another base: {saved['base']} of "
                f"fingerprint {saved['fingerprint']}, and lora.base={own['base']} has "
                f"{own['fingerprint']}"
            )
        for key in ("rank", "alpha", "targets"):
            if own and own[key] != saved[key]:
                raise CheckpointError(
                    f"the adapters in {store.directory} have lora.{key}={saved[key]}, not "
                    f"{own[key]}: give another workdir"
                )


def open_base(config: TrainConfig) -> Base:
    """The base that the configuration names; reads small files alone.

    Raises FileNotFoundError, ValueError or CheckpointError that say what does not fit.
    """
    lora, model = config.lora, config.model
    if not lora.base:
        return Base({}, lambda: None)
    step = found_step(lora.base)
    if quantized_rule(manifest.read(step)["meta"], int(step.name)):
        raise ValueError(
            f"lora.base={lora.base} was trained as it is served, and holds other weights: convert "
            "it to the released format and back (python -m k3_jax.checkpoint.convert)"
        )
    opened = open_checkpoint(str(step), model.dtype, model.moe.packed)
    check_sizes(lora.base, opened.config, as_served(model, model.dtype, model.moe.packed))

    def load():
        return with_leaves(abstract(model), named_leaves(opened.load()))

    told = {k: v for k, v in to_dict(lora).items() if k != "base"}
    return Base({KEY: {"base": str(step), "fingerprint": fingerprint(step), **told}}, load)


def found_step(path: str) -> epath.Path:
    """The step of ours that `path` means."""
    step = find_step(epath.Path(path))
    if step is None:
        raise FileNotFoundError(
            f"{path} holds no checkpoint of ours; a released one is converted first: "
            "python -m k3_jax.checkpoint.convert hf-to-orbax SRC DST"
        )
    return step


def check_sizes(path: str, stored: ModelConfig, asked: ModelConfig) -> None:
    """Raises ValueError naming what differs between the base and `model`."""

    def told(c):
        # What a start, a balance and the masters were is nothing to a model that is there.
        moe = dataclasses.replace(c.moe, balance="none", balance_bins=1)
        plain = to_dict(dataclasses.replace(c, init_std=0.0, moe=moe))
        return flatten(plain)

    have, want = told(stored), told(asked)
    wrong = [
        f"model.{key.replace('/', '.')}={want[key]}, the base has {have[key]}"
        for key in want
        if have[key] != want[key]
    ]
    if wrong:
        raise ValueError(f"lora.base={path} is another model: {'; '.join(wrong)}")


def fingerprint(step: epath.Path) -> str:
    """16 hex digits that go with a checkpoint wherever it is copied.

    Of the manifest: the run's configuration, each file's size, and the content of small files,
    among them a converted checkpoint's hashes of all tensors. No array is read.
    """
    told = manifest.read(step)
    text = json.dumps([told["meta"], told["files"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
