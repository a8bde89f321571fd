"""What families with Gated DeltaNet share: names, keys and sizes. arXiv:2412.06464."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.spec.families.base import Key
from meshwright.spec.families.layers import LayerKeys

_LAYER: Final = "model.layers.{}"
_DELTA: Final = f"{_LAYER}.linear_attn"
_INTERVAL: Final = 4
SIZES: Final = {
    "delta_heads": 32,
    "delta_key_heads": 16,
    "delta_key_dim": 128,
    "delta_value_dim": 128,
    "delta_kernel": 4,
}
# Three layers with the recurrence, then one that attends.
PATTERN: Final[tuple[dict[str, Any], ...]] = (*({"delta": True},) * (_INTERVAL - 1), {})
LAYERS: Final = LayerKeys(recurrence="delta", interval=_INTERVAL)
SPARSE_LAYERS: Final = LayerKeys(sparse=True, recurrence="delta", interval=_INTERVAL)
KEYS: Final = (
    Key("delta_heads", "linear_num_value_heads", "size", 32),
    Key("delta_key_heads", "linear_num_key_heads", "size", 16),
    Key("delta_key_dim", "linear_key_head_dim", "size", 128),
    Key("delta_value_dim", "linear_value_head_dim", "size", 128),
    Key("delta_kernel", "linear_conv_kernel_dim", "size", 4),
)
# Attention whose result a gate multiplies; of each head, its query, then its gate.
FIXED: Final = {"qk_norm": "head", "norm_plus_one": True, "attention_gate": True}
GATED_HEADS: Final = dict.fromkeys(("attn.q", "attn.gate"), "n_heads")


def delta_modules(projections: Mapping[str, str]) -> dict[str, str]:
    """Return the stored names of Gated DeltaNet's parameters, and of the attention of other layers,
    by our names.

    `projections` has for each linear layer but the last the matrix that contains it; one
    convolution is of queries, keys and values.
    """
    columns = {f"attn.{ours}": f"{_DELTA}.{stored}" for ours, stored in projections.items()}
    convs = dict.fromkeys((f"attn.{x}_conv" for x in "qkv"), f"{_DELTA}.conv1d.weight")
    return {
        **{f"attn.{proj}_norm": f"{_LAYER}.self_attn.{proj}_norm" for proj in "qk"},
        "attn.gate": f"{_LAYER}.self_attn.q_proj",
        **columns,
        **convs,
        "attn.out": f"{_DELTA}.out_proj",
        "attn.gated_norm": f"{_DELTA}.norm",
        "attn.a_log": f"{_DELTA}.A_log",
        "attn.dt_bias": f"{_DELTA}.dt_bias",
    }


def gated_shared_expert() -> dict[str, str]:
    """Return the stored names of a shared expert and of its gate, by our names."""
    shared = {
        f"mlp.shared.{proj}": f"{_LAYER}.mlp.shared_expert.{proj}_proj"
        for proj in ("gate", "up", "down")
    }
    return {**shared, "mlp.shared_gate": f"{_LAYER}.mlp.shared_expert_gate"}
