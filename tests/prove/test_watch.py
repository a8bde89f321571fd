"""`watch` on torch's engines: right loops agree, and seeded faults are named."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.prove.trainers.watch import watch
from meshwright.units import format_bytes
from ranks import on_ranks, ranks
from seeded_trainers import SEEDS, run_seed
from trainer_loops import LENGTH, VOCAB, Tiny, build, sum_of_head_norms, train


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
    assert "divided after" not in " ".join(found["notes"])


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


class Rotated(nn.Module):
    """A model that rotates by complex numbers in a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.register_buffer("angles", torch.polar(torch.ones(LENGTH, 4), torch.rand(LENGTH, 4)))

    def forward(self, ids):
        pairs = torch.view_as_complex(self.embed(ids).unflatten(-1, (4, 2)))
        return self.head(torch.view_as_real(pairs * self.angles).flatten(-2))


def test_complex_buffers_are_whole_in_the_reference(tmp_path):
    """As torchtitan's rotary embeddings: a reference without imaginary parts would accuse them."""
    torch.manual_seed(0)
    model = Rotated()
    with watch(model, folder=tmp_path, say=lambda line: None) as watched:
        train(model, 1, 0)
    assert watched.verdict.passed, watched.verdict.lines()


def test_gated_mlps_of_megatron_are_refused_under_tp(tmp_path):
    """Their shards are the gate's and the other half's in one: put end to end, they are wrong."""
    for tp, is_refused in ((1, False), (2, True)):
        model = Tiny()
        model.config = SimpleNamespace(gated_linear_unit=True, tensor_model_parallel_size=tp)
        with watch(model, folder=tmp_path / str(tp), say=lambda line: None) as watched:
            train(model, 1, 0)
        assert watched.verdict.passed == (not is_refused)
        assert ("gated_linear_unit" in (watched.verdict.verdict.refused or "")) == is_refused


def test_memory_is_stated_before_anything_is_recorded(tmp_path):
    lines, model = [], Tiny()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with watch(model, folder=tmp_path, say=lines.append):
        (line,) = lines
        assert not list(tmp_path.rglob("*.safetensors"))
        train(model, 1, 0)
    assert f"up to {format_bytes(4 * size)} of host memory on each rank and of disk" in line
    assert f"{format_bytes(12 * size)} on rank 0 to compare" in line


@ranks(2)
def test_a_run_that_takes_fewer_steps_is_compared_by_these(world, tmp_path):
    model, data_ranks, data_rank = build("ddp")
    lines = []
    with watch(model, folder=tmp_path, say=lines.append, steps=5) as watched:
        train(model, data_ranks, data_rank, steps=1)
    if dist.get_rank() == 0:
        assert watched.verdict.passed, lines
        assert watched.verdict.steps == 1
