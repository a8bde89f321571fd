"""Makes a layout of any size small enough to prove on local ranks. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final

from meshwright.layout import AXES, Layout, broken
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.prove.case import Case
from meshwright.spec.families import FAMILIES
from meshwright.spec.lora import NF4_BLOCK
from meshwright.spec.model import LayerSpec, ModelSpec
from meshwright.spec.rotary import RopeScaling
from meshwright.spec.training import TrainSpec
from meshwright.units import round_up

MOST_RANKS: Final = 8
# Data parallelism first: more of the same is the least of what a layout can get wrong.
_SHRINK_ORDER: Final = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
_MOST_VIRTUAL: Final = 4
_SEQ_LEN: Final = 32
_DIM: Final = 64
_EXPERTS: Final = 8


def shrink(
    model: ModelSpec, train: TrainSpec, layout: Layout, *, packed: bool = False, chat: bool = False
) -> tuple[Case, ...]:
    """Return the small cases that represent a layout.

    Degrees above 1 stay above 1, and the policies (ZeRO, schedule, recompute, ...) stay the same.
    If the layout has more axes than fit into `MOST_RANKS`, there is a case for every set of as many
    axes as fit, so that each axis is combined with every other. The model keeps its family, flags
    and ratio of heads.
    """
    microbatches = layout.microbatches(train.batch)
    is_uneven = model.n_layers % layout.stages > 0
    cases = []
    for degrees in _degrees(layout):
        small = _with_policies(layout, degrees)
        small_train = _small_train(train, small, microbatches)
        scaling = partial(_small_scaling, model, train, small_train)
        kinds = _small_kinds(model, train, small_train)
        small_model = _small_model(model, small, scaling, kinds, is_uneven=is_uneven)
        rule = broken(small_model, small_train, small)
        assert rule is None, rule
        cases.append(Case(small_model, small_train, small, packed, chat=chat))
    return tuple(cases)


def _degrees(layout: Layout) -> Iterator[Mapping[str, int]]:
    """Yield the small degrees of the axes."""
    split = [axis for axis in AXES if getattr(layout, axis) > 1]
    most = min(len(split), int(math.log2(MOST_RANKS)))
    for axes in combinations(split, most):
        degrees = {axis: getattr(layout, axis) for axis in axes}
        while math.prod(degrees.values()) > MOST_RANKS:
            largest = max(_SHRINK_ORDER, key=lambda axis: degrees.get(axis, 0))
            degrees[largest] = _next_smaller(degrees[largest])
        yield degrees


def _next_smaller(degree: int) -> int:
    """Return the largest divisor of a degree that is smaller, but at least 2."""
    return max((d for d in range(2, degree) if degree % d == 0), default=2)


def _with_policies(layout: Layout, degrees: Mapping[str, int]) -> Layout:
    """Return the layout on small degrees; an axis that is gone takes its policies along."""
    update: dict[str, Any] = dict.fromkeys(AXES, 1) | dict(degrees)
    update["microbatch"] = min(layout.microbatch, 2)
    update["sp"] = layout.sp and "tp" in degrees
    update["cp_kind"] = layout.cp_kind if "cp" in degrees else "ring"
    if layout.pp > 1 and "pp" not in degrees:
        update |= {"schedule": "1f1b", "virtual_stages": 1}
    elif SCHEDULES[layout.schedule].max_virtual is None:
        update["virtual_stages"] = min(layout.virtual_stages, _MOST_VIRTUAL)
    small = layout.model_copy(update=update)
    if layout.folds > 1 and small.sp:
        ep = small.tp * math.gcd(layout.expert_data, small.alike_ranks)
        return small.model_copy(update={"ep": ep})
    ep = math.gcd(layout.ep, small.alike_ranks)
    return small.model_copy(update={"ep": ep, "etp": None})


def _small_train(train: TrainSpec, layout: Layout, microbatches: int) -> TrainSpec:
    """Return a batch of short sequences, of about so many microbatches, that the layout divides."""
    count = _microbatches(layout, microbatches)
    update = {
        "batch": layout.dp * layout.microbatch * count,
        "seq_len": round_up(_SEQ_LEN, 2 * layout.cp * layout.tp),
    }
    return train.model_copy(update=update)


def _microbatches(layout: Layout, asked: int) -> int:
    """Return a number of microbatches that the schedule takes: that asked for, or near 2 rounds."""
    if not layout.is_pipelined:
        return min(asked, 2)
    most = 2 * layout.stages
    tries: list[int] = [min(asked, most), *range(most, 0, -1)]
    stages = layout.schedule, layout.pp, layout.virtual_stages
    return next(n for n in tries if microbatch_rule(*stages, n) is None)


def _small_model(
    model: ModelSpec,
    layout: Layout,
    scaling: Callable[[int], RopeScaling | None],
    kinds: tuple[LayerSpec, ...],
    *,
    is_uneven: bool,
) -> ModelSpec:
    """Return a small model with the family and flags of a given one, which the layout divides."""
    ranks_of_heads = layout.tp * (layout.cp if layout.cp_kind == "ulysses" else 1)
    kv_heads = round_up(min(model.n_kv_heads, 2), ranks_of_heads)
    group = min(model.n_heads // model.n_kv_heads, 4)
    # Of three layers of a stage, one has left and comes back while another goes back.
    each = 3 if layout.offload == "activations" else 1
    least = each * layout.stages + (is_uneven and layout.is_pipelined)
    layers = max(2, len(kinds), least)
    # In four bits each rank of tp has whole blocks of a layer's inputs.
    block = NF4_BLOCK if model.lora is not None and model.lora.four_bits else 1
    of_rank = group * kv_heads // layout.tp
    of_heads = [size for size in (8, 16, 32, 64, 128) if of_rank * size % block == 0]
    head_dim = _head_dim(model, of_heads)
    sizes: dict[str, Any] = {
        "preset": None,
        "init_from": None,
        "vocab_size": round_up(128, layout.tp),
        "dim": _DIM,
        "n_layers": layers,
        "n_heads": group * kv_heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope_scaling": scaling(head_dim),
        "ffn_dim": round_up(2 * _DIM, layout.tp * block),
        "layer_pattern": kinds if model.layer_pattern else (),
        **_small_experts(model, layout),
        **_small_latent(model),
        **FAMILIES[model.family].of_width(_DIM),
    }
    if model.attention_scale is not None:  # scores as large as they were
        scale = model.attention_scale * math.sqrt(model.head_dim / head_dim)
        sizes["attention_scale"] = scale
    return ModelSpec.model_validate_json(model.model_copy(update=sizes).model_dump_json())


def _small_experts(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Return the sizes of few small experts, which the layout divides, where there are any."""
    if not model.experts:
        return {}
    count = round_up(min(model.experts, _EXPERTS), layout.ep)
    groups = 2 if model.expert_groups > 1 and count % 4 == 0 else 1
    top_k = min(model.top_k, count)
    is_cut = model.top_groups < model.expert_groups and 2 * top_k <= count
    width = None if model.expert_ffn_dim is None else round_up(_DIM, layout.tp)
    return {
        "experts": count,
        "top_k": top_k,
        "expert_groups": groups,
        "top_groups": 1 if is_cut else groups,
        "dense_layers": min(model.dense_layers, 0 if model.layer_pattern else 1),
        "expert_ffn_dim": width,
        "shared_ffn_dim": round_up(_DIM, layout.tp) if model.shared_ffn_dim else 0,
    }


