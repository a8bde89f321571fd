"""Any layout reads what any other wrote: the optimizer's state bit for bit, and the next step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.commit import steps
from meshwright.checkpoint.restore import StoredSource, newest_good, restore, stored_of
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS, Trained, chunks_of, scalars_of
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.gather import on_rank_0
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import UNIT_ROUNDOFFS, mine
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, gradients, update
from ranks import on_ranks

LAYOUTS = {
    layout.label: layout
    for layout in (
        Layout(),
        Layout(dp_replicate=2),
        Layout(dp_shard=2, zero=1, offload="optimizer"),
        Layout(dp_shard=2, zero=3),
        Layout(dp_shard=3, zero=3),  # no dim divides by three
        Layout(tp=2, sp=True),
        Layout(cp=2),
        Layout(cp=2, zero=2, cp_kind="ulysses"),
        Layout(pp=2),
        Layout(pp=2, virtual_stages=2, schedule="interleaved_1f1b"),
        Layout(dp_replicate=2, dp_shard=2, zero=3),
        Layout(dp_shard=2, tp=2, zero=2),
        Layout(pp=4, schedule="gpipe"),
        Layout(pp=2, tp=2, virtual_stages=2, schedule="zbv"),
        Layout(dp_shard=2, pp=2, tp=2, zero=2),
        Layout(pp=2, cp=2, tp=2, sp=True),
        Layout(dp_shard=3, zero=1),
        Layout(dp_shard=2, tp=2, zero=1),
    )
}
LABELS = list(LAYOUTS)
MODEL = model_spec(
    dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=71, ffn_dim=44, tie_embeddings=True
)
TRAIN = TrainSpec(batch=12, seq_len=16, seed=3)
ADAM = OptimizerSpec(warmup_steps=0, schedule="constant")


def open_layout(world, layout, source):
    program = lower(MODEL, TRAIN, OptimizerSpec(), layout)
    parallel = build(program, open_groups(layout, world), world.device, source)
    shards = Shards(parallel.held, on_host=layout.offload == "optimizer")
    return Trained(parallel, shards, build_optimizer(shards.leaves, shards.parts, ADAM))


def write(world, label, root, start=None):
    """Train two steps, or take what is at `start`, and save."""
    layout = LAYOUTS[label]
    if start is None:
        trained = open_layout(world, layout, seeded(MODEL, TRAIN.seed))
        parallel, shards, optimizer = trained
        for step in (1, 2):
            batch = mine(make_batch(Case(MODEL, TRAIN, layout), step), parallel.program, world)
            update(parallel, batch, world, shards, optimizer, LossScale(), 1.0)
    else:
        trained = read(world, layout, start)
    saver = Saver(Path(root), world, 1, lambda saved: None)
    saver.save(2, chunks_of(trained), {"scalars": scalars_of(trained)}, {})


def read(world, layout, root):
    good = newest_good(Path(root), world, pytest.fail)
    trained = open_layout(world, layout, StoredSource(good.folder))
    restore(trained, good)
    return trained


def next_step(world, label, roots):
    """Return the loss of the step after each of some checkpoints, and the worst gradient's error.

    One rank alone writes what is expected of it.
    """
    layout, found = LAYOUTS[label], {}
    for name, root in roots.items():
        trained = read(world, layout, root)
        assert scalars_of(trained) == {"step": 2.0}
        parallel = trained.parallel
        batch = mine(make_batch(Case(MODEL, TRAIN, layout), 3), parallel.program, world)
        loss = world.sum_on_host([gradients(parallel, batch, world).loss.item()])[0]
        whole = dict(on_rank_0(parallel, lambda held: held.parameter.grad))
        file = Path(root) / "expected.safetensors"
        if world.size == 1:
            save_file(whole, file)
        expected = load_file(file)
        floor = 1e-5 * max(t.abs().max().item() for t in expected.values())
        errors = [
            (whole[key] - wanted).abs().max().item() / max(wanted.abs().max().item(), floor)
            for key, wanted in expected.items()
            if world.rank == 0
        ]
        found[name] = (loss, max(errors, default=0.0))
    return found


def tensors(root):
    """Return all whole tensors of the step under a root."""
    folder = steps(Path(root))[-1]
    return {
        f"{kind} {name}": stored.whole(name)
        for kind in (WEIGHTS, OPTIMIZER)
        for stored in [stored_of(folder, kind)]
        for name in stored.names
    }


def check(pairs, tmp_path):
    """Hold the next step of each pair (who wrote, who reads) against one device's, and print it."""
    roots = {label: str(tmp_path / f"from-{LABELS.index(label)}") for label in LABELS}
    writers = sorted({pair[0] for pair in pairs}, key=LABELS.index)
    for label in writers:
        on_ranks(LAYOUTS[label].world, write, label=label, root=roots[label])
        assert len(tensors(roots[label])) == 3 * (2 + 9 * MODEL.n_layers)
    alone = on_ranks(1, next_step, label=LABELS[0], roots={w: roots[w] for w in writers})[0]
    table = {}
    for reader in LABELS:
        theirs = {writer: roots[writer] for writer, other in pairs if other == reader}
        if not theirs:
            continue
        found = on_ranks(LAYOUTS[reader].world, next_step, label=reader, roots=theirs)[0]
        for writer, (loss, error) in found.items():
            off = abs(loss - alone[writer][0]) / alone[writer][0]
            table[writer, reader] = max(off, error)
            print(f"{writer:32} -> {reader:32} loss {off:.1e} gradients {error:.1e}")
    assert set(table) == set(pairs)
    assert max(table.values()) <= 32 * UNIT_ROUNDOFFS["fp32"], max(table, key=table.get)


@pytest.mark.slow
def test_every_layout_reads_and_is_read(tmp_path):
    """Every other one of up to two ranks: the others are among the ordered pairs."""
    chain = [label for label in LABELS if LAYOUTS[label].world <= 2][::2]
    check(list(zip(chain, chain[1:] + chain[:1], strict=True)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_ordered_pair(tmp_path):
    check([(a, b) for a in LABELS for b in LABELS], tmp_path)


@pytest.mark.parametrize(
    "numbers",
    [(4, 13, 7, 0, 2), pytest.param((14, 4, 16, 13, 7, 0, 2), marks=pytest.mark.slow)],
    ids=["up to four ranks", "up to eight ranks"],
)
def test_what_is_read_is_written_again_bit_for_bit(tmp_path, numbers):
    """Through layouts that cut everything differently, the optimizer's state included."""
    first = tmp_path / "0"
    on_ranks(2, write, label=LABELS[3], root=str(first))
    expected = tensors(first)
    for number in numbers:
        label, root = LABELS[number], tmp_path / str(number)
        on_ranks(LAYOUTS[label].world, write, label=label, root=str(root), start=str(first))
        found = tensors(root)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (label, name)
        first = root
