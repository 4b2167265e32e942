"""The independent PyTorch implementation's outputs, row by row (tests/golden/README.md)."""

import pytest

from benchmarks.golden import all_lines, golden


@pytest.fixture(scope="module")
def lines():
    return all_lines()


def test_every_golden_array_is_within_its_bound(lines):
    """T06, T07, T32: text, left-padded, packed and image rows, loss, gradients, bfloat16."""
    assert {line.name: line.error for line in lines if not line.error <= line.bound} == {}


def test_every_golden_array_is_compared(lines):
    """No array of the file is left out: 21 gradients, 9 layers, 5 logits, the loss."""
    names = [line.name for line in lines]
    assert sum(n.startswith("gradient of ") for n in names) == sum(
        k.startswith("grad/") for k in golden()
    )
    assert sum(n.startswith("running sum") for n in names) == 9
    assert sum("logits" in n for n in names) == 4 and "loss" in names
