"""The command that trains a plan's best layout."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from meshwright.planner.pins import given
from meshwright.planner.plan import Plan
from meshwright.spec.training import LayoutSection

# What train derives where they are left out: at least one of the two degrees is given.
_DERIVED = ("dp_replicate", "dp_shard")


def training_command(arguments: Sequence[str], plan: Plan, name: str | None = None) -> str | None:
    """Return the command that trains a plan's best layout; None where nothing fits.

    `arguments` are the config path and the overrides of the plan. The command keeps them, and
    appends the layout keys that the planner has chosen. With several nodes, `launch torchrun`
    writes a command for each node. `name` is another `log.name`, where the config's is taken.
    """
    if plan.best is None:
        return None
    cluster = plan.setting.cluster
    start = ["train"] if cluster.devices <= cluster.per_node else ["launch", "torchrun"]
    named = [] if name is None else [f"log.name={name}"]
    return shlex.join(["meshwright", *start, *arguments, *_chosen(plan), *named])


def _chosen(plan: Plan) -> list[str]:
    """Return what the planner has chosen of the best layout, as overrides.

    What was given already and what holds unless it is given are left out.
    """
    assert plan.best is not None
    pins, plain = given(plan.config), LayoutSection()
    values = plan.best.layout.model_dump()
    overrides = {
        key: value
        for key, value in values.items()
        if key not in pins and value != getattr(plain, key) and (key not in _DERIVED or value > 1)
    }
    if not any(key in overrides or key in pins for key in _DERIVED):
        overrides["dp_replicate"] = values["dp_replicate"]
    auto = ["layout.auto=false"] if plan.config.layout.auto else []
    return [*auto, *(f"layout.{key}={_word(value)}" for key, value in overrides.items())]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
