"""Where modelled time goes outside K3's own kernels, beside the least that a chip could need.

One device's share of the released model: 12 of 96 heads, 14 of 896 experts with the 16 T rows that
a balanced router sends them; B = 1, T = 8192, bfloat16. Parts are profiled in eighths of T where
that is linear and the whole would take gigabytes. Where the profiler ends the process, XLA's own
estimates stand in ("note"). Whole layers are estimates too, without the delta rule, MLA's
attention, the grouped products and the short convolutions, which have rows of their own. Cases with
"pallas" are our kernels for the case before. `top`: what takes most (operation, modelled us, MB).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import k3_jax.layers.experts
from benchmarks.tpucost import CHIPS, NoFigure, answer, ask, row, tpu_cost
from k3_jax.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3_jax.hlo import operations
from k3_jax.layers.kda import Kda
from k3_jax.layers.mla import Mla
from k3_jax.layers.moe import Moe, permute
from k3_jax.layers.moe import spread as spread_rows
from k3_jax.state import Rows
from pallas_kernels import attn_res
from pallas_kernels.conv import mosaic as conv
from pallas_kernels.conv import mosaic_kernels as conv_bodies
from pallas_kernels.conv import short_conv
from pallas_kernels.kda import _documents
from pallas_kernels.kda.mosaic import mask_rows
from pallas_kernels.mla import absorbed_attention
from pallas_kernels.situ import situ_glu
from pallas_kernels.top_k import top_k as choose
from sharding import make_mesh

T, D, H, E, A, L, F = 8192, 7168, 12, 896, 16, 3584, 3072
LOCAL_EXPERTS, SLOTS = 14, 8192
PIECES = 8  # of T, where cost is linear in it
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
S = jax.ShapeDtypeStruct
LEFT_OUT = ("left_out", "kda_", "mla_", "conv_")  # Pallas calls by their names


@dataclasses.dataclass(frozen=True)
class Case:
    """fn(*args) and what it cannot avoid: bytes of HBM read or written once, FLOPs of products.

    `times` such pieces make the released size. `module` builds a layer, whose weights then come
    before args[lead].
    """

    fn: object
    args: tuple
    bytes: float
    flops: float = 0.0
    times: int = 1
    module: object = None
    lead: int = 0


def rows(chips):
    """One row for each chip, case and direction."""
    for chip in chips:
        for case, directions in CASES.items():
            for direction in directions:
                labels = {"chip": chip, "case": case, "direction": direction}
                yield row(labels, functools.partial(measured, labels))


def measured(labels):
    """The figures of a case, profiled if that can be."""
    why = "whole layer: XLA's estimates"
    if not labels["case"].startswith("layer"):
        try:
            return ask("benchmarks.cost_layers", profile=True, seconds=300, **labels)
        except NoFigure as error:
            why = f"not profiled, XLA's estimates: {error}"
    return ask("benchmarks.cost_layers", profile=False, **labels) | {"note": why}


def cost(chip, case, direction):
    """In a process of its own."""
    k3_jax.layers.experts.grouped_matmul = lambda *args, **_: no_product(*args)
    k3_jax.layers.experts.grouped_glu = lambda x, gate, up, sizes, **betas: situ_glu(
        no_product(x, gate, sizes), no_product(x, up, sizes), **betas
    )
    name, *options = case.split()
    c = PARTS[name](direction != "forward", *(int(x) if x.isdigit() else x for x in options))
    if c.module is None:
        r = tpu_cost(c.fn, c.args, chip)
        ops, temp = r["ops"], r["temp_bytes"]
    else:
        ops, temp = layer_operations(c, chip)
        ops = [op for op in ops if not op.name.startswith(LEFT_OUT)]
    ops = [op._replace(runs=op.runs * c.times) for op in ops]
    _, clock, peak, bandwidth, _ = CHIPS[chip]

    def us(op):
        return 1e6 * op.runs * max((op.cycles or 0) / clock, op.bytes / bandwidth)

    total, moved = sum(map(us, ops)), sum(op.runs * op.bytes for op in ops)
    floor_us = 1e6 * c.times * max(c.bytes / bandwidth, c.flops / peak)
    top = sorted(ops, key=us, reverse=True)[:12]
    return {
        "us": total,
        "core_us": 1e6 * sum(op.runs * (op.cycles or 0) for op in ops) / clock,
        "hbm_us": 1e6 * moved / bandwidth,
        "hbm_bytes": moved,
        "temp_bytes": temp,
        "floor_us": floor_us,
        "floor_bound": "products" if c.flops / peak > c.bytes / bandwidth else "HBM",
        "over_floor": total / floor_us,
        "top": [[op.name, round(us(op), 1), round(op.runs * op.bytes / 1e6, 1)] for op in top],
    }


def layer_operations(case, chip):
    """What a layer compiles to on a mesh of one described chip, and its temporaries in bytes."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices
    mesh = make_mesh(devices=chips[:1])

    def place(x):
        return S(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*(None,) * x.ndim)))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        args = [place(x) for x in case.args]
        args.insert(case.lead, jax.tree.map(place, jax.eval_shape(case.module)))
        compiled = jax.jit(case.fn).lower(*args).compile()
    return operations(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes


def both(fn, n):
    """fn and the gradients of its first n arguments; the cotangent comes before them."""

    def run(dy, *args):
        y, pull = jax.vjp(lambda *x: fn(*x, *args[n:]), *args[:n])
        return y, pull(dy)

    return run


def mix(backward, n, impl="reference"):
    """AttnRes: n candidates read, one row written; backward: read again, with dy, n written."""
    # A kernel's first block is waited for, once in each piece.
    pieces = 2 if impl == "pallas" else PIECES
    candidate = S((1, T // pieces, D), BF16)
    one = candidate.size * 2

    def fn(probe, *candidates):
        return attn_res.mix(candidates, probe, eps=1e-5, impl=impl)

    args = (S((D,), F32), *[candidate] * n)
    if not backward:
        return Case(fn, args, (n + 1) * one, times=pieces)
    return Case(both(fn, n + 1), (candidate, *args), (3 * n + 2) * one, times=pieces)


def absorbed(_, n_rows, impl="plain"):
    """One token a row against its 8192 slots: the latent cache is read once."""
    args = (
        *(S((n_rows, 1, H, n), BF16) for n in (512, 64)),
        S((n_rows, 576, SLOTS), BF16),
        S((n_rows, 1), I32),
    )
    moved, pairs = 2 * n_rows * (SLOTS * 576 + H * (576 + 512)), n_rows * H * SLOTS
    fn = functools.partial(absorbed_attention, scale=192**-0.5, impl=impl)
    return Case(fn, args, moved, 2 * pairs * (576 + 512))


def scores(backward):
    """The router's float32 scores of bfloat16 tokens and weights; exact in one pass of products."""

    def fn(x, w):
        highest = jax.lax.Precision.HIGHEST
        return jax.nn.sigmoid(
            jnp.einsum("BTD,DE->BTE", x.astype(F32), w.astype(F32), precision=highest)
        )

    args = (S((1, T, D), BF16), S((D, E), BF16))
    moved, flops = 2 * T * D + 2 * D * E + 4 * T * E, 2 * T * D * E
    if not backward:
        return Case(fn, args, moved, flops)
    return Case(both(fn, 2), (S((1, T, E), F32), *args), 2 * moved, 3 * flops)


def top_k(_, impl="reference"):
    """The choice: scores read, indices written."""
    t = T // PIECES

    def fn(scores, bias):
        return choose(scores, A, bias_E=bias, impl=impl)

    return Case(fn, (S((t, E), F32), S((E,), F32)), 4 * t * (E + A), times=PIECES)


def order(_):
    """The two sorts of the copies' experts and the group sizes: each array read or written once."""

    def fn(chosen):
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        return order, jnp.argsort(order), jnp.bincount(expert, length=LOCAL_EXPERTS)

    return Case(fn, (S((1, T, A), I32),), 4 * T * A * 3)


def chosen_scores(backward):
    """The chosen experts' scores out of all 896."""
    t = T // PIECES

    def fn(scores, chosen):
        return jnp.take_along_axis(scores, chosen, axis=-1)

    args, moved = (S((1, t, E), F32), S((1, t, A), I32)), 4 * t * (E + 2 * A)
    if not backward:
        return Case(fn, args, moved, times=PIECES)
    return Case(both(fn, 1), (S((1, t, A), F32), *args), 2 * moved, times=PIECES)


def spread(backward):
    """Each token's 16 copies, sorted by expert: a row read, 16 written; backward the converse."""
    t = T // PIECES
    args = (S((t, L), BF16), S((t * A,), I32), S((t, A), I32))
    moved = 2 * L * t * (1 + A) + 4 * t * A
    if not backward:
        return Case(spread_rows, args, moved, times=PIECES)
    return Case(both(spread_rows, 1), (S((t * A, L), BF16), *args), 2 * moved, times=PIECES)


def combine(_):
    """Back to tokens and summed by weight: 16 rows read, one written."""
    t = T // PIECES

    def fn(y, order, place, weights):
        y = permute(y, place, order).reshape(1, t, A, L)
        return jnp.einsum("BTAL,BTA->BTL", y.astype(F32), weights).astype(BF16)

    n = S((t * A,), I32)
    args = (S((t * A, L), BF16), n, n, S((1, t, A), F32))
    return Case(fn, args, 2 * L * t * (1 + A) + 8 * t * A, times=PIECES)


def convs(backward):
    """The three short convolutions: read once, written once; backward also dy in and du out."""

    def fn(u, taps, history, segments):
        return short_conv(u, taps, history, segments, impl="reference")[0]

    # One of the three and half of its tokens.
    u = S((1, T // 2, H * 128), BF16)
    args = (u, S((4, H * 128), F32), S((1, 3, H * 128), BF16), S((1, T // 2), I32))
    if not backward:
        return Case(fn, args, 2 * 2 * u.size, times=6)
    return Case(both(fn, 3), (u, *args), 5 * 2 * u.size, times=6)


def conv_kernels(backward, chunks="plain"):
    """The same by the kernels, without the masks, which `documents` has.

    The profiler adds up both arms of a branch, so chunks are either all without beginnings of
    documents and pads or all "masked".
    """
    conv_bodies.per_chunk = lambda plain, index, run: run(chunks == "masked")

    def fn(plain, mask, u, dy, taps, history):
        y = conv.forward(plain, mask, u, taps, history)
        return (y, conv.backward(plain, mask, u, dy, taps, history)) if backward else y

    n, X = T // 2 // conv_bodies.CHUNK, H * 128
    u, taps, history = S((1, T // 2, X), BF16), S((4, X), F32), S((1, 2, 8, X), F32)
    args = (S((1, n), I32), S((1, n, conv_bodies.MASKS, 128), F32), u, u, taps, history)
    return Case(fn, args, (5 if backward else 2) * 2 * u.size, times=6)


def documents(backward):
    """What the kernels of a KDA layer are told of documents and pads, from segments."""

    def fn(segments):
        return conv.masks(segments), mask_rows(_documents(segments), segments != 0)

    return Case(fn, (S((1, T), I32),), T * 4 + T * (8 + 8) * 4)


def layer(make, products, moved, experts, backward):
    """A whole layer; backward adds two products for each and reads and writes twice more."""
    factor = 3 if backward else 1
    args = [S((1, T, D), BF16), S((1, T), I32)]
    if make is Moe:
        args.append(S((1, T, A), I32))

    def call(module, x, segments, *forced):
        return module(x, Rows(segments), *(forced or (None,)))[0]

    return Case(
        both(call, 2) if backward else call,
        (args[0], *args) if backward else tuple(args),
        factor * moved,
        2 * factor * products,
        module=lambda: make(config(experts), rngs=nnx.Rngs(0)),
        lead=int(backward),
    )


def config(experts=E):
    """One device's share of K3."""
    return ModelConfig(
        vocab_size=163840,
        width=D,
        n_layers=4,
        mla_layers=(3,),
        n_dense=1,
        dense_width=33792,
        block_layers=12,
        kda=KdaConfig(n_heads=H, head_dim=128),
        mla=MlaConfig(
            n_heads=H,
            query_latent=1536,
            kv_latent=512,
            key_dim=128,
            shared_key_dim=64,
            value_dim=128,
        ),
        moe=MoeConfig(n_experts=experts, n_active=min(A, experts), latent_width=L, expert_width=F),
        param_dtype="bfloat16",
    )


@jax.custom_vjp
def no_product(x_NL, w_ELF, sizes_E):
    """The place of a grouped product: a Pallas call that touches nothing."""
    return untouched((x_NL, w_ELF, sizes_E), (x_NL.shape[0], w_ELF.shape[2]), x_NL.dtype)


def _no_product_bwd(inputs, dy):
    x, w, _ = inputs
    return untouched((dy, w), x.shape, x.dtype), untouched((dy, x), w.shape, w.dtype), None


no_product.defvjp(lambda *x: (no_product(*x), x), _no_product_bwd)


def untouched(operands, shape, dtype):
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        lambda *refs: None,
        in_specs=[anywhere] * len(operands),
        out_specs=anywhere,
        out_shape=S(shape, dtype, manual_axis_type=jax.typeof(operands[0]).manual_axis_type),
        name=LEFT_OUT[0],
    )(*operands)


# q, k, v, gate and out; the decay's two; beta.
KDA_PRODUCTS = T * (D * (5 * H * 128 + 128 + H) + 128 * H * 128)
# The latents, gate and out; queries, keys and values.
MLA_PRODUCTS = T * (D * (1536 + 576 + 2 * H * 128) + 1536 * H * 192 + 512 * H * 256)
# Into the latent and out of it, the two shared experts, the router.
MOE_PRODUCTS = T * D * (2 * L + 3 * 2 * F + LOCAL_EXPERTS)
IN_AND_OUT = 2 * 2 * T * D
# Beside x and y: rows spread and combined, gate and up read, hidden written.
MOE_MOVED = IN_AND_OUT + 2 * T * (2 * (1 + A) * L + 3 * A * F)

PARTS = {
    "mix": mix,
    "absorbed": absorbed,
    "scores": scores,
    "top_k": top_k,
    "order": order,
    "chosen_scores": chosen_scores,
    "spread": spread,
    "combine": combine,
    "convs": convs,
    "conv_kernels": conv_kernels,
    "documents": documents,
    "layer_kda": functools.partial(layer, Kda, KDA_PRODUCTS, IN_AND_OUT, E),
    "layer_mla": functools.partial(layer, Mla, MLA_PRODUCTS, IN_AND_OUT, E),
    "layer_moe": functools.partial(layer, Moe, MOE_PRODUCTS, MOE_MOVED, LOCAL_EXPERTS),
}
FORWARD, BOTH = ("forward",), ("forward", "forward+backward")
CASES = {
    **dict.fromkeys(("mix 4", "mix 4 pallas", "mix 12", "mix 12 pallas"), BOTH),
    **dict.fromkeys(("absorbed 8", "absorbed 8 pallas"), FORWARD),
    **dict.fromkeys(("absorbed 64", "absorbed 64 pallas"), FORWARD),
    "scores": BOTH,
    **dict.fromkeys(("top_k", "top_k pallas", "order"), FORWARD),
    "chosen_scores": BOTH,
    "spread": BOTH,
    "combine": FORWARD,
    **dict.fromkeys(("convs", "conv_kernels", "conv_kernels masked"), BOTH),
    "documents": FORWARD,
    **dict.fromkeys(("layer_kda", "layer_mla", "layer_moe"), BOTH),
}

if __name__ == "__main__":
    answer(cost)
