"""Makes checkpoints in the released format, of any size, out of random bytes or of none.

Names and shapes are spelled here by hand (k3-facts 2.3 and 2.4), apart from those of the code that
is tested.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

WIDTHS = {"F32": 4, "BF16": 2, "U8": 1}


class Sizes(NamedTuple):
    """Of a model; the defaults are the release's."""

    vocab: int = 163840
    width: int = 7168
    n_layers: int = 93
    mla_layers: tuple[int, ...] = (*range(3, 92, 4), 92)
    dense: int = 33792
    heads: int = 96
    head_dim: int = 128
    q_latent: int = 1536
    kv_latent: int = 512
    rope: int = 64
    experts: int = 896
    active: int = 16
    latent: int = 3584
    expert: int = 3072
    block: int = 12
    a_log: int = 128
    vision_layers: int = 27
    vision_width: int = 1024


SMALL = Sizes(
    vocab=256,
    width=64,
    n_layers=6,
    mla_layers=(3, 5),
    dense=96,
    heads=4,
    head_dim=32,
    q_latent=48,
    kv_latent=32,
    rope=16,
    experts=8,
    active=2,
    latent=64,
    expert=96,
    block=4,
    vision_layers=2,
    vision_width=32,
)


def config_json(s: Sizes) -> dict:
    """A config.json of that model with every key that a reader needs."""
    mla = [i + 1 for i in s.mla_layers]
    text = dict(
        vocab_size=s.vocab, hidden_size=s.width, num_hidden_layers=s.n_layers,
        num_attention_heads=s.heads, num_key_value_heads=s.heads, intermediate_size=s.dense,
        first_k_dense_replace=1, q_lora_rank=s.q_latent, kv_lora_rank=s.kv_latent,
        qk_nope_head_dim=s.head_dim, qk_rope_head_dim=s.rope, v_head_dim=s.head_dim,
        num_experts=s.experts, num_experts_per_token=s.active, num_shared_experts=2,
        moe_intermediate_size=s.expert, routed_expert_hidden_size=s.latent,
        attn_res_block_size=s.block, rms_norm_eps=1e-5, activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0, hidden_act="situ", tie_word_embeddings=False,
        mla_use_nope=True, mla_use_output_gate=True, eos_token_id=2,
        linear_attn_config=dict(
            head_dim=s.head_dim, num_heads=s.heads, short_conv_kernel_size=4,
            use_full_rank_gate=True, gate_lower_bound=-5.0, full_attn_layers=mla,
            kda_layers=[i for i in range(1, s.n_layers + 1) if i not in mla],
        ),
    )  # fmt: skip
    return {"model_type": "kimi_k3", "text_config": text, "dtype": "bfloat16"}


