"""Meshes and placement: knows axes and letters, nothing of K3."""

from sharding.mesh import AXES, make_mesh, mesh_sizes
from sharding.rules import (
    ACTIVATION,
    ROUTED,
    TOKENS,
    act_spec,
    gathered,
    on_shards,
    present,
    weight_spec,
)

__all__ = [
    "ACTIVATION",
    "AXES",
    "ROUTED",
    "TOKENS",
    "act_spec",
    "gathered",
    "make_mesh",
    "mesh_sizes",
    "on_shards",
    "present",
    "weight_spec",
]
