"""Which projections have adapters, what adapters start as, and the model that they make.

A pair of leaves stands for each projection, named as the weight is: "blocks/.../attn/q_DHk/a_DK"
and ".../b_KHk", with the leading axes of the weight's stack; each routed expert has a pair of its
own, "ffn/gate_ELF/a_ELK" and ".../b_EKF", packed or not. The model that is run has `axes.Adapted`
in place of these weights; of the layers only `experts` knows of it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from k3_jax.axes import Adapted, normal, zeros
from k3_jax.config import LoraConfig, TrainConfig, nearest
from k3_jax.layers.experts import Packed
from k3_jax.model import K3, abstract
from k3_jax.optim.muon import WHOLE
from k3_jax.tree import flatten, named_leaves, nest, with_leaves
from sharding import weight_spec


def chosen(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The weights that get adapters, by path; packed ones as if they were not. Raises ValueError
    for a target that is none.

    All matrices of the layers may: those that Muon updates.
    """
    c, places = config.model, {}
    plain = dataclasses.replace(c, moe=dataclasses.replace(c.moe, packed=False))
    for path, leaf in named_leaves(abstract(plain)).items():
        if path.rsplit("/", 1)[-1] in WHOLE:
            for name in names(path):
                places.setdefault(name, {})[path] = leaf
    found = {}
    for target in config.lora.targets:
        if target not in places:
            raise ValueError(
                f"lora.targets: {target!r} is no projection of this model"
                f"{nearest(target, places)} (there are {', '.join(sorted(places))}; the router "
                "stays as it is)"
            )
        found |= places[target]
    return dict(sorted(found.items()))


def names(path: str) -> list[str]:
    """What `lora.targets` may call this weight: by itself or by its folders.

    Routed experts are most of a model: they are in no folder but one of their own.
    """
    place = path.split("/", 6)[-1]  # behind blocks/0/parts/0/runs/0
    if "E" in letters(path):
        return [place, "experts"]
    parts = place.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def letters(path: str) -> str:
    """Those of the weight of this path."""
    return path.rsplit("_", 1)[-1]


def pair(path: str) -> tuple[str, str]:
    """The paths of A and B beside the weight of this path."""
    ins, outs = WHOLE[path.rsplit("/", 1)[-1]]
    each = "E" * ("E" in letters(path))
    return f"{path}/a_{each}{ins}K", f"{path}/b_{each}K{outs}"


def fresh(config: TrainConfig) -> dict:
    """New adapters as nested dicts, float32: A normal, B zero, so that they change nothing.

    A's standard deviation is inputs ** -0.5, which gives x A the size of x (the paper says a random
    Gaussian; chosen here).
    """
    weights, made = chosen(config), {}
    keys = jax.random.split(jax.random.key(config.seed), len(weights))
    for key, (path, leaf) in zip(keys, weights.items(), strict=True):
        lead = leaf.ndim - len(letters(path))
        sizes = dict(zip(letters(path), leaf.shape[lead:], strict=True), K=config.lora.rank)
        for name in pair(path):
            own = letters(name)
            shape = (*leaf.shape[:lead], *(sizes[a] for a in own))
            n_in = math.prod(sizes[a] for a in own[:-1] if a != "E")
            init = normal(n_in**-0.5) if own.endswith("K") else zeros
            placed = weight_spec("G" * lead + own, shape)
            made[name] = init(key, shape, jnp.float32, out_sharding=placed)
    return nest(made)


def whole(trained, base: K3 | None, c: LoraConfig) -> K3:
    """The model: `trained` itself, or the frozen `base` with these adapters."""
    if base is None:
        return trained
    leaves, adapters = named_leaves(base, _is_packed), flatten(trained)
    for path in dict.fromkeys(name.rsplit("/", 1)[0] for name in adapters):
        a, b = (adapters[name] for name in pair(path))
        leaves[path] = Adapted(leaves[path], a, b, c.alpha / c.rank)
    return with_leaves(base, leaves, _is_packed)


def _is_packed(x) -> bool:
    return isinstance(x, Packed)
