"""What the programs' logs say."""

import logging

from absl import logging as absl_logging


def quiet_libraries():
    """Warnings of all, as libraries tell of every file they write; and our packages' choices.

    Which form of a mechanism runs (`impl="auto"`) is told at INFO, once.
    """
    absl_logging.set_verbosity(absl_logging.WARNING)
    for package in ("k3_jax", "pallas_kernels", "sharding"):
        logging.getLogger(package).setLevel(logging.INFO)
