"""`System`: how training systems differ when they run the same layout.

Only facts, each with its source; measured values are in the calibration under the system's name.
`meshwright` is this package's engine. Most published measurements are of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

OURS: Final = "meshwright"
# Parts of a layer that selective recomputation may name.
Module = Literal["core_attn", "mlp", "layernorm", "activation"]


@dataclass(frozen=True)
class System:
    """How a training system stores states, which kernels it uses, and what it overlaps.

    `keeps` = "shards": the fp32 shards are the weights, gathered in the dtype of matmuls (FSDP).
    "whole": each rank has whole weights in that dtype, and the optimizer has fp32 master weights.
    `gradient_bytes` and `reduced_bytes` are per element of an accumulated gradient and of one being
    reduced (None: as `train.reduce_dtype` says). `attention` is its usual kernel. `selective`
    recomputation recomputes everything but matmuls ("blocks"), only attention, half of the matmuls
    too, or `modules`. `fused_norm`: a norm is one kernel. `fused_activation`: a gated activation
    saves only its two inputs. `splits_loss`: logits at the loss are sharded over tp.
    `gathers_again`: with sp, matmul inputs are gathered again in the backward, always or only in
    layers that are not recomputed. `overlaps_tp`: gradients of matmul inputs are summed over tp
    while those of weights are computed. `overlaps_shared`: expert messages overlap with the shared
    expert. `even_stages`: stages have equal numbers of layers, not equal cost. `fuses_loss`: the
    backward computes head and loss in chunks of tokens; another system does so in `loss_chunks`.
    `parts_ends`: ZeRO-3 gathers untied embedding and head only for the pass that uses each.
    `sends_once`: a token is sent once to a rank and to a node, however many of its experts are
    there. `sums_apart`: a separate kernel accumulates gradients, which no fitted constant includes.
    `keeps_quantised`: inputs of float8 matmuls are saved in float8.
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
