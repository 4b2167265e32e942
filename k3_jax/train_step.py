"""The train state and one pure step: loss, gradients, update, metrics."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3_jax.axes import read
from k3_jax.balancing import figures, next_biases
from k3_jax.config import TrainConfig, as_quantized
from k3_jax.lora import adapters
from k3_jax.loss import cross_entropy, next_tokens
from k3_jax.model import K3, Output, abstract, router_biases, with_router_biases
from k3_jax.optim.qk_clip import clip_logits, largest_of_all
from k3_jax.spikes import Recent, judge, none_yet
from k3_jax.tree import named_leaves, with_leaves
from sharding import present
from sharding.pipeline import STAGES, on_stages, own_rows

F32 = jnp.float32
# A gather over mesh axes that span all three dimensions of a torus is an all-reduce of zero-padded
# parts otherwise, which sends twice as much.
TPU_OPTIONS = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}


def jit_options(mesh: jax.sharding.Mesh) -> dict:
    """How `jax.jit` compiles a step for a mesh; the state, its first argument, is given up."""
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    return dict(donate_argnums=0, compiler_options=TPU_OPTIONS if is_tpu else None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that an optimizer step reads and writes.

    `model`: what is trained, all weights or adapters (`k3_jax.lora.adapters`) alone. `skipped`
    counts the steps whose loss or gradient was not finite or a spike, `bad_in_row` the latest run
    of them; `recent` is what a spike is told by.
    """

    model: K3 | dict
    opt: optax.OptState
    step: jax.Array
    skipped: jax.Array
    bad_in_row: jax.Array
    recent: Recent


def init_state(config: TrainConfig, tx: optax.GradientTransformation) -> TrainState:
    """A fresh state; under `jax.eval_shape`, the abstract one with every leaf's placement.

    Called outside `jax.jit`, where parameters of one shape share one small program: compiled as
    one, the random bits of all parameters take minutes.
    """
    if config.lora.base:
        model = adapters.fresh(config)
    else:
        model = K3(config.model, rngs=nnx.Rngs(params=jax.random.key(config.seed)))
    # Scalars made without a placement would be restored onto one device of the mesh.
    opt = jax.tree.map(lambda x: x if x.ndim else jax.reshard(x, P()), tx.init(model))
    counters = (jax.reshard(jnp.zeros((), jnp.int32), P()) for _ in range(3))
    recent = jax.tree.map(lambda x: jax.reshard(x, P()), none_yet(config.spikes))
    return TrainState(model, opt, *counters, recent)


def loss_sums(model: K3, config: TrainConfig, batch: dict, quantized=False, **keep):
    """LossSums over rows {"tokens", "segments"[, "mask"]} of [B, T]; and the model's Output, with
    what `keep` asks of it. `quantized`: with experts as they will be served."""
    model = with_quantized_experts(model) if quantized else model
    if present((STAGES,)) and STAGES not in jax.sharding.get_abstract_mesh().manual_axes:
        return _on_stages(model, config, batch, **keep)
    tokens_BT, segments_BT = batch["tokens"], batch["segments"]
    out = model(model.embed(tokens_BT), segments_BT, n_micro=config.pipeline_micro_batches, **keep)
    targets_BT, counts_BT = next_tokens(tokens_BT, segments_BT, batch.get("mask"))
    head_DV, chunk = read(model.head_DV), config.loss_chunk
    return cross_entropy(out.hidden_BTD, head_DV, targets_BT, counts_BT, chunk=chunk), out


def with_quantized_experts(model: K3) -> K3:
    """The same parameters, in a model whose experts compute as they will be served."""
    return with_leaves(abstract(as_quantized(model.config)), named_leaves(model))


def _on_stages(model: K3, config: TrainConfig, batch: dict, counted_BT=None, **keep):
    """`loss_sums` on a mesh with stages, each for its own rows; of what layers tell, what does not
    depend on which rows are where."""

    def of_stage(model, batch, counted_BT):
        batch, counted_BT = jax.tree.map(own_rows, (batch, counted_BT))
        sums, out = loss_sums(model, config, batch, counted_BT=counted_BT, **keep)
        routing = out.routing and dataclasses.replace(out.routing, experts_BTA=None)
        largest = jax.lax.pmax(jax.lax.stop_gradient(out.largest), STAGES)
        told = Output(None, None, routing, None, largest)
        return jax.lax.psum(sums, STAGES), told

    specs = P(), Output(None, None, P(None, STAGES), None, P())
    return on_stages(of_stage, specs)(model, batch, counted_BT)


