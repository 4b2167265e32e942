"""A pytree's leaves by readable path, as checkpoints and the optimizer's rules name them."""

import jax


def named_leaves(tree, is_leaf=None) -> dict:
    """{"blocks/0/parts/0/runs/1/attn/q_DHk": leaf, ...} in the tree's own order. is_leaf: as
    `jax.tree.leaves` has it."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return {path_name(path): leaf for path, leaf in paths}


def path_name(path) -> str:
    """A key path as text; the `value` that every flax Variable adds is left out."""
    parts = []
    for key in path:
        part = getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))
        parts.append(str(part))
    return "/".join(p for p in parts if p != "value")


def with_leaves(tree, leaves: dict, is_leaf=None):
    """`tree` with each leaf replaced by the one of its name; KeyError when one is missing."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return jax.tree.unflatten(structure, [leaves[path_name(path)] for path, _ in paths])


def nest(leaves: dict) -> dict:
    """{"a/b": x} -> {"a": {"b": x}}: the plain dicts that a checkpoint stores."""
    out: dict = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        inner = out
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = leaf
    return out


def flatten(nested: dict, prefix: str = "") -> dict:
    """The inverse of `nest`."""
    out = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            out |= flatten(value, f"{prefix}{key}/")
        else:
            out[prefix + key] = value
    return out
