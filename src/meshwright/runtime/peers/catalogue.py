"""What is compared: the model, the modes of parallelism, and which peers have which of them.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

RANKS = 2
SINGLE = "single"  # one rank with the threads of all
DATA = (SINGLE, "ddp", "zero1", "zero2", "zero3", "bf16")  # each rank reads other rows
CONTEXT = ("ring", "ulysses")  # each rank reads half of each row
MODES = (SINGLE, "ddp", "zero1", "zero2", "zero3", "tp", "pp", *CONTEXT, "bf16")


@dataclass(frozen=True)
class PeerSizes:
    """The sizes of the model and of a step: `seq` tokens per row, `batch` rows."""

    vocab: int = 8192
    dim: int = 512
    layers: int = 8
    heads: int = 8
    ffn: int = 1408
    seq: int = 512
    batch: int = 8


class Peer(NamedTuple):
    """A framework to compare: modules it needs, the package whose version to report, its modes."""

    needs: tuple[str, ...]
    package: str
    modes: tuple[str, ...]


# The adapter of peer X is meshwright.runtime.peers.run_X.
PEERS: Mapping[str, Peer] = {
    "native": Peer(
        ("torch",), "torch", (SINGLE, "ddp", "zero1", "zero2", "zero3", "tp", "pp", "bf16")
    ),
    "accelerate": Peer(
        ("accelerate", "transformers"),
        "accelerate",
        (SINGLE, "ddp", "zero2", "zero3", "tp", "bf16"),
    ),
    "deepspeed": Peer(
        ("deepspeed", "transformers"),
        "deepspeed",
        (SINGLE, "ddp", "zero1", "zero2", "zero3", "tp", "pp", "ulysses", "bf16"),
    ),
    "torchtitan": Peer(
        ("torchtitan",), "torchtitan", (SINGLE, "ddp", "zero2", "zero3", "tp", "pp", "bf16")
    ),
    "megatron": Peer(("megatron.core",), "megatron-core", ("ddp", "zero1", "tp", "pp", "bf16")),
    "olmo": Peer(("olmo_core",), "ai2-olmo-core", ("ddp", "zero3", "tp", "pp", "ulysses", "bf16")),
    "picotron": Peer(("picotron", "safetensors"), "picotron", ("ddp", "tp", "pp", "ring")),
    "litgpt": Peer(("litgpt", "lightning"), "litgpt", (SINGLE, "ddp", "zero2", "zero3", "bf16")),
}


def ranks_of(mode: str) -> int:
    """Return how many ranks a mode has."""
    return 1 if mode == SINGLE else RANKS


def adapter(peer: str) -> str:
    """Return the name of the module that trains with a peer."""
    return f"meshwright.runtime.peers.{peer if peer == 'native' else f'run_{peer}'}"
