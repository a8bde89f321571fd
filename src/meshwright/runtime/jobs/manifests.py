"""A job as a SkyPilot task, or as Kubernetes manifests: JobSet, or Kubeflow's PyTorchJob."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from meshwright.comm.secret import VARIABLE
from meshwright.errors import ConfigError, refusal
from meshwright.runtime.jobs.job import PORT, Expression, JobSpec, environment, shell
from meshwright.store import is_url

# Where a pod has the volume that keeps data and runs, and the files of its command.
_VOLUME: Final = "/work"
_CONFIG: Final = "/etc/meshwright"
# Keys of a ConfigMap, which are names of files here.
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]+")
# Where SkyPilot has a task's folder, and where the package goes.
_WORKDIR: Final = "~/sky_workdir"
_WHEELS: Final = "/tmp/meshwright"


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line strings as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: never write YAML aliases."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000)


def _script(job: JobSpec, endpoint: str, node: str) -> str:
    """Return the shell script of a node; `endpoint` is a shell expression for where ranks meet.

    `node` is the environment variable with the node's index.
    """
    if job.nodes == 1:  # our own supervisor: it waits for ranks that save, as long as they take
        return _run_or_resume(job, job.train, node)
    return _run_or_resume(job, job.torchrun(Expression(endpoint)), node)


def _run_or_resume(job: JobSpec, command: Sequence[str], node: str) -> str:
    """Return a shell script that starts the job's run, or resumes it if it has saved a step.

    The command replaces the shell (`exec`), so that the stop signal reaches it. The folder of an
    attempt that saved no step cannot be resumed and is renamed, by the first node only, since other
    nodes may start later. `node` is the environment variable with the node's index. Raises
    `ConfigError` for steps in an object store.
    """
    if is_url(job.checkpoints):
        rule = f"checkpoint.dir = {job.checkpoints}: this job looks for steps in a folder"
        raise ConfigError(refusal(rule, hint="Leave it out, or use launch slurm, ray or torchrun"))
    run = Expression('"$RUN"')
    begin = [*command, f"log.name={job.name}"]
    return "\n".join(
        [
            "set -e",
            f"RUN={shell([job.run_folder])}",
            f"if ls -d -- {shell([job.checkpoints])}/step-* > /dev/null 2>&1; then",
            f"  exec {shell([*command, '--resume', run])}",
            "fi",
            f'if [ "${{{node}:-0}}" = 0 ] && [ -e "$RUN" ]; then',
            '  mv -- "$RUN" "$RUN-unsaved-$(date +%Y%m%d-%H%M%S)"',
            "fi",
            f"exec {shell(begin)}",
            "",
        ]
    )


def skypilot(job: JobSpec) -> str:
    """Return the YAML of a SkyPilot task for `sky launch`, or `sky jobs launch` on spot nodes."""
    _check_skypilot(job)
    resources: dict[str, Any] = {}
    if job.device == "cuda":
        if job.accelerator is None:
            raise ConfigError(
                refusal(
                    "SkyPilot asks for devices by name: add --accelerator NAME, or a "
                    "cluster.preset",
                    legal=["--accelerator H100"],
                )
            )
        resources["accelerators"] = f"{job.accelerator}:{job.per_node}"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    first = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)":' + str(PORT)
    # SkyPilot copies the folder in which this is written, with config, data and plan.
    document: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "workdir": "."}
    if resources:
        document["resources"] = resources
    secret = {VARIABLE: job.secret} if job.nodes > 1 else {}
    if environ := {**environment(job), **secret}:
        document["envs"] = environ
    mounts: dict[str, Any] = {}
    setup = [job.setup] if job.setup else []
    if job.wheel is not None:
        wheel_path = f"{_WHEELS}/{PurePosixPath(job.wheel).name}"
        mounts[wheel_path] = job.wheel
        setup.append(f"pip install {shell([f'{wheel_path}[train]'])}")
    if job.volume is not None:
        mounts[f"{_WORKDIR}/{job.log_dir}"] = {"source": job.volume, "mode": "MOUNT_CACHED"}
    if mounts:
        document["file_mounts"] = mounts
    if setup:
        document["setup"] = "\n".join([*setup, ""])
    return _yaml({**document, "run": _script(job, first, "SKYPILOT_NODE_RANK")})


def _check_skypilot(job: JobSpec) -> None:
    if job.setup is None and job.image is None and job.wheel is None:
        raise ConfigError(
            refusal(
                "SkyPilot's machines have no Meshwright",
                legal=["--wheel FILE", "--image NAME", "--setup COMMAND"],
                hint="`pip wheel --no-deps --wheel-dir dist .` in its source makes the file",
            )
        )
    reason = "SkyPilot copies the folder in which the task is written"
    _check_inside((*job.files, job.log_dir), reason, "name it relative to that folder")


def _check_inside(paths: Iterable[str], reason: str, hint: str) -> None:
    """Raise `ConfigError` for paths that are absolute or contain ".."."""
    for path in paths:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ConfigError(f"{reason}: {path} lies outside; {hint}")


def jobset(job: JobSpec) -> str:
    """Return the YAML of a JobSet with a pod per node; ranks meet on the first pod.

    Preceded by a ConfigMap with the files that the command names, and on several nodes a Secret.
    """
    job = _carrying(job)
    first = f"{job.name}-node-0-0.{job.name}:{PORT}"
    has_secret = job.nodes > 1  # on one node the supervisor draws one
    script = _script(job, first, "JOB_COMPLETION_INDEX")
    pod = _pod(job, "train", ["bash", "-c", script], has_secret=has_secret)
    template = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod that fails fails the set, which starts anew as a whole
        "template": {"spec": {**pod, "restartPolicy": "Never"}},
    }
    return _before(job, has_secret=has_secret) + _yaml(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": {
                "failurePolicy": {"maxRestarts": job.restarts},
                "network": {"enableDNSHostnames": True},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": template}}],
            },
        }
    )


def pytorchjob(job: JobSpec) -> str:
    """Return the YAML of a PyTorchJob; Kubeflow's operator sets torchrun's rendezvous (`PET_...`).

    Preceded by a ConfigMap with the files that the command names, and a Secret.
    """
    job = _carrying(job)
    command = [*job.elastic, "-m", *job.train]
    # The operator finds the container by this name.
    script = _run_or_resume(job, command, "RANK")
    pod = _pod(job, "pytorch", ["bash", "-c", script], has_secret=True)
    spec = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
    replicas: dict[str, Any] = {"Master": {"replicas": 1, **spec}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **spec}
    return _before(job, has_secret=True) + _yaml(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name},
            "spec": {
                "nprocPerNode": str(job.per_node),
                "runPolicy": {"backoffLimit": job.restarts},
                "pytorchReplicaSpecs": replicas,
            },
        }
    )


def _carrying(job: JobSpec) -> JobSpec:
    """Return the job with its files' paths replaced by those in a pod.

    Raises `ConfigError` for file names that are equal, or not allowed in a ConfigMap.
    """
    names = [PurePosixPath(file).name for file in job.files]
    for name in names:
        if names.count(name) > 1 or not _KEY.fullmatch(name):
            rule = (
                f"a ConfigMap cannot have the file {name!r}: names in it differ, and are made of "
            )
            raise ConfigError(f"{rule}letters, digits, '-', '_' and '.'")
    arguments = tuple(
        _path(argument) if argument in job.files else argument for argument in job.arguments
    )
    return replace(job, arguments=arguments)


def _path(file: str) -> str:
    return f"{_CONFIG}/{PurePosixPath(file).name}"


def _before(job: JobSpec, *, has_secret: bool) -> str:
    """Return the YAML documents of the job's ConfigMap, if it has files, and of its Secret."""
    documents = []
    if job.files:
        data = {PurePosixPath(name).name: text for name, text in job.files.items()}
        documents.append({"kind": "ConfigMap", **_named(f"{job.name}-config"), "data": data})
    if has_secret:
        secret_data = {VARIABLE: job.secret}
        documents.append({"kind": "Secret", **_named(_secret_of(job)), "stringData": secret_data})
    return "".join(f"{_yaml({'apiVersion': 'v1', **document})}---\n" for document in documents)


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}


