"""What is compared of other systems: families, layouts and microbatches."""

from __future__ import annotations

import math
from typing import Any

DENSE = (
    *("llama", "llama, tied", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "olmo3", "phi3"),
    *("smollm3", "exaone4", "cohere2", "apertus"),
)
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "glm4_moe", "dots1")

ACCELERATE = (
    {"ddp": 2},
    {"ddp": 4},
    {"fsdp_version": 2, "dp_shard_size": 2, "reshard_after_forward": True},
    {"fsdp_version": 2, "dp_shard_size": 2, "reshard_after_forward": False},
    {"fsdp_version": 2, "dp_shard_size": 4, "reshard_after_forward": True},
    {"fsdp_version": 2, "dp_shard_size": 4, "reshard_after_forward": False},
    {"fsdp_version": 2, "dp_replicate_size": 2, "dp_shard_size": 2},
    {
        "fsdp_version": 2,
        "dp_replicate_size": 2,
        "dp_shard_size": 2,
        "reshard_after_forward": False,
    },
)
# (family, layout); what is not an axis is a setting.
TORCHTITAN = (
    ("llama3", {"dp_shard": 2}),
    ("llama3", {"dp_replicate": 2}),
    ("llama3", {"tp": 2}),
    ("llama3", {"dp_replicate": 2, "dp_shard": 2}),
    ("llama3", {"dp_shard": 2, "tp": 2}),
    ("llama3", {"cp": 2}),
    ("qwen3", {"dp_shard": 2}),
    ("qwen3", {"tp": 2}),
    ("qwen3", {"dp_shard": 2, "tp": 2}),
    ("qwen3_moe", {"dp_shard": 2}),
    ("qwen3_moe", {"dp_shard": 2, "ep": 2}),
    ("qwen3_moe", {"dp_shard": 2, "tp": 2}),
)
MEGATRON = (
    ("gpt", {"dp": 2}),
    ("gpt", {"dp": 4}),
    ("gpt", {"tp": 2}),
    ("gpt", {"tp": 2, "dp": 2}),
    ("gpt", {"tp": 4}),
    ("gpt", {"dp": 2, "overlap_grad_reduce": True}),
    ("gpt", {"tp": 2, "sequence_parallel": True}),
    ("gpt", {"cp": 2}),
    ("gpt, norms of heads", {"tp": 2}),
    ("gpt, norms of heads", {"tp": 2, "dp": 2}),
    ("gpt, tied", {"tp": 2}),
    ("gpt, tied", {"tp": 2, "dp": 2}),
    ("gpt, experts", {"dp": 2}),
    ("gpt, experts", {"dp": 2, "ep": 2}),
)
_AXES = ("dp", "dp_shard", "dp_replicate", "tp", "cp")


def case(
    system: str, family: str, layout: dict[str, Any], microbatches: int = 2, ranks: int = 2
) -> dict[str, Any]:
    """Return a case of the worker."""
    return {
        "system": system,
        "family": family,
        "layout": layout,
        "microbatches": microbatches,
        "ranks": ranks,
    }


def cases() -> list[dict[str, Any]]:
    """Return all cases of the table."""
    found = []
    for family in (*DENSE, *MIXTURES):
        for microbatches in (1, 2):
            found.append(case("transformers", family, {"tp_size": 2}, microbatches))
            both = {"fsdp_size": 2, "tp_size": 2}
            found.append(case("transformers", family, both, microbatches, ranks=4))
        found.append(case("transformers", family, {"fsdp_size": 2}))
    for family in MIXTURES:
        for microbatches in (1, 2):
            layout = {"fsdp_size": 2, "ep_size": 2}
            found.append(case("transformers", family, layout, microbatches))
    for stage in (0, 1, 2, 3):
        for microbatches in (1, 2):
            found.append(case("deepspeed", "llama", {"stage": stage}, microbatches))
    for stage in (1, 2, 3):
        found.append(case("deepspeed", "llama", {"stage": stage, "ranks": 4}, ranks=4))
    for stage in (0, 1):
        layout = {"stage": stage, "autotp_size": 2}
        found.append(case("deepspeed", "llama", layout, 1, ranks=4))
    for family in ("llama", "qwen3", "gemma3", "mixtral"):
        found.append(case("deepspeed", family, {"autotp_size": 2}, 1))
    for layout in ACCELERATE:
        for microbatches in (1, 2):
            ranks = math.prod(v for k, v in layout.items() if k.endswith(("_size", "ddp")))
            found.append(case("accelerate", "llama", layout, microbatches, ranks))
    for system, layouts in (("torchtitan", TORCHTITAN), ("megatron-core", MEGATRON)):
        for family, layout in layouts:
            ranks = math.prod(size for key, size in layout.items() if key in _AXES)
            found.append(case(system, family, layout, 2, ranks))
    for family in ("llama", "llama, tied", "qwen2", "qwen3", "gemma3", "olmo3"):
        found.append(case("meshwright", family, {"tp": 2}))
    for layout in ({"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}):
        found.append(case("meshwright", "llama", layout))
    return found
