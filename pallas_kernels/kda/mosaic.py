"""Chunked KDA on a TPU: the calls of the two kernels and the custom gradient.

The forward kernel walks the chunks with the state in VMEM. For a gradient it also writes the state
before each chunk of 128 tokens, in bfloat16; that and the inputs are all that is kept. The backward
kernel walks back and makes the rest again.

What a shard of a sequence does to any state before it (its transition, and the outputs' part along
that state) is not among what the forward kernel gives: `sequence` asks for it as K more columns of
values and state where a row is split, and says what that costs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import mosaic_backward, mosaic_forward
from pallas_kernels.kda.mosaic_chunk import BASE, BF16, CHUNK, F32
from pallas_kernels.kda.mosaic_forward import LOWEST, Plan, Raw

LANES = 128


def kda_mosaic(
    q_BTHk, k_BTHk, v_BTHv, g_BTHk, beta_BTH, gates, state_BHkv, docs_BT, real_BT,
    *, raw=None, plans=None, interpret=False,
):  # fmt: skip
    """`kda` (raw None) or `gated_kda` (raw, with gates = (exp(a_log) [H], bias [H, K])).

    docs_BT counts documents as in `kda_reference`, real_BT is False at pads. plans are those of the
    forward and the backward kernel; None asks for the chip that is compiled for. Raises ValueError
    if K or V is no multiple of 128 or nothing fits the chip's VMEM.
    """
    (B, T, H, K), V = q_BTHk.shape, v_BTHv.shape[-1]
    if K % LANES or V % LANES:
        raise ValueError(
            f"kda: impl='pallas' wants K and V in multiples of {LANES}, got K={K} and V={V}; "
            "impl='chunked' takes any"
        )
    if plans is None:
        chip = pltpu.get_tpu_info()
        plans = tuple(plan_for(T, H, K, V, q_BTHk.dtype.itemsize, back, chip) for back in (0, 1))
    size = max(p.chunks for p in plans) * CHUNK
    spare = -T % size

    def fill(x, mode="constant"):
        width = ((0, 0), (0, spare)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, width, mode=mode) if spare else x

    # A pad's beta is 0, after the sigmoid too.
    beta_BTH = jnp.where(real_BT[..., None], beta_BTH, LOWEST if raw else 0)
    q, k, v, g = (fill(x).reshape(B, T + spare, -1) for x in (q_BTHk, k_BTHk, v_BTHv, g_BTHk))
    mask = mask_rows(fill(docs_BT, "edge"), fill(real_BT))
    if raw:
        # The kernels write sigmoid as (1 + tanh) / 2: rate and bias come halved.
        rate, bias = gates
        rate = jnp.broadcast_to(rate[:, None] / 2, bias.shape)
        gates = tuple(x.astype(F32).reshape(1, H * K) for x in (rate, rate * bias))
    o, state = _run((plans, raw, interpret), q, k, v, g, fill(beta_BTH), gates, state_BHkv, mask)
    return o.reshape(B, T + spare, H, V)[:, :T], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static, q, k, v, g, beta, gates, state, mask):
    (plan, _), raw, interpret = static
    return forward(
        mask, q, k, v, g, beta, gates, state, plan=plan, raw=raw, saves=False, interpret=interpret
    )


def _run_fwd(static, q, k, v, g, beta, gates, state, mask):
    (plan, _), raw, interpret = static
    o, state, saved = forward(
        mask, q, k, v, g, beta, gates, state, plan=plan, raw=raw, saves=True, interpret=interpret
    )
    return (o, state), (q, k, v, g, beta, gates, mask, saved)


def _run_bwd(static, kept, grads):
    (_, plan), raw, interpret = static
    q, k, v, g, beta, gates, mask, saved = kept
    *dtokens, dstate = backward(
        mask, q, k, v, g, beta, gates, saved, *grads, plan=plan, raw=raw, interpret=interpret
    )
    dq, dk, dv, dg, dbeta, *dgates = dtokens
    dgates = tuple(jnp.sum(x, 0) for x in dgates)
    return dq, dk, dv, dg, dbeta, dgates, dstate, None


_run.defvjp(_run_fwd, _run_bwd)


def mask_rows(docs_BT, real_BT):
    """What the kernels are told of documents and pads, [B, chunks, 8, 128] float32.

    Rows: 0 document number; 1 whether the state before the chunk reaches the token; 2 whether the
    token's write is left at the chunk's end; 3 whether the state before is; 4 whether the token is
    real; 5 whether all of the chunk's are.
    """
    B, T = docs_BT.shape
    docs = docs_BT.reshape(B, T // CHUNK, CHUNK)
    last = docs[:, :, -1:]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)))
    keep = jnp.broadcast_to(before == last, docs.shape)
    real = real_BT.reshape(docs.shape)
    whole = jnp.broadcast_to(real.all(-1, keepdims=True), docs.shape)
    rows = [x.astype(F32) for x in (docs, docs == before, docs == last, keep, real, whole)]
    return jnp.stack(rows + [jnp.zeros_like(rows[0])] * 2, 2)


def by_heads(beta_BTH, heads):
    """[B, T, H] -> [B, H / heads, T, heads]."""
    B, T, H = beta_BTH.shape
    return jnp.moveaxis(beta_BTH.reshape(B, T, H // heads, heads), 2, 1)


def blocks(plan, B, T, H, K, V, reverse):
    """Grid and block specs by name, for time running forwards or backwards."""
    size = plan.chunks * CHUNK
    n_t = T // size

    def spec(block, index):
        at = (lambda t: n_t - 1 - t) if reverse else (lambda t: t)
        return pl.BlockSpec(block, lambda b, h, t: index(b, h, at(t)))

    return (B, H // plan.heads, n_t), {
        "mask": spec((1, plan.chunks, 8, CHUNK), lambda b, h, t: (b, t, 0, 0)),
        "k": spec((1, size, plan.heads * K), lambda b, h, t: (b, t, h)),
        "v": spec((1, size, plan.heads * V), lambda b, h, t: (b, t, h)),
        "beta": spec((1, 1, size, plan.heads), lambda b, h, t: (b, h, t, 0)),
        "gate": spec((1, plan.heads * K), lambda b, h, t: (0, h)),
        "dgate": spec((1, 1, plan.heads * K), lambda b, h, t: (b, 0, h)),
        "state": spec((1, plan.heads, K, V), lambda b, h, t: (b, h, 0, 0)),
        "saved": spec((1, plan.chunks, plan.heads, K, V), lambda b, h, t: (b, t, h, 0, 0)),
    }


# A kernel's trace takes seconds: under jit the layers of a model share one.
@functools.partial(jax.jit, static_argnames=("plan", "raw", "saves", "interpret"))
def forward(mask, q, k, v, g, beta, gates, state, *, plan, raw, saves, interpret):
    """Heads on lanes: q [B, T, H K]. Returns o, the state after, and (saves) one per chunk."""
    (B, T, _), (_, H, K, V) = q.shape, state.shape
    out = [(v.shape, v.dtype, "v"), (state.shape, F32, "state")]
    if saves:
        out.append(((B, T // CHUNK, H, K, V), BF16, "saved"))
    kernel = functools.partial(mosaic_forward.kernel, plan=plan, raw=raw, saves=saves)
    named = [("mask", mask), ("k", q), ("k", k), ("v", v), ("k", g), ("beta", beta)]
    named += [("gate", x) for x in gates] + [("state", state)]
    return _call(kernel, "kda_forward", named, out, plan, (B, T, H, K, V), False, interpret)


@functools.partial(jax.jit, static_argnames=("plan", "raw", "interpret"))
def backward(mask, q, k, v, g, beta, gates, saved, do, dlast, *, plan, raw, interpret):
    """Returns dq, dk, dv, dg, dbeta, gradients of the gates [B, 1, H K] and of the state before."""
    (B, T, _), (_, _, H, K, V) = q.shape, saved.shape
    out = [(x.shape, x.dtype, name) for name, x in zip("kkvk", (q, k, v, g), strict=True)]
    out.append(((B, H // plan.heads, T, plan.heads), F32, "beta"))
    out += [((B, 1, H * K), F32, "dgate")] * len(gates) + [(dlast.shape, F32, "state")]
    kernel = functools.partial(mosaic_backward.kernel, plan=plan, raw=raw)
    named = [("mask", mask), ("k", q), ("k", k), ("v", v), ("k", g), ("beta", beta)]
    named += [("gate", x) for x in gates] + [("saved", saved), ("v", do), ("state", dlast)]
    grads = _call(kernel, "kda_backward", named, out, plan, (B, T, H, K, V), True, interpret)
    *dtokens, dbeta = grads[:5]
    return *dtokens, jnp.moveaxis(dbeta, 1, 2).reshape(beta.shape), *grads[5:]


def _call(kernel, name, named, out, plan, sizes, reverse, interpret):
    B, T, H, K, V = sizes
    grid, spec = blocks(plan, B, T, H, K, V, reverse)
    args = [by_heads(x, plan.heads) if key == "beta" else x for key, x in named]
    groups = plan.chunks * plan.heads // plan.group
    # Under shard_map, what comes out varies over the axes over which q does.
    axes = jax.typeof(args[1]).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=grid,
        name=name,
        in_specs=[spec[key] for key, _ in named],
        out_specs=[spec[key] for _, _, key in out],
        out_shape=[jax.ShapeDtypeStruct(s, d, manual_axis_type=axes) for s, d, _ in out],
        scratch_shapes=[pltpu.VMEM((groups, 2, plan.group, BASE, CHUNK), F32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
    )(*args)


VMEM_LIMIT = 60 << 20
# By the chip's generation: v5p, v6e, tpu7x.
FORWARD = {5: Plan(6, 8, 3, 2, fold=1), 6: Plan(6, 4, 6, 3), 7: Plan(12, 4, 4, 3, "shared")}
BACKWARD = {
    5: Plan(6, 2, 6, 2, "late", fold=1),
    6: Plan(6, 2, 6, 2, "late"),
    7: Plan(12, 1, 6, 2, "late"),
}


def vmem_bytes(plan, K, V, itemsize, backward):
    """What a kernel's blocks take, each twice (one is computed on while the next arrives)."""
    size = plan.chunks * CHUNK
    k_block, v_block = (size * plan.heads * x * itemsize for x in (K, V))
    state, saved = plan.heads * K * V * 4, plan.chunks * plan.heads * K * V * 2
    beta, mask = size * LANES * 4, plan.chunks * 8 * CHUNK * 4
    if backward:
        twice = 6 * k_block + 3 * v_block + saved + 2 * state + 2 * beta + mask
    else:
        twice = 3 * k_block + 2 * v_block + saved + 2 * state + beta + mask
    return 2 * twice + plan.chunks * plan.heads * 2 * BASE * CHUNK * 4


