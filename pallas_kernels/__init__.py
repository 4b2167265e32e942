"""Kernels of Kimi K3: each is a function of arrays, with its definition beside it."""

from pallas_kernels.kda import kda

__all__ = ["kda"]
