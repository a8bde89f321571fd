"""Elastic replicas: one is killed or hangs, the others go on, and it joins again.

Runs whose replicas have one microbatch each add up the same gradients in the same order with two
replicas as with one: they end with the same bits, however long the second one was missing.
"""

import io
import os
import signal

import pytest
import torch

from faulty import HANG, events_of, of, start_train, wait_for
from meshwright.checkpoint.commit import PLACES, steps, verify
from meshwright.checkpoint.restore import stored_of
from meshwright.checkpoint.state import OPTIMIZER, WEIGHTS
from meshwright.comm.flight_recorder_file import read_flight_recorder
from meshwright.comm.generations import Announcements, ReplicaGeneration, ranks_of
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.program.shards import whole
from meshwright.runtime.checks.start import Resume
from meshwright.runtime.session import train
from meshwright.runtime.supervise.diagnosis import diagnose
from meshwright.training.between_steps import sequences_of
from runs import clean_environ

ELASTIC = "cluster.elastic=true"
# So the learning rate does not depend on the number of steps, nor does what a step does.
LASTING = ["optimizer.schedule=constant", "optimizer.warmup_steps=0"]


def state_of(folder):
    """The weights and optimizer states of a step, by name, whatever the layout that wrote them."""
    verify(folder)
    tensors = {}
    for kind in (WEIGHTS, OPTIMIZER):
        stored = stored_of(folder, kind)
        names = stored.names
        tensors |= {
            f"{kind} {name}": stored.read(name, whole(stored.shape(name))) for name in names
        }
    return tensors


def last_state(folder):
    return state_of(steps(folder / "checkpoints")[-1])


def assert_same(state, other):
    assert state.keys() == other.keys()
    assert state
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name


def losses(events, kind="step"):
    """The loss of each step; where a step is there twice, the newest line counts."""
    return {event["step"]: event["loss"] for event in of(events, kind)}


@pytest.fixture
def undisturbed(go):
    """Return the state, losses and held-out losses of a run that nothing disturbs."""
    kept = {}

    def run(*overrides):
        if overrides not in kept:
            folder, _, events = go(None, *overrides, name="undisturbed")
            kept[overrides] = last_state(folder), losses(events), losses(events, "eval")
        return kept[overrides]

    return run


# --- the rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2, "dp_shard": 2}, {"cp": 2}])
def test_every_number_of_replicas_reads_each_row_once(replicas, layout):
    layout = Layout(dp_replicate=replicas, microbatch=2, **layout)
    alike = layout.pp * layout.cp * layout.tp
    read = [row for rank in range(layout.world) for row in sequences_of(layout, 16, rank)]
    assert sorted(read) == sorted(row for row in range(16) for _ in range(alike))


def test_the_ranks_of_a_generation_are_those_of_its_replicas(tmp_path):
    layout = Layout(pp=2, dp_replicate=3, tp=2)
    assert ranks_of(layout, 1) == [2, 3, 8, 9]
    generation = ReplicaGeneration(4, (2, 1))
    assert generation.layout(layout).dp_replicate == 2
    assert generation.ranks(layout) == [4, 5, 2, 3, 10, 11, 8, 9]
    announced = Announcements(tmp_path)
    assert announced.newest() is None
    announced.announce(generation)
    assert announced.newest() == generation


# --- a killed rank ---------------------------------------------------------------------------


