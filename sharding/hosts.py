"""Each process's own rows become arrays over the whole mesh."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.rules import ROWS


def global_rows(local: np.ndarray, mesh: jax.sharding.Mesh, row_axis: int = 0) -> jax.Array:
    """The array whose rows (along `row_axis`) are split over the mesh, from this process's part."""
    spec = P(*(None,) * row_axis, ROWS)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
