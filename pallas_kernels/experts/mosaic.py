"""Grouped matmul on a TPU, forward and both gradients: one expert's weights at a time in VMEM.

Rows are visited block by block in their order, and a block that groups share once for each of
them. The contraction is never cut: a visit is one product with the whole depth of an expert's
weights, which stay in VMEM while visits belong to one expert. Each block of columns reads x anew;
the columns are as wide as VMEM allows, so that the products bind and not these reads. The weights'
gradient adds up x^T dy of a group in float32 in VMEM. Group ends and N need no alignment: blocks
that a group fills in part are masked, and nothing is padded.

In place of libraries: on v6e and tpu7x XLA (libtpu 0.0.52) multiplies every row with every expert,
and JAX's megablox leaves the rows after the last group unwritten, so that y and dx need one more
pass each.
Modelled for N=131072, E=14, L=3584, F=3072, bfloat16, groups that end anywhere, us; megablox at
tiles of the whole depth that fit the VMEM it gets, the pass behind the +:
              floor (products)    forward, dx, dw             megablox
    v6e       3144 each           3461, 3480, 3529            3538 + 983, 4064 + 1147, 4701
    tpu7x     2503                2737, 2754, 2928            2782 + 437, 3241 + 509, 3520
    v5p       6288                6544, 6553, 6791            6719 + 583, 7779 + 680, 9579
Of the rest 5 % (v5p: 2.5 %) are the 13 visits more that groups with open ends need. With E=112 of
1170 rows each these are a fifth and weights arrive late: 1.53 times the floor on a v6e.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import vary, varying
from pallas_kernels.experts.mxfp4 import is_mine, store, visits
from pallas_kernels.situ import fused

LANES = 128
TIMES = ((1,), (0,))  # x w
TIMES_TRANSPOSED = ((1,), (1,))  # dy w^T
OUTER = ((0,), (0,))  # x^T dy


class Limits(NamedTuple):
    """rows: of a block of a large group. vmem: bytes that a kernel's arrays may take."""

    rows: int
    vmem: int