@pytest.mark.often(1)
@pytest.mark.parametrize("phase", ["forward", "update", "log"])
def test_the_others_go_on_where_a_replica_is_killed(go, undisturbed, phase):
    """In `log` all have updated already; else none has, and the step is repeated."""
    folder, text, events = go(f"1:{phase}:4:kill", ELASTIC, "train.eval_every=3")
    lost = of(events, "replica_lost")[0]
    assert (lost["replicas"], lost["ranks"], lost["left"]) == ([1], [1], [0])
    assert "rank 1 was killed by SIGKILL" in lost["cause"]
    assert of(events, "regroup")[0]["step"] == (4 if phase == "log" else 3)
    assert not of(events, "restart")
    assert [event["from_step"] for event in of(events, "start")] == [0]
    assert "replica 0 continues without replica 1" in text
    state, step_losses, held_out = undisturbed("train.eval_every=3")
    assert_same(last_state(folder), state)
    assert losses(events) == step_losses
    assert losses(events, "eval") == held_out


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["data", "backward", "reduce", "update", "log", "eval", "save"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_killed_in_any_phase(go, undisturbed, rank, phase):
    folder, _, events = go(f"{rank}:{phase}:4:kill", ELASTIC, "train.eval_every=2")
    assert of(events, "replica_lost")[0]["ranks"] == [rank]
    assert not of(events, "restart")
    state, step_losses, held_out = undisturbed("train.eval_every=2")
    assert_same(last_state(folder), state)
    assert losses(events) == step_losses
    assert losses(events, "eval") == held_out


@pytest.mark.faults
def test_a_hung_replica_is_ended_and_left_out(go, undisturbed):
    folder, _, events = go("1:forward:4:stop", ELASTIC, *HANG)
    lost = of(events, "replica_lost")[0]
    assert (lost["replicas"], lost["kind"]) == ([1], "hang")
    assert "rank 1 is stopped (SIGSTOP) in step 4" in lost["cause"]
    assert_same(last_state(folder), undisturbed(*HANG)[0])


@pytest.mark.faults
def test_a_replica_that_never_loads_is_left_out(go, undisturbed):
    folder, _, events = go("1:load:0:kill:always", ELASTIC, "checkpoint.restarts=1", *LASTING)
    lost = of(events, "replica_lost")
    assert lost[0]["restarts"] == [1]
    assert [event["left"] for event in lost] == [[0]] * len(lost)
    assert not of(events, "restart")
    assert_same(last_state(folder), undisturbed(*LASTING)[0])


@pytest.mark.faults
def test_what_all_replicas_raise_restarts_all(go, undisturbed):
    folder, _, events = go("1:forward:4:nan", ELASTIC)
    assert not of(events, "replica_lost")
    assert "is not finite" in of(events, "restart")[0]["cause"]
    assert_same(last_state(folder), undisturbed()[0])


# --- it joins again --------------------------------------------------------------------------


def kill_ranks(folder, ranks):
    """Kill ranks with nothing between, in the middle of whatever they do."""
    for pid in [read_flight_recorder(folder / f"logs/rank-{rank}.recorder").pid for rank in ranks]:
        os.kill(pid, signal.SIGKILL)


def has_step(folder, step):
    events = events_of(folder) if (folder / "events.jsonl").is_file() else []
    return max(losses(events), default=0) >= step


def start_lasting(corpus, tmp_path, *overrides, **environ):
    """Start a run that lasts until it is asked to stop; returns its folder and process."""
    words = ["train.steps=100000", "train.log_every=1", "checkpoint.every=1000", ELASTIC]
    process = start_train(corpus, tmp_path, *words, *LASTING, *overrides, **environ)
    return tmp_path / "runs" / "run", process


def stop_when(folder, process, happened, what):
    """Ask a run to stop once its events are as awaited."""
    wait_for(lambda: happened(events_of(folder)), what, process, timeout_s=300.0)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 4, out
    return folder


def all_train_again(replicas):
    """Whether as many replicas train, and have done ten steps since the last one joined."""

    def have(events):
        groups = of(events, "regroup")
        if not groups or len(groups[-1]["replicas"]) < replicas:
            return False
        return max(losses(events), default=0) >= groups[-1]["step"] + 10

    return have


def run_until_joined(corpus, tmp_path, fault, *overrides):
    """Train until the replica that a fault ended has joined and taken ten steps, then stop.

    Returns the run folder.
    """
    folder, process = start_lasting(corpus, tmp_path, *overrides, FAULT=fault)
    wait_for(lambda: has_step(folder, 1), "a step", process)
    return stop_when(folder, process, all_train_again(2), "a replica that joins")


def undisturbed_until(config, folder, *overrides):
    """The run folder of an undisturbed run with as many steps as another had."""
    done = of(events_of(folder), "end")[0]["step"]
    words = [f"train.steps={done}", "train.log_every=1", "log.name=whole", *LASTING, *overrides]
    return train(config(*words), clean_environ(), io.StringIO()).folder


def same_rows(config, folder, *overrides):
    """The run folder of a run over the same rows that no replica has left.

    It stops where process groups changed in another run, and is resumed from a checkpoint with as
    many replicas as that one then had: so it adds up the same numbers in the same order, if
    `overrides` have the size of a microbatch.
    """
    events = events_of(folder)
    changes = [(event["step"], len(event["replicas"])) for event in of(events, "regroup")]
    ends = [*(step for step, _ in changes), of(events, "end")[0]["step"]]
    counts = [of(events, "start")[0]["layout"]["dp_replicate"], *(count for _, count in changes)]
    resume = None
    for end, replicas in zip(ends, counts, strict=True):
        words = [f"train.steps={end}", "train.log_every=1", "log.name=same-rows", *LASTING]
        layout = f"layout.dp_replicate={replicas}"
        asked = config(*words, *overrides, layout)
        done = train(asked, clean_environ(), io.StringIO(), resume=resume).folder
        resume = Resume(done)
    return done


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["1:backward:5:kill", "0:log:5:kill"])
def test_a_replica_reads_weights_and_states_from_another_and_joins(corpus, tmp_path, config, fault):
    layout = ["layout.dp_replicate=2", "model.dropout=0.1"]
    folder = run_until_joined(corpus, tmp_path, fault, *layout)
    events = events_of(folder)
    killed = int(fault[0])
    left, joined = of(events, "regroup")[:2]
    assert (left["replicas"], left["joined"]) == ([1 - killed], [])
    assert (joined["replicas"], joined["joined"]) == ([1 - killed, killed], [killed])
    assert joined["step"] > left["step"]
    whole_run = undisturbed_until(config, folder, *layout)
    assert_same(last_state(folder), last_state(whole_run))
    assert losses(events) == losses(events_of(whole_run))
    assert diagnose(folder).last_step == max(losses(events))


