"""Automatic choices: what was chosen, its measured gain, and the key that changes it.

The gains come from `meshwright bench device`, measured on the config's own blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.cost.inputs import CostInputs
from meshwright.layout import Layout
from meshwright.planner.compiling import CompileChoice
from meshwright.spec.loading import Config
from meshwright.spec.model import OF_PADDING
from meshwright.spec.words import vocabulary_padding
from meshwright.units import format_bytes


class Chosen(NamedTuple):
    """One automatic choice: its subject, its value, its measured gain if any, and its key."""

    subject: str
    text: str
    gain: float | None
    key: str


def choices(
    config: Config, setting: CostInputs, layout: Layout, compiled: CompileChoice
) -> list[Chosen]:
    """Return the automatic choices of a layout: the measured ones, and compiling.

    `compiled` is the resolved value of `train.compile`.
    """
    asked = "auto" if compiled.reason != "as asked for" else str(compiled.compiled).lower()
    blocks = f"{'compiled' if compiled.compiled else 'not compiled'} (train.compile = {asked})"
    candidates = [
        _products(setting),
        Chosen("blocks", f"{blocks}: {compiled.reason}", setting.compile_gain, "train.compile"),
        None if config.cluster.memory else _allocator(setting),
        _microbatch(setting, layout.microbatch),
        _vocabulary(setting, layout),
        _channels(setting) if layout.tp > 1 else None,
        _routing(setting, layout) if layout.ep > 1 else None,
    ]
    return [choice for choice in candidates if choice is not None]


def _products(setting: CostInputs) -> Chosen | None:
    gain, matmul = setting.measured("matmul.gain"), setting.train.matmul
    if gain is None or setting.train.precision != "fp32":
        return None
    text = f"{gain:.2f} x torch's speed, as measured (train.matmul = {matmul})"
    if matmul == "torch":
        gain = 1 / gain
        text = f"torch's, {gain:.2f} x the speed of auto's, as measured (train.matmul = torch)"
    return Chosen("products", text, gain, "train.matmul")


def _allocator(setting: CostInputs) -> Chosen | None:
    gain = setting.measured(f"blocks.allocator.{setting.train.precision}")
    if gain is None:
        return None
    text = f"kept by glibc when it is freed, {gain:.2f} x the measured speed of blocks without"
    text += " (GLIBC_TUNABLES, cluster.memory)"
    return Chosen("memory", text, gain, "GLIBC_TUNABLES, cluster.memory")


def rows_of(setting: CostInputs) -> dict[int, float]:
    """Return measured seconds of a block per token, by the number of sequences in a microbatch."""
    start, end = f"{setting.cluster.device.kind}.blocks.rows.", f".{setting.train.precision}"
    return {
        int(name.removeprefix(start).removesuffix(end)): value
        for name, value in setting.calibration.constants.items()
        if name.startswith(start) and name.endswith(end)
    }


def _microbatch(setting: CostInputs, count: int) -> Chosen | None:
    seconds_by_size = rows_of(setting)
    if len(seconds_by_size) < 2 or count not in seconds_by_size:
        return None
    smallest, best = min(seconds_by_size), min(seconds_by_size, key=seconds_by_size.__getitem__)
    gain = seconds_by_size[smallest] / seconds_by_size[count]
    text = f"{count} rows, {gain:.2f} x the speed of blocks with {smallest}, as measured; fastest "
    text += f"are {best} of {', '.join(map(str, sorted(seconds_by_size)))} (layout.microbatch)"
    return Chosen("microbatch", text, gain, "layout.microbatch")


def _vocabulary(setting: CostInputs, layout: Layout) -> Chosen | None:
    text = vocabulary_padding(setting.model, layout.tp)
    return None if text is None else Chosen("vocabulary", text, None, f"model.{OF_PADDING}")


def _routing(setting: CostInputs, layout: Layout) -> Chosen | None:
    train, busiest_share = setting.train, setting.imbalance
    if train.routing == "balanced":
        return None
    text = f"the busiest of {layout.ep} ranks gets {busiest_share:g} x the mean of tokens, "
    text += "as given" if train.imbalance else "by runs of others"
    if train.expert_capacity == busiest_share:
        text = f"the busiest of {layout.ep} ranks gets at most its capacity, "
        text += f"{busiest_share:g} x the mean"
    return Chosen("experts", f"{text} (train.imbalance)", None, "train.imbalance")


def _channels(setting: CostInputs) -> Chosen | None:
    by_gloo, by_channel, message_bytes = map(
        setting.measured, ("blocks.sum.gloo", "blocks.sum.channel", "blocks.message")
    )
    if by_gloo is None or by_channel is None or message_bytes is None:
        return None
    text = f"sums of {format_bytes(message_bytes)} take {by_channel * 1e3:.1f} ms "
    text += f"through shared memory, {by_gloo * 1e3:.1f} ms by gloo, as measured"
    return Chosen("messages", text, by_gloo / by_channel, "between CPU ranks of one machine")
