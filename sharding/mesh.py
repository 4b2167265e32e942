"""The device mesh. There always is one: a single device is the mesh (1, 1)."""

import math

import jax

AXES = ("data", "fsdp")


def make_mesh(data: int = 1, fsdp: int = 1, devices=None) -> jax.sharding.Mesh:
    """A mesh with explicit axes: `data` splits rows; `fsdp` splits rows and stored parameters.

    A size of -1 takes the devices that are left. Raises ValueError when the sizes do not multiply
    to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp}
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
            f"({devices[0].platform}); set --config.mesh.data and --config.mesh.fsdp so that "
            f"their product is {len(devices)}, or one of them to -1"
        )
    axis_types = (jax.sharding.AxisType.Explicit,) * len(AXES)
    return jax.make_mesh(tuple(sizes[a] for a in AXES), AXES, axis_types, devices=devices)