def _small_latent(model: ModelSpec) -> dict[str, Any]:
    """Return the sizes of small latent vectors and of heads made of them, where there are any."""
    if not model.is_latent:
        return {}
    return {
        "q_lora_rank": min(model.q_lora_rank, 24),
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "head_dim": 16,
        "v_head_dim": 12 if model.v_head_dim < model.head_dim else 20,
        "rope_scaling": model.rope_scaling,
    }


def _small_kinds(model: ModelSpec, train: TrainSpec, small: TrainSpec) -> tuple[LayerSpec, ...]:
    """Return a layer of each kind, with windows that hide as large a share of small rows."""
    found = []
    for kind in model.layer_kinds:
        window = kind.window
        if window is not None and window < train.seq_len:
            window = max(2, window * small.seq_len // train.seq_len)
        found.append(kind.model_copy(update={"window": window}))
    return tuple(found)


def _small_scaling(
    model: ModelSpec, train: TrainSpec, small: TrainSpec, head_dim: int
) -> RopeScaling | None:
    """Return the scaling for small heads and rows, which are as long for longrope as they were."""
    scaling, pairs = model.rope_scaling, int(head_dim * model.rotary_pct) // 2
    if scaling is None or scaling.kind != "longrope" or pairs == 0:
        return scaling
    original = scaling.original_context
    is_long, most = train.seq_len > original, small.seq_len
    update: dict[str, Any] = {
        "original_context": min(original, most // 4) if is_long else max(original, most)
    }
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        update[name] = tuple(factors[pair * len(factors) // pairs] for pair in range(pairs))
    return scaling.model_copy(update=update)


def _head_dim(model: ModelSpec, sizes: Sequence[int]) -> int:
    """Return a small head size of which an even part is rotated, none only if none was."""
    for size in sizes:
        rotated = int(size * model.rotary_pct)
        if rotated % 2 == 0 and (rotated > 0) == (model.rotary_dim > 0):
            return size
    return model.head_dim
