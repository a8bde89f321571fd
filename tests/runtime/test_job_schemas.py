"""Manifests against the schemas of the tools that take them, where these are installed."""

import pytest
import yaml

NODES = (["cluster.nodes=1", "layout.dp_shard=8"], [])


@pytest.mark.parametrize("more", NODES, ids=["one node", "two nodes"])
def test_skypilot_takes_the_task(written, more):
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    task = yaml.safe_load(
        written("skypilot", *more, "--image", "my/image", "--bucket", "s3://here")
    )
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


@pytest.mark.parametrize("more", NODES, ids=["one node", "two nodes"])
def test_kubeflow_takes_the_job(written, more):
    """Its client knows every field, and keeps their values."""
    models = pytest.importorskip("kubeflow.training.models", reason="kubeflow is not installed")
    client = pytest.importorskip("kubernetes.client")
    options = ["--kind", "pytorchjob", "--image", "i", "--volume", "v"]
    *_, job = yaml.safe_load_all(written("kubernetes", *options, *more))
    assert job["kind"] == "PyTorchJob"
    known = {**vars(models), **vars(client.models)}
    assert keep(job, "KubeflowOrgV1PyTorchJob", known) == job


@pytest.mark.parametrize("more", NODES, ids=["one node", "two nodes"])
def test_kubernetes_takes_the_pods_of_a_jobset(written, more):
    """JobSet's own fields are not in any client; the Job inside of it is one of Kubernetes'."""
    validate = pytest.importorskip("kubernetes_validate", reason="it is not installed")
    options = ("--image", "i", "--volume", "v")
    *others, found = yaml.safe_load_all(written("kubernetes", *options, *more))
    assert others
    for one in others:  # of Kubernetes' own kinds
        validate.validate(one, "1.30", strict=True)
    assert found["kind"] == "JobSet"
    (group,) = found["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    validate.validate({**job, "spec": group["template"]["spec"]}, "1.30", strict=True)


def keep(value, kind, known):
    """Return what a client's model of some kind has of a value: fields that it lacks are lost."""
    if kind.startswith("list["):
        return [keep(one, kind[5:-1], known) for one in value]
    if kind.startswith("dict("):
        inner = kind[5:-1].partition(", ")[2]
        return {key: keep(one, inner, known) for key, one in value.items()}
    model = known.get(kind)
    if model is None:
        return value
    fields = {theirs: own for own, theirs in model.attribute_map.items()}
    return {
        key: keep(one, model.openapi_types[fields[key]], known)
        for key, one in value.items()
        if key in fields
    }
