"""Explanations of layouts: why one loses, and warnings for the user."""

from __future__ import annotations

from meshwright.cost.host import host_bytes
from meshwright.cost.price import Prediction
from meshwright.cost.setting import Setting
from meshwright.errors import either
from meshwright.planner.rank import MARGIN
from meshwright.program.optimizer import rule_of
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.parts import parts
from meshwright.spec.words import beyond_context
from meshwright.units import format_bytes

# Shares of the memory and of the step that are worth a word.
_LARGE, _WASTED = 0.35, 0.2
# What offload keeps on the host beside the optimizer's states: weight and gradient in fp32.
_HOST_BYTES = 8
# Of what makes a layout slower, parts of this share of the largest are named; below so many seconds
# all are told in milliseconds.
_NAMED, _SHORT = 0.2, 0.01


def lost_by(found: Prediction, winner: Prediction) -> str:
    """Return why a layout loses: the difference and its parts, or that the winner is simpler.

    The parts add up to the printed difference between the two step times.
    """
    if found.time.total < winner.time.total:
        return f"{1 - found.time.total / winner.time.total:.1%} faster, but less simple"
    theirs, ours = _parts(found), _parts(winner)
    more = {name: theirs[name] - ours[name] for name in theirs}
    unit, scale = ("ms", 1e3) if max(map(abs, more.values())) < _SHORT else ("s", 1.0)
    whole = round((found.time.total - winner.time.total) * scale, 2)
    least = _NAMED * max(map(abs, more.values()))
    named = sorted((n for n in more if abs(more[n]) >= least), key=lambda n: -abs(more[n]))
    parts = {name: round(more[name] * scale, 2) for name in named}
    parts["the rest"] = round(whole - sum(parts.values()), 2)
    told = ", ".join(f"{name} {size:+.2f}{unit}" for name, size in parts.items() if size)
    return f"{whole:.2f}{unit} slower" + (f": {told}" if told else "")


def _parts(found: Prediction) -> dict[str, float]:
    """Return the seconds of a step by cause, data parallelism's messages in two kinds."""
    causes, gathers = found.time.causes, found.time.gathers
    parts = {cause: seconds for cause, seconds in causes.items() if cause != "data"}
    return parts | {"gathers": gathers, "gradients": causes["data"] - gathers}


def warnings(found: Prediction, setting: Setting) -> list[str]:
    """Return warnings about a layout, each derived from its numbers."""
    said = (rule(found, setting) for rule in _RULES)
    return [text for text in said if text is not None]


def _states(found: Prediction, setting: Setting) -> str | None:
    layout, states = found.layout, found.memory.by_category().get("optimizer", 0.0)
    share = states / found.memory.total
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


def _tp_across_nodes(found: Prediction, setting: Setting) -> str | None:
    tp, cluster = found.layout.tp, setting.cluster
    if tp <= cluster.per_node:
        return None
    slower = cluster.inner.bandwidth / cluster.outer.bandwidth
    return (
        f"tp {tp} crosses nodes of {cluster.per_node}: {cluster.outer.name} is {slower:.0f} times "
        f"slower than {cluster.inner.name}, and nothing hides its messages"
    )


def _bubble(found: Prediction, setting: Setting) -> str | None:
    share = found.time.causes["bubble"] / found.time.total
    if share <= _WASTED:
        return None
    layout = found.layout
    count = layout.microbatches(setting.train.batch)
    few = "1 microbatch" if count == 1 else f"{count} microbatches"
    helps = ["a larger train.batch"]
    if layout.microbatch > 1:
        helps.append("a smaller layout.microbatch")
    if layout.virtual_stages == 1 and 2 * layout.pp <= setting.model.n_layers:
        helps.append("virtual stages")
    return (
        f"the pipeline is idle for {share:.0%} of the step, with {few} for {layout.pp} ranks: "
        f"{either(helps)} would fill it"
    )


def _ulysses(found: Prediction, setting: Setting) -> str | None:
    layout, heads = found.layout, setting.model.n_kv_heads
    if layout.cp == 1 or layout.cp_kind != "ring" or heads % (layout.tp * layout.cp) == 0:
        return None
    return f"Ulysses is no choice: tp {layout.tp} x cp {layout.cp} does not divide {heads} kv heads"


def _tensors(found: Prediction, setting: Setting) -> str | None:
    if setting.cluster.device.kind != "cpu":
        return None
    return (
        "memory counts tensors alone: each rank's process also holds Python and torch, a few "
        "hundred MiB"
    )


def _messages(found: Prediction, setting: Setting) -> str | None:
    causes, total = found.time.causes, found.time.total
    waits = {cause: causes[cause] / total for cause in ("tp", "data", "cp", "ep")}
    large = [f"{cause} {share:.0%}" for cause, share in waits.items() if share > _WASTED]
    return f"the step waits for messages: {', '.join(large)}" if large else None


def _host(found: Prediction, setting: Setting) -> str | None:
    """Return what offload asks of the host: weights, gradients and the optimizer's states.

    Or what activations take there.
    """
    layout = found.layout
    if layout.offload == "none":
        return None
    if layout.offload == "activations":
        size = host_bytes(setting, layout) * min(setting.cluster.per_node, layout.world)
        return (
            f"offload = activations: each node's host has to hold {format_bytes(size)}, and its "
            "link copies them twice for each microbatch"
        )
    # Experts, too: `ep` and their own sharding divide them by as much.
    spec, trained = setting.optimizer, [part for part in parts(setting.model) if part.trained]
    kept = sum(
        one.numel * (_HOST_BYTES + rule_of(spec, one).element_bytes(spec)) for one in trained
    )
    on_node = min(setting.cluster.per_node, layout.world)
    size = kept / layout.tp / layout.pp / layout.shard_ranks * on_node
    return (
        f"offload = {layout.offload}: the host's link and memory set the pace, and each node's "
        f"host has to hold {format_bytes(size)}"
    )


def _precision(found: Prediction, setting: Setting) -> str | None:
    device = setting.cluster.device
    if device.kind == "cpu":
        return None
    best = "bf16" if device.peaks["bf16"] >= device.peaks["fp16"] else "fp16"
    mine = setting.peak
    if mine * 2 > device.peaks[best]:
        return None
    times = device.peaks[best] / mine
    return f"{device.name} multiplies {times:.0f} times faster in {best}: train.precision={best}"


def _context(found: Prediction, setting: Setting) -> str | None:
    return beyond_context(setting.train.seq_len, setting.model)


def _tight(found: Prediction, setting: Setting) -> str | None:
    free = 1 - found.memory.total / found.memory.limit
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
