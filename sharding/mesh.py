"""The device mesh. There always is one: a single device is a mesh of ones.

data     rows; weights are copied along it. The axis that may span slices of a pod
pipeline AttnRes blocks that are alike, and rows of what is not (`sharding.pipeline`)
fsdp     rows; weights rest split over it and are gathered where they are used
expert   rows; routed experts live on it, and the other weights rest split over it too
seq      the time axis of long rows
tensor   heads, hidden channels and the slots of a cache (serving); routed experts too
"""

import math
import re

import jax
import numpy as np
from jax.experimental import mesh_utils

AXES = ("data", "pipeline", "fsdp", "expert", "seq", "tensor")


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    seq: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    slices: int = 1,
    devices=None,
) -> jax.sharding.Mesh:
    """A mesh with explicit axes. A size of -1 takes the devices that are left.

    slices: of a pod, joined by the data-centre network; they split `data`, whose neighbours are
    far apart, and no other axis. Raises ValueError when the sizes do not multiply to the number of
    devices or `data` does not divide over the slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(AXES, (data, pipeline, fsdp, expert, seq, tensor), strict=True))
    unknown = [a for a in AXES if sizes[a] == -1]
    wrong = {a: n for a, n in sizes.items() if n < 1 and n != -1}
    if wrong or len(unknown) > 1:
        raise ValueError(f"mesh sizes {sizes}: each must be positive, and at most one may be -1")
    known = math.prod(n for n in sizes.values() if n != -1)
    if unknown:
        sizes[unknown[0]] = max(len(devices) // known, 1)
    total = math.prod(sizes.values())
    if total != len(devices):
        raise ValueError(
            f"mesh sizes {sizes} need {total} devices, but {len(devices)} are here "
            f"({devices[0].platform}): their product must be {len(devices)}, and one of them may "
            "be -1, the devices that are left"
        )
    if slices < 1 or sizes["data"] % slices:
        raise ValueError(
            f"mesh.data={sizes['data']} does not divide over mesh.slices={slices}: only `data` "
            "may span slices"
        )
    return jax.sharding.Mesh(
        _arranged(sizes, slices, devices), AXES, (jax.sharding.AxisType.Explicit,) * len(AXES)
    )


def mesh_sizes(text: str) -> dict[str, int]:
    """ "data=2,tensor=-1" -> {"data": 2, "tensor": -1}, as `make_mesh` takes them."""
    found = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in found or not re.fullmatch(r"-?\d+", size):
            raise ValueError(
                f"--mesh={text!r}: {part!r} is not AXIS=SIZE with an axis of its own among "
                f"{', '.join(AXES)}"
            )
        found[axis] = int(size)
    return found


def _arranged(sizes: dict[str, int], slices: int, devices) -> np.ndarray:
    """Devices so that neighbours on an axis are near each other; `data` outermost."""
    shape = tuple(sizes.values())
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    within = (sizes["data"] // slices, *shape[1:])
    across = (slices, *(1,) * (len(shape) - 1))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )
