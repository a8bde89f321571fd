"""Faults inside the ranks and on the disk: what must survive, and what must be refused."""

import json
import os
import pickle
import resource
import struct
import time
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.commit import PLACES, begin, clean, seal, step_name, steps, verify
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import chunks_of, scalars_of
from meshwright.checkpoint.tensors import Chunk, Stored, write_chunks
from meshwright.checkpoint.weights import load_model, write_weights
from meshwright.data.sampler import IGNORE
from meshwright.errors import CheckpointError, MeshwrightError, RankFailed
from meshwright.layout import Layout
from meshwright.models import build_model, init_model
from meshwright.models.files import MAX_TENSORS
from meshwright.parallel.build import seeded
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.spec.resolve import model_spec
from meshwright.training.between_steps import check_replicas
from meshwright.training.readings import SpikeWatch
from meshwright.training.update import LossScale, gradients, overflowed, update
from outcomes import Outcome, refused
from ranks import on_ranks, ranks
from test_reshard import LABELS, LAYOUTS, MODEL, TRAIN, open_layout
from test_reshard import write as write_step


class Crash(BaseException):
    """The end of a process, as far as files go: nothing gets to clean up."""


# --- saves that are cut short (cases 2, 3, 4) ------------------------------------------------


def crash_in_save(world, root, place, beside):
    """Save steps 1 and 2, and crash on rank 0 in the save of step 3; returns where it got to."""
    trained = open_layout(world, LAYOUTS[LABELS[0]], seeded(MODEL, TRAIN.seed))
    facts = {"scalars": scalars_of(trained)}
    for step in (1, 2):
        saver = Saver(Path(root), world, 2, lambda saved: None)
        saver.save(step, chunks_of(trained), facts, {})
    seen = []

    def mark(at, step):
        assert step == 3
        seen.append(at)
        if at == place:
            raise Crash

    def save():
        saver = Saver(Path(root), world, 2, lambda saved: None, during_training=beside, mark=mark)
        saver.save(3, chunks_of(trained), facts, {})
        saver.finish()

    with pytest.raises(Crash):
        save()
    return seen


@pytest.mark.case(2, 4)
@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
@pytest.mark.parametrize("place", PLACES)
def test_a_save_that_is_cut_short_leaves_the_step_before_it(tmp_path, place, beside, outcome):
    root = tmp_path / "root"
    seen = on_ranks(1, crash_in_save, root=str(root), place=place, beside=beside)[0]
    assert seen[-1] == place
    started = time.monotonic()
    committed = {path.name for path in steps(root)}
    is_there = place in ("pointer", "purge")  # renamed already: it counts
    assert committed == {step_name(n) for n in ([1, 2, 3] if is_there else [1, 2])}
    for path in steps(root):
        verify(path)
    latest = (root / "latest").read_text().strip()
    assert latest == step_name(3 if place == "purge" else 2)
    left = [path for path in root.iterdir() if path.name.startswith(".")]
    assert bool(left) == (place in ("shard", "manifest", "rename"))
    clean(root)
    assert not [path for path in root.iterdir() if path.name.startswith(".")]
    assert {path.name for path in steps(root)} == committed
    seconds = time.monotonic() - started
    outcome.add(None, f"{latest} is the newest, what was left is removed", seconds)


@pytest.mark.case(3)
def test_a_committed_step_is_not_saved_again(tmp_path, outcome):
    """Its files are not touched, so that a crash cannot mix old and new."""
    root = tmp_path / "root"
    on_ranks(2, write_step, label=LABELS[1], root=str(root))
    before = {p: p.read_bytes() for p in steps(root)[0].iterdir()}
    started = time.monotonic()
    on_ranks(2, write_step, label=LABELS[3], root=str(root))
    assert {p: p.read_bytes() for p in steps(root)[0].iterdir()} == before
    outcome.add(None, "the committed step keeps its files", time.monotonic() - started)


# --- the disk (cases 7, 28) ------------------------------------------------------------------


