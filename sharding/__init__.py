"""Meshes and placement: knows axes and letters, nothing of K3."""

from sharding.mesh import AXES, make_mesh
from sharding.rules import ROUTED, TOKENS, act_spec, gathered, on_shards, present, weight_spec

__all__ = [
    "AXES",
    "ROUTED",
    "TOKENS",
    "act_spec",
    "gathered",
    "make_mesh",
    "on_shards",
    "present",
    "weight_spec",
]
