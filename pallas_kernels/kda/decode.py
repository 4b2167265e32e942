"""KDA decode on TPU: one to eight tokens for each of many rows, the states changed in place.

Rows stand on sublanes and head channels on lanes in every operand but the states: that is how XLA
lays out the projections and the convolution histories of twelve heads a device by itself, so the
transposes below move nothing. Eight rows share one block of tokens; each row has its own block of
states, and a block that no row needs is neither fetched nor written.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.gate import NORM_EPS

F32, BF16 = jnp.float32, jnp.bfloat16
LANES, ROWS, MOST_TOKENS = 128, 8, 8
PARTS = 3  # a float32 is the exact sum of three bfloat16
INACTIVE = -1


def kda_decode(
    q_BtHk,
    k_BtHk,
    v_BtHv,
    logit_BtHk,
    beta_BtH,
    gate_BtHv,
    q_taps_WHk,
    k_taps_WHk,
    v_taps_WHv,
    a_log_H,
    bias_Hk,
    out_norm_v,
    state_BHkv,
    q_past_BWHk,
    k_past_BWHk,
    v_past_BWHv,
    active_B,
    accept_B=None,
    layer=None,
    *,
    lower_bound: float,
    eps: float,
    interpret=False,
):
    """A KDA layer between its projections and its output matrix, for t <= 8 tokens. k3-facts 3.4.

    q, k, v = SiLU(conv(raw)), q and k L2-normalised, q scaled by K^-1/2; then for each token
    S = diag(e^g) S, g = lower_bound sigmoid(e^a_log (logit + bias));
    S += sigmoid(beta) k (v - S^T k)^T;  o = S^T q;
    y = out_norm o / sqrt(mean(o^2) + eps) sigmoid(gate).
    The first six arrays are raw projections, bfloat16 or float32 as the pasts are (the last W-1
    inputs of each convolution, oldest first); all the others are float32. The states' arithmetic
    is float32 on the vector unit; nothing of it is rounded.

    accept_B (int32, clipped to 0 .. t, t if None): how many tokens the state and the pasts keep.
    y holds all t tokens whatever is kept. Rows that are not active give y = 0; their states and
    pasts stay as they are, and their inputs may hold anything. An inactive row's state is not
    read, one that keeps nothing is not written (one row is rewritten as it was where no row of
    the call keeps anything).

    Speculation, in HBM bytes of states per row and head (K3: 64 KiB each): a state for every
    prefix would be read once and written t times, 64 (1 + t) KiB. Here the draft is scored with
    accept 0 (64 KiB) and the call is repeated with what was accepted (128 KiB): 192 KiB. Or the
    accepted tokens go in front of the next draft, with accept counting them alone: 128 KiB per
    step, that of one plain token. t is both together, and projections are 1.5 KiB per token.

    layer: with it, states and pasts are those of many layers, [N, B, ...], and only that layer's
    are touched. A scan over layers must carry them whole and pass the layer: slices of the
    stacked arrays would be copied out and in again.

    Rows come in blocks of eight; the last one may be partly filled. A single row has a layout of
    its own, which XLA brings about with a dozen small copies: two rows, one inactive, cost less.

    Returns y_BtHv in gate's dtype and the new state, q_past, k_past and v_past; on TPU these take
    the place of the old ones (donate them). Raises ValueError for shapes and dtypes that do not
    fit together, t > 8, and K or V that are no multiples of 128.
    """
    raw = (q_BtHk, k_BtHk, v_BtHv, logit_BtHk, gate_BtHv)
    taps = (q_taps_WHk, k_taps_WHk, v_taps_WHv)
    kept = (state_BHkv, q_past_BWHk, k_past_BWHk, v_past_BWHv)
    sizes = _check(raw, beta_BtH, taps, a_log_H, bias_Hk, out_norm_v, kept, active_B, layer)
    if accept_B is None:
        accept_B = jnp.full(active_B.shape, sizes.t, jnp.int32)
    accept_B = jnp.where(active_B, jnp.clip(accept_B, 0, sizes.t), INACTIVE)
    if layer is None:
        kept = [x[None] for x in kept]
    y_BtHv, *kept = _call(
        sizes,
        jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
        _plan(accept_B, ROWS),
        (*raw, beta_BtH, *taps, a_log_H, bias_Hk, out_norm_v),
        kept,
        dict(lower_bound=lower_bound, eps=eps),
        interpret,
    )
    return y_BtHv, *(x[0] if layer is None else x for x in kept)


class Sizes(NamedTuple):
    """Rows, tokens, heads, key and value channels, taps; bytes of a projected number."""

    B: int
    t: int
    H: int
    k: int
    v: int
    W: int
    itemsize: int

    @property
    def rows(self):
        """Rows that share a block of tokens."""
        return min(self.B, ROWS)


def vmem_bytes(sizes: Sizes, heads: int) -> int:
    """VMEM that a step with `heads` heads takes; two buffers for all that comes and goes."""
    _, t, H, k, v, W, itemsize = sizes
    rows, token = sizes.rows, 2 * k + v  # one number for each channel of q, k and v
    sublanes = ROWS * heads  # of one token of a block; fewer rows are padded to 8
    total = 4 * heads * k * v * 4  # states in and out
    total += 2 * t * sublanes * (3 * k + 3 * v) * itemsize  # q, k, logit; v, gate, y
    total += 2 * t * ROWS * -(-H // LANES) * LANES * itemsize  # beta
    total += 4 * (W - 1) * sublanes * token * itemsize  # pasts in and out
    total += 2 * heads * (ROWS * token + ROWS * k) * 4  # taps; bias
    total += (W - 1 + t) * sublanes * token * 4  # scratch: inputs of the convolutions
    total += t * sublanes * (3 * k + 4 * v) * 4  # scratch: columns; values, betas, echoes, reads
    total += t * rows * k // 2 * LANES * 4  # scratch: parts of the columns
    total += LANES * 2 * v * 2  # scratch: ones
    return total + heads * k * v * 4  # scratch: the running states


def heads_per_step(sizes: Sizes, vmem: int, cores: int) -> int:
    """The most heads, dividing H, for which a step fits in half the VMEM.

    Cores share the blocks of heads, so their number goes into that of the blocks where it can; of
    three heads one core takes all.
    More and smaller steps would overlap better for one or two rows, yet each costs more by itself.
    """
    most = LANES // (2 * PARTS)  # parts of two columns a head must fit on the lanes
    fits = [
        heads
        for heads in range(1, min(sizes.H, most) + 1)
        if sizes.H % heads == 0 and vmem_bytes(sizes, heads) <= vmem // 2
    ]
    if not fits:
        raise ValueError(
            f"kda_decode: one head with t={sizes.t}, K={sizes.k}, V={sizes.v} takes "
            f"{vmem_bytes(sizes, 1)} bytes of VMEM, more than half of this chip's {vmem}"
        )

    return max([heads for heads in fits if sizes.H // heads % cores == 0] or fits)


def _check(raw, beta, taps, a_log, bias, out_norm, kept, active, layer):
    q, k, v, logit, gate = raw
    if q.ndim != 4 or v.ndim != 4 or taps[0].ndim != 3:
        raise ValueError(
            f"kda_decode: q must be [B, t, H, K], v [B, t, H, V] and the taps [W, H, K], "
            f"got {q.shape}, {v.shape} and {taps[0].shape}"
        )
    sizes = Sizes(*q.shape, v.shape[3], taps[0].shape[0], q.dtype.itemsize)
    B, t, H, K, V, W, _ = sizes
    if not 1 <= t <= MOST_TOKENS or B < 1 or H < 1 or W < 2:
        raise ValueError(
            f"kda_decode: q is {q.shape} with {W} taps; t must be 1 to {MOST_TOKENS}, B and H at "
            f"least 1, taps at least 2"
        )
    if K % LANES or V % LANES or not K or not V:
        raise ValueError(f"kda_decode: K={K} and V={V} must be multiples of {LANES}")
    wide, lead = jnp.dtype(F32), () if layer is None else kept[0].shape[:1]
    wants = [
        ("q", q, (B, t, H, K), q.dtype),
        ("k", k, (B, t, H, K), q.dtype),
        ("v", v, (B, t, H, V), q.dtype),
        ("logit", logit, (B, t, H, K), q.dtype),
        ("gate", gate, (B, t, H, V), q.dtype),
        ("beta", beta, (B, t, H), q.dtype),
        ("a_log", a_log, (H,), wide),
        ("bias", bias, (H, K), wide),
        ("out_norm", out_norm, (V,), wide),
        ("state", kept[0], (*lead, B, H, K, V), wide),
        ("active", active, (B,), jnp.dtype(bool)),
    ]
    for name, d, taps_WHd, past in zip("qkv", (K, K, V), taps, kept[1:], strict=True):
        wants += [(f"{name}_taps", taps_WHd, (W, H, d), wide)]
        wants += [(f"{name}_past", past, (*lead, B, W - 1, H, d), q.dtype)]
    if q.dtype not in (BF16, F32):
        raise ValueError(f"kda_decode: q is {q.dtype}; it must be bfloat16 or float32")
    for name, x, shape, dtype in wants:
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(
                f"kda_decode: {name} is {x.dtype}{list(x.shape)}, but q {q.dtype}{list(q.shape)}, "
                f"v {list(v.shape)} and {W} taps want {dtype}{list(shape)}"
            )
    return sizes


def _plan(accept_B, rows):
    """For every slot (rows, filled up to whole blocks): the row to read, to write, tokens to keep.

    A slot whose state is not needed names the block of the slot before it, or where there is none
    that of the first one after it: the pipeline moves a block only when its index changes. The
    last number says whether no row keeps anything.
    """
    B = accept_B.shape[0]
    rows = min(B, rows)
    accept = jnp.pad(accept_B, (0, -B % rows), constant_values=INACTIVE)
    slots = jnp.arange(accept.size, dtype=jnp.int32)

    def nearest(needed, otherwise):
        before = jnp.max(jnp.where(needed & (slots <= slots[:, None]), slots, -1), axis=1)
        first = jnp.min(jnp.where(needed, slots, accept.size))
        return jnp.where(before >= 0, before, jnp.where(first < accept.size, first, otherwise))

    read = nearest(accept >= 0, 0)
    write = nearest(accept > 0, read[0])
    none = jnp.all(accept <= 0)[None]
    return jnp.concatenate([x.astype(jnp.int32) for x in (read, write, accept, none)])


def _call(sizes, layer, plan, operands, kept, constants, interpret):
    B, t, H, k, v, W, _ = sizes
    vmem, cores = 64 << 20, 1
    if not interpret:
        info = pltpu.get_tpu_info()
        vmem, cores = info.vmem_capacity_bytes, info.num_cores
    rows, heads = sizes.rows, heads_per_step(sizes, vmem, cores)
    q, k_, v_, logit, gate, beta, q_taps, k_taps, v_taps, a_log, bias, out_norm = operands
    # Index maps get the head block j, the row block g, the row r, and the two scalar operands.
    n_slots = (plan.size - 1) // 3

    def tokens(d):
        return pl.BlockSpec((t, heads, rows, d), lambda j, g, r, layer, plan: (0, j, g, 0))

    def past(d):
        return pl.BlockSpec(
            (1, W - 1, heads, rows, d), lambda j, g, r, layer, plan: (layer[0], 0, j, g, 0)
        )

    def weights(n, d):
        return pl.BlockSpec((heads, n, d), lambda j, g, r, layer, plan: (j, 0, 0))

    def state(first):
        return pl.BlockSpec(
            (1, 1, heads, k, v),
            lambda j, g, r, layer, plan: (layer[0], plan[first + g * rows + r], j, 0, 0),
        )

    pasts = [past(k), past(k), past(v)]
    inputs = [
        *(x.transpose(1, 2, 0, 3) for x in (q, k_, v_, logit, gate)),
        beta.swapaxes(0, 1),
        *(x.swapaxes(0, 1) for x in (q_taps, k_taps, v_taps)),
        *(a_log, bias[:, None], out_norm[None]),
        *(kept[0], *(x.transpose(0, 2, 3, 1, 4) for x in kept[1:])),
    ]
    # All pasts of a layer are written, so they need the old ones' place only among other layers.
    # JAX's interpreter cannot alias an array that ends within a block.
    n_aliased = 4 if B % rows == 0 or kept[0].shape[0] > 1 else 1
    outputs = [jax.ShapeDtypeStruct((t, H, B, v), gate.dtype), *inputs[-4:]]
    y, state_after, *pasts_after = pl.pallas_call(
        functools.partial(_kernel, **constants),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(H // heads, n_slots // rows, rows),
            in_specs=[
                *(tokens(d) for d in (k, k, v, k, v)),
                pl.BlockSpec((t, rows, H), lambda j, g, r, layer, plan: (0, g, 0)),
                *(weights(W, d) for d in (k, k, v)),
                pl.BlockSpec(memory_space=pltpu.SMEM),
                weights(1, k),
                pl.BlockSpec((1, v), lambda j, g, r, layer, plan: (0, 0)),
                *(state(0), *pasts),
            ],
            out_specs=[tokens(v), state(n_slots), *pasts],
            scratch_shapes=[
                *(pltpu.VMEM((W - 1 + t, heads, rows, d), F32) for d in (k, k, v)),
                pltpu.VMEM((t, 3 * heads * rows, k), F32),
                pltpu.VMEM((t, rows, k // 2, LANES), jnp.int32),
                *(pltpu.VMEM((t, heads, rows, v), F32) for _ in range(4)),
                pltpu.VMEM((LANES, 2 * v), BF16),
                pltpu.VMEM((heads, k, v), F32),
            ],
        ),
        out_shape=[_like(x, kept[0]) for x in outputs],
        input_output_aliases={2 + len(inputs) - 4 + i: 1 + i for i in range(n_aliased)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem * 3 // 4,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=7 * B * t * H * k * v,
            transcendentals=B * t * H * (5 * k + 2 * v),
            bytes_accessed=_bytes_accessed(inputs[:-4], inputs[-4:], outputs[0]),
        ),
        name=f"kda_decode_{t}",
        interpret=interpret,
    )(layer, plan, *inputs)
    pasts_after = (x.transpose(0, 3, 1, 2, 4) for x in pasts_after)
    return y.transpose(2, 0, 1, 3), state_after, *pasts_after


def _bytes_accessed(inputs, kept, y):
    """Where every row is active and keeps tokens: one layer's states and pasts go both ways."""

    def total(arrays):
        return sum(x.size * x.dtype.itemsize for x in arrays)

    return total((*inputs, y)) + 2 * total(kept) // kept[0].shape[0]