def plan_for(T, H, K, V, itemsize, backward, chip):
    """The walk of a kernel on a chip (`pltpu.get_tpu_info()`).

    The walks are found by trial, for the order of writing leads the compiler's scheduler: several
    heads hide each other's waits for a product, and many chunks the start and end of a step, until
    what does not fit in registers goes to VMEM and back too often. Those trials, in cycles per
    chunk and head: v6e forward 491 (6 heads x 4 chunks) and backward 1177 (6 x 2); tpu7x forward
    500 (12 x 4 in groups of 4) and backward 1293 (12 x 1); v5p forward 584 (6 x 8; folded 751) and
    backward 1724 (6 x 2; groups of 3 1903, of 2 1799; early roots in groups of 3 1834). Heads must
    divide H, chunks add at most an eighth to the tokens, and all fit VMEM, so that fewer may be
    taken.
    """
    budget = min(chip.vmem_capacity_bytes, VMEM_LIMIT) * 2 // 3
    table = BACKWARD if backward else FORWARD
    best = table.get(chip.generation, table[6])
    divisors = [n for n in range(min(best.heads, H), 0, -1) if H % n == 0]
    # Cores share the blocks of heads, so their number goes into that of the blocks where it can.
    shared = [n for n in divisors if H // n % chip.num_cores == 0]
    for heads in shared or divisors:
        group = next(n for n in range(best.group, 0, -1) if heads % n == 0)
        for chunks in (n for n in (8, 4, 2, 1) if n <= best.chunks):
            plan = best._replace(heads=heads, chunks=chunks, group=group)
            fills = chunks == 1 or 8 * (-T % (chunks * CHUNK)) <= T
            if fills and vmem_bytes(plan, K, V, itemsize, backward) <= budget:
                return plan
    need = vmem_bytes(Plan(1, 1, 1, 2), K, V, itemsize, backward)
    raise ValueError(
        f"kda: one head of K={K}, V={V} and one chunk need {need} bytes of VMEM; {budget} of "
        f"{chip.vmem_capacity_bytes} may be used; impl='chunked' takes any size"
    )


__all__ = ["Plan", "Raw", "kda_mosaic", "plan_for"]
