"""Print which update every parameter gets: python -m k3_jax.optim configs/k3.py"""

import runpy
import sys

import jax

from k3_jax.config import TrainConfig, from_dict
from k3_jax.model import abstract
from k3_jax.optim.coverage import coverage, lines
from k3_jax.tree import named_leaves
from sharding import make_mesh

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m k3_jax.optim CONFIG_FILE")
    config = from_dict(TrainConfig, runpy.run_path(sys.argv[1])["get_config"]())
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        leaves = named_leaves(abstract(config.model))
    print("\n".join(lines(coverage(leaves, config.optim))))
