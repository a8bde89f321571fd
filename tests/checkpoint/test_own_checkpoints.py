"""Checkpoints of a loop of one's own: any layout reads them, and a kill leaves the step before."""

import functools
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.checkpoint.commit import steps
from meshwright.errors import CheckpointError, ConfigError
from ranks import RankError, on_ranks, ranks
from test_own_cp import OWN_PLAN, SEQ, Own, own, summed

ROWS = 4
LAYOUTS = {
    layout.label: layout
    for layout in (
        mw.Layout(),
        mw.Layout(tp=2),
        mw.Layout(cp=2),
        mw.Layout(dp_replicate=2),
        mw.Layout(dp_shard=2, zero=3),
        mw.Layout(cp=2, zero=1),
        mw.Layout(dp_shard=3, zero=2),
        mw.Layout(tp=2, cp=2, cp_kind="ulysses", zero=3),
        mw.Layout(dp_replicate=2, dp_shard=2, zero=2),
    )
}


class Counted(Own):
    """With a buffer, which counts forwards, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.places.weight.requires_grad_(False)

    def forward(self, *given):
        self.seen += 1
        return super().forward(*given)


def opened(layout, folder, seed=0, lr=0.01):
    torch.manual_seed(seed)
    model = mw.parallelize(Counted(), layout, mw.make_mesh(layout), plan=OWN_PLAN)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, foreach=False)
    return model, optimizer, mw.Checkpoints(folder, model, optimizer, layout)


def step(model, optimizer, layout, number):
    """Train a step and return its loss, over all ranks."""
    torch.manual_seed(number)
    tokens = torch.randint(0, 32, (12, SEQ + 1))
    share, at = 12 // layout.dp, mw.positions(layout, SEQ)
    place = layout.mesh.data_rank(dist.get_rank())
    mine = tokens[place * share : (place + 1) * share]
    loss = summed(model(mine[:, at], at[None]), mine[:, at + 1]) / (12 * SEQ)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / layout.tp


def write(world, label, folder):
    """Save steps 1 and 2; return the losses of the two after, and the number of forwards then."""
    layout = LAYOUTS[label]
    model, optimizer, checkpoints = opened(layout, folder)
    assert checkpoints.load() is None
    for number in (1, 2):
        step(model, optimizer, layout, number)
        optimizer.param_groups[0]["lr"] = 0.01 / number
        with torch.no_grad():  # leaves whole weights with ZeRO-1 and -2
            model(torch.zeros(1, 4, dtype=torch.int64) + torch.arange(4), torch.arange(4)[None])
        checkpoints.save(number, {"samples": number * 12})
    seen = model.seen.item()
    return [step(model, optimizer, layout, number) for number in (3, 4)], seen


def read(world, label, folder):
    """Load step 2 into another model and train on."""
    layout = LAYOUTS[label]
    model, optimizer, checkpoints = opened(layout, folder, seed=7, lr=1.0)
    found = checkpoints.load()
    assert (found.step, found.state) == (2, {"samples": 24})
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert len(optimizer.state) == len(optimizer.param_groups[0]["params"])
    seen = model.seen.item()
    return [step(model, optimizer, layout, number) for number in (3, 4)], seen


WRITERS = ["zero1 cp2-ring mb1", "zero3 tp2 cp2-ulysses mb1"]
WRITERS += [pytest.param(one, marks=pytest.mark.slow) for one in ("dp2 mb1", "tp2 mb1")]
WRITERS += [pytest.param("shard3 zero2 mb1", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_any_layout_goes_on_where_another_has_stopped(tmp_path, writer):
    world, folder = LAYOUTS[writer].world, str(tmp_path)
    expected, seen = on_ranks(world, write, label=writer, folder=folder)[0]
    for other, layout in LAYOUTS.items():
        losses, found = on_ranks(layout.world, read, label=other, folder=folder)[0]
        assert losses == pytest.approx(expected, abs=2e-5), other
        assert found == seen


@ranks(2)
def same_bits(world, folder):
    layout = mw.Layout(cp=2, zero=2)
    model, optimizer, checkpoints = opened(layout, folder)
    for number in (1, 2):
        step(model, optimizer, layout, number)
    checkpoints.save(2)
    step(model, optimizer, layout, 3)
    expected = [p.detach().full_tensor() for p in model.parameters()]
    model, optimizer, checkpoints = opened(layout, folder, seed=3)
    checkpoints.load()
    step(model, optimizer, layout, 3)
    for (name, parameter), wanted in zip(model.named_parameters(), expected, strict=True):
        assert torch.equal(parameter.detach().full_tensor(), wanted), name


def test_the_same_layout_goes_on_bit_for_bit(tmp_path):
    same_bits(folder=str(tmp_path))


# --- kills -----------------------------------------------------------------------------------


def killed(world, folder, place, rank):
    """Save step 1, and be killed in the save of step 2."""
    from meshwright.checkpoint import own

    def mark(at, number):
        if (at, number, world.rank) == (place, 2, rank):
            os.kill(os.getpid(), signal.SIGKILL)

    own.Saver = functools.partial(own.Saver, mark=mark)
    layout = mw.Layout(dp_shard=2, zero=3)
    model, optimizer, checkpoints = opened(layout, folder)
    for number in (1, 2):
        step(model, optimizer, layout, number)
        checkpoints.save(number)


def survives(world, folder):
    """Load, and return the step, what is in the folder then, and what is after another save."""
    layout = mw.Layout(dp_shard=2, zero=3)
    _, _, checkpoints = opened(layout, folder)
    found = checkpoints.load()
    world.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    checkpoints.save(found.step + 1)
    return found.step, left, [path.name for path in steps(Path(folder))]


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("place", "rank", "expected"),
    [("shard", 1, 1), ("manifest", 0, 1), ("rename", 0, 1), ("pointer", 0, 2)],
)
def test_a_kill_in_a_save_leaves_a_step_that_is_whole(tmp_path, place, rank, expected):
    folder = str(tmp_path)
    with pytest.raises(RankError):
        on_ranks(2, killed, folder=folder, place=place, rank=rank)
    there = ["latest", *(f"step-{n:08d}" for n in range(1, expected + 1))]
    for found, left, after in on_ranks(2, survives, folder=folder):
        assert (found, left) == (expected, there)
        assert after[-1] == f"step-{expected + 1:08d}"


# --- refusals --------------------------------------------------------------------------------


@ranks(2)
def harmed(world, folder):
    layout = mw.Layout(dp_shard=2, zero=3)
    model, optimizer, checkpoints = opened(layout, folder)
    for number in (1, 2):
        step(model, optimizer, layout, number)
        checkpoints.save(number)
    with pytest.raises(CheckpointError, match="step-00000002 is there already"):
        checkpoints.save(2)
    if world.rank == 0:
        path = Path(folder) / "step-00000002" / "optimizer-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    world.barrier()
    if world.rank == 0:
        with pytest.warns(UserWarning, match=r"optimizer-00001\.safetensors is corrupt"):
            assert checkpoints.load().step == 1
    else:
        assert checkpoints.load().step == 1
    assert checkpoints.save(2).name == "step-00000002"
    _other_models(layout, folder)


def _other_models(layout, folder):
    mesh = mw.make_mesh(layout)

    def load(model):
        model = mw.parallelize(model, layout, mesh)
        before = [p.detach().full_tensor() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            mw.Checkpoints(folder, model, optimizer, layout).load()
        finally:
            after = [p.detach().full_tensor() for p in model.parameters()]
            assert all(map(torch.equal, before, after))

    with pytest.raises(CheckpointError, match=r"of another model: it lacks \['0.bias', '0.weight'"):
        load(nn.Sequential(nn.Linear(4, 4)))
    model = Counted()
    model.head = nn.Linear(16, 40)
    with pytest.raises(
        CheckpointError, match=r"holds head.weight as \[32, 16\], the model has \[40"
    ):
        load(model)


def test_what_is_corrupt_is_passed_over_and_other_models_are_refused(tmp_path):
    harmed(folder=str(tmp_path))


@ranks(2)
def misused(world, folder):
    layout = mw.Layout(dp_shard=2, zero=3)
    whole = own()
    early = torch.optim.SGD(whole.parameters())
    model = mw.parallelize(whole, layout, mw.make_mesh(layout))
    with pytest.raises(ConfigError, match="after parallelize, which replaces them"):
        mw.Checkpoints(folder, model, early, layout)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(ConfigError, match="the layout is of 1 ranks, and 2 have met"):
        mw.Checkpoints(folder, model, optimizer, mw.Layout())
    with pytest.raises(ConfigError, match=r"here, where dp2 mb1 has .*: give the layout"):
        mw.Checkpoints(folder, model, optimizer, mw.Layout(dp_replicate=2))
    checkpoints = mw.Checkpoints(folder, model, optimizer, layout)
    with pytest.raises(ConfigError, match="state must be of numbers, texts, lists and dicts"):
        checkpoints.save(1, {"x": torch.zeros(2)})
    optimizer.state[next(model.parameters())]["factor"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"keeps factor of words.weight as \[3\]: only numbers"):
        checkpoints.save(1)
    assert not steps(Path(folder))


def test_what_cannot_be_saved_is_refused(tmp_path):
    misused(folder=str(tmp_path))


@ranks(2)
def beside(world, folder):
    layout = mw.Layout(dp_shard=2, zero=3)
    first, second = (opened(layout, folder)[2] for _ in range(2))
    first.save(1)
    with pytest.raises(
        CheckpointError, match=r"run \w+ has written step-00000001, and this is run"
    ):
        second.save(2)
    assert second.load().step == 1
    second.save(2)


def test_a_loop_does_not_save_among_steps_that_it_has_not_loaded(tmp_path):
    beside(folder=str(tmp_path))


def test_the_commands_for_checkpoints_read_them(tmp_path, capsys):
    from meshwright.cli.main import main

    on_ranks(2, write, label="dp2 mb1", folder=str(tmp_path))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    assert "dp2" in capsys.readouterr().out
