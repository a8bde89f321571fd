"""The script under a real Slurm on this machine: stopped at its limit, requeued, gone on."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.comm.flight_recorder_file import read_flight_recorder
from runs import TINY

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
CONF = """\
ClusterName=test
SlurmctldHost=localhost
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def call(*words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


@pytest.fixture
def cluster(request, monkeypatch):
    """A Slurm on this machine whose nodes have the names asked for, gone at the end."""
    names = getattr(request, "param", ["localhost"])
    folder = Path("/tmp") / f"slurm-{os.getpid()}"  # a socket's path must be short
    (folder / "state").mkdir(parents=True)
    nodes = [
        f"NodeName={name} NodeHostname=localhost Port={16818 + number} CPUs=2 State=UNKNOWN"
        for number, name in enumerate(names)
    ]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, nodes="\n".join(nodes)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file")]
    call("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock", *files)
    try:
        call("slurmctld")
        time.sleep(2)
        for name in names:
            (folder / f"spool-{name}").mkdir()
            call("slurmd", "-N", name)
        wait(lambda: call("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(names), 30)
        yield folder
    finally:
        subprocess.run(["scontrol", "shutdown"], check=False)
        for file in folder.glob("*.pid"):
            subprocess.run(["kill", file.read_text().strip()], check=False)
        time.sleep(1)
        shutil.rmtree(folder, ignore_errors=True)


def wait(done, seconds):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "it took too long"
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons are started as root")
def test_a_job_saves_at_its_limit_and_goes_on_when_requeued(
    cluster, corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += ["train.steps=1000000", "log.dir=runs", "log.name=job", "checkpoint.every=0"]
    options = ["--time", "2m", "--grace", "70s", "--submit"]
    assert main(["launch", "slurm", *words, *options]) == 0
    job = capsys.readouterr().out.split()[1]
    events = tmp_path / "runs" / "job" / "events.jsonl"

    def seen(kind):
        if not events.is_file():
            return []
        found = [json.loads(line) for line in events.read_text().splitlines()]
        return [event for event in found if event["event"] == kind]

    wait(lambda: seen("end"), 200)
    (end,) = seen("end")
    assert end["stopped"]
    assert seen("save")[-1]["step"] == end["step"]
    # Slurm lets a requeued job wait for two minutes, from when its processes are gone.
    hurry = ["scontrol", "update", f"jobid={job}", "StartTime=now"]
    wait(lambda: seen("resume") or subprocess.run(hurry, capture_output=True) is None, 250)
    wait(lambda: any(event["step"] > end["step"] for event in seen("step")), 200)
    assert [event["step"] for event in seen("resume")] == [end["step"]]
    assert [event["world"] for event in seen("start")] == [2, 2]
    call("scancel", job)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons are started as root")
@pytest.mark.parametrize("cluster", [["n0", "n1"]], indirect=True)
def test_tasks_that_slurm_deals_out_in_turns_are_numbered_node_by_node(
    cluster, corpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [*TINY, f"data.source={corpus}", f"data.cache={tmp_path / 'cache'}"]
    words += [f"log.dir={tmp_path / 'runs'}", "log.name=job", "model.n_kv_heads=2"]
    words += ["layout.tp=2", "layout.dp_replicate=2"]
    dealt = ["--nodes=2", "--ntasks=4", "--distribution=cyclic"]
    where = 'echo "$SLURM_PROCID $SLURMD_NODENAME"'
    placed = sorted(call("srun", *dealt, "sh", "-c", where).split("\n"))[1:]
    assert placed == ["0 n0", "1 n1", "2 n0", "3 n1"]
    call("srun", *dealt, "meshwright", "train", *words)
    run = tmp_path / "runs" / "job"
    start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    assert start["nodes"] == ["n0", "n1"]
    recorders = [read_flight_recorder(run / "logs" / f"rank-{rank}.recorder") for rank in range(4)]
    tp = [group.ranks for recorder in recorders for group in recorder.groups if group.label == "tp"]
    assert set(tp) == {(0, 1), (2, 3)}
