"""`watch` on torch's engines: right loops agree, and seeded faults are named."""

import pytest
import torch.distributed as dist

from meshwright.prove.trainers.watch import watch
from ranks import on_ranks, ranks
from seeded_trainers import SEEDS, run_seed
from trainer_loops import Tiny, build, sum_of_head_norms, train


def watched_run(world, engine, folder, head_norms=sum_of_head_norms, **options):
    """Return the lines and the verdict of a watched loop, on rank 0."""
    lines = []
    model, data_ranks, data_rank = build(engine, head_norms=head_norms)
    reference = Tiny if engine.startswith("tp") else None
    with watch(model, folder=folder, say=lines.append, reference=reference) as watched:
        train(model, data_ranks, data_rank, **options)
    return lines, None if watched.verdict is None else watched.verdict.as_dict()


ENGINES = {"ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4, "tp": 2, "tp_fsdp2": 4}
HEALTHY = [
    (engine, microbatches, optimizer, clip)
    for engine in ENGINES
    for microbatches, clip in ((1, 0.1), (2, 1.0), (3, None))
    for optimizer in ("AdamW", "SGD")
]


@pytest.mark.often(1)
@pytest.mark.parametrize(("engine", "microbatches", "optimizer", "clip"), HEALTHY)
def test_right_loops_agree(engine, microbatches, optimizer, clip, tmp_path):
    options = {"microbatches": microbatches, "optimizer": optimizer, "clip": clip}
    world = ENGINES[engine]
    _, found = on_ranks(world, watched_run, engine=engine, folder=tmp_path, **options)[0]
    assert found["passed"], found
    assert found["compared"] > 50


@pytest.mark.slow
def test_seeded_faults_are_named(tmp_path):
    """At least 28 of 30 get the kind that they are of, and none passes."""
    named, wrong = 0, {}
    for number, (name, seed) in enumerate(SEEDS.items()):
        found = on_ranks(seed.ranks, run_seed, name=name, folder=tmp_path / str(number))[0]
        kinds = [fault["kind"] for fault in found["faults"]]
        if kinds[:1] == [seed.kind]:
            named += 1
        else:
            wrong[name] = (seed.kind, found["refused"], [f["sentence"] for f in found["faults"]])
        assert not found["passed"], name
    assert len(SEEDS) >= 30
    assert named >= 28 / 30 * len(SEEDS), wrong
    print(f"{named} of {len(SEEDS)}", wrong)


@ranks(2)
def test_a_run_that_takes_fewer_steps_is_compared_by_these(world, tmp_path):
    model, data_ranks, data_rank = build("ddp")
    lines = []
    with watch(model, folder=tmp_path, say=lines.append, steps=5) as watched:
        train(model, data_ranks, data_rank, steps=1)
    if dist.get_rank() == 0:
        assert watched.verdict.passed, lines
        assert watched.verdict.steps == 1
