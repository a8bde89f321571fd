"""`JobSpec`: what a job runs, where and for how long, independent of the scheduler.

Does not import torch, so that a job can be written on a laptop.
"""

from __future__ import annotations

import math
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Final

from meshwright.comm.secret import VARIABLE
from meshwright.errors import ConfigError, refusal
from meshwright.runtime.ranks.local import ALLOCATOR
from meshwright.units import format_seconds

PORT: Final = 29500
# Names as Kubernetes takes them (RFC 1123), which Slurm and SkyPilot take, too.
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME: Final = 52  # what JobSet adds to it must stay below 63


class Expression(str):
    """A shell expression, which `shell` does not quote."""


@dataclass(frozen=True)
class JobSpec:
    """A training job: `arguments` are those of `meshwright train`, `per_node` the ranks per node.

    `accelerator` is the device by its cloud name ("H100"), None on CPUs. `time_limit_s` is the
    scheduler's limit; `grace_s` before it, ranks are asked to save and stop. `setup` is a script
    that runs first on each node; `image` is a container's. `log_dir` is the folder of runs,
    `steps_dir` the folder of this run's steps, None for the run's own. `files` has the texts of
    files that the arguments name, by path, for Kubernetes. `volume` is the PersistentVolumeClaim or
    the bucket for data and runs, `wheel` the file of Meshwright's package, `identity` a random id
    of this job. Ranks authenticate each other by `secret`.
    """

    name: str
    arguments: tuple[str, ...]
    nodes: int
    per_node: int
    device: str
    accelerator: str | None = None
    cores: int | None = None
    time_limit_s: int = 24 * 3600
    grace_s: int = 180
    restarts: int = 3
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    setup: str | None = None
    log_dir: str = "runs"
    steps_dir: str | None = None
    hosts: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    volume: str | None = None
    wheel: str | None = None
    identity: str = field(default_factory=lambda: secrets.token_hex(4))
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def __post_init__(self) -> None:
        for name, text in self._texts():
            if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
                raise ConfigError(f"{name} {text!r} has control characters, which no job takes")
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            near = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:_LONGEST_NAME]
            rule = "small letters, digits and dashes, as Kubernetes has it"
            raise ConfigError(
                refusal(f"--name {self.name!r} must be {rule}", legal=[near or "meshwright"])
            )
        if self.time_limit_s <= self.grace_s:
            raise ConfigError(
                refusal(
                    f"--time {format_seconds(self.time_limit_s)} must be longer than the "
                    f"--grace {format_seconds(self.grace_s)} in which ranks save",
                    legal=[f"--time {math.ceil((2 * self.grace_s) / 60)}m"],
                )
            )
        if self.hosts and len(self.hosts) != self.nodes:
            raise ConfigError(
                refusal(
                    f"--hosts names {len(self.hosts)}, but there are {self.nodes} nodes",
                    legal=[self.nodes],
                )
            )

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield (field, text) for all text fields except the setup script and the files."""
        for spec_field in fields(self):
            value = getattr(self, spec_field.name)
            if spec_field.name in ("setup", "files") or value is None:
                continue
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str):
                    yield spec_field.name, text

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def train(self) -> list[str]:
        """The command line of a rank."""
        return ["meshwright", "train", *self.arguments]

    @property
    def python(self) -> str:
        """The Python on a node: this one, on a shared file system, or the one of `setup`."""
        return sys.executable if self.setup is None else "python"

    @property
    def run_folder(self) -> str:
        """The run folder, if the run is named like the job."""
        return str(PurePosixPath(self.log_dir) / self.name)

    @property
    def checkpoints(self) -> str:
        """The checkpoint folder, if the run is named like the job."""
        return self.steps_dir or str(PurePosixPath(self.run_folder) / "checkpoints")

    @property
    def elastic(self) -> list[str]:
        """The start of a torchrun command, which sets the grace period for saving.

        By default torchrun kills its ranks 30 seconds after SIGTERM; torch 2.11 has no option for
        it, only an environment variable.
        """
        return ["env", f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={self.grace_s}", "torchrun"]

    def torchrun(self, endpoint: str) -> list[str]:
        """Return a node's torchrun command; `endpoint` is the host:port where ranks meet.

        The rendezvous id is unique to this job, so that a second job of the same name does not join
        processes left by the first.
        """
        return [
            *self.elastic,
            *("--nnodes", str(self.nodes), "--nproc-per-node", str(self.per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
            *("--rdzv-id", f"{self.name}-{self.identity}"),
            *("--max-restarts", str(self.restarts)),
            *("-m", "meshwright", "train", *self.arguments),
        ]


def local(job: JobSpec) -> str:
    """Return the shell command that starts the ranks on this machine; one node only."""
    if job.nodes > 1:
        raise ConfigError(
            refusal(f"local is one node, and the config has {job.nodes}", legal=["torchrun"])
        )
    return shell(job.train) + "\n"


def torchrun(job: JobSpec) -> str:
    """Return a torchrun command for each node; ranks meet on the first node."""
    hosts = job.hosts or tuple(f"NODE{number}" for number in range(job.nodes))
    first = hosts[0] if job.nodes > 1 else "localhost"
    lines = [] if job.nodes == 1 or job.hosts else ["# NODE0 and so on stand for the nodes' names"]
    for host in hosts:
        if job.nodes > 1:
            lines.append(f"# on {host}")
        # Before the command, not in it: others see the words of a process, not its environment.
        lines.append(shell([f"{VARIABLE}={job.secret}", *job.torchrun(f"{first}:{PORT}")]))
    return "\n".join(lines) + "\n"


def shell(arguments: Sequence[str]) -> str:
    """Return arguments as a shell command line; all quoting of jobs is done here."""
    return " ".join(
        argument if isinstance(argument, Expression) else shlex.quote(argument)
        for argument in arguments
    )


def environment(job: JobSpec) -> Mapping[str, str]:
    """Return environment variables for ranks: empty on GPUs; on CPUs, one thread per rank."""
    if job.device == "cuda":
        return {}
    return {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": ALLOCATOR}


def parse_time(text: str) -> int:
    """Return the seconds of a duration such as `90m`, `24h`, `2d` or `12:30:00`.

    Raises `ConfigError` for any other text.
    """
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match:
        return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    clock = re.fullmatch(r"(\d+):(\d\d):(\d\d)", text)
    if clock:
        hours, minutes, seconds = map(int, clock.groups())
        return 3600 * hours + 60 * minutes + seconds
    raise ConfigError(
        refusal(f"{text!r} is not a length of time", legal=["90m", "24h", "12:30:00"])
    )


def clock(seconds: int) -> str:
    """Return seconds in Slurm's notation, `[days-]hours:minutes:seconds`."""
    minutes, remaining = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (
        f"{days}-{hours:02}:{minutes:02}:{remaining:02}"
        if days
        else f"{hours:02}:{minutes:02}:{remaining:02}"
    )
