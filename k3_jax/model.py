"""Kimi K3: embedding, Attention Residual blocks of layer groups, final mixture, norm and head."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import ShapesOnly, normal, ones, own_ids, read, stacked, weight
from k3_jax.config import ModelConfig
from k3_jax.layers.attn_res import AttnRes
from k3_jax.layers.kda import Kda
from k3_jax.layers.mla import Mla
from k3_jax.layers.mlp import DenseFfn
from k3_jax.layers.moe import Moe, Routing
from k3_jax.layers.norm import rms_norm
from k3_jax.state import K3Cache, Rows, fresh_kda, fresh_mla, zeros
from pallas_kernels.common import dot32
from sharding import act_spec, on_shards, present

# One part of an AttnRes block: equal groups of consecutive layers, by their indices.
Part = tuple[tuple[int, ...], ...]


def plan_blocks(c: ModelConfig) -> list[list[Part]]:
    """Cut the layers into AttnRes blocks, blocks into groups that end with an MLA layer.

    A block's parts are its opening group, the groups after it that are alike and share one program
    under a scan, and what is left over, such as the released model's lone last MLA layer. The
    opening group is apart because its first layer reads the bank alone (and, in block 0, has the
    dense FFN).
    """

    def kinds(layers):
        return [(i in c.mla_layers, i < c.n_dense) for i in layers]

    unit = min(c.mla_layers[0] + 1 if c.mla_layers else c.block_layers, c.block_layers)
    plans = []
    for start in range(0, c.n_layers, c.block_layers):
        layers = range(start, min(start + c.block_layers, c.n_layers))
        groups = [tuple(layers[i : i + unit]) for i in range(0, len(layers), unit)]
        opening, *others = groups
        n_alike = 0
        while n_alike < len(others) and kinds(others[n_alike]) == kinds(others[0]):
            n_alike += 1
        parts = [(opening,), tuple(others[:n_alike]), *((g,) for g in others[n_alike:])]
        plans.append([part for part in parts if part])
    return plans


def cut_runs(c: ModelConfig, indices: tuple[int, ...], is_opening: bool) -> list[list[int]]:
    """A group's layers as runs of equal ones; the first layer of a block is a run of its own."""

    def kind(i):
        return i in c.mla_layers, i < c.n_dense, is_opening and i == indices[0]

    return [list(run) for _, run in itertools.groupby(indices, key=kind)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    """What a call returns.

    `hidden_BTD`: after the final norm. `cache`: None when none was given. `routing`: of each
    of the Z MoE layers, stacked. `stream_YBTD`: with `keep_stream`, the running sum
    after each of the Y layers.
    """

    hidden_BTD: jax.Array
    cache: K3Cache | None
    routing: Routing | None
    stream_YBTD: jax.Array | None


class Layer(nnx.Module):
    """One decoder layer: two sub-layers, each reading a mixture and adding to the running sum."""

    def __init__(self, c: ModelConfig, index: int, *, rngs: nnx.Rngs):
        dims = dict(D=c.width)
        self.eps = c.norm_eps
        self.attn_res, self.ffn_res = AttnRes(c, rngs=rngs), AttnRes(c, rngs=rngs)
        self.attn_norm_D = weight(rngs, "D", dims, c.param_dtype, ones)
        self.ffn_norm_D = weight(rngs, "D", dims, c.param_dtype, ones)
        self.attn = (Mla if index in c.mla_layers else Kda)(c, rngs=rngs)
        self.ffn = (DenseFfn if index < c.n_dense else Moe)(c, rngs=rngs)

    def __call__(self, sum_BTD, bank, rows: Rows, cache, forced_BTA):
        """The block's running sum after this layer; `sum_BTD` is None in a block's first layer."""
        x_BTD = self.attn_res(bank if sum_BTD is None else (*bank, sum_BTD))
        y_BTD, cache = self.attn(rms_norm(x_BTD, read(self.attn_norm_D), self.eps), rows, cache)
        sum_BTD = y_BTD if sum_BTD is None else sum_BTD + y_BTD
        x_BTD = self.ffn_res((*bank, sum_BTD))
        y_BTD, routing = self.ffn(
            rms_norm(x_BTD, read(self.ffn_norm_D), self.eps), rows, forced_BTA
        )
        return sum_BTD + y_BTD, cache, routing


class Group(nnx.Module):
    """Consecutive layers as runs of equal ones, each run stacked and scanned."""

    def __init__(
        self, c: ModelConfig, indices: tuple[int, ...], is_opening: bool, *, rngs: nnx.Rngs
    ):
        self.remat = c.remat
        runs = cut_runs(c, indices, is_opening)
        self.lengths = tuple(len(run) for run in runs)
        self.is_moe = tuple(run[0] >= c.n_dense for run in runs)
        self.runs = nnx.List([stacked(Layer, c, run[0], n=len(run), rngs=rngs) for run in runs])

    def __call__(self, sum_BTD, bank, rows: Rows, caches, forced_ZBTA, keep_stream: bool):
        """The sum after the group, and per run (caches, routing, sums)."""

        def step(sum_BTD, xs):
            layer, cache, forced_BTA = xs
            run = remat(lambda layer, *x: layer(*x), self.remat, "layer")
            sum_BTD, cache, routing = run(layer, sum_BTD, bank, rows, cache, forced_BTA)
            return sum_BTD, (cache, routing, sum_BTD if keep_stream else None)

        found, z = [], 0
        for r, (layers, n) in enumerate(zip(self.runs, self.lengths, strict=True)):
            forced = None
            if forced_ZBTA is not None and self.is_moe[r]:
                forced, z = forced_ZBTA[z : z + n], z + n
            cache = None if caches is None else caches[r]
            sum_BTD, out = repeat(step, sum_BTD, (layers, cache, forced), n)
            found.append(out)
        return sum_BTD, tuple(zip(*found, strict=True))


class Block(nnx.Module):
    """One AttnRes block. The bank's rows are constants of its scans: each is saved once (T31)."""

    def __init__(self, c: ModelConfig, plan: list[Part], *, rngs: nnx.Rngs):
        self.remat = c.remat
        self.lengths = tuple(len(part) for part in plan)
        self.parts = nnx.List(
            [stacked(Group, c, p[0], p is plan[0], n=len(p), rngs=rngs) for p in plan]
        )

    def __call__(self, bank, rows: Rows, caches, forced_ZBTA, keep_stream: bool):
        """The block's sum; its caches, the routing of its MoE layers and its sums, in order."""

        def step(sum_BTD, xs):
            group, cache, forced_ZBTA = xs
            run = remat(lambda g, *x: g(*x, keep_stream), self.remat, "group")
            return run(group, sum_BTD, bank, rows, cache, forced_ZBTA)

        sum_BTD, after, routing, stream, z = None, [], [], [], 0
        for p, (groups, n) in enumerate(zip(self.parts, self.lengths, strict=True)):
            n_moe = sum(
                k for k, is_moe in zip(groups.lengths, groups.is_moe, strict=True) if is_moe
            )
            forced = None
            if forced_ZBTA is not None:
                forced = forced_ZBTA[z : z + n * n_moe]
                forced, z = forced.reshape(n, n_moe, *forced.shape[1:]), z + n * n_moe
            cache = None if caches is None else caches[p]
            sum_BTD, (cache, chosen, sums) = repeat(step, sum_BTD, (groups, cache, forced), n)
            after.append(cache)
            routing += in_order(chosen)
            stream += in_order(sums)
        return sum_BTD, (tuple(after), routing, stream)


def repeat(step, carry, xs, n: int):
    """`jax.lax.scan` over `n` stacked things; one alone runs without a loop."""
    if n > 1:
        return jax.lax.scan(step, carry, xs)
    carry, ys = step(carry, jax.tree.map(lambda x: jnp.squeeze(x, 0), xs))
    return carry, jax.tree.map(lambda y: y[None], ys)


def in_order(runs) -> list:
    """Per-run trees of [groups, layers of the run, ...] -> [layers, ...] in the layers' order."""
    runs = [x for x in runs if x is not None]
    if not runs:
        return []
    joined = _concatenate(runs, axis=1)
    return [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), joined)]


