"""The released `config.json`: reading it, and writing one for a trained model."""

import json

from etils import epath

from k3_jax.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig, nearest

# Keys that only one value of is implemented: another one is a different model.
FIXED = {
    "hidden_act": ("situ",),
    "tie_word_embeddings": (False,),
    "mla_use_nope": (True,),
    "mla_use_output_gate": (True,),
    "moe_layer_freq": (1,),
    "latent_moe_use_norm": (True,),
    "moe_renormalize": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "num_nextn_predict_layers": (0, None),
    "rope_scaling": (None,),
}
FIXED_KDA = {"use_full_rank_gate": (True,)}
SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "first_k_dense_replace q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "num_experts num_experts_per_token num_shared_experts moe_intermediate_size "
    "routed_expert_hidden_size attn_res_block_size rms_norm_eps activation_situ_beta "
    "activation_situ_linear_beta linear_attn_config"
).split()
OPTIONAL = ("routed_scaling_factor", "num_key_value_heads", "use_grouped_topk", "initializer_range")
KDA_SIZES = (
    "head_dim num_heads short_conv_kernel_size gate_lower_bound full_attn_layers kda_layers".split()
)
# How compressed-tensors, which the GPU engines read, names packed experts. k3-facts 1.2.
_WEIGHTS = dict(
    num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, dynamic=False,
    observer="minmax", observer_kwargs={}, scale_dtype="torch.uint8", actorder=None,
    block_structure=None, zp_dtype=None,
)  # fmt: skip
_PACKED = "mxfp4-pack-quantized"
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": _PACKED,
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "format": _PACKED,
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": _WEIGHTS,
        }
    },
    # The release's patterns, and one for the latent projections, which match none of them.
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
        "re:.*routed_expert_(down|up)_proj.*",
    ],
}
# Read by the tokenizer, the packing or nobody: no bearing on the network.
OTHER = (
    "model_type architectures auto_map dtype torch_dtype transformers_version quantization_config "
    "bos_token_id eos_token_id pad_token_id max_position_embeddings use_cache"
).split()
# What the Hugging Face base class writes into every file.
GENERIC = (
    "_name_or_path add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams "
    "num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type "
    "pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate "
    "sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p use_bfloat16"
).split()


def from_hf(path, **overrides) -> ModelConfig:
    """The model of a released `config.json` (its `text_config` where there is one).

    Raises ValueError naming each key that is unknown, missing, or asks for what K3 is not.
    """
    path = epath.Path(path)
    try:
        whole = json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from None
    text = whole.get("text_config", whole)
    linear = text.get("linear_attn_config", {})
    problems = _problems(text, FIXED, SIZES, (*OPTIONAL, *OTHER, *GENERIC), "")
    problems += _problems(linear, FIXED_KDA, KDA_SIZES, (), "linear_attn_config.")
    if problems:
        raise ValueError(f"{path} is not a Kimi K3 this project can build: " + "; ".join(problems))
    n = text["num_hidden_layers"]
    mla_layers = _layers(path, n, linear)
    return ModelConfig(
        vocab_size=text["vocab_size"],
        width=text["hidden_size"],
        n_layers=n,
        mla_layers=mla_layers,
        n_dense=text["first_k_dense_replace"],
        dense_width=text["intermediate_size"],
        block_layers=text["attn_res_block_size"],
        kda=KdaConfig(
            n_heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_width=linear["short_conv_kernel_size"],
            gate_lower_bound=float(linear["gate_lower_bound"]),
        ),
        mla=MlaConfig(
            n_heads=text["num_attention_heads"],
            query_latent=text["q_lora_rank"],
            kv_latent=text["kv_lora_rank"],
            key_dim=text["qk_nope_head_dim"],
            shared_key_dim=text["qk_rope_head_dim"],
            value_dim=text["v_head_dim"],
        ),
        moe=MoeConfig(
            n_experts=text["num_experts"],
            n_active=text["num_experts_per_token"],
            latent_width=text["routed_expert_hidden_size"],
            expert_width=text["moe_intermediate_size"],
            n_shared=text["num_shared_experts"],
            routed_scale=float(text.get("routed_scaling_factor", 1.0)),
        ),
        norm_eps=text["rms_norm_eps"],
        situ_beta=float(text["activation_situ_beta"]),
        situ_linear_beta=float(text["activation_situ_linear_beta"]),
        init_std=text.get("initializer_range", 0.02),
        **overrides,
    )


