"""What ranks of elastic replicas carry from one generation to the next."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.comm.generations import Announcements
from meshwright.errors import RankFailed
from meshwright.layout import Layout
from meshwright.parallel.build import seeded
from meshwright.prove.batches import make_batch
from meshwright.prove.case import Case
from meshwright.prove.compare import mine
from meshwright.spec.training import OptimizerSpec
from meshwright.training.elastic import Carried, Elastic, share_state, take_over
from meshwright.training.update import LossScale, update
from ranks import on_ranks
from saved_steps import MODEL, TRAIN, open_layout, take_step, whole_states

LAYOUT = Layout(dp_replicate=2)
JOB = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(clip_norm=1.0)))
SAVER = SimpleNamespace(before_update=lambda: None)


def opened(world, seed):
    return open_layout(world, LAYOUT, OptimizerSpec(), seeded(MODEL, seed), TRAIN)


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


def joining(world, folder):
    trained = opened(world, 3)
    take_step(world, trained, 1)
    fresh = opened(world, 4)
    if world.rank == 0:
        take_over(fresh, trained)
        for state in fresh.optimizer.state.values():  # both take a step below
            state |= {key: tensor.clone() for key, tensor in state.items()}
    share_state(fresh, 0)
    expected, state = whole_states(trained), whole_states(fresh)
    steps = [
        [float(t.optimizer.state[leaf]["step"]) for leaf in t.shards.leaves]
        for t in (trained, fresh)
    ]
    take_step(world, trained, 2)
    take_step(world, fresh, 2)
    return expected, state, steps, whole_states(trained), whole_states(fresh)


def test_a_rank_that_joins_has_the_weights_and_states_of_the_others(tmp_path):
    for expected, state, steps, after, joined in on_ranks(2, joining, folder=str(tmp_path)):
        assert expected.keys() == state.keys()
        assert all(np.array_equal(expected[key], state[key]) for key in expected)
        assert steps[0] == steps[1]
        assert all(np.array_equal(after[key], joined[key]) for key in after)
