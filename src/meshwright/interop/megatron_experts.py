"""How a Megatron-LM command line trains experts: their ranks, losses and capacity.

Source: Megatron-LM's megatron/core/transformer/moe, router.py and moe_utils.py. Its losses of a
router have the same scale as Meshwright's: a sum over layers, 1 for each layer if tokens are even.
"""

from __future__ import annotations

from typing import Any, Final

from meshwright.interop.source import ImportSource

_TYPE: Final = "moe-router-load-balancing-type"
_WEIGHT: Final = "moe-aux-loss-coeff"
_CAPACITY: Final = "moe-expert-capacity-factor"
_OF_CAPACITY: Final = ("moe-token-drop-policy", "moe-pad-expert-input-to-capacity")
_FORCED: Final = "moe-router-force-load-balancing"
# Balancing by other means than a loss that `train.router_aux_loss` could be.
_OTHER_TYPES: Final = ("sinkhorn", "quantile_balancing")


def read_experts(source: ImportSource) -> None:
    """Take the arguments on experts that are not of the architecture."""
    for key, to in (
        ("expert-model-parallel-size", "layout.ep"),
        ("expert-tensor-parallel-size", "layout.etp"),
    ):
        size = source.whole(key)
        if size is not None:
            source.honour(key, {to: size})
    if source.whole("num-experts") is None:
        return
    is_sigmoid = source.get("moe-router-score-function") == "sigmoid"
    _read_balancing(source)
    _read_bias(source, is_sigmoid)
    if is_sigmoid and source.number("moe-z-loss-coeff", 0.0):
        reason = "train.router_z_loss is of a softmax; nearest: 0"
        source.refuse("moe-z-loss-coeff", reason)
    _read_capacity(source)
    if source.get(_FORCED) is True:
        note = "tokens meet experts in turn, there at random"
        source.translate(_FORCED, {"train.routing": "balanced"}, note)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_balancing(source: ImportSource) -> None:
    """Take load-balancing losses: of each sequence, or of microbatches of one sequence."""
    kinds = [str(kind) for kind in _listed(source.get(_TYPE, "aux_loss"))]
    weights = _listed(source.get(_WEIGHT, 0.0))
    settled = ["train.router_aux_loss"]
    if len(kinds) != len(weights):
        source.contradict([_TYPE, _WEIGHT], f"{len(weights)} weights for {len(kinds)} types")
        return
    total = 0.0
    for kind, weight in zip(kinds, weights, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            source.contradict([_WEIGHT], f"{weight!r} must be a number", settled)
            return
        reason = _unlike(source, kind) if weight or kind in _OTHER_TYPES else ""
        if reason:
            source.refuse(_TYPE, reason, settled_by=settled, default=kind)
            return
        total += weight
    to = {"train.router_aux_loss": total}
    note = "the loss of each sequence"
    source.honour(_WEIGHT, to, note)
    source.honour(_TYPE, note=note if total else "no loss")


def _unlike(source: ImportSource, kind: str) -> str:
    """Return why a kind of balancing is not that of each sequence; empty where it is."""
    nearest = "nearest: seq_aux_loss, or train.router_aux_loss"
    if kind in _OTHER_TYPES:
        return f"no {kind}; {nearest}"
    if kind == "global_aux_loss":
        return f"no loss of the global batch; {nearest}"
    micro = source.whole("micro-batch-size") or 1
    if kind == "aux_loss" and micro > 1:
        return f"no loss of {micro} sequences at once; {nearest}, or micro-batch-size 1"
    return ""


def _read_bias(source: ImportSource, is_sigmoid: bool) -> None:
    """Take the step of the corrections of sigmoid routers."""
    switch, rate = "moe-router-enable-expert-bias", "moe-router-bias-update-rate"
    if source.get(switch, False) is not True:
        source.honour(switch, note="off")
        source.ignore(rate, f"{switch} is not on")
        return
    if not is_sigmoid:
        source.refuse(switch, "of routers with model.router_scores = sigmoid")
        source.ignore(rate, f"of {switch}")
        return
    to = {"train.router_bias_rate": source.number(rate, 1e-3)}
    source.honour(rate, to)
    source.translate(switch, to, f"{rate} = {to['train.router_bias_rate']:g}")


def _read_capacity(source: ImportSource) -> None:
    factor = source.number(_CAPACITY, -1.0)
    if factor < 0:
        source.honour(_CAPACITY, note="no token is dropped")
        for key in _OF_CAPACITY:
            source.ignore(key, f"of {_CAPACITY}")
        return
    settled = ["train.expert_capacity"]
    if source.get("moe-token-drop-policy", "probs") != "position":
        reason = "later tokens are dropped, not those of small probability; nearest: position"
        source.refuse("moe-token-drop-policy", reason, settled_by=settled, default="probs")
    shared = [
        f"{key} {size}"
        for key in ("micro-batch-size", "tensor-model-parallel-size", "context-parallel-size")
        if (size := source.whole(key) or 1) > 1
    ]
    if shared or factor < 1:
        rule = "an expert's share is of a whole sequence, and at least even"
        condition = f" with {', '.join(shared)}" if shared else ""
        reason = (
            f"{rule}, not {factor:g}{condition}; nearest: "
            f"train.expert_capacity = {max(factor, 1):g}"
        )
        source.refuse(_CAPACITY, reason, settled_by=settled)
    source.honour(_CAPACITY, {"train.expert_capacity": factor})
    source.honour("moe-token-drop-policy", note="the first tokens of a sequence have precedence")
    source.ignore("moe-pad-expert-input-to-capacity", "how tokens travel")
