"""The train state and one pure step: loss, gradients, update, metrics."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3_jax.axes import read
from k3_jax.config import TrainConfig
from k3_jax.loss import LossSums, cross_entropy, next_tokens
from k3_jax.model import K3

F32 = jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that an optimizer step reads and writes.

    `skipped` counts the steps whose loss or gradient was not finite, `bad_in_row` the latest run
    of them.
    """

    model: K3
    opt: optax.OptState
    step: jax.Array
    skipped: jax.Array
    bad_in_row: jax.Array


def init_state(config: TrainConfig, tx: optax.GradientTransformation) -> TrainState:
    """A fresh state; under `jax.eval_shape`, the abstract one with every leaf's placement.

    Called outside `jax.jit`, where parameters of one shape share one small program: compiled as
    one, the random bits of all parameters take minutes.
    """
    model = K3(config.model, rngs=nnx.Rngs(params=jax.random.key(config.seed)))
    # Scalars made without a placement would be restored onto one device of the mesh.
    opt = jax.tree.map(lambda x: x if x.ndim else jax.reshard(x, P()), tx.init(model))
    counters = (jax.reshard(jnp.zeros((), jnp.int32), P()) for _ in range(3))
    return TrainState(model, opt, *counters)


def loss_sums(model: K3, config: TrainConfig, batch: dict) -> LossSums:
    """Sums over one batch of rows {"tokens", "segments"[, "mask"]} of [B, T]."""
    tokens_BT, segments_BT = batch["tokens"], batch["segments"]
    hidden_BTD = model(model.embed(tokens_BT), segments_BT).hidden_BTD
    targets_BT, counts_BT = next_tokens(tokens_BT, segments_BT, batch.get("mask"))
    head_DV = read(model.head_DV)
    return cross_entropy(hidden_BTD, head_DV, targets_BT, counts_BT, chunk=config.loss_chunk)


def train_step(state: TrainState, batch: dict, config: TrainConfig, tx, learning_rate):
    """One optimizer step on {"tokens": [accumulate, B, T], ...} -> the next state and metrics.

    The loss is the mean over all real targets of the step, however they are packed or split into
    micro-batches. A step whose loss or gradient is not finite changes nothing but its counters.
    """

    def objective(model, rows):
        sums = loss_sums(model, config, rows)
        return sums.nats + config.z_loss * sums.z, sums

    grad_fn = jax.grad(objective, has_aux=True)

    def micro(carry, rows):
        grads, sums = grad_fn(state.model, rows)
        return jax.tree.map(jnp.add, carry, (grads, sums)), None

    if config.accumulate == 1:
        grads, sums = grad_fn(state.model, {k: v[0] for k, v in batch.items()})
    else:
        first = jax.tree.map(jnp.zeros_like, state.model)
        empty = LossSums(jnp.zeros((), F32), jnp.zeros((), F32), jnp.zeros((), jnp.int32))
        (grads, sums), _ = jax.lax.scan(micro, (first, empty), batch)
    count = jnp.maximum(sums.count, 1).astype(F32)
    grads = jax.tree.map(lambda g: (g / count).astype(g.dtype), grads)
    loss, grad_norm = sums.nats / count, optax.tree.norm(grads)

    is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt = tx.update(grads, state.opt, state.model)
    model = optax.apply_updates(state.model, updates)
    model, opt = jax.tree.map(
        lambda new, old: jnp.where(is_good, new, old), (model, opt), (state.model, state.opt)
    )
    bad = 1 - is_good.astype(jnp.int32)
    after = TrainState(
        model, opt, state.step + 1, state.skipped + bad, (state.bad_in_row + 1) * bad
    )
    metrics = {
        "loss": loss,
        "z": sums.z / count,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate(state.step),
        "tokens": sums.count,
        "skipped": after.skipped,
        "bad_in_row": after.bad_in_row,
    }
    return after, metrics
