"""A job as an sbatch script, and its submission to Slurm."""

from __future__ import annotations

import subprocess
import tempfile
from typing import Final

from meshwright.comm.secret import VARIABLE
from meshwright.errors import (
    EXIT_NO_PROGRESS,
    EXIT_RANK_FAILED,
    EXIT_STOPPED,
    ConfigError,
    MeshwrightError,
)
from meshwright.runtime.jobs.job import JobSpec, clock, environment, shell

# Cores of a rank unless the job says. One with a GPU has one each for its work, its saver and its
# collectives, and one to spare. Slurm's own default is one.
_CORES: Final = {"cpu": 1, "cuda": 4}
# Ranks that were asked to stop end one after the other, and are not to be killed meanwhile.
_LEFT_S: Final = 60


def slurm(job: JobSpec) -> str:
    """Return the sbatch script of a job, in which each task of srun is a rank.

    Slurm sends the ranks SIGTERM before the time limit; they save and exit with code 4, and the job
    is requeued and resumes the run. A job with a failed rank is requeued `restarts` times.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {shell([option])}" for option in _options(job)), ""]
    lines += [f"export {shell([f'{name}={value}'])}" for name, value in environment(job).items()]
    # Drawn as the job starts: Slurm shows the script of a job to more than its owner.
    lines.append(f"export {VARIABLE}=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')")
    lines += [job.setup] if job.setup else []
    train = [job.python, "-m", "meshwright", "train", *job.arguments]
    cores = f"--cpus-per-task={_cores(job)}"  # srun no longer takes it from the job
    run = ["srun", f"--wait={_LEFT_S}", "--label", cores, *train]
    lines += [
        # The code is looked at below: not the end of the script.
        f"{shell(run)} || code=$?",
        'case "${code:-0}" in',
        f"  {EXIT_STOPPED})  # asked to stop, and saved: the time is up, or the job was preempted",
        '    scontrol requeue "$SLURM_JOB_ID" ;;',
        f"  0 | 1 | 2 | {EXIT_NO_PROGRESS})  # done, or nothing that another try would change",
        "    ;;",
        f"  *)  # a rank or a node failed ({EXIT_RANK_FAILED}, or a signal's number)",
        f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then',
        '      scontrol requeue "$SLURM_JOB_ID"',
        "    fi ;;",
        "esac",
        'exit "${code:-0}"',
    ]
    return "\n".join(lines) + "\n"


def _options(job: JobSpec) -> list[str]:
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
        f"--time={clock(job.time_limit_s)}",
        f"--signal=TERM@{job.grace_s}",
        "--requeue",
        "--open-mode=append",
        # Where the job is submitted: Slurm makes no folder for it.
        f"--output={job.name}-%j.log",
        f"--cpus-per-task={_cores(job)}",
    ]
    if job.device == "cuda":
        options.append(f"--gpus-per-node={job.per_node}")
    for name, value in (("partition", job.partition), ("account", job.account)):
        if value is not None:
            options.append(f"--{name}={value}")
    return options


def _cores(job: JobSpec) -> int:
    return _CORES[job.device] if job.cores is None else job.cores


def submit(script: str) -> str:
    """Submit a script with sbatch and return the job number.

    Raises `ConfigError` if sbatch is missing, and `MeshwrightError` if it rejects the script.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", file.name], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ConfigError("--submit needs sbatch, which is not on this machine") from None
    if done.returncode:
        raise MeshwrightError(f"sbatch refused: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
