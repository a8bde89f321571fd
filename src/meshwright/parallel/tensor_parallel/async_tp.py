"""Matmuls in pieces beside the messages of sequence parallelism, by the compiler: async TP.

PyTorch's compiler finds a gather before products, and a sum behind one, and puts operators in their
place that exchange pieces through memory which the ranks of a link share (symmetric memory), each
while the next is computed. See github.com/pytorch/pytorch, torch/_inductor/fx_passes,
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
    """Return groups whose tp ranks multiply in pieces; a collective over them.

    Raises `MeshwrightError` where the device or this torch cannot.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise MeshwrightError(
            "train.async_tp = true needs GPUs of NVIDIA, whose ranks share memory; "
            "leave train.async_tp out"
        )
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is None:
        raise MeshwrightError(
            f"train.async_tp = true, but torch {torch.__version__} has no symmetric memory; leave "
            "train.async_tp out"
        )
    enable(groups.tp.name)
    return replace(groups, tp=replace(groups.tp, in_pieces=True))
