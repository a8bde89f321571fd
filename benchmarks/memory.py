"""Peak memory per rank under each parallelism, by what it is made of, beside what theory gives.

    python -m benchmarks.memory --out docs/benchmarks/memory.json

Two models: in the first the states (weights, gradients, AdamW) dominate, in the second the
activations. Every layout takes four microbatches a rank in fp32. Of the peaks of three steps after
a first one the median is taken, and of the ranks the highest. Prints a table; the last line is the
command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.bench.memory_breakdown import AllocatedMemory, measure
from meshwright.comm.world import World
from meshwright.layout import Layout
from meshwright.program.lower import Program, lower
from meshwright.prove.case import Case
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.units import MIB

MICROBATCHES: Final = 4


@dataclass(frozen=True)
class CostInputs:
    """A model, the length of a row, and the layouts that it is measured under, `{n}` ranks each."""

    name: str
    model: ModelSpec
    seq_len: int
    layouts: tuple[str, ...]


STATES: Final = CostInputs(
    "states",
    model_spec(dim=192, n_layers=16, n_heads=4, n_kv_heads=4, ffn_dim=512, vocab_size=256),
    32,
    ("dp{n}", "shard{n} zero1", "shard{n} zero2", "shard{n} zero3", "tp{n}", "pp{n} 1f1b"),
)
ACTIVATIONS: Final = CostInputs(
    "activations",
    model_spec(dim=128, n_layers=8, n_heads=4, n_kv_heads=4, ffn_dim=352, vocab_size=512),
    2048,
    ("tp{n}", "tp{n} sp", "cp{n}-ring", "cp{n}-ulysses", "pp{n} 1f1b"),
)


def theory(program: Program, pp_rank: int) -> AllocatedMemory:
    """Return what a rank of a fp32 Llama holds at its peak after the papers, in bytes.

    States: 4 bytes per weight, 4 per gradient and K = 8 for AdamW, of which ZeRO cuts as much as
    its stage says (arXiv:1910.02054, figure 1). Activations: what our blocks keep for the backward,
    cut as arXiv:2205.05198, table 2, says: norms and stream with sp only, all else over tp; over
    cp by the sequence; a pipeline holds as many microbatches as ranks follow (1F1B).
    """
    layout, model = program.layout, program.model
    stages = program.held(pp_rank)
    names = {name for stage in stages for name in program.parameters(stage)}
    shardings = [program.shardings[name] for name in names]
    weights = sum(s.part.numel / (s.tp if s.tp_dim is not None else 1) for s in shardings)
    ranks = layout.shard_ranks
    cuts = [ranks if layout.zero >= stage else 1 for stage in (3, 2, 1)]
    tokens = layout.microbatch * program.sequence
    stream_ranks = layout.tp if layout.sp else 1
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    # Stream and norm, before attention and before the MLP: 4. q, k, v and what attention gives;
    # gate, up, the activated gate and their product.
    layer = (
        4 * model.dim / stream_ranks + (2 * heads + 2 * kv_heads + 4 * model.ffn_dim) / layout.tp
    )
    in_flight = min(layout.pp - pp_rank, program.microbatches)
    kept = in_flight * layer * sum(len(stage.layers) for stage in stages)
    if stages[-1].is_last:  # the last norm; softmax, its gradient and that of the logits
        kept += 2 * model.dim / stream_ranks + 3 * model.vocab_size / layout.tp
    return AllocatedMemory(
        parameters=4 * weights / cuts[0],
        gradients=4 * weights / cuts[1],
        optimizer=8 * weights / cuts[2],
        rest=4 * tokens * kept,
    )


def row(world: World, setting: CostInputs, label: str) -> dict[str, Any]:
    """Return what the rank with the highest peak holds, beside the theory; a collective."""
    layout = Layout.parse(f"{label} mb1")
    train = TrainSpec(batch=MICROBATCHES * layout.dp, seq_len=setting.seq_len)
    found = measure(world, Case(setting.model, train, layout))
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, (found.peak, found.start))
    rank = max(range(world.size), key=lambda rank: everyone[rank][0].total)
    program = lower(setting.model, train, OptimizerSpec(), layout)
    expected = theory(program, layout.mesh.coordinates(rank)["pp"])
    return {
        "setting": setting.name,
        "layout": label,
        "ranks": world.size,
        "rank": rank,
        "peak": int(everyone[rank][0].total),
        "theory_peak": int(expected.total),
        "measured": asdict(everyone[rank][0]),
        "theory": asdict(expected),
        "between_steps": int(everyone[rank][1].total),
    }


def _rank(rank: int, world_size: int, folder: str) -> None:
    """Measure every layout as one rank; rank 0 writes the rows."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    world = World(rank, world_size, torch.device("cpu"), store)
    rows = []
    for setting in (STATES, ACTIVATIONS):
        layouts = ("",) if world_size == 1 else setting.layouts
        rows += [row(world, setting, name.format(n=world_size)) for name in layouts]
    if rank == 0:
        Path(folder, f"rows{world_size}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


COLUMNS: Final = ("parameters", "gradients", "optimizer", "rest")


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown: MiB measured, and in brackets what theory gives."""
    lines = [
        "| layout | peak | parameters | gradients | AdamW | rest |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for one in rows:
        have, expected = one["measured"], one["theory"]
        cells = [f"{one['peak'] / MIB:.0f} ({one['theory_peak'] / MIB:.0f})"]
        for name in COLUMNS:
            text = f"{have[name] / MIB:.1f}"
            if name == "parameters" and have["gathered"]:
                text += f" + {have['gathered'] / MIB:.1f}"
            if name == "rest" and have["buffers"]:
                text += f" + {have['buffers'] / MIB:.1f}"
            cells.append(f"{text} ({expected[name] / MIB:.1f})")
        label = one["layout"] or "none"
        lines.append(f"| {one['setting']}: {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in args.ranks:
            mp.spawn(_rank, (count, folder), nprocs=count)
            rows += json.loads(Path(folder, f"rows{count}.json").read_text())
    print(as_table(rows))
    command = f"python -m benchmarks.memory --ranks {' '.join(map(str, args.ranks))}"
    result = {
        "command": command,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "unit": "bytes",
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(command)


if __name__ == "__main__":
    main()
