"""`draw`: random legal layouts, each with a small model of odd sizes. No torch.

The table of `matrix` spreads its choices evenly, mostly over powers of 2. Here, they are combined
at random: any degree, and sizes that are divisible only as far as the rules require.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, Final, TypeVar

from meshwright.errors import ConfigError, refusal
from meshwright.layout import AXES, Layout, broken
from meshwright.layout.rules import divisors
from meshwright.layout.schedules import SCHEDULES, microbatch_rule
from meshwright.prove.case import ADAMW, GROUPED, SGD, Case
from meshwright.spec.families import FAMILIES
from meshwright.spec.families.base import Family
from meshwright.spec.lora import DOWN, JOINED, JOINT, Lora, own_layers, target_names
from meshwright.spec.model import PLAIN_LAYER, LayerSpec, ModelSpec
from meshwright.spec.resolve import model_spec
from meshwright.spec.rotary import RopeScaling
from meshwright.spec.training import TrainSpec

T = TypeVar("T")

WORLDS: Final = (2, 3, 4, 5, 6)
MOST_RANKS: Final = 16
# Of the numbers of microbatches that a schedule takes, the lowest so many are drawn from.
_COUNTS: Final = 6
# Tokens of a sequence.
_SHORTEST: Final = 12
_LONGEST: Final = 48

_BOOLS: Final = (False, True)
# A choice that is there twice is dealt twice as often.
_ZERO_OF_NONE: Final = (0, 0, 0, 0, 1, 2, 3)
_OFFLOADS: Final = ("none", "none", "none", "optimizer", "params", "activations")
_OPTIMIZERS: Final = (ADAMW, GROUPED, SGD)
_ONE_IN_FIVE: Final = (*4 * (False,), True)
_PRECISIONS: Final = ("fp32", "fp32", "fp32", "bf16", "fp16")
_ROTARY_PCTS: Final = (0.0, 0.25, 0.5, 1.0)
_FAMILIES: Final = (
    *("llama", "neox", "qwen2", "qwen3", "granite", "phi3"),
    *("gemma2", "gemma3", "olmo2", "olmo3", "smollm3"),
    *("seed_oss", "gemma", "starcoder2"),
    *("glm4", "ernie4_5", "exaone4", "arcee"),
    *("qwen3_5", "granitemoehybrid", "bamba"),
)
_MIXTURES: Final = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"),
    *("glm4_moe", "dots1", "minimax_m2"),
    *("qwen3_next", "granitemoehybrid"),
)
_LOCAL: Final = LayerSpec(window=9, rope_theta=50.0)
# Windows shorter than any row, some of them at the seams of chunks, and layers that do not rotate.
_PATTERNS: Final = (
    (),
    (LayerSpec(window=5), PLAIN_LAYER),
    (_LOCAL, _LOCAL, PLAIN_LAYER),
    (PLAIN_LAYER, LayerSpec(rotary=False)),
    (LayerSpec(window=2),),
    (LayerSpec(window=17, rotary=False), PLAIN_LAYER, LayerSpec(window=4)),
)
_NO_EXPERTS: Final = {"experts": 0, "top_k": 0, "expert_ffn_dim": None, "shared_ffn_dim": 0}
_CALM: Final = {"norm_eps": 1e-3}
# Which layers of a model with recurrences have one.
_RECURRING: Final = ((True, True, False), (True,), (False, True))
# What the models of a family may choose.
_FREE: Final[Mapping[str, tuple[Any, ...]]] = {
    "parallel_residual": _BOOLS,
    "attention_bias": _BOOLS,
    "output_bias": _BOOLS,
    "qk_norm": ("head", "none"),
    "mlp_bias": _BOOLS,
    "embedding_scale": (3.0, 0.5),
    "attention_scale": (0.6, None),
    "residual_scale": (0.7, 1.0),
    "logits_divisor": (1.5, 1.0),
    "attention_softcap": (1.5, None),
    "logits_softcap": (3.0, None),
    "layer_pattern": _PATTERNS,
    "norm_top_k": _BOOLS,
    "routed_scale": (0.7, 1.0),
    "rope_interleave": _BOOLS,
    "swiglu_limit": (5.0, None),
}
_YARN: Final = RopeScaling(kind="yarn", factor=4.0, original_context=16)
_SCALINGS: Final = (
    *(None, _YARN),
    RopeScaling(kind="linear", factor=2.0),
    RopeScaling(kind="llama3", factor=4.0, original_context=16),
)


def draw(seed: int, count: int, worlds: Sequence[int] = WORLDS) -> tuple[Case, ...]:
    """Return `count` random cases on numbers of ranks from `worlds`; equal arguments give equal
    cases.

    A smaller `count` gives the first of them. All meshes of these numbers of ranks occur once
    before any occurs again. Raises `ConfigError` if a number of ranks is not 2 to 16, or if `count`
    is below 1.
    """
    for world in worlds:
        if not 2 <= world <= MOST_RANKS:
            legal = range(2, MOST_RANKS + 1)
            rule = f"random layouts have {legal[0]} to {legal[-1]} ranks, not {world}"
            raise ConfigError(refusal(rule, legal=[min(max(world, 2), MOST_RANKS)]))
    if count < 1:
        raise ConfigError(refusal(f"{count} random layouts prove nothing", legal=[1]))
    dealer = _Dealer(seed)
    meshes = tuple(mesh for world in worlds for mesh in _meshes(world))
    return tuple(_case(dealer, dealer.deal("mesh", meshes)) for _ in range(count))


class _Dealer:
    """Makes random choices like dealing cards: each choice comes once, in random order, before any
    comes again.

    Uses `Random.random` alone, which is the same in every version of Python.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._decks: dict[tuple[str, tuple[Any, ...]], list[Any]] = {}

    def deal(self, name: str, choices: tuple[T, ...]) -> T:
        """Return the next of `choices`; each `name` with its choices has a deck of its own."""
        deck: list[T] = self._decks.setdefault((name, choices), [])
        if not deck:
            undealt = list(choices)
            while undealt:
                deck.append(undealt.pop(self.number(0, len(undealt) - 1)))
        return deck.pop()

    def number(self, low: int, high: int) -> int:
        """Return a random integer from `low` to `high`, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def multiple(self, unit: int, low: int, high: int) -> int:
        """Return a random multiple of `unit` from `low` to `high`; if there is none, the next one
        above `low`.
        """
        first = math.ceil(low / unit)
        return unit * self.number(first, max(first, high // unit))


def _meshes(world: int) -> list[tuple[int, ...]]:
    """Return the degrees of all meshes with `world` ranks, in the order of `AXES`."""
    degrees = product(divisors(world), repeat=len(AXES))
    return [mesh for mesh in degrees if math.prod(mesh) == world]


def _case(dealer: _Dealer, mesh: tuple[int, ...]) -> Case:
    layout = _layout(dealer, dict(zip(AXES, mesh, strict=True)))
    has_experts = dealer.deal("has experts", (False, False, True))
    if has_experts:
        layout = _shared_out(dealer, layout)
    model = _model(dealer, layout, has_experts)
    if dealer.deal("has adapters", _ONE_IN_FIVE) and not (model.recurs or model.attention_gate):
        model = model.model_copy(update={"lora": _adapters(dealer, model)})
    train = _train(dealer, layout)
    if has_experts:
        train = _routed(dealer, model, train)
    rule = broken(model, train, layout)
    assert rule is None, rule
    is_free = layout.zero > 0 and layout.offload != "params"  # which FSDP2 shards anyway
    return Case(
        model,
        train,
        layout,
        packed=dealer.deal("packed", _BOOLS),
        optimizer=dealer.deal("optimizer", _OPTIMIZERS),
        chat=dealer.deal("chat", _ONE_IN_FIVE),
        fsdp2=is_free and dealer.deal("fsdp2", _BOOLS),
    )


def _layout(dealer: _Dealer, degrees: dict[str, int]) -> Layout:
    """Return a random layout with these degrees."""
    values: dict[str, Any] = dict(degrees)
    is_sharded, has_cp = degrees["dp_shard"] > 1, degrees["cp"] > 1
    zeros = (1, 2, 3) if is_sharded else (0, 1, 2, 3) if has_cp else _ZERO_OF_NONE
    values["zero"] = dealer.deal("zero", zeros)
    if degrees["tp"] > 1:
        values["sp"] = dealer.deal("sp", _BOOLS)
    if has_cp:
        values["cp_kind"] = dealer.deal("cp_kind", ("ring", "ulysses"))
    if degrees["pp"] > 1:
        traits = SCHEDULES[dealer.deal("schedule", tuple(SCHEDULES))]
        limit = traits.max_virtual or (3 if degrees["pp"] < 4 else 2)
        values["schedule"] = traits.name
        values["virtual_stages"] = dealer.number(traits.min_virtual, limit)
    values["microbatch"] = dealer.deal("microbatch", (1, 2, 3))
    values["recompute"] = dealer.deal("recompute", ("none", "full", "selective"))
    offload = dealer.deal("offload", _OFFLOADS)
    needs_zero = offload == "params" and not values["zero"]
    values["offload"] = "optimizer" if needs_zero else offload
    return Layout(**values)


def _shared_out(dealer: _Dealer, layout: Layout) -> Layout:
    """Return the layout with a random legal `ep` and `etp`."""
    data = divisors(layout.alike_ranks)
    folded = [(layout.tp * ep, 1) for ep in data] if layout.sp else []
    ep, etp = dealer.deal("ep", (*((ep, None) for ep in data), *folded))
    return layout.model_copy(update={"ep": ep, "etp": etp})


def _routed(dealer: _Dealer, model: ModelSpec, train: TrainSpec) -> TrainSpec:
    """Return the training settings with random router losses, expert capacity and correction rate.

    In half precision, a token near a tie selects another expert, which no tolerance covers: such
    models are trained in fp32, unless each token selects all experts.
    """
    update: dict[str, Any] = {
        "router_aux_loss": dealer.deal("aux", (0.0, 1.0)),
        "expert_capacity": dealer.deal("capacity", (None, None, 1.1)),
    }
    if model.router_scores == "sigmoid":
        rates = (0.0, 0.05) if model.lora is None else (0.0,)  # adapters store no corrections
        update["router_bias_rate"] = dealer.deal("bias", rates)
    else:
        update["router_z_loss"] = dealer.deal("z", (0.0, 0.3))
    if model.top_k < model.experts:
        update["precision"] = "fp32"
    return train.model_copy(update=update)


def _adapters(dealer: _Dealer, model: ModelSpec) -> Lora:
    """Return random low-rank adapters on some of the model's linear layers."""
    layers, names = own_layers(model.blocks), target_names(model.blocks)
    of_experts: list[str] = []
    if model.experts and dealer.deal("adapted experts", _BOOLS):
        is_apart = JOINED[0] in names and dealer.deal("adapted apart", _BOOLS)
        of_experts = [names[JOINED[0]][0] if is_apart else names[JOINT][-1], names[DOWN][-1]]
    chosen = dealer.number(0 if of_experts else 1, 2 ** len(layers) - 1)
    return Lora(
        rank=dealer.number(1, 5),
        alpha=dealer.deal("alpha", (3.0, 6.0)),
        targets=(
            *(layer for index, layer in enumerate(layers) if chosen >> index & 1),
            *of_experts,
        ),
        rslora=dealer.deal("rslora", _BOOLS),
        dropout=0.0 if of_experts else dealer.deal("adapter dropout", (0.0, 0.2)),
    )


