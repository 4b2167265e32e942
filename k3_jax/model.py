"""Kimi K3: embedding, Attention Residual blocks of layer groups, final mixture, norm and head."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.axes import normal, ones, read, weight
from k3_jax.config import ModelConfig
from k3_jax.layers.attn_res import AttnRes
from k3_jax.layers.kda import Kda
from k3_jax.layers.mla import Mla
from k3_jax.layers.mlp import DenseFfn
from k3_jax.layers.moe import Moe
from k3_jax.layers.norm import rms_norm
from k3_jax.state import K3Cache, Rows, fresh_kda, fresh_mla
from pallas_kernels.common import dot32
from sharding import act_spec, on_shards


class BlockPlan(NamedTuple):
    """The layers of one AttnRes block: an opening group, equal groups to be scanned, a tail."""

    opening: tuple[int, ...]
    rest: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]


def plan_blocks(c: ModelConfig) -> list[BlockPlan]:
    """Cut the layers into AttnRes blocks, and each block into groups that end with an MLA layer.

    The opening group is apart because its first layer reads the bank alone (and, in block 0, has
    the dense FFN). The groups after it are alike and share one program under a scan; what is left
    over, such as the released model's lone last MLA layer, is the tail.
    """

    def kinds(layers):
        return [(i in c.mla_layers, i < c.n_dense) for i in layers]

    unit = min(c.mla_layers[0] + 1 if c.mla_layers else c.block_layers, c.block_layers)
    plans = []
    for start in range(0, c.n_layers, c.block_layers):
        layers = range(start, min(start + c.block_layers, c.n_layers))
        groups = [tuple(layers[i : i + unit]) for i in range(0, len(layers), unit)]
        opening, *others = groups
        n_rest = 0
        while n_rest < len(others) and kinds(others[n_rest]) == kinds(others[0]):
            n_rest += 1
        tail = sum(others[n_rest:], ())
        plans.append(BlockPlan(opening, tuple(others[:n_rest]), tail))
    return plans


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    """What a call returns.

    `hidden_BTD`: after the final norm. `cache`: None when none was given. `experts_ZBTA`: the
    experts chosen in each of the Z MoE layers. `stream_layers`: with `keep_stream`, the running
    sum [B, T, D] after each layer, else empty.
    """

    hidden_BTD: jax.Array
    cache: K3Cache | None
    experts_ZBTA: jax.Array | None
    stream_layers: tuple[jax.Array, ...]


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
        y_BTD, experts_BTA = self.ffn(
            rms_norm(x_BTD, read(self.ffn_norm_D), self.eps), rows, forced_BTA
        )
        return sum_BTD + y_BTD, cache, experts_BTA


class Group(nnx.Module):
    """Consecutive layers that run as one program."""

    def __init__(self, c: ModelConfig, indices: tuple[int, ...], *, rngs: nnx.Rngs):
        self.layers = nnx.List([Layer(c, i, rngs=rngs) for i in indices])
        self.is_moe = tuple(i >= c.n_dense for i in indices)
        self.remat = c.remat

    def __call__(self, sum_BTD, bank, rows: Rows, caches, forced_ZBTA):
        """The sum after the group; its layers' caches, choices of experts and sums."""
        run = remat(_call, self.remat, "layer")
        after, experts, sums = [], [], []
        for j, layer in enumerate(self.layers):
            cache = None if caches is None else caches[j]
            forced_BTA = None
            if forced_ZBTA is not None and self.is_moe[j]:
                forced_BTA = forced_ZBTA[sum(self.is_moe[:j])]
            sum_BTD, cache, experts_BTA = run(layer, sum_BTD, bank, rows, cache, forced_BTA)
            after.append(cache)
            sums.append(sum_BTD)
            if self.is_moe[j]:
                experts.append(experts_BTA)
        return sum_BTD, (None if caches is None else tuple(after), _stack(experts), tuple(sums))


