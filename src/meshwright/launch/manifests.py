"""A job as a SkyPilot task and as Kubernetes manifests: JobSet, and PyTorchJob of Kubeflow."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from meshwright.errors import ConfigError, refusal
from meshwright.launch.jobs import PORT, JobSpec, environment, shell

_SHARED = {"name": "shm", "mountPath": "/dev/shm"}


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, and what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never refer to what was written before."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000)


def _script(job: JobSpec, endpoint: str) -> str:
    """Return what a node runs: `endpoint` is the shell's word for where ranks meet."""
    if job.nodes == 1:  # our own supervisor: it waits for ranks that save, as long as they take
        return _run_or_resume(job, shell(job.train))
    command = shell(job.torchrun("ENDPOINT", job.name))
    return _run_or_resume(job, command.replace("ENDPOINT", endpoint))


def _run_or_resume(job: JobSpec, command: str) -> str:
    """Return a script that begins the job's run, or goes on with it where it is there already."""
    run = f"{job.log_dir}/{job.name}"
    return "\n".join(
        [
            "set -e",
            f"RUN={shlex.quote(run)}",
            'if [ -f "$RUN/plan.json" ]; then',
            f'  {command} --resume "$RUN"',
            "else",
            f"  {command} {shlex.quote(f'log.name={job.name}')}",
            "fi",
            "",
        ]
    )


def skypilot(job: JobSpec) -> str:
    """Return the YAML of a SkyPilot task: `sky launch`, or `sky jobs launch` where nodes may go."""
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
    document: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes}
    if resources:
        document["resources"] = resources
    if environment(job):
        document["envs"] = dict(environment(job))
    document["setup"] = f"{job.setup or 'pip install meshwright'}\n"
    return _yaml({**document, "run": _script(job, first)})


def jobset(job: JobSpec) -> str:
    """Return a JobSet: a pod for each node, which meet on the first one by its name."""
    first = f"{job.name}-node-0-0.{job.name}:{PORT}"
    pod = _pod(job, "train", ["bash", "-c", _script(job, first)])
    template = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod that fails fails the set, which starts anew as a whole
        "template": {"spec": {**pod, "restartPolicy": "Never"}},
    }
    return _yaml(
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
    """Return a PyTorchJob: Kubeflow's operator tells torchrun where to meet (`PET_...`)."""
    command = shell(["torchrun", "-m", *job.train])
    # The operator finds the container by this name.
    pod = _pod(job, "pytorch", ["bash", "-c", _run_or_resume(job, command)])
    spec = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
    replicas: dict[str, Any] = {"Master": {"replicas": 1, **spec}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **spec}
    return _yaml(
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


def _pod(job: JobSpec, name: str, command: list[str]) -> dict[str, Any]:
    """Return the pod of a node, with memory that NCCL's ranks share."""
    if job.image is None:
        raise ConfigError(
            refusal("Kubernetes runs images: add --image NAME", legal=["--image pytorch/pytorch"])
        )
    container: dict[str, Any] = {"name": name, "image": job.image, "command": command}
    if environment(job):
        container["env"] = [{"name": k, "value": v} for k, v in environment(job).items()]
    if job.device == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": job.per_node}}
    elif job.cores is not None:
        container["resources"] = {"requests": {"cpu": job.cores * job.per_node}}
    container["volumeMounts"] = [dict(_SHARED)]
    return {
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container],
        "volumes": [{"name": _SHARED["name"], "emptyDir": {"medium": "Memory"}}],
    }
