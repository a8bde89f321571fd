"""Jobs: what `launch` writes for torchrun, Slurm, SkyPilot and Kubernetes."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from meshwright.cli import main
from meshwright.comm.secret import Secret
from meshwright.runtime.jobs import job as jobs
from meshwright.runtime.jobs.job import parse_time
from meshwright.runtime.supervise.supervisor import listen_on_loopback
from meshwright.spec.dump import to_toml
from runs import clean_environ
from written_jobs import CONFIG, script_of


def test_torchrun_has_a_line_for_each_node_and_one_meeting_place(written):
    text = written("torchrun", "--hosts", "a", "b", "--name", "big")
    lines = text.splitlines()
    assert lines[0::2] == ["# on a", "# on b"]
    assert lines[1] == lines[3]
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint a:29500" in lines[1]
    assert lines[1].endswith("-m meshwright train run.toml")


def test_a_job_with_a_secret_is_never_readable_by_others(written, tmp_path, monkeypatch):
    seen, rename = [], Path.replace

    def replaced(source, target):
        seen.append((Path(target).name, stat.S_IMODE(source.stat().st_mode)))
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", replaced)
    written("torchrun", "--hosts", "a", "b", "--out", "job.sh")
    assert seen == [("job.sh", 0o600)]
    assert stat.S_IMODE((tmp_path / "job.sh").stat().st_mode) == 0o600


def test_two_jobs_of_one_name_do_not_meet(written):
    ids = [re.search(r"--rdzv-id (\S+)", written("torchrun", "--hosts", "a", "b"))[1] for _ in "12"]
    assert ids[0] != ids[1]
    assert all(one.startswith("meshwright-") for one in ids)


def test_ranks_of_a_job_get_a_secret_that_is_in_no_command(written, tmp_path):
    written("torchrun", "--hosts", "a", "b", "--out", "job.sh")
    assert (tmp_path / "job.sh").stat().st_mode & 0o077 == 0
    before, _, command = (tmp_path / "job.sh").read_text().splitlines()[1].partition(" ")
    secret = before.removeprefix("MESHWRIGHT_SECRET=")
    assert len(secret) == 64
    assert secret not in command
    task = yaml.safe_load(written("skypilot", "--image", "i"))
    assert len(task["envs"]["MESHWRIGHT_SECRET"]) == 64
    script = written("slurm")  # which Slurm shows: the secret is drawn as it runs
    line = next(line for line in script.splitlines() if "MESHWRIGHT_SECRET" in line)
    drawn = [
        subprocess.run(["bash", "-c", f"{line}; env"], capture_output=True, text=True, check=True)
        for _ in "12"
    ]
    found = [re.search(r"^MESHWRIGHT_SECRET=([0-9a-f]{64})$", one.stdout, re.M) for one in drawn]
    assert found[0][1] != found[1][1]


@pytest.mark.slow  # test_launch joins torchrun
def test_the_line_of_torchrun_runs_as_it_is_printed(config, written, tmp_path, monkeypatch):
    """By a shell, on one node, whose ranks meet by c10d at a free port in place of the usual."""
    with listen_on_loopback(None) as listener:
        monkeypatch.setattr(jobs, "PORT", listener.getsockname()[1])
    tiny = config("cluster.devices_per_node=2", "layout.dp_shard=2", "layout.zero=2")
    (tmp_path / "tiny run.toml").write_text(to_toml(tiny))
    line = written("torchrun", "--nodes", "1", config="tiny run.toml")
    assert line.count("\n") == 1
    assert f"--rdzv-backend c10d --rdzv-endpoint localhost:{jobs.PORT} --rdzv-id" in line
    environ = {**clean_environ(), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(["bash", "-ec", line], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    events = (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()
    start, *_, end = map(json.loads, events)
    assert start["world"] == 2
    assert (end["event"], end["step"]) == ("end", 4)


def test_a_slurm_script_is_a_shell_script_and_asks_for_what_it_needs(written, tmp_path):
    text = written("slurm", "--time", "12h", "--partition", "gpu", "--setup", "source env.sh")
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    for option in (
        *("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=12:00:00"),
        *("--signal=TERM@180", "--requeue", "--partition=gpu", "--cpus-per-task=4"),
        "--output=meshwright-%j.log",  # Slurm would not make a folder
    ):
        assert option in options
    srun = "srun --wait=60 --label --cpus-per-task=4"
    assert f"{srun} python -m meshwright train run.toml" in text
    assert "source env.sh\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_slurm_script_takes_the_python_at_hand_unless_a_setup_brings_one(written):
    text = written("slurm", "--cpus", "12")
    assert f"--cpus-per-task=12 {shlex.quote(sys.executable)} -m meshwright train" in text


HOSTILE = "runs/a b; touch pwned; $(touch pwned) `touch pwned` ENDPOINT '\""


@pytest.mark.case(46)
@pytest.mark.parametrize("target", ["slurm", "skypilot", "kubernetes"])
def test_nothing_of_a_config_is_run_by_the_shell(written, target, tmp_path, outcome):
    started = time.monotonic()
    more = {
        "skypilot": ["--image", "i"],
        "kubernetes": ["--image", "i", "--volume", "v"],
    }
    text = written(target, f"log.dir={HOSTILE}", *more.get(target, ()))
    if target == "slurm":
        script = text
    elif target == "skypilot":
        script = yaml.safe_load(text)["run"]
    else:
        script = script_of(text)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("torchrun", "srun", "scontrol"):
        (tools / name).write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        (tools / name).chmod(0o755)
    environ = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "1.2.3.4",
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(
        ["bash", "-c", script], text=True, env=environ, capture_output=True, cwd=tmp_path
    )
    assert f"log.dir={HOSTILE}" in done.stdout.splitlines()
    assert not list(tmp_path.rglob("pwned"))
    outcome.add(None, "the words reach the command as they are", time.monotonic() - started)


@pytest.mark.case(46)
@pytest.mark.parametrize("option", [("--partition", "a\nb"), ("--name", "a\tb")])
def test_control_characters_are_refused(written, option, capsys, outcome):
    started = time.monotonic()
    code = main(["launch", "slurm", "run.toml", *option])
    said = capsys.readouterr().err
    outcome.add(code, said.strip(), time.monotonic() - started)
    assert (code, "control characters" in said) == (2, True)
    assert main(["launch", "slurm", "run.toml", "log.dir=a\nb"]) == 2


def run_script(tmp_path, text, code, restarts=0):
    """Run a batch script where srun ends with a code; returns its own and what scontrol got."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    log = tmp_path / "scontrol.log"
    for name, body in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {log}')):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    environ = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(["bash"], input=text, text=True, env=environ, check=False)
    said = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return done.returncode, said


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (0, 0, False),
        *((code, 0, False) for code in (1, 2, 5)),
        (3, 0, True),
        (3, 3, False),  # as often as --restarts says
        (4, 9, True),  # the time was up: however often
        (137, 1, True),
    ],
)
def test_a_job_is_requeued_by_its_exit_code(written, tmp_path, code, restarts, again):
    found = run_script(tmp_path, written("slurm"), code, restarts)
    assert found == (code, "requeue 7\n" if again else "")


