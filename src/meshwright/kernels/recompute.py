"""Recomputes activations in the backward: whole blocks, or all but matmuls, attention and
collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.comm import shared
from meshwright.models import blockwise

# What selective recompute keeps: products, attention and what came from tp's collectives. The rest
# (norms, activations, rotations, casts) is a few percent of the time and most of the memory.
# arXiv:2205.05198, section 5, extended from attention's inside to single operations. A ring's or
# Ulysses' transfers are sent again: kept, they would be the whole keys and values of every layer.
KEPT = frozenset(
    getattr(getattr(torch.ops, space), name).default
    for space, name in (
        ("aten", "mm"),
        ("aten", "addmm"),
        ("aten", "bmm"),
        ("aten", "linear"),
        ("aten", "_scaled_mm"),
        ("aten", "_scaled_dot_product_flash_attention_for_cpu"),
        ("aten", "_scaled_dot_product_flash_attention"),
        ("aten", "_scaled_dot_product_efficient_attention"),
        ("aten", "_scaled_dot_product_cudnn_attention"),
        ("_c10d_functional", "all_reduce"),
        ("_c10d_functional", "reduce_scatter_tensor"),
        (blockwise.SPACE, "attention"),
    )
)


# By name, as they are registered later, or not by every torch: experts' products in one kernel,
# attention by documents, on CPUs and GPUs, with a cap in plain operations, FlexAttention in a
# compiled block, and channels.
_LATER = (
    "aten::_grouped_mm",
    "flex_attention",
    "meshwright::attend_varlen",
    "meshwright::capped_attention",
    "meshwright::delta_rule",
    "meshwright::delta_rule_ends",
    "meshwright::delta_rule_passed",
    "meshwright::flex_block_attention",
    "meshwright::state_space",
    "meshwright::state_space_ends",
    "torch_attn::_varlen_attn",
    f"{shared.SPACE}::all_reduce",
    f"{shared.SPACE}::reduce_scatter_tensor",
)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = op in KEPT or op.name() in _LATER
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _policy_of_draws(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the selective policy for blocks with random draws: also recomputes attention with
    dropout.

    If its result were saved, later draws of the recomputation would come too early.
    """
    named = (
        dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    )
    if named.get("dropout_p", 0.0) > 0:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _policy(ctx, op, *args, **kwargs)


def recompute(
    block: nn.Module,
    kind: Literal["none", "selective", "full"],
    note: Callable[[Mapping[Any, Any]], None] | None = None,
    *,
    draws: bool = False,
) -> None:
    """Make a block recompute its forward in the backward: not at all, fully, or all but matmuls and
    the like.

    With "selective", `note` is called in each forward that is not compiled with the storage of
    saved results. The method is replaced on the instance, so that parameters keep their names and
    the hooks of data parallelism stay outside of it. `draws`: the block may draw from torch's
    generators, whose state is restored for the recomputation; Meshwright's dropout is counter-based
    and does not need it.
    """
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if kind == "selective":
        policy = _policy_of_draws if draws else _policy
        options["context_fn"] = contexts = partial(create_selective_checkpoint_contexts, policy)
        if note is not None:
            options["context_fn"] = partial(_noted, contexts, note)
    inner = block.forward

    # A function, which the compiler enters; a `partial` it would leave as it is, and compile none.
    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, **options, **kwargs)

    block.forward = forward


def _noted(contexts: Callable[[], Any], note: Callable[[Mapping[Any, Any]], None]) -> Any:
    pair = contexts()
    note(pair[0].storage)
    return pair
