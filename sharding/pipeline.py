"""Stages of a pipeline: each has rows and blocks of its own, and they exchange both here.

    sums = on_stages(fn, P())(weights, batch)   # within: `pipeline` is manual, others as outside
        rows = own_rows(batch_rows)             # this stage's part of the rows
        x = all_micro_batches(x, "BTD", M)      # every stage's rows, cut
        w = in_ring(w, n)                       # blocks from how they rest to where they are used
        y = next_stage(y)                       # what crosses in one tick
        y = deal_back(y, "BTD")                 # a stage's blocks of all rows -> all blocks of its

At rest the n blocks of a stack lie in their order, n / P in a row on each of the P stages, so that
a checkpoint knows nothing of stages. In use block i is on stage i % P, where a ring that is walked
n / P times comes by.
"""

import jax
import jax.numpy as jnp

from sharding.rules import act_spec, on_shards

STAGES = "pipeline"


def on_stages(fn, out_specs):
    """`fn` on each stage, whose arguments are its part of what is split over `pipeline`, and whole
    otherwise; `out_specs` name `pipeline` alone. The gradient of what is whole is summed over
    stages.

    The one shard_map without check_vma: with it the residuals of one that is nested in another are
    given the shape of both (jaxlib 0.12.0.1: "'sdy.manual_computation' op result shape,
    corresponding sharding, and region result shape must match"). Those nested here keep theirs.
    """
    return jax.shard_map(fn, out_specs=out_specs, axis_names={STAGES}, check_vma=False)


def n_stages() -> int:
    return jax.sharding.get_abstract_mesh().shape[STAGES]


def own_rows(x_BT):
    """This stage's part of each device's rows."""

    def cut(x_BT, index):
        n = len(x_BT) // n_stages()
        return jax.lax.dynamic_slice_in_dim(x_BT, index * n, n)

    x_BT = jax.reshard(x_BT, act_spec("BT"))
    return on_shards(cut, "BT, -> BT")(x_BT, jax.lax.axis_index(STAGES))


def all_micro_batches(x, letters: str, n_micro: int):
    """x, the rows of this stage -> the rows of all in `n_micro` parts [n_micro, ...], on each.

    letters: of x, with B first. The parts of one stage stand in a row.
    """
    n = n_micro // n_stages()
    cut = on_shards(lambda x: x.reshape(n, -1, *x.shape[1:]), f"{letters} -> .{letters}")(x)
    # An all-gather, whose gradient JAX 0.12 cannot lower where other axes are explicit.
    copies = jnp.broadcast_to(cut, (n_stages(), *cut.shape))
    return jax.lax.all_to_all(copies, STAGES, 0, 0).reshape(n_micro, *cut.shape[1:])


def next_stage(x):
    """x of the stage before, the last before the first."""
    n = n_stages()
    return jax.lax.ppermute(x, STAGES, [(i, (i + 1) % n) for i in range(n)])


def deal_back(x, letters: str):
    """[v, M, ...], by this stage's blocks and all parts of all rows -> [n, ...], by all blocks and
    this stage's rows.

    letters: of the rest; its B becomes that of a stage's rows. With a P instead, what devices
    counted, the parts are added.
    """
    v, n_micro, *shape = x.shape
    n = n_stages()

    def join(x):
        if "B" not in letters:
            return x.sum(1)
        axis = 1 + letters.index("B")
        x = jnp.moveaxis(x, 1, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    x = jax.lax.all_to_all(x.reshape(v, n, n_micro // n, *shape), STAGES, 1, 1)
    x = x.reshape(v * n, n_micro // n, *shape)
    return on_shards(join, f"..{letters} -> .{letters}")(x)


def in_ring(w, n_blocks: int):
    """A stack as it rests [v G, run, ...], G of each of v blocks -> [G, run, v, ...], of the blocks
    that this stage has in use.

    Where v > 1 they are others: each device sends its part of every block to where it belongs, in
    up to ceil(v / P) P / v of the bytes that it has of the stack.
    """
    v = n_blocks // n_stages()
    w = w.reshape(v, -1, *w.shape[1:])
    w = _dealt(w, n_stages()) if v > 1 else w
    return jnp.moveaxis(w, 0, 2)


def _dealt(w, n):
    """[v, ...] blocks s v, s v + 1, ... of this stage s -> blocks s, s + P, ... on it."""
    v, here = len(w), jax.lax.axis_index(STAGES)
    most = -(-v // n)
    # Those for stage d are every P-th, from the first that is d modulo P on.
    to = (jnp.arange(n) - here * v) % n
    given = to[:, None] + n * jnp.arange(most)
    came = jax.lax.all_to_all(w[jnp.minimum(given, v - 1)], STAGES, 0, 0)
    block = jnp.arange(v) * n + here
    return came[block // v, block % v // n]
