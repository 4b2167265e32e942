"""Muon: which matrices it updates, and how. Per head for attention's queries, keys and values.

Report section 2.5 has the momentum of q, k and v split by heads, each head orthogonalised by
itself. It does not say more; chosen here: MLA's q_b, and k_b and v_b apart, go by heads too; all
other matrices but embedding, head and router go whole, each routed expert by itself; five
Newton-Schulz steps with the coefficients of optax, Nesterov momentum of 0.95 (Jordan 2024).
"""

import functools
import math
from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from k3_jax.config import OptimConfig
from k3_jax.tree import named_leaves, with_leaves
from sharding.matrices import Stack, on_whole

# The letters of a matrix's rows and of its columns. Letters in neither, and the axes that stacking
# puts in front, count matrices.
WHOLE = {
    **dict.fromkeys(("q_DHk", "k_DHk"), ("D", "Hk")),
    **dict.fromkeys(("v_DHv", "gate_DHv"), ("D", "Hv")),
    "decay_a_DR": ("D", "R"),
    "decay_b_RHk": ("R", "Hk"),
    "beta_DH": ("D", "H"),
    "out_HvD": ("Hv", "D"),
    "q_a_DQ": ("D", "Q"),
    "q_b_QHq": ("Q", "Hq"),
    "kv_a_DM": ("D", "M"),
    "k_b_CHk": ("C", "Hk"),
    "v_b_CHv": ("C", "Hv"),
    **dict.fromkeys(("gate_DF", "up_DF"), ("D", "F")),
    "down_FD": ("F", "D"),
    "down_DL": ("D", "L"),
    "up_LD": ("L", "D"),
    **dict.fromkeys(("gate_ELF", "expert_up_ELF"), ("L", "F")),
    "expert_down_EFL": ("F", "L"),
}
PER_HEAD = {
    **dict.fromkeys(("q_DHk", "k_DHk"), ("D", "k")),
    "v_DHv": ("D", "v"),
    "q_b_QHq": ("Q", "q"),
    "k_b_CHk": ("C", "k"),
    "v_b_CHv": ("C", "v"),
}
ADAMW = {
    *("embed_VD", "head_DV", "router_DE", "router_bias_E", "a_log_H", "decay_bias_Hk"),
    *("q_conv_WHk", "k_conv_WHk", "v_conv_WHv", "norm_D", "query_D", "attn_norm_D", "ffn_norm_D"),
    *("out_norm_D", "out_norm_v", "q_norm_Q", "kv_norm_C", "latent_norm_L"),
}
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
CHUNK_BYTES = 1 << 27  # of matrices that a device orthogonalises at a time


class Rule(NamedTuple):
    """The update of one parameter: "muon" on matrices of rows and columns (letters), or "adamw"."""

    optimizer: str
    rows: str = ""
    columns: str = ""


def rule(name: str, kind: str) -> Rule:
    """The one rule of the parameter of this path under `optim.name` = kind. Raises ValueError."""
    own = name.rsplit("/", 1)[-1]
    if (own in WHOLE) == (own in ADAMW):
        raise ValueError(
            f"parameter {name!r} must be in one of k3_jax.optim.muon's WHOLE and ADAMW: "
            f"{'both have' if own in ADAMW else 'neither has'} {own!r}"
        )
    if kind == "adamw" or own in ADAMW:
        return Rule("adamw")
    per_head = PER_HEAD if kind == "muon_per_head" else {}
    return Rule("muon", *per_head.get(own, WHOLE[own]))


def axes(name: str, ndim: int, letters: str) -> tuple[int, ...]:
    """Where these letters of a parameter's name stand in its array, stacked axes before them."""
    own = name.rsplit("_", 1)[-1]
    return tuple(ndim - len(own) + own.index(a) for a in letters)


def orthogonalize(c: OptimConfig) -> optax.GradientTransformation:
    """M = U S V^T -> update_rms sqrt(max(rows, columns)) U V^T (roughly), matrix by matrix.

    An orthogonal matrix has a root mean square of 1 / sqrt(max(rows, columns)). The factor makes
    it `update_rms`; 0.2 is about AdamW's, so both share a learning rate (arXiv 2502.16982).

    optax.contrib.muon as a whole does not run on this mesh: with weights split over fsdp or
    expert its reshapes and products raise ShardingTypeError, and a gather before it would have
    every device hold and orthogonalise everything. So its Newton-Schulz (`scale_by_muon`, with a
    momentum of 0) runs within `on_whole`; the momentum, element by element, is optax.trace.
    """

    def update(updates, state, params=None):
        leaves, kinds = named_leaves(updates), defaultdict(list)
        for name, x in leaves.items():
            found = rule(name, c.name)
            stack = Stack(x, axes(name, x.ndim, found.rows + found.columns))
            kinds[stack.kind, len(found.rows)].append((name, stack))
        for (_, n_rows), members in kinds.items():
            names, stacks = zip(*members, strict=True)
            newton_schulz = functools.partial(_orthogonal, n_rows=n_rows, c=c)
            leaves |= zip(names, on_whole(newton_schulz, stacks), strict=True)
        return with_leaves(updates, leaves), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _orthogonal(x, n_rows: int, c: OptimConfig):
    """[n, *rows, *columns], whole, a part of them at a time."""
    ends = tuple(range(x.ndim - 1))
    tx = scale_by_muon(
        (COEFFICIENTS,) * STEPS,
        STEPS,
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=MuonDimensionNumbers(ends[:n_rows], ends[n_rows:]),
    )
    rows, columns = math.prod(x.shape[1 : 1 + n_rows]), math.prod(x.shape[1 + n_rows :])
    scale = c.update_rms * math.sqrt(max(rows, columns))

    def one(matrix):
        # float32 means float32: matrix units that would round the operands are told not to.
        with jax.default_matmul_precision("highest" if c.ns_dtype == "float32" else None):
            found, _ = tx.update(matrix, tx.init(matrix))
        return found

    n_bytes = rows * columns * jnp.dtype(c.ns_dtype).itemsize
    found = jax.lax.map(one, x.astype(c.ns_dtype), batch_size=max(CHUNK_BYTES // n_bytes, 1))
    return scale * found.astype(x.dtype)
