"""Public figures of accelerators, by JAX's `device_kind`.

TPU: Google's pages on system architecture (docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x});
a TPU7x device is one of a chip's two TensorCores, with half of the chip's figures. NVIDIA: data
sheets, SXM, without sparsity.
"""

from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """One JAX device.

    flops: dense bfloat16, 1/s. memory: of HBM, bytes. bandwidth: of HBM, bytes/s. links: bytes/s
    that leave the device over all its links to other chips (half of what Google calls
    bidirectional). torus: dimensions of the torus that the links make. network: bytes/s of the
    data-centre network that joins slices, a device's share.
    """

    flops: float
    memory: int | None = None
    bandwidth: float | None = None
    links: float | None = None
    torus: int | None = None
    network: float | None = None

    def closes_ring(self, side: int) -> bool:
        """Whether links join the ends of a slice's dimension of `side` chips.

        Three-dimensional slices are made of cubes of 4 x 4 x 4; of the two-dimensional ones only
        the whole pod's 16 chips are joined.
        """
        return side % 4 == 0 if self.torus == 3 else side == 16


GIB = 1 << 30
V5E = Chip(197e12, 16 * GIB, 819e9, 200e9, 2, 25e9 / 8)
V5P = Chip(459e12, 95 * GIB, 2765e9, 600e9, 3, 50e9 / 8)
V6E = Chip(918e12, 32 * GIB, 1638e9, 400e9, 2, 100e9 / 8)
TPU7X = Chip(1153e12, 96 * GIB, 3690e9, 300e9, 3, 50e9 / 8)
CHIPS = {
    "TPU v4": Chip(275e12, 32 * GIB, 1200e9, 300e9, 3),
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
    "TPU7x": TPU7X,
    "NVIDIA A100-SXM4-80GB": Chip(312e12),
    "NVIDIA H100 80GB HBM3": Chip(989e12),
    "NVIDIA H200": Chip(989e12),
}


LIBTPU = "libtpu==0.0.52"
# Chips of this machine are needed only to run a program. A process that compiles for others sets
# these before it first asks: libtpu then neither looks for chips nor warns that it knows of none.
LOOK_FOR_NONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
}


def peak_flops() -> float | None:
    """Peak bfloat16 FLOP/s of one device here, or None where it is not known (such as a CPU)."""
    chip = CHIPS.get(jax.devices()[0].device_kind)
    return chip and chip.flops
