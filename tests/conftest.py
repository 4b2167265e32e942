"""Eight CPU devices, exact matrix products, and the meshes that tests share."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

# Workers and the programs that tests start compile the same things: one folder keeps the results.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "xla"),
)

import jax  # noqa: E402
import pytest  # noqa: E402

from sharding import make_mesh  # noqa: E402


@pytest.fixture
def one_device():
    """The mesh (1, 1), set for the test."""
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])) as mesh:
        yield mesh


@pytest.fixture
def four_devices():
    """The mesh (2, 2), set for the test."""
    with jax.set_mesh(make_mesh(2, 2, devices=jax.devices()[:4])) as mesh:
        yield mesh


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs():
    """What a module compiled goes when it ends. Every program takes memory maps, of which Linux
    gives a process 65,530; the compiler ends a process that has none left by a segmentation
    fault."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compiler():
    """Half the compile time or less, for programs that are long for what they compute."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
