"""The released checkpoint's names and shapes, and how each maps to a leaf of our model.

One table, read in both directions. A released tensor's row-major dimensions are spelled in our
letters ("HkD" is [96 * 128, 7168]); our leaf's own letters end its name ("q_DHk"). The transform
is therefore a reshape and a transposition, and needs no case of its own.
"""

import math
from typing import NamedTuple

import numpy as np

from k3_jax.checkpoint.safetensors import FormatError, read_index
from k3_jax.config import ModelConfig
from k3_jax.model import layer_places
from k3_jax.quant import mxfp4

PREFIX = "language_model."
# The text model has no place for these: they belong to the vision path.
IGNORED = ("vision_tower.", "mm_projector.")
PACKED, SCALES = "_packed", "_scale"  # what a routed expert's name ends with where it is MXFP4


class Entry(NamedTuple):
    """One released tensor: our leaf's name, where it goes in it, and its dimensions.

    `dims` spells the released shape: "Hk 1 W" is [H * k, 1, W]. `index` selects the leaf's leading
    axes (group, layer of a run, expert). `rows` is the part of a head's rows that goes to this
    leaf, for the one tensor that holds keys and values together.
    """

    leaf: str
    dims: str
    index: tuple[int, ...] = ()
    rows: str = ""

    @property
    def letters(self) -> str:
        return "".join(filter(str.isalpha, self.dims))

    @property
    def ours(self) -> str:
        """The letters in our leaf's order, without the leading axes that `index` selects."""
        return "".join(a for a in self.leaf.rsplit("_", 1)[1] if a in self.dims)


GLOBAL = {
    "model.embed_tokens.weight": ("embed_VD", "V D"),
    "lm_head.weight": ("head_DV", "V D"),
    "model.norm.weight": ("out_norm_D", "D"),
    "model.output_attn_res_norm.weight": ("out_res/norm_D", "D"),
    "model.output_attn_res_proj.weight": ("out_res/query_D", "1 D"),
}
LAYER = {
    "input_layernorm.weight": ("attn_norm_D", "D"),
    "post_attention_layernorm.weight": ("ffn_norm_D", "D"),
    "self_attention_res_norm.weight": ("attn_res/norm_D", "D"),
    "self_attention_res_proj.weight": ("attn_res/query_D", "1 D"),
    "mlp_res_norm.weight": ("ffn_res/norm_D", "D"),
    "mlp_res_proj.weight": ("ffn_res/query_D", "1 D"),
}
KDA = {
    "self_attn.q_proj.weight": ("attn/q_DHk", "Hk D"),
    "self_attn.k_proj.weight": ("attn/k_DHk", "Hk D"),
    "self_attn.v_proj.weight": ("attn/v_DHv", "Hv D"),
    "self_attn.g_proj.weight": ("attn/gate_DHv", "Hv D"),
    "self_attn.o_proj.weight": ("attn/out_HvD", "D Hv"),
    "self_attn.f_a_proj.weight": ("attn/decay_a_DR", "R D"),
    "self_attn.f_b_proj.weight": ("attn/decay_b_RHk", "Hk R"),
    "self_attn.b_proj.weight": ("attn/beta_DH", "H D"),
    "self_attn.q_conv1d.weight": ("attn/q_conv_WHk", "Hk 1 W"),
    "self_attn.k_conv1d.weight": ("attn/k_conv_WHk", "Hk 1 W"),
    "self_attn.v_conv1d.weight": ("attn/v_conv_WHv", "Hv 1 W"),
    "self_attn.A_log": ("attn/a_log_H", "H"),
    "self_attn.dt_bias": ("attn/decay_bias_Hk", "Hk"),
    "self_attn.o_norm.weight": ("attn/out_norm_v", "v"),
}
MLA = {
    "self_attn.q_a_proj.weight": ("attn/q_a_DQ", "Q D"),
    "self_attn.q_a_layernorm.weight": ("attn/q_norm_Q", "Q"),
    "self_attn.q_b_proj.weight": ("attn/q_b_QHq", "Hq Q"),
    "self_attn.kv_a_proj_with_mqa.weight": ("attn/kv_a_DM", "M D"),
    "self_attn.kv_a_layernorm.weight": ("attn/kv_norm_C", "C"),
    "self_attn.g_proj.weight": ("attn/gate_DHv", "Hv D"),
    "self_attn.o_proj.weight": ("attn/out_HvD", "D Hv"),
}
# [H * (k + v), C]: each head's key rows, then its value rows.
KV_B = "self_attn.kv_b_proj.weight"
KV_B_PARTS = (("attn/k_b_CHk", "Hk C", "k"), ("attn/v_b_CHv", "Hv C", "v"))
DENSE = {
    "mlp.gate_proj.weight": ("ffn/gate_DF", "F D"),
    "mlp.up_proj.weight": ("ffn/up_DF", "F D"),
    "mlp.down_proj.weight": ("ffn/down_FD", "D F"),
}
MOE = {
    "block_sparse_moe.gate.weight": ("ffn/router_DE", "E D"),
    "block_sparse_moe.gate.e_score_correction_bias": ("ffn/router_bias_E", "E"),
    "block_sparse_moe.routed_expert_down_proj.weight": ("ffn/down_DL", "L D"),
    "block_sparse_moe.routed_expert_norm.weight": ("ffn/latent_norm_L", "L"),
    "block_sparse_moe.routed_expert_up_proj.weight": ("ffn/up_LD", "D L"),
    "block_sparse_moe.shared_experts.gate_proj.weight": ("ffn/shared/gate_DF", "F D"),
    "block_sparse_moe.shared_experts.up_proj.weight": ("ffn/shared/up_DF", "F D"),
    "block_sparse_moe.shared_experts.down_proj.weight": ("ffn/shared/down_FD", "D F"),
}
EXPERT = {
    "w1": ("ffn/gate_ELF", "F L"),
    "w3": ("ffn/expert_up_ELF", "F L"),
    "w2": ("ffn/expert_down_EFL", "L F"),
}


