"""Which tensor of a Hugging Face folder holds which of our parameters, both ways.

GPT-NeoX stores query, key and value of each head together: `[heads, 3, head_dim, dim]` flattened
to `[3 x dim, dim]`, with a bias alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from meshwright.program.parts import parts
from meshwright.spec.model import ModelSpec

_LLAMA: Final = {
    "embed": "model.embed_tokens",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn.q": "model.layers.{}.self_attn.q_proj",
    "attn.k": "model.layers.{}.self_attn.k_proj",
    "attn.v": "model.layers.{}.self_attn.v_proj",
    "attn.o": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "mlp.gate": "model.layers.{}.mlp.gate_proj",
    "mlp.up": "model.layers.{}.mlp.up_proj",
    "mlp.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_NEOX: Final = {
    "embed": "gpt_neox.embed_in",
    "attn_norm": "gpt_neox.layers.{}.input_layernorm",
    "attn.q": "gpt_neox.layers.{}.attention.query_key_value",
    "attn.k": "gpt_neox.layers.{}.attention.query_key_value",
    "attn.v": "gpt_neox.layers.{}.attention.query_key_value",
    "attn.o": "gpt_neox.layers.{}.attention.dense",
    "mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "mlp.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "mlp.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}
_TABLES: Final = {"llama": _LLAMA, "neox": _NEOX}
# Tables and masks that older versions of transformers stored beside the parameters.
_NOT_PARAMETERS: Final = {
    "llama": re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    "neox": re.compile(
        r"gpt_neox\.layers\.\d+\.attention\.(rotary_emb\.inv_freq|bias|masked_bias)"
    ),
}
_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HFTensor:
    """One stored tensor: its name and shape, and the one or three parameters in it.

    Three are q, k and v of `heads` heads, interleaved by head.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    heads: int

    def split(self, stored: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of a stored tensor, each contiguous."""
        if len(self.parts) == 1:
            return (stored.contiguous(),)
        by_head = stored.reshape(self.heads, len(self.parts), -1, *stored.shape[1:])
        return tuple(part.flatten(0, 1).contiguous() for part in by_head.unbind(1))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the stored tensor of these parameters, contiguous."""
        if len(self.parts) == 1:
            return ours[0].contiguous()
        by_head = [part.reshape(self.heads, -1, *part.shape[1:]) for part in ours]
        return torch.stack(by_head, dim=1).flatten(0, 2).contiguous()


def hf_name(family: str, name: str) -> str:
    """Return the name of the stored tensor that holds one of our parameters."""
    module, kind = name.rsplit(".", 1)
    found = _LAYER.fullmatch(module)
    if found is None:
        return f"{_TABLES[family][module]}.{kind}"
    layer, inner = found.groups()
    return f"{_TABLES[family][inner].format(layer)}.{kind}"


def hf_tensors(spec: ModelSpec) -> tuple[HFTensor, ...]:
    """Return the tensors of a stored model, in the order of our parameters."""
    held: dict[str, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts(spec):
        name = hf_name(spec.family, part.name)
        held.setdefault(name, []).append(part.name)
        rows = part.shape[0] + shapes.get(name, (0,))[0]
        shapes[name] = (rows, *part.shape[1:])
    return tuple(
        HFTensor(name, shapes[name], tuple(ours), spec.n_heads) for name, ours in held.items()
    )


def to_hf(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole parameters, by our names, as the tensors of a Hugging Face folder."""
    return {item.name: item.join([state[name] for name in item.parts]) for item in hf_tensors(spec)}


def from_hf(spec: ModelSpec, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face folder as parameters by our names."""
    found: dict[str, Tensor] = {}
    for item in hf_tensors(spec):
        found.update(zip(item.parts, item.split(stored[item.name]), strict=True))
    return found


def head_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names under which the head is stored; transformers 5 also reads the second."""
    return ("lm_head.weight",) if spec.family == "llama" else ("embed_out.weight", "lm_head.weight")


def is_parameter(family: str, name: str) -> bool:
    """Whether a stored tensor is a parameter, rather than a table kept beside them."""
    return _NOT_PARAMETERS[family].fullmatch(name) is None
