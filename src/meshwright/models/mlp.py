"""The MLP of a layer, gated or plain."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.attention import Project, each
from meshwright.models.context import PLAIN, Context
from meshwright.models.lora import add_linears, apply
from meshwright.models.ops import activated, gated
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import mlp_linears


class MLP(nn.Module):
    """`down(act(gate(x)) * up(x))` if gated, as in Llama (SwiGLU with SiLU, arXiv:2002.05202).

    Otherwise `down(act(up(x)))`, as in GPT-NeoX. `name` is the module's name in a block, by which
    its adapters are found.
    """

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(self, spec: ModelSpec, name: str = "mlp") -> None:
        super().__init__()
        add_linears(self, spec, mlp_linears(spec, name))
        self.act = spec.activation
        self.is_gated = spec.gated_mlp
        self.project: Project = each

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """Return the MLP's output for `x` `[..., dim]`, of the same shape."""
        if self.is_gated:
            gate, up = self.project(x, (self.gate, self.up), context)
            hidden = gated(gate, up, self.act)
            del gate, up  # frees their memory before the last product
        else:
            (up,) = self.project(x, (self.up,), context)
            hidden = activated(up, self.act)
            del up
        return apply(self.down, hidden, context)