@pytest.mark.faults
@pytest.mark.parametrize(
    "layout",
    [
        ["layout.tp=2", "model.n_kv_heads=2"],
        ["layout.dp_shard=2", "layout.zero=3"],
        ["layout.pp=2"],
    ],
    ids=["tp", "zero3", "pp"],
)
def test_a_replica_of_two_ranks_is_left_out_and_joins(corpus, tmp_path, config, layout):
    nodes = ["layout.dp_replicate=2", "cluster.devices_per_node=4", "layout.microbatch=1"]
    layout = [*nodes, *layout]
    folder = run_until_joined(corpus, tmp_path, "3:backward:5:kill", *layout)
    events = events_of(folder)
    lost = of(events, "replica_lost")[0]
    assert (lost["replicas"], len(lost["ranks"])) == ([1], 2)
    assert not of(events, "restart")
    same = same_rows(config, folder, *layout)
    assert_same(last_state(folder), last_state(same))
    assert losses(events) == losses(events_of(same))


@pytest.mark.faults
def test_two_replicas_that_are_killed_at_once_join_again(corpus, tmp_path, config):
    layout = ["layout.dp_replicate=3", "cluster.devices_per_node=3", "train.batch=6"]
    layout += ["layout.microbatch=1"]
    folder, process = start_lasting(corpus, tmp_path, *layout)
    wait_for(lambda: has_step(folder, 5), "five steps", process)
    kill_ranks(folder, (0, 2))
    stop_when(folder, process, all_train_again(3), "two replicas that join")
    events = events_of(folder)
    assert {rank for event in of(events, "replica_lost") for rank in event["ranks"]} == {0, 2}
    assert not of(events, "restart")
    same = same_rows(config, folder, *layout)
    assert_same(last_state(folder), last_state(same))
    assert losses(events) == losses(events_of(same))


@pytest.mark.faults
def test_unlike_shares_of_the_rows_add_up_to_the_same_step(go, undisturbed):
    """Of three microbatches, one replica has one, and the other one two."""
    layout = ["layout.dp_replicate=3", "cluster.devices_per_node=3", "train.batch=3", *LASTING]
    folder, _, events = go("0:forward:3:kill", ELASTIC, *layout)
    assert of(events, "regroup")[0]["step"] == 2
    state, step_losses, _ = undisturbed(*layout)
    assert losses(events) == pytest.approx(step_losses, rel=1e-6)
    for name, tensor in last_state(folder).items():
        if name.startswith(WEIGHTS):
            assert (tensor - state[name]).norm() < 1e-4 * tensor.norm().clamp(min=1e-3), name


