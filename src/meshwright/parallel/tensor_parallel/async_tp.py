"""Async TP: the compiler pipelines matmuls with the collectives of sequence parallelism.

PyTorch's compiler finds an all-gather before matmuls, and a reduce-scatter after one, and replaces
them by operators that exchange pieces through memory which the ranks share (symmetric memory),
while the next piece is computed. See github.com/pytorch/pytorch, torch/_inductor/fx_passes,
micro_pipeline_tp.py; the idea is that of doi.org/10.1145/3567955.3567959.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from meshwright.comm.groups import Groups
from meshwright.errors import MeshwrightError

# Of `torch.compile`.
OPTIONS: Final = {"_micro_pipeline_tp": True}


def take_async_tp(groups: Groups, device: torch.device) -> Groups:
    """Enable symmetric memory for the tp group, and return groups marked for async TP.

    A collective over tp. Raises `MeshwrightError` where the device or this torch cannot.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise MeshwrightError(
            "train.async_tp = true needs GPUs of NVIDIA, whose ranks share memory; "
            "leave train.async_tp out"
        )
    from meshwright.torch_private import symmetric_memory

    enable = getattr(symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is None:
        raise MeshwrightError(
            f"train.async_tp = true, but torch {torch.__version__} has no symmetric memory; leave "
            "train.async_tp out"
        )
    enable(groups.tp.name)
    return replace(groups, tp=replace(groups.tp, in_pieces=True))
