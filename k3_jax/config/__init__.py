"""Configuration: frozen dataclasses, built once from a ConfigDict or from a released `config.json`.

The alphabet. Every dimension has one letter; the same letter stands in an array's name, in an
einsum string and in `sharding/rules.py`. The middle column is the released model's size.

    B       -   batch rows                    T       -   time, query side
    S       -   time, key side                N       -   tokens in a flat pool
    D    7168   model width                   V  163840   vocabulary
    F   33792   hidden width of this FFN      H      96   heads
    k     128   key dim of a head             v     128   value dim of a head
    r      64   MLA key part shared by heads  q     192   MLA query dim of a head, k + r
    Q    1536   MLA query latent              C     512   MLA key-value latent
    M     576   MLA cache row, C + r          R     128   rank of the KDA decay projection
    W       4   convolution taps              E     896   routed experts
    A      16   experts per token             L    3584   latent width of the routed experts
    J       9   AttnRes candidates            G       -   stacked groups of layers
    X   12288   channels of all KDA heads, H k    U    1000   bins of a required router bias
    P       -   devices, each with tokens of its own
    K       -   rank of an adapter
    w      32   steps by whose loss a spike is told
"""

from k3_jax.config.lora import LoraConfig
from k3_jax.config.mapping import from_dict, nearest, to_dict
from k3_jax.config.model import (
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    as_quantized,
    as_served,
)
from k3_jax.config.run import (
    DataConfig,
    LengthConfig,
    MeshConfig,
    OptimConfig,
    ShareConfig,
    SourceConfig,
    SpikeConfig,
    StageConfig,
    TrainConfig,
    is_quantized,
)
from k3_jax.config.stages import Stage, current, planned

__all__ = [
    "DataConfig",
    "KdaConfig",
    "LengthConfig",
    "LoraConfig",
    "MeshConfig",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimConfig",
    "ShareConfig",
    "SourceConfig",
    "SpikeConfig",
    "Stage",
    "StageConfig",
    "TrainConfig",
    "as_quantized",
    "as_served",
    "current",
    "from_dict",
    "is_quantized",
    "nearest",
    "planned",
    "to_dict",
]
