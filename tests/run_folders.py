"""Run folders made by hand: every file that a run writes, without training anything."""

import json
import math

from meshwright.program.lower import lower
from meshwright.program.profile import (
    MemoryPoint,
    RankProfile,
    Span,
    StepProfile,
    Traffic,
    to_json,
)
from meshwright.program.timing import end_times
from meshwright.runtime.session import prepare_job
from meshwright.training.run_folder import create
from runs import clean_environ

SECONDS = {"F": 0.010, "I": 0.011, "W": 0.008, "B": 0.019}
MIB = 2**20


def step_profile(config, layout, source="predicted", slower=1.0, limit=64 * MIB):
    """A profile whose actions follow the program's table, each taking a fixed time."""
    program = lower(config.model, config.train, config.optimizer, layout)
    costs = {kind: seconds * slower for kind, seconds in SECONDS.items()}
    done = end_times(program.compute_tables, program.stage_ranks, costs)
    finish = max(done.values(), default=0.0)
    ranks = []
    for place, table in enumerate(program.compute_tables):
        rank = layout.mesh.rank({"pp": place})
        spans, memory, held = [], [], 0
        spans.append(Span("host", "input", 0.0, 0.001))
        for action in table:
            last = action._replace(kind="W") if action.kind == "B" else action
            end = 0.001 + done[last]
            start = end - costs[action.kind]
            spans.append(Span("compute", action.kind, start, end, action.stage, action.microbatch))
            held += {"F": 2, "B": -2, "W": -2, "I": 0}[action.kind]
            kinds = {"parameters": 8 * MIB, "gradients": 8 * MIB, "activations": held * MIB}
            memory.append(MemoryPoint(str(action), end, {**kinds, "optimizer": 16 * MIB}))
        if layout.pp > 1 and place:
            first = spans[1].start
            spans.append(Span("messages", "recv", 0.001, first, axis="pp", bytes=4096))
        spans.append(Span("host", "reduce", 0.001 + finish, 0.003 + finish))
        spans.append(Span("host", "update", 0.003 + finish, 0.006 + finish))
        memory.append(MemoryPoint("update", 0.006 + finish, {**kinds, "optimizer": 16 * MIB}))
        work = sum(span.seconds for span in spans if span.track == "compute")
        causes = {"compute": work, "optimizer": 0.003, "input": 0.001, "data": 0.002}
        causes["bubble"] = finish - work
        traffic = [Traffic("all_reduce", "world", 8, 1, 0.001)]
        if layout.pp > 1:
            traffic.append(Traffic("send", "pp", 4096, program.microbatches, 0.002))
        if layout.tp > 1:
            traffic.append(Traffic("all_reduce", "tp", 65536, 4 * program.microbatches, None))
        held_stages = tuple(stage.index for stage in program.held(place))
        at = dict(layout.mesh.coordinates(rank))
        ranks.append(
            RankProfile(rank, at, held_stages, tuple(spans), tuple(memory), tuple(traffic), causes)
        )
    return StepProfile(
        source,
        layout.model_dump(mode="json"),
        layout.label,
        "two cores",
        tuple(ranks),
        step=3 if source == "measured" else None,
        step_time_s=0.006 + finish,
        tokens_per_s=1e4,
        memory_limit=limit,
    )


def step_event(step, steps, world, **more):
    loss = 5.0 - 2.5 * step / steps + 0.1 * math.sin(step)
    return {
        "event": "step",
        "step": step,
        "loss": loss,
        "grad_norm": 1.0 + 0.2 * math.cos(step),
        "lr": 1e-3 * (1 - step / steps),
        "step_time_s": 0.1,
        "tokens_per_s": 10240.0 + 100 * math.sin(step),
        "tokens_per_s_per_device": 10240.0 / world,
        "tflops_per_device": 0.02,
        "mfu": None,
        "peak_memory_bytes": {str(rank): 400 * MIB + rank for rank in range(world)},
        "data_time_share": 0.01,
        **more,
    }


def events_of(config, world, steps=40):
    start = {
        "event": "start",
        "time": 1.79e9,
        "from_step": 0,
        "steps": steps,
        "world": world,
        "device": "CPU (hand made)",
        "parameters": 123456,
        "unigram_entropy": 3.1,
        "torch": "2.13.0",
    }
    yield start
    for step in range(1, steps + 1):
        yield step_event(step, steps, world)
        if step % 10 == 0:
            yield {"event": "eval", "step": step, "loss": 5.1 - 2.4 * step / steps, "seconds": 0.2}
    yield {"event": "end", "step": steps, "loss": 2.5, "stopped": False}


def write_run(config, *, profile=True, events=None, more=(), slower=1.2):
    """Write a run folder as a finished run leaves it and return its path."""
    job = prepare_job(config, clean_environ())
    create(job)
    path = job.folder.path
    said = list(events_of(config, job.layout.world)) if events is None else list(events)
    lines = [json.dumps(event) for event in [*said, *more]]
    job.folder.events.write_text("".join(f"{line}\n" for line in lines))
    if profile:
        profiles = [
            step_profile(config, job.layout),
            step_profile(config, job.layout, "measured", slower),
        ]
        (path / "ledger.json").write_text(json.dumps(to_json(profiles)))
    return path
