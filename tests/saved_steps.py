"""Steps of a small run that one layout saves and another one reads."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint.restore import StoredSource, newest_good, restore
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.state import Trained, chunks_of, scalars_of
from meshwright.comm.groups import open_groups
from meshwright.layout import Layout
from meshwright.parallel.build import build, seeded
from meshwright.parallel.data_parallel.int8_states import values_of
from meshwright.parallel.data_parallel.optimize import Shards
from meshwright.parallel.gather import whole_of
from meshwright.program.lower import lower
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.prove.trial import _like
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import TrainSpec
from meshwright.training.optimizer import build_optimizer
from meshwright.training.update import LossScale, update
from ranks import on_ranks

MODEL = model_spec(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=70, ffn_dim=44)
TRAIN = TrainSpec(batch=12, seq_len=16, seed=3)


def open_layout(world, layout, spec, source, train):
    program = lower(MODEL, train, spec, layout)
    parallel = build(program, open_groups(layout, world), world.device, source)
    shards = Shards(parallel.held, on_host=layout.offload == "optimizer")
    matrices = shards.matrices(parallel.groups, parallel.device, layout)
    return Trained(parallel, shards, build_optimizer(shards.leaves, shards.parts, spec, matrices))


def take_step(world, trained, step):
    parallel, shards, optimizer = trained
    case = Case(MODEL, parallel.program.train, parallel.program.layout)
    batch = mine(make_batch(case, step), parallel.program, world)
    update(parallel, batch, world, shards, optimizer, LossScale(), 1.0)


def whole_states(trained):
    """The weights and states of this rank's stages, whole, as arrays of their own."""
    states = {}
    for held, leaf in zip(trained.shards.held, trained.shards.leaves, strict=True):
        state = trained.optimizer.state[leaf]
        keys = [key for key in state if not key.endswith("_scale")]
        tensors = {"weight": held.shard, **{key: values_of(state, key) for key in keys}}
        for key, tensor in tensors.items():
            if tensor.dim():
                local = _like(held.parameter, tensor)
                whole = whole_of(local, held.sharding, trained.parallel)
                states[f"{key}.{held.name}"] = whole.detach().float().numpy().copy()
    return states


def write(world, label, spec, root, train=TRAIN):
    """Take two steps, save, take a third; return the third's weights and states."""
    trained = open_layout(world, Layout.parse(label), spec, seeded(MODEL, TRAIN.seed), train)
    for step in (1, 2):
        take_step(world, trained, step)
    saver = Saver(Path(root), world, 1, lambda saved: None)
    saver.save(2, chunks_of(trained), {"scalars": scalars_of(trained)}, {})
    saved = whole_states(trained)
    take_step(world, trained, 3)
    return saved, whole_states(trained)


def go_on(world, label, spec, root, train=TRAIN):
    """Resume from the saved step; return its weights and states, and those after the third."""
    good = newest_good(Path(root), world, pytest.fail)
    trained = open_layout(world, Layout.parse(label), spec, StoredSource(good.folder), train)
    restore(trained, good)
    loaded = whole_states(trained)
    take_step(world, trained, 3)
    return loaded, whole_states(trained)


def merged(results, at):
    return {name: tensor for result in results for name, tensor in result[at].items()}


def check_read_by(others, label, spec, root, *, rtol, atol, train=TRAIN):
    """Check that other layouts read a step of this one bit for bit, and continue as it does.

    The same layout continues bit for bit, others within the tolerance of sums in another order.
    Returns the saved weights and states.
    """
    given = {"spec": spec, "root": root, "train": train}
    written = on_ranks(Layout.parse(label).world, write, label=label, **given)
    saved, third = merged(written, 0), merged(written, 1)
    for other in (label, *others):
        ranks = Layout.parse(other).world
        resumed = on_ranks(ranks, go_on, label=other, **given)
        loaded, after = merged(resumed, 0), merged(resumed, 1)
        assert loaded.keys() == saved.keys()
        assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
        limits = {"rtol": 0, "atol": 0} if other == label else {"rtol": rtol, "atol": atol}
        for name in third:
            np.testing.assert_allclose(after[name], third[name], **limits)
    return saved
