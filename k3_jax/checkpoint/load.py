"""Opens a checkpoint for inference, one of ours or one in the released format."""

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax.checkpoint import hf, manifest
from k3_jax.checkpoint.arrays import StoredArrays
from k3_jax.checkpoint.hf_config import from_hf
from k3_jax.checkpoint.safetensors import read_index
from k3_jax.checkpoint.store import CheckpointError, Store
from k3_jax.checkpoint.to_orbax import FILES, SOURCE, STATE
from k3_jax.checkpoint.trained import quantized_rule
from k3_jax.checkpoint.tree import placed
from k3_jax.config import ModelConfig, as_served, from_dict
from k3_jax.model import K3, abstract
from k3_jax.quant import mxfp4
from k3_jax.quant.mxfp4 import Mxfp4
from k3_jax.quant.training import with_whole_groups
from k3_jax.tree import flatten, named_leaves, nest, with_leaves
from pallas_kernels.experts import from_released

TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json")
EXPERTS = tuple(leaf for leaf, _ in hf.EXPERT.values())


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


def open_checkpoint(
    path: str, dtype: str, is_packed: bool = False, activations: str | None = None
) -> Opened:
    """The checkpoint in `path`: a training run, its checkpoints, one step, or a released one.

    is_packed: experts stay MXFP4 in memory, which a checkpoint allows that was converted or that
    quantisation-aware training made. `dtype` is what other weights are kept in and matrix products
    use; what the release keeps in float32 stays float32. `activations`: those of `MoeConfig`, by
    default what our training had; a released checkpoint does not tell, and has "plain".
    Raises FileNotFoundError, ValueError or CheckpointError that say what is wrong.
    """
    directory = epath.Path(path)
    if not directory.exists():
        raise FileNotFoundError(f"checkpoint {path}: no such directory")
    if not directory.is_dir():
        raise NotADirectoryError(f"checkpoint {path} is a file; give the directory that holds it")
    if (directory / manifest.NAME).exists() and directory.name.isdigit():
        return _open_ours(directory.parent, int(directory.name), dtype, is_packed, activations)
    for place in (directory / "checkpoints", directory):
        if manifest.numbered(place):
            return _open_ours(place, None, dtype, is_packed, activations)
    if (directory / "config.json").exists():
        if is_packed:
            raise ValueError(
                f"{path} is in the released format, whose experts are widened when they are read: "
                "convert it first (python -m k3_jax.checkpoint.convert hf-to-orbax SRC DST)"
            )
        return _open_released(directory, dtype, activations)
    raise FileNotFoundError(
        f"checkpoint {path}: neither numbered steps of a training run (in it or in its "
        "checkpoints/) nor a config.json with safetensors files"
    )


def _open_ours(
    directory: epath.Path, step: int | None, dtype: str, is_packed: bool, activations: str | None
) -> Opened:
    store = Store(directory)
    meta = store.read_meta(step)
    step = store.steps()[-1] if step is None else step
    path = store.directory / str(step)
    manifest.check_is_model(path, meta)
    try:
        sizes, tokenizer = meta["config"]["model"], meta["config"]["data"]["tokenizer"]
    except KeyError:
        raise CheckpointError(f"{path} does not say which model it holds") from None
    trained = from_dict(ModelConfig, sizes, "config.model")
    is_quantized = bool(quantized_rule(meta, step))
    activations = activations or ("mxfp8" if is_quantized else None)
    config, kept = (as_served(trained, dtype, packed, activations) for packed in (False, is_packed))
    # A converted checkpoint brings the files that the released one had.
    files = path / SOURCE / FILES
    tokenizer = _tokenizer_in(files) or tokenizer or None

    def load():
        model = abstract(config)
        targets = named_leaves(model)
        experts = [name for name in targets if name.endswith(EXPERTS)] if is_quantized else []
        masters = {name: as_master(targets[name]) for name in experts}
        with store:
            leaves = read_leaves(store, step, targets | masters)
        for name in experts:
            leaves[name] = packed_as_trained(leaves[name])
        for name, leaf in list(leaves.items()):
            is_mxfp4 = isinstance(leaf, Mxfp4)
            if is_packed and is_mxfp4:
                leaves |= for_kernel(name, leaves.pop(name))
            elif is_packed and name.endswith(EXPERTS):
                raise ValueError(f"{path}: {name} is {leaf.dtype}, not packed")
            elif is_mxfp4:
                leaves[name] = widened(name, leaf, targets[name])
        if is_packed:
            model = abstract(kept)
            leaves = {
                name: jax.device_put(leaves.pop(name), placed(target).sharding)
                for name, target in named_leaves(model).items()
            }
        return with_leaves(model, leaves)

    return Opened(kept, str(path), tokenizer, eos_ids(files), load)