@pytest.mark.faults
def test_a_replica_that_dies_in_its_first_step_each_time_is_left_out(corpus, tmp_path, config):
    layout = ["layout.dp_replicate=2", "checkpoint.restarts=1"]
    environ = {"FAULT": "1:forward:*:kill:always"}
    folder, process = start_lasting(corpus, tmp_path, *layout, **environ)
    wait_for(lambda: has_step(folder, 1), "a step", process)

    def is_left_out(events):
        lost = of(events, "replica_lost")
        return lost and lost[-1]["restarts"] == [] and losses(events)

    stop_when(folder, process, is_left_out, "a replica that is not started again")
    events = events_of(folder)
    assert [event["restarts"] for event in of(events, "replica_lost")] == [[1], []]
    assert_same(last_state(folder), last_state(undisturbed_until(config, folder, *layout)))


@pytest.mark.faults
def test_a_replica_is_lost_while_the_best_step_is_saved(go, undisturbed):
    """The step is due to be saved by its held-out loss alone."""
    words = ["checkpoint.every=100", "checkpoint.keep_best=true", "train.eval_every=4"]
    _, _, events = go("1:save:4:kill", ELASTIC, *words)
    assert of(events, "replica_lost")[0]["ranks"] == [1]
    assert not of(events, "restart")
    assert {event["step"] for event in of(events, "save")} == {4, 6}
    assert losses(events, "eval") == undisturbed(*words)[2]


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_replica_is_lost_during_a_save_beside_training(go, undisturbed, place, rank):
    """The save that breaks off is dropped, and the next one is whole."""
    folder, _, events = go(f"{rank}:save.{place}:4:kill", ELASTIC, "checkpoint.async=true")
    assert not of(events, "restart")
    state, step_losses, _ = undisturbed()
    assert_same(last_state(folder), state)
    assert losses(events) == step_losses
    for step in steps(folder / "checkpoints"):
        verify(step)


@pytest.mark.faults
def test_who_joins_goes_on_from_a_checkpoint_where_the_last_living_replica_is_lost(
    corpus, tmp_path, config
):
    """The step that the others have in memory is gone, but none that is saved."""
    layout = ["layout.dp_replicate=2", "checkpoint.every=5"]
    folder, process = start_lasting(corpus, tmp_path, *layout, FAULT="1:forward:8:kill")
    wait_for(lambda: has_step(folder, 1), "a step", process)

    def is_joining():
        return any(event["joined"] for event in of(events_of(folder), "regroup"))

    wait_for(is_joining, "a replica that joins", process, timeout_s=200.0)
    kill_ranks(folder, (0,))
    reached = max(losses(events_of(folder)))
    stop_when(
        folder, process, lambda events: max(losses(events)) >= reached + 20, "steps after that"
    )
    events = events_of(folder)
    assert min(event["from_step"] for event in of(events, "start")[1:] or [{"from_step": 5}]) >= 5
    whole_run = undisturbed_until(config, folder, *layout)
    assert_same(last_state(folder), last_state(whole_run))
    assert losses(events) == losses(events_of(whole_run))


# --- what it does not go with ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.dp_shard=2", "layout.zero=2"], "layout.dp_replicate = 1"),
        (["layout.dp_replicate=2", "checkpoint.restarts=0"], "checkpoint.restarts = 0"),
        (["layout.dp_replicate=2", "optimizer.name=muon"], "optimizer.name = muon"),
        (["layout.dp_replicate=2", "train.precision=fp16"], "train.precision = fp16"),
        (["layout.dp_replicate=2", "cluster.memory=2GiB"], "cluster.memory = "),
    ],
)
def test_what_elastic_replicas_do_not_go_with_is_refused(config, overrides, message):
    with pytest.raises(ConfigError, match=r"cluster\.elastic = true") as refused:
        train(config(ELASTIC, *overrides), clean_environ(), io.StringIO())
    assert message in str(refused.value)


def test_a_schedule_must_be_legal_with_fewer_replicas(config):
    pipeline = ["layout.pp=2", "layout.virtual_stages=2", "layout.schedule=interleaved_1f1b"]
    words = [*pipeline, "model.n_layers=4", "train.batch=9", "layout.dp_replicate=3"]
    with pytest.raises(ConfigError, match="replicas left"):
        train(
            config(ELASTIC, *words, "layout.microbatch=1", "cluster.devices_per_node=6"),
            clean_environ(),
            io.StringIO(),
        )
