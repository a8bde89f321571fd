"""Writes a script that shows a wrong gradient of transformers' layouts, and needs nothing else.

It has the model's config, the layout and random tokens, and compares one process with the ranks
by itself: no line of the program, and none of Meshwright.
"""

from __future__ import annotations

from collections.abc import Mapping
from pprint import pformat
from typing import Any, Final

SCRIPT: Final = "smallest.py"
# What it exits with if a gradient is wrong, which no error of Python does.
EXIT_WRONG: Final = 9
_OFF: Final = 1e-3

_TEMPLATE: Final = '''\
"""A gradient that differs between {world} ranks and one process.

torchrun --nproc-per-node {world} {script}

Exit code {exit_wrong} if it differs. {versions}.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import {config_class}, {model_class}
from transformers.distributed import DistributedConfig

CONFIG = {config}
LAYOUT = {layout}
TENSORS = {tensors}
DATA_RANK_OF = {data_rank_of}  # ranks of one data rank read the same rows
ROWS, LENGTH, MICROBATCHES = {rows}, {length}, {microbatches}


def compute_gradients(model, data_ranks):
    """Return the gradients of the mean loss over some data ranks' microbatches."""
    for microbatch in range(MICROBATCHES):
        for data_rank in data_ranks:
            generator = torch.Generator().manual_seed(100 * microbatch + data_rank)
            ids = torch.randint(3, CONFIG["vocab_size"], (ROWS, LENGTH), generator=generator)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / MICROBATCHES / len(data_ranks)).backward()
    return {{name: p.grad for name, p in model.named_parameters()}}


def write_model(folder):
    """Save a random model, away from the ones and zeros of a new one."""
    torch.manual_seed(0)
    model = {model_class}({config_class}(**CONFIG)).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)


def main():
    dist.init_process_group("gloo")
    rank, number = dist.get_rank(), torch.tensor(int.from_bytes(os.urandom(7), "big"))
    dist.broadcast(number, 0)
    folder = os.path.join(tempfile.gettempdir(), f"smallest-{{number.item()}}")
    if rank == 0:
        write_model(folder)
    dist.barrier()
    plain = {model_class}.from_pretrained(folder, dtype=torch.float32).train()
    expected = compute_gradients(plain, range(max(DATA_RANK_OF) + 1))
    layout = DistributedConfig(**LAYOUT)
    model = {model_class}.from_pretrained(
        folder, distributed_config=layout, dtype=torch.float32
    ).train()
    computed = compute_gradients(model, [DATA_RANK_OF[rank]])
    worst = 0.0
    for name in TENSORS:
        gradient = computed[name]
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        off = float((gradient - expected[name]).norm() / expected[name].norm())
        print(f"rank {{rank}}: the gradient of {{name}} is {{off:.2g}} of its size off", flush=True)
        worst = max(worst, off)
    largest = torch.tensor(worst)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    os._exit({exit_wrong} if largest > {off} else 0)


main()
'''


def standalone_script(verdict: Mapping[str, Any]) -> str | None:
    """Return a script for the first fault of a verdict, None if it cannot be one.

    It can for a wrong gradient of a model of transformers that its `DistributedConfig` shards.
    """
    case, fault = verdict["case"], verdict["faults"][0]
    facts = case.get("transformers")
    if facts is None or fault["quantity"] != "gradient":
        return None
    versions = verdict["versions"]
    return _TEMPLATE.format(
        world=verdict["world"],
        script=SCRIPT,
        exit_wrong=EXIT_WRONG,
        versions=", ".join(f"{name} {versions[name]}" for name in versions),
        config_class=facts["config_class"],
        model_class=facts["class"],
        config=pformat(facts["config"], width=96, sort_dicts=False),
        layout=pformat(facts["layout"], width=90, sort_dicts=False),
        tensors=pformat(list(fault["tensors"])[:4], width=90),
        data_rank_of=case["data_rank_of"],
        rows=case["rows"],
        length=case["length"],
        microbatches=case["microbatches"],
        off=_OFF,
    )
