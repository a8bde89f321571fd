"""A step of the engine beside the plain loop, with the same kernels: a ratio, no absolute time."""

import statistics
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.comm.groups import open_groups
from meshwright.data import IGNORE
from meshwright.layout import Layout
from meshwright.models import build_model, init_model
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update
from ranks import ranks

MODEL = {"vocab_size": 2048, "dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4}
PAIRS = 12


def engine(case, world):
    program = lower(case.model, case.train, case.optimizer, case.layout)
    groups = open_groups(case.layout, world)
    parallel = build(program, groups, world.device, seeded(case.model, 0))
    shards = Shards(parallel.held, on_host=False)
    optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec())
    batch, scale = mine(make_batch(case, 0), program, world), LossScale.of(case.train)

    def step():
        return update(parallel, batch, world, shards, optimizer, scale, 1.0).loss.item()

    return step


def plain(case):
    model = init_model(build_model(case.model, "cpu", case.train.seq_len), case.model, 0)
    spec = OptimizerSpec()
    settings = {"betas": spec.betas, "eps": spec.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, fused=True, **settings)
    batch = make_batch(case, 0)
    count = (batch.targets != IGNORE).sum()

    def step():
        total = 0.0
        for part in batch.split(case.layout.microbatch):
            logits = model(part.inputs).flatten(0, 1)
            targets = part.targets.flatten()
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


@pytest.mark.perf
@ranks(1)
def test_a_step_costs_no_more_than_the_plain_loops(world):
    layout = Layout(microbatch=4)
    case = Case(model_spec(**MODEL), TrainSpec(batch=8, seq_len=128), layout)
    steps = {"engine": engine(case, world), "plain": plain(case)}
    first = {name: step() for name, step in steps.items()}
    assert abs(first["engine"] / first["plain"] - 1) < 1e-5
    seconds = {name: [] for name in steps}
    for _ in range(PAIRS):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(seconds["engine"], seconds["plain"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"plain loop's seconds over the engine's: {ratio:.2f}")
    assert ratio > 0.8, sorted(ratios)
