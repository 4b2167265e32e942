"""Grouped matmul with packed MXFP4 weights: the TPU kernel, interpreted, and its definition."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mxfp4_inputs import CHIPS, INTERPRET, SIZES, E, F, L, N, product, rows

from k3_jax.quant import mxfp4 as released
from pallas_kernels import experts
from pallas_kernels.experts import mxfp4, mxfp4_reference
from pallas_kernels.experts.mxfp4 import Blocks, from_released, grouped_matmul_mxfp4, visits

# Two column blocks, two slabs; x by blocks of 16 rows on a chip with bfloat16 vectors, or whole in
# one of 32 (50 rows are one full and one partial block) on a chip without.
BLOCKS = {
    "x by blocks, v6e": Blocks(rows=16, x_rows=16, columns=128, slab=128, generation=6, cores=1),
    "x whole, v5p": Blocks(rows=32, x_rows=64, columns=128, slab=128, generation=5, cores=2),
}
# float32 sums of 512 products (exact in float32) against float64: results reach 150, so that each
# of the 512 roundings is up to 150 x 2^-24 = 9e-6, and 23 of them (the root of 512) 2e-4.
TIGHT = dict(rtol=1e-5, atol=2e-4)


def draw(seed, low=118, high=130, E=E, L=L, F=F):
    """Released bytes, every code and scale bytes in [low, high), and their float64 weights."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (E, F, L // 2), dtype=np.uint8)
    scales = rng.integers(low, high, (E, F, L // 32), dtype=np.uint8)
    return packed, scales, released.unpack(packed, scales, np.float64).swapaxes(1, 2)


@cache
def compiled(blocks, out_dtype=jnp.float32):
    return jax.jit(
        partial(grouped_matmul_mxfp4, out_dtype=out_dtype, blocks=blocks, interpret=INTERPRET)
    )


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_kernel_equals_the_float64_product_with_widened_weights(sizes, blocks):
    """Ragged groups; scratch starts as NaN and a race raises. Rows after the last group give 0."""
    packed, scales, w = draw(0)
    got = compiled(blocks)(rows(N), *from_released(packed, scales), jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(got, product(rows(N), w, sizes), **TIGHT)
    assert np.all(np.asarray(got)[sum(sizes) :] == 0)


@pytest.mark.parametrize("form", ["kernel", "definition"])
def test_the_experts_of_one_layer_out_of_those_of_all(form):
    """Layers 0, 1 and 2 in one stack, the index traced."""
    packed, scales, w = draw(2, E=3 * E)
    sizes, stack = SIZES["unaligned, one empty, rows left over"], from_released(packed, scales)
    fn = partial(experts.grouped_matmul_mxfp4, out_dtype=jnp.float32, impl="reference")
    if form == "kernel":
        fn = compiled(BLOCKS["x by blocks, v6e"])
    run = jax.jit(lambda first: fn(rows(N), *stack, jnp.asarray(sizes, jnp.int32), first=first))
    for layer in range(3):
        want = product(rows(N), w[layer * E : (layer + 1) * E], sizes)
        np.testing.assert_allclose(run(jnp.int32(layer * E)), want, **TIGHT)


@pytest.mark.parametrize("n", [1, 9])
def test_fewer_rows_than_a_tile(n):
    """Decode: what lies beyond the last row is never seen."""
    packed, scales, w = draw(1)
    sizes = [0, n - n // 2, 0, n // 2]
    block = Blocks(rows=16, x_rows=16, columns=256, slab=256, generation=6, cores=1)
    got = compiled(block)(rows(n), *from_released(packed, scales), jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(got, product(rows(n), w, sizes), **TIGHT)


@pytest.mark.parametrize("generation", [5, 6])
def test_widening_is_exact_for_every_code_and_every_scale_from_2_to_240(generation):
    """Rows of the identity read the weights out, bit for bit and with the sign of each zero."""
    packed, scales, w = draw(2, E=1, L=256, F=256)
    scales[:] = (np.arange(scales.size) % 239 + 2).reshape(scales.shape)
    w = released.unpack(packed, scales, np.float64).swapaxes(1, 2)
    kernel_bytes = from_released(packed, scales)
    assert len(np.unique(packed & 15)) == len(np.unique(packed >> 4)) == 16
    block = Blocks(rows=256, x_rows=256, columns=256, slab=128, generation=generation, cores=1)
    eye = jnp.eye(256, dtype=jnp.bfloat16)
    got = compiled(block)(eye, *kernel_bytes, jnp.array([256], jnp.int32))
    np.testing.assert_array_equal(got, w[0])
    np.testing.assert_array_equal(mxfp4_reference.widen(*(b[0] for b in kernel_bytes)), w[0])


def test_scales_beyond_the_exact_range_stay_finite():
    """Larger ones act as 240; smaller ones give at most their own tiny value, or 0."""
    packed, scales, _ = draw(3, E=1, L=256, F=128)
    scales[:] = np.resize(np.array([0, 1, 241, 254, 255], np.uint8), scales.shape)
    block = Blocks(rows=256, x_rows=256, columns=128, slab=128, generation=6, cores=1)
    eye = jnp.eye(256, dtype=jnp.bfloat16)
    got = compiled(block)(eye, *from_released(packed, scales), jnp.array([256], jnp.int32))
    tiny = np.repeat(scales[0].T < 2, 32, axis=0)
    assert np.all(np.abs(got)[tiny] <= 6 * 2.0**-126)
    clamped = released.unpack(packed, np.minimum(scales, 240), np.float64)[0].T
    np.testing.assert_array_equal(np.asarray(got)[~tiny], clamped[~tiny])


def test_a_nan_stays_in_its_own_row():
    """Rows of one block that belong to three experts, and one row of no expert."""
    packed, scales, w = draw(4)
    x, sizes = rows(N), [5, 6, 0, 38]
    x_nan = x.at[jnp.array([6, 49])].set(jnp.nan)
    block = BLOCKS["x by blocks, v6e"]
    got = np.asarray(
        compiled(block)(x_nan, *from_released(packed, scales), jnp.asarray(sizes, jnp.int32))
    )
    want = product(x, w, sizes)
    assert np.all(np.isnan(got[6])) and np.all(got[49] == 0)
    others = np.delete(np.arange(N), 6)
    np.testing.assert_allclose(got[others], want[others], **TIGHT)


def test_bfloat16_output_is_the_float32_sum_rounded_once():
    packed, scales, _ = draw(0)
    args = rows(N), *from_released(packed, scales), jnp.array([7, 0, 20, 3], jnp.int32)
    block = BLOCKS["x by blocks, v6e"]
    want = compiled(block)(*args).astype(jnp.bfloat16)
    np.testing.assert_array_equal(compiled(block, jnp.bfloat16)(*args), want)


def test_the_definition_equals_the_float64_product():
    packed, scales, w = draw(5)
    sizes = [7, 0, 20, 3]
    run = jax.jit(partial(mxfp4_reference.grouped_matmul_mxfp4, out_dtype=jnp.float32))
    got = run(rows(N), *from_released(packed, scales), jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(got, product(rows(N), w, sizes), **TIGHT)


def test_the_kernels_layout_loses_no_bit_of_the_released_bytes():
    """Every byte value, both halves: the released bytes come back from the moved ones."""
    packed, scales, _ = draw(6)
    packed[0, 0] = np.arange(256, dtype=np.uint8)
    moved, moved_scales = (np.asarray(a).swapaxes(1, 2) for a in from_released(packed, scales))
    assert moved.nbytes == packed.nbytes and moved_scales.nbytes == scales.nbytes
    first = (moved >> 7) << 3 | moved >> 1 & 7
    second = (moved & 1) << 3 | moved >> 4 & 7
    codes = np.concatenate([first, second], axis=-1)
    np.testing.assert_array_equal(codes[..., ::2] | codes[..., 1::2] << 4, packed)
    np.testing.assert_array_equal(moved_scales, scales)


@pytest.mark.parametrize("seed", range(5))
def test_visits_meet_every_expert_and_block_once_and_leave_no_block_out(seed):
    """Against a loop over rows; an expert's and a block's visits are consecutive."""
    rng = np.random.default_rng(seed)
    n, block_rows, experts = int(rng.integers(1, 200)), 16, 7
    cuts = np.sort(rng.integers(0, n + 1, experts))
    sizes = np.diff(cuts, prepend=0) * (rng.random(experts) < 0.7)
    owner = np.repeat(np.arange(experts), sizes)
    pairs = sorted({(int(e), r // block_rows) for r, e in enumerate(owner)})
    plan = jax.jit(visits, static_argnums=(1, 2))(jnp.asarray(sizes, jnp.int32), n, block_rows)
    expert, block, low, high = map(np.asarray, plan)
    real = low < high
    assert list(zip(expert[real], block[real], strict=True)) == pairs
    covered = np.concatenate([np.arange(*x) for x in zip(low, high, strict=True)])
    np.testing.assert_array_equal(covered, np.arange(sizes.sum()))
    assert set(block) == set(range(-(-n // block_rows)))
    assert np.all(np.diff(block) >= 0) and np.all(np.diff(expert) >= 0)
    assert np.all((low >= block * block_rows) & (high <= (block + 1) * block_rows) | ~real)


def test_nothing_as_large_as_the_widened_weights_is_made_outside_the_kernel():
    """The packed bytes reach the kernel as they are."""
    packed, scales, _ = draw(7)
    args = rows(N), *from_released(packed, scales), jnp.array([7, 0, 20, 3], jnp.int32)
    run = partial(grouped_matmul_mxfp4, blocks=BLOCKS["x by blocks, v6e"])
    eqns = jax.make_jaxpr(run)(*args).eqns
    kernel = [eqn for eqn in eqns if eqn.primitive.name == "pallas_call"]
    made = [v.aval.size for eqn in eqns for v in eqn.outvars]
    assert len(kernel) == 1 and max(made) == N * F
    assert {a.aval.dtype.name for a in kernel[0].invars if a.aval.size >= E * L * F // 32} == {
        "uint8",
        "bfloat16",
    }


def test_each_shard_multiplies_its_own_rows_with_its_own_experts():
    """check_vma=True over 2 devices; sizes and weights are sharded with the rows."""
    mesh = jax.make_mesh((2,), ("expert",), (AxisType.Explicit,), devices=jax.devices()[:2])
    packed, scales, w = draw(8)
    sizes = np.array([7, 0, 5, 13], np.int32)
    block = Blocks(rows=16, x_rows=32, columns=256, slab=256, generation=6, cores=1)
    # The race detector holds one kernel's state for the whole process, not one per device.
    run = partial(
        grouped_matmul_mxfp4, out_dtype=jnp.float32, blocks=block, interpret=pltpu.InterpretParams()
    )
    args = (rows(N), *from_released(packed, scales), sizes)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(a, NamedSharding(mesh, P("expert"))) for a in args]
        both = jax.shard_map(run, in_specs=P("expert"), out_specs=P("expert"), check_vma=True)
        got = np.asarray(jax.jit(both)(*sharded))
    half = N // 2
    np.testing.assert_allclose(got[:half], product(rows(N)[:half], w[:2], sizes[:2]), **TIGHT)
    np.testing.assert_allclose(got[half:], product(rows(N)[half:], w[2:], sizes[2:]), **TIGHT)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize(
    "n, rows_of",
    [
        (1, lambda mxu: 16),
        (14, lambda mxu: 16),
        (112, lambda mxu: 64),
        (896, lambda mxu: mxu // 2),
        (14 * 512, lambda mxu: mxu // 2),
        (14 * 2048, lambda mxu: mxu),
    ],
    ids=["1", "14", "112", "896", "7168", "28672"],
)
@pytest.mark.parametrize("width, out", [(3584, 3072), (3072, 3584)], ids=["gate", "down"])
def test_blocks_of_the_released_size_fit_the_chips(width, out, n, rows_of, chip):
    """Full size without memory. Two column blocks, one for each core of a v5p."""
    got = mxfp4.choose(n, 14, width, out, 4, chip)
    assert got.columns * 2 == out and got.slab == 256 and got.generation == chip.generation
    assert got.rows == rows_of(chip.mxu_column_size) and got.x_rows % got.rows == 0
    assert got.x_rows >= n or n * width * 2 > mxfp4.SMALL_X
    assert got.reads_of_x(n, out) == (chip.num_cores if got.x_rows >= n else 2)
    need = mxfp4.vmem_bytes(got.rows, got.x_rows, got.columns, width, 4)
    assert need <= chip.vmem_capacity_bytes * 3 // 4


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=jnp.zeros((N, L), jnp.float32)), "bfloat16"),
        (dict(x=jnp.zeros((N, L + 2), jnp.bfloat16)), r"L=514"),
        (dict(scales=jnp.zeros((E, L // 16, F), jnp.uint8)), r"\[E,16,F\]"),
        (dict(packed=jnp.zeros((E, L // 2, F), jnp.int8)), "uint8"),
        (dict(sizes=jnp.zeros(E, jnp.float32)), "int32"),
        (dict(out_dtype=jnp.float16), "float16"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(change, message):
    args = dict(
        x=jnp.zeros((N, L), jnp.bfloat16),
        packed=jnp.zeros((E, L // 2, F), jnp.uint8),
        scales=jnp.zeros((E, L // 32, F), jnp.uint8),
        sizes=jnp.zeros(E, jnp.int32),
        out_dtype=None,
    )
    args.update(change)
    out_dtype = args.pop("out_dtype")
    with pytest.raises(ValueError, match=message):
        grouped_matmul_mxfp4(*args.values(), out_dtype=out_dtype, blocks=BLOCKS["x whole, v5p"])


def test_sizes_no_block_can_take_are_refused_with_numbers():
    chip = CHIPS["tpu7x"]
    with pytest.raises(ValueError, match="L=320 must be a multiple of 256 and F=256 of 128"):
        mxfp4.choose(8, 1, 320, 256, 2, chip)
    with pytest.raises(ValueError, match="L=131072 and 128 columns need"):
        mxfp4.choose(128, 1, 131072, 256, 2, chip)
    with pytest.raises(ValueError, match="multiple of 64"):
        from_released(np.zeros((1, 4, 40), np.uint8), np.zeros((1, 4, 2), np.uint8))


def test_the_door_takes_blocks_off_tpu_and_refuses_what_is_not():
    """`impl`: auto is blocks here, bit for bit, and an unknown one is named."""
    r = np.random.default_rng(5)
    codes = r.integers(0, 256, (2, 128, 256), np.uint8)
    scale_bytes = r.integers(120, 130, (2, 128, 16), np.uint8)
    packed, scales = from_released(jnp.asarray(codes), jnp.asarray(scale_bytes))
    x = jnp.asarray(r.standard_normal((5, 512)), jnp.bfloat16)
    args = (x, packed, scales, jnp.asarray([2, 3], jnp.int32))
    auto, blocks = (experts.grouped_matmul_mxfp4(*args, impl=i) for i in ("auto", "blocks"))
    np.testing.assert_array_equal(auto, blocks)
    mxfp8 = (experts.to_mxfp8(x), *args[1:])
    with pytest.raises(ValueError, match="impl='blocks' takes bfloat16 rows, not mxfp8"):
        experts.grouped_matmul_mxfp4(*mxfp8, activations="mxfp8", impl="blocks")
    with pytest.raises(ValueError, match="impl='fast' is not one of"):
        experts.grouped_matmul_mxfp4(*args, impl="fast")
