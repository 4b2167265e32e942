"""The released checkpoint's names and shapes, and how each maps to a leaf of our model.

One table, read in both directions. A released tensor's row-major dimensions are spelled in our
letters ("HkD" is [96 * 128, 7168]); our leaf's own letters end its name ("q_DHk"). The transform
is therefore a reshape and a transposition, and needs no case of its own.
"""

from typing import NamedTuple

import numpy as np

from k3_jax.checkpoint.safetensors import Stored, read_index
from k3_jax.config import ModelConfig
from k3_jax.model import cut_runs, plan_blocks
from k3_jax.quant import mxfp4

PREFIX = "language_model."
# Text alone is served here: these belong to the vision path.
IGNORED = ("vision_tower.", "mm_projector.")


class Entry(NamedTuple):
    """One released tensor: our leaf's name, where it goes in it, and its letters.

    `index` selects the leaf's leading axes (group, layer of a run, expert). `rows` is the part of a
    head's rows that goes to this leaf, for the one tensor that holds keys and values together.
    """

    leaf: str
    letters: str
    index: tuple[int, ...] = ()
    rows: str = ""


GLOBAL = {
    "model.embed_tokens.weight": ("embed_VD", "VD"),
    "lm_head.weight": ("head_DV", "VD"),
    "model.norm.weight": ("out_norm_D", "D"),
    "model.output_attn_res_norm.weight": ("out_res/norm_D", "D"),
    "model.output_attn_res_proj.weight": ("out_res/query_D", "D"),
}
LAYER = {
    "input_layernorm.weight": ("attn_norm_D", "D"),
    "post_attention_layernorm.weight": ("ffn_norm_D", "D"),
    "self_attention_res_norm.weight": ("attn_res/norm_D", "D"),
    "self_attention_res_proj.weight": ("attn_res/query_D", "D"),
    "mlp_res_norm.weight": ("ffn_res/norm_D", "D"),
    "mlp_res_proj.weight": ("ffn_res/query_D", "D"),
}
KDA = {
    "self_attn.q_proj.weight": ("attn/q_DHk", "HkD"),
    "self_attn.k_proj.weight": ("attn/k_DHk", "HkD"),
    "self_attn.v_proj.weight": ("attn/v_DHv", "HvD"),
    "self_attn.g_proj.weight": ("attn/gate_DHv", "HvD"),
    "self_attn.o_proj.weight": ("attn/out_HvD", "DHv"),
    "self_attn.f_a_proj.weight": ("attn/decay_a_DR", "RD"),
    "self_attn.f_b_proj.weight": ("attn/decay_b_RHk", "HkR"),
    "self_attn.b_proj.weight": ("attn/beta_DH", "HD"),
    "self_attn.q_conv1d.weight": ("attn/q_conv_WHk", "HkW"),
    "self_attn.k_conv1d.weight": ("attn/k_conv_WHk", "HkW"),
    "self_attn.v_conv1d.weight": ("attn/v_conv_WHv", "HvW"),
    "self_attn.A_log": ("attn/a_log_H", "H"),
    "self_attn.dt_bias": ("attn/decay_bias_Hk", "Hk"),
    "self_attn.o_norm.weight": ("attn/out_norm_v", "v"),
}
MLA = {
    "self_attn.q_a_proj.weight": ("attn/q_a_DQ", "QD"),
    "self_attn.q_a_layernorm.weight": ("attn/q_norm_Q", "Q"),
    "self_attn.q_b_proj.weight": ("attn/q_b_QHq", "HqQ"),
    "self_attn.kv_a_proj_with_mqa.weight": ("attn/kv_a_DM", "MD"),
    "self_attn.kv_a_layernorm.weight": ("attn/kv_norm_C", "C"),
    "self_attn.g_proj.weight": ("attn/gate_DHv", "HvD"),
    "self_attn.o_proj.weight": ("attn/out_HvD", "DHv"),
}
# [H * (k + v), C]: each head's key rows, then its value rows.
KV_B = "self_attn.kv_b_proj.weight"
KV_B_PARTS = (("attn/k_b_CHk", "HkC", "k"), ("attn/v_b_CHv", "HvC", "v"))
DENSE = {
    "mlp.gate_proj.weight": ("ffn/gate_DF", "FD"),
    "mlp.up_proj.weight": ("ffn/up_DF", "FD"),
    "mlp.down_proj.weight": ("ffn/down_FD", "DF"),
}
MOE = {
    "block_sparse_moe.gate.weight": ("ffn/router_DE", "ED"),
    "block_sparse_moe.gate.e_score_correction_bias": ("ffn/router_bias_E", "E"),
    "block_sparse_moe.routed_expert_down_proj.weight": ("ffn/down_DL", "LD"),
    "block_sparse_moe.routed_expert_norm.weight": ("ffn/latent_norm_L", "L"),
    "block_sparse_moe.routed_expert_up_proj.weight": ("ffn/up_LD", "DL"),
    "block_sparse_moe.shared_experts.gate_proj.weight": ("ffn/shared/gate_DF", "FD"),
    "block_sparse_moe.shared_experts.up_proj.weight": ("ffn/shared/up_DF", "FD"),
    "block_sparse_moe.shared_experts.down_proj.weight": ("ffn/shared/down_FD", "DF"),
}
EXPERT = {
    "w1": ("ffn/gate_ELF", "FL"),
    "w3": ("ffn/expert_up_ELF", "FL"),
    "w2": ("ffn/expert_down_EFL", "LF"),
}


