import jax
import pytest


@pytest.fixture(scope="module")
def quick_compiler():
    """An unrolled kernel is a long program for a CPU; and float64 for the oracle."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)
