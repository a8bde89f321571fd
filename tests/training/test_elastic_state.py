"""What ranks of elastic replicas carry from one generation to the next."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.comm.generations import Announcements
from meshwright.comm.groups import open_groups
from meshwright.data.sampler import IGNORE
from meshwright.errors import RankFailed
from meshwright.layout import Layout
from meshwright.parallel.build import seeded
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.spec.training import OptimizerSpec
from meshwright.training.between_steps import assemble, sequences_of
from meshwright.training.elastic import (
    Carried,
    Elastic,
    refuse_incomplete,
    share_state,
    take_over,
)
from meshwright.training.update import LossScale, update
from ranks import on_ranks
from saved_steps import MODEL, TRAIN, open_layout, take_step, whole_states

LAYOUT = Layout(dp_replicate=2)
JOB = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(clip_norm=1.0)))
SAVER = SimpleNamespace(before_update=lambda: None)


def opened(world, seed, spec=None):
    return open_layout(world, LAYOUT, spec or OptimizerSpec(), seeded(MODEL, seed), TRAIN)


def cut_off(world):
    """A world whose connection breaks before the result of a vote has come, but after it left."""

    def sum_on_host(values):
        world.sum_on_host(values)
        raise RuntimeError("Connection closed by peer")

    return SimpleNamespace(sum_on_host=sum_on_host)


def broken_vote(world, folder):
    trained = opened(world, 3)
    replicas = Elastic(Announcements(Path(folder)), LAYOUT, world.rank, "")
    replicas.carried = Carried(trained, 0, 0, 0)
    case = Case(MODEL, TRAIN, LAYOUT)

    def step(number, voting):
        batch = mine(make_batch(case, number), trained.parallel.program, world)
        vote = replicas.vote(number, 1e-3, LossScale(), SAVER, voting)
        parallel, shards, optimizer = trained
        update(parallel, batch, world, shards, optimizer, LossScale(), 1.0, vote)
        replicas.commit()

    step(1, world)
    before = whole_states(trained)
    if world.rank == 0:
        step(2, world)
        return before, whole_states(trained), replicas.carried.numbers.loss
    with pytest.raises(RuntimeError, match="closed by peer"):
        step(2, cut_off(world))
    kept = whole_states(trained)
    assert all(np.array_equal(kept[key], before[key]) for key in before)
    assert replicas.carried.step == 1
    with pytest.raises(RankFailed, match="no gradients of step 3"):
        replicas._catch_up_update(3, JOB)
    replicas._catch_up_update(2, JOB)
    assert replicas.carried.step == 2
    return before, whole_states(trained), None


def test_a_rank_whose_vote_broke_off_updates_with_the_gradients_that_it_holds(tmp_path):
    (_, whole, loss), (before, caught_up, _) = on_ranks(2, broken_vote, folder=str(tmp_path))
    assert loss > 0
    assert whole.keys() == caught_up.keys()
    for key, state in whole.items():
        assert np.array_equal(state, caught_up[key]), key
    assert not np.array_equal(before["weight.embed.weight"], whole["weight.embed.weight"])


OPTIMIZERS = {
    "adamw": OptimizerSpec(),
    "int8": OptimizerSpec(state_dtype="int8"),
    "sgd": OptimizerSpec(name="sgd", momentum=0.0),
}


def joining(world, name):
    spec = OPTIMIZERS[name]
    trained = opened(world, 3, spec)
    take_step(world, trained, 1)
    fresh = opened(world, 4, spec)
    if world.rank == 0:
        take_over(fresh, trained)
        for state in fresh.optimizer.state.values():  # both take a step below
            state |= {key: tensor.clone() for key, tensor in state.items()}
    share_state(fresh, 0)
    expected, state = whole_states(trained), whole_states(fresh)
    steps = [
        [float(t.optimizer.state[leaf].get("step", 0)) for leaf in t.shards.leaves]
        for t in (trained, fresh)
    ]
    take_step(world, trained, 2)
    take_step(world, fresh, 2)
    return expected, state, steps, whole_states(trained), whole_states(fresh)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_that_joins_has_the_weights_and_states_of_the_others(name):
    for expected, state, steps, after, joined in on_ranks(2, joining, name=name):
        assert expected.keys() == state.keys()
        assert all(np.array_equal(expected[key], state[key]) for key in expected)
        assert steps[0] == steps[1]
        assert all(np.array_equal(after[key], joined[key]) for key in after)


@pytest.mark.parametrize(
    ("joined", "lacking"), [([], None), ([2, 3], None), ([1, 2], None), ([0, 2], 0), ([1, 2, 3], 1)]
)
def test_state_that_no_rank_has_left_ends_the_attempt_on_all_ranks(joined, lacking):
    """Ranks 0 and 2 have the same shards, and so have 1 and 3."""
    layout = Layout(dp_replicate=2, tp=2)
    if lacking is None:
        refuse_incomplete(layout, joined)
        return
    with pytest.raises(RankFailed, match=f"the weights of rank {lacking}"):
        refuse_incomplete(layout, joined)


def carrying(world, folder):
    """A rank that joins a run that was resumed at step 40, and what it knows then."""
    replicas = Elastic(Announcements(Path(folder)), LAYOUT, world.rank, "")
    if world.rank == 0:
        replicas.carried = Carried(None, 41, 41, 40)
    replicas.agree(replicas._reports(world, resume=False))
    return replicas.carried.began


def test_all_ranks_agree_on_where_a_resumed_run_began(tmp_path):
    """Steps are recorded by their distance from there, which is a collective."""
    assert on_ranks(2, carrying, folder=str(tmp_path)) == [40, 40]


def unlike_shares(world):
    """Take two steps with three sequences on these ranks, and return loss, weights and states."""
    layout = Layout(dp_replicate=world.size, microbatch=1)
    train = TRAIN.model_copy(update={"batch": 3})
    parts = {"model": MODEL, "train": train, "optimizer": OptimizerSpec()}
    config = SimpleNamespace(data=SimpleNamespace(packing="none"), **parts)
    job = SimpleNamespace(config=config, layout=layout)
    groups = open_groups(layout, world)
    trained = assemble(job, world, groups, seeded(MODEL, TRAIN.seed))
    rows = sequences_of(layout, 3, world.rank)
    losses = []
    for step in (1, 2):
        batch = make_batch(Case(MODEL, train, Layout(microbatch=1)), step)
        # Rows with unlike numbers of targets, as those of documents have.
        for row in range(3):
            batch.targets[row, : 2 * row] = IGNORE
        share = batch.rows(slice(rows.start, rows.stop)).to(world.device)
        parallel, shards, optimizer = trained
        done = update(parallel, share, world, shards, optimizer, LossScale(), 1.0)
        losses.append(world.sum_on_host([float(done.loss)])[0])
    return losses, whole_states(trained), len(rows)


def test_replicas_with_unlike_shares_of_the_rows_do_the_step_of_one():
    """Where a replica is missing, another has more microbatches, and more of the targets."""
    ((losses, expected, _),) = on_ranks(1, unlike_shares)
    answers = on_ranks(2, unlike_shares)
    assert [rows for _, _, rows in answers] == [1, 2]
    for shared_losses, states, _ in answers:
        assert shared_losses == pytest.approx(losses, rel=1e-6)
        for key, state in expected.items():
            distance = np.linalg.norm(states[key] - state)
            assert distance < 1e-4 * max(np.linalg.norm(state), 1e-6), key
