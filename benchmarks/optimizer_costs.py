"""Memory and the time of an update of every optimizer and precision, beside what is predicted.

    python -m benchmarks.optimizer_costs --out optimizer-costs.json

Memory: the peak of each rank of a small model in which states outweigh activations, measured by
torch's profiler (the median of three steps), beside that of `cost.timeline`; on 1, 2 and 4 ranks.
Update: CPU time of `step` per element on one thread, beside torch.optim's own optimizers, the
median of rounds in which all take turns. Muon: the same for smaller matrices, with Newton-Schulz
in bf16, beside torch.optim's and, where Python finds it, that of dion (github.com/microsoft/dion),
which is OLMo-core's. Prints all as tables; figures that are not measured again stay in the file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.optimizer_curves import WAYS, Way, processor
from meshwright.bench.memory_breakdown import measure
from meshwright.comm.world import World
from meshwright.cost.timeline import timeline
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import Layout
from meshwright.program.lower import lower
from meshwright.prove.case import Case
from meshwright.spec.parts import Part
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer, step_scaled
from meshwright.units import MIB

LAYOUTS: Final = {
    1: ("mb1",),
    2: ("shard2 zero1 mb1", "shard2 zero3 mb1", "tp2 mb1"),
    4: ("shard4 zero3 mb1", "shard2 zero2 tp2 mb1"),
}
_MODEL: Final = {
    "vocab_size": 2048,
    "dim": 128,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 384,
}
# Matrices of an update that is timed: how many, and their sides. Those of Muon are small,
# as most CPUs have no matmuls in bf16.
_COUNT, _SIDE, _MUON_SIDE = 4, 768, 128


def case_of(way: Way, label: str) -> Case:
    """Return a way of training the small model on a layout."""
    is_half = way.used == torch.bfloat16
    train = TrainSpec(
        batch=4,
        seq_len=16,
        precision="bf16" if is_half else "fp32",
        master="none" if way.kept == torch.bfloat16 else "fp32",
    )
    spec = OptimizerSpec(**way.optimizer)
    return Case(model_spec(**_MODEL), train, Layout.parse(label), optimizer=spec)


def _rank(rank: int, ranks: int, folder: str, names: Sequence[str]) -> None:
    """Measure ways on the layouts of so many ranks; rank 0 writes a line for each."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world = World(rank, ranks, torch.device("cpu"), store)
    for name in names:
        for label in LAYOUTS[ranks]:
            case = case_of(WAYS[name], label)
            target = target_of(case.train, world.device)
            program = lower(case.model, case.train, case.optimizer, case.layout, target)
            pair = [measure(world, case).peak.total, timeline(program, rank).peak.total]
            pairs = world.gather_on_host(pair)
            if rank == 0:
                row = {"way": name, "ranks": ranks, "layout": label}
                row["measured"], row["predicted"] = [
                    [int(pair[at]) for pair in pairs] for at in (0, 1)
                ]
                with Path(folder, "rows.jsonl").open("a") as out:
                    out.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measured_memory(ranks: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the peaks of ways on all layouts of so many ranks, in bytes of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, names), nprocs=ranks)
        lines = Path(folder, "rows.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def merged(rows: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return rows with those that were measured again in place of their older ones, in order."""
    by_case = {(row["way"], row["ranks"], row["layout"]): row for row in (*rows, *new)}
    ways, labels = list(WAYS), [label for some in LAYOUTS.values() for label in some]
    return sorted(
        by_case.values(), key=lambda row: (labels.index(row["layout"]), ways.index(row["way"]))
    )


def errors_of(row: Mapping[str, Any]) -> list[float]:
    """Return the relative error of the prediction for each rank."""
    pairs = zip(row["predicted"], row["measured"], strict=True)
    return [predicted / measured - 1 for predicted, measured in pairs]


def memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the peaks as a table, in MiB of the rank that has most, and how far all are off."""
    labels = list(dict.fromkeys(row["layout"] for row in rows))
    cells = {
        (row["way"], row["layout"]): f"{max(row['measured']) / MIB:.2f} "
        f"({max(row['predicted']) / MIB:.2f})"
        for row in rows
    }
    lines = [f"| way | {' | '.join(labels)} |", f"|---|{'--:|' * len(labels)}"]
    for name in WAYS:
        of_way = (cells.get((name, label), "not measured") for label in labels)
        lines.append(f"| {name} | {' | '.join(of_way)} |")
    errors = [abs(error) for row in rows for error in errors_of(row)]
    lines += ["", f"{len(errors)} ranks: {statistics.median(errors):.2%} in the median, "]
    lines[-1] += f"{max(errors):.1%} at worst"
    return "\n".join(lines)


def _steps(way: Way, side: int = _SIDE) -> Callable[[], None]:
    """Return a function that takes a step of a way's optimizer on some matrices."""
    parts = [Part(f"m{index}", (side, side), ("ffn", "dim")) for index in range(_COUNT)]
    weights = [nn.Parameter(torch.randn(part.shape).to(way.kept)) for part in parts]
    for weight in weights:
        weight.grad_dtype = torch.float32
        weight.grad = torch.randn(weight.shape)
    optimizer = build_optimizer(weights, parts, OptimizerSpec(**way.optimizer))
    norm = torch.tensor(1.0, dtype=torch.float64)
    return lambda: step_scaled(optimizer, norm, 1.0, 1.0)


def _of_peer(make: Callable[..., torch.optim.Optimizer], side: int = _SIDE) -> Callable[[], None]:
    weights = [nn.Parameter(torch.randn(side, side)) for _ in range(_COUNT)]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    optimizer = make(weights)
    return lambda: optimizer.step() and None


def measured_updates(rounds: int) -> dict[str, float]:
    """Return the CPU time of an update in ns per element, on one thread, by way."""
    kinds: dict[str, Callable[[], None]] = {
        "torch.optim.AdamW, fused": _of_peer(lambda w: torch.optim.AdamW(w, fused=True)),
        "torch.optim.AdamW, for-loop": _of_peer(lambda w: torch.optim.AdamW(w, foreach=False)),
        **{name: _steps(way) for name, way in WAYS.items() if way.used == way.kept},
    }
    return _in_turn(kinds, rounds, _SIDE)


def measured_muons(rounds: int) -> dict[str, float]:
    """Return the CPU time of an update by Muon in ns per element, on one thread, by package."""
    side = _MUON_SIDE
    kinds = {
        "Muon": _steps(Way({"name": "muon"}), side),
        "torch.optim.Muon": _of_peer(torch.optim.Muon, side),
    }
    if importlib.util.find_spec("dion") is not None:
        # Five iterations, too, with other coefficients; its other kernels are for GPUs.
        kernels: Any = {"use_triton": False, "use_polar_express": False}
        muon = importlib.import_module("dion").Muon
        kinds["dion.Muon"] = _of_peer(lambda w: muon(w, nesterov=True, **kernels), side)
    return _in_turn(kinds, rounds, side)


def _in_turn(kinds: Mapping[str, Callable[[], None]], rounds: int, side: int) -> dict[str, float]:
    """Return the median CPU time of each step, in ns per element; a first round is left out."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, step in kinds.items():
            started = time.process_time()
            step()
            seconds[name].append(time.process_time() - started)
    elements = _COUNT * side**2
    return {name: statistics.median(all_s[1:]) / elements * 1e9 for name, all_s in seconds.items()}


def update_table(updates: Mapping[str, float]) -> str:
    """Return times of updates as a table."""
    rows = [f"| {name} | {nanoseconds:.1f} |" for name, nanoseconds in updates.items()]
    return "\n".join(["| optimizer | ns per element |", "|---|--:|", *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the figures where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_costs")
    parser.add_argument("--only", choices=["memory", "update", "muon"])
    parser.add_argument("--ways", nargs="+", default=[""], help="of memory: names with a text")
    parser.add_argument("--ranks", nargs="+", type=int, default=[*LAYOUTS], choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    has_some = args.out is not None and args.out.exists()
    result: dict[str, Any] = json.loads(args.out.read_text()) if has_some else {}
    result["machine"] = f"{processor()}, torch {torch.__version__}"
    for kind, measured in (("update", measured_updates), ("muon", measured_muons)):
        if args.only in (None, kind):
            result[kind] = measured(args.rounds)
            print(update_table(result[kind]))
    if args.only in (None, "memory"):
        names = [name for name in WAYS if any(text in name for text in args.ways)]
        for ranks in args.ranks:
            new = measured_memory(ranks, names)
            result["memory"] = merged(result.get("memory", ()), new)
        print(memory_table(result["memory"]))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
