"""Training with DeepSpeed's engine: the same config, batches, events and run folder.

For users who must stay on its engine, and for comparing the two. Weights, samples, learning rates
and the normalization of the loss are Meshwright's; ZeRO, precision, accumulation, clipping and the
update are DeepSpeed's, over data-parallel ranks. The extra `deepspeed` installs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor
from torch.nn import functional as F

from meshwright.checkpoint.weights import write_weights
from meshwright.comm.world import World
from meshwright.data import IGNORE, Dataset
from meshwright.errors import MeshwrightError
from meshwright.kernels.recompute import recompute
from meshwright.models import Transformer, build_model
from meshwright.parallel.batch import Batch
from meshwright.spec.learning_rate import learning_rate
from meshwright.spec.model import unpadded
from meshwright.spec.parts import parts
from meshwright.training.between_steps import weights_source
from meshwright.training.events import Emit
from meshwright.training.held_out import Interruptible
from meshwright.training.loop import (
    Summary,
    ended,
    held_out_batches,
    is_due,
    keys,
    share,
    start_event,
)
from meshwright.training.optimizer import build_optimizer, set_learning_rate
from meshwright.training.readings import LeftOut, StepClock, step_event
from meshwright.training.run_folder import Job


def train(
    job: Job,
    world: World,
    dataset: Dataset,
    emit: Emit,
    asked_to_stop: Callable[[], bool],
    resume: bool = False,
) -> Summary:
    """Train to the last step, or to the step at which any rank was asked to stop.

    Saves weights only, as the config says and at the end. Raises `MeshwrightError` for a resumed
    run, because DeepSpeed's states are not saved.
    """
    if resume:
        raise MeshwrightError('train.engine = "deepspeed" keeps no state to resume from')
    config, layout = job.config, job.layout
    engine = open_engine(job, world)
    sampler = dataset.sampler("train", config.train.seq_len, config.train.batch)
    indices = share(config.train.batch, layout.mesh.data_rank(world.rank), layout.dp)
    read_rows, left_out = dataset.reader(sampler.rows, config.train.steps), LeftOut()
    emit(start_event(job, world, dataset, sampler, 0))
    clock, loss, step, stopped = StepClock(), float("nan"), 0, world.anyone(asked_to_stop())
    while step < config.train.steps and not stopped:
        step += 1
        world.recorder.step(step)
        clock.start()
        rows = read_rows(step - 1, indices)
        batch = Batch.of(rows, keys(config, step, indices)).to(world.device)
        clock.data_done()
        left_out.add(rows)
        lr = learning_rate(step, config.train.steps, config.optimizer)
        set_learning_rate(engine.optimizer, lr)
        mean = update(engine, batch, layout.microbatch, layout.dp)
        world.recorder.phase("log")
        loss, votes = world.sum_on_host([mean / layout.dp, float(asked_to_stop())])
        clock.stop()
        stopped = votes > 0
        last = stopped or step == config.train.steps
        if last or step % config.train.log_every == 0:
            norm = float(engine.get_global_grad_norm())
            emit(step_event(step, loss, norm, lr, 1.0, clock, left_out, job, world))
        if saved := last or is_due(config.checkpoint.every, step, last):
            save(engine, job, world, step)
        if not stopped and is_due(config.train.eval_every, step, last):
            started = time.perf_counter()
            batches = held_out_batches(step, job, world, dataset, emit)
            held_out = evaluate(engine, job, world, batches, asked_to_stop)
            seconds = time.perf_counter() - started
            if held_out is not None:
                emit({"event": "eval", "step": step, "loss": held_out, "seconds": seconds})
            stopped = held_out is None
        if stopped and not saved:
            save(engine, job, world, step)
    return ended(step, loss, stopped, None, job, world, emit)


def open_engine(job: Job, world: World) -> Any:
    """Return DeepSpeed's engine around Meshwright's model, with Meshwright's initial weights."""
    config, layout = job.config, job.layout
    spec = unpadded(config.model)
    model = build_model(spec, "cpu", config.train.seq_len)
    source = weights_source(job, world)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            region = tuple((0, size) for size in parameter.shape)
            parameter.copy_(source(name, tuple(parameter.shape), region))
    for block in model.blocks:
        recompute(block, layout.recompute)
    model.to(world.device)
    model.init_tables(world.device)
    optimizer = build_optimizer(list(model.parameters()), parts(spec), config.optimizer)
    is_bf16 = config.train.precision == "bf16"
    settings = {
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": layout.microbatches(config.train.batch),
        "gradient_clipping": config.train.clip_norm,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": layout.zero},
        "zero_allow_untested_optimizer": True,  # a momentum whose weight decay is decoupled
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": is_bf16},
        **({"communication_data_type": "fp32"} if config.train.reduce_dtype == "fp32" else {}),
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def update(engine: Any, batch: Batch, microbatch: int, ranks: int) -> float:
    """Run one optimizer step; return `ranks` times this rank's contribution to the loss, in nats.

    DeepSpeed averages over ranks and microbatches, but each loss here is a sum over tokens divided
    by the global number of targets. So it is multiplied by both counts before it goes to DeepSpeed.
    """
    count = (batch.targets != IGNORE).sum()
    if ranks > 1:
        dist.all_reduce(count)
    parts = batch.split(microbatch)
    total = 0.0
    for part in parts:
        mean = loss_sum(engine, part) / count.clamp(min=1) * ranks
        engine.backward(mean * len(parts))
        engine.step()
        total += mean.item()
    return total


def loss_sum(engine: Any, batch: Batch) -> Tensor:
    """Return the summed cross-entropy of a batch, in nats and fp32."""
    logits = engine(batch.inputs, segments=batch.segments, keys=batch.keys).float()
    targets = batch.targets.flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def evaluate(
    engine: Any, job: Job, world: World, rows: Iterable[Batch], asked_to_stop: Callable[[], bool]
) -> float | None:
    """Return the mean loss on the held-out split, over all ranks.

    None, on every rank, if any is asked to stop before the end.
    """
    world.recorder.phase("eval")
    batches = Interruptible(rows, world, asked_to_stop)
    engine.eval()
    total = count = 0.0
    for batch in batches:
        for part in batch.split(job.layout.microbatch):
            total += loss_sum(engine, part).item()
            count += float((part.targets != IGNORE).sum())
    engine.train()
    total, count = world.sum_on_host([total, count])
    return None if batches.is_broken_off else total / max(count, 1.0)


def save(engine: Any, job: Job, world: World, step: int) -> None:
    """Write the weights in fp32 as a step of the run, without other state."""
    world.recorder.phase("save")
    model: Transformer = engine.module
    state = {}
    for name, parameter in model.named_parameters():
        wide = safe_get_full_fp32_param(parameter)  # a collective under ZeRO
        state[name] = (parameter if wide is None else wide).detach()
    if world.rank == 0:
        facts = {"layout": job.layout.label, "engine": "deepspeed"}
        write_weights(job.checkpoints, job.config.model, state, facts, step, job.run)
    world.barrier()
