"""Reads rows of measurements, ours or published, as cost inputs and layouts: `predict --rows`.

Measured values are not read. Missing values are assumed, and reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import ValidationError

from meshwright.cost.calibration import Calibration
from meshwright.cost.catalogue import Device, cluster_of, device_named, find_device
from meshwright.cost.evidence import evidence
from meshwright.cost.inputs import CostInputs
from meshwright.cost.price import Prediction, RankMemory, price, worst_memory
from meshwright.cost.row_experts import RowError, mixture
from meshwright.cost.row_models import known, whole
from meshwright.cost.row_words import (
    OURS,
    UNKNOWN_ATTENTION,
    imbalance_of,
    matmul_of,
    precision_of,
    recompute_of,
    system_of,
    unquantised_of,
)
from meshwright.cost.systems import CAUSAL, System
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.spec.lora import ALL_LINEAR, Lora, check_targets
from meshwright.spec.model import ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.training import OptimizerSpec, Recompute, Schedule, TrainSpec, Zero
from meshwright.units import GIB, round_up

Row = Mapping[str, Any]
_NEEDED = ("layers", "hidden", "heads", "seq", "gbs", "gpu")
# Megatron-LM pads the vocabulary to a multiple of this for each tp rank.
_VOCAB_MULTIPLE = 128
# A layout that was run fits; a prediction above the memory by more than this share is not an error.
_SLACK = 0.25


# MLPs of three matrices, as Llama's, or of two.
_MLPS: Final = ("gated", "plain")


@dataclass(frozen=True)
class PricedRow:
    """The cost inputs and the layout of a row, and the assumptions that were made."""

    setting: CostInputs
    layout: Layout
    assumed: tuple[str, ...]


def _compile(row: Row, system: System) -> bool | Literal["auto"]:
    """Return `train.compile` for a row; for other systems, compiling is part of the system, so
    False."""
    asked: bool | None = row.get("compile")
    if system.name != "meshwright":
        return False
    return "auto" if asked is None else bool(asked)


def read_row(row: Row, calibration: Calibration) -> PricedRow:
    """Return the cost inputs and the layout of a row; raises `RowError` if it says too little or is
    inconsistent."""
    assumed: list[str] = []
    named, row = whole(row), known(row, assumed)
    missing = [key for key in _NEEDED if not row.get(key)]
    if missing:
        raise RowError(f"the row lacks {', '.join(missing)}")
    degrees = _degrees(row, assumed)
    system = system_of(row, assumed)
    device = _device(row, assumed)
    model = _model(row, degrees["tp"], system, assumed)
    if named is not None and named.n_kv_heads % degrees["tp"] == 0:
        model = named.model_copy(update={"vocab_size": model.vocab_size, "context": row["seq"]})
    model = _adapted(row, model, assumed)
    precision, products = precision_of(row, assumed)
    per_node = row.get("gpus_per_node")
    devices = degrees["dp"] * degrees["tp"] * degrees["cp"] * degrees["pp"]
    if device.per_node > 8:  # NVLink reaches further than the machine that a row counts
        per_node = device.per_node
    cluster = cluster_of(device, devices, per_node, _links(row, device))
    try:
        matmul = matmul_of(row)
        train = TrainSpec(
            batch=row["gbs"],
            seq_len=row["seq"],
            precision=precision,
            matmul=matmul,
            compile=_compile(row, system),
        )
        layout = _layout(row, degrees, system, assumed)
    except ValidationError as error:
        raise RowError(str(error.errors()[0]["msg"])) from None
    if train.batch % (layout.dp * layout.microbatch):
        raise RowError(f"a batch of {train.batch} is not a multiple of dp {layout.dp} x microbatch")
    calibration = calibration.of(model, train.seq_len)
    imbalance = 1.0
    if layout.ep > 1:
        default = calibration.find("experts.imbalance", device.kind)
        imbalance = imbalance_of(row, system, default, assumed)
    setting = CostInputs(
        model,
        train,
        OptimizerSpec(),
        cluster,
        system,
        calibration,
        products,
        imbalance=imbalance,
        unquantised=unquantised_of(row),
    )
    if not row.get("attn_impl"):
        setting = _with_kernel(setting, layout, assumed)
    if not row.get("recompute"):
        layout = _least_recompute(setting, layout)
        assumed.append(f"recompute {layout.recompute}: the least that fits")
    return PricedRow(setting, layout, tuple(assumed))


def _degrees(row: Row, assumed: list[str]) -> dict[str, int]:
    degrees = {}
    for key in ("tp", "cp", "pp"):
        if row.get(key) is None:
            assumed.append(f"{key} 1")
        degrees[key] = int(row.get(key) or 1)
    model_ranks = degrees["tp"] * degrees["cp"] * degrees["pp"]
    given = row.get("n_gpus") or (row.get("dp") or 0) * model_ranks
    if not given:
        raise RowError("the row has neither n_gpus nor dp")
    devices = int(given)
    if devices % model_ranks:
        raise RowError(f"tp x cp x pp = {model_ranks} does not divide n_gpus = {devices}")
    degrees["dp"] = int(row.get("dp") or devices // model_ranks)
    if degrees["dp"] * model_ranks != devices:
        raise RowError(f"dp x tp x cp x pp = {degrees['dp'] * model_ranks}, but n_gpus = {devices}")
    return degrees


def _device(row: Row, assumed: list[str]) -> Device:
    text = str(row["gpu"])
    device = device_named(text)
    if device is None:
        raise RowError(f"the device {text!r} is not in the catalogue")
    if device.kind == "a100" and not re.search("40|80", text) and row.get("gpu_mem_gb") is None:
        assumed.append(f"device {device.name}")
    if row.get("gpu_mem_gb") == 40 and device.name == "a100-80gb":
        device = find_device("a100-40gb")
    return device


def _links(row: Row, device: Device) -> tuple[str, str] | None:
    """Return the links inside a node and between nodes if the row states the network in Gb/s, else
    None."""
    match = re.search(r"(\d+)\s*Gb/s", str(row.get("internode") or ""))
    if match is None:
        return None
    rate = int(match[1])
    if re.search("per GPU", str(row["internode"])):
        pass
    elif rate >= 800 or re.search("node-node|per node", str(row["internode"])):
        rate //= 8
    names = {12: "infiniband-100", 25: "infiniband-200", 50: "infiniband-400"}
    nearest = min(names, key=lambda gbs: abs(gbs - rate / 8))
    return (device.links[0], names[nearest])


def _model(row: Row, tp: int, system: System, assumed: list[str]) -> ModelSpec:
    name = str(row.get("model", ""))
    vocab = row.get("vocab")
    if vocab is None:
        vocab = 51200
        assumed.append(f"vocabulary {vocab}")
    hidden, heads = row["hidden"], row["heads"]
    kv_heads = row.get("kv_heads") or heads
    if kv_heads < tp:
        kv_heads = tp
        assumed.append(f"key and value heads copied to {tp} tp ranks")
    ffn = row.get("ffn") or 4 * hidden
    # A gated MLP has three matrices, and so never four times the width.
    is_gated = ffn != 4 * hidden or bool(row.get("experts"))
    is_llama = is_gated and bool(
        re.search("llama|mi[sx]tral|qwen|olmo|gpt.?oss|grok", name, re.IGNORECASE)
    )
    if (mlp := row.get("mlp")) is not None:
        if mlp not in _MLPS:
            raise RowError(f"mlp {mlp!r}: it is one of {', '.join(_MLPS)}")
        is_llama = mlp == "gated"
    elif system.name == OURS:  # both families may have any width
        is_llama = is_gated or kv_heads != heads
        assumed.append(f"mlp {'gated' if is_llama else 'plain'}")
    if not row.get("ffn"):
        assumed.append(f"ffn {ffn}")
    if not is_llama and kv_heads != heads:
        is_llama, ffn = True, ffn * 2 // 3
        assumed.append("two MLP matrices priced as three of 2/3 the width")
    fields: dict[str, Any] = {
        "family": "llama" if is_llama else "neox",
        "vocab_size": vocab if system.name == OURS else round_up(vocab, _VOCAB_MULTIPLE * tp),
        "dim": hidden,
        "n_layers": row["layers"],
        "n_heads": heads,
        "head_dim": row.get("head_dim") or hidden // heads,
        "ffn_dim": round_up(ffn, tp),
        "context": row["seq"],
        "tie_embeddings": bool(row.get("tied_embeddings")),
    }
    if row.get("experts"):
        fields |= {"n_kv_heads": heads if row.get("kv_lora_rank") else kv_heads, **mixture(row)}
    elif is_llama:
        fields["n_kv_heads"] = kv_heads
    else:
        # Others have learned positions, or ALiBi.
        fields["rotary_pct"] = float(row.get("rotary_pct", 1.0 if system.name == OURS else 0.0))
        fields["parallel_residual"] = bool(row.get("parallel_residual"))
    try:
        return model_spec(**fields)
    except (ValidationError, ConfigError) as error:
        raise RowError(f"model: {error}") from None


def _adapted(row: Row, model: ModelSpec, assumed: list[str]) -> ModelSpec:
    """Return the model with the LoRA adapters that a row trains, if any."""
    rank, targets = row.get("lora_rank"), row.get("lora_targets")
    if not rank:
        if "lora" in str(row.get("task", "")).lower():
            raise RowError("the row trains LoRA, but lacks lora_rank")
        return model
    if not targets:
        targets = (ALL_LINEAR,)
        assumed.append("lora_targets all-linear")
    try:
        if model.experts:
            raise ValueError(f"adapters of a model with experts = {model.experts} are not priced")
        lora = Lora(rank=rank, alpha=rank, targets=targets)
        check_targets(lora, model.blocks)
    except ValueError as error:
        raise RowError(f"lora: {error}") from None
    return model.model_copy(update={"lora": lora})


def _layout(row: Row, degrees: Mapping[str, int], system: System, assumed: list[str]) -> Layout:
    dp, virtual = degrees["dp"], int(row.get("vp") or 1)
    if row.get("vp") is None and degrees["pp"] > 1 and system.name == "nemo":
        # Its recipes interleave as finely as the layers divide.
        virtual = max(1, row["layers"] // degrees["pp"])
        while virtual > 1 and row["layers"] % (virtual * degrees["pp"]):
            virtual -= 1
        assumed.append(f"{virtual} virtual stages")
    stated = row.get("zero_stage")
    keeps_whole = system.keeps == "whole" or system.name == OURS
    zero: Zero = (0 if keeps_whole else 3) if stated is None else stated
    if stated is None:
        assumed.append(f"zero {zero}")
    if system.name.startswith("torchtitan") and degrees["pp"] > 1 and zero == 3:
        zero = 2  # its FSDP keeps gathered weights where there is a pipeline
    shards = int(row.get("dp_shard") or dp) if zero else 1
    if "hsdp" in str(row.get("sharding", "")).lower() and not row.get("dp_shard"):
        shards = min(dp, int(row.get("gpus_per_node") or 8))
    if dp % shards:
        shards = dp
    microbatch = row.get("mbs")
    if microbatch is None:
        microbatch = 1
        assumed.append("microbatch 1")
    ep, tp = int(row.get("ep") or 1) if row.get("experts") else 1, degrees["tp"]
    alike = (shards if zero else dp) * degrees["cp"]
    ranks = {"alike": alike, "stage": dp * degrees["cp"] * tp}
    etp = _expert_tp(row, ep, tp, ranks, assumed)
    sp = etp < tp or _splits_sequences(row, tp, system, assumed)
    if alike % (ep // (tp // etp)) or int(row["experts"] if ep > 1 else 1) % ep:
        raise RowError(f"ep {ep} does not divide the {alike * tp // etp} ranks that share experts")
    schedule: Schedule = "interleaved_1f1b" if virtual > 1 and degrees["pp"] > 1 else "1f1b"
    if system.name == OURS and degrees["pp"] > 1:
        schedule = row.get("pp_schedule") or schedule
    offload = str(row.get("offload") or "none").lower()
    return Layout(
        pp=degrees["pp"],
        dp_replicate=dp // shards,
        dp_shard=shards,
        cp=degrees["cp"],
        cp_kind=row.get("cp_kind") or "ring",
        tp=degrees["tp"],
        ep=ep,
        etp=None if etp == tp else etp,
        zero=zero,
        sp=sp and tp > 1,
        schedule=schedule,
        virtual_stages=virtual if degrees["pp"] > 1 else 1,
        microbatch=int(microbatch),
        recompute=recompute_of(row, assumed),
        offload="params" if "param" in offload else "optimizer" if "optim" in offload else "none",
    )


def _splits_sequences(row: Row, tp: int, system: System, assumed: list[str]) -> bool:
    """Return whether a row has sequence parallelism; if it does not say, what its system usually
    does."""
    sp = row.get("sp")
    is_usual = system.name not in ("megatron", "aleph-alpha", "aleph-alpha-rms")
    if sp is None and tp > 1 and is_usual:
        assumed.append("sp")
        return True
    return bool(sp)


def _expert_tp(row: Row, ep: int, tp: int, ranks: Mapping[str, int], assumed: list[str]) -> int:
    """Return how many tp ranks split an expert's width: as the row states, if that is possible.

    A stated `edp` determines it, too: the `ranks` of a stage are ep x etp x edp. If the row states
    neither, and `ep` does not divide the data-parallel ranks (`alike`), it is 1.
    """
    if ep == 1:
        return tp
    stated, edp, stage_ranks = row.get("etp"), row.get("edp"), ranks["stage"]
    if edp and (
        stage_ranks % (ep * edp) or (stated or stage_ranks // (ep * edp)) * ep * edp != stage_ranks
    ):
        degrees = f"ep {ep} x etp {stated} x edp {edp}" if stated else f"ep {ep} x edp {edp}"
        raise RowError(f"{degrees} does not divide the {stage_ranks} ranks of dp x cp x tp")
    stated = stated or (stage_ranks // (ep * edp) if edp else None)
    if tp == 1 or stated == tp:
        return tp
    can_be_whole = ep % tp == 0 and ranks["alike"] % (ep // tp) == 0
    if can_be_whole and (stated == 1 or (not stated and ranks["alike"] % ep)):
        return 1
    assumed.append(f"experts cut over tp {tp}")
    return tp


def _nearly_fits(memory: RankMemory) -> bool:
    return memory.total <= (1 + _SLACK) * memory.limit


def _with_kernel(setting: CostInputs, layout: Layout, assumed: list[str]) -> CostInputs:
    """Return the cost inputs with the attention kernel that a row without one must have had: its
    system's.

    If that kernel writes scores that would not nearly fit, assumes FlashAttention.
    """
    kernel = setting.system.attention
    if not CAUSAL[kernel]:
        recomputed = layout.model_copy(update={"recompute": "full"})
        if not _nearly_fits(worst_memory(setting, recomputed)):
            kernel = UNKNOWN_ATTENTION
    assumed.append(f"attention {kernel}")
    return replace(setting, system=replace(setting.system, attention=kernel))


def _least_recompute(setting: CostInputs, layout: Layout) -> Layout:
    """Return the layout with the least recomputation with which it nearly fits; with "full" if none
    does.

    Published layouts are tuned to fill the memory, so only an excess beyond the prediction's own
    error shows that something was recomputed.
    """
    policies: tuple[Recompute, ...] = ("none", "selective", "full")
    tried = [layout.model_copy(update={"recompute": policy}) for policy in policies]
    return next(
        (candidate for candidate in tried if _nearly_fits(worst_memory(setting, candidate))),
        tried[-1],
    )


def predict_row(row: Row, calibration: Calibration) -> dict[str, Any]:
    """Return the prediction of a row as a JSON object, or why it is refused."""
    try:
        case = read_row(row, calibration)
        return as_json(row.get("id"), case, price(case.setting, case.layout))
    except RowError as error:
        return {"id": row.get("id"), "refused": str(error)}
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Others' data: a value of another type or size than its field has.
        return {"id": row.get("id"), "refused": f"the row cannot be read: {error!r}"}


def as_json(name: object, case: PricedRow, prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as the JSON of `predict --rows`; `name` is the row's id."""
    return {
        "id": name,
        "fits": prediction.memory.fits,
        "peak_mem_gib": prediction.memory.total / GIB,
        "peak_mem_interval_gib": [bound / GIB for bound in prediction.memory_interval],
        "worst_rank": worst_rank(prediction),
        "step_time_s": prediction.time.total,
        "step_time_interval_s": list(prediction.interval),
        "tokens_per_s_per_gpu": prediction.tokens_per_s / prediction.devices,
        "tflops_per_gpu": prediction.tflops_per_device,
        "mfu": prediction.mfu,
        "evidence": evidence(case.setting, case.layout),
        "assumed": list(case.assumed),
    }


def worst_rank(prediction: Prediction) -> int:
    """Return the first global rank at the place in the pipeline that needs the most memory."""
    return prediction.memory.rank * (prediction.layout.world // prediction.layout.pp)
