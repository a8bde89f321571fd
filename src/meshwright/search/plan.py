"""`plan`: a config to ranked layouts, and what is said of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.predict.calibration import Calibration, shipped_calibration
from meshwright.predict.catalogue import resolve_cluster
from meshwright.predict.price import Memory, Prediction, memory, price
from meshwright.predict.setting import Setting, as_measured
from meshwright.predict.stacks import STACKS
from meshwright.search.advice import lost_by, warnings
from meshwright.search.rank import MARGIN, Found, Search
from meshwright.spec.loading import Config

# Devices of a machine that says nothing else: the ranks that a CPU is split into.
_LOCAL_DEVICES = 2


@dataclass(frozen=True)
class Plan:
    """Layouts for a config, the best first; see `as_json` for what is kept of it."""

    config: Config
    setting: Setting
    found: Found

    @property
    def best(self) -> Prediction | None:
        """The layout to run, or None where none fits."""
        return self.found.ranked[0] if self.found.ranked else None


def setting_of(
    config: Config,
    calibration: Calibration | None = None,
    local_devices: int = _LOCAL_DEVICES,
) -> Setting:
    """Return what a config's layouts are priced for; raises `ConfigError` for unknown names."""
    calibration = calibration or shipped_calibration()
    cluster = as_measured(resolve_cluster(config.cluster, local_devices), calibration)
    return Setting(
        config.model,
        config.train,
        cluster,
        STACKS["meshwright"],
        calibration,
        config.train.precision,
    )


def plan(
    config: Config,
    top: int = 10,
    calibration: Calibration | None = None,
    margin: float = MARGIN,
    local_devices: int = _LOCAL_DEVICES,
) -> Plan:
    """Return the ranked layouts of a config on its cluster; torch is not imported.

    `top` divisions of the devices are ranked by tokens per second, each with its best layout among
    those that leave the share `margin` of the memory free. Raises `ConfigError` where no layout is
    legal.
    """
    setting = setting_of(config, calibration, local_devices)
    found = Search(setting, setting.cluster.devices, margin).run(top)
    if not found.considered:
        raise ConfigError(
            f"no layout of {setting.cluster.devices} devices is legal: train.batch = "
            f"{config.train.batch} divides into none of their data-parallel degrees"
        )
    return Plan(config, setting, found)


def digest(config: Config, layout: Layout) -> str:
    """Return a fingerprint of what a program is made of: model, batch, precision, layout."""
    train = config.train.model_dump(mode="json", include={"batch", "seq_len", "precision"})
    parts = [config.model.model_dump(mode="json"), train, layout.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def ranks_of(setting: Setting, layout: Layout) -> list[Memory]:
    """Return the memory of the ranks at each place in the pipeline."""
    return [memory(setting, layout, rank) for rank in range(layout.pp)]


def explain(setting: Setting, layout: Layout) -> Prediction:
    """Return the price of one layout; raises `ConfigError` where it has another world size."""
    if layout.world != setting.cluster.devices:
        cluster = replace(
            setting.cluster,
            nodes=-(-layout.world // setting.cluster.per_node),
            per_node=min(setting.cluster.per_node, layout.world),
        )
        setting = replace(setting, cluster=cluster)
    count = layout.dp * layout.microbatch
    if setting.train.batch % count:
        raise ConfigError(
            f"train.batch = {setting.train.batch} must be a multiple of dp x microbatch = {count}"
        )
    return price(setting, layout)


def ledger(found: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON: bytes and seconds by category, rates."""
    return {
        "layout": found.layout.model_dump(mode="json"),
        "label": found.layout.label,
        "fits": found.memory.fits,
        "peak_memory_bytes": round(found.memory.total),
        "worst_rank": found.memory.rank * (found.layout.world // found.layout.pp),
        "memory_bytes": {name: round(size) for name, size in found.memory.by_category().items()},
        "step_time_s": found.time.total,
        "seconds": found.time.causes,
        "tokens_per_s": found.tokens_per_s,
        "tflops_per_device": found.tflops_per_device,
        "mfu": found.mfu,
    }


def as_json(made: Plan) -> dict[str, Any]:
    """Return a plan as JSON: specs, layout, digest, ledger, and the layouts that lost with why."""
    best, found = made.best, made.found
    cluster = made.setting.cluster
    return {
        "model": made.config.model.model_dump(mode="json"),
        "train": made.config.train.model_dump(mode="json"),
        "cluster": {
            "device": cluster.device.name,
            "devices": cluster.devices,
            "devices_per_node": cluster.per_node,
            "links": [cluster.inner.name, cluster.outer.name],
        },
        "calibration": {
            "date": made.setting.calibration.date,
            "source": made.setting.calibration.source,
        },
        "considered": found.considered,
        "ruled_out": found.reasons,
        "layout": best.layout.model_dump(mode="json") if best else None,
        "digest": digest(made.config, best.layout) if best else None,
        "ledger": ledger(best) if best else None,
        "warnings": warnings(best, made.setting) if best else [],
        "ranked": [
            {**ledger(one), "why": lost_by(one, best) if best and one is not best else "best"}
            for one in found.ranked
        ],
    }
