"""Layout keys that a config sets: the planner keeps them, or says why it cannot."""

from __future__ import annotations

import math
from typing import Any

from meshwright.cost.inputs import CostInputs
from meshwright.errors import ConfigError, refusal
from meshwright.layout import AXES, Layout, broken, unsharded
from meshwright.layout.rules import divisors, nearest_legal
from meshwright.planner.space import Pins
from meshwright.spec.loading import Config


def is_given(config: Config, key: str) -> bool:
    """Whether a layout key was set, in a file or on the command line."""
    return config.origins.get(f"layout.{key}", "default") != "default"


def given(config: Config) -> Pins:
    """Return the layout keys that were set, with their values."""
    values = config.layout.model_dump(exclude={"auto"})
    return {key: value for key, value in values.items() if is_given(config, key)}


def degree_of(pins: Pins) -> int:
    """Return the least number of ranks that the given degrees require."""
    return math.prod(int(str(pins[key])) for key in AXES if key in pins)


def words(pins: Pins) -> str:
    """Return the given keys in the notation of overrides."""
    return ", ".join(
        f"layout.{key} = {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in pins.items()
    )


def refuse(setting: CostInputs, pins: Pins) -> ConfigError:
    """Return why no layout of the cluster's devices can have the given keys, with the nearest."""
    devices, train = setting.cluster.devices, setting.train
    if not pins:
        if (rule := broken(setting.model, train, Layout())) is not None:  # whatever the layout
            return ConfigError(refusal(rule, legal=nearest_legal(setting.model, train, Layout())))
        text = f"no layout of {devices} devices is legal with train.batch = {train.batch}"
        return ConfigError(text)
    values: dict[str, Any] = dict(pins)
    if values.get("dp_shard", 1) > 1 or values.get("offload") == "params":
        values.setdefault("zero", 1)  # it is free to shard
    plain = Layout(**values)
    rule = broken(setting.model, train, plain)
    if rule is not None and (plain.dp == 1 or devices % degree_of(pins) == 0):
        return ConfigError(refusal(rule, legal=nearest_legal(setting.model, train, plain)))
    degrees = degree_of(pins)
    if devices % degrees:
        fixed = words({key: pins[key] for key in AXES if key in pins})
        rule = f"{fixed}: {degrees} ranks do not divide the cluster's {devices} devices"
        return ConfigError(refusal(rule, legal=[f"{n} ranks" for n in divisors(devices)[::-1][:3]]))
    hint = "Leave one of the keys out, and the planner chooses it"
    if degrees == devices and (idle := unsharded(plain)) is not None:
        return ConfigError(refusal(idle, legal=["layout.zero = 0"], hint=hint))
    rule = f"no layout of {devices} devices with train.batch = {train.batch} has {words(pins)}"
    return ConfigError(refusal(rule, hint=hint))