def name_table(c: ModelConfig) -> dict[str, list[Entry]]:
    """Released name (routed experts: without `_packed` or `_scale`) -> the leaves it fills."""
    table = {PREFIX + name: [Entry(*entry)] for name, entry in GLOBAL.items()}
    for i, (folder, stack) in enumerate(layer_places(c)):
        released = f"{PREFIX}model.layers.{i}."
        is_mla, is_dense = i in c.mla_layers, i < c.n_dense
        named = LAYER | (MLA if is_mla else KDA) | (DENSE if is_dense else MOE)
        for name, (leaf, letters) in named.items():
            table[released + name] = [Entry(f"{folder}/{leaf}", letters, stack)]
        if is_mla:
            table[released + KV_B] = [
                Entry(f"{folder}/{leaf}", letters, stack, rows)
                for leaf, letters, rows in KV_B_PARTS
            ]
        if not is_dense:
            for e in range(c.moe.n_experts):
                for name, (leaf, letters) in EXPERT.items():
                    full = f"{released}block_sparse_moe.experts.{e}.{name}.weight"
                    table[full] = [Entry(f"{folder}/{leaf}", letters, (*stack, e))]
    return table


def layer_places(c: ModelConfig) -> list[tuple[str, tuple[int, int]]]:
    """For each layer, its folder in our tree and its index on the two stacked axes."""
    places = {}
    for b, plan in enumerate(plan_blocks(c)):
        for p, part in enumerate(plan):
            for g, group in enumerate(part):
                for r, run in enumerate(cut_runs(c, group, p == 0)):
                    folder = f"blocks/{b}/parts/{p}/runs/{r}"
                    places |= {layer: (folder, (g, j)) for j, layer in enumerate(run)}
    return [places[i] for i in range(c.n_layers)]


def load(directory, c: ModelConfig, leaves: dict) -> dict[str, np.ndarray]:
    """A released-format directory as numpy arrays, by the names of `leaves` (shapes and dtypes).

    Packed experts are widened, which is exact. Every tensor must be used and every leaf filled;
    raises ValueError naming what is missing, left over, of another shape or would be rounded.
    """
    tensors = read_index(directory)
    table = name_table(c)
    _check_names(table, tensors)
    out = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    for name, entries in table.items():
        array = _read(name, tensors)
        for entry in entries:
            target = out[entry.leaf]
            if np.dtype(array.dtype).itemsize > target.dtype.itemsize:
                raise ValueError(
                    f"{name} is {array.dtype}: {entry.leaf} as {target.dtype} would round it"
                )
            target[entry.index] = to_ours(name, array, entry, target[entry.index].shape, c)
    return out


def to_ours(name, array, entry: Entry, shape, c: ModelConfig) -> np.ndarray:
    """A released tensor in our leaf's shape and letter order."""
    # The leading axes that `index` selects are named by no letter of the released tensor.
    ours = "".join(a for a in entry.leaf.rsplit("_", 1)[1] if a in entry.letters)
    sizes = dict(zip(ours, shape, strict=True))
    if name.endswith("A_log"):
        array = _heads_only(name, array, sizes["H"])
    if entry.rows:
        k, v = c.mla.key_dim, c.mla.value_dim
        array = _sized(name, array, (sizes["H"], k + v, sizes["C"]))
        array = array[:, :k] if entry.rows == "k" else array[:, k:]
    array = _sized(name, array, tuple(sizes[a] for a in entry.letters))
    return array.transpose([entry.letters.index(a) for a in ours])


def _sized(name, array, shape):
    if array.size != np.prod(shape):
        raise ValueError(f"{name} has shape {array.shape}; the configuration wants {shape}")
    return array.reshape(shape)


def _heads_only(name, array, n_heads):
    """`A_log` is stored padded with zeros to a multiple of 128 entries (T14)."""
    if array.size < n_heads or np.any(array[n_heads:]):
        raise ValueError(f"{name} of {array.size} entries is not {n_heads} heads and zeros")
    return array[:n_heads]


def _read(name: str, tensors: dict[str, Stored]) -> np.ndarray:
    if name in tensors:
        return tensors[name].read()
    packed, scales = tensors[name + "_packed"], tensors[name + "_scale"]
    return mxfp4.unpack(packed.read(), scales.read()).astype(np.dtype("bfloat16"))


def _check_names(table, tensors):
    def is_there(name):
        return name in tensors or (name + "_packed" in tensors and name + "_scale" in tensors)

    if lost := [name for name in table if not is_there(name)]:
        raise ValueError(f"the checkpoint lacks {len(lost)} tensors, such as {lost[0]}")
    known = {n + suffix for n in table for suffix in ("", "_packed", "_scale")}
    if extra := [n for n in tensors if n not in known and not n.startswith(IGNORED)]:
        raise ValueError(f"the checkpoint has {len(extra)} tensors of no use, such as {extra[0]}")