def _secret_of(job: JobSpec) -> str:
    return f"{job.name}-secret"


def _pod(job: JobSpec, name: str, command: list[str], *, has_secret: bool) -> dict[str, Any]:
    """Return a node's pod spec: container, files, volume, and shared memory for NCCL.

    Raises `ConfigError` if the job has no image or no volume.
    """
    if job.image is None:
        hint = "Meshwright's Dockerfile makes one: docker build --tag NAME ."
        raise ConfigError(
            refusal("Kubernetes runs images: add --image NAME, one with Meshwright", hint=hint)
        )
    if job.volume is None:
        raise ConfigError(
            "Kubernetes keeps nothing of a pod that ends: add --volume CLAIM, a "
            "PersistentVolumeClaim that all nodes may write (ReadWriteMany); data and "
            f"{job.log_dir} are in it, by paths relative to its root"
        )
    for key, path in (("log.dir", job.log_dir), ("checkpoint.dir", job.checkpoints)):
        _check_inside([path], f"{key} is kept by the volume", "name it relative to its root")
    container: dict[str, Any] = {"name": name, "image": job.image, "command": command}
    container["workingDir"] = _VOLUME
    env: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in environment(job).items()]
    if has_secret:
        reference = {"secretKeyRef": {"name": _secret_of(job), "key": VARIABLE}}
        env.append({"name": VARIABLE, "valueFrom": reference})
    if env:
        container["env"] = env
    if job.device == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": job.per_node}}
    elif job.cores is not None:
        container["resources"] = {"requests": {"cpu": job.cores * job.per_node}}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
        "work": (_VOLUME, {"persistentVolumeClaim": {"claimName": job.volume}}),
    }
    if job.files:
        volumes["config"] = (_CONFIG, {"configMap": {"name": f"{job.name}-config"}})
    container["volumeMounts"] = [
        {"name": name, "mountPath": path} for name, (path, _) in volumes.items()
    ]
    return {
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }
