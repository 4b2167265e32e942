"""Causal attention with segments on a TPU: keys wider than values, scores in VMEM only.

Of the pairs of a block of queries and a block of keys only those are gone through in which some
query may see some key, by position and by the range of both blocks' segments. Their list is data,
so that one program serves whole rows, shards of rows and pieces of prompts, wherever they begin.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import vary, varying
from pallas_kernels.mla import mosaic_kernels as kernels
from pallas_kernels.mla.mosaic_kernels import (
    BITS,
    DIAGONAL,
    F32,
    FIRST,
    LANES,
    LAST,
    MASKED,
    OPEN,
)

ATTENDED = "mla attended"  # what a checkpoint policy may keep: o and the log-sums
BLOCK, TILE = 1024, 512
QUERIES = 8192  # whose dq the backward kernel keeps in VMEM


class Plan(NamedTuple):
    """scale of the logits; blocks of `rows` queries, in tiles of `tile`, and of `keys` keys;
    `piece` queries in a backward pass; `heads` a step, forward and backward."""

    scale: float
    out_dtype: object
    rows: int
    tile: int
    keys: int
    piece: int
    heads: tuple[int, int]
    interpret: object


def attend(
    q_BTHq, k_BSHq, v_BSHv, segments_BT, segments_BS, first_B, *,
    scale, out_dtype=None, heads=None, interpret=False,
):  # fmt: skip
    """o_t = sum over s <= first + t of the same segment of softmax(scale q_t.k_s) v_s; largest_BTH.

    first_B (int32, traced; or a scalar): the position of each row's first query among the keys.
    Segment 0 marks a pad, which sees nothing and is not seen; it must be finite all the same.
    largest_BTH: each query's largest scale q_t.k_s of a visible pair, float32 and without a
    gradient; the least float32 where there is none, and o is then finite and meaningless.
    out_dtype: q's if None. heads: a step, forward and backward; None asks the chip.
    Raises ValueError for what does not fit.
    """
    (B, T, H, q), (S, v), dtype = q_BTHq.shape, v_BSHv.shape[1::2], q_BTHq.dtype
    out_dtype = dtype if out_dtype is None else jnp.dtype(out_dtype)
    (rows, tile), (keys, _) = block_and_tile(T), block_and_tile(S)
    piece = queries_per_call(T, rows)
    if heads is None:
        chip, sizes = pltpu.get_tpu_info(), (rows, tile, keys, q, v, dtype.itemsize)
        check_list(B, -(-T // rows), -(-S // keys), chip.smem_capacity_bytes)
        heads = tuple(heads_per_step(H, *sizes, n, chip.vmem_capacity_bytes) for n in (0, piece))
    plan = Plan(scale, out_dtype, rows, tile, keys, piece, heads, interpret)
    args = [_swap(_lengthen(q_BTHq, piece)), *(_swap(_lengthen(x, keys)) for x in (k_BSHq, v_BSHv))]
    # A pad among queries is of another segment than any key.
    queries_BT = jnp.where(segments_BT == 0, -1, segments_BT)
    args += [_lengthen(queries_BT, piece, -1)[:, None], _lengthen(segments_BS, keys)[:, None]]
    args.append(jnp.broadcast_to(first_B, (B,)).astype(jnp.int32))
    axes = frozenset().union(*map(varying, args))
    o_BHTv, top_BH1T = _attend(plan, *(vary(x, axes) for x in args))
    return _swap(o_BHTv)[:, :T], jax.lax.stop_gradient(_swap(top_BH1T[:, :, 0, :T]))


def attend_real(q_BTHq, k_BSHq, v_BSHv, segments_BT, *rest, **options):
    """`attend` with pads' rows zeroed, and the largest of each head's logits."""
    o_BTHv, largest_BTH = attend(q_BTHq, k_BSHq, v_BSHv, segments_BT, *rest, **options)
    return jnp.where((segments_BT != 0)[..., None, None], o_BTHv, 0), largest_BTH.max((0, 1))


def block_and_tile(T):
    """Of T queries or keys: how many are a block, and how many a tile; T fills up whole blocks."""
    if T <= TILE:
        return (-(-T // LANES) * LANES,) * 2
    return (BLOCK if -(-T // TILE) * TILE % BLOCK == 0 else TILE), TILE


def queries_per_call(T, rows):
    """Of how many queries one backward pass keeps dq: whole blocks, in equal pieces."""
    blocks = -(-T // rows)
    pieces = -(-blocks * rows // QUERIES)
    return rows * -(-blocks // pieces)


def check_list(B, n_q, n_k, smem):
    """Raises ValueError where the list of pairs of blocks does not fit half of scalar memory."""
    if (need := 4 * B * n_q * n_k) > smem // 2 or max(n_q, n_k) > 2**BITS:
        raise ValueError(
            f"attention: {B} rows of {n_q} blocks of queries and {n_k} of keys need a list of "
            f"{need} bytes, more than {smem // 2} of {smem}; give it fewer rows at a time, shards "
            "of them (mesh.seq), or impl='blocks'"
        )


def vmem_bytes(heads, rows, tile, keys, q, v, itemsize, queries):
    """VMEM of a step. queries: whose dq the backward kernel keeps, 0 for the forward kernel."""
    q_lanes, v_lanes = (-(-x // LANES) * LANES for x in (q, v))
    if not queries:
        per_head = (
            2 * rows * (q_lanes * itemsize + v_lanes * 4)  # q and, of any type, o; twice
            + 2 * keys * (q_lanes + v_lanes) * itemsize  # k and v, twice
            + rows * (2 * LANES + v_lanes) * 4  # the running maximum and sums
        )
        return heads * per_head + tile * keys * (3 * 4 + itemsize)  # two tiles' scores, p
    per_head = (
        2 * (rows + keys) * (q_lanes + v_lanes) * itemsize  # q and do, k and v, twice
        + queries * (q_lanes * itemsize + q * 4)  # dq, once, and its sums, transposed
        + 2 * keys * (q_lanes + v_lanes) * 4  # dk and dv, of any type, twice
        + keys * ((q_lanes + v_lanes) * 4 + q * itemsize)  # their sums; k transposed
    )
    return heads * per_head + tile * keys * (6 * 4 + 2 * itemsize)  # two tiles' x, dp; p, ds


def heads_per_step(H, rows, tile, keys, q, v, itemsize, queries, vmem):
    """Two, so that one head's products stand beside the other's exponentials, if two are to be had
    and fit three quarters of VMEM."""
    sizes, budget = (rows, tile, keys, q, v, itemsize, queries), vmem * 3 // 4
    if H % 2 == 0 and vmem_bytes(2, *sizes) <= budget:
        return 2
    if (need := vmem_bytes(1, *sizes)) > budget:
        raise ValueError(
            f"attention: blocks of {rows} queries and {keys} keys, {q} and {v} wide, need {need} "
            f"bytes of VMEM, more than {budget} of {vmem}; impl='blocks' takes any size"
        )
    return 1


def _lengthen(x_BT, block, fill=0):
    pads = ((0, 0), (0, -x_BT.shape[1] % block)) + ((0, 0),) * (x_BT.ndim - 2)
    return jnp.pad(x_BT, pads, constant_values=fill)


def _swap(x):
    return jnp.swapaxes(x, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, *args):
    o_BHTv, _, top_BH1T = forward(plan, *args)
    return o_BHTv, top_BH1T


def _attend_fwd(plan, *args):
    o_BHTv, lse_BH1T, top_BH1T = forward(plan, *args)
    o_BHTv, lse_BH1T = (checkpoint_name(x, ATTENDED) for x in (o_BHTv, lse_BH1T))
    return (o_BHTv, top_BH1T), (*args, o_BHTv, lse_BH1T)


def _attend_bwd(plan, saved, cotangents):
    q, k, v, segments_B1T, segments_B1S, first_B, o_BHTv, lse_BH1T = saved
    # Rounded first, so that p (dp - inner) cancels what is common to all values.
    do_BHTv = cotangents[0].astype(q.dtype)
    inner_BH1T = jnp.sum(do_BHTv.astype(F32) * o_BHTv.astype(F32), -1)[:, :, None]
    T, n = q.shape[2], plan.piece

    def some(start, dtype):
        def cut(x, axis):
            return x if n == T else jax.lax.dynamic_slice_in_dim(x, start, n, axis)

        of_queries = cut(q, 2), k, v, cut(do_BHTv, 2), cut(lse_BH1T, 3), cut(inner_BH1T, 3)
        ids = cut(segments_B1T, 2), segments_B1S
        return backward(plan, *of_queries, *ids, first_B + start, dtype)

    if n == T:
        return *some(0, k.dtype), None, None, None

    def step(sums, start):
        dq, *parts = some(start, F32)
        return [x + part for x, part in zip(sums, parts, strict=True)], dq

    zeros = [vary(jnp.zeros(x.shape, F32), varying(x)) for x in (k, v)]
    (dk, dv), dqs = jax.lax.scan(step, zeros, jnp.arange(0, T, n, dtype=jnp.int32))
    dq = jnp.moveaxis(dqs, 0, 2).reshape(q.shape)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def pairs(plan, segments_B1T, segments_B1S, first_B, by_keys=False):
    """The pairs that a kernel goes through, packed [B,N], and how many the longest row has.

    Block of queries by block of queries or, by_keys, block of keys by block of keys. A pair is
    listed if some query of it may see some key. A block of the outer kind without a pair gets one,
    for its results must be written.
    """
    least_q, low_q, high_q = _ranges(segments_B1T, plan.rows, 2)
    least_k, low_k, high_k = _ranges(segments_B1S, plan.keys, 1)
    B, n_q, n_k = len(first_B), low_q.shape[1], low_k.shape[2]
    i, j = jnp.arange(n_q)[:, None], jnp.arange(n_k)
    query, key = first_B[:, None, None] + plan.rows * i, plan.keys * j
    meet = (key < query + plan.rows) & (low_q <= high_k) & (low_k <= high_q)
    is_open = (key + plan.keys - 1 <= query) & (least_q == high_k) & (least_k == high_q)
    outer, inner = (j, i) if by_keys else (i, j)
    meet |= ~jnp.any(meet, axis=1 if by_keys else 2, keepdims=True) & (inner == 0)

    def listed(x):
        x = jnp.broadcast_to(x, (B, n_q, n_k))
        return (jnp.swapaxes(x, 1, 2) if by_keys else x).reshape(B, -1)

    meet = listed(meet)
    steps_B1 = meet.sum(axis=1, keepdims=True)
    n = jnp.arange(n_q * n_k)
    # Past its own steps a row stays where it is and does nothing.
    place = jnp.argsort(~meet, axis=1, stable=True)
    place = jnp.take_along_axis(place, jnp.minimum(n, steps_B1 - 1), axis=1)
    is_diagonal = (query == key) & (plan.rows == plan.keys)
    kind = jnp.where(is_open, OPEN, jnp.where(is_diagonal, DIAGONAL, MASKED))
    code = kernels.packed(i, j, kind)
    code, outer = (jnp.take_along_axis(listed(x), place, axis=1) for x in (code, outer))
    begins = jnp.concatenate([jnp.ones((B, 1), bool), outer[:, 1:] != outer[:, :-1]], 1)
    ends = jnp.roll(begins, -1, axis=1) | (n == steps_B1 - 1)
    code = jnp.where(
        n < steps_B1, code | FIRST * begins | LAST * ends, code & ~(2**kernels.KINDS - 1)
    )
    return code.astype(jnp.int32), steps_B1.max().astype(jnp.int32)


def _ranges(segments_B1T, block, axis):
    """The least, the least but for pads, and the largest segment of each block, with a new axis."""
    blocks = segments_B1T.reshape(segments_B1T.shape[0], -1, block)
    real = jnp.where(blocks > 0, blocks, jnp.iinfo(jnp.int32).max)
    return [jnp.expand_dims(x, axis) for x in (blocks.min(-1), real.min(-1), blocks.max(-1))]


def forward(plan, q, k, v, segments_B1T, segments_B1S, first_B):
    """o_BHTv, and log2 sum exp and the largest logit of each query, both [B,H,1,T]."""
    rows, heads, v_width = plan.rows, plan.heads[0], v.shape[-1]
    row = (*q.shape[:2], 1, q.shape[2]), F32, "T row"
    return _call(
        plan, False, first_B,
        [(q, "T"), (k, "S"), (v, "S"), (segments_B1T, "T row"), (segments_B1S, "S row")],
        [((*q.shape[:3], v_width), plan.out_dtype, "T"), row, row],
        [pltpu.VMEM((heads, rows, x), F32) for x in (LANES, LANES, v_width)],
    )  # fmt: skip


def backward(plan, q, k, v, do, lse_BH1T, inner_BH1T, segments_B1T, segments_B1S, first_B, dtype):
    """dq in q's type, dk and dv in `dtype`."""
    keys, heads, (T, width), v_width = plan.keys, plan.heads[1], q.shape[2:], v.shape[-1]
    rows = (lse_BH1T, "T row"), (inner_BH1T, "T row"), (segments_B1T, "T row")
    return _call(
        plan, True, first_B,
        [(q, "T"), (k, "S"), (v, "S"), (do, "T"), *rows, (segments_B1S, "S row")],
        [(q.shape, q.dtype, "all"), (k.shape, dtype, "S"), (v.shape, dtype, "S")],
        [pltpu.VMEM((heads, width, T), F32), pltpu.VMEM((heads, width, keys), k.dtype),
         pltpu.VMEM((heads, keys, width), F32), pltpu.VMEM((heads, keys, v_width), F32)],
    )  # fmt: skip


