"""The short convolution: its definition, and the TPU kernels interpreted on a CPU against it.

The oracle is float64. The kernels take bfloat16 inputs, work in float32 and round y and du to
bfloat16 once: 2^-9 = 0.2 % of each value. The taps' gradient stays in float32.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.conv import short_conv
from pallas_kernels.conv.mosaic import conv_mosaic, plan_for, vmem_bytes
from pallas_kernels.conv.mosaic_kernels import Plan

F32, BF16 = jnp.float32, jnp.bfloat16
NANS = pltpu.InterpretParams(uninitialized_memory="nan")

pytestmark = pytest.mark.usefixtures("quick_compiler")


def inputs(T, X=128, B=1, W=4, seed=0):
    """u, taps, history and dy."""
    rng = np.random.default_rng(seed)
    u, history, dy = (rng.normal(size=(B, n, X)) for n in (T, W - 1, T))
    taps = jnp.asarray(rng.normal(size=(W, X)), F32)
    return [jnp.asarray(u, BF16), taps, *(jnp.asarray(x, BF16) for x in (history, dy))]


def exact(u, taps, history, segments):
    """The definition in float64, for clean inputs."""
    W, T = len(taps), u.shape[1]
    first = np.array([next((s for s in row if s), 0) for row in segments])
    owner = np.concatenate([np.repeat(first[:, None], W - 1, 1), segments], 1)
    line = jnp.concatenate([history, u], 1)
    sees = [(owner[:, w : w + T] == segments) & (segments != 0) for w in range(W)]
    y = sum(taps[w] * jnp.where(sees[w][..., None], line[:, w : w + T], 0) for w in range(W))
    return y * jax.nn.sigmoid(y)


def pulled(f, args, dy):
    y, pull = jax.vjp(f, *args)
    return y, *pull(dy)


@partial(jax.jit, static_argnums=0)
def interpreted(static, u, taps, history, dy, segments):
    return pulled(lambda *x: conv_mosaic(static, *x, segments), (u, taps, history), dy)


ONE = Plan(1, 1)


def compare(x, segments, plan=ONE, interpret=NANS, run=interpreted):
    """y and every gradient, with NaN at the pads of u and dy."""
    u, taps, history, dy = x
    segments = np.asarray(segments, np.int32).reshape(u.shape[:2])
    real = jnp.asarray(segments != 0)[..., None]
    dirty = [jnp.where(real, a, jnp.nan).astype(BF16) for a in (u, dy)]
    got = run((plan, interpret), dirty[0], taps, history, dirty[1], jnp.asarray(segments))
    u, taps, history, dy = (jnp.asarray(a, jnp.float64) for a in x)
    clean = jnp.where(real, u, 0), taps, history
    want = pulled(partial(exact, segments=segments), clean, jnp.where(real, dy, 0))
    for name, g, w in zip(("y", "u", "taps", "history"), got, want, strict=True):
        # The taps' gradient is a float32 sum over tokens, everything else rounded to bfloat16.
        tolerance = dict(rtol=1e-5, atol=2e-4) if name == "taps" else dict(rtol=5e-3, atol=1e-4)
        np.testing.assert_allclose(np.asarray(g, np.float64), w, err_msg=name, **tolerance)
    for g in got[:2]:
        assert not np.any(np.asarray(g, np.float32)[segments == 0])


def row(lengths, T):
    """Documents of these lengths (negative: pads), then pads."""
    signed = np.sign(lengths) * np.arange(1, len(lengths) + 1)
    filled = np.repeat(np.maximum(signed, 0), np.abs(lengths))
    return np.pad(filled, (0, T - len(filled)))


@pytest.mark.parametrize("lengths", [(1, 2), (3, 4), (127, 128), (130, 300), (255, 256)])
def test_any_number_of_tokens_with_nan_behind_the_last(lengths):
    """T03, T06, T30: what stands behind the last token, in the row or in a buffer, is NaN."""
    compare(inputs(300, B=2, seed=lengths[0]), [row([n], 300) for n in lengths])


DOCUMENTS = {
    "of length 1": ([1] * 300, [3, 1, 1, 2, 1, 247, 1, 1, 1, 42]),
    "with pads between": ([20, -3, 1, -1, 1, -30, 200, -1, 3], [100, -100, 56, -2, 42]),
    "after pads": ([-1, 299], [-5, 251, -1, 43]),
    "beginning with chunks": ([256, 44], [255, 1, 44]),
    "none": ([-300], [2, 298]),
}


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_begin_and_end_anywhere(lengths):
    """T06, T07: no token is seen from another document; pads hold NaN and reach nothing."""
    compare(inputs(300, B=2, seed=7), [row(n, 300) for n in lengths])


def test_a_document_goes_on_across_a_pad_and_another_document():
    """Documents are told apart by their numbers, whatever stands between."""
    segments = np.array([[1, 1, 0, 1, 2, 1, 1, 2, 2, 1] * 30, [5] * 300])
    compare(inputs(300, B=2, seed=8), segments)


def test_fewer_tokens_than_taps():
    compare(inputs(2), [1, 1])


def test_several_chunks_and_blocks_of_channels_with_no_race_and_three_taps():
    """The scratch is handed from chunk to chunk, and time walked again for each block of X."""
    strict = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    segments = row([260, 250], 520)
    compare(inputs(520, X=256, W=3), segments, plan=Plan(2, 1), interpret=strict)


def test_rows_split_over_two_devices():
    """Under shard_map; the taps' gradient is summed over the devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows, whole = jax.P("rows"), jax.P()

    def sharded(static, u, taps, history, dy, segments):
        def local(u, taps, history, segments):
            taps = jax.lax.pcast(taps, "rows", to="varying")
            return conv_mosaic(static, u, taps, history, segments)

        specs = (rows, whole, rows, rows)
        f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows)
        return pulled(lambda *x: f(*x, segments), (u, taps, history), dy)

    run = jax.jit(sharded, static_argnums=0)
    compare(inputs(5, B=2), [[1, 1, 2, 2, 0], [1] * 5], run=run)