def to_hf(c: ModelConfig, packed: bool, old: dict | None = None) -> dict:
    """The inverse of `from_hf`: what the GPU engines read.

    packed: whether routed experts are MXFP4; the section about it is there exactly then.
    old: the file that the checkpoint came with; all that is no size of the network stays.
    """
    whole = dict(old) if old else _frame(c)
    text = dict(whole.get("text_config", whole)) | _sizes(c)
    for section in (whole, text):
        section.pop("quantization_config", None)
    if packed:
        text["quantization_config"] = QUANTIZATION
    return whole | {"text_config": text} if "text_config" in whole else text


def _frame(c: ModelConfig) -> dict:
    text = {key: allowed[0] for key, allowed in FIXED.items()}
    text |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    return text | {"dtype": c.param_dtype, "use_grouped_topk": True, "use_cache": True}


def _sizes(c: ModelConfig) -> dict:
    mla = [i + 1 for i in sorted(c.mla_layers)]
    linear = {
        "num_heads": c.kda.n_heads,
        "head_dim": c.kda.head_dim,
        "short_conv_kernel_size": c.kda.conv_width,
        "gate_lower_bound": c.kda.gate_lower_bound,
        "use_full_rank_gate": True,
        "full_attn_layers": mla,
        "kda_layers": [i for i in range(1, c.n_layers + 1) if i not in mla],
    }
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.mla.n_heads,
        "num_key_value_heads": c.mla.n_heads,
        "intermediate_size": c.dense_width,
        "first_k_dense_replace": c.n_dense,
        "q_lora_rank": c.mla.query_latent,
        "kv_lora_rank": c.mla.kv_latent,
        "qk_nope_head_dim": c.mla.key_dim,
        "qk_rope_head_dim": c.mla.shared_key_dim,
        "v_head_dim": c.mla.value_dim,
        "num_experts": c.moe.n_experts,
        "num_experts_per_token": c.moe.n_active,
        "num_shared_experts": c.moe.n_shared,
        "moe_intermediate_size": c.moe.expert_width,
        "routed_expert_hidden_size": c.moe.latent_width,
        "routed_scaling_factor": c.moe.routed_scale,
        "attn_res_block_size": c.block_layers,
        "rms_norm_eps": c.norm_eps,
        "activation_situ_beta": c.situ_beta,
        "activation_situ_linear_beta": c.situ_linear_beta,
        "initializer_range": c.init_std,
        "linear_attn_config": linear,
    }


def _problems(section, fixed, sizes, free, where):
    known = (*fixed, *sizes, *free)
    out = [f"{where}{k} is not understood{nearest(k, known)}" for k in section if k not in known]
    out += [f"{where}{k} is missing" for k in sizes if k not in section]
    for key, allowed in fixed.items():
        if key in section and section[key] not in allowed:
            out.append(f"{where}{key}={section[key]!r}, only {allowed[0]!r} is implemented")
    heads = section.get("num_attention_heads")
    if section.get("num_key_value_heads", heads) != heads:
        out.append(f"num_key_value_heads={section['num_key_value_heads']} is not {heads}")
    return out


def _layers(path, n: int, linear: dict) -> tuple[int, ...]:
    """MLA layers from 0, out of the file's two lists that count from 1."""
    mla, kda = sorted(linear["full_attn_layers"]), sorted(linear["kda_layers"])
    if sorted(mla + kda) != list(range(1, n + 1)):
        both = sorted(set(mla) & set(kda))
        neither = sorted(set(range(1, n + 1)) - set(mla) - set(kda))
        beyond = [i for i in mla + kda if not 1 <= i <= n]
        raise ValueError(
            f"{path}: full_attn_layers and kda_layers do not cover layers 1..{n} once each "
            f"(in both: {both}, in neither: {neither}, outside: {beyond})"
        )
    return tuple(i - 1 for i in mla)
