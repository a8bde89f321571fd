"""The rules that a legal layout obeys, and the nearest legal layouts to one that breaks a rule.

A rule is a small function that returns the broken rule as a sentence, or None. Its row in `RULES`
names the keys that a user may change to obey it; `NUMBERS` and `CHOICES` have the values to try for
each key. One search serves all rules: it changes a key of the first broken rule, then one of the
rule that this breaks, and checks each result against all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from meshwright.layout.layout import Layout
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.spec.kinds import LARGEST
from meshwright.spec.lora import NF4_BLOCK, Base
from meshwright.spec.model import ModelSpec
from meshwright.spec.training import ContextKind, Master, Offload, Schedule, TrainSpec, Zero


@lru_cache(maxsize=256)
def divisors(value: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order; above 2^32, only those up to 2^16 and
    their cofactors."""
    small = [d for d in range(1, min(math.isqrt(value), 1 << 16) + 1) if value % d == 0]
    return tuple(sorted({*small, *(value // d for d in small)}))


def _tensor_sizes(model: ModelSpec) -> int:
    """Return the greatest common divisor of the model sizes that tp splits."""
    widths = (model.ffn_dim, model.expert_width, model.shared_ffn_dim)
    return math.gcd(model.n_heads, model.n_kv_heads, *widths, *_mixer_heads(model))


def _mixer_heads(model: ModelSpec) -> Iterator[int]:
    """Yield the numbers of heads of recurrent layers, and of the mixers of models that can only be
    planned."""
    if model.has_delta:
        yield model.delta_key_heads
    if model.has_mamba:
        yield model.mamba_heads
    if model.planned is not None:
        mixers = (kind.mixer for kind in model.layer_kinds)
        yield from (mixer.heads for mixer in mixers if mixer is not None and mixer.matrices)


def _up_to(top: int, near: int) -> Iterable[int]:
    """Return the numbers from 1 to `top` that are within 64 of `near`, and 1."""
    near = min(near, max(top, 1))
    return (1, *range(max(1, near - 64), min(top, near + 64) + 1))


def _multiples(near: int, *units: int) -> Iterator[int]:
    for unit in units:
        for factor in range(-1, 3):
            yield (near // unit + factor) * unit


def _batches(model: ModelSpec, train: TrainSpec, layout: Layout) -> Iterable[int]:
    one_each = layout.dp * layout.microbatch
    # A schedule wants a number of microbatches, often of a multiple of the pipeline's ranks.
    filled = one_each * layout.pp
    return _multiples(train.batch, layout.dp, one_each, filled, 2 * filled)


def _seq_lens(model: ModelSpec, train: TrainSpec, layout: Layout) -> Iterable[int]:
    cp, tp = layout.cp, layout.tp
    return _multiples(train.seq_len, cp, 2 * cp, cp * tp, cp * math.lcm(2, tp))


def most_stages(layers: int) -> int:
    """Return the most pipeline stages for `layers` layers: embedding and head may each have their
    own."""
    return layers + 2


NUMBERS: Mapping[str, Callable[[ModelSpec, TrainSpec, Layout], Iterable[int]]] = {
    "layout.tp": lambda model, train, layout: divisors(_tensor_sizes(model)),
    "layout.cp": lambda model, train, layout: divisors(train.seq_len),
    "layout.ep": lambda model, train, layout: divisors(
        math.gcd(model.experts or 1, layout.alike_ranks * layout.folds)
    ),
    "layout.etp": lambda model, train, layout: (1, layout.tp),
    "layout.pp": lambda model, train, layout: _up_to(
        most_stages(model.n_layers) // layout.virtual_stages, layout.pp
    ),
    "layout.virtual_stages": lambda model, train, layout: _up_to(
        most_stages(model.n_layers) // layout.pp, layout.virtual_stages
    ),
    "layout.dp_replicate": lambda model, train, layout: divisors(train.batch),
    "layout.dp_shard": lambda model, train, layout: divisors(train.batch),
    "layout.microbatch": lambda model, train, layout: divisors(max(train.batch // layout.dp, 1)),
    "train.batch": _batches,
    "train.seq_len": _seq_lens,
}

# The values to try for keys whose values are not numbers, or for which only the default is legal.
CHOICES: Mapping[str, tuple[object, ...]] = {
    "layout.zero": get_args(Zero),
    "layout.cp_kind": get_args(ContextKind),
    "layout.schedule": get_args(Schedule),
    "layout.offload": get_args(Offload),
    "layout.sp": (False, True),
    **dict.fromkeys(("train.fp8", "train.async_tp"), (False, True)),
    "train.master": get_args(Master),
    "lora.base": get_args(Base),
    "train.precision": ("bf16",),  # which fp8 needs, and weights without masters
    "train.router_aux_loss": (0.0,),
    "train.router_z_loss": (0.0,),
    "train.router_bias_rate": (0.0,),
    "train.expert_capacity": (None,),
    "train.routing": ("learned",),
    "train.imbalance": (1.0,),
}


_WHY = "(lora.base = nf4)"


def nf4_rule(model: ModelSpec, layout: Layout) -> str | None:
    """Return the rule of NF4 weights that a layout breaks, or None.

    NF4 blocks lie along the inputs of a linear layer, which tp splits for the row-parallel ones.
    """
    if model.lora is None or model.lora.base != "nf4":
        return None
    if model.experts:
        return f"model.experts = {model.experts} are not kept in four bits {_WHY}"
    if model.is_latent:
        return f"latent attention (model.kv_lora_rank) is not kept in four bits {_WHY}"
    if layout.offload == "params":
        return f"layout.offload = params cuts frozen weights, which four bits keep whole {_WHY}"
    if layout.zero == 3:
        return f"layout.zero = 3 cuts frozen weights, which four bits keep whole {_WHY}"
    values = model.n_heads * model.value_dim
    for name, inputs in (
        ("model.dim", model.dim),
        (f"model.n_heads x model.head_dim / layout.tp = {layout.tp}:", values // layout.tp),
        (f"model.ffn_dim / layout.tp = {layout.tp}:", model.ffn_dim // layout.tp),
    ):
        if inputs % NF4_BLOCK:
            term = f"{name} {inputs}" if name.endswith(":") else f"{name} = {inputs}"
            return f"{term} must be a multiple of {NF4_BLOCK} {_WHY}"
    return None


# What a config may ask of routers, and the kinds of scores that it works with.
ROUTERS = {
    "router_aux_loss": ("softmax", "sigmoid"),
    "router_z_loss": ("softmax",),
    "router_bias_rate": ("sigmoid",),
    "expert_capacity": ("softmax", "sigmoid"),
    "routing": ("softmax", "sigmoid"),
    "imbalance": ("softmax", "sigmoid"),
}
_ASKED = attrgetter("router_aux_loss", "router_z_loss", "router_bias_rate", "expert_capacity")


def router_rule(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Return the rule on routers of experts that a config breaks, or None."""
    if not any(_ASKED(train)) and train.routing == "learned" and train.imbalance in (None, 1):
        return None  # soon: the planner asks for thousands of layouts
    for key, scores in ROUTERS.items():
        value = getattr(train, key)
        if value in (None, 0, "learned") or (key == "imbalance" and value == 1):
            continue
        if not model.experts:
            return f"train.{key} = {value} is of models with experts, but model.experts = 0"
        if model.router_scores not in scores:
            return (
                f"train.{key} = {value} is of routers with a {scores[0]}, but "
                f"model.router_scores = {model.router_scores}"
            )
    if train.routing == "balanced" and (train.imbalance or 1) > 1:
        return (
            f'train.routing = "{train.routing}" gives every rank as many tokens, but '
            f"train.imbalance = {train.imbalance}"
        )
    if train.router_bias_rate and model.lora is not None:
        return (
            f"train.router_bias_rate = {train.router_bias_rate} changes a buffer, which adapters "
            f"do not store, but lora.rank = {model.lora.rank}"
        )
    return None


Check = Callable[[ModelSpec, TrainSpec, Layout], str | None]
# Fills in again what a user left out, after the given keys were changed; None: no room for it.
Settle = Callable[[TrainSpec, Layout, Collection[str]], Layout | None]


class Rule(NamedTuple):
    """A rule, and the config keys to change if it is broken, in the order to try them."""

    check: Check
    keys: tuple[str, ...]


def broken(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Return the first rule that a layout breaks, as a sentence with its numbers, or None."""
    for rule in RULES:
        text = rule.check(model, train, layout)
        if text is not None:
            return text
    return None


# A planner asks for thousands of layouts: a rule that is obeyed must cost a fraction of a
# microsecond, so it compares before it words anything.
def _divides(name: str, value: int, dividend_name: str, dividend: int) -> str:
    return f"{name} = {value} must divide {dividend_name} = {dividend}"


def _cut_over_tp(size: str) -> Check:
    """Return a rule that tp must divide the model size named `size`."""

    def check(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        if (getattr(model, size) or 0) % layout.tp == 0:
            return None
        return _divides("layout.tp", layout.tp, f"model.{size}", getattr(model, size))

    return check


def _heads(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Return a sentence unless tp divides the numbers of query and of key/value heads."""
    if model.n_heads % layout.tp == 0:
        return None
    rule = _divides("layout.tp", layout.tp, "model.n_heads", model.n_heads)
    if model.n_kv_heads != model.n_heads and model.n_kv_heads % layout.tp:
        rule += f" and model.n_kv_heads = {model.n_kv_heads}"
    return rule


def _mixers(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Return a sentence unless tp divides the heads of recurrent mixers, and those that can only be
    planned have no context parallelism."""
    if model.planned is None:
        return _recurrence(model, layout) if model.delta_heads or model.mamba_heads else None
    for heads in _mixer_heads(model):
        if heads % layout.tp:
            name = f"the heads of {model.planned.model_type}'s mixers"
            return _divides("layout.tp", layout.tp, name, heads)
        if layout.cp > 1:
            name = model.planned.model_type
            return f"layout.cp = {layout.cp} is not planned for the mixers of {name}"
    return None


def _recurrence(model: ModelSpec, layout: Layout) -> str | None:
    """Return the rule of recurrent layers that a layout breaks, or None."""
    if not model.recurs:
        return None
    if model.has_delta and model.delta_key_heads % layout.tp:
        return _divides("layout.tp", layout.tp, "model.delta_key_heads", model.delta_key_heads)
    if model.has_mamba and model.mamba_heads % layout.tp:
        return _divides("layout.tp", layout.tp, "model.mamba_heads", model.mamba_heads)
    if model.has_mamba and model.mamba_groups % layout.tp and layout.tp % model.mamba_groups:
        rule = f"layout.tp = {layout.tp} gives ranks parts of several groups of heads: it must "
        rule += f"divide model.mamba_groups = {model.mamba_groups}, or be a multiple"
        return rule
    return None


def _recurrent(model: ModelSpec) -> str:
    """Return the name of a model's recurrent layers."""
    return "Gated DeltaNet" if model.has_delta else "Mamba-2"


def _stages(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    stages = layout.pp * layout.virtual_stages
    if stages <= most_stages(model.n_layers):
        return None
    return (
        f"layout.pp = {layout.pp} x layout.virtual_stages = {layout.virtual_stages} gives "
        f"{stages} stages, more than model.n_layers = {model.n_layers}, the embedding and the head"
    )


def _virtual_stages(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if layout.pp > 1 or layout.virtual_stages == 1:
        return None
    return f"layout.virtual_stages = {layout.virtual_stages} needs a pipeline, but layout.pp = 1"


def _batch(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if train.batch % layout.dp == 0:
        return None
    return (
        f"train.batch = {train.batch} must be a multiple of the data-parallel degree {layout.dp} "
        f"(dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard})"
    )


def _microbatch(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    local = train.batch // layout.dp
    if local % layout.microbatch == 0:
        return None
    return _divides("layout.microbatch", layout.microbatch, "train.batch per data rank", local)


def _experts(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if layout.ep == 1 and layout.etp is None:
        return None
    if layout.ep > 1 and not model.experts:
        return f"layout.ep = {layout.ep} divides experts over ranks, but model.experts = 0"
    if layout.expert_tp != layout.tp:
        rule = _whole_experts(layout)
        if rule is not None:
            return rule
    if layout.ep > 1 and model.experts % layout.ep:
        return _divides("layout.ep", layout.ep, "model.experts", model.experts)
    if layout.alike_ranks % layout.expert_data == 0:
        return None
    axes = "dp_shard x cp" if layout.zero else "dp_replicate x cp"
    if layout.folds > 1:
        ranks = f"the {axes} x tp ranks of a stage"
        return _divides("layout.ep", layout.ep, ranks, layout.alike_ranks * layout.tp)
    ranks = f"the {axes} ranks with the same weights"
    return _divides("layout.ep", layout.ep, ranks, layout.alike_ranks)


def _whole_experts(layout: Layout) -> str | None:
    """Return a sentence unless all tp ranks split experts, or none does, with sp and `ep` a
    multiple of tp."""
    if layout.expert_tp > 1:
        return f"layout.etp = {layout.etp} must be 1 or layout.tp = {layout.tp}"
    if not layout.sp:
        return "layout.etp = 1 requires layout.sp = true"
    if layout.ep % layout.tp == 0:
        return None
    return f"layout.ep = {layout.ep} must be a multiple of layout.tp = {layout.tp} (layout.etp = 1)"


def _expert_width(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if (model.expert_ffn_dim or 0) % layout.tp == 0 or layout.etp == 1:
        return None
    return _divides("layout.tp", layout.tp, "model.expert_ffn_dim", model.expert_ffn_dim or 0)


def _shards(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if layout.zero or layout.dp_shard == 1:
        return None
    return f"layout.dp_shard = {layout.dp_shard} requires layout.zero = 1, 2 or 3, but it is 0"


def _offload(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if layout.offload == "params" and not layout.zero:
        return "layout.offload = params requires layout.zero = 1, 2 or 3, but it is 0"
    if layout.offload == "activations" and layout.pp == 1 and model.n_layers < 3:
        return (
            "layout.offload = activations leaves those of two layers on the device, but "
            f"model.n_layers = {model.n_layers}"
        )
    return None


def _sequence(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    cp, seq_len = layout.cp, train.seq_len
    if cp > 1:
        if layout.cp_kind == "ring" and seq_len % (2 * cp):
            return (
                f"train.seq_len = {seq_len} must be a multiple of {2 * cp} = 2 x layout.cp "
                f"(layout.cp_kind = ring gives each rank two chunks)"
            )
        if seq_len % cp:
            return f"train.seq_len = {seq_len} must be a multiple of layout.cp = {cp}"
    if layout.sp and seq_len // cp % layout.tp:
        return (
            f"train.seq_len / layout.cp = {seq_len // cp} must be a multiple of "
            f"layout.tp = {layout.tp} (layout.sp = true)"
        )
    return None


def _ulysses(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if layout.cp == 1 or layout.cp_kind != "ulysses":
        return None
    degrees = layout.tp * layout.cp
    if model.n_kv_heads % degrees == 0:
        return None
    return (
        f"layout.tp = {layout.tp} x layout.cp = {layout.cp} gives {degrees}, which must divide "
        f"model.n_kv_heads = {model.n_kv_heads} (layout.cp_kind = ulysses)"
    )


def _fp8(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Return the rule of float8 matmuls that a config breaks, or None: dims must be multiples of
    16."""
    if not train.fp8:
        return None
    if train.precision != "bf16":
        return f"train.fp8 = true requires train.precision = bf16, but it is {train.precision}"
    if model.lora is not None:
        return f"train.fp8 = true has no adapters, but lora.rank = {model.lora.rank}"
    if model.experts:
        return f"train.fp8 = true has no expert matmuls, but model.experts = {model.experts}"
    if model.recurs:
        key = "model.delta_heads" if model.has_delta else "model.mamba_heads"
        heads = model.delta_heads if model.has_delta else model.mamba_heads
        return f"train.fp8 = true has no {_recurrent(model)}, but {key} = {heads}"
    if layout.tp > 1:
        return f"layout.tp = {layout.tp} cuts linear layers, which train.fp8 = true needs whole"
    if layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward:
        return f"layout.schedule = {layout.schedule} defers matmuls; train.fp8 = true does not"
    for name, size in (
        ("model.dim", model.dim),
        ("model.ffn_dim", model.ffn_dim),
        ("model.n_kv_heads x model.head_dim", model.n_kv_heads * model.head_dim),
        ("tokens of a microbatch", layout.microbatch * train.seq_len // layout.cp),
    ):
        if size % 16:
            return f"{name} = {size} must be a multiple of 16 (train.fp8 = true)"
    return None


def _master(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Weights without fp32 masters are bf16, which has the range of fp32."""
    if train.master == "fp32":
        return None
    if train.precision != "bf16":
        return f"train.master = none requires train.precision = bf16, but it is {train.precision}"
    if model.lora is not None:
        rank = model.lora.rank
        return f"train.master = none is for all weights, but adapters are few: lora.rank = {rank}"
    if train.fp8:
        return "train.master = none has bf16 weights, of which train.fp8 = true gathers no float8"
    return None


def _async_tp(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    """Return a sentence if async TP is on without sequence parallelism, whose collectives it
    overlaps."""
    if not train.async_tp or (layout.tp > 1 and layout.sp):
        return None
    return "train.async_tp = true is for sequence parallelism: layout.sp = true, layout.tp above 1"


def _nf4(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    return nf4_rule(model, layout)


def _schedule(model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
    if layout.pp == 1:
        return None
    count = layout.microbatches(train.batch)
    return microbatch_rule(layout.schedule, layout.pp, layout.virtual_stages, count)


RULES = (
    Rule(_heads, ("layout.tp",)),
    *(Rule(_cut_over_tp(size), ("layout.tp",)) for size in ("n_kv_heads", "ffn_dim")),
    Rule(_expert_width, ("layout.tp", "layout.etp")),
    Rule(_cut_over_tp("shared_ffn_dim"), ("layout.tp",)),
    Rule(_mixers, ("layout.tp", "layout.cp")),
    Rule(_experts, ("layout.ep", "layout.sp", "layout.etp")),
    Rule(_stages, ("layout.virtual_stages", "layout.pp")),
    Rule(_virtual_stages, ("layout.virtual_stages", "layout.pp")),
    Rule(_batch, ("train.batch", "layout.dp_replicate", "layout.dp_shard")),
    Rule(_microbatch, ("layout.microbatch",)),
    Rule(_shards, ("layout.zero", "layout.dp_shard")),
    Rule(_offload, ("layout.zero", "layout.offload")),
    Rule(_sequence, ("train.seq_len", "layout.cp_kind", "layout.sp", "layout.cp", "layout.tp")),
    Rule(
        _fp8, ("train.precision", "layout.tp", "layout.schedule", "layout.microbatch", "train.fp8")
    ),
    Rule(_master, ("train.precision", "train.fp8", "train.master")),
    Rule(_nf4, ("layout.tp", "layout.zero", "layout.offload", "lora.base")),
    Rule(_async_tp, ("layout.sp", "train.async_tp")),
    Rule(router_rule, tuple(f"train.{key}" for key in ROUTERS)),
    Rule(_ulysses, ("layout.cp_kind", "layout.cp", "layout.tp")),
    Rule(
        _schedule,
        (
            *("layout.microbatch", "layout.schedule", "layout.virtual_stages", "train.batch"),
            *("layout.pp", "layout.dp_replicate", "layout.dp_shard"),
        ),
    ),
)


class _Case(NamedTuple):
    """A model, its training and a layout: what rules check."""

    model: ModelSpec
    train: TrainSpec
    layout: Layout

    def with_value(self, key: str, value: object) -> _Case:
        """Return the case with the key `section.key` set to a value."""
        section, _, name = key.partition(".")
        if section == "lora":
            lora = self.model.lora and self.model.lora.model_copy(update={name: value})
            return self._replace(model=self.model.model_copy(update={"lora": lora}))
        changed: dict[str, Any] = {section: getattr(self, section).model_copy(update={name: value})}
        return self._replace(**changed)


class _Change(NamedTuple):
    """A new value for a key; `distance` is relative to the old one, `side` is whether a number
    grows, or the choice itself."""

    key: str
    value: object
    side: object
    distance: float


class _Repair(NamedTuple):
    """Changes that make a case legal, and the resulting case."""

    changes: tuple[_Change, ...]
    case: _Case

    @property
    def text(self) -> str:
        """The changes as a user writes them."""
        first, *further = map(self._word, self.changes)
        return f"{first} with {' and '.join(further)}" if further else first

    def _word(self, change: _Change) -> str:
        value = str(change.value).lower() if isinstance(change.value, bool) else change.value
        text = f"{change.key} = {value}"
        layout = self.case.layout
        if change.key == "layout.microbatch" and layout.pp > 1:
            text += f" ({layout.microbatches(self.case.train.batch)} microbatches)"
        return text


# How many keys to change at most, and how many values of each to try on either side. The second
# and third row are for layouts that break several rules; the width keeps them within a blink.
_SEARCHES = ((1, 32), (2, 8), (3, 4))


def nearest_legal(
    model: ModelSpec,
    train: TrainSpec,
    layout: Layout,
    count: int = 3,
    *,
    settle: Settle | None = None,
) -> list[str]:
    """Return up to `count` changes that make a layout legal, such as `layout.tp = 2`, best first.

    Changes as few keys as possible. For a number, gives the nearest value on each side; changes
    that keep the number of ranks come first, and the keys alternate. `settle`, if given, completes
    each candidate before it is checked. A legal layout gives [].
    """
    case = _Case(model, train, layout)
    if broken(*case) is None:
        return []
    for depth, width in _SEARCHES:
        repairs = _best_of_each_kind(_repairs(case, (), depth, width, settle))
        if repairs:
            break
    seen: Counter[tuple[bool, tuple[str, ...]]] = Counter()
    ranking: dict[str, tuple[bool, int]] = {}
    for repair in repairs:
        moves = repair.case.layout.world != layout.world
        kind = (moves, tuple(change.key for change in repair.changes))
        ranking.setdefault(repair.text, (moves, seen[kind]))
        seen[kind] += 1
    return sorted(ranking, key=ranking.__getitem__)[:count]


def _best_of_each_kind(repairs: Iterable[_Repair]) -> list[_Repair]:
    """Return the nearest repair for each set of keys and directions, grouped by the keys."""
    kinds: dict[tuple[str, ...], dict[frozenset[object], _Repair]] = {}
    for repair in repairs:
        kind = kinds.setdefault(tuple(sorted(change.key for change in repair.changes)), {})
        slot = frozenset((change.key, change.side) for change in repair.changes)
        if slot not in kind or _distance(repair) < _distance(kind[slot]):
            kind[slot] = repair
    return [repair for kind in kinds.values() for repair in sorted(kind.values(), key=_distance)]


def _distance(repair: _Repair) -> float:
    return sum(change.distance for change in repair.changes)


def _repairs(
    case: _Case, changes: tuple[_Change, ...], depth: int, width: int, settle: Settle | None
) -> Iterator[_Repair]:
    """Yield the legal cases that at most `depth` changes reach, each of a key of the first broken
    rule.

    `width` is how many values of a key to try on each side; `settle` completes each candidate.
    """
    rule = next((rule for rule in RULES if rule.check(*case) is not None), None)
    if rule is None:
        yield _Repair(changes, case)
        return
    if depth == 0:
        return
    done = [change.key for change in changes]
    for key in rule.keys:
        if key in done:
            continue
        for change in _options(case, key, width):
            new = case.with_value(key, change.value)
            if settle is not None:
                settled = settle(new.train, new.layout, {*done, key})
                if settled is None:
                    continue
                new = new._replace(layout=settled)
            yield from _repairs(new, (*changes, change), depth - 1, width, settle)


def _options(case: _Case, key: str, width: int) -> list[_Change]:
    """Return the values to try for a key: all other choices, or numbers near the present one."""
    section, _, name = key.partition(".")
    old = getattr(case.model.lora if section == "lora" else getattr(case, section), name)
    if key in CHOICES:
        choices = CHOICES[key]
        index = choices.index(old) if old in choices else len(choices)  # a number that none is near
        by_distance = sorted((abs(i - index), i) for i in range(len(choices)) if i != index)
        return [_Change(key, choices[i], choices[i], d / len(choices)) for d, i in by_distance]
    if old is None:  # what is not set is as another key says
        return []
    numbers = sorted(set(NUMBERS[key](*case)) - {old}, key=lambda number: abs(number - old))
    below = [number for number in numbers if 0 < number < old]
    above = [number for number in numbers if old < number <= LARGEST]
    # Degree 1 obeys most rules; it is tried even where many others are nearer.
    tried = dict.fromkeys(below[:width] + below[-1:] + above[:width])
    return [_Change(key, n, n > old, abs(n - old) / old) for n in tried]
