"""Sentences about ranked layouts: how much slower one is than the best, and warnings for the
user."""

from __future__ import annotations

from meshwright.cost.host import host_bytes
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction
from meshwright.errors import either
from meshwright.layout.rules import most_stages
from meshwright.planner.rank import MARGIN
from meshwright.program.optimizer import rule_of
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import parts
from meshwright.spec.words import beyond_context
from meshwright.units import format_bytes

# Shares of the memory and of the step that are worth a word.
_LARGE, _WASTED = 0.35, 0.2
# Of what makes a layout slower, parts of this share of the largest are named.
_NAMED = 0.2


def lost_by(prediction: Prediction, winner: Prediction) -> str:
    """Return one line that says how much slower a layout is than the winner, and by which causes.

    The listed causes add up to the printed difference of the two step times. A layout that is
    faster lost because it is more complex (see `prices.preference`).
    """
    if prediction.time.total < winner.time.total:
        return f"{1 - prediction.time.total / winner.time.total:.1%} faster, but less simple"
    loser_seconds, winner_seconds = _parts(prediction), _parts(winner)
    excess = {name: loser_seconds[name] - winner_seconds[name] for name in loser_seconds}
    largest = max(map(abs, excess.values()))
    unit, scale = ("ms", 1e3) if largest < 1 else ("s", 1.0)
    digits = 2 if not 0.01 <= largest < 1 else 1 if largest < 0.1 else 0
    difference = round((prediction.time.total - winner.time.total) * scale, digits)
    threshold = _NAMED * largest
    named = sorted(
        (name for name in excess if abs(excess[name]) >= threshold),
        key=lambda name: -abs(excess[name]),
    )
    parts = {name: round(excess[name] * scale, digits) for name in named}
    parts["the rest"] = round(difference - sum(parts.values()), digits)
    breakdown = ", ".join(
        f"{name} {change:+.{digits}f}{unit}" for name, change in parts.items() if change
    )
    return f"{difference:.{digits}f}{unit} slower" + (f": {breakdown}" if breakdown else "")