def objective(model, batch: dict, config: TrainConfig, base: K3 | None = None, quantized=False):
    """What is minimised, summed over targets; with it sums to be added over micro-batches (of the
    loss, and of routing) and what is kept of each (for balancing, and the largest logits).

    Pads and, where rows have a mask, tokens that are not to be learned do not count for balancing
    the experts (T22; what the report does with masked tokens it does not say).
    """
    counted_BT = batch["segments"] != 0
    if "mask" in batch:
        counted_BT &= batch["mask"] != 0
    keep = dict(counted_BT=counted_BT, keep_largest=clips(config))
    model = adapters.whole(model, base, config.lora)
    sums, out = loss_sums(model, config, batch, quantized, **keep)
    routed, required = None, None
    if (routing := out.routing) is not None:
        routed, required = (routing.n_dropped_P, routing.tally), routing.required_BTE
    return minimised(sums, config), ((sums, routed), (required, out.largest))


def minimised(sums, config: TrainConfig) -> jax.Array:
    """What training makes small, of LossSums: summed over targets as they are."""
    return sums.nats + config.z_loss * sums.z


def clips(config: TrainConfig) -> bool:
    """Whether there are attention logits to be bounded."""
    return config.optim.qk_clip > 0 and bool(config.model.mla_layers)


def gradients(model, batch: dict, config: TrainConfig, base: K3 | None = None, quantized=False):
    """Sums over micro-batches [accumulate, B, T] of the objective's gradient and of what it says to
    add; and what it keeps of each."""
    objective_fn = partial(objective, config=config, base=base, quantized=quantized)
    grad_fn = jax.grad(objective_fn, has_aux=True)
    rows = {k: v[0] for k, v in batch.items()}
    if config.accumulate == 1:
        grads, (sums, kept) = grad_fn(model, rows)
        return grads, sums, jax.tree.map(lambda x: x[None], kept)

    def micro(carry, rows):
        grads, (sums, kept) = grad_fn(model, rows)
        return jax.tree.map(jnp.add, carry, (grads, sums)), kept

    _, (shapes, _) = jax.eval_shape(objective_fn, model, rows)
    empty = jax.tree.map(
        lambda x: jax.reshard(jnp.zeros(x.shape, x.dtype), x.sharding.spec), shapes
    )
    first = jax.tree.map(jnp.zeros_like, model)
    (grads, sums), kept = jax.lax.scan(micro, (first, empty), batch)
    return grads, sums, kept


def train_step(
    state: TrainState,
    batch: dict,
    base: K3 | None = None,
    *,
    config: TrainConfig,
    tx,
    learning_rate,
    quantized=False,
):
    """One optimizer step on {"tokens": [accumulate, B, T], ...} -> the next state and metrics.

    The loss is the mean over all real targets of the step, however they are packed or split into
    micro-batches. The router biases, which have no gradient, become those that would have balanced
    this step. A step whose loss or gradient is not finite, or a spike (`k3_jax.spikes`), changes
    nothing but its counters and what the next spike is told by.
    `quantized`: experts compute as they will be served (`TrainConfig.qat_from_step`). base: the
    frozen model, where adapters are trained.
    """
    found = gradients(state.model, batch, config, base, quantized)
    grads, (sums, routed), (required, largest) = found
    largest = jax.tree.map(lambda x: jnp.max(x, axis=0), largest)
    count = jnp.maximum(sums.count, 1).astype(F32)
    grads = jax.tree.map(lambda g: (g / count).astype(g.dtype), grads)
    loss, grad_norm = sums.nats / count, optax.tree.norm(grads)

    is_spike, recent = judge(state.recent, loss, grad_norm, config.spikes)
    is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & ~is_spike
    updates, opt = tx.update(grads, state.opt, state.model)
    model = optax.apply_updates(state.model, updates)
    if routed is not None:
        biases_ZE = router_biases(state.model if base is None else base)
        biases_ZE = next_biases(config.model.moe, biases_ZE, routed[1], required)
        model = model if biases_ZE is None else with_router_biases(model, biases_ZE)
    if clips(config):
        model = clip_logits(model, largest, config.optim.qk_clip)
    model, opt = jax.tree.map(
        lambda new, old: jnp.where(is_good, new, old), (model, opt), (state.model, state.opt)
    )
    bad = 1 - is_good.astype(jnp.int32)
    after = TrainState(
        model, opt, state.step + 1, state.skipped + bad, (state.bad_in_row + 1) * bad, recent
    )
    metrics = {
        "loss": loss,
        "z": sums.z / count,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate(state.step),
        "tokens": sums.count,
        "skipped": after.skipped,
        "bad_in_row": after.bad_in_row,
        "spikes": recent.n_spikes,
    }
    if routed is not None:
        metrics |= figures(routed[1], router_biases(model if base is None else base))
        metrics["dropped"] = dropped_share(routed[0], batch["segments"], config.model.moe.n_active)
    if clips(config):
        metrics["largest_logit"] = largest_of_all(largest)
    return after, metrics


def dropped_share(n_dropped_ZP, segments, n_active: int) -> jax.Array:
    """The share of copies of tokens that found no room, a mean over layers."""
    # In float32: all layers' copies of tokens may leave int32.
    copies = jnp.sum(segments != 0).astype(F32) * n_active
    dropped = jnp.sum(n_dropped_ZP.astype(F32)) / len(n_dropped_ZP)
    return dropped / jnp.maximum(copies, 1)
