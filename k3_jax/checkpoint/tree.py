"""What a checkpoint needs to know of a state tree: its paths, and whether two trees agree."""

import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

MAX_LISTED = 20  # differences that one message spells out


class StateMismatch(ValueError):
    """The stored state and the state asked for differ; the message lists paths."""


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """{"a/b": leaf}; an empty dict counts as a leaf."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    parts = [_flat(node, f"{path}/{key}" if path else str(key)) for key, node in tree.items()]
    return {path: leaf for part in parts for path, leaf in part.items()}


def _check_keys(tree: Any) -> None:
    for key, node in tree.items() if isinstance(tree, dict) else ():
        # Orbax joins keys by dots: {"a.b": x} and {"a": {"b": y}} would share one array on disk.
        if not isinstance(key, str) or not re.fullmatch(r"[^./]+", key):
            raise ValueError(f"state key {key!r}: keys are strings without '.' and '/'")
        _check_keys(node)


def check_state(state: Any) -> int:
    """Bytes of the whole state; raises on what does not come back as it was."""
    if not isinstance(state, dict) or not state:
        raise TypeError(f"state is {type(state).__name__}; expected a non-empty dict")
    _check_keys(state)
    n_bytes = 0
    for path, leaf in _flat(state).items():
        if isinstance(leaf, dict):  # an empty one
            continue
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(f"state leaf {path} is {type(leaf).__name__}; expected a jax.Array")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"state leaf {path} is {leaf.dtype}; save jax.random.key_data of it")
        if leaf.size == 0:
            raise ValueError(f"state leaf {path} has shape {leaf.shape}; empty arrays have no file")
        n_bytes += leaf.size * leaf.dtype.itemsize
    return n_bytes


def selected(state: dict, only: tuple[str, ...] | None) -> dict:
    """The top-level entries named by `only`, or all."""
    if only is None:
        return state
    if unknown := [name for name in only if name not in state]:
        raise StateMismatch(f"only={only}: {unknown} not among {sorted(state)}")
    return {name: state[name] for name in only}


def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The leaf with a sharding over real devices."""
    sharding = leaf.sharding
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        if mesh.axis_names != sharding.mesh.axis_names:
            raise ValueError(
                f"the state is sharded over mesh axes {sharding.mesh.axis_names}, jax.set_mesh "
                f"has {mesh.axis_names}"
            )
        sharding = NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check_match(where: str, stored: dict, target: dict, cast: bool) -> None:
    """Raises StateMismatch unless both trees have equal paths, shapes and, without cast, dtypes."""
    have, want = _flat(stored), _flat(target)
    problems, is_dtype_only = [], False
    for path in sorted(have.keys() | want.keys()):
        old, new = _described(have, path), _described(want, path)
        is_castable = old[1:] == new[1:] and len(old) == 2
        if old != new and not (cast and is_castable):
            problems.append(f"\n  {path}: stored {' '.join(old)}, asked for {' '.join(new)}")
            is_dtype_only |= is_castable
    if problems:
        more = f"\n  and {len(problems) - MAX_LISTED} more" if problems[MAX_LISTED:] else ""
        hint = "\n  (cast=True converts dtypes)" if is_dtype_only else ""
        raise StateMismatch(
            f"checkpoint {where} does not fit the state asked for:"
            f"{''.join(problems[:MAX_LISTED])}{more}{hint}"
        )


def _described(leaves: dict[str, Any], path: str) -> tuple[str, ...]:
    if path not in leaves:
        return ("nothing",)
    leaf = leaves[path]
    return (str(leaf.dtype), str(list(leaf.shape))) if hasattr(leaf, "shape") else ("empty dict",)
