"""The command that trains a plan's best layout."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from meshwright.planner.pins import given
from meshwright.planner.plan import Plan
from meshwright.spec.training import LayoutSection

# What train derives where they are left out: at least one of the two degrees is given.
_DERIVED = ("dp_replicate", "dp_shard")


def training_command(words: Sequence[str], made: Plan, name: str | None = None) -> str | None:
    """Return the command that trains a plan's best layout; None where nothing fits.

    `words` are the config path and the overrides of the plan. The command keeps them, and appends
    the layout keys that the planner has chosen. With several nodes, `launch torchrun` writes a
    command for each node. `name` is another `log.name`, where the config's is taken.
    """
    if made.best is None:
        return None
    cluster = made.setting.cluster
    start = ["train"] if cluster.devices <= cluster.per_node else ["launch", "torchrun"]
    named = [] if name is None else [f"log.name={name}"]
    return shlex.join(["meshwright", *start, *words, *_chosen(made), *named])


def _chosen(made: Plan) -> list[str]:
    """Return what the planner has chosen of the best layout, as overrides.

    What was given already and what holds unless it is given are left out.
    """
    assert made.best is not None
    pins, plain = given(made.config), LayoutSection()
    values = made.best.layout.model_dump()
    found = {
        key: value
        for key, value in values.items()
        if key not in pins and value != getattr(plain, key) and (key not in _DERIVED or value > 1)
    }
    if not any(key in found or key in pins for key in _DERIVED):
        found["dp_replicate"] = values["dp_replicate"]
    auto = ["layout.auto=false"] if made.config.layout.auto else []
    return [*auto, *(f"layout.{key}={_word(value)}" for key, value in found.items())]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
