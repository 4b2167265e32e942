"""The gated FFN: layer 0's dense one and the shared experts."""

from flax import nnx

from k3_jax.axes import einsum, normal, weight
from k3_jax.config import ModelConfig
from pallas_kernels.situ import situ_glu


class Mlp(nnx.Module):
    """y = W_down SiTU(W_gate x, W_up x). k3-facts 3.7."""

    def __init__(self, c: ModelConfig, hidden: int, *, rngs: nnx.Rngs):
        dims = dict(D=c.width, F=hidden)
        self.config = c
        self.gate_DF = weight(rngs, "DF", dims, c.param_dtype, normal(c.init_std))
        self.up_DF = weight(rngs, "DF", dims, c.param_dtype, normal(c.init_std))
        self.down_FD = weight(rngs, "FD", dims, c.param_dtype, normal(c.init_std))

    def __call__(self, x_BTD):
        """x_BTD -> y_BTD."""
        gate_BTF = einsum("BTD,DF->BTF", x_BTD, self.gate_DF)
        up_BTF = einsum("BTD,DF->BTF", x_BTD, self.up_DF)
        hidden_BTF = situ_glu(gate_BTF, up_BTF, self.config.situ_beta, self.config.situ_linear_beta)
        return einsum("BTF,FD->BTD", hidden_BTF, self.down_FD)


class DenseFfn(Mlp):
    """The dense FFN of the first layers, with the MoE's signature."""

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(c, c.dense_width, rngs=rngs)

    def __call__(self, x_BTD, rows, forced_BTA=None):
        """x_BTD -> y_BTD and None, for there is no choice of experts."""
        return super().__call__(x_BTD), None
