"""Gate, up and SiTU-GLU in one kernel, and MXFP8 activations: interpreted, and by definition."""

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
from pallas_kernels.experts import mxfp4, mxfp4_reference, mxfp8
from pallas_kernels.experts.mxfp4 import Blocks, from_released
from pallas_kernels.situ import situ_glu

BETAS = dict(beta=4.0, linear_beta=25.0)
# 32 rows, so that MXFP8 takes them too; 50 are one full and one partial block.
BLOCKS = {
    "x by blocks, v6e": Blocks(rows=32, x_rows=32, columns=128, slab=128, generation=6, cores=1),
    "x whole, v5p": Blocks(rows=32, x_rows=64, columns=128, slab=128, generation=5, cores=2),
}
# float32 sums up to 150 are off by 2e-4 (test_experts_mxfp4); the activation's slope is at most 25
# (linear_beta, at a gate where beta tanh and sigmoid give 1 a unit) times that, 5e-3, where y is
# some 100; then one rounding to bfloat16, 2^-8.
ROUNDED = dict(rtol=2**-8, atol=5e-3)


def draw(seed, E=E, L=L, F=F):
    """(packed, scales) in the kernel's order with sums from 0.01 to 150, and float64 weights."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (E, F, L // 2), dtype=np.uint8)
    scales = rng.integers(118, 130, (E, F, L // 32), dtype=np.uint8)
    # Half the outputs are small enough that the activation does not saturate.
    scales[:, ::2] -= 8
    return from_released(packed, scales), released.unpack(packed, scales, np.float64).swapaxes(1, 2)


def glu(x, gate_w, up_w, sizes):
    """The definition in float64, and bfloat16's last value below the bound."""
    gate, up = (product(x, w, sizes) for w in (gate_w, up_w))
    y = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    return np.clip(y, -99.5, 99.5)


def wide(a):
    return np.asarray(a, np.float64)


@cache
def compiled(blocks, interpret=INTERPRET):
    return jax.jit(partial(mxfp4.grouped_glu_mxfp4, **BETAS, blocks=blocks, interpret=interpret))


