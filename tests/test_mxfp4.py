"""MXFP4: bytes to numbers and back (T19)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_jax.quant.mxfp4 import BLOCK, pack, unpack


def block(*values):
    out = np.zeros(BLOCK, np.float32)
    out[: len(values)] = values
    return out


def test_the_low_nibble_is_the_even_element():
    """0x21 is [0.5, 1.0]: code 1, then code 2."""
    packed = np.full(BLOCK // 2, 0x21, np.uint8)
    values = unpack(packed, np.array([127], np.uint8))
    assert values[:4].tolist() == [0.5, 1.0, 0.5, 1.0]


@given(st.integers(0, 2**32 - 1), st.sampled_from(["floor", "ceil"]))
def test_what_is_on_the_grid_comes_back_exactly(seed, rule):
    """Signs of zero too. Scales stay as they are when a block uses its largest magnitudes."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (3, 2 * BLOCK // 2), np.uint8)
    scales = rng.integers(3, 253, (3, 2)).astype(np.uint8)
    values = unpack(packed, scales)
    again = unpack(*pack(values, rule))
    assert np.array_equal(values.view(np.uint32), again.view(np.uint32))


@pytest.mark.parametrize(
    ("largest", "floor", "ceil"),
    [
        (0.7, -3, -3),
        (0.75, -3, -3),
        (1.0, -2, -2),
        (5.9, 0, 0),
        (6.0, 0, 0),
        (6.1, 0, 1),
        (1e-30, -102, -102),
    ],
)
def test_the_exponent_is_the_floor_or_the_least_that_clips_nothing(largest, floor, ceil):
    """T19: an integer cast would truncate toward zero for scales below 1."""
    for rule, exponent in (("floor", floor), ("ceil", ceil)):
        _, scales = pack(block(largest, 0.1 * largest), rule)
        assert scales[0] == exponent + 127


def test_ceil_clips_nothing_and_floor_saturates_at_six_units():
    packed, scales = pack(block(7.9), "floor")
    assert unpack(packed, scales)[0] == 6.0
    packed, scales = pack(block(7.9), "ceil")
    assert unpack(packed, scales)[0] == 8.0


def test_ties_go_to_the_even_code():
    """Between 2 and 3, and between 3 and 4, with 4 holding the scale at 1."""
    values = unpack(*pack(block(4, 2.5, 3.5, 5.0, 0.25, 0.75, -2.5)))
    assert values[:7].tolist() == [4, 2, 4, 4, 0, 1, -2]


def test_a_block_of_zeros_stays_zero():
    packed, scales = pack(block())
    assert scales[0] == 0 and not unpack(packed, scales).any()


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        pack(block(np.nan))
    with pytest.raises(ValueError, match="255, which is NaN"):
        unpack(np.zeros(16, np.uint8), np.array([255], np.uint8))
    with pytest.raises(ValueError, match="not a multiple of 32"):
        pack(np.zeros(33, np.float32))
    with pytest.raises(ValueError, match="rule='round' is not one of"):
        pack(block(1), "round")
    with pytest.raises(ValueError, match="do not belong together"):
        unpack(np.zeros(16, np.uint8), np.zeros(2, np.uint8))
