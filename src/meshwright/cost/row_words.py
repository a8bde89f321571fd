"""Interprets the free text in a row of measurements: its system, kernels, precision and
recomputation.

An unknown word gets its likeliest meaning, which is noted in `assumed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from meshwright.cost.systems import SYSTEMS, Module, System
from meshwright.program.target import Matmul
from meshwright.spec.training import Precision, Recompute

# Our own system: what of a row is said in its words, and not in those of the papers.
OURS: Final = "meshwright"
# Every attention that somebody named since 2022 spares the scores, so an unknown name does.
UNKNOWN_ATTENTION: Final = "flash2"
# Patterns of a row's `framework`.
_FRAMEWORKS: Final = (
    (r"aleph", "aleph-alpha"),
    (r"jax|maxtext|paxml", "jax"),
    (r"nemo|bridge", "nemo"),
    (r"core|megascale", "megatron-core"),
    (r"zero-?3", "deepspeed"),
    (r"megatron|neox|deepspeed", "megatron"),
    (r"composer|foundry|mosaic", "composer"),
    (r"titan", "torchtitan"),
    (r"fsdp\d? \+ torch.compile|fms|lit-?gpt|fsdp", "fms"),
    (r"meshwright", "meshwright"),
)
# Patterns of its `attn_impl`; True where a name says all, False where it is of something alike.
_KERNELS: Final = (
    (r"flash.?att\w*?.?v?1\b|flash_attentionv1|\bfa.?1\b", ("flash1", True)),
    (r"flash_attention$", ("flash1", False)),
    (r"flash.?att\w*?.?v?2\b|\bfa.?2\b", ("flash2", True)),
    (r"cudnn|transformer.?engine|\bte\b", ("cudnn", True)),
    (r"sdpa.?math|math.?sdpa|\b(eager|math|naive|unfused|vanilla)\b", ("scores", True)),
    (r"^\s*(py)?torch\s*$|baddbmm", ("scores", True)),
    (r"^\s*fused\s*$|fused.?(scaled.?)?(masked.?)?softmax", ("softmax", True)),
)
# Patterns of what a row names of grouped selective recomputation: Megatron-Core's
# `--recompute-modules`.
_MODULES: Final[tuple[tuple[str, Module], ...]] = (
    (r"core.?att|self.?att|\(attention\)|attention core", "core_attn"),
    (r"\bmlp\b|feed.?forward", "mlp"),
    (r"layer.?norm|rms.?norm|\bnorms?\b", "layernorm"),
    (r"moe.?act|\bact(ivation)?s?\b", "activation"),
    (r"\bmoe\b(?!.?act)|\bexperts\b", "mlp"),
)
# Patterns of its `routing`: whether all ranks of `ep` get as many tokens, by force or as others are
# dropped.
_ROUTINGS: Final = (
    (r"force|fake|\bbalanced|drop(?!less)|capacity", True),
    (r"natural|learned|aux|bias|dropless|top", False),
)
# Patterns of its `dispatcher`: whether a token goes to a rank, and to a node, once for all its
# experts there. An all-to-all sends a copy for each expert; an all-gather sends all tokens to all
# ranks.
_DISPATCHERS: Final = (
    (r"deep.?ep|hybrid.?ep|\bhybrid|\bflex", True),
    (r"all.?to.?all|a2a|all.?gather", False),
)
# github.com/deepseek-ai/DeepEP, README: requirements.
_BEFORE_HOPPER: Final = r"\bV100|\bA100|\bA800|\bA[34]0\b|\bA6000"
# What a precision says of layers that keep 16 bits, first and last.
_WIDE_LAYERS: Final = re.compile(r"(?:bf16|fp16) \(?(?:layers )?(\d+)-(\d+)", re.IGNORECASE)
# A loss that never has all logits, and how often it cuts them where it says a number.
_CHUNKED: Final = re.compile(
    r"(?<!no )(?<!without )(?:(\d+)\s+(?:loss\s+chunks|chunks of the loss)|liger|"
    r"cut.?cross.?entropy|fused.?linear.?(?:cross|loss)|"
    r"(?:chunked|fused).?(?:loss|cross.?entropy|ce\b))",
    re.IGNORECASE,
)
_CHUNKS: Final = 8
_OF_LOSS: Final = ("loss", "loss_impl", "kernels", "framework", "notes")


def imbalance_of(
    row: Mapping[str, Any], system: System, default: float, assumed: list[str]
) -> float:
    """Return the tokens of the busiest expert-parallel rank over the mean, as a row states it.

    `default` is for routing that is not forced to be balanced. A row of another system that says
    nothing is assumed to be balanced, like nearly all published ones. Raises `ValueError` for an
    imbalance below 1.
    """
    if row.get("imbalance") is not None:
        if not (given := float(row["imbalance"])) >= 1:
            raise ValueError(f"imbalance {given:g} must be at least 1: the mean")
        return given
    is_even = first(_ROUTINGS, row.get("routing") or "")
    if is_even is None:
        is_even = system.name != OURS
        assumed.append("routing balanced" if is_even else "routing learned")
    if not is_even:
        assumed.append(f"imbalance {default:g}")
    return 1.0 if is_even else default


def first(patterns: tuple[tuple[str, Any], ...], text: object) -> Any:
    """Return the value of the first pattern that matches a text, or None."""
    return next(
        (value for pattern, value in patterns if re.search(pattern, str(text), re.IGNORECASE)), None
    )


def system_of(row: Mapping[str, Any], assumed: list[str]) -> System:
    """Return the training system of a row, with the attention kernel, recomputed modules, expert
    dispatcher and loss that it states."""
    text = row.get("framework") or row.get("source_key")
    name = first(_FRAMEWORKS, text) if text else OURS
    if not text:
        assumed.append(f"system {name}")
    if name is None:  # some other
        name = "megatron" if (row.get("tp") or 1) * (row.get("pp") or 1) > 1 else "fms"
        assumed.append(f"system {name}")
    if name == "torchtitan" and row.get("compile"):
        name = "torchtitan-compile"
    kernel = row.get("attn_impl")
    if name == "aleph-alpha" and "rms" in str(kernel).lower():
        name = "aleph-alpha-rms"
    system = SYSTEMS[name]
    if re.search(r"\bte\b|transformer.?engine", str(text), re.IGNORECASE):
        system = replace(system, keeps_quantised=True)
    if kernel:
        system = replace(system, attention=_attention(str(kernel), assumed))
    # Inferred from published peaks, 103 GiB where bf16 needs 174, and not read from its code: its
    # NVFP4 linear keeps what its product took. torchao's float8 and MXFP8 linears keep 16 bits.
    if "titan" in name and "nvfp4" in str(row.get("precision")).lower():
        system = replace(system, keeps_quantised=True)
    system = _with_dispatcher(system, row, assumed)
    return _with_loss(_with_modules(system, row), row, assumed)


def _with_dispatcher(system: System, row: Mapping[str, Any], assumed: list[str]) -> System:
    """Return the system with the token dispatcher that a row of a mixture-of-experts model
    states."""
    text = row.get("dispatcher")
    if not row.get("experts"):
        return system
    if not text:  # the kernels that send once need a Hopper or newer
        is_older = re.search(_BEFORE_HOPPER, str(row.get("gpu")))
        return replace(system, sends_once=False) if is_older else system
    once = first(_DISPATCHERS, text)
    if once is None:
        usual = "once to a rank" if system.sends_once else "once for each expert"
        assumed.append(f"dispatcher {text!r} priced as one that sends a token {usual}")
        return system
    return replace(system, sends_once=once)


def _attention(name: str, assumed: list[str]) -> str:
    """Return the attention kernel that a name means; an uncertain meaning is noted in `assumed`."""
    kernel, says_all = first(_KERNELS, name) or (UNKNOWN_ATTENTION, False)
    if not says_all:
        assumed.append(f"attention {name!r} priced as {kernel}")
    return str(kernel)


def _with_modules(system: System, row: Mapping[str, Any]) -> System:
    """Return the system with the recomputed modules that a row names, if they differ from its usual
    ones."""
    text = f"{_recomputed(row)} {row.get('recompute_modules') or ''}"
    if text.startswith("full"):
        return system
    modules = {module for pattern, module in _MODULES if re.search(pattern, text)}
    if not modules or (modules == {"core_attn"} and system.selective == "attention"):
        return system
    return replace(system, selective="modules", modules=frozenset(modules))


def _with_loss(system: System, row: Mapping[str, Any], assumed: list[str]) -> System:
    """Return the system with a loss that computes logits in chunks, if the row says so."""
    text = "; ".join(str(row[key]) for key in _OF_LOSS if row.get(key))
    match = _CHUNKED.search(text)
    if match is None or system.fuses_loss:
        return system
    if match[1] is None:
        assumed.append(f"{_CHUNKS} chunks of the loss")
    return replace(system, loss_chunks=max(1, int(match[1] or _CHUNKS)))


def matmul_of(row: Mapping[str, Any]) -> Matmul:
    """Return the route of fp32 matmuls in a row: "auto" (TF32) if it states TF32, else "torch"."""
    return "auto" if str(row.get("precision") or "").lower() == "tf32" else "torch"


def precision_of(row: Mapping[str, Any], assumed: list[str]) -> tuple[Precision, str]:
    """Return the precision of a row's activations, and that of its matmuls."""
    text = str(row.get("precision") or "").lower()
    if not text:
        assumed.append("precision bf16")
    if "fp4" in text:
        return "bf16", "fp4"
    if "rowwise" in text:
        return "bf16", "fp8-rowwise"
    if "mxfp8" in text or "fp8-mx" in text:
        return "bf16", "fp8-mx"
    if "fp8" in text or "float8" in text:
        return "bf16", "fp8"
    name: Precision = "fp16" if "fp16" in text and "bf16" not in text else "bf16"
    if text in ("fp32", "tf32"):
        name = "fp32"
    return name, name


def unquantised_of(row: Mapping[str, Any]) -> float:
    """Return the share of a row's layers whose matmuls are in 16 bits while others have fewer.

    The row's precision names these layers, counted from 0: "nvfp4 (layers 0-26), bf16 (27-31,
    head)".
    """
    match = _WIDE_LAYERS.search(str(row.get("precision") or ""))
    if match is None:
        return 0.0
    first_layer, last_layer, layers = int(match[1]), int(match[2]), int(row["layers"])
    if not 0 <= first_layer <= last_layer < layers:
        raise ValueError(f"layers {match[1]}-{match[2]} in 16 bits, but the row has {layers}")
    return (last_layer - first_layer + 1) / layers


def _recomputed(row: Mapping[str, Any]) -> str:
    return str(row.get("recompute") or "").lower()


def recompute_of(row: Mapping[str, Any], assumed: list[str]) -> Recompute:
    """Return the recomputation policy of a row; named modules mean "selective"."""
    text = _recomputed(row)
    if text.startswith("full"):
        return "full"
    if "select" in text or any(re.search(pattern, text) for pattern, _ in _MODULES):
        return "selective"
    if text and not re.match("none|no\\b|off|false", text):
        assumed.append(f"recompute {text!r} read as none")
    return "none"