def test_the_reference_is_its_definition_and_stays_in_its_document():
    """T06, T07: a loop over tokens; the history belongs to the first document only."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(2, 9, 3)).astype(np.float32)
    taps, history = (
        rng.normal(size=(4, 3)).astype(np.float32),
        rng.normal(size=(2, 3, 3)).astype(np.float32),
    )
    segments = np.array([[1, 1, 1, 1, 2, 2, 3, 0, 0], [0, 0, 5, 5, 5, 5, 5, 5, 5]])
    y, after = short_conv(*map(jnp.asarray, (u, taps, history, segments)), impl="reference")
    for b in range(2):
        first = segments[b][segments[b] != 0][0]
        line = np.concatenate([history[b], u[b]])
        owner = np.concatenate([[first] * 3, segments[b]])
        for t in range(9):
            want = sum(taps[w] * line[t + w] * (owner[t + w] == segments[b, t]) for w in range(4))
            want *= segments[b, t] != 0
            np.testing.assert_allclose(y[b, t], want / (1 + np.exp(-want)), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(after[0], np.concatenate([history[0], u[0]])[7:10])


def test_the_history_after_a_row_with_fewer_tokens_than_taps():
    """The last inputs before the next token, history and all; none of the row's pads."""
    u = jnp.asarray([[1.0, 2.0, np.nan, np.nan]] * 2)[..., None]
    history = jnp.asarray([[-3.0, -2.0, -1.0]] * 2)[..., None]
    segments = jnp.asarray([[1, 1, 0, 0], [0, 0, 0, 0]])
    _, after = short_conv(u, jnp.ones((4, 1)), history, segments)
    np.testing.assert_array_equal(after[..., 0], [[-1, 1, 2], [-3, -2, -1]])


def test_auto_is_the_reference_here_and_what_the_kernel_cannot_take_is_refused():
    x = [a.astype(F32) if a.ndim == 3 else a for a in inputs(5)][:3]
    segments = jnp.ones((1, 5), jnp.int32)
    for got, want in zip(short_conv(*x, segments), short_conv(*x, segments, impl="reference")):  # noqa: B905
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="float32"):
        short_conv(*x, segments, impl="pallas")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        short_conv(*x, segments, impl="fast")
    with pytest.raises(ValueError, match=r"history has shape \(1, 2, 128\)"):
        short_conv(x[0], x[1], x[2][:, 1:], segments)
    narrow = [a[..., :100].astype(BF16) for a in x]
    with pytest.raises(ValueError, match="multiple of 128"):
        short_conv(*narrow, segments, impl="pallas")


@pytest.mark.parametrize("backward", [False, True])
def test_blocks_fit_the_chip_and_are_shared_by_its_cores(backward):
    chip = SimpleNamespace(vmem_capacity_bytes=64 << 20, num_cores=2)
    for groups, want in ((12, 6), (96, 12), (1, 1), (7, 7)):
        assert plan_for(8192, groups * 128, backward, chip) == Plan(2, want)
    plan = plan_for(100, 1536, backward, chip)
    assert plan.chunks == 1 and vmem_bytes(plan, backward) < 40 << 20
    small = SimpleNamespace(vmem_capacity_bytes=1 << 20, num_cores=1)
    with pytest.raises(ValueError, match="of 1048576 may be used"):
        plan_for(8192, 1536, backward, small)
