"""Runs a job in a Ray placement group: a bundle per node, with an actor that starts its ranks.

The ranks are `meshwright train` processes with the environment that torchrun would set. Imports no
torch, and Ray only to submit a job.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from meshwright.comm.secret import VARIABLE
from meshwright.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DONE,
    EXIT_NO_PROGRESS,
    EXIT_RANK_FAILED,
    EXIT_REFUSED,
    EXIT_STOPPED,
    ConfigError,
    MeshwrightError,
    RankFailed,
    refusal,
)
from meshwright.runtime.jobs.job import JobSpec, environment, shell
from meshwright.runtime.supervise.supervisor import StopSignals

_POLL_S: Final = 0.5
# Nothing that another attempt would change, as in Slurm's script.
_FINAL: Final = (EXIT_CHECK_FAILED, EXIT_REFUSED, EXIT_NO_PROGRESS)
# What of the environment of whoever submits a job its ranks have, too.
_PASSED: Final = ("NCCL_", "GLOO_", "TORCH_", "PYTHONPATH", "FAULT")


def ray_job(job: JobSpec) -> str:
    """Return the shell command that submits a job to a Ray cluster from the current folder."""
    inside = shell(["meshwright", "launch", "ray", *job.arguments, *_options(job), "--submit"])
    line = f"cd {shlex.quote(str(Path.cwd()))} && {inside}"
    return shell(["ray", "job", "submit", "--no-wait", "--", "sh", "-c", line]) + "\n"


def _options(job: JobSpec) -> list[str]:
    options = ["--name", job.name, "--restarts", str(job.restarts)]
    return options if job.cores is None else [*options, "--cpus", str(job.cores)]


def bundles(job: JobSpec) -> list[dict[str, float]]:
    """Return the resources of each node, as bundles of a Ray placement group."""
    bundle = {"CPU": float(job.per_node * (job.cores or 1))}
    if job.device == "cuda":
        bundle["GPU"] = float(job.per_node)
    return [dict(bundle) for _ in range(job.nodes)]


def strategy(job: JobSpec) -> str:
    """Return the placement strategy: all on one node if there is one, else nodes close together."""
    return "STRICT_PACK" if job.nodes == 1 else "PACK"


def environments(
    job: JobSpec, node: int, endpoint: tuple[str, int], attempt: int, identity: str
) -> list[dict[str, str]]:
    """Return, for each rank of a node, the environment variables that torchrun would set.

    `endpoint` is the host and port where ranks meet, `identity` the job's id.
    """
    common = {
        **environment(job),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.per_node),
        "MASTER_ADDR": endpoint[0],
        "MASTER_PORT": str(endpoint[1]),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_RUN_ID": identity,
        VARIABLE: job.secret,
    }
    return [
        {**common, "RANK": str(node * job.per_node + local), "LOCAL_RANK": str(local)}
        for local in range(job.per_node)
    ]


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of the submitter's environment variables that ranks receive."""
    return {key: value for key, value in environ.items() if key.startswith(_PASSED)}


class NodeRanks:
    """A Ray actor with the ranks of one node; they end when it does."""

    def __init__(self, folder: str) -> None:
        """Set the working folder of the ranks, which must exist on this node."""
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifeline = os.pipe()

    def port(self) -> int:
        """Return a TCP port that is free on this node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, arguments: Sequence[str], environs: Sequence[Mapping[str, str]]) -> None:
        """Start a rank for each environment; raises `OSError` if the folder is missing."""
        follow = self._lifeline[0]
        for environ in environs:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "meshwright", "train", *arguments],
                    env={**os.environ, **environ, "MESHWRIGHT_PARENT_FD": str(follow)},
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[follow],
                    start_new_session=True,
                )
            )

    def codes(self) -> list[int | None]:
        """Return each rank's exit code, negative for a signal, None while it runs."""
        return [process.poll() for process in self._processes]

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every running rank, which then saves and ends."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def end(self) -> None:
        """Kill every rank."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Nodes(Protocol):
    """What a supervisor needs of the Ray nodes that run a job's ranks between two restarts.

    That is their exit codes, a request to stop, and a way to kill them.
    """

    def codes(self) -> list[int | None]:
        """Return each rank's exit code or None; raises `NodeLost` if a node is gone."""

    def ask_to_stop(self) -> None:
        """Ask all ranks to save and end."""

    def end(self) -> None:
        """Kill all ranks on the remaining nodes."""


class NodeLost(Exception):
    """A node or its actor is gone, together with its ranks."""


def follow(
    start: Callable[[int], Nodes], restarts: int, grace_s: float, stop: Callable[[], bool]
) -> int:
    """Start attempts with `start` until one succeeds, and return the exit code of the job.

    A failed rank or a lost node ends the attempt's other ranks. Raises `RankFailed` after
    `restarts` failed restarts, or if ranks do not stop within `grace_s` seconds of a request by
    `stop`.
    """
    for attempt in range(restarts + 1):
        nodes = start(attempt)
        try:
            codes = _watch(nodes, grace_s, stop)
            reason = f"ranks ended with codes {codes}"
        except NodeLost as error:
            codes, reason = [], str(error)
        finally:
            nodes.end()
        if codes and all(code in (EXIT_DONE, EXIT_STOPPED) for code in codes):
            return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_DONE
        if final := [code for code in codes if code in _FINAL]:
            return int(final[0] or 0)
        if stop():
            return EXIT_RANK_FAILED
        print(f"attempt {attempt}: {reason}", file=sys.stderr, flush=True)
    raise RankFailed(f"the ranks failed, also after {restarts} restarts; the last time {reason}")


