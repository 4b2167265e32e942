"""Reading the released config.json, and what is refused in it."""

import dataclasses
import json
from pathlib import Path

import pytest

from configs import k3
from k3_jax.checkpoint.hf_config import from_hf
from k3_jax.config import TrainConfig, from_dict, to_dict
from k3_jax.flops import forward_flops_per_token

GOLDEN = json.loads((Path(__file__).parent / "golden" / "k3-tiny" / "config.json").read_text())
# k3-facts 1.2, with a few of the generic keys that the base class writes.
RELEASED = dict(
    model_type="kimi_linear", architectures=["KimiLinearForCausalLM"], dtype="bfloat16",
    transformers_version="4.56.2", hidden_size=7168, num_hidden_layers=93, vocab_size=163840,
    max_position_embeddings=1048576, initializer_range=0.02, rms_norm_eps=1e-05, use_cache=True,
    tie_word_embeddings=False, num_attention_heads=96, num_key_value_heads=96, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True,
    mla_use_output_gate=True, intermediate_size=33792, first_k_dense_replace=1, moe_layer_freq=1,
    hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
    num_experts=896, num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=3072,
    routed_expert_hidden_size=3584, latent_moe_use_norm=True, moe_renormalize=True,
    moe_router_activation_func="sigmoid", routed_scaling_factor=1.0, topk_method="noaux_tc",
    use_grouped_topk=True, num_expert_group=1, topk_group=1, attn_res_block_size=12,
    num_nextn_predict_layers=0, bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
    temperature=1.0, top_k=50, pruned_heads={}, quantization_config={"format": "mxfp4"},
    linear_attn_config=dict(
        head_dim=128, num_heads=96, short_conv_kernel_size=4, use_full_rank_gate=True,
        gate_lower_bound=-5.0, full_attn_layers=[*range(4, 93, 4), 93],
        kda_layers=[i for i in range(1, 93) if i % 4],
    ),
)  # fmt: skip


def write(tmp_path, **changes):
    """The golden config.json with keys of its text section changed; None removes one."""
    whole = json.loads(json.dumps(GOLDEN))
    text = whole["text_config"]
    for key, value in changes.items():
        section = text["linear_attn_config"] if key in text["linear_attn_config"] else text
        section[key] = value
        if value is None:
            del section[key]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    return path


def test_the_released_file_gives_the_released_sizes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "kimi_k3", "text_config": RELEASED}))
    ours = from_dict(TrainConfig, k3.get_config()).model
    # How experts are reached is the run's choice, not the model's.
    ours = dataclasses.replace(
        ours, moe=dataclasses.replace(ours.moe, exchange="plain", capacity=0.0)
    )
    assert from_hf(path, remat="group") == ours
    path.write_text(json.dumps(RELEASED))
    assert dataclasses.replace(from_hf(path), remat="group") == ours


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(hidden_sise=64), 'hidden_sise is not understood; did you mean "hidden_size"'),
        (dict(rope_theta=10000.0), "rope_theta is not understood"),
        (dict(hidden_act="silu"), "hidden_act='silu', only 'situ' is implemented"),
        (dict(num_experts=None), "num_experts is missing"),
        (dict(mla_use_nope=False), "mla_use_nope=False"),
        (dict(num_expert_group=8), "num_expert_group=8"),
        (dict(use_full_rank_gate=False), "linear_attn_config.use_full_rank_gate=False"),
        (dict(num_key_value_heads=2), "num_key_value_heads=2 is not 4"),
        (dict(kda_layers=[1, 2, 3, 5, 6]), r"in neither: \[7\]"),
        (dict(kda_layers=[1, 2, 3, 4, 5, 6, 7]), r"in both: \[4\]"),
        (dict(full_attn_layers=[4, 8, 10]), r"outside: \[10\]"),
        (dict(gate_lower_bound=-6.0), "gate_lower_bound=-6.0"),
    ],
)
def test_what_is_not_k3_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        from_hf(write(tmp_path, **changes))


def test_a_configuration_survives_its_mapping():
    config = from_dict(TrainConfig, k3.get_config())
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_model_flops_are_the_active_parameters_of_the_report():
    """k3-facts 8: 104,189,614,848 active, of which norms, queries, biases and taps multiply
    nothing; the recurrence's three products per head come on top."""
    model = from_dict(TrainConfig, k3.get_config()).model
    recurrence = 69 * 3 * 96 * 128 * 128
    products = forward_flops_per_token(model, 0) / 2 - recurrence
    assert abs(products / 104_189_614_848 - 1) < 1e-4
