"""Shrinks a model and layout of any size to cases that can be proven on at most 8 local ranks. No
torch.

`prove.kept` says what shrinking must keep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final

from meshwright.layout import AXES, Layout, broken
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.program.attention import BLOCK, SHORTEST, ScoreBounds, by_blocks
from meshwright.prove.case import Case
from meshwright.prove.kept import why_not_proven
from meshwright.spec.families import FAMILIES
from meshwright.spec.groups import GroupSpec
from meshwright.spec.lora import NF4_BLOCK
from meshwright.spec.model import OF_PADDING, VOCAB_MULTIPLE, LayerSpec, ModelSpec, padded
from meshwright.spec.rotary import RopeScaling
from meshwright.spec.training import OptimizerSpec, TrainSpec
from meshwright.units import round_up

MOST_RANKS: Final = 8
# Data parallelism first: more of the same is the least of what a layout can get wrong.
_SHRINK_ORDER: Final = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
_MOST_VIRTUAL: Final = 4
_MOST_MICROBATCHES: Final = 3
# The tokens of a row: as few as possible, or so many that a CPU's attention has several blocks, in
# its own kernel for rows of this length, and in PyTorch's for all others.
_SHORT_ROW: Final = 32
_OWN_ROW: Final = SHORTEST
_OTHER_ROW: Final = SHORTEST - BLOCK // 2
# A window that spans blocks begins in the block before, or in the one before that.
_WINDOW: Final = BLOCK + 9
# A chunk of a ring has more than one block of queries.
_CHUNK: Final = BLOCK + 8
_CONTEXT: Final = 2048
_DIM: Final = 64
# Entries of a vocabulary: as they are, and where rows of padding come after them.
_VOCAB: Final = 128
_PADDED_VOCAB: Final = 127
# One whose root no half precision holds, for models that scale by it.
_ROOTED_DIM: Final = 96
_ROOTED_DIM_OF_BLOCKS: Final = 192
_EXPERTS: Final = 8
# Of each token: one of two ranks has several of them.
_TOP_K: Final = 3
# Experts take little more than an even share, so that some are full.
_CAPACITY: Final = 1.25
# Two of warm-up, two at or near the highest rate, two of decay.
_STEPS: Final = 6
_WARMUP: Final = 2
_DECAY: Final = 2


def shrink(
    model: ModelSpec,
    train: TrainSpec,
    layout: Layout,
    optimizer: OptimizerSpec = OptimizerSpec(),  # noqa: B008
    *,
    packed: bool = False,
    chat: bool = False,
) -> tuple[Case, ...]:
    """Return the small cases that stand for a layout and model in a proof.

    Degrees above 1 stay above 1, and the policies (ZeRO, schedule, recomputation, ...) stay the
    same. If the layout has more axes than fit into `MOST_RANKS`, there is a case for every set of
    as many axes as fit, so that each axis is combined with every other. The model keeps its family,
    flags and ratio of heads, the optimizer its kind, and the schedule its phases; `prove.kept`
    lists the rest.
    """
    microbatches = layout.microbatches(train.batch)
    is_uneven = model.n_layers % layout.stages > 0
    without = max(layout.stages - model.n_layers, 0)
    pads = padded(model, layout.tp).vocab_rows > model.vocab_size
    cases = []
    for degrees in _degrees(layout, _fewest_tp(model, layout)):
        small = _with_policies(layout, degrees)
        small_train = _small_train(model, train, small, microbatches)
        scaling = partial(_small_scaling, model, train, small_train)
        kinds = _small_kinds(model, train, small_train)
        flags: dict[str, Any] = {"is_uneven": is_uneven, "without": without, "pads": pads}
        small_model = _small_model(model, small, scaling, kinds, **flags)
        rule = broken(small_model, small_train, small)
        assert rule is None, rule
        small_optimizer = _small_optimizer(optimizer, train.steps, small_model.n_layers)
        cases.append(
            Case(small_model, small_train, small, packed, _STEPS, small_optimizer, chat=chat)
        )
    return tuple(cases)


def _fewest_tp(model: ModelSpec, layout: Layout) -> int:
    """Return the smallest tp degree that keeps how the ranks share the model: 2, or 4.

    4 is for Mamba-2 with several groups of heads, each spread over several ranks.
    """
    return 4 if model.has_mamba and 1 < model.mamba_groups < layout.tp else 2


def _degrees(layout: Layout, fewest_tp: int) -> Iterator[Mapping[str, int]]:
    """Yield the reduced degrees by axis, with at most `MOST_RANKS` ranks; tp stays at least
    `fewest_tp` if it was above 1.
    """
    fewest = dict.fromkeys(AXES, 2) | {"tp": fewest_tp}
    split = [axis for axis in AXES if getattr(layout, axis) > 1]
    axes_of_two = MOST_RANKS if layout.tp == 1 else MOST_RANKS * 2 // fewest_tp
    count = min(len(split), int(math.log2(axes_of_two)))
    for axes in combinations(split, count):
        degrees = {axis: getattr(layout, axis) for axis in axes}
        while math.prod(degrees.values()) > MOST_RANKS:
            above = [axis for axis in _SHRINK_ORDER if degrees.get(axis, 0) > fewest[axis]]
            largest = max(above, key=lambda axis: degrees[axis])
            degrees[largest] = _next_smaller(degrees[largest], fewest[largest])
        yield degrees


def _next_smaller(degree: int, fewest: int) -> int:
    """Return the largest proper divisor of a degree that is at least `fewest`; `fewest` if there is
    none.
    """
    divisors = (d for d in range(fewest, degree) if degree % d == 0)
    return max(divisors, default=fewest)


def _with_policies(layout: Layout, degrees: Mapping[str, int]) -> Layout:
    """Return the layout with reduced degrees; policies of an axis that is left out get their
    defaults.
    """
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


def _small_train(
    model: ModelSpec, train: TrainSpec, layout: Layout, microbatches: int
) -> TrainSpec:
    """Return the training settings with short sequences and about `microbatches` microbatches per
    data rank.
    """
    count = _microbatches(layout, microbatches)
    update: dict[str, Any] = {
        "batch": layout.dp * layout.microbatch * count,
        "seq_len": round_up(_row(model, train, layout), 2 * layout.cp * layout.tp),
    }
    for key in TrainSpec.model_fields:
        if key not in ("batch", "seq_len") and why_not_proven(f"train.{key}") is not None:
            update[key] = TrainSpec.model_fields[key].default
    if train.clip_norm:
        update["clip_norm"] = TrainSpec.model_fields["clip_norm"].default
    if train.expert_capacity is not None:
        update["expert_capacity"] = min(train.expert_capacity, _CAPACITY)
    return train.model_copy(update=update)


def _row(model: ModelSpec, train: TrainSpec, layout: Layout) -> int:
    """Return a sequence length, in tokens, as short as possible such that the same attention kernel
    computes it as the config's.
    """
    asked, shortest = train.seq_len, _SHORT_ROW
    if asked > 2 * BLOCK:
        all_bounds = (ScoreBounds.of(model, kind).within(asked) for kind in model.layer_kinds)
        heads = model.n_heads, model.n_kv_heads
        is_own = all(by_blocks(*heads, asked, train.precision, bounds) for bounds in all_bounds)
        shortest = _OWN_ROW if is_own else _OTHER_ROW
    if layout.cp > 1 and layout.cp_kind == "ring" and asked >= 2 * layout.cp * _CHUNK:
        shortest = max(shortest, 2 * layout.cp * _CHUNK)
    return shortest


def _small_optimizer(spec: OptimizerSpec, steps: int, layers: int) -> OptimizerSpec:
    """Return the optimizer with a learning rate schedule of few steps that has the same phases.

    Learning rate, `eps` and decay get their defaults: a proof scales them to the gradients. Groups
    that match a layer beyond the `layers` of the small model match another layer instead.
    """
    plain = {name: OptimizerSpec.model_fields[name].default for name in ("lr", "eps")}
    if spec.weight_decay:
        plain["weight_decay"] = OptimizerSpec.model_fields["weight_decay"].default
    update: dict[str, Any] = {**plain, "warmup_steps": min(spec.warmup_steps, _WARMUP)}
    update["groups"] = tuple(_small_group(group, layers) for group in spec.groups)
    last = _STEPS
    if spec.schedule_steps is not None:
        last += (spec.schedule_steps > steps) - (spec.schedule_steps < steps)
        update["schedule_steps"] = last
    if spec.schedule == "wsd":
        falls = spec.decay_steps or max((spec.schedule_steps or steps) // 5, 1)
        update["decay_steps"] = min(falls, _DECAY)
    return spec.model_copy(update=update)


def _small_group(group: GroupSpec, layers: int) -> GroupSpec:
    match = re.sub(r"(?<=layers\.)\d+", lambda number: f"{int(number[0]) % layers}", group.match)
    return group.model_copy(update={"match": match})


def _microbatches(layout: Layout, asked: int) -> int:
    """Return a legal number of microbatches for the schedule: `asked`, or near two rounds of the
    pipeline.
    """
    if not layout.is_pipelined:
        return min(asked, _MOST_MICROBATCHES)
    limit = 2 * layout.stages
    tries: list[int] = [min(asked, limit), *range(limit, 0, -1)]
    stages = layout.schedule, layout.pp, layout.virtual_stages
    return next(n for n in tries if microbatch_rule(*stages, n) is None)


def _small_model(
    model: ModelSpec,
    layout: Layout,
    scaling: Callable[[int], RopeScaling | None],
    kinds: tuple[LayerSpec, ...],
    *,
    is_uneven: bool,
    without: int,
    pads: bool,
) -> ModelSpec:
    """Return a small model with the family and flags of a given one, of sizes that the layout
    divides.

    `without` is the number of pipeline stages that have no layer.
    """
    ranks_of_heads = layout.tp * (layout.cp if layout.cp_kind == "ulysses" else 1)
    kv_heads = round_up(min(model.n_kv_heads, 2), ranks_of_heads)
    if model.n_kv_heads >= 2 * kv_heads:
        kv_heads = max(kv_heads, 2 * ranks_of_heads)  # several on each rank, as there were
    group = min(model.n_heads // model.n_kv_heads, 4)
    # Of three layers of a stage, one has left and comes back while another goes back.
    per_stage = 3 if layout.offload == "activations" else 1
    minimum = max(2, per_stage * layout.stages + (is_uneven and layout.is_pipelined))
    if layout.is_pipelined and without:  # stages of the embedding or the head alone
        minimum = max(layout.stages - without, 1)
    repeated = len(kinds) + 1 if model.n_layers > len(kinds) > 1 else len(kinds)
    layers = max(repeated, minimum)
    # In four bits each rank of tp has whole blocks of a layer's inputs.
    block = NF4_BLOCK if model.lora is not None and model.lora.is_nf4 else 1
    dim = _small_dim(model, block)
    of_rank = group * kv_heads // layout.tp
    of_heads = [size for size in (8, 16, 32, 64, 128) if of_rank * size % block == 0]
    head_dim = _head_dim(model, of_heads)
    sizes: dict[str, Any] = {
        "preset": None,
        "init_from": None,
        **_small_vocabulary(model, layout, pads=pads),
        "context": _CONTEXT,
        "dim": dim,
        "n_layers": layers,
        "n_heads": group * kv_heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope_scaling": scaling(head_dim),
        "ffn_dim": round_up(2 * dim, layout.tp * block),
        "layer_pattern": kinds if model.layer_pattern else (),
        **_small_experts(model, layout),
        **_small_latent(model),
        **_small_delta(model, layout),
        **_small_mamba(model, layout),
        **FAMILIES[model.family].of_width(dim),
    }
    if model.attention_scale is not None:  # scores as large as they were
        scale = model.attention_scale * math.sqrt(model.head_dim / head_dim)
        sizes["attention_scale"] = scale
    return ModelSpec.model_validate_json(model.model_copy(update=sizes).model_dump_json())


def _small_vocabulary(model: ModelSpec, layout: Layout, *, pads: bool) -> dict[str, Any]:
    """Return the model keys of a small vocabulary; `pads` says whether padding rows follow it."""
    if not pads:
        return {"vocab_size": round_up(_VOCAB, layout.tp), OF_PADDING: None}
    multiple = VOCAB_MULTIPLE if model.pad_vocab_to_multiple_of else None
    return {"vocab_size": _PADDED_VOCAB, OF_PADDING: multiple}


def _small_dim(model: ModelSpec, block: int) -> int:
    """Return a small model width, a multiple of `block`.

    If the family derives a factor from the width, it is one whose square root is not exact.
    """
    if not FAMILIES[model.family].of_width(model.dim):
        return _DIM
    return _ROOTED_DIM if block == 1 else _ROOTED_DIM_OF_BLOCKS


def _small_experts(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Return the model keys of few small experts that the layout divides; empty for a dense model.

    As in the given model, routers select some of the experts, from some of the groups; each group
    has more experts than the two that its score counts.
    """
    if not model.experts:
        return {}
    groups, top_groups = _small_groups(model)
    per_group = 4 if groups > 1 else _EXPERTS
    limit = max(per_group * groups, 2 * layout.ep)
    count = round_up(min(model.experts, limit), math.lcm(layout.ep, groups))
    selectable = count * top_groups // groups
    top_k = min(model.top_k, _TOP_K, selectable - 1)
    if model.top_k == model.experts * model.top_groups // model.expert_groups:
        top_k = selectable
    width = None if model.expert_ffn_dim is None else round_up(_DIM, layout.tp)
    return {
        "experts": count,
        "top_k": max(top_k, 1),
        "expert_groups": groups,
        "top_groups": top_groups,
        "dense_layers": min(model.dense_layers, 0 if model.layer_pattern else 1),
        "expert_ffn_dim": width,
        "shared_ffn_dim": round_up(_DIM, layout.tp) if model.shared_ffn_dim else 0,
    }