@pytest.mark.parametrize("is_mxfp8", [False, True], ids=["bfloat16", "mxfp8"])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_one_kernel_equals_the_float64_definition(sizes, blocks, is_mxfp8):
    """Ragged groups; scratch starts as NaN and a race raises. Rows after the last group give 0."""
    (gate, gate_w), (up, up_w) = draw(0), draw(1)
    x = rows(N)
    x_pair = experts.to_mxfp8(x)
    want = glu(mxfp8.from_mxfp8(*x_pair) if is_mxfp8 else x, gate_w, up_w, sizes)
    got = compiled(blocks)(x_pair if is_mxfp8 else x, gate, up, jnp.asarray(sizes, jnp.int32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(got), want, **ROUNDED)
    assert np.all(wide(got)[sum(sizes) :] == 0)


def test_the_kernel_equals_its_definition_and_both_the_separate_calls():
    """The definition's sums are in another order; separate calls round gate and up to bfloat16."""
    (gate, _), (up, _) = draw(2), draw(3)
    x, sizes = rows(N), jnp.array([7, 0, 20, 23], jnp.int32)
    one = compiled(BLOCKS["x by blocks, v6e"])(x, gate, up, sizes)
    definition = mxfp4_reference.grouped_glu_mxfp4(x, gate, up, sizes, 4.0, 25.0)
    np.testing.assert_allclose(wide(one), wide(definition), **ROUNDED)
    y = [mxfp4_reference.grouped_matmul_mxfp4(x, *m, sizes, jnp.bfloat16) for m in (gate, up)]
    separate = situ_glu(*y, 4.0, 25.0)
    # A gate or up of bfloat16 is off by 2^-9; both move y by about as much, relatively.
    np.testing.assert_allclose(wide(one), wide(separate), rtol=2**-6, atol=5e-3)


def test_saturated_products_stay_below_the_bound():
    """Sums of 1e4 and more: |y| is bfloat16's last value below 100, and never 100."""
    packed = np.full((1, 128, 128), 0x77, np.uint8)  # 6.0 everywhere
    gate = from_released(packed, np.full((1, 128, 8), 130, np.uint8))
    x = jnp.asarray([[4.0], [-4.0]], jnp.bfloat16) * jnp.ones((2, 256), jnp.bfloat16)
    block = Blocks(rows=16, x_rows=16, columns=128, slab=128, generation=6, cores=1)
    got = compiled(block)(x, gate, gate, jnp.array([2], jnp.int32))
    np.testing.assert_array_equal(wide(got), np.array([[99.5], [0.0]]) * np.ones((2, 128)))


def test_mxfp8_rows_are_widened_exactly():
    """Over 4096 inputs and more, whose scales are two tiles. Every sum is exact in float32."""
    long, width = 4096 + 512, 128
    rng = np.random.default_rng(4)
    packed = rng.integers(0, 256, (1, width, long // 2), dtype=np.uint8)
    scales = np.full((1, width, long // 32), 127, np.uint8)
    w = released.unpack(packed, scales, np.float64).swapaxes(1, 2)
    # Groups of a row differ by powers of two, so that a scale in a wrong place would show.
    x = rng.integers(-8, 9, (N, long)) * np.exp2(np.arange(long) // 32 % 5)
    pair = experts.to_mxfp8(jnp.asarray(x, jnp.bfloat16))
    assert len(np.unique(pair[1])) > 4
    block = Blocks(rows=32, x_rows=64, columns=width, slab=256, generation=6, cores=1)
    run = partial(mxfp4.grouped_matmul_mxfp4, blocks=block, interpret=INTERPRET)
    got = run(pair, *from_released(packed, scales), jnp.array([45]), out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, product(x, w, [45]))


def test_values_on_the_grid_come_back_exactly():
    """Every finite E4M3 value under scales of 2^-117 to 2^119, each group with 256 or more."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    codes = codes[np.isfinite(codes)]
    groups = np.full((9, 32), 448.0, np.float32)
    groups[:, :-1].flat[: codes.size] = codes
    for exponent in (-117, -60, 0, 60, 119):
        x = jnp.asarray((groups * 2.0**exponent).reshape(1, -1), jnp.bfloat16)
        values, scales = experts.to_mxfp8(x)
        np.testing.assert_array_equal(scales, exponent + 127)
        np.testing.assert_array_equal(wide(values).reshape(9, 32), groups)
        np.testing.assert_array_equal(wide(mxfp8.from_mxfp8(values, scales)), wide(x))


@pytest.mark.parametrize(
    "given, units, scale",
    [
        # 8 significant bits against 4. Groups whose largest is 256: one unit is 1.
        ([256, 17, 19, 21, -17, 17.125], [256, 16, 20, 20, -16, 18], 127),
        # Subnormals are multiples of 2^-9: half of one is a tie to 0, one and a half to two.
        ([256, 2**-10, 3 * 2**-10, 2**-9, 2**-11], [256, 0, 2**-8, 2**-9, 0], 127),
        # The largest is 510, whose exponent is that of 256: what lies above 448 saturates.
        ([510, -510, 448, 464, 432], [448, -448, 448, 448, 432], 127),
        ([0, -0.0], [0, -0.0], 10),
        ([2**-126, 3 * 2**-126], [2**-9, 3 * 2**-9], 10),
        ([3.38953139e38], [448], 246),
    ],
    ids=["ties to even", "subnormals", "saturation", "zeros", "smallest scale", "largest scale"],
)
def test_rounding_of_one_group(given, units, scale):
    x = jnp.asarray([given + [0] * (32 - len(given))], jnp.bfloat16)
    values, scales = jax.jit(experts.to_mxfp8)(x)
    assert scales.shape == (1, 1) and scales[0, 0] == scale
    want = np.array(units).astype(jnp.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(wide(values)[0, : len(given)], want)
    np.testing.assert_array_equal(np.signbit(wide(values)[0, : len(given)]), np.signbit(want))


def test_the_largest_error_is_half_a_step_or_what_saturates():
    """Random groups: 2^-4 of a value, or 1/8 of the largest where 512 units go to 448."""
    x = rows(64, 6) * jnp.asarray(np.exp2(np.arange(L) // 32 * 4 - 30), jnp.bfloat16)
    back = wide(mxfp8.from_mxfp8(*experts.to_mxfp8(x))).reshape(64, -1, 32)
    x = wide(x).reshape(64, -1, 32)
    largest = np.abs(x).max(-1, keepdims=True)
    unit = np.exp2(np.floor(np.log2(largest)) - 8)
    is_saturated = np.abs(x) > 448 * unit
    assert is_saturated.any() and np.all(
        np.abs(back)[is_saturated] == (448 * unit + 0 * x)[is_saturated]
    )
    error = np.abs(back - x)[~is_saturated]
    assert np.all(error <= np.maximum(2**-4 * np.abs(x), 2.0**-10 * unit)[~is_saturated])


def test_what_is_not_finite_stays_in_its_own_element():
    x = rows(2, 7).at[0, 3].set(jnp.nan).at[1, 40].set(-jnp.inf)
    back = wide(mxfp8.from_mxfp8(*experts.to_mxfp8(x)))
    clean = wide(mxfp8.from_mxfp8(*experts.to_mxfp8(x.at[0, 3].set(0).at[1, 40].set(0))))
    is_bad = np.zeros(x.shape, bool)
    is_bad[0, 3] = is_bad[1, 40] = True
    assert np.all(np.isnan(back[is_bad]))
    np.testing.assert_array_equal(back[~is_bad], clean[~is_bad])


def test_each_shard_has_its_own_rows_and_experts():
    """check_vma=True over 2 devices; sizes and both weights are sharded with the MXFP8 rows."""
    mesh = jax.make_mesh((2,), ("expert",), (AxisType.Explicit,), devices=jax.devices()[:2])
    (gate, gate_w), (up, up_w) = draw(8), draw(9)
    sizes = np.array([7, 0, 5, 13], np.int32)
    pair = experts.to_mxfp8(rows(N))
    # The race detector holds one kernel's state for the whole process, not one per device.
    run = compiled(BLOCKS["x by blocks, v6e"], pltpu.InterpretParams())
    with jax.set_mesh(mesh):
        put = lambda a: jax.device_put(a, NamedSharding(mesh, P("expert")))  # noqa: E731
        args = jax.tree.map(put, (pair, gate, up, sizes))
        both = jax.shard_map(run, in_specs=P("expert"), out_specs=P("expert"), check_vma=True)
        got = wide(jax.jit(both)(*args))
    x, half = mxfp8.from_mxfp8(*pair), N // 2
    for d, mine in enumerate((slice(half), slice(half, N))):
        of = slice(2 * d, 2 * d + 2)
        want = glu(x[mine], gate_w[of], up_w[of], sizes[of])
        np.testing.assert_allclose(got[mine], want, **ROUNDED)


@pytest.mark.parametrize("is_mxfp8", [False, True], ids=["bfloat16", "mxfp8"])
@pytest.mark.parametrize("n", [1, 14, 112, 896, 14 * 512, 14 * 2048])
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_blocks_of_the_released_size_fit_the_chips(chip, n, is_mxfp8):
    """Both matrices are held; an E4M3 tile has 32 rows."""
    got = mxfp4.choose(n, 14, 3584, 3072, 2, chip, 2, is_mxfp8)
    assert got.columns >= 1024 and got.rows % (32 if is_mxfp8 else 16) == 0
    need = mxfp4.vmem_bytes(got.rows, got.x_rows, got.columns, 3584, 2, 2, is_mxfp8)
    assert need <= chip.vmem_capacity_bytes * 3 // 4


def arguments():
    return dict(x=rows(5), gate=draw(0)[0], up=draw(1)[0], sizes=jnp.array([2, 0, 3, 0], jnp.int32))


@pytest.mark.parametrize("is_mxfp8", [False, True], ids=["bfloat16", "mxfp8"])
def test_the_door_takes_blocks_off_tpu_and_the_definition_for_mxfp8(is_mxfp8):
    args = arguments()
    args["x"] = experts.to_mxfp8(args["x"]) if is_mxfp8 else args["x"]
    name = "mxfp8" if is_mxfp8 else "bfloat16"
    got, want = (
        experts.grouped_glu_mxfp4(*args.values(), **BETAS, activations=name, impl=impl)
        for impl in ("auto", "reference" if is_mxfp8 else "blocks")
    )
    np.testing.assert_array_equal(got, want)
    x, gate, up, sizes = args.values()
    definition = mxfp4_reference.grouped_glu_mxfp4(x, gate, up, sizes, *BETAS.values())
    np.testing.assert_allclose(wide(got), wide(definition), **ROUNDED)


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({}, dict(impl="fast"), "impl='fast' is not one of"),
        ({}, dict(activations="fp8"), "activations='fp8' is not one of"),
        ({}, dict(activations="mxfp8"), "'mxfp8' with an array"),
        (dict(x=experts.to_mxfp8(rows(5))), {}, "'bfloat16' with a pair"),
        ({}, dict(beta=0.0), "beta must be positive and finite; got 0.0"),
        (dict(up=draw(1, F=128)[0]), {}, r"\(4, 256, 256\), \(4, 256, 128\)"),
        (dict(x=rows(5, L=514)), {}, "L=514"),
        (
            dict(x=(rows(5), jnp.zeros((5, 16), jnp.uint8))),
            dict(activations="mxfp8"),
            "got bfloat16, uint8",
        ),
        (
            dict(x=(rows(5).astype(jnp.float8_e4m3fn), jnp.zeros((5, 8), jnp.uint8))),
            dict(activations="mxfp8"),
            r"uint8 \(5, 16\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(change, options, message):
    with pytest.raises(ValueError, match=message):
        experts.grouped_glu_mxfp4(*(arguments() | change).values(), **(BETAS | options))


def test_the_quantiser_refuses_other_shapes_and_dtypes():
    with pytest.raises(ValueError, match=r"multiple of 32; got bfloat16 \(3, 40\)"):
        experts.to_mxfp8(jnp.zeros((3, 40), jnp.bfloat16))
    with pytest.raises(ValueError, match="got float16"):
        experts.to_mxfp8(jnp.zeros((3, 64), jnp.float16))
