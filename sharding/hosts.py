"""Several processes make one run: how they meet, and which rows each of them brings."""

import math
import re

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.rules import ROWS, act_spec

SILENCE = 30  # seconds without a sign of a process after which the others stop


def join(processes: str) -> None:
    """Make this process one of several, before anything else asks for a device.

    processes: "auto" where the hosts of a pod know each other, or "HOST:PORT,n,i": the i-th of n
    processes, of which number 0 listens at that address. When one dies the others end with
    an error within about SILENCE seconds. Raises ValueError for anything else.
    """
    if processes == "auto":
        jax.distributed.initialize(heartbeat_timeout_seconds=SILENCE)
        return
    found = re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", processes)
    if found is None or int(found[3]) >= int(found[2]):
        raise ValueError(
            f"--processes={processes!r} is neither auto nor HOST:PORT,n,i with i from 0 to n - 1"
        )
    jax.distributed.initialize(
        found[1], int(found[2]), int(found[3]), heartbeat_timeout_seconds=SILENCE
    )


def row_share(mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """(i, n): this process brings the i-th of n equal parts of each batch's rows.

    Processes whose devices hold the same rows bring the same part, as where only `seq` or `tensor`
    spans them. Raises ValueError where processes share some rows and not all.
    """
    n = math.prod(mesh.shape[a] for a in ROWS)
    parts: dict[int, set[int]] = {}
    for device, (rows,) in NamedSharding(mesh, P(ROWS)).devices_indices_map((n,)).items():
        parts.setdefault(device.process_index, set()).add(rows.start or 0)
    shares = sorted({tuple(sorted(part)) for part in parts.values()})
    if sum(map(len, shares)) != n or len({len(s) for s in shares}) > 1:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} splits rows over {len(parts)} processes unevenly: make "
            "seq * tensor divide, or be a multiple of, the devices of one process"
        )
    return shares.index(tuple(sorted(parts[jax.process_index()]))), len(shares)


def furthest(n: int) -> int:
    """The largest of what all processes call this with, at least 0 and below 2^61."""
    # In two words: jax makes int32 of what travels.
    found = multihost_utils.process_allgather(np.array(divmod(n, 1 << 30), np.int32))
    return max(int(high) << 30 | int(low) for high, low in found.reshape(-1, 2))


def micro_batches(local: np.ndarray, accumulate: int, mesh: jax.sharding.Mesh) -> jax.Array:
    """[rows, T] of this process -> [accumulate, rows / accumulate, T] over the mesh."""
    return global_rows(local.reshape(accumulate, -1, local.shape[-1]), mesh, row_axis=1)


def global_rows(local: np.ndarray, mesh: jax.sharding.Mesh, row_axis: int = 0) -> jax.Array:
    """The array whose rows (along `row_axis`) are split over the mesh, from this process's part."""
    spec = act_spec("." * row_axis + "B")
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
