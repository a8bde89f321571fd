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
TORCH = (
    {"ddp": 2, "gradient_as_bucket_view": True},
    {"ddp": 2, "static_graph": True},
    {"fsdp1": 2},
    {"fsdp1": 2, "sharding_strategy": "SHARD_GRAD_OP"},
    {"dp_shard": 2, "reshard_after_forward": False},
    {"tp": 2},
    {"dp_shard": 2, "tp": 2},
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
    ("gpt", {"dp": 2, "calculate_per_token_loss": True}),
    ("gpt", {"tp": 2, "dp": 2, "calculate_per_token_loss": True}),
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
_AXES = ("dp", "dp_shard", "dp_replicate", "tp", "cp", "ddp", "fsdp1")
# Families with norms of heads, whose gradient transformers 5.23 sums over tp again at each
# microbatch (a script without Meshwright shows it of qwen3), and those whose sum it leaves out.
_SUMMED_AGAIN = ("qwen3", "gemma3", "exaone4", "qwen3_moe", "dots1")
_NOT_SUMMED = ("apertus", "glm4_moe")


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


def is_healthy(case: dict[str, Any]) -> bool:
    """Whether nothing is known to be wrong with a case: a fault that is named accuses it."""
    layout, family = case["layout"], case["family"]
    if case["system"] == "transformers" and "tp_size" in layout:
        is_again = family in _SUMMED_AGAIN and len(layout) == 1 and case["microbatches"] > 1
        return not is_again and family not in _NOT_SUMMED
    # Its loop divides by the global number of targets, and its DDP averages besides.
    return case["system"] != "torchtitan" or layout != {"dp_replicate": 2}


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
    for layout in TORCH:
        for microbatches in (1, 2):
            ranks = math.prod(size for key, size in layout.items() if key in _AXES)
            found.append(case("torch", "llama", layout, microbatches, ranks))
    for system, layouts in (("torchtitan", TORCHTITAN), ("megatron-core", MEGATRON)):
        for family, layout in layouts:
            ranks = math.prod(size for key, size in layout.items() if key in _AXES)
            found.append(case(system, family, layout, 2, ranks))
    for family in ("llama", "llama, tied", "qwen2", "qwen3", "gemma3", "olmo3"):
        found.append(case("meshwright", family, {"tp": 2}))
    for layout in ({"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}):
        found.append(case("meshwright", "llama", layout))
    return found