def _small_groups(model: ModelSpec) -> tuple[int, int]:
    """Return the number of expert groups, and how many of them a token's experts come from."""
    groups, top_groups = model.expert_groups, model.top_groups
    if groups == 1:
        return 1, 1
    if top_groups == groups:
        return 2, 2
    return (2, 1) if top_groups == 1 else (min(groups, 4), 2)


def _small_latent(model: ModelSpec) -> dict[str, Any]:
    """Return the model keys of small latent attention; empty for a model without it."""
    if not model.is_latent:
        return {}
    rotated = 8 if model.qk_rope_head_dim == model.qk_nope_head_dim else 4
    return {
        "q_lora_rank": min(model.q_lora_rank, 24),
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16 - rotated,
        "qk_rope_head_dim": rotated,
        "head_dim": 16,
        "v_head_dim": 12 if model.v_head_dim < model.head_dim else 20,
        "rope_scaling": model.rope_scaling,
    }


def _small_delta(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Return the model keys of few small Gated DeltaNet heads, of odd dims; empty for a model
    without them.
    """
    if not model.has_delta:
        return {}
    key_heads = round_up(min(model.delta_key_heads, 2), layout.tp)
    if model.delta_key_heads >= 2 * key_heads:
        key_heads = max(key_heads, 2 * layout.tp)  # several on each rank, as there were
    shared = min(model.delta_heads // model.delta_key_heads, 3)
    return {
        "delta_key_heads": key_heads,
        "delta_heads": shared * key_heads,
        "delta_key_dim": 7,
        "delta_value_dim": 9,
        "delta_kernel": min(model.delta_kernel, 4),
    }


def _small_mamba(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Return the model keys of few small Mamba-2 heads, of odd dims; empty for a model without
    them.
    """
    if not model.has_mamba:
        return {}
    groups = math.gcd(model.mamba_groups, 2 * layout.tp)
    if groups % layout.tp and layout.tp % groups:
        groups = math.gcd(model.mamba_groups, layout.tp)
    shared = min(model.mamba_heads // model.mamba_groups, 2)
    heads = math.lcm(shared * groups, layout.tp)
    if model.mamba_heads > layout.tp:
        heads = max(heads, 2 * layout.tp)  # several on each rank, as there were
    return {
        "mamba_heads": heads,
        "mamba_head_dim": 9,
        "mamba_groups": groups,
        "mamba_state": 7,
        "mamba_kernel": min(model.mamba_kernel, 4),
    }


def _small_kinds(model: ModelSpec, train: TrainSpec, small: TrainSpec) -> tuple[LayerSpec, ...]:
    """Return the model's kinds of layers, one each, with windows that hide the same share of the
    short sequences.
    """
    kinds = []
    for kind in model.layer_kinds:
        window = kind.window
        if window is not None and window < train.seq_len:
            shortest = _WINDOW if window > BLOCK and train.seq_len > 2 * BLOCK else 2
            window = max(shortest, window * small.seq_len // train.seq_len)
        kinds.append(kind.model_copy(update={"window": window}))
    return tuple(kinds)


def _small_scaling(
    model: ModelSpec, train: TrainSpec, small: TrainSpec, head_dim: int
) -> RopeScaling | None:
    """Return the RoPE scaling for small heads and short sequences; with longrope, sequences stay on
    the same side of the original context.
    """
    scaling, pairs = model.rope_scaling, int(head_dim * model.rotary_pct) // 2
    if scaling is None or scaling.kind != "longrope" or pairs == 0:
        return scaling
    original = scaling.original_context
    is_long, length = train.seq_len > original, small.seq_len
    update: dict[str, Any] = {
        "original_context": min(original, length // 4) if is_long else max(original, length)
    }
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        update[name] = tuple(factors[pair * len(factors) // pairs] for pair in range(pairs))
    return scaling.model_copy(update=update)


def _head_dim(model: ModelSpec, sizes: Sequence[int]) -> int:
    """Return the first of `sizes` of which an even number of dims is rotated, and none only if the
    model rotates none.
    """
    for size in sizes:
        rotated = int(size * model.rotary_pct)
        if rotated % 2 == 0 and (rotated > 0) == (model.rotary_dim > 0):
            return size
    return model.head_dim