def _like(x, state):
    """An output's type: it varies over a mesh as the states do (all operands must vary alike)."""
    axes = jax.typeof(state).manual_axis_type
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes)


class _Refs(NamedTuple):
    """The kernel's arrays; d is k or v, M three columns for each head: decay, then k, then q."""

    layer: Any
    plan: Any
    q_tHrk: Any
    k_tHrk: Any
    v_tHrv: Any
    logit_tHrk: Any
    gate_tHrv: Any
    beta_trH: Any
    q_taps_HWk: Any
    k_taps_HWk: Any
    v_taps_HWv: Any
    a_log_H: Any
    bias_H1k: Any
    out_norm_1v: Any
    state: Any
    q_past: Any
    k_past: Any
    v_past: Any
    y_tHrv: Any
    new_state: Any
    new_q_past: Any
    new_k_past: Any
    new_v_past: Any
    q_inputs: Any
    k_inputs: Any
    v_inputs: Any
    columns_tMk: Any
    parts_trkc: Any
    values_tHrv: Any
    betas_tHrv: Any
    echoes_tHrv: Any
    reads_tHrv: Any
    ones_cv: Any
    running_Hkv: Any


def _kernel(*refs, lower_bound, eps):
    """One row's tokens; the first row of a block prepares for all its rows, the last finishes."""
    a = _Refs(*refs)
    j, g, r = (pl.program_id(axis) for axis in range(3))
    t, _, rows, _ = a.y_tHrv.shape
    n_slots = pl.num_programs(1) * rows
    here = 2 * n_slots + g * rows
    keep = a.plan[here + r]
    keeps = [a.plan[here + m] for m in range(rows)]

    # No row keeps a token, yet one block will be written: as it was.
    @pl.when((g == 0) & (r == 0) & (a.plan[3 * n_slots] == 1))
    def _():
        a.new_state[...] = a.state[...]

    @pl.when((g == 0) & (r == 0))
    def _():
        _fill_ones(a.ones_cv, a.y_tHrv.shape[1])

    @pl.when(r == 0)
    def _():
        _gather_inputs(a)
        _keep_pasts(a, keeps)
        jax.lax.fori_loop(0, t, lambda n, _: _prepare(a, n, j, lower_bound), None)

    old, new, running = a.state.at[0, 0], a.new_state.at[0, 0], a.running_Hkv
    if t == 1:
        pl.when(keep == 1)(lambda: _token(a, 0, r, old, new))
        pl.when(keep == 0)(lambda: _token(a, 0, r, old, running))
    else:

        @pl.when(keep >= 0)
        def _():
            def token(n, _):
                _token(a, n, r, running, running)

                @pl.when(n + 1 == keep)
                def _():
                    new[...] = running[...]

            running[...] = old[...]
            jax.lax.fori_loop(0, t, token, None)

    @pl.when(r == rows - 1)
    def _():
        jax.lax.fori_loop(0, t, lambda n, _: _finish(a, n, keeps, eps), None)