def test_a_skypilot_task_meets_on_its_first_node(written):
    wheel = ["--wheel", "dist/meshwright-0.2.0-py3-none-any.whl", "--bucket", "s3://here/runs"]
    task = yaml.safe_load(written("skypilot", "--name", "big", *wheel))
    assert task["workdir"] == "."  # with the config, and data beside it
    there = "/tmp/meshwright/meshwright-0.2.0-py3-none-any.whl"
    assert task["file_mounts"][there] == "dist/meshwright-0.2.0-py3-none-any.whl"
    assert task["file_mounts"]["~/sky_workdir/runs"]["source"] == "s3://here/runs"
    assert task["setup"] == f"pip install '{there}[train]'\n"
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "H100:8"}
    assert '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)":29500' in task["run"]
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True).returncode == 0


def test_a_jobset_starts_a_pod_for_each_node(written):
    options = ["--image", "my/image", "--name", "big", "--volume", "training"]
    files, secret, found = yaml.safe_load_all(written("kubernetes", *options))
    assert (files["kind"], files["data"]) == ("ConfigMap", {"run.toml": CONFIG})
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = found["spec"]["replicatedJobs"]
    spec = group["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    (env,) = container["env"]
    named = {"name": secret["metadata"]["name"], "key": env["name"]}
    assert env["valueFrom"] == {"secretKeyRef": named}
    assert Secret.from_environment(secret["stringData"])
    assert container["workingDir"] == "/work"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/work"]]["persistentVolumeClaim"] == {"claimName": "training"}
    assert volumes[mounts["/etc/meshwright"]]["configMap"] == files["metadata"]
    script = container["command"][2]
    assert "--rdzv-endpoint big-node-0-0.big:29500" in script
    assert '--resume "$RUN"' in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_pytorchjob_has_a_master_and_workers(written):
    options = ["--image", "i", "--volume", "v", "--kind", "pytorchjob"]
    _, secret, found = yaml.safe_load_all(written("kubernetes", *options))
    assert secret["kind"] == "Secret"
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 1)
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    script = container["command"][2]
    torchrun = "env TORCH_ELASTIC_SHUTDOWN_TIMEOUT=180 torchrun"
    train = f"exec {torchrun} -m meshwright train /etc/meshwright/run.toml"
    assert f"{train} log.name=meshwright\n" in script
    assert f'  {train} --resume "$RUN"\n' in script