def _parts(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of a step by cause, with "data" split into "gathers" and "gradients"."""
    causes, gathers = prediction.time.causes, prediction.time.gathers
    parts = {cause: seconds for cause, seconds in causes.items() if cause != "data"}
    return parts | {"gathers": gathers, "gradients": causes["data"] - gathers}


def warnings(prediction: Prediction, setting: CostInputs) -> list[str]:
    """Return warnings about a layout (memory, idle time, messages, precision), each with its
    numbers."""
    texts = (rule(prediction, setting) for rule in _RULES)
    return [text for text in texts if text is not None]


def _states(prediction: Prediction, setting: CostInputs) -> str | None:
    layout, states = prediction.layout, prediction.memory.by_category().get("optimizer", 0.0)
    share = states / prediction.memory.total
    if layout.zero or share < _LARGE:
        return None
    ranks = layout.dp * layout.cp
    label = OPTIMIZERS[setting.optimizer.name].label
    if ranks == 1:
        return f"{label}'s states are {share:.0%} of the memory: layout.offload=optimizer frees it"
    return (
        f"{label}'s states are {share:.0%} of the memory, and each of {ranks} ranks holds the "
        f"same: layout.zero=1 leaves {format_bytes(states / ranks)} of {format_bytes(states)}"
    )


def _tp_across_nodes(prediction: Prediction, setting: CostInputs) -> str | None:
    tp, cluster = prediction.layout.tp, setting.cluster
    if tp <= cluster.per_node:
        return None
    slower = cluster.inner.bandwidth / cluster.outer.bandwidth
    return (
        f"tp {tp} crosses nodes of {cluster.per_node}: {cluster.outer.name} is {slower:.0f} times "
        f"slower than {cluster.inner.name}, and nothing hides its messages"
    )


def _bubble(prediction: Prediction, setting: CostInputs) -> str | None:
    share = prediction.time.causes["bubble"] / prediction.time.total
    if share <= _WASTED:
        return None
    layout = prediction.layout
    count = layout.microbatches(setting.train.batch)
    few = "1 microbatch" if count == 1 else f"{count} microbatches"
    helps = ["a larger train.batch"]
    if layout.microbatch > 1:
        helps.append("a smaller layout.microbatch")
    if layout.virtual_stages == 1 and 2 * layout.pp <= most_stages(setting.model.n_layers):
        helps.append("virtual stages")
    return (
        f"the pipeline is idle for {share:.0%} of the step, with {few} for {layout.pp} ranks: "
        f"{either(helps)} would fill it"
    )


def _ulysses(prediction: Prediction, setting: CostInputs) -> str | None:
    layout, heads = prediction.layout, setting.model.n_kv_heads
    if layout.cp == 1 or layout.cp_kind != "ring" or heads % (layout.tp * layout.cp) == 0:
        return None
    return f"no Ulysses: tp {layout.tp} x cp {layout.cp} does not divide {heads} KV heads"


def _tensors(prediction: Prediction, setting: CostInputs) -> str | None:
    if setting.cluster.device.kind != "cpu":
        return None
    return (
        "memory counts tensors alone: each rank's process also holds Python and torch, a few "
        "hundred MiB"
    )


def _messages(prediction: Prediction, setting: CostInputs) -> str | None:
    causes, total = prediction.time.causes, prediction.time.total
    waits = {cause: causes[cause] / total for cause in ("tp", "data", "cp", "ep")}
    large = [f"{cause} {share:.0%}" for cause, share in waits.items() if share > _WASTED]
    return f"the step waits for messages: {', '.join(large)}" if large else None


def _host(prediction: Prediction, setting: CostInputs) -> str | None:
    """Return a warning with the bytes that offload needs in each node's host memory, if there is
    offload.

    "params" keeps weights, gradients and optimizer states on the host, "optimizer" the optimizer
    states with the weights and gradients that it updates, "activations" the saved activations.
    """
    layout = prediction.layout
    if layout.offload == "none":
        return None
    if layout.offload == "activations":
        byte_count = host_bytes(setting, layout) * min(setting.cluster.per_node, layout.world)
        return (
            f"offload = activations: each node's host has to hold {format_bytes(byte_count)}, and "
            "its link copies them twice for each microbatch"
        )
    # Experts, too: `ep` and their own sharding divide them by as much.
    spec, trained = setting.optimizer, [part for part in parts(setting.model) if part.trained]
    element_bytes = setting.weight_bytes + setting.gradient_bytes
    total_bytes = sum(
        part.numel * element_bytes
        + rule_of(spec, part).state_bytes(spec, part.numel, part.shape[-1])
        for part in trained
    )
    on_node = min(setting.cluster.per_node, layout.world)
    byte_count = total_bytes / layout.tp / layout.pp / layout.shard_ranks * on_node
    return (
        f"offload = {layout.offload}: the host's link and memory set the pace, and each node's "
        f"host has to hold {format_bytes(byte_count)}"
    )


def _precision(prediction: Prediction, setting: CostInputs) -> str | None:
    device = setting.cluster.device
    if device.kind == "cpu":
        return None
    best = "bf16" if device.peaks["bf16"] >= device.peaks["fp16"] else "fp16"
    current_peak = setting.peak
    if current_peak * 2 > device.peaks[best]:
        return None
    ratio = device.peaks[best] / current_peak
    return f"{device.name} multiplies {ratio:.0f} times faster in {best}: train.precision={best}"


def _context(prediction: Prediction, setting: CostInputs) -> str | None:
    return beyond_context(setting.train.seq_len, setting.model)


def _tight(prediction: Prediction, setting: CostInputs) -> str | None:
    free = 1 - prediction.memory.total / prediction.memory.limit
    if free < 0:
        return f"it does not fit: {-free:.0%} more than there is"
    if free >= MARGIN:
        return None
    return f"only {free:.1%} of the memory stays free, and a prediction is a few percent off"


_RULES = (
    _tight,
    _states,
    _tp_across_nodes,
    _bubble,
    _ulysses,
    _tensors,
    _messages,
    _host,
    _precision,
    _context,
)
