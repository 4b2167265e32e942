"""Kimi K3: embedding, Attention Residual blocks of layer groups, final mixture, norm and head."""

import dataclasses
import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3_jax.axes import ShapesOnly, is_held, normal, ones, own_ids, read, stacked, weight
from k3_jax.config import ModelConfig
from k3_jax.layers.attn_res import AttnRes, Bank
from k3_jax.layers.kda import Kda
from k3_jax.layers.mla import Mla
from k3_jax.layers.mlp import DenseFfn
from k3_jax.layers.moe import Moe, Routing
from k3_jax.layers.norm import rms_norm
from k3_jax.layers.passage import Passage, unseen
from k3_jax.loops import held, hold, of_turn, remat, repeat, stacks, taken
from k3_jax.pipeline import through_stages
from k3_jax.state import K3Cache, Rows, fresh_kda, fresh_mla, zeros
from k3_jax.tree import named_leaves, with_leaves
from pallas_kernels.common import dot32
from sharding import act_spec, on_shards, present
from sharding.pipeline import STAGES

# Equal groups of consecutive layers, by their indices, that share one program under a scan.
Part = tuple[tuple[int, ...], ...]


class Alike(NamedTuple):
    """Consecutive AttnRes blocks of the same layers, which share one program under a scan.

    A part has the groups of all `n_blocks` blocks, block by block.
    """

    n_blocks: int
    parts: tuple[Part, ...]


def plan_blocks(c: ModelConfig) -> list[Alike]:
    """Cut the layers into AttnRes blocks, blocks into groups that end with an MLA layer.

    Groups that are alike make up a part of their block, and blocks that are alike are one entry:
    of the released model's eight the first is apart (layer 0 has the dense FFN), the last has a
    lone MLA layer at its end, and the six between them are one.
    """
    unit = min(c.mla_layers[0] + 1 if c.mla_layers else c.block_layers, c.block_layers)
    blocks = []
    for start in range(0, c.n_layers, c.block_layers):
        layers = range(start, min(start + c.block_layers, c.n_layers))
        groups = [tuple(layers[i : i + unit]) for i in range(0, len(layers), unit)]
        alike = itertools.groupby(groups, key=lambda group: [layer_kind(c, i) for i in group])
        blocks.append([tuple(part) for _, part in alike])

    def kinds(parts):
        return [[[layer_kind(c, i) for i in group] for group in part] for part in parts]

    plan = []
    for _, found in itertools.groupby(blocks, key=kinds):
        found = list(found)
        plan.append(Alike(len(found), tuple(sum(part, ()) for part in zip(*found, strict=True))))
    return plan


def layer_kind(c: ModelConfig, index: int) -> tuple[bool, bool]:
    """Whether a layer has MLA, and whether it has the dense FFN."""
    return index in c.mla_layers, index < c.n_dense


def cut_runs(c: ModelConfig, group: tuple[int, ...]) -> list[list[int]]:
    """A group's layers as runs of equal ones."""
    return [list(run) for _, run in itertools.groupby(group, key=partial(layer_kind, c))]


