"""Peak memory of fine-tuning all weights, adapters, and adapters on four bits: predicted, measured.

    python -m benchmarks.fine_tuning --out docs/benchmarks/fine-tuning.json

A model whose weights dominate is trained in bf16 by one rank and by two, and measured by the
profiler on CPU ranks. The prediction of the same step is beside it, and that of Llama 3 8B on one
H100, which is not measured. Prints the tables of docs/guides/lora.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.bench.memory_breakdown import measure
from meshwright.comm.world import World
from meshwright.cost.price import worst_memory
from meshwright.cost.timeline import timeline
from meshwright.layout import Layout
from meshwright.planner.plan import cost_inputs_of
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.spec.loading import load_config
from meshwright.spec.lora import Lora
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.units import GIB, MIB

ADAPTERS: Final = Lora(rank=16, alpha=16)
WAYS: Final[dict[str, Lora | None]] = {
    "all weights": None,
    "adapters": ADAPTERS,
    "adapters, 4-bit": ADAPTERS.model_copy(update={"base": "nf4"}),
}
SMALL: Final = model_spec(
    dim=256, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=768, vocab_size=256
)
TRAIN: Final = TrainSpec(batch=2, seq_len=64, precision="bf16")
LAYOUTS: Final = {1: ("dp1 mb1",), 2: ("shard2 zero1 mb1", "tp2 sp mb1", "pp2 1f1b mb1")}
# What is predicted of a device that nobody has measured here.
LARGE: Final = (
    *("model.preset=llama-3-8b", "cluster.preset=h100-sxm", "cluster.devices_per_node=1"),
    *("train.batch=8", "train.seq_len=2048"),
)
LARGE_LAYOUT: Final = "dp1 mb1 recompute-full"


def adapted(model: ModelSpec, lora: Lora | None) -> ModelSpec:
    """Return a model of which adapters are trained, or all weights."""
    return model.model_copy(update={"lora": lora})


def row(world: World, trained: str, label: str) -> dict[str, Any]:
    """Return what the rank with the highest peak holds, measured and predicted; a collective."""
    layout, model = Layout.parse(label), adapted(SMALL, WAYS[trained])
    found = measure(world, Case(model, TRAIN, layout))
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, int(found.peak.total))
    program = lower(model, TRAIN, OptimizerSpec(), layout)
    return {
        "trained": trained,
        "layout": label,
        "measured": max(everyone),
        "predicted": max(timeline(program, rank).peak.total for rank in range(world.size)),
    }


def predicted() -> list[dict[str, Any]]:
    """Return what is predicted of Llama 3 8B on one H100."""
    setting = cost_inputs_of(load_config(None, list(LARGE)))
    found = []
    for trained, lora in WAYS.items():
        own = replace(setting, model=adapted(setting.model, lora))
        memory = worst_memory(own, Layout.parse(LARGE_LAYOUT))
        weights = sum(term.bytes for term in memory.terms if term.category == "weights")
        found.append(
            {
                "trained": trained,
                "layout": LARGE_LAYOUT,
                "predicted": int(memory.total),
                "weights": int(weights),
                "fits": memory.fits,
            }
        )
    return found


def _rank(rank: int, world_size: int, folder: str) -> None:
    """Measure every layout as one rank; rank 0 writes the rows."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    world = World(rank, world_size, torch.device("cpu"), store)
    rows = [row(world, trained, label) for label in LAYOUTS[world_size] for trained in WAYS]
    if rank == 0:
        Path(folder, f"rows{world_size}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def tables(content: dict[str, Any]) -> str:
    """Return the tables of the guide: what was measured, then what is predicted alone."""
    lines = ["| layout | trained | measured | predicted |", "|---|---|--:|--:|"]
    for one in content["rows"]:
        cells = (f"{one[key] / MIB:.0f} MiB" for key in ("measured", "predicted"))
        lines.append(f"| `{one['layout']}` | {one['trained']} | {' | '.join(cells)} |")
    lines += ["", "| trained | weights | predicted peak | fits in 80 GB |", "|---|--:|--:|---|"]
    for one in content["large"]:
        cells = (f"{one[key] / GIB:.1f} GiB" for key in ("weights", "predicted"))
        fits = "yes" if one["fits"] else "no"
        lines.append(f"| {one['trained']} | {' | '.join(cells)} | {fits} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, predict, print the tables, and write them as JSON where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning", description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world_size in LAYOUTS:
            mp.start_processes(_rank, (world_size, folder), world_size, start_method="spawn")
            rows += json.loads(Path(folder, f"rows{world_size}.json").read_text())
    content = {
        "command": "python -m benchmarks.fine_tuning",
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "rows": rows,
        "large": predicted(),
    }
    print(tables(content))
    if args.out is not None:
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
