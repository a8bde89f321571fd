"""Granite 4: Mamba-2 in most layers, Granite's multipliers, experts beside a shared MLP or none."""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import (
    Family,
    Key,
    expert_keys,
    llama_keys,
    llama_modules,
    preset,
    sizes_of,
)
from meshwright.spec.families.granite import MULTIPLIERS
from meshwright.spec.families.layers import LayerKeys
from meshwright.spec.families.mamba import FREE, INERT, WRITTEN, mamba_keys, mamba_modules

_LAYER: Final = "model.layers.{}"
_EXPERTS: Final = f"{_LAYER}.block_sparse_moe"
# The MLP of a model without experts, and the shared one beside them.
_STORED: Final = {"gate": "input_linear", "up": "input_linear", "down": "output_linear"}
_SHARED: Final = {
    f"{mlp}.{proj}": f"{_LAYER}.shared_mlp.{stored}"
    for mlp in ("mlp", "mlp.shared")
    for proj, stored in _STORED.items()
}
_MAMBA: Final[dict[str, Any]] = {"mamba": True}
_ATTENTION: Final[dict[str, Any]] = {"rotary": False}
# Of the published models: attention, without rotation, in 4 of 40 layers.
_TENS: Final = (*(_MAMBA,) * 5, _ATTENTION, *(_MAMBA,) * 4)


def _granite(dim: int, heads: int, kv_heads: int, ffn: int, mamba: int, **fields: Any) -> Any:
    return preset(
        "granitemoehybrid",
        *(100352, dim, 40, heads),
        n_kv_heads=kv_heads,
        ffn_dim=ffn,
        context=131072,
        norm_eps=1e-5,
        tie_embeddings=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        mamba_heads=mamba,
        mamba_head_dim=2 * dim // mamba,
        mamba_groups=1,
        mamba_state=128,
        mamba_kernel=4,
        layer_pattern=_TENS,
        **fields,
    )


GRANITEMOEHYBRID: Final = Family(
    name="granitemoehybrid",
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    modules=llama_modules(
        **_SHARED,
        **mamba_modules(f"{_LAYER}.mamba"),
        **{
            "mlp.router": f"{_EXPERTS}.router.layer",
            "mlp.experts.gate.weight": f"{_EXPERTS}.input_linear.weight",
            "mlp.experts.up.weight": f"{_EXPERTS}.input_linear.weight",
            "mlp.experts.down.weight": f"{_EXPERTS}.output_linear.weight",
        },
    ),
    fused_experts="stacked",
    sizes=sizes_of(32000, 4096, 11008, 32, 32, 2048),
    keys=(
        *llama_keys(),
        *MULTIPLIERS,
        *expert_keys(8, 2, hf_key="num_local_experts", kind="count"),
        Key("attention_bias", "attention_bias", "flag", False),
        Key("ffn_dim", "shared_intermediate_size", "size", 1024),
        Key("shared_ffn_dim", "shared_intermediate_size", "size", 1024),
        Key("expert_ffn_dim", "intermediate_size", "size", 11008),
        *mamba_keys(),
    ),
    free=frozenset(
        {
            *FREE,
            *(key.ours for key in MULTIPLIERS),
            *("attention_bias", "experts", "top_k", "expert_ffn_dim", "shared_ffn_dim"),
        }
    ),
    defaults={
        "attention_scale": 1.0,
        "mamba_heads": 128,
        "mamba_head_dim": 64,
        "mamba_groups": 1,
        "mamba_state": 256,
        "mamba_kernel": 4,
        "layer_pattern": (_MAMBA,),
    },
    layers=LayerKeys(
        recurrence="mamba",
        names=("mamba", "attention"),
        rotates_by="position_embedding_type",
    ),
    inert=INERT,
    written=WRITTEN,
    # HF configs of ibm-granite/granite-4.0-h-micro, -h-tiny and -h-small.
    presets={
        "granite-4.0-h-micro": _granite(
            *(2048, 32, 8, 8192, 64), attention_scale=0.015625, logits_divisor=8.0
        ),
        "granite-4.0-h-tiny": _granite(
            *(1536, 12, 4, 1024, 48),
            attention_scale=0.0078125,
            logits_divisor=6.0,
            experts=64,
            top_k=6,
            expert_ffn_dim=512,
            shared_ffn_dim=1024,
        ),
        "granite-4.0-h-small": _granite(
            *(4096, 32, 8, 1536, 128),
            attention_scale=0.0078125,
            logits_divisor=16.0,
            experts=72,
            top_k=10,
            expert_ffn_dim=768,
            shared_ffn_dim=1536,
        ),
    },
)