def layer_places(c: ModelConfig) -> list[tuple[str, tuple[int, int]]]:
    """For each layer, its folder in our tree and its index on the two stacked axes."""
    places = {}
    for b, plan in enumerate(plan_blocks(c)):
        for p, part in enumerate(plan.parts):
            for g, group in enumerate(part):
                for r, run in enumerate(cut_runs(c, group)):
                    folder = f"blocks/{b}/parts/{p}/runs/{r}"
                    places |= {layer: (folder, (g, j)) for j, layer in enumerate(run)}
    return [places[i] for i in range(c.n_layers)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    """What a call returns.

    `hidden_BTD`: after the final norm. `cache`: None when none was given. `routing`: of each of the
    Z MoE layers, stacked. `seen`: what `look` returned of each layer, stacked. `largest`: with
    `keep_largest` and no cache, the largest logit of each head of the MLA layers;
    largest[block][part][run] has the leading axes of that run's parameters.
    """

    hidden_BTD: jax.Array
    cache: K3Cache | None
    routing: Routing | None
    seen: Any
    largest: tuple | None


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

    def __call__(self, before_BTD, is_first, bank: Bank, rows: Rows, cache, forced_BTA, look):
        """The block's running sum after this layer; `is_first` in the block, it starts anew."""
        x_BTD = self.attn_res(before_BTD, bank, has_sum=~is_first)
        attn_in_BTD = rms_norm(x_BTD, read(self.attn_norm_D), self.eps)
        y_BTD, kept = self.attn(attn_in_BTD, rows, cache)
        cache, largest_H = (None, kept) if cache is None else (kept, None)
        sum_BTD = jnp.where(is_first, jnp.zeros((), y_BTD.dtype), before_BTD) + y_BTD
        x_BTD = self.ffn_res(sum_BTD, bank, has_sum=True)
        ffn_in_BTD = rms_norm(x_BTD, read(self.ffn_norm_D), self.eps)
        y_BTD, routing = self.ffn(ffn_in_BTD, rows, forced_BTA)
        after_BTD = sum_BTD + y_BTD
        given = before_BTD, is_first, bank, rows
        seen = look(self, Passage(*given, attn_in_BTD, sum_BTD, ffn_in_BTD, after_BTD))
        return after_BTD, cache, (routing, largest_H, seen)


class Group(nnx.Module):
    """Consecutive layers as runs of equal ones, each run stacked and scanned."""

    def __init__(self, c: ModelConfig, indices: tuple[int, ...], *, rngs: nnx.Rngs):
        self.remat = c.remat
        runs = cut_runs(c, indices)
        self.lengths = tuple(len(run) for run in runs)
        self.is_moe = tuple(run[0] >= c.n_dense for run in runs)
        self.runs = nnx.List([stacked(Layer, c, run[0], n=len(run), rngs=rngs) for run in runs])

    @property
    def n_moe(self) -> int:
        """Its MoE layers."""
        return sum(n for n, is_moe in zip(self.lengths, self.is_moe, strict=True) if is_moe)

    def __call__(self, sum_BTD, is_first, bank, rows: Rows, caches, forced_ZBTA, turn, look):
        """The sum after the group, its caches, and per run (routing, largest logits, what is seen).

        is_first: the group is its block's first. turn: as `loops.of_turn` has it.
        """

        def step(sum_BTD, xs, cache):
            layer, is_first, forced_BTA = xs
            layer = taken(layer)
            run = remat(lambda layer, *x: of_turn(layer, turn)(*x, look), self.remat, "layer")
            return run(layer, sum_BTD, is_first, bank, rows, cache, forced_BTA)

        after, found, z = [], [], 0
        for r, (layers, n) in enumerate(zip(self.runs, self.lengths, strict=True)):
            forced = None
            if forced_ZBTA is not None and self.is_moe[r]:
                forced, z = forced_ZBTA[z : z + n], z + n
            cache = None if caches is None else caches[r]
            firsts = (np.arange(n) == 0) & (r == 0) & is_first
            sum_BTD, cache, out = repeat(step, sum_BTD, (layers, firsts, forced), cache, n)
            after.append(cache)
            found.append(out)
        after = None if caches is None else tuple(after)
        return sum_BTD, after, tuple(zip(*found, strict=True))


class Blocks(nnx.Module):
    """AttnRes blocks that are alike. The bank's rows are constants of a block's scans: each is
    saved once in a block (T31)."""

    def __init__(self, c: ModelConfig, plan: Alike, *, rngs: nnx.Rngs):
        self.remat, self.n_blocks = c.remat, plan.n_blocks
        # Groups of each part in one block.
        self.lengths = tuple(len(part) // plan.n_blocks for part in plan.parts)
        self.has_stages = plan.n_blocks > 1 and bool(present((STAGES,)))
        over = STAGES if self.has_stages else None
        parts = [stacked(Group, c, p[0], n=len(p), rngs=rngs, over=over) for p in plan.parts]
        self.parts = nnx.List(parts)

    def __call__(self, sum_BTD, bank: Bank, rows: Rows, caches, forced_ZBTA, look, n_micro):
        """The sum of the last block, the bank with what came before it, and the caches; then the
        routing of the MoE layers and what is seen of all, in the layers' order, and largest logits
        by runs."""
        n, given = self.n_blocks, (list(self.parts), forced_ZBTA)
        if self.has_stages:
            block = partial(self._block, look=unseen)
            found = through_stages(block, given[0], n, sum_BTD, bank, rows, n_micro)
            return *found[:2], None, jax.tree.map(_join, found[2])

        def step(carry, xs, caches):
            (sum_BTD, made), (i, *xs) = carry, xs
            made = tuple(jnp.where(i == k, sum_BTD, row) for k, row in enumerate(made))
            here = Bank((*bank.rows, *made), (*bank.is_there, *(k <= i for k in range(n))))
            sum_BTD, caches, out = self._block(sum_BTD, here, rows, caches, *xs, None, look)
            return (sum_BTD, made), caches, out

        # Room for the sum before each of these blocks.
        made = (jnp.zeros_like(sum_BTD),) * n
        xs = (np.arange(n), *jax.tree.map(partial(_split, n), given, is_leaf=is_held))
        (sum_BTD, made), caches, out = repeat(step, (sum_BTD, made), xs, caches, n)
        bank = Bank((*bank.rows, *made), (*bank.is_there, *(True,) * n))
        return sum_BTD, bank, caches, jax.tree.map(_join, out)

    @property
    def n_moe(self) -> int:
        """MoE layers in all of the blocks."""
        groups = zip(self.parts, self.lengths, strict=True)
        return self.n_blocks * sum(n * group.n_moe for group, n in groups)

    def _block(self, sum_BTD, bank, rows, caches, parts, forced_ZBTA, turn, look):
        def step(sum_BTD, xs, cache):
            group, is_first, forced_ZBTA = xs
            run = remat(lambda g, *x: g(*x, look), self.remat, "group")
            return run(group, sum_BTD, is_first, bank, rows, cache, forced_ZBTA, turn)

        after, routing, seen, largest, z = [], [], [], [], 0
        for p, (groups, n) in enumerate(zip(parts, self.lengths, strict=True)):
            forced = None
            if forced_ZBTA is not None:
                forced = _split(n, forced_ZBTA[z : z + n * groups.n_moe])
                z += n * groups.n_moe
            cache = None if caches is None else caches[p]
            firsts = (np.arange(n) == 0) & (p == 0)
            sum_BTD, cache, out = repeat(step, sum_BTD, (groups, firsts, forced), cache, n)
            after.append(cache)
            routing += in_order(out[0])
            largest.append(out[1])
            seen += in_order(out[2])
        after = None if caches is None else tuple(after)
        return sum_BTD, after, (_concatenate(routing), _concatenate(seen), tuple(largest))


def _split(n: int, x):
    """[n * a, ...] -> [n, a, ...]"""
    return x if is_held(x) else x.reshape(n, -1, *x.shape[1:])


def _join(x):
    """[n, a, ...] -> [n * a, ...]"""
    return x.reshape(-1, *x.shape[2:])


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
        self.blocks = nnx.List([Blocks(c, plan, rngs=rngs) for plan in plan_blocks(c)])
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
        look=unseen,
        counted_BT=None,
        keep_largest=False,
        n_micro=1,
    ) -> Output:
        """Rows of embeddings -> hidden rows.

        `segments_BT`: 0 for pads, else the document of the token; documents never see each other.
        With a cache each row is one document, padded on the right only: its tokens (any segment
        but 0) follow those in the cache, and the cache afterwards holds them too.
        With `counted_BT` (booleans) routing has what balancing the experts needs to know of these
        tokens. `look(layer, passage)` is called within each layer; the arrays that it returns, of
        equal shapes for all layers, come out with a leading axis over them.
        On a mesh with stages, `n_micro` parts of the rows go through them.
        """
        segments_BT = jax.reshard(segments_BT, act_spec("BT"))
        if counted_BT is not None:
            counted_BT = jax.reshard(counted_BT, act_spec("BT"))
        rows = Rows(segments_BT, counted_BT=counted_BT, keep_largest=keep_largest)
        asked = any(x is not None for x in (cache, forced_ZBTA))
        if present((STAGES,)) and (asked or look is not unseen):
            raise ValueError("mesh.pipeline takes no cache, no forced_ZBTA, no look")
        if cache is not None:
            if present(("seq",)):
                raise ValueError(
                    "a cache needs rows that are whole on a device: mesh.seq must be 1"
                )
            real_BT = segments_BT != 0
            slots_BT = cache.length_B[:, None] + jnp.cumsum(real_BT, axis=1) - 1
            rows = Rows(segments_BT, jnp.where(real_BT, slots_BT, -1), counted_BT)
        bank, sum_BTD = Bank(), jax.reshard(x_BTD, act_spec("BTD"))
        after, routing, seen, largest, z = [], [], [], [], 0
        for i, blocks in enumerate(self.blocks if cache is None else held(self.blocks)):
            caches = None if cache is None else hold(cache.blocks[i])
            forced = None
            if forced_ZBTA is not None:
                forced, z = forced_ZBTA[z : z + blocks.n_moe], z + blocks.n_moe
            sum_BTD, bank, caches, out = blocks(sum_BTD, bank, rows, caches, forced, look, n_micro)
            after.append(stacks(caches))
            for kept, found in zip((routing, seen), out[:2], strict=True):
                kept += [] if found is None else [found]
            largest.append(out[2])
        mixed_BTD = self.out_res(sum_BTD, bank, has_sum=True)
        hidden_BTD = rms_norm(mixed_BTD, read(self.out_norm_D), self.config.norm_eps)
        if cache is not None:
            blocks = jax.tree.map(lambda x, old: x.reshape(old.shape), tuple(after), cache.blocks)
            cache = K3Cache(blocks, cache.length_B + jnp.sum(real_BT, axis=1))
        largest = tuple(largest) if keep_largest else None
        return Output(hidden_BTD, cache, _concatenate(routing), _concatenate(seen), largest)


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


def router_biases(model: K3) -> jax.Array:
    """bias_ZE: the router biases of the Z MoE layers, in the layers' order."""
    leaves, of = named_leaves(model), router_leaves(model.config)
    whole = [jax.reshard(leaves[name], jax.P()).reshape(len(z), -1) for name, z in of.items()]
    return jnp.concatenate(whole)[np.argsort(np.concatenate([*of.values()]))]


def with_router_biases(model: K3, bias_ZE) -> K3:
    """The model with other router biases."""
    leaves, of = named_leaves(model), router_leaves(model.config)
    for name, z in of.items():
        old = jax.typeof(leaves[name])
        leaves[name] = jax.reshard(bias_ZE[np.array(z)].reshape(old.shape), old.sharding.spec)
    return with_leaves(model, leaves)


def router_leaves(c: ModelConfig) -> dict[str, list[int]]:
    """Which of the MoE layers each leaf of router biases holds, in the order in which it does."""
    found: dict[str, list[int]] = {}
    for z, (folder, _) in enumerate(layer_places(c)[c.n_dense :]):
        found.setdefault(f"{folder}/ffn/router_bias_E", []).append(z)
    return found


def fresh_cache(c: ModelConfig, n_rows: int, n_slots: int) -> K3Cache:
    """The cache of `n_rows` empty rows with room for `n_slots` tokens each."""

    def run(layers, n_groups):
        lead = (n_groups, len(layers))
        if layers[0] in c.mla_layers:
            return fresh_mla(c, n_rows, n_slots, lead)
        return fresh_kda(c, n_rows, lead)

    blocks = tuple(
        tuple(tuple(run(r, len(part)) for r in cut_runs(c, part[0])) for part in plan.parts)
        for plan in plan_blocks(c)
    )
    return K3Cache(blocks, zeros((n_rows,), jnp.int32, "B"))


def _concatenate(trees, axis=0):
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *trees) if trees else None