def read_leaves(store: Store, step: int, targets: dict) -> dict[str, jax.Array | Mxfp4]:
    """The model's parameters by name, experts that are stored packed as `Mxfp4`.

    targets: shapes, dtypes and shardings of the leaves as if none was packed. Codes and scales are
    split as the leaf is, and each host reads its own part alone. Other values are converted to
    the dtype asked for: float32 masters narrow where bfloat16 is what was asked for.
    """
    stored = StoredArrays(store.directory / str(step) / STATE).info("model")
    wanted = {}
    for name, leaf in targets.items():
        if f"{name}/packed" in stored:
            sharding = _packed_sharding(name, leaf, stored[f"{name}/scales"].shape)
            for part in ("packed", "scales"):
                info = stored[f"{name}/{part}"]
                wanted[f"{name}/{part}"] = jax.ShapeDtypeStruct(*info[::-1], sharding=sharding)
        else:
            wanted[name] = leaf
    found = flatten(store.restore({"model": nest(wanted)}, step, only=("model",), cast=True).state)
    found = {name.removeprefix("model/"): x for name, x in found.items()}
    return {
        name: found[name]
        if name in found
        else Mxfp4(found.pop(f"{name}/packed"), found.pop(f"{name}/scales"))
        for name in targets
    }


def as_master(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The leaf as training keeps it: what rounds to MXFP4 must not be rounded before."""
    return jax.ShapeDtypeStruct(target.shape, jnp.float32, sharding=target.sharding)


def packed_as_trained(weight: jax.Array) -> Mxfp4:
    """Masters of quantisation-aware training as it multiplied them, in the release's order."""
    weight = with_whole_groups(weight)
    spec = jax.typeof(weight).sharding.spec
    pack = jax.shard_map(mxfp4.pack_rounded, in_specs=(spec,), out_specs=(_turned(spec),) * 2)
    return Mxfp4(*jax.jit(pack)(weight))


def widened(name: str, weight: Mxfp4, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Packed experts as the leaf `name`, in its order, dtype and sharding. Exact."""
    if n := int((weight.scales == 255).sum()):
        raise ValueError(f"{name}: {n} scale bytes are 255, which is NaN in E8M0")
    released = weight.packed.sharding

    def local(packed, scales):
        values = mxfp4.unpack(packed, scales, target.dtype)
        return jnp.swapaxes(values, -1, -2) if _is_turned(name) else values

    out = _turned(released.spec) if _is_turned(name) else released.spec
    widen = jax.shard_map(local, mesh=released.mesh, in_specs=(released.spec,) * 2, out_specs=out)
    return jax.device_put(jax.jit(widen)(weight.packed, weight.scales), placed(target).sharding)


def for_kernel(name: str, weight: Mxfp4) -> dict[str, jax.Array]:
    """Packed experts as the parameters of `layers.moe.Packed`: the same bits in another order."""
    released = weight.packed.sharding

    def local(packed, scales):
        *lead, E, F, half = packed.shape
        flat = packed.reshape(-1, F, half), scales.reshape(-1, F, scales.shape[-1])
        return tuple(x.reshape(*lead, E, *x.shape[1:]) for x in from_released(*flat))

    # The halves of a column share bytes: the packed axis has to be whole.
    spec = PartitionSpec(*released.spec[:-1], None)
    order = jax.shard_map(
        local, mesh=released.mesh, in_specs=(spec,) * 2, out_specs=(_turned(spec),) * 2
    )
    whole = NamedSharding(released.mesh, spec)
    parts = jax.jit(order)(*jax.device_put((weight.packed, weight.scales), whole))
    return dict(zip((f"{name}/packed", f"{name}/scales"), parts, strict=True))


def _is_turned(name: str) -> bool:
    """Whether the leaf's last two axes are the released ones in the other order."""
    dims = next(d for leaf, d in hf.EXPERT.values() if name.endswith(leaf))
    return not name.endswith(dims.replace(" ", ""))


def _turned(spec) -> PartitionSpec:
    *lead, a, b = spec
    return PartitionSpec(*lead, b, a)


def _packed_sharding(name: str, leaf, scales: tuple[int, ...]) -> NamedSharding:
    """How codes and scales are split. Along the packed axis only where no block would be."""
    sharding = placed(leaf).sharding
    spec = PartitionSpec(*sharding.spec, *(None,) * (len(leaf.shape) - len(sharding.spec)))
    spec = _turned(spec) if _is_turned(name) else spec
    axes = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],) if spec[-1] else ()
    if scales[-1] % math.prod(sharding.mesh.shape[a] for a in axes):
        spec = PartitionSpec(*spec[:-1], None)
    return NamedSharding(sharding.mesh, spec)


def _tokenizer_in(directory: epath.Path) -> str | None:
    return str(directory) if any((directory / n).exists() for n in TOKENIZER_FILES) else None


def _open_released(directory: epath.Path, dtype: str, activations: str | None) -> Opened:
    config = as_served(from_hf(directory / "config.json"), dtype, activations=activations)
    tokenizer = _tokenizer_in(directory)
    # A cut file or a missing one is told before the weights are read.
    read_index(directory)

    def load():
        model = abstract(config)
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
