"""Nothing in a step waits for the device, and what it computed is read once, a step later."""

from pathlib import Path

import pytest
import torch

from meshwright.comm.groups import open_groups
from meshwright.data import open_data
from meshwright.layout import Layout
from meshwright.parallel.batch import Feed
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.runtime.session import prepare_job
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training import loop
from meshwright.training.optimizer import build_optimizer
from meshwright.training.readings import ArrivingNumbers, DeviceLaps, StepClock
from meshwright.training.run_folder import create, read_job
from meshwright.training.update import LossScale, update
from ranks import on_ranks
from runs import clean_environ
from syncs import Syncs

MODEL = model_spec(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=64, ffn_dim=64)


def test_what_synchronises_is_noticed():
    x = torch.arange(4.0)
    for read in (
        lambda: x[0].item(),
        lambda: bool(x[0] > 0),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: float(x[1]),
        lambda: x.new_tensor([1.0]),
        lambda: torch.tensor(2.0),
    ):
        with Syncs() as found:
            read()
        assert found
    with Syncs() as found:
        (x * 2).sum().clamp(min=1).masked_fill(x[0] > 0, 1)
    assert found == []


LAYOUTS = {
    "dp2 mb2": ("fp32", "bf16", "fp16"),
    "shard2 zero1 mb1": ("bf16",),
    "shard2 zero3 mb1": ("fp32", "bf16", "fp16"),
    "tp2 sp mb2": ("fp32", "bf16"),
    "pp2 1f1b mb1": ("fp32",),
    "pp2 zbv v2 mb1": ("bf16",),
    "cp2-ring mb2": ("fp32",),
    "cp2-ulysses mb2": ("bf16",),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("label", LAYOUTS)
def test_a_step_reads_nothing_from_the_device(label):
    for precision in LAYOUTS[label]:
        for found in on_ranks(2, syncs_of, label=label, precision=precision):
            assert found == [], (precision, found)


def syncs_of(world, label, precision):
    layout = Layout.parse(label)
    spec = TrainSpec(batch=4, seq_len=16, precision=precision, clip_norm=0.5)
    case = Case(MODEL, spec, layout, packed=True)
    program = lower(case.model, case.train, case.optimizer, layout)
    parallel = build(program, open_groups(layout, world), world.device, seeded(MODEL, 0))
    shards = Shards(parallel.held, on_host=False)
    optimizer = build_optimizer(shards.leaves, shards.parts, OptimizerSpec())
    batch, scale = mine(make_batch(case, 0), program, world), LossScale.of(spec)
    update(parallel, batch, world, shards, optimizer, scale, spec.clip_norm)
    with Syncs() as found:
        update(parallel, batch, world, shards, optimizer, scale, spec.clip_norm)
    return list(found)


def read_behind(world, folder, behind):
    """The body of a rank: train the job of a folder, reading so many steps late."""
    order, events = [], []
    real_update, real_read, real_bring = loop.update, ArrivingNumbers.read, Feed.bring

    def seen_update(*args):
        order.append("u")
        return real_update(*args)

    def seen_bring(feed, batch):
        order.append("b")
        return real_bring(feed, batch)

    def seen_read(numbers):
        order.append("r")
        return real_read(numbers)

    job = read_job(Path(folder))
    dataset = open_data(job.config.data, job.cache, vocab_size=job.config.model.vocab_size)

    def asked():
        return order.count("u") >= 7

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "lag", lambda device, scale: behind)
        patch.setattr(loop, "update", seen_update)
        patch.setattr(ArrivingNumbers, "read", seen_read)
        patch.setattr(Feed, "bring", seen_bring)
        summary = loop.train(job, world, dataset, events.append, asked)
    return "".join(order), events, summary


TIMES = ("time", "seconds", "stall_s", "data_time_share", "path", "bytes", "mfu")


def said(events):
    """What events say but for times."""
    keys = [{k for k in event if k not in TIMES and "_per_" not in k} for event in events]
    keys = [some - {"step_time_s", "peak_memory_bytes"} for some in keys]
    return [{k: event[k] for k in some} for some, event in zip(keys, events, strict=True)]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Stopped at the seventh step; the fourth is followed by an evaluation, the fifth by a save.
        (
            ("train.eval_every=4", "checkpoint.every=5", "log.trace=0"),
            "bu bur bur burr bur bu burr",
        ),
        # The second and third steps are recorded, between reads.
        (("train.log_every=2", "log.trace=100"), "bu r bur bur bu bur bur burr"),
    ],
)
def test_steps_are_read_one_behind_and_say_the_same(config, overrides, expected):
    runs = []
    for behind in (0, 1):
        name = f"log.name=behind{behind}"
        own = config("layout.dp_replicate=2", "train.steps=9", name, *overrides)
        job = prepare_job(own, clean_environ())
        create(job)
        found = on_ranks(2, read_behind, folder=str(job.folder.path), behind=behind)
        assert found[0][0] == found[1][0]
        runs.append(found[0])
    (at_once, events, summary), (behind, late_events, late) = runs
    assert at_once == "bur" * 7
    assert behind == expected.replace(" ", "")
    assert (late, said(late_events)) == (summary, said(events))
    assert summary.stopped
    assert summary.steps == 7
    steps = [event for event in late_events if event["event"] == "step"]
    assert steps[-1]["step"] == 7
    assert all(event["step_time_s"] > 0 for event in steps)


class Mark:
    """An event of a device, at a time in milliseconds."""

    def __init__(self, at):
        self.at = at

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_device_says_what_its_steps_took_however_late_the_host_looks():
    laps, clock = DeviceLaps(), StepClock()
    laps.begin(lambda: Mark(100))
    laps.begin(lambda: Mark(130))  # the second step begins before the first was read
    assert [laps.until(Mark(at)) for at in (130, 160)] == [0.03, 0.03]
    laps.rest()
    laps.begin(lambda: Mark(500))  # after a pause
    assert laps.until(Mark(530)) == 0.03
    clock.start()
    assert clock.lap(0.03).total_s == 0.03
