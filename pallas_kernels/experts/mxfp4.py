"""Grouped matmul on a TPU with weights that stay packed MXFP4 until they are in VMEM.

Weights lie in memory as `from_released` leaves them, once, at load: inputs on rows, outputs on
lanes, and byte r of a column holds the codes of rows r and L/2 + r with their bits moved:

    bit   7                6 5 4                     3 2 1              0
          sign of row r    magnitude of row L/2+r    magnitude of r     sign of row L/2+r

Row r is then one mask away from being a float8_e5m2 (s 000 ee m0), the other row two shifts more:
E2M1 and E5M2 differ by the factor 2^14 and in nothing else, the subnormal code 0.5 included (that
the chip keeps E5M2's subnormals is what its other float8 conversions rest on as well). The chip
widens E5M2 in one instruction, and 32 rows of E5M2 are one tile and one block of a scale, so a
scale is a product with one broadcast row.

Exact for scale bytes 2..240 (2^-125 to 2^113). Smaller ones lose products below bfloat16's normal
range, which a TPU flushes to 0; larger ones, and 255 (NaN), act as 240.

Modelled for 14 experts of L=3584, F=3072 with groups that end anywhere, us, for 1 | 8 | 64 | 512
rows an expert; below it the same product with bfloat16 weights on the same schedule, or for few
rows the time of reading them:
    v6e      81 |  91 | 119 | 293    tpu7x    47 |  50 |  65 | 206    v5p      55 |  64 | 103 | 423
            188 | 189 | 196 | 336             84 |  84 |  87 | 222            112 | 112 | 116 | 422
"""

from dataclasses import dataclass
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import vary, varying
from pallas_kernels.experts.mxfp8 import E4M3
from pallas_kernels.situ.fused import situ_glu
from pallas_kernels.situ.reference import largest_below

BLOCK = 32  # inputs that share a scale
LANES = 128
E5M2_SHIFT = 14  # E5M2's exponent bias less E2M1's
SMALL_X = 8 << 20  # bytes
LARGEST_SCALE = 240  # + E5M2_SHIFT is the largest finite exponent