def test_one_node_needs_no_torchrun(written):
    one = ["cluster.nodes=1", "layout.dp_shard=8"]
    assert written("local", *one) == "meshwright train run.toml cluster.nodes=1 layout.dp_shard=8\n"
    script = yaml.safe_load(written("skypilot", *one, "--image", "i"))["run"]
    assert "torchrun" not in script
    assert (
        "meshwright train run.toml cluster.nodes=1 layout.dp_shard=8 log.name=meshwright" in script
    )


def test_a_plan_is_launched(written, tmp_path, capsys):
    assert main(["plan", "run.toml", "--top", "1", "--save", "plan.json"]) == 0
    capsys.readouterr()
    assert "meshwright train run.toml --plan plan.json" in written("slurm", "--plan", "plan.json")
    options = ["--image", "i", "--volume", "v", "--plan", "plan.json"]
    files, _, _ = yaml.safe_load_all(written("kubernetes", *options))
    assert files["data"]["plan.json"] == (tmp_path / "plan.json").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["local", "run.toml"], "local is one node, and the config has 2; nearest legal: torchrun"),
        (["slurm", "run.toml", "--nodes", "3"], "the layout has 16 ranks, and 3 node(s) have 24"),
        (["slurm", "run.toml", "--time", "soon"], "'soon' is not a length of time"),
        (["slurm", "run.toml", "--time", "2m"], "--time 2m00s must be longer than the --grace"),
        (["slurm", "run.toml", "--name", "My Run"], "'My Run' must be small letters"),
        (["torchrun", "run.toml", "--hosts", "a"], "--hosts names 1, but there are 2 nodes"),
        (["kubernetes", "run.toml"], "Kubernetes runs images: add --image"),
        (["kubernetes", "run.toml", "--image", "i"], "Kubernetes keeps nothing of a pod"),
        (
            ["kubernetes", "run.toml", "--image", "i", "--volume", "v", "log.dir=/runs"],
            "log.dir is kept by the volume: /runs lies outside",
        ),
        (
            ["kubernetes", "run.toml", "--image", "i", "--volume", "v", "checkpoint.dir=/s"],
            "checkpoint.dir is kept by the volume: /s lies outside",
        ),
        (
            ["kubernetes", "my run.toml", "--image", "i", "--volume", "v"],
            "a ConfigMap cannot have the file 'my run.toml'",
        ),
        (["skypilot", "run.toml"], "SkyPilot's machines have no Meshwright"),
        (["skypilot", "run.toml", "--image", "i", "log.dir=/runs"], "/runs lies outside"),
        (["slurm", "run.toml", "layout.tp=3"], "the layout needs a multiple of 48 ranks"),
    ],
)
def test_what_cannot_be_launched_is_refused(written, words, message, tmp_path, capsys):
    (tmp_path / "my run.toml").write_text(CONFIG)
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_lengths_of_time():
    found = [parse_time(text) for text in ("90s", "90m", "2d", "1:00:01")]
    assert found == [90, 5400, 172800, 3601]


def test_a_submission_needs_sbatch(written, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", "run.toml", "--submit"]) == 2
    assert "--submit needs sbatch" in capsys.readouterr().err