class K3(nnx.Module):
    """The language model. One call trains, scores, prefills and decodes."""

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        dims = dict(V=c.vocab_size, D=c.width)
        self.config = c
        self.embed_VD = weight(rngs, "VD", dims, c.param_dtype, normal(c.init_std))
        self.blocks = nnx.List([Block(c, plan, rngs=rngs) for plan in plan_blocks(c)])
        self.out_res = AttnRes(c, rngs=rngs)
        self.out_norm_D = weight(rngs, "D", dims, c.param_dtype, ones)
        self.head_DV = weight(rngs, "DV", dims, c.param_dtype, normal(c.init_std))

    def embed(self, tokens_BT) -> jax.Array:
        """Token ids -> embedding rows [B, T, D] in the compute dtype."""
        # Rows are looked up before the cast, so that their gradients add up in the stored dtype.
        look_up = on_shards(_look_up, "BT,VD -> BTD")
        tokens_BT = jax.reshard(tokens_BT, act_spec("BT"))
        return look_up(tokens_BT, read(self.embed_VD)).astype(self.config.dtype)

    def logits(self, hidden_BTD) -> jax.Array:
        """Final hidden rows -> float32 logits [B, T, V], V whole. The loss never calls this."""
        logits_BTV = dot32("BTD,DV->BTV", hidden_BTD, read(self.head_DV, hidden_BTD.dtype))
        return jax.reshard(logits_BTV, act_spec("BT."))

    def __call__(
        self,
        x_BTD,
        segments_BT,
        cache: K3Cache | None = None,
        *,
        forced_ZBTA=None,
        keep_stream=False,
    ) -> Output:
        """Rows of embeddings -> hidden rows.

        `segments_BT`: 0 for pads, else the document of the token; documents never see each other.
        With a cache each row is one document, padded on the right only: its tokens (any segment
        but 0) follow those in the cache, and the cache afterwards holds them too.
        """
        segments_BT = jax.reshard(segments_BT, act_spec("BT"))
        rows = Rows(segments_BT)
        if cache is not None:
            if present(("seq",)):
                raise ValueError(
                    "a cache needs rows that are whole on a device: mesh.seq must be 1"
                )
            real_BT = segments_BT != 0
            slots_BT = cache.length_B[:, None] + jnp.cumsum(real_BT, axis=1) - 1
            rows = Rows(segments_BT, jnp.where(real_BT, slots_BT, -1))
        bank, sum_BTD = (), jax.reshard(x_BTD, act_spec("BTD"))
        after, routing, stream, z = [], [], [], 0
        for i, block in enumerate(self.blocks):
            bank = (*bank, sum_BTD)
            caches = None if cache is None else cache.blocks[i]
            forced = None if forced_ZBTA is None else forced_ZBTA[z:]
            sum_BTD, (caches, chosen, sums) = block(bank, rows, caches, forced, keep_stream)
            after.append(caches)
            routing, stream = routing + chosen, stream + sums
            z += sum(len(x.n_dropped) for x in chosen)
        mixed_BTD = self.out_res((*bank, sum_BTD))
        hidden_BTD = rms_norm(mixed_BTD, read(self.out_norm_D), self.config.norm_eps)
        if cache is not None:
            cache = K3Cache(tuple(after), cache.length_B + jnp.sum(real_BT, axis=1))
        return Output(hidden_BTD, cache, _concatenate(routing), _concatenate(stream))


