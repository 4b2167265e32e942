"""A pipeline over AttnRes blocks: alike blocks on stages, parts of the rows from one to the next.

P stages, n alike blocks, M micro-batches of the rows (`pipeline_micro_batches`), M a multiple of P.
Block i is on stage i % P; a micro-batch walks round the ring of stages n / P times. In tick t stage
s runs its round r = (t - s) // M on micro-batch (t - s) % M, block r P + s. After M n / P + P - 1
ticks all is done; (P - 1) of them every stage waits, so (P - 1) / (M n / P + P - 1) is lost. One
scan over ticks under the step's one jit: the backward pass is autodiff's, the ticks in reverse.

What crosses. Block i wants the sums before blocks 0 .. i, which are the bank's rows, and nothing
else: its own sum starts anew. What came into the pipeline every stage gets before the first tick.
Of the later sums a stage keeps what it made and what it got, so when a micro-batch comes round
again it lacks those that the other stages made since: P - 1 of them. **A tick moves P - 1 rows of
[B / M, T, D] from each stage to the next, however deep the model is**, and as many cotangents
backward. Report section 5.2: only newly made block rows cross (T15). It has interleaved 1F1B, which
lowers the memory of saved rows by mixing forward and backward passes; autodiff of a scan does not.

A tick uses the weights of one block, so those that rest over `fsdp` are gathered, and their
gradients scattered, once a tick, as with `accumulate` once a micro-batch.

What is not of alike blocks (the first and last block, embedding, loss) runs on each stage for its
own rows: there `pipeline` is one more axis of rows.

Own code, as no library's pipeline fits: those of praxis and MaxText are Linen modules that vmap
stages under automatic sharding and pass one array on, JaxPP has a runtime of its own.
"""

import jax
import jax.numpy as jnp

from k3_jax.layers.attn_res import Bank
from k3_jax.state import Rows
from k3_jax.tree import path_name
from sharding.pipeline import (
    STAGES,
    all_micro_batches,
    deal_back,
    in_ring,
    n_stages,
    next_stage,
)


def through_stages(block, parts, n: int, sum_BTD, bank: Bank, rows: Rows, n_micro: int):
    """n alike blocks on this stage's rows: the last one's sum, the bank with what came before it,
    and what blocks told, [n, ...], of these rows; the largest logits, of all rows, but -inf for the
    blocks of other stages. Inside `sharding.pipeline.on_stages`.

    block(sum_BTD, bank, rows, None, parts, None, turn) -> sum_BTD, None, told. parts: this stage's
    part of the blocks' weights as they rest.
    """
    parts = jax.tree.map(lambda w: in_ring(w, n), parts)
    came_in = [all_micro_batches(x, "BTD", n_micro) for x in (*bank.rows, sum_BTD)]
    cut = jax.tree.map(lambda x: all_micro_batches(x, "BT", n_micro), rows)
    P, s = n_stages(), jax.lax.axis_index(STAGES)
    n_items = n_micro * n // P

    def tick(kept, t):
        (turn, m), is_due = _item(t - s, n_micro, n_items)
        i = turn * P + s
        first, later = [x[m] for x in came_in], kept[m]
        there = (*bank.is_there, True, *(k < i for k in range(n - 1)))
        here = Bank((*first, *(later[k] for k in range(n - 1))), there)
        own = jax.tree.map(lambda x: x[m], cut)
        sum_BTD, _, told = block(first[-1], here, own, None, parts, None, turn)
        # The sum after block i is row i of what is kept; before it went P - 2 others.
        older = [later[jnp.maximum(i - 1 - j, 0)] for j in range(P - 2)]
        kept = _keep(kept, m, i, sum_BTD, is_due)
        before = (s - 1) % P
        (turn, m), is_due = _item(t - before, n_micro, n_items)
        i = turn * P + before
        for j, x_BTD in enumerate(next_stage((sum_BTD, *older))):
            kept = _keep(kept, m, i - j, x_BTD, is_due & (i < n - 1))
        return kept, (sum_BTD, told)

    # Of each micro-batch the sums after all blocks but the last, as far as they are here.
    room = jnp.stack([jnp.zeros_like(came_in[0])] * (n - 1), axis=1)
    _, found = jax.lax.scan(tick, room, jnp.arange(n_items + P - 1))
    # Of this stage's ticks those that were due, by its turns.
    sums, (routing, _, largest) = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, s, n_items).reshape(-1, n_micro, *x.shape[1:]),
        found,
    )
    sums = deal_back(sums, "BTD")
    routing = jax.tree_util.tree_map_with_path(
        lambda path, x: deal_back(x, "Z" + path_name(path).rsplit("_", 1)[-1]), routing
    )
    largest = jax.tree.map(_of_own_blocks, largest)
    made = (sum_BTD, *(sums[k] for k in range(n - 1)))
    bank = Bank((*bank.rows, *made), (*bank.is_there, *(True,) * n))
    return sums[n - 1], bank, (routing, None, largest)


def _item(index, n_micro: int, n_items: int):
    """The round and the micro-batch of a stage's `index`-th item, and whether there is one."""
    is_due = (index >= 0) & (index < n_items)
    return jnp.divmod(jnp.clip(index, 0, n_items - 1), n_micro), is_due


def _keep(kept, m, k, x_BTD, is_due):
    """kept with x as row k of micro-batch m, where it is due and there is such a row."""
    n_rows = kept.shape[1]
    is_due &= (k >= 0) & (k < n_rows)
    at = (m, jnp.clip(k, 0, n_rows - 1), 0, 0, 0)
    old = jax.lax.dynamic_slice(kept, at, (1, 1, *x_BTD.shape))
    return jax.lax.dynamic_update_slice(kept, jnp.where(is_due, x_BTD[None, None], old), at)


def _of_own_blocks(largest):
    """[v, M, ...] of this stage's blocks -> [n, ...], of all micro-batches."""
    own = jnp.max(largest, axis=1)[:, None]
    is_own = jnp.arange(n_stages()) == jax.lax.axis_index(STAGES)
    is_own = is_own.reshape(-1, *(1,) * (own.ndim - 2))
    return jnp.where(is_own, own, -jnp.inf).reshape(-1, *own.shape[2:])
