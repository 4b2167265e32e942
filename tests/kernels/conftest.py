import jax
import pytest


@pytest.fixture(scope="module")
def quick_compiler(quick_compiler):
    """An unrolled kernel is a long program for a CPU; and float64 for the oracle."""
    with jax.enable_x64(True):
        yield