def _call(plan, back, first_B, ins, outs, scratch):
    """The forward kernel, or the one back. ins: (array, where), of which q, k and v are the first;
    outs: (shape, dtype, where); of which axis a step takes a block, T, S or "all" of it, and if
    that is the last axis, "row"."""
    (q, _), _, (v, _), *_ = ins
    ids = [x for x, _ in ins if x.ndim == 3]
    (B, H, T, width), v_width, heads = q.shape, v.shape[-1], plan.heads[back]
    codes, steps = pairs(plan, *ids, first_B, by_keys=back)
    sizes = plan.rows, plan.tile, plan.keys, width, v_width, q.dtype.itemsize

    def spec(shape, where):
        axis, *row = where.split()
        block = dict(T=plan.rows, S=plan.keys, all=shape[-2])[axis]
        by_head = (heads,) if len(shape) == 4 else ()

        def index(b, h, n, codes, _):
            i, j, _ = kernels.unpacked(codes[b, n])
            at = dict(T=i, S=j, all=0)[axis]
            return (b, *(h for _ in by_head), *((0, at) if row else (at, 0)))

        tail = (1, block) if row else (block, shape[-1])
        # One buffer for what leaves once a head.
        mode = pl.Buffered(1) if axis == "all" else None
        return pl.BlockSpec((None, *by_head, *tail), index, pipeline_mode=mode)

    axes = jax.typeof(q).manual_axis_type
    return pl.pallas_call(
        functools.partial(kernels.backward if back else kernels.forward, plan=plan),
        name="mla_backward" if back else "mla_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, H // heads, steps),
            in_specs=[spec(x.shape, where) for x, where in ins],
            out_specs=[spec(shape, where) for shape, _, where in outs],
            scratch_shapes=scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype, _ in outs
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(heads, *sizes, T * back) * 5 // 4,
        ),
        cost_estimate=_estimate(plan, back, ins, outs),
        interpret=plan.interpret,
    )(codes, first_B, *(x for x, _ in ins))


def _estimate(plan, back, ins, outs):
    """Of one document whose queries are the last."""
    (B, H, T, width), (S, v_width) = ins[0][0].shape, ins[2][0].shape[2:]
    seen = B * H * T * max(S - T // 2, S // 2)
    # A pair fetches the block that is not its list's outer one.
    inner, outer = ("T", plan.keys) if back else ("S", plan.rows)
    fetched = sum(x.shape[-1] * x.dtype.itemsize for x, where in ins if where == inner)
    once = sum(x.size * x.dtype.itemsize for x, where in ins if where.split()[0] != inner)
    once += sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype, _ in outs)
    return pl.CostEstimate(
        flops=2 * seen * (3 * width + 2 * v_width if back else width + v_width),
        transcendentals=seen,
        bytes_accessed=once + seen // outer * fetched,
    )
