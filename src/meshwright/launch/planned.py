"""`layout.auto`: the layout that the planner chooses for the machine that is to train."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.layout import Machine
from meshwright.spec.loading import Config


def settled(config: Config, machine: Machine) -> Config:
    """Return a config whose layout is decided: by the planner where `layout.auto` is set.

    Raises `ConfigError` where no layout fits, or where the machine's GPUs are not named.
    """
    if not config.layout.auto:
        return config
    if machine.device == "cuda" and config.cluster.preset == "local":
        raise ConfigError(
            "layout.auto = true prices layouts for the GPUs of this machine: name them, as in "
            "cluster.preset=h100-sxm"
        )
    # Only here: a run whose layout is given starts without the planner.
    from meshwright.search.plan import planned

    return planned(config, machine.devices)
