"""`System`: the differences between training systems that run the same layout.

Only facts, each with its source; measured values are in the calibration under the system's name.
`meshwright` is our own. The others are here because most published measurements are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

# Parts of a layer that selective recomputation may name.
Module = Literal["core_attn", "mlp", "layernorm", "activation"]


@dataclass(frozen=True)
class System:
    """How a system stores states, which kernels it uses, and what it overlaps.

    `keeps` "shards": fp32 shards are the weights, gathered in the dtype of the products (FSDP).
    "whole": each rank has whole weights in the products' dtype, and the optimizer its fp32 ones.
    `gradient_bytes` of an accumulated gradient, `reduced_bytes` of one that is being summed,
    None where `train.reduce_dtype` says it.
    `attention` is the kernel where a row names none.
    `selective` recomputation makes whole blocks but for their products anew, attention alone,
    half of the products too, or `modules`. `fused_norm`: a norm is one kernel. `fused_activation`:
    a gated activation keeps its two inputs alone. `splits_loss`: the loss has logits cut over tp.
    `gathers_again`: with sp, what products took is gathered again in the backward, or only in that
    of layers which are not recomputed. `overlaps_tp`: the gradients of products' inputs are summed
    while those of weights are computed; else the fitted share of messages has it. `even_stages`:
    layers are spread over stages by number rather than by cost. `fuses_loss`: the backward makes
    the head's products and the loss, of some tokens at a time; `loss_chunks` of another system that
    does so. `parts_ends`: ZeRO-3 gathers embedding and head, unless tied, for the one pass that
    uses each. `sends_once`: a token goes to a rank, and to a node, once, however many of its
    experts are there. `sums_apart`: a separate kernel accumulates gradients, whose time no fitted
    constant includes. `keeps_quantised`: what float8 products have taken is kept in float8.
    """

    name: str
    keeps: Literal["shards", "whole"]
    gradient_bytes: int = 4
    reduced_bytes: int | None = None
    attention: str = "flash2"
    even_stages: bool = True
    overlaps_data: bool = True
    selective: Literal["blocks", "attention", "half", "modules"] = "blocks"
    modules: frozenset[Module] = frozenset()
    fused_norm: bool = False
    fused_activation: bool = False
    splits_loss: bool = True
    overlaps_tp: bool = False
    overlaps_shared: bool = False
    gathers_again: Literal["never", "always", "unless recomputed"] = "never"
    fuses_loss: bool = False
    loss_chunks: int = 1
    parts_ends: bool = False
    sends_once: bool = False
    sums_apart: bool = False
    keeps_quantised: bool = False
    source: str = ""


SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        System(
            "meshwright",
            "shards",
            even_stages=False,
            fused_norm=True,
            fused_activation=True,
            overlaps_tp=True,
            overlaps_shared=True,
            gathers_again="unless recomputed",
            fuses_loss=True,
            parts_ends=True,
            sums_apart=True,
            source="meshwright.parallel",
        ),
        System(
            "megatron",
            "whole",
            attention="scores",
            reduced_bytes=2,
            overlaps_data=False,
            selective="attention",
            fused_norm=True,
            gathers_again="always",
            source="github.com/NVIDIA/Megatron-LM of 2021 and 2022; arXiv:2205.05198",
        ),
        System(
            "megatron-core",
            "whole",
            attention="cudnn",
            selective="attention",
            fused_norm=True,
            fused_activation=True,
            gathers_again="always",
            keeps_quantised=True,  # Transformer Engine, pytorch/module/linear.py
            sends_once=True,  # DeepEP and HybridEP, dispatchers of Megatron-Core
            source="github.com/NVIDIA/Megatron-LM, megatron/core, with Transformer Engine",
        ),
        System(
            "nemo",
            "whole",
            attention="cudnn",
            gradient_bytes=2,
            reduced_bytes=2,
            selective="attention",
            fused_norm=True,
            fused_activation=True,
            gathers_again="always",
            keeps_quantised=True,  # Transformer Engine, pytorch/module/linear.py
            sends_once=True,  # DeepEP and HybridEP, dispatchers of Megatron-Core
            source="github.com/NVIDIA-NeMo: Megatron-Core with gradients in bf16",
        ),
        System(
            "aleph-alpha",
            "whole",
            gradient_bytes=2,
            reduced_bytes=2,
            overlaps_data=False,
            splits_loss=False,
            source="arXiv:2311.05610, section 3",
        ),
        System(
            "aleph-alpha-rms",
            "whole",
            gradient_bytes=2,
            reduced_bytes=2,
            overlaps_data=False,
            splits_loss=False,
            fused_norm=True,
            source="arXiv:2311.05610, section 4: the later sweeps, with a kernel for norms",
        ),
        System(
            "deepspeed",
            "whole",
            attention="scores",
            reduced_bytes=2,
            fused_norm=True,
            source="github.com/microsoft/DeepSpeed, ZeRO-3; arXiv:2104.07857",
        ),
        System(
            "composer",
            "shards",
            reduced_bytes=2,
            keeps_quantised=True,  # Transformer Engine, pytorch/module/linear.py
            source="github.com/mosaicml/llm-foundry, scripts/train/benchmarking",
        ),
        System(
            "torchtitan",
            "shards",
            selective="half",
            source="arXiv:2410.06511; activation checkpointing of every other product",
        ),
        System(
            "torchtitan-compile",
            "shards",
            selective="half",
            fused_norm=True,
            source="arXiv:2410.06511, with torch.compile",
        ),
        System(
            "fms",
            "shards",
            reduced_bytes=2,
            fused_norm=True,
            source="github.com/foundation-model-stack/fms-fsdp",
        ),
        System(
            "jax",
            "shards",
            reduced_bytes=2,
            attention="cudnn",
            fused_norm=True,
            fused_activation=True,
            source="MaxText and Paxml, JAX with XLA",
        ),
    )
}

# Attention kernels: whether they skip what the causal mask hides, and whether they write scores.
CAUSAL: Final[Mapping[str, bool]] = {
    "flash1": True,
    "flash2": True,
    "cudnn": True,
    "scores": False,
    "softmax": False,
}