def _on_rows(scalars, width):
    """[rows, width] int32 with one of the scalars in each row."""
    row = jax.lax.broadcasted_iota(jnp.int32, (len(scalars), width), 0)
    return functools.reduce(
        lambda x, m: jnp.where(row == m, scalars[m], x), range(len(scalars)), jnp.zeros_like(row)
    )


def _gather_inputs(a):
    """The inputs of the convolutions in a row: pasts, then tokens."""
    pasts, tokens = (a.q_past, a.k_past, a.v_past), (a.q_tHrk, a.k_tHrk, a.v_tHrv)
    n = a.q_past.shape[1]
    for i, inputs in enumerate((a.q_inputs, a.k_inputs, a.v_inputs)):
        inputs[:n] = pasts[i][0].astype(F32)
        inputs[n:] = tokens[i][...].astype(F32)


def _keep_pasts(a, keeps):
    """The W-1 inputs before each row's first token that is not kept.

    Copied by way of float32, which changes no bfloat16 but perhaps subnormal ones.
    """
    t, heads, rows, _ = a.y_tHrv.shape
    pasts = (a.new_q_past, a.new_k_past, a.new_v_past)
    for inputs, past in zip((a.q_inputs, a.k_inputs, a.v_inputs), pasts, strict=True):
        keep_rd = _on_rows(keeps, inputs.shape[-1])
        for w in range(past.shape[1]):
            for h in range(heads):
                x_rd = inputs[w, h]
                for n in range(1, t + 1):
                    x_rd = jnp.where(keep_rd == n, inputs[w + n, h], x_rd)
                past[0, w, h] = x_rd.astype(past.dtype)


