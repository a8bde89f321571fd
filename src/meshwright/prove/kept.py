"""Which properties of a config its small proof must keep, and which config keys no proof depends
on. No torch.

Making a model small must not remove what is to be proven: if every expert is selected, no fault of
the selection shows. `PROPERTIES` lists what a config may have; `not_kept` returns what a small case
has lost. `NOT_PROVEN` has the keys whose values change no small case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from meshwright.program.attention import BLOCK, ScoreBounds, by_blocks
from meshwright.prove.case import Case
from meshwright.spec.groups import empty_group
from meshwright.spec.loading import Config
from meshwright.spec.model import ModelSpec, padded
from meshwright.spec.parts import parts

Property = Callable[[Case], bool]
# More bits than this, and bf16 rounds a factor.
_BF16_BITS: Final = 8
# More layers than any pattern and dense layers have.
_MOST: Final = 256


def _heads_of_rank(case: Case) -> int:
    layout = case.layout
    ranks = layout.tp * (layout.cp if layout.cp_kind == "ulysses" else 1)
    return case.model.n_kv_heads // ranks


def _windows(case: Case) -> Iterator[int]:
    """Yield the attention windows that are shorter than the sequence, one per kind of layer."""
    for kind in case.model.layer_kinds:
        if kind.window is not None and kind.window < case.train.seq_len:
            yield kind.window


def _chunk(case: Case) -> int:
    """Return the tokens of a chunk in ring attention; 0 without a ring."""
    layout = case.layout
    is_ring = layout.cp > 1 and layout.cp_kind == "ring"
    return case.train.seq_len // (2 * layout.cp) if is_ring else 0


def _kernels(case: Case) -> set[bool]:
    """Return, over the kinds of layers, whether a CPU computes attention by blocks (True) or by
    PyTorch's kernel (False).

    Empty with ring attention, which has its own kernel.
    """
    if _chunk(case):
        return set()
    model, length = case.model, case.train.seq_len
    heads = model.n_heads, model.n_kv_heads
    all_bounds = (ScoreBounds.of(model, kind).within(length) for kind in model.layer_kinds)
    return {by_blocks(*heads, length, case.train.precision, bounds) for bounds in all_bounds}


def _of_experts(model: ModelSpec) -> int:
    """Return the number of layers with experts; layers after the first `_MOST` do not count."""
    layers = range(min(model.n_layers, _MOST))
    return sum(model.has_experts(model.layer(index)) for index in layers)


def _of_group(model: ModelSpec) -> int:
    return model.experts // model.expert_groups


def _is_full(case: Case) -> bool:
    """Whether more tokens of a sequence may select an expert than it has capacity for."""
    capacity, model = case.train.expert_capacity, case.model
    return capacity is not None and capacity * model.top_k < model.experts


def _last(case: Case) -> int:
    return case.optimizer.schedule_steps or case.steps


def _falls(case: Case) -> int:
    """Return the number of steps over which the learning rate falls."""
    spec, last = case.optimizer, _last(case)
    if spec.schedule == "constant" or spec.min_lr_ratio == 1:
        return 0
    if spec.schedule == "wsd":
        return spec.decay_steps or max(last // 5, 1)
    return last - spec.warmup_steps


def _period(model: ModelSpec) -> int:
    return max(len(model.layer_pattern), 1)


# What a case of a config may have, and its small cases must then have, too.
PROPERTIES: Final[Mapping[str, Property]] = {
    "routers select some of the experts": lambda c: 0 < c.model.top_k < c.model.experts,
    "a token has several experts": lambda c: c.model.top_k > 1,
    "several experts on each rank": lambda c: c.layout.ep > 1 and c.model.experts > c.layout.ep,
    "several layers of experts": lambda c: _of_experts(c.model) > 1,
    "layers without experts beside them": lambda c: c.model.experts > 0 and c.model.has_dense,
    "some groups of experts are selected": lambda c: c.model.top_groups < c.model.expert_groups,
    "several groups are selected": lambda c: c.model.top_groups > 1,
    "a group's score leaves out some of its experts": (
        lambda c: c.model.expert_groups > 1 and _of_group(c.model) > 2
    ),
    "some experts of the selected groups": (
        lambda c: (
            c.model.expert_groups > 1 and c.model.top_k < _of_group(c.model) * c.model.top_groups
        )
    ),
    "experts that may be full": _is_full,
    "rows of padding after the vocabulary": (
        lambda c: padded(c.model, c.layout.tp).vocab_rows > c.model.vocab_size
    ),
    "several heads of keys on each rank": lambda c: _heads_of_rank(c) > 1,
    "queries that share keys": lambda c: c.model.n_heads > c.model.n_kv_heads,
    "values that share a recurrence's keys": (
        lambda c: c.model.has_delta and c.model.delta_heads > c.model.delta_key_heads
    ),
    "several heads of a recurrence's keys on each rank": (
        lambda c: c.model.has_delta and c.model.delta_key_heads > c.layout.tp
    ),
    "heads that share a recurrence's group": (
        lambda c: c.model.has_mamba and c.model.mamba_heads > c.model.mamba_groups
    ),
    "several groups of a recurrence's heads": (
        lambda c: c.model.has_mamba and c.model.mamba_groups > 1
    ),
    "a group of heads on several ranks": (
        lambda c: c.model.has_mamba and c.model.mamba_groups % c.layout.tp != 0
    ),
    "several heads of a recurrence on each rank": (
        lambda c: c.model.has_mamba and c.model.mamba_heads > c.layout.tp
    ),
    "heads that rotate in part": lambda c: 0 < c.model.rotary_dim < c.model.head_dim,
    "rotated dims of another number than the others": (
        lambda c: c.model.is_latent and c.model.qk_rope_head_dim != c.model.qk_nope_head_dim
    ),
    "values of fewer dims than keys": lambda c: c.model.value_dim < c.model.head_dim,
    "windows that hide keys": lambda c: any(_windows(c)),
    "windows beyond a block of keys": (
        lambda c: c.train.seq_len > 2 * BLOCK and any(window > BLOCK for window in _windows(c))
    ),
    "layers of several kinds": lambda c: len(c.model.layer_kinds) > 1,
    "layers of each kind": lambda c: c.model.n_layers >= len(c.model.layer_kinds),
    "a pattern of layers that repeats": (
        lambda c: _period(c.model) > 1 and c.model.n_layers > _period(c.model)
    ),
    "stages of different sizes": (
        lambda c: c.layout.is_pipelined and c.model.n_layers % c.layout.stages > 0
    ),
    "stages without layers": (
        lambda c: c.layout.is_pipelined and c.model.n_layers < c.layout.stages
    ),
    "several blocks of attention in a row": lambda c: c.train.seq_len > 2 * BLOCK,
    "a CPU's own attention": lambda c: True in _kernels(c),
    "PyTorch's attention": lambda c: False in _kernels(c),
    "chunks of a ring of several blocks": lambda c: _chunk(c) > BLOCK,
    "a factor of embeddings that bf16 rounds": lambda c: _is_rounded(c.model.embedding_scale),
    "several sequences in a microbatch": lambda c: c.layout.microbatch > 1,
    "several microbatches": lambda c: c.layout.microbatches(c.train.batch) > 1,
    "more than two microbatches": lambda c: c.layout.microbatches(c.train.batch) > 2,
    "clipping": lambda c: c.train.clip_norm > 0,
    "momentum": lambda c: c.optimizer.name == "sgd" and c.optimizer.momentum > 0,
    "weight decay": lambda c: c.optimizer.weight_decay > 0,
    "parameters in each group of the optimizer": (
        lambda c: len(c.optimizer.groups) > 0 and _has_all_groups(c)
    ),
    "a warm-up of several steps": lambda c: c.optimizer.warmup_steps > 1,
    "steps after the warm-up": lambda c: c.steps > c.optimizer.warmup_steps + 1,
    "a rate that falls over several steps": lambda c: _falls(c) > 1,
    "steps at the highest rate before it falls": (
        lambda c: c.optimizer.schedule == "wsd" and _last(c) - _falls(c) > c.optimizer.warmup_steps
    ),
    "steps after the schedule": lambda c: c.steps > _last(c),
    "a schedule that goes on after the last step": lambda c: c.steps < _last(c),
}


def _has_all_groups(case: Case) -> bool:
    names = [part.name for part in parts(case.model) if part.trained]
    return empty_group(case.optimizer.groups, names) is None


def _is_rounded(factor: float) -> bool:
    mantissa, _ = math.frexp(factor)
    return not (mantissa * 2**_BF16_BITS).is_integer()


def not_kept(asked: Case, small: Case) -> list[str]:
    """Return the names of `PROPERTIES` that the config's case has and its small case lacks.

    Properties of an axis that the small case leaves out do not count: another small case has that
    axis.
    """
    layout = asked.layout
    gone = {
        axis: 1
        for axis in ("pp", "cp", "tp", "ep")
        if getattr(small.layout, axis) == 1 < getattr(layout, axis)
    }
    if gone:
        update: dict[str, Any] = {**gone, "etp": None}
        if "cp" in gone:
            update["cp_kind"] = "ring"
        asked = replace(asked, layout=layout.model_copy(update=update))
    return [name for name, has in PROPERTIES.items() if has(asked) and not has(small)]


_SIZES: Final = "small sizes take their place"
_DATA: Final = "the tokens of a proof are random"
_MACHINE: Final = "a proof runs on local ranks"
_RECORDS: Final = "a proof writes no records"
_SAVED: Final = "steps are saved and restored by `prove --resume`"
_NO_RUN: Final = "a proof takes a few steps, and evaluates after the last"
# The keys whose values change nothing in a proof, and why; a section stands for its other keys.
NOT_PROVEN: Final[Mapping[str, str]] = {
    "model.vocab_size": _SIZES,
    "model.dim": _SIZES,
    "model.head_dim": _SIZES,
    "model.ffn_dim": _SIZES,
    "model.expert_ffn_dim": _SIZES,
    **dict.fromkeys(("model.delta_key_dim", "model.delta_value_dim"), _SIZES),
    **dict.fromkeys(("model.mamba_head_dim", "model.mamba_state"), _SIZES),
    "model.context": "no step of training depends on it",
    "model.init_from": "weights of a proof are random",
    "model.planned": "a model that is planned only is not trained",
    "lora.init_from": "weights of a proof are random",
    "data": _DATA,
    "train.loss_scale": "fp16 is proven with a constant scale",
    "train.nonfinite": "no gradient of a proof overflows",
    "train.engine": "a proof runs the native engine",
    "train.imbalance": "it is for predictions alone",
    "train.routing": "only learned routing can be proven",
    **dict.fromkeys(("train.log_every", "train.check_every"), _RECORDS),
    "train.epochs": "it sets train.steps, which a proof takes",
    **dict.fromkeys(("train.eval_every", "train.eval_batches", "train.stop_after_evals"), _NO_RUN),
    "optimizer.eps": "one as large as the gradients takes its place, so that their size shows",
    "layout.auto": "the layout that it chooses is proven",
    "cluster": _MACHINE,
    "checkpoint": _SAVED,
    "log": _RECORDS,
}
# The origin of a value that a file or the command line gives.
_STATED: Final = re.compile(r"^override |:\d+$")
# Keys of such sections that do change a proof.
PROVEN: Final = frozenset(
    {"data.packing", "data.format", "cluster.nodes", "cluster.devices_per_node"}
)


def why_not_proven(key: str) -> str | None:
    """Return the reason why no proof depends on a config key ("section.key"); None if proofs do."""
    if key in PROVEN:
        return None
    return NOT_PROVEN.get(key) or NOT_PROVEN.get(key.partition(".")[0])


def not_proven(config: Config) -> dict[str, str]:
    """Return the keys that a config sets explicitly and no proof depends on, each with the
    reason.
    """
    stated = (key for key, origin in config.origins.items() if _STATED.search(origin))
    reasons = ((key, why_not_proven(key)) for key in stated)
    return {key: reason for key, reason in reasons if reason is not None}
