"""The script under a real Slurm on this machine: stopped at its limit, requeued, gone on."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli import main
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
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=localhost CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def call(*words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A Slurm of one node with two cores, gone at the end."""
    folder = Path("/tmp") / f"slurm-{os.getpid()}"  # a socket's path must be short
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONF.format(folder=folder))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file")]
    call("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock", *files)
    try:
        call("slurmctld")
        time.sleep(2)
        call("slurmd", "-N", "localhost")
        wait(lambda: "idle" in call("sinfo", "-h", "-o", "%t"), 30)
        yield folder
    finally:
        subprocess.run(["scontrol", "shutdown"], check=False)
        for file in ("slurmd.pid", "slurmctld.pid", "munge.pid"):
            if (folder / file).is_file():
                subprocess.run(["kill", (folder / file).read_text().strip()], check=False)
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