def name_table(c: ModelConfig) -> dict[str, list[Entry]]:
    """Released name (routed experts: as if they were not packed) -> the leaves it fills."""
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


def shape_of(entry: Entry, leaf_shape, c: ModelConfig) -> tuple[int, ...]:
    """The released tensor's shape, from that of our whole leaf."""
    sizes = dict(zip(entry.ours, leaf_shape[len(entry.index) :], strict=True))
    if entry.rows:
        sizes["k"] = sizes["v"] = c.mla.key_dim + c.mla.value_dim
    return tuple(
        math.prod(1 if a == "1" else sizes[a] for a in group) for group in entry.dims.split()
    )


class Matched(NamedTuple):
    """What a checkpoint's tensors are to the model.

    `keys`: for each name of the table the keys that hold it, one, or those of packed codes and
    scales. `dtypes`: of each leaf, as stored; uint8 where packed. `kept`: keys of no leaf, which
    are carried along as they are.
    """

    keys: dict[str, tuple[str, ...]]
    dtypes: dict[str, np.dtype]
    kept: tuple[str, ...]


def match(tensors, table, leaves: dict, c: ModelConfig, *, allow_rounded=False) -> Matched:
    """Gives every tensor its place. `leaves`: shapes by name, bfloat16 but for what is float32.

    What a tensor is, is decided by what is stored, not by the configuration: packed or not,
    bfloat16 or float32, with the multimodal prefix or without. Raises FormatError naming a tensor
    that is missing, of no use, there twice, or of a shape or dtype other than expected.

    allow_rounded: takes bfloat16 for parameters that the release keeps in float32.
    """
    keys, kept = _find(tensors, table)
    dtypes: dict[str, np.dtype] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    first: dict[str, str] = {}
    for name, found in keys.items():
        for entry in table[name]:
            leaf = leaves[entry.leaf]
            if entry.leaf not in shapes:
                shapes[entry.leaf] = shape_of(entry, leaf.shape, c)
                dtypes[entry.leaf] = tensors[found[0]].dtype
                first[entry.leaf] = found[0]
            if tensors[found[0]].dtype != dtypes[entry.leaf]:
                _refuse_mixed(tensors, first[entry.leaf], found[0], leaf.dtype)
            _check_tensor(tensors, found, shapes[entry.leaf], dtypes[entry.leaf], name)
            if leaf.dtype == np.float32 and not allow_rounded:
                _check_exact(tensors, found[0], entry)
    return Matched(keys, dtypes, kept)


def _find(tensors, table) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    ours, kept = {}, []
    for key in tensors:
        if key.startswith(IGNORED):
            kept.append(key)
            continue
        name = key if key.startswith(PREFIX) else PREFIX + key
        if name in ours:
            raise FormatError(f"the checkpoint has {name} with and without {PREFIX!r}")
        ours[name] = key
    found, lost = {}, []
    for name in table:
        packed = (name + PACKED, name + SCALES) if ".experts." in name else ()
        if both := [k for k in packed if k in ours and name in ours]:
            raise FormatError(f"the checkpoint has both {name} and {both[0]}")
        wanted = packed if any(k in ours for k in packed) else (name,)
        lost += [k for k in wanted if k not in ours]
        found[name] = tuple(ours.pop(k) for k in wanted if k in ours)
    if lost:
        raise FormatError(f"the checkpoint lacks {len(lost)} tensors, such as {lost[0]}")
    if ours:
        first = next(iter(ours.values()))
        raise FormatError(f"the checkpoint has {len(ours)} tensors of no use, such as {first!r}")
    return found, tuple(kept)


