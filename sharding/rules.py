"""Which mesh axis a dimension letter lives on, for stored weights and for activations.

Weights rest sharded over `fsdp` and are gathered where they are used; activations are split by
rows over both axes. Letters are those of `k3_jax.config`; one letter, one meaning.
"""

import jax
from jax.sharding import PartitionSpec as P

# The first of these letters that a weight has is the dimension it is stored sharded by.
STORED_BY = "DEQCR"
ROWS = ("data", "fsdp")


def weight_spec(letters: str) -> P:
    """Where a weight rests: its first letter of STORED_BY over `fsdp`, the rest whole."""
    by = next((a for a in STORED_BY if a in letters), None)
    return P(*("fsdp" if a == by else None for a in letters))


def act_spec(letters: str) -> P:
    """Where an activation lives: rows (B) over all devices, everything else whole."""
    return P(*(ROWS if a == "B" else None for a in letters))


def gathered(w: jax.Array) -> jax.Array:
    """The whole weight on every device; its gradient is reduced back to where the weight rests."""
    return jax.reshard(w, P(*(None,) * w.ndim))


def on_shards(fn, signature: str):
    """`fn` run on each device's own rows: "BTD,DF->BTF" names the shape letters in and out.

    Operands without a B are whole on every device. They are marked as varying on entry, so that
    inside a custom VJP too their gradients are summed over the mesh.
    """
    ins, outs = (side.split(",") for side in signature.replace(" ", "").split("->"))

    def local(*arrays):
        pairs = zip(ins, arrays, strict=True)
        return fn(*(a if "B" in s else jax.lax.pcast(a, ROWS, to="varying") for s, a in pairs))

    out_specs = tuple(act_spec(s) for s in outs)
    # Wrapped at the call: shard_map binds the context mesh when it wraps.
    return jax.shard_map(
        local,
        in_specs=tuple(act_spec(s) for s in ins),
        out_specs=out_specs if len(outs) > 1 else out_specs[0],
    )