def limits_of(chip):
    """For a chip (`pltpu.get_tpu_info()`)."""
    return Limits(2 * chip.mxu_column_size, chip.vmem_capacity_bytes * 3 // 4)


def whole_tiles(n):
    """Lanes that n numbers take, such as the few of an adapter's rank."""
    return -(-n // LANES) * LANES


def times_bytes(rows, K, columns, itemsize, out_bytes, matrices=1, outs=1):
    """VMEM of a visit of x w: twice what the pipeline moves; the products and their masked selves.

    matrices: that x is multiplied with. outs: arrays of results, of out_bytes a number each.
    """
    K, columns = whole_tiles(K), whole_tiles(columns)
    moved = (rows * K + matrices * K * columns) * itemsize + outs * rows * columns * out_bytes
    return 2 * moved + 2 * max(matrices, outs) * rows * columns * 4


def outer_bytes(rows, inputs, columns, itemsize):
    """VMEM of a visit of x^T dy: the sum, the product being added, and x turned and masked."""
    inputs, columns = whole_tiles(inputs), whole_tiles(columns)
    moved = rows * (inputs + columns) * itemsize + inputs * columns * itemsize
    return 2 * moved + 2 * inputs * columns * 4 + rows * (2 * inputs + columns) * itemsize


def choose_rows(N, E, limits):
    """Rows of a block: half as many for small groups, whose last blocks are emptier."""
    most = limits.rows if N >= 8 * limits.rows * E else limits.rows // 2
    return min(most, -(-N // 16) * 16)


def choose_columns(rows, K, M, itemsize, out_bytes, limits, matrices=1, outs=1):
    """Columns of the result [N,M] that a visit computes. Raises ValueError if none fit VMEM.

    An even number of blocks where possible: a v5p splits them over its two cores.
    """
    fits = [
        c
        for c in _widths(M)
        if (M // c % 2 == 0 or c == _widths(M)[0])
        and times_bytes(rows, K, c, itemsize, out_bytes, matrices, outs) <= limits.vmem
    ]
    if not fits:
        least = _widths(M)[0]
        need = times_bytes(rows, K, least, itemsize, out_bytes, matrices, outs)
        raise ValueError(
            f"grouped_matmul: {rows} rows of {K} and {least} columns need {need} bytes of VMEM; "
            f"{limits.vmem} may be used"
        )
    return max(fits)


def choose_tile(rows, L, F, itemsize, limits):
    """The tile of dw [L,F] that is summed in VMEM, which reads x and dy the least.

    Raises ValueError if none fits VMEM.
    """
    fits = [
        (inputs, columns)
        for inputs in _widths(L)
        for columns in _widths(F)
        if outer_bytes(rows, inputs, columns, itemsize) <= limits.vmem
    ]
    if not fits:
        least = _widths(L)[0], _widths(F)[0]
        need = outer_bytes(rows, *least, itemsize)
        raise ValueError(
            f"grouped_matmul: the gradient of weights of {rows} rows and {least} weights needs "
            f"{need} bytes of VMEM; {limits.vmem} may be used"
        )
    # Each of the F / columns blocks reads L columns of x, and each of the L / inputs F of dy.
    return min(fits, key=lambda tile: (L * F // tile[1] + L * F // tile[0], -tile[1]))


def _widths(n):
    """Widths of blocks that divide n: whole tiles of lanes, or n itself."""
    return [w for w in range(LANES, n + 1, LANES) if n % w == 0] if n % LANES == 0 else [n]


def grouped_matmul(x_NL, w_ELF, sizes_E, out_dtype, *, limits=None, interpret=False):
    """y_n = x_n w_e as in the door's `grouped_matmul`, in out_dtype; differentiable in x and w.

    Operands are bfloat16, or float32, which is multiplied in full precision. Under `shard_map` with
    check_vma=True they may vary differently. limits: of the chip at hand if None.
    Raises ValueError for other dtypes and for sizes of which nothing fits VMEM.
    """
    _check_dtype(x_NL)
    if x_NL.shape[0] == 0:
        return jnp.zeros((0, w_ELF.shape[2]), out_dtype)
    limits = limits_of(pltpu.get_tpu_info()) if limits is None else limits
    args = x_NL, w_ELF, sizes_E
    axes = frozenset().union(*map(varying, args))
    options = limits, jnp.dtype(out_dtype), interpret
    return _grouped(options, *(vary(a, axes) for a in args))


def grouped_glu(
    x_NL, gate_ELF, up_ELF, sizes_E, beta, linear_beta, *, limits=None, interpret=False
):
    """situ_glu(x_n gate_e, x_n up_e) with products rounded to x's dtype, as separate calls have it.

    The activation is made where both products are: nothing reads them again forward. Saved are
    they and the inputs. Differentiable in x, gate and up; all else is as in `grouped_matmul`.

    Modelled for the sizes above, us forward, one call and three (two products and the activation at
    its HBM floor): v6e 6879 and 8397, v5p 13162 and 13961, tpu7x at most 6050 (none of the
    activation hidden) and 6128.
    """
    _check_dtype(x_NL)
    if x_NL.shape[0] == 0:
        return jnp.zeros((0, gate_ELF.shape[2]), x_NL.dtype)
    limits = limits_of(pltpu.get_tpu_info()) if limits is None else limits
    args = x_NL, gate_ELF, up_ELF, sizes_E
    axes = frozenset().union(*map(varying, args))
    return _glu((limits, beta, linear_beta, interpret), *(vary(a, axes) for a in args))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _glu(options, x_NL, gate_ELF, up_ELF, sizes_E):
    return _glu_and_products(options, 1, x_NL, gate_ELF, up_ELF, sizes_E)[0]


def _glu_and_products(options, outs, x_NL, gate_ELF, up_ELF, sizes_E):
    """[y], or with outs=3 [y, gate, up], each [N,F]."""
    limits, beta, linear_beta, interpret = options

    def finish(gate, up):
        gate, up = (product.astype(x_NL.dtype) for product in (gate, up))
        return [fused.situ_glu(gate, up, beta, linear_beta), gate, up][:outs]

    of = (x_NL, [gate_ELF, up_ELF], sizes_E, TIMES, outs, x_NL.dtype, limits, interpret)
    return _multiply("grouped_glu", finish, *of)


def _glu_fwd(options, x_NL, gate_ELF, up_ELF, sizes_E):
    args = x_NL, gate_ELF, up_ELF, sizes_E
    y_NF, *products = _glu_and_products(options, 3, *args)
    return y_NF, (args, products)


def _glu_bwd(options, saved, dy_NF):
    limits, beta, linear_beta, interpret = options
    (x_NL, *weights, sizes_E), products = saved
    _, pull = jax.vjp(lambda gate, up: fused.situ_glu(gate, up, beta, linear_beta), *products)
    dproducts = pull(dy_NF)
    dx_NL, other_NL = (
        times(dy, w, sizes_E, TIMES_TRANSPOSED, x_NL.dtype, limits, interpret)
        for dy, w in zip(dproducts, weights, strict=True)
    )
    dweights = (outer(x_NL, dy, sizes_E, limits, interpret) for dy in dproducts)
    return dx_NL + other_NL, *dweights, None


_glu.defvjp(_glu_fwd, _glu_bwd)


def times_transposed(dy_NF, w_ELF, sizes_E, *, limits=None, interpret=False):
    """dy_n w_e^T in dy's dtype: the gradient of x alone, for weights that have none."""
    if dy_NF.shape[0] == 0:
        return jnp.zeros((0, w_ELF.shape[1]), dy_NF.dtype)
    limits = limits_of(pltpu.get_tpu_info()) if limits is None else limits
    args = dy_NF, w_ELF, sizes_E
    axes = frozenset().union(*map(varying, args))
    args = (vary(a, axes) for a in args)
    return times(*args, TIMES_TRANSPOSED, dy_NF.dtype, limits, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(options, x_NL, w_ELF, sizes_E):
    limits, out_dtype, interpret = options
    return times(x_NL, w_ELF, sizes_E, TIMES, out_dtype, limits, interpret)


def _grouped_fwd(options, x_NL, w_ELF, sizes_E):
    return _grouped(options, x_NL, w_ELF, sizes_E), (x_NL, w_ELF, sizes_E)


def _grouped_bwd(options, saved, dy_NF):
    limits, _, interpret = options
    x_NL, w_ELF, sizes_E = saved
    dy_NF = dy_NF.astype(x_NL.dtype)
    dx_NL = times(dy_NF, w_ELF, sizes_E, TIMES_TRANSPOSED, x_NL.dtype, limits, interpret)
    return dx_NL, outer(x_NL, dy_NF, sizes_E, limits, interpret), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def times(x_NK, w_ELF, sizes_E, contract, out_dtype, limits, interpret=False):
    """[N,F] of x [N,L] and TIMES, or [N,L] of dy [N,F] and TIMES_TRANSPOSED."""
    of = (x_NK, [w_ELF], sizes_E, contract, 1, out_dtype, limits, interpret)
    return _multiply("grouped_matmul", lambda product: [product], *of)[0]


def _multiply(name, finish, x_NK, weights, sizes_E, contract, outs, out_dtype, limits, interpret):
    """`outs` arrays that finish makes of the rows' products with each of the weights."""
    (N, K), (E, L, F) = x_NK.shape, weights[0].shape
    M = F if contract == TIMES else L
    rows, sizes = choose_rows(N, E, limits), (x_NK.dtype.itemsize, out_dtype.itemsize)
    columns = choose_columns(rows, K, M, *sizes, limits, len(weights), outs)
    # m, v: block of columns and visit; e, b: the visit's expert and block of rows.
    if contract == TIMES:
        of_expert = pl.BlockSpec((None, K, columns), lambda m, v, e, *_: (e[v], 0, m))
    else:
        of_expert = pl.BlockSpec((None, columns, K), lambda m, v, e, *_: (e[v], m, 0))
    of_rows = pl.BlockSpec((rows, K), lambda m, v, e, b, *_: (b[v], 0))
    plan, need = visits(sizes_E, N, rows), times_bytes(rows, K, columns, *sizes, len(weights), outs)
    return pl.pallas_call(
        partial(_times_kernel, rows=rows, contract=contract, finish=finish, n=len(weights)),
        name=name,
        out_shape=[_like(x_NK, (N, M), out_dtype)] * outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(M // columns, plan[0].shape[0]),
            in_specs=[of_rows, *[of_expert] * len(weights)],
            out_specs=[pl.BlockSpec((rows, columns), lambda m, v, e, b, *_: (b[v], m))] * outs,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=need * 4 // 3
        ),
        interpret=interpret,
    )(*plan, x_NK, *weights)


def outer(x_NL, dy_NF, sizes_E, limits, interpret=False):
    """dw_e = sum over the rows of group e of x_n dy_n^T, rounded once to their dtype."""
    (N, L), F, E = x_NL.shape, dy_NF.shape[1], sizes_E.shape[0]
    rows = choose_rows(N, E, limits)
    inputs, columns = choose_tile(rows, L, F, x_NL.dtype.itemsize, limits)
    plan = visits(sizes_E, N, rows, empty_too=True)
    return pl.pallas_call(
        partial(_outer_kernel, rows=rows),
        name="grouped_outer",
        out_shape=_like(x_NL, (E, L, F), x_NL.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(L // inputs, F // columns, plan[0].shape[0]),
            in_specs=[
                pl.BlockSpec((rows, inputs), lambda i, f, v, e, b, *_: (b[v], i)),
                pl.BlockSpec((rows, columns), lambda i, f, v, e, b, *_: (b[v], f)),
            ],
            out_specs=pl.BlockSpec((None, inputs, columns), lambda i, f, v, e, *_: (e[v], i, f)),
            scratch_shapes=[pltpu.VMEM((inputs, columns), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=outer_bytes(rows, inputs, columns, x_NL.dtype.itemsize) * 4 // 3,
        ),
        interpret=interpret,
    )(*plan, x_NL, dy_NF)


def _check_dtype(x_NL):
    if x_NL.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"grouped_matmul: on a TPU x and w are bfloat16 or float32; got {x_NL.dtype}"
        )


def _like(x, shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _times_kernel(
    expert_V, block_V, low_V, high_V, x_ref, *refs, rows, contract, finish, n
):  # fmt: skip
    """refs: n of weights, then those of what `finish` makes of the products."""
    w_refs, y_refs, v = refs[:n], refs[n:], pl.program_id(1)
    low, high = low_V[v], high_V[v]
    is_new_block = (v == 0) | (block_V[v] != block_V[jnp.maximum(v - 1, 0)])

    @pl.when(low < high)
    def _():
        made = finish(*(_dot(x_ref[...], w_ref[...], contract) for w_ref in w_refs))
        store(made, y_refs, block_V[v] * rows, low, high, is_new_block)

    @pl.when((low >= high) & is_new_block)
    def _():
        for y_ref in y_refs:
            y_ref[...] = jnp.zeros_like(y_ref)


def _outer_kernel(expert_V, block_V, low_V, high_V, x_ref, dy_ref, dw_ref, sum_ref, *, rows):
    v, last = pl.program_id(2), pl.num_programs(2) - 1
    expert, low, high = expert_V[v], low_V[v], high_V[v]

    @pl.when((v == 0) | (expert != expert_V[jnp.maximum(v - 1, 0)]))
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(high - low == rows)
    def _():
        sum_ref[...] += _dot(x_ref[...], dy_ref[...], OUTER)

    @pl.when((low < high) & (high - low < rows))
    def _():
        # Both sides: 0 * NaN of a foreign row, or of what lies beyond the last, would be NaN.
        x, dy = (
            jnp.where(is_mine(block_V[v] * rows, low, high, ref.shape), ref[...], 0)
            for ref in (x_ref, dy_ref)
        )
        sum_ref[...] += _dot(x, dy, OUTER)

    @pl.when((v == last) | (expert != expert_V[jnp.minimum(v + 1, last)]))
    def _():
        dw_ref[...] = sum_ref[...].astype(dw_ref.dtype)


def _dot(a, b, contract):
    """Sums in float32; float32 operands are not rounded on the way."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
