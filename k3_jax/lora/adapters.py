"""Which projections have adapters, what adapters start as, and the model that they make.

A pair of leaves stands for each projection, named as the weight is: "blocks/.../attn/q_DHk/a_DK"
and ".../b_KHk", with the leading axes of the weight's stack. The model that is run has
`axes.Adapted` in place of these weights; the layers know nothing of it.
"""

import math

import jax
import jax.numpy as jnp

from k3_jax.axes import Adapted, normal, zeros
from k3_jax.config import LoraConfig, TrainConfig, nearest
from k3_jax.model import K3, abstract
from k3_jax.optim.muon import WHOLE
from k3_jax.tree import flatten, named_leaves, nest, with_leaves
from sharding import weight_spec


def chosen(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The weights that get adapters, by path. Raises ValueError for a target that is none.

    All matrices of the layers may: those that Muon updates, but routed experts.
    """
    places: dict[str, dict] = {}
    for path, leaf in named_leaves(abstract(config.model)).items():
        if path.rsplit("/", 1)[-1] in WHOLE and "E" not in letters(path):
            place = path.split("/", 6)[-1]  # behind blocks/0/parts/0/runs/0
            parts = place.split("/")
            for name in ("/".join(parts[: i + 1]) for i in range(len(parts))):
                places.setdefault(name, {})[path] = leaf
    found = {}
    for target in config.lora.targets:
        if target not in places:
            raise ValueError(
                f"lora.targets: {target!r} is no projection of this model"
                f"{nearest(target, places)} (there are {', '.join(sorted(places))}; routed experts "
                "and the router stay as they are)"
            )
        found |= places[target]
    return dict(sorted(found.items()))


def letters(path: str) -> str:
    """Those of the weight of this path."""
    return path.rsplit("_", 1)[-1]


def pair(path: str) -> tuple[str, str]:
    """The paths of A and B beside the weight of this path."""
    ins, outs = WHOLE[path.rsplit("/", 1)[-1]]
    return f"{path}/a_{ins}K", f"{path}/b_K{outs}"


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
            n_in = math.prod(sizes[a] for a in own[:-1])
            init = normal(n_in**-0.5) if own.endswith("K") else zeros
            placed = weight_spec("G" * lead + own, shape)
            made[name] = init(key, shape, jnp.float32, out_sharding=placed)
    return nest(made)


def whole(trained, base: K3 | None, c: LoraConfig) -> K3:
    """The model: `trained` itself, or the frozen `base` with these adapters."""
    if base is None:
        return trained
    leaves, adapters = named_leaves(base), flatten(trained)
    for path in dict.fromkeys(name.rsplit("/", 1)[0] for name in adapters):
        a, b = (adapters[name] for name in pair(path))
        leaves[path] = Adapted(leaves[path], a, b, c.alpha / c.rank)
    return with_leaves(base, leaves)