def layer(s: Sizes, i: int, packed: bool = True) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name within the layer: (dtype, shape)}"""
    D, X = s.width, s.heads * s.head_dim
    out = {f"{n}_layernorm.weight": ("BF16", (D,)) for n in ("input", "post_attention")}
    for n in ("self_attention", "mlp"):
        out[f"{n}_res_norm.weight"] = "BF16", (D,)
        out[f"{n}_res_proj.weight"] = "BF16", (1, D)
    if i in s.mla_layers:
        attn = {
            "q_a_proj": (s.q_latent, D),
            "q_a_layernorm": (s.q_latent,),
            "q_b_proj": (s.heads * (s.head_dim + s.rope), s.q_latent),
            "kv_a_proj_with_mqa": (s.kv_latent + s.rope, D),
            "kv_a_layernorm": (s.kv_latent,),
            "kv_b_proj": (2 * X, s.kv_latent),
            "g_proj": (X, D),
            "o_proj": (D, X),
        }
        attn = {f"{n}.weight": ("BF16", shape) for n, shape in attn.items()}
    else:
        attn = {f"{n}_proj.weight": ("BF16", (X, D)) for n in "qkvg"}
        attn |= {f"{n}_conv1d.weight": ("F32", (X, 1, 4)) for n in "qkv"}
        attn |= {
            "o_proj.weight": ("BF16", (D, X)),
            "f_a_proj.weight": ("BF16", (s.head_dim, D)),
            "f_b_proj.weight": ("BF16", (X, s.head_dim)),
            "b_proj.weight": ("BF16", (s.heads, D)),
            "A_log": ("F32", (s.a_log,)),
            "dt_bias": ("F32", (X,)),
            "o_norm.weight": ("F32", (s.head_dim,)),
        }
    out |= {f"self_attn.{n}": value for n, value in attn.items()}
    return out | (_dense("mlp", s.dense, D) if i == 0 else _moe(s, packed))


def _dense(where: str, hidden: int, D: int):
    shapes = {"gate": (hidden, D), "up": (hidden, D), "down": (D, hidden)}
    return {f"{where}.{n}_proj.weight": ("BF16", shape) for n, shape in shapes.items()}


def _moe(s: Sizes, packed: bool):
    D, L = s.width, s.latent
    out = {
        "gate.weight": ("BF16", (s.experts, D)),
        "gate.e_score_correction_bias": ("F32", (s.experts,)),
        "routed_expert_down_proj.weight": ("BF16", (L, D)),
        "routed_expert_norm.weight": ("BF16", (L,)),
        "routed_expert_up_proj.weight": ("BF16", (D, L)),
    } | _dense("shared_experts", 2 * s.expert, D)
    for e in range(s.experts):
        for n, (rows, width) in {
            "w1": (s.expert, L),
            "w2": (L, s.expert),
            "w3": (s.expert, L),
        }.items():
            name = f"experts.{e}.{n}.weight"
            if packed:
                out[name + "_packed"] = "U8", (rows, width // 2)
                out[name + "_scale"] = "U8", (rows, width // 32)
            else:
                out[name] = "BF16", (rows, width)
    return {f"block_sparse_moe.{n}": value for n, value in out.items()}


def vision(s: Sizes) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """The tensors of the projector, and those of the tower."""
    V, heads = s.vision_width, s.vision_width * 3 // 2
    M = 4 * V
    projector = {
        "proj.0.weight": (M, M),
        "proj.2.weight": (s.width, M),
        "post_norm.weight": (s.width,),
    }
    tower = {
        "patch_embed.proj.weight": (V, 3, 14, 14),
        "patch_embed.pos_emb.weight": (64, 64, V),
        "encoder.final_layernorm.weight": (V,),
    }
    for b in range(s.vision_layers):
        block = {
            "norm0.weight": (V,),
            "norm1.weight": (V,),
            "wqkv.weight": (3 * heads, V),
            "wo.weight": (V, heads),
            "mlp.fc0.weight": (M, V),
            "mlp.fc1.weight": (V, M),
        }
        tower |= {f"encoder.blocks.{b}.{n}": shape for n, shape in block.items()}
    return [
        {f"mm_projector.{n}": ("BF16", shape) for n, shape in projector.items()},
        {f"vision_tower.{n}": ("BF16", shape) for n, shape in tower.items()},
    ]


def files_of(s: Sizes, *, packed=True, has_vision=True, prefix="language_model."):
    """The release's split: a file a layer, the global tensors, the projector, the tower."""
    layers = [
        {f"{prefix}model.layers.{i}.{n}": value for n, value in layer(s, i, packed).items()}
        for i in range(s.n_layers)
    ]
    D = s.width
    last = {
        "model.embed_tokens.weight": ("BF16", (s.vocab, D)),
        "lm_head.weight": ("BF16", (s.vocab, D)),
        "model.norm.weight": ("BF16", (D,)),
        "model.output_attn_res_norm.weight": ("BF16", (D,)),
        "model.output_attn_res_proj.weight": ("BF16", (1, D)),
    }
    last = {prefix + n: value for n, value in last.items()}
    return [*layers, last, *(vision(s) if has_vision else [])]


def make(directory: Path, s: Sizes = SMALL, *, files=None, seed: int | None = 0, **how) -> Path:
    """Writes the checkpoint; seed=None leaves its tensors as holes of sparse files.

    files: another split than the release's, a list of {name: (dtype, shape)}. how: of `files_of`.
    """
    directory.mkdir(parents=True)
    files = files_of(s, **how) if files is None else files
    rng = None if seed is None else np.random.default_rng(seed)
    where, total = {}, 0
    for i, tensors in enumerate(files, 1):
        file = directory / f"model-{i:05}-of-{len(files):06}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape) in tensors.items():
            stop = at + math.prod(shape) * WIDTHS[dtype]
            header[name] = dict(dtype=dtype, shape=list(shape), data_offsets=[at, stop])
            at = stop
        text = json.dumps(header).encode()
        with file.open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            if rng is None:
                f.truncate(8 + len(text) + at)
            else:
                for name, (dtype, shape) in tensors.items():
                    f.write(random_bytes(rng, name, dtype, shape, s))
        where |= dict.fromkeys(tensors, file.name)
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config_json(s), indent=2))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def random_bytes(rng, name: str, dtype: str, shape, s: Sizes) -> bytes:
    """Any codes, exponents 90..140, float bits of any sign and of moderate size."""
    n = math.prod(shape)
    if name.endswith("_scale"):
        return rng.integers(90, 141, n, np.uint8).tobytes()
    if dtype == "U8":
        return rng.bytes(n)
    if dtype == "F32":
        values = rng.standard_normal(n, np.float32)
        if name.endswith("A_log"):
            values[s.heads :] = 0
        return values.tobytes()
    # bfloat16: any sign and mantissa, exponents around that of 0.1.
    bits = rng.integers(0, 1 << 16, n, np.uint16)
    return (bits & 0x80FF | ((bits >> 8 & 3) + 0x3B) << 8).astype("<u2").tobytes()
