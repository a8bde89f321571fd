"""Megatron-LM's arguments of Muon, read and written.

Source: OptimizerConfig of megatron/core/optimizer/optimizer_config.py for the defaults; the names
of scales and coefficients are those of the package `emerging_optimizers`, which has the iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.interop.degrees import degree
from meshwright.interop.plan_source import PlanSource
from meshwright.interop.source import ImportSource

# dist_muon shards whole matrices among the replicas; later versions say so by
# use-distributed-optimizer beside muon.
_NAMES: Final = ("muon", "dist_muon")
_NESTEROV: Final = ("muon-nesterov", "muon-use-nesterov")
_UNSPLIT: Final = ("muon-no-split-qkv", "no-muon-split-qkv")
_MODE, _FACTOR = "muon-scale-mode", "muon-extra-scale-factor"
# Each `optimizer.scale` as the mode and the factor that multiplies it: spectral is the root of the
# longer side, shape_scaling that of rows / columns, at least 1.
_SCALES: Final[Mapping[str, tuple[str, float]]] = {
    "match_rms_adamw": ("spectral", 0.2),
    "original": ("shape_scaling", 1.0),
}
# "medium" computes fp32 matmuls in bf16, as torch.set_float32_matmul_precision says.
_PRECISIONS: Final = {"bf16": "medium", "fp32": "highest"}


def read_muon(source: ImportSource) -> None:
    """Import the arguments of Muon if the file asks for it; else they have no effect."""
    name = source.get("optimizer")
    if name not in _NAMES:
        for key in [key for key in source.values if "muon-" in key]:
            source.ignore(key, "the optimizer is not Muon")
        return
    joined = "gate and up are matrices of their own, there one" if source.get("swiglu") else ""
    sharded = {"layout.zero": 1} if name == "dist_muon" else {}
    source.translate("optimizer", {"optimizer.name": "muon", **sharded}, joined)
    momentum, steps = source.number("muon-momentum", 0.95), source.whole("muon-num-ns-steps") or 5
    _set(source, "muon-momentum", "optimizer.momentum", momentum)
    _set(source, "muon-num-ns-steps", "optimizer.ns_steps", steps)
    is_nesterov = any(source.get(key) is True for key in _NESTEROV)
    _set(source, _NESTEROV[int(_NESTEROV[1] in source.values)], "optimizer.nesterov", is_nesterov)
    _read_scale(source)
    _read_iteration(source)
    _read_shards(source)


def _set(source: ImportSource, key: str, to: str, value: Any) -> None:
    """Set a Meshwright key to a value of the file, or to Megatron's default."""
    source.honour(key, {to: value})
    if key not in source.values:
        source.fill(to, value, f"Megatron's default of {key}")


def _read_scale(source: ImportSource) -> None:
    asked = source.get(_MODE, "spectral"), source.number(_FACTOR, 1.0)
    scale = next((name for name, pair in _SCALES.items() if pair == asked), None)
    if scale is None:
        reason = "no other scale of Muon; nearest: spectral with muon-extra-scale-factor = 0.2"
        key, default = (_FACTOR, 1.0) if asked[0] == "spectral" else (_MODE, "spectral")
        source.refuse(key, reason, settled_by=["optimizer.scale"], default=default)
    to = {} if scale is None else {"optimizer.scale": scale}
    for key in (_MODE, _FACTOR):
        source.translate(key, to)


def _read_iteration(source: ImportSource) -> None:
    """Import coefficients and precision of Newton-Schulz, and who updates the other parameters."""
    key = "muon-coefficient-type"
    if source.get(key, "quintic") != "simple":
        reason = "no other iteration of Newton-Schulz; nearest: simple"
        source.refuse(key, reason, settled_by=["optimizer.name"], default="quintic")
    source.honour(key, note="Keller Jordan's coefficients")
    key = "muon-fp32-matmul-prec"
    asked = source.get(key, "medium")
    precision = next((dtype for dtype, name in _PRECISIONS.items() if name == asked), None)
    if precision is None:
        reason = "matrices are orthogonalized in bf16 or fp32; nearest: medium, highest"
        source.refuse(key, reason, settled_by=["optimizer.ns_precision"])
    else:
        _set(source, key, "optimizer.ns_precision", precision)
    key = "muon-scalar-optimizer"
    if source.get(key, "adam") != "adam":
        reason = "Muon leaves other parameters to AdamW; nearest: adam"
        source.refuse(key, reason, settled_by=["optimizer.name"])
    source.honour(key, note="AdamW for what is not orthogonalized")


def _read_shards(source: ImportSource) -> None:
    """Import how matrices that tp cuts, or that are stored joined, are orthogonalized."""
    key = "muon-tp-mode"
    if source.get(key, "blockwise") == "blockwise" and degree(source, "layout.tp") > 1:
        reason = "matrices are whole when orthogonalized, on every layout; nearest: duplicated"
        source.refuse(key, reason, settled_by=["optimizer.name"], default="blockwise")
    source.ignore(key, "matrices are whole when orthogonalized, on every layout")
    for key in _UNSPLIT:
        if source.get(key) is True:
            reason = "q, k and v are matrices of their own; nearest: muon-split-qkv"
            source.refuse(key, reason, settled_by=["optimizer.name"])
    source.honour("muon-split-qkv", note="q, k and v are matrices of their own")


def muon_arguments(source: PlanSource) -> dict[str, Any]:
    """Return the arguments of a plan with Muon; raises `ConfigError` for shards that it lacks."""
    optimizer, zero = source.config.optimizer, source.layout.zero
    if zero > 1:
        raise ConfigError(
            f"Megatron's Muon shards optimizer states only; nearest to layout.zero = {zero}: 1"
        )
    mode, factor = _SCALES[optimizer.scale]
    return {
        "muon-momentum": optimizer.momentum,
        **({_NESTEROV[0]: True} if optimizer.nesterov else {}),
        "muon-num-ns-steps": optimizer.ns_steps,
        _MODE: mode,
        _FACTOR: factor,
        "muon-coefficient-type": "simple",
        "muon-fp32-matmul-prec": _PRECISIONS[optimizer.ns_precision],
        "muon-tp-mode": "duplicated",
    }
