"""A checkpoint's content as a table: tensors, dtypes, bytes, parameters; and is it whole?"""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass, field

from k3_jax.checkpoint.hf import IGNORED, PREFIX, SCALES, match, name_table
from k3_jax.checkpoint.plan import abstract_leaves
from k3_jax.checkpoint.safetensors import FormatError
from k3_jax.checkpoint.views import View
from k3_jax.config import ModelConfig

DIGITS = re.compile(r"\d+")  # without them there are few different names
RELEASED = 497_220, 1_560_860_324_864  # tensors and bytes of Kimi K3
# In this order, the first group with a part that the name contains.
GROUPS = {
    "vision": IGNORED,
    "embedding": ("embed_tokens",),
    "output head": ("lm_head",),
    "routed experts": (".experts.",),
    "shared experts": (".shared_experts.",),
    "latent projections": (".routed_expert_",),
    "router": (".block_sparse_moe.gate.",),
    "dense FFN": (".mlp.",),
    "KDA": (".self_attn.",),
    "MLA": (),
    "norms, residual queries": ("norm", "_res_"),
    "unknown": ("",),
}


@dataclass
class Group:
    """One row of the table. Scales are no parameters, and a byte of codes is two."""

    tensors: int = 0
    n_bytes: int = 0
    parameters: int = 0
    dtypes: Counter = field(default_factory=Counter)


@functools.cache
def _group(key: str) -> str:
    return next(g for g, parts in GROUPS.items() if any(part in f".{key}" for part in parts))


def count(view: View) -> dict[str, Group]:
    """The rows that are not empty."""
    mla = {n.split(".self_attn.")[0] for n in view.tensors if ".self_attn.kv_b_proj." in n}
    groups = {name: Group() for name in GROUPS}
    for key, info in view.tensors.items():
        where = _group(DIGITS.sub("0", key))
        if where == "KDA" and key.split(".self_attn.")[0] in mla:
            where = "MLA"
        group, n = groups[where], math.prod(info.shape)
        group.tensors += 1
        group.n_bytes += n * info.dtype.itemsize
        group.dtypes[str(info.dtype)] += 1
        if info.dtype == "uint8":
            n = 0 if key.endswith(SCALES) else 2 * n
        group.parameters += n
    return {name: group for name, group in groups.items() if group.tensors}


def active_parameters(groups: dict[str, Group], c: ModelConfig) -> int:
    """Of a token, as the report counts them: with the head, without embedding and vision."""
    total = sum(g.parameters for name, g in groups.items() if name not in ("vision", "embedding"))
    routed = groups["routed experts"].parameters if "routed experts" in groups else 0
    return total - routed + routed * c.moe.n_active // c.moe.n_experts


def completeness(view: View) -> str:
    """One sentence."""
    if view.config is None:
        return "whether it is complete cannot be told: there is no config.json"
    try:
        leaves, table = abstract_leaves(view.config), name_table(view.config)
        match(view.tensors, table, leaves, view.config, allow_rounded=True)
    except FormatError as e:
        return f"not a complete K3 of its configuration: {e}"
    n_bytes = sum(math.prod(t.shape) * t.dtype.itemsize for t in view.tensors.values())
    if (len(view.tensors), n_bytes) == RELEASED:
        return "complete: the released Kimi K3 by names, shapes and bytes"
    has_vision = any(key.startswith(IGNORED) for key in view.tensors)
    vision = "with vision tensors" if has_vision else "without vision"
    return f"complete K3 of its configuration, {vision}"


def lines(view: View) -> list[str]:
    """The table and what is known beside it."""
    groups = count(view)
    total = Group()
    for group in groups.values():
        total.tensors += group.tensors
        total.n_bytes += group.n_bytes
        total.parameters += group.parameters
        total.dtypes += group.dtypes
    row = "{:<24} {:>9} {:>22} {:>22}  {}".format
    out = [row("group", "tensors", "bytes", "parameters", "dtypes")]
    for name, group in [*groups.items(), ("total", total)]:
        dtypes = ", ".join(f"{n:,} {dtype}" for dtype, n in sorted(group.dtypes.items()))
        numbers = (f"{x:,}" for x in (group.tensors, group.n_bytes, group.parameters))
        out.append(row(name, *numbers, dtypes))
    if view.config is not None:
        out.append(f"active parameters a token: {active_parameters(groups, view.config):,}")
    prefixed = any(key.startswith(PREFIX) for key in view.tensors)
    out.append(f"names are {'with' if prefixed else 'without'} the prefix {PREFIX!r}")
    out.append(completeness(view))
    return out