def _watch(nodes: Nodes, grace_s: float, stop: Callable[[], bool]) -> list[int | None]:
    """Wait until all ranks have ended or one has failed, and return the exit codes."""
    asked_at: float | None = None
    while True:
        codes = nodes.codes()
        if None not in codes or any(code not in (None, EXIT_DONE, EXIT_STOPPED) for code in codes):
            return codes
        clock_s = time.monotonic()
        if stop() and asked_at is None:
            asked_at = clock_s
            nodes.ask_to_stop()
        if asked_at is not None and clock_s - asked_at > grace_s:
            raise RankFailed(f"ranks did not stop within {grace_s:.0f} s of being asked to")
        time.sleep(_POLL_S)


class _RayNodes:
    """The Ray actors of one attempt, one in each bundle."""

    def __init__(self, ray: Any, job: JobSpec, group: Any, attempt: int, identity: str) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._actors = ray, []
        for number, bundle in enumerate(bundles(job)):
            inside = PlacementGroupSchedulingStrategy(group, number)
            kind = ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0))(NodeRanks)
            self._actors.append(kind.options(scheduling_strategy=inside).remote(str(Path.cwd())))
        first = ray.util.placement_group_table(group)["bundles_to_node_id"][0]
        host = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == first)
        try:
            port = ray.get(self._actors[0].port.remote())
            passed_environ = passed(os.environ)
            environs_by_node = [
                [
                    passed_environ | rank_environ
                    for rank_environ in environments(job, number, (host, port), attempt, identity)
                ]
                for number in range(job.nodes)
            ]
            pairs = zip(self._actors, environs_by_node, strict=True)
            ray.get([actor.start.remote(job.arguments, environs) for actor, environs in pairs])
        except ray.exceptions.RayTaskError as error:  # a folder that a node does not see
            self.end()
            raise ConfigError(f"a node could not start its ranks: {error.cause}") from None

    def codes(self) -> list[int | None]:
        """Return each rank's exit code or None; raises `NodeLost` if an actor is gone."""
        try:
            codes_by_node = self._ray.get([actor.codes.remote() for actor in self._actors])
        except self._ray.exceptions.RayActorError as error:
            raise NodeLost(f"a node was lost: {error}") from None
        return [code for codes in codes_by_node for code in codes]

    def ask_to_stop(self) -> None:
        """Ask all ranks to save and end."""
        self._ray.get([actor.ask_to_stop.remote() for actor in self._actors])

    def end(self) -> None:
        """End all ranks, and the actors with them."""
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(actor.end.remote(), timeout=10)
            self._ray.kill(actor)


def submit(job: JobSpec, address: str, wait_s: float) -> int:
    """Run a job on a Ray cluster until it ends, and return its exit code.

    `address` is "auto" for an existing cluster, "local" for a new one on this machine, or a
    cluster's address. Raises `ConfigError` without Ray, without a cluster or if resources are not
    free within `wait_s` seconds, and `RankFailed`.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("launch ray --submit needs Ray: pip install 'meshwright[ray]'") from None
    try:
        ray.init(address=address, log_to_driver=True)
    except ConnectionError as error:
        hint = "`ray start --head` starts one, --address local one that ends with the job"
        raise ConfigError(f"--address {address}: no Ray cluster there: {error}. {hint}") from None
    try:
        group = _reserve(ray, job, wait_s)
        identity = f"ray-{job.name}-{job.identity}"  # Ray counts its jobs anew in each cluster
        with StopSignals() as signals:

            def start(attempt: int) -> Nodes:
                if not group.wait(wait_s):  # Ray finds another place for a bundle that was lost
                    raise MeshwrightError(_no_room(ray, job, wait_s))
                return _RayNodes(ray, job, group, attempt, identity)

            def stop() -> bool:
                if signals.repeats:
                    raise RankFailed("ended at once, as asked again: steps may not be saved")
                return signals.asked

            return follow(start, job.restarts, job.grace_s, stop)
    finally:
        ray.shutdown()


def _reserve(ray: Any, job: JobSpec, wait_s: float) -> Any:
    group = ray.util.placement_group(bundles(job), strategy=strategy(job), name=job.name)
    if not group.wait(wait_s):
        ray.util.remove_placement_group(group)
        raise ConfigError(_no_room(ray, job, wait_s))
    return group


def _no_room(ray: Any, job: JobSpec, wait_s: float) -> str:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    available = [{key: node.get(key, 0) for key in bundles(job)[0]} for node in nodes]
    problem = f"{job.nodes} bundle(s) of {bundles(job)[0]} found no room in {wait_s:.0f} s"
    hint = "--cpus is the cores of each rank, --wait how long to wait for nodes to come"
    return refusal(f"{problem}; Ray's nodes have {available}", hint=hint)