class Block(nnx.Module):
    """One AttnRes block. The bank's rows are constants of its scan: each is saved once (T31)."""

    def __init__(self, c: ModelConfig, plan: BlockPlan, *, rngs: nnx.Rngs):
        self.remat = c.remat
        self.opening = Group(c, plan.opening, rngs=rngs)
        self.n_rest = len(plan.rest)
        self.rest = _stacked(c, plan.rest, rngs) if plan.rest else None
        self.tail = Group(c, plan.tail, rngs=rngs) if plan.tail else None

    def __call__(self, bank, rows: Rows, caches, forced_ZBTA, keep_stream: bool):
        """The block's sum, and per part what `Group` returns beside it, in layer order."""
        run = remat(_call, self.remat, "group")
        opening, rest, tail = (None, None, None) if caches is None else caches
        z0 = sum(self.opening.is_moe)
        z1 = z0 + self.n_rest * sum(self.rest.is_moe) if self.rest else z0
        part = (lambda a, b: None) if forced_ZBTA is None else (lambda a, b: forced_ZBTA[a:b])
        sum_BTD, found = run(self.opening, None, bank, rows, opening, part(0, z0))
        opening, experts, sums = found
        experts = [experts]
        if self.rest is not None:
            forced = part(z0, z1)
            if forced is not None:
                forced = forced.reshape(self.n_rest, -1, *forced.shape[1:])

            def body(sum_BTD, xs):
                group, cache, forced_ZBTA = xs
                sum_BTD, (cache, chosen, sums) = run(group, sum_BTD, bank, rows, cache, forced_ZBTA)
                return sum_BTD, (cache, chosen, sums if keep_stream else ())

            sum_BTD, (rest, chosen, more) = jax.lax.scan(body, sum_BTD, (self.rest, rest, forced))
            experts.append(None if chosen is None else chosen.reshape(-1, *chosen.shape[2:]))
            sums += tuple(s[g] for g in range(self.n_rest) for s in more)
        if self.tail is not None:
            forced = None if forced_ZBTA is None else forced_ZBTA[z1:]
            sum_BTD, (tail, chosen, more) = run(self.tail, sum_BTD, bank, rows, tail, forced)
            experts.append(chosen)
            sums += more
        after = None if caches is None else (opening, rest, tail)
        experts = [e for e in experts if e is not None]
        return sum_BTD, (after, jnp.concatenate(experts) if experts else None, sums)


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
        look_up = on_shards(lambda ids, table: table[ids], "BT,VD -> BTD")
        tokens_BT = jax.reshard(tokens_BT, act_spec("BT"))
        return look_up(tokens_BT, read(self.embed_VD)).astype(self.config.dtype)

    def logits(self, hidden_BTD) -> jax.Array:
        """Final hidden rows -> float32 logits [B, T, V]. The loss never calls this at once."""
        return dot32("BTD,DV->BTV", hidden_BTD, read(self.head_DV, hidden_BTD.dtype))

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
            real_BT = segments_BT != 0
            slots_BT = cache.length_B[:, None] + jnp.cumsum(real_BT, axis=1) - 1
            rows = Rows(segments_BT, jnp.where(real_BT, slots_BT, -1))
        bank, sum_BTD = (), jax.reshard(x_BTD, act_spec("BTD"))
        after, experts, stream, z = [], [], [], 0
        for i, block in enumerate(self.blocks):
            bank = (*bank, sum_BTD)
            caches = None if cache is None else cache.blocks[i]
            forced = None if forced_ZBTA is None else forced_ZBTA[z:]
            sum_BTD, (caches, chosen, sums) = block(bank, rows, caches, forced, keep_stream)
            after.append(caches)
            stream += sums if keep_stream else ()
            if chosen is not None:
                experts.append(chosen)
                z += chosen.shape[0]
        hidden_BTD = rms_norm(
            self.out_res((*bank, sum_BTD)), read(self.out_norm_D), self.config.norm_eps
        )
        if cache is not None:
            cache = K3Cache(tuple(after), cache.length_B + jnp.sum(real_BT, axis=1))
        experts_ZBTA = jnp.concatenate(experts) if experts else None
        return Output(hidden_BTD, cache, experts_ZBTA, tuple(stream))


def fresh_cache(c: ModelConfig, n_rows: int, n_slots: int) -> K3Cache:
    """The cache of `n_rows` empty rows with room for `n_slots` tokens each."""

    def layer(i):
        return fresh_mla(c, n_rows, n_slots) if i in c.mla_layers else fresh_kda(c, n_rows)

    def stacked(groups):
        caches = [tuple(layer(i) for i in group) for group in groups]
        return jax.tree.map(lambda *x: jnp.stack(x), *caches) if caches else None

    blocks = tuple(
        (
            tuple(layer(i) for i in plan.opening),
            stacked(plan.rest),
            tuple(layer(i) for i in plan.tail) if plan.tail else None,
        )
        for plan in plan_blocks(c)
    )
    return K3Cache(blocks, jnp.zeros(n_rows, jnp.int32))


def remat(fn, name: str, level: str):
    """`fn` recomputed in the backward pass when the remat `name` works at this `level`."""
    if name == level:
        return jax.checkpoint(fn)
    if name == "dots" and level == "layer":
        return jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return fn


def _stacked(c: ModelConfig, groups, rngs) -> Group:
    """Equal groups as one, each parameter with a leading axis over them."""
    keys = jax.random.split(rngs.params(), len(groups))
    return jax.vmap(lambda key: Group(c, groups[0], rngs=nnx.Rngs(params=key)))(keys)


def _call(module, *args):
    return module(*args)


def _stack(arrays):
    return jnp.stack(arrays) if arrays else None