def _look_up(ids_BT, table_VD):
    """Rows of the table. Each device of `tensor` has a part of it and adds zeros for other ids."""
    axes = present(("tensor",))
    if not axes:
        return table_VD[ids_BT]
    ids_BT, is_own_BT = own_ids(ids_BT, len(table_VD))
    return jax.lax.psum(jnp.where(is_own_BT[..., None], table_VD[ids_BT], 0), axes)


def abstract(c: ModelConfig) -> K3:
    """The model's shapes, dtypes and resting places on the mesh in force; no values."""
    return K3(c, rngs=ShapesOnly())


def fresh_cache(c: ModelConfig, n_rows: int, n_slots: int) -> K3Cache:
    """The cache of `n_rows` empty rows with room for `n_slots` tokens each."""

    def run(layers, n_groups):
        lead = (n_groups, len(layers))
        if layers[0] in c.mla_layers:
            return fresh_mla(c, n_rows, n_slots, lead)
        return fresh_kda(c, n_rows, lead)

    blocks = tuple(
        tuple(
            tuple(run(r, len(part)) for r in cut_runs(c, part[0], part is plan[0])) for part in plan
        )
        for plan in plan_blocks(c)
    )
    return K3Cache(blocks, zeros((n_rows,), jnp.int32, "B"))


def remat(fn, name: str, level: str):
    """`fn` recomputed in the backward pass when the remat `name` works at this `level`."""
    if name == level:
        return jax.checkpoint(fn)
    if name == "dots" and level == "layer":
        return jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return fn


def _concatenate(trees, axis=0):
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *trees) if trees else None
