"""What is said of layouts: why one loses, what a user should know, what fewer devices would do."""

from __future__ import annotations

from dataclasses import replace

from meshwright.predict.price import Prediction
from meshwright.predict.setting import Setting
from meshwright.search.rank import MARGIN, Search


def lost_by(found: Prediction, winner: Prediction) -> str:
    """Return why a layout is slower than the winner: the cause that costs it most more."""
    more = {
        cause: seconds - winner.time.causes[cause] for cause, seconds in found.time.causes.items()
    }
    cause = max(more, key=more.__getitem__)
    names = {
        "compute": "less efficient products",
        "tp": "tensor-parallel messages",
        "cp": "context-parallel messages",
        "gathers": "waiting for gathered weights",
        "data": "summing gradients",
        "bubble": "an idle pipeline",
        "recompute": "recomputation",
        "optimizer": "the optimizer's step",
        "host": "the host",
    }
    return f"{names[cause]}: {more[cause]:+.2f} s"


def warnings(found: Prediction, setting: Setting) -> list[str]:
    """Return what a user should know of a layout, each from its numbers."""
    words, time, held = [], found.time, found.memory
    categories = held.by_category()
    layout, cluster = found.layout, setting.cluster
    states = categories.get("optimizer", 0.0)
    if states > 0.35 * held.total:
        words.append(
            f"Adam's states are {states / held.total:.0%} of the memory: shard them, zero=1"
        )
    if layout.tp > cluster.per_node:
        words.append(
            f"tp {layout.tp} crosses nodes of {cluster.per_node}: its messages are not hidden"
        )
    share = time.causes["bubble"] / time.total
    if share > 0.2:
        words.append(f"the pipeline is idle for {share:.0%} of the step: more microbatches help")
    heads = setting.model.n_kv_heads
    if layout.cp > 1 and layout.cp_kind == "ring" and heads % (layout.tp * layout.cp):
        words.append(
            f"Ulysses is no choice: tp {layout.tp} x cp {layout.cp} does not divide "
            f"{heads} kv heads"
        )
    if cluster.device.kind == "cpu" and layout.dp > 1:
        words.append("data parallelism on the cores of one CPU brings nothing but its messages")
    for cause in ("tp", "data", "gathers", "cp"):
        part = time.causes[cause] / time.total
        if part > 0.2:
            words.append(f"{part:.0%} of the step waits for messages: {cause}")
    if layout.offload != "none":
        words.append(f"offload = {layout.offload}: the host's link and memory set the pace")
    return words


def fewest_devices(setting: Setting, devices: int, margin: float = MARGIN) -> int | None:
    """Return the fewest devices, halving from a number that fits, on which a layout fits."""
    fewest = None
    while devices >= 1:
        cluster = replace(
            setting.cluster,
            nodes=-(-devices // setting.cluster.per_node),
            per_node=min(setting.cluster.per_node, devices),
        )
        if not Search(replace(setting, cluster=cluster), devices, margin).run(1).ranked:
            break
        fewest = devices
        devices //= 2
    return fewest