def _prepare(a, n, j, lower_bound):
    """Everything about token n of a block's rows that does not need the state."""
    _, heads, rows, V = a.y_tHrv.shape
    K = a.q_tHrk.shape[-1]

    def convolved(inputs, taps_HWd, h):
        n_taps = taps_HWd.shape[1]
        y = sum(inputs[n + w, h] * taps_HWd[h, w : w + 1] for w in range(n_taps))
        return (y * jax.nn.sigmoid(y)).astype(a.q_tHrk.dtype).astype(F32)

    def normal(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)

    beta_rH = jax.nn.sigmoid(a.beta_trH[n].astype(F32))
    lane = jax.lax.broadcasted_iota(jnp.int32, beta_rH.shape, 1)
    for h in range(heads):
        rate = jnp.exp(jnp.full((rows, K), a.a_log_H[j * heads + h], F32))
        z_rk = rate * (a.logit_tHrk[n, h].astype(F32) + a.bias_H1k[h])
        decay_rk = jnp.exp(lower_bound * jax.nn.sigmoid(z_rk))
        k_rk = normal(convolved(a.k_inputs, a.k_taps_HWk, h))
        q_rk = normal(convolved(a.q_inputs, a.q_taps_HWk, h)) * K**-0.5
        for m, x_rk in enumerate((decay_rk, k_rk, q_rk)):
            a.columns_tMk[n, pl.ds((m * heads + h) * rows, rows)] = x_rk
        beta_r1 = jnp.sum(jnp.where(lane == j * heads + h, beta_rH, 0), axis=1, keepdims=True)
        echo_r1 = beta_r1 * jnp.sum(q_rk * k_rk, axis=1, keepdims=True)
        a.values_tHrv[n, h] = convolved(a.v_inputs, a.v_taps_HWv, h)
        a.betas_tHrv[n, h] = jnp.broadcast_to(beta_r1, (rows, V))
        a.echoes_tHrv[n, h] = jnp.broadcast_to(echo_r1, (rows, V))
    for m in range(rows):
        a.parts_trkc[n, m] = _parts(a.columns_tMk.at[n], m, heads, rows)


