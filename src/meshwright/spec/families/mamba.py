"""What families with layers of Mamba-2 share: names, keys and sizes. arXiv:2405.21060."""

from __future__ import annotations

from typing import Any, Final

from meshwright.spec.families.base import Key

SIZES: Final = frozenset({"mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state"})
# The features of a model with such layers.
FREE: Final = SIZES | {"mamba_kernel", "mamba_dt_limit", "layer_pattern"}
# Keys that hold nothing where they have these values; `mamba_chunk_size` never changes a result.
INERT: Final[dict[str, tuple[object, ...]]] = {
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    "hidden_dropout": (0.0,),
}
WRITTEN: Final[dict[str, Any]] = {
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def mamba_modules(module: str) -> dict[str, str]:
    """Return the stored names of Mamba-2's parameters, by our names; `module` contains them.

    One matrix has the gate z, the values x, keys and queries of groups, and steps dt, one below the
    other, as one convolution has those of values, keys and queries.
    """
    columns = dict.fromkeys((f"attn.{name}" for name in ("z", "x", "bc", "dt")), "in_proj")
    convs = dict.fromkeys(("attn.x_conv", "attn.bc_conv"), "conv1d")
    inside = {
        "attn.out": "out_proj",
        "attn.gated_norm": "norm",
        "attn.a_log": "A_log",
        "attn.dt_bias": "dt_bias",
        "attn.skip": "D",
    }
    return {ours: f"{module}.{stored}" for ours, stored in (columns | convs | inside).items()}


def mamba_keys(heads: int = 128, state: int = 256) -> tuple[Key, ...]:
    """Return the keys of Mamba-2's sizes in files like Bamba's, with defaults."""
    return (
        Key("mamba_heads", "mamba_n_heads", "size", heads),
        Key("mamba_head_dim", "mamba_expand", "expansion", 2),
        Key("mamba_head_dim", "mamba_d_head", "head of expansion", "auto"),
        Key("mamba_groups", "mamba_n_groups", "size", 1),
        Key("mamba_state", "mamba_d_state", "size", state),
        Key("mamba_kernel", "mamba_d_conv", "size", 4),
        Key("mamba_dt_limit", "time_step_limit", "limits", None),
    )
