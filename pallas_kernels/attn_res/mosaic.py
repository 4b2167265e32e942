"""MIX on a TPU: kernels over blocks of tokens that hold every candidate's rows in VMEM.

Either kernel reads a block's rows from HBM once and goes over them twice: for sums over D, from
which come the weights of all the block's tokens, and for what is written. For a gradient the
forward kernel also writes each row's score and scale, 128 float32 a token in all, which spares the
backward kernel a third of its work; those, the rows and the probe are all that is kept. The matrix
unit is left out: with the dot of rows and probe on it a step took longer, for it does not overlap.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import vary, varying

F32 = jnp.float32
LANES = 128
MOST = LANES // 2  # candidates: a score and a scale of each share a token's 128 lanes
GROUP = 16  # rows of a bfloat16 tile
STRIP = 512  # channels that stay in registers together
MOST_ROWS = 256
NEVER = -1e30  # the score of a candidate that takes no part: its weight is 0, in both directions


def mix_mosaic(candidates, probe_D, is_there_J, *, eps, blocks=None, interpret=False):
    """`mix` of 2 to 64 candidates. blocks: tokens a step, forward and backward; None asks the chip.

    Raises ValueError for other numbers, if D is no multiple of 128, or if 16 tokens do not fit
    the chip's VMEM.
    """
    (B, T, D), J, itemsize = candidates[0].shape, len(candidates), candidates[0].dtype.itemsize
    if D % LANES or not 2 <= J <= MOST:
        raise ValueError(
            f"mix: impl='pallas' wants D in multiples of {LANES} and at most {MOST} candidates, "
            f"got D={D} and {J}; impl='reference' takes any"
        )
    if B * T == 0:
        return candidates[0]
    if blocks is None:
        vmem = pltpu.get_tpu_info().vmem_capacity_bytes
        blocks = tuple(rows_per_step(B * T, J, D, itemsize, back, vmem) for back in (0, 1))
    axes = frozenset().union(*(varying(x) for x in (*candidates, probe_D, is_there_J)))
    rows = tuple(vary(x, axes).reshape(B * T, D) for x in candidates)
    probe_D, is_there_J = vary(probe_D, axes), vary(is_there_J, axes)
    return _run((eps, blocks, interpret), rows, probe_D, is_there_J).reshape(B, T, D)


def vmem_bytes(rows, J, D, itemsize, backward):
    """What a step of `rows` tokens takes; what comes and goes is held twice."""
    moved = (2 * J + 1 if backward else J + 1) * rows * D * itemsize
    moved += rows * LANES * 4  # scores and scales
    moved += (8 + 8 * backward) * D * 4  # the probe and its gradient
    sums = (3 if backward else 2) * J * rows * LANES * 4
    return 2 * moved + sums + 8 * backward * D * 4


def rows_per_step(N, J, D, itemsize, backward, vmem):
    """The most tokens, by powers of two from 16 to 256, whose step fits three quarters of VMEM."""
    budget, rows = vmem * 3 // 4, MOST_ROWS
    while rows > GROUP and (rows >= 2 * N or vmem_bytes(rows, J, D, itemsize, backward) > budget):
        rows //= 2
    need = vmem_bytes(rows, J, D, itemsize, backward)
    if need > budget:
        raise ValueError(
            f"mix: {rows} tokens of {J} candidates of D={D} need {need} bytes of VMEM; {budget} "
            f"of {vmem} may be used; impl='reference' takes any size"
        )
    return rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static, rows, probe_D, is_there_J):
    eps, (block, _), interpret = static
    how = dict(eps=eps, block=block, saves=False, interpret=interpret)
    return forward(rows, probe_D, is_there_J, **how)[0]


def _run_fwd(static, rows, probe_D, is_there_J):
    eps, (block, _), interpret = static
    y_ND, stats_Nl = forward(rows, probe_D, is_there_J, eps=eps, block=block, interpret=interpret)
    return y_ND, (rows, probe_D, is_there_J, stats_Nl)


def _run_bwd(static, kept, dy_ND):
    _, (_, block), interpret = static
    return *backward(*kept, dy_ND, block=block, interpret=interpret), None


_run.defvjp(_run_fwd, _run_bwd)


def forward(rows, probe_D, is_there_J, *, eps, block, saves=True, interpret=False):
    """J rows [N, D] -> [N, D] and, with saves, [N, 128]: scores on lanes 0.., scales on 64.. ."""
    (N, D), dtype = rows[0].shape, rows[0].dtype
    out = [((N, D), dtype)] + [((N, LANES), F32)] * saves
    kernel = functools.partial(_forward_kernel, J=len(rows), eps=eps)
    args = (*rows, probe_D)
    return _call(kernel, "mix_forward", is_there_J, args, out, len(rows), 2, block, interpret)


def backward(rows, probe_D, is_there_J, stats_Nl, dy_ND, *, block, interpret=False):
    """Gradients of the rows, in their dtype, and of the probe, in float32."""
    (N, D), dtype, J = rows[0].shape, rows[0].dtype, len(rows)
    out = [((N, D), dtype)] * J + [((pl.cdiv(N, block), 1, D), F32)]
    kernel = functools.partial(_backward_kernel, J=J, N=N)
    args = (*rows, probe_D, stats_Nl, dy_ND)
    *drows, dprobes = _call(kernel, "mix_backward", is_there_J, args, out, J, 3, block, interpret)
    return tuple(drows), jnp.sum(dprobes, (0, 1))


def _call(kernel, name, is_there_J, args, out, J, n_sums, block, interpret):
    (N, D), dtype = args[0].shape, args[0].dtype
    axes = jax.typeof(args[0]).manual_axis_type
    backward = name == "mix_backward"

    def candidate(j):
        # One that takes no part is read once, whole steps never.
        return pl.BlockSpec((block, D), lambda i, is_there: (i * is_there[j], 0))

    def spec(shape):
        if len(shape) == 2 and shape[0] == N:
            return pl.BlockSpec((block, shape[1]), lambda i, _: (i, 0))
        if len(shape) == 3:
            return pl.BlockSpec((None, *shape[1:]), lambda i, _: (i, 0, 0))
        return pl.BlockSpec(shape, lambda i, _: (0, 0))

    args = [jnp.broadcast_to(x, (8, D)) if x.ndim == 1 else x for x in args]
    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(N, block),),
            in_specs=[candidate(j) for j in range(J)] + [spec(x.shape) for x in args[J:]],
            out_specs=[spec(shape) for shape, _ in out],
            scratch_shapes=[pltpu.VMEM((J, block, LANES), F32)] * n_sums
            + [pltpu.VMEM((8, D), F32)] * backward,
        ),
        out_shape=[jax.ShapeDtypeStruct(*o, manual_axis_type=axes) for o in out],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_bytes(block, J, D, dtype.itemsize, backward) * 5 // 4,
        ),
        interpret=interpret,
    )(is_there_J, *args)


def _strips(D):
    return [slice(c, min(c + STRIP, D)) for c in range(0, D, STRIP)]


def _groups(block, step):
    """step(slice of 16 rows) over a block."""

    @pl.loop(0, block // GROUP)
    def _(i):
        step(pl.ds(pl.multiple_of(i * GROUP, GROUP), GROUP))


def _lanes(x):
    """[rows, width] -> [rows, 128] with the same sum."""
    return sum(x[:, c : c + LANES] for c in range(0, x.shape[1], LANES))


def _tall(x_8w):
    """Eight equal rows -> GROUP of them."""
    return jnp.concatenate([x_8w] * (GROUP // 8))


def _total(sums_nl):
    return jnp.sum(sums_nl, axis=1, keepdims=True)


def _wide(x_n1, width=LANES):
    return jnp.broadcast_to(x_n1, (x_n1.shape[0], width))


def _over(x_nl, width):
    """Equal lanes [rows, 128] -> [rows, width]."""
    return jnp.concatenate([x_nl] * (width // LANES), axis=1)


def _softmax(scores):
    top = functools.reduce(jnp.maximum, scores)
    powers = [jnp.exp(s - top) for s in scores]
    whole = 1 / sum(powers)
    return [p * whole for p in powers]


def _forward_kernel(is_there, *refs, J, eps):
    rows, probe, y, squares, dots = refs[:J], refs[J], refs[J + 1], refs[-2], refs[-1]
    block, D = y.shape

    def add_up(at):
        sums = [[jnp.zeros((GROUP, LANES), F32)] * 2 for _ in rows]
        for strip in _strips(D):
            p = _tall(probe[:, strip])
            for row, both in zip(rows, sums, strict=True):
                x = row[at, strip].astype(F32)
                both[:] = both[0] + _lanes(x * x), both[1] + _lanes(x * p)
        for j in range(J):
            squares[j, at, :], dots[j, at, :] = sums[j]

    _groups(block, add_up)
    scales = [jax.lax.rsqrt(_total(squares[j]) / D + eps) for j in range(J)]
    scores = [_total(dots[j]) * scales[j] for j in range(J)]
    scores = [jnp.where(is_there[j] != 0, score, NEVER) for j, score in enumerate(scores)]
    if len(refs) > J + 4:
        stats, lane = jnp.zeros((block, LANES), F32), _lane(block)
        for j in range(J):
            stats = jnp.where(lane == j, scores[j], stats)
            stats = jnp.where(lane == MOST + j, scales[j], stats)
        refs[J + 2][...] = stats
    for j, weight in enumerate(_softmax(scores)):
        squares[j] = _wide(weight)

    def mix(at):
        weights = [squares[j, at, :] for j in range(J)]
        for strip in _strips(D):
            width = strip.stop - strip.start
            pairs = zip(weights, rows, strict=True)
            mixed = sum(_over(w, width) * row[at, strip].astype(F32) for w, row in pairs)
            y[at, strip] = mixed.astype(y.dtype)

    _groups(block, mix)


def _lane(rows):
    return jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)


def _backward_kernel(_, *refs, J, N):
    """With s = c (x . p), c = 1 / sqrt(mean(x^2) + eps), w = softmax(s), dw = x . dy:

    ds = w (dw - sum w dw);  dx = w dy + ds c p - (ds s c^2 / D) x;  dp = sum over tokens ds c x.
    """
    rows, (probe, stats, dy), drows = refs[:J], refs[J : J + 3], refs[J + 3 : 2 * J + 3]
    dprobe, by_dy, by_probe, by_row, dprobe_8D = refs[2 * J + 3 :]
    block, D = dy.shape

    def add_up(at):
        dots = [jnp.zeros((GROUP, LANES), F32)] * J
        for strip in _strips(D):
            g = dy[at, strip].astype(F32)
            dots = [
                dot + _lanes(row[at, strip].astype(F32) * g)
                for dot, row in zip(dots, rows, strict=True)
            ]
        for j in range(J):
            by_dy[j, at, :] = dots[j]

    _groups(block, add_up)
    scores = [stats[:, j : j + 1] for j in range(J)]
    scales = [stats[:, MOST + j : MOST + j + 1] for j in range(J)]
    weights, dweights = _softmax(scores), [_total(by_dy[j]) for j in range(J)]
    mean = sum(w * d for w, d in zip(weights, dweights, strict=True))
    for j in range(J):
        dscore = weights[j] * (dweights[j] - mean)
        by_dy[j] = _wide(weights[j])
        by_probe[j] = _wide(dscore * scales[j])
        by_row[j] = _wide(dscore * scores[j] * scales[j] * scales[j] * (1 / D))
    dprobe_8D[...] = jnp.zeros(dprobe_8D.shape, F32)

    def write(at, is_real=None):
        a, b, c = ([ref[j, at, :] for j in range(J)] for ref in (by_dy, by_probe, by_row))
        for strip in _strips(D):
            width = strip.stop - strip.start
            g, p = dy[at, strip].astype(F32), _tall(probe[:, strip])
            added = jnp.zeros((GROUP, width), F32)
            for j in range(J):
                x, to_probe = rows[j][at, strip].astype(F32), _over(b[j], width)
                dx = _over(a[j], width) * g + to_probe * p - _over(c[j], width) * x
                drows[j][at, strip] = dx.astype(dy.dtype)
                added += to_probe * x
            if is_real is not None:
                added = jnp.where(is_real, added, 0)
            dprobe_8D[:, strip] += added[:8] + added[8:]

    if N % block == 0:
        _groups(block, write)
    else:
        # Past the last token stands anything; it must not reach the probe's gradient.
        left = jnp.minimum(N - pl.program_id(0) * block, block)

        @pl.loop(0, pl.cdiv(left, GROUP))
        def _(i):
            start = pl.multiple_of(i * GROUP, GROUP)
            token = start + jax.lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0)
            write(pl.ds(start, GROUP), token < left)

    dprobe[...] = jnp.sum(dprobe_8D[...], axis=0, keepdims=True)


__all__ = ["mix_mosaic", "rows_per_step", "vmem_bytes"]
