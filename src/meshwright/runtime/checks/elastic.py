"""Checks of `cluster.elastic`: what a run with elastic replicas must not have."""

from __future__ import annotations

from meshwright.comm.rendezvous import Rendezvous
from meshwright.errors import ConfigError, refusal
from meshwright.layout import Layout
from meshwright.layout.schedules import microbatch_rule
from meshwright.program.optimizer import needs_matrices
from meshwright.spec.loading import Config
from meshwright.store import StorePath, place


def check_elastic(
    config: Config, layout: Layout, device: str, rendezvous: Rendezvous | None
) -> None:
    """Raise `ConfigError` if `cluster.elastic` is set, and does not go with the rest of a config.

    `layout` is complete. Its number of microbatches must be legal with fewer replicas, too.
    """
    if not config.cluster.elastic:
        return
    train, keys = config.train, config.checkpoint
    if layout.dp_replicate == 1:
        rule = "cluster.elastic = true needs replicas, but layout.dp_replicate = 1"
        raise ConfigError(refusal(rule, legal=["layout.dp_replicate=2", "cluster.elastic=false"]))
    if rendezvous is not None:
        rule = "cluster.elastic = true is for ranks that Meshwright's supervisor starts"
        raise ConfigError(refusal(rule, legal=["meshwright train alone", "cluster.elastic=false"]))
    is_dynamic = train.precision == "fp16" and train.loss_scale is None
    in_store = keys.dir is not None and isinstance(place(keys.dir), StorePath)
    wrong = {
        "cluster.device": (device, "cpu"),
        "cluster.memory": (config.cluster.memory, None),
        "train.engine": (train.engine, "native"),
        "train.precision": (train.precision, "bf16" if is_dynamic else train.precision),
        "model.experts": (config.model.experts, 0),
        "lora.rank": (config.lora.rank, 0),
        "data.streaming": (config.data.streaming, False),
        "data.on_error": (config.data.on_error, "stop"),
        "optimizer.name": (
            config.optimizer.name,
            "adamw" if needs_matrices(config.optimizer) else config.optimizer.name,
        ),
        "layout.offload": (layout.offload, "none"),
        "checkpoint.restarts": (keys.restarts, keys.restarts or 3),
        "checkpoint.dir": (keys.dir, "a folder" if in_store else keys.dir),
    }
    for key, (value, legal) in wrong.items():
        if value != legal:
            rule = f"cluster.elastic = true does not go with {key} = {value}"
            choices = [f"{key} = {legal}", "cluster.elastic = false"]
            raise ConfigError(refusal(rule, legal=choices))
    _check_schedule(train.batch, layout)


def _check_schedule(batch: int, layout: Layout) -> None:
    """Raise `ConfigError` if the schedule has a rule that fewer replicas would break."""
    microbatches = layout.microbatches(batch) * layout.dp_replicate  # of all replicas
    for replicas in range(1, layout.dp_replicate):
        for count in {microbatches // replicas, -(-microbatches // replicas)}:
            broken = microbatch_rule(layout.schedule, layout.pp, layout.virtual_stages, count)
            if broken is not None and layout.pp > 1:
                rule = f"cluster.elastic = true: with {replicas} replicas left, {broken}"
                legal = ["another layout.schedule", "another train.batch", "cluster.elastic=false"]
                raise ConfigError(refusal(rule, legal=legal))