def _train(dealer: _Dealer, layout: Layout) -> TrainSpec:
    """Return training settings with a random batch that the layout divides."""
    stages = layout.schedule, layout.pp, layout.virtual_stages
    limit = 2 * layout.stages + _COUNTS
    legal = [n for n in range(1, limit + 1) if microbatch_rule(*stages, n) is None]
    count = legal[dealer.deal("count", tuple(range(_COUNTS)))]
    cut = layout.cp * (layout.tp if layout.sp else 1)
    if layout.cp > 1 and layout.cp_kind == "ring":
        cut = math.lcm(cut, 2 * layout.cp)
    return TrainSpec(
        batch=layout.dp * layout.microbatch * count,
        seq_len=dealer.multiple(cut, _SHORTEST, _LONGEST),
        precision=dealer.deal("precision", _PRECISIONS),
        reduce_dtype=dealer.deal("reduce_dtype", ("fp32", "fp32", "same")),
        clip_norm=dealer.deal("clip_norm", (1.0, 0.1, 0.0)),
        matmul=dealer.deal("matmul", ("torch", "onednn")),
        seed=dealer.number(0, 9999),
        compile=False,
    )


def _experts(dealer: _Dealer, layout: Layout, family: Family, layers: int) -> dict[str, Any]:
    """Return random sizes of a model's experts and of its router's choice, as far as the family has
    them.
    """
    experts = dealer.multiple(layout.ep, 2, 9)
    needs_shared = family.fixed.get("shared_gate", False)
    values: dict[str, Any] = {
        "experts": experts,
        "top_k": dealer.number(1, min(experts, 4)),
        "expert_ffn_dim": dealer.multiple(layout.expert_tp, 20, 60),
        "shared_ffn_dim": dealer.multiple(layout.tp, 20, 60),
        "dense_layers": dealer.deal("dense", (0, 1)) if layers > 1 else 0,
    }
    if not needs_shared and dealer.deal("shared", _BOOLS):
        values["shared_ffn_dim"] = 0
    if "expert_groups" in family.free:
        groups = dealer.deal("groups", tuple(n for n in divisors(experts) if 2 * n <= experts))
        values["expert_groups"] = groups
        values["top_groups"] = dealer.number(-(-values["top_k"] * groups // experts), groups)
    return {key: value for key, value in values.items() if key in family.free}


def _latent(dealer: _Dealer) -> dict[str, Any]:
    """Return random sizes of latent attention, with values narrower or wider than keys."""
    plain, rotated = dealer.number(2, 8), 2 * dealer.number(1, 3)
    return {
        "head_dim": plain + rotated,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "v_head_dim": dealer.number(3, 12),
        "kv_lora_rank": dealer.number(9, 20),
        "q_lora_rank": dealer.deal("q_lora_rank", (0, 23)),
    }


def _recurrent(dealer: _Dealer, layout: Layout, recurrence: str) -> dict[str, Any]:
    """Return random sizes of recurrent layers, and which layers have the recurrence.

    The first tokens of a document read next to nothing from a state: a norm of it with a small
    epsilon would amplify rounding beyond any tolerance.
    """
    recurs = dealer.deal("recurring", _RECURRING)
    kernel, tp = dealer.number(2, 4), layout.tp
    sizes: dict[str, Any]
    if recurrence == "delta":
        key_heads = dealer.multiple(tp, 1, 4)
        sizes = {
            "delta_key_heads": key_heads,
            "delta_heads": key_heads * dealer.deal("group", (1, 2, 3)),
            "delta_key_dim": dealer.number(3, 9),
            "delta_value_dim": dealer.number(3, 9),
            "delta_kernel": kernel,
        }
        return {**sizes, "layer_pattern": tuple(LayerSpec(delta=it) for it in recurs)} | _CALM
    groups = dealer.deal("mamba groups", tuple(n for n in (1, tp, 2 * tp) if n <= 6))
    sizes = {
        "mamba_groups": groups,
        "mamba_heads": dealer.multiple(math.lcm(groups, tp), 1, 8),
        "mamba_head_dim": dealer.number(3, 9),
        "mamba_state": dealer.number(3, 9),
        "mamba_kernel": kernel,
        "mamba_dt_limit": dealer.deal("mamba_dt_limit", ((0.05, 2.0), None)),
    }
    return {**sizes, "layer_pattern": tuple(LayerSpec(mamba=it) for it in recurs)} | _CALM


def _model(dealer: _Dealer, layout: Layout, has_experts: bool) -> ModelSpec:
    """Return a random model, with sizes that the layout's rules allow and that have few other
    divisors.
    """
    families = _MIXTURES if has_experts else _FAMILIES
    family, tp = FAMILIES[dealer.deal("family", families)], layout.tp
    # Of activations, those of two layers stay on the device.
    minimum = 3 if layout.offload == "activations" and not layout.is_pipelined else layout.stages
    # A pipeline has up to two stages without layers: the embedding's and the head's.
    added = dealer.deal("more layers", (-2, -1, 0, 1, 1, 2) if layout.is_pipelined else (0, 1, 2))
    layers = max(minimum + added, 1)
    rotary_pct = dealer.deal("rotary_pct", _ROTARY_PCTS) if "rotary_pct" in family.free else 1.0
    rotates_even = tuple(size for size in range(4, 14) if int(size * rotary_pct) % 2 == 0)
    kv_heads = dealer.multiple(tp * (layout.cp if layout.cp_kind == "ulysses" else 1), 1, 6)
    group = dealer.deal("group", (1, 2, 3)) if family.grouped else 1
    free = {key: dealer.deal(key, choices) for key, choices in _FREE.items() if key in family.free}
    if has_experts:
        free |= _experts(dealer, layout, family, layers)
    elif "experts" in family.free:
        free |= _NO_EXPERTS
    if "kv_lora_rank" in family.free:
        free |= _latent(dealer)
    if family.layers is not None and family.layers.recurrence:
        free |= _recurrent(dealer, layout, family.layers.recurrence)
    spec = model_spec(
        family=family.name,
        dim=dealer.number(20, 70),
        n_layers=layers,
        n_heads=group * kv_heads,
        n_kv_heads=kv_heads,
        ffn_dim=dealer.multiple(tp, 20, 150),
        vocab_size=dealer.number(40, 200),
        pad_vocab_to_multiple_of=dealer.deal("vocabulary", (None, None, 8, 48)),
        rotary_pct=rotary_pct,
        tie_embeddings=dealer.deal("tie_embeddings", _BOOLS),
        activation=dealer.deal("activation", ("silu", "gelu", "gelu_tanh", "relu2")),
        dropout=dealer.deal("dropout", (0.0, 0.0, 0.1)),
        rope_scaling=dealer.deal("rope_scaling", _SCALINGS),
        rope_theta=dealer.deal("rope_theta", (10000.0, 500000.0)),
        **{
            "norm_eps": dealer.deal("norm_eps", (1e-5, 1e-6)),
            "head_dim": dealer.deal("head_dim", rotates_even),
            **free,
        },
    )
    pairs = spec.rotary_dim // 2
    if spec.rope_scaling != _YARN or pairs % 2 == 0:
        return spec
    # Heads of an odd number of pairs get longrope instead, whose lists are as long as that.
    short, long = (tuple(start + pair / 4 for pair in range(pairs)) for start in (1.0, 2.0))
    longrope = RopeScaling(
        kind="longrope", factor=4.0, original_context=16, short_factor=short, long_factor=long
    )
    return spec.model_copy(update={"rope_scaling": longrope})