def _parts(columns_Mk, m, heads, rows):
    """Row m's k and q on sublanes, in three bfloat16 whose sum they are, as pairs of bits.

    Lane i heads 2 + x heads + h holds part i of head h's k (x = 0) or q (x = 1).
    """
    x_Mk = columns_Mk[pl.ds(heads * rows + m, 2 * heads, stride=rows)]
    high = x_Mk.astype(BF16).astype(F32)
    middle = (x_Mk - high).astype(BF16).astype(F32)
    unused = jnp.zeros((LANES - PARTS * x_Mk.shape[0], x_Mk.shape[1]), F32)
    parts_ck = jnp.concatenate([high, middle, x_Mk - high - middle, unused])
    return pltpu.bitcast(parts_ck.T.astype(BF16), jnp.int32)


def _fill_ones(ones_cv, heads):
    """Sums a head's three parts: lanes of k to the first half, lanes of q to the second."""
    lane = jax.lax.broadcasted_iota(jnp.int32, ones_cv.shape, 0)
    half = jax.lax.broadcasted_iota(jnp.int32, ones_cv.shape, 1) // (ones_cv.shape[1] // 2)
    is_part = ((lane // heads) % 2 == half) & (lane < 2 * PARTS * heads)
    ones_cv[...] = is_part.astype(F32).astype(BF16)


def _token(a, n, r, old_Hkv, new_Hkv):
    """Row r's token n: old states to new ones, what it reads to `reads`.

    The state wants decay, k and q with one channel per sublane, the same on all lanes. Spreading
    over lanes is the dearest step, so two units share it: the transposer takes decay, and the
    matrix unit takes k and q, exactly: parts of one head times ones, three addends of 8 bits.
    """
    _, heads, rows, V = a.y_tHrv.shape
    K = a.q_tHrk.shape[-1]
    bits_kc = a.parts_trkc[n, r]
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def own_parts(h):
        own = functools.reduce(jnp.logical_or, (lane == i * heads + h for i in range(2 * PARTS)))
        return pltpu.bitcast(jnp.where(jnp.broadcast_to(own, bits_kc.shape), bits_kc, 0), BF16)

    for first in range(0, heads, 2):
        pair = range(first, min(first + 2, heads))
        lhs = jnp.concatenate([own_parts(h) for h in pair])
        spread = jnp.dot(lhs, a.ones_cv[...], preferred_element_type=F32)
        for i, h in enumerate(pair):
            k_kv, q_kv = spread[i * K : (i + 1) * K, :V], spread[i * K : (i + 1) * K, V:]
            decay_1k = a.columns_tMk[n, pl.ds(h * rows + r, 1)]
            S_kv = old_Hkv[h] * jnp.broadcast_to(decay_1k, (V, K)).T
            error_1v = a.values_tHrv[n, h, pl.ds(r, 1)] - jnp.sum(k_kv * S_kv, 0, keepdims=True)
            # q^T (S + beta k error) from the S that is at hand.
            echo_1v = a.echoes_tHrv[n, h, pl.ds(r, 1)] * error_1v
            a.reads_tHrv[n, h, pl.ds(r, 1)] = jnp.sum(q_kv * S_kv, 0, keepdims=True) + echo_1v
            new_Hkv[h] = S_kv + k_kv * (a.betas_tHrv[n, h, pl.ds(r, 1)] * error_1v)


def _finish(a, n, keeps, eps):
    """Output norm and gate of token n for a block's rows; zeros for rows that are not active."""
    y_tHrv = a.y_tHrv
    is_active = _on_rows(keeps, y_tHrv.shape[-1]) != INACTIVE
    for h in range(y_tHrv.shape[1]):
        o_rv = a.reads_tHrv[n, h].astype(y_tHrv.dtype).astype(F32)
        scale_r1 = jax.lax.rsqrt(jnp.mean(o_rv * o_rv, axis=-1, keepdims=True) + eps)
        gate_rv = jax.nn.sigmoid(a.gate_tHrv[n, h].astype(F32))
        y_rv = o_rv * scale_r1 * a.out_norm_1v[...] * gate_rv
        y_tHrv[n, h] = jnp.where(is_active, y_rv, 0).astype(y_tHrv.dtype)