def from_released(packed_EFl, scales_EFj):
    """The released bytes in the kernel's order: packed [E,L/2,F] and scales [E,L/32,F], uint8.

    Released: byte i of an output holds inputs 2i (low nibble) and 2i + 1. Lossless and the same
    size; runs under jit. Raises ValueError for shapes that do not belong together.
    """
    E, F, half = packed_EFl.shape
    if half % BLOCK or scales_EFj.shape != (E, F, half * 2 // BLOCK):
        raise ValueError(
            f"from_released: packed {packed_EFl.shape} must be [E,F,L/2] with L a multiple of "
            f"{2 * BLOCK}, and scales [E,F,L/{BLOCK}]; got {scales_EFj.shape}"
        )
    codes_EFL = jnp.stack([packed_EFl & 15, packed_EFl >> 4], axis=-1).reshape(E, F, 2 * half)
    first, second = codes_EFL[..., :half], codes_EFL[..., half:]
    signs = (first & 8) << 4 | second >> 3
    magnitudes = (first & 7) << 1 | (second & 7) << 4
    return jnp.swapaxes(signs | magnitudes, 1, 2), jnp.swapaxes(scales_EFj, 1, 2)


@dataclass(frozen=True)
class Blocks:
    """Sizes of one grid step.

    rows: rows of x that are multiplied. x_rows: rows of x that are held, `rows` or all of them.
    columns: outputs. slab: bytes of a column that are unpacked together.
    generation: of the chip; from 6 on vectors are multiplied in bfloat16, before in float32, and
    the matrix unit takes weights from registers without a change of layout.
    cores: that share the blocks of columns, and a device's memory.
    """

    rows: int
    x_rows: int
    columns: int
    slab: int
    generation: int
    cores: int

    def reads_of_x(self, N, F):
        """How often each of N rows is read: for every block of columns, or once by each core."""
        column_blocks = F // self.columns
        return min(self.cores, column_blocks) if self.x_rows >= N else column_blocks


def vmem_bytes(rows, x_rows, columns, L, out_bytes, matrices=1, is_mxfp8=False):
    """VMEM of one grid step. What the pipeline moves is held twice."""
    moved = (
        matrices * L // 2 * columns  # packed
        + matrices * -(-L // BLOCK // 32) * 32 * columns  # scales, in tiles of 32 rows
        + x_rows * (L + scale_lanes(L) if is_mxfp8 else L * 2)  # x
        + rows * columns * out_bytes  # y
    )
    kept = (
        matrices * L * columns * 2  # widened weights
        + matrices * L // BLOCK * columns * 4  # scale words
        + (matrices + 1) * rows * columns * 4  # the sums, and the product being added to one
        + (rows * L * 2 if is_mxfp8 else 0)  # widened rows
    )
    return 2 * moved + kept


def scale_lanes(L):
    """Lanes of a row's MXFP8 scales: whole tiles, so that every gather has one to itself."""
    return -(-L // BLOCK // LANES) * LANES


def choose(N, E, L, F, out_bytes, chip, matrices=1, is_mxfp8=False):
    """Blocks for a chip (`pltpu.get_tpu_info()`). Raises ValueError if nothing fits its VMEM.

    At least two column blocks where possible: a v5p splits them over its two cores. A small x is
    held whole, so that it is read once and not once per column block.
    """
    # Rows half as many as the matrix unit is wide take as long as loading its weights, and fewer
    # hardly less. Twice as many run 3 to 8 % faster a row, and leave a group's last block emptier.
    mxu = chip.mxu_column_size
    most = mxu if N >= 8 * mxu * E else mxu // 2
    tile = 32 if is_mxfp8 else 16
    rows = min(most, max(tile, pl.next_power_of_2(8 * -(-N // E))), -(-N // tile) * tile)
    all_rows = -(-N // rows) * rows
    x_rows = all_rows if all_rows * L * (1 if is_mxfp8 else 2) <= SMALL_X else rows
    slab = next((s for s in (256, 128) if L % (2 * s) == 0), None)
    if slab is None or F % LANES:
        raise ValueError(f"packed experts: L={L} must be a multiple of 256 and F={F} of {LANES}")
    budget = chip.vmem_capacity_bytes * 3 // 4
    widest = max(LANES, F // 2)
    fits = [
        c
        for c in range(LANES, widest + 1, LANES)
        if F % c == 0 and vmem_bytes(rows, x_rows, c, L, out_bytes, matrices, is_mxfp8) <= budget
    ]
    if not fits:
        need = vmem_bytes(rows, x_rows, LANES, L, out_bytes, matrices, is_mxfp8)
        raise ValueError(
            f"packed experts: {x_rows} rows of L={L} and {LANES} columns need {need} bytes "
            f"of VMEM; {budget} of {chip.vmem_capacity_bytes} may be used"
        )
    return Blocks(rows, x_rows, max(fits), slab, chip.generation, chip.num_cores)


def visits(sizes_E, N, rows, empty_too=False):
    """Which expert meets which block of rows, in order: (expert, block, first row, end row) [V].

    Consecutive visits share a block, an expert or neither. Blocks after the last group are
    visited once with no rows, so that they can be zeroed; visits that are left over repeat the
    last block with no rows. empty_too: experts without rows have one visit, too.
    """
    E, n_blocks = sizes_E.shape[0], -(-N // rows)
    e_E, v = (jnp.arange(n, dtype=sizes_E.dtype) for n in (E, n_blocks + E - 1))
    ends_E = jnp.cumsum(sizes_E)
    starts_E = ends_E - sizes_E
    is_visited_E = (sizes_E > 0) | empty_too
    count_E = jnp.where(sizes_E > 0, (ends_E - 1) // rows - starts_E // rows + 1, is_visited_E)
    visit_ends_E = jnp.cumsum(count_E)
    visit_starts_E = visit_ends_E - count_E
    # Sums over a mask: gathers of a few numbers would be a program each.
    is_of_VE = (v[:, None] >= visit_starts_E) & (v[:, None] < visit_ends_E)
    expert, start, end, offset = (
        jnp.where(is_of_VE, x_E, 0).sum(axis=1, dtype=sizes_E.dtype)
        for x_E in (e_E, starts_E, ends_E, starts_E // rows - visit_starts_E)
    )
    is_real = v < visit_ends_E[-1]
    empty = -(-ends_E[-1] // rows) - visit_ends_E[-1]
    block = jnp.minimum(v + jnp.where(is_real, offset, empty), n_blocks - 1)
    # Past the last visit stays its expert: the weights need no new copy.
    expert = jnp.where(is_real, expert, jnp.max(jnp.where(is_visited_E, e_E, 0)))
    return expert, block, jnp.maximum(start, block * rows), jnp.minimum(end, (block + 1) * rows)


def store(ys, y_refs, first, low, high, is_new_block):
    """Put rows low to high of results whose block begins at row `first`, each in its array."""
    rows = y_refs[0].shape[0]

    @pl.when(high - low == rows)
    def _():
        for y, y_ref in zip(ys, y_refs, strict=True):
            y_ref[...] = y.astype(y_ref.dtype)

    @pl.when(high - low < rows)
    def _():
        # Rows of other groups, of x's end and of no group: 0 until their own visit.
        mine = is_mine(first, low, high, y_refs[0].shape)
        for y, y_ref in zip(ys, y_refs, strict=True):
            others = jnp.where(is_new_block, 0.0, y_ref[...].astype(jnp.float32))
            y_ref[...] = jnp.where(mine, y, others).astype(y_ref.dtype)


def is_mine(first, low, high, shape):
    row = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= low) & (row < high)


def grouped_matmul_mxfp4(
    x_NL, packed_ELF, scales_ELF, sizes_E, *, first=0, out_dtype=None, blocks=None, interpret=False
):
    """y_n = x_n w_e for the rows n of group e, w_e = E2M1(packed_e) 2^(scales_e - 127).

    x is bfloat16, or the pair that `to_mxfp8` returns; packed uint8 [E,L/2,F] and scales uint8
    [E,L/32,F] are as `from_released` returns them; sizes_E int32. Groups as in `grouped_matmul`:
    any may be empty, rows after the last give 0. Weights are widened in VMEM to bfloat16, exactly,
    once per expert and block of columns, however many rows the expert has; sums are float32.
    first: group e is expert first + e of the weights, which may hold more, of other layers: a copy
    of one layer's out of them would be read and written beside what the kernel reads.
    out_dtype: bfloat16 if None, or float32. Not differentiable. Under `shard_map` with
    check_vma=True all operands may vary differently.
    blocks: chosen for the chip at hand if None. Raises ValueError for what does not fit.
    """
    out_dtype = jnp.dtype(jnp.bfloat16 if out_dtype is None else out_dtype)
    check("grouped_matmul_mxfp4", x_NL, packed_ELF, scales_ELF, sizes_E, out_dtype)
    matrices = [(packed_ELF, scales_ELF)]
    return _multiply(x_NL, matrices, sizes_E, first, out_dtype, None, blocks, interpret)


def grouped_glu_mxfp4(
    x_NL, gate, up, sizes_E, *, beta, linear_beta, first=0, blocks=None, interpret=False
):
    """y_n = situ_glu(x_n gate_e, x_n up_e) in bfloat16; neither product leaves VMEM.

    gate and up are (packed, scales), all else is as in `grouped_matmul_mxfp4`.

    Modelled for the experts above, us, in one call and in three (the activation at its HBM floor):
                 1 row      64 rows    512 rows an expert
        v6e    155, 163    233, 248    562, 666
        tpu7x   88,  94                432, 447 (none of the activation hidden: an upper bound)
        v5p    106, 110    204, 212    828, 892
    """
    check_glu(x_NL, gate, up, sizes_E)
    out_dtype = jnp.dtype(jnp.bfloat16)
    finish = partial(activation, beta=beta, linear_beta=linear_beta)
    return _multiply(x_NL, [gate, up], sizes_E, first, out_dtype, finish, blocks, interpret)


def activation(gate, up, *, beta, linear_beta):
    """SiTU-GLU of float32 sums, to be rounded to bfloat16: there too it stays below its bound."""
    top = largest_below(beta * linear_beta, jnp.bfloat16)
    return jnp.clip(situ_glu(gate, up, beta, linear_beta), -top, top)


def _multiply(x, matrices, sizes_E, first, out_dtype, finish, blocks, interpret):
    xs = x if isinstance(x, tuple) else (x,)
    (N, L), E, F = xs[0].shape, len(sizes_E), matrices[0][0].shape[2]
    if N == 0:
        return jnp.zeros((0, F), out_dtype)
    is_mxfp8 = len(xs) == 2
    if blocks is None:
        chip, n = pltpu.get_tpu_info(), len(matrices)
        blocks = choose(N, E, L, F, out_dtype.itemsize, chip, n, is_mxfp8)
    if is_mxfp8:
        missing = scale_lanes(L) - L // BLOCK
        xs = xs[0], jnp.pad(xs[1], ((0, 0), (0, missing)))
    expert_V, *visited = visits(sizes_E, N, blocks.rows)
    operands = (expert_V + first, *visited, *xs, *chain(*matrices))
    axes = frozenset().union(*(varying(a) for a in operands))
    operands = [vary(a, axes) for a in operands]
    out_type = jax.ShapeDtypeStruct(
        (N, F), out_dtype, manual_axis_type=jax.typeof(operands[0]).manual_axis_type
    )
    return _call(blocks, E, len(matrices), is_mxfp8, finish, out_type, interpret, *operands)


def _call(blocks, E, matrices, is_mxfp8, finish, out_type, interpret, *operands):
    n_visits, L, F = operands[0].shape[0], operands[4].shape[1], out_type.shape[1]
    rows, x_rows, columns = blocks.rows, blocks.x_rows, blocks.columns
    need = vmem_bytes(rows, x_rows, columns, L, out_type.dtype.itemsize, matrices, is_mxfp8)

    def of_rows(width):
        return pl.BlockSpec((x_rows, width), lambda f, v, e, b, *_: (b[v] * rows // x_rows, 0))

    N = out_type.shape[0]
    # As if every expert has rows.
    moved = matrices * E * (L // 2 + L // BLOCK) * F + N * F * out_type.dtype.itemsize
    moved += blocks.reads_of_x(N, F) * N * L * operands[4].dtype.itemsize
    return pl.pallas_call(
        partial(_kernel, blocks=blocks, matrices=matrices, is_mxfp8=is_mxfp8, finish=finish),
        name="grouped_matmul_mxfp4" if finish is None else "grouped_glu_mxfp4",
        out_shape=out_type,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(F // columns, n_visits),
            # e and b: the expert and the block of rows of each visit v.
            in_specs=[
                *map(of_rows, (L, scale_lanes(L)) if is_mxfp8 else (L,)),
                *[
                    pl.BlockSpec((None, L // 2, columns), lambda f, v, e, *_: (e[v], 0, f)),
                    pl.BlockSpec((None, L // BLOCK, columns), lambda f, v, e, *_: (e[v], 0, f)),
                ]
                * matrices,
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda f, v, e, b, *_: (b[v], f)),
            scratch_shapes=scratch(blocks, L, matrices, is_mxfp8),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=need * 4 // 3
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * matrices * N * L * F, transcendentals=0, bytes_accessed=moved
        ),
        interpret=interpret,
    )(*operands)


def scratch(blocks, L, matrices=1, is_mxfp8=False):
    """Widened weights and a word for each scale, of each matrix; then widened rows."""
    of_matrix = [
        # Two rows a word spare the chips that can use it a change of layout at each store.
        pltpu.VMEM((L // 2, blocks.columns), jnp.int32)
        if blocks.generation >= 6
        else pltpu.VMEM((L, blocks.columns), jnp.bfloat16),
        pltpu.VMEM((L // BLOCK, blocks.columns), jnp.int32),
    ]
    return of_matrix * matrices + [pltpu.VMEM((blocks.rows, L), jnp.bfloat16)] * is_mxfp8


def _kernel(
    expert_V, block_V, low_V, high_V, x_ref, *refs, blocks, matrices=1, is_mxfp8=False, finish=None
):  # fmt: skip
    """refs: scales of x if it is MXFP8, packed and scales of each matrix, y, then `scratch`."""
    x_scales_ref, *refs = refs if is_mxfp8 else (None, *refs)
    n = 2 * matrices
    y_ref, *kept = refs[n:]
    weights = [(*refs[m : m + 2], *kept[m : m + 2]) for m in range(0, n, 2)]
    v = pl.program_id(1)
    low, high = low_V[v], high_V[v]
    before = jnp.maximum(v - 1, 0)
    is_new_expert = (v == 0) | (expert_V[v] != expert_V[before])
    is_new_block = (v == 0) | (block_V[v] != block_V[before])
    has_rows = low < high
    # 0 unless all of x is held.
    first = pl.multiple_of(block_V[v] * blocks.rows % blocks.x_rows, blocks.rows)
    x_ref = x_ref.at[pl.ds(first, blocks.rows)]
    if is_mxfp8:
        values_ref, x_ref = x_ref, kept[n]

        @pl.when(has_rows & is_new_block)
        def _():
            _widen_rows(values_ref, x_scales_ref.at[pl.ds(first, blocks.rows)], x_ref)

    def put(sums):
        y = finish(*sums) if finish else sums[0]
        store([y], [y_ref], block_V[v] * blocks.rows, low, high, is_new_block)

    @pl.when(has_rows & is_new_expert)
    def _():
        put([_multiply_and_widen(x_ref, *matrix, blocks) for matrix in weights])

    @pl.when(has_rows & ~is_new_expert)
    def _():
        put([_dot(x_ref[...], _as_rows(w_ref[...])) for _, _, w_ref, _ in weights])

    @pl.when(~has_rows & is_new_block)
    def _():
        y_ref[...] = jnp.zeros_like(y_ref)


def _multiply_and_widen(x_ref, packed_ref, scales_ref, w_ref, word_ref, blocks):
    """x w, leaving w in w_ref. Unrolled: unpacking a slab hides behind the slab before it."""
    half, slab = packed_ref.shape[0], blocks.slab
    exponents = jnp.minimum(scales_ref[...].astype(jnp.int32), LARGEST_SCALE) + E5M2_SHIFT
    # A float32 power of two; for bfloat16 arithmetic the same number twice in a word.
    word_ref[...] = exponents << 23 | (exponents << 7 if blocks.generation >= 6 else 0)
    y = None
    for r in range(0, half, slab):
        words = pltpu.bitcast(packed_ref[r : r + slab, :], jnp.uint32)
        magnitudes, signs = jnp.uint32(0x0E0E0E0E), jnp.uint32(0x80808080)
        for at, e5m2 in (
            (r, words & (magnitudes | signs)),
            (half + r, words >> 3 & magnitudes | words << 7 & signs),
        ):
            w = _scale(e5m2, word_ref, at // BLOCK, blocks.generation)
            if w_ref.dtype == jnp.bfloat16:
                w_ref[at : at + slab, :] = w
                # Through memory, which is the cheaper change of layout.
                w = w_ref[at : at + slab, :]
            else:
                w_ref[at // 2 : (at + slab) // 2, :] = pltpu.bitcast(w, jnp.int32)
            part = _dot(x_ref[:, at : at + slab], w)
            y = part if y is None else y + part
    return y


def _scale(words, word_ref, first, generation):
    """[slab/4, columns] words of four E5M2 rows each -> scaled bfloat16 [slab, columns]."""
    columns = words.shape[1]
    dtype, sublanes = (jnp.bfloat16, 16) if generation >= 6 else (jnp.float32, 8)
    scaled = []
    for j in range(words.shape[0] * 4 // BLOCK):
        block = pltpu.bitcast(words[j * BLOCK // 4 : (j + 1) * BLOCK // 4], jnp.float8_e5m2)
        row = jnp.broadcast_to(word_ref[first + j : first + j + 1, :], (8, columns))
        block = block.astype(dtype).reshape(BLOCK // sublanes, sublanes, columns)
        block = block * pltpu.bitcast(row, dtype)[None]
        scaled.append(block.reshape(BLOCK, columns).astype(jnp.bfloat16))
    return jnp.concatenate(scaled, axis=0)


def _widen_rows(values_ref, scales_ref, x_ref):
    """E4M3 [rows, L] times a power of two for each 32 lanes, to bfloat16: exact."""
    for at in range(0, x_ref.shape[1], LANES):
        # A tile of scales are those of 4096 inputs. Two rows a word halve the gathers.
        tile = at // (BLOCK * LANES) * LANES
        exponents = scales_ref[:, tile : tile + LANES].astype(jnp.int32)
        powers = jax.lax.bitcast_convert_type(exponents << 23, jnp.float32).astype(jnp.bfloat16)
        words = pltpu.bitcast(powers, jnp.int32)
        of_lane = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1) // BLOCK
        words = jnp.take_along_axis(words, at // BLOCK - tile + of_lane, axis=1)
        values = values_ref[:, at : at + LANES].astype(jnp.bfloat16)
        x_ref[:, at : at + LANES] = values * pltpu.bitcast(words, jnp.bfloat16)


def _as_rows(w):
    return w if w.dtype == jnp.bfloat16 else pltpu.bitcast(w, jnp.bfloat16)


def _dot(x, w):
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def check(door, x, packed_ELF, scales_ELF, sizes_E, out_dtype):
    if is_mxfp8 := isinstance(x, tuple):
        x, x_scales_NJ = x
    shapes = f"x {x.shape}, packed {packed_ELF.shape}, scales {scales_ELF.shape}"
    if (x.ndim, packed_ELF.ndim, scales_ELF.ndim, sizes_E.ndim) != (2, 3, 3, 1):
        raise ValueError(
            f"{door}: shapes must be [N,L], [E,L/2,F], [E,L/{BLOCK},F], [E]; "
            f"got {shapes}, sizes {sizes_E.shape}"
        )
    (N, L), (E, half, F) = x.shape, packed_ELF.shape
    if half * 2 != L or scales_ELF.shape != (E, L // BLOCK, F) or len(sizes_E) > E:
        raise ValueError(
            f"{door}: L={L} of x asks for packed [E,{L // 2},F], scales [E,{L // BLOCK},F] and "
            f"sizes [E]; got {shapes}, sizes {sizes_E.shape}"
        )
    if is_mxfp8 and (
        x_scales_NJ.shape != (N, L // BLOCK) or (x.dtype, x_scales_NJ.dtype) != (E4M3, jnp.uint8)
    ):
        raise ValueError(
            f"{door}: MXFP8 values {x.shape} must be float8_e4m3fn and their scales uint8 "
            f"{(N, L // BLOCK)}; got {x.dtype}, {x_scales_NJ.dtype} {x_scales_NJ.shape}"
        )
    if not is_mxfp8 and x.dtype != jnp.bfloat16 or out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"{door}: x must be bfloat16 and out_dtype bfloat16 or float32; "
            f"got {x.dtype} and {out_dtype}"
        )
    if not packed_ELF.dtype == scales_ELF.dtype == jnp.uint8 or sizes_E.dtype != jnp.int32:
        raise ValueError(
            f"{door}: packed and scales must be uint8 and sizes int32; "
            f"got {packed_ELF.dtype}, {scales_ELF.dtype}, {sizes_E.dtype}"
        )


def check_glu(x, gate, up, sizes_E):
    door = "grouped_glu_mxfp4"
    if gate[0].shape != up[0].shape:
        raise ValueError(
            f"{door}: gate and up must share one shape; packed are {gate[0].shape}, {up[0].shape}"
        )
    for packed_ELF, scales_ELF in (gate, up):
        check(door, x, packed_ELF, scales_ELF, sizes_E, jnp.dtype(jnp.bfloat16))
