"""Where ranks meet, from what torchrun, srun or nobody says."""

import pytest

from meshwright.comm.rendezvous import Rendezvous, first_host
from meshwright.errors import ConfigError

# What srun tells the third of three tasks on two nodes, one of which has two.
SRUN = {
    "SLURM_JOB_ID": "40017",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_a_task_of_srun_is_a_rank():
    at = Rendezvous.from_environment(SRUN)
    assert at == Rendezvous(2, 3, 0, 1, "gpu07", 25017, job="slurm-40017")


def test_a_requeued_job_counts_its_attempts():
    assert Rendezvous.from_environment({**SRUN, "SLURM_RESTART_COUNT": "2"}).attempt == 2


def test_what_is_set_by_hand_wins():
    at = Rendezvous.from_environment({**SRUN, "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "1234"})
    assert (at.host, at.port) == ("10.0.0.5", 1234)
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert Rendezvous.from_environment({**SRUN, **own}).size == 2


def test_several_nodes_do_not_meet_on_localhost():
    with pytest.raises(ConfigError, match=r"every node itself.* has 2 nodes; nearest legal: gpu07"):
        Rendezvous.from_environment({**SRUN, "MASTER_ADDR": "localhost"})
    one = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0", "SLURM_LOCALID": "2"}
    assert Rendezvous.from_environment({**one, "MASTER_ADDR": "localhost"}).host == "localhost"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # the batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # it starts its ranks itself
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_nobody_has_started_ranks(environ):
    assert Rendezvous.from_environment(environ) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("one", "one"),
        ("a,b", "a"),
        ("gpu[007-009,12],login", "gpu007"),
        ("gpu[3,5-6]", "gpu3"),
        ("rack1-n[01-04]-ib", "rack1-n01-ib"),
        ("rack1-n[01-04]-ib,rack2-n[01-04]-ib", "rack1-n01-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first
