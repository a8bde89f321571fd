"""The MLPs of a layer, gated and plain."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.attention import Project, each
from meshwright.models.context import PLAIN, Context
from meshwright.models.lora import apply, linear
from meshwright.models.ops import activated, gated
from meshwright.spec.model import ModelSpec


class GatedMLP(nn.Module):
    """A gated MLP, as Llama's: `down(act(gate(x)) * up(x))`, SwiGLU with SiLU. arXiv:2002.05202.

    `name` is its own in a block.
    """

    def __init__(self, spec: ModelSpec, width: int, name: str = "mlp") -> None:
        super().__init__()
        self.gate = linear(spec, f"{name}.gate", spec.dim, width, bias=spec.mlp_bias)
        self.up = linear(spec, f"{name}.up", spec.dim, width, bias=spec.mlp_bias)
        self.down = linear(spec, f"{name}.down", width, spec.dim, bias=spec.mlp_bias)
        self.act = spec.activation
        self.project: Project = each

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the MLP of x `[..., dim]`, of the same shape."""
        gate, up = self.project(x, (self.gate, self.up), context)
        hidden = gated(gate, up, self.act)
        del gate, up  # frees their memory before the last product
        return apply(self.down, hidden, context)


class MLP(nn.Module):
    """A plain MLP, as GPT-NeoX's: `down(act(up(x)))`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = linear(spec, "mlp.up", spec.dim, spec.ffn_dim, bias=spec.mlp_bias)
        self.down = linear(spec, "mlp.down", spec.ffn_dim, spec.dim, bias=spec.mlp_bias)
        self.act = spec.activation
        self.project: Project = each

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the MLP of x `[..., dim]`, of the same shape."""
        (up,) = self.project(x, (self.up,), context)
        hidden = activated(up, self.act)
        del up
        return apply(self.down, hidden, context)
