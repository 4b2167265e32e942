"""The released model without memory: its parameter count, its tensors, its bytes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import k3
from k3_jax.checkpoint import hf
from k3_jax.config import TrainConfig, from_dict
from k3_jax.model import abstract
from k3_jax.tree import named_leaves
from sharding import make_mesh

PADDING = 69 * 32  # zeros behind the 96 heads of each KDA layer's A_log, stored with 128 entries
VISION = 165 + 3  # tensors that are not text
VISION_BYTES = 92_289_024 + 802_428_928
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")

# k3-facts 2.3, by hand: {layer: {name: shape}} of one layer of each kind.
EVERY = {
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attention_res_norm.weight": (7168,),
    "self_attention_res_proj.weight": (1, 7168),
    "mlp_res_norm.weight": (7168,),
    "mlp_res_proj.weight": (1, 7168),
}
KDA = {
    **{f"self_attn.{x}_proj.weight": (12288, 7168) for x in "qkvg"},
    **{f"self_attn.{x}_conv1d.weight": (12288, 1, 4) for x in "qkv"},
    "self_attn.o_proj.weight": (7168, 12288),
    "self_attn.f_a_proj.weight": (128, 7168),
    "self_attn.f_b_proj.weight": (12288, 128),
    "self_attn.b_proj.weight": (96, 7168),
    "self_attn.A_log": (96,),
    "self_attn.dt_bias": (12288,),
    "self_attn.o_norm.weight": (128,),
}
MLA = {
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (18432, 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (24576, 512),
    "self_attn.g_proj.weight": (12288, 7168),
    "self_attn.o_proj.weight": (7168, 12288),
}
DENSE = {
    "mlp.gate_proj.weight": (33792, 7168),
    "mlp.up_proj.weight": (33792, 7168),
    "mlp.down_proj.weight": (7168, 33792),
}
MOE = {
    "block_sparse_moe.gate.weight": (896, 7168),
    "block_sparse_moe.gate.e_score_correction_bias": (896,),
    "block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
    "block_sparse_moe.routed_expert_norm.weight": (3584,),
    "block_sparse_moe.routed_expert_up_proj.weight": (7168, 3584),
    "block_sparse_moe.shared_experts.gate_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.up_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
    **{
        f"block_sparse_moe.experts.{e}.{w}.weight": (3584, 3072) if w == "w2" else (3072, 3584)
        for e in range(896)
        for w in ("w1", "w2", "w3")
    },
}
GLOBAL = {
    "model.embed_tokens.weight": (163840, 7168),
    "lm_head.weight": (163840, 7168),
    "model.norm.weight": (7168,),
    "model.output_attn_res_norm.weight": (7168,),
    "model.output_attn_res_proj.weight": (1, 7168),
}


def expected() -> dict[str, tuple[int, ...]]:
    shapes = {hf.PREFIX + name: shape for name, shape in GLOBAL.items()}
    mla = {*range(3, 92, 4), 92}
    for i in range(93):
        named = EVERY | (MLA if i in mla else KDA) | (MOE if i else DENSE)
        shapes |= {f"{hf.PREFIX}model.layers.{i}.{name}": shape for name, shape in named.items()}
    return shapes


@pytest.fixture(scope="module")
def config():
    return from_dict(TrainConfig, k3.get_config()).model


@pytest.fixture(scope="module")
def leaves(config):
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        return named_leaves(abstract(config))


def test_the_released_model_has_its_published_parameter_count(leaves):
    """2,779,484,478,208 as k3-facts 8 counts them: with the stored padding of A_log."""
    assert sum(math.prod(x.shape) for x in leaves.values()) + PADDING == 2_779_484_478_208


def test_every_released_tensor_fills_exactly_one_place(config, leaves):
    """Names and shapes of k3-facts 2.3; each element of each leaf is filled once."""
    table, shapes = hf.name_table(config), expected()
    assert set(table) == set(shapes)
    filled = dict.fromkeys(leaves, 0)
    for name, entries in table.items():
        total = 0
        for entry in entries:
            size = math.prod(leaves[entry.leaf].shape[len(entry.index) :])
            filled[entry.leaf] += size
            total += size
        assert total == math.prod(shapes[name]), name
    assert filled == {name: math.prod(x.shape) for name, x in leaves.items()}


def test_the_release_adds_up_to_its_index_to_the_byte():
    """497,220 tensors and 1,560,860,324,864 bytes, vision included; experts packed."""
    n_tensors, n_bytes = VISION, VISION_BYTES
    for name, shape in expected().items():
        size = math.prod(shape)
        if ".experts." in name:
            n_tensors, n_bytes = n_tensors + 2, n_bytes + size // 2 + size // 32
        else:
            width = 4 if name.endswith(FLOAT32) else 2
            n_tensors, n_bytes = n_tensors + 1, n_bytes + size * width
    assert n_tensors == 497_220
    assert n_bytes + 4 * PADDING == 1_560_860_324_864


def test_what_the_release_keeps_in_float32_is_float32_in_bfloat16_storage(config):
    """T13, and k3-facts 2.2: the same seven kinds of tensor, whatever `param_dtype`."""
    narrow = dataclasses.replace(config, param_dtype="bfloat16")
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        found = named_leaves(abstract(narrow))
    for name, entries in hf.name_table(config).items():
        wanted = jnp.float32 if name.endswith(FLOAT32) else jnp.bfloat16
        assert all(found[e.leaf].dtype == wanted for e in entries), name


def array(n, size=128):
    out = np.zeros(size, np.float32)
    out[:n] = np.arange(1, n + 1)
    return out


def test_a_log_gives_up_its_zeros_and_nothing_else(config):
    """T14: 96 of 128 entries are heads; anything but zeros behind them is refused."""
    name = "language_model.model.layers.0.self_attn.A_log"
    (entry,) = hf.name_table(config)[name]
    for stored in (array(96), array(96, 96)):
        assert np.array_equal(hf.to_ours(name, stored, entry, (96,), config), np.arange(1, 97))
    for stored in (array(97), array(64, 64)):
        with pytest.raises(ValueError, match="A_log of .* entries is not 96 heads"):
            hf.to_ours(name, stored, entry, (96,), config)
