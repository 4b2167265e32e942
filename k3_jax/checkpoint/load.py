"""Opens a checkpoint for inference, one of ours or one in the released format."""

import dataclasses
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
from etils import epath
from flax import nnx

from k3_jax.checkpoint import hf, manifest
from k3_jax.checkpoint.hf_config import from_hf
from k3_jax.checkpoint.safetensors import read_index
from k3_jax.checkpoint.store import CheckpointError, Store
from k3_jax.checkpoint.tree import placed
from k3_jax.config import ModelConfig, from_dict
from k3_jax.model import K3
from k3_jax.tree import flatten, named_leaves, nest, with_leaves

TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json")


class Opened(NamedTuple):
    """A checkpoint whose small files have been read. `load` reads the weights.

    `name` tells this checkpoint from others. `tokenizer` is for `load_tokenizer`, None when the
    checkpoint names none. `eos_ids` are those of the configuration files: a tokenizer has its own,
    which may differ, and an answer ends at either (T16). `load` places the model on the mesh of
    `jax.set_mesh`, and raises ValueError or CheckpointError naming what does not fit.
    """

    config: ModelConfig
    name: str
    tokenizer: str | None
    eos_ids: frozenset[int]
    load: Callable[[], K3]


def open_checkpoint(path: str, dtype: str) -> Opened:
    """The checkpoint in `path`: a training run, its checkpoints, one step, or a released one.

    `dtype` is what weights are kept in and matrix products use; what the release keeps in float32
    stays float32. Raises FileNotFoundError, ValueError or CheckpointError that say what is wrong.
    """
    directory = epath.Path(path)
    if not directory.exists():
        raise FileNotFoundError(f"checkpoint {path}: no such directory")
    if not directory.is_dir():
        raise NotADirectoryError(f"checkpoint {path} is a file; give the directory that holds it")
    precision = dict(dtype=dtype, param_dtype=dtype, remat="none")
    if (directory / manifest.NAME).exists() and directory.name.isdigit():
        return _open_ours(directory.parent, int(directory.name), precision)
    for place in (directory / "checkpoints", directory):
        if manifest.numbered(place):
            return _open_ours(place, None, precision)
    if (directory / "config.json").exists():
        return _open_released(directory, precision)
    raise FileNotFoundError(
        f"checkpoint {path}: neither numbered steps of a training run (in it or in its "
        "checkpoints/) nor a config.json with safetensors files"
    )


def _open_ours(directory: epath.Path, step: int | None, precision: dict) -> Opened:
    store = Store(directory)
    meta = store.read_meta(step)
    step = store.steps()[-1] if step is None else step
    try:
        sizes, tokenizer = meta["config"]["model"], meta["config"]["data"]["tokenizer"]
    except KeyError:
        raise CheckpointError(f"{directory}/{step} does not say which model it holds") from None
    config = dataclasses.replace(from_dict(ModelConfig, sizes, "config.model"), **precision)

    def load():
        model = _abstract(config)
        target = {"model": nest(named_leaves(model))}
        # Float32 masters narrow here when bfloat16 is what was asked for.
        with store:
            found = store.restore(target, step, only=("model",), cast=True)
        return with_leaves(model, flatten(found.state["model"]))

    return Opened(config, f"{store.directory}/{step}", tokenizer, frozenset(), load)


def _open_released(directory: epath.Path, precision: dict) -> Opened:
    config = from_hf(directory / "config.json", **precision)
    has_tokenizer = any((directory / name).exists() for name in TOKENIZER_FILES)
    tokenizer = str(directory) if has_tokenizer else None
    # A cut file or a missing one is told before the weights are read.
    read_index(directory)

    def load():
        model = _abstract(config)
        targets = named_leaves(model)
        arrays = hf.load(directory, config, targets)
        leaves = {n: jax.device_put(arrays.pop(n), placed(t).sharding) for n, t in targets.items()}
        return with_leaves(model, leaves)

    return Opened(config, str(directory.resolve()), tokenizer, eos_ids(directory), load)


def eos_ids(directory) -> frozenset[int]:
    """Every end id that `config.json` and `generation_config.json` name, in any of their ways."""
    found = set()
    for name in ("config.json", "generation_config.json"):
        path = epath.Path(directory) / name
        whole = json.loads(path.read_text()) if path.exists() else {}
        for section in (whole, whole.get("text_config", {})):
            stated = section.get("eos_token_id")
            found.update(stated if isinstance(stated, list) else [stated])
    return frozenset(found - {None})


def _abstract(config: ModelConfig) -> K3:
    return jax.eval_shape(lambda: K3(config, rngs=nnx.Rngs(params=jax.random.key(0))))
