"""What a layout leaves unused: devices, and the sharding of states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.layout.layout import Layout
from meshwright.layout.mesh import AXES
from meshwright.layout.rules import broken
from meshwright.spec.loading import Config

_DATA = ("dp_replicate", "dp_shard")


class Unused(NamedTuple):
    """Why devices are unused, and settings of which each would use all of them."""

    used: int
    devices: int
    reason: str
    legal: tuple[str, ...]

    @property
    def text(self) -> str:
        """The reason as a sentence."""
        advice = f"; {' or '.join(self.legal)} would use all" if self.legal else ""
        return f"{self.used} of {self.devices} devices are used: {self.reason}{advice}"


def left_over(config: Config, layout: Layout, devices: int) -> Unused | None:
    """Return why a config's layout has fewer ranks than there are devices; None if it has not.

    The layout is the result of `resolve_layout` for so many devices. If both data-parallel degrees
    are missing, `train.batch` is the reason, because they follow from it; otherwise the given
    degrees are.
    """
    if layout.world >= devices:
        return None
    section, batch = config.layout, config.train.batch
    data = [key for key in _DATA if getattr(section, key) is not None]
    if not data:
        data_ranks = devices // layout.model_ranks
        lower = batch // data_ranks * data_ranks
        reason = f"train.batch = {batch} does not divide among {data_ranks} data-parallel ranks"
        legal = [f"train.batch={n}" for n in (lower, lower + data_ranks) if n]
        return Unused(layout.world, devices, reason, tuple(legal))
    stated = [key for key in AXES if key in data or (key not in _DATA and getattr(layout, key) > 1)]
    degrees = " and ".join(f"layout.{key} = {getattr(layout, key)}" for key in stated)
    reason = f"{degrees} {'is' if len(stated) == 1 else 'are'} given"
    return Unused(layout.world, devices, reason, tuple(_with_all(config, layout, devices)))


def _with_all(config: Config, layout: Layout, devices: int) -> Iterator[str]:
    """Yield changes of one degree that give all devices a rank: of the data's, else another's."""
    for axes in (_DATA, ("tp", "cp", "pp")):
        changes = [text for axis in axes if (text := _grown(config, layout, axis, devices))]
        if changes:
            yield from changes
            return


def _grown(config: Config, layout: Layout, axis: str, devices: int) -> str | None:
    """Return the degree of an axis that takes all devices, and the batch where that must grow.

    None where there is none, or it breaks a rule, or nothing is sharded with it that is to be.
    """
    degree, odd = divmod(devices * getattr(layout, axis), layout.world)
    free = {"microbatch": 1} if config.layout.microbatch is None else {}
    grown = layout.model_copy(update={axis: degree, **free})
    if odd or (axis in _DATA and unsharded(grown)):
        return None
    batch = -(-config.train.batch // grown.dp) * grown.dp
    if broken(config.model, config.train.model_copy(update={"batch": batch}), grown) is not None:
        return None
    grows = f" train.batch={batch}" if batch != config.train.batch else ""
    return f"layout.{axis}={degree}{grows}"


def unsharded(layout: Layout) -> str | None:
    """Return a note on a layout whose ZeRO stage shards nothing, otherwise None."""
    if not layout.zero or layout.shard_ranks > 1 or layout.offload == "params":
        return None
    problem = f"layout.zero = {layout.zero} shards nothing"
    if layout.dp_replicate == 1:
        return f"{problem}: there is one data-parallel rank, which holds all states of its layers"
    return (
        f"{problem}: layout.dp_shard = 1, and each of {layout.dp_replicate} ranks holds the same; "
        f"layout.dp_shard={layout.dp_replicate} layout.dp_replicate=1 shards over them"
    )