def _refuse_mixed(tensors, one: str, other: str, dtype):
    """Names the one of two tensors that is not as the release has it."""
    odd, even = (one, other) if tensors[other].dtype == dtype else (other, one)
    raise FormatError(
        f"{odd} is {tensors[odd].dtype}; expected {tensors[even].dtype} as {even} is: layers of a "
        "kind are stored in one array"
    )


def _check_tensor(tensors, found, shape, dtype, name):
    *lead, last = shape
    wanted = [(dtype, shape)]
    if len(found) == 2:
        uint8 = np.dtype(np.uint8)
        wanted = [(uint8, (*lead, last // 2)), (uint8, (*lead, last // mxfp4.BLOCK))]
    elif dtype == np.uint8:
        wanted = [(np.dtype("bfloat16"), shape)]
    for key, (dtype, shape) in zip(found, wanted, strict=True):
        t = tensors[key]
        if t.dtype != dtype:
            raise FormatError(f"{key} is {t.dtype}; expected {dtype}, as others of its kind")
        is_padded = name.endswith("A_log") and len(t.shape) == 1 and t.shape > shape
        if t.shape == shape or is_padded:
            continue
        raise FormatError(f"{key} has shape {t.shape}; expected {shape}")


def _check_exact(tensors, key, entry):
    if tensors[key].dtype != np.float32:
        raise FormatError(
            f"{key} is {tensors[key].dtype}; expected float32: whoever saved it has rounded "
            f"{entry.leaf} (the option --allow-rounded takes it as it is)"
        )


def load(directory, c: ModelConfig, leaves: dict) -> dict[str, np.ndarray]:
    """A released-format directory as numpy arrays, by the names of `leaves` (shapes and dtypes).

    Packed experts are widened, which is exact. Every tensor must be used and every leaf filled;
    raises FormatError naming what is missing, left over, of another shape or would be rounded.
    """
    tensors = read_index(directory)
    table = name_table(c)
    # Rounded float32 is as good as it gets here, and loads without a further loss.
    matched = match(tensors, table, leaves, c, allow_rounded=True)
    out = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    for name, keys in matched.keys.items():
        array = _widened(*(tensors[key].read() for key in keys))
        for entry in table[name]:
            target = out[entry.leaf]
            if np.dtype(array.dtype).itemsize > target.dtype.itemsize:
                raise ValueError(
                    f"{name} is {array.dtype}: {entry.leaf} as {target.dtype} would round it"
                )
            target[entry.index] = to_ours(name, array, entry, target[entry.index].shape, c)
    return out


def to_ours(name, array, entry: Entry, shape, c: ModelConfig) -> np.ndarray:
    """A released tensor in our leaf's shape and letter order, as a view where that can be."""
    sizes = dict(zip(entry.ours, shape, strict=True))
    if name.endswith("A_log"):
        array = _heads_only(name, array, sizes["H"])
    if entry.rows:
        k, v = c.mla.key_dim, c.mla.value_dim
        array = _sized(name, array, (sizes["H"], k + v, sizes["C"]))
        array = array[:, :k] if entry.rows == "k" else array[:, k:]
    array = _sized(name, array, tuple(sizes[a] for a in entry.letters))
    return array.transpose([entry.letters.index(a) for a in entry.ours])


def to_released(name, arrays, entries: list[Entry], shape) -> np.ndarray:
    """The inverse of `to_ours`: the leaves' parts that one tensor filled, as it is released."""
    parts = [
        array.transpose([entry.ours.index(a) for a in entry.letters])
        for array, entry in zip(arrays, entries, strict=True)
    ]
    array = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    if name.endswith("A_log"):
        array = np.pad(array, (0, shape[0] - array.size))
    return np.ascontiguousarray(array).reshape(shape)


def _sized(name, array, shape):
    if array.size != math.prod(shape):
        raise FormatError(f"{name} has shape {array.shape}; the configuration wants {shape}")
    return array.reshape(shape)


def _heads_only(name, array, n_heads):
    """`A_log` is stored padded with zeros to a multiple of 128 entries (T14)."""
    # By bits: -0 is no padding that would come back.
    if array.size < n_heads or np.any(array[n_heads:].view(np.uint8)):
        raise FormatError(f"{name} of {array.size} entries is not {n_heads} heads and zeros")
    return array[:n_heads]


def _widened(array, scales=None) -> np.ndarray:
    return array if scales is None else mxfp4.unpack(array, scales, np.dtype("bfloat16"))
