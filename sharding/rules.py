"""Which mesh axes a dimension letter lives on, for stored weights and for activations.

Letters are those of `k3_jax.config`; one letter, one meaning. Axes of one device are never named,
so that a mesh without them has the types of a program that knows nothing of them.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

ROWS = ("data", "fsdp", "expert")
TOKENS = (*ROWS, "seq")
TENSOR = ("tensor",)
# Where a letter of an activation lives; the others are whole. S: the slots of a cache. P: what each
# device has of its own.
ACTIVATION = {"B": ROWS, "T": ("seq",), "P": TOKENS, **dict.fromkeys("HXFVLS", TENSOR)}
# Inside the routed experts each device has tokens and experts of its own.
ROUTED = {
    "B": (*ROWS, "tensor"),
    "T": ("seq",),
    "P": (*TOKENS, "tensor"),
    "E": ("expert", "tensor"),
}
# Weights rest split over these too, each over the first of its STORED_BY letters that it divides.
STORED_OVER = ("fsdp", "expert", "seq")
STORED_BY = "DQCRVLFHkv"


def present(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the mesh axes that have more than one device."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(a for a in axes if sizes[a] > 1)


def act_spec(letters: str, table: dict[str, tuple[str, ...]] = ACTIVATION) -> P:
    """Where an activation with these letters lives; a letter of no axis, such as ".", is whole."""
    return _spec(present(table.get(a, ())) for a in letters)


def weight_spec(letters: str, shape: tuple[int, ...]) -> P:
    """Where a weight rests.

    Experts are on their own devices; heads and channels are split over `tensor`, as they are used.
    Then each axis of STORED_OVER splits the first letter of STORED_BY that it still divides.
    Vectors and convolution taps rest whole: to gather them would cost more than it saves.
    """
    is_expert = "E" in letters and len(letters) > 2
    table = {"E": ROUTED["E"]} if is_expert else ACTIVATION
    axes = [present(table.get(a, ())) for a in letters]
    if len(letters) > 1 and "W" not in letters:
        sizes = jax.sharding.get_abstract_mesh().shape
        for axis in present(STORED_OVER):
            for i, a in enumerate(letters):
                parts = math.prod(sizes[x] for x in axes[i]) * sizes[axis]
                is_free = not any(axis in x for x in axes)
                if is_free and a in STORED_BY and shape[i] % parts == 0:
                    axes[i] += (axis,)
    return _spec(axes)


def gathered(w: jax.Array, parts_over: tuple[str, ...] = ()) -> jax.Array:
    """The weight as it is used: whole, but for heads and channels, which stay on `tensor`.

    Its gradient is reduced back to where the weight rests. Where that gradient comes as parts to be
    summed over these mesh axes, they stay parts until then: a reduce-scatter, where an all-reduce
    with a slice after it would send twice as much.
    """
    axes = map(named, jax.typeof(w).sharding.spec)
    kept = _spec(TENSOR if a[:1] == TENSOR else () for a in axes)
    # XLA (jaxlib 0.12.0.1) aborts on such a sum where another axis is manual: "Manual axes must be
    # sorted". Between the stages of a pipeline the sum is made at once.
    is_whole = not jax.sharding.get_abstract_mesh().manual_axes
    return jax.reshard(w, kept.update(reduced=set(parts_over if is_whole else ())))


def on_shards(fn, signature: str, table: dict[str, tuple[str, ...]] = ACTIVATION):
    """`fn` run on each device's own part: "BTD,DF->BTF" names the shape letters in and out.

    Operands that are whole over an axis by which others are split are marked as varying over it on
    entry, so that inside a custom VJP too their gradients are summed over the mesh. A star, as in
    "*ELF", is a weight as it rests: it is gathered within, so that its gradient is summed by a
    reduce-scatter.
    """
    ins, outs = (side.split(",") for side in signature.replace(" ", "").split("->"))
    plain = [x for letters in ins if letters[:1] != "*" for x in letters]
    split = {a for x in plain for a in present(table.get(x, ()))}

    def enter(letters, x, spec):
        if letters[:1] == "*":
            for dim, axes in enumerate(map(named, spec)):
                more = tuple(a for a in axes if a not in table.get(letters[dim + 1], ()))
                x = jax.lax.all_gather(x, more, axis=dim, tiled=True) if more else x
        has_gradient = jnp.issubdtype(x.dtype, jnp.inexact)
        return vary(x, split) if has_gradient else x

    def run(*arrays):
        in_specs = tuple(
            jax.typeof(x).sharding.spec if s[:1] == "*" else act_spec(s, table)
            for s, x in zip(ins, arrays, strict=True)
        )
        out_specs = tuple(act_spec(s, table) for s in outs)
        return jax.shard_map(
            lambda *local: fn(*map(enter, ins, local, in_specs)),
            in_specs=in_specs,
            out_specs=out_specs if len(outs) > 1 else out_specs[0],
        )(*arrays)

    return run


def vary(x: jax.Array, axes) -> jax.Array:
    """x marked as varying over these mesh axes too; inside shard_map."""
    missing = tuple(set(axes) - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def named(entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(axes) -> P:
    return P(*(None if not a else a[0] if len(a) == 1 else tuple(a) for a in axes))
