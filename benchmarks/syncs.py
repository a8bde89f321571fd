"""Whether a training step makes the host wait for the GPU: CUDA itself says so.

    python -m benchmarks.syncs

Trains steps of one rank with `torch.cuda.set_sync_debug_mode("error")`, under which whatever
synchronises raises, and prints a JSON row for each case. Without a GPU (`--device cpu`) the short
ones of them run, and nothing is checked: `tests/bench/test_syncs.py` counts what would have been.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.comm.groups import open_groups
from meshwright.comm.world import World
from meshwright.kernels.fp32_matmuls import target_of
from meshwright.layout import Layout
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.readings import ArrivingNumbers
from meshwright.training.update import LossScale, update


class Steps(NamedTuple):
    """What is trained: its precision, layout and optimizer, and what else is not as usual."""

    precision: str
    label: str
    optimizer: str = "adamw"
    packed: bool = False
    length: int = 128
    compiled: bool = False

    @property
    def name(self) -> str:
        """A line that tells it from the others."""
        more = [f"{self.length} tokens"] if self.length > 128 else []
        more += ["packed"] if self.packed else []
        more += ["compiled"] if self.compiled else []
        return " ".join((self.precision, self.label, self.optimizer, *more))


CASES = (
    Steps("fp32", "dp1 mb2"),
    Steps("bf16", "dp1 mb2"),
    Steps("bf16", "dp1 mb2", packed=True),
    Steps("bf16", "dp1 mb1 recompute-selective"),
    Steps("bf16", "dp1 mb2", "sgd"),
    Steps("fp16", "dp1 mb2"),
    # As many tokens as a GPU trains with: some operations go other ways then.
    Steps("bf16", "dp1 mb2", length=4096),
    Steps("bf16", "dp1 mb2", length=4096, compiled=True),
    Steps("bf16", "dp1 mb2", packed=True, compiled=True),
)
# Those that a CPU, on which nothing is checked, is done with soon.
SHORT = tuple(case for case in CASES if case.length == 128 and not case.compiled)
WARM = 2


def run(world: World, of: Steps) -> None:
    """Train some steps, the last of them with no leave to synchronise; raises where one does."""
    model = model_spec(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=512)
    spec = TrainSpec(batch=4, seq_len=of.length, precision=of.precision, compile=of.compiled)  # type: ignore[arg-type]
    layout = Layout.parse(of.label)
    program, source = (
        lower(
            model, spec, OptimizerSpec(), layout, target_of(spec, world.device, packed=of.packed)
        ),
        seeded(model, 0),
    )
    groups = open_groups(layout, world)
    parallel = build(program, groups, world.device, source, compiled=of.compiled)
    shards = Shards(parallel.held, on_host=False)
    made = build_optimizer(
        shards.leaves, shards.parts, OptimizerSpec(name=of.optimizer, momentum=0.9)
    )  # type: ignore[arg-type]
    case, scale = Case(model, spec, layout, packed=of.packed), LossScale.of(spec)
    batch = mine(make_batch(case, 0), program, world)
    for step in range(WARM + 1):
        if step == WARM and world.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            done = update(parallel, batch, world, shards, made, scale, spec.clip_norm)
            numbers = ArrivingNumbers(done.numbers())
        finally:
            if world.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        numbers.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        world = World(0, 1, torch.device(args.device), store)
        for case in CASES if args.device == "cuda" else SHORT:
            row: dict[str, Any] = {"of": case.name, "waits": None}
            try:
                run(world, case)
            except Exception as error:  # the other cases have their say
                told = traceback.format_exc().splitlines()
                row |= {"waits": (str(error) or repr(error)).splitlines()[0], "told": told[-40:]}
            rows.append(row)
        dist.destroy_process_group()
    print(json.dumps({"rows": rows, "checked": args.device == "cuda"}))
    return 1 if any(row["waits"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