def save_under_a_limit(world, root):
    """Save once, then again where rank 1 may write no more than 20 kB to a file."""
    trained = open_layout(world, LAYOUTS[LABELS[1]], seeded(MODEL, TRAIN.seed))
    saver = Saver(Path(root), world, 2, lambda saved: None)
    saver.save(1, chunks_of(trained), {}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with refused(CheckpointError) as caught:
            saver.save(2, chunks_of(trained), {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return caught.outcome


@pytest.mark.case(7)
def test_a_full_disk_says_so_with_path_and_bytes_on_every_rank(tmp_path, outcome):
    root = tmp_path / "root"
    found = on_ranks(2, save_under_a_limit, root=str(root))
    outcome.add(*found[1])
    said = [one.message for one in found]
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 1: {root}/.tmp-step-00000002-")
    assert "weights-00001.safetensors was not written: File too large, after 20000 of" in said[0]
    assert "save elsewhere with checkpoint.dir=FOLDER, and resume the run" in said[0]
    assert {path.name for path in root.iterdir()} == {step_name(1), "latest"}
    verify(steps(root)[0])


@pytest.mark.case(28)
def test_a_folder_that_cannot_be_written_is_named(tmp_path, outcome):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with outcome.refused(CheckpointError, f"{blocked}.* was not written: Not a directory"):
        begin(blocked / "root", 1)


# --- numbers (cases 16, 17) ------------------------------------------------------------------


@pytest.mark.case(16)
@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_nan_on_one_rank_is_decided_by_all_before_the_update(policy, number, outcome):
    found = on_ranks(2, spoiled, policy=policy, number=number)
    assert found[0].message == found[1].message
    outcome.add(*found[1])


def spoiled(world, policy, number):
    """Train three steps, with a number on rank 1 that is not finite in the second of them."""
    layout = LAYOUTS[LABELS[1]]
    trained = open_layout(world, layout, seeded(MODEL, TRAIN.seed))
    parallel, shards, optimizer = trained
    scale = LossScale.of(TRAIN.model_copy(update={"nonfinite": policy}))

    def step(number):
        batch = mine(make_batch(Case(MODEL, TRAIN, layout), number), parallel.program, world)
        done = update(parallel, batch, world, shards, optimizer, scale, 1.0)
        return overflowed(done.norm.item(), int(done.first), parallel, world, scale, step=1)

    step(1)
    before = [leaf.detach().clone() for leaf in shards.leaves]
    poison = (
        parallel.modules[0]
        .blocks[2]
        .mlp.up.register_forward_hook(
            lambda module, args, out: out * (float(number) if world.rank == 1 else 1.0)
        )
    )
    if policy == "stop":
        with refused(MeshwrightError, r"gradient of .* is not finite") as caught:
            step(2)
        found = caught.outcome
    else:
        started = time.monotonic()
        tensor = step(2)
        assert tensor is not None
        found = Outcome(None, f"step 2 is skipped for {tensor}", time.monotonic() - started)
    poison.remove()
    for leaf, old in zip(shards.leaves, before, strict=True):
        assert torch.equal(leaf, old)
        for value in optimizer.state[leaf].values():
            assert torch.isfinite(value).all()
    shards.clear()
    assert step(3) is None  # and it goes on
    return found


@pytest.mark.case(18)
def test_a_batch_without_any_target_changes_nothing(outcome):
    """A mean over no tokens is not a NaN: the loss is 0, and so are all gradients."""
    outcome.add(*on_ranks(2, without_targets)[0])


def without_targets(world):
    layout = LAYOUTS[LABELS[1]]
    trained = open_layout(world, layout, seeded(MODEL, TRAIN.seed))
    batch = make_batch(Case(MODEL, TRAIN, layout), 1)
    batch = mine(
        batch._replace(targets=torch.full_like(batch.targets, IGNORE)),
        trained.parallel.program,
        world,
    )
    started = time.monotonic()
    done = gradients(trained.parallel, batch, world)
    assert done.numbers().tolist() == [0.0, 0.0, len(trained.parallel.held)]
    return Outcome(None, "the loss and the norm are 0", time.monotonic() - started)


@pytest.mark.case(17)
def test_a_bit_that_differs_between_replicas_is_found_and_named(outcome):
    outcome.add(*on_ranks(4, flipped)[0])


def flipped(world):
    layout = Layout(dp_replicate=4)
    trained = open_layout(world, layout, seeded(MODEL, TRAIN.seed))
    check_replicas(trained.parallel, world)
    if world.rank == 2:
        held = next(h for h in trained.parallel.held if h.name == "layers.1.attn.k.weight")
        held.shard.view(torch.int32).view(-1)[7] ^= 1
    said = r"layers\.1\.attn\.k\.weight is not the same on rank 2"
    with refused(RankFailed, said) as caught:
        check_replicas(trained.parallel, world)
    return caught.outcome


@ranks(4)
def test_sharded_weights_are_compared_with_their_copies_only(world):
    layout = Layout(dp_replicate=2, dp_shard=2, zero=3)
    trained = open_layout(world, layout, seeded(MODEL, TRAIN.seed))
    check_replicas(trained.parallel, world)
    if world.rank == 3:
        trained.parallel.held[0].shard.view(-1)[0] += 1
    with pytest.raises(RankFailed, match=r"is not the same between ranks 1, 3"):
        check_replicas(trained.parallel, world)


def test_a_spike_of_the_loss_is_noticed_and_a_slope_is_not():
    watch = SpikeWatch()
    noise = torch.randn(300, generator=torch.Generator().manual_seed(0)).mul(0.05).tolist()
    falling = [6 - 4 * n / 300 + noise[n] for n in range(300)]
    assert not any(watch.is_spike(loss) for loss in falling)
    assert watch.is_spike(falling[-1] + 2.0)
    assert not watch.is_spike(falling[-1])
    assert watch.is_spike(float("nan"))


# --- files that mean harm (cases 22, 23) -----------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def weights(root):
    spec = model_spec(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=64)
    model = init_model(build_model(spec, device="cpu"), spec, 0)
    return write_weights(root, spec, dict(model.named_parameters()), {})


@pytest.mark.case(22)
@pytest.mark.parametrize("name", ["weights-00000.safetensors", "model.json", "manifest.json"])
def test_a_pickle_in_place_of_a_file_never_runs(tmp_path, name, outcome):
    step, fired = weights(tmp_path / "root"), tmp_path / "fired"
    (step / name).write_bytes(pickle.dumps(Bomb(fired)))
    with outcome.refused(CheckpointError):
        load_model(step)
    # Nor where someone has made the hashes fit
    if name != "manifest.json":
        forge(step)
        with outcome.refused(MeshwrightError):
            load_model(step)
    assert not fired.exists()


def forge(step):
    """Write a manifest that fits whatever is in a folder."""
    manifest = step / "manifest.json"
    manifest.unlink()
    aside = step.with_name(".tmp-forged")
    step.rename(aside)
    sealed = seal(aside, 0, {}, {})
    assert sealed == step


def hostile(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.slow
@pytest.mark.case(23)
def test_hostile_safetensors_are_refused(tmp_path, outcome):
    path = tmp_path / "weights-00000.safetensors"

    def entry(start, stop):
        return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}

    cases = {
        "huge header": lambda: path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
        "overlap": lambda: hostile(path, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "beyond the end": lambda: hostile(path, {"a": entry(0, 80)}, bytes(8)),
        "not json": lambda: hostile(path, b"\x80\x04pickle"),
        "no offsets": lambda: hostile(
            path, {"__metadata__": {"DCP_SHARDING_INFO": "[]"}, "a": entry(0, 8)}, bytes(8)
        ),
        "many": lambda: hostile(path, {f"t{n}": entry(0, 0) for n in range(2 * MAX_TENSORS)}),
    }
    for make in cases.values():
        make()
        with outcome.refused(CheckpointError, path.name):
            Stored([path])


@pytest.mark.case(23)
def test_a_name_in_a_file_is_never_a_path(tmp_path, outcome):
    """It is a key of a dictionary, also where it looks like a path."""
    started = time.monotonic()
    path = tmp_path / "weights-00000.safetensors"
    write_chunks(path, [Chunk("../../evil", (0,), torch.zeros(2))])
    assert Stored([path]).names == ("../../evil",)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    outcome.add(None, "the name is a key, no path", time.monotonic() - started)
